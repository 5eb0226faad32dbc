"""Softmax and norms of the OpenCL backend at sizes where rows are long, and statistics are merged from parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from op_cases import OpCase, f, normalisations, softmax_and_losses
from opencl_cases import assert_exact, computed
from opencl_devices import DEVICES, open_device

ALL = [True, True, True]


def finish_of(op: str) -> Any:
    """How a backward case makes its inputs consistent, taken from the cases of all backends."""
    return next(case.finish for case in (*normalisations(), *softmax_and_losses()) if case.op == op)


@pytest.mark.parametrize("device", DEVICES)
def test_long_rows_and_many_columns_of_a_softmax(device: str) -> None:
    cases = []
    for op in ("softmax", "log_softmax"):
        for shape, dim in (((3, 5003), 1), ((2, 70, 64), 1)):
            cases.append(OpCase(op, (f(*shape),), {"dim": dim}))
        finish = finish_of(f"{op}_backward")  # along dim 1
        cases.append(OpCase(f"{op}_backward", (f(3, 5003), f(3, 5003)), {"dim": 1}, finish))
        cases.append(OpCase(f"{op}_backward", (f(2, 70, 64), f(2, 70, 64)), {"dim": 1}, finish))
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_masked_rows_of_a_softmax_are_those_of_pytorch(device: str, op: str) -> None:
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    x[0, 7:], x[1, ::2], x[2], x[3, 3], x[4, 9] = -np.inf, -np.inf, -np.inf, np.nan, np.inf
    columns = np.ascontiguousarray(x.T)
    cases = [OpCase(op, (f(5, 40),), {"dim": 1}), OpCase(op, (f(40, 5),), {"dim": 0})]
    (by_rows,), (by_columns,) = computed(device, cases, [[x], [columns]])
    import torch

    expected = getattr(torch, op)(torch.from_numpy(x), 1).numpy()
    np.testing.assert_allclose(by_rows, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(by_columns.T, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_many_rows_and_long_rows_of_a_layer_norm(device: str) -> None:
    cases = []
    for rows, length in ((700, 64), (3, 3001)):
        attrs = {"normalized_shape": [length], "eps": 1e-5}
        cases.append(OpCase("native_layer_norm", (f(rows, length), f(length), f(length)), attrs))
        inputs = (f(rows, length), f(rows, length), f(rows, 1), f(rows, 1), f(length), f(length))
        attrs = {"normalized_shape": [length], "output_mask": ALL}
        cases.append(OpCase("native_layer_norm_backward", inputs, attrs, row_statistics(rows)))
    assert_exact(device, cases)


def row_statistics(rows: int) -> Any:
    def finish(made: list[Any]) -> None:
        lines = made[1].reshape(rows, -1).astype(np.float64)
        made[2][...] = lines.mean(axis=1).reshape(made[2].shape)
        made[3][...] = (1 / np.sqrt(lines.var(axis=1) + 1e-5)).reshape(made[3].shape)

    return finish


@pytest.mark.parametrize("device", DEVICES)
def test_batch_statistics_are_merged_from_many_parts(device: str) -> None:
    cases = []
    for shape in ((300, 64), (260, 3, 5), (2, 4, 70, 70)):
        channels = shape[1]
        running = (f(channels), f(channels, kind="positive"))
        attrs: dict[str, Any] = {"training": True, "momentum": 0.1, "eps": 1e-5}
        cases.append(OpCase("native_batch_norm", (f(*shape), f(channels), f(channels), *running), attrs))
        inputs = (f(*shape), f(*shape), f(channels), *running, f(channels), f(channels))
        attrs = {"training": True, "eps": 1e-5, "output_mask": ALL}
        cases.append(OpCase("native_batch_norm_backward", inputs, attrs, finish_of("native_batch_norm_backward")))
    cases.append(OpCase("native_group_norm", (f(2, 8, 30, 31), f(8), f(8)), {"groups": 2, "eps": 1e-5}))
    assert_exact(device, cases)


@pytest.mark.parametrize("device", DEVICES)
def test_statistics_of_numbers_far_from_zero_are_exact(device: str) -> None:
    """The mean is 10 000 times the deviation: E[x^2] - E[x]^2 would have no correct digit."""
    rng = np.random.default_rng(3)
    x = (10_000 + rng.standard_normal((300, 4, 9))).astype(np.float32)
    w, b, running = np.ones(4, np.float32), np.zeros(4, np.float32), np.ones(4, np.float32)
    batch = OpCase(
        "native_batch_norm", (f(300, 4, 9), f(4), f(4), f(4), f(4)), {"training": True, "momentum": 0.1, "eps": 0}
    )
    rows = OpCase("native_layer_norm", (f(300, 36), None, None), {"normalized_shape": [36], "eps": 0})
    (out, mean, invstd, *_), (hat, *_) = computed(
        device, [batch, rows], [[x, w, b, running, running], [x.reshape(300, 36), None, None]]
    )
    true = np.moveaxis(x.astype(np.float64), 1, 0).reshape(4, -1)
    np.testing.assert_allclose(mean, true.mean(axis=1), rtol=2e-7)
    np.testing.assert_allclose(invstd, 1 / true.std(axis=1), rtol=1e-4)  # the numbers are rounded to 1e-3 themselves
    lines = x.reshape(300, 36).astype(np.float64)
    expected = (lines - lines.mean(axis=1, keepdims=True)) / lines.std(axis=1, keepdims=True)
    np.testing.assert_allclose(hat, expected, atol=3e-3)  # a mean of 10 000 is itself rounded to 1e-3
    assert np.isfinite(out).all()


def test_both_forms_are_in_the_tests() -> None:
    forms = {name: open_device(name).facts.group_form for name in DEVICES if name != "rusticl"}
    assert forms == {"pocl": False, "pocl_gpu": True}
