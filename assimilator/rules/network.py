"""A sorting network over rows: values of given ranks of every column, by minimum and maximum of whole rows.

Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, algorithm M; K. E. Batcher 1968,
https://doi.org/10.1145/1468075.1468121), without the comparators that the wanted ranks do not depend on. Which
rows are compared does not depend on the values, so every step is one vector instruction for many columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import numpy as np

from assimilator.rules.rows import Array

#: Wires i < j, and whether their minimum (on i) and their maximum (on j) are needed afterwards.
Comparator = tuple[int, int, bool, bool]


def merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Pairs i < j: exchanging each so that the smaller one is on i sorts n values."""
    top = 1 << max(n - 1, 1).bit_length() - 1
    p = top if n > 1 else 0
    while p > 0:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(n - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1


@lru_cache(maxsize=64)
def network(n: int, ranks: range) -> tuple[Comparator, ...]:
    """The comparators that bring the values of these ranks (0: the smallest) to the wires `ranks`, in any order."""
    ordered: set[int] = set()  # wires that later comparators read
    kept: list[Comparator] = []
    for i, j in reversed(list(merge_exchange(n))):
        if i not in ordered and j not in ordered and (i in ranks) == (j in ranks):
            continue  # both are wanted, or neither is: whichever is smaller
        kept.append((i, j, i in ordered or i in ranks, j in ordered or j in ranks))
        ordered |= {i, j}
    return tuple(reversed(kept))


def values_of_ranks(block: Array, ranks: range) -> list[Array]:
    """Of every column of [n, width] without NaN the values of these ranks, as arrays [width], in any order."""
    n, width = block.shape
    room = np.empty((n + 1, width), block.dtype)
    room[:n] = block
    *wires, spare = room
    for i, j, low, high in network(n, ranks):
        a, b = wires[i], wires[j]
        if low and high:
            np.minimum(a, b, out=spare)
            np.maximum(a, b, out=b)
            wires[i], spare = spare, a
        elif low:
            np.minimum(a, b, out=a)
        else:
            np.maximum(a, b, out=b)
    return [wires[rank] for rank in ranks]
