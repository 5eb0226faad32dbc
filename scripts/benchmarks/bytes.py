"""Bytes that training costs on 8 volunteers' computers, against PyTorch DDP on the same batches in the same order.

The character GPT of examples/gpt_chars, made smaller (`--features`, `--layers`), 8 hosts. Both sides start from the
same weights: `--start-steps` steps of plain PyTorch on one computer, which costs no traffic (DiLoCo's paper begins with
24,000 of 88,000 steps); 0: from random ones. Then both see the same tokens in the same batches.
Ours: DiLoCo in the simulator with the real daemons, `--local-steps` H of plain SGD a task (which has no state to lose
between tasks), results as fp4, versions as int8 deltas between keyframes. Theirs: AdamW over the mean gradient of the 8
workers, which is what DistributedDataParallel computes; it is stepped in one process, and checked against real
processes over gloo. Rates are scheduled alike.

    DDP          ring all-reduce: 2 (n - 1) / n x 4 P bytes sent by each of n workers in each step, P parameters. What
                 they receive is as much again; it is not counted, ours is
    up, down     all files that the simulated hosts move, by what each has on its disk already: updates; graphs, data,
                 versions. Replicas included, the application not; scheduler messages by their usual size, in `total`
    total_factor            DDP bytes / (up + down + messages), without replication
    upload_factor           DDP bytes / up, without replication;  upload_factor_quorum2: with a quorum of 2
    loss_ratio              our held-out loss / theirs, for equal tokens; the largest of the seeds
    target_factor           the same as total_factor, up to the moment at which each is at `--target` x their final loss
    ddp_wire_ratio          bytes of real DDP's steps on the wire / those of the formula
    ddp_distance            relative L2 distance of real DDP's weights from those stepped in one process
    hivemind_..., flower_...  the same factors for one exchange of the same weights every H steps (bytes_peers.py); what
                            loss these reach is not measured
All figures of training but loss_ratio are medians over the seeds. Rates were chosen (`--tune`) on a seed that is not
among them, optimizer and rate from one grid for both sides.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from boinc_project.plan import DataPlan
from boinc_project.simulator.computing import Computer
from boinc_project.simulator.report import Report, report_of
from boinc_project.simulator.simulation import Settings, simulated
from boinc_project.simulator.synthetic import synthetic_hosts
from scripts.benchmarks.bytes_ddp import Theirs, check, ddp, held_out, parameters_in, ring_bytes, train
from scripts.benchmarks.bytes_peers import flower_bytes, hivemind_bytes
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed, BenchmarkSkipped
from scripts.benchmarks.simulations import LONG_TASKS, plot_path
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job
from work_generator.workunits import data_plan

HOSTS = 8
GOALS = "upload_factor >= 500, upload_factor_quorum2 >= 250, loss_ratio <= 1.01"
DDP_TOLERANCE = 1e-5
WEIGHT_DECAY = 0.1  # of AdamW

#: What `--tune` tries, on a seed that is never reported: optimizers and rates of both sides; our outer rate, momentum.
TUNING_SEED = 1000
RATES = {"adamw": (4e-3, 8e-3, 1.6e-2), "sgd": (0.1, 0.3, 1.0)}
OUTER = ((1.0, 0.5), (0.8, 0.8), (0.7, 0.9), (1.0, 0.9))
#: And what it chose.
START: tuple[str, float] = ("adamw", 8e-3)
THEIRS, OURS, OUR_OUTER = ("adamw", 8e-3), ("sgd", 0.3), (1.0, 0.9)

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
kind = "{kind}"
lr = {lr}
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
    parser.add_argument("--local-steps", type=int, default=40, help="H (default 40)")
    parser.add_argument("--versions", type=int, default=60, help="model versions (default 60)")
    parser.add_argument("--start-steps", type=int, default=4000, help="steps before the comparison (default 4000)")
    parser.add_argument("--features", type=int, default=32, help="width of the GPT (default 32)")
    parser.add_argument("--layers", type=int, default=1, help="its layers (default 1)")
    parser.add_argument("--heads", type=int, default=2, help="its heads (default 2)")
    parser.add_argument("--batch", type=int, default=8, help="samples of one batch of one worker (default 8)")
    for side, (kind, rate) in (("their", THEIRS), ("our", OURS)):
        parser.add_argument(f"--{side}-optimizer", default=kind, choices=RATES, help=f"(default {kind})")
        parser.add_argument(f"--{side}-lr", type=float, default=rate, help=f"its rate (default {rate})")
    parser.add_argument("--outer", type=float, default=OUR_OUTER[0], help=f"outer rate (default {OUR_OUTER[0]})")
    parser.add_argument("--momentum", type=float, default=OUR_OUTER[1], help=f"outer momentum (default {OUR_OUTER[1]})")
    parser.add_argument("--codec", default="fp4", help="how results travel (default fp4)")
    parser.add_argument("--keyframes", type=int, default=32, help="versions from keyframe to keyframe (default 32)")
    parser.add_argument(
        "--target", type=float, default=1.05, help="target loss, as a multiple of theirs (default 1.05)"
    )
    parser.add_argument("--ddp-workers", type=int, default=4, help="processes of real DDP (default 4; 0: none)")
    parser.add_argument("--no-peers", action="store_true", help="leave hivemind and Flower out")
    parser.add_argument("--tune", action="store_true", help="try the grids instead, on the tuning seed (hours)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """total_factor, upload_factor, upload_factor_quorum2, loss_ratio, target_factor and so on."""
    print(__doc__)
    torch.set_num_threads(1)
    if options.tune:
        return _tuned(options)
    found: dict[str, list[float]] = {}
    curves = []
    others: dict[str, float] = {}
    for seed in range(options.seeds):
        with _job(options, seed) as (job, exported):
            computer = Computer("torch", kept=HOSTS * options.versions)
            single, plan = _run(job, exported, 1, seed, computer)
            double, _ = _run(job, exported, 2, seed, computer)
            if double.digests != single.digests:
                raise BenchmarkFailed("a quorum of 2 led to other weights than single copies")
            theirs = ddp(_at(job, options.their_optimizer, options.their_lr), plan)
            for name, value in _figures(options, theirs, single, double).items():
                found.setdefault(name, []).append(value)
            print(f"seed {seed}: {single.text()}")
            print(
                f"seed {seed}: from loss {held_out(job):.4f} DDP gets to {theirs.final:.4f}, we to"
                f" {single.last.evaluation['loss']:.4f}; { ({name: round(v[-1], 4) for name, v in found.items()}) }",
                flush=True,
            )
            curves.append((theirs, single, double))
            if not seed:
                others = {**_real_ddp(options, job, plan), **_peers(options, job)}
    _draw(options, curves, plot_path("bytes"))
    print(f"plot: {plot_path('bytes')}; goals: {GOALS}")
    figures = {n: max(values) if n == "loss_ratio" else statistics.median(values) for n, values in found.items()}
    return {**figures, **others}


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


def _real_ddp(options: argparse.Namespace, job: Job, plan: DataPlan) -> dict[str, float]:
    if not options.ddp_workers:
        return {}
    try:
        theirs = _at(job, options.their_optimizer, options.their_lr)
        found = check(theirs, plan, options.ddp_workers, 10, job.folder)
    except BenchmarkSkipped as skipped:
        print(f"real DDP is not compared with: {skipped}")
        return {}
    if found.distance > DDP_TOLERANCE:
        raise BenchmarkFailed(f"real DDP is at a distance of {found.distance:.2g} from its steps in one process")
    print(f"real DDP, {options.ddp_workers} processes over gloo, 10 steps: {found}", flush=True)
    return {"ddp_distance": found.distance, "ddp_wire_ratio": found.bytes_ratio}


def _peers(options: argparse.Namespace, job: Job) -> dict[str, float]:
    """Factors of one exchange of the job's weights every H steps."""
    if options.no_peers:
        return {}
    tensors = [p.detach().numpy() for p in job.model.parameters()]
    count, found = parameters_in(job.model), dict[str, float]()
    theirs = options.local_steps * ring_bytes(HOSTS, count)
    try:
        for name, sent in hivemind_bytes(count, HOSTS).items():
            found[f"hivemind_{name}_factor"] = theirs / sent
    except (BenchmarkSkipped, BenchmarkFailed) as failed:
        print(f"hivemind is not compared with: {failed}")
    try:
        down, up = flower_bytes(tensors, HOSTS)
        found.update({"flower_total_factor": theirs / (up + down), "flower_upload_factor": theirs / up})
    except BenchmarkSkipped as skipped:
        print(f"Flower is not compared with: {skipped}")
    print(f"one exchange every {options.local_steps} steps: {found}", flush=True)
    return found


def _tuned(options: argparse.Namespace) -> dict[str, float]:
    """Final losses over the grids: optimizers and rates first, then, with our best ones, outer settings."""
    grid = [(kind, rate) for kind, rates in RATES.items() for rate in rates]
    theirs: dict[tuple[str, float], float] = {}
    ours: dict[tuple[tuple[str, float], tuple[float, float]], float] = {}
    with _job(options, TUNING_SEED) as (job, _):

        def tried(inner: tuple[str, float], outer: tuple[float, float]) -> DataPlan:
            optimizer = replace(job.config.optimizer, lr=outer[0], momentum=outer[1])
            changed = _at(replace(job, config=replace(job.config, optimizer=optimizer)), *inner)
            exported = export_job(changed)
            report, plan = _run(changed, exported, 1, TUNING_SEED, Computer("torch"))
            ours[inner, outer] = report.last.evaluation["loss"]
            print(f"ours: {inner}, outer rate and momentum {outer}: {ours[inner, outer]:.4f}", flush=True)
            return plan

        for inner in grid:
            plan = tried(inner, (options.outer, options.momentum))
            theirs[inner] = ddp(_at(job, *inner), plan).final
            print(f"DDP: {inner}: {theirs[inner]:.4f}", flush=True)
        best = min(ours, key=lambda key: ours[key])[0]
        for outer in OUTER:
            if (best, outer) not in ours:
                tried(best, outer)
    chosen, outer = min(ours, key=lambda key: ours[key])
    print(f"chosen: DDP {min(theirs, key=lambda key: theirs[key])}, ours {chosen} with {outer}")
    return {"their_loss": min(theirs.values()), "our_loss": ours[chosen, outer]}


def _at(job: Job, kind: str, rate: float) -> Job:
    """The job with another inner optimizer."""
    inner = job.config.inner_optimizer
    assert inner is not None
    decay = WEIGHT_DECAY if kind == "adamw" else 0.0
    inner = replace(inner, kind=kind, lr=rate, weight_decay=decay)
    return replace(job, config=replace(job.config, inner_optimizer=inner))


@contextmanager
def _job(options: argparse.Namespace, seed: int) -> Iterator[tuple[Job, ExportedJob]]:
    """The example with these settings and a start of its own, traced."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(REPOSITORY / "examples" / "gpt_chars", folder, dirs_exist_ok=True)
        code = (folder / "gpt.py").read_text()
        for constant in ("features", "layers", "heads"):
            value = getattr(options, constant)
            code = re.sub(rf"^{constant.upper()} = \d+", f"{constant.upper()} = {value}", code, flags=re.M)
        (folder / "gpt.py").write_text(code)
        text = (REPOSITORY / "examples" / "gpt_chars" / "job.toml").read_text()
        head = text[: text.index("[train]")].replace("batch_size = 16", f"batch_size = {options.batch}")
        head = head.replace("seed = 1", f"seed = {seed}")
        sections = _SECTIONS.format(
            hosts=HOSTS, steps=options.local_steps, versions=options.versions,
            every=max(1, options.versions // 20), outer=options.outer, momentum=options.momentum,
            kind=options.our_optimizer, lr=options.our_lr,
            codec=options.codec, keyframes=options.keyframes, warmup=max(1, options.versions // 20),
        )  # fmt: skip
        (folder / "job.toml").write_text(head + sections)
        if options.start_steps:
            _write_start(_at(Job.load(folder), *START), options.start_steps, folder / "start.safetensors")
            head = head.replace("\n[data]", 'pretrained = "start.safetensors"\n\n[data]')
            (folder / "job.toml").write_text(head + sections)
        job = _at(Job.load(folder), options.our_optimizer, options.our_lr)
        yield job, export_job(job)


def _write_start(job: Job, steps: int, path: Path) -> None:
    """Train so many steps with batches of 16 at a constant rate, over samples in an order of their own."""
    schedule = replace(job.config.schedule, kind="constant")
    short = replace(job.config.train, local_steps=8)  # the rate rises over the first few dozen steps
    config = replace(job.config, schedule=schedule, train=short)
    draws = np.random.default_rng([job.config.job.seed, steps])
    rows = draws.integers(0, len(job.data["train"]["text"]), (steps, 16))
    train(replace(job, config=config), list(rows))
    save_file({name: value.clone() for name, value in job.model.state_dict().items()}, path)


def _run(job: Job, exported: ExportedJob, quorum: int, seed: int, computer: Computer) -> tuple[Report, DataPlan]:
    """A simulated training. With a quorum of 2 it is that of single copies once more, and not evaluated again."""
    unit = replace(job.config.workunit, min_quorum=quorum, target_nresults=quorum)
    every = replace(job.config.train, evaluate_every=job.config.train.evaluate_every if quorum == 1 else 0)
    job = replace(job, config=replace(job.config, workunit=unit, train=every))
    hosts = synthetic_hosts(HOSTS, seed, flops=5e9, flops_sigma=0.2)
    settings = Settings(seed=seed, options=LONG_TASKS)
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
    shown = [each for each in single.versions if each.evaluation]
    losses = [each.evaluation["loss"] for each in shown]
    twice = {each.version: each for each in double.versions}
    axes.plot([_moved(each) for each in shown], losses, label="ours, all bytes")
    axes.plot([_moved(twice[each.version]) for each in shown], losses, label="ours, quorum of 2, all bytes")
    axes.set(xlabel="bytes", ylabel="held-out loss", xscale="log", title=f"character GPT, H = {options.local_steps}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
