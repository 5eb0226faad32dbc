"""Codecs: how an update becomes tensors to send, and back. Stateless and deterministic.

    dense   float32 as it is
    int8    blocks of B values share one float32 scale = max|x| / 127; a code is round-half-even(x / scale)

Agreement between replicas is measured after decoding. Only float32 tensors are encoded; tensors of other
dtypes (counters of batch norm) always travel as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.canonical import Taker
from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType
from boinc_project.contract.tensorfile import FileTensor

Array = npt.NDArray[Any]
CODES_SUFFIX = "#codes"
SCALES_SUFFIX = "#scales"
MAX_BLOCK = 1 << 20
PIECE_ELEMENTS = 1 << 15  # decoded at a time where a whole tensor would cost memory


@dataclass(frozen=True)
class Codec:
    """A codec and its parameters as the microtask names them.

    kind         "dense" or "int8"
    block        values that share one scale (int8)
    compression  "zstd" or "none": of the whole file, see update.py
    """

    kind: str = "dense"
    block: int = 256
    compression: str = "zstd"

    def __post_init__(self) -> None:
        if self.kind not in ("dense", "int8"):
            raise ContractError(f"codec {self.kind!r} is unknown; use 'dense' or 'int8'", fault="codec")
        if self.compression not in ("zstd", "none"):
            raise ContractError(f"compression {self.compression!r} is unknown; use 'zstd' or 'none'", fault="codec")
        if not 1 <= self.block <= MAX_BLOCK:
            raise ContractError(f"codec block {self.block} is not between 1 and {MAX_BLOCK}", fault="codec")

    def to_document(self) -> dict[str, Any]:
        return {"kind": self.kind, "block": self.block, "compression": self.compression}

    @staticmethod
    def from_document(take: Taker) -> Codec:
        take.only("kind", "block", "compression")
        return Codec(take.text("kind", 16), take.integer("block", 1, MAX_BLOCK), take.text("compression", 8))

    def encoded_types(self, types: Mapping[str, TensorType]) -> dict[str, FileTensor]:
        """Names and types of the tensors in the file for an update with these types."""
        found: dict[str, FileTensor] = {}
        for name, kind in types.items():
            if self.kind == "int8" and kind.dtype == "float32":
                elements = _elements(kind)
                found[name + CODES_SUFFIX] = FileTensor("int8", (elements,))
                found[name + SCALES_SUFFIX] = FileTensor("float32", (-(-elements // self.block),))
            else:
                found[name] = FileTensor(kind.dtype, kind.shape)
        return found

    def encode(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Update tensors -> file tensors."""
        found: dict[str, Array] = {}
        for name, array in tensors.items():
            if self.kind == "int8" and array.dtype == np.float32:
                found[name + CODES_SUFFIX], found[name + SCALES_SUFFIX] = _quantise(array, self.block)
            else:
                found[name] = array
        return found

    def in_pieces(self, tensors: Mapping[str, Array], name: str, kind: TensorType) -> Iterator[tuple[slice, Array]]:
        """(place in the flat tensor, its values) until the tensor is complete: what `decode` gives, bit for bit.

        The values are good until the next piece is asked for.
        """
        if self.kind == "int8" and kind.dtype == "float32":
            codes, scales = tensors[name + CODES_SUFFIX], tensors[name + SCALES_SUFFIX]
            blocks = max(1, PIECE_ELEMENTS // self.block)
            room = np.empty((min(blocks, max(1, scales.size)), self.block), np.float32)
            whole = codes.size // self.block
            for first in range(0, whole, blocks):
                count = min(blocks, whole - first)
                where = slice(first * self.block, (first + count) * self.block)
                grid = codes[where].reshape(count, self.block)
                np.multiply(grid, scales[first : first + count, None], out=room[:count], dtype=np.float32)
                yield where, room[:count].reshape(-1)
            if whole * self.block < codes.size:
                where = slice(whole * self.block, codes.size)
                yield where, codes[where].astype(np.float32) * scales[whole]
            return
        flat = tensors[name].reshape(-1)
        for start in range(0, flat.size, PIECE_ELEMENTS):
            where = slice(start, min(start + PIECE_ELEMENTS, flat.size))
            yield where, flat[where]

    def decode(self, tensors: Mapping[str, Array], types: Mapping[str, TensorType]) -> dict[str, Array]:
        """File tensors (already checked against `encoded_types`) -> update tensors of these types."""
        found: dict[str, Array] = {}
        for name, kind in types.items():
            if self.kind == "int8" and kind.dtype == "float32":
                codes, scales = tensors[name + CODES_SUFFIX], tensors[name + SCALES_SUFFIX]
                spread = np.repeat(scales, self.block)[: codes.size]
                found[name] = (codes.astype(np.float32) * spread).reshape(kind.shape)
            else:
                found[name] = tensors[name]
        return found


def _elements(kind: TensorType) -> int:
    count = 1
    for dim in kind.shape:
        count *= dim
    return count


def _quantise(array: Array, block: int) -> tuple[Array, Array]:
    flat = np.ascontiguousarray(array, dtype=np.float32).reshape(-1)
    blocks = -(-flat.size // block)
    padded = np.zeros(blocks * block, dtype=np.float32)
    padded[: flat.size] = flat
    grid = padded.reshape(blocks, block)
    scales = (np.abs(grid).max(axis=1, initial=0.0) / np.float32(127)).astype(np.float32)
    # A block of zeros (or of values so small that the scale underflows) has scale 0 and codes 0.
    safe = np.where(scales > 0, scales, np.float32(1))
    codes = np.clip(np.rint(grid / safe[:, None]), -127, 127).astype(np.int8)
    codes[scales == 0] = 0
    return codes.reshape(-1)[: flat.size].copy(), scales
