"""Drift: the test against its formula, groups that are found and named, and honest partners that are not."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from validator.drift import Pair, discoveries, findings

HOSTS = 12


def pairs(seed: int, off: dict[int, float], count: int = 400, families: dict[int, str] | None = None) -> list[Pair]:
    """Pairs of hosts drawn at random; a host in `off` is so many times farther from everybody than the others are."""
    draws, made = np.random.default_rng(seed), []
    for _ in range(count):
        a, b = draws.choice(HOSTS, 2, replace=False)
        size = 3e-7 * draws.lognormal(0, 0.5) * max(off.get(int(a), 1.0), off.get(int(b), 1.0))
        names = [{f"host:{h}", f"device:{(families or {}).get(int(h), 'good')}"} for h in (a, b)]
        made.append(Pair(size, "k", frozenset(names[0] | names[1])))
    return made


def drifting(made: list[Pair]) -> list[str]:
    return [one.group for one in findings(made) if one.drifts]


@pytest.mark.parametrize("seed", range(5))
def test_honest_hosts_are_not_named(seed: int) -> None:
    assert drifting(pairs(seed, {})) == []


@pytest.mark.parametrize("seed", range(5))
def test_one_drifting_host_is_named_and_its_honest_partners_are_not(seed: int) -> None:
    assert drifting(pairs(seed, {3: 20.0})) == ["host:3"]


@pytest.mark.parametrize("seed", range(5))
def test_a_family_of_devices_that_drifts_is_named_as_a_family(seed: int) -> None:
    broken = dict.fromkeys((1, 4, 7, 9), "broken")
    found = drifting(pairs(seed, dict.fromkeys(broken, 30.0), families=broken))
    assert found == ["device:broken"]


@pytest.mark.parametrize("seed", range(5))
def test_a_family_whose_members_agree_on_the_same_wrong_numbers_is_named_too(seed: int) -> None:
    """O26: broken cards confirm one another to the last bit and differ from all others."""
    broken = dict.fromkeys((1, 4, 7, 9), "broken")
    made = pairs(seed, dict.fromkeys(broken, 30.0), families=broken)
    made = [Pair(1e-8, p.kind, p.groups) if "device:good" not in p.groups else p for p in made]
    assert drifting(made)[0] == "device:broken"


def test_a_difference_that_is_certain_and_small_is_no_drift() -> None:
    (found,) = [one for one in findings(pairs(0, {3: 1.6}, count=4000)) if one.group == "host:3"]
    assert found.p < 1e-6 and not found.drifts


def test_few_pairs_say_nothing() -> None:
    assert findings(pairs(0, {3: 50.0}, count=10)) == []
    assert findings([]) == []


def test_equal_distances_are_no_evidence() -> None:
    made = [Pair(0.0, "k", frozenset({f"host:{n % 4}"})) for n in range(80)]
    assert [(one.p, one.drifts) for one in findings(made)] == [(pytest.approx(0.5, abs=0.6), False)] * 4


def test_kinds_of_work_are_ranked_apart() -> None:
    """A host that does all of the noisy kind of work does not drift."""
    draws = np.random.default_rng(1)
    made = [Pair(1e-7 * draws.random(), "gradient", frozenset({f"host:{n % 5}"})) for n in range(100)]
    made += [Pair(1e-4 * draws.random(), "local-steps", frozenset({f"host:{5 + n % 2}"})) for n in range(100)]
    assert drifting(made) == []


def test_the_statistic_is_that_of_mann_and_whitney() -> None:
    """Against the definition: pairs (x of the group, y of the others) with x > y, ties counting half."""
    draws = np.random.default_rng(4)
    x, y = draws.integers(0, 12, 15) / 10, draws.integers(0, 9, 20) / 10
    made = [Pair(float(v), "k", frozenset({"host:1"})) for v in x] + [Pair(float(v), "k", frozenset()) for v in y]
    (found,) = findings(made)
    u = sum((a > b) + 0.5 * (a == b) for a, b in itertools.product(x, y))
    n, m = len(x), len(y)
    counts = np.unique(np.concatenate([x, y]), return_counts=True)[1]
    ties = float((counts**3 - counts).sum())
    sigma = math.sqrt(n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1))))
    assert found.p == pytest.approx(0.5 * math.erfc((u - n * m / 2 - 0.5) / sigma / math.sqrt(2)))
    assert found.pairs == n and found.median == np.median(x)


@pytest.mark.parametrize(
    ("p_values", "limit"),
    [
        ([], -1.0),
        ([0.5, 0.9], -1.0),
        ([0.004, 0.9], 0.004),
        ([0.004, 0.009], 0.009),
        ([0.02, 0.001, 0.004, 0.5], 0.004),
    ],
)
def test_false_discoveries_are_held_to_their_rate(p_values: list[float], limit: float) -> None:
    assert discoveries(p_values, 0.01) == limit
