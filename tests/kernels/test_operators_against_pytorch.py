"""Every operator of both backends against eager PyTorch, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import CASES, OpCase
from operator_oracle import assert_as_exact_as_eager
from pytorch_reference import REFERENCE

from apps.gradient.backends import Backend, open_backend
from apps.gradient.backends.numpy_elementwise import erf_block
from apps.gradient.backends.torch_backend import TorchBackend
from apps.gradient.executor import apply, missing_operators
from boinc_project.contract.graph import Graph, GraphBuilder
from boinc_project.contract.opset import OPSET

ALL_CASES = [case for cases in CASES.values() for case in cases]


@pytest.fixture(scope="module", params=["numpy", "torch", "torch with deferred checks"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    threads = torch.get_num_threads()
    if request.param == "torch with deferred checks":  # as on a card
        yield TorchBackend(torch.device("cpu"), 1, deferred_checks=True)
    else:
        yield open_backend(request.param, threads=1, device="cpu")
    torch.set_num_threads(threads)


def graph_of(case: OpCase, arrays: list[Any]) -> Graph:
    builder = GraphBuilder()
    values = [
        None if a is None else builder.input(f"in{i}", "constant", a.dtype.name, a.shape) for i, a in enumerate(arrays)
    ]
    for number, value in enumerate(builder.node(case.op, values, case.attrs, "op_cases.py")):
        builder.output(f"out{number}", "metric", value)
    return builder.build()


def strided(array: Any, backend: Backend) -> Any:
    """The same values as every other element of a tensor twice as wide."""
    if array.ndim == 0:
        return backend.from_numpy(array)
    dim, size = array.ndim - 1, array.shape[-1]
    wide = np.repeat(array, 2, axis=dim)
    every_other = {"dim": dim, "start": 0, "stop": 2 * size, "step": 2}
    return apply(backend, "slice", [backend.from_numpy(wide)], every_other)[0]


def run(case: OpCase, backend: Backend, lay_out: Callable[[Any, Backend], Any]) -> list[np.ndarray[Any, Any]]:
    arrays = case.arrays()
    program = backend.program(graph_of(case, arrays), verify=True)
    before = [None if a is None else a.copy() for a in arrays]
    inputs = {f"in{i}": lay_out(a, backend) for i, a in enumerate(arrays) if a is not None}
    outputs = [backend.to_numpy(each).copy() for each in program.run(inputs).values()]
    for name, was in ((f"in{i}", a) for i, a in enumerate(before) if a is not None):
        np.testing.assert_array_equal(backend.to_numpy(inputs[name]), was, f"{case.op} wrote to {name}")
    return outputs


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id[:150])
def test_operator_is_as_exact_as_eager_pytorch(case: OpCase, backend: Backend) -> None:
    ours = run(case, backend, lambda array, backend: backend.from_numpy(array))
    of_views = run(case, backend, strided)
    assert_as_exact_as_eager(case, ours)
    assert_as_exact_as_eager(case, of_views)


def test_erf_of_the_numpy_backend_is_within_one_unit_in_the_last_place() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-6, 6, 20_000), 10.0 ** rng.uniform(-8, 0.6, 20_000)]).astype(np.float32)
    exact = np.array([math.erf(float(each)) for each in x])
    units = np.spacing(np.abs(exact).astype(np.float32)).astype(np.float64)
    assert (np.abs(erf_block(x) - exact) / units).max() <= 1


def test_every_operator_has_cases_and_a_reference() -> None:
    assert set(CASES) == set(OPSET) == set(REFERENCE)
    assert all(CASES.values())


def test_the_tables_have_the_keys_of_the_opset_in_its_order(backend: Backend) -> None:
    assert list(backend.ops) == list(OPSET)
    assert missing_operators(backend) == []
