"""What the measurements share: a scratch folder, a server in a process of its own, medians, the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import psutil

from boinc_project.cli.project import port_of, wait_until_listening
from boinc_project.processes import Processes
from boinc_project.project_tree import ProjectTree

REPOSITORY = Path(__file__).resolve().parents[2]


class BenchmarkFailed(RuntimeError):
    """The measurement means nothing; the message says why."""


class BenchmarkSkipped(RuntimeError):
    """What is to be compared with is not there; the message says what and why."""


def machine(moment: str) -> str:
    """One line: processors and the load that other programs put on them."""
    loads = ", ".join(f"{load:.2f}" for load in os.getloadavg())
    return f"machine {moment}: {os.cpu_count()} processors, {_processor()}, load average {loads}"


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def shown(values: Sequence[float], unit: str) -> str:
    """Median and all values of a repeated measurement."""
    listed = ", ".join(f"{value:.4g}" for value in values)
    return f"median {statistics.median(values):.4g} {unit} of [{listed}]"


@contextlib.contextmanager
def scratch(name: str) -> Iterator[Path]:
    """An empty folder on the repository's disk (not in memory: commits must be durable), removed at the end."""
    parent = REPOSITORY / ".cache" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def serving(tree: ProjectTree) -> Iterator[psutil.Process]:
    """The embedded server of a project as a process of its own, ready to answer."""
    processes = Processes(tree.project_dir)
    processes.add("server", [sys.executable, "-m", "boinc_project.server.run", str(tree.project_dir)])
    processes.start()
    try:
        wait_until_listening("127.0.0.1", port_of(tree), processes)
        pid = processes.pid("server")
        assert pid is not None
        yield psutil.Process(pid)
    finally:
        processes.stop()


def commit_latency(folder: Path, repeats: int = 50) -> float:
    """Median seconds of one small write and fsync: what any durable commit costs at least here."""
    seconds = []
    with (folder / "fsync").open("wb", buffering=0) as stream:
        for _ in range(repeats):
            start = time.perf_counter()
            stream.write(bytes(4096))
            os.fsync(stream.fileno())
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def fresh_processes(count: int) -> ProcessPoolExecutor:
    """A pool whose processes are started anew: threads of PyTorch and OpenCL do not survive a fork."""
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"))


def run_process(command: Sequence[str], request: bytes) -> bytes:
    """Standard output of a command that reads `request`; BenchmarkFailed if it fails."""
    done = subprocess.run(command, input=request, stdout=subprocess.PIPE, cwd=REPOSITORY)
    if done.returncode != 0:
        raise BenchmarkFailed(f"{command[-1]} ended with status {done.returncode}")
    return done.stdout
