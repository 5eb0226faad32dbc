"""random-k: k of d values, chosen by a seed that both sides know, times d / k. Only values travel, no indices.

Random masks of Konečný et al. 2016 (https://arxiv.org/abs/1610.05492, section 3) and rand-k of Stich et al. 2018
(https://arxiv.org/abs/1809.07599), with the factor that makes it unbiased: E[C(x)] = x and
E||C(x) - x||^2 = (d/k - 1) ||x||^2. The values are cut into k runs of d/k, and one of each run is chosen: every value
is chosen with the same probability as by k draws from all of them, both moments are the same, and no list of d numbers
has to be shuffled. Each slot draws a mask of its own. Tensors of fewer than 64 values go whole. The values may be
coded themselves (`values`): then the error of that comes on top, times d / k.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from boinc_project.contract import philox
from boinc_project.contract.codecs import method
from boinc_project.contract.codecs.method import (
    Array,
    CodecSeed,
    Parts,
    Shape,
    elements,
    flat_float32,
    share_of,
)
from boinc_project.contract.codecs.sparse import Sparse
from boinc_project.contract.tensorfile import FileTensor

RUNS_AT_ONCE = 1 << 14
LEAST_ELEMENTS = 64  # below, a tensor's share would be a handful of values, each multiplied by d / k


@dataclass(frozen=True)
class RandomK(Sparse):
    """share x (4 bytes, or what `values` takes) a value."""

    kind: ClassVar[str] = "random-k"

    def kept(self, shape: Shape) -> int:
        count = elements(shape)
        return count if count < LEAST_ELEMENTS else share_of(count, self.share)

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        return self.values.parts((self.kept(shape),))

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        flat, count = flat_float32(array), self.kept(array.shape)
        places, _ = chosen(flat.size, count, 0, count, seed.key(self.kind, name))
        return self.values.encode(flat[places], name, seed)

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        total, count = elements(shape), self.kept(shape)
        if not count:
            return
        values = self.values.decode(parts, (count,), name, seed)
        key = seed.key(self.kind, name)
        runs = max(1, method.PIECE_ELEMENTS * count // total)
        for begin in range(0, count, RUNS_AT_ONCE):
            end = min(begin + RUNS_AT_ONCE, count)
            places, lengths = chosen(total, count, begin, end, key)
            raised = values[begin:end] * lengths.astype(np.float32)
            for first in range(begin, end, runs):
                last = min(first + runs, end)
                where = slice(first * total // count, last * total // count)
                room = np.zeros(where.stop - where.start, np.float32)
                room[places[first - begin : last - begin] - where.start] = raised[first - begin : last - begin]
                yield where, room

    def check(self, parts: Parts, shape: Shape, place: str) -> None:
        self.values.check(parts, (self.kept(shape),), place)

    @property
    def variance(self) -> float:
        return 1 / self.share - 1

    def spread(self, distance: float) -> float:
        return self.values.spread(distance)


def chosen(total: int, count: int, first: int, last: int, key: int) -> tuple[Array, Array]:
    """Of the runs `first` to `last` (of `count` that divide `total` values): the places chosen, the runs' lengths."""
    edges = np.arange(first, last + 1, dtype=np.int64) * total // max(count, 1)
    lengths = np.diff(edges)
    words = philox.words(key, 0, 0, last - first, first).astype(np.uint64)
    return edges[:-1] + (words * lengths.astype(np.uint64) >> np.uint64(32)).astype(np.int64), lengths
