"""Every operator of both backends against eager PyTorch, forward and backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from op_cases import CASES, OpCase
from pytorch_reference import REFERENCE

from apps.gradient.backends import Backend, open_backend
from apps.gradient.backends.numpy_elementwise import erf_block
from apps.gradient.executor import Executor, apply, missing_operators
from boinc_project.contract.graph import Graph, GraphBuilder
from boinc_project.contract.opset import OPSET

ALL_CASES = [case for cases in CASES.values() for case in cases]
# A float32 result may be as wrong as three times the worst error of PyTorch's own float32 result, plus a few
# roundings of the value itself (PyTorch is sometimes exact by luck) and of the largest value where sums cancel.
EAGER_FACTOR = 3.0
ULPS_OF_VALUE = 4 * 2.0**-23
ULPS_OF_LARGEST = 2.0**-23
# Sums may cancel to almost nothing; their error is measured by the sum of the terms' absolute values.
SUMS = ("sum", "mean", "cumsum", "mm", "bmm", "addmm", "convolution", "convolution_backward", "avg_pool2d")
ULPS_OF_TERMS = 2.0**-23


@pytest.fixture(scope="module", params=["numpy", "torch"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    threads = torch.get_num_threads()
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
    executor = Executor(graph_of(case, arrays), backend, verify=True)
    before = [None if a is None else a.copy() for a in arrays]
    inputs = {f"in{i}": lay_out(a, backend) for i, a in enumerate(arrays) if a is not None}
    outputs = [backend.to_numpy(each).copy() for each in executor.run(inputs).values()]
    for name, was in ((f"in{i}", a) for i, a in enumerate(before) if a is not None):
        np.testing.assert_array_equal(backend.to_numpy(inputs[name]), was, f"{case.op} wrote to {name}")
    return outputs


_computed: dict[tuple[str, torch.dtype, bool], list[np.ndarray[Any, Any]]] = {}


def reference(case: OpCase, real: torch.dtype, absolute: bool = False) -> list[np.ndarray[Any, Any]]:
    """What eager PyTorch makes of the case; computed once for all backends."""
    key = (case.id, real, absolute)
    if key not in _computed:
        _computed[key] = compute_reference(case, real, absolute)
    return _computed[key]


def compute_reference(case: OpCase, real: torch.dtype, absolute: bool) -> list[np.ndarray[Any, Any]]:
    tensors = [None if a is None else torch.from_numpy(np.asarray(np.abs(a)) if absolute else a) for a in case.arrays()]
    wide = [t.to(real) if t is not None and t.is_floating_point() else t for t in tensors]
    with torch.no_grad():
        return [each.detach().numpy() for each in REFERENCE[case.op](wide, case.attrs, real)]


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id[:150])
def test_operator_is_as_exact_as_eager_pytorch(case: OpCase, backend: Backend) -> None:
    ours = run(case, backend, lambda array, backend: backend.from_numpy(array))
    of_views = run(case, backend, strided)
    eager, exact = reference(case, torch.float32), reference(case, torch.float64)
    assert len(ours) == len(eager)
    terms = reference(case, torch.float64, absolute=True) if case.op in SUMS else [np.zeros(()) for _ in exact]
    theirs_twice = zip([*ours, *of_views], [*eager, *eager], [*exact, *exact], [*terms, *terms], strict=True)
    for mine, theirs, true, size in theirs_twice:
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype or mine.dtype.kind in "iu"
        if mine.dtype != np.float32 or case.op.startswith("random"):
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert_close(mine, theirs, true, ULPS_OF_TERMS * np.broadcast_to(size, true.shape))


def assert_close(mine: Any, theirs: Any, true: Any, allowance: Any) -> None:
    """Infinities and NaN are where eager float32 has them; all else within the tolerance above."""
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(mine[~finite], theirs[~finite])
    mine, theirs, true, allowance = (a[finite].astype(np.float64) for a in (mine, theirs, true, allowance))
    if mine.size == 0:
        return
    tolerance = EAGER_FACTOR * np.abs(theirs - true).max() + ULPS_OF_VALUE * np.abs(true)
    tolerance += ULPS_OF_LARGEST * np.abs(true).max() + allowance + 2.0**-149
    error = np.abs(mine - true)
    assert (error <= tolerance).all(), f"error {error.max()} at tolerance {tolerance[error.argmax()]}"


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
