"""top-k: of every 4,096 values those of largest magnitude, and 12-bit indices of where they were.

Deep Gradient Compression (Lin et al. 2018, https://arxiv.org/abs/1712.01887); chosen chunk by chunk as in SparseLoCo
(https://arxiv.org/abs/2508.15706), so that an index is short and no chunk is left out. Adapted: both add what was not
sent to the next gradient (error feedback), which a volunteer who keeps nothing cannot do; without it the small values
are lost and the result is biased. Of equal magnitudes the first ones are taken. The values may be coded (`values`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boinc_project.contract.codecs import method
from boinc_project.contract.codecs.bits import index_bytes, pack_indices, unpack_indices
from boinc_project.contract.codecs.method import (
    Array,
    CodecSeed,
    Method,
    Parts,
    Shape,
    elements,
    flat_float32,
    rounded_apart,
    share_of,
    unusable,
)
from boinc_project.contract.codecs.sparse import Sparse
from boinc_project.contract.tensorfile import FileTensor

INDICES_SUFFIX = "#indices"
CHUNK = 4096
AT_ONCE = 64  # chunks in which the largest are looked for together


@dataclass(frozen=True)
class TopK(Sparse):
    """share x (1.5 bytes + 4, or what `values` takes) a value."""

    kind: ClassVar[str] = "top-k"

    def chunks(self, shape: Shape) -> tuple[int, int, int, int]:
        """Whole chunks, values kept of each, length of the last short chunk (0: none), values kept of that."""
        whole, rest = divmod(elements(shape), CHUNK)
        return whole, share_of(CHUNK, self.share), rest, share_of(rest, self.share)

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        whole, kept, _, rest_kept = self.chunks(shape)
        return sparse_parts(self.values, whole * kept + rest_kept)

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        flat = flat_float32(array)
        whole, kept, _, rest_kept = self.chunks(array.shape)
        grid, rest = flat[: whole * CHUNK].reshape(whole, CHUNK), flat[whole * CHUNK :][None]
        parts = [(grid[first : first + AT_ONCE], kept) for first in range(0, whole, AT_ONCE)] + [(rest, rest_kept)]
        found = [(rows, largest(rows, count)) for rows, count in parts]
        indices = np.concatenate([each.reshape(-1) for _, each in found])
        values = np.concatenate([np.take_along_axis(rows, each, 1).reshape(-1) for rows, each in found])
        return {INDICES_SUFFIX: pack_indices(indices), **self.values.encode(values, name, seed)}

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        whole, kept, rest, rest_kept = self.chunks(shape)
        count = whole * kept + rest_kept
        indices = unpack_indices(parts[INDICES_SUFFIX], count)
        values = self.values.decode(parts, (count,), name, seed)
        some = max(1, method.PIECE_ELEMENTS // CHUNK)
        for first in range(0, whole, some):
            last = min(first + some, whole)
            room = np.zeros((last - first, CHUNK), np.float32)
            mine = slice(first * kept, last * kept)
            np.put_along_axis(room, indices[mine].reshape(-1, kept), values[mine].reshape(-1, kept), 1)
            yield slice(first * CHUNK, last * CHUNK), room.reshape(-1)
        if rest:
            short = np.zeros(rest, np.float32)
            short[indices[whole * kept :]] = values[whole * kept :]
            yield slice(whole * CHUNK, whole * CHUNK + rest), short

    def check(self, parts: Parts, shape: Shape, place: str) -> None:
        whole, kept, rest, rest_kept = self.chunks(shape)
        count = whole * kept + rest_kept
        indices = checked_indices(parts, count, place)
        check_rows(indices[: whole * kept].reshape(whole, kept), CHUNK, place)
        check_rows(indices[whole * kept :][None], rest, place)
        self.values.check(parts, (count,), place)

    def spread(self, distance: float) -> float:
        return chosen_apart(distance, self.values)


def chosen_apart(distance: float, values: Method) -> float:
    """What choosing the largest makes of a distance: of two values at the edge either may be sent, in full.

    The step (see `rounded_apart`) of 2 is measured: 1.9 for shares of 1/64 and 1/16 of normally distributed values.
    """
    return math.hypot(rounded_apart(distance, 2.0), values.spread(distance))


def sparse_parts(values: Method, count: int) -> dict[str, FileTensor]:
    return {INDICES_SUFFIX: FileTensor("uint8", (index_bytes(count),)), **values.parts((count,))}


def largest(rows: Array, count: int) -> Array:
    """Of each row of at most 4096 float32 numbers the `count` of largest magnitude: places [rows, count], ascending."""
    size = rows.shape[1]
    if count >= size:
        return np.broadcast_to(np.arange(size, dtype=np.int16), rows.shape)
    # The bits of a positive number rise with it; with the place below them no two are equal, and the first wins.
    ranks = np.abs(rows).view(np.uint32).astype(np.int64) * size + np.arange(size - 1, -1, -1)
    return np.sort(np.argpartition(ranks, size - count, axis=1)[:, size - count :], axis=1).astype(np.int16)


def checked_indices(parts: Parts, count: int, place: str) -> Array:
    """The indices; refuses bits beyond the last one."""
    packed = parts[INDICES_SUFFIX]
    if count % 2 and int(packed[-1]) >> 4:
        raise unusable(place, "an index follows the last one")
    return unpack_indices(packed, count)


def check_rows(indices: Array, size: int, place: str) -> None:
    """Refuse rows of indices [rows, kept] that do not rise, or leave their `size`."""
    if indices.size and int(indices[:, -1].max()) >= size:
        raise unusable(place, f"an index is {int(indices[:, -1].max())} of {size}")
    if indices.shape[1] > 1 and indices.size and int(np.diff(indices, axis=1).min()) < 1:
        raise unusable(place, "its indices do not rise")
