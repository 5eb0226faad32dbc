"""Goodput and loss when half of the hosts leave for good, each at a random moment, against the undisturbed run.

The real daemons decide, in virtual time (boinc_project/simulator); gradients and losses are real. The model is that of
examples/digits; so that a task takes minutes, as production tasks should, the hosts are made slow: `--task-s` seconds
for a microtask on the median one. Who leaves, when, and how fast each host is, follow from the seed; departures are
spread over the time that the undisturbed run takes. Every workunit has a quorum of 2, which is not counted as waste;
further copies are.

    goodput          unique applied host-seconds / (host-seconds available / replication); median over the seeds
    loss_ratio       training loss of the last version, disturbed / undisturbed, at equal applied samples; the largest
    goodput_calm     goodput of the undisturbed runs
    slowdown         virtual time of the disturbed run / of the undisturbed one
"""

from __future__ import annotations

import argparse
import statistics

from boinc_project.simulator.hosts import with_departures
from boinc_project.simulator.report import DEFINITIONS, Report, draw
from boinc_project.simulator.simulation import Settings
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.common import BenchmarkFailed
from scripts.benchmarks.simulations import LONG_TASKS, example, plot_path, run

GOALS = {"goodput": ">= 0.88", "loss_ratio": "<= 1.021"}
STARTUP_FLOPS = 1e10  # what a task costs besides its steps (work_generator/workunits.py); they are small beside it here


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=16, help="hosts at the beginning (default 16)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--versions", type=int, default=5, help="model versions (default 5)")
    parser.add_argument("--microtasks", type=int, default=384, help="microtasks of a version (default 384)")
    parser.add_argument("--task-s", type=float, default=300.0, help="a task's seconds on the median host (default 300)")
    parser.add_argument("--patience", type=float, default=4.0, help="task times until a copy is late (default 4)")
    parser.add_argument("--leave", type=float, default=0.5, help="share of hosts that leave (default 0.5)")
    parser.add_argument("--on-share", type=float, default=1.0, help="share of time for which hosts are on (default 1)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """goodput, loss_ratio, goodput_calm, slowdown, copies_per_accepted."""
    print(__doc__)
    print(DEFINITIONS)
    pairs = [_pair(options, seed) for seed in range(options.seeds)]
    reports = {f"seed {seed}, {name}": report for seed, pair in enumerate(pairs)
               for name, report in zip(("undisturbed", "half leave"), pair, strict=True)}  # fmt: skip
    path = plot_path("churn")
    draw(reports, path)
    print(f"plot: {path}")
    goodput = [disturbed.goodput for _, disturbed in pairs]
    ratios = [_loss_ratio(*pair) for pair in pairs]
    print(f"goodput {[round(each, 4) for each in goodput]} (goal {GOALS['goodput']})")
    same = [calm.digests == disturbed.digests for calm, disturbed in pairs]
    print(f"loss ratios {ratios} (goal {GOALS['loss_ratio']}); all versions bit for bit the undisturbed ones: {same}")
    return {
        "goodput": statistics.median(goodput),
        "goodput_worst": min(goodput),
        "loss_ratio": max(ratios),
        "goodput_calm": statistics.median(calm.goodput for calm, _ in pairs),
        "slowdown": statistics.median(b.last.when_s / a.last.when_s for a, b in pairs),
        "copies_per_accepted": statistics.median(b.copies_per_accepted for _, b in pairs),
    }


def _pair(options: argparse.Namespace, seed: int) -> tuple[Report, Report]:
    """The undisturbed and the disturbed run of a seed."""
    sections = {
        "job": {"seed": seed},
        "train": {"microtasks_per_version": options.microtasks, "batches_per_microtask": 1,
                  "max_versions": options.versions, "evaluate_every": options.versions},
        "supply": {"straggler_after_s": round(options.patience * options.task_s)},
        "workunit": {"delay_bound_s": 86400},
    }  # fmt: skip
    job = example("digits", 32, sections)
    flops = STARTUP_FLOPS / options.task_s
    hosts = synthetic_hosts(options.hosts, seed, flops=flops, on_share=options.on_share)
    settings = Settings(seed=seed, options=LONG_TASKS)
    calm = run(job, hosts, settings)
    print(f"seed {seed}, undisturbed: {calm.text()}", flush=True)
    leaving = with_departures(hosts, options.leave, calm.last.when_s, seed)
    disturbed = run(job, leaving, settings)
    print(f"seed {seed}, {options.leave:.0%} leave: {disturbed.text()}", flush=True)
    for report in (calm, disturbed):
        if report.last.version != options.versions:
            raise BenchmarkFailed(f"a run ended at version {report.last.version}: {report.note}")
    return calm, disturbed


def _loss_ratio(calm: Report, disturbed: Report) -> float:
    if calm.applied_samples != disturbed.applied_samples:
        raise BenchmarkFailed(f"{disturbed.applied_samples} samples were applied, {calm.applied_samples} undisturbed")
    return disturbed.losses()[-1][1] / calm.losses()[-1][1]
