"""What a rule is, and how any rule turns the rows of a round into the aggregate.

coordinatewise   every column by itself: block [n, width] -> [width]; one pass over the rows
linear           sum_i c_i x_i + c_n previous, c from the Gram matrix; two passes: Gram matrix, weighted sum
mixing           a pre-step: the rows are replaced by the rows of M X; M follows from the Gram matrix as well

Rows of weight 0 are left out before anything else. Where a rule ranks, selects or takes a median, every row that is
left counts once, whatever its weight: a host that was given more samples must not have more votes. Weights are what
rows are averaged by.

The result is the same bit for bit whatever order the contributions arrived in, on any processor: rows are in slot
order, every sum has one order, float64 sums are rounded to float32 once (and mixed rows before they are ranked).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np

from assimilator.contributions import NothingToFold
from assimilator.rules.gram import gram_matrix, product
from assimilator.rules.rows import Array, Rows


@runtime_checkable
class LinearRule(Protocol):
    """A rule whose result is a combination of the rows and the previous aggregate."""

    needs_gram: ClassVar[bool]
    """False if the coefficients follow from the weights alone; the matrix is then zeros, and one pass is saved."""

    def coefficients(self, gram: Array, weights: Array) -> Array:
        """c float64 [n + 1] from the Gram matrix [n + 1, n + 1] (last: previous aggregate) and weights > 0 [n]."""


class CoordinateRule(Protocol):
    """A rule that treats every coordinate by itself and alike."""

    def reduce(self, block: Array) -> Array:
        """float32 [n, width] -> float32 [width]"""


class Mixing(Protocol):
    """A pre-step that replaces each row by a combination of rows."""

    def matrix(self, gram: Array, weights: Array) -> Array:
        """M float64 [n, n] from the Gram matrix [n, n] and weights > 0 [n]."""


Rule = LinearRule | CoordinateRule


def aggregate(rule: Rule, rows: Rows, mixing: Mixing | None = None, previous: Array | None = None) -> Array:
    """The aggregate of a round, float32 [d]. `previous`: the last round's, float32 [d]; None counts as zeros.

    Raises NothingToFold if no row has a weight, ValueError if the weights are no weights.
    """
    weights = np.asarray(rows.weights, np.float64)
    if not (weights >= 0).all() or not np.isfinite(weights.sum()):
        raise ValueError("the weights of contributions must be 0 or more, and their sum finite")
    used = np.flatnonzero(weights)
    if not used.size:
        raise NothingToFold(f"{weights.size} contributions without weight")
    weights, n = weights[used], used.size

    def blocks() -> Iterator[tuple[slice, Array]]:
        for columns, block in rows.blocks():
            yield columns, block if n == block.shape[0] else block[used]

    needs_gram = mixing is not None or (isinstance(rule, LinearRule) and rule.needs_gram)
    gram = gram_matrix(blocks(), n, previous) if needs_gram else np.zeros((n + 1, n + 1))
    mixed = np.eye(n + 1)  # what the rule's rows, and the previous aggregate, are made of
    if mixing is not None:
        mixed[:n, :n] = mixing.matrix(gram[:n, :n], weights)
        gram = product(product(mixed, gram), mixed.T)
        np.fill_diagonal(gram, np.maximum(np.diagonal(gram), 0.0))  # rows that cancel out: zero but for rounding
    result = np.zeros(rows.size, np.float32)
    if isinstance(rule, LinearRule):
        coefficients = product(rule.coefficients(gram, weights)[None, :], mixed)[0]
        for columns, block in blocks():
            last = [] if previous is None else [previous[columns]]
            result[columns] = _combination(coefficients, [*block, *last])
        return result
    for columns, block in blocks():
        if mixing is not None:
            block = np.stack([_combination(row[:n], block) for row in mixed[:n]]).astype(np.float32)
        result[columns] = rule.reduce(block)
    return result


def _combination(coefficients: Array, rows: Sequence[Array] | Array) -> Array:
    """sum_i c_i x_i in float64 [width], from the first row to the last; rows whose c_i is 0 are left out."""
    width = len(rows[0])
    total, term = None, np.empty(width)
    for coefficient, row in zip(coefficients, rows, strict=False):  # without a previous aggregate it has no row
        if coefficient == 0.0:
            continue
        if total is None:  # assigned, so that -0.0 stays what it is
            total = np.multiply(row, coefficient, dtype=np.float64)
        else:
            total += np.multiply(row, coefficient, out=term, dtype=np.float64)
    return np.zeros(width) if total is None else total
