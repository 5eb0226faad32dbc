"""Fingerprints: small, the same for the same update, and an estimate of the distance that the payloads had."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project.contract.opset import TensorType
from validator.agreement import distance
from validator.fingerprint import Layout, Marks, estimate, fingerprints, heads, layout_of, max_bytes, read, unlikeness

SMALL = {"gradient/a": (20, 10), "gradient/b": (30,), "gradient/c": (5, 4), "metric/loss": (3,)}
LARGE = {"gradient/a": (200, 150), "gradient/b": (3000,), "gradient/c": (8, 5), "metric/loss": (3,)}
SHAPES = pytest.mark.parametrize("shapes", [SMALL, LARGE], ids=["small", "large"])


def types(shapes: dict[str, tuple[int, ...]]) -> dict[str, TensorType]:
    return {name: TensorType("float32", shape) for name, shape in shapes.items()}


def layout(shapes: dict[str, tuple[int, ...]]) -> Layout:
    found = layout_of(types(shapes))
    assert found is not None
    return found


def update(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, Any]:
    draws = np.random.default_rng(seed)
    return {name: draws.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def noisy(made: dict[str, Any], share: float) -> dict[str, Any]:
    draws = np.random.default_rng(1)
    return {n: (a * (1 + share * draws.standard_normal(a.shape))).astype(np.float32) for n, a in made.items()}


def scaled(made: dict[str, Any], factor: float) -> dict[str, Any]:
    return {n: a if n.startswith("metric/") else (factor * a).astype(np.float32) for n, a in made.items()}


def marks(made: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> Marks:
    found = read(fingerprints([made], layout(shapes))[0], layout(shapes))
    assert found is not None
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    st.sampled_from(["gradient", "delta", "buffer", "metric"]),
)
def test_a_fingerprint_is_no_larger_than_a_thousandth_of_the_dense_update_or_a_kibibyte(
    sizes: list[int], family: str
) -> None:
    kinds = {f"{family}/{n}": TensorType("float32", (size,)) for n, size in enumerate(sizes)}
    found = layout_of(kinds)
    if not any(sizes):
        assert found is None
        return
    assert found is not None
    (blob,) = fingerprints([{name: np.ones(kind.shape, np.float32) for name, kind in kinds.items()}], found)
    assert len(blob) == found.nbytes <= max_bytes(kinds) == max(4 * sum(sizes) // 1000, 1024)
    assert read(blob, found) is not None


def test_more_tensors_than_a_fingerprint_holds_leave_the_smallest_out() -> None:
    shapes: dict[str, tuple[int, ...]] = {f"gradient/{n:03}": (1 + n,) for n in range(200)}
    found = layout(shapes)
    assert len(found.names) < 200 and min(found.sizes) > 100
    assert found.nbytes <= 1024


@SHAPES
def test_it_holds_the_largest_values_of_every_tensor_with_their_places(shapes: dict[str, tuple[int, ...]]) -> None:
    made, kind = update(shapes), layout(shapes)
    found = marks(made, shapes)
    for index, (name, count) in enumerate(zip(kind.names, kind.counts, strict=True)):
        flat = made[name].reshape(-1)
        mine = (found.places >= kind.starts[index]) & (found.places < kind.starts[index] + kind.sizes[index])
        largest = np.sort(np.argsort(-np.abs(flat), kind="stable")[:count])
        np.testing.assert_array_equal(found.places[mine] - kind.starts[index], largest)
        np.testing.assert_allclose(found.values[mine], flat[largest], rtol=0, atol=np.abs(flat).max() / 65534 * 1.01)
        assert found.norms[index] == pytest.approx(np.linalg.norm(flat), rel=1e-6)


@SHAPES
def test_it_does_not_depend_on_what_is_made_beside_it(shapes: dict[str, tuple[int, ...]]) -> None:
    several, kind = [update(shapes, seed) for seed in range(3)], layout(shapes)
    assert fingerprints(several, kind) == [fingerprints([each], kind)[0] for each in several]
    assert fingerprints([], kind) == []


@SHAPES
@pytest.mark.parametrize("share", [1e-4, 1e-3, 1e-2, 0.1])
def test_the_estimate_is_near_the_distance_of_the_payloads(shapes: dict[str, tuple[int, ...]], share: float) -> None:
    first = update(shapes)
    second = noisy(first, share)
    found = estimate(marks(first, shapes), marks(second, shapes), layout(shapes))
    assert found == pytest.approx(distance(first, second), rel=0.5, abs=3e-5)


@SHAPES
def test_equal_updates_are_estimated_equal_and_honest_rounding_stays_below_every_tolerance(
    shapes: dict[str, tuple[int, ...]],
) -> None:
    first = update(shapes)
    assert estimate(marks(first, shapes), marks(first, shapes), layout(shapes)) == 0
    assert estimate(marks(first, shapes), marks(noisy(first, 5e-7), shapes), layout(shapes)) < 5e-5


@SHAPES
@pytest.mark.parametrize("lie", [-1.0, 0.5, 2.0, 0.0])
def test_a_scaled_or_reversed_update_is_far_away(shapes: dict[str, tuple[int, ...]], lie: float) -> None:
    first = update(shapes)
    assert estimate(marks(first, shapes), marks(scaled(first, lie), shapes), layout(shapes)) > 0.3


def test_a_tensor_of_mere_noise_does_not_part_honest_copies() -> None:
    first, second = update(SMALL), update(SMALL)
    first["gradient/b"] = (1e-9 * update(SMALL, 7)["gradient/b"]).astype(np.float32)
    second["gradient/b"] = (1e-9 * update(SMALL, 8)["gradient/b"]).astype(np.float32)
    assert estimate(marks(first, SMALL), marks(second, SMALL), layout(SMALL)) < 1e-6


@SHAPES
@pytest.mark.parametrize("factor", [1.0, -3.0, 1e-3])
def test_a_multiple_of_another_update_is_recognised_and_fresh_work_is_not(
    shapes: dict[str, tuple[int, ...]], factor: float
) -> None:
    first, fresh = update(shapes), update(shapes, 5)
    copy = scaled(noisy(first, 1e-3), factor)
    assert unlikeness(marks(first, shapes), marks(copy, shapes), layout(shapes)) < 0.01
    assert unlikeness(marks(first, shapes), marks(fresh, shapes), layout(shapes)) > 0.5
    blobs = fingerprints([first, copy, fresh], layout(shapes))
    first_heads, copy_heads, fresh_heads = (heads(blob, layout(shapes)) for blob in blobs)
    assert 2 * len(first_heads & copy_heads) >= len(first_heads) > 2 * len(first_heads & fresh_heads)


def test_an_update_of_zeros_resembles_nothing() -> None:
    zero = {name: np.zeros(shape, np.float32) for name, shape in SMALL.items()}
    found = marks(zero, SMALL)
    assert unlikeness(found, marks(update(SMALL), SMALL), layout(SMALL)) == 1.0
    assert estimate(found, marks(update(SMALL), SMALL), layout(SMALL)) > 0.8
    assert estimate(found, found, layout(SMALL)) == 0


@pytest.mark.parametrize("spoil", [lambda b: b"", lambda b: b[:-1], lambda b: b"\x02" + b[1:], lambda b: b + b"x"])
def test_what_is_no_fingerprint_of_this_kind_is_not_read(spoil: Any) -> None:
    (blob,) = fingerprints([update(SMALL)], layout(SMALL))
    assert read(spoil(blob), layout(SMALL)) is None


def test_integers_have_no_marks_and_an_update_without_numbers_has_no_fingerprint() -> None:
    assert layout_of({"buffer/steps": TensorType("int64", ())}) is None
    mixed = layout_of({"buffer/steps": TensorType("int64", ()), "gradient/a": TensorType("float32", (3,))})
    assert mixed is not None and mixed.names == ("gradient/a",)
