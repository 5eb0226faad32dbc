"""Goes on when the device is lost or memory runs out: on a fresh run, from the last checkpoint.

    device lost      the backend and its programs are opened afresh, MOST_LOSSES times; then DeviceLost. ContextLost at
                     once: only another process can open it again
    memory runs out  batches are computed in smaller parts, as long as the microtask has graphs for them

What it is not: it repairs no run. A fault may come in the middle of a step that overwrites the state, so the run
that had it is given up.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from apps.gradient.backends.backend import Backend, ContextLost, DeviceLost
from apps.gradient.runner import Loaded, Run, Timings
from boinc_project.contract.errors import TooLittleMemory, UnfitHost

MOST_LOSSES = 3  # of a device in one start of a task

Result = TypeVar("Result")


@dataclass
class Recovery:
    """Makes runs of one microtask.

    opened    opens the backend
    restore   brings a fresh run to where the last checkpoint was
    log       gets one line for every fault
    """

    loaded: Loaded
    opened: Callable[[], Backend]
    restore: Callable[[Run], None]
    log: Callable[[str], None]
    timings: Timings

    def __post_init__(self) -> None:
        self._losses = 0
        self._forms = list(self.loaded.forms)

    def complete(self, work: Callable[[Run], Result]) -> Result:
        """work(run) for a run that goes on from the last checkpoint; again for another one after each fault.

        Raises ContextLost, DeviceLost after too many losses, and TooLittleMemory or MemoryError if the smallest parts
        do not fit.
        """
        backend: Backend | None = None
        whole, first = self.loaded.microtask.batch_size, self._forms[0].batch_size
        if first < whole:
            self.log(f"batches of {whole} are computed in parts of {first}: more would not fit in this task's memory")
        while True:
            try:
                backend = backend or self._open()
                return self._attempt(backend, work)
            except ContextLost:
                raise
            except DeviceLost as error:
                self._count(error)
                backend = None
            except (TooLittleMemory, MemoryError) as error:
                if len(self._forms) == 1:
                    raise
                self._make_smaller(error)
            gc.collect()  # what the run held must be gone before the next one asks for it

    def _attempt(self, backend: Backend, work: Callable[[Run], Result]) -> Result:
        run = Run(self.loaded, backend, self.timings, self._forms[0])
        self.restore(run)
        return work(run)

    def _open(self) -> Backend:
        try:
            return self.opened()
        except UnfitHost as error:
            if self._losses:  # it was there; its driver may need a while to come back
                raise DeviceLost(str(error)) from error
            raise

    def _count(self, error: DeviceLost) -> None:
        self._losses += 1
        if self._losses > MOST_LOSSES:
            raise DeviceLost(f"the device was lost {self._losses} times, at last: {error}") from error
        self.log(f"{error}; it is opened again ({self._losses} of {MOST_LOSSES} times)")

    def _make_smaller(self, error: Exception) -> None:
        given_up = self._forms.pop(0)
        text = f"batches are computed in parts of {self._forms[0].batch_size} samples instead of {given_up.batch_size}"
        self.log(f"{text}: {str(error) or 'out of memory'}")
