"""The half of the application that the client talks to, and the half that computes, kept apart.

Why two processes. A suspended task must use no CPU at all within two seconds, and quit, abort and the
client's death must be obeyed while the arithmetic is inside one long call: a BLAS product on eight threads,
or an operator of PyTorch, takes seconds and asks nobody. BOINC's C library stops its single worker thread
by a signal; the threads of a BLAS pool are not ours to signal, and a Python thread stopped while it holds
the interpreter lock would stop the watcher with it. A whole process, however, can be stopped by the kernel
at any instruction and continued as if nothing had happened. So

    client -> [PyInstaller's boot loader] -> supervisor (this file, ten looks a second, no numpy) -> worker
    (computes)

The worker and whatever it starts form one process group: SIGSTOP, SIGCONT and SIGKILL reach all of it. A
small block of anonymous shared memory carries progress up and requests down. Nobody outlives anybody: the
supervisor sees its own parent change and the client vanish, and the kernel itself kills the worker's group
when the supervisor dies (`tie_to_parent`).

A critical section (checkpoint and output writing) is given time to end before the worker is stopped or
killed. Stopping in its midst would harm nothing, since every file appears by rename, so the wait is short;
killing would waste the work.

On Windows the worker is the main thread and the supervisor a second one: suspension then takes effect
between two nodes of the graph (`Boinc.check`), quit and abort at once.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import signal
import struct
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NoReturn, Protocol

from apps.gradient.boinc_messages import (
    DRIVER_CACHE,
    FINISH_FILE,
    LOCK_FILE,
    TEMPORARY_EXIT_FILE,
    InitData,
    SharedMemory,
    read_init_data,
    status_message,
    write_marker,
)

EXIT_BUG = 1  # an exception nobody expected, or an exit nobody announced
EXIT_CRASHED = 3  # the worker died of a signal that says "our bug" (segmentation fault, abort, illegal instruction)
EXIT_STATE_FILE_WRITE = 192  # BOINC's code: the marker itself could not be written
EXIT_ABORTED_BY_CLIENT = 194  # BOINC's code, lib/error_numbers.h

# Signals from outside that mean "stop now", not "you are broken". BOINC's client also restarts tasks that
# die of them.
POLITE_SIGNALS = (signal.SIGTERM, signal.SIGINT) + (() if sys.platform == "win32" else (signal.SIGHUP, signal.SIGQUIT))

# The longest a temporary exit may ask for; the client reads anything above as 300 s (client/app_control.cpp).
MAX_TEMPORARY_EXIT_S = 86400


@dataclass(frozen=True)
class Timing:
    """The runtime's intervals in seconds. The defaults are BOINC's own where it has one; tests shorten
    them."""

    poll: float = 0.1  # api/boinc_api.cpp: the timer thread runs at 10 Hz
    status: float = 1.0
    heartbeat_timeout: float = 30.0  # HEARTBEAT_GIVEUP_SECS
    lock_wait: float = 35.0  # LOCKFILE_TIMEOUT_PERIOD: longer than the heartbeat time-out of a copy left behind
    lock_delay: int = 600
    final_status_wait: float = 3.0  # the client reads the channel once a second
    critical_suspend_wait: float = 1.0
    critical_quit_wait: float = 10.0  # the client kills 60 s after a quit
    quit_wait: float = 1.0
    signal_delay: int = 30  # temporary exit after SIGTERM and its like
    killed_delay: int = 300  # temporary exit after the kernel killed the worker, most likely for memory
    marker_retry: float = 60.0  # a full disk may be emptied meanwhile


KILL_WAIT_S = 2.0  # a killed process stuck in the kernel is left behind; the marker must not wait for it

REQUEST_QUIT, REQUEST_ABORT = 1, 2
OUTCOME_FINISH, OUTCOME_TEMPORARY_EXIT = 1, 2


class Block:
    """What worker and supervisor share: single bytes and aligned 8-byte words, each written by one side
    only."""

    _SUSPENDED, _REQUEST, _CRITICAL, _OUTCOME = 0, 1, 2, 3
    _FRACTION, _CHECKPOINTS, _PERIOD, _NUMBER, _LENGTH, _TEXT = 8, 16, 24, 32, 40, 48
    _BYTES, _MAX_TEXT = 4096, 2000

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, self._BYTES)

    @property
    def suspended(self) -> bool:
        return self._memory[self._SUSPENDED] != 0

    @suspended.setter
    def suspended(self, value: bool) -> None:
        self._memory[self._SUSPENDED] = int(value)

    @property
    def request(self) -> int:
        return self._memory[self._REQUEST]

    @request.setter
    def request(self, value: int) -> None:
        self._memory[self._REQUEST] = value

    @property
    def critical(self) -> bool:
        return self._memory[self._CRITICAL] != 0

    @critical.setter
    def critical(self, value: bool) -> None:
        self._memory[self._CRITICAL] = int(value)

    @property
    def fraction_done(self) -> float:
        return float(struct.unpack_from("<d", self._memory, self._FRACTION)[0])

    @fraction_done.setter
    def fraction_done(self, value: float) -> None:
        clean = min(1.0, max(0.0, value)) if math.isfinite(value) else 0.0
        struct.pack_into("<d", self._memory, self._FRACTION, clean)

    @property
    def checkpoints(self) -> int:
        return int(struct.unpack_from("<q", self._memory, self._CHECKPOINTS)[0])

    @checkpoints.setter
    def checkpoints(self, value: int) -> None:
        struct.pack_into("<q", self._memory, self._CHECKPOINTS, value)

    @property
    def checkpoint_period(self) -> float:
        return float(struct.unpack_from("<d", self._memory, self._PERIOD)[0])

    @checkpoint_period.setter
    def checkpoint_period(self, value: float) -> None:
        struct.pack_into("<d", self._memory, self._PERIOD, value)

    def publish(self, outcome: int, number: int, text: str) -> None:
        """Say how the work ended: a status (finish) or a delay in seconds (temporary exit), and a
        sentence."""
        data = text.encode("ascii", "backslashreplace")[: self._MAX_TEXT]
        struct.pack_into("<qq", self._memory, self._NUMBER, number, len(data))
        self._memory[self._TEXT : self._TEXT + len(data)] = data
        self._memory[self._OUTCOME] = outcome  # last: the supervisor looks at this byte only

    def outcome(self) -> tuple[int, int, str] | None:
        """(outcome, number, text) once published, else None."""
        kind = self._memory[self._OUTCOME]
        if kind == 0:
            return None
        number, length = struct.unpack_from("<qq", self._memory, self._NUMBER)
        return kind, int(number), bytes(self._memory[self._TEXT : self._TEXT + length]).decode("ascii")


class Worker(Protocol):
    """The computing half, as the supervisor handles it."""

    def stop(self) -> None: ...
    def resume(self) -> None: ...
    def kill(self) -> None: ...
    def ended(self) -> int | None:
        """None while it runs, else its wait status (os.wait4)."""
        ...

    def cpu_time(self) -> float: ...


class ProcessWorker:
    """A worker in its own process group, started by fork (POSIX)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._status: int | None = None
        self._cpu_time = 0.0

    def _signal(self, number: int) -> None:
        # The group may be empty by now; and on some systems a group of zombies refuses signals.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, number)

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """End the worker and all it started, and collect it, unless it hangs in a driver even now."""
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + KILL_WAIT_S
        while self.ended() is None and time.monotonic() < deadline:
            time.sleep(0.01)

    def ended(self) -> int | None:
        if self._status is None:
            self._collect(os.wait4(self._pid, os.WNOHANG))
        return self._status

    def _collect(self, waited: tuple[int, int, object]) -> None:
        pid, status, usage = waited
        if pid:
            self._status = status
            self._cpu_time = max(self._cpu_time, usage.ru_utime + usage.ru_stime)  # type: ignore[attr-defined]

    def cpu_time(self) -> float:
        if self._status is None:
            with contextlib.suppress(OSError, ValueError, IndexError):
                self._cpu_time = max(self._cpu_time, process_cpu_time(self._pid))
        return self._cpu_time


class ThreadWorker:
    """The main thread as worker (Windows): it stops by itself in `Boinc.check`, and ends with the process."""

    def stop(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def kill(self) -> None:
        pass

    def ended(self) -> int | None:
        return None

    def cpu_time(self) -> float:
        return 0.0  # time.process_time() of the supervisor is the whole process


def process_cpu_time(pid: int) -> float:
    """CPU seconds of a process and of its collected children (proc(5): utime, stime, cutime, cstime)."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def process_identity(pid: int) -> bytes | None:
    """What tells a process from a later one of the same number: its start time. None if dead, b"" if
    unknowable."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass  # alive, under another user
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else fields[19]
    except (OSError, IndexError):
        return b""


def tie_to_parent(read_end: int, parent: int) -> None:
    """In the new worker: have the kernel SIGKILL this whole process group the moment the supervisor is gone.

    The supervisor holds the only write end of a pipe. When it dies, in whatever way, that end closes;
    O_ASYNC on our end makes the kernel signal the owner, which F_SETOWN makes the group and F_SETSIG makes
    a SIGKILL. No code of ours has to run for it, so it works while we are stopped or inside a long call.
    PR_SET_PDEATHSIG would reach only the worker, not the processes that it started.
    """
    import fcntl

    fcntl.fcntl(read_end, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(read_end, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(read_end, fcntl.F_SETFL, fcntl.fcntl(read_end, fcntl.F_GETFL) | os.O_ASYNC)
    if os.getppid() != parent:  # it died before the pipe was armed
        os._exit(EXIT_BUG)


def fork_worker(work: Callable[[], None]) -> ProcessWorker:
    """Start the worker process, which runs `work` and leaves through os._exit."""
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        os.close(write_end)
        os.setpgid(0, 0)
        tie_to_parent(read_end, parent)
        try:
            work()
        finally:
            os._exit(EXIT_BUG)  # work() announces its outcome and never returns
    os.close(read_end)
    os.set_inheritable(write_end, False)  # kept open, unused, for as long as we live
    with contextlib.suppress(OSError):
        os.setpgid(pid, pid)  # both sides do it, so that neither can be too early
    return ProcessWorker(pid)


class Supervisor:
    """Reads the client's messages, stops and continues the worker, reports, and ends the task properly."""

    def __init__(
        self,
        init: InitData,
        shared: SharedMemory | None,
        block: Block,
        worker: Worker,
        timing: Timing,
        log: Callable[[str], None],
    ) -> None:
        self._init = init
        self._shared = shared
        self._block = block
        self._worker = worker
        self._timing = timing
        self._log = log
        self._suspended = False  # what the client wants
        self._suspended_since = 0.0
        self._stopped = False  # what the worker is
        self._silence = 0.0  # seconds since the last heartbeat
        self._signal: int | None = None
        self._cpu_time = init.wu_cpu_time
        self._checkpoint_cpu_time = init.wu_cpu_time
        self._checkpoints = 0
        self._parent = os.getppid()
        self._client = process_identity(init.client_pid) if self._watch_pid() else None
        block.checkpoint_period = init.checkpoint_period

    def _watch_pid(self) -> bool:
        # On Windows os.kill(pid, 0) would end the client; its heartbeat is enough there.
        return self._init.client_pid > 0 and sys.platform != "win32"

    def catch_signals(self) -> None:
        """Turn SIGTERM and its like into a proper end. Only the main thread may call this."""

        def remember(number: int, frame: object) -> None:
            self._signal = number

        for number in POLITE_SIGNALS:
            signal.signal(number, remember)

    def loop(self) -> NoReturn:
        """Ten times a second until the task ends, which ends this process."""
        last = time.monotonic()
        until_status = 0.0
        while True:
            time.sleep(self._timing.poll)
            now = time.monotonic()
            # A machine that slept, or a supervisor that was stopped, has not listened: count what we were
            # awake.
            awake = min(now - last, 5 * self._timing.poll)
            last = now
            request = self._read_control(now)
            self._leave_if_over(request)
            self._apply_suspension(now)
            until_status -= awake
            self._silence += awake
            if until_status <= 0:
                until_status = self._timing.status
                self._leave_if_alone()
                if not self._suspended:
                    self._send_status(self._block.fraction_done)

    def _read_control(self, now: float) -> int:
        """Take one message of each channel; returns a request to end, or 0."""
        if self._shared is None:
            return 0
        if self._shared.receive("heartbeat") is not None:
            self._silence = 0.0
        self._shared.receive("graphics_request")
        self._shared.receive("trickle_down")
        message = self._shared.receive("process_control_request") or ""
        if "<reread_app_info/>" in message:
            fresh = read_init_data()
            if fresh is not None:
                self._block.checkpoint_period = fresh.checkpoint_period
        if "<suspend/>" in message and not self._suspended:
            self._suspended, self._suspended_since = True, now
        if "<resume/>" in message:
            self._suspended = False
        if "<abort/>" in message:
            return REQUEST_ABORT
        return REQUEST_QUIT if "<quit/>" in message else 0

    def _leave_if_over(self, request: int) -> None:
        outcome = self._block.outcome()
        if outcome is not None:
            self._conclude(*outcome)
        if request == REQUEST_ABORT:
            self._log("the client aborted this task")
            self._leave(REQUEST_ABORT, EXIT_ABORTED_BY_CLIENT)
        if request == REQUEST_QUIT:
            self._leave(REQUEST_QUIT, 0)
        if self._signal is not None:
            self._stop_worker(REQUEST_QUIT)
            name = signal.Signals(self._signal).name
            self._temporary_exit(self._timing.signal_delay, f"stopped by {name}")
        status = self._worker.ended()
        if status is not None:
            outcome = self._block.outcome()  # published between the two looks
            if outcome is not None:
                self._conclude(*outcome)
            self._conclude_unannounced(status)

    def _leave_if_alone(self) -> None:
        """End without a finish marker when the client, or the boot loader between it and us, is gone.

        As in BOINC's library a known client_pid replaces the heartbeat: a client that is busy for a minute
        is not dead.
        """
        gone = ""
        if sys.platform != "win32" and os.getppid() != self._parent:
            gone = "the process that started this task is gone"
        elif self._watch_pid():
            identity = process_identity(self._init.client_pid)
            if identity is None or identity != self._client:
                gone = "the BOINC client is gone"
        elif self._shared is not None and self._silence > self._timing.heartbeat_timeout:
            gone = f"no heartbeat from the BOINC client for {self._timing.heartbeat_timeout:.0f} s"
        if gone:
            self._log(f"{gone}; the task stops and will continue from its last checkpoint")
            self._leave(REQUEST_QUIT, 0)

    def _apply_suspension(self, now: float) -> None:
        self._block.suspended = self._suspended
        if self._stopped and not self._suspended:
            self._worker.resume()
            self._stopped = False
        elif self._suspended and not self._stopped:
            waited = now - self._suspended_since
            if not self._block.critical or waited >= self._timing.critical_suspend_wait:
                self._worker.stop()
                self._stopped = True

    def _send_status(self, fraction_done: float) -> bool:
        now = self._init.wu_cpu_time + time.process_time() + self._worker.cpu_time()
        self._cpu_time = max(self._cpu_time, now)
        checkpoints = self._block.checkpoints
        if checkpoints != self._checkpoints:
            # The client sees a checkpoint by the change of this number alone, so it must change.
            self._checkpoints = checkpoints
            self._checkpoint_cpu_time = max(self._cpu_time, self._checkpoint_cpu_time + 1e-3)
            self._cpu_time = self._checkpoint_cpu_time
        if self._shared is None:
            return True
        return self._shared.send("app_status", status_message(self._cpu_time, self._checkpoint_cpu_time, fraction_done))

    def _stop_worker(self, request: int) -> None:
        """End the worker: let a critical section end, give `check` a moment to notice, then kill what is
        left."""
        self._block.request = request
        self._block.suspended = False
        if self._stopped and self._block.critical:
            self._worker.resume()
            self._stopped = False
        start = time.monotonic()
        while not self._stopped and self._worker.ended() is None:
            limit = self._timing.critical_quit_wait if self._block.critical else self._timing.quit_wait
            if time.monotonic() - start > limit:
                break
            if isinstance(self._worker, ThreadWorker) and not self._block.critical:
                break
            time.sleep(self._timing.poll / 5)
        self._worker.kill()

    def _leave(self, request: int, code: int) -> NoReturn:
        self._stop_worker(request)
        leave(code)

    def _conclude(self, kind: int, number: int, text: str) -> NoReturn:
        """The worker has said how it ended. It is not waited for: a driver may hang in its own tear-down."""
        self._worker.kill()
        if kind == OUTCOME_TEMPORARY_EXIT:
            self._temporary_exit(number, text)
        self._finish(number, text)

    def _conclude_unannounced(self, status: int) -> NoReturn:
        """The worker ended without a word: killed, crashed, or a library called exit."""
        self._worker.kill()  # what it may have started
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            name = signal.Signals(number).name if number in set(signal.Signals) else str(number)
            if number == signal.SIGKILL or number in POLITE_SIGNALS:
                why = " (most likely for lack of memory)" if number == signal.SIGKILL else ""
                self._temporary_exit(self._timing.killed_delay, f"the computing process was killed by {name}{why}")
            self._empty_driver_cache()
            self._finish(EXIT_CRASHED, f"the computing process crashed with {name}")
        code = os.WEXITSTATUS(status)
        self._finish(code or EXIT_BUG, f"the computing process ended unannounced with status {code}")

    def _empty_driver_cache(self) -> None:
        """What OpenCL drivers keep may be damaged (by a power cut, say), and would crash the next task as well."""
        folder = Path(self._init.project_dir) / DRIVER_CACHE
        if self._init.project_dir and folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
            self._log(f"emptied {folder}, in case a driver crashed over what it keeps there")

    def _finish(self, status: int, text: str) -> NoReturn:
        """boinc_finish: final status read by the client, then the marker, then gone at once."""
        status &= 0xFF
        if text:
            self._log(text)
        self._log(f"called boinc_finish({status})")
        self._final_status(1.0 if status == 0 else self._block.fraction_done)
        lines = [str(status)] + ([text, ""] if text else [])
        self._write_marker(FINISH_FILE, lines)
        with contextlib.suppress(OSError):
            os.unlink(LOCK_FILE)
        leave(status)

    def _final_status(self, fraction_done: float) -> None:
        """Have the client read our last numbers, if it is there to read. It looks once a second."""
        if self._shared is None:
            return
        deadline = time.monotonic() + self._timing.final_status_wait
        while not self._send_status(fraction_done) and time.monotonic() < deadline:
            time.sleep(self._timing.poll / 2)
        while not self._shared.is_free("app_status") and time.monotonic() < deadline:
            time.sleep(self._timing.poll / 2)

    def _temporary_exit(self, delay: int, reason: str) -> NoReturn:
        temporary_exit(delay, reason, self._log, self._write_marker)

    def _write_marker(self, name: str, lines: list[str]) -> None:
        """Without the marker the client would restart or fail a done task, so a full disk is waited for."""
        deadline = time.monotonic() + self._timing.marker_retry
        while True:
            try:
                return write_marker(name, lines)
            except OSError as error:
                if time.monotonic() > deadline:
                    self._log(f"cannot write {name}: {error.strerror}")
                    leave(EXIT_STATE_FILE_WRITE)
                time.sleep(1)


def temporary_exit(
    delay: int,
    reason: str,
    log: Callable[[str], None],
    write: Callable[[str, list[str]], None] = write_marker,
) -> NoReturn:
    """boinc_temporary_exit: ask the client to start this task again in `delay` seconds.

    The reason line is required: client 7.20.5 takes a file without one for a premature exit.
    """
    delay = min(max(int(delay), 1), MAX_TEMPORARY_EXIT_S)
    log(f"temporary exit for {delay} s: {reason}")
    write(TEMPORARY_EXIT_FILE, [str(delay), reason or "no reason given"])
    leave(0)


def leave(code: int) -> NoReturn:
    """End this process now: no destructors, no exit handlers, nothing that could hang."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def supervise_in_thread(supervisor: Supervisor) -> None:
    """Run the supervisor beside the main thread (Windows)."""
    threading.Thread(target=supervisor.loop, name="boinc-supervisor", daemon=True).start()
