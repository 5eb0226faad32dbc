"""The Gram matrix of a round: inner products of all rows, from which the linear rules find their coefficients.

A matrix product of a library sums in an order that depends on the processor and on the number of threads. Here no
order matters, because nothing is rounded inside a product: in every PART columns a row is first rounded to whole
multiples of 2^-BITS of the power of two above its largest value. Products of two such numbers have 2 BITS bits, sums
of PART of them 2 BITS + log2 PART = 53: exact in float64. The parts are added in float64, first to last.
So a value that is multiplied is off by at most 2^-(BITS + 1) of that power of two (float32 itself: 2^-24 of each
value). The coefficients feel that, the rows do not: what is summed in the end are the contributions themselves.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from assimilator.rules.rows import Array

BITS = 21
PART = 2048


def gram_matrix(blocks: Iterable[tuple[slice, Array]], n: int, previous: Array | None) -> Array:
    """float64 [n + 1, n + 1]: the rows' inner products; last the previous aggregate's [d] (zeros without one)."""
    gram = np.zeros((n + 1, n + 1))
    room = np.zeros((n + 1, PART))
    for columns, block in blocks:
        for start in range(0, block.shape[1], PART):
            values = block[:, start : start + PART]
            part = room[:, : values.shape[1]]
            part[:n] = values
            if previous is not None:
                first = columns.start + start
                part[n] = previous[first : first + values.shape[1]]
            gram += _exact_products(part)
    return gram


def _exact_products(part: Array) -> Array:
    """part part^T of rounded values; `part` is used up."""
    largest = np.maximum(part.max(axis=1), -part.min(axis=1))
    _, exponents = np.frexp(largest)  # largest < 2^exponent
    part *= np.ldexp(1.0, BITS - exponents)[:, None]
    np.rint(part, out=part)
    unit = np.ldexp(1.0, exponents - BITS)
    products: Array = (part @ part.T) * np.outer(unit, unit)
    return products


def squared_distances(gram: Array) -> Array:
    """|x_i - x_j|^2 as float64 [m, m] from a Gram matrix [m, m]; never below zero, zero on the diagonal."""
    norms = np.diagonal(gram)
    distances: Array = np.maximum(norms[:, None] + norms[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(distances, 0.0)
    return distances


def squared_distances_to(gram: Array, point: Array) -> Array:
    """|x_i - sum_j point_j x_j|^2 as float64 [m] for a point given by its coefficients [m]."""
    towards = product(gram, point[:, None])[:, 0]
    distances: Array = np.maximum(np.diagonal(gram) - 2.0 * towards + np.sum(point * towards), 0.0)
    return distances


def product(a: Array, b: Array) -> Array:
    """a @ b for small matrices, summed by numpy itself: the same bits on every processor."""
    columns = np.ascontiguousarray(b.T)
    return np.stack([np.sum(row * columns, axis=1) for row in a])
