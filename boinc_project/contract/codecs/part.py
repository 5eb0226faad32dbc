"""Parts: which of an update's values travel at all, the same for every copy of a microtask.

    tensors    the named tensors in `count` runs of about equally many values; those of run `index` travel, whole
    elements   every `count`-th value of each tensor, from an offset on; with index 0 to count - 1 each value once

The offset is index + a shift of the version and the tensor's name, so that which values go together changes. What does
not travel decodes to zeros (elements) or is not there (tensors): whoever folds must know (`Codec.carries`, `share_of`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from boinc_project.contract.canonical import Taker
from boinc_project.contract.codecs.method import PIECE_ELEMENTS, Array, CodecSeed, Shape, elements
from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType

PART_KINDS = ("tensors", "elements")
MAX_PARTS = 4096


@dataclass(frozen=True)
class Part:
    """Part `index` of `count`; the whole update if count is 1."""

    index: int = 0
    count: int = 1
    by: str = "tensors"

    def __post_init__(self) -> None:
        if self.by not in PART_KINDS:
            raise ContractError(f"parts by {self.by!r} are unknown; use one of {PART_KINDS}", fault="codec")
        if not 1 <= self.count <= MAX_PARTS or not 0 <= self.index < self.count:
            raise ContractError(f"part {self.index} of {self.count} does not exist", fault="codec")

    def to_document(self) -> dict[str, Any]:
        return {"index": self.index, "count": self.count, "by": self.by}

    @staticmethod
    def from_document(take: Taker) -> Part:
        take.only("index", "count", "by")
        return Part(take.integer("index", 0, MAX_PARTS), take.integer("count", 1, MAX_PARTS), take.text("by", 8))

    @property
    def is_strided(self) -> bool:
        return self.by == "elements" and self.count > 1

    def of_tensors(self, types: Mapping[str, TensorType]) -> frozenset[str]:
        """The names of those that travel."""
        if self.by != "tensors" or self.count == 1:
            return frozenset(types)
        sizes = {name: elements(kind.shape) for name, kind in types.items()}
        total, before, found = max(1, sum(sizes.values())), 0, []
        for name, size in sizes.items():
            middle = 2 * before + size  # twice the place of the tensor's middle
            if min(middle * self.count // (2 * total), self.count - 1) == self.index:
                found.append(name)
            before += size
        return frozenset(found)

    def offset(self, name: str, seed: CodecSeed) -> int:
        """Place of the first value of a tensor that travels."""
        return (self.index + seed.shared_key("part", name)) % self.count

    def inner(self, shape: Shape, name: str, seed: CodecSeed) -> Shape:
        """The shape of what travels of a tensor."""
        if not self.is_strided:
            return shape
        return (len(range(self.offset(name, seed), elements(shape), self.count)),)

    def take(self, array: Array, name: str, seed: CodecSeed) -> Array:
        """What travels of a tensor, of the shape `inner`."""
        return array.reshape(-1)[self.offset(name, seed) :: self.count] if self.is_strided else array

    def spread(self, values: Array, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        """(place in the flat tensor, its values), zeros between those that travelled, until it is complete."""
        first, total = self.offset(name, seed), elements(shape)
        step = max(1, PIECE_ELEMENTS // self.count) * self.count  # so that each piece begins with the same offset
        taken = 0
        for start in range(0, total, step):
            where = slice(start, min(start + step, total))
            room = np.zeros(where.stop - where.start, np.float32)
            places = room[first :: self.count]
            places[:] = values[taken : taken + places.size]
            taken += places.size
            yield where, room
