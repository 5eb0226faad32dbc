"""Codecs: bounds of the error, equal bytes from equal replicas, and odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from boinc_project.contract.canonical import Taker
from boinc_project.contract.codecs import CODES_SUFFIX, SCALES_SUFFIX, Codec, method
from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType

FLOATS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7),
    elements=st.floats(-(2.0**90), 2.0**90, width=32),
)
BLOCKS = st.integers(1, 40)


def types_of(tensors: dict[str, Any]) -> dict[str, TensorType]:
    return {name: TensorType(array.dtype.name, array.shape) for name, array in tensors.items()}


def round_trip(codec: Codec, tensors: dict[str, Any]) -> dict[str, Any]:
    types = types_of(tensors)
    coded = codec.encode(tensors)
    wanted = codec.encoded_types(types)
    assert {n: (a.dtype.name, a.shape) for n, a in coded.items()} == {n: (t.dtype, t.shape) for n, t in wanted.items()}
    return codec.decode(coded, types)


@given(FLOATS)
def test_dense_keeps_every_bit(array: Any) -> None:
    found = round_trip(Codec("dense"), {"gradient/w": array})["gradient/w"]
    assert found.tobytes() == array.tobytes()


@given(FLOATS, BLOCKS)
def test_int8_is_within_half_a_code_of_the_block_s_largest_value(array: Any, block: int) -> None:
    found = round_trip(Codec("int8", block), {"gradient/w": array})["gradient/w"]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    flat, decoded = array.reshape(-1).astype(np.float64), found.reshape(-1).astype(np.float64)
    for start in range(0, flat.size, block):
        piece = flat[start : start + block]
        top = np.abs(piece).max()
        # Half a code, a rounding of the division, and what subnormal scales lose (smallest float32: 1.4e-45).
        allowed = 0.5 * top / 127 * (1 + 1e-5) + 128 * 1.5e-45
        assert np.abs(decoded[start : start + block] - piece).max() <= allowed


@given(FLOATS, BLOCKS)
def test_decoded_values_encode_to_themselves_within_rounding(array: Any, block: int) -> None:
    codec = Codec("int8", block)
    once = round_trip(codec, {"gradient/w": array})["gradient/w"]
    twice = round_trip(codec, {"gradient/w": once})["gradient/w"]
    np.testing.assert_allclose(twice, once, rtol=1e-6, atol=1e-42)


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -3e-42])
def test_blocks_of_zeros_and_of_the_smallest_numbers_decode_without_warning_to_almost_zero(value: float) -> None:
    array = np.full(300, value, np.float32)
    found = round_trip(Codec("int8", 256), {"w": array})["w"]
    assert np.abs(found.astype(np.float64) - array).max() <= 128 * 1.5e-45


@given(FLOATS, st.one_of(BLOCKS, st.just(1 << 20)), st.sampled_from(["int8", "dense"]), st.integers(1, 100))
def test_decoding_in_pieces_gives_every_bit_of_decoding_at_once(array: Any, block: int, kind: str, size: int) -> None:
    codec = Codec(kind, block)
    types = types_of({"w": array})
    coded = codec.encode({"w": array})
    found = np.zeros(array.size, np.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(method, "PIECE_ELEMENTS", size)
        for where, values in codec.in_pieces(coded, "w", types["w"]):
            found[where] = values
    assert found.tobytes() == codec.decode(coded, types)["w"].tobytes()


def test_one_large_value_does_not_blur_the_other_blocks() -> None:
    array = np.full(96, 1e-3, np.float32)
    array[40] = 1e6
    found = round_trip(Codec("int8", 32), {"w": array})["w"]
    np.testing.assert_allclose(found[:32], 1e-3, rtol=1e-6)
    np.testing.assert_allclose(found[64:], 1e-3, rtol=1e-6)
    assert found[40] == np.float32(1e6)


@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_replicas_of_equal_bits_encode_to_equal_bytes_whatever_their_memory_layout(kind: str) -> None:
    array = np.random.default_rng(0).standard_normal((33, 65)).astype(np.float32)
    codec = Codec(kind, 64)
    plain = codec.encode({"w": array})
    strided = codec.encode({"w": np.asfortranarray(array)})
    for name, expected in plain.items():
        assert np.ascontiguousarray(strided[name]).tobytes() == expected.tobytes()


def test_replicas_that_differ_in_the_last_bits_decode_within_1e_4_of_each_other() -> None:
    generator = np.random.default_rng(1)
    one = generator.standard_normal(100_000).astype(np.float32)
    other = (one * (1 + 3e-7 * generator.standard_normal(one.size))).astype(np.float32)
    codec = Codec("int8", 256)
    a, b = (round_trip(codec, {"w": each})["w"] for each in (one, other))
    assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a)


def test_tensors_that_are_not_float32_travel_as_they_are() -> None:
    counter = np.array(7, np.int64)
    codec = Codec("int8")
    assert set(codec.encode({"n": counter, "w": np.ones(3, np.float32)})) == {
        "n",
        "w" + CODES_SUFFIX,
        "w" + SCALES_SUFFIX,
    }
    assert round_trip(codec, {"n": counter})["n"] == 7


@pytest.mark.parametrize(
    "document",
    [
        {"kind": "topk", "block": 256, "compression": "zstd"},
        {"kind": "fp4", "block": 17, "compression": "zstd"},
        {"kind": "sign", "block": 256, "compression": "zstd"},
        {"kind": "qsgd", "block": 256, "levels": 0, "compression": "zstd"},
        {"kind": "top-k", "block": 256, "share": 0, "values": "int8", "compression": "zstd"},
        {"kind": "top-k", "block": 256, "share": 2, "values": "int8", "compression": "zstd"},
        {"kind": "top-k", "block": 256, "share": 0.1, "values": "sign", "compression": "zstd"},
        {"kind": "random-k", "block": 256, "values": "dense", "compression": "zstd"},
        {"kind": "low-rank", "rank": 0, "iterations": 1, "compression": "zstd"},
        {"kind": "low-rank", "rank": 4, "iterations": 9, "compression": "zstd"},
        {"kind": "int8", "block": 0, "compression": "zstd"},
        {"kind": "int8", "block": 2**40, "compression": "zstd"},
        {"kind": "int8", "block": 256, "compression": "gzip"},
        {"kind": "int8", "block": 256},
        {"kind": "int8", "block": 256, "compression": "zstd", "seed": 1},
    ],
)
def test_unknown_codecs_and_parameters_out_of_bounds_are_refused(document: dict[str, Any]) -> None:
    with pytest.raises(ContractError):
        Codec.from_document(Taker(document, "codec", ContractError))


@given(st.sampled_from(["dense", "int8"]), st.integers(1, 1 << 20), st.sampled_from(["zstd", "none"]))
def test_a_codec_is_read_back_from_its_document(kind: str, block: int, compression: str) -> None:
    codec = Codec(kind, block, compression)
    assert Codec.from_document(Taker(codec.to_document(), "codec", ContractError)) == codec
