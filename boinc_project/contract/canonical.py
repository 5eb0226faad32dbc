"""Canonical JSON, bounded zstd, and strict reading of small documents.

Canonical means: sorted keys, no blanks, ASCII, finite numbers, floats in Python's shortest round-trip
form. Two programs that hold equal documents write equal bytes, so digests can name them.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import zstandard

from boinc_project.contract.errors import ContractError

ZSTD_LEVEL = 6  # beyond 6 the files of this project gain under 1 % and take several times as long
MAX_OBJECTS = 200_000  # of one document; each costs about a microsecond to read
MAX_VALUES = 1_000_000
_FEED_BYTES = 1024  # four bytes of zstd can mean 128 KiB: at most 32 MiB appear between two checks


def dumps(document: Any) -> bytes:
    """The canonical JSON bytes; NaN and infinity are refused (ContractError)."""
    try:
        return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode()
    except ValueError as error:
        raise ContractError(f"a document holds a number that JSON cannot carry: {error}", fault="number") from error


def loads(text: bytes, what: str, fault_type: type[ContractError] = ContractError, max_values: int = MAX_VALUES) -> Any:
    """Parse JSON strictly: UTF-8, no duplicate keys, no NaN; depth, integers and numbers of values are bounded.

    Megabytes of `{},{},` would take seconds and gigabytes to parse, so their brackets and commas are counted
    first (also those within strings: the limits are far above what honest documents hold).
    """
    if text.count(b"{") > MAX_OBJECTS or text.count(b"[") > MAX_VALUES or text.count(b",") > max_values:
        raise fault_type(f"{what}: more than {MAX_OBJECTS} objects or {max_values} values", fault="too_large")

    try:
        return _STRICT.decode(text.decode("utf-8"))
    except _Unusable as error:
        raise fault_type(f"{what}: {error}", fault=error.fault) from error
    except RecursionError as error:
        raise fault_type(f"{what}: nested too deeply", fault="depth") from error
    except (ValueError, UnicodeDecodeError) as error:
        raise fault_type(f"{what}: not valid JSON ({error})", fault="json") from error


class _Unusable(Exception):
    """JSON that is well formed and still refused."""

    def __init__(self, message: str, fault: str) -> None:
        super().__init__(message)
        self.fault = fault


def _refused_constant(name: str) -> Any:
    raise _Unusable(f"{name} is not a number that JSON allows", fault="number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise _Unusable(f"the key {twice[:80]!r} appears twice", fault="duplicate_key")
    return found


def _bounded_int(digits: str) -> int:
    if len(digits) > 20:
        raise _Unusable(f"an integer has {len(digits)} digits", fault="number")
    return int(digits)


def _finite_float(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise _Unusable(f"the number {digits[:40]} is too large", fault="number")
    return number


#: One for all documents: making a decoder takes longer than decoding a small one.
_STRICT = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_refused_constant, parse_int=_bounded_int, parse_float=_finite_float
)


def compress(data: bytes) -> bytes:
    """One zstd frame that states its content size, with a checksum; the same bytes for the same input."""
    return zstandard.ZstdCompressor(level=ZSTD_LEVEL, write_checksum=True, write_content_size=True).compress(data)


def decompress(data: bytes, max_bytes: int, what: str, fault_type: type[ContractError] = ContractError) -> bytes:
    """Expand one zstd frame; more than `max_bytes`, a lying size or trailing bytes are refused.

    The declared size is checked before anything is allocated, so a small bomb costs nothing.
    """
    try:
        parameters = zstandard.get_frame_parameters(data)
    except zstandard.ZstdError as error:
        raise fault_type(f"{what}: not a zstd frame", fault="zstd") from error
    size = parameters.content_size
    if size == zstandard.CONTENTSIZE_UNKNOWN or size == zstandard.CONTENTSIZE_ERROR:
        raise fault_type(f"{what}: the zstd frame does not state its size", fault="zstd")
    if size > max_bytes:
        raise fault_type(f"{what}: expands to {size} bytes, more than {max_bytes}", fault="too_large")
    if parameters.window_size > max(2 * max_bytes, 1 << 23):
        raise fault_type(f"{what}: the zstd window is larger than the content", fault="zstd")
    if size:  # of a frame that claims to be empty, the package would not look at the rest
        with contextlib.suppress(zstandard.ZstdError):
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=size, allow_extra_data=False)
    return _decompressed_with_care(data, size, what, fault_type)


def _decompressed_with_care(data: bytes, size: int, what: str, fault_type: type[ContractError]) -> bytes:
    """The same step by step, to say what is wrong with a frame."""
    expander = zstandard.ZstdDecompressor().decompressobj()
    pieces = bytearray()
    position = 0
    try:
        while position < len(data) and not expander.eof and len(pieces) <= size:
            pieces += expander.decompress(data[position : position + _FEED_BYTES])
            position += _FEED_BYTES
    except zstandard.ZstdError as error:
        raise fault_type(f"{what}: damaged zstd frame ({error})", fault="zstd") from error
    if len(pieces) != size or not expander.eof:
        raise fault_type(f"{what}: the zstd frame is cut short or lies about its size", fault="truncated")
    if expander.unused_data or position < len(data):
        raise fault_type(f"{what}: bytes follow the zstd frame", fault="trailing_bytes")
    return bytes(pieces)


class Taker:
    """Reads fields of a JSON object with their types checked; errors name the place."""

    def __init__(self, document: Any, place: str, fault_type: type[ContractError]) -> None:
        self.place = place
        self._fault = fault_type
        if not isinstance(document, dict):
            raise fault_type(f"{place}: expected an object", fault="type")
        self._document: dict[str, Any] = document

    def only(self, *names: str) -> None:
        """Refuse keys other than these."""
        extra = sorted(set(self._document) - set(names))
        if extra:
            raise self._fault(f"{self.place}: unknown key {extra[0][:80]!r}", fault="unknown_key")

    def value(self, name: str) -> Any:
        if name not in self._document:
            raise self._fault(f"{self.place}: key {name!r} is missing", fault="missing_key")
        return self._document[name]

    def has(self, name: str) -> bool:
        return name in self._document

    def text(self, name: str, max_chars: int = 10_000) -> str:
        value = self.value(name)
        if not isinstance(value, str) or len(value) > max_chars:
            raise self._wrong(name, f"a string of at most {max_chars} characters")
        return value

    def integer(self, name: str, low: int = -(2**63), high: int = 2**63 - 1) -> int:
        value = self.value(name)
        if type(value) is not int or not low <= value <= high:
            raise self._wrong(name, f"an integer from {low} to {high}")
        return value

    def number(self, name: str, low: float = -1e300, high: float = 1e300) -> float:
        value = self.value(name)
        if type(value) not in (int, float) or not low <= value <= high:
            raise self._wrong(name, f"a number from {low} to {high}")
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.value(name)
        if type(value) is not bool:
            raise self._wrong(name, "true or false")
        return value

    def integers(self, name: str, low: int = -(2**63), high: int = 2**63 - 1, limit: int = 1 << 24) -> tuple[int, ...]:
        value = self._list(name, limit)
        if not all(type(each) is int and low <= each <= high for each in value):
            raise self._wrong(name, f"a list of integers from {low} to {high}")
        return tuple(value)

    def numbers(self, name: str, limit: int = 1 << 24) -> tuple[float, ...]:
        value = self._list(name, limit)
        if not all(type(each) in (int, float) for each in value):
            raise self._wrong(name, "a list of numbers")
        return tuple(float(each) for each in value)

    def optional_integers(self, name: str) -> tuple[int | None, ...]:
        value = self._list(name, 1 << 20)
        if not all(each is None or (type(each) is int and 0 <= each < 2**40) for each in value):
            raise self._wrong(name, "a list of value numbers or null")
        return tuple(value)

    def mapping(self, name: str) -> Mapping[str, Any]:
        value = self.value(name)
        if not isinstance(value, dict):
            raise self._wrong(name, "an object")
        return value

    def object(self, name: str) -> Taker:
        return Taker(self.value(name), f"{self.place}.{name}", self._fault)

    def items(self, name: str, limit: int) -> Iterator[Taker]:
        for index, each in enumerate(self._list(name, limit)):
            yield Taker(each, f"{self.place} {name}[{index}]", self._fault)

    def _list(self, name: str, limit: int) -> list[Any]:
        value = self.value(name)
        if not isinstance(value, list) or len(value) > limit:
            raise self._wrong(name, f"a list of at most {limit}")
        return value

    def _wrong(self, name: str, expected: str) -> ContractError:
        return self._fault(f"{self.place}: {name!r} must be {expected}", fault="type")
