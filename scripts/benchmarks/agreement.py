"""How far honest copies drift apart, across the real backends: how many local steps agreement alone can judge.

Two models from three seeds each: a GPT over characters (examples/gpt_chars with five blocks, 1.02M parameters), and a
perceptron (examples/digits' shape), both trained for some hundred steps first. Then the same microtasks on numpy, on
PyTorch and on OpenCL: single gradients on every replica that `boinc-train calibrate` knows, and local trainings with
AdamW, for each setting of its eps and clipping. Fixed data, no download: Python's help topics (pydoc_data), and points
drawn by a generator with a teacher's labels.

    distance   the validator's (validator/agreement.py): the largest over tensors, relative, with a floor
    l2         relative L2 of the whole update, against PyTorch's on one thread
    safe steps the largest number of local steps, up to --steps, up to which every pair of honest copies is within
               1e-3 by `distance` (with _l2: every copy by `l2`), looked at every --every steps; the least of the seeds
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.cli.tables import table
from boinc_project.contract import tensorfile
from scripts.benchmarks.common import REPOSITORY, fresh_processes

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

LIMIT = 1e-3
STEPS = (1, 50, 100, 200, 300, 400, 500)
#: Setting -> eps and max_norm of AdamW.
SETTINGS = {"eps 1e-8": (1e-8, 0.0), "eps 1e-6": (1e-6, 0.0), "eps 1e-6, clipping at 1": (1e-6, 1.0)}
#: The setting that job.toml has by default gives `largest_safe_steps`; the others have it with a suffix.
SUFFIXES = {"eps 1e-8": "_eps_1e8", "eps 1e-6": "", "eps 1e-6, clipping at 1": "_clipped"}
LEARNING_RATE = 1e-3
TRAINED = ("torch, 1 thread", "numpy", "opencl")  # the honest copies of local trainings; the first is the reference


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=3, help="models and orders of the data (default 3)")
    parser.add_argument("--steps", type=int, default=500, help="local steps at most (default 500)")
    parser.add_argument("--every", type=int, default=10, help="steps between two looks at the copies (default 10)")
    parser.add_argument("--pretrain", type=int, default=300, help="steps before anything is measured (default 300)")
    parser.add_argument("--processes", type=int, default=2, help="trainings at a time (default 2)")
    parser.add_argument("--quick", action="store_true", help="tiny models, few steps: to see that it runs")
    parser.add_argument("--plot", type=Path, default=Path("agreement.png"), help="picture to write (agreement.png)")


@dataclass(frozen=True)
class Piece:
    """One training to follow. `state`: the file with the model to start from."""

    model: str
    seed: int
    setting: str
    steps: tuple[int, ...]
    every: int
    quick: bool
    pretrain: int
    state: Path
    imprecise: bool


@dataclass(frozen=True)
class Look:
    """At one number of local steps: the farthest honest copies, and what must be told apart (None: not measured)."""

    steps: int
    distance: float
    l2: float
    worst: str
    tf32: tuple[float, float] | None
    half: tuple[float, float] | None


def measure(options: argparse.Namespace) -> dict[str, float]:
    """gradient_p99 and largest_safe_steps of the GPT, the same of other settings and of the perceptron, the table."""
    print(__doc__, flush=True)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read by PyTorch's threads in the processes below
    steps = tuple(each for each in STEPS if each <= options.steps) or (options.steps,)
    every, pretrain, seeds = options.every, options.pretrain, options.seeds
    if options.quick:
        steps, every, pretrain = (1, 4, 8), 4, 5
    with (
        tempfile.TemporaryDirectory() as folder,
        fresh_processes(options.processes) as pool,
    ):
        pieces = [
            Piece(
                model, seed, setting, steps, every, options.quick, pretrain, Path(folder) / f"{model}_{seed}", seed == 1
            )
            for model in ("gpt", "mlp")
            for setting in SETTINGS
            for seed in range(1, seeds + 1)
        ]
        firsts = [each for each in pieces if each.setting == next(iter(SETTINGS))]
        gradients: dict[str, list[Gradients]] = {"gpt": [], "mlp": []}
        for piece, found in zip(firsts, pool.map(single_gradients, firsts), strict=True):
            gradients[piece.model].append(found)
            print(
                f"{piece.model}, seed {piece.seed}: {found.parameters:,} parameters, loss {found.loss:.3f}", flush=True
            )
        looks: dict[tuple[str, str], list[list[Look]]] = {}
        for piece, seen in zip(pieces, pool.map(local_training, pieces), strict=True):
            looks.setdefault((piece.model, piece.setting), []).append(seen)
            print(f"{piece.model}, {piece.setting}, seed {piece.seed}: safe for {safe_steps(seen)} steps", flush=True)
    metrics = _gradient_metrics(gradients["gpt"])
    for (model, setting), seeds_seen in looks.items():
        name = "" if model == "gpt" else "mlp_"
        metrics[f"{name}largest_safe_steps{SUFFIXES[setting]}"] = min(map(safe_steps, seeds_seen))
        metrics[f"{name}largest_safe_steps_l2{SUFFIXES[setting]}"] = min(safe_steps(s, "l2") for s in seeds_seen)
        for number in steps:
            metrics[f"{name}l2_{number}{SUFFIXES[setting]}"] = _at(seeds_seen, number, "l2")
    _print_table(looks, steps)
    draw(looks, options.plot)
    print(f"plot: {options.plot.resolve()}")
    return metrics


# --- the two models --------------------------------------------------------------------------------------------------


def bench_of(model: str, seed: int, setting: str, quick: bool) -> tuple[Any, Tensors]:
    """The traced job as a calibration's workbench, and its first state."""
    import torch

    from boinc_project.calibration.workbench import Workbench
    from boinc_project.job_config import load_config
    from work_generator.export import export_job
    from work_generator.job import Job, checked_data

    config = load_config(REPOSITORY / "examples" / "gpt_chars")
    assert config.inner_optimizer is not None
    eps, max_norm = SETTINGS[setting]
    config = dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, seed=seed),
        data=dataclasses.replace(config.data, batch_size=2 if model == "gpt" else 32),
        codec=dataclasses.replace(config.codec, kind="dense"),
        inner_optimizer=dataclasses.replace(config.inner_optimizer, lr=LEARNING_RATE, eps=eps, max_norm=max_norm),
    )
    torch.manual_seed(seed)
    network, loss, data = (_gpt if model == "gpt" else _perceptron)(quick)
    checked, _ = checked_data(data, config)
    exported = export_job(Job(config=config, model=network, loss=loss, metrics=None, data=checked))
    return Workbench.of(
        Job(config=config, model=network, loss=loss, metrics=None, data=checked), exported
    ), exported.state


def _gpt(quick: bool) -> tuple[Any, Any, Any]:
    sys.path.insert(0, str(REPOSITORY / "examples" / "gpt_chars"))
    import gpt  # type: ignore[import-not-found]

    gpt.LAYERS = 5
    if quick:
        gpt.LAYERS, gpt.FEATURES, gpt.CONTEXT, gpt.HEADS = 1, 16, 16, 2
    return gpt.model(), gpt.loss, gpt.data()


def _perceptron(quick: bool) -> tuple[Any, Any, Any]:
    """64 -> 256 -> 256 -> 10 on points with the labels of a random teacher of the same shape."""
    import torch
    from torch import nn
    from torch.nn import functional

    def network() -> nn.Module:
        width = 16 if quick else 256
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))

    def loss(model: nn.Module, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")

    x = torch.randn(4096 + 256, 64)
    with torch.no_grad():
        scores = network()(x)
        y = (scores - scores.mean(0)).argmax(1)
    fields = {"x": x, "y": y}
    data = {"train": {n: t[:4096] for n, t in fields.items()}, "test": {n: t[4096:] for n, t in fields.items()}}
    return network(), loss, data


# --- what is measured, in processes of their own ----------------------------------------------------------------------


@dataclass(frozen=True)
class Gradients:
    """Single gradients: distances and l2 of honest pairs, the least ones of what must be told apart, noise tensors."""

    parameters: int
    loss: float
    honest: tuple[float, ...]
    l2: tuple[float, ...]
    apart: Mapping[str, tuple[float, float]]
    noise: tuple[str, ...]


def single_gradients(piece: Piece) -> Gradients:
    """Train the model of this seed, write its state, and take gradients of it in every way."""
    from boinc_project.calibration.replicas import replicas
    from boinc_project.calibration.spread import NoiseMeter
    from validator.agreement import distance

    bench, state = bench_of(piece.model, piece.seed, "eps 1e-6", piece.quick)
    ways = replicas(bench.random_numbers)
    trained = bench.trained(ways.honest[1], state, piece.pretrain)
    tensorfile.write(piece.state, trained)
    meter = NoiseMeter()
    honest, squares = [], []
    apart: dict[str, list[tuple[float, float]]] = {}
    loss = 0.0
    for slot in range(4):
        copies = [bench.gradient(each, trained, 1, slot, 1) for each in ways.honest]
        loss += float(copies[0]["metric/loss"].sum() / copies[0]["metric/weight"].sum()) / 4
        meter.add(copies)
        pairs = list(itertools.combinations(copies, 2))
        honest += [distance(a, b) for a, b in pairs]
        squares += [whole(a, b) for a, b in pairs]
        for replica in ways.imprecise:
            other = bench.gradient(replica, trained, 1, slot, 1)
            apart.setdefault(replica.name, []).append((distance(copies[1], other), whole(copies[1], other)))
    least = {name: min(found) for name, found in apart.items()}
    size = sum(array.size for name, array in trained.items() if name.startswith("parameter/"))
    return Gradients(size, loss, tuple(honest), tuple(squares), least, tuple(map(str, meter.found())))


def local_training(piece: Piece) -> list[Look]:
    """The same local training on every backend, looked at every few steps."""
    from boinc_project.calibration.replicas import replicas
    from validator.agreement import tensor_distances

    bench, _ = bench_of(piece.model, piece.seed, piece.setting, piece.quick)
    trained = tensorfile.read(piece.state).tensors
    ways = replicas(bench.random_numbers)
    last = max(piece.steps)
    honest = {each.name: each for each in ways.honest}
    trails = [bench.trail(honest[name], trained, 1, 0, last) for name in TRAINED if name in honest]
    coarse = bench.trail(ways.imprecise[0], trained, 1, 0, last) if piece.imprecise else None
    halves = {number // 2 for number in piece.steps if number > 1}
    kept: dict[int, Tensors] = {}
    looks = []
    for number in sorted({*piece.steps, *halves, *range(piece.every, last + 1, piece.every)}):
        for trail in trails:
            trail.advance(number)
        updates = [trail.update() for trail in trails]
        if number in halves:
            kept[number] = {n: a for n, a in updates[0].items() if n.startswith("delta/")}
        pairs = [tensor_distances(a, b) for a, b in itertools.combinations(updates, 2)]
        farthest = max(pairs, key=lambda each: max(each.values()))
        worst = max(farthest, key=lambda name: farthest[name])
        tf32 = half = None
        if number in piece.steps:
            reference = {n: a for n, a in updates[0].items() if n.startswith("delta/")}
            if coarse is not None:
                coarse.advance(number)
                tf32 = _both(reference, coarse.update())
            if number > 1:
                scale = number / (number // 2)
                half = _both(reference, {n: scale * a for n, a in kept[number // 2].items()})
        l2 = max((whole(updates[0], other) for other in updates[1:]), default=0.0)
        looks.append(Look(number, farthest[worst], l2, worst, tf32, half))
    return looks


def _both(reference: Tensors, other: Tensors) -> tuple[float, float]:
    from validator.agreement import distance

    return distance(reference, {n: other[n] for n in reference}), whole(reference, other)


def whole(reference: Tensors, other: Tensors) -> float:
    """Relative L2 of all gradients or deltas together."""
    difference = norm = 0.0
    for name, a in reference.items():
        if name.startswith(("gradient/", "delta/")):
            flat = a.astype(np.float64)
            difference += float(np.square(flat - other[name]).sum())
            norm += float(np.square(flat).sum())
    return math.sqrt(difference / norm)


def safe_steps(looks: Sequence[Look], what: str = "distance") -> int:
    """The last number of steps before the first at which honest copies are farther apart than LIMIT."""
    found = 0
    for look in looks:
        if getattr(look, what) > LIMIT:
            break
        found = look.steps
    return found


# --- what is shown ----------------------------------------------------------------------------------------------------


def _gradient_metrics(found: Sequence[Gradients]) -> dict[str, float]:
    honest = [each for one in found for each in one.honest]
    l2 = [each for one in found for each in one.l2]
    metrics = {
        "gradient_p99": float(np.percentile(honest, 99)),
        "gradient_max": max(honest),
        "gradient_l2_p99": float(np.percentile(l2, 99)),
    }
    for name in found[0].apart:
        metrics[f"gradient_{name}"] = min(one.apart[name][0] for one in found)
        metrics[f"gradient_{name}_l2"] = min(one.apart[name][1] for one in found)
    print(f"noise in the GPT's gradients (no digit agreed on): {', '.join(found[0].noise) or 'none'}")
    return metrics


def _at(seeds: Sequence[Sequence[Look]], number: int, what: str) -> float:
    return max(float(getattr(look, what)) for looks in seeds for look in looks if look.steps == number)


def _print_table(looks: Mapping[tuple[str, str], Sequence[Sequence[Look]]], steps: Sequence[int]) -> None:
    """The largest of the seeds for honest copies, the least for what must be told apart; distance / l2."""
    from rich.console import Console

    for (model, setting), seeds in looks.items():
        shown = table("steps", "honest", "in the tensor", "TF32", "half, doubled", title=f"{model}, AdamW {setting}")
        for number in steps:
            here = [look for seen in seeds for look in seen if look.steps == number]
            far = max(here, key=lambda look: look.distance)
            honest = f"{far.distance:.1e} / {max(look.l2 for look in here):.1e}"
            told = []
            for values in ([look.tf32 for look in here], [look.half for look in here]):
                pairs = [pair for pair in values if pair is not None]
                told.append(f"{min(a for a, _ in pairs):.1e} / {min(b for _, b in pairs):.1e}" if pairs else "")
            shown.add_row(str(number), honest, far.worst, *told)
        Console(width=100).print(shown)


def draw(looks: Mapping[tuple[str, str], Sequence[Sequence[Look]]], path: Path) -> None:
    """Distance against local steps, one panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    for axes, model in zip(figure.subplots(1, 2, sharey=True), ("gpt", "mlp"), strict=True):
        for number, setting in enumerate(SETTINGS):
            for seed, seen in enumerate(looks[model, setting]):
                label = f"honest, {setting}" if seed == 0 else None
                axes.plot([e.steps for e in seen], [e.distance for e in seen], color=f"C{number}", label=label)
                tf32 = [(look.steps, look.tf32[0]) for look in seen if look.tf32 is not None]
                if tf32:
                    axes.plot(*zip(*tf32, strict=True), "x", color=f"C{number}", label=f"TF32, {setting}")
        axes.axhline(LIMIT, color="black", linestyle=":", label="agreement alone is enough below")
        axes.set(yscale="log", xlabel="local steps", ylabel="distance of copies", title=model)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path)
