"""PyTorch DDP on a job's batches: computed in one process, and by real processes over gloo to see that it is the same.

`python -m scripts.benchmarks.bytes_ddp FOLDER`, run in a network of its own (wire.py), trains the job in FOLDER with
one process for each worker of rows.npy there, and prints what the network has carried and the weights' digest.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file

from boinc_project.plan import DataPlan
from scripts.benchmarks import wire
from scripts.benchmarks.common import REPOSITORY, BenchmarkFailed
from work_generator.job import Job

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Theirs:
    """DDP: (step, held-out loss) from time to time, and the bytes that all workers have sent by a step."""

    curve: tuple[tuple[int, float], ...]
    bytes_per_step: float

    @property
    def final(self) -> float:
        return self.curve[-1][1]


def ring_bytes(workers: int, parameters: int) -> float:
    """What all workers send in a ring all-reduce of float32 gradients: 2 (n - 1) / n x 4 P each."""
    return workers * 2 * (workers - 1) / workers * 4 * parameters


def rows_of(job: Job, plan: DataPlan) -> list[list[Array]]:
    """Samples of each worker's batch, by steps, as the job's microtasks have them. An epoch's last batch is shorter."""
    workers, steps = job.config.train.microtasks_per_version, job.config.train.local_steps
    starts = np.concatenate([[0], np.cumsum(plan.rows)])
    found = []
    for step in range(job.config.train.max_versions * steps):
        version, inside = divmod(step, steps)
        drawn = [plan.samples_of((version * workers + slot) * steps + inside) for slot in range(workers)]
        found.append([starts[shards] + rows for shards, rows in drawn])
    return found


def train(
    job: Job, rows: Sequence[Array], model: torch.nn.Module | None = None, every: int = 0
) -> list[tuple[int, float]]:
    """Step [inner_optimizer] over the mean gradient of each step's samples; (step, held-out loss) after each `every`.

    `model`: the job's, wrapped.
    """
    config, model = job.config, model or job.model
    inner = config.inner_optimizer
    assert inner is not None
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer: torch.optim.Optimizer
    if inner.kind == "adamw":
        decay = inner.weight_decay
        optimizer = torch.optim.AdamW(parameters, lr=inner.lr, betas=inner.betas, eps=inner.eps, weight_decay=decay)
    else:
        optimizer = torch.optim.SGD(parameters, lr=inner.lr, momentum=inner.momentum, nesterov=inner.nesterov)
    text, curve = job.data["train"]["text"], []
    for step, chosen in enumerate(rows):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate(step // config.train.local_steps)
        optimizer.zero_grad()
        job.loss(model, {"text": text[torch.from_numpy(chosen)]}).mean().backward()
        torch.nn.utils.clip_grad_norm_(parameters, inner.max_norm)
        optimizer.step()
        if every and ((step + 1) % every == 0 or step + 1 == len(rows)):
            curve.append((step + 1, held_out(job)))
    return curve


def held_out(job: Job) -> float:
    """Mean loss of the job's model on its held-out samples."""
    text = job.data["test"]["text"]
    with torch.no_grad():
        losses = [job.loss(job.model, {"text": text[i : i + 128]}) for i in range(0, len(text), 128)]
    return float(torch.cat(losses).mean())


def ddp(job: Job, plan: DataPlan) -> Theirs:
    """All of the job's steps from its first weights, one over the batches of all workers together."""
    rows = rows_of(job, plan)
    fresh = Job.load(job.config)
    together = [np.concatenate(each) for each in rows]
    curve = train(fresh, together, every=job.config.train.evaluate_every * job.config.train.local_steps)
    return Theirs(tuple(curve), ring_bytes(len(rows[0]), parameters_in(fresh.model)))


@dataclass(frozen=True)
class Checked:
    """Real DDP against the steps in one process: relative L2 distance of the weights; bytes of a step, measured over
    those of the formula."""

    distance: float
    bytes_ratio: float


def check(job: Job, plan: DataPlan, workers: int, steps: int, folder: Path) -> Checked:
    """Train the first steps with the first workers, by real processes and in this one. Raises as wire.alone."""
    rows = np.array([each[:workers] for each in rows_of(job, plan)[:steps]])
    np.save(folder / "rows.npy", rows)
    assert job.config.inner_optimizer is not None
    (folder / "optimizer.json").write_text(json.dumps(asdict(job.config.inner_optimizer)))
    carried = wire.alone(__name__, str(folder))["carried"]
    fresh = Job.load(job.config)
    train(fresh, list(rows.reshape(len(rows), -1)))
    real = [load_file(folder / f"weights{rank}.safetensors")["weights"] for rank in range(workers)]
    if any(not torch.equal(each, real[0]) for each in real):
        raise BenchmarkFailed("the processes of DDP ended with different weights")
    distance = float((real[0] - _flat(fresh.model)).norm() / _flat(fresh.model).norm())
    return Checked(distance, carried / steps / ring_bytes(workers, parameters_in(fresh.model)))


def parameters_in(model: torch.nn.Module) -> int:
    """How many numbers are trained."""
    return sum(p.numel() for p in model.parameters())


def _flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _worker(folder: Path, rank: int) -> None:
    """One process of DDP; the first one says what the network has carried during the steps."""
    torch.set_num_threads(1)
    rows = np.load(folder / "rows.npy")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=rows.shape[1]
    )
    job = Job.load(folder)
    assert job.config.inner_optimizer is not None
    inner = replace(job.config.inner_optimizer, **json.loads((folder / "optimizer.json").read_text()))
    job = replace(job, config=replace(job.config, inner_optimizer=inner))
    model = torch.nn.parallel.DistributedDataParallel(job.model)
    torch.distributed.barrier()
    before = wire.carried()
    train(job, rows[:, rank], model)
    torch.distributed.barrier()
    after = wire.carried()
    save_file({"weights": _flat(job.model)}, folder / f"weights{rank}.safetensors")
    torch.distributed.destroy_process_group()
    if rank == 0:
        print(json.dumps({"carried": after - before}), flush=True)


def _all_workers(folder: Path) -> int:
    wire.bring_up()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "scripts.benchmarks.bytes_ddp", str(folder)]
    count = np.load(folder / "rows.npy", mmap_mode="r").shape[1]
    started = [subprocess.Popen([*command, str(k)], cwd=REPOSITORY, env=environment) for k in range(count)]
    return max(abs(each.wait()) for each in started)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        sys.exit(_all_workers(Path(sys.argv[1])))
    _worker(Path(sys.argv[1]), int(sys.argv[2]))
