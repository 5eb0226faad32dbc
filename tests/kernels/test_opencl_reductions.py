"""Reductions of the OpenCL backend where they take several passes: long rows, long columns, dimensions far apart."""

from __future__ import annotations

import pytest
from op_cases import OpCase, bools, f, ints
from opencl_cases import assert_exact
from opencl_devices import DEVICES

LONG = 20_000  # more than a pass takes of one row


def over(*dims: int) -> dict[str, object]:
    return {"dims": list(dims), "keepdim": False}


@pytest.mark.parametrize("device", DEVICES)
def test_a_few_long_rows_are_combined_in_two_passes(device: str) -> None:
    cases = [OpCase(op, (f(3, LONG),), over(1)) for op in ("sum", "mean", "amin")]
    cases += [
        OpCase("sum", (f(LONG + 1),), over(0)),
        OpCase("sum", (ints(2, LONG, high=2**40, low=-(2**40)),), over(1)),
    ]
    cases += [OpCase("amax", (ints(2, LONG, high=9, dtype="int32"),), over(1))]
    cases += [OpCase(op, (bools(2, LONG),), over(1)) for op in ("all", "sum")]
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_long_columns_are_cut_into_segments(device: str) -> None:
    shapes = ((1500, 64), (3, 700, 65), (5000, 1))
    cases = [OpCase(op, (f(*shape),), over(len(shape) - 2)) for op in ("sum", "amax") for shape in shapes]
    cases += [
        OpCase("mean", (f(2, 600, 96),), over(1)),
        OpCase("sum", (ints(900, 6, high=99, dtype="int32"),), over(0)),
    ]
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_dimensions_that_cannot_be_walked_as_one_take_a_pass_each(device: str) -> None:
    cases = [OpCase("sum", (f(5, 3, 300, 4, 66),), over(0, 2, 4)), OpCase("mean", (f(64, 3, 40, 33),), over(0, 2, 3))]
    cases += [OpCase("amax", (f(2, 9, 4, 7),), over(1, 3)), OpCase("prod", (f(2, 3, 2, 5, 2),), over(0, 2, 4))]
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_the_first_extreme_of_a_long_row_is_found(device: str) -> None:
    cases = []
    for op in ("argmax", "argmin"):
        cases += [OpCase(op, (draw,), {"dim": 1, "keepdim": False}) for draw in (f(2, LONG), ints(2, LONG, high=5))]
        cases += [OpCase(op, (f(400, 70),), {"dim": dim, "keepdim": True}) for dim in (0, None)]
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_running_sums_go_on_from_segment_to_segment(device: str) -> None:
    cases = [OpCase("cumsum", (f(3, 3001),), {"dim": 1}), OpCase("cumsum", (f(2, 1500, 5),), {"dim": 1})]
    cases += [OpCase("cumsum", (ints(2, 2500, high=2**40),), {"dim": 1}), OpCase("cumsum", (bools(5000),), {"dim": 0})]
    cases += [OpCase("cumsum", (f(2000, kind="special"),), {"dim": 0})]
    assert_exact(device, cases)
