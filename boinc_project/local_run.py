"""Runs a microtask on this machine, in a process of its own, exactly as a volunteer's computer would.

For held-out evaluation, for `boinc-train run`, and for the server's own checks. The application runs
standalone (no BOINC client) in a folder that holds its files by their open names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from boinc_project.contract.microtask import MICROTASK_FILE, UPDATE_FILE, Microtask
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import Update, read_update

APP_MODULE = "apps.gradient"


class LocalRunFailed(Exception):
    """The application ended without an update; the message holds the end of what it said."""


@dataclass
class LocalRun:
    """A running (or ended) application process and its folder."""

    folder: Path
    microtask: Microtask
    process: subprocess.Popen[bytes]

    def finished(self) -> bool:
        return self.process.poll() is not None

    def update(self, types: Mapping[str, TensorType]) -> Update:
        """Wait for the end and read the update. Raises LocalRunFailed."""
        status = self.process.wait()
        log = (self.folder / "stderr.txt").read_text(encoding="utf-8", errors="replace")
        path = self.folder / UPDATE_FILE
        if status != 0 or not path.exists():
            raise LocalRunFailed(f"the application ended with status {status}: {_last_words(log)}")
        return read_update(path.read_bytes(), types, self.microtask.codec, self.microtask.digest())

    def stop(self) -> None:
        """End the process if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def start(
    folder: Path, microtask: Microtask, files: Mapping[str, Path], arguments: Sequence[str] = ("--nthreads", "1")
) -> LocalRun:
    """Start the application on a microtask; `files` maps open names to where the files lie."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MICROTASK_FILE).write_bytes(microtask.to_json())
    for name in microtask.files:
        link = folder / name
        link.unlink(missing_ok=True)
        link.symlink_to(files[name].resolve())
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join([root, environment.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with open(folder / "stderr.txt", "wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", APP_MODULE, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    return LocalRun(folder, microtask, process)


def remove_leftovers(folder: Path, pattern: str) -> None:
    """Delete the runs' folders in `folder` whose process is gone (a daemon that is killed leaves its one).

    Their names match `pattern` and end with the number of the process: `..._PID`.
    """
    for path in folder.glob(pattern):
        pid = path.name.rpartition("_")[2]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _last_words(log: str) -> str:
    """The last line of a program's log that says why it ended, without its time and process number."""
    lines = [re.sub(r"^[\d-]+ [\d:]+ \(\d+\): ", "", line).strip() for line in log.splitlines()]
    said = [line for line in lines if line and not line.startswith("called boinc_finish")]
    return said[-1][:500] if said else "it said nothing"
