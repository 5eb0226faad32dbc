"""Arrival traces: which contributions made which version of a simulated flow, and what other arithmetic makes of them.

Which results come first does not depend on what they hold. A trace recorded from one simulation, in which the real
daemons decided, is therefore that of all policies that take the first K; they differ in what they make of it.
`replay` takes the same local steps in PyTorch, over the same batches in the same order, and the product's own policies
make the versions. Many settings go through a trace at once: their local steps are one batched computation.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from assimilator.contributions import Contribution
from assimilator.policies import Round, age_weight, policy_of
from boinc_project.contract.codecs import Codec
from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import OpenUpdate
from boinc_project.gt_tables import Disposition, gt_ledger
from boinc_project.job_config import JobConfig
from boinc_project.plan import DataPlan
from boinc_project.simulator.simulation import Simulation
from work_generator.export import ExportedJob
from work_generator.export.optimizer import CLIP_EPS
from work_generator.job import Job
from work_generator.speed_classes import uniform

Array = npt.NDArray[Any]
State = dict[str, Array]

#: (parameters [P, ...] by name, the job's one field [P, B, ...]) -> mean loss of each of P models, [P].
Losses = Callable[[dict[str, Tensor], Tensor], Tensor]


@dataclass(frozen=True)
class Arrivals:
    """Of every version from 1 on: (base version, slot) of its contributions, and virtual hours when it was made."""

    rounds: tuple[tuple[tuple[int, int], ...], ...]
    hours: tuple[float, ...]

    @property
    def lag(self) -> float:
        """Mean age of what was applied, in versions."""
        return statistics.mean(version - base for version, round in enumerate(self.rounds) for base, _ in round)

    @property
    def lasts(self) -> dict[int, int]:
        """Base version -> the last version whose making needs it."""
        return {base: version for version, round in enumerate(self.rounds) for base, _ in round}


def recorded(simulation: Simulation) -> Arrivals:
    """The trace of a simulation that has come to its end."""
    rows = [row for row in simulation.project.rows(gt_ledger) if row["disposition"] == Disposition.APPLIED]
    rounds: dict[int, list[tuple[int, int]]] = {}
    for row in rows:
        rounds.setdefault(int(row["applied_version"]), []).append((int(row["base_version"]), int(row["slot"])))
    hours = {moment.version: moment.when / 3600 for moment in simulation.moments}
    versions = sorted(rounds)
    return Arrivals(tuple(tuple(sorted(rounds[v])) for v in versions), tuple(hours[v] for v in versions))


def replay(
    job: Job,
    exported: ExportedJob,
    losses: Losses,
    configs: Sequence[JobConfig],
    arrivals: Arrivals,
    every: int,
    margin: float = math.inf,
) -> list[list[tuple[float, float]]]:
    """(virtual hours, held-out loss) of each setting at every `every`-th version and the last; infinite, and the
    last: it diverged.

    The settings differ in policy and rates alone. The model has no buffers, the inner optimizer is SGD. In the second
    half a setting is given up whose loss is over `margin` times the least one of its policy.
    """
    training = _Training(job, exported, losses, configs[0])
    start = {name: array for name, array in exported.state.items() if name.startswith("parameter/")}
    runs = [_Run(config, {0: start}) for config in configs]
    lasts = arrivals.lasts
    with np.errstate(all="ignore"):  # settings that diverge are part of a search
        for version, round in enumerate(arrivals.rounds):
            going = [run for run in runs if run.is_finite]
            if not going:
                break
            deltas = training.deltas(going, round)
            for run, moved in zip(going, deltas, strict=True):
                run.advance(version, round, moved, training)
                for base in [each for each in run.history if each <= version and lasts.get(each, -1) <= version]:
                    del run.history[base]
                if (version + 1) % every == 0 or version + 1 == len(arrivals.rounds):
                    run.note(arrivals.hours[version], training.held_out(run.history[version + 1]))
            if 2 * version > len(arrivals.rounds):
                _give_up(going, margin)
    return [run.curve for run in runs]


def _give_up(runs: Sequence[_Run], margin: float) -> None:
    noted = [run for run in runs if run.curve]
    for run in noted:
        others = [each.curve[-1][1] for each in noted if each.config.train.policy == run.config.train.policy]
        if run.curve[-1][1] > margin * min(others):
            run.note(run.curve[-1][0], math.inf)


@dataclass
class _Run:
    """A setting on its way: versions that are still needed, the optimizer's state, (virtual hours, loss) so far."""

    config: JobConfig
    history: dict[int, State]
    optimizer: State = field(default_factory=dict)
    curve: list[tuple[float, float]] = field(default_factory=list)
    is_finite: bool = True

    def note(self, hours: float, loss: float) -> None:
        self.is_finite = math.isfinite(loss)
        self.curve.append((hours, loss if self.is_finite else math.inf))

    def advance(
        self, version: int, round: Sequence[tuple[int, int]], deltas: Sequence[State], training: _Training
    ) -> None:
        """Make version + 1 of what these contributions changed."""
        contributions = [
            Contribution(
                slot, training.samples, partial(training.update, delta), base, training.steps,
                age_weight=age_weight(self.config.aggregation, version - base),
            )
            for (base, slot), delta in zip(round, deltas, strict=True)
        ]  # fmt: skip

        def load() -> tuple[State, State]:
            return {name: array.copy() for name, array in self.history[version].items()}, self.optimizer

        made = policy_of(self.config).advance(
            Round(version, contributions, load, lambda base: self.history[base], training.graph)
        )
        self.history[version + 1], self.optimizer = made.state, made.optimizer


def clipped(gradients: Sequence[Tensor], most: float) -> tuple[Tensor, ...]:
    """Gradients [P, ...] of P models, each scaled down to the norm `most` over all of its parameters."""
    squares = torch.stack([gradient.flatten(1).square().sum(1) for gradient in gradients]).sum(0)
    factor = torch.clamp(most / (squares.sqrt() + CLIP_EPS), max=1.0)
    return tuple(gradient * factor.view((-1,) + (1,) * (gradient.dim() - 1)) for gradient in gradients)


class _Training:
    """Local steps and held-out loss of a job, in PyTorch."""

    def __init__(self, job: Job, exported: ExportedJob, losses: Losses, config: JobConfig) -> None:
        assert config.inner_optimizer is not None
        self._exported, self._losses, self._max_norm = exported, losses, config.inner_optimizer.max_norm
        self._names = {theirs: ours for theirs, ours in exported.state_dict.items() if ours.startswith("parameter/")}
        assert len(self._names) == len(exported.state), "a model with buffers or tied weights cannot be replayed"
        (self._train,), (self._test,) = job.data["train"].values(), job.data["test"].values()
        size, count = config.data.batch_size, len(self._train)
        assert count % size == 0, "an epoch's last batch must be full"
        self._plan = DataPlan(config.job.seed, (count,), size, False)
        self.steps, self.samples = config.steps, config.steps * size
        types = {f"delta/{ours.partition('/')[2]}": array.shape for ours, array in exported.state.items()}
        self._types = {name: TensorType("float32", shape) for name, shape in types.items()}

    def graph(self) -> Graph:
        return self._exported.gradient

    def update(self, delta: State) -> OpenUpdate:
        return OpenUpdate(delta, self._types, Codec(compression="none"), {})

    def deltas(self, runs: Sequence[_Run], round: Sequence[tuple[int, int]]) -> list[list[State]]:
        """What the local steps of each setting and contribution change, start minus end."""
        rates, momenta = [], []
        for config in (run.config for run in runs):
            inner = config.inner_optimizer
            assert inner is not None and inner.kind == "sgd" and not (inner.nesterov or inner.weight_decay)
            rates += [config.learning_rate(base) for base, _ in round]
            momenta += [inner.momentum] * len(round)
        flat = [run.history[base] for run in runs for base, _ in round]
        first = {n: torch.from_numpy(np.stack([state[ours] for state in flat])) for n, ours in self._names.items()}
        now = {name: tensor.clone() for name, tensor in first.items()}
        speed = {name: torch.zeros_like(tensor) for name, tensor in first.items()}
        column = {name: (-1,) + (1,) * (tensor.dim() - 1) for name, tensor in first.items()}
        rate, momentum = torch.tensor(rates), torch.tensor(momenta)
        places = [self._rows(run.config, base, slot) for run in runs for base, slot in round]
        for step in range(self.steps):
            rows = torch.from_numpy(np.stack([each[step] for each in places]))
            leaves = [tensor.requires_grad_() for tensor in now.values()]
            gradients = torch.autograd.grad(self._losses(now, self._train[rows]).sum(), leaves)
            with torch.no_grad():
                if self._max_norm:
                    gradients = clipped(gradients, self._max_norm)
                for (name, tensor), gradient in zip(now.items(), gradients, strict=True):
                    speed[name].mul_(momentum.view(column[name])).add_(gradient)
                    tensor.sub_(rate.view(column[name]) * speed[name])
        ours = {
            f"delta/{ours.partition('/')[2]}": (first[n] - now[n].detach()).numpy() for n, ours in self._names.items()
        }
        each = [{name: array[i] for name, array in ours.items()} for i in range(len(flat))]
        return [each[i : i + len(round)] for i in range(0, len(each), len(round))]

    def _rows(self, config: JobConfig, base: int, slot: int) -> list[Array]:
        first = uniform(config, base, slot).first_batch
        return [self._plan.samples_of(first + step)[1] for step in range(self.steps)]

    def held_out(self, state: State) -> float:
        named = {name: torch.from_numpy(state[ours]).unsqueeze(0) for name, ours in self._names.items()}
        with torch.no_grad():
            return float(self._losses(named, self._test.unsqueeze(0)))
