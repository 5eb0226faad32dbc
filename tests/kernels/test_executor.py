"""The executor on both backends: order, freeing, folding, failures."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.gradient.backends import Backend, numpy_convolution, open_backend
from apps.gradient.backends.numpy_backend import NumpyBackend
from apps.gradient.backends.torch_backend import TorchBackend
from apps.gradient.executor import ExecutionError, Executor, apply
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.graph import Graph, GraphBuilder


@pytest.fixture(scope="module", params=["numpy", "torch", "torch with deferred checks"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    threads = torch.get_num_threads()
    if request.param == "torch with deferred checks":  # as on a card
        yield TorchBackend(torch.device("cpu"), 1, deferred_checks=True)
    else:
        yield open_backend(request.param, threads=1, device="cpu")
    torch.set_num_threads(threads)


def chain(length: int) -> Graph:
    """x -> neg -> neg ... -> y."""
    builder = GraphBuilder()
    value = builder.input("x", "batch", "float32", (3,))
    for _ in range(length):
        (value,) = builder.node("neg", [value])
    builder.output("y", "metric", value)
    return builder.build()


def test_a_graph_gives_its_outputs_by_name(backend: Backend) -> None:
    x = np.array([1, 2, 3], np.float32)
    outputs = Executor(chain(3), backend).run({"x": backend.from_numpy(x)})
    np.testing.assert_array_equal(backend.to_numpy(outputs["y"]), -x)


def test_one_operator_runs_without_a_graph(backend: Backend) -> None:
    a, b = (backend.from_numpy(np.full(3, v, np.float32)) for v in (1, 2))
    (total,) = apply(backend, "add", [a, b])
    np.testing.assert_array_equal(backend.to_numpy(total), np.full(3, 3, np.float32))


class Watching(NumpyBackend):
    """Counts how many of the arrays made by `neg` are alive when each `neg` begins."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.alive: list[int] = []
        self._made: list[Any] = []

        def neg(x: Any) -> Any:
            self.alive.append(sum(ref() is not None for ref in self._made))
            out = np.asarray(np.negative(x))
            self._made.append(weakref.ref(out))
            return out

        self.ops: Mapping[str, Any] = {**NumpyBackend.ops, "neg": lambda call: neg}


def test_values_are_freed_after_their_last_use() -> None:
    watching = Watching()
    Executor(chain(20), watching).run({"x": np.ones(3, np.float32)})
    assert max(watching.alive) == 1


def test_a_value_that_nobody_reads_is_freed_at_once() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "batch", "float32", (3,))
    for _ in range(5):
        (last,) = builder.node("neg", [x])
    builder.output("y", "metric", last)
    watching = Watching()
    Executor(builder.build(), watching).run({"x": np.ones(3, np.float32)})
    assert watching.alive == [0] * 5


def test_values_without_inputs_are_computed_once() -> None:
    builder = GraphBuilder()
    x = builder.input("x", "batch", "float32", (3,))
    (two,) = builder.node("full", [], {"shape": [], "value": 2.0, "dtype": "float32"})
    (minus_two,) = builder.node("neg", [two])
    (y,) = builder.node("mul", [x, minus_two])
    builder.output("y", "metric", y)
    watching = Watching()
    executor = Executor(builder.build(), watching)
    for _ in range(3):
        np.testing.assert_array_equal(executor.run({"x": np.ones(3, np.float32)})["y"], np.full(3, -2, np.float32))
    assert len(watching.alive) == 1


def test_large_constants_are_not_kept() -> None:
    builder = GraphBuilder()
    (zeros,) = builder.node("full", [], {"shape": [3 << 20], "value": 0.0, "dtype": "float32"})
    (y,) = builder.node("neg", [zeros])
    builder.output("y", "metric", y)
    watching = Watching()
    executor = Executor(builder.build(), watching)
    assert watching.alive == []
    executor.run({})
    executor.run({})
    assert len(watching.alive) == 2


@pytest.mark.parametrize("exponent", [2.0, 3.0, 0.5, -0.5, -1.0, 1.0, 0.0, 4.0, 2.7])
def test_a_constant_exponent_gives_the_same_power_as_a_tensor_of_it(backend: Backend, exponent: float) -> None:
    x = np.random.default_rng(0).uniform(0.1, 3, 65).astype(np.float32)
    builder = GraphBuilder()
    base = builder.input("x", "batch", "float32", x.shape)
    given = builder.input("e", "batch", "float32", ())
    (constant,) = builder.node("full", [], {"shape": [], "value": exponent, "dtype": "float32"})
    for name, value in (("constant", constant), ("given", given)):
        builder.output(name, "metric", builder.node("pow", [base, value])[0])
    inputs = {"x": backend.from_numpy(x), "e": backend.from_numpy(np.array(exponent, np.float32))}
    made = Executor(builder.build(), backend, verify=True).run(inputs)
    exact = x.astype(np.float64) ** np.float64(np.float32(exponent))
    for value in made.values():
        np.testing.assert_allclose(backend.to_numpy(value), exact, rtol=1e-6)


OUT_OF_RANGE: list[tuple[str, list[Any], dict[str, Any]]] = [
    ("gather", [(3,), [3]], {"dim": 0}),
    ("gather", [(3,), [-1]], {"dim": 0}),
    ("scatter", [(3,), [5], (1,)], {"dim": 0}),
    ("scatter_add", [(3,), [-2], (1,)], {"dim": 0}),
    ("index", [(3,), [3]], {"dim": 0}),
    ("index", [(3,), [-4]], {"dim": 0}),
    ("index_put", [(3,), (1,), [3]], {"dim": 0, "accumulate": False}),
    ("index_put", [(3,), (1,), [-4]], {"dim": 0, "accumulate": True}),
    ("index_select", [(3,), [7]], {"dim": 0}),
    ("index_select", [(3,), [-1]], {"dim": 0}),
    ("embedding", [(3, 2), [3]], {}),
    ("embedding", [(3, 2), [2**62]], {}),
    ("embedding_dense_backward", [(1, 2), [3]], {"num_weights": 3, "padding_idx": -1}),
    ("embedding_dense_backward", [(1, 2), [-1]], {"num_weights": 3, "padding_idx": -1}),
    ("nll_loss_forward", [(1, 3), [3], None], {"reduction": "sum", "ignore_index": -100}),
    ("nll_loss_backward", [(), (1, 3), [-1], None, ()], {"reduction": "sum", "ignore_index": -100}),
]


@pytest.mark.parametrize(("op", "inputs", "attrs"), OUT_OF_RANGE, ids=lambda value: str(value))
def test_an_index_out_of_range_is_an_error_that_names_the_node(
    backend: Backend, op: str, inputs: list[Any], attrs: dict[str, Any]
) -> None:
    arrays = {
        f"in{i}": np.array(each, np.int64) if isinstance(each, list) else np.ones(each, np.float32)
        for i, each in enumerate(inputs)
        if each is not None
    }
    builder = GraphBuilder()
    values = {name: builder.input(name, "batch", a.dtype.name, a.shape) for name, a in arrays.items()}
    made = builder.node(op, [values.get(f"in{i}") for i in range(len(inputs))], attrs, "model.py:7 wte")
    builder.output("y", "metric", made[0])
    executor = backend.program(builder.build())
    with pytest.raises(ExecutionError, match=rf"node 0 {op}\(.*int64.*\) at model.py:7 wte failed: index") as failure:
        executor.run({name: backend.from_numpy(array) for name, array in arrays.items()})
    assert (failure.value.index, failure.value.op, failure.value.where) == (0, op, "model.py:7 wte")


def test_a_max_pool_index_outside_its_plane_is_refused(backend: Backend) -> None:
    attrs = {"kernel_size": [2, 2], "stride": [2, 2], "padding": [0, 0], "dilation": [1, 1], "ceil_mode": False}
    grad, x = (backend.from_numpy(np.ones(shape, np.float32)) for shape in ((1, 1, 1, 1), (1, 1, 2, 2)))
    for index in (-1, 4):
        indices = backend.from_numpy(np.full((1, 1, 1, 1), index, np.int64))
        with pytest.raises(IndexError, match="out of range"):
            apply(backend, "max_pool2d_with_indices_backward", [grad, x, indices], attrs)


@pytest.mark.parametrize("op", ["floor_divide", "remainder", "fmod"])
def test_integer_division_by_zero_is_an_error_and_the_lowest_integer_is_not(backend: Backend, op: str) -> None:
    lowest, zero, minus_one = (backend.from_numpy(np.array([v], np.int64)) for v in (np.iinfo(np.int64).min, 0, -1))
    with pytest.raises(ZeroDivisionError):
        apply(backend, op, [lowest, zero])
    with backend.scope():
        (result,) = apply(backend, op, [lowest, minus_one])
    assert backend.to_numpy(result)[0] in (0, np.iinfo(np.int64).min)


def test_a_negative_integer_power_is_an_error(backend: Backend) -> None:
    two, minus_one = (backend.from_numpy(np.array([v], np.int64)) for v in (2, -1))
    with pytest.raises(ValueError, match=r"[Ii]ntegers to negative integer powers are not allowed"):
        apply(backend, "pow", [two, minus_one])


def test_a_missing_or_wrong_input_is_named(backend: Backend) -> None:
    executor = Executor(chain(1), backend)
    with pytest.raises(ValueError, match="'x' is missing"):
        executor.run({})
    for wrong in (np.ones(4, np.float32), np.ones(3, np.int64)):
        with pytest.raises(ValueError, match=r"'x' must be float32\[3\]"):
            executor.run({"x": backend.from_numpy(wrong)})


class Stop(Exception):
    pass


def test_check_is_called_before_every_node_and_may_stop_the_run(backend: Backend) -> None:
    calls = []

    def check() -> None:
        calls.append(1)
        if len(calls) == 4:
            raise Stop

    with pytest.raises(Stop):
        Executor(chain(10), backend).run({"x": backend.from_numpy(np.ones(3, np.float32))}, check)
    assert len(calls) == 4


def test_products_take_broadcast_operands(backend: Backend) -> None:
    """An expanded tensor has strides of zero, which BLAS does not know."""
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((4, 5)).astype(np.float32), rng.standard_normal((3, 5, 6)).astype(np.float32)
    builder = GraphBuilder()
    row, right = (builder.input(name, "batch", "float32", x.shape) for name, x in (("a", a[:1]), ("b", b)))
    (left,) = builder.node("expand", [row], {"shape": [3, 4, 5]})
    builder.output("y", "metric", builder.node("bmm", [left, right])[0])
    inputs = {"a": backend.from_numpy(a[:1]), "b": backend.from_numpy(b)}
    made = backend.to_numpy(Executor(builder.build(), backend, verify=True).run(inputs)["y"])
    np.testing.assert_allclose(made, np.broadcast_to(a[:1], (3, 4, 5)) @ b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("limit", [1, 50, 700, 100_000])
def test_convolutions_copied_in_small_pieces_give_the_same(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(numpy_convolution, "WINDOW_ELEMENTS", limit)
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((3, 4, 9, 7), (6, 2, 3, 3)))
    attrs: dict[str, Any] = {"stride": [2, 1], "padding": [1, 2], "dilation": [2, 1], "groups": 2}
    attrs |= {"transposed": False, "output_padding": [0, 0]}
    made = {}
    for name in ("numpy", "torch"):
        backend = open_backend(name, 1, "cpu")
        tensors = [backend.from_numpy(x), backend.from_numpy(w)]
        (out,) = apply(backend, "convolution", [*tensors, None], attrs)
        grads = apply(backend, "convolution_backward", [out, *tensors], {**attrs, "output_mask": [True] * 3})
        made[name] = [backend.to_numpy(each) for each in (out, *grads)]
    for ours, theirs in zip(made["numpy"], made["torch"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_read_only_and_strided_arrays_are_accepted(backend: Backend) -> None:
    x = np.arange(6, dtype=np.float32)[::-2]
    x.flags.writeable = False
    outputs = Executor(chain(1), backend).run({"x": backend.from_numpy(x)})
    np.testing.assert_array_equal(backend.to_numpy(outputs["y"]), -x)


def test_backends_and_devices_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match="choose one of"):
        open_backend("abacus")
    for name, device in (("numpy", "cuda"), ("torch", "tpu"), ("torch", "cuda:999")):
        with pytest.raises(UnfitHost):
            open_backend(name, 1, device)


# --- broadcasting and movement: any shapes, the two backends against each other ---------------------------------------

_SHAPES = st.lists(st.integers(0, 4), max_size=4)


@settings(max_examples=60, deadline=None)
@given(_SHAPES, st.data())
def test_backends_agree_on_views_of_views(shape: list[int], data: st.DataObject) -> None:
    """permute -> slice -> expand -> flip -> add -> sum -> reshape over arbitrary shapes."""
    builder = GraphBuilder()
    value = builder.input("x", "batch", "float32", shape)
    (value,) = builder.node("permute", [value], {"dims": data.draw(st.permutations(range(len(shape))))})
    size = list(builder.type_of(value).shape)
    if size:
        dim = data.draw(st.integers(0, len(size) - 1))
        start = data.draw(st.integers(0, size[dim]))
        stop = data.draw(st.integers(start, size[dim]))
        region = {"dim": dim, "start": start, "stop": stop, "step": data.draw(st.integers(1, 3))}
        (value,) = builder.node("slice", [value], region)
        dims = data.draw(st.lists(st.integers(0, len(size) - 1), unique=True))
        (value,) = builder.node("flip", [value], {"dims": dims})
    wide = [2, *builder.type_of(value).shape]
    (expanded,) = builder.node("expand", [value], {"shape": wide})
    (value,) = builder.node("add", [expanded, value])
    dims = data.draw(st.lists(st.integers(0, len(wide) - 1), unique=True))
    (total,) = builder.node("sum", [value], {"dims": dims, "keepdim": data.draw(st.booleans())})
    flat = int(np.prod(builder.type_of(total).shape))
    builder.output("flat", "metric", builder.node("reshape", [total], {"shape": [flat]})[0])
    builder.output("value", "metric", value)
    graph = builder.build()
    x = np.random.default_rng(len(shape)).integers(-9, 9, shape).astype(np.float32)
    made = []
    for name in ("numpy", "torch"):
        backend = open_backend(name, 1, "cpu")
        outputs = Executor(graph, backend, verify=True).run({"x": backend.from_numpy(x)})
        made.append({key: backend.to_numpy(each) for key, each in outputs.items()})
    for key in made[0]:
        np.testing.assert_array_equal(made[0][key], made[1][key])
