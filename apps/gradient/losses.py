"""What follows when a device was lost together with the process: when to start again, and when to give up.

A new process is a temporary exit for BOINC's client, which starts the task again after a delay and gives up after 100
such exits (client/app_control.cpp). A driver that was reset is back within seconds, so the first delay is short; a
device that fails again and again before the next checkpoint disturbs its owner and gets nowhere, so delays grow and
the task is given up early: another computer can do it. The count is kept in the slot.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from boinc_project.contract import whole_file

FILE = "device_losses.json"

FIRST_DELAY_S = 60
LONGEST_DELAY_S = 600
MOST_WITHOUT_PROGRESS = 10


@dataclass(frozen=True)
class Losses:
    """So many losses since the checkpoint of `step` was written; 0 is the task's beginning."""

    step: int
    count: int

    @property
    def delay_s(self) -> int:
        """Seconds until the next start."""
        return min(FIRST_DELAY_S << (self.count - 1), LONGEST_DELAY_S)

    @property
    def hopeless(self) -> bool:
        """Whether the task had better be given up."""
        return self.count >= MOST_WITHOUT_PROGRESS


def after(before: Losses | None, step: int) -> Losses:
    """One loss more, with the last checkpoint at `step`."""
    return Losses(step, before.count + 1 if before is not None and before.step == step else 1)


def count_one(binding: Mapping[str, str], step: int, folder: Path = Path(".")) -> Losses:
    """Count a loss in the slot; a record of another task's, or an unreadable one, does not count."""
    losses = after(_read(binding, folder), step)
    record = {"binding": dict(binding), "step": losses.step, "count": losses.count}
    with contextlib.suppress(OSError):  # on a full disk the client's own limit is left
        whole_file.write_bytes(folder / FILE, json.dumps(record, sort_keys=True).encode("ascii"))
    return losses


def _read(binding: Mapping[str, str], folder: Path) -> Losses | None:
    try:
        record = json.loads((folder / FILE).read_bytes())
        if record["binding"] != dict(binding):
            return None
        step, count = record["step"], record["count"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Losses(step, count) if type(step) is int and type(count) is int and count > 0 else None
