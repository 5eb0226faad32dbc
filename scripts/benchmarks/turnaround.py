"""How long volunteers wait between two model versions, with two clients on a small sync job.

The digits example without held-out evaluation: 2 microtasks a version, quorum 2, so that each client computes
both and a version needs four reports. Server, daemons and clients are processes as in the demo, with the
settings of `boinc-train serve`. Times are those at which a change is first seen in the server's database,
read every 20 ms from this process:

    report    the last result that a version needs is over (the client's report is committed)
    version   the next version's row is there (its files are published before)
    work      a result of that version is in progress (committed just before the reply goes to the client)
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import re
import shutil
import sqlite3
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from boinc_project import store
from boinc_project.cli.demo import Plan, volunteers
from boinc_project.cli.jobs import create_job, load_job
from boinc_project.cli.project import (
    DEFAULT_SLEEP_S,
    build_and_publish,
    port_of,
    prepare_project,
    project_processes,
    wait_until_listening,
)
from boinc_project.gt_tables import JobState
from boinc_project.processes import only_starter
from boinc_project.project_tree import ProjectTree
from boinc_project.server.run import free_port
from boinc_project.states import Outcome, ServerState
from boinc_project.stock_client import stock_client_available
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed, scratch, shown

EXAMPLE = REPOSITORY / "examples" / "digits"
POLL_S = 0.02
CLIENTS = 2


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--versions", type=int, default=12, help="versions to train (default 12)")
    parser.add_argument("--clients", choices=["auto", "stock", "scripted"], default="auto", help="kind of volunteers")
    parser.add_argument("--minutes", type=float, default=15.0, help="give up after this time (default 15)")
    parser.add_argument("--hold", type=float, default=None, help="gt_hold_dry_reply, seconds (default: the project's)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """result_to_next_work_s and report_to_version_s, medians over the versions."""
    kind = options.clients
    if kind == "auto":
        kind = "stock" if stock_client_available() else "scripted"
    settings = {} if options.hold is None else {"gt_hold_dry_reply": options.hold}
    console = Console(stderr=True)
    with scratch("turnaround") as folder:
        tree = prepare_project(folder / "project", free_port(), "Benchmark", settings)
        print(f"two {kind} clients; gt_hold_dry_reply {tree.config.gt_hold_dry_reply:g} s", flush=True)
        build_and_publish(tree, "1.00", None, console)
        create_job(tree, load_job(_job(folder / "job", options.versions), console), console)
        processes = project_processes(tree.project_dir, DEFAULT_SLEEP_S, "user")
        with only_starter(tree.project_dir), contextlib.ExitStack() as stack:
            stack.callback(processes.stop)
            processes.start()
            wait_until_listening("127.0.0.1", port_of(tree), processes)
            seen = stack.enter_context(_watching(tree))
            stack.enter_context(volunteers(Plan(folder, EXAMPLE, kind, options.minutes), tree))
            _wait_until_finished(tree, 60 * options.minutes)
    rounds = seen.rounds()
    if not rounds:
        raise BenchmarkFailed("no two versions were seen; train more --versions")
    to_version = [each.version - each.report for each in rounds]
    to_work = [each.first_work - each.report for each in rounds]
    to_all = [each.all_work - each.report for each in rounds]
    print(f"last report to version: {shown(to_version, 's')}")
    print(f"last report to work of the next version on a client: {shown(to_work, 's')}")
    print(f"last report to work of the next version on every client: {shown(to_all, 's')}")
    print(f"one version to the next: {shown(seen.intervals(), 's')}")
    return {
        "result_to_next_work_s": statistics.median(to_work),
        "report_to_version_s": statistics.median(to_version),
        "result_to_all_clients_s": statistics.median(to_all),
        "version_to_version_s": statistics.median(seen.intervals()),
    }


def _job(folder: Path, versions: int) -> Path:
    """The digits example with so many versions and without evaluation."""
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "job.toml"
    text = path.read_text()
    for key, value in (("max_versions", versions), ("evaluate_every", 0)):
        text, count = re.subn(rf"^{key} = \d+$", f"{key} = {value}", text, flags=re.MULTILINE)
        assert count == 1, key
    path.write_text(text)
    return path


def _wait_until_finished(tree: ProjectTree, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with tree.database() as database:
        while time.monotonic() < deadline:
            with database.read() as connection:
                job = store.jobs(connection)[0]
            if job.state == JobState.FAILED:
                raise BenchmarkFailed(f"the job stopped: {job.note}")
            if job.state == JobState.FINISHED:
                return
            time.sleep(0.5)
    raise BenchmarkFailed(f"the job was at version {job.current_version} after {seconds:.0f} s")


@dataclass(frozen=True)
class Round:
    """When one version's last report came, the next version, and work of it (seconds of the monotonic clock)."""

    report: float
    version: float
    first_work: float
    all_work: float


@dataclass
class Seen:
    """First sight of what happened, by model version."""

    reports: dict[int, dict[int, float]] = field(default_factory=dict)  # base version -> result id -> time
    work: dict[int, dict[int, float]] = field(default_factory=dict)  # base version -> host id -> time
    versions: dict[int, float] = field(default_factory=dict)

    def look(self, connection: sqlite3.Connection, now: float) -> None:
        for (version,) in connection.execute("SELECT version FROM gt_version"):
            self.versions.setdefault(version, now)
        rows = connection.execute(_RESULTS, {"known": max(0, max(self.versions, default=0) - 1)})
        for version, result, host, state, outcome in rows:
            if state in (ServerState.IN_PROGRESS, ServerState.OVER) and host:
                self.work.setdefault(version, {}).setdefault(host, now)
            if state == ServerState.OVER and outcome == Outcome.SUCCESS:
                self.reports.setdefault(version, {}).setdefault(result, now)

    def rounds(self) -> list[Round]:
        found = []
        for version, reports in sorted(self.reports.items()):
            published, work = self.versions.get(version + 1), self.work.get(version + 1, {})
            if published is not None and len(work) == CLIENTS:
                report = max(each for each in reports.values() if each <= published)
                found.append(Round(report, published, min(work.values()), max(work.values())))
        return found

    def intervals(self) -> list[float]:
        times = [self.versions[version] for version in sorted(self.versions) if version]
        return [later - earlier for earlier, later in itertools.pairwise(times)]


_RESULTS = """
    SELECT m.version, r.id, r.hostid, r.server_state, r.outcome
    FROM gt_microtask m JOIN workunit w ON w.name = m.workunit_name JOIN result r ON r.workunitid = w.id
    WHERE m.version >= :known
"""


@contextlib.contextmanager
def _watching(tree: ProjectTree) -> Iterator[Seen]:
    """A thread that reads the server's database until the end of the block."""
    seen, ended, failures = Seen(), threading.Event(), []
    path = tree.config.database_url.database

    def watch() -> None:
        try:
            with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
                while not ended.wait(POLL_S):
                    seen.look(connection, time.monotonic())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
    if failures:
        raise BenchmarkFailed(f"the database could not be read: {failures[0]}")
