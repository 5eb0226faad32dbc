"""How contributions become the next version: pure arithmetic, the same bytes whatever order they arrived in.

Contributions are folded in slot order, in float64, elementwise; the result is rounded to float32 once.

    sync     g = sum of the summed gradients / samples of all contributions: plain data-parallel SGD
    diloco   d = sum n_i * delta_i / sum n_i, the pseudo-gradient of Douillard et al. 2023
             (https://arxiv.org/abs/2311.08105), then an outer Nesterov step
Buffers (running statistics of batch norm) are averaged by samples and never given an optimizer step;
integer buffers (counters) take the largest value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class NothingToFold(Exception):
    """All contributions of the round together have no weight; the version stays as it is."""


@dataclass(frozen=True)
class Contribution:
    """One validated update: its place in the round, its weight (samples by the server's own record), its tensors.

    `load` reads the tensors when they are needed, so that only one contribution is in memory at a time.
    """

    slot: int
    samples: int
    load: Callable[[], Mapping[str, Array]]


def fold(contributions: Iterable[Contribution], policy: str) -> tuple[dict[str, Array], dict[str, Array], int]:
    """(gradient by parameter name, buffers by name, samples). Raises NothingToFold."""
    ordered = sorted(contributions, key=lambda c: c.slot)
    total = sum(c.samples for c in ordered)
    if total <= 0:
        raise NothingToFold(f"{len(ordered)} contributions with {total} samples")
    prefix = "gradient/" if policy == "sync" else "delta/"
    sums: dict[str, Array] = {}
    buffers: dict[str, Array] = {}
    for contribution in ordered:
        share = contribution.samples / total
        for name, array in contribution.load().items():
            if name.startswith(prefix):
                # A gradient is already a sum over its samples; a delta is weighted by them.
                weight = 1.0 / total if policy == "sync" else share
                _add(sums, name[len(prefix) :], array, weight)
            elif name.startswith("buffer/"):
                if array.dtype.kind == "f":
                    _add(buffers, name[len("buffer/") :], array, share)
                else:
                    old = buffers.get(name[len("buffer/") :])
                    buffers[name[len("buffer/") :]] = array if old is None else np.maximum(old, array)
    gradient = {name: total_array.astype(np.float32) for name, total_array in sums.items()}
    rounded = {n: a.astype(np.float32) if a.dtype == np.float64 else np.array(a) for n, a in buffers.items()}
    return gradient, rounded, total


def _add(sums: dict[str, Array], name: str, array: Array, weight: float) -> None:
    term = array.astype(np.float64) * weight
    if name in sums:
        sums[name] += term
    else:
        sums[name] = term
