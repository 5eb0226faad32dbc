"""Tensor files: round trips, and every malformed file refused by the name of its fault."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load as safetensors_load

from boinc_project.contract import tensorfile
from boinc_project.contract.errors import ContractError
from boinc_project.contract.tensorfile import FileTensor, TensorFileError

DTYPES = ("float32", "int64", "int32", "int8", "uint8", "bool")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)
NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=12).filter(
    lambda name: ".." not in name and not name.startswith("/") and name != "__metadata__"
)


def raw(header: object, body: bytes = b"") -> bytes:
    """A file with this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8), **more: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **more}


def fault_of(data: bytes, expected: Any = None) -> str:
    with pytest.raises(TensorFileError) as caught:
        tensorfile.from_bytes(data, expected)
    return caught.value.fault


@given(st.dictionaries(NAMES, ARRAYS, max_size=4), st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3))
def test_what_is_written_is_read_back_bit_for_bit(tensors: dict[str, Any], metadata: dict[str, int]) -> None:
    data = tensorfile.to_bytes(tensors, metadata)
    assert data == tensorfile.to_bytes(dict(reversed(tensors.items())), metadata)
    found = tensorfile.from_bytes(data, {n: FileTensor(a.dtype.name, a.shape) for n, a in tensors.items()})
    assert found.metadata == metadata
    assert set(found.tensors) == set(tensors)
    for name, array in tensors.items():
        read = found.tensors[name]
        assert (read.dtype, read.shape, read.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(st.dictionaries(st.one_of(NAMES, st.text(min_size=1, max_size=5)), ARRAYS, max_size=6), st.integers(0, 9))
def test_writing_in_pieces_gives_the_bytes_of_the_safetensors_package(tensors: dict[str, Any], number: int) -> None:
    tensors.pop("__metadata__", None)
    assert b"".join(tensorfile.chunks(tensors, {"k": number})) == tensorfile.to_bytes(tensors, {"k": number})


def test_the_files_are_plain_safetensors() -> None:
    data = tensorfile.to_bytes({"a": np.arange(6, dtype=np.float32).reshape(2, 3)}, {"k": 1})
    assert np.array_equal(safetensors_load(data)["a"], np.arange(6).reshape(2, 3))


def test_the_tensors_read_are_read_only_views_of_the_bytes() -> None:
    data = tensorfile.to_bytes({"a": np.zeros(4, np.float32)})
    array = tensorfile.from_bytes(data).tensors["a"]
    assert not array.flags.writeable and not array.flags.owndata


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "truncated"),
        (b"\0" * 7, "truncated"),
        (struct.pack("<Q", 2**63), "header_too_long"),
        (struct.pack("<Q", 200 << 20) + b"{}", "header_too_long"),
        (struct.pack("<Q", 50) + b"{}", "truncated"),
        (raw(b"not json"), "json"),
        (raw([1, 2]), "type"),
        (
            raw(b'{"a":' + json.dumps(entry()).encode() + b',"a":' + json.dumps(entry()).encode() + b"}"),
            "duplicate_key",
        ),
        (raw({"a": entry()}, b"\0" * 7), "truncated"),
        (raw({"a": entry(shape=[1000, 1000], offsets=[0, 16])}, b"\0" * 16), "offsets"),
        (raw({"a": entry(offsets=[0, 2**63])}, b"\0" * 8), "type"),
        (raw({"a": entry(offsets=[8, 0])}, b"\0" * 8), "offsets"),
        (raw({"a": entry(offsets=[0])}, b"\0" * 8), "offsets"),
        (raw({"a": entry(offsets=[0, 8, 8])}, b"\0" * 8), "type"),
        (raw({"a": entry(), "b": entry(offsets=[4, 12])}, b"\0" * 12), "offsets"),
        (raw({"a": entry(), "b": entry(offsets=[0, 8])}, b"\0" * 8), "offsets"),
        (raw({"a": entry(), "b": entry(offsets=[12, 20])}, b"\0" * 20), "offsets"),
        (raw({"a": entry()}, b"\0" * 9), "trailing_bytes"),
        (raw({}, b"\0"), "trailing_bytes"),
        (raw({"a": entry(dtype="F64", offsets=[0, 16])}, b"\0" * 16), "dtype"),
        (raw({"a": entry(dtype="NOPE")}, b"\0" * 8), "dtype"),
        (raw({"a": entry(dtype=7)}, b"\0" * 8), "type"),
        (raw({"a": entry(dtype="BOOL", offsets=[0, 2])}, b"\1\2"), "dtype"),
        (raw({"a": entry(shape=[-2], offsets=[0, 8])}, b"\0" * 8), "type"),
        (raw({"a": entry(shape=[2**62, 4], offsets=[0, 8])}, b"\0" * 8), "type"),
        (raw({"a": entry(shape=[2**40, 2**40, 2**40], offsets=[0, 8])}, b"\0" * 8), "offsets"),
        (raw({"a": entry(shape=[0, 2**40, 2**40, 2**40], offsets=[0, 0])}), "shape"),
        (raw({"a": entry(shape=[1] * 17, offsets=[0, 4])}, b"\0" * 4), "type"),
        (raw({"a": entry(extra=1)}, b"\0" * 8), "unknown_key"),
        (raw({"a": {"dtype": "F32", "shape": [2]}}, b"\0" * 8), "missing_key"),
        (raw({"a": 3}), "type"),
        (raw({"../../x": entry()}, b"\0" * 8), "name"),
        (raw({"/etc/passwd": entry()}, b"\0" * 8), "name"),
        (raw({"a\nb": entry()}, b"\0" * 8), "name"),
        (raw({"": entry()}, b"\0" * 8), "name"),
        (raw({"a" * 501: entry()}, b"\0" * 8), "name"),
        (raw(b'{"\\ud800":' + json.dumps(entry()).encode() + b"}", b"\0" * 8), "name"),
        (raw({"__metadata__": [1]}), "type"),
        (raw({"__metadata__": {"boinc_train": 3}}), "type"),
        (raw({"__metadata__": {"boinc_train": "[1]"}}), "type"),
        (raw({"__metadata__": {"boinc_train": "{"}}), "json"),
        (raw({"__metadata__": {"boinc_train": "\ud800"}}), "json"),
        (raw({f"t{n}": 0 for n in range(60_000)}), "too_many_tensors"),
    ],
)
def test_malformed_files_are_refused_by_name(data: bytes, fault: str) -> None:
    assert fault_of(data) == fault


@pytest.mark.parametrize(
    ("expected", "fault"),
    [
        ({}, "extra_tensor"),
        ({"a": FileTensor("float32", (2,)), "b": FileTensor("float32", (2,))}, "missing_tensor"),
        ({"a": FileTensor("int32", (2,))}, "dtype"),
        ({"a": FileTensor("float32", (1, 2))}, "shape"),
    ],
)
def test_files_with_other_tensors_than_expected_are_refused_by_name(expected: Any, fault: str) -> None:
    assert fault_of(tensorfile.to_bytes({"a": np.zeros(2, np.float32)}), expected) == fault


JSON_VALUES = st.sampled_from(
    [None, True, 0, -1, 2**40, 2**63, 1.5, "", "F32", "I8", "x", [], [0], [0, 8], [2], [2, 2], {}, {"a": 1}]
)


@settings(max_examples=400)
@given(st.data())
def test_mutated_files_are_refused_or_read_and_nothing_else_happens(data: Any) -> None:
    tensors = {"a": np.ones((2, 3), np.float32), "b": np.zeros((), np.int64), "c": np.zeros((0, 4), np.uint8)}
    good = tensorfile.to_bytes(tensors, {"k": 1})
    length = int.from_bytes(good[:8], "little")
    header, body = json.loads(good[8 : 8 + length]), good[8 + length :]
    name = data.draw(st.sampled_from(sorted(header)))
    if data.draw(st.booleans()):
        header[name] = data.draw(JSON_VALUES)
    else:
        key = data.draw(st.sampled_from([*sorted(header[name]), "more"]))
        header[name][key] = data.draw(JSON_VALUES)
    damaged = bytearray(raw(header, body + data.draw(st.binary(max_size=3))))
    if data.draw(st.booleans()):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        tensorfile.from_bytes(bytes(damaged))
        tensorfile.from_bytes(bytes(damaged), {n: FileTensor(a.dtype.name, a.shape) for n, a in tensors.items()})
    except ContractError:
        pass


def test_a_file_above_the_limit_is_not_even_opened(tmp_path: Path) -> None:
    path = tmp_path / "big.safetensors"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse
    with pytest.raises(TensorFileError) as caught:
        tensorfile.read(path, max_bytes=1000)
    assert caught.value.fault == "too_large"
