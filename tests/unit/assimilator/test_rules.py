"""Robust rules: equal to plain float64 references, the same bits in any order of arrival, robust under attack."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import assimilator.rules
from assimilator.aggregation import fold
from assimilator.contributions import Contribution, NothingToFold
from assimilator.rules import (
    BLOCK,
    MIXINGS,
    RULES,
    CenteredClipping,
    GeometricMedian,
    Krum,
    Mean,
    Median,
    MemoryRows,
    Mixing,
    MultiKrum,
    NearestNeighbourMixing,
    NormBound,
    Rule,
    TrimmedMean,
    aggregate,
)
from assimilator.rules.gram import PART, gram_matrix, squared_distances, squared_distances_to
from assimilator.rules.network import merge_exchange, network, values_of_ranks
from boinc_project import job_config
from boinc_project.contract.codecs import Codec
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import open_update, write_update

Array = np.ndarray[Any, Any]


def some_rows(n: int, d: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def aggregated(
    rule: Rule, matrix: Any, weights: Any = None, mixing: Mixing | None = None, previous: Array | None = None
) -> Array:
    matrix = np.asarray(matrix, np.float32)
    matrix.setflags(write=False)
    given_weights = np.ones(len(matrix)) if weights is None else np.asarray(weights, np.float64)
    result = aggregate(rule, MemoryRows(matrix, given_weights), mixing, previous)
    assert result.dtype == np.float32 and result.shape == matrix.shape[1:]
    return result


# --- The rules as their papers have them, on a whole float64 matrix x [n, d] with weights w [n]. ---


def mean_reference(x: Array, w: Array, previous: Array) -> Array:
    return np.average(x, axis=0, weights=w)


def median_reference(x: Array, w: Array, previous: Array) -> Array:
    return np.median(x, axis=0)


def trimmed_mean_reference(f: int) -> Callable[..., Array]:
    def rule(x: Array, w: Array, previous: Array) -> Array:
        return np.sort(x, axis=0)[f : len(x) - f].mean(axis=0)

    return rule


def multi_krum_reference(f: int, m: int, nearest: int) -> Callable[..., Array]:
    def rule(x: Array, w: Array, previous: Array) -> Array:
        scores = []
        for i in range(len(x)):
            distances = [np.sum((x[i] - x[j]) ** 2) for j in range(len(x)) if j != i]
            scores.append(sum(sorted(distances)[:nearest]))
        best = sorted(range(len(x)), key=lambda i: scores[i])[:m]
        return np.average(x[best], axis=0, weights=w[best])

    return rule


def clipping_reference(tau: float, iterations: int) -> Callable[..., Array]:
    def rule(x: Array, w: Array, previous: Array) -> Array:
        v = previous
        for _ in range(iterations):
            clipped = [(row - v) * min(1.0, tau / max(np.linalg.norm(row - v), 1e-300)) for row in x]
            v = v + np.average(clipped, axis=0, weights=w)
        return v

    return rule


def geometric_median_reference(nu: float, iterations: int) -> Callable[..., Array]:
    def rule(x: Array, w: Array, previous: Array) -> Array:
        z = np.zeros(x.shape[1])
        for _ in range(iterations):
            b = [share / max(nu, np.linalg.norm(z - row)) for share, row in zip(w / w.sum(), x, strict=True)]
            z = np.average(x, axis=0, weights=b)
        return z

    return rule


def norm_bound_reference(x: Array, w: Array, previous: Array) -> Array:
    norms = [float(np.linalg.norm(row)) for row in x]
    bound = sorted(norms)[(len(x) - 1) // 2]
    scaled = [row * (min(1.0, bound / norm) if norm else 1.0) for row, norm in zip(x, norms, strict=True)]
    return np.average(scaled, axis=0, weights=w)


def mixing_reference(f: int, x: Array, w: Array) -> Array:
    mixed = []
    for i in range(len(x)):
        order = sorted(range(len(x)), key=lambda j: (j != i, np.sum((x[i] - x[j]) ** 2)))[: len(x) - f]
        mixed.append(np.average(x[order], axis=0, weights=w[order]))
    return np.array(mixed)


#: Rule, its reference, for 11 rows.
PAIRS: dict[str, tuple[Rule, Callable[..., Array]]] = {
    "mean": (Mean(), mean_reference),
    "median": (Median(), median_reference),
    "trimmed mean": (TrimmedMean(3), trimmed_mean_reference(3)),
    "trimmed mean of nothing": (TrimmedMean(0), trimmed_mean_reference(0)),
    "krum": (Krum(4), multi_krum_reference(4, 1, 5)),
    "multi-krum": (MultiKrum(3), multi_krum_reference(3, 8, 6)),
    "multi-krum of 4, of byzfl's scores": (MultiKrum(3, 4, 7), multi_krum_reference(3, 4, 7)),
    "clipping": (CenteredClipping(5.0), clipping_reference(5.0, 1)),
    "clipping of some, thrice": (CenteredClipping(100.0, 3), clipping_reference(100.0, 3)),
    "geometric median": (GeometricMedian(), geometric_median_reference(0.1, 3)),
    "geometric median, long": (GeometricMedian(1e-3, 20), geometric_median_reference(1e-3, 20)),
    "norm bound": (NormBound(), norm_bound_reference),
}
#: What gives the row of the only contributor as it is.
KEEPS_ONE = [name for name in PAIRS if "clipping" not in name]


@pytest.mark.parametrize("f", [None, 0, 4], ids=["", "mixed with all", "mixed"])
@pytest.mark.parametrize("name", PAIRS)
def test_a_rule_equals_its_paper(name: str, f: int | None) -> None:
    rule, reference = PAIRS[name]
    d = BLOCK + PART + 77
    x = some_rows(11, d) * np.linspace(0.5, 2, 11, dtype=np.float32)[:, None] + np.float32(0.3)
    w = np.random.default_rng(1).uniform(0.5, 20, 11)
    previous = some_rows(1, d, 5)[0]
    exact = x.astype(np.float64) if f is None else mixing_reference(f, x.astype(np.float64), w)
    expected = reference(exact, w, previous.astype(np.float64))
    mixing = None if f is None else NearestNeighbourMixing(f)
    found = aggregated(rule, x, w, mixing, previous)
    if name.startswith(("krum", "multi")) and f == 0:
        return  # all rows are one and the same, up to rounding: which of them are chosen means nothing
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_even_numbers_of_rows_have_two_middle_ones() -> None:
    x = some_rows(8, 999)
    np.testing.assert_array_equal(aggregated(Median(), x), np.median(x.astype(np.float64), axis=0).astype(np.float32))
    expected = trimmed_mean_reference(2)(x.astype(np.float64), None, None)
    np.testing.assert_allclose(aggregated(TrimmedMean(2), x), expected, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(
        aggregated(NormBound(), [[1.0], [3.0], [5.0], [9.0]]), [(1 + 3 + 3 + 3) / 4]
    )  # the lower one of 3 and 5


def test_the_mean_is_what_folding_makes_bit_for_bit() -> None:
    x, samples = some_rows(5, 3000), [3, 1, 20, 7, 5]
    x[0, :2], x[1:, :2] = -0.0, -0.0
    types = {"delta/w": TensorType("float32", (3000,))}
    codec = Codec(compression="none")

    def contribution(slot: int) -> Contribution:
        data = write_update({"delta/w": x[slot]}, types, {"microtask": "m"}, codec)
        return Contribution(slot, samples[slot], lambda: open_update(data, types, codec, "m"))

    folded = fold([contribution(slot) for slot in range(5)]).gradient
    assert aggregated(Mean(), x, samples).tobytes() == folded["w"].tobytes()


# --- Order, scale, translation. ---

MIXED = list(itertools.product(PAIRS, [None, NearestNeighbourMixing(2)]))


@pytest.mark.parametrize(("name", "mixing"), MIXED)
def test_the_result_is_the_same_bit_for_bit_in_every_order_of_arrival(name: str, mixing: Mixing | None) -> None:
    x = some_rows(11, 5000) * np.float32(10.0) ** np.arange(-5, 6, dtype=np.float32)[:, None]
    arrived = {slot: (x[slot], 1.0 + slot) for slot in range(11)}
    previous = some_rows(1, 5000, 5)[0]
    results = set()
    for seed in range(6):
        order = np.random.default_rng(seed).permutation(11)
        rows = MemoryRows.of({int(slot): arrived[int(slot)] for slot in order})
        results.add(aggregate(PAIRS[name][0], rows, mixing, previous).tobytes())
    assert len(results) == 1


matrices = st.integers(1, 9).flatmap(
    lambda n: st.integers(1, 4).flatmap(
        lambda d: st.lists(st.lists(st.integers(-100, 100), min_size=d, max_size=d), min_size=n, max_size=n)
    )
)


@settings(deadline=None, max_examples=60)
@given(matrices, st.randoms())
def test_slots_matter_only_to_equal_scores_and_last_bits(numbers: list[list[int]], random: Any) -> None:
    x = np.array(numbers, np.float32)
    shuffled = x.copy()
    random.shuffle(numbers)
    shuffled[:] = numbers
    assert aggregated(Median(), x).tobytes() == aggregated(Median(), shuffled).tobytes()
    for rule in (Mean(), TrimmedMean(1), CenteredClipping(7.0, 2), GeometricMedian(), NormBound()):
        np.testing.assert_allclose(aggregated(rule, x), aggregated(rule, shuffled), rtol=2e-5, atol=1e-4)


@settings(deadline=None, max_examples=60)
@given(matrices, st.integers(-60, 60))
def test_rows_times_a_power_of_two_give_the_result_times_it_bit_for_bit(numbers: list[list[int]], power: int) -> None:
    x, factor = np.array(numbers, np.float32), 2.0**power
    weights = 1.0 + np.arange(len(x))
    for rule, scaled in [
        *((rule, rule) for rule in (Mean(), Median(), TrimmedMean(1), Krum(1), MultiKrum(1), NormBound())),
        (CenteredClipping(7.0, 2), CenteredClipping(7.0 * factor, 2)),
        (GeometricMedian(), GeometricMedian(0.1 * factor)),
    ]:
        for mixing in (None, NearestNeighbourMixing(1)):
            expected = aggregated(rule, x, weights, mixing) * np.float32(factor)
            assert aggregated(scaled, x * np.float32(factor), weights, mixing).tobytes() == expected.tobytes()


@settings(deadline=None, max_examples=60)
@given(matrices, st.integers(-100, 100))
def test_rows_moved_by_a_vector_give_the_result_moved_by_it(numbers: list[list[int]], offset: int) -> None:
    x = np.array(numbers, np.float32)
    moved = x + np.float32(offset)
    zero = np.zeros(x.shape[1], np.float32)
    for rule in (Mean(), Median(), TrimmedMean(1), Krum(1), MultiKrum(2), CenteredClipping(50.0)):
        found = aggregated(rule, moved, None, None, zero + np.float32(offset))
        np.testing.assert_allclose(found, aggregated(rule, x, None, None, zero) + offset, rtol=1e-5, atol=3e-4)


@settings(deadline=None, max_examples=60)
@given(matrices)
def test_no_combination_leaves_the_range_of_the_rows(numbers: list[list[int]]) -> None:
    x = np.array(numbers, np.float32)
    for rule in (Mean(), Median(), TrimmedMean(2), Krum(1), MultiKrum(1), GeometricMedian()):
        for mixing in (None, NearestNeighbourMixing(1)):
            found = aggregated(rule, x, None, mixing)
            assert (found >= x.min(axis=0) - 1e-4).all() and (found <= x.max(axis=0) + 1e-4).all()


# --- Degenerate rounds. ---


@pytest.mark.parametrize(("name", "mixing"), MIXED)
def test_without_any_weight_there_is_nothing_to_fold(name: str, mixing: Mixing | None) -> None:
    for n in (0, 1, 3):
        with pytest.raises(NothingToFold, match=f"{n} contributions without weight"):
            aggregated(PAIRS[name][0], some_rows(n, 4), np.zeros(n), mixing)


@pytest.mark.parametrize("name", KEEPS_ONE)
def test_of_one_contributor_with_weight_the_result_is_its_row(name: str) -> None:
    x = some_rows(4, 300)
    x[[0, 1, 3]] = 1e30
    for mixing in (None, NearestNeighbourMixing(4)):
        for previous in (None, some_rows(1, 300, 5)[0]):
            found = aggregated(PAIRS[name][0], x, [0, 0, 0.01, 0], mixing, previous)
            assert found.tobytes() == x[2].tobytes()


def test_one_contributor_is_clipped_like_any_other() -> None:
    previous = np.array([1.0, 1.0], np.float32)
    found = aggregated(CenteredClipping(10.0), [[1.0, 1e6]], None, None, previous)
    np.testing.assert_allclose(found, [1.0, 11.0], rtol=1e-6)
    np.testing.assert_array_equal(aggregated(CenteredClipping(10.0), [[3.0, 4.0]]), [3.0, 4.0])
    np.testing.assert_allclose(aggregated(CenteredClipping(10.0), [[0.0, 1e6]]), [0.0, 10.0], rtol=1e-6)


def test_rows_that_are_all_clipped_move_the_aggregate_by_no_more_than_tau_an_iteration() -> None:
    x = 1e20 * (2 + some_rows(7, 50))
    previous = some_rows(1, 50, 5)[0]
    for iterations in (1, 3):
        moved = aggregated(CenteredClipping(2.0, iterations), x, None, None, previous) - previous
        assert 0 < np.linalg.norm(moved) <= 2.0 * iterations * (1 + 1e-6)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_with_too_few_rows_f_is_lowered(n: int) -> None:
    x = some_rows(n, 40)
    np.testing.assert_allclose(aggregated(TrimmedMean(9), x), np.median(x, axis=0), rtol=1e-6, atol=1e-7)
    lowered = max(n - 3, 0) // 2
    for rule, other in ((Krum(9), Krum(lowered)), (MultiKrum(9), MultiKrum(lowered))):
        np.testing.assert_array_equal(aggregated(rule, x), aggregated(other, x))
    mixed = NearestNeighbourMixing((n - 1) // 2)
    np.testing.assert_array_equal(
        aggregated(Median(), x, None, NearestNeighbourMixing(9)), aggregated(Median(), x, None, mixed)
    )


def test_of_two_contributors_krum_takes_the_mean_by_weights() -> None:
    for rule in (Krum(0), Krum(3), MultiKrum(0), MultiKrum(3, 1)):
        np.testing.assert_array_equal(aggregated(rule, [[0.0], [4.0]], [3, 1]), [1.0])


def test_of_equal_scores_krum_takes_the_lower_slot() -> None:
    np.testing.assert_array_equal(aggregated(Krum(0), [[1.0], [0.0], [-1.0], [0.0]]), [0.0])
    np.testing.assert_array_equal(aggregated(Krum(1), [[7.0], [5.0], [5.0], [7.0], [6.0]]), [7.0])
    np.testing.assert_array_equal(aggregated(Krum(0, 1), [[5.0], [5.0], [7.0], [7.0]]), [5.0])


@pytest.mark.parametrize("name", PAIRS)
def test_equal_rows_give_that_row(name: str) -> None:
    x = np.tile(some_rows(1, 100), (11, 1))
    for mixing in (None, NearestNeighbourMixing(3)):
        found = aggregated(PAIRS[name][0], x, None, mixing, x[0])
        np.testing.assert_allclose(found, x[0], rtol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_rows_of_zeros_give_zeros(name: str) -> None:
    for n in (1, 2, 11):
        assert not aggregated(PAIRS[name][0], np.zeros((n, 7))).any()


def test_rows_that_cancel_out_when_mixed_have_the_norm_zero() -> None:
    x = [[-100.0], [-48.0], [34.0], [36.0], [36.0], [-48.0], [34.0]]
    for rule, _ in PAIRS.values():
        assert abs(aggregated(rule, x, 1.0 + np.arange(7), NearestNeighbourMixing(1))[0]) < 100


def test_if_half_of_the_rows_are_zeros_the_bound_is_zero() -> None:
    assert not aggregated(NormBound(), [[0.0], [0.0], [1.0], [2.0]]).any()


def test_a_row_without_weight_has_no_vote() -> None:
    x = some_rows(9, 60)
    x[[1, 6]] = -1e25
    weights = np.ones(9)
    weights[[1, 6]] = 0.0
    kept = x[weights > 0]
    for rule, _ in PAIRS.values():
        for mixing in (None, NearestNeighbourMixing(2)):
            found = aggregated(rule, x, weights, mixing)
            assert found.tobytes() == aggregated(rule, kept, None, mixing).tobytes()


@pytest.mark.parametrize("weights", [[1, -1e-9], [1, np.nan], [1, np.inf], [1e308, 1e308]])
@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_weights_that_are_none_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights"):
        aggregated(Mean(), [[1.0], [2.0]], weights)


def test_the_smallest_and_largest_weights_and_numbers_are_no_special_case() -> None:
    largest = np.finfo(np.float32).max
    for rule, _ in PAIRS.values():
        for mixing in (None, NearestNeighbourMixing(2)):
            for x in (np.full((5, 3), largest), np.full((5, 3), 1e-45)):
                found = aggregated(rule, x, [1e-300, 1.0, 1e300, 5e-324, 2.0], mixing)
                assert np.isfinite(found).all()


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrimmedMean(-1),
        lambda: Krum(-1),
        lambda: Krum(1, 0),
        lambda: MultiKrum(1, 0),
        lambda: MultiKrum(True),
        lambda: NearestNeighbourMixing(1.5),  # type: ignore[arg-type]
        lambda: CenteredClipping(0.0),
        lambda: CenteredClipping(float("inf")),
        lambda: CenteredClipping(1.0, 0),
        lambda: GeometricMedian(float("nan")),
        lambda: GeometricMedian(0.1, -1),
    ],
)
def test_parameters_that_mean_nothing_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


# --- Attacks. ---


def flipped(honest: Array, count: int) -> Array:
    return np.tile(-honest.mean(axis=0), (count, 1))


def huge(honest: Array, count: int) -> Array:
    return np.full((count, honest.shape[1]), 1e30, np.float32) * np.linspace(0.5, 1, count, dtype=np.float32)[:, None]


def a_little_is_enough(honest: Array, count: int) -> Array:
    return np.tile(honest.mean(axis=0) - 1.5 * honest.std(axis=0), (count, 1))


def inner_product(honest: Array, count: int) -> Array:
    return np.tile(-0.1 * honest.mean(axis=0), (count, 1))


N = 15
ROBUST: dict[str, Callable[[int], tuple[Rule, Mixing | None]]] = {
    "median": lambda f: (Median(), None),
    "trimmed mean": lambda f: (TrimmedMean(f), None),
    "krum": lambda f: (Krum(f), None),
    "multi-krum": lambda f: (MultiKrum(f), None),
    "clipping": lambda f: (CenteredClipping(5.0, 3), None),
    "geometric median": lambda f: (GeometricMedian(0.1, 10), None),
    "mixing, trimmed mean": lambda f: (TrimmedMean(f), NearestNeighbourMixing(f)),
    "mixing, krum": lambda f: (Krum(f), NearestNeighbourMixing(f)),
    "mixing, geometric median": lambda f: (GeometricMedian(0.1, 10), NearestNeighbourMixing(f)),
}


@pytest.mark.parametrize("attack", [flipped, huge, a_little_is_enough, inner_product])
@pytest.mark.parametrize("f", [1, 3, 6])
@pytest.mark.parametrize("name", ROBUST)
def test_with_f_bad_rows_a_robust_rule_stays_near_the_honest_mean(
    name: str, f: int, attack: Callable[[Array, int], Array]
) -> None:
    if name in ("krum", "multi-krum"):
        f = min(f, 3)  # more equal rows than that, not far from the honest ones, have the best scores: known of Krum
    truth = np.full(400, 0.5)
    honest = (truth + 0.25 * some_rows(N - f, 400, 3)).astype(np.float32)
    bad = attack(honest, f).astype(np.float32)
    slots = np.random.default_rng(f).permutation(N)
    x = np.concatenate([honest, bad])[slots]
    rule, mixing = ROBUST[name](f)
    previous = (truth + 0.1).astype(np.float32)
    error = np.linalg.norm(aggregated(rule, x, None, mixing, previous) - honest.mean(axis=0))
    radius = max(np.linalg.norm(row - honest.mean(axis=0)) for row in honest)
    assert error <= 1.6 * radius, (error, radius)
    if attack is huge:
        assert np.linalg.norm(x.mean(axis=0, dtype=np.float64)) > 1e20


def test_the_norm_bound_takes_a_bad_rows_length_but_not_its_vote() -> None:
    honest = (0.5 + 0.25 * some_rows(9, 400)).astype(np.float32)
    x = np.concatenate([honest, np.full((2, 400), -1e30, np.float32)])
    error = np.linalg.norm(aggregated(NormBound(), x) - honest.mean(axis=0))
    median_norm = np.sort(np.linalg.norm(honest.astype(np.float64), axis=1))[5]
    assert error <= 2 * 2 / 11 * median_norm * 1.1


def test_more_samples_do_not_give_more_votes() -> None:
    honest = some_rows(8, 100) * np.float32(0.1)
    x = np.concatenate([honest, np.full((3, 100), 50.0, np.float32)])
    weights = [1.0] * 8 + [1e6] * 3
    for rule in (Median(), TrimmedMean(3), Krum(3), MultiKrum(3)):
        assert np.abs(aggregated(rule, x, weights)).max() < 1


# --- Memory and passes. ---


class CountedRows:
    """Rows that hand out one buffer again and again, and count how often they are gone through."""

    def __init__(self, matrix: Array) -> None:
        self._rows = MemoryRows(matrix, np.ones(len(matrix)))
        self.weights = self._rows.weights
        self.size = self._rows.size
        self.passes = 0

    def blocks(self) -> Iterator[tuple[slice, Array]]:
        self.passes += 1
        room = np.empty((len(self.weights), BLOCK), np.float32)
        for columns, block in self._rows.blocks():
            room[:] = np.nan
            view = room[:, : block.shape[1]]
            view[:] = block
            yield columns, view


@pytest.mark.parametrize(("name", "mixing"), MIXED)
def test_a_rule_goes_through_the_rows_once_or_twice_and_keeps_no_block(name: str, mixing: Mixing | None) -> None:
    x = some_rows(11, 2 * BLOCK + 5)
    rule = PAIRS[name][0]
    rows = CountedRows(x)
    assert aggregate(rule, rows, mixing).tobytes() == aggregated(rule, x, None, mixing).tobytes()
    once = mixing is None and ("trimmed" in name or name in ("mean", "median"))
    assert rows.passes == (1 if once else 2)


def test_blocks_cover_the_columns_in_order() -> None:
    for d in (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK):
        matrix = np.zeros((2, d), np.float32)
        parts = [
            (columns.start, columns.stop, block.shape) for columns, block in MemoryRows(matrix, np.ones(2)).blocks()
        ]
        assert [stop - start for start, stop, _ in parts] == [shape[1] for _, _, shape in parts]
        assert [0, *(stop for _, stop, _ in parts)] == [*(start for start, _, _ in parts), d]
        assert all(stop - start == BLOCK for start, stop, _ in parts[:-1])


# --- Inner products. ---


def test_inner_products_are_exact_sums_so_that_the_order_of_summation_does_not_matter() -> None:
    x = some_rows(9, PART) * np.float32(10.0) ** np.random.default_rng(1).integers(-3, 4, PART).astype(np.float32)
    x[0] = 2.0 - 2.0**-23  # rounds up to a whole power of two everywhere: the largest possible sum
    expected = gram_matrix([(slice(0, PART), x)], 9, None)
    assert expected[0, 0] == 4.0 * PART
    for seed in range(5):
        order = np.random.default_rng(seed).permutation(PART)
        assert gram_matrix([(slice(0, PART), x[:, order])], 9, None).tobytes() == expected.tobytes()


def test_inner_products_are_right_to_single_precision_and_include_the_previous_aggregate() -> None:
    d = BLOCK + 2 * PART + 3
    x = some_rows(6, d) * np.array([1e-30, 1e-3, 1, 10, 1e4, 1e30], np.float32)[:, None]
    previous = some_rows(1, d, 5)[0]
    exact = np.concatenate([x, previous[None]]).astype(np.float64)
    norms = np.linalg.norm(exact, axis=1)
    found = gram_matrix(MemoryRows(x, np.ones(6)).blocks(), 6, previous)
    np.testing.assert_allclose(found / np.outer(norms, norms), exact @ exact.T / np.outer(norms, norms), atol=1e-6)
    assert (found == found.T).all()
    without = gram_matrix(MemoryRows(x, np.ones(6)).blocks(), 6, None)
    assert without[:6, :6].tobytes() == found[:6, :6].tobytes() and not without[6].any() and not without[:, 6].any()


def test_distances_follow_from_inner_products() -> None:
    x = some_rows(7, 50).astype(np.float64)
    gram = x @ x.T
    expected = np.sum((x[:, None] - x[None]) ** 2, axis=2)
    np.testing.assert_allclose(squared_distances(gram), expected, atol=1e-10)
    point = np.random.default_rng(1).uniform(size=7)
    np.testing.assert_allclose(squared_distances_to(gram, point), np.sum((x - point @ x) ** 2, axis=1), atol=1e-9)
    equal = np.full((3, 3), 1 / 3)
    assert not squared_distances(equal).any() and (squared_distances_to(equal, np.array([0.1, 0.2, 0.7])) >= 0).all()


# --- The sorting network. ---


@pytest.mark.parametrize("n", range(1, 11))
def test_merge_exchange_sorts_every_sequence_of_zeros_and_ones(n: int) -> None:
    bits = np.array(list(itertools.product([0, 1], repeat=n))).T
    for i, j in merge_exchange(n):
        assert 0 <= i < j < n
        bits[[i, j]] = np.minimum(bits[i], bits[j]), np.maximum(bits[i], bits[j])
    assert (np.diff(bits, axis=0) >= 0).all()  # and so it sorts every sequence (Knuth 5.3.4, theorem Z)


@pytest.mark.parametrize("n", [*range(1, 10), 25, 31, 32, 33, 64, 100])
def test_the_pruned_network_finds_the_values_of_its_ranks(n: int) -> None:
    x = some_rows(n, 64)
    in_order = np.sort(x, axis=0)
    for start, stop in {(0, n), (0, 1), (n - 1, n), ((n - 1) // 2, n // 2 + 1), (n // 4, n - n // 4)}:
        found = np.sort(values_of_ranks(x, range(start, stop)), axis=0)
        np.testing.assert_array_equal(found, in_order[start:stop])


@settings(deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, n))))
def test_pruning_only_leaves_comparators_out(given_sizes: tuple[int, int, int]) -> None:
    n, start, count = given_sizes
    ranks = range(start, min(start + count, n))
    all_of_them = list(merge_exchange(n))
    kept = [(i, j) for i, j, _, _ in network(n, ranks)]
    remaining = iter(all_of_them)
    assert all(pair in remaining for pair in kept)  # a subsequence
    assert all(low or high for _, _, low, high in network(n, ranks))


def test_which_zero_a_median_is_does_not_depend_on_the_slots() -> None:
    for order in itertools.permutations([[-0.0], [0.0], [-0.0], [0.0], [1.0]]):
        assert aggregated(Median(), list(order)).tobytes() == np.float32(0.0).tobytes()


# --- The registry. ---


def test_job_toml_offers_the_rules_and_mixings_that_there_are() -> None:
    """They stand twice, because the stations do not import one another's parts."""
    assert tuple(RULES) == job_config.RULES
    assert ("none", *MIXINGS) == job_config.MIXINGS


def test_every_rule_has_a_name_and_is_described_and_cites_its_paper() -> None:
    text = assimilator.rules.__doc__ or ""
    for name, make in {**RULES, **MIXINGS}.items():
        assert name in text
        module = importlib.import_module(make.__module__)
        assert module.__file__ is not None and Path(module.__file__).name in text
        assert "https://arxiv.org/abs/" in (module.__doc__ or "")
        made = make(1) if "f" in getattr(make, "__dataclass_fields__", {}) else make()
        assert hasattr(made, "coefficients") + hasattr(made, "reduce") + hasattr(made, "matrix") == 1
