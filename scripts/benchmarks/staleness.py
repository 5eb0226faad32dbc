"""Final loss and time to a loss of the aggregation policies when results are late, on one and the same arrival trace.

`--hosts` hosts of unlike speeds (log-normal, sigma 0.5) have one task each, of `--task-s` seconds on the median one;
the real daemons decide, in virtual time (boinc_project/simulator). A version is made of the first K contributions: with
fewer of them more versions pass while a task is out. Each mean lag is a K, hosts / (lag + 1); for lags above hosts - 1
every host has two tasks. The lag that came out is measured: the mean age of what was applied, in versions. For each lag
and seed one simulation, of the default policy, gives the trace; the other policies go through it by replay
(scripts/benchmarks/arrivals.py), and so does the default once more, to show that the replay tells the same. The
synchronous run (DiLoCo: K = hosts, everybody waits for the slowest) is simulated too. All apply the same samples, once
each, without replication, to which lateness is all the same.

The job is scripts/benchmarks/next_character: characters of a text too long to be learnt by heart, so that the held-out
loss is still falling at the end and tells one policy from another (`synchronous, half` is the synchronous run with half
of the samples). Local steps of SGD with momentum 0.9, gradients clipped to the norm 1, cosine schedule. (Without
clipping one batch in some thousands makes a gradient a thousand times as long as the others, whatever the policy.)

Rates: every policy, the synchronous one included, has its inner rate, outer rate (of the mixing policies the mixing
rate) and outer momentum from the same grid, at lag 10, with a seed that is not among the reported ones. `--tune` finds
them again; they are in scripts/benchmarks/next_character/rates.json. At other lags the outer rate is multiplied by
11 / (lag + 1), up to 1: what is moved while a result is under way stays the same. All other keys of [aggregation] are
job.toml's defaults, but for max_age, so that all apply the same samples.

    final loss               held-out loss of the last version, nats a character; median over the seeds
    default_loss_ratio_lag10 final loss of the default policy (delay-compensated) at lag 10 / synchronous; median of
                             the seeds' ratios, as all ratios
    hours                    virtual hours until the held-out loss is below `--target`; "-" if it never is
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from boinc_project.job_config import JobConfig
from boinc_project.simulator.client import Habits
from boinc_project.simulator.computing import Computer
from boinc_project.simulator.report import report_of
from boinc_project.simulator.simulation import Settings, simulated
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.arrivals import Arrivals, recorded, replay
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed, fresh_processes
from scripts.benchmarks.next_character.characters import losses
from scripts.benchmarks.simulations import plot_path
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job, load_config

GOAL = "<= 1.02"
STARTUP_FLOPS = 1e10  # what a task costs besides its steps (work_generator/workunits.py); they are small beside it here
FOLDER = REPOSITORY / "scripts" / "benchmarks" / "next_character"
RATES = FOLDER / "rates.json"
TUNING_SEED, TUNING_LAG = 1000, 10
TUNING_MARGIN = 1.15  # of the best loss, beyond which rates are given up in the second half of a run
GRID: Mapping[str, Sequence[float]] = {
    "inner": (0.2, 0.4, 0.6), "outer": (0.06, 0.12, 0.25, 0.35, 0.5, 0.7, 1.0), "momentum": (0.0, 0.3, 0.6, 0.8),
}  # fmt: skip

SYNCHRONOUS = "synchronous"
DEFAULT = "delay-compensated"
#: Name in the tables -> policy.
POLICIES: Mapping[str, str] = {
    SYNCHRONOUS: "diloco",
    DEFAULT: DEFAULT,
    "buffered (FedBuff)": "buffered",
    "async (FedAsync)": "async",
    "vc-asgd": "vc-asgd",
    "delayed-nesterov": "delayed-nesterov",
}

_SECTIONS = """
[train]
policy = "{policy}"
microtasks_per_version = {count}
local_steps = {steps}
max_versions = {versions}
evaluate_every = {every}

{outer}

[inner_optimizer]
kind = "sgd"
lr = {inner}
momentum = 0.9
max_norm = 1

[schedule]
kind = "cosine"
warmup_versions = {warmup}

{aggregation}

[workunit]
min_quorum = 1
delay_bound_s = 86400

[supply]
extra_replicas = 0
"""


@dataclass(frozen=True)
class Rates:
    """outer: of the step from version to version, or the mixing rate."""

    inner: float
    outer: float
    momentum: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """Mean age of what was applied; held-out loss by virtual hours."""

    lag: float
    curve: Sequence[tuple[float, float]]

    @property
    def final(self) -> float:
        loss = self.curve[-1][1]
        return loss if math.isfinite(loss) else math.inf

    def hours_to(self, target: float) -> float | None:
        return next((hours for hours, loss in self.curve if loss <= target), None)


@dataclass(frozen=True)
class Seed:
    """What came of a seed. half: the synchronous run's final loss with half of the samples. apart: by how much the
    default's final loss differs, relatively, between simulation and replay."""

    outcomes: dict[tuple[str, int], Outcome]
    half: float
    apart: list[float] = field(default_factory=list)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hosts", type=int, default=11, help="hosts (default 11)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--rounds", type=int, default=40, help="versions of the synchronous run (default 40)")
    parser.add_argument("--steps", type=int, default=32, help="local steps of a task (default 32)")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 5, 10, 20], help="mean lags (default 1 5 10 20)")
    parser.add_argument("--task-s", type=float, default=600.0, help="a task's seconds on the median host (default 600)")
    parser.add_argument("--target", type=float, default=2.0, help="held-out loss for the time to it (default 2)")
    parser.add_argument("--processes", type=int, default=2, help="seeds at a time (default 2)")
    parser.add_argument("--tune", nargs="*", metavar="NAME", help="find the rates of these policies again (of all)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """default_loss_ratio_lag10, and the final losses and lags of all policies."""
    print(__doc__)
    if options.tune is not None:
        with _bench(options) as bench:
            return bench.tune(options.tune or list(POLICIES))
    stored = _stored()
    print(f"rates: { ({name: stored[name] for name in POLICIES}) }", flush=True)
    with fresh_processes(options.processes) as pool:
        return told(list(pool.map(partial(_of_seed, options), range(options.seeds))), options.target)


def _of_seed(options: argparse.Namespace, seed: int) -> Seed:
    with _bench(options) as bench:
        return bench.one(seed)


@contextmanager
def _bench(options: argparse.Namespace) -> Iterator[_Bench]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        yield _Bench(options, Path(name))


def told(seeds: Sequence[Seed], target: float) -> dict[str, float]:
    """Print and draw what came of all seeds; the metrics."""
    outcomes = {key: [seed.outcomes[key] for seed in seeds] for key in seeds[0].outcomes}
    print("\nall seeds")
    for (name, lag), runs in outcomes.items():
        print(_line(name, lag, runs, target))
    print(f"synchronous, half: {[round(seed.half, 4) for seed in seeds]}")
    apart = max(each for seed in seeds for each in seed.apart)
    print(f"replay of the default against its simulation: final losses at most {apart:.2g} apart, relatively")
    _draw(outcomes, plot_path("staleness"))
    print(f"plot: {plot_path('staleness')}; goal: default_loss_ratio_lag10 {GOAL}")
    return _figures(outcomes) | {"synchronous_half_loss": statistics.median(seed.half for seed in seeds)}


class _Bench:
    """The job, traced once, and what is done with it."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        shutil.copytree(FOLDER, folder, dirs_exist_ok=True)
        self._options, self._folder = options, folder
        self._head = (FOLDER / "job.toml").read_text()
        job = Job.load(self._config(SYNCHRONOUS, 0, Rates(0.1, 1.0, 0.9), 0))
        self._made: tuple[Job, ExportedJob] = job, export_job(job)

    # Settings.

    def _count(self, name: str, lag: int) -> int:
        """K: contributions that make a version."""
        hosts: int = self._options.hosts
        return hosts if name == SYNCHRONOUS else max(1, round(hosts / (lag + 1) - 0.01))

    def _config(self, name: str, lag: int, rates: Rates, seed: int) -> JobConfig:
        options, policy, count = self._options, POLICIES[name], self._count(name, lag)
        versions = options.rounds * options.hosts // count
        turns = max(1, options.hosts // count)
        outer, keys = rates.outer, ""
        if name != SYNCHRONOUS:
            outer = min(1.0, rates.outer * (TUNING_LAG + 1) / (lag + 1))
            keys = f"[aggregation]\nin_flight = {self._in_flight(lag)}\nmax_age = 10000\n"
        section = f"[optimizer]\nlr = {outer}\nmomentum = {rates.momentum}\n"
        section += f"nesterov = {'true' if rates.momentum else 'false'}\n"
        if policy in ("async", "vc-asgd"):
            section, keys = "", f"{keys}mixing_rate = {outer}\n"
        if policy == "delayed-nesterov":  # a version takes an N / K-th of its rate
            section = f"[optimizer]\nlr = {outer * turns}\nmomentum = {rates.momentum or 1e-9}\n"
            keys += f"momentum_every = {count * turns}\n"
        text = self._head.replace("[job]", f"[job]\nseed = {seed}") + _SECTIONS.format(
            policy=policy, count=count, steps=options.steps, versions=versions, every=max(1, versions // 20),
            outer=section, inner=rates.inner, warmup=max(1, versions // 15), aggregation=keys,
        )  # fmt: skip
        (self._folder / "job.toml").write_text(text)
        return load_config(self._folder)

    def _in_flight(self, lag: int) -> int:
        """A tenth more than the hosts hold, so that none waits."""
        hosts: int = self._options.hosts
        return hosts * self._tasks(lag) + hosts // 10

    def _tasks(self, lag: int) -> int:
        """Tasks that each host has at a time."""
        return 1 if lag < self._options.hosts else 2

    # Runs.

    def _job(self, config: JobConfig) -> tuple[Job, ExportedJob]:
        """The job with these settings; its weights are those of its seed."""
        job, exported = self._made
        if job.config.job.seed != config.job.seed:
            self._made = job, exported = (made := Job.load(config)), export_job(made)
        return replace(job, config=config), exported

    def _simulated(self, name: str, lag: int, rates: Rates, seed: int) -> tuple[Outcome, Arrivals]:
        options, config = self._options, self._config(name, lag, rates, seed)
        job, exported = self._job(config)
        hosts = synthetic_hosts(options.hosts, seed, flops=STARTUP_FLOPS / options.task_s)
        # A host without work asks again after a fifth of a task's time.
        dry = {"gt_dry_rpc_delay": round(options.task_s / 5)}
        habits = Habits(tasks_per_processor=self._tasks(lag))
        settings = Settings(seed=seed, habits=habits, options=dry)
        with simulated(job, exported, hosts, settings, computer=Computer("torch")) as simulation:
            simulation.run()
            report, arrivals = report_of(simulation), recorded(simulation)
        if report.last.version != config.train.max_versions:
            raise BenchmarkFailed(f"{name} at lag {lag} ended at version {report.last.version}: {report.note}")
        curve = [(each.when_s / 3600, each.evaluation["loss"]) for each in report.versions if each.evaluation]
        return Outcome(arrivals.lag, curve), arrivals

    def _replayed(self, arrivals: Arrivals, configs: Sequence[JobConfig], margin: float = math.inf) -> list[Outcome]:
        every = configs[0].train.evaluate_every
        curves = replay(*self._job(configs[0]), losses, configs, arrivals, every, margin)
        return [Outcome(arrivals.lag, curve) for curve in curves]

    def one(self, seed: int) -> Seed:
        """All runs of a seed."""
        options, stored = self._options, _stored()
        reference, trace = self._simulated(SYNCHRONOUS, 0, stored[SYNCHRONOUS], seed)
        print(f"seed {seed}: {_line(SYNCHRONOUS, 0, [reference], options.target)}", flush=True)
        made = Seed({(SYNCHRONOUS, 0): reference}, self._half(trace, stored[SYNCHRONOUS], seed))
        for lag in options.lags:
            whole, arrivals = self._simulated(DEFAULT, lag, stored[DEFAULT], seed)
            names = [name for name in POLICIES if name != SYNCHRONOUS]
            configs = [self._config(name, lag, stored[name], seed) for name in names]
            found = dict(zip(names, self._replayed(arrivals, configs), strict=True))
            made.apart.append(abs(found[DEFAULT].final / whole.final - 1))
            for name, outcome in {**found, DEFAULT: whole}.items():
                made.outcomes[name, lag] = outcome
                print(f"seed {seed}: {_line(name, lag, [outcome], options.target)}", flush=True)
        return made

    def _half(self, trace: Arrivals, rates: Rates, seed: int) -> float:
        """Final loss of the synchronous run with half of the rounds, scheduled for these."""
        config = self._config(SYNCHRONOUS, 0, rates, seed)
        rounds = config.train.max_versions // 2
        config = replace(config, train=replace(config.train, max_versions=rounds))
        config = replace(config, schedule=replace(config.schedule, total_versions=rounds))
        shorter = Arrivals(trace.rounds[:rounds], trace.hours[:rounds])
        return replay(*self._job(config), losses, [config], shorter, rounds)[0][-1][1]

    def tune(self, names: Sequence[str]) -> dict[str, float]:
        """Find and store the rates of these policies: the least final loss on the tuning seed."""
        stored = _stored()
        found: dict[str, float] = {}
        for some in ([n for n in names if n == SYNCHRONOUS], [n for n in names if n != SYNCHRONOUS]):
            if not some:
                continue
            trace = self._simulated(some[0], TUNING_LAG, Rates(0.1, 0.1, 0.1), TUNING_SEED)[1]
            tried = [(name, rates) for name in some for rates in self._grid(name)]
            configs = [self._config(name, TUNING_LAG, rates, TUNING_SEED) for name, rates in tried]
            outcomes = self._replayed(trace, configs, TUNING_MARGIN)
            for (name, rates), outcome in zip(tried, outcomes, strict=True):
                print(f"{name}: {rates}: {outcome.final:.4f}", flush=True)
            for name in some:
                best = min((outcome.final, index) for index, outcome in enumerate(outcomes) if tried[index][0] == name)
                stored[name], found[f"{_key(name)}_tuned_loss"] = tried[best[1]][1], best[0]
                print(f"{name}: {stored[name]}, loss {best[0]:.4f}", flush=True)
        RATES.write_text(json.dumps({name: vars(rates) for name, rates in stored.items()}, indent=2) + "\n")
        return found

    def _grid(self, name: str) -> list[Rates]:
        """The grid, without momenta where a policy has none."""
        momenta = GRID["momentum"][:1] if POLICIES[name] in ("async", "vc-asgd") else GRID["momentum"]
        return [Rates(*each) for each in itertools.product(GRID["inner"], GRID["outer"], momenta)]


def _stored() -> dict[str, Rates]:
    if not RATES.exists():
        return {}
    return {name: Rates(**values) for name, values in json.loads(RATES.read_text()).items()}


def _key(name: str) -> str:
    return name.partition(" ")[0].replace("-", "_")


def _figures(outcomes: Mapping[tuple[str, int], Sequence[Outcome]]) -> dict[str, float]:
    references = outcomes[SYNCHRONOUS, 0]
    found: dict[str, float] = {"synchronous_loss": _final(references)}
    for (name, lag), runs in outcomes.items():
        if name == SYNCHRONOUS:
            continue
        ratios = [min(run.final / reference.final, 99.0) for run, reference in zip(runs, references, strict=True)]
        found[f"{'default' if name == DEFAULT else _key(name)}_loss_ratio_lag{lag}"] = statistics.median(ratios)
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


def _draw(outcomes: Mapping[tuple[str, int], Sequence[Outcome]], path: Path) -> None:
    """Final loss by measured lag, and loss by virtual hours at the lag nearest to 10; a PNG of 1200 x 500 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    middle = min({lag for _, lag in outcomes if lag}, key=lambda lag: abs(lag - 10))
    for name in POLICIES:
        waits = name == SYNCHRONOUS
        points: list[tuple[Any, Any]] = sorted(
            (statistics.mean(r.lag for r in runs), _final(runs)) for (n, _), runs in outcomes.items() if n == name
        )
        if waits:
            left.axhline(points[0][1], linestyle=":", color="gray")
        else:
            left.plot(*zip(*points, strict=True), "o-", label=name)
        curve = outcomes[name, 0 if waits else middle][0].curve
        right.plot(*zip(*curve, strict=True), ":" if waits else "-", color="gray" if waits else None, label=name)
    left.set(xlabel="mean age of what was applied, versions", ylabel="final held-out loss", title="dotted: synchronous")
    right.set(xlabel="virtual hours", ylabel="held-out loss", title=f"lag {middle}, first seed")
    for axes in (left, right):
        axes.set_ylim(top=min(axes.get_ylim()[1], 3.5))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
