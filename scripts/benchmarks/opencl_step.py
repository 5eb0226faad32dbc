"""Forward, backward and AdamW of the GPT example on OpenCL, against eager PyTorch on the same processor.

Both use all processors. They take turns with pauses between them, because PyTorch's and the OpenCL driver's threads
would otherwise wait actively for work on each other's cores.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from apps.gradient.opencl import device as devices
from apps.gradient.opencl.opencl_backend import OpenclBackend, OpenclProgram
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed
from work_generator.export import export_job
from work_generator.export.program import sample_batch
from work_generator.job import Job

EXAMPLE = REPOSITORY / "examples" / "gpt_chars"
PAUSE_S = 0.06
AGREEMENT = 1e-4  # largest relative L2 difference of the parameters after one step


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="OpenCL device: cpu, gpu or PLATFORM:INDEX (default cpu)")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds (default 30)")
    parser.add_argument("--warm-up", type=int, default=5, help="rounds before the clock counts (default 5)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """ratio_torch: our time over eager PyTorch's; launches, bytes_moved and peak_memory_mb of one step."""
    torch.set_num_threads(os.cpu_count() or 1)
    job = Job.load(EXAMPLE)
    exported = export_job(job)
    assert exported.optimizer is not None
    batch = sample_batch(job.data["train"], job.config.data.batch_size)
    found = devices.choose(devices.find_devices(), devices.request_of_text(options.device))
    backend = OpenclBackend(found.handle, devices.facts(found))
    start = time.perf_counter()
    ours = _OpenclStep(backend, exported, batch, job.config.data.batch_size)
    theirs = _EagerStep(job, batch)
    ours.step()
    print(f"{found.name}: planned, built and run once in {time.perf_counter() - start:.1f} s", flush=True)
    theirs.step()
    _check(ours.parameters(), theirs.parameters())
    seconds: dict[str, list[float]] = {"opencl": [], "eager": []}
    runs: Mapping[str, Callable[[], None]] = {"opencl": ours.step, "eager": theirs.step}
    for number in range(options.warm_up + options.rounds):
        for name, run in runs.items():
            time.sleep(PAUSE_S)
            before = time.perf_counter()
            run()
            if number >= options.warm_up:
                seconds[name].append(time.perf_counter() - before)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(", ".join(f"{name} {1000 * value:.1f} ms" for name, value in medians.items()))
    return {
        "ratio_torch": medians["opencl"] / medians["eager"],
        "launches": ours.launches,
        "bytes_moved": ours.bytes_moved,
        "peak_memory_mb": backend.pool.peak / 1e6,
    }


class _OpenclStep:
    def __init__(self, backend: OpenclBackend, exported: Any, batch: Mapping[str, torch.Tensor], size: int) -> None:
        self._backend = backend
        self._gradient = OpenclProgram(exported.gradient, backend, False, frozenset())
        self._optimizer = OpenclProgram(exported.optimizer, backend, False, frozenset({"parameter", "optimizer"}))
        plans = (self._gradient.plan, self._optimizer.plan)
        self.launches = sum(len(plan.launches) for plan in plans)
        self.bytes_moved = sum(launch.nbytes for plan in plans for launch in plan.launches)
        upload = backend.from_numpy
        self._fixed = {name: upload(array) for name, array in exported.constants.items()}
        self._fixed |= {f"batch/{name}": upload(tensor.numpy()) for name, tensor in batch.items()}
        self._fixed |= {"mask": upload(np.ones(size, np.float32)), "seed": upload(np.array(1, np.int64))}
        self._values = {name: upload(array) for name, array in exported.state.items()}
        for each in exported.optimizer.inputs_of_kind("optimizer"):
            self._values[each.name] = upload(np.zeros(each.shape, each.dtype))
        self._number = 0

    def step(self) -> None:
        upload = self._backend.from_numpy
        step = upload(np.array(self._number, np.int64))
        made = self._gradient.run({**self._fixed, **self._values, "step": step})
        rate = upload(np.array(1e-3, np.float32))
        gradients = {name: tensor for name, tensor in made.items() if name.startswith("gradient/")}
        given = {**self._values, **gradients, "weight": made["metric/weight"], "learning_rate": rate, "step": step}
        self._values.update(self._optimizer.run(given))
        self._backend.synchronize()
        self._number += 1

    def parameters(self) -> dict[str, Any]:
        return {n: self._backend.to_numpy(t) for n, t in self._values.items() if n.startswith("parameter/")}


class _EagerStep:
    """What a training loop does."""

    def __init__(self, job: Job, batch: Mapping[str, torch.Tensor]) -> None:
        self._job, self._batch = job, batch
        settings = job.config.inner_optimizer
        assert settings is not None
        self._settings = settings
        self._optimizer = torch.optim.AdamW(
            job.model.parameters(), lr=1e-3, eps=settings.eps, weight_decay=settings.weight_decay, betas=settings.betas
        )

    def step(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._job.loss(self._job.model, self._batch).mean().backward()
        if self._settings.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._job.model.parameters(), self._settings.max_norm)
        self._optimizer.step()

    def parameters(self) -> dict[str, Any]:
        return {f"parameter/{name}": p.detach().numpy() for name, p in self._job.model.named_parameters()}


def _check(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """Both must have taken the same step, or their times say nothing."""
    shared = sorted(set(ours) & set(theirs))
    difference = sum(float(np.square(ours[name] - theirs[name]).sum()) for name in shared)
    norm = sum(float(np.square(theirs[name]).sum()) for name in shared)
    if not shared or not difference <= AGREEMENT**2 * norm:
        raise BenchmarkFailed(f"after one step the parameters differ by {(difference / max(norm, 1e-30)) ** 0.5:.3g}")
