"""The embedded server's process: one project, one port, one database (SQLite, or MariaDB if the project says so).

Bird's eye view, in call order: `serve` (signals, stop file) -> `EmbeddedServer.start` (lock, port, threads)
-> `SchedulerQueue` (requests that wait together are answered in one commit) and `HeldReplies` before it
-> `_housekeeping` (transitioner, size regulator and file deleter) -> `EmbeddedServer.stop`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from aiohttp import web
from sqlalchemy.exc import DBAPIError

from boinc_project import database
from boinc_project.config import ConfigError, ProjectConfig
from boinc_project.daemon import orphaned
from boinc_project.database import Database, is_lost
from boinc_project.project_tree import ProjectTree
from boinc_project.server.file_deleter import FileDeleter
from boinc_project.server.held_replies import HeldReplies
from boinc_project.server.http_rim import Rim
from boinc_project.server.scheduler_service import INDEXES, Answer, Held, Posted, SchedulerService
from boinc_project.server.size_regulator import SizeRegulator
from boinc_project.server.transitioner import Transitioner
from boinc_project.server.uploads import UploadStore
from boinc_project.signing import KeyFormatError

log = logging.getLogger(__name__)

#: Seconds between looks for due transitions. Reports are handled at once; this is for what other processes
#: write (new workunits, validated and assimilated ones).
TRANSITION_INTERVAL_S = 0.2

#: Longest pause (seconds) between attempts to reach a database that is away.
LONGEST_DATABASE_PAUSE_S = 30.0

#: Seconds between passes of the file deleter.
FILE_DELETE_INTERVAL_S = 5.0

#: Most requests that share one commit.
MAX_SHARED_COMMIT = 32

#: Seconds that open requests get to finish when the server stops.
SHUTDOWN_TIMEOUT_S = 5.0

#: Seconds for which the rest of a body is read after the reply, so that the sender gets to see the reply.
LINGERING_S = 2.0

LOCK_NAME = "embedded_server.lock"

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class ServerError(Exception):
    """The server cannot start; the message is one sentence that says what to do."""


class ProjectLock:
    """At most one embedded server per project, and no lock left behind by a dead one.

    The lock is the operating system's and goes with the process; the file only tells who holds it.
    """

    def __init__(self, project_dir: Path) -> None:
        self.path = project_dir / LOCK_NAME
        self._stream: IO[str] | None = None

    def acquire(self) -> None:
        """Raises ServerError if another live process serves the project."""
        stream = self.path.open("a+")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            stream.seek(0)
            holder = stream.read(20).strip() or "unknown"
            stream.close()
            raise ServerError(
                f"another server (process {holder}) already serves {self.path.parent}; stop it first"
            ) from None
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        self._stream = stream

    def release(self) -> None:
        if self._stream is not None:
            self._stream.truncate(0)
            self._stream.close()
            self._stream = None


class SchedulerQueue:
    """Hands waiting scheduler requests, as many as there are, to one thread and one commit."""

    def __init__(self, answer: Callable[[Sequence[Posted | Held]], list[Answer]]) -> None:
        self._answer = answer
        self._waiting: queue.SimpleQueue[tuple[Posted | Held, asyncio.Future[Answer]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="scheduler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._waiting.put(None)
        self._thread.join(SHUTDOWN_TIMEOUT_S)

    async def answer(self, asked: Posted | Held) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.put((asked, future))
        return await future

    def _run(self) -> None:
        stopping = False
        while not stopping:
            batch = [self._waiting.get()]
            with contextlib.suppress(queue.Empty):
                while len(batch) < MAX_SHARED_COMMIT:
                    batch.append(self._waiting.get_nowait())
            stopping = None in batch
            self._serve([each for each in batch if each is not None])

    def _serve(self, batch: list[tuple[Posted | Held, asyncio.Future[Answer]]]) -> None:
        if not batch:
            return
        try:
            answers: list[Answer | Exception] = [*self._answer([asked for asked, _ in batch])]
        except Exception as error:
            log.exception("scheduler requests failed")
            answers = [error] * len(batch)
        # All futures belong to the server's one event loop; wake it once for the whole batch.
        loop = batch[0][1].get_loop()
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(_resolve, [future for _, future in batch], answers)


def _resolve(futures: list[asyncio.Future[Answer]], answers: list[Answer | Exception]) -> None:
    for future, answer in zip(futures, answers, strict=True):
        if future.cancelled():
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class EmbeddedServer:
    """The embedded server of one project; `start` returns when it answers requests, `stop` when it is gone.

    `host` and `port` say where to listen (default: loopback, and the port of the master URL). Listening
    beyond loopback needs `allow_plain_http`, unless the master URL is https (a proxy in front does TLS).
    """

    def __init__(
        self,
        project_dir: Path | str,
        *,
        host: str = "127.0.0.1",
        port: int | None = None,
        allow_plain_http: bool = False,
    ) -> None:
        self.tree = _load_tree(Path(project_dir))
        self.config = self.tree.config
        self.host = host
        self.port = port or _port_of(self.config)
        if host not in _LOOPBACK and not allow_plain_http and self.config.master_url.startswith("http:"):
            raise ServerError(
                f"{host} is reachable from other computers and {self.config.master_url} is not encrypted; "
                "use https behind a proxy, or allow plain HTTP explicitly"
            )
        self._lock = ProjectLock(self.tree.project_dir)
        self._stopping = threading.Event()
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_stop: asyncio.Event | None = None

    @property
    def is_running(self) -> bool:
        return self._started.is_set() and not self._stopping.is_set()

    def start(self) -> None:
        """Start serving in background threads. Raises ServerError."""
        self._lock.acquire()
        try:
            listener = _bind(self.host, self.port)
            self.db = self._open_database()
            self._build()
        except BaseException:
            self._lock.release()
            raise
        for name, target in (
            ("http", lambda: self._run_http(listener)),
            ("housekeeping", self._housekeeping),
        ):
            thread = threading.Thread(target=target, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        self._started.wait()
        if self._failure is not None:
            self.stop()
            raise ServerError(f"the server could not start: {self._failure}") from self._failure
        log.info("serving %s from %s", self.config.master_url, self.tree.project_dir)

    def stop(self) -> None:
        """Stop: open requests get a moment, the database is left consistent. Safe to call again."""
        self._stopping.set()
        loop, stop = self._loop, self._loop_stop
        if loop is not None and stop is not None:
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(stop.set)
        for thread in self._threads:
            thread.join(SHUTDOWN_TIMEOUT_S * 3)
        self._threads.clear()
        if hasattr(self, "db"):
            self.db.close()
        self._lock.release()

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def _open_database(self) -> Database:
        db = self.tree.database()
        try:
            db.create_tables(database.metadata)
            if db.is_sqlite:
                with db.transaction() as connection:
                    for index in INDEXES:
                        connection.exec_driver_sql(index)
        except DBAPIError as error:
            db.close()
            raise ServerError(f"the database cannot be opened ({error.orig})") from error
        return db

    def _build(self) -> None:
        key = self.tree.upload_private()
        self._transitioner = Transitioner(self.db, self.config, upload_key=key)
        self._regulator = SizeRegulator(self.tree, self.db)
        service = SchedulerService(self.tree, self.db, self._transitioner)
        self._queue = SchedulerQueue(service.answer)
        store = UploadStore(self.tree)
        self._file_deleter = FileDeleter(self.tree, self.db, store)
        held_replies = HeldReplies(
            self._queue.answer,
            results_made=lambda: self._transitioner.results_made + self._regulator.released,
            hold_s=self.config.gt_hold_dry_reply,
            is_stopping=self._stopping.is_set,
        )
        self._rim = Rim(self.tree, self.db, store, held_replies.answer)

    # Threads.

    def _run_http(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve_http(listener))
        except Exception as error:
            log.exception("the HTTP server failed")
            self._failure = error
        finally:
            self._started.set()
            listener.close()

    async def _serve_http(self, listener: socket.socket) -> None:
        self._loop, self._loop_stop = asyncio.get_running_loop(), asyncio.Event()
        self._queue.start()
        runner = web.AppRunner(
            self._rim.application(),
            access_log=None,
            shutdown_timeout=SHUTDOWN_TIMEOUT_S,
            lingering_time=LINGERING_S,
            handle_signals=False,
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=256).start()
        self._started.set()
        if self._stopping.is_set():
            self._loop_stop.set()
        await self._loop_stop.wait()
        await runner.cleanup()
        self._queue.stop()

    def _housekeeping(self) -> None:
        delete_at = time.monotonic() + FILE_DELETE_INTERVAL_S
        pause = TRANSITION_INTERVAL_S
        while not self._stopping.wait(pause):
            try:
                self._transitioner.run_once()
                self._regulator.run_once()
                if time.monotonic() >= delete_at:
                    delete_at = time.monotonic() + FILE_DELETE_INTERVAL_S
                    self._file_deleter.run_once()
                pause = TRANSITION_INTERVAL_S
            except DBAPIError as error:
                if is_lost(error):
                    pause = min(max(2 * pause, 1.0), LONGEST_DATABASE_PAUSE_S)
                    log.error("the database does not answer (%s); trying again in %.0f s", error.orig, pause)
                else:
                    log.exception("housekeeping failed; tried again")
            except Exception:
                # Daemons stop on a bug of ours, but a server that answers is better than one that does not.
                log.exception("housekeeping failed; tried again")


def _load_tree(project_dir: Path) -> ProjectTree:
    try:
        tree = ProjectTree(project_dir)
        tree.code_sign_private()
    except (ConfigError, KeyFormatError) as error:
        raise ServerError(str(error)) from error
    except OSError as error:
        raise ServerError(f"cannot read {error.filename}: {error.strerror}") from error
    return tree


def _port_of(config: ProjectConfig) -> int:
    parts = urlsplit(config.master_url)
    try:
        return parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise ServerError(f"the master URL {config.master_url} has no usable port") from error


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(256)
    except OSError as error:
        listener.close()
        raise ServerError(
            f"cannot listen on {host} port {port} ({error.strerror}); "
            "stop the program that uses it or choose another port"
        ) from error
    listener.setblocking(False)
    return listener


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def serve(
    project_dir: Path | str,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    allow_plain_http: bool = False,
) -> int:
    """Serve until SIGTERM, SIGINT, SIGHUP or the project's `stop_daemons` file; returns the exit status.

    0 after a stop, 2 if the server cannot start (one sentence on stderr). Call it from the main thread.
    """
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: stopping.set())
    try:
        server = EmbeddedServer(project_dir, host=host, port=port, allow_plain_http=allow_plain_http)
        if server.tree.is_triggered("stop_daemons"):
            raise ServerError(f"{server.tree.project_dir / 'stop_daemons'} exists; remove it to start the server")
        server.start()
    except ServerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        while not stopping.wait(0.5):
            if server.tree.is_triggered("stop_daemons") or not server.is_running or orphaned():
                break
    finally:
        server.stop()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """`python -m boinc_project.server.run PROJECT_DIR`: what the demo and tests start as a process."""
    parser = argparse.ArgumentParser(prog="python -m boinc_project.server.run")
    parser.add_argument("project_dir", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=None)
    parser.add_argument("--allow-plain-http", action="store_true")
    given = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    return serve(given.project_dir, host=given.host, port=given.port, allow_plain_http=given.allow_plain_http)


if __name__ == "__main__":
    sys.exit(main())
