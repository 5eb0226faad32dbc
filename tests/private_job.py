"""A job in a live project that no volunteer is sent: tests answer its tasks, BOINC's own daemons do the rest.

It has an app of its own, which is marked as deprecated: BOINC's feeder passes such work over, and the project's own
instances of our daemons are for another app. BOINC's transitioner and file deleter treat it like all work. Ours are
run by the test, as programs or as objects, when and as often as it likes.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import secrets
import shutil
import stat
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from boinc_project import database
from boinc_project.daemon import Stopper
from boinc_project.database import Database
from boinc_project.gt_tables import gt_heartbeat
from boinc_project.states import NEVER, ServerState
from tests.live_project import LiveProject, Trained, add_users, remove, wait_for
from tests.tiny_project import TINY_JOB, TinyProject
from work_generator.export import export_job
from work_generator.job import Job
from work_generator.publish import publish_job

PATIENCE_S = 60.0  # BOINC's daemons look every five seconds
VERSION_NUMBERS = (100, 101)
QUOTA = 50  # of every host, and results in a row that it has had valid
SO_FAR = 3


class PrivateJob(TinyProject):
    """The job, its users (each with a host) and what happens to its workunits."""

    def __init__(self, live: LiveProject, made: Trained, appid: int, job_id: int, versions: Sequence[int]) -> None:
        self.live, self.made, self.versions = live, made, tuple(versions)
        self.tree, self.db = live.tree, live.db
        self.appid, self.job_id = appid, job_id
        self.stopper = Stopper(live.folder)
        self.hosts = {user: self._add_host(user) for user in made.users}
        self._folders: list[Path] = []
        self._untaken: list[int] = []
        self._moments = itertools.count(2)

    def __enter__(self) -> PrivateJob:
        return self

    def __exit__(self, *exception: object) -> None:
        for folder in self._folders:
            with contextlib.suppress(OSError):  # by now others may have uploaded into it
                folder.rmdir()

    def issue(self) -> list[dict[str, Any]]:
        """Let our generator work and BOINC's transitioner make the results; returns the unsent ones of our job."""
        self.generator().one_pass()
        self.wait_for_transitioner()
        return [row for row in self.made.results() if row["server_state"] == ServerState.UNSENT]

    def wait_for_transitioner(self) -> None:
        """Until it has looked at every workunit of the job that was due."""
        wait_for(self._nothing_is_due, "BOINC's transitioner", patience_s=PATIENCE_S, pause_s=0.1)

    def _nothing_is_due(self) -> bool:
        with self.db.read() as connection:
            query = sa.select(sa.func.min(database.workunit.c.transition_time)).where(
                database.workunit.c.appid == self.appid
            )
            return int(connection.scalar(query) or NEVER) > time.time()

    def take(self, number: int) -> list[list[dict[str, Any]]]:
        """So many workunits that no test has had yet, each as its unsent results."""
        if not self._untaken:
            self._untaken = sorted({int(result["workunitid"]) for result in self.issue()})
        units = [self._untaken.pop() for _ in range(number)]
        return [self.results_of(unit) for unit in units]

    def results_of(self, unit: int) -> list[dict[str, Any]]:
        return self.rows(database.result, workunitid=unit)

    def unit(self, identifier: int) -> dict[str, Any]:
        (found,) = self.rows(database.workunit, id=identifier)
        return found

    def wait_for_units(self, units: Sequence[int], **columns: Any) -> None:
        """Until these columns of all the workunits hold these values."""

        def reached() -> bool:
            rows = self.live.rows(database.workunit, database.workunit.c.id.in_(units))
            return all(row[name] == value for row in rows for name, value in columns.items())

        wait_for(reached, f"{columns} of workunits {list(units)}", patience_s=PATIENCE_S, pause_s=0.1)

    def one_more_copy(self, unit: int) -> dict[str, Any]:
        """Have the transitioner make one more result than there are; it is in progress with the user after theirs."""
        before = self.results_of(unit)
        self.change(database.workunit, unit, target_nresults=len(before) + 1, transition_time=int(time.time()) - 1)
        self.wait_for_transitioner()
        (result,) = [row for row in self.results_of(unit) if row["id"] not in {each["id"] for each in before}]
        user = self.made.users[len(before)]
        values = {
            "server_state": int(ServerState.IN_PROGRESS), "userid": user, "hostid": self.hosts[user],
            "sent_time": int(time.time()) - 60, "report_deadline": int(time.time()) + 3600,
        }  # fmt: skip
        self.change(database.result, int(result["id"]), **values)
        return {**result, **values}

    def answer(
        self, result: Mapping[str, Any], data: bytes | str | None = "honest", *, user: int | None = None,
        host: int | None = None, **columns: Any,
    ) -> None:  # fmt: skip
        """Report a result as a success of its user: the first copy is the first user's, and so on."""
        number = int(re.search(r"_(\d+)$", str(result["name"]))[1])  # type: ignore[index]
        user = self.made.users[number % len(self.made.users)] if user is None else user
        self._make_room(self.upload_path(result).parent)
        (account,) = self.rows(database.user, id=user)
        given = {
            "app_version_id": self.versions[0], "app_version_num": VERSION_NUMBERS[0], "teamid": account["teamid"],
            "report_deadline": int(time.time()) + 3600, **columns,
        }  # fmt: skip
        super().answer(result, data, user=user, host=self.hosts[user] if host is None else host, **given)
        # Another moment than any before: the transitioner overlooks a wish for the one that it is just handling.
        moment = int(time.time()) - next(self._moments)
        self.change(database.workunit, int(result["workunitid"]), transition_time=moment)

    def _make_room(self, folder: Path) -> None:
        """A directory of the upload tree in which the web server can write as well."""
        if not folder.exists():
            folder.mkdir()
            folder.chmod(stat.S_IMODE(folder.parent.stat().st_mode))
            self._folders.append(folder)

    def _add_host(self, user: int) -> int:
        with self.db.transaction() as connection:
            row = database.new_row(
                database.host, create_time=int(time.time()), userid=user, domain_name=f"{self.made.mark}-{user}"
            )
            host = _inserted(connection, database.host, row)
            for version in self.versions:
                row = database.new_row(
                    database.host_app_version, host_id=host, app_version_id=version, max_jobs_per_day=QUOTA,
                    consecutive_valid=SO_FAR,
                )  # fmt: skip
                connection.execute(database.host_app_version.insert(), row)
        return host

    @contextlib.contextmanager
    def daemons(self, name: str, *options: Sequence[str]) -> Iterator[list[Path]]:
        """Instances of one of our daemons, one for each list of options, while the block runs; their logs."""
        scratch = Path(str(self.job.folder.path))
        logs = [scratch / f"{name}{number}.log" for number in range(len(options))]
        running: list[subprocess.Popen[bytes]] = []
        try:
            for log, given in zip(logs, options, strict=True):
                with log.open("wb") as stream:
                    running.append(self._start(name, given, stream))
            wait_for(lambda: all("Starting" in log.read_text() for log in logs), f"{name} to start", pause_s=0.1)
            yield logs
        finally:
            for process in running:
                process.terminate()
            statuses = [process.wait(PATIENCE_S) for process in running]
        assert statuses == [0] * len(running), [log.read_text() for log in logs]

    def _start(self, name: str, options: Sequence[str], stream: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [name, "-d", "3", "--app", self.made.mark, "--sleep_interval", "0.2", *options],
            cwd=self.live.temporary_folder,
            env=self.live.daemon_environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
        )


@contextlib.contextmanager
def private_job(
    live: LiveProject, scratch: Path, *, slots: int = 2, workunit: str = "", speeds: Sequence[float] = ()
) -> Iterator[PrivateJob]:
    """Publish the tiny job with so many microtasks a version, these lines in [workunit] and these speed_classes (the
    app then has as many size classes, of which no other program of BOINC's looks); removed afterwards."""
    mark = f"livetest{secrets.token_hex(4)}"
    team, users = add_users(live.db, mark, {f"{mark}-{name}": secrets.token_hex(16) for name in "abcd"})
    made = Trained(live, mark, users, team, {})
    appid, versions = _add_app(live.db, mark, len(speeds))
    train = f"batches_per_microtask = 4\nspeed_classes = {list(speeds)}" if speeds else "batches_per_microtask = 3"
    try:
        exported = _exported(scratch, mark, slots, workunit, train)
        job_id = publish_job(live.tree, live.db, *exported, mark, lambda text: None)
        with PrivateJob(live, made, appid, job_id, versions) as job:
            yield job
    finally:
        remove(made)
        with live.db.transaction() as connection:
            connection.execute(sa.delete(database.app_version).where(database.app_version.c.appid == appid))
            connection.execute(sa.delete(database.app).where(database.app.c.id == appid))
            connection.execute(sa.delete(gt_heartbeat).where(gt_heartbeat.c.daemon.contains(mark)))


def _exported(scratch: Path, mark: str, slots: int, workunit: str, train: str) -> tuple[Job, Any]:
    source = scratch / mark
    shutil.copytree(TINY_JOB, source)
    text = (source / "job.toml").read_text()
    for old, new in (
        ('name = "tiny"', f'name = "{mark}"'),
        ("microtasks_per_version = 2", f"microtasks_per_version = {slots}"),
        ("batches_per_microtask = 3", train),
        ("[workunit]\nmin_quorum = 2", f"[workunit]\n{workunit or 'min_quorum = 2'}"),
    ):
        assert old in text
        text = text.replace(old, new)
    (source / "job.toml").write_text(text)
    job = Job.load(source / "job.toml")
    return job, export_job(job)


def _add_app(db: Database, name: str, classes: int) -> tuple[int, list[int]]:
    now = int(time.time())
    with db.transaction() as connection:
        platform = connection.scalar(sa.select(sa.func.min(database.platform.c.id)))
        row = database.new_row(
            database.app, name=name, user_friendly_name=name, create_time=now, deprecated=1, n_size_classes=classes
        )
        appid = _inserted(connection, database.app, row)
        versions = [
            _inserted(
                connection,
                database.app_version,
                database.new_row(
                    database.app_version, appid=appid, version_num=number, platformid=platform, create_time=now
                ),
            )
            for number in VERSION_NUMBERS
        ]
    return appid, versions


def _inserted(connection: sa.Connection, table: sa.Table, row: Mapping[str, Any]) -> int:
    key = connection.execute(table.insert(), row).inserted_primary_key
    assert key is not None
    return int(key[0])
