"""A 100 MB upload: its speed, and what it costs the server in memory.

As the stock client does it: a query for the size that is there already, then one POST with
`Expect: 100-continue`, each over a connection of its own. One upload is broken off in the middle and resumed
where the server says. The server is a process of its own; its memory is what the kernel's high-water mark of
the resident set (VmHWM, reset before) lies above the resident set at rest after a small upload.
"""

from __future__ import annotations

import argparse
import hashlib
import secrets
import socket
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from boinc_project import templates
from boinc_project.scripted_volunteer import FileInfo, ScriptedVolunteer, upload_body
from scripts.benchmarks.common import BenchmarkFailed, scratch, serving, shown
from scripts.benchmarks.load import exchange
from tests.server_project import add_user, add_workunits, make_project, publish_app

MB = 1_000_000
PIECE_BYTES = 1 << 18
TIMEOUT_S = 120.0
SETTLE_S = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=float, default=100.0, help="size of the file (default 100)")
    parser.add_argument("--repeats", type=int, default=3, help="undisturbed uploads (default 3)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """mb_per_s (median, 10^6 bytes) and extra_memory_mb (largest, the resumed upload included)."""
    nbytes = int(options.megabytes * MB)
    with scratch("upload") as folder:
        tree = make_project(folder / "project", max_wus_in_progress=100)
        with tree.database() as db, serving(tree) as server:
            appid = publish_app(tree, db)
            output = [templates.OutputReference(open_name="out", max_nbytes=nbytes)]
            (tree.project_dir / "templates" / "uppercase_out").write_text(templates.output_template(output))
            add_workunits(tree, db, appid, options.repeats + 2, min_quorum=1, rsc_disk_bound=1e6)
            volunteer = ScriptedVolunteer(tree.config.master_url, add_user(db, "sender"), folder / "client")
            small, interrupted, *whole = _output_files(volunteer, options.repeats + 2)
            _send(small, secrets.token_bytes(10_000))
            time.sleep(SETTLE_S)
            rest = server.memory_info().rss
            print(f"server at rest: {rest / MB:.1f} MB resident; file of {nbytes / MB:g} MB of random bytes")
            content = secrets.token_bytes(nbytes)
            speeds, extra = [], []
            for file in whole:
                with _peak(server) as peak:
                    seconds = _send(file, content)
                speeds.append(nbytes / MB / seconds)
                extra.append((peak[0] - rest) / MB)
            with _peak(server) as peak:
                offset = _send_interrupted(interrupted, content)
            extra.append((peak[0] - rest) / MB)
            print(f"an upload broken off was resumed at {offset / MB:.1f} MB")
            for file in (*whole, interrupted):
                _check(tree.upload_path(file.name), content)
    print(f"speed, query and durable end included: {shown(speeds, 'MB/s')}")
    print("memory above rest, MB, in order: " + ", ".join(f"{value:.1f}" for value in extra))
    return {"mb_per_s": statistics.median(speeds), "extra_memory_mb": max(extra)}


def _output_files(volunteer: ScriptedVolunteer, count: int) -> list[FileInfo]:
    """The output files, with their certificates, of so many tasks."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(volunteer.queue) < count and time.monotonic() < deadline:
        volunteer.queue += volunteer.scheduler_rpc(1e9, float(count)).tasks
        time.sleep(0.2)
    if len(volunteer.queue) < count:
        raise BenchmarkFailed(f"the server gave {len(volunteer.queue)} of {count} tasks")
    return [task.outputs[0].file for task in volunteer.queue[:count]]


def _send(file: FileInfo, content: bytes) -> float:
    """Query and upload; returns the seconds that both took."""
    body = upload_body(file, content)  # the client knows the MD5 since the task's end
    start = time.perf_counter()
    if _uploaded_size(file) != 0:
        raise BenchmarkFailed(f"{file.name} is there before it was sent")
    reply = _post(file, body)
    seconds = time.perf_counter() - start
    if b"<status>0</status>" not in reply:
        raise BenchmarkFailed(f"the upload was refused: {reply!r}")
    return seconds


def _send_interrupted(file: FileInfo, content: bytes) -> int:
    """Break off after 40 %, ask, send the rest; returns where it was resumed."""
    _post(file, upload_body(file, content), stop_after=len(content) * 2 // 5)
    time.sleep(SETTLE_S)
    offset = _uploaded_size(file)
    if not 0 < offset < len(content):
        raise BenchmarkFailed(f"the server kept {offset} bytes of the upload that was broken off")
    reply = _post(file, upload_body(file, content, offset))
    if b"<status>0</status>" not in reply:
        raise BenchmarkFailed(f"the resumed upload was refused: {reply!r}")
    return offset


def _uploaded_size(file: FileInfo) -> int:
    query = (
        "<data_server_request>\n    <core_client_major_version>7</core_client_major_version>\n"
        "    <core_client_minor_version>20</core_client_minor_version>\n"
        "    <core_client_release>5</core_client_release>\n"
        f"    <get_file_size>{file.name}</get_file_size>\n</data_server_request>\n"
    ).encode()
    reply = exchange(_address(file), _head(file, len(query)) + query)
    _, _, rest = reply.partition(b"<file_size>")
    if not rest:
        raise BenchmarkFailed(f"no file size in {reply!r}")
    return int(rest.partition(b"<")[0])


def _post(file: FileInfo, body: bytes, stop_after: int | None = None) -> bytes:
    """One upload request; broken off after so many bytes if asked, then b''."""
    with socket.create_connection(_address(file), TIMEOUT_S) as connection:
        connection.sendall(_head(file, len(body), b"Expect: 100-continue\r\n"))
        received = connection.recv(4096)
        if not received.startswith(b"HTTP/1.1 100"):
            raise BenchmarkFailed(f"not asked to continue: {received[:200]!r}")
        received = received.partition(b"\r\n\r\n")[2]
        view = memoryview(body)[:stop_after]
        for start in range(0, len(view), PIECE_BYTES):
            connection.sendall(view[start : start + PIECE_BYTES])
        if stop_after is not None:
            return b""
        while b"</data_server_reply>" not in received:
            data = connection.recv(4096)
            if not data:
                raise BenchmarkFailed("the server closed the connection without a reply")
            received += data
        return received


def _address(file: FileInfo) -> tuple[str, int]:
    parts = urlsplit(file.urls[0])
    assert parts.hostname is not None and parts.port is not None, file.urls
    return parts.hostname, parts.port


def _head(file: FileInfo, length: int, more: bytes = b"") -> bytes:
    parts = urlsplit(file.urls[0])
    return (
        f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        "User-Agent: BOINC client (x86_64-pc-linux-gnu 7.20.5)\r\nAccept: */*\r\n"
        "Accept-Encoding: deflate, gzip, br, zstd\r\nContent-Type: application/x-www-form-urlencoded\r\n"
        f"Content-Length: {length}\r\n"
    ).encode() + (more + b"\r\n")


@contextmanager
def _peak(server: psutil.Process) -> Iterator[list[float]]:
    """Fills the list with the largest resident set, in bytes, during the block."""
    found: list[float] = []
    Path(f"/proc/{server.pid}/clear_refs").write_text("5\n")  # resets the high-water mark (proc(5))
    yield found
    for line in Path(f"/proc/{server.pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            found.append(1024.0 * int(line.split()[1]))


def _check(path: Path, content: bytes) -> None:
    with path.open("rb") as stream:
        if hashlib.file_digest(stream, "md5").digest() != hashlib.md5(content).digest():
            raise BenchmarkFailed(f"{path.name} did not arrive whole")
