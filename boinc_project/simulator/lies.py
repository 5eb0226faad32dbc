"""What liars give back: a Behaviour turns a microtask and its honest update into an update, or into nothing.

    honest        what was asked for
    sign_flip     -scale g
    alie          "a little is enough", Baruch et al. 2019, https://arxiv.org/abs/1902.06156: mu - z sigma
    ipm           inner-product manipulation, Xie et al. 2019, https://arxiv.org/abs/1903.03936: -epsilon mu
    label_flip    g computed from labels C - 1 - y (Karimireddy et al. 2021, https://arxiv.org/abs/2012.10333)
    mimic         one honest update that others give too (Karimireddy et al. 2022, https://arxiv.org/abs/2006.09365)
    scaled        factor g
    free_rider    noise, without computing
    drop          computes and is never heard of again
mu and sigma are mean and standard deviation, coordinate by coordinate, of the round's honest updates: the liar is
taken to know them all, as those papers do.

Two liars of a workunit give the same lie if they collude, as the same arithmetic on the same microtask does. `Apart`
makes a liar one that does not: its lie is moved, by a direction of its own, too far to agree with anybody's.
Metrics and buffers stay honest: a lie there would be seen for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from boinc_project.simulator.computing import MOVING, Array, Computed, Computer, Tensors, seeded


@dataclass(frozen=True)
class Situation:
    """What a host knows when it answers. `round` gives the honest updates of all microtasks of the round, this one
    among them, by slot; computed when a liar asks."""

    host: str
    computed: Computed
    computer: Computer
    round: Callable[[], Sequence[Tensors]]

    @property
    def honest(self) -> Tensors:
        return self.computed.tensors


class Behaviour(Protocol):
    """How a host answers. `works`: the share of a microtask's computing that it takes."""

    @property
    def works(self) -> float: ...

    @property
    def lies(self) -> bool:
        """Whether its answers are not what was asked for."""

    def answer(self, situation: Situation) -> Tensors | None:
        """The update to give back; None: nothing, ever."""


@dataclass(frozen=True)
class Honest:
    """Does what it was asked for."""

    works: ClassVar[float] = 1.0
    lies: ClassVar[bool] = False

    def answer(self, situation: Situation) -> Tensors | None:
        return situation.honest


@dataclass(frozen=True)
class _Liar:
    works: ClassVar[float] = 1.0
    lies: ClassVar[bool] = True


@dataclass(frozen=True)
class SignFlip(_Liar):
    """-scale g"""

    scale: float = 1.0

    def answer(self, situation: Situation) -> Tensors | None:
        return _mapped(situation.honest, lambda g: -self.scale * g)


@dataclass(frozen=True)
class Scaled(_Liar):
    """factor g"""

    factor: float = 10.0

    def answer(self, situation: Situation) -> Tensors | None:
        return _mapped(situation.honest, lambda g: self.factor * g)


@dataclass(frozen=True)
class Alie(_Liar):
    """mu - z sigma; z None: the paper's largest one that n workers, f of them bad, do not notice."""

    z: float | None = 1.5
    n: int = 25
    f: int = 5

    def answer(self, situation: Situation) -> Tensors | None:
        mean, deviation = _moments(situation.round())
        z = alie_z(self.n, self.f) if self.z is None else self.z
        return {**situation.honest, **{name: _like(mean[name] - z * deviation[name]) for name in mean}}


@dataclass(frozen=True)
class Ipm(_Liar):
    """-epsilon mu"""

    epsilon: float = 2.0

    def answer(self, situation: Situation) -> Tensors | None:
        mean, _ = _moments(situation.round())
        return {**situation.honest, **{name: _like(-self.epsilon * mean[name]) for name in mean}}


@dataclass(frozen=True)
class LabelFlip(_Liar):
    """g from labels C - 1 - y; `labels` names the shards' tensor of labels, C is its largest value and one more."""

    labels: str = "batch/y"

    def answer(self, situation: Situation) -> Tensors | None:
        lie = situation.computer.changed(situation.computed, self._flipped)
        return {name: lie[name] if name.startswith(MOVING) else array for name, array in situation.honest.items()}

    def _flipped(self, name: str, array: Array) -> Array:
        if name != self.labels:
            return array
        if array.dtype.kind not in "iu":
            raise ValueError(f"label_flip: {name} holds no whole numbers")
        return np.ascontiguousarray(array.max() - array)


@dataclass(frozen=True)
class Mimic(_Liar):
    """The honest update of the round's first microtask, whatever was asked for."""

    def answer(self, situation: Situation) -> Tensors | None:
        first = situation.round()[0]
        return {name: first[name] if name.startswith(MOVING) else array for name, array in situation.honest.items()}


@dataclass(frozen=True)
class FreeRider(_Liar):
    """Normal noise of this standard deviation, made without computing."""

    works: ClassVar[float] = 0.0
    deviation: float = 1e-3

    def answer(self, situation: Situation) -> Tensors | None:
        draws = seeded("free rider", situation.computed.digest, situation.host)
        return _mapped(situation.honest, lambda g: self.deviation * draws.standard_normal(g.shape))


@dataclass(frozen=True)
class Drop(_Liar):
    """Takes work and never reports it."""

    def answer(self, situation: Situation) -> Tensors | None:
        return None


@dataclass(frozen=True)
class Apart:
    """A liar that colludes with nobody: its lie and a direction of its own, `share` of the lie's norm long."""

    liar: Behaviour
    share: float = 0.5

    @property
    def works(self) -> float:
        return self.liar.works

    @property
    def lies(self) -> bool:
        return self.liar.lies

    def answer(self, situation: Situation) -> Tensors | None:
        lie = self.liar.answer(situation)
        if lie is None:
            return None
        draws = seeded("apart", situation.computed.digest, situation.host)

        def moved(g: Array) -> Array:
            own = draws.standard_normal(g.shape)
            length = float(np.linalg.norm(own))
            return g + (self.share * float(np.linalg.norm(g)) / length if length else 0.0) * own

        return _mapped(lie, moved)


#: Name of a behaviour -> what makes it, with its usual parameters.
BEHAVIOURS: Mapping[str, Callable[[], Behaviour]] = {
    "honest": Honest,
    "sign_flip": SignFlip,
    "alie": Alie,
    "ipm": Ipm,
    "label_flip": LabelFlip,
    "mimic": Mimic,
    "scaled": Scaled,
    "free_rider": FreeRider,
    "drop": Drop,
}


def alie_z(n: int, f: int) -> float:
    """The paper's z, the largest with Phi(z) < (n - f - s) / (n - f), where s = floor(n / 2 + 1) - f honest workers
    must come to lie beyond mu - z sigma."""
    from statistics import NormalDist

    supporters = math.floor(n / 2 + 1) - f
    share = (n - f - supporters) / (n - f)
    if not 0 < share < 1:
        raise ValueError(f"{f} of {n} workers need no deceit to be the majority")
    return NormalDist().inv_cdf(share)


def _mapped(tensors: Tensors, change: Callable[[Array], Any]) -> Tensors:
    return {n: _like(change(array)) if n.startswith(MOVING) else array for n, array in tensors.items()}


def _moments(updates: Sequence[Tensors]) -> tuple[dict[str, Array], dict[str, Array]]:
    """Mean and (population) standard deviation of each moving tensor over a round, in float64."""
    names = [name for name in updates[0] if name.startswith(MOVING)]
    stacked = {name: np.stack([each[name] for each in updates]).astype(np.float64) for name in names}
    return {n: a.mean(axis=0) for n, a in stacked.items()}, {n: a.std(axis=0) for n, a in stacked.items()}


def _like(array: Any) -> Array:
    """As an update's file has it."""
    return np.ascontiguousarray(array, dtype=np.float32)
