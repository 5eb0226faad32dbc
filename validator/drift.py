"""Which group of hosts drifts: a stated test on how far its copies are from those of others.

Groups are a host, a user, an app version, a plan class, a family of devices, a family with a driver, a family of
processors (voters.groups_of).
The data are pairs: of each judged workunit every copy beside the canonical one, with their distance (gt_fingerprint).
A pair says something of both of its members, so it is compared by whether a group has a part in it:

    one-sided Mann-Whitney test (Mann and Whitney 1947): are the distances of pairs with a member of the group larger
    than those of pairs without one? Normal approximation with the correction for ties.

Distances are ranked within their kind of work only (the sums of the strata are added, van Elteren 1960). The p-values
of all groups of a sort (all hosts, all drivers ...) are held against one another by Benjamini and Hochberg (1995) at a
false discovery rate of 1 % (gt_drift_false_discoveries of config.xml). And because in many pairs a tiny difference
becomes significant, the group's median must be at least twice that of the others (gt_drift_ratio). A honest partner of
a drifting group shares its pairs: groups are found one after the other, the strongest first, and the pairs of those
that were found are then left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

LEAST_PAIRS = 8  # of a group and of the others
MOST_SHARE = 0.75  # of the pairs: who has more is the rule that others are measured by; if it is wrong, replays tell

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Limits:
    """When a group drifts: the false discovery rate of the test, and the least ratio of the medians."""

    false_discoveries: float = 0.01
    least_ratio: float = 2.0


USUAL = Limits()


@dataclass(frozen=True)
class Pair:
    """Two copies of a workunit: how far apart, what kind of work, and the groups that either of them belongs to.

    Either, not one alone: where two families stand against each other their common pairs say nothing of which is
    wrong, and the other pairs must tell.
    """

    distance: float
    kind: str
    groups: frozenset[str]


@dataclass(frozen=True)
class Finding:
    """What the pairs say of a group. `ratio`: its median distance by that of the others, within kinds."""

    group: str
    pairs: int
    median: float
    ratio: float
    p: float
    drifts: bool


def findings(pairs: Sequence[Pair], limits: Limits = USUAL) -> list[Finding]:
    """Every group with enough pairs, those that drift first, then by their p-values."""
    left = list(pairs)
    found: list[Finding] = []
    while True:
        tested = [one for sort in _sorts(left).values() for one in _tested(left, sort, limits)]
        drifting = [one for one in tested if one.drifts]
        if not drifting:
            named = {one.group for one in found}
            rest = [one for one in tested if one.group not in named]
            return found + sorted(rest, key=lambda one: (one.p, one.group))
        # Of groups with the same pairs (a version with one host) the one with the most pairs says the most.
        strongest = min(drifting, key=lambda one: (one.p, -one.pairs, _breadth(one.group), one.group))
        found.append(strongest)
        left = [pair for pair in left if strongest.group not in pair.groups]


#: Sorts of groups from the broadest to the narrowest.
_SORTS = ("class", "device", "driver", "version", "user", "host")


def _breadth(group: str) -> int:
    sort = group.partition(":")[0]
    return _SORTS.index(sort) if sort in _SORTS else len(_SORTS)


def _sorts(pairs: Iterable[Pair]) -> dict[str, list[str]]:
    """All groups by what they are: host, driver ..."""
    found: dict[str, set[str]] = {}
    for group in {group for pair in pairs for group in pair.groups}:
        found.setdefault(group.partition(":")[0], set()).add(group)
    return {sort: sorted(groups) for sort, groups in found.items()}


def _tested(pairs: Sequence[Pair], groups: Sequence[str], limits: Limits) -> list[Finding]:
    """The test of each group of one sort, and which of them drift."""
    strata = [_Stratum.of([pair for pair in pairs if pair.kind == kind]) for kind in sorted({p.kind for p in pairs})]
    made = [one for group in groups if (one := _test(strata, group)) is not None]
    limit = discoveries([one.p for one in made], limits.false_discoveries)
    return [replace(one, drifts=one.p <= limit and one.ratio >= limits.least_ratio) for one in made]


def discoveries(p_values: Sequence[float], rate: float) -> float:
    """The largest p-value that counts (Benjamini and Hochberg): the last p(i) <= rate i / m in order; -1 if none."""
    ordered = sorted(p_values)
    passing = [p for i, p in enumerate(ordered, 1) if p <= rate * i / len(ordered)]
    return max(passing, default=-1.0)


@dataclass(frozen=True)
class _Stratum:
    """The pairs of one kind of work with the ranks of their distances (from 1, ties share their mean rank)."""

    pairs: Sequence[Pair]
    distances: Array
    ranks: Array
    ties: float  # sum of t^3 - t over groups of t equal distances

    @staticmethod
    def of(pairs: Sequence[Pair]) -> _Stratum:
        distances = np.array([pair.distance for pair in pairs])
        _, inverse, counts = np.unique(distances, return_inverse=True, return_counts=True)
        last = np.cumsum(counts)
        return _Stratum(pairs, distances, (last - (counts - 1) / 2)[inverse], float((counts**3 - counts).sum()))


def _test(strata: Sequence[_Stratum], group: str) -> Finding | None:
    """The one-sided test of one group over all kinds of work; None without enough pairs."""
    excess, variance, number, others = 0.0, 0.0, 0, 0
    inside: list[float] = []
    ratios: list[float] = []
    for stratum in strata:
        mine = np.array([group in pair.groups for pair in stratum.pairs], dtype=bool)
        n, m = int(mine.sum()), int((~mine).sum())
        if not n or not m:
            continue
        total = n + m
        u = float(stratum.ranks[mine].sum()) - n * (n + 1) / 2
        excess += u - n * m / 2
        variance += n * m / 12 * (total + 1 - stratum.ties / (total * max(total - 1, 1)))
        number, others = number + n, others + m
        inside += stratum.distances[mine].tolist()
        usual = float(np.median(stratum.distances[~mine]))
        ratios += (
            stratum.distances[mine] / usual if usual > 0 else np.where(stratum.distances[mine] > 0, np.inf, 1.0)
        ).tolist()
    if number < LEAST_PAIRS or others < LEAST_PAIRS or number > MOST_SHARE * (number + others):
        return None
    p = 1.0 if variance <= 0 else 0.5 * math.erfc((excess - 0.5) / math.sqrt(2 * variance))
    return Finding(group, number, float(np.median(inside)), float(np.median(ratios)), p, drifts=False)


def pairs_of(rows: Iterable[Mapping[str, Any]], groups: Mapping[tuple[str, int], frozenset[str]]) -> list[Pair]:
    """Pairs of the rows of gt_fingerprint; `groups` by workunit name and result id."""
    rows = list(rows)
    canonical = {str(row["workunit_name"]): row for row in rows if row["verdict"] == "canonical"}
    found = []
    for row in rows:
        name = str(row["workunit_name"])
        if row["distance"] is None or name not in canonical:
            continue
        mine = groups.get((name, int(row["result_id"])), frozenset())
        theirs = groups.get((name, int(canonical[name]["result_id"])), frozenset())
        found.append(Pair(float(row["distance"]), str(row["kind"]), mine | theirs))
    return found
