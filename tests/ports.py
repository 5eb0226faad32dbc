"""Ports that a test keeps for later: a project's address, a database's after its restart.

The system gives port 0 and outgoing connections a number from 32768 on, also one that a test beside this one has asked
for and does not use yet. These lie below, in a stretch of each process's own.
"""

from __future__ import annotations

import itertools
import os
import socket

LOWEST, STRETCH, STRETCHES = 12_000, 10, 2_000

_next = itertools.count()


def kept_port() -> int:
    """A port of the loopback interface that is free, and that nobody else gets meanwhile."""
    first = LOWEST + os.getpid() % STRETCHES * STRETCH
    for number in _next:
        port = LOWEST + (first - LOWEST + number) % (STRETCH * STRETCHES)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("unreachable")
