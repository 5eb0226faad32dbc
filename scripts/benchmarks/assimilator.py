"""Intake and folding by the assimilator daemon, one process, on MariaDB with a durable commit.

bookkeeping   workunits with updates of about 1 KiB: payloads verified, copied and made durable, ledger rows,
              microtask and workunit states. Measured from the moment they are ready until the last one is done.
fold1m        updates of 1,000,000 int8 codes: from ready workunits to the published version, with the payloads'
              intake, the fold, AdamW's step, the files of the version and its publication.

Memory is what the kernel's high-water mark of the daemon's resident set lies above its resident set after an
idle pass and one small intake, in sizes of the model (4 bytes per parameter).
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import psutil

from scripts.benchmarks.common import commit_latency, scratch, shown
from scripts.benchmarks.jobs import BenchProject, daemon, peak_bytes, project_on_mariadb, reset_peak, wait_until

SMALL_WIDTH, SMALL_LAYERS = 16, 2  # 544 parameters
LARGE_WIDTH, LARGE_LAYERS = 499, 4  # 998,000 parameters


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--small", type=int, default=1200, help="small workunits of one repeat (default 1200)")
    parser.add_argument("--large", type=int, default=60, help="large updates of one version (default 60)")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of each (default 3)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """bookkeeping_wu_per_s and fold1m_wu_per_s (medians), peak_memory_copies (largest)."""
    with scratch("assimilator") as folder, project_on_mariadb(folder) as project:
        print(f"one durable 4 KB write takes {1000 * commit_latency(folder):.2f} ms here (median)")
        small = project.add_job(
            folder / "small", "small", width=SMALL_WIDTH, layers=SMALL_LAYERS, slots=options.small * options.repeats + 1
        )
        project.issue()
        ids = project.answer(small)
        print(f"{len(ids)} small workunits with two valid results each are there", flush=True)
        with daemon(project, "assimilator") as process:
            _take_in(project, ids[-1:])
            counts = [
                _take_in(project, ids[n * options.small : (n + 1) * options.small]) for n in range(options.repeats)
            ]
            print(f"bookkeeping: {shown(counts, 'workunits/s')}", flush=True)
            folds, copies = _fold(project, process, folder, options)
    return {
        "bookkeeping_wu_per_s": statistics.median(counts),
        "fold1m_wu_per_s": statistics.median(folds),
        "peak_memory_copies": max(copies),
    }


def _take_in(project: BenchProject, ids: list[int]) -> float:
    """Workunits per second from ready to done."""
    project.hand_over(ids)
    start = time.perf_counter()
    wait_until(lambda: not project.some_ready(), "the assimilator does not finish the small workunits")
    return len(ids) / (time.perf_counter() - start)


def _fold(
    project: BenchProject, process: psutil.Process, folder: Path, options: argparse.Namespace
) -> tuple[list[float], list[float]]:
    """Updates per second, and copies of the model in memory, of each version."""
    large = project.add_job(folder / "large", "large", width=LARGE_WIDTH, layers=LARGE_LAYERS, slots=options.large)
    model_bytes = 4 * LARGE_LAYERS * (LARGE_WIDTH * LARGE_WIDTH + LARGE_WIDTH)
    rest = process.memory_info().rss
    rates, copies = [], []
    for version in range(1, options.repeats + 1):
        project.issue()
        ids = project.answer(large)
        reset_peak(process)
        project.hand_over(ids)
        start = time.perf_counter()
        wait_until(
            lambda wanted=version: project.current_version(large) == wanted,  # type: ignore[misc]
            "the assimilator does not publish the version",
        )
        rates.append(len(ids) / (time.perf_counter() - start))
        copies.append((peak_bytes(process) - rest) / model_bytes)
    print(f"model of {model_bytes // 4} parameters, {options.large} updates a version: {shown(rates, 'per second')}")
    print(f"memory above the idle daemon's {rest / 1e6:.0f} MB: {shown(copies, 'sizes of the model')}")
    return rates, copies
