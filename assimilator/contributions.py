"""Contributions: validated updates, what each of them counts, and their files one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.update import OpenUpdate

Array = npt.NDArray[Any]


class NothingToFold(Exception):
    """All contributions of a version together have no weight."""


@dataclass(frozen=True)
class Contribution:
    """One validated update, by the server's own record.

    slot, base_version  its place, and the version that it was computed from
    samples, steps      what it has seen
    part                which part of the model it is about, where contributions are about parts
    weight              validation x reliability of the host: a mean is divided by the sum of these
    age_weight          factor for its age, by which a mean is not divided: late contributions make a smaller step
    equal               it counts as much as any other, whatever it has seen
    load                reads the file when it is needed; called from another thread, one after the other
    """

    slot: int
    samples: int
    load: Callable[[], OpenUpdate]
    base_version: int = 0
    steps: int = 1
    part: int = 0
    weight: float = 1.0
    age_weight: float = 1.0
    equal: bool = False

    @property
    def share(self) -> float:
        """What it counts beside others: its samples by its weight."""
        return (min(self.samples, 1) if self.equal else self.samples) * self.weight


def in_order(contributions: Sequence[Contribution]) -> list[Contribution]:
    """The one order in which they are folded, in whatever order they arrived."""
    return sorted(contributions, key=lambda each: (each.base_version, each.slot))


def loaded(ordered: Sequence[Contribution]) -> Iterator[tuple[Contribution, OpenUpdate]]:
    """Each contribution with its update; the next one is read while the caller works on this one."""
    with ThreadPoolExecutor(1, thread_name_prefix="payload") as reader:
        coming = reader.submit(ordered[0].load)
        for number, contribution in enumerate(ordered):
            update = coming.result()
            if number + 1 < len(ordered):
                coming = reader.submit(ordered[number + 1].load)
            yield contribution, update


def parameters_in(update: OpenUpdate) -> dict[str, str]:
    """Parameter name -> name of its tensor in an update of either mode, of those that have travelled."""
    names = (name for name in update.types if name.startswith(("gradient/", "delta/")))
    return {name.partition("/")[2]: name for name in names if update.carries(name)}


#: Buffers, and the inner optimizer's state where that is shipped: averaged, and never given an optimizer step.
CARRIED = ("buffer/", "optimizer/")


def averaged_in(update: OpenUpdate) -> list[str]:
    """Names in the update of what is averaged; of integer buffers the largest value is kept."""
    return [name for name, kind in update.types.items() if name.startswith(CARRIED) and kind.dtype == "float32"]


class WeightedSum:
    """sum_i c_i x_i of named tensors in float64, piece by piece, from the first contribution to the last."""

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}

    def add(self, key: str, update: OpenUpdate, name: str, weight: float) -> None:
        """sums[key] += weight * tensor, where the first term is assigned (so that -0.0 stays what it is)."""
        first = key not in self._sums
        if first:
            self._sums[key] = np.empty(update.types[name].shape, np.float64)
        total = self._sums[key].reshape(-1)
        room = np.empty(0, np.float64)
        for where, values in update.pieces(name):
            if first:
                np.multiply(values, weight, out=total[where], dtype=np.float64)
                continue
            if room.size < values.size:
                room = np.empty(values.size, np.float64)
            term = np.multiply(values, weight, out=room[: values.size], dtype=np.float64)
            total[where] += term

    def take(self) -> Iterator[tuple[str, Array]]:
        """The sums, each rounded to float32 once; they are used up."""
        return ((key, array.astype(np.float32)) for key, array in self.take_exact())

    def take_exact(self) -> Iterator[tuple[str, Array]]:
        """The sums in float64; they are used up."""
        for key in list(self._sums):
            yield key, self._sums.pop(key)
