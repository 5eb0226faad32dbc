"""Starts, watches and stops the processes of an embedded project: the server and the three daemons.

What bin/start does for a real project, on one machine without cron: each process writes to a log of its
own, one that dies is started again after a growing pause, and all are stopped by their process ids. A
lock file with the starter's process id keeps a second starter away; one left by a dead process is taken over.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from boinc_project.config import ConfigError
from boinc_project.daemon import PARENT_VARIABLE

LOG_DIRECTORY = "log"
PID_FILE = "boinc-train.pid"
STOP_PATIENCE_S = 15.0
FIRST_RESTART_S = 1.0
LAST_RESTART_S = 60.0
LINES_LOOKED_AT = 500
_COMPLAINT = re.compile(r"(\d{4}-\d\d-\d\d [\d:.]+) UTC \[PID=\d+\] \[(CRITICAL|warning)\] (.*)")  # see daemon.py
HEALTHY_S = 60.0  # a process that ran so long is started again without the pauses of earlier restarts


@dataclass
class Child:
    """One process: how to start it, and how it is doing."""

    name: str
    command: Sequence[str]
    process: subprocess.Popen[bytes] | None = None
    restarts: int = 0
    not_before: float = 0.0
    started: float = 0.0


@dataclass
class Processes:
    """The children of one project folder."""

    project_dir: Path
    children: list[Child] = field(default_factory=list)

    def add(self, name: str, command: Sequence[str]) -> None:
        self.children.append(Child(name, command))

    def log_path(self, name: str) -> Path:
        return self.project_dir / LOG_DIRECTORY / f"{name}.log"

    def start(self) -> None:
        """Start every child that is not running."""
        for child in self.children:
            if child.process is None:
                self._start(child)

    def watch(self) -> list[str]:
        """Restart what died; returns a sentence for each such event."""
        events = []
        for child in self.children:
            if child.process is not None and (status := child.process.poll()) is not None:
                if time.monotonic() - child.started > HEALTHY_S:
                    child.restarts = 0
                pause = min(FIRST_RESTART_S * 2**child.restarts, LAST_RESTART_S)
                events.append(
                    f"{child.name} ended with status {status}; starting it again (see {self.log_path(child.name)})"
                )
                child.process, child.restarts = None, child.restarts + 1
                child.not_before = time.monotonic() + pause
            if child.process is None and time.monotonic() >= child.not_before:
                self._start(child)
        return events

    def stop(self) -> None:
        """Ask every child to end, daemons before the server, and kill what does not within 15 s."""
        for child in reversed(self.children):
            if child.process is not None and child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + STOP_PATIENCE_S
        for child in self.children:
            if child.process is None:
                continue
            try:
                child.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
            child.process = None

    def pid(self, name: str) -> int | None:
        """Process id of a running child."""
        for child in self.children:
            if child.name == name and child.process is not None and child.process.poll() is None:
                return child.process.pid
        return None

    def _start(self, child: Child) -> None:
        child.started = time.monotonic()
        path = self.log_path(child.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "BOINC_PROJECT_DIR": str(self.project_dir),
            "PYTHONUNBUFFERED": "1",
            PARENT_VARIABLE: str(os.getpid()),
        }
        with open(path, "ab") as log:
            child.process = subprocess.Popen(
                child.command,
                cwd=self.project_dir,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # the terminal's Ctrl-C reaches the starter only, which stops them in order
            )


def gravest_words(project_dir: Path) -> str:
    """What the daemons' logs complain of most, for one sentence: `work_generator: the disk is almost full`, or ''.

    The newest critical line of any daemon, else the newest warning.
    """
    found: list[tuple[bool, str, str]] = []
    for path in sorted((project_dir / LOG_DIRECTORY).glob("*.log")):
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-LINES_LOOKED_AT:]:
            parts = _COMPLAINT.match(line)
            if parts is not None:
                found.append((parts[2] == "CRITICAL", parts[1], f"{path.stem}: {parts[3][:300]}"))
    return max(found)[2] if found else ""


def daemon_commands(sleep_interval: float, votes: str = "user") -> dict[str, list[str]]:
    """Command lines of the three daemons in the order of starting."""
    common = ["--sleep_interval", f"{sleep_interval:g}"]
    return {
        "validator": [sys.executable, "-m", "validator", *common, "--votes", votes],
        "assimilator": [sys.executable, "-m", "assimilator", *common],
        "work_generator": [sys.executable, "-m", "work_generator", *common],
    }


@contextlib.contextmanager
def only_starter(project_dir: Path) -> Iterator[None]:
    """Hold the project for this process; ConfigError if another live one has it."""
    refuse_second_starter(project_dir)
    path = project_dir / PID_FILE
    path.write_text(f"{os.getpid()} {psutil.Process().create_time()}\n", encoding="ascii")
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def refuse_second_starter(project_dir: Path) -> None:
    """ConfigError with the process id if another live process holds the project."""
    holder = _live_holder(project_dir / PID_FILE)
    if holder is not None:
        raise ConfigError(f"process {holder} already serves {project_dir}; stop it first (kill {holder})")


def _live_holder(path: Path) -> int | None:
    """The process named in a lock file, if it is the same process still."""
    try:
        pid_text, started = path.read_text(encoding="ascii").split()
        process = psutil.Process(int(pid_text))
        same = abs(process.create_time() - float(started)) < 1.0
        return process.pid if same and process.pid != os.getpid() else None
    except (OSError, ValueError, psutil.Error):
        return None
