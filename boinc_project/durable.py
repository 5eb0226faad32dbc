"""Many files put in place at once, each whole or absent, and lasting before anybody is told of them.

A file of its own costs a disk two to three waits (its bytes, its name, its folder's name): thousands of small
files cost minutes. A batch waits twice in all: once for the bytes of all files under temporary names, and,
after the renames, once for the names. It uses Linux's syncfs(2), which makes a whole file system durable; where
that is missing, or for a handful of files, each file is flushed by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import sys
import threading
from collections.abc import Callable
from pathlib import Path

FEW = 4  # so many files are flushed one by one: their waits are shorter than those for a busy file system


def _find_syncfs() -> Callable[[int], int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)


_syncfs = _find_syncfs()


class FileBatch:
    """Files on their way to their places.

    `add` writes one (threads may add at once), `commit` puts all of them in place; leaving the block without
    `commit` removes what was written. `expected` is about how many files will come.
    """

    def __init__(self, expected: int) -> None:
        self._together = expected > FEW and _syncfs is not None
        self._waiting: list[tuple[Path, Path]] = []
        self._folders: dict[int, int] = {}  # device -> a descriptor on it, opened before anything is written
        self._kept: set[Path] = set()
        self._lock = threading.Lock()

    def add(self, path: Path, data: bytes) -> None:
        """Write the contents for `path` beside it, making its folder if need be."""
        temporary = path.with_name(f".{path.name[:180]}.{secrets.token_hex(8)}.tmp")
        self._watch(path.parent)
        with self._lock:
            self._waiting.append((temporary, path))
        with open(temporary, "xb") as stream:
            stream.write(data)
            if not self._together:
                stream.flush()
                os.fsync(stream.fileno())

    def keep(self, path: Path) -> None:
        """A file that is in its place already: its name becomes lasting with the others."""
        self._watch(path.parent)
        with self._lock:
            self._kept.add(path.parent)

    def commit(self) -> None:
        """Put every file in its place; when this returns, a loss of power takes none of them away."""
        if self._together:
            self._sync_devices()
        for temporary, path in self._waiting:
            os.replace(temporary, path)
        if self._together:
            self._sync_devices()
        else:
            for folder in {path.parent for _, path in self._waiting} | self._kept:
                sync_folder(folder)
        self._waiting.clear()
        self._kept.clear()

    def _watch(self, folder: Path) -> None:
        """Know the file system of a folder. An error of writing is told to descriptors that were open before it."""
        try:
            device = os.stat(folder).st_dev
        except FileNotFoundError:
            folder.mkdir(parents=True, exist_ok=True)
            device = os.stat(folder).st_dev
        if not self._together:
            return
        with self._lock:
            if device not in self._folders:
                self._folders[device] = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)

    def _sync_devices(self) -> None:
        for descriptor in self._folders.values():
            sync_device(descriptor)

    def __enter__(self) -> FileBatch:
        return self

    def __exit__(self, *exception: object) -> None:
        for temporary, _ in self._waiting:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
        self._waiting.clear()
        for descriptor in self._folders.values():
            os.close(descriptor)
        self._folders.clear()


def sync_device(descriptor: int) -> None:
    """Make the whole file system of an open file durable; OSError if something could not be written."""
    assert _syncfs is not None
    if _syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
