"""Files that are whole or absent: written under a temporary name beside their place, flushed, renamed.

A writer that is killed leaves the temporary file; `TEMPORARY` tells such files from all others.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path

TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.tmp", re.DOTALL)

_KEPT_BYTES = 180  # of the name, so that with what is added it fits in the 255 that file systems take


def temporary_name(name: str) -> str:
    """A hidden name for a file that is to become `name`; a new one each time, since two writers may share a storage."""
    beginning = os.fsdecode(os.fsencode(name)[:_KEPT_BYTES])
    return f".{beginning}.{secrets.token_hex(8)}.tmp"


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Put bytes in place, atomically and durably. OSError leaves what was there. `mode`: the file's, on POSIX;
    None: what the process gives new files (umask)."""
    write_chunks(path, (data,), mode)


def write_chunks(path: Path, data: Iterable[bytes | memoryview], mode: int | None = None) -> None:
    """The same for bytes that come in pieces."""
    temporary = path.with_name(temporary_name(path.name))
    try:
        write_through(temporary, data, mode)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_through(path: Path, data: Iterable[bytes | memoryview], mode: int | None = None) -> None:
    """Write a file of its own and flush it to the disk. A temporary one: what is there is gone first."""
    with open(path, "wb") as file:
        if mode is not None:
            os.chmod(path, mode)
        for piece in data:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable (nothing to do on Windows)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
