"""Uploads: reading the upload handler's requests and keeping the files whole.

Sources: BOINC `sched/file_upload_handler.cpp` (requests, replies), `client/file_xfer.cpp` (what clients
send). Unlike the stock handler, data goes to a `.part` file beside the target and only becomes the target
when its length and MD5 are right; a complete file is never written again; an upload continues exactly where
the part file ends or not at all.

No sockets here: `HeaderReader` is fed bytes, `UploadStore` opens, appends and finishes files.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO
from xml.sax.saxutils import escape

from boinc_project import signing
from boinc_project.contract.whole_file import sync_folder
from boinc_project.project_tree import ProjectTree, check_file_name

log = logging.getLogger(__name__)

#: Longest XML before the file's bytes; the stock client sends about 700 bytes.
MAX_HEADER_BYTES = 16384

#: Mode of a complete upload: nobody needs to write it again, and hard links to it are safe.
COMPLETED_MODE = 0o444

_READ_BYTES = 1 << 20


class Status(IntEnum):
    """`<status>` of a reply."""

    OK = 0
    TRANSIENT = 1  # the client tries again later
    PERMANENT = -1  # the client gives up: the task fails


class UploadRefused(Exception):
    """An upload or size query that is answered with an error; `status` says whether to try again."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def permanent(message: str) -> UploadRefused:
    return UploadRefused(Status.PERMANENT, message)


def transient(message: str) -> UploadRefused:
    return UploadRefused(Status.TRANSIENT, message)


@dataclass(frozen=True)
class SizeQuery:
    """A client asks how much of a file is here."""

    name: str


@dataclass(frozen=True, kw_only=True)
class UploadHeader:
    """A client sends bytes `offset` to `nbytes` of a file."""

    name: str
    signature: str  # the upload certificate, '' without one
    max_nbytes: float
    nbytes: int
    md5: str
    offset: int

    @property
    def length(self) -> int:
        """Bytes that follow the header."""
        return self.nbytes - self.offset


def format_reply(status: Status, message: str = "", file_size: int | None = None) -> bytes:
    """The reply's bytes."""
    lines = ["<data_server_reply>", f"    <status>{int(status)}</status>"]
    if file_size is not None:
        lines.append(f"    <file_size>{file_size}</file_size>")
    if message:
        lines.append(f"    <message>{escape(message)}</message>")
    return ("\n".join([*lines, "</data_server_reply>"]) + "\n").encode()


# Reading requests.


class HeaderReader:
    """Collects the beginning of a request body until the XML is complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, chunk: bytes) -> tuple[UploadHeader | SizeQuery, bytes] | None:
        """Add bytes; the header and the first file bytes once it is complete, else None.

        Raises UploadRefused for a header that is too long or wrong.
        """
        # The file's bytes may contain anything, so only the header's own length is searched for its end.
        self._buffer += chunk
        head = bytes(self._buffer[:MAX_HEADER_BYTES])
        start = head.find(b"<data>\n")
        if start >= 0:
            return parse_upload(head[:start]), bytes(self._buffer[start + len(b"<data>\n") :])
        if b"</get_file_size>" in head:
            return parse_size_query(head), b""
        if len(self._buffer) >= MAX_HEADER_BYTES:
            raise permanent("Missing <data> tag")
        return None

    def end(self) -> tuple[UploadHeader | SizeQuery, bytes]:
        """The body ended before the header was complete."""
        if b"<file_upload>" in self._buffer:
            raise permanent("Missing <data> tag")
        raise transient("no command in request")


def parse_size_query(header: bytes) -> SizeQuery:
    name = _element(header, "get_file_size")
    if name is None:
        raise permanent("Missing name")
    return SizeQuery(_checked_name(name))


def parse_upload(header: bytes) -> UploadHeader:
    """Read the XML before `<data>`. Raises UploadRefused (permanent) with what is missing."""
    name = _element(header, "name")
    if name is None:
        raise permanent("Missing name")
    md5 = (_element(header, "md5_cksum") or "").lower()
    if not re.fullmatch(r"[0-9a-f]{32}", md5):
        raise permanent("Missing md5_cksum")
    nbytes = _count(header, "nbytes")
    offset = _count(header, "offset", default=0)
    if offset > nbytes:
        raise transient(f"offset {offset} is beyond the file's {nbytes} bytes")
    return UploadHeader(
        name=_checked_name(name),
        signature=_element(header, "xml_signature") or "",
        max_nbytes=_count(header, "max_nbytes", default=-1),
        nbytes=nbytes,
        md5=md5,
        offset=offset,
    )


def _element(header: bytes, tag: str) -> str | None:
    found = re.search(rf"<{tag}>(.*?)</{tag}>".encode(), header, re.DOTALL)
    return None if found is None else found[1].decode("utf-8", "replace").strip("\r\n\t ")


def _count(header: bytes, tag: str, default: int | None = None) -> int:
    """A byte count; clients may write decimals."""
    text = _element(header, tag)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,19}(\.\d*)?", text):
        raise permanent(f"Missing or wrong {tag}")
    return int(text.partition(".")[0])


def _checked_name(name: str) -> str:
    try:
        check_file_name(name)
    except ValueError as error:
        raise permanent(f"bad file name: {error}") from None
    return name


def check_certificate(header: UploadHeader, key: signing.PublicKey) -> None:
    """Refuse an upload that this project did not ask for: its certificate signs name and size limit."""
    if not header.signature:
        raise permanent("missing signature")
    if header.max_nbytes < 0:
        raise permanent("missing max_nbytes")
    if not key.verify(signing.upload_certificate_text(header.name, header.max_nbytes), header.signature):
        raise permanent("invalid signature")


def check_size(header: UploadHeader, max_nbytes: float) -> None:
    """Refuse a file larger than the task allows, before its bytes are read."""
    if header.nbytes > max_nbytes:
        raise permanent(f"file size {header.nbytes} exceeds the limit of {max_nbytes:.0f} bytes")


# Keeping files.


@dataclass(frozen=True, eq=False)
class Claim:
    """The right to touch the part files of one name. Only its holder can give it back; again is harmless."""

    store: UploadStore
    name: str

    def release(self) -> None:
        self.store._release(self)


@dataclass
class Upload:
    """An upload being written; call `write` with each piece, then `finish` or `abandon`."""

    store: UploadStore
    claim: Claim
    header: UploadHeader
    target: Path
    part: Path
    stream: BinaryIO
    received: int  # bytes in the part file
    digest: hashlib._Hash | None = field(repr=False)  # None: a resumed upload, hashed from disk at the end

    @property
    def missing(self) -> int:
        return self.header.nbytes - self.received

    def write(self, data: bytes) -> None:
        """Append; bytes beyond the announced length are dropped. UploadRefused if the disk is full."""
        data = data[: self.missing]
        try:
            self.stream.write(data)
        except OSError as error:
            raise _disk_error(error) from error
        self.received += len(data)
        if self.digest is not None:
            self.digest.update(data)

    def finish(self) -> None:
        """Make the file complete: checked, durable, in its place, read-only.

        UploadRefused (transient) if bytes are missing (the part stays, to be continued) or the MD5 is wrong
        (the part goes, so that the client starts again).
        """
        try:
            self._flush()
            if self.missing:
                raise transient(f"the file has {self.received} of {self.header.nbytes} bytes")
            self._check_part()
            md5 = self.digest.hexdigest() if self.digest is not None else signing.file_md5(self.part)
            if md5 != self.header.md5:
                self.part.unlink(missing_ok=True)
                raise transient("MD5 mismatch; the upload starts again")
            _complete(self.part, self.target, self.store.completed_mode)
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Stop writing and keep what is there; safe to call again."""
        with contextlib.suppress(OSError):
            self.stream.close()
        self.claim.release()

    def _check_part(self) -> None:
        """The part in its place is the file that was written, with exactly its bytes; else it goes."""
        try:
            written, found = os.fstat(self.stream.fileno()), self.part.stat()
        except OSError as error:
            raise _disk_error(error) from error
        if not os.path.samestat(written, found) or found.st_size != self.header.nbytes:
            log.error("%s is not the file that was written; it is thrown away", self.part)
            self.part.unlink(missing_ok=True)
            raise transient("the file changed while it was written; the upload starts again")

    def _flush(self) -> None:
        try:
            self.stream.flush()
            os.fsync(self.stream.fileno())
        except OSError as error:
            raise _disk_error(error) from error


def _disk_error(error: OSError) -> UploadRefused:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return transient("no disk space left on the server")
    return transient(f"cannot write the file: {error.strerror}")


def _complete(part: Path, target: Path, mode: int) -> None:
    os.chmod(part, mode)
    # link() fails if the target exists, where rename() would replace it.
    with contextlib.suppress(FileExistsError):
        os.link(part, target)
    part.unlink()
    sync_folder(target.parent)


class UploadStore:
    """The project's upload hierarchy. One process writes it; in that process, one thread per name.

    Every method may be called from any thread: whoever touches the part files of a name claims it first.
    """

    def __init__(self, tree: ProjectTree) -> None:
        self.tree = tree
        self.completed_mode = tree.config.fuh_set_completed_permission or COMPLETED_MODE
        self.min_free_bytes = tree.config.gt_upload_min_free_mb * 1e6
        self._claims: dict[str, Claim] = {}
        self._lock = threading.Lock()  # of the claims; never held while files are touched

    def size(self, name: str) -> int:
        """Bytes that need not be sent again. UploadRefused (transient) if there is no room for more.

        A part file that has its full length but was not finished (the server died in between) is finished
        here: a client that hears the full length takes the upload for done.
        """
        if self.tree.is_triggered("stop_upload"):
            raise transient("uploads are stopped for maintenance")
        target = self.tree.upload_path(name)
        if self._is_complete(name, target):
            return target.stat().st_size
        if self._free_bytes() < self.min_free_bytes:
            raise transient("no disk space left on the server")
        with self._claimed(name):
            return self._claimed_size(target)

    def _claimed_size(self, target: Path) -> int:
        if target.exists():
            return target.stat().st_size
        for part in self._parts(target):
            length, (nbytes, md5) = part.stat().st_size, _part_facts(part)
            if length < nbytes:
                return length
            if length == nbytes and signing.file_md5(part) == md5:
                _complete(part, target, self.completed_mode)
                return nbytes
            part.unlink()
        return 0

    def begin(self, header: UploadHeader) -> Upload | None:
        """Open the upload; None if the complete file is already here. UploadRefused otherwise."""
        if self.tree.is_triggered("stop_upload"):
            raise transient("uploads are stopped for maintenance")
        target = self.tree.upload_path(header.name)
        if self._is_complete(header.name, target):
            return None
        claim = self._claim(header.name)
        try:
            upload = None if target.exists() else self._open(claim, header, target)
        except BaseException:
            claim.release()
            raise
        if upload is None:
            claim.release()
        return upload

    def _open(self, claim: Claim, header: UploadHeader, target: Path) -> Upload:
        resumed = header.offset > 0
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            part = self._part_for(header, target)
            stream = part.open("ab" if resumed else "xb")
        except OSError as error:
            raise _disk_error(error) from error
        return Upload(self, claim, header, target, part, stream, header.offset, None if resumed else hashlib.md5())

    def _is_complete(self, name: str, target: Path) -> bool:
        """Whether the file is in its place for good.

        In this order: a file that appeared under a claim is durable only when that claim has been given back.
        """
        if not target.exists():
            return False
        with self._lock:
            return name not in self._claims

    def _claim(self, name: str) -> Claim:
        """UploadRefused (transient) if another thread has the name."""
        claim = Claim(self, name)
        with self._lock:
            if self._claims.setdefault(name, claim) is not claim:
                raise transient("the file is being uploaded by another connection")
        return claim

    def _release(self, claim: Claim) -> None:
        with self._lock:
            if self._claims.get(claim.name) is claim:
                del self._claims[claim.name]

    @contextlib.contextmanager
    def _claimed(self, name: str) -> Iterator[None]:
        claim = self._claim(name)
        try:
            yield
        finally:
            claim.release()

    def _part_for(self, header: UploadHeader, target: Path) -> Path:
        """The part file, exactly `offset` bytes long."""
        wanted = target.with_name(f"{target.name}.{header.nbytes}.{header.md5}.part")
        for part in self._parts(target):
            if part != wanted or header.offset == 0:
                # Another content under the same name, or the client starts again: never splice the two.
                part.unlink()
        length = wanted.stat().st_size if wanted.exists() else 0
        if length != header.offset:
            raise transient(f"the file has {length} bytes here, cannot continue at offset {header.offset}")
        return wanted

    def _parts(self, target: Path) -> list[Path]:
        """Part files of a target: NAME.NBYTES.MD5.part, so that each says what it will become."""
        if not target.parent.is_dir():
            return []
        pattern = re.compile(re.escape(target.name) + r"\.\d+\.[0-9a-f]{32}\.part")
        return [path for path in target.parent.iterdir() if pattern.fullmatch(path.name)]

    def remove(self, name: str) -> None:
        """Delete a file and what is left of unfinished uploads of it; nothing there is no error.

        Raises BlockingIOError while it is being uploaded: it would come back after its deletion.
        """
        target = self.tree.upload_path(name)
        try:
            with self._claimed(name):
                for path in (target, *self._parts(target)):
                    path.unlink(missing_ok=True)
        except UploadRefused:
            raise BlockingIOError(errno.EAGAIN, "the file is being uploaded", str(target)) from None

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self.tree.config.upload_dir).free


def _part_facts(part: Path) -> tuple[int, str]:
    _, nbytes, md5, _ = part.name.rsplit(".", 3)
    return int(nbytes), md5
