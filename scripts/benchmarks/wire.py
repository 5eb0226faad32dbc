"""Bytes that programs of several processes exchange: by the counter of a loopback device that they have for themselves.

A network namespace of its own (Linux; `unshare` of util-linux) has a loopback device that nobody else uses. What it
counts is all of it: data, headers of TCP and IP, acknowledgements.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed, BenchmarkSkipped

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1


def alone(module: str, *arguments: str, timeout_s: float = 600) -> Any:
    """What `python -m module arguments` prints as JSON in its last line, run in a network of its own.

    Raises BenchmarkSkipped where the system has no such networks, BenchmarkFailed if the program fails.
    """
    unshare = _unshare()
    if unshare is None:
        raise BenchmarkSkipped("this system gives out no network namespace (unshare --net), so bytes cannot be counted")
    command = [*unshare, sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise BenchmarkFailed(f"{module} {arguments[0]} took more than {timeout_s:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise BenchmarkFailed(f"{module} {arguments[0]} ended with status {done.returncode}: {said}")
    return json.loads(lines[-1])


def _unshare() -> Sequence[str] | None:
    for options in (["--net"], ["--map-root-user", "--net"]):
        command = ["unshare", *options]
        try:
            if subprocess.run([*command, "true"], capture_output=True).returncode == 0:
                return command
        except FileNotFoundError:
            return None
    return None


def bring_up() -> None:
    """Switch on the loopback device of a new network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        fcntl.ioctl(asked, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def carried() -> int:
    """Bytes that the loopback device has carried so far."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    raise BenchmarkFailed("there is no loopback device")
