"""The update file: what is written is read, and what a stranger wrote is checked first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project.contract import canonical, tensorfile
from boinc_project.contract.codecs import Codec
from boinc_project.contract.errors import ContractError, InvalidResult
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import (
    FORMAT,
    MAX_METADATA_BYTES,
    judged_metrics,
    max_update_bytes,
    read_update,
    squared_norm,
    write_update,
)

DIGEST = "d" * 64
TYPES = {
    "gradient/w": TensorType("float32", (5, 7)),
    "buffer/count": TensorType("int64", ()),
    "buffer/mean": TensorType("float32", (7,)),
    "metric/loss": TensorType("float32", (3,)),
}
CODECS = [Codec(kind, 16, compression) for kind in ("dense", "int8") for compression in ("zstd", "none")]
PLAIN = Codec("dense", 16, "none")


def tensors(**changes: Any) -> dict[str, Any]:
    generator = np.random.default_rng(0)
    made: dict[str, Any] = {
        "gradient/w": generator.standard_normal((5, 7)).astype(np.float32),
        "buffer/count": np.array(3, np.int64),
        "buffer/mean": np.ones(7, np.float32),
        "metric/loss": np.array([3, 2, 1], np.float32),
    }
    return {**made, **{name.replace("_", "/", 1): value for name, value in changes.items()}}


def file_of(codec: Codec = PLAIN, metadata: dict[str, Any] | None = None, **changes: Any) -> bytes:
    """A file that `write_update` would not write: no checks."""
    values = tensors(**changes)
    coded = codec.encode({"gradient/w": values.pop("gradient/w")})
    header = {"format": FORMAT, "microtask": DIGEST} if metadata is None else metadata
    data = tensorfile.to_bytes({**coded, **values}, header)
    return canonical.compress(data) if codec.compression == "zstd" else data


def fault_of(data: bytes, codec: Codec = PLAIN) -> str:
    with pytest.raises(InvalidResult) as caught:
        read_update(data, TYPES, codec, DIGEST)
    return caught.value.fault


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_metrics_alone_are_those_of_the_whole_update(codec: Codec) -> None:
    data = write_update(tensors(), TYPES, {"microtask": DIGEST}, codec)
    found = judged_metrics(data, codec)
    assert {name: array.tolist() for name, array in found.items()} == {"metric/loss": [3, 2, 1]}


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_an_update_is_read_back_with_its_metadata(codec: Codec) -> None:
    data = write_update(tensors(), TYPES, {"microtask": DIGEST, "backend": "numpy"}, codec)
    assert len(data) <= max_update_bytes(TYPES, codec)
    found = read_update(data, TYPES, codec, DIGEST)
    assert found.metadata["backend"] == "numpy"
    assert {n: (a.dtype.name, a.shape) for n, a in found.tensors.items()} == {
        n: (t.dtype, t.shape) for n, t in TYPES.items()
    }
    expected = tensors()
    tolerance = 0.0 if codec.kind == "dense" else np.abs(expected["gradient/w"]).max() / 250
    np.testing.assert_allclose(found.tensors["gradient/w"], expected["gradient/w"], rtol=0, atol=tolerance)
    for name in set(TYPES) - {"gradient/w"}:
        np.testing.assert_array_equal(found.tensors[name], expected[name])


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_equal_updates_are_written_as_equal_bytes(codec: Codec) -> None:
    metadata = {"microtask": DIGEST}
    assert write_update(tensors(), TYPES, metadata, codec) == write_update(tensors(), TYPES, metadata, codec)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38, -1e25, 1.1e18])
@pytest.mark.parametrize("name", ["gradient_w", "buffer_mean", "metric_loss"])
def test_values_that_are_not_finite_or_whose_square_would_overflow_are_neither_written_nor_read(
    name: str, value: float
) -> None:
    array = tensors()[name.replace("_", "/")].copy()
    array.flat[2] = value
    with pytest.raises(ContractError) as caught:
        write_update(tensors(**{name: array}), TYPES, {"microtask": DIGEST}, PLAIN)
    assert caught.value.fault == "not_finite"
    assert fault_of(file_of(**{name: array})) == "not_finite"
    assert fault_of(file_of(Codec("dense", 16, "zstd"), **{name: array}), Codec("dense", 16, "zstd")) == "not_finite"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_int8_scales_that_are_not_finite_are_refused(value: float) -> None:
    codec = Codec("int8", 16, "none")
    values = tensors()
    coded = codec.encode({"gradient/w": values.pop("gradient/w")})
    coded["gradient/w#scales"][1] = value
    data = tensorfile.to_bytes({**coded, **values}, {"format": FORMAT, "microtask": DIGEST})
    assert fault_of(data, codec) == "not_finite"


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", "empty"),
        (bytes(10_000_000), "too_large"),
        (file_of()[:-1], "truncated"),
        (file_of()[: len(file_of()) // 2], "truncated"),
        (file_of() + b"\0", "trailing_bytes"),
        (file_of(metadata={"format": FORMAT, "microtask": "e" * 64}), "wrong_microtask"),
        (file_of(metadata={"format": FORMAT}), "wrong_microtask"),
        (file_of(metadata={"microtask": DIGEST}), "format"),
        (
            file_of(metadata={"format": FORMAT, "microtask": DIGEST, "x": "y" * 68_000}),
            "too_large",
        ),
        (file_of(gradient_w=np.zeros((7, 5), np.float32)), "shape"),
        (file_of(buffer_count=np.array(3, np.int32)), "dtype"),
        (file_of(gradient_x=np.zeros(1, np.float32)), "extra_tensor"),
        (tensorfile.to_bytes({}, {"format": FORMAT, "microtask": DIGEST}), "missing_tensor"),
        (canonical.compress(file_of()), "header_too_long"),
    ],
)
def test_files_that_are_not_the_update_asked_for_are_refused_by_name(data: bytes, fault: str) -> None:
    assert fault_of(data) == fault


def test_a_plain_file_where_a_compressed_one_is_due_is_refused() -> None:
    assert fault_of(file_of(), Codec("dense", 16, "zstd")) == "zstd"


def test_metadata_too_long_is_not_written() -> None:
    with pytest.raises(ContractError, match="metadata is too long"):
        write_update(tensors(), TYPES, {"log": "x" * MAX_METADATA_BYTES}, PLAIN)


def test_tensors_of_another_shape_or_dtype_are_not_written() -> None:
    with pytest.raises(ContractError, match="gradient/w"):
        write_update(tensors(gradient_w=np.zeros((5, 8), np.float32)), TYPES, {}, PLAIN)
    with pytest.raises(ContractError, match="buffer/count"):
        write_update(tensors(buffer_count=np.array(3, np.int32)), TYPES, {}, PLAIN)


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_no_update_with_the_longest_metadata_is_larger_than_the_bound(codec: Codec) -> None:
    noise = np.random.default_rng(3).bytes(MAX_METADATA_BYTES)
    text = "".join(chr(33 + byte % 90) for byte in noise)[: MAX_METADATA_BYTES - 200]
    text = text.replace("\\", "/").replace('"', "'")
    data = write_update(tensors(), TYPES, {"microtask": DIGEST, "log": text}, codec)
    assert len(data) <= max_update_bytes(TYPES, codec)
    read_update(data, TYPES, codec, DIGEST)


@settings(max_examples=200)
@given(st.data())
def test_an_update_with_a_damaged_byte_is_refused_as_invalid_or_read_within_its_types(data: Any) -> None:
    codec = data.draw(st.sampled_from(CODECS))
    damaged = bytearray(write_update(tensors(), TYPES, {"microtask": DIGEST}, codec))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = read_update(bytes(damaged), TYPES, codec, DIGEST)
    except InvalidResult:
        return
    for name, array in found.tensors.items():
        assert (array.dtype.name, array.shape) == (TYPES[name].dtype, TYPES[name].shape)
        assert array.dtype.kind != "f" or np.isfinite(array).all()


def test_the_squared_norm_of_large_values_does_not_overflow() -> None:
    assert squared_norm(np.full((2, 2), 3e38, np.float32)) == pytest.approx(4 * 9e76)
