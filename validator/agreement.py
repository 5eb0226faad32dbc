"""Which copies of a workunit agree: a decision over all of them at once, whatever order they came in.

Distance of two updates: for every tensor t of a family (gradient, delta, buffer, metric, each kind of moment)

    d_t = |a_t - b_t| / (m_t + m * sqrt(n_t / n))      m_t = (|a_t| + |b_t|) / 2,  m = the same for the family

with Euclidean norms, n_t the elements of t and n of the family; the distance is the largest d_t. The second
term is the floor: a tensor whose true gradient is zero (the key bias of attention) holds only rounding
noise, and a purely relative measure would call two honest copies different. Tensors of integers must be
equal. The measure is symmetric; an all-zero update is farther than 0.8 from any other, and one whose signs
are all flipped is at distance 1 or more, whatever the magnitude. What it cannot see: a lie in a tensor whose
norm is below the tolerance times its share of the family's norm; such a lie cannot move the model either.

"Close" is not transitive, so the verdict is taken over groups in which every pair agrees (cliques), and the
canonical result is the member that most voters agree with, then the one with the least sum of distances.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.update import family_of

Array = npt.NDArray[Any]

_CHUNK = 8192  # elements per piece of the float64 sums: scratch memory that stays in the processor's cache


def distance(a: Mapping[str, Array], b: Mapping[str, Array]) -> float:
    """Largest relative difference of two updates with the same tensors; 0 for equal ones, inf if integers differ."""
    return max(tensor_distances(a, b).values(), default=0.0)


def tensor_distances(a: Mapping[str, Array], b: Mapping[str, Array]) -> dict[str, float]:
    """The terms d_t of the distance by tensor; 0 where two tensors are equal, inf where integers differ."""
    families: dict[str, list[str]] = {}
    for name in a:
        families.setdefault(family_of(name), []).append(name)
    return {name: apart for names in families.values() for name, apart in _family_distances(a, b, names).items()}


def _family_distances(a: Mapping[str, Array], b: Mapping[str, Array], names: Sequence[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    floats = []
    for name in names:
        if a[name].dtype.kind == "f" and a[name].size:
            floats.append(name)
        else:
            found[name] = 0.0 if np.array_equal(a[name], b[name]) else math.inf
    pairs = [(a[name].reshape(-1), b[name].reshape(-1)) for name in floats]
    elements = sum(of_a.size for of_a, _ in pairs)
    squares = _squares_together(pairs) if 0 < elements <= _CHUNK else [_squares(*pair) for pair in pairs]
    terms = []
    total = 0.0
    for name, (square_a, square_b, square_difference) in zip(floats, squares, strict=True):
        mean_norm = (math.sqrt(square_a) + math.sqrt(square_b)) / 2
        terms.append((name, mean_norm, math.sqrt(square_difference)))
        total += square_a + square_b
    # The family's norm as the mean of the two copies' norms would need them apart; their root mean square
    # differs from it by less than the tolerances that matter.
    norm = math.sqrt(total / 2)
    for name, mean_norm, difference in terms:
        share = norm * math.sqrt(a[name].size / elements)
        found[name] = difference / (mean_norm + share) if difference > 0 else 0.0
    return found


def _squares_together(pairs: Sequence[tuple[Array, Array]]) -> Sequence[tuple[float, float, float]]:
    """What `_squares` gives for each of some small tensors, without calls for each of them."""
    first, second = (np.concatenate(side, dtype=np.float64) for side in zip(*pairs, strict=True))
    starts = list(itertools.accumulate((of_a.size for of_a, _ in pairs[:-1]), initial=0))
    values = np.stack((first, second, first - second))
    values *= values
    sums: list[tuple[float, float, float]] = np.add.reduceat(values, starts, axis=1).T.tolist()
    return sums


def _squares(flat_a: Array, flat_b: Array) -> tuple[float, float, float]:
    """Sums of squares of a, b and a - b, in float64."""
    scratch = np.empty((2, min(_CHUNK, flat_a.size)))
    of_a = of_b = of_difference = 0.0
    for start in range(0, flat_a.size, _CHUNK):
        end = min(start + _CHUNK, flat_a.size)
        piece_a, piece_b = scratch[0, : end - start], scratch[1, : end - start]
        piece_a[...], piece_b[...] = flat_a[start:end], flat_b[start:end]
        of_a += float(piece_a @ piece_a)
        of_b += float(piece_b @ piece_b)
        piece_a -= piece_b
        of_difference += float(piece_a @ piece_a)
    return of_a, of_b, of_difference


@dataclass(frozen=True)
class Copy:
    """One readable copy: result id, and who made it. Copies with the same voter are one vote, those with none (None)
    are no vote. `established`: made by somebody who is known long enough to carry a quorum."""

    identifier: int
    voter: Hashable
    established: bool = True


@dataclass(frozen=True)
class Verdict:
    """canonical: result id, or None while undecided; valid and invalid: result ids judged with it; camps: undecided
    because two groups without a common member have the votes.

    `distances` of the pairs (for logs and drift statistics), keyed by (smaller id, larger id).
    """

    canonical: int | None
    valid: frozenset[int]
    invalid: frozenset[int]
    distances: Mapping[tuple[int, int], float]
    camps: bool = False


def judge(copies: Sequence[Copy], distances: Mapping[tuple[int, int], float], tolerance: float, votes: int) -> Verdict:
    """Find the agreeing group with the most voters, at least `votes`, and the copy in its middle.

    Undecided if no group has the votes, or if two groups without a common member are the strongest (two camps:
    more copies must tell). Strongest groups that overlap are one camp in a chain A~B~C: its middle is the
    canonical result, so that nobody close to it loses. Every copy within `tolerance` of it is valid and every
    other invalid. A tie of two copies goes to the smaller id, given before anybody had computed.

    A group in which nobody is established has one vote less: newcomers alone need one voter more than others, so that
    a crowd of fresh accounts costs its owner one copy more each time, and a new project still begins.
    """
    ids = sorted(copy.identifier for copy in copies)
    voters = {copy.identifier: copy.voter for copy in copies}
    known = {copy.identifier for copy in copies if copy.established and copy.voter is not None}

    def apart(i: int, j: int) -> float:
        return 0.0 if i == j else distances[min(i, j), max(i, j)]

    def strength(group: Sequence[int]) -> int:
        return len({voters[i] for i in group} - {None}) - (0 if known.intersection(group) else 1)

    groups = _cliques(ids, lambda i, j: apart(i, j) <= tolerance)
    undecided = Verdict(None, frozenset(), frozenset(), distances)
    if not groups:
        return undecided
    most = max(strength(group) for group in groups)
    strongest = [group for group in groups if strength(group) == most]
    if most < votes:
        return undecided
    if any(not set(g) & set(h) for g, h in itertools.combinations(strongest, 2)):
        return replace(undecided, camps=True)

    def around(i: int) -> list[int]:
        return [j for j in ids if apart(i, j) <= tolerance]

    candidates = sorted({i for group in strongest for i in group if voters[i] is not None})
    canonical = min(candidates, key=lambda i: (-strength(around(i)), sum(apart(i, j) for j in around(i)), i))
    valid = frozenset(around(canonical))
    return Verdict(canonical, valid, frozenset(ids) - valid, distances)


def _cliques(ids: Sequence[int], agree: Callable[[int, int], bool]) -> list[tuple[int, ...]]:
    """All maximal groups in which every pair agrees (Bron and Kerbosch 1973, with a pivot).

    Copies that all agree, or all disagree, take a step each; the worst that anybody can arrange among the 21 copies
    that a workunit has at most are some 2,000 groups.
    """
    near = {i: {j for j in ids if j != i and agree(i, j)} for i in ids}
    found: list[tuple[int, ...]] = []

    def extend(group: set[int], candidates: set[int], tried: set[int]) -> None:
        if not candidates and not tried:
            found.append(tuple(sorted(group)))
            return
        pivot = max(sorted(candidates | tried), key=lambda i: len(near[i] & candidates))
        for i in sorted(candidates - near[pivot]):
            extend(group | {i}, candidates & near[i], tried & near[i])
            candidates = candidates - {i}
            tried = tried | {i}

    if ids:
        extend(set(), set(ids), set())
    return found


def pair_distances(updates: Mapping[int, Mapping[str, Array]]) -> dict[tuple[int, int], float]:
    """Distance of every pair, keyed by (smaller id, larger id)."""
    return {(i, j): distance(updates[i], updates[j]) for i, j in itertools.combinations(sorted(updates), 2)}
