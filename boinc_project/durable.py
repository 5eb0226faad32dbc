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
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from boinc_project.contract.whole_file import sync_folder, temporary_name

LARGE = 64 << 10  # bytes of a file whose way to the disk begins at once, while others are still being made
FEW = 4  # so many files are flushed one by one: their waits are shorter than those for a busy file system

#: Modes of what a web server reads: files, and folders as BOINC's boinc_mkdir (lib/filesys.cpp) makes them.
PUBLIC_FILE, PUBLIC_FOLDER = 0o644, 0o771

_SYNC_FILE_RANGE_WRITE = 2


def _find(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


_syncfs = _find("syncfs")
_sync_file_range = _find("sync_file_range")


def make_public_folder(folder: str | Path) -> None:
    """Make a folder that a web server can enter, whatever the umask, unless it is there; it inherits its parent's
    group if that one hands it down (setgid). Several may make the same one."""
    try:
        os.mkdir(folder)
    except FileExistsError:
        return
    except FileNotFoundError:
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        make_public_folder(folder)
        return
    os.chmod(folder, PUBLIC_FOLDER | os.stat(folder).st_mode & stat.S_ISGID)


class FileBatch:
    """Files on their way to their places.

    `add` writes one (threads may add at once), `commit` puts all of them in place; leaving the block without
    `commit` removes what was written. `expected` is about how many files will come. `public`: the files and the
    folders made for them are for a web server, too, whatever the umask.
    """

    def __init__(self, expected: int, *, public: bool = False) -> None:
        self._public = public
        self._together = expected > FEW and _syncfs is not None
        self._waiting: list[tuple[str, str]] = []  # temporary name, place
        self._folders: dict[int, int] = {}  # device -> a descriptor on it, opened before anything is written
        self._kept: set[str] = set()
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def add(self, path: Path, data: bytes) -> None:
        """Write the contents for `path` beside it, making its folder if need be."""
        folder, name = os.path.split(path)
        temporary = os.path.join(folder, temporary_name(name))
        self._watch(folder)
        with self._lock:
            self._waiting.append((temporary, str(path)))
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb", buffering=0) as stream:
            if self._public:
                os.fchmod(descriptor, PUBLIC_FILE)
            left = memoryview(data)
            while left:
                left = left[stream.write(left) :]
            if not self._together:
                os.fsync(descriptor)
            elif len(data) >= LARGE:
                _begin_writing(descriptor)

    def keep(self, path: Path) -> None:
        """A file that is in its place already: its name becomes lasting with the others."""
        folder = os.path.dirname(path)
        self._watch(folder)
        with self._lock:
            self._kept.add(folder)

    def commit(self) -> None:
        """Put every file in its place; when this returns, a loss of power takes none of them away."""
        if self._together:
            self._sync_devices()
        for temporary, path in self._waiting:
            os.replace(temporary, path)
        if self._together:
            self._sync_devices()
        else:
            for folder in {os.path.dirname(path) for _, path in self._waiting} | self._kept:
                sync_folder(Path(folder))
        self._waiting.clear()
        self._kept.clear()

    def _watch(self, folder: str) -> None:
        """Know the file system of a folder. An error of writing is told to descriptors that were open before it."""
        if folder in self._known:
            return
        try:
            device = os.stat(folder).st_dev
        except FileNotFoundError:
            if self._public:
                make_public_folder(folder)
            else:
                os.makedirs(folder, exist_ok=True)
            device = os.stat(folder).st_dev
        with self._lock:
            self._known.add(folder)
            if self._together and device not in self._folders:
                self._folders[device] = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)

    def _sync_devices(self) -> None:
        for descriptor in self._folders.values():
            sync_device(descriptor)

    def __enter__(self) -> FileBatch:
        return self

    def __exit__(self, *exception: object) -> None:
        for temporary, _ in self._waiting:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
        self._waiting.clear()
        for descriptor in self._folders.values():
            os.close(descriptor)
        self._folders.clear()


def _begin_writing(descriptor: int) -> None:
    """Have the kernel begin to write a file; only a later sync says that it lasts."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, ctypes.c_int64(0), ctypes.c_int64(0), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE))


def sync_device(descriptor: int) -> None:
    """Make the whole file system of an open file durable; OSError if something could not be written."""
    assert _syncfs is not None
    if _syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
