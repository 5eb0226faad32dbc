"""Checkpoints in the slot that survive a kill at any instruction, a full disk and a foreign slot.

Two generations, `checkpoint.0` and `checkpoint.1`: a save replaces the older one by rename, so at every
moment at least one whole file is there. A file is

    boinc-train-checkpoint 1 GENERATION SHA256 LENGTH\\n      the digest covers the generation and all that
    follows a tensor file (contract/tensorfile.py) of LENGTH bytes; its metadata: step, binding, extra

The binding (workunit, result, microtask digest) says whose progress it is: a slot may hold another task's
leftovers. Whatever is wrong with a file, the task goes on from the other one, or from the start; it never
fails for it. A save needs room for one file more: count three times a checkpoint's size in
`rsc_disk_bound`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from boinc_project.contract import tensorfile, whole_file
from boinc_project.contract.errors import ContractError

Array = npt.NDArray[Any]

FILES = ("checkpoint.0", "checkpoint.1")
TEMPORARY_FILE = "checkpoint.tmp"
OUTPUTS_FILE = "outputs.json"
FORMAT = "boinc-train-checkpoint 1"

_HEADER = re.compile(rb"boinc-train-checkpoint 1 (\d{1,18}) ([0-9a-f]{64}) (\d{1,18})\n")
_MAX_HEADER_BYTES = 256


@dataclass(frozen=True)
class Checkpoint:
    """Progress of a task after `step` steps: tensors by name, and small JSON values of the runner's own."""

    step: int
    tensors: Mapping[str, Array]
    extra: Mapping[str, Any] = field(default_factory=dict)


class CheckpointStore:
    """The two checkpoint files of one task in its slot.

    `binding` names the task (workunit, result, microtask digest); files with another binding are ignored.
    `log` gets one sentence for everything unusual.
    """

    def __init__(self, binding: Mapping[str, str], log: Callable[[str], None], folder: Path = Path(".")) -> None:
        self._binding = dict(binding)
        self._log = log
        self._folder = folder
        self._generation = 0  # of the newest good file
        self._slot = 1  # where that file is, so the first save goes to checkpoint.0

    def load(self) -> Checkpoint | None:
        """The newest good checkpoint of this task, None to start afresh. Never raises for what it finds."""
        with contextlib.suppress(OSError):
            (self._folder / TEMPORARY_FILE).unlink()
        for generation, slot in sorted(self._generations(), reverse=True):
            name = FILES[slot]
            try:
                found = read_checkpoint(self._folder / name, self._binding)
            except (OSError, ContractError, ValueError) as error:
                self._log(f"{name} is not used: {error}")
                continue
            self._generation, self._slot = generation, slot
            return found
        return None

    def _generations(self) -> list[tuple[int, int]]:
        found = []
        for slot, name in enumerate(FILES):
            try:
                with open(self._folder / name, "rb") as file:
                    match = _HEADER.match(file.read(_MAX_HEADER_BYTES))
            except FileNotFoundError:
                continue
            except OSError as error:
                self._log(f"{name} is not used: {error.strerror}")
                continue
            if match is None:
                self._log(f"{name} is not used: it does not begin as a checkpoint does")
                continue
            found.append((int(match.group(1)), slot))
        return found

    def save(self, checkpoint: Checkpoint) -> bool:
        """Write a checkpoint; False, and a line in the log, where the disk does not take it (computing goes
        on)."""
        slot = 1 - self._slot
        generation = self._generation + 1
        metadata = {"binding": self._binding, "step": checkpoint.step, "extra": dict(checkpoint.extra)}
        data = tensorfile.to_bytes(checkpoint.tensors, metadata)
        header = f"{FORMAT} {generation} {_digest(generation, data)} {len(data)}\n".encode("ascii")
        temporary = self._folder / TEMPORARY_FILE
        try:
            with open(temporary, "wb") as file:
                file.write(header)
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self._folder / FILES[slot])
            whole_file.sync_folder(self._folder)
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            self._log(f"no checkpoint at step {checkpoint.step}: {error.strerror}; the last one is kept")
            return False
        self._generation, self._slot = generation, slot
        return True

    def outputs_written(self, outputs: Mapping[str, Path]) -> None:
        """Note that the outputs (open name -> resolved path) are complete and synced, before the finish
        marker.

        If the task is killed between its outputs and the marker, the next start need not compute again.
        """
        record = {
            "binding": self._binding,
            "outputs": {name: [path.stat().st_size, _file_digest(path)] for name, path in outputs.items()},
        }
        # Without this note the work would only be repeated.
        with contextlib.suppress(OSError):
            whole_file.write_bytes(self._folder / OUTPUTS_FILE, json.dumps(record, sort_keys=True).encode("ascii"))

    def outputs_complete(self, outputs: Mapping[str, Path]) -> bool:
        """Whether an earlier start of this task has left exactly these outputs, whole."""
        try:
            record = json.loads((self._folder / OUTPUTS_FILE).read_bytes())
            if record["binding"] != self._binding or set(record["outputs"]) != set(outputs):
                return False
            return all(
                record["outputs"][name] == [path.stat().st_size, _file_digest(path)] for name, path in outputs.items()
            )
        except (OSError, ValueError, KeyError, TypeError):
            return False


def read_checkpoint(path: Path, binding: Mapping[str, str]) -> Checkpoint:
    """Read one checkpoint file.

    Raises OSError, or ContractError if it is damaged or of another task; the text says which.
    """
    data = memoryview(path.read_bytes())
    match = _HEADER.match(data)
    if match is None:
        raise ContractError("it does not begin as a checkpoint does", fault="truncated")
    body = data[match.end() :]
    if len(body) != int(match.group(3)):
        raise ContractError(f"it holds {len(body)} bytes of {int(match.group(3))}", fault="truncated")
    if _digest(int(match.group(1)), body) != match.group(2).decode("ascii"):
        raise ContractError("its digest is wrong, so it is damaged", fault="digest")
    found = tensorfile.from_bytes(body, None, path.name)
    if found.metadata.get("binding") != dict(binding):
        raise ContractError("it belongs to another task", fault="binding")
    step, extra = found.metadata.get("step"), found.metadata.get("extra")
    if type(step) is not int or not isinstance(extra, dict):
        raise ContractError("it lacks its step", fault="missing_key")
    # Copies, so that the whole file's bytes are not kept for one small tensor, and arrays can be written to.
    return Checkpoint(step, {name: np.array(array) for name, array in found.tensors.items()}, extra)


def _digest(generation: int, data: bytes | memoryview) -> str:
    digest = hashlib.sha256(str(generation).encode("ascii") + b"\n")
    digest.update(data)
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
