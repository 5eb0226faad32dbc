"""Bytes that training costs on 8 volunteers' computers, against PyTorch DDP on the same batches in the same order.

The character GPT of examples/gpt_chars (`--features`, `--layers` make it smaller), 8 hosts. Ours: DiLoCo in the
simulator with the real daemons, `--local-steps` H of AdamW a task, results as fp4, versions as int8 deltas between
keyframes. Theirs: AdamW over the mean gradient of the 8 workers, which is what DistributedDataParallel computes; it is
stepped here in one process. Both see the same tokens; the rate is scheduled alike.

    DDP          ring all-reduce: 2 (n - 1) / n x 4 P bytes sent by each of n workers in each step, P parameters. What
                 they receive is as much again; it is not counted, ours is
    up, down     all files that the simulated hosts move, by what each has on its disk already: updates; graphs, data,
                 versions. Replicas included, the application not; scheduler messages by their usual size, in `total`
    total_factor            DDP bytes / (up + down + messages), without replication
    upload_factor           DDP bytes / up, without replication;  upload_factor_quorum2: with a quorum of 2
    loss_ratio              our held-out loss / theirs, for equal tokens; the largest of the seeds
    target_factor           the same as total_factor, up to the moment at which each is at `--target` x their final loss
All figures but loss_ratio are medians over the seeds.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from boinc_project.plan import DataPlan
from boinc_project.simulator.computing import Computer
from boinc_project.simulator.report import Report, report_of
from boinc_project.simulator.simulation import Settings, simulated
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed
from scripts.benchmarks.simulations import plot_path
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job
from work_generator.workunits import data_plan

HOSTS = 8
GOALS = "upload_factor >= 500, upload_factor_quorum2 >= 250, loss_ratio <= 1.01"

_SECTIONS = """
[train]
policy = "diloco"
microtasks_per_version = {hosts}
local_steps = {steps}
max_versions = {versions}
evaluate_every = {every}

[optimizer]
lr = {outer}
momentum = {momentum}
nesterov = true

[inner_optimizer]
kind = "adamw"
lr = {lr}
weight_decay = 0.1
eps = 1e-6
max_norm = 1.0

[schedule]
kind = "cosine"
warmup_versions = {warmup}
min_ratio = 0.1

[codec]
kind = "{codec}"

[workunit]
min_quorum = 1

[supply]
extra_replicas = 0
keyframe_every = {keyframes}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="seeds (default 3)")
    parser.add_argument("--local-steps", type=int, default=36, help="H (default 36)")
    parser.add_argument("--versions", type=int, default=100, help="model versions (default 100)")
    parser.add_argument("--features", type=int, default=64, help="width of the GPT (default 64)")
    parser.add_argument("--layers", type=int, default=2, help="its layers (default 2)")
    parser.add_argument("--batch", type=int, default=4, help="samples of one batch of one worker (default 4)")
    parser.add_argument("--lr", type=float, default=2e-3, help="rate of AdamW, theirs and ours (default 2e-3)")
    parser.add_argument("--outer", type=float, default=0.7, help="outer rate (default 0.7)")
    parser.add_argument("--momentum", type=float, default=0.9, help="outer momentum (default 0.9)")
    parser.add_argument("--codec", default="fp4", help="how results travel (default fp4)")
    parser.add_argument("--keyframes", type=int, default=16, help="versions from keyframe to keyframe (default 16)")
    parser.add_argument(
        "--target", type=float, default=1.05, help="target loss, as a multiple of theirs (default 1.05)"
    )


def measure(options: argparse.Namespace) -> dict[str, float]:
    """total_factor, upload_factor, upload_factor_quorum2, loss_ratio, target_factor."""
    print(__doc__)
    found: dict[str, list[float]] = {}
    curves = []
    for seed in range(options.seeds):
        with _job(options, seed) as (job, exported):
            computer = Computer("torch", kept=HOSTS * options.versions)
            (single, plan), (double, _) = (_run(job, exported, quorum, seed, computer) for quorum in (1, 2))
            theirs = ddp(job, exported, plan)
            for name, value in _figures(options, theirs, single, double).items():
                found.setdefault(name, []).append(value)
            print(f"seed {seed}: DDP {theirs.final:.4f}; {single.text()}", flush=True)
            print(f"seed {seed}: { ({name: round(values[-1], 4) for name, values in found.items()}) }", flush=True)
            curves.append((theirs, single, double))
    _draw(options, curves, plot_path("bytes"))
    print(f"plot: {plot_path('bytes')}; goals: {GOALS}")
    return {name: max(values) if name == "loss_ratio" else statistics.median(values) for name, values in found.items()}


def _figures(options: argparse.Namespace, theirs: Theirs, single: Report, double: Report) -> dict[str, float]:
    all_bytes = theirs.bytes_per_step * options.local_steps * options.versions
    target = options.target * theirs.final
    their_step = next(step for step, loss in theirs.curve if loss <= target)
    ours = next((v for v in single.versions if v.evaluation and v.evaluation["loss"] <= target), None)
    return {
        "total_factor": all_bytes / _moved(single.last),
        "upload_factor": all_bytes / single.last.bytes_up,
        "upload_factor_quorum2": all_bytes / double.last.bytes_up,
        "total_factor_quorum2": all_bytes / _moved(double.last),
        "loss_ratio": single.last.evaluation["loss"] / theirs.final,
        "target_factor": 0.0 if ours is None else theirs.bytes_per_step * their_step / _moved(ours),
    }


def _moved(version: Any) -> int:
    return int(version.bytes_up + version.bytes_down + version.bytes_messages)


@contextmanager
def _job(options: argparse.Namespace, seed: int) -> Iterator[tuple[Job, ExportedJob]]:
    """The example with these settings, traced."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(REPOSITORY / "examples" / "gpt_chars", folder, dirs_exist_ok=True)
        code = (folder / "gpt.py").read_text()
        code = re.sub(r"^FEATURES = \d+", f"FEATURES = {options.features}", code, flags=re.M)
        (folder / "gpt.py").write_text(re.sub(r"^LAYERS = \d+", f"LAYERS = {options.layers}", code, flags=re.M))
        text = (folder / "job.toml").read_text()
        head = text[: text.index("[train]")].replace("batch_size = 16", f"batch_size = {options.batch}")
        head = head.replace("seed = 1", f"seed = {seed}")
        (folder / "job.toml").write_text(
            head
            + _SECTIONS.format(
                hosts=HOSTS, steps=options.local_steps, versions=options.versions,
                every=max(1, options.versions // 25), outer=options.outer, momentum=options.momentum, lr=options.lr,
                codec=options.codec, keyframes=options.keyframes, warmup=max(1, options.versions // 20),
            )
        )  # fmt: skip
        job = Job.load(folder)
        yield job, export_job(job)


def _run(job: Job, exported: ExportedJob, quorum: int, seed: int, computer: Computer) -> tuple[Report, DataPlan]:
    unit = replace(job.config.workunit, min_quorum=quorum, target_nresults=quorum)
    job = replace(job, config=replace(job.config, workunit=unit))
    hosts = synthetic_hosts(HOSTS, seed, flops=5e9, flops_sigma=0.2)
    settings = Settings(seed=seed, options={"gt_dry_rpc_delay": 60})
    with simulated(job, exported, hosts, settings, computer=computer) as simulation:
        simulation.run()
        report, plan = report_of(simulation), data_plan(job.config, simulation.project.job.facts)
    if report.last.version != job.config.train.max_versions:
        raise BenchmarkFailed(f"a run ended at version {report.last.version}: {report.note}")
    return report, plan


def _draw(options: argparse.Namespace, curves: Sequence[tuple[Theirs, Report, Report]], path: Path) -> None:
    """Held-out loss by bytes moved, of the first seed; a PNG of 700 x 500 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    theirs, single, double = curves[0]
    axes.plot(
        [step * theirs.bytes_per_step for step, _ in theirs.curve],
        [loss for _, loss in theirs.curve],
        label="DDP, sent",
    )
    for label, report in (("ours, all bytes", single), ("ours, quorum of 2, all bytes", double)):
        shown = [each for each in report.versions if each.evaluation]
        axes.plot([_moved(each) for each in shown], [each.evaluation["loss"] for each in shown], label=label)
    axes.set(xlabel="bytes", ylabel="held-out loss", xscale="log", title=f"character GPT, H = {options.local_steps}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
