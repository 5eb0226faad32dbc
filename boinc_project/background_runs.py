"""Microtasks that a daemon has computed beside its own work, each in a process of its own (boinc_project/local_run.py).

    runs: BackgroundRuns[Key] = BackgroundRuns("replay", at_once=1)
    if runs.room:
        folder = runs.folder(job.folder.path, "17")          # .../replay_17_PID, empty
        runs.begin(key, folder, microtask, files, types)
    for each in runs.ended():                                # in every pass
        each.key, each.microtask, each.update, each.why

Evaluations and anchors of versions (assimilator), trials of updates and the server's own copies (validator) are such
runs. Nothing is recorded: what a daemon that ends has under way is asked for again by whatever asked for it.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from boinc_project import local_run
from boinc_project.contract.errors import ContractError
from boinc_project.contract.microtask import Microtask
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import Update

Key = TypeVar("Key", bound=Hashable)

ONE_THREAD = ("--nthreads", "1")


class Run(Protocol):
    """One computation, under way or ended (local_run.LocalRun)."""

    folder: Path

    def finished(self) -> bool: ...

    def update(self, types: Mapping[str, TensorType]) -> Update:
        """Wait for the end and read what came out. Raises local_run.LocalRunFailed."""

    def stop(self) -> None: ...


#: Starts a microtask in a folder, given where its files lie by open name and the program's arguments.
Start = Callable[[Path, Microtask, Mapping[str, Path], Sequence[str]], Run]


@dataclass(frozen=True)
class Ended(Generic[Key]):
    """What came of one: its update, or, where that is None, a sentence that says why there is none."""

    key: Key
    microtask: Microtask
    update: Update | None
    why: str = ""


@dataclass
class _Running:
    run: Run
    microtask: Microtask
    types: Mapping[str, TensorType]
    since: float


class BackgroundRuns(Generic[Key]):
    """The runs of one kind that are under way. Not thread-safe.

    prefix     what their folders' names begin with: PREFIX_LABEL_PID, in the job's folder
    at_once    so many processes at most
    longest_s  one that takes longer is ended and has failed
    start      what starts one: a process, or something that has its signature (the simulator's)
    """

    def __init__(
        self, prefix: str, at_once: int = 1, longest_s: float = math.inf, start: Start = local_run.start
    ) -> None:
        self._prefix, self._at_once, self._longest_s, self._start = prefix, at_once, longest_s, start
        self._running: dict[Key, _Running] = {}
        self._swept: set[Path] = set()

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def room(self) -> bool:
        """Whether one more may begin now."""
        return len(self._running) < self._at_once

    def __contains__(self, key: object) -> bool:
        """Whether the run with this key is under way."""
        return key in self._running

    def folder(self, parent: Path, label: str) -> Path:
        """An empty folder for a run that is about to begin; what killed daemons have left beside it is removed."""
        if parent not in self._swept:
            self._swept.add(parent)
            local_run.remove_leftovers(parent, f"{self._prefix}_*_*")
        place = parent / f"{self._prefix}_{label}_{os.getpid()}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        return place

    def begin(
        self,
        key: Key,
        folder: Path,
        microtask: Microtask,
        files: Mapping[str, Path],
        types: Mapping[str, TensorType],
        arguments: Sequence[str] = ONE_THREAD,
    ) -> None:
        """Start one in its folder, which is removed when the run has ended; `types` are those of its update. Raises
        OSError."""
        try:
            run = self._start(folder, microtask, files, arguments)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self._running[key] = _Running(run, microtask, types, time.monotonic())

    def ended(self) -> list[Ended[Key]]:
        """Those that have ended since the last call, in the order of their beginning."""
        found = []
        for key, each in list(self._running.items()):
            if each.run.finished() or time.monotonic() - each.since >= self._longest_s:
                del self._running[key]
                found.append(_collected(key, each))
        return found

    def stop(self) -> None:
        """End those that are under way."""
        for each in self._running.values():
            each.run.stop()
            shutil.rmtree(each.run.folder, ignore_errors=True)
        self._running.clear()


def _collected(key: Key, running: _Running) -> Ended[Key]:
    running.run.stop()  # one that took too long
    try:
        return Ended(key, running.microtask, running.run.update(running.types))
    except (local_run.LocalRunFailed, ContractError, OSError) as error:
        return Ended(key, running.microtask, None, str(error))
    finally:
        shutil.rmtree(running.run.folder, ignore_errors=True)
