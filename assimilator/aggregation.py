"""How contributions become one step: pure arithmetic, the same bytes whatever order they arrived in.

With x_i the mean gradient of contribution i, or its delta; n_i its samples by weight; s_i its weight by age:

    mean             g = sum n_i s_i x_i / sum n_i      plain data-parallel SGD where all weights are 1; with deltas the
                     pseudo-gradient of DiLoCo (https://arxiv.org/abs/2311.08105)
                     where contributions are about parts of the values, each value's mean is over those about it
    any other rule   g = rule of the rows s_i x_i with weights n_i (assimilator/rules/)

Buffers (running statistics of batch norm), and the inner optimizer's state where it is shipped, are averaged by n_i s_i
and never given an optimizer step; under a robust rule they are the coordinate median. Integer buffers (counters) take
the largest value.

Memory: the mean takes one float64 sum of the model, and the files of two contributions: the one that is decoded, in
small pieces, and the next one, which a thread reads meanwhile. A robust rule needs the files of all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from assimilator.contributions import (
    CARRIED,
    Contribution,
    NothingToFold,
    WeightedSum,
    averaged_in,
    in_order,
    loaded,
    parameters_in,
)
from assimilator.rules import BLOCK, Mean, Median, Mixing, Rule, aggregate
from boinc_project.contract.update import OpenUpdate

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Folded:
    """gradient: float32 by parameter name; buffers (and the inner optimizer's state) by their names in a state; samples
    of all contributions together."""

    gradient: dict[str, Array]
    buffers: dict[str, Array]
    samples: int


def fold(
    contributions: Sequence[Contribution],
    rule: Rule | None = None,
    mixing: Mixing | None = None,
    previous: Mapping[str, Array] | None = None,
) -> Folded:
    """Fold contributions by a rule (None: the mean). `previous` is the last outcome, for rules that start from it.

    Raises NothingToFold, and what `load` raises.
    """
    ordered = [each for each in in_order(contributions) if each.share * each.age_weight > 0]
    if not ordered:
        raise NothingToFold(f"{len(contributions)} contributions without weight")
    if mixing is None and (rule is None or isinstance(rule, Mean)):
        return _mean(ordered)
    return _by_rule(ordered, rule or Mean(), mixing, previous)


def _mean(ordered: Sequence[Contribution]) -> Folded:
    totals = {part: sum(e.share for e in ordered if e.part == part) for part in {each.part for each in ordered}}
    aged = sum(each.share * each.age_weight for each in ordered)
    sums, buffers = WeightedSum(), MeanBuffers()
    for contribution, update in loaded(ordered):
        for parameter, name in parameters_in(update).items():
            # A gradient is already a sum over its samples; a delta is weighted by them.
            factor = contribution.weight if name.startswith("gradient/") else contribution.share
            sums.add(parameter, update, name, factor * contribution.age_weight / totals[contribution.part])
        buffers.add(update, contribution.share * contribution.age_weight / aged)
    return Folded(dict(sums.take()), buffers.take(), sum(each.samples for each in ordered))


class MeanBuffers:
    """Buffers of updates whose weights add up to 1: floats averaged, of integers the largest."""

    def __init__(self) -> None:
        self._averages = WeightedSum()
        self._counters: dict[str, Array] = {}

    def add(self, update: OpenUpdate, weight: float) -> None:
        for name in averaged_in(update):
            self._averages.add(name, update, name, weight)
        keep_largest(self._counters, update)

    def take(self) -> dict[str, Array]:
        """By name; they are used up."""
        return {**dict(self._averages.take()), **self._counters}


def keep_largest(counters: dict[str, Array], update: OpenUpdate) -> None:
    """Integer buffers of an update into the largest values so far."""
    averaged = set(averaged_in(update))
    for name in update.types:
        if name.startswith(CARRIED) and name not in averaged:
            array = update.plain(name)
            counters[name] = np.maximum(counters[name], array) if name in counters else np.array(array)


def _by_rule(
    ordered: Sequence[Contribution], rule: Rule, mixing: Mixing | None, previous: Mapping[str, Array] | None
) -> Folded:
    updates = [update for _, update in loaded(ordered)]
    names = parameters_in(updates[0])
    are_sums = any(name.startswith("gradient/") for name in names.values())
    scales = [each.age_weight / (each.samples if are_sums else 1) for each in ordered]
    weights = np.array([each.share for each in ordered], np.float64)
    rows = FileRows(updates, list(names.values()), scales, weights)
    before = (
        None
        if previous is None
        else np.concatenate([_flat_or_zeros(previous, name, updates[0].types[t].shape) for name, t in names.items()])
    )
    gradient = _apart(aggregate(rule, rows, mixing, before), updates[0], names)
    counters: dict[str, Array] = {}
    for update in updates:
        keep_largest(counters, update)
    floats = {name: name for name in averaged_in(updates[0])}
    ones = [1.0] * len(updates)
    middle = aggregate(Median(), FileRows(updates, list(floats.values()), ones, weights)) if floats else np.empty(0)
    buffers = {**_apart(middle, updates[0], floats), **counters}
    return Folded(gradient, buffers, sum(each.samples for each in ordered))


def _flat_or_zeros(tensors: Mapping[str, Array], name: str, shape: tuple[int, ...]) -> Array:
    return np.asarray(tensors.get(name, np.zeros(shape, np.float32))).reshape(-1)


def _apart(flat: Array, update: OpenUpdate, names: Mapping[str, str]) -> dict[str, Array]:
    """A flat concatenation [d] as the named tensors that it is made of."""
    found, start = {}, 0
    for key, name in names.items():
        shape = update.types[name].shape
        size = int(np.prod(shape, dtype=np.int64))
        found[key] = flat[start : start + size].reshape(shape)
        start += size
    return found


@dataclass(frozen=True)
class FileRows:
    """Rows (assimilator/rules/rows.py) that are decoded from updates block by block.

    tensors   their names in the updates, in the order of the columns
    scales    by which each row is multiplied, and rounded to float32
    """

    updates: Sequence[OpenUpdate]
    tensors: Sequence[str]
    scales: Sequence[float]
    weights: Array

    @property
    def size(self) -> int:
        types = self.updates[0].types
        return sum(int(np.prod(types[name].shape, dtype=np.int64)) for name in self.tensors)

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        streams = [
            _Stream(update, self.tensors, scale) for update, scale in zip(self.updates, self.scales, strict=True)
        ]
        room = np.empty((len(streams), min(BLOCK, self.size)), np.float32)
        for start in range(0, self.size, BLOCK):
            columns = slice(start, min(start + BLOCK, self.size))
            block = room[:, : columns.stop - columns.start]
            for row, stream in zip(block, streams, strict=True):
                stream.read_into(row)
            yield columns, block


class _Stream:
    """The values of an update's tensors one after the other, as one long row."""

    def __init__(self, update: OpenUpdate, names: Sequence[str], scale: float) -> None:
        self._pieces = (values for name in names for _, values in update.pieces(name))
        self._scale = scale
        self._rest = np.empty(0, np.float32)

    def read_into(self, row: Array) -> None:
        filled = 0
        while filled < row.size:
            if not self._rest.size:
                self._rest = next(self._pieces)
            take = min(row.size - filled, self._rest.size)
            np.multiply(
                self._rest[:take], self._scale, out=row[filled : filled + take], casting="unsafe", dtype=np.float64
            )
            self._rest = self._rest[take:]
            filled += take
