"""Goodput and loss when half of the hosts leave for good, each at a random moment, against the undisturbed run.

The real daemons decide, in virtual time (boinc_project/simulator); gradients and losses are real. The model is that of
examples/digits; so that a task takes minutes, as production tasks should, the hosts are made slow: `--task-s` seconds
for a microtask on the median one. Who leaves, when, and how fast each host is, follow from the seed; departures are
spread over the time that the undisturbed run takes. Every workunit has a quorum of 2, which is not counted as waste;
further copies are. Both runs of a seed share what they compute: the same microtask over the same version.

`--policy`: sync (AdamW on gradients) or any other, with local steps of SGD, 4 a task, where it has them. Rounds are of
`--microtasks`; a flow makes a version of as many as there are hosts, twice as many are in flight, and it makes so many
versions that the same samples are applied.

    goodput          unique applied host-seconds / (host-seconds available / replication); median over the seeds
    loss_ratio       held-out loss of the last version, disturbed / undisturbed, at equal applied samples; the largest
    goodput_calm     goodput of the undisturbed runs
    slowdown         virtual time of the disturbed run / of the undisturbed one
"""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import statistics
import tempfile
from pathlib import Path

from boinc_project.policies import POLICIES
from boinc_project.simulator.computing import Computer
from boinc_project.simulator.hosts import with_departures
from boinc_project.simulator.report import DEFINITIONS, Report, draw
from boinc_project.simulator.simulation import Settings
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed
from scripts.benchmarks.simulations import LONG_TASKS, plot_path, run
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job

GOALS = {"goodput": ">= 0.88", "loss_ratio": "<= 1.021"}
STARTUP_FLOPS = 1e10  # what a task costs besides its steps (work_generator/workunits.py); they are small beside it here

BATCH, LOCAL_STEPS = 32, 4

_SECTIONS = """
[train]
policy = "{policy}"
microtasks_per_version = {count}
max_versions = {versions}
evaluate_every = {versions}
{rest}
[workunit]
min_quorum = 2
delay_bound_s = 86400

[supply]
straggler_after_s = {straggler}
"""
_LOCAL = """local_steps = {steps}

[inner_optimizer]
kind = "sgd"
lr = 0.1
"""
_ADAMW = """
[optimizer]
kind = "adamw"
lr = 0.01
weight_decay = 0.01
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=16, help="hosts at the beginning (default 16)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--policy", choices=sorted(POLICIES), default="sync", help="aggregation policy (default sync)")
    parser.add_argument("--versions", type=int, default=3, help="model versions (default 3)")
    parser.add_argument("--microtasks", type=int, default=384, help="microtasks of a version (default 384)")
    parser.add_argument("--task-s", type=float, default=300.0, help="a task's seconds on the median host (default 300)")
    parser.add_argument("--patience", type=float, default=4.0, help="task times until a copy is late (default 4)")
    parser.add_argument("--leave", type=float, default=0.5, help="share of hosts that leave (default 0.5)")
    parser.add_argument("--on-share", type=float, default=1.0, help="share of time for which hosts are on (default 1)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """goodput, loss_ratio, goodput_calm, slowdown, copies_per_accepted."""
    print(__doc__)
    print(DEFINITIONS)
    job = _job(options)
    pairs = [_pair(options, job, seed) for seed in range(options.seeds)]
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


def _job(options: argparse.Namespace) -> tuple[Job, ExportedJob]:
    """The digits example under the policy."""
    facts, policy = POLICIES[options.policy], options.policy
    count, versions, rest = options.microtasks, options.versions, _LOCAL.format(steps=LOCAL_STEPS)
    if facts.inner is not True:
        rest = _ADAMW
    elif facts.outer and "lr" not in facts.outer_defaults:
        rest += "\n[optimizer]\nlr = 1.0\n"
    if facts.flow:
        count = options.hosts
        versions = -(-options.versions * options.microtasks // count)
        rest += f"\n[aggregation]\nin_flight = {2 * count}\n"
    text = (REPOSITORY / "examples" / "digits" / "job.toml").read_text()
    head = text[: text.index("[train]")].replace("batch_size = 160", f"batch_size = {BATCH}")
    text = head + _SECTIONS.format(
        policy=policy, count=count, versions=versions, rest=rest, straggler=round(options.patience * options.task_s)
    )
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(REPOSITORY / "examples" / "digits", folder, dirs_exist_ok=True)
        (Path(folder) / "job.toml").write_text(text)
        job = Job.load(Path(folder))
        return job, export_job(job)


def _pair(options: argparse.Namespace, made: tuple[Job, ExportedJob], seed: int) -> tuple[Report, Report]:
    """The undisturbed and the disturbed run of a seed."""
    config = made[0].config
    config = dataclasses.replace(config, job=dataclasses.replace(config.job, seed=seed))
    job = dataclasses.replace(made[0], config=config), made[1]
    train = config.train
    flops = STARTUP_FLOPS / options.task_s
    hosts = synthetic_hosts(options.hosts, seed, flops=flops, on_share=options.on_share)
    settings = Settings(seed=seed, options=LONG_TASKS)
    computer = Computer(kept=train.max_versions * train.microtasks_per_version + 1000)
    calm = run(job, hosts, settings, computer=computer)
    print(f"seed {seed}, undisturbed: {calm.text()}", flush=True)
    leaving = with_departures(hosts, options.leave, calm.last.when_s, seed)
    disturbed = run(job, leaving, settings, computer=computer)
    print(f"seed {seed}, {options.leave:.0%} leave: {disturbed.text()}", flush=True)
    for report in (calm, disturbed):
        if report.last.version != train.max_versions:
            raise BenchmarkFailed(f"a run ended at version {report.last.version}: {report.note}")
    return calm, disturbed


def _loss_ratio(calm: Report, disturbed: Report) -> float:
    if calm.applied_samples != disturbed.applied_samples:
        raise BenchmarkFailed(f"{disturbed.applied_samples} samples were applied, {calm.applied_samples} undisturbed")
    return disturbed.last.evaluation["loss"] / calm.last.evaluation["loss"]
