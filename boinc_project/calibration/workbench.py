"""The job's own microtasks in this process, on any replica, step by step, and their updates as a validator reads them.

Workbench.gradient(...)   one microtask of gradients -> the update's tensors
Workbench.trail(...)      a local training that can be stopped, looked at and taken back at any step
Workbench.judged(...)     an update written with the job's codec and read again
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from apps.gradient.backends import Backend
from apps.gradient.checkpoint import Checkpoint
from apps.gradient.runner import Form, Loaded, NotFinite, Run
from boinc_project.calibration.replicas import Replica
from boinc_project.contract.codecs import Codec, CodecSeed
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import Batch, Microtask
from boinc_project.contract.update import read_update, update_types, write_update
from boinc_project.job_config import InnerOptimizerSection, JobConfig
from boinc_project.plan import DataPlan, batches_of_microtask
from work_generator.export import ExportedJob, export_optimizer
from work_generator.job import Job

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

__all__ = ["NotFinite", "Tensors", "Trail", "Workbench"]


@dataclass(frozen=True)
class Workbench:
    """A traced job and what its microtasks are made of."""

    config: JobConfig
    gradient_graph: Graph
    optimizer: Graph
    constants: Tensors
    data: Tensors
    plan: DataPlan
    _backends: dict[str, Backend] = field(default_factory=dict)  # opening one again costs seconds

    @staticmethod
    def of(job: Job, exported: ExportedJob) -> Workbench:
        data = {f"batch/{name}": tensor.numpy() for name, tensor in job.data["train"].items()}
        rows = len(next(iter(data.values())))
        wanted = {each.name for each in exported.gradient.inputs_of_kind("constant")}
        return Workbench(
            job.config,
            exported.gradient,
            exported.optimizer or _server_optimizer(job.config, exported),
            {name: array for name, array in exported.constants.items() if name in wanted},
            data,
            DataPlan(job.config.job.seed, (rows,), job.config.data.batch_size, exported.needs_full_batches),
        )

    @property
    def random_numbers(self) -> bool:
        """Whether a step draws random numbers."""
        return any(op.startswith("random_") for op in self.gradient_graph.operators())

    @property
    def learning_rate(self) -> float:
        """The highest rate of the schedule, at which copies part soonest."""
        section = self.config.inner_optimizer or self.config.optimizer
        return section.lr

    def gradient(self, replica: Replica, state: Tensors, version: int, slot: int, batches: int) -> Tensors:
        """The update of a gradient microtask. Raises NotFinite."""
        run = self._run(replica, self._loaded(replica, "gradient", state, version, slot, batches))
        while not run.done:
            run.step()
        return run.update()

    def half_of_the_gradient(self, replica: Replica, state: Tensors, version: int, slot: int, batches: int) -> Tensors:
        """A lie: half of the samples computed, and the sums doubled. (Its metrics have fewer steps.)"""
        loaded = self._loaded(replica, "gradient", state, version, slot, batches)
        kept = loaded.microtask.batches[: max(1, batches // 2)]
        if batches == 1:
            half = max(1, kept[0].samples // 2)
            kept = (Batch(kept[0].shards[:half], kept[0].rows[:half]),)
        microtask = dataclasses.replace(loaded.microtask, batches=kept, learning_rates=(0.0,) * len(kept))
        share = sum(batch.samples for batch in kept) / loaded.microtask.samples
        run = self._run(replica, dataclasses.replace(loaded, microtask=microtask))
        while not run.done:
            run.step()
        return {n: (a / share).astype(a.dtype) if n.startswith("gradient/") else a for n, a in run.update().items()}

    def trail(self, replica: Replica, state: Tensors, version: int, slot: int, steps: int) -> Trail:
        """A local training of at most `steps` steps."""
        run = self._run(replica, self._loaded(replica, "local-steps", state, version, slot, steps))
        return Trail(run, replica)

    def trained(self, replica: Replica, state: Tensors, steps: int) -> Tensors:
        """The state after so many steps of the job's optimizer. Raises NotFinite."""
        run = self._run(replica, self._loaded(replica, "local-steps", state, 0, 0, steps))
        while not run.done:
            run.step()
        values = run.progress().tensors
        return {name: values[f"value/{name}"] for name in state}

    def _loaded(self, replica: Replica, mode: str, state: Tensors, version: int, slot: int, steps: int) -> Loaded:
        number = version * self.config.train.microtasks_per_version + slot
        batches, _ = batches_of_microtask(self.plan, number, steps)
        if replica.shuffle:
            batches = tuple(_shuffled(batch) for batch in batches)
        microtask = Microtask(
            job=self.config.job.name,
            mode=mode,
            base_version=version,
            slot=slot,
            files={},
            batch_size=self.config.data.batch_size,
            batches=batches,
            learning_rates=(self.learning_rate,) * steps,
            seed=self.config.job.seed,
            first_step=number * steps,
            codec=self._codec,
        )
        return Loaded(
            microtask=microtask,
            digest=_DIGEST,
            gradient=self.gradient_graph,
            optimizer=self.optimizer if mode == "local-steps" else None,
            state=state,
            constants=self.constants,
            shards=[self.data],
            types=update_types(self.gradient_graph, mode, steps),
            forms=(Form(microtask.batch_size, self.gradient_graph),),
        )

    @property
    def _codec(self) -> Codec:
        # What the file is compressed with changes no number.
        return dataclasses.replace(self.config.codec.codec(), compression="none")

    def _run(self, replica: Replica, loaded: Loaded) -> Run:
        if replica.name not in self._backends:
            self._backends[replica.name] = replica.open()
        torch.set_num_threads(replica.threads)
        return Run(loaded, self._backends[replica.name])

    def judged(self, mode: str, tensors: Tensors, steps: int, version: int, slot: int) -> Tensors:
        """An update of so many steps, written with the codec of that microtask and read again: what the validator
        compares."""
        types = update_types(self.gradient_graph, mode, steps)
        codec = self._codec.seeded(CodecSeed(self.config.job.seed, version, slot))
        data = write_update(tensors, types, {"microtask": _DIGEST}, codec)
        return read_update(data, types, codec, _DIGEST).tensors


_DIGEST = "0" * 64  # these microtasks are nobody's


@dataclass
class Trail:
    """A local training on one replica."""

    _run: Run
    replica: Replica

    @property
    def step(self) -> int:
        return self._run.step_number

    def advance(self, step: int) -> None:
        """Go on until so many steps are done. Raises NotFinite."""
        torch.set_num_threads(self.replica.threads)
        while self._run.step_number < step:
            self._run.step()

    def mark(self) -> Checkpoint:
        """Where it is now, for `back`."""
        return self._run.progress()

    def back(self, mark: Checkpoint) -> None:
        """Return to a mark that was made at step 1 or later."""
        self._run.restore(mark)

    def update(self, scale: float = 1.0) -> Tensors:
        """The update if the microtask ended here; the delta `scale` times as large."""
        progress, loaded = self._run.progress(), self._run.loaded
        found: dict[str, Array] = {}
        for name in loaded.types:
            kind, _, rest = name.partition("/")
            if kind == "delta":
                delta = loaded.state[f"parameter/{rest}"] - progress.tensors[f"value/parameter/{rest}"]
                found[name] = delta if scale == 1.0 else (scale * delta).astype(np.float32)
            elif kind == "buffer":
                found[name] = progress.tensors[f"value/{name}"]
            else:
                found[name] = progress.tensors[name].view(np.float64).astype(np.float32)
        return found


def _shuffled(batch: Batch) -> Batch:
    order = np.random.Generator(np.random.Philox(13)).permutation(batch.samples)
    return Batch(tuple(batch.shards[i] for i in order), tuple(batch.rows[i] for i in order))


def _server_optimizer(config: JobConfig, exported: ExportedJob) -> Graph:
    """[optimizer] as a graph: how a job whose volunteers only compute gradients is trained here."""
    shapes = {
        each.name[len("parameter/") :]: each.shape
        for each in exported.gradient.inputs_of_kind("parameter")
        if f"gradient/{each.name[len('parameter/') :]}" in exported.gradient.output_types()
    }
    return export_optimizer(shapes, InnerOptimizerSection(**dataclasses.asdict(config.optimizer)))
