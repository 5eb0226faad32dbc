"""Named tensors in one file: safetensors, read with strict bounds.

What it is: writing through the safetensors package, and a reader of our own for strangers' files that
checks everything before it trusts or allocates anything: header length, duplicate keys, names, dtypes,
shapes, offsets without gap or overlap, no trailing bytes. What it is not: it never unpickles, and a
tensor that the reader returns is a view into the given bytes, so nothing larger than the file is made.
Format: https://github.com/huggingface/safetensors (8-byte little-endian header length, JSON, data).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save as safetensors_save

from boinc_project.contract import canonical, whole_file
from boinc_project.contract.errors import ContractError

MAX_HEADER_BYTES = 16 << 20
MAX_TENSORS = 50_000
METADATA_KEY = "boinc_train"  # our metadata is one JSON string under this key, so that its order is fixed

Array = npt.NDArray[Any]

_DTYPES: Mapping[str, str] = {
    "F32": "float32",
    "I64": "int64",
    "I32": "int32",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
_FILE_ORDER = ("I64", "F32", "I32", "I8", "U8", "BOOL")
_LITTLE_ENDIAN = {code: np.dtype(dtype).newbyteorder("<") for code, dtype in _DTYPES.items()}
FILE_ITEM_BYTES: Mapping[str, int] = {"float32": 4, "int64": 8, "int32": 4, "int8": 1, "uint8": 1, "bool": 1}
_ITEM_BYTES: Mapping[str, int] = {"F32": 4, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}


class Described(Protocol):
    """Anything with a dtype and a shape: a TensorType of the opset, or a FileTensor."""

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...


class FileTensor(NamedTuple):
    """dtype and shape of a tensor in a file; int8, which no graph computes with, occurs in files alone."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = FILE_ITEM_BYTES[self.dtype]
        for dim in self.shape:
            count *= dim
        return count


class TensorFileError(ContractError):
    """A tensor file is not what it should be; `fault` names how."""


@dataclass(frozen=True)
class TensorFile:
    """What a file holds: arrays by name (read-only views) and our metadata."""

    tensors: Mapping[str, Array]
    metadata: Mapping[str, Any]


def to_bytes(tensors: Mapping[str, Array], metadata: Mapping[str, Any] | None = None) -> bytes:
    """The file's bytes: the same tensors and metadata give the same bytes."""
    arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    text = canonical.dumps(dict(metadata or {})).decode("ascii")
    return bytes(safetensors_save(arrays, {METADATA_KEY: text}))


def chunks(tensors: Mapping[str, Array], metadata: Mapping[str, Any] | None = None) -> Iterator[bytes | memoryview]:
    """The same bytes as `to_bytes`, piece by piece and without a copy of the tensors."""
    arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in tensors.items()}
    own = {"__metadata__": {METADATA_KEY: canonical.dumps(dict(metadata or {})).decode("ascii")}}
    layout = _layout(tuple((name, FileTensor(array.dtype.name, array.shape)) for name, array in arrays.items()))
    text = json.dumps({**own, **layout.header}, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in layout.header:
        array = arrays[name].astype(arrays[name].dtype.newbyteorder("<"), copy=False)
        if array.size:
            yield array.reshape(-1).view(np.uint8).data


class _Layout(NamedTuple):
    """How our own writer lays out a file of these tensors: their header entries in order, the same as the text
    that ends the header, and the bytes of data."""

    header: dict[str, dict[str, Any]]
    text: bytes
    nbytes: int


@functools.lru_cache(maxsize=64)
def _layout(tensors: tuple[tuple[str, Described], ...]) -> _Layout:
    codes = {dtype: code for code, dtype in _DTYPES.items()}
    header: dict[str, dict[str, Any]] = {}
    at = 0
    # The order of the safetensors package: larger alignment first, then by name.
    for name, kind in sorted(tensors, key=lambda each: (_FILE_ORDER.index(codes[each[1].dtype]), each[0])):
        end = at + FILE_ITEM_BYTES[kind.dtype] * math.prod(kind.shape)
        header[name] = {"dtype": codes[kind.dtype], "shape": list(kind.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
    return _Layout(header, b"," + text[1:].encode(), at)


def _as_written(
    view: memoryview, expected: Mapping[str, Described], what: str, fault_type: type[ContractError]
) -> TensorFile | None:
    """A file that is exactly as our own writer makes it, which nearly all are; None: look closer."""
    layout = _layout(tuple(expected.items()))
    length = int.from_bytes(view[:8], "little")
    if len(view) != 8 + length + layout.nbytes or length > MAX_HEADER_BYTES:
        return None
    text = bytes(view[8 : 8 + length]).rstrip(b" ")
    if not text.endswith(layout.text):
        return None
    # Without the tensors' entries, and closed, the header must be an object with nothing but metadata.
    rest = canonical.loads(text[: -len(layout.text)] + b"}", what, fault_type)
    if not isinstance(rest, dict) or list(rest) != ["__metadata__"]:
        return None
    body = view[8 + length :]
    found: dict[str, Array] = {}
    for name, entry in layout.header.items():
        start, end = entry["data_offsets"]
        if entry["dtype"] == "BOOL":
            return None
        found[name] = np.frombuffer(body[start:end], _LITTLE_ENDIAN[entry["dtype"]]).reshape(entry["shape"])
    return TensorFile(found, _metadata(rest["__metadata__"], what, fault_type))


def from_bytes(
    data: bytes | memoryview,
    expected: Mapping[str, Described] | None = None,
    what: str = "tensor file",
    fault_type: type[ContractError] = TensorFileError,
) -> TensorFile:
    """Read a file; with `expected`, exactly these names, dtypes and shapes must be there.

    Raises `fault_type` whose `fault` is one of: truncated, header_too_long, json, duplicate_key, type,
    unknown_key, missing_key, name, dtype, shape, offsets, trailing_bytes, missing_tensor, extra_tensor,
    too_many_tensors, too_large (the header has more values than any honest one).
    """
    view = memoryview(data)
    if expected and (known := _as_written(view, expected, what, fault_type)) is not None:
        return known
    header, body = _split(view, what, fault_type)
    text = header.pop("__metadata__", {})
    if len(header) > MAX_TENSORS:
        raise fault_type(f"{what}: {len(header)} tensors, more than {MAX_TENSORS}", fault="too_many_tensors")
    if expected is not None:
        missing = sorted(set(expected) - set(header))
        extra = sorted(set(header) - set(expected))
        if missing:
            raise fault_type(f"{what}: tensor {missing[0]!r} is missing", fault="missing_tensor")
        if extra:
            raise fault_type(f"{what}: tensor {extra[0][:120]!r} does not belong there", fault="extra_tensor")
    spans: list[tuple[int, int, str]] = []
    tensors: dict[str, Array] = {}
    for name, entry in header.items():
        place = f"{what}: tensor {name[:120]!r}"
        if not name or len(name) > 500 or not name.isprintable() or ".." in name or name.startswith("/"):
            raise fault_type(f"{place} has an unusable name", fault="name")
        take = canonical.Taker(entry, place, fault_type)
        take.only("dtype", "shape", "data_offsets")
        code = take.text("dtype", 16)
        if code not in _DTYPES:
            raise fault_type(f"{place} has dtype {code!r}, which this project does not use", fault="dtype")
        shape = take.integers("shape", 0, 2**40, 16)
        offsets = take.integers("data_offsets", 0, 2**62, 2)
        if expected is not None:
            wanted = expected[name]
            if _DTYPES[code] != wanted.dtype:
                raise fault_type(f"{place} has dtype {_DTYPES[code]}, not {wanted.dtype}", fault="dtype")
            if shape != wanted.shape:
                raise fault_type(f"{place} has shape {list(shape)}, not {list(wanted.shape)}", fault="shape")
        size = _ITEM_BYTES[code]
        for dim in shape:
            size *= dim
        if len(offsets) != 2 or offsets[1] - offsets[0] != size:
            raise fault_type(f"{place}: its offsets do not hold {size} bytes", fault="offsets")
        if offsets[1] > len(body):
            raise fault_type(f"{place}: the file ends before it", fault="truncated")
        spans.append((offsets[0], offsets[1], name))
        flat = np.frombuffer(body[offsets[0] : offsets[1]], dtype=_LITTLE_ENDIAN[code])
        if code == "BOOL" and flat.size and int(flat.view(np.uint8).max()) > 1:
            raise fault_type(f"{place}: a boolean is neither 0 nor 1", fault="dtype")
        try:
            tensors[name] = flat.reshape(shape)
        except ValueError as error:  # an empty tensor whose other dimensions no array can have
            raise fault_type(f"{place} has the impossible shape {list(shape)}", fault="shape") from error
    _check_spans(spans, len(body), what, fault_type)
    return TensorFile(tensors, _metadata(text, what, fault_type))


def write(path: Path, tensors: Mapping[str, Array], metadata: Mapping[str, Any] | None = None) -> str:
    """Write a file so that it is whole or absent; returns its SHA-256."""
    data = to_bytes(tensors, metadata)
    whole_file.write_bytes(path, data)
    return hashlib.sha256(data).hexdigest()


def read(
    path: Path,
    expected: Mapping[str, Described] | None = None,
    max_bytes: int | None = None,
    fault_type: type[ContractError] = TensorFileError,
) -> TensorFile:
    """Read a file from disk; `max_bytes` is checked before it is opened for reading."""
    size = path.stat().st_size
    if max_bytes is not None and size > max_bytes:
        raise fault_type(f"{path.name}: {size} bytes, more than {max_bytes}", fault="too_large")
    return from_bytes(path.read_bytes(), expected, path.name, fault_type)


def _split(view: memoryview, what: str, fault_type: type[ContractError]) -> tuple[dict[str, Any], memoryview]:
    if len(view) < 8:
        raise fault_type(f"{what}: {len(view)} bytes are too few for a tensor file", fault="truncated")
    length = int.from_bytes(view[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise fault_type(f"{what}: claims a header of {length} bytes", fault="header_too_long")
    if 8 + length > len(view):
        raise fault_type(f"{what}: ends inside its header", fault="truncated")
    header = canonical.loads(bytes(view[8 : 8 + length]), what, fault_type)
    if not isinstance(header, dict):
        raise fault_type(f"{what}: its header is not an object", fault="type")
    return header, view[8 + length :]


def _check_spans(
    spans: list[tuple[int, int, str]], body_bytes: int, what: str, fault_type: type[ContractError]
) -> None:
    """Tensors must follow one another without gap or overlap and end where the file ends."""
    at = 0
    for start, end, name in sorted(spans):
        if start != at:
            kind = "overlaps another" if start < at else "leaves a gap before it"
            raise fault_type(f"{what}: tensor {name[:120]!r} {kind}", fault="offsets")
        at = end
    if at != body_bytes:
        fault = "trailing_bytes" if at < body_bytes else "truncated"
        raise fault_type(f"{what}: {body_bytes} bytes of data where {at} are described", fault=fault)


def _metadata(text: Any, what: str, fault_type: type[ContractError]) -> Mapping[str, Any]:
    if not isinstance(text, dict) or not all(isinstance(each, str) for each in text.values()):
        raise fault_type(f"{what}: its metadata is not an object of strings", fault="type")
    own = text.get(METADATA_KEY)
    if own is None:
        return {}
    found = canonical.loads(own.encode("utf-8", "surrogatepass"), f"{what} metadata", fault_type)
    if not isinstance(found, dict):
        raise fault_type(f"{what}: its metadata is not an object", fault="type")
    return found
