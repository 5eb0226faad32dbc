"""The HTTP rim of the embedded server: routes, bodies and bounds; every decision is made elsewhere.

URLs follow config.xml: the master page and web RPCs under `master_url`, downloads under `download_url`, the
scheduler and the upload handler where `cgi_url` and `upload_url` say. Unknown paths get 404 and nothing is
listed; files are served from the download directory only.
"""

from __future__ import annotations

import asyncio
import html
import logging
import re
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from aiohttp import web
from sqlalchemy.exc import DBAPIError

from boinc_project import clock, database, templates
from boinc_project import store as queries
from boinc_project.database import Database
from boinc_project.gt_tables import JobState, gt_job
from boinc_project.project_tree import ProjectTree
from boinc_project.server import accounts, uploads
from boinc_project.server.messages import MAX_REQUEST_BYTES
from boinc_project.server.remote import remote_address
from boinc_project.server.scheduler_service import Posted
from boinc_project.server.uploads import HeaderReader, SizeQuery, Status, Upload, UploadHeader, UploadRefused
from boinc_project.states import FileDeleteState

log = logging.getLogger(__name__)

#: Seconds without a byte after which a sender is given up.
IDLE_TIMEOUT_S = 120.0

#: Bytes of a refused upload that are read and thrown away so that the client hears the reply, and seconds of
#: silence after which it is told anyway.
MAX_DRAIN_BYTES = 256 << 20
DRAIN_IDLE_S = 2.0

#: Seconds that a wrong password costs.
BAD_PASSWORD_DELAY_S = 1.0

#: The `<server_version>` told to clients.
SERVER_VERSION = "8.3.0"

#: A request, and whether the client has hung up -> reply body.
Answer = Callable[[Posted, Callable[[], bool]], Awaitable[bytes]]

_XML = {"Content-Type": "text/xml"}
_TEXT = {"Content-Type": "text/plain"}
_FAN_OUT = re.compile(r"[0-9a-f]{1,8}")


class Rim:
    """The request handlers of one project."""

    def __init__(self, tree: ProjectTree, db: Database, store: uploads.UploadStore, answer_scheduler: Answer) -> None:
        self.tree, self.db, self.config = tree, db, tree.config
        self.store = store
        self.answer_scheduler = answer_scheduler
        self.upload_key = tree.upload_public()

    def application(self) -> web.Application:
        """The aiohttp application with every route of the project."""
        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        master = urlsplit(self.config.master_url).path
        download = urlsplit(self.config.download_url).path.rstrip("/")
        app.router.add_get(master, self.master_page)
        if master != "/":
            app.router.add_get(master.rstrip("/"), self.master_page)
        for name, handler in (
            ("get_project_config.php", self.project_config),
            ("create_account.php", self.create_account),
            ("lookup_account.php", self.lookup_account),
            ("am_get_info.php", self.account_info),
        ):
            app.router.add_get(master + name, handler)
        app.router.add_get(download + "/{name}", self.download)
        app.router.add_get(download + "/{directory}/{name}", self.download)
        app.router.add_post(urlsplit(self.config.scheduler_url).path, self.scheduler)
        app.router.add_post(urlsplit(self.config.upload_url).path, self.upload)
        return app

    # Pages.

    async def master_page(self, _request: web.Request) -> web.Response:
        """Clients look for the scheduler's URL on short lines of their own; people read what is being learned."""
        url, name = self.config.scheduler_url, html.escape(self.config.long_name)
        jobs = await asyncio.to_thread(self._job_list)
        page = (
            f'<!DOCTYPE html>\n<html>\n<head>\n<meta charset="utf-8">\n<title>{name}</title>\n'
            f'<link rel="boinc_scheduler" href="{url}">\n'
            f"</head>\n<body>\n<!-- <scheduler>{url}</scheduler> -->\n"
            f"<h1>{name}</h1>\n<p>This is a BOINC project. Attach a BOINC client to\n"
            f"{html.escape(self.config.master_url)}</p>\n{jobs}</body>\n</html>\n"
        )
        return web.Response(text=page, content_type="text/html")

    def _job_list(self) -> str:
        """What the running jobs learn, and under which licence their data are, for volunteers."""
        with self.db.read() as connection:
            if not sa.inspect(connection).has_table(gt_job.name):
                return ""
            jobs = queries.jobs(connection, JobState.RUNNING)
        items = "".join(
            f"<li>{html.escape(job.config.job.description)}\nVersion {job.current_version}.\n"
            f"Data: {html.escape(job.config.data.license)}.</li>\n"
            for job in jobs
        )
        return f"<h2>What your computer would do</h2>\n<ul>\n{items}</ul>\n" if items else ""

    async def project_config(self, _request: web.Request) -> web.Response:
        return _xml_reply(await asyncio.to_thread(self._project_config))

    def _project_config(self) -> str:
        with self.db.read() as connection:
            platforms = connection.execute(_PLATFORMS_IN_USE).all()
        listed = "".join(
            "        <platform>\n"
            f"            <platform_name>{html.escape(row.name)}</platform_name>\n"
            f"            <user_friendly_name>{html.escape(row.user_friendly_name)}</user_friendly_name>\n"
            + (f"            <plan_class>{html.escape(row.plan_class)}</plan_class>\n" if row.plan_class else "")
            + "        </platform>\n"
            for row in platforms
        )
        closed = "    <account_creation_disabled/>\n" if self.config.disable_account_creation else ""
        return (
            '<?xml version="1.0" encoding="ISO-8859-1" ?>\n<project_config>\n'
            f"    <name>{html.escape(self.config.long_name)}</name>\n"
            f"    <master_url>{html.escape(self.config.master_url)}</master_url>\n"
            f"    <web_rpc_url_base>{html.escape(self.config.master_url)}</web_rpc_url_base>\n"
            f"    <server_version>{SERVER_VERSION}</server_version>\n"
            f"    <web_stopped>{int(self.tree.is_triggered('stop_web'))}</web_stopped>\n{closed}"
            f"    <min_passwd_length>{self.config.min_passwd_length}</min_passwd_length>\n"
            f"    <sched_stopped>{int(self.tree.is_triggered('stop_sched'))}</sched_stopped>\n"
            f"    <platforms>\n{listed}    </platforms>\n</project_config>\n"
        )

    # Accounts.

    async def create_account(self, request: web.Request) -> web.Response:
        if self.config.disable_account_creation:
            error = accounts.AccountError(accounts.CREATION_DISABLED, "Account creation is disabled")
            return _xml_reply(accounts.error_xml(error.number, str(error)))
        query = request.query

        def created(connection: sa.Connection) -> dict[str, Any]:
            return accounts.create_account(
                connection,
                email=query.get("email_addr", ""),
                passwd_hash=query.get("passwd_hash", ""),
                name=query.get("user_name", ""),
                now=int(clock.now()),
            )

        def create() -> str:
            return accounts.account_xml(self.db.serialized(created))

        return await _account_reply(create)

    async def lookup_account(self, request: web.Request) -> web.Response:
        email, passwd_hash = request.query.get("email_addr", ""), request.query.get("passwd_hash")

        def look_up() -> str:
            with self.db.read() as connection:
                user = accounts.lookup_account(connection, email=email, passwd_hash=passwd_hash)
            return accounts.exists_xml() if passwd_hash is None else accounts.account_xml(user)

        return await _account_reply(look_up)

    async def account_info(self, request: web.Request) -> web.Response:
        key = request.query.get("account_key", "")

        def info() -> str:
            with self.db.read() as connection:
                user = accounts.find_user(connection, authenticator=key) if key else None
            if user is None:
                raise accounts.AccountError(accounts.NOT_FOUND, "Not found")
            return accounts.info_xml(user)

        return await _account_reply(info)

    # Downloads.

    async def download(self, request: web.Request) -> web.StreamResponse:
        """A published file; ranges are answered with 206 or 416."""
        name, directory = request.match_info["name"], request.match_info.get("directory", "")
        try:
            path = self.tree.download_path(name) if directory else self.tree.app_file_path(name)
        except ValueError:
            raise web.HTTPNotFound from None
        if directory and (not _FAN_OUT.fullmatch(directory) or path.parent.name != directory):
            raise web.HTTPNotFound
        if not path.is_file():
            raise web.HTTPNotFound
        return web.FileResponse(path, headers={"Content-Type": "application/octet-stream"})

    # Scheduler.

    async def scheduler(self, request: web.Request) -> web.Response:
        body = await _bounded_body(request, MAX_REQUEST_BYTES)
        forwarded = request.headers.getall("X-Forwarded-For", [])
        address = remote_address(request.remote, forwarded, self.config.master_url)
        reply = await self.answer_scheduler(Posted(body, address), lambda: request.transport is None)
        return web.Response(body=reply, headers=_XML)

    # Uploads.

    async def upload(self, request: web.Request) -> web.Response:
        """The file upload handler: a size query or a file."""
        size: int | None = None
        try:
            command, rest = await _read_header(request)
            if isinstance(command, SizeQuery):
                size = await asyncio.to_thread(self.store.size, command.name)
            else:
                await self._receive(request, command, rest)
        except UploadRefused as refusal:
            log.info("upload refused: %s", refusal)
            await _drain(request)
            return web.Response(body=uploads.format_reply(refusal.status, str(refusal)), headers=_TEXT)
        except OSError as error:
            log.error("upload failed: %s", error)
            return web.Response(body=uploads.format_reply(Status.TRANSIENT, "storage error"), headers=_TEXT)
        except DBAPIError as error:
            log.error("upload failed: the database does not answer (%s)", error.orig)
            await _drain(request)
            return web.Response(body=uploads.format_reply(Status.TRANSIENT, "database error"), headers=_TEXT)
        return web.Response(body=uploads.format_reply(Status.OK, file_size=size), headers=_TEXT)

    async def _receive(self, request: web.Request, header: UploadHeader, rest: bytes) -> None:
        if not self.config.ignore_upload_certificates:
            uploads.check_certificate(header, self.upload_key)
            uploads.check_size(header, header.max_nbytes)
        max_nbytes = await asyncio.to_thread(self._max_nbytes, header.name)
        if max_nbytes is None:
            await _drain(request)  # nobody needs the file any more; the client may forget it
            return
        uploads.check_size(header, max_nbytes)
        upload = await asyncio.to_thread(self.store.begin, header)
        if upload is None:
            await _drain(request)
            return
        try:
            await _write_body(request, upload, rest)
            await asyncio.to_thread(upload.finish)
        finally:
            upload.abandon()
        await _drain(request)

    def _max_nbytes(self, name: str) -> float | None:
        """The size limit of an output file, None if its result's files are already deleted.

        UploadRefused if no result of this project writes a file of that name.
        """
        result_name = re.sub(r"_r\d+_\d+$", "", name)
        table = database.result
        query = sa.select(table.c.xml_doc_in, table.c.file_delete_state).where(table.c.name == result_name)
        with self.db.read() as connection:
            row = connection.execute(query).first()
        if row is None:
            raise uploads.permanent(f"no task of this project writes {name}")
        if row.file_delete_state != FileDeleteState.INIT:
            return None
        for file in templates.output_files(row.xml_doc_in or ""):
            if file.name == name:
                return file.max_nbytes
        raise uploads.permanent(f"no task of this project writes {name}")


_PLATFORMS_IN_USE = (
    sa.select(database.platform.c.name, database.platform.c.user_friendly_name, database.app_version.c.plan_class)
    .join_from(database.app_version, database.platform, database.platform.c.id == database.app_version.c.platformid)
    .where(database.app_version.c.deprecated == 0, database.platform.c.deprecated == 0)
    .distinct()
)


def _xml_reply(text: str) -> web.Response:
    return web.Response(body=text.encode("latin-1", "xmlcharrefreplace"), headers=_XML)


async def _account_reply(action: Callable[[], str]) -> web.Response:
    try:
        text = await asyncio.to_thread(action)
    except accounts.AccountError as error:
        if error.number == accounts.BAD_PASSWORD:
            await asyncio.sleep(BAD_PASSWORD_DELAY_S)
        text = accounts.error_xml(error.number, str(error))
    return _xml_reply(text)


async def _bounded_body(request: web.Request, limit: int) -> bytes:
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    body = bytearray()
    while chunk := await _next_chunk(request):
        body += chunk
        if len(body) > limit:
            raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=len(body))
    return bytes(body)


async def _next_chunk(request: web.Request, timeout: float = IDLE_TIMEOUT_S) -> bytes:
    """The next bytes of the body, b'' at its end. A sender that falls silent or goes away ends the body."""
    try:
        async with asyncio.timeout(timeout):
            return await request.content.readany()
    except TimeoutError:
        return b""
    except (ConnectionError, web.PayloadAccessError, web.RequestPayloadError):
        return _received_before_the_break(request)


def _received_before_the_break(request: web.Request) -> bytes:
    """What has arrived of a body whose connection broke, so that an upload resumes exactly there.

    aiohttp keeps these bytes but raises instead of handing them out; it has no public way to them. Should
    this private one change, an upload resumes a little earlier.
    """
    read_rest = getattr(request.content, "_read_nowait", None)
    return bytes(read_rest(-1)) if read_rest is not None else b""


async def _read_header(request: web.Request) -> tuple[UploadHeader | SizeQuery, bytes]:
    reader = HeaderReader()
    while chunk := await _next_chunk(request):
        found = reader.feed(chunk)
        if found is not None:
            return found
    return reader.end()


async def _write_body(request: web.Request, upload: Upload, rest: bytes) -> None:
    """Append the body to the upload until it is complete or the sender stops.

    Written at once, not in a thread: what has arrived when a connection breaks must not be lost in a buffer.
    """
    upload.write(rest)
    while upload.missing and (chunk := await _next_chunk(request)):
        upload.write(chunk)


async def _drain(request: web.Request) -> None:
    """Read the rest of the body and forget it, within reason."""
    read = 0
    while read < MAX_DRAIN_BYTES and (chunk := await _next_chunk(request, DRAIN_IDLE_S)):
        read += len(chunk)
