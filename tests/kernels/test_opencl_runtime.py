"""Running plans: values keep their meaning from run to run, long launches are cut, faults of drivers are told apart."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from opencl_devices import open_device

pytest.importorskip("pyopencl", reason="pyopencl is not installed")

import pyopencl as cl

from apps.gradient.backends.backend import DeviceLost
from apps.gradient.opencl import runtime
from apps.gradient.opencl.opencl_backend import OpenclProgram
from apps.gradient.opencl.runtime import Pool
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.graph import Graph, GraphBuilder

Array = np.ndarray[Any, Any]
SIZE = 100_000


def step_graph() -> Graph:
    """parameter - rate * gradient, as an optimizer's graph."""
    builder = GraphBuilder()
    parameter = builder.input("parameter/w", "parameter", "float32", (SIZE,))
    gradient = builder.input("gradient/w", "gradient", "float32", (SIZE,))
    rate = builder.input("learning_rate", "learning_rate", "float32", ())
    (scaled,) = builder.node("mul", [gradient, rate])
    builder.output("parameter/w", "parameter", builder.node("sub", [parameter, scaled])[0])
    return builder.build()


def program(device: str, graph: Graph, *consume: str) -> OpenclProgram:
    return OpenclProgram(graph, open_device(device), True, frozenset(consume))


@pytest.fixture(params=["pocl", "pocl_gpu"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def arrays() -> dict[str, Array]:
    draws = np.random.default_rng(0)
    values = {name: draws.standard_normal(SIZE).astype(np.float32) for name in ("parameter/w", "gradient/w")}
    return {**values, "learning_rate": np.array(0.5, np.float32)}


@pytest.mark.parametrize("consume", [(), ("parameter",)])
def test_steps_follow_one_another(device: str, arrays: dict[str, Array], consume: tuple[str, ...]) -> None:
    backend, step = open_device(device), program(device, step_graph(), *consume)
    values = {name: backend.from_numpy(array) for name, array in arrays.items()}
    expected = arrays["parameter/w"]
    for _ in range(4):
        values.update(step.run(values))
        expected = expected - np.float32(0.5) * arrays["gradient/w"]
    np.testing.assert_allclose(backend.to_numpy(values["parameter/w"]), expected, rtol=1e-6, atol=1e-6)


def test_a_value_that_somebody_holds_does_not_change(device: str, arrays: dict[str, Array]) -> None:
    backend, step = open_device(device), program(device, step_graph())
    values = {name: backend.from_numpy(array) for name, array in arrays.items()}
    first = step.run(values)["parameter/w"]
    kept = backend.to_numpy(first).copy()
    step.run({**values, "parameter/w": first})
    np.testing.assert_array_equal(backend.to_numpy(first), kept)
    np.testing.assert_array_equal(backend.to_numpy(values["parameter/w"]), arrays["parameter/w"])


def test_an_optimizer_step_in_place_needs_no_second_copy_of_the_model(arrays: dict[str, Array]) -> None:
    backend = open_device("pocl")
    step = program("pocl", step_graph(), "parameter")
    values = {name: backend.from_numpy(array) for name, array in arrays.items()}
    buffer = values["parameter/w"].buffer
    made = step.run(values)["parameter/w"]
    assert made.buffer is buffer


def test_a_launch_estimated_as_too_long_is_cut_and_computes_the_same(
    device: str, arrays: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = open_device(device)
    whole = program(device, step_graph())
    monkeypatch.setattr(runtime.Speed, "seconds", lambda self, launch: 1.5)
    cut = program(device, step_graph())
    assert len(cut._prepared._queue) > len(whole._prepared._queue) == 1
    assert all(seconds <= runtime.LONGEST_LAUNCH_S for *_, seconds in cut._prepared._queue)
    values = {name: backend.from_numpy(array) for name, array in arrays.items()}
    a, b = (backend.to_numpy(each.run(values)["parameter/w"]) for each in (whole, cut))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("code", "error"),
    [("OUT_OF_RESOURCES", DeviceLost), ("DEVICE_NOT_AVAILABLE", DeviceLost), ("INVALID_COMMAND_QUEUE", DeviceLost),
     ("MEM_OBJECT_ALLOCATION_FAILURE", UnfitHost), ("INVALID_KERNEL_ARGS", cl.Error)],
)  # fmt: skip
def test_what_a_driver_answers_is_a_lost_device_no_memory_or_a_fault_of_ours(
    code: str, error: type[Exception], arrays: dict[str, Array], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, step = open_device("pocl"), program("pocl", step_graph())
    values = {name: backend.from_numpy(array) for name, array in arrays.items()}

    number = getattr(cl.status_code, code)
    refusal = type("Refusal", (cl.Error,), {"code": number})

    def refused(*_: Any, **__: Any) -> None:
        raise refusal(code)

    monkeypatch.setattr(cl, "enqueue_nd_range_kernel", refused)
    with pytest.raises(error):
        step.run(values)


def test_memory_is_refused_with_numbers_when_the_device_is_full() -> None:
    backend = open_device("pocl")
    pool = Pool(backend.context, backend.queue, dataclasses.replace(backend.facts, global_memory=1 << 20))
    kept = pool.take(600_000)
    with pytest.raises(UnfitHost, match=r"has 1048576 bytes for us and 600064 are taken: 500224 more"):
        pool.take(500_000)
    pool.give_back(kept)
    assert pool.take(700_000).size >= 700_000, "free buffers are given up for one of another size"


def test_fresh_memory_is_zero() -> None:
    backend = open_device("pocl")
    buffer = backend.pool.take(3 << 20)
    found = np.ones(3 << 20, np.uint8)
    cl.enqueue_copy(backend.queue, found, buffer, is_blocking=True)
    assert not found.any()


def test_check_may_stop_a_run_before_anything_is_overwritten(arrays: dict[str, Array]) -> None:
    backend, step = open_device("pocl"), program("pocl", step_graph(), "parameter")
    values = {name: backend.from_numpy(array) for name, array in arrays.items()}

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        step.run(values, stop)
    np.testing.assert_array_equal(backend.to_numpy(values["parameter/w"]), arrays["parameter/w"])
