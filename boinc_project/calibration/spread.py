"""From distances of copies to what a job should allow: pure arithmetic.

tolerance   the geometric mean of the largest honest distance and the nearest lie's, so that as large a factor lies
            on either side; never looser than LIMIT, because a tolerance is a room for lies: an update that is a
            thousandth wrong in the worst direction still learns, one that is a hundredth wrong loses half of it
noise       a tensor (or rows of one) whose true gradient is zero holds rounding noise only: honest replicas agree on
            it in less than one digit. The key bias of attention is one: softmax ignores it
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]
Tensors = Mapping[str, Array]

LIMIT = 1e-3  # the largest distance of copies at which agreement alone is evidence enough
SMALLEST = 1.2e-7  # float32's epsilon: copies that agree better than this are as good as equal
NOISE_RATIO = 0.1  # of a tensor's difference to its own size: no digit is agreed on
FARTHEST = 1e6  # stands for anything larger: JSON has no infinity
MARGIN = 4.0  # the least factor between honest copies and the nearest lie (2 on either side) that tells them apart


@dataclass(frozen=True)
class Noise:
    """Noise in a tensor: rows first to last - 1 along its first dimension, of `rows` in all; ratio: how noisy."""

    tensor: str
    first: int
    last: int
    rows: int
    ratio: float

    @property
    def whole(self) -> bool:
        return (self.first, self.last) == (0, self.rows)

    def __str__(self) -> str:
        return self.tensor if self.whole else f"{self.tensor}[{self.first}:{self.last}]"


@dataclass(frozen=True)
class Band:
    """How far apart copies of one kind of update are: honest ones, and the ones that must be told apart.

    steps     of the microtask
    pairs     of honest copies that were compared
    p50, p99, largest   of their distances
    worst     the tensor in which the two farthest honest copies differ most
    families  family (gradient, delta, buffer, metric) -> its largest honest distance
    apart     name of what must be told apart -> its smallest distance to an honest copy
    """

    steps: int
    pairs: int
    p50: float
    p99: float
    largest: float
    worst: str
    families: Mapping[str, float]
    apart: Mapping[str, float]

    @property
    def nearest(self) -> str:
        """The lie that is hardest to tell."""
        return min(self.apart, key=lambda name: (self.apart[name], name))

    @property
    def margin(self) -> float:
        """How many times farther than the farthest honest copies the nearest lie is."""
        return self.apart[self.nearest] / max(self.largest, SMALLEST)

    @property
    def tolerance(self) -> float:
        """The proposed tolerance, two digits, rounded down."""
        return _two_digits(min(LIMIT, math.sqrt(max(self.largest, SMALLEST) * self.apart[self.nearest])))

    @property
    def separable(self) -> bool:
        """Whether the tolerance lets honest copies pass, and no lie."""
        return self.margin >= MARGIN and self.largest <= self.tolerance


def band(steps: int, honest: Sequence[Mapping[str, float]], lies: Mapping[str, Sequence[float]]) -> Band:
    """honest: for each pair of honest copies its distances by tensor; lies: name -> distances to honest copies."""
    largest = [min(max(each.values(), default=0.0), FARTHEST) for each in honest]
    farthest = honest[int(np.argmax(largest))]
    families: dict[str, float] = {}
    for each in honest:
        for tensor, apart in each.items():
            family = tensor.split("/", 1)[0]
            families[family] = max(families.get(family, 0.0), min(apart, FARTHEST))
    return Band(
        steps=steps,
        pairs=len(honest),
        p50=float(np.percentile(largest, 50)),
        p99=float(np.percentile(largest, 99)),
        largest=max(largest),
        worst=max(farthest, key=lambda name: (farthest[name], name)),
        families=families,
        apart={name: min(*distances, FARTHEST) for name, distances in lies.items()},
    )


class NoiseMeter:
    """Where gradients are noise, over several microtasks.

    For each row r of a tensor, over all microtasks and each copy b against the first one a:
    ratio = sqrt(sum |a_r - b_r|^2 / sum |a_r| |b_r|); noise is what reaches NOISE_RATIO. A row that is zero in every
    copy is none: it is known exactly.
    """

    def __init__(self) -> None:
        self._differences: dict[str, npt.NDArray[np.float64]] = {}
        self._sizes: dict[str, npt.NDArray[np.float64]] = {}

    def add(self, copies: Sequence[Tensors]) -> None:
        """Gradients of one microtask by honest replicas, before any codec."""
        first, *others = copies
        for name, array in first.items():
            if not name.startswith("gradient/"):
                continue
            a = _rows(array)
            for other in others:
                b = _rows(other[name])
                size = np.sqrt(np.square(a).sum(1) * np.square(b).sum(1))
                self._differences[name] = self._differences.get(name, np.zeros(1)) + np.square(a - b).sum(1)
                self._sizes[name] = self._sizes.get(name, np.zeros(1)) + size

    def found(self) -> list[Noise]:
        """Noise tensors and noise in tensors."""
        found = []
        tiny = float(np.finfo(np.float64).tiny)
        for name, difference in self._differences.items():
            sizes = np.maximum(self._sizes[name], tiny)
            noisy = (difference > 0) & (np.sqrt(difference / sizes) >= NOISE_RATIO)
            for first, last in _runs(noisy):
                ratio = math.sqrt(float(difference[first:last].sum() / sizes[first:last].sum()))
                found.append(Noise(name.partition("/")[2], first, last, len(noisy), min(ratio, FARTHEST)))
        return found


def _rows(array: Array) -> npt.NDArray[np.float64]:
    """The tensor as float64 rows along its first dimension (a number is one row)."""
    return array.reshape(len(array) if array.ndim else 1, -1).astype(np.float64)


def _runs(flags: npt.NDArray[np.bool_]) -> list[tuple[int, int]]:
    """First and last + 1 of every unbroken run of set flags."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return [(int(start), int(end)) for start, end in zip(edges[::2], edges[1::2], strict=True)]


def largest_steps(within: Callable[[int, int], bool], bound: int) -> int:
    """The largest number of steps up to `bound` for which honest copies stay within the limit; 0: not even one.

    within(steps, last)   whether they do; `last` is the largest number that was found to hold (0: none), where a
                          training can be taken back to
    Doubling from 1 until it does not hold or the bound is reached, then bisection. Distances that fall again beyond
    a number that did not hold are not looked for.
    """
    good, bad = 0, bound + 1
    step = 1
    while step <= bound:
        if not within(step, good):
            bad = step
            break
        good, step = step, min(2 * step, bound) if step < bound else bound + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if within(middle, good):
            good = middle
        else:
            bad = middle
    return good


def _two_digits(value: float) -> float:
    exponent = math.floor(math.log10(value)) - 1
    return float(f"{math.floor(value / 10.0**exponent * (1 + 1e-12))}e{exponent}")
