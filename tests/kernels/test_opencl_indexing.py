"""Indexing and sorting of the OpenCL backend: repeated and bad indices, and sorts of more than a block."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import OpCase, f, ints
from opencl_cases import assert_exact, computed
from opencl_devices import DEVICES

from apps.gradient.backends import OutOfRange
from apps.gradient.executor import ExecutionError


@pytest.mark.parametrize("device", DEVICES)
def test_sorts_of_several_blocks_are_stable(device: str) -> None:
    cases = []
    for flag in (False, True):
        for draw in (f(3, 1000), ints(2, 777, high=9), f(2, 400, kind="special")):
            cases.append(OpCase("sort", (draw,), {"dim": 1, "descending": flag}))
        cases.append(OpCase("sort", (f(500, 140),), {"dim": 0, "descending": flag}))
        for k, draw in (
            (1, f(2, 1000)),
            (7, f(3, 530)),
            (200, f(2, 700)),
            (5, ints(2, 600, high=9)),
            (40, f(70, 1000)),
        ):
            cases.append(OpCase("topk", (draw,), {"k": k, "dim": 1, "largest": flag}))
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_named_often_are_summed_over_many_chunks(device: str) -> None:
    cases = []
    for rows, width, count in ((2, 33, 700), (300, 64, 1000)):
        for padding_idx in (-1, 0):
            attrs = {"num_weights": rows, "padding_idx": padding_idx}
            cases.append(OpCase("embedding_dense_backward", (f(count, width), ints(count, high=rows)), attrs))
    attrs = {"dim": 1, "accumulate": True}
    cases.append(OpCase("index_put", (f(2, 5, 16), f(2, 400, 16), ints(400, low=-5, high=5)), attrs))
    cases.append(OpCase("index_put", (ints(3, high=9), ints(500, high=9), ints(500, high=3)), {**attrs, "dim": 0}))
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_many_indices_of_a_line_are_added(device: str) -> None:
    cases = [OpCase("scatter_add", (f(3, 40), ints(3, 300, high=40), f(3, 300)), {"dim": 1})]
    cases += [OpCase("scatter_add", (f(40, 5), ints(200, 3, high=40), f(200, 5)), {"dim": 0})]
    cases += [OpCase("scatter_add", (ints(9, high=9), ints(200, high=9), ints(200, high=9)), {"dim": 0})]
    bytes_ = [ints(7, high=255, dtype="uint8"), ints(300, high=7), ints(300, high=255, dtype="uint8")]
    cases += [
        OpCase("scatter_add", tuple(bytes_), {"dim": 0}),
        OpCase("gather", (f(40, 6), ints(300, 2, high=40)), {"dim": 0}),
    ]
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_the_last_of_several_values_for_one_place_stays(device: str) -> None:
    """PyTorch leaves it open; replicas of a workunit must agree, and numpy's answer is the last."""
    rng = np.random.default_rng(1)
    x, src = (rng.standard_normal((4, 9)).astype(np.float32) for _ in range(2))
    few, many = rng.integers(0, 9, (4, 9)), rng.integers(0, 9, (4, 50))
    values = rng.standard_normal((4, 50)).astype(np.float32)
    rows, lines = rng.integers(-4, 4, 30), rng.standard_normal((30, 9)).astype(np.float32)
    along = {"dim": 1}
    cases = [OpCase("scatter", (), along), OpCase("scatter", (), along)]
    cases.append(OpCase("index_put", (), {"dim": 0, "accumulate": False}))
    made = computed(device, cases, [[x, few, src], [x, many, values], [x, lines, rows]])
    for (ours,), where, what in zip(made[:2], (few, many), (src, values), strict=True):
        expected = x.copy()
        for i in range(where.shape[1]):
            expected[np.arange(4), where[:, i]] = what[:, i]
        np.testing.assert_array_equal(ours, expected)
    expected = x.copy()
    for row, line in zip(rows, lines, strict=True):
        expected[row] = line
    np.testing.assert_array_equal(made[2][0], expected)


BAD: list[tuple[str, dict[str, Any], list[tuple[int, ...]]]] = [
    ("gather", {"dim": 0}, [(5,), (9,)]),
    ("scatter", {"dim": 0}, [(5,), (9,), (9,)]),
    ("scatter_add", {"dim": 0}, [(5,), (40,), (40,)]),
    ("index", {"dim": 0}, [(5, 2), (9,)]),
    ("index_put", {"dim": 0, "accumulate": True}, [(5, 2), (9, 2), (9,)]),
    ("index_select", {"dim": 0}, [(5, 2), (9,)]),
    ("embedding", {}, [(5, 2), (9,)]),
    ("embedding_dense_backward", {"num_weights": 5, "padding_idx": -1}, [(9, 2), (9,)]),
]


@pytest.mark.parametrize("wrong", [5, -6, 2**40])
@pytest.mark.parametrize(("op", "attrs", "shapes"), BAD, ids=[each[0] for each in BAD])
def test_an_index_out_of_range_stops_the_task(
    op: str, attrs: dict[str, Any], shapes: list[tuple[int, ...]], wrong: int
) -> None:
    arrays: list[Any] = [np.ones(shape, np.float32) for shape in shapes]
    place = 2 if op == "index_put" else 1
    arrays[place] = np.zeros(shapes[place], np.int64)
    arrays[place][-2] = wrong
    with pytest.raises(ExecutionError) as raised:
        computed("pocl", [OpCase(op, (), attrs)], [arrays])
    assert isinstance(raised.value.__cause__, OutOfRange)


@pytest.mark.parametrize("device", DEVICES)
def test_random_numbers_of_any_length_are_those_of_the_generator(device: str) -> None:
    cases = []
    for shape in ([1001], [1, 4, 8], [3, 4099]):
        seeds = (ints(low=-(2**62), high=2**62), ints(low=-(2**40), high=2**40))
        cases.append(OpCase("random_uniform", seeds, {"shape": shape, "stream": 2**31}))
        cases.append(OpCase("random_bernoulli", seeds, {"p": 0.3, "shape": shape, "stream": 5}))
    assert_exact(device, cases)
