"""What all codecs have in common: round trips, equal replicas, no bias where a paper says so, hostile files."""

from __future__ import annotations

import hashlib
import math
import tracemalloc
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from boinc_project.contract import tensorfile
from boinc_project.contract.canonical import Taker
from boinc_project.contract.codecs import KINDS, PARAMETERS, VALUE_KINDS, Codec, CodecSeed, method
from boinc_project.contract.codecs.bits import pack_indices, unpack_indices
from boinc_project.contract.codecs.dct_top_k import dct, inverse_dct
from boinc_project.contract.codecs.fp4 import nearest
from boinc_project.contract.codecs.low_rank import LowRank, orthonormal
from boinc_project.contract.codecs.random_k import chosen
from boinc_project.contract.codecs.top_k import largest
from boinc_project.contract.errors import ContractError, InvalidResult
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import FORMAT, judged_metrics, open_update, read_update, write_update

CODECS = [
    Codec("dense"),
    Codec("int8", 32),
    Codec("fp4", 32),
    Codec("sign"),
    Codec("qsgd", 32),
    Codec("qsgd", 32, levels=100),
    Codec("random-k", share=0.1),
    Codec("random-k", 32, share=0.3, values="int8"),
    Codec("low-rank", rank=2),
    Codec("low-rank", rank=2, iterations=0),
    Codec("top-k", share=0.1),
    Codec("top-k", 32, share=0.01, values="fp4"),
    Codec("dct-top-k", share=0.1),
    Codec("dct-top-k", 32, share=0.01, values="int8"),
]
FLOATS = hnp.arrays(
    np.float32,
    st.one_of(
        hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9),
        st.sampled_from([(257,), (4097,), (8192,), (65, 70), (3, 5, 50), (1, 300), (300, 1), (64, 64)]),
    ),
    elements=st.floats(-(2.0**60), 2.0**60, width=32),
)
SEED = CodecSeed(7, 3, 2)


def label(value: Any) -> str:
    """A codec in a test's name: its kind and what is not by default."""
    if not isinstance(value, Codec):
        return str(value) if isinstance(value, int | float | str) else ""
    changed = [f"{f.name}={getattr(value, f.name)}" for f in fields(value)[1:-1] if getattr(value, f.name) != f.default]
    return " ".join([value.kind, *changed])


def types_of(tensors: Mapping[str, Any]) -> dict[str, TensorType]:
    return {name: TensorType(array.dtype.name, array.shape) for name, array in tensors.items()}


def decoded(codec: Codec, array: Any, name: str = "delta/w") -> Any:
    tensors = {name: array}
    types = types_of(tensors)
    coded = codec.encode(tensors)
    wanted = codec.encoded_types(types)
    assert {n: (a.dtype.name, a.shape) for n, a in coded.items()} == {n: (t.dtype, t.shape) for n, t in wanted.items()}
    codec.check(coded, types)
    return codec.decode(coded, types)[name]


def normal(*shape: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def distance(one: Any, other: Any) -> float:
    return float(np.linalg.norm(one.astype(np.float64) - other) / np.linalg.norm(one.astype(np.float64)))


# --- all of them ------------------------------------------------------------------------------------------------------


def test_every_codec_is_tested_here() -> None:
    assert {codec.kind for codec in CODECS} == set(KINDS)


@pytest.mark.parametrize("codec", CODECS, ids=label)
@settings(max_examples=40, deadline=None)
@given(array=FLOATS, size=st.sampled_from([1, 7, 100, 1 << 15]))
def test_arrays_of_every_shape_are_decoded_at_once_and_in_pieces_to_the_same_bits(
    codec: Codec, array: Any, size: int
) -> None:
    codec = codec.seeded(SEED)
    whole = decoded(codec, array)
    assert (whole.dtype, whole.shape) == (np.float32, array.shape)
    assert np.isfinite(whole).all()
    coded, found = codec.encode({"delta/w": array}), np.full(array.size, np.nan, np.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(method, "PIECE_ELEMENTS", size)
        for where, values in codec.in_pieces(coded, "delta/w", TensorType("float32", array.shape)):
            assert np.isnan(found[where]).all(), "no place is filled twice"
            found[where] = values
    assert found.tobytes() == whole.tobytes()


@pytest.mark.parametrize("codec", CODECS, ids=label)
@pytest.mark.parametrize("shape", [(), (0,), (0, 5), (1,), (300,), (70, 80)])
def test_zeros_stay_zeros(codec: Codec, shape: tuple[int, ...]) -> None:
    assert not decoded(codec, np.zeros(shape, np.float32)).any()


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_replicas_encode_alike_whatever_the_memory_layout_and_whole_numbers_travel_as_they_are(codec: Codec) -> None:
    array, counter = normal(130, 70), np.array(7, np.int64)
    one, other = (codec.seeded(SEED).encode({"w": each, "n": counter}) for each in (array, np.asfortranarray(array)))
    assert {n: a.tobytes() for n, a in one.items()} == {n: np.ascontiguousarray(a).tobytes() for n, a in other.items()}
    assert one["n"] is counter


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_a_codec_is_read_back_from_its_document_which_holds_its_own_parameters_alone(codec: Codec) -> None:
    document = codec.to_document()
    assert set(document) == {"kind", "compression", *PARAMETERS[codec.kind]}
    assert Codec.from_document(Taker(document, "codec", ContractError)) == codec


@pytest.mark.parametrize(
    ("kind", "parameters"),
    [("dense", {"share": 0.5}), ("int8", {"levels": 9}), ("sign", {"block": 16}), ("low-rank", {"values": "int8"})],
)
def test_a_parameter_that_the_codec_does_not_have_is_refused(kind: str, parameters: Any) -> None:
    with pytest.raises(ContractError, match=f"codec {kind} has no {next(iter(parameters))}"):
        Codec(kind, **parameters)


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_an_update_is_written_and_read_with_every_codec(codec: Codec) -> None:
    codec = codec.seeded(SEED)
    tensors = {"delta/w": normal(130, 70), "delta/b": normal(70), "metric/loss": np.ones(3, np.float32)}
    types = types_of(tensors)
    data = write_update(tensors, types, {"microtask": "m"}, codec)
    whole = read_update(data, types, codec, "m").tensors
    opened = open_update(data, types, codec, "m")
    assert judged_metrics(data, codec)["metric/loss"].tolist() == [1, 1, 1]
    for name in tensors:
        pieces = np.concatenate([np.array(values) for _, values in opened.pieces(name)])
        assert pieces.tobytes() == whole[name].tobytes()


# Updates of two honest replicas, apart by a millionth (one gradient), a ten-thousandth and a thousandth. What codecs
# make of it follows the square root of the distance, since what changes is the *number* of codes that fall otherwise.
@pytest.mark.parametrize("apart", [1e-6, 1e-4, 1e-3])
@pytest.mark.parametrize(
    "codec",
    [*(Codec(kind) for kind in KINDS), Codec("qsgd", 512), *(Codec("top-k", values=v) for v in VALUE_KINDS)],
    ids=label,
)
def test_honest_replicas_stay_as_close_as_the_codec_says(codec: Codec, apart: float) -> None:
    array = normal(512, 512)
    other = array + np.float32(apart) * normal(512, 512, seed=1)
    found = distance(*(decoded(codec, each) for each in (array, other)))
    # Few codes differ at a millionth: their number is as good as random, and may be five times the mean.
    assert found <= codec.method.spread(apart) * (2.3 if apart < 1e-5 else 1.5)
    assert codec.method.spread(apart) >= apart


# --- bytes that must not change ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codec", "digest"),
    [
        (Codec("dense", 256, "zstd"), "330eef98dde8f99c"),
        (Codec("int8", 256, "zstd"), "b396c4c3cc905a1b"),
        (Codec("int8", 100, "none"), "e21dcc5cdcfc672a"),
    ],
    ids=label,
)
def test_files_and_documents_of_the_first_two_codecs_have_the_bytes_they_always_had(codec: Codec, digest: str) -> None:
    values = (np.arange(3000, dtype=np.float32) % 611 - 300) * np.float32(1e-3)
    tensors = {"gradient/w": values.reshape(60, 50), "metric/loss": np.arange(3, dtype=np.float32)}
    data = write_update(tensors, types_of(tensors), {"microtask": "m"}, codec)
    assert hashlib.sha256(data).hexdigest()[:16] == digest
    assert codec.to_document() == {"kind": codec.kind, "block": codec.block, "compression": codec.compression}


# --- no bias ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "codec", [Codec("qsgd", 64, levels=2), Codec("qsgd", 64, levels=20), Codec("random-k", share=0.1)], ids=label
)
def test_the_mean_over_many_seeds_is_the_update(codec: Codec) -> None:
    array = normal(20, 16)
    draws = np.stack([decoded(codec.seeded(CodecSeed(seed, 5, 1)), array) for seed in range(2000)]).astype(np.float64)
    # Of 320 means one is beyond four standard errors in 50 such tests; their average is a much sharper test.
    errors = (draws.mean(axis=0) - array) / (draws.std(axis=0) / math.sqrt(len(draws)) + 1e-9)
    assert np.abs(errors).max() < 4.5
    assert abs(errors.mean()) * math.sqrt(errors.size) < 4


def test_random_k_has_the_variance_of_its_paper() -> None:
    array, share = normal(32, 32), 1 / 16
    codec = Codec("random-k", share=share)
    squares = [
        float(((decoded(codec.seeded(CodecSeed(seed)), array) - array).astype(np.float64) ** 2).sum())
        for seed in range(400)
    ]
    assert codec.method.variance == 1 / share - 1
    wanted = (1 / share - 1) * float((array.astype(np.float64) ** 2).sum())
    assert abs(np.mean(squares) - wanted) < 4 * np.std(squares) / math.sqrt(len(squares))


def test_qsgd_stays_within_the_variance_bound_of_its_paper() -> None:
    array, block, levels = normal(64, 64), 64, 4
    codec = Codec("qsgd", block, levels=levels)
    squares = [
        float(((decoded(codec.seeded(CodecSeed(seed)), array) - array).astype(np.float64) ** 2).sum())
        for seed in range(30)
    ]
    assert codec.method.variance == min(block / levels**2, math.sqrt(block) / levels)
    assert max(squares) < codec.method.variance * float((array.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("codec", CODECS, ids=label)
def test_a_step_shortened_by_the_variance_does_not_point_away_from_the_update(codec: Codec) -> None:
    """||C(x) / (1 + w) - x||^2 <= w / (1 + w) ||x||^2 on average: less than without any step."""
    array = normal(48, 64)
    left = [
        float(((decoded(codec.seeded(CodecSeed(seed)), array) / (1 + codec.method.variance) - array) ** 2).sum())
        for seed in range(20)
    ]
    assert np.mean(left) < float((array**2).sum())


def test_a_fixed_projection_keeps_its_share_of_the_update_and_is_linear() -> None:
    array, other = normal(12, 30), normal(12, 30, seed=1)
    codec = Codec("low-rank", rank=3, iterations=0)
    draws = np.stack([decoded(codec.seeded(CodecSeed(seed)), array) for seed in range(2000)]).astype(np.float64)
    errors = (draws.mean(axis=0) - array * 3 / 30) / (draws.std(axis=0) / math.sqrt(len(draws)))
    assert np.abs(errors).max() < 4.5 and abs(errors.mean()) * math.sqrt(errors.size) < 4
    seeded = codec.seeded(SEED)
    total = decoded(seeded, array) + decoded(seeded, other)
    np.testing.assert_allclose(decoded(seeded, array + other), total, atol=1e-5)


# --- who draws what ---------------------------------------------------------------------------------------------------


def test_slots_versions_and_tensors_draw_apart_and_replicas_alike() -> None:
    array = normal(64, 64)
    codec = Codec("random-k", share=0.05)

    def mask(seed: CodecSeed, name: str = "delta/w") -> bytes:
        return (decoded(codec.seeded(seed), array, name) != 0).tobytes()

    base = mask(CodecSeed(1, 2, 3))
    assert base == mask(CodecSeed(1, 2, 3))
    others = [mask(CodecSeed(*each)) for each in ((2, 2, 3), (1, 3, 3), (1, 2, 4))] + [mask(CodecSeed(1, 2, 3), "v")]
    assert len({base, *others}) == 5


def test_the_start_of_low_rank_is_orthonormal_and_the_same_for_all_slots_of_a_version() -> None:
    codec = LowRank(5)
    q = codec.start(200, "delta/w", CodecSeed(1, 2, 3))
    np.testing.assert_allclose(q.T @ q, np.eye(5), atol=1e-6)
    assert q.tobytes() == codec.start(200, "delta/w", CodecSeed(1, 2, 9)).tobytes()
    assert q.tobytes() != codec.start(200, "delta/w", CodecSeed(1, 3, 3)).tobytes()


# --- arithmetic, one by one -------------------------------------------------------------------------------------------


@given(st.floats(0, 1, width=32))
def test_fp4_takes_the_nearest_of_its_numbers(ratio: float) -> None:
    numbers = [0.0, *(2.0**-k for k in range(6, -1, -1))]
    code = int(nearest(np.array([ratio], np.float32))[0])
    assert abs(numbers[code] - ratio) == min(abs(each - ratio) for each in numbers)


def test_sign_sends_the_mean_magnitude() -> None:
    found = decoded(Codec("sign"), np.array([3, -1, 0, -4], np.float32))
    assert found.tolist() == [2, -2, 2, -2]


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_low_rank_gives_matrices_of_that_rank_back(rank: int) -> None:
    array = normal(60, rank) @ normal(rank, 90, seed=1)
    assert distance(array, decoded(Codec("low-rank", rank=rank), array)) < 1e-5
    assert distance(array, decoded(Codec("low-rank", rank=2 * rank), array)) < 1e-5, "surplus columns do no harm"


def test_more_iterations_come_closer_to_the_best_of_that_rank() -> None:
    array = normal(80, 80) @ np.diag(0.8 ** np.arange(80)).astype(np.float32) @ normal(80, 80, seed=1)
    values = np.linalg.svd(array, compute_uv=False)
    best = float(np.sqrt((values[4:] ** 2).sum() / (values**2).sum()))
    found = [distance(array, decoded(Codec("low-rank", rank=4, iterations=k), array)) for k in (1, 2, 6)]
    assert found[0] > found[1] > found[2]
    assert best < found[2] < 1.05 * best


def test_low_rank_leaves_whole_what_it_would_not_shorten() -> None:
    codec = LowRank(4)
    assert not any(codec.saves(shape) for shape in ((), (1000,), (8, 8), (3, 1000), (0, 50)))
    assert codec.saves((64, 3, 3, 3)) and codec.saves((10, 64)) and LowRank(4, 0).saves((3, 1000))


def test_orthonormal_columns_are_made_without_those_that_depend_on_others() -> None:
    column = normal(50, 1)
    found = orthonormal(np.concatenate([column, 2 * column, normal(50, 1, seed=2)], axis=1))
    np.testing.assert_allclose(found.T @ found, np.diag([1, 0, 1]), atol=1e-6)


def test_top_k_keeps_the_largest_of_each_chunk_and_the_first_of_equal_ones() -> None:
    array = normal(10_000)
    found = decoded(Codec("top-k", share=0.01), array)
    for start in (0, 4096, 8192):
        part, kept = array[start : start + 4096], found[start : start + 4096]
        count = round(0.01 * part.size)
        assert np.flatnonzero(kept).tolist() == sorted(np.argsort(-np.abs(part), kind="stable")[:count].tolist())
        assert (kept[kept != 0] == part[kept != 0]).all()
    assert largest(np.array([[1, -2, 2, 0, -2]], np.float32), 2).tolist() == [[1, 2]]


@given(hnp.arrays(np.int64, st.integers(0, 50), elements=st.integers(0, 4095)))
def test_indices_are_packed_into_twelve_bits(indices: Any) -> None:
    packed = pack_indices(indices)
    assert packed.size == math.ceil(1.5 * indices.size)
    assert unpack_indices(packed, indices.size).tolist() == indices.tolist()


@pytest.mark.parametrize("shape", [(64, 64), (10, 64), (1, 1), (7, 3)])
def test_the_cosine_transform_is_orthonormal_and_undone(shape: tuple[int, int]) -> None:
    tiles = normal(3, *shape)
    height, width = (dct(size) for size in shape)
    np.testing.assert_allclose(height @ height.T, np.eye(shape[0]), atol=1e-12)
    np.testing.assert_allclose(
        inverse_dct((height @ tiles @ width.T).astype(np.float32)), tiles, atol=2e-6 * np.abs(tiles).max() * 8
    )


def test_the_inverse_transform_does_not_depend_on_the_order_of_its_sums() -> None:
    spectrum = normal(4, 64, 64) * np.float32(1e-3)
    fixed = [dct(64)[order] for order in (slice(None), slice(None, None, -1))]
    # No entry lies so near the middle between two whole numbers that another computer's cosine would move it.
    middle = np.abs((fixed[0] * (1 << 20)) % 1 - 0.5)
    assert middle.min() > 1e-7
    whole = np.rint(fixed[0] * (1 << 20))
    exponents = np.frexp(np.abs(spectrum).max(axis=(1, 2)))[1][:, None, None]
    numbers = np.rint(np.ldexp(spectrum.astype(np.float64), 23 - exponents))
    assert np.array_equal(whole.T @ numbers, whole[::-1].T @ numbers[:, ::-1])
    most = np.abs(whole).sum(axis=0).max()
    assert 2.0**23 * most < 2.0**53, "no sum of the first product is rounded"
    assert (2.0**23 * most / 2.0**20) * most < 2.0**53, "nor of the second"
    assert inverse_dct(spectrum).tobytes() == inverse_dct(np.asfortranarray(spectrum)).tobytes()


def test_runs_of_random_k_cover_everything_once() -> None:
    places, lengths = chosen(1001, 7, 0, 7, 5)
    assert lengths.sum() == 1001 and set(lengths.tolist()) <= {143, 144}
    edges = np.concatenate([[0], np.cumsum(lengths)])
    assert ((places >= edges[:-1]) & (places < edges[1:])).all()
    parts = [chosen(1001, 7, first, min(first + 3, 7), 5)[0] for first in (0, 3, 6)]
    assert np.concatenate(parts).tolist() == places.tolist()


# --- hostile files ----------------------------------------------------------------------------------------------------


def fault_of(codec: Codec, **changes: Any) -> str:
    """The fault of a file in which parts of delta/w (30 x 11) are replaced: `codes=...` stands for delta/w#codes."""
    tensors = {"delta/w": normal(30, 11), "metric/loss": np.ones(2, np.float32)}
    types = types_of(tensors)
    coded = codec.encode({"delta/w": tensors["delta/w"]})
    for part, change in changes.items():
        name = "delta/w" + ("" if part == "whole" else f"#{part}")
        coded[name] = change(np.array(coded[name], order="C"))
    data = tensorfile.to_bytes({**coded, "metric/loss": tensors["metric/loss"]}, {"format": FORMAT, "microtask": "m"})
    faults = []
    for reader in (read_update, open_update):
        with pytest.raises(InvalidResult) as caught:
            reader(data, types, replace(codec, compression="none"), "m")
        faults.append(caught.value.fault)
    assert faults[0] == faults[1]
    return faults[0]


def put(index: int, value: Any) -> Any:
    def change(array: Any) -> Any:
        array.reshape(-1)[index] = value
        return array

    return change


NONE = {"compression": "none"}
ODD = Codec("top-k", share=0.1, **NONE)  # 33 of 330 values: an odd number of indices


@pytest.mark.parametrize(
    ("codec", "changes", "fault"),
    [
        (Codec("fp4", 32, **NONE), {"scales": put(1, np.nan)}, "not_finite"),
        (Codec("fp4", 32, **NONE), {"scales": lambda a: a[:-1]}, "shape"),
        (Codec("fp4", 32, **NONE), {"codes": lambda a: a.astype(np.int8)}, "dtype"),
        (Codec("sign", **NONE), {"scales": put(0, np.inf)}, "not_finite"),
        (Codec("sign", **NONE), {"bits": put(-1, 255)}, "codes"),  # 330 values leave six bits free
        (Codec("sign", **NONE), {"bits": lambda a: np.append(a, np.uint8(0))}, "shape"),
        (Codec("qsgd", 32, levels=5, **NONE), {"codes": put(0, 0x06)}, "codes"),
        (Codec("qsgd", 32, levels=5, **NONE), {"codes": put(0, 0x80)}, "codes"),
        (Codec("qsgd", 32, levels=100, **NONE), {"codes": put(0, -128)}, "codes"),
        (Codec("qsgd", 32, **NONE), {"scales": put(0, np.nan)}, "not_finite"),
        (Codec("random-k", share=0.1, **NONE), {"whole": put(0, np.nan)}, "not_finite"),
        (Codec("random-k", share=0.1, **NONE), {"whole": lambda a: a[:-1]}, "shape"),
        (Codec("low-rank", rank=2, **NONE), {"p": put(0, np.inf)}, "not_finite"),
        (Codec("low-rank", rank=2, **NONE), {"q": lambda a: a.T}, "shape"),
        (ODD, {"indices": lambda a: pack_indices(np.full(33, 5))}, "codes"),
        (ODD, {"indices": lambda a: pack_indices(np.arange(33)[::-1])}, "codes"),
        (ODD, {"indices": lambda a: pack_indices(np.arange(298, 331))}, "codes"),
        (ODD, {"indices": lambda a: pack_indices(np.r_[0:32, 4095])}, "codes"),
        (ODD, {"indices": lambda a: pack_indices(np.arange(33)) | put(-1, 0xF0)(np.zeros_like(a))}, "codes"),
        (ODD, {"indices": lambda a: a[:-1]}, "shape"),
        (Codec("dct-top-k", share=0.1, **NONE), {"indices": lambda a: pack_indices(np.arange(33)[::-1])}, "codes"),
        (Codec("dct-top-k", share=0.1, **NONE), {"indices": lambda a: pack_indices(np.arange(298, 331))}, "codes"),
        (Codec("dct-top-k", share=0.1, **NONE), {"whole": put(0, np.nan)}, "not_finite"),
    ],
    ids=label,
)
def test_codes_that_nobody_honest_makes_are_refused(codec: Codec, changes: Any, fault: str) -> None:
    assert fault_of(codec, **changes) == fault


@pytest.mark.parametrize("kind", ["fp4", "qsgd"])
def test_a_code_beside_an_odd_last_one_is_refused(kind: str) -> None:
    codec = Codec(kind, 32, "none")
    array = normal(33)
    coded, types = codec.encode({"delta/w": array}), {"delta/w": TensorType("float32", (33,))}
    coded["delta/w#codes"][-1] |= 0x10
    with pytest.raises(InvalidResult):
        codec.check(coded, types)


@pytest.mark.parametrize("codec", [Codec("random-k", share=0.1), Codec("low-rank", rank=2)], ids=label)
def test_parts_that_decode_beyond_all_bounds_are_refused(codec: Codec) -> None:
    codec = replace(codec, compression="none")
    tensors = {"delta/w": normal(30, 11)}
    coded = {name: np.full_like(array, 1e30) for name, array in codec.encode(tensors).items()}
    data = tensorfile.to_bytes(coded, {"format": FORMAT, "microtask": "m"})
    with pytest.raises(InvalidResult) as caught:
        read_update(data, types_of(tensors), codec, "m")
    assert caught.value.fault == "not_finite"


@pytest.mark.parametrize("kind", KINDS)
def test_neither_encoding_nor_decoding_in_pieces_needs_a_second_copy_of_a_large_tensor(kind: str) -> None:
    array, codec = normal(1024, 2048), Codec(kind)
    tracemalloc.start()
    try:
        coded = codec.encode({"delta/w": array})
        encoding = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in codec.in_pieces(coded, "delta/w", TensorType("float32", array.shape)):
            pass
        decoding = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert encoding < 1.3 * array.nbytes
    assert decoding < 0.8 * array.nbytes
