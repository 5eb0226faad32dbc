"""`scripts/bench bytes`: what DDP is said to send, and that it is given our batches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from boinc_project.plan import DataPlan
from boinc_project.plan import batches_of_microtask as batches_of
from scripts.benchmarks.bytes_ddp import ring_bytes, rows_of


def test_a_ring_of_8_workers_sends_56_bytes_for_each_parameter() -> None:
    assert ring_bytes(8, 1) == 56  # 8 x 2 x 7 / 8 x 4


def test_each_worker_of_ddp_has_in_step_h_what_its_microtask_has_in_local_step_h() -> None:
    workers, steps, versions = 3, 4, 2
    train = SimpleNamespace(microtasks_per_version=workers, local_steps=steps, max_versions=versions)
    job = cast(Any, SimpleNamespace(config=SimpleNamespace(train=train)))
    plan = DataPlan(seed=5, rows=(7, 6), batch_size=2, full_batches=False)
    found = rows_of(job, plan)
    assert len(found) == versions * steps
    for version in range(versions):
        for slot in range(workers):
            batches, used = batches_of(plan, version * workers + slot, steps)
            for inside, batch in enumerate(batches):
                expected = [7 * used[shard] + row for shard, row in zip(batch.shards, batch.rows, strict=True)]
                assert np.array_equal(found[version * steps + inside][slot], expected)
