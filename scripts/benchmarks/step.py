"""One forward and backward pass of the GPT example: our executor on both backends against eager PyTorch.

The same weights, the same batch, the same thread number, in one process. A round runs each of the three once,
in turn, so that what else the machine does falls on all of them; a ratio is that of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from apps.gradient.backends import open_backend
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed
from work_generator.export import export_job
from work_generator.export.program import sample_batch
from work_generator.job import Job

EXAMPLE = REPOSITORY / "examples" / "gpt_chars"
BACKENDS = ("torch", "numpy")

#: Largest relative L2 difference of all gradients that two float32 computations of the same step may have.
AGREEMENT = 1e-4

Gradients = Mapping[str, "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=60, help="measured rounds per thread number (default 60)")
    parser.add_argument("--warm-up", type=int, default=8, help="rounds before the clock counts (default 8)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """torch_ratio and numpy_ratio at one thread, and the same with _2_threads."""
    metrics: dict[str, float] = {}
    for threads in (1, 2):
        seconds = _rounds(threads, options.rounds, options.warm_up)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        suffix = "" if threads == 1 else f"_{threads}_threads"
        for name in BACKENDS:
            metrics[f"{name}_ratio{suffix}"] = medians[name] / medians["eager"]
        listed = ", ".join(f"{name} {1000 * value:.2f} ms" for name, value in medians.items())
        print(f"{threads} thread(s), medians of {options.rounds} alternating repeats: {listed}", flush=True)
    return metrics


def _rounds(threads: int, rounds: int, warm_up: int) -> dict[str, list[float]]:
    """Seconds of each run of each of the three."""
    job = Job.load(EXAMPLE)
    exported = export_job(job)
    batch = sample_batch(job.data["train"], job.config.data.batch_size)
    torch.set_num_threads(threads)
    runs: dict[str, Callable[[], object]] = {"eager": lambda: _eager(job, batch)}
    reference = _gradients_of(job, batch)
    arrays = {
        **exported.state,
        **exported.constants,
        **{f"batch/{name}": tensor.numpy() for name, tensor in batch.items()},
        "mask": np.ones(job.config.data.batch_size, np.float32),
        "seed": np.array(1, np.int64),
        "step": np.array(0, np.int64),
    }
    for name in BACKENDS:
        backend = open_backend(name, threads, "cpu")
        program = backend.program(exported.gradient)
        inputs = {each: backend.from_numpy(np.array(array)) for each, array in arrays.items()}
        made = program.run(inputs)
        _check(name, {each: backend.to_numpy(value) for each, value in made.items()}, reference)
        runs[name] = lambda program=program, inputs=inputs: program.run(inputs)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(warm_up + rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            if number >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def _eager(job: Job, batch: Mapping[str, torch.Tensor]) -> None:
    """What a training loop does before the optimizer: fresh gradients of the sum of the samples' losses."""
    job.model.zero_grad(set_to_none=True)
    job.loss(job.model, batch).sum().backward()


def _gradients_of(job: Job, batch: Mapping[str, torch.Tensor]) -> Gradients:
    _eager(job, batch)
    return {
        f"gradient/{name}": parameter.grad.numpy().copy()
        for name, parameter in job.model.named_parameters()
        if parameter.grad is not None
    }


def _check(name: str, made: Mapping[str, np.ndarray], reference: Gradients) -> None:
    """The three must compute the same, or their times say nothing."""
    difference = sum(float(np.square(made[each] - wanted).sum()) for each, wanted in reference.items())
    norm = sum(float(np.square(wanted).sum()) for wanted in reference.values())
    if not difference <= AGREEMENT**2 * norm:
        raise BenchmarkFailed(f"the {name} backend's gradients differ from eager PyTorch's")
