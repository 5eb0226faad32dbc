"""A cheap load generator, run as a process of its own: HTTP POSTs over some connections at once.

Standard input and output are JSON (`Load`, `Outcome`). As hosts that ask one after the other do, every request
opens a connection of its own, sends what the stock client sends (HTTP/1.1, no `Connection` header) and
closes after the reply. All requests are built before the clock starts.
"""

from __future__ import annotations

import json
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from scripts.benchmarks.common import BenchmarkFailed, run_process

TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Asking:
    """What makes a recorded scheduler request that of one host at one time."""

    key: str  # the account's authenticator
    hostid: int
    cpid: str
    rpc_seqno: int
    other_result: str  # the task that the host has


@dataclass(frozen=True, kw_only=True)
class Load:
    """What to send: the recorded request `template`, once for each of `requests`, at most for `seconds`."""

    url: str
    template: str  # path of a recorded HTTP request
    code_sign_key: str
    requests: Sequence[Asking]
    connections: int
    seconds: float
    expected: str  # regular expression that every reply must match


@dataclass(kw_only=True)
class Outcome:
    """What came back."""

    replies: int = 0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)  # replies that were not as expected, and failures

    @property
    def per_second(self) -> float:
        return self.replies / self.seconds


def generate(load: Load) -> Outcome:
    """Send the load from another process. BenchmarkFailed if a reply was not as expected."""
    request = json.dumps(asdict(load)).encode()
    outcome = Outcome(**json.loads(run_process([sys.executable, "-m", "scripts.benchmarks.load"], request)))
    if outcome.wrong:
        raise BenchmarkFailed(f"{len(outcome.wrong)} wrong replies, the first: {outcome.wrong[0]}")
    return outcome


def http_requests(load: Load) -> list[bytes]:
    """The requests as they go over the wire."""
    head, _, body = Path(load.template).read_bytes().partition(b"\r\n\r\n")
    parts = urlsplit(load.url)
    agent = re.search(rb"^User-Agent:.*$", head, re.MULTILINE)
    lines = [line for line in head.split(b"\r\n")[1:] if not line.lower().startswith((b"host:", b"content-length:"))]
    start = f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\n".encode() + b"\r\n".join(lines)
    assert agent is not None, load.template
    body = re.sub(
        rb"<code_sign_key>.*?</code_sign_key>",
        b"<code_sign_key>\n" + load.code_sign_key.strip().encode() + b"\n</code_sign_key>",
        body,
        flags=re.DOTALL,
    )
    made = []
    for asking in load.requests:
        mine = body
        for tag, value in (
            ("authenticator", asking.key),
            ("hostid", str(asking.hostid)),
            ("rpc_seqno", str(asking.rpc_seqno)),
            ("host_cpid", asking.cpid),
        ):
            mine = re.sub(rf"(<{tag}>)[^<]*".encode(), rf"\g<1>{value}".encode(), mine, count=1)
        mine = re.sub(rb"(<other_result>\s*<name>)[^<]*", rb"\g<1>" + asking.other_result.encode(), mine, count=1)
        made.append(start + f"\r\nContent-Length: {len(mine)}\r\n\r\n".encode() + mine)
    return made


def exchange(address: tuple[str, int], request: bytes) -> bytes:
    """One request over a connection of its own; returns the reply's body."""
    with socket.create_connection(address, TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(request)
        received = b""
        while b"\r\n\r\n" not in received:
            received += _more(connection)
        head, _, body = received.partition(b"\r\n\r\n")
        found = re.search(rb"^content-length: *(\d+)", head, re.MULTILINE | re.IGNORECASE)
        if not head.startswith(b"HTTP/1.1 200") or found is None:
            raise OSError(f"unusable reply: {head[:200]!r}")
        while len(body) < int(found[1]):
            body += _more(connection)
        return body


def _more(connection: socket.socket) -> bytes:
    data = connection.recv(1 << 16)
    if not data:
        raise OSError("the server closed the connection before the reply was complete")
    return data


def run(load: Load) -> Outcome:
    """Send the load from this process's threads."""
    parts = urlsplit(load.url)
    assert parts.hostname is not None and parts.port is not None, load.url
    address, outcome, lock = (parts.hostname, parts.port), Outcome(), threading.Lock()
    waiting = iter(http_requests(load))
    expected = re.compile(load.expected.encode(), re.DOTALL)
    start = time.perf_counter()
    deadline = start + load.seconds

    def work() -> None:
        while time.perf_counter() < deadline:
            with lock:
                request = next(waiting, None)
            if request is None:
                return
            try:
                body = exchange(address, request)
            except OSError as error:
                body = str(error).encode()
            with lock:
                if expected.search(body):
                    outcome.replies += 1
                else:
                    outcome.wrong.append(body[:2000].decode("utf-8", "replace"))

    threads = [threading.Thread(target=work) for _ in range(load.connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = time.perf_counter() - start
    return outcome


def main() -> int:
    given = json.loads(sys.stdin.buffer.read())
    load = Load(**{**given, "requests": [Asking(**each) for each in given["requests"]]})
    print(json.dumps(asdict(run(load))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
