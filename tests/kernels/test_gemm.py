"""Matrix products on OpenCL beyond the operator cases: every recipe that could be chosen, and layouts of operands."""

from __future__ import annotations

import dataclasses
from itertools import product
from typing import Any

import numpy as np
import pytest
from opencl_devices import DEVICES, open_device

from apps.gradient.opencl import matrix
from apps.gradient.opencl.emitter import Emitter
from apps.gradient.opencl.tiles import Product, recipes
from boinc_project.contract.graph import GraphBuilder

Array = np.ndarray[Any, Any]
ULPS = 3 * 2.0**-23


def run(device: str, arrays: dict[str, Array], build: Any) -> dict[str, Array]:
    """What a graph makes of arrays; `build(builder, values)` adds its nodes and outputs."""
    backend, builder = open_device(device), GraphBuilder()
    values = {name: builder.input(name, "constant", a.dtype.name, a.shape) for name, a in arrays.items()}
    build(builder, values)
    program = backend.program(builder.build(), verify=True)
    made = program.run({name: backend.from_numpy(array) for name, array in arrays.items()})
    return {name: backend.to_numpy(tensor) for name, tensor in made.items()}


def assert_close(made: Array, a: Array, b: Array, bias: Array | float = 0.0) -> None:
    """Within a few roundings of the terms' absolute values."""
    wanted = np.matmul(a.astype(np.float64), b.astype(np.float64)) + bias
    terms = np.matmul(np.abs(a).astype(np.float64), np.abs(b).astype(np.float64)) + np.abs(bias)
    assert made.shape == wanted.shape
    assert (np.abs(made - wanted) <= ULPS * terms).all(), np.abs(made - wanted).max()


RAGGED, WHOLE = (37, 70, 300), (48, 64, 320)


@pytest.mark.parametrize(
    ("device", "shape"),
    [
        # The recipes of a processor take a compiler a minute.
        pytest.param(device, shape, id=f"{device}-{name}", marks=pytest.mark.long if device == "pocl" else ())
        for name, shape in (("ragged", RAGGED), ("whole_tiles", WHOLE))
        for device in DEVICES
    ],
)
def test_every_recipe_gives_the_same_product(
    device: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    m, n, k = shape
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)
    bias = rng.standard_normal(n, np.float32)
    facts = open_device(device).facts
    emit = Emitter(facts, {})
    sides = (emit.fresh("float32", (1, m, k)), matrix.turned(emit.fresh("float32", (1, k, n))))
    wanted = Product(1, k, *(matrix.side(facts, each) for each in sides))
    many = dataclasses.replace(facts, compute_units=64)  # so that K is cut
    planned = [recipe for _, recipe in recipes(many, wanted)]
    planned = [each for each in planned if each.parts == 1 or each.tile in (planned[0].tile, planned[-1].tile)]
    assert {each.turned for each in planned} == {False, True} and {each.parts > 1 for each in planned} == {False, True}

    def build(builder: GraphBuilder, values: dict[str, int]) -> None:
        for number in range(len(planned)):
            (made,) = builder.node("addmm", [values["bias"], values["a"], values["b"]])
            builder.output(f"c{number}", "metric", made)

    following = iter(planned)
    monkeypatch.setattr(matrix, "choose", lambda _, wanted: next(following))
    made = run(device, {"a": a, "b": b, "bias": bias}, build)
    for number, recipe in enumerate(planned):
        try:
            assert_close(made[f"c{number}"], a, b, bias)
        except AssertionError as error:
            raise AssertionError(f"{recipe}: {error}") from error


@pytest.mark.parametrize("device", DEVICES)
def test_operands_may_lie_in_memory_in_any_order(device: str) -> None:
    """Transposed, of a wider tensor, backwards, and one matrix for the whole batch."""
    batch, m, n, k = 3, 33, 65, 40
    rng = np.random.default_rng(1)
    ways = ("plain", "turned", "wide", "backwards", "shared")
    arrays, seen = {}, {}
    for side, (rows, columns) in (("a", (m, k)), ("b", (k, n))):
        for way in ways:
            size = {"turned": (columns, rows), "wide": (rows, 2 * columns)}.get(way, (rows, columns))
            array = rng.standard_normal((1 if way == "shared" else batch, *size), np.float32)
            arrays[side + way] = array
            views = {
                "turned": array.swapaxes(1, 2),
                "wide": array[:, :, ::2],
                "backwards": array[:, ::-1, ::-1],
                "shared": np.repeat(array, batch, axis=0),
            }
            seen[side + way] = views.get(way, array)

    def build(builder: GraphBuilder, values: dict[str, int]) -> None:
        views = dict(values)
        for side, (rows, columns) in (("a", (m, k)), ("b", (k, n))):
            stop = {"dim": 2, "start": 0, "stop": 2 * columns, "step": 2}
            (views[side + "turned"],) = builder.node("permute", [values[side + "turned"]], {"dims": [0, 2, 1]})
            (views[side + "wide"],) = builder.node("slice", [values[side + "wide"]], stop)
            (views[side + "backwards"],) = builder.node("flip", [values[side + "backwards"]], {"dims": [1, 2]})
            shape = {"shape": [batch, rows, columns]}
            (views[side + "shared"],) = builder.node("expand", [values[side + "shared"]], shape)
        for left, right in product(ways, ways):
            (made,) = builder.node("bmm", [views["a" + left], views["b" + right]])
            builder.output(f"{left} {right}", "metric", made)

    for name, made in run(device, arrays, build).items():
        left, right = name.split()
        assert_close(made, seen["a" + left], seen["b" + right])


@pytest.mark.parametrize("device", DEVICES)
def test_a_bias_may_have_any_shape_that_broadcasts(device: str) -> None:
    rng = np.random.default_rng(2)
    for m, n in ((33, 37), (1, 37), (33, 1)):
        shapes = {"row": (n,), "column": (m, 1), "number": (), "full": (m, n), "one": (1, 1)}
        arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        arrays |= {"a": rng.standard_normal((m, 50), np.float32), "b": rng.standard_normal((50, n), np.float32)}

        def build(builder: GraphBuilder, values: dict[str, int], names: tuple[str, ...] = tuple(shapes)) -> None:
            for name in names:
                (made,) = builder.node("addmm", [values[name], values["a"], values["b"]])
                builder.output(name, "metric", made)

        for name, made in run(device, arrays, build).items():
            assert_close(made, arrays["a"], arrays["b"], arrays[name])


@pytest.mark.parametrize("device", DEVICES)
def test_long_sums_of_few_results_are_the_same_every_time(device: str) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in ((1, 1, 70_000), (2, 1, 9_001), (5, 7, 20_000)):
        arrays = {"a": rng.standard_normal((m, k), np.float32), "b": rng.standard_normal((k, n), np.float32)}

        def build(builder: GraphBuilder, values: dict[str, int]) -> None:
            for name in ("c", "again"):
                builder.output(name, "metric", builder.node("mm", [values["a"], values["b"]])[0])

        made = run(device, arrays, build)
        assert_close(made["c"], arrays["a"], arrays["b"])
        np.testing.assert_array_equal(made["c"], made["again"])


@pytest.mark.parametrize("device", ["pocl", "pocl_gpu"])
def test_operands_too_large_to_be_packed_at_once_are_packed_in_parts(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(4)
    backend = open_device(device)
    bound = 64 << 10
    for batch, m, n, k in ((1, 300, 100, 130), (1, 100, 300, 130), (6, 70, 40, 130)):
        a, b = rng.standard_normal((batch, m, k), np.float32), rng.standard_normal((batch, k, n), np.float32)
        whole = run(device, {"a": a, "b": b}, _one_bmm)["c"]
        builder = GraphBuilder()
        values = {name: builder.input(name, "constant", "float32", x.shape) for name, x in (("a", a), ("b", b))}
        _one_bmm(builder, values)
        with monkeypatch.context() as patch:
            patch.setattr(matrix, "PANEL_BYTES", bound)
            program = backend.program(builder.build(), verify=True)
        plan = program.plan  # type: ignore[attr-defined]
        written = {each for launch in plan.launches for each in launch.storages()[1]} - {
            each for each in plan.storages if each.number in plan.outputs.values()
        }
        assert max((each.nbytes for each in written), default=0) <= bound * 5 // 4  # zeros fill the last panel
        made = program.run({"a": backend.from_numpy(a), "b": backend.from_numpy(b)})
        assert_close(backend.to_numpy(made["c"]), a, b)
        np.testing.assert_allclose(backend.to_numpy(made["c"]), whole, rtol=1e-4, atol=1e-4)


def _one_bmm(builder: GraphBuilder, values: dict[str, int]) -> None:
    builder.output("c", "metric", builder.node("bmm", [values["a"], values["b"]])[0])
