"""BOINC's application interface in pure Python: what a task does to be a good guest of the stock client.

    def main(boinc: Boinc) -> int:
        inputs = open(boinc.resolve("microtask.json"), "rb")
        for ...:
            boinc.check()                       # between graph nodes: obeys quit and abort
            boinc.fraction_done(step / steps)
            if boinc.time_to_checkpoint():
                with boinc.critical_section():
                    ...write it...
                    boinc.checkpoint_completed()
        return 0                                # after the outputs are synced and in place

    run(main)

`run` forks: `main` computes in a worker process, and the calling process supervises it (boinc_supervisor.py
says why). So call it before numpy or torch are imported and before any thread is started; `main` imports
what it needs. Whatever `main` does, the client gets a clear word: a finish marker with the status, or a
temporary exit with a reason.

Sources in BOINC: api/boinc_api.{h,cpp}; what the client makes of it: client/app_control.cpp.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Callable, NoReturn

from apps.gradient import boinc_messages
from apps.gradient.boinc_messages import LOCK_FILE, InitData
from apps.gradient.boinc_supervisor import (
    EXIT_BUG,
    OUTCOME_FINISH,
    OUTCOME_TEMPORARY_EXIT,
    REQUEST_ABORT,
    Block,
    Supervisor,
    ThreadWorker,
    Timing,
    fork_worker,
    leave,
    supervise_in_thread,
    temporary_exit,
)

__all__ = ["Abort", "Boinc", "InitData", "Quit", "StopComputing", "Timing", "run"]

# A full disk is not the task's fault, and its owner may make room: wait, with what was computed in the
# checkpoint.
DISK_FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
DISK_FULL_DELAY_S = 600

UNPACKED_PREFIX = "_MEI"  # PyInstaller's boot loader names its unpacked folders so


class StopComputing(BaseException):
    """Raised by `Boinc.check`: stop at once and do not finish. A BaseException, so that no `except
    Exception` keeps it."""


class Quit(StopComputing):
    """The client wants this process gone; the task will be started again later."""


class Abort(StopComputing):
    """The client has given the task up."""


class Boinc:
    """The task's view of the client. All methods are for the worker's main thread.

    `init` holds the fields of init_data.xml (defaults when `standalone`); `threads` is how many threads may
    compute.
    """

    def __init__(self, init: InitData, block: Block, standalone: bool, process: bool) -> None:
        self.init = init
        self.standalone = standalone
        self._block = block
        self._process = process  # the worker is a process of its own (not under Windows, not standalone)
        self._parent = os.getppid()
        self._depth = 0
        self._last_checkpoint = time.monotonic()

    @property
    def threads(self) -> int:
        """Threads the task may use (the client's `ncpus`)."""
        return self.init.threads

    def resolve(self, open_name: str) -> Path:
        """The path to open for a file's open name, inputs and outputs alike."""
        return Path(boinc_messages.resolve(open_name))

    def check(self) -> None:
        """Call often. Raises Quit or Abort when the client asks for it; waits here while suspended.

        Costs well under a microsecond. Under POSIX a suspended worker is stopped wherever it is; the wait
        here serves Windows, where it is not.
        """
        if self._depth:
            return
        while True:
            request = self._block.request
            if request:
                raise Abort() if request == REQUEST_ABORT else Quit()
            if not self._block.suspended:
                return
            time.sleep(0.05)

    @contextlib.contextmanager
    def critical_section(self) -> Iterator[None]:
        """Hold off suspension, quit and abort while writing a checkpoint or an output. Keep it to a few
        seconds.

        The client's patience is bounded, and so is ours: a longer section is stopped or ended half-way, so
        write to a temporary name and rename.
        """
        self._depth += 1
        self._block.critical = True
        try:
            yield
        finally:
            self._depth -= 1
            self._block.critical = self._depth > 0

    def fraction_done(self, fraction: float) -> None:
        """Progress of this task, 0 to 1; the client hears of it within a second."""
        self._block.fraction_done = fraction

    def time_to_checkpoint(self) -> bool:
        """Whether the user's checkpoint interval has passed since the last checkpoint, or since the start."""
        return time.monotonic() - self._last_checkpoint >= self._block.checkpoint_period

    def checkpoint_completed(self) -> None:
        """A checkpoint is safely on disk: tell the client, restart the interval."""
        self._block.checkpoints += 1
        self._last_checkpoint = time.monotonic()

    def log(self, text: str) -> None:
        """A line for stderr.txt, which the project's admin reads; ASCII with escapes, dated as BOINC's
        own."""
        log(text)

    def finish(self, status: int, message: str = "") -> NoReturn:
        """End the task for good with `status` (0 success, 1-127 our own codes). Outputs must be in place
        and synced."""
        self._end(OUTCOME_FINISH, status, message)

    def temporary_exit(self, delay_s: int, reason: str) -> NoReturn:
        """Give up for now; the client starts the task again after `delay_s` seconds (1 to 86400) and shows
        the reason."""
        self._end(OUTCOME_TEMPORARY_EXIT, delay_s, reason)

    def _end(self, outcome: int, number: int, text: str) -> NoReturn:
        if self.standalone:
            if outcome == OUTCOME_TEMPORARY_EXIT:
                log(f"try again later: {text}")
                leave(EXIT_BUG)
            if text:
                log(text)
            leave(number & 0xFF)
        self._block.publish(outcome, number, text)
        if self._process:
            leave(0)
        while True:  # the supervising thread ends the process
            time.sleep(1)


def run(main: Callable[[Boinc], int], timing: Timing = Timing()) -> NoReturn:  # noqa: B008 (frozen)
    """Run a task in the current directory (the slot) and end the process as BOINC expects.

    Without init_data.xml the task runs standalone: no client, no markers, exit status = main's return value.
    """
    make_stderr_safe()
    init = boinc_messages.read_init_data()
    block = Block()
    if init is None:
        block.checkpoint_period = InitData().checkpoint_period
        _work(main, Boinc(InitData(), block, standalone=True, process=False))
    status = boinc_messages.finish_status()
    if status is not None:
        log(f"this task has finished already, with status {status}")
        leave(status)
    lock = take_lock(timing)
    remove_strangers()
    shared = boinc_messages.open_shared_memory(init)
    if shared is None:
        log("the client gave no shared memory: does the app version declare <api_version> 7.5 or later?")
    if sys.platform == "win32":
        supervise_in_thread(Supervisor(init, shared, block, ThreadWorker(), timing, log))
        _work(main, Boinc(init, block, standalone=False, process=False))
    worker = fork_worker(lambda: _work(main, Boinc(init, block, standalone=False, process=True)))
    supervisor = Supervisor(init, shared, block, worker, timing, log)
    supervisor.catch_signals()
    with lock:
        supervisor.loop()


def _work(main: Callable[[Boinc], int], boinc: Boinc) -> NoReturn:
    """Call `main` and turn every way out of it into one of the two ends the client understands."""
    try:
        status = main(boinc)
    except StopComputing:
        leave(0)  # the supervisor knows why, and decides the exit code
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and boinc.standalone:
            leave(128 + signal.SIGINT)
        log("".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip())
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            boinc.temporary_exit(DISK_FULL_DELAY_S, "the disk is full")
        code = error.code if isinstance(error, SystemExit) else EXIT_BUG
        # A bare exit 0 from some library is not a result.
        status = code if isinstance(code, int) and code else EXIT_BUG
        boinc.finish(status, f"{type(error).__name__}: {error}")
    boinc.finish(status)


def log(text: str) -> None:
    """Write a dated line to stderr. Never fails: a full disk or a closed stream must not end a task."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{stamp} ({os.getpid()}): {text}\n")
        sys.stderr.flush()


def make_stderr_safe() -> None:
    """Escape what is not ASCII: the client escapes the rest badly, and a console's code page may lack a
    character."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr.reconfigure(encoding="ascii", errors="backslashreplace", line_buffering=True)


def take_lock(timing: Timing) -> contextlib.AbstractContextManager[object]:
    """Hold boinc_lockfile for as long as this process lives, or leave by a temporary exit if another copy
    holds it.

    After a crash of the client a copy of this task may still run in the slot, until it misses its
    heartbeat. Nothing in the slot, and no channel of the shared memory, is touched before the lock is ours.
    """
    deadline = time.monotonic() + timing.lock_wait
    file = open(LOCK_FILE, "ab")  # noqa: SIM115 (kept open to the end)
    while not _try_lock(file.fileno()):
        if time.monotonic() >= deadline:
            temporary_exit(timing.lock_delay, "another copy of this task is running in the same slot", log)
        time.sleep(min(1.0, timing.lock_wait / 10 + 0.01))
    return file


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            os.lseek(descriptor, 0, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def remove_strangers() -> None:
    """Delete folders that killed earlier starts of the packaged app unpacked into this slot (about 100 MB
    each)."""
    own: str | None = getattr(sys, "_MEIPASS", None)
    for name in os.listdir("."):
        if name.startswith(UNPACKED_PREFIX) and os.path.isdir(name):
            if own is not None and os.path.exists(own) and os.path.samefile(name, own):
                continue
            shutil.rmtree(name, ignore_errors=True)
