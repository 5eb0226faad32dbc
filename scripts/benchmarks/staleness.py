"""Final loss and time to a loss of the aggregation policies when results are late, on one and the same arrival trace.

The real daemons decide, in virtual time (boinc_project/simulator). `--hosts` hosts of unlike speeds (log-normal, sigma
0.5) have one task each, of `--task-s` seconds on the median one; who needs how long follows from the seed and is the
same for all policies. A version is made of K contributions: with fewer of them more versions pass while a task is out.
Each mean lag is a K, hosts / (lag + 1); the lag that came out is measured: the mean age of what was applied, in
versions. The synchronous run waits for all hosts (K = hosts), once with DiLoCo's outer Nesterov step and once with
plain averaging; the better one is the reference. All runs apply the same number of samples, over the same job
(examples/digits, local steps of SGD, cosine schedule), without replication, to which lateness is all the same.

    final loss               held-out loss of the last version; of each policy the median over the seeds
    default_loss_ratio_lag10 final loss of the default policy (buffered) at lag 10 / of the synchronous one; median
    hours                    virtual hours until the held-out loss is below `--target`; "-" if it never is
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from boinc_project.gt_tables import Disposition, gt_ledger
from boinc_project.simulator.client import Habits
from boinc_project.simulator.report import Report, report_of
from boinc_project.simulator.simulation import Settings, simulated
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed
from scripts.benchmarks.simulations import plot_path
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job

GOAL = "<= 1.02"
STARTUP_FLOPS = 1e10  # what a task costs besides its steps (work_generator/workunits.py); they are small beside it here
DEFAULT = "buffered"
SYNCHRONOUS = ("synchronous, Nesterov", "synchronous, averaging")

#: Name in the tables -> policy, [optimizer], further keys of [aggregation]; {hosts}, {count} are filled in.
POLICIES: Mapping[str, tuple[str, str, str]] = {
    SYNCHRONOUS[0]: ("diloco", "lr = 0.7\nmomentum = 0.9\nnesterov = true", ""),
    SYNCHRONOUS[1]: ("diloco", "lr = 1.0\nmomentum = 0.0\nnesterov = false", ""),
    DEFAULT: ("buffered", "lr = 1.0", ""),
    "async (FedAsync)": ("async", "", ""),
    "vc-asgd": ("vc-asgd", "", ""),
    "delayed-nesterov": ("delayed-nesterov", "", "momentum_every = {every}"),
    "decoupled-diloco": ("decoupled-diloco", "", "grace_s = 0"),
}

_SECTIONS = """
[train]
policy = "{policy}"
microtasks_per_version = {count}
local_steps = 4
max_versions = {versions}
evaluate_every = {every}

{outer}

[inner_optimizer]
kind = "sgd"
lr = 0.1

[schedule]
kind = "cosine"
min_ratio = 0.02

{aggregation}

[workunit]
min_quorum = 1
delay_bound_s = 86400

[supply]
extra_replicas = 0
"""


@dataclass(frozen=True)
class Outcome:
    """A run: its report, the mean age of what was applied, held-out loss by virtual hours."""

    report: Report
    lag: float
    curve: tuple[tuple[float, float], ...]

    @property
    def final(self) -> float:
        return self.curve[-1][1]

    def hours_to(self, target: float) -> float | None:
        return next((hours for hours, loss in self.curve if loss <= target), None)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=42, help="hosts (default 42)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--rounds", type=int, default=20, help="versions of the synchronous run (default 20)")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 5, 10, 20], help="mean lags (default 1 5 10 20)")
    parser.add_argument("--task-s", type=float, default=600.0, help="a task's seconds on the median host (default 600)")
    parser.add_argument("--target", type=float, default=0.2, help="held-out loss for the time to it (default 0.2)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """default_loss_ratio_lag10, and the final losses and lags of all policies."""
    print(__doc__)
    outcomes: dict[tuple[str, int], list[Outcome]] = {}
    for name in POLICIES:
        for lag in [0] if name in SYNCHRONOUS else options.lags:
            outcomes[name, lag] = [_run(options, name, lag, seed) for seed in range(options.seeds)]
            print(_line(name, lag, outcomes[name, lag], options.target), flush=True)
    best = min(SYNCHRONOUS, key=lambda name: _final(outcomes[name, 0]))
    print(f"reference: {best}, loss {_final(outcomes[best, 0]):.4f}")
    found: dict[str, float] = {"synchronous_loss": _final(outcomes[best, 0])}
    for (name, lag), runs in outcomes.items():
        if name in SYNCHRONOUS:
            continue
        ratios = [run.final / reference.final for run, reference in zip(runs, outcomes[best, 0], strict=True)]
        key = f"{name.partition(' ')[0].replace('-', '_')}_loss_ratio_lag{lag}"
        found["default_loss_ratio_lag10" if (name, lag) == (DEFAULT, 10) else key] = statistics.median(ratios)
    _draw(outcomes, plot_path("staleness"))
    print(f"plot: {plot_path('staleness')}; goal: default_loss_ratio_lag10 {GOAL}")
    return found


def _final(runs: Sequence[Outcome]) -> float:
    return statistics.median(run.final for run in runs)


def _line(name: str, lag: int, runs: Sequence[Outcome], target: float) -> str:
    hours = [run.hours_to(target) for run in runs]
    return (
        f"{name}, lag {lag}: final loss {_final(runs):.4f} of {[round(run.final, 4) for run in runs]}, measured lag"
        f" {statistics.mean(run.lag for run in runs):.2f}, hours to {target:g}:"
        f" {['-' if each is None else round(each, 2) for each in hours]}"
    )


@cache
def _job(name: str, count: int, hosts: int, versions: int) -> tuple[Job, ExportedJob]:
    """The digits example with this policy; its graphs, which do not depend on the policy."""
    policy, outer, keys = POLICIES[name]
    flow = name not in SYNCHRONOUS
    section = f"[aggregation]\nin_flight = {hosts + hosts // 10}\nmax_age = 10000\n{keys}" if flow else ""
    text = (REPOSITORY / "examples" / "digits" / "job.toml").read_text()
    head = text[: text.index("[train]")].replace("batch_size = 160", "batch_size = 8")
    text = head + _SECTIONS.format(
        policy=policy, count=count, versions=versions, every=max(1, versions // 20),
        outer=f"[optimizer]\n{outer}" if outer else "",
        aggregation=section.format(every=count * max(1, hosts // count)),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(REPOSITORY / "examples" / "digits", folder, dirs_exist_ok=True)
        (Path(folder) / "job.toml").write_text(text)
        job = Job.load(Path(folder))
        return job, _traced(job)


_made: list[ExportedJob] = []


def _traced(job: Job) -> ExportedJob:
    if not _made:
        _made.append(export_job(job))
    return _made[0]


def _run(options: argparse.Namespace, name: str, lag: int, seed: int) -> Outcome:
    count = max(1, round(options.hosts / (lag + 1)))
    versions = round(options.rounds * options.hosts / count)
    job, exported = _job(name, count, options.hosts, versions)
    job = replace(job, config=replace(job.config, job=replace(job.config.job, seed=seed)))
    hosts = synthetic_hosts(options.hosts, seed, flops=STARTUP_FLOPS / options.task_s)
    # A host without work asks again after a fifth of a task's time.
    dry = {"gt_dry_rpc_delay": round(options.task_s / 5)}
    settings = Settings(seed=seed, habits=Habits(tasks_per_processor=1), options=dry)
    with simulated(job, exported, hosts, settings) as simulation:
        simulation.run()
        report = report_of(simulation)
        applied = [row for row in simulation.project.rows(gt_ledger) if row["disposition"] == Disposition.APPLIED]
    if report.last.version != versions:
        raise BenchmarkFailed(f"{name} at lag {lag} ended at version {report.last.version}: {report.note}")
    ages = [int(row["applied_version"]) - 1 - int(row["base_version"]) for row in applied]
    curve = [(each.when_s / 3600, each.evaluation["loss"]) for each in report.versions if each.evaluation]
    return Outcome(report, statistics.mean(ages), tuple(curve))


def _draw(outcomes: Mapping[tuple[str, int], Sequence[Outcome]], path: Path) -> None:
    """Final loss by measured lag, and loss by virtual hours at the lag nearest to 10; a PNG of 1200 x 500 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    middle = min({lag for _, lag in outcomes if lag}, key=lambda lag: abs(lag - 10))
    for name in POLICIES:
        points = sorted(
            (statistics.mean(r.lag for r in runs), _final(runs)) for (n, _), runs in outcomes.items() if n == name
        )
        if name in SYNCHRONOUS:
            left.axhline(points[0][1], linestyle=":", color="gray")
        else:
            left.plot(*zip(*points, strict=True), "o-", label=name)
        curve = outcomes[name, 0 if name in SYNCHRONOUS else middle][0].curve
        right.plot(*zip(*curve, strict=True), ":" if name in SYNCHRONOUS else "-", label=name)
    left.set(xlabel="mean age of what was applied, versions", ylabel="final held-out loss", title="dotted: synchronous")
    right.set(xlabel="virtual hours", ylabel="held-out loss", title=f"lag {middle}, first seed", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
