"""Canonical JSON, bounded zstd, and the strict reader of small documents."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project.contract import canonical
from boinc_project.contract.errors import ContractError, InvalidResult

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


def fault_of(call: Any) -> str:
    with pytest.raises(ContractError) as caught:
        call()
    return caught.value.fault


@given(DOCUMENTS)
def test_every_document_is_read_back_as_it_was_written(document: Any) -> None:
    text = canonical.dumps(document)
    assert canonical.loads(text, "document") == document
    assert canonical.dumps(canonical.loads(text, "document")) == text


def test_equal_documents_have_equal_bytes_whatever_the_order_of_their_keys() -> None:
    assert canonical.dumps({"b": 1, "a": [1.5, "é"]}) == canonical.dumps({"a": [1.5, "é"], "b": 1})
    assert canonical.dumps({"b": 1, "a": "é"}) == b'{"a":"\\u00e9","b":1}'


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_numbers_that_json_cannot_carry_are_not_written(number: float) -> None:
    assert fault_of(lambda: canonical.dumps({"x": number})) == "number"


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b'{"a":1,"a":2}', "duplicate_key"),
        (b'{"a":{"b":1,"b":1}}', "duplicate_key"),
        (b"NaN", "number"),
        (b"[-Infinity]", "number"),
        (b"[1e999]", "number"),
        (b"[" + b"9" * 21 + b"]", "number"),
        (b"[" * 100_000 + b"]" * 100_000, "depth"),
        (b"[" * 2_000_000, "too_large"),
        (b"[" + b"{}," * 300_000 + b"{}]", "too_large"),
        (b"[" + b"0," * 1_500_000 + b"0]", "too_large"),
        (b'{"a":1', "json"),
        (b"\xff\xfe", "json"),
        (b"", "json"),
        (b"[1] [2]", "json"),
    ],
    ids=lambda value: value if isinstance(value, str) else repr(value[:12]),
)
def test_malformed_json_is_refused_by_name(text: bytes, fault: str) -> None:
    assert fault_of(lambda: canonical.loads(text, "document")) == fault


def test_refusals_are_of_the_type_that_the_caller_asks_for() -> None:
    with pytest.raises(InvalidResult, match=r"^update: the key 'a' appears twice$"):
        canonical.loads(b'{"a":1,"a":2}', "update", InvalidResult)


@given(st.binary(max_size=5000))
def test_compressed_bytes_are_the_same_every_time_and_expand_again(data: bytes) -> None:
    packed = canonical.compress(data)
    assert packed == canonical.compress(data)
    assert canonical.decompress(packed, len(data), "file") == data


def with_claimed_size(packed: bytes, size: int) -> bytes:
    """The same zstd frame with another content size in its header (RFC 8878: 8-byte field, no window byte)."""
    descriptor = 0b1110_0100  # content size of 8 bytes, single segment, checksum
    assert packed[4] & 0b0010_0100 == 0b0010_0100, "a single-segment frame with a checksum"
    width = {0: 1, 1: 2, 2: 4, 3: 8}[packed[4] >> 6]
    return packed[:4] + bytes([descriptor]) + size.to_bytes(8, "little") + packed[5 + width :]


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda p: with_claimed_size(p, 10 << 30), "too_large"),
        (lambda p: with_claimed_size(p, 999), "zstd"),
        (lambda p: with_claimed_size(p, 1001), "zstd"),
        (lambda p: p + b"\0", "trailing_bytes"),
        (lambda p: p + p, "trailing_bytes"),
        (lambda p: p[:-1], "truncated"),
        (lambda p: p[: len(p) // 2], "truncated"),
        (lambda p: p[:3], "zstd"),
        (lambda p: b"", "zstd"),
        (lambda p: b"PK\3\4" + p, "zstd"),
        (lambda p: p[:-1] + bytes([p[-1] ^ 1]), "zstd"),
        (lambda p: zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000)), "zstd"),
    ],
)
def test_damaged_or_lying_frames_are_refused_by_name(damage: Any, fault: str) -> None:
    data = bytes(range(250)) * 4
    packed = damage(canonical.compress(data))
    assert fault_of(lambda: canonical.decompress(packed, 2000, "file")) in (fault, "truncated")
    if fault != "zstd":
        assert fault_of(lambda: canonical.decompress(packed, 2000, "file")) == fault


def test_frame_within_its_stated_size_but_above_the_limit_is_refused_before_it_is_expanded() -> None:
    bomb = canonical.compress(bytes(50_000_000))
    assert len(bomb) < 10_000
    assert fault_of(lambda: canonical.decompress(bomb, 1_000_000, "file")) == "too_large"


@settings(max_examples=300)
@given(st.binary(max_size=200), st.data())
def test_flipping_any_byte_of_a_frame_is_refused_or_harmless(data: bytes, draw: Any) -> None:
    packed = bytearray(canonical.compress(data))
    place = draw.draw(st.integers(0, len(packed) - 1))
    packed[place] ^= draw.draw(st.integers(1, 255))
    with contextlib.suppress(ContractError):
        assert canonical.decompress(bytes(packed), 1000, "file") == data


@pytest.mark.parametrize(
    ("document", "read"),
    [
        ({"x": True}, lambda t: t.integer("x")),
        ({"x": 1.0}, lambda t: t.integer("x")),
        ({"x": 2**63}, lambda t: t.integer("x")),
        ({"x": -1}, lambda t: t.integer("x", 0)),
        ({"x": 1}, lambda t: t.boolean("x")),
        ({"x": 1}, lambda t: t.text("x")),
        ({"x": "aaa"}, lambda t: t.text("x", 2)),
        ({"x": [True]}, lambda t: t.integers("x")),
        ({"x": [1, 2, 3]}, lambda t: t.integers("x", limit=2)),
        ({"x": [None]}, lambda t: t.integers("x")),
        ({"x": [-1]}, lambda t: t.optional_integers("x")),
        ({"x": ["1"]}, lambda t: t.numbers("x")),
        ({"x": True}, lambda t: t.number("x")),
        ({"x": []}, lambda t: t.mapping("x")),
        ({"x": {}}, lambda t: list(t.items("x", 3))),
        ({"x": [1]}, lambda t: list(t.items("x", 3))),
        ({"x": [1]}, lambda t: t.object("x")),
    ],
)
def test_fields_of_the_wrong_type_are_refused_with_their_place(document: Any, read: Any) -> None:
    with pytest.raises(ContractError, match=r"^document") as caught:
        read(canonical.Taker(document, "document", ContractError))
    assert caught.value.fault == "type"


def test_missing_and_unknown_keys_are_named() -> None:
    take = canonical.Taker(json.loads('{"a": 1}'), "document", ContractError)
    assert fault_of(lambda: take.value("b")) == "missing_key"
    assert fault_of(lambda: take.only("b")) == "unknown_key"
    assert fault_of(lambda: canonical.Taker([], "document", ContractError)) == "type"
