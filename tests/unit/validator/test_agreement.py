"""Agreement of copies: symmetric, independent of order, with a floor for tensors that are only noise."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validator.agreement import Copy, Verdict, distance, judge, pair_distances

TOLERANCE = 1e-4
MAGNITUDES = (1.0, 1e-4, 1e-8)
LAYERS = {"gradient/a": (64, 32), "gradient/b": (32,), "gradient/c": (32, 10)}


def honest(magnitude: float = 1.0, seed: int = 0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {n: (magnitude * generator.standard_normal(s)).astype(np.float32) for n, s in LAYERS.items()}


def changed(update: dict[str, Any], change: Any, *names: str) -> dict[str, Any]:
    return {n: change(a).astype(np.float32) if not names or n in names else a for n, a in update.items()}


def reordered_sums(update: dict[str, Any]) -> dict[str, Any]:
    """What another order of additions does: relative noise of a few units in the last place, and of the tensor."""
    generator = np.random.default_rng(9)
    return changed(
        update,
        lambda a: (
            a * (1 + 2e-7 * generator.standard_normal(a.shape))
            + 2e-7 * np.sqrt(np.mean(a.astype(np.float64) ** 2)) * generator.standard_normal(a.shape)
        ),
    )


def short_mantissa(update: dict[str, Any]) -> dict[str, Any]:
    """Values rounded to the 10 bits of TF32's mantissa."""

    def cut(a: Any) -> Any:
        fraction, exponent = np.frexp(a.astype(np.float64))
        return np.ldexp(np.round(fraction * 2**10) / 2**10, exponent)

    return changed(update, cut)


def some_zeroed(array: Any) -> Any:
    kept = np.random.default_rng(2).random(array.shape) >= 0.01
    return array * kept


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_reordered_sums_agree_at_every_magnitude(magnitude: float) -> None:
    update = honest(magnitude)
    assert 0 < distance(update, reordered_sums(update)) < 1e-6


@pytest.mark.parametrize("magnitude", MAGNITUDES)
@pytest.mark.parametrize(
    "wrong",
    [
        short_mantissa,
        lambda u: changed(u, some_zeroed),
        lambda u: changed(u, np.zeros_like),
        lambda u: changed(u, np.ones_like),
        lambda u: changed(u, np.negative),
        lambda u: changed(u, np.negative, "gradient/b"),
        lambda u: changed(u, lambda a: 1.001 * a),
        lambda u: changed(u, lambda a: 0.5 * a),
    ],
    ids=["short_mantissa", "some_zeroed", "zeros", "ones", "flipped", "one_layer_flipped", "scaled", "half"],
)
def test_wrong_updates_are_told_apart_at_every_magnitude(magnitude: float, wrong: Any) -> None:
    update = honest(magnitude)
    assert distance(update, wrong(update)) > TOLERANCE


def test_a_flipped_small_layer_is_told_apart_beside_layers_ten_thousand_times_larger() -> None:
    update = honest()
    update["gradient/b"] = (1e-4 * update["gradient/b"]).astype(np.float32)
    assert distance(update, changed(update, np.negative, "gradient/b")) > TOLERANCE


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_an_all_zero_update_is_far_from_any_other_and_equals_itself(magnitude: float) -> None:
    update = honest(magnitude)
    zero = changed(update, np.zeros_like)
    assert distance(update, zero) > 0.8
    assert distance(zero, zero) == 0.0


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_all_signs_flipped_is_a_distance_of_at_least_one(magnitude: float) -> None:
    update = honest(magnitude)
    assert distance(update, changed(update, np.negative)) >= 1.0


def test_a_tensor_of_pure_noise_does_not_part_honest_copies() -> None:
    one, other = honest(seed=0), reordered_sums(honest(seed=0))
    generator = np.random.default_rng(3)
    for update in (one, other):  # the key bias of attention: its true gradient is zero
        update["gradient/key.bias"] = (1e-8 * generator.standard_normal(32)).astype(np.float32)
    apart = np.linalg.norm(one["gradient/key.bias"] - other["gradient/key.bias"])
    assert apart / np.linalg.norm(one["gradient/key.bias"]) > 1, "per tensor they differ completely"
    assert distance(one, other) < TOLERANCE


def test_noise_is_measured_against_its_own_family() -> None:
    one, other = honest(), honest()
    one["buffer/mean"] = np.full(32, 1e-3, np.float32)
    other["buffer/mean"] = -one["buffer/mean"]
    assert distance(one, other) >= 1.0, "large gradients do not hide a wrong buffer"


def test_integers_must_be_equal() -> None:
    one, other = honest(), honest()
    one["buffer/n"], other["buffer/n"] = np.array(3, np.int64), np.array(4, np.int64)
    assert distance(one, other) == float("inf")
    other["buffer/n"] = np.array(3, np.int64)
    assert distance(one, other) == 0.0


def test_large_values_do_not_overflow() -> None:
    update = {"gradient/w": np.full(1000, 9e29, np.float32)}
    assert distance(update, {"gradient/w": np.full(1000, 9.0001e29, np.float32)}) == pytest.approx(5.55e-6, rel=0.01)


@given(st.integers(0, 10_000), st.sampled_from([0.0, 1e-7, 1e-3, 1.0, 1e3]))
def test_the_distance_is_symmetric_and_zero_from_itself(seed: int, noise: float) -> None:
    one = honest(seed=seed)
    generator = np.random.default_rng(seed + 1)
    other = changed(one, lambda a: a + noise * generator.standard_normal(a.shape))
    assert distance(one, other) == distance(other, one)
    assert distance(one, one) == 0.0


def verdict_by_content(values: dict[str, float], order: tuple[str, ...], votes: int, **voters: str) -> Any:
    """Judge copies with these values (their distance is the difference) when `order` gives the ids."""
    ids = {name: 100 + place for place, name in enumerate(order)}
    names = {identifier: name for name, identifier in ids.items()}
    distances = {(i, j): abs(values[names[i]] - values[names[j]]) for i, j in itertools.combinations(sorted(names), 2)}
    copies = [Copy(ids[name], voters.get(name, name)) for name in order]
    found = judge(copies, distances, 1.0, votes)
    shown = None if found.canonical is None else names[found.canonical]
    return shown, {names[i] for i in found.valid}, {names[i] for i in found.invalid}


def all_verdicts(values: dict[str, float], votes: int, **voters: str) -> list[Any]:
    found: list[Any] = []
    for order in itertools.permutations(values):
        verdict = verdict_by_content(values, order, votes, **voters)
        if verdict not in found:
            found.append(verdict)
    return found


def test_a_chain_of_copies_has_the_same_verdict_in_all_orders_and_nobody_close_loses() -> None:
    assert all_verdicts({"a": 0.0, "b": 0.9, "c": 1.8}, 2) == [("b", {"a", "b", "c"}, set())]


def test_two_camps_of_equal_strength_are_undecided_in_all_orders() -> None:
    values = {"a": 0.0, "b": 0.3, "c": 5.0, "d": 5.2}
    assert all_verdicts(values, 2) == [(None, set(), set())]
    assert all_verdicts({"a": 0.0, "b": 0.9, "c": 1.8, "d": 2.7}, 2) == [(None, set(), set())]


def test_a_third_copy_decides_between_camps_in_all_orders() -> None:
    values = {"a": 0.0, "b": 0.3, "c": 5.0, "d": 5.2, "e": 0.1}
    assert all_verdicts(values, 2) == [("e", {"a", "b", "e"}, {"c", "d"})]


def test_an_agreeing_pair_outvotes_one_liar_in_all_orders() -> None:
    for canonical, valid, invalid in all_verdicts({"a": 0.0, "b": 0.1, "liar": 9.0}, 2):
        assert canonical in ("a", "b")
        assert (valid, invalid) == ({"a", "b"}, {"liar"})


def test_copies_of_one_voter_are_one_vote() -> None:
    values = {"a1": 7.0, "a2": 7.0, "b": 0.0}
    assert all_verdicts(values, 2, a1="a", a2="a") == [(None, set(), set())]
    for canonical, valid, invalid in all_verdicts({**values, "c": 0.1}, 2, a1="a", a2="a"):
        assert canonical in ("b", "c")
        assert (valid, invalid) == ({"b", "c"}, {"a1", "a2"})


def test_one_copy_decides_where_one_vote_is_enough_and_two_that_differ_do_not() -> None:
    assert all_verdicts({"a": 0.0}, 1) == [("a", {"a"}, set())]
    assert all_verdicts({"a": 0.0, "b": 9.0}, 1) == [(None, set(), set())]
    assert judge([], {}, 1.0, 1) == Verdict(None, frozenset(), frozenset(), {})


@settings(max_examples=60)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 3))
def test_the_valid_copies_never_depend_on_the_order_and_are_those_close_to_the_canonical_one(
    numbers: list[int], votes: int
) -> None:
    values = {f"v{place}": 0.4 * number for place, number in enumerate(numbers)}
    sets = []
    for canonical, valid, invalid in all_verdicts(values, votes):
        assert valid | invalid == (set() if canonical is None else set(values))
        for name in values if canonical is not None else ():
            assert (name in valid) == (abs(values[name] - values[canonical]) <= 1.0)
        if (valid, invalid) not in sets:
            sets.append((valid, invalid))
    # Copies with exactly equal standing (mirror images) may be told apart by their ids alone.
    shown = {(tuple(sorted(values[n] for n in v)), tuple(sorted(values[n] for n in i))) for v, i in sets}
    assert len(shown) <= 2


def test_pair_distances_are_those_of_every_pair() -> None:
    updates = {7: honest(), 3: reordered_sums(honest()), 5: changed(honest(), np.negative)}
    found = pair_distances(updates)
    assert set(found) == {(3, 5), (3, 7), (5, 7)}
    assert found[3, 7] < TOLERANCE < found[3, 5]


def test_many_copies_that_all_differ_or_form_many_camps_are_judged_in_moments() -> None:
    """Whoever owns many accounts must not be able to stop the validator: exponential searches would never end here."""
    for copies in (21, 60):
        ids = [Copy(i, f"user {i}") for i in range(copies)]
        apart = {(i, j): 9.0 for i in range(copies) for j in range(i + 1, copies)}
        assert judge(ids, apart, 1.0, 2).canonical is None
        assert judge(ids, dict.fromkeys(apart, 0.0), 1.0, 2).valid == frozenset(range(copies))
    ids = [Copy(i, f"user {i}") for i in range(21)]  # the most groups there can be: everybody disagrees with two
    apart = {(i, j): 9.0 if i // 3 == j // 3 else 0.5 for i in range(21) for j in range(i + 1, 21)}
    verdict = judge(ids, apart, 1.0, 2)
    assert verdict.canonical is None or len(verdict.valid) == 19


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_tensors_summed_together_have_the_distance_that_the_formula_gives(sizes: list[int], seed: int) -> None:
    draws = np.random.default_rng(seed)
    a = {f"gradient/{n}": draws.standard_normal(size).astype(np.float32) for n, size in enumerate(sizes)}
    b = {name: (array + 1e-3 * draws.standard_normal(array.size)).astype(np.float32) for name, array in a.items()}
    joined = {update: np.concatenate(list(update_.values())).astype(float) for update, update_ in (("a", a), ("b", b))}
    m = np.sqrt((joined["a"] @ joined["a"] + joined["b"] @ joined["b"]) / 2)
    expected = 0.0
    for name, array in a.items():
        if array.size:
            mean = (np.linalg.norm(array.astype(float)) + np.linalg.norm(b[name].astype(float))) / 2
            floor = m * np.sqrt(array.size / sum(sizes))
            expected = max(expected, np.linalg.norm(array.astype(float) - b[name]) / (mean + floor))
    assert distance(a, b) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("magnitude", MAGNITUDES)
def test_sums_that_were_kept_in_half_precision_are_told_apart(magnitude: float) -> None:
    generator = np.random.default_rng(3)
    inputs = generator.standard_normal((64, 48)).astype(np.float32)
    errors = (magnitude * generator.standard_normal((64, 32))).astype(np.float32)
    half = np.zeros((48, 32), np.float16)
    for x, e in zip(inputs, errors, strict=True):
        half = half + np.outer(x, e).astype(np.float16)
    exact = {"gradient/a": inputs.T @ errors}
    reordered = {"gradient/a": np.ascontiguousarray(inputs[::-1]).T @ np.ascontiguousarray(errors[::-1])}
    assert distance(exact, reordered) < 1e-6
    assert distance(exact, {"gradient/a": half.astype(np.float32)}) > TOLERANCE
