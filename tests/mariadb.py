"""A real MariaDB server of Debian's package for tests and benchmarks: private directory, loopback, own process.

`server()` starts one server for this process and keeps it until the process ends; `new_database()` makes an
empty database in it. Whoever needs another SQL mode sets it per database with `sql_mode`. The server commits
durably (innodb_flush_log_at_trx_commit=1), as a project's should.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import getpass
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pymysql
import sqlalchemy as sa

from tests.ports import kept_port

SERVER = shutil.which("mariadbd", path=os.environ.get("PATH", "") + ":/usr/sbin")
INSTALL = shutil.which("mariadb-install-db")

START_S = 60.0
STOP_S = 30.0
_PR_SET_PDEATHSIG = 1

#: Why there is no MariaDB on this machine, or "".
MISSING = "" if SERVER and INSTALL else "Debian's mariadb-server is not installed (scripts/test installs it)"

_numbers = itertools.count(1)


@dataclass
class MariaDb:
    """One running server. `root` is its administrator, without a password, over loopback and its socket."""

    folder: Path
    port: int = 0
    options: tuple[str, ...] = ()
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def socket(self) -> Path:
        return self.folder / "db.sock"

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    def install(self) -> None:
        """Make the system tables in `folder`/data."""
        assert INSTALL is not None, MISSING
        done = subprocess.run(
            [
                INSTALL,
                "--no-defaults",
                f"--datadir={self.folder / 'data'}",
                f"--user={getpass.getuser()}",
                "--auth-root-authentication-method=normal",
                "--skip-test-db",
            ],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def start(self) -> None:
        """Start serving on `port` (a free one the first time) and wait until it answers."""
        assert SERVER is not None, MISSING
        self.port = self.port or kept_port()
        temporary = self.folder / "tmp"  # of its own: a server that starts deletes what others have in a common one
        temporary.mkdir(exist_ok=True)
        command = [
            SERVER,
            "--no-defaults",
            f"--datadir={self.folder / 'data'}",
            f"--tmpdir={temporary}",
            f"--socket={self.socket}",
            f"--pid-file={self.folder / 'server.pid'}",
            f"--user={getpass.getuser()}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            "--innodb-flush-log-at-trx-commit=1",
            "--innodb-buffer-pool-size=128M",
            "--innodb-log-file-size=48M",
            "--skip-name-resolve",
            "--skip-log-bin",
            "--max-connections=100",
            *self.options,
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )
        deadline = time.monotonic() + START_S
        while True:
            try:
                self.connect().close()
                return
            except pymysql.MySQLError:
                alive = self.process.poll() is None
                assert alive and time.monotonic() < deadline, self.log.read_text(errors="replace")[-3000:]
                time.sleep(0.05)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End the server by its process id: in order with SIGTERM, like a loss of power with SIGKILL."""
        if self.process is not None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None

    def connect(self) -> pymysql.Connection[pymysql.cursors.Cursor]:
        """An administrator's connection, for what tests do to the server itself."""
        return pymysql.connect(host="127.0.0.1", port=self.port, user="root", autocommit=True)

    def execute(self, statement: str) -> list[tuple[object, ...]]:
        """Run one statement as administrator."""
        with self.connect() as connection, connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def new_database(self, sql_mode: str | None = None) -> sa.URL:
        """An empty database with an account of its own; its URL. Without `sql_mode` the server's (strict) one holds."""
        name = f"boinc_{os.getpid()}_{next(_numbers)}"
        self.execute(f"CREATE DATABASE {name} CHARACTER SET utf8mb4")
        for host in ("127.0.0.1", "localhost"):
            self.execute(f"CREATE USER '{name}'@'{host}' IDENTIFIED BY 'secret'")
            self.execute(f"GRANT ALL ON {name}.* TO '{name}'@'{host}'")
        query = {} if sql_mode is None else {"init_command": f"SET SESSION sql_mode='{sql_mode}'"}
        return sa.URL.create(
            "mysql+pymysql", name, "secret", host="127.0.0.1", port=self.port, database=name, query=query
        )


def private_server(folder: Path, *options: str) -> MariaDb:
    """A server of the caller's own in `folder`, started; for tests that stop it or change its settings."""
    made = MariaDb(folder, options=options)
    made.install()
    made.start()
    return made


@functools.cache
def server() -> MariaDb:
    """The server that all tests of this process share."""
    folder = Path(tempfile.mkdtemp(prefix="boinc-train-mariadb-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    made = private_server(folder)
    atexit.register(made.stop)
    return made


def new_database(sql_mode: str | None = None) -> sa.URL:
    """An empty database in the shared server."""
    return server().new_database(sql_mode)


def _prctl() -> Callable[[int, int], int]:
    return ctypes.CDLL(None, use_errno=True).prctl


def _die_with_parent() -> None:
    """The server must not outlive a test run that is killed."""
    _prctl()(_PR_SET_PDEATHSIG, signal.SIGTERM)
