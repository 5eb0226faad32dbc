"""Which samples a microtask gets: a pure function of the job's seed and the microtask's place.

Every epoch visits the shards in a shuffled order and the rows of each shard in a shuffled order, so that a
microtask touches few shards however large the data are; with a single shard this is a full shuffle. The
batches of an epoch are numbered on through all versions:

    batch number = number of the microtask * batches per microtask + batch

or, where microtasks have unlike numbers of batches, first batch of the microtask + batch (speed_classes.py). Two
microtasks never share a batch, the same one issued again gets the same batches, and nothing depends on who
computes what or when.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.microtask import Batch

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class DataPlan:
    """rows: rows of each shard. full_batches: leave out an epoch's last batch if it is not full."""

    seed: int
    rows: tuple[int, ...]
    batch_size: int
    full_batches: bool

    @property
    def batches_per_epoch(self) -> int:
        samples = sum(self.rows)
        if self.full_batches:
            return samples // self.batch_size
        return -(-samples // self.batch_size)

    def samples_of(self, batch_number: int) -> tuple[Array, Array]:
        """(shard, row) of each sample of the batch with this number, as two int64 arrays."""
        epoch, place = divmod(batch_number, self.batches_per_epoch)
        shards, rows = _epoch_order(self.seed, epoch, self.rows)
        chosen = slice(place * self.batch_size, (place + 1) * self.batch_size)
        return shards[chosen], rows[chosen]


@lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, rows: tuple[int, ...]) -> tuple[Array, Array]:
    generator = np.random.Generator(np.random.Philox(key=[seed, epoch]))
    order = generator.permutation(len(rows))
    shards = [np.full(rows[shard], shard, np.int64) for shard in order]
    inside = [generator.permutation(rows[shard]).astype(np.int64) for shard in order]
    return np.concatenate(shards), np.concatenate(inside)


def batches_of_microtask(plan: DataPlan, number: int, batches: int) -> tuple[tuple[Batch, ...], tuple[int, ...]]:
    """The batches of the job's microtask `number`, where all have so many, and the shards they use."""
    return batches_from(plan, number * batches, batches)


def batches_from(plan: DataPlan, first: int, batches: int) -> tuple[tuple[Batch, ...], tuple[int, ...]]:
    """So many batches from the one with number `first` on, and the shards they use: Batch.shards number the entries of
    that list."""
    drawn = [plan.samples_of(first + index) for index in range(batches)]
    used = sorted({int(shard) for shards, _ in drawn for shard in shards})
    place = {shard: number for number, shard in enumerate(used)}
    made = tuple(
        Batch(tuple(place[int(shard)] for shard in shards), tuple(int(row) for row in rows)) for shards, rows in drawn
    )
    return made, tuple(used)
