"""Whole trainings of the tiny job in a few seconds: server, daemons and scripted volunteers as they really run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import requests

from boinc_project.gt_tables import JobState
from boinc_project.processes import Processes, daemon_commands
from boinc_project.scripted_volunteer import ProtocolError, ScriptedVolunteer
from tests.server_project import add_user
from tests.tiny_project import TinyProject, volunteer_environment

APP_COMMAND = [sys.executable, "-m", "apps.gradient", "--nthreads", "1"]
PATIENCE_S = 300.0


class Volunteers:
    """Scripted volunteers that run the application, each in a thread, until told to end."""

    def __init__(self, project: TinyProject, folder: Path, names: tuple[str, ...] = ("alice", "bob")) -> None:
        self._ended = threading.Event()
        self._threads = []
        for name in names:
            url, key = project.tree.config.master_url, add_user(project.db, name)
            volunteer = ScriptedVolunteer(url, key, folder / name, name=name, command=APP_COMMAND)
            self._threads.append(threading.Thread(target=self._work, args=(volunteer,), name=name, daemon=True))

    def _work(self, volunteer: ScriptedVolunteer) -> None:
        while not self._ended.is_set():
            # A server that is away or dies in the middle of a reply is what a client lives with.
            with contextlib.suppress(requests.RequestException, ProtocolError):
                volunteer.run(self._ended.is_set, pause=0.2)
            self._ended.wait(0.3)

    def __enter__(self) -> Volunteers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(60)


@contextlib.contextmanager
def own_modules_importable() -> Iterator[None]:
    """Child processes find the repository's modules wherever they are started."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = volunteer_environment()["PYTHONPATH"]
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def project_processes(project: TinyProject, sleep_interval: float = 0.1) -> Processes:
    """The server and the three daemons, as processes not started yet."""
    folder = project.tree.project_dir
    processes = Processes(folder)
    processes.add("server", [sys.executable, "-m", "boinc_project.server.run", str(folder)])
    for name, command in daemon_commands(sleep_interval).items():
        processes.add(name, command)
    return processes


def train(
    project: TinyProject, folder: Path, disturb: Callable[[Processes], None] = lambda processes: None
) -> list[str]:
    """Train the project's job to its end; returns the digests of its versions.

    `disturb` is called again and again while it runs.
    """
    processes = project_processes(project)
    deadline = time.monotonic() + PATIENCE_S
    with own_modules_importable(), Volunteers(project, folder / "volunteers"):
        processes.start()
        try:
            while project.job.state == JobState.RUNNING:
                assert time.monotonic() < deadline, (project.job.current_version, logs(processes))
                disturb(processes)
                processes.watch()
                time.sleep(0.05)
        finally:
            processes.stop()
    assert project.job.state == JobState.FINISHED, (project.job.note, logs(processes))
    return project.version_digests()


def logs(processes: Processes) -> str:
    """The ends of all logs, for a failed test."""
    found = []
    for child in processes.children:
        path = processes.log_path(child.name)
        text = path.read_text(errors="replace") if path.exists() else ""
        found.append(f"--- {child.name}\n{text[-1500:]}")
    return "\n".join(found)
