"""What sending the inner optimizer's state along ([inner_optimizer] state) is worth, at equal tokens and equal bytes.

The classifier of examples/digits (or a small GPT: `--example gpt_chars`), local steps of AdamW on `--hosts` simulated
hosts, int8 results, whole versions, quorum 1; the real daemons decide, in virtual time (boinc_project/simulator). The
outer step is DiLoCo's (Nesterov, 0.7 and 0.9) or the plain mean of the models (averaging). For each number of local
steps H there are three runs of a seed: `reset` and `shipped` for the same number of versions, and `reset` for as many
versions more as it takes to move the bytes that `shipped` has moved. Each has its cosine schedule to its own end. Bytes
are input files and updates in both directions, and scheduler messages.

    tokens_ratio_OUTER_hH   final held-out loss, shipped / reset, at equal tokens; median over the seeds
    bytes_ratio_OUTER_hH    final held-out loss, shipped / reset for as many bytes; median over the seeds
    bytes_factor_OUTER_hH   bytes of shipped / bytes of reset, at equal tokens
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from boinc_project.simulator.computing import Computer
from boinc_project.simulator.report import Report, VersionReport, report_of
from boinc_project.simulator.simulation import Settings, simulated
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed
from scripts.benchmarks.simulations import LONG_TASKS, plot_path
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job

OUTER: Mapping[str, Mapping[str, Any]] = {
    "averaging": {"lr": 1.0, "momentum": 0.0, "nesterov": False},
    "nesterov": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
}
HELD_OUT = 512  # samples of which the loss is taken

_SECTIONS = """
[train]
policy = "diloco"
microtasks_per_version = {hosts}
max_versions = 1

[inner_optimizer]
kind = "adamw"
lr = {lr}
weight_decay = 0.01
eps = 1e-6
max_norm = 1.0

[schedule]
kind = "cosine"
min_ratio = 0.1

[codec]
kind = "int8"

[workunit]
min_quorum = 1

[supply]
extra_replicas = 0
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--hosts", type=int, default=3, help="hosts, and microtasks of a version (default 3)")
    parser.add_argument("--local-steps", default="5,25", help="numbers of local steps H (default 5,25)")
    parser.add_argument("--outer", default=",".join(OUTER), help="outer steps (default averaging,nesterov)")
    parser.add_argument("--steps", type=int, default=125, help="steps of a host in the shorter runs (default 125)")
    parser.add_argument("--example", default="digits", help="digits, or gpt_chars made narrow (default digits)")
    parser.add_argument("--batch", type=int, default=16, help="samples of one batch (default 16)")
    parser.add_argument("--lr", type=float, default=3e-3, help="rate of AdamW (default 3e-3)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """tokens_ratio_hH, bytes_ratio_OUTER_hH and bytes_factor_hH for each H."""
    print(__doc__)
    found: dict[str, list[float]] = {}
    curves: dict[str, Mapping[str, Report]] = {}
    for seed in range(options.seeds):
        made = _made(options, seed)
        for outer, steps in itertools.product(options.outer.split(","), map(int, options.local_steps.split(","))):
            reports = _reports(options, made, seed, outer, steps)
            key = f"{outer}_h{steps}"
            curves.setdefault(key, reports)
            reset, shipped, longer = reports.values()
            values = {
                f"tokens_ratio_{key}": _loss(shipped) / _loss(reset),
                f"bytes_ratio_{key}": _loss(shipped) / _loss(longer),
                f"bytes_factor_{key}": moved(shipped.last) / moved(reset.last),
            }
            for name, value in values.items():
                found.setdefault(name, []).append(value)
            for name, report in reports.items():
                print(
                    f"seed {seed}, {key}, {name}: held-out loss {_loss(report):.4f} after {report.last.version}"
                    f" versions and {moved(report.last) / 1e6:.2f} MB",
                    flush=True,
                )
    _draw(curves, plot_path("inner_state"))
    print(f"plot: {plot_path('inner_state')}")
    return {name: statistics.median(values) for name, values in found.items()}


def moved(version: VersionReport) -> int:
    """Bytes of all hosts together until a version."""
    return version.bytes_down + version.bytes_up + version.bytes_messages


def _loss(report: Report) -> float:
    return report.last.evaluation["loss"]


def _made(options: argparse.Namespace, seed: int) -> tuple[Job, ExportedJob]:
    """The example with these sections, traced with the initial weights of a seed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(REPOSITORY / "examples" / options.example, folder, dirs_exist_ok=True)
        if options.example == "gpt_chars":
            code = (folder / "gpt.py").read_text()
            code = re.sub(r"^FEATURES = \d+", "FEATURES = 32", code, flags=re.M)
            (folder / "gpt.py").write_text(re.sub(r"^LAYERS = \d+", "LAYERS = 2", code, flags=re.M))
        text = (folder / "job.toml").read_text()
        head = text[: text.index("[train]")].replace("\nseed = 1\n", f"\nseed = {seed}\n")
        head = re.sub(r"\nbatch_size = \d+\n", f"\nbatch_size = {options.batch}\n", head)
        (folder / "job.toml").write_text(head + _SECTIONS.format(hosts=options.hosts, lr=options.lr))
        job = Job.load(folder)
        exported = export_job(job)
    test = {name: array[:HELD_OUT] for name, array in job.data["test"].items()}
    return replace(job, data={**job.data, "test": test}), exported


def _reports(
    options: argparse.Namespace, made: tuple[Job, ExportedJob], seed: int, outer: str, steps: int
) -> dict[str, Report]:
    versions = max(2, options.steps // steps)
    reset, shipped = (_run(options, made, seed, outer, steps, versions, state) for state in ("reset", "shipped"))
    as_many = max(versions, round(versions * moved(shipped.last) / moved(reset.last)))
    return {
        "reset": reset,
        "shipped": shipped,
        "reset, equal bytes": _run(options, made, seed, outer, steps, as_many, "reset"),
    }


def _run(
    options: argparse.Namespace,
    made: tuple[Job, ExportedJob],
    seed: int,
    outer: str,
    steps: int,
    versions: int,
    state: str,
) -> Report:
    job, exported = made
    config = job.config
    assert config.inner_optimizer is not None
    config = replace(
        config,
        train=replace(
            config.train,
            local_steps=steps,
            max_versions=versions,
            evaluate_every=versions,
        ),
        optimizer=replace(config.optimizer, **OUTER[outer]),
        inner_optimizer=replace(config.inner_optimizer, state=state),
        schedule=replace(config.schedule, warmup_versions=max(1, versions // 20), total_versions=versions),
    )
    hosts = synthetic_hosts(options.hosts, seed, flops=5e9, flops_sigma=0.2)
    settings = Settings(seed=seed, options=LONG_TASKS)
    with simulated(replace(job, config=config), exported, hosts, settings, computer=Computer("torch", kept=16)) as one:
        one.run()
        report = report_of(one)
    if report.last.version != versions:
        raise BenchmarkFailed(f"a run ended at version {report.last.version}: {report.note}")
    return report


def _draw(curves: Mapping[str, Mapping[str, Report]], path: Path) -> None:
    """Training loss by samples and by bytes, first seed; a PNG of 1200 x 500 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for key, reports in curves.items():
        for name, report in reports.items():
            known = [each for each in report.versions if each.loss is not None]
            losses = [each.loss for each in known]
            style = "o-" if name == "shipped" else "o--" if name == "reset" else ":"
            left.plot(
                [each.version * int(key.rpartition("h")[2]) for each in known],
                losses,
                style,
                markersize=3,
                label=f"{key}, {name}",
            )
            right.plot([moved(each) / 1e6 for each in known], losses, style, markersize=3, label=f"{key}, {name}")
    left.set(xlabel="local steps of a host", ylabel="training loss", title="loss by tokens")
    right.set(xlabel="MB moved, both directions", ylabel="training loss", title="loss by bytes")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)
