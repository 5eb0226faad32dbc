"""How contributions become the next version: pure arithmetic, the same bytes whatever order they arrived in.

Contributions are folded in slot order, in float64, elementwise; the result is rounded to float32 once.

    sync     g = sum of the summed gradients / samples of all contributions: plain data-parallel SGD
    diloco   d = sum n_i * delta_i / sum n_i, the pseudo-gradient of Douillard et al. 2023
             (https://arxiv.org/abs/2311.08105), then an outer Nesterov step
Buffers (running statistics of batch norm) are averaged by samples and never given an optimizer step;
integer buffers (counters) take the largest value.

Memory: one float64 sum of the model, and the files of two contributions: the one that is decoded, in small
pieces, and the next one, which a thread reads meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.update import OpenUpdate

Array = npt.NDArray[Any]


class NothingToFold(Exception):
    """All contributions of the round together have no weight; the version stays as it is."""


@dataclass(frozen=True)
class Contribution:
    """One validated update: its place in the round, its weight (samples by the server's own record), its tensors.

    `load` reads the file when it is needed; it is called from another thread, one contribution after the other.
    """

    slot: int
    samples: int
    load: Callable[[], OpenUpdate]


def fold(contributions: Iterable[Contribution], policy: str) -> tuple[dict[str, Array], dict[str, Array], int]:
    """(gradient by parameter name, buffers by name, samples). Raises NothingToFold, and what `load` raises."""
    ordered = sorted(contributions, key=lambda c: c.slot)
    total = sum(c.samples for c in ordered)
    if total <= 0:
        raise NothingToFold(f"{len(ordered)} contributions with {total} samples")
    prefix = "gradient/" if policy == "sync" else "delta/"
    sums: dict[str, Array] = {}
    buffers: dict[str, Array] = {}
    for contribution, update in _loaded(ordered):
        share = contribution.samples / total
        for name in update.types:
            if name.startswith(prefix):
                # A gradient is already a sum over its samples; a delta is weighted by them.
                weight = 1.0 / total if policy == "sync" else share
                _add(sums, name[len(prefix) :], update, name, weight)
            elif name.startswith("buffer/"):
                array = update.plain(name)
                if array.dtype.kind == "f":
                    _add(buffers, name[len("buffer/") :], update, name, share)
                else:
                    old = buffers.get(name[len("buffer/") :])
                    buffers[name[len("buffer/") :]] = array if old is None else np.maximum(old, array)
    gradient = {name: sums.pop(name).astype(np.float32) for name in list(sums)}
    rounded = {n: a.astype(np.float32) if a.dtype == np.float64 else np.array(a) for n, a in buffers.items()}
    return gradient, rounded, total


def _loaded(ordered: Sequence[Contribution]) -> Iterator[tuple[Contribution, OpenUpdate]]:
    """Each contribution with its update; the next one is read while the caller works on this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="payload") as reader:
        coming = reader.submit(ordered[0].load)
        for number, contribution in enumerate(ordered):
            update = coming.result()
            if number + 1 < len(ordered):
                coming = reader.submit(ordered[number + 1].load)
            yield contribution, update


def _add(sums: dict[str, Array], key: str, update: OpenUpdate, name: str, weight: float) -> None:
    """sums[key] += weight * tensor, where the first term is assigned (so that -0.0 stays what it is)."""
    first = key not in sums
    if first:
        sums[key] = np.empty(update.types[name].shape, np.float64)
    total = sums[key].reshape(-1)
    room = np.empty(0, np.float64)
    for where, values in update.pieces(name):
        if first:
            np.multiply(values, weight, out=total[where], dtype=np.float64)
            continue
        if room.size < values.size:
            room = np.empty(values.size, np.float64)
        term = np.multiply(values, weight, out=room[: values.size], dtype=np.float64)
        total[where] += term
