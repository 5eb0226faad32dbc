"""What a policy is: from the contributions of a version, and the version before it, to the next one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from assimilator.aggregation import Folded, fold
from assimilator.contributions import CARRIED, Contribution
from assimilator.optimizers import AdamW, Optimizer, Sgd, step_in_place
from assimilator.rules import MIXINGS, RULES, CenteredClipping, Mixing, Rule
from boinc_project.contract.graph import Graph
from boinc_project.job_config import AggregationSection, JobConfig

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

#: The last outcome of a rule that starts from it is kept with the optimizer's state.
PREVIOUS = "aggregate/"


@dataclass(frozen=True)
class Anchor:
    """The server's own gradient at a version: `load` gives its matrices' singular vectors (policies/anchored.py)."""

    version: int
    load: Callable[[], Tensors]


@dataclass(frozen=True)
class Round:
    """What version + 1 is made of.

    contributions   in any order
    load            state (parameter/*, buffer/*) and optimizer state of `version`; the arrays are the caller's
    load_state      state of an earlier version that a contribution was computed from
    graph           the job's gradient graph
    anchor          the server's own gradient, if the job's policy has one and it is there
    """

    version: int
    contributions: Sequence[Contribution]
    load: Callable[[], tuple[dict[str, Array], dict[str, Array]]]
    load_state: Callable[[int], Tensors]
    graph: Callable[[], Graph]
    anchor: Anchor | None = None


@dataclass(frozen=True)
class NewVersion:
    """The outcome of a round before it is written. `delta`: from the version before, if that is what is published."""

    state: dict[str, Array]
    optimizer: dict[str, Array]
    samples: int
    delta: Mapping[str, Array] | None = None


class Policy(Protocol):
    """Pure arithmetic: the same bytes for the same contributions, whatever order they arrived in.

    Raises NothingToFold if the contributions have no weight, and what loading raises.
    """

    def advance(self, round: Round) -> NewVersion: ...


@dataclass(frozen=True)
class OuterStep:
    """A step of the server's optimizer over what a rule makes of the contributions.

    rate   learning rate of the step from a version to the next
    """

    optimizer: Optimizer
    rate: Callable[[int], float]
    rule: Rule | None = None
    mixing: Mixing | None = None

    def advance(self, round: Round, change: Callable[[Folded], Folded] = lambda folded: folded) -> NewVersion:
        """Fold the contributions, let `change` alter what came out, and take the step."""
        if not isinstance(self.rule, CenteredClipping):
            return self.take(round, change(fold(round.contributions, self.rule, self.mixing)))
        previous = {n[len(PREVIOUS) :]: a for n, a in round.load()[1].items() if n.startswith(PREVIOUS)}
        folded = fold(round.contributions, self.rule, self.mixing, previous or None)
        kept = {PREVIOUS + name: array.copy() for name, array in folded.gradient.items()}
        made = self.take(round, change(folded))
        return NewVersion(made.state, {**made.optimizer, **kept}, made.samples)

    def take(self, round: Round, folded: Folded) -> NewVersion:
        """The step alone, of the parameters that contributions are about; the others stay as they are.

        The version is loaded when all contributions are folded; its arrays are written over.
        """
        state, kept = round.load()
        parameters = parameters_of(state)
        moved = {name: array for name, array in parameters.items() if name in folded.gradient}
        own = {k: array for k, array in kept.items() if k.partition("/")[2] in moved and not k.startswith(PREVIOUS)}
        rest = {k: array for k, array in kept.items() if k.partition("/")[2] not in moved}
        number = round.version + 1
        new = step_in_place(self.optimizer, moved, folded.gradient, own, number, self.rate(round.version))
        made = state_of({**parameters, **moved}, {**carried_of(state), **folded.buffers})
        return NewVersion(made, {**rest, **new}, folded.samples)


def outer_step(config: JobConfig, optimizer: Optimizer | None = None) -> OuterStep:
    """The step that a job's [optimizer] and [aggregation] ask for. Scheduled without an inner optimizer; with one the
    inner rate is, and the outer one constant."""

    def rate(version: int) -> float:
        return config.learning_rate(version) if config.inner_optimizer is None else config.optimizer.lr

    section = config.aggregation
    mixing = None if section.mixing == "none" else MIXINGS[section.mixing](section.byzantine)
    return OuterStep(optimizer or optimizer_of(config), rate, rule_of(section), mixing)


def optimizer_of(config: JobConfig) -> Optimizer:
    """The server's (outer) optimizer of a job."""
    section = config.optimizer
    if section.kind == "adamw":
        return AdamW(section.betas, section.eps, section.weight_decay)
    return Sgd(section.momentum, section.nesterov, section.weight_decay)


def rule_of(section: AggregationSection) -> Rule:
    """The robust rule of a job."""
    if section.rule == "centered_clipping":
        return CenteredClipping(section.tau, section.clip_iterations)
    needs_f = section.rule in ("trimmed_mean", "krum", "multi_krum")
    return RULES[section.rule](*([section.byzantine] if needs_f else []))


def parameters_of(state: Tensors) -> dict[str, Array]:
    """Parameters of a state by their names."""
    return {name[len("parameter/") :]: array for name, array in state.items() if name.startswith("parameter/")}


def carried_of(state: Tensors) -> dict[str, Array]:
    """Buffers of a state, and the inner optimizer's state, by their names in it."""
    return {name: array for name, array in state.items() if name.startswith(CARRIED)}


def state_of(parameters: Tensors, carried: Tensors) -> dict[str, Array]:
    """The state again, by sorted names."""
    named = {**{f"parameter/{name}": array for name, array in parameters.items()}, **carried}
    return {name: named[name] for name in sorted(named)}
