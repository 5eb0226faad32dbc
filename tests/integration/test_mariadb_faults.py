"""Lost connections, lost replies and a dead MariaDB server: each unit of work is done once, by daemons that go on."""

from __future__ import annotations

import contextlib
import itertools
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from assimilator.replay import replay
from boinc_project import database
from boinc_project.daemon import RetryLater
from boinc_project.database import Database
from boinc_project.gt_tables import gt_heartbeat, gt_ledger, gt_microtask
from boinc_project.processes import daemon_commands
from boinc_project.states import ServerState, ValidateState
from tests import databases, mariadb
from tests.tiny_project import TinyProject, tiny_project, volunteer_environment

pytestmark = databases.needs_mariadb

MOST_STATEMENTS = 200
PATIENCE_S = 60.0


@contextlib.contextmanager
def answered() -> Iterator[TinyProject]:
    """A project on MariaDB with two honest copies of every workunit, reported and not judged."""
    with databases.chosen(databases.MARIADB), tiny_project() as project:
        for result in project.issue():
            project.answer(result)
        project.transitioner.run_once()
        yield project


@contextlib.contextmanager
def validated() -> Iterator[TinyProject]:
    with databases.chosen(databases.MARIADB), tiny_project(validated=True) as project:
        yield project


def books(project: TinyProject) -> dict[str, Any]:
    """What a pass may change, without its times."""
    columns: list[tuple[sa.Table, list[str]]] = [
        (database.user, ["id", "total_credit"]),
        (database.host, ["id", "total_credit"]),
        (database.host_app_version, ["host_id", "consecutive_valid", "max_jobs_per_day", "et_n", "turnaround_n"]),
        (database.result, ["id", "server_state", "outcome", "validate_state", "granted_credit"]),
        (database.workunit, ["id", "need_validate", "canonical_resultid", "canonical_credit", "assimilate_state"]),
        (gt_microtask, ["workunit_name", "state", "canonical_sha256"]),
        (gt_ledger, ["workunit_name", "disposition", "applied_version"]),
    ]
    found: dict[str, Any] = {
        table.name: sorted([row[name] for name in names] for row in project.rows(table)) for table, names in columns
    }
    return {**found, "versions": project.version_digests()}


def validate(project: TinyProject) -> Callable[[], object]:
    return project.validator().one_pass


def assimilate(project: TinyProject) -> Callable[[], object]:
    return project.assimilator().one_pass


DAEMONS = [pytest.param(answered, validate, id="validator"), pytest.param(validated, assimilate, id="assimilator")]
Made = Callable[[], contextlib.AbstractContextManager[TinyProject]]
Daemon = Callable[[TinyProject], Callable[[], object]]


def undisturbed(made: Made, daemon: Daemon) -> dict[str, Any]:
    with made() as project:
        before = books(project)
        daemon(project)()
        after = books(project)
    assert before != after
    return after


def until_done(one_pass: Callable[[], object]) -> bool:
    """Passes of one daemon until one is not disturbed; whether there was a disturbed one."""
    for number in itertools.count():
        try:
            one_pass()
            return number > 0
        except RetryLater:
            assert number < 3
    raise AssertionError


class Killer:
    """Has the server kill our connection right before its `at`-th statement; a COMMIT counts as one."""

    def __init__(self, db: Database, at: int) -> None:
        self.at, self.seen = at, 0
        sa.event.listen(db.engine, "before_cursor_execute", self._on_statement)
        sa.event.listen(db.engine, "commit", self._look)

    def _on_statement(self, connection: sa.Connection, *_: Any) -> None:
        self._look(connection)

    def _look(self, connection: sa.Connection) -> None:
        if self.seen == self.at:
            raw: Any = connection.connection.dbapi_connection
            mariadb.server().execute(f"KILL {raw.thread_id()}")
        self.seen += 1


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize(("made", "daemon"), DAEMONS)
def test_a_connection_killed_before_any_statement_costs_nothing_but_a_repetition(
    made: Made, daemon: Daemon, every: int
) -> None:
    expected = undisturbed(made, daemon)
    for at in range(0, MOST_STATEMENTS, every):
        with made() as project:
            one_pass = daemon(project)
            killer = Killer(project.db, at)
            disturbed = until_done(one_pass)
            if killer.seen <= at:
                break
            assert disturbed, at
            assert books(project) == expected, at
    assert 10 < at < MOST_STATEMENTS - every


class Proxy:
    """Stands between a client and the server, and can drop the server's reply to a COMMIT, and the connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.commits = 0
        self.drop_at = -1
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                dropping = threading.Event()
                threading.Thread(target=self._requests, args=(client, server, dropping), daemon=True).start()
                threading.Thread(target=self._replies, args=(client, server, dropping), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket, dropping: threading.Event) -> None:
        with contextlib.suppress(OSError), client.makefile("rb") as stream:
            while header := stream.read(4):
                payload = stream.read(int.from_bytes(header[:3], "little"))
                if payload == b"\x03COMMIT":
                    if self.commits == self.drop_at:
                        dropping.set()
                    self.commits += 1
                server.sendall(header + payload)
        with contextlib.suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)

    def _replies(self, client: socket.socket, server: socket.socket, dropping: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if dropping.is_set():
                    break  # it has answered, so the COMMIT is done
                client.sendall(data)
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@pytest.mark.parametrize(("made", "daemon"), DAEMONS)
def test_a_commit_whose_reply_is_lost_is_found_to_be_done_and_not_done_again(made: Made, daemon: Daemon) -> None:
    expected = undisturbed(made, daemon)
    lost_writes = 0
    for at in range(MOST_STATEMENTS):
        with made() as project, contextlib.closing(Proxy(mariadb.server().port)) as proxy:
            direct = project.db
            project.db = Database(direct.url.set(port=proxy.port))
            one_pass = daemon(project)
            proxy.drop_at = at
            disturbed = until_done(one_pass)
            project.db.close()
            project.db = direct
            if proxy.commits <= at:
                break
            lost_writes += disturbed
            assert books(project) == expected, at
    assert lost_writes >= 3


def test_connections_that_the_server_closed_for_idleness_are_replaced(tmp_path: Path) -> None:
    url = mariadb.new_database().update_query_dict({"init_command": "SET SESSION wait_timeout=1"})
    with TinyProject(tmp_path / "project", on=url) as project:
        validator, assimilator = project.validator(), project.assimilator()
        results = project.issue()
        validator.one_pass()
        assimilator.one_pass()
        for result in results:
            project.answer(result)
        project.transitioner.run_once()
        time.sleep(3)
        validator.one_pass()
        time.sleep(3)
        assimilator.one_pass()
        assert project.job.current_version == 1
        states = [row["validate_state"] for row in project.rows(database.result, server_state=int(ServerState.OVER))]
        assert states == [ValidateState.VALID] * 4


class Daemons:
    """The three daemons as processes, each with a log."""

    def __init__(self, project: TinyProject, folder: Path) -> None:
        self.logs = {name: folder / f"{name}.log" for name in daemon_commands(0.1)}
        environment = {**volunteer_environment(), "BOINC_PROJECT_DIR": str(project.tree.project_dir)}
        self.processes = {}
        for name, command in daemon_commands(0.1).items():
            with self.logs[name].open("wb") as log:
                self.processes[name] = subprocess.Popen(
                    command, cwd=project.tree.project_dir, env=environment, stdin=subprocess.DEVNULL, stderr=log
                )

    def attempts(self, name: str) -> list[str]:
        """The lines about a database that does not answer."""
        lines = self.logs[name].read_text(errors="replace").splitlines()
        return [line for line in lines if "does not answer" in line]

    def wait(self, condition: Callable[[str], bool]) -> None:
        """Until it holds for every daemon."""
        for name in self.processes:
            wait_until(lambda name=name: condition(name), self.text)  # type: ignore[misc]

    def text(self) -> str:
        return "\n".join(f"--- {name}\n{path.read_text(errors='replace')[-2000:]}" for name, path in self.logs.items())

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()


def wait_until(condition: Callable[[], bool], explain: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.1)


def test_daemons_wait_for_a_dead_server_with_one_line_per_attempt_and_go_on_when_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "db"
    folder.mkdir()
    server = mariadb.private_server(folder)
    try:
        with TinyProject(tmp_path / "project", on=server.new_database()) as project:
            results = project.issue()
            daemons = Daemons(project, tmp_path)
            try:
                wait_until(lambda: len(project.rows(gt_heartbeat)) == len(daemons.processes), daemons.text)
                server.stop(signal.SIGKILL)
                daemons.wait(lambda name: len(daemons.attempts(name)) >= 2)
                for name in daemons.processes:
                    pauses = [line.rsplit(" ", 2)[1] for line in daemons.attempts(name)]
                    assert pauses == ["2", "4", "8", "16"][: len(pauses)], "the pauses double, so nobody is flooded"
                    text = daemons.logs[name].read_text()
                    assert "Traceback" not in text
                server.start()
                for result in results:
                    project.answer(result)
                project.transitioner.run_once()
                wait_until(lambda: project.job.current_version == 1, daemons.text)
                assert list(replay(project.db, project.job).values()) == project.version_digests()
                granted = sum(row["granted_credit"] for row in project.rows(database.result))
                assert granted > 0
                assert sum(row["total_credit"] for row in project.rows(database.user)) == pytest.approx(granted)
                known = {name: len(daemons.attempts(name)) for name in daemons.processes}
                project.db.close()
                server.stop(signal.SIGKILL)
                daemons.wait(lambda name: len(daemons.attempts(name)) > known[name])
                (project.tree.project_dir / "stop_daemons").touch()
                daemons.wait(lambda name: daemons.processes[name].poll() is not None)
                assert [process.returncode for process in daemons.processes.values()] == [0, 0, 0], daemons.text()
            finally:
                daemons.end()
    finally:
        server.stop()


def test_a_daemon_that_finds_no_database_at_its_start_says_so_in_one_sentence(tmp_path: Path) -> None:
    url = mariadb.new_database()
    with TinyProject(tmp_path / "project", on=url) as project:
        config = project.tree.project_dir / "config.xml"
        config.write_text(config.read_text().replace(f":{url.port}/", ":1/"))
        environment = {**volunteer_environment(), "BOINC_PROJECT_DIR": str(project.tree.project_dir)}
        done = subprocess.run(
            [sys.executable, "-m", "validator"], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "the database cannot be opened" in done.stderr
