"""What liars can do: to a rule alone, and to the whole system.

(a) The aggregator alone, against byzfl's rules in the same run. 25 workers train a perceptron on scikit-learn's digits
    (scripts/benchmarks/digits_workers.py: model, attacks, where momentum is kept); the last f send lies, and every rule
    is told f. A drop is the accuracy of 25 honest workers under the mean, in the same form, less the rule's under
    attack, in points, mean over the seeds; a rule's figure is that of its worst attack.
        rule_drop_f5, _f8, _f11       our default rule, gradients (what stateless volunteers send), server momentum
        rule_drop_f5_momentum, ...    the same where workers keep momentum, as published
        peer_drop_f5, ...             the best of byzfl's rules in the first form
(b) The whole system, simulated (boinc_project/simulator): real generator, scheduler, validator and assimilator.
        accepted_bad_error   the largest |accepted-bad rate - f^2 (3 - 2 f)| over the f: quorum 2, no audits, a third
                             copy on disagreement, every bad host tells the same lie for the same workunit. The formula
                             is for hosts drawn from many; the exact one for 25 is printed beside it
        system_drop_f11      accuracy of the job of examples/digits without liars less that with 11 colluding liars
                             of 25 hosts, in points, mean over the seeds, worst attack: quorum of 2 independent voters,
                             spot checks of 10 % of the workunits, disputes computed by the server, our default rule
        unique_accepted      accepted workunits for each copy that was sent, once hosts have a record: adaptive
                             replication with audits, 5 % of the hosts always lying; the least of the seeds
        accepted_bad         share of these workunits whose accepted result is a lie; the largest of the seeds
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from threadpoolctl import threadpool_limits

from assimilator.rules import (
    CenteredClipping,
    GeometricMedian,
    Mean,
    Median,
    MemoryRows,
    Mixing,
    MultiKrum,
    NearestNeighbourMixing,
    NormBound,
    Rule,
    TrimmedMean,
    aggregate,
)
from boinc_project import database
from boinc_project.gt_tables import gt_microtask
from boinc_project.simulator.lies import Alie, Behaviour, Ipm, LabelFlip, Mimic, SignFlip
from boinc_project.simulator.report import Report
from boinc_project.simulator.simulation import Settings, simulated
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.common import BenchmarkFailed, fresh_processes
from scripts.benchmarks.digits_workers import ATTACKS, Aggregate, Array, Digits, N, Training, accuracy
from scripts.benchmarks.peers import peer
from scripts.benchmarks.simulations import LONG_INTERVALS, LONG_TASKS, Sections, example, plot_path, run

DEFAULT_RULE = "geometric_median"
ADAPTIVE_HOSTS, ADAPTIVE_SLOTS = 40, 100  # hosts, 5 % of which lie; microtasks of a version
#: Versions in which hosts earn their record, until the slowest has its 52 confirmed results, and after that.
WARM_UP, MEASURED = 30, 20
LIES = [name for name in ATTACKS if name != "none"]
SYSTEM_LIES: Mapping[str, Callable[[int], Behaviour]] = {
    "sign_flip": lambda f: SignFlip(),
    "alie": lambda f: Alie(1.5),
    "ipm": lambda f: Ipm(2.0),
    "label_flip": lambda f: LabelFlip(),
    "mimic": lambda f: Mimic(),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--parts", default="rules,pairs,system,adaptive", help="what is measured (default all four)")
    parser.add_argument("--f", default="5,8,11", help="numbers of bad workers or hosts (default 5,8,11)")
    parser.add_argument("--steps", type=int, default=300, help="rules: steps of a training (default 300)")
    parser.add_argument("--rules", default="", help="rules: only these and our default (default all)")
    parser.add_argument("--workunits", type=int, default=1000, help="pairs: accepted workunits of a run (default 1000)")
    parser.add_argument("--processes", type=int, default=2, help="system: runs at a time (default 2)")
    parser.add_argument("--versions", type=int, default=40, help="system: model versions of a run (default 40)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """See the module's text."""
    print(__doc__)
    counts = [int(each) for each in options.f.split(",")]
    metrics: dict[str, float] = {}
    curves: dict[str, list[float]] = {}
    with threadpool_limits(1):
        torch.set_num_threads(1)
        if "rules" in options.parts:
            metrics |= _rules(options, counts, curves)
        if "pairs" in options.parts:
            metrics["accepted_bad_error"] = _pairs(options, counts)
        if "system" in options.parts:
            metrics[f"system_drop_f{max(counts)}"] = _system(options, max(counts))
        if "adaptive" in options.parts:
            metrics |= _adaptive(options)
    if curves:
        _draw(counts, curves)
    return metrics


# (a) The aggregator alone.


def _ours(rule: Rule, mixing: Mixing | None = None) -> Aggregate:
    def made(rows: Array, previous: Array) -> Array:
        return aggregate(rule, MemoryRows(np.ascontiguousarray(rows), np.ones(len(rows))), mixing, previous)

    return made


def our_rules(f: int) -> dict[str, Aggregate]:
    """Name -> rule that withstands f bad rows."""
    mixing = NearestNeighbourMixing(f)
    return {
        "mean": _ours(Mean()),
        "median": _ours(Median()),
        "trimmed_mean": _ours(TrimmedMean(f)),
        "multi_krum": _ours(MultiKrum(f)),
        "centered_clipping": _ours(CenteredClipping(1.0, 3)),
        "geometric_median": _ours(GeometricMedian(0.1, 3)),
        "norm_bound": _ours(NormBound()),
        "mixing + trimmed_mean": _ours(TrimmedMean(f), mixing),
        "mixing + geometric_median": _ours(GeometricMedian(0.1, 3), mixing),
    }


def _theirs(make: Callable[[], Sequence[Callable[[Any], Any]]]) -> Aggregate:
    steps = make()

    def made(rows: Array, previous: Array) -> Array:
        found: Any = torch.from_numpy(np.ascontiguousarray(rows))
        for step in steps:
            found = step(found)
        return np.asarray(found)

    return made


def peer_rules(aggregators: ModuleType, mixings: ModuleType, f: int) -> dict[str, Aggregate]:
    """byzfl's rules, each a new object (its centered clipping goes on from the last result)."""
    a = aggregators
    made: dict[str, Callable[[], Sequence[Callable[[Any], Any]]]] = {
        "byzfl Median": lambda: [a.Median()],
        "byzfl TrMean": lambda: [a.TrMean(f)],
        "byzfl MultiKrum": lambda: [a.MultiKrum(f)],
        "byzfl CenteredClipping": lambda: [a.CenteredClipping(None, 3, 1.0)],
        "byzfl GeometricMedian": lambda: [a.GeometricMedian(0.1, 3)],
        "byzfl NNM + TrMean": lambda: [mixings.NNM(f), a.TrMean(f)],
    }
    return {name: _theirs(make) for name, make in made.items()}


def _rules(options: argparse.Namespace, counts: Sequence[int], curves: dict[str, list[float]]) -> dict[str, float]:
    modules = peer("byzfl", "aggregators"), peer("byzfl", "aggregators.preaggregators")
    digits, training = Digits(), Training(steps=options.steps)
    chosen = [name for name in options.rules.split(",") if name]
    metrics: dict[str, float] = {}
    for at_workers in (False, True):
        score = partial(_mean_accuracy, digits, training, range(options.seeds), at_workers)
        clean = score(lambda f: _ours(Mean()), "none", 0)
        print(f"{'workers keep momentum' if at_workers else 'gradients, server momentum'}:", flush=True)
        print(f"  25 honest workers under the mean: {100 * clean:.2f} % accuracy; points lost under attack:")
        suffix = "_momentum" if at_workers else ""
        for f in counts:
            drops: dict[str, float] = {}
            names = [*our_rules(f), *([] if at_workers else peer_rules(*modules, f))]
            for name in (each for each in names if not chosen or each in chosen or each == DEFAULT_RULE):
                lost = {lie: 100 * (clean - score(partial(_rule, modules, name), lie, f)) for lie in LIES}
                worst = max(lost, key=lambda lie: lost[lie])
                drops[name] = lost[worst]
                listed = ", ".join(f"{lie} {points:.1f}" for lie, points in lost.items())
                print(f"  f = {f}, {name}: {lost[worst]:.2f} ({worst}); {listed}", flush=True)
                if not at_workers:
                    curves.setdefault(name, []).append(drops[name])
            metrics[f"rule_drop_f{f}{suffix}"] = drops[DEFAULT_RULE]
            peers = [points for name, points in drops.items() if name.startswith("byzfl")]
            if peers:
                metrics[f"peer_drop_f{f}"] = min(peers)
    return metrics


def _rule(modules: tuple[ModuleType, ModuleType], name: str, f: int) -> Aggregate:
    return (peer_rules(*modules, f) if name.startswith("byzfl") else our_rules(f))[name]


def _mean_accuracy(
    digits: Digits, training: Training, seeds: Sequence[int], at_workers: bool, make: Callable[[int], Aggregate],
    attack: str, f: int,
) -> float:  # fmt: skip
    found = [accuracy(digits, training, make(f), attack, f, seed, at_workers=at_workers) for seed in seeds]
    return statistics.fmean(found)


# (b) The whole system.


def _settings(seed: int, **options: int) -> Settings:
    return Settings(seed=seed, options={**LONG_TASKS, **options}, intervals=LONG_INTERVALS)


def _pairs(options: argparse.Namespace, counts: Sequence[int]) -> float:
    """The largest distance of the accepted-bad rate from the formula."""
    errors = []
    for f in counts:
        rates, copies = [], []
        for seed in range(options.seeds):
            slots = 100
            sections = {
                "job": {"seed": seed},
                "train": {"microtasks_per_version": slots, "batches_per_microtask": 1,
                          "max_versions": -(-options.workunits // slots), "evaluate_every": 0},
                "supply": {"straggler_after_s": 86400},
            }  # fmt: skip
            # Alike, with unlike tasks: who shares a workunit with whom is drawn anew each time, as the formula has it.
            hosts = synthetic_hosts(N, seed, flops=5e7, flops_sigma=0.0, jitter=0.5)
            bad = np.random.default_rng([seed, f]).permutation(N)[:f]
            behaviours = {hosts[number].name: SignFlip() for number in bad}
            report = run(example("digits", 16, sections), hosts, _settings(seed), behaviours)
            rates.append(report.accepted_bad_rate)
            copies.append(report.copies_per_accepted)
        share = f / N
        wanted = share**2 * (3 - 2 * share)
        exact = f * (f - 1) / (N * (N - 1)) * (1 + 2 * (N - f) / (N - 2))
        rate = statistics.fmean(rates)
        errors.append(abs(rate - wanted))
        print(
            f"f = {f}: accepted bad {rate:.4f} {[round(each, 4) for each in rates]}, formula {wanted:.4f}, drawn from"
            f" 25 without repeats {exact:.4f}; {statistics.fmean(copies):.3f} copies for each accepted workunit,"
            f" formula {2 + 2 * share * (1 - share):.3f}",
            flush=True,
        )
    return max(errors)


def _system(options: argparse.Namespace, f: int) -> float:
    """Points of accuracy that the worst attack costs the trained job."""
    runs = [(seed, name) for seed in range(options.seeds) for name in ("none", *SYSTEM_LIES)]
    found: dict[tuple[int, str], float] = {}
    with fresh_processes(options.processes) as pool:
        reports = pool.map(partial(_attacked, options.versions, f), *zip(*runs, strict=True))
        for (seed, name), report in zip(runs, reports, strict=True):
            if not report.last.evaluation and report.state != "failed":
                raise BenchmarkFailed(f"{name}: the run ended at version {report.last.version} without an evaluation")
            # A job that had to stop, because its weights were not finite any more, has learned nothing.
            found[seed, name] = report.last.evaluation.get("accuracy", 0.1)
            print(
                f"seed {seed}, {name}: accuracy {found[seed, name]:.4f}, accepted bad {report.accepted_bad_rate:.3f}",
                flush=True,
            )
    means = {
        name: statistics.fmean(100 * (found[seed, "none"] - found[seed, name]) for seed in range(options.seeds))
        for name in SYSTEM_LIES
    }
    print(f"whole system, f = {f}, points lost: {', '.join(f'{name} {points:.2f}' for name, points in means.items())}")
    return max(means.values())


def _attacked(versions: int, f: int, seed: int, name: str) -> Report:
    """A training with f hosts that lie in this way."""
    sections: Sections = {
        "job": {"seed": seed},
        "train": {"microtasks_per_version": N, "batches_per_microtask": 1, "max_versions": versions,
                  "evaluate_every": versions},
        "aggregation": {"rule": DEFAULT_RULE},
        "trust": {"spot_check_share": 0.1, "replay_disputes": True},
    }  # fmt: skip
    hosts = synthetic_hosts(N, seed, flops=5e7)
    bad = [hosts[number].name for number in np.random.default_rng([seed, f]).permutation(N)[:f]]
    behaviours = {host: SYSTEM_LIES[name](f) for host in bad} if name != "none" else {}
    with threadpool_limits(1):
        torch.set_num_threads(1)
        return run(example("digits", 32, sections), hosts, _settings(seed), behaviours)


def _adaptive(options: argparse.Namespace) -> dict[str, float]:
    """What adaptive replication costs and lets through, after hosts have earned their record."""
    unique, bad = [], []
    for seed in range(options.seeds):
        sections: Sections = {
            "job": {"seed": seed},
            "train": {"microtasks_per_version": ADAPTIVE_SLOTS, "batches_per_microtask": 1,
                      "max_versions": WARM_UP + MEASURED, "evaluate_every": 0},
            "trust": {"adaptive_replication": True},
            "supply": {"straggler_after_s": 3600},  # tasks take some minutes
        }  # fmt: skip
        hosts = synthetic_hosts(ADAPTIVE_HOSTS, seed, flops=5e7)
        liars = np.random.default_rng([seed, 5]).permutation(ADAPTIVE_HOSTS)[: ADAPTIVE_HOSTS // 20]
        behaviours = {hosts[number].name: SignFlip() for number in liars}
        settings = _settings(seed, daily_result_quota=1000)
        with simulated(*example("digits", 16, sections), hosts, settings, behaviours) as simulation:
            simulation.run()
            if simulation.project.job.current_version != WARM_UP + MEASURED:
                raise BenchmarkFailed(f"the run ended: {simulation.project.job.note}")
            tasks = simulation.project.rows(gt_microtask, "workunit_name", "version")
            late = {str(row["workunit_name"]) for row in tasks if row["version"] >= WARM_UP}
            units = simulation.project.rows(database.workunit, "id", "name", "canonical_resultid")
            ids = {int(row["id"]): int(row["canonical_resultid"]) for row in units if row["name"] in late}
            results = simulation.project.rows(database.result, "id", "name", "workunitid", "sent_time")
            sent = [row for row in results if row["workunitid"] in ids and row["sent_time"]]
            canonical = set(ids.values()) - {0}
            lies = sum(simulation.answers[str(row["name"])].lied for row in sent if row["id"] in canonical)
        unique.append(len(canonical) / len(sent))
        bad.append(lies / len(canonical))
        print(f"seed {seed}: {len(canonical)} accepted of {len(sent)} copies, {lies} of them lies", flush=True)
    return {"unique_accepted": min(unique), "accepted_bad": max(bad)}


def _draw(counts: Sequence[int], curves: Mapping[str, Sequence[float]]) -> None:
    """Points lost in the worst attack by the number of bad workers, one line for each rule."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        axes.plot(counts, points, "x--" if name.startswith("byzfl") else "o-", markersize=4, label=name)
    axes.set(xlabel="bad workers of 25", ylabel="points of accuracy lost in the worst attack", xticks=list(counts))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    path = plot_path("byzantine")
    figure.savefig(path)
    print(f"plot: {path}")
