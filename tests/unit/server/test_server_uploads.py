"""Reading upload requests byte by byte, and what the store refuses."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boinc_project import signing
from boinc_project.project_tree import ProjectTree
from boinc_project.server.uploads import (
    MAX_HEADER_BYTES,
    HeaderReader,
    SizeQuery,
    Status,
    UploadHeader,
    UploadRefused,
    UploadStore,
    check_certificate,
    format_reply,
    parse_upload,
)
from tests.server_project import make_project, wire_body

RECORDED = wire_body("upload.request")
EMPTY = wire_body("upload-zero-bytes.request")


@pytest.fixture
def tree(tmp_path: Path) -> ProjectTree:
    return make_project(tmp_path / "project")


def header(**fields: Any) -> UploadHeader:
    content = b"0123456789"
    values = {"name": "w_0_0_r1_0", "nbytes": 10, "md5": hashlib.md5(content).hexdigest(), "offset": 0}
    return UploadHeader(**{"signature": "", "max_nbytes": 100, **values, **fields})


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_recorded_upload_is_read_in_pieces_of_any_size(size: int) -> None:
    reader, rest = HeaderReader(), b""
    found = None
    for start in range(0, len(RECORDED), size):
        piece = RECORDED[start : start + size]
        if found is None:
            found = reader.feed(piece)
            if found is not None:
                rest = found[1]
        else:
            rest += piece
    assert found is not None
    read = found[0]
    assert isinstance(read, UploadHeader)
    assert (read.name, read.nbytes, read.offset, read.max_nbytes) == ("w_1_0_r322077834_0", 25, 0, 5000000)
    assert hashlib.md5(rest).hexdigest() == read.md5
    assert read.signature == ""


def test_recorded_empty_upload_is_read() -> None:
    found = HeaderReader().feed(EMPTY)
    assert found is not None and isinstance(found[0], UploadHeader)
    assert found[0].nbytes == 0 and found[1] == b""


def test_file_bytes_may_look_like_tags() -> None:
    content = b"<data>\n</get_file_size><name>x</name>"
    found = HeaderReader().feed(RECORDED[: RECORDED.index(b"<data>\n") + 7] + content)
    assert found is not None and found[1] == content


def test_size_query_is_recognised() -> None:
    body = b"<data_server_request>\n    <get_file_size>w_0_0_r1_0</get_file_size>\n</data_server_request>\n"
    assert HeaderReader().feed(body) == (SizeQuery("w_0_0_r1_0"), b"")


BROKEN = [
    (b"<name>w_1_0_r322077834_0</name>", b"", "Missing name"),
    (b"<nbytes>25</nbytes>", b"", "nbytes"),
    (b"<nbytes>25<", b"<nbytes>-25<", "nbytes"),
    (b"<nbytes>25<", b"<nbytes>nan<", "nbytes"),
    (b"<nbytes>25<", b"<nbytes>99999999999999999999<", "nbytes"),
    (b"<offset>0<", b"<offset>-1<", "offset"),
    (b"<md5_cksum>cac45132042eb5e8a938e5a80e382258<", b"<md5_cksum>../x<", "md5_cksum"),
    (b"<data>\n", b"", "Missing <data> tag"),
]


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_broken_header_is_refused_for_ever(old: bytes, new: bytes, message: str) -> None:
    assert old in RECORDED
    reader = HeaderReader()
    with pytest.raises(UploadRefused, match=message) as refusal:
        if reader.feed(RECORDED.replace(old, new)) is None:
            reader.end()
    assert refusal.value.status == Status.PERMANENT


def test_endless_header_is_refused_without_being_kept() -> None:
    reader = HeaderReader()
    with pytest.raises(UploadRefused):
        for _ in range(MAX_HEADER_BYTES):
            reader.feed(b" " * 100)


def test_decimals_and_an_offset_beyond_the_end() -> None:
    text = RECORDED[: RECORDED.index(b"<data>")]
    assert parse_upload(text.replace(b">25<", b">25.000000<")).nbytes == 25
    with pytest.raises(UploadRefused) as refusal:
        parse_upload(text.replace(b"<offset>0<", b"<offset>26<"))
    assert refusal.value.status == Status.TRANSIENT


def test_certificate_binds_name_and_size() -> None:
    key = signing.PrivateKey.generate()
    signature = key.sign(signing.upload_certificate_text("w_0_0_r1_0", 100))
    good = header(signature="".join(signature.split()), max_nbytes=100)
    check_certificate(good, key.public)
    for bad in (
        replace(good, name="w_0_0_r1_1"),
        replace(good, max_nbytes=101),
        replace(good, signature=""),
        replace(good, signature="zz"),
        replace(good, signature="f" * 256),
    ):
        with pytest.raises(UploadRefused) as refusal:
            check_certificate(bad, key.public)
        assert refusal.value.status == Status.PERMANENT


def test_reply_is_the_recorded_one() -> None:
    assert format_reply(Status.OK) == wire_body("upload.reply")
    assert format_reply(Status.OK, file_size=0).strip() == wire_body("get-file-size-reply.reply").strip()


# The store.


def send(store: UploadStore, head: UploadHeader, content: bytes) -> None:
    upload = store.begin(head)
    if upload is not None:
        upload.write(content)
        upload.finish()


def test_upload_resumes_at_the_exact_length_only(tree: ProjectTree) -> None:
    store, head = UploadStore(tree), header()
    upload = store.begin(head)
    assert upload is not None
    upload.write(b"0123")
    upload.abandon()
    assert store.size(head.name) == 4
    for offset in (3, 5):
        with pytest.raises(UploadRefused) as refusal:
            store.begin(replace(head, offset=offset))
        assert refusal.value.status == Status.TRANSIENT
        assert store.size(head.name) == 4
    send(store, replace(head, offset=4), b"456789")
    assert tree.upload_path(head.name).read_bytes() == b"0123456789"
    assert store.begin(head) is None


def test_bytes_beyond_the_announced_length_are_dropped(tree: ProjectTree) -> None:
    send(UploadStore(tree), header(), b"0123456789 and more")
    assert tree.upload_path("w_0_0_r1_0").read_bytes() == b"0123456789"


def test_names_that_are_prefixes_of_each_other_do_not_mix(tree: ProjectTree) -> None:
    store = UploadStore(tree)
    folder = tree.upload_path("w_0").parent
    folder.mkdir(parents=True)
    md5 = "0" * 32
    (folder / f"w_0.5.{md5}.part").write_bytes(b"abc")
    (folder / f"w_0.1.{md5}.5.{md5}.part").write_bytes(b"abcd")
    assert store.size("w_0") == 3


def test_full_disk_while_writing_is_transient_and_keeps_the_part(tree: ProjectTree) -> None:
    class Full(io.RawIOBase):
        def write(self, _data: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    store = UploadStore(tree)
    upload = store.begin(header())
    assert upload is not None
    upload.write(b"0123")
    upload.stream.flush()
    real, upload.stream = upload.stream, Full()  # type: ignore[assignment]
    with pytest.raises(UploadRefused, match="disk space") as refusal:
        upload.write(b"4567")
    assert refusal.value.status == Status.TRANSIENT
    real.close()
    upload.abandon()
    assert store.size("w_0_0_r1_0") == 4


def test_removal_takes_unfinished_parts_along(tree: ProjectTree) -> None:
    store, head = UploadStore(tree), header()
    upload = store.begin(head)
    assert upload is not None
    upload.write(b"01")
    upload.abandon()
    store.remove(head.name)
    store.remove(head.name)
    assert store.size(head.name) == 0
    assert not list(tree.upload_path(head.name).parent.iterdir())


# Many connections at once.

ROUNDS, SENDERS = 40, 8


def shaken(seed: int, size: int) -> bytes:
    return hashlib.shake_256(b"%d" % seed).digest(size)


def outcome(store: UploadStore, head: UploadHeader, content: bytes) -> str:
    try:
        upload = store.begin(head)
        if upload is None:
            return "complete"
        try:
            for start in range(0, len(content), 1000):
                upload.write(content[start : start + 1000])
            upload.finish()
        finally:
            upload.abandon()
    except UploadRefused as refusal:
        assert refusal.status == Status.TRANSIENT
        return str(refusal)
    return "stored"


@pytest.mark.parametrize("same", [True, False], ids=["one content", "eight contents"])
def test_of_simultaneous_uploads_of_a_name_exactly_one_is_stored(
    tree: ProjectTree, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = UploadStore._parts

    def slowly(store: UploadStore, target: Path) -> list[Path]:
        found = listed(store, target)
        os.sched_yield()
        return found

    monkeypatch.setattr(UploadStore, "_parts", slowly)
    store = UploadStore(tree)
    contents = [shaken(0 if same else seed, 5000 if same else 5000 + seed) for seed in range(SENDERS)]
    for number in range(ROUNDS):
        name, barrier, told = f"w_{number}_0_r1_0", threading.Barrier(SENDERS), [""] * SENDERS

        def work(each: int, name: str = name, barrier: threading.Barrier = barrier, told: list[str] = told) -> None:
            content = contents[each]
            head = header(name=name, nbytes=len(content), md5=hashlib.md5(content).hexdigest())
            barrier.wait()
            told[each] = outcome(store, head, content)

        threads = [threading.Thread(target=work, args=(each,)) for each in range(SENDERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told.count("stored") == 1
        assert set(told) <= {"stored", "complete", "the file is being uploaded by another connection"}
        target = tree.upload_path(name)
        assert target.read_bytes() == contents[told.index("stored")]
        assert store.size(name) == target.stat().st_size
        assert not list(target.parent.glob(f"{name}.*")), "no part is left over"


def test_name_stays_taken_until_its_own_upload_gives_it_back(tree: ProjectTree) -> None:
    store, head = UploadStore(tree), header()
    first = store.begin(head)
    assert first is not None
    first.write(b"0123")
    first.abandon()
    second = store.begin(head)
    assert second is not None
    first.abandon()
    for refused in (lambda: store.begin(head), lambda: store.size(head.name)):
        with pytest.raises(UploadRefused, match="another connection") as refusal:
            refused()
        assert refusal.value.status == Status.TRANSIENT
    with pytest.raises(BlockingIOError):
        store.remove(head.name)
    second.write(b"0123456789")
    second.finish()
    assert store.size(head.name) == 10
    store.remove(head.name)


def test_upload_that_cannot_begin_leaves_the_name_free(tree: ProjectTree) -> None:
    store, head = UploadStore(tree), header()
    with pytest.raises(UploadRefused, match="cannot continue"):
        store.begin(replace(head, offset=4))
    assert store.size(head.name) == 0
    send(store, head, b"0123456789")
    assert store.begin(head) is None
    assert store.size(head.name) == 10


@pytest.mark.parametrize("change", ["longer", "shorter", "another", "gone"])
def test_part_that_is_not_what_was_written_never_becomes_the_file(tree: ProjectTree, change: str) -> None:
    store, head = UploadStore(tree), header()
    upload = store.begin(head)
    assert upload is not None
    upload.write(b"0123456789")
    upload.stream.flush()
    if change == "longer":
        upload.part.write_bytes(b"0123456789+")
    elif change == "shorter":
        upload.part.write_bytes(b"012345678")
    else:
        upload.part.unlink()
        if change == "another":
            upload.part.write_bytes(b"9876543210")
    with pytest.raises(UploadRefused) as refusal:
        upload.finish()
    assert refusal.value.status == Status.TRANSIENT
    assert not tree.upload_path(head.name).exists()
    assert store.size(head.name) == 0
    send(store, head, b"0123456789")
    assert tree.upload_path(head.name).read_bytes() == b"0123456789"


def test_resumed_upload_is_hashed_with_the_part_that_it_continues(tree: ProjectTree) -> None:
    store, head = UploadStore(tree), header()
    upload = store.begin(head)
    assert upload is not None
    upload.write(b"xxxx")
    upload.abandon()
    with pytest.raises(UploadRefused, match="MD5 mismatch"):
        send(store, replace(head, offset=4), b"456789")
    assert store.size(head.name) == 0
    other = replace(head, md5=hashlib.md5(b"9876543210").hexdigest())
    upload = store.begin(head)
    assert upload is not None
    upload.write(b"0123")
    upload.abandon()
    with pytest.raises(UploadRefused, match="cannot continue"):
        send(store, replace(other, offset=4), b"543210")
    send(store, other, b"9876543210")
    assert tree.upload_path(head.name).read_bytes() == b"9876543210"
