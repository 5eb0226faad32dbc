"""Robust rules on the contributions of one round against byzfl's, one thread each, in one process.

25 rows of 300,000 float32 numbers, in memory: 20 honest ones, a common signal and noise of unlike strength, and f = 5
that flip its sign. A round runs ours, byzfl's on a PyTorch tensor (as byzfl's own training loop has them) and byzfl's
on a numpy array, one after the other; a speed-up is byzfl's median time over ours. `..._speedup` is against tensors,
`..._speedup_numpy` against arrays. The results must be equal to 1e-6.

Ours also give the same bits on every processor, and read the rows in blocks. byzfl sums Krum's scores over
n - f - 1 neighbours (paper: n - f - 2); ours do so here too.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from assimilator.rules import (
    CenteredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MemoryRows,
    MultiKrum,
    Rule,
    TrimmedMean,
    aggregate,
)
from scripts.benchmarks.common import BenchmarkFailed
from scripts.benchmarks.peers import peer

N, F = 25, 5
AGREEMENT = 1e-6  # largest difference, relative to the largest value
#: The rules that have a goal; the others are measured beside them.
GOALS = ("median", "trimmed_mean", "multi_krum")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", type=int, default=300_000, help="numbers of a contribution (default 300000)")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default 9)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """median_speedup, trimmed_mean_speedup, multi_krum_speedup, the same of other rules, and against arrays."""
    byzfl = peer("byzfl", "aggregators")
    rules: dict[str, tuple[Rule, Callable[[], Callable[[Any], Any]]]] = {
        "median": (Median(), byzfl.Median),
        "trimmed_mean": (TrimmedMean(F), partial(byzfl.TrMean, F)),
        "multi_krum": (MultiKrum(F, nearest=N - F - 1), partial(byzfl.MultiKrum, F)),
        "krum": (Krum(F, nearest=N - F - 1), partial(byzfl.Krum, F)),
        "geometric_median": (GeometricMedian(0.1, 3), partial(byzfl.GeometricMedian, 0.1, 3)),
        # byzfl refuses a previous aggregate of any type; both start from zeros.
        "centered_clipping": (CenteredClipping(100.0, 1), partial(byzfl.CenteredClipping, None, 1, 100.0)),
        "mean": (Mean(), byzfl.Average),
    }
    torch.set_num_threads(1)
    array = _contributions(options.size)
    tensor, rows = torch.from_numpy(array), MemoryRows(array, np.ones(N))
    metrics: dict[str, float] = {}
    with threadpool_limits(1):
        for name, (rule, theirs) in rules.items():
            runs: Mapping[str, Callable[[], Any]] = {
                "ours": partial(aggregate, rule, rows),
                "tensor": partial(_fresh, theirs, tensor),
                "array": partial(_fresh, theirs, array),
            }
            medians = _medians(name, runs, options.rounds)
            metrics[f"{name}_speedup"] = medians["tensor"] / medians["ours"]
            metrics[f"{name}_speedup_numpy"] = medians["array"] / medians["ours"]
            listed = ", ".join(f"{what} {1000 * medians[key]:.1f} ms" for key, what in
                               (("ours", "ours"), ("tensor", "byzfl on tensors"), ("array", "on arrays")))  # fmt: skip
            print(f"{name}{' (goal: 3 times as fast)' if name in GOALS else ''}: {listed}", flush=True)
    return metrics


def _contributions(size: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    draws = np.random.default_rng(0)
    signal = draws.standard_normal(size)
    made = signal + np.linspace(0.6, 1.2, N)[:, None] * draws.standard_normal((N, size))
    made[2 : 2 + F] -= 2 * signal
    return made.astype(np.float32)


def _fresh(rule: Callable[[], Callable[[Any], Any]], rows: Any) -> Any:
    """The result of a new object of byzfl's: its centered clipping goes on from the last result."""
    return rule()(rows)


def _medians(name: str, runs: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each; the first run of each is compared, not timed."""
    results = {key: np.asarray(run(), np.float64) for key, run in runs.items()}
    for key in ("tensor", "array"):
        difference = np.abs(results["ours"] - results[key]).max() / max(1.0, np.abs(results[key]).max())
        if not difference <= AGREEMENT:
            raise BenchmarkFailed(f"{name} differs from byzfl's on {key}s by {difference:.2g}")
    seconds: dict[str, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[key].append(time.perf_counter() - start)
    return {key: statistics.median(values) for key, values in seconds.items()}
