"""Checks that look when a run has ended find what checks before each node find, and nothing in a run waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.gradient.backends import torch_checks
from apps.gradient.backends.torch_backend import TorchBackend
from apps.gradient.executor import ExecutionError
from boinc_project.contract.graph import Graph, GraphBuilder

Array = np.ndarray[Any, Any]


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[TorchBackend, TorchBackend]]:
    threads = torch.get_num_threads()
    yield TorchBackend(torch.device("cpu"), 1, False), TorchBackend(torch.device("cpu"), 1, True)
    torch.set_num_threads(threads)


def graph_of(op: str, inputs: dict[str, Array], attrs: dict[str, Any]) -> Graph:
    builder = GraphBuilder()
    values = [builder.input(name, "batch", array.dtype.name, array.shape) for name, array in inputs.items()]
    builder.output("y", "metric", builder.node(op, values, attrs)[0])
    return builder.build()


def outcome(backend: TorchBackend, graph: Graph, inputs: dict[str, Array]) -> Any:
    """The result, or what went wrong: the error's text and its cause's kind."""
    try:
        made = backend.program(graph).run({name: backend.from_numpy(array) for name, array in inputs.items()})
    except ExecutionError as error:
        return str(error), type(error.__cause__)
    return backend.to_numpy(made["y"]).tolist()


INDEX_OPS: dict[str, tuple[Callable[[int, Array], dict[str, Array]], dict[str, Any]]] = {
    "gather": (lambda size, i: {"x": np.arange(size, dtype=np.float32), "i": i}, {"dim": 0}),
    "index": (lambda size, i: {"x": np.arange(size, dtype=np.float32), "i": i}, {"dim": 0}),
    "index_select": (lambda size, i: {"x": np.arange(size, dtype=np.float32), "i": i}, {"dim": 0}),
    "embedding": (lambda size, i: {"x": np.arange(2 * size, dtype=np.float32).reshape(size, 2), "i": i}, {}),
    "scatter": (
        lambda size, i: {"x": np.zeros(size, np.float32), "i": i[:1], "src": np.ones(1, np.float32)},
        {"dim": 0},
    ),
    "scatter_add": (
        lambda size, i: {"x": np.zeros(size, np.float32), "i": i, "src": np.ones(i.size, np.float32)},
        {"dim": 0},
    ),
}


@settings(max_examples=60, deadline=None)
@given(
    op=st.sampled_from(sorted(INDEX_OPS)),
    size=st.integers(1, 4),
    index=st.lists(st.integers(-6, 6), min_size=1, max_size=4),
)
def test_indices_are_judged_alike_before_and_after(
    both: tuple[TorchBackend, TorchBackend], op: str, size: int, index: list[int]
) -> None:
    make, attrs = INDEX_OPS[op]
    inputs = make(size, np.array(index))
    graph = graph_of(op, inputs, attrs)
    before, after = (outcome(backend, graph, inputs) for backend in both)
    assert before == after
    least = -size if op == "index" else 0
    used = index[:1] if op == "scatter" else index
    assert isinstance(before, tuple) is any(not least <= each < size for each in used)
    if isinstance(before, tuple):
        said = int(before[0].split("failed: index ")[1].split(" ")[0])
        assert not least <= said < size, "the index that is named is a wrong one"


@settings(max_examples=60, deadline=None)
@given(
    op=st.sampled_from(["floor_divide", "remainder", "fmod", "pow"]),
    values=st.lists(st.tuples(st.integers(-9, 9), st.integers(-2, 3)), min_size=1, max_size=4),
    dtype=st.sampled_from(["int64", "int32"]),
)
def test_divisors_and_powers_are_judged_alike_before_and_after(
    both: tuple[TorchBackend, TorchBackend], op: str, values: list[tuple[int, int]], dtype: str
) -> None:
    a, b = (np.array(column, dtype) for column in zip(*values, strict=True))
    graph = graph_of(op, {"a": a, "b": b}, {})
    before, after = (outcome(backend, graph, {"a": a.copy(), "b": b.copy()}) for backend in both)
    assert before == after
    assert isinstance(before, tuple) is bool((b < 0).any() if op == "pow" else (b == 0).any())


@settings(max_examples=60, deadline=None)
@given(targets=st.lists(st.integers(-2, 4), min_size=1, max_size=5), ignore=st.sampled_from([-100, -1, 0, 2, 4]))
def test_targets_are_judged_alike_before_and_after(
    both: tuple[TorchBackend, TorchBackend], targets: list[int], ignore: int
) -> None:
    rows = np.linspace(-1, 1, 3 * len(targets), dtype=np.float32).reshape(-1, 3)
    builder = GraphBuilder()
    x = builder.input("x", "batch", "float32", rows.shape)
    target = builder.input("target", "batch", "int64", (len(targets),))
    attrs = {"reduction": "sum", "ignore_index": ignore}
    builder.output("y", "metric", builder.node("nll_loss_forward", [x, target, None], attrs)[0])
    inputs = {"x": rows, "target": np.array(targets)}
    before, after = (outcome(backend, builder.build(), inputs) for backend in both)
    assert before == after
    assert isinstance(before, tuple) is any(each != ignore and not 0 <= each < 3 for each in targets)


def lookups(count: int) -> Graph:
    """Several lookups in one table, each with its own index."""
    builder = GraphBuilder()
    table = builder.input("table", "parameter", "float32", (3, 2))
    indices = [builder.input(f"i{number}", "batch", "int64", (2,)) for number in range(count)]
    for number, index in enumerate(indices):
        (found,) = builder.node("embedding", [table, index], {}, f"model.py:{number}")
        builder.output(f"y{number}", "metric", found)
    return builder.build()


def given_to(backend: TorchBackend, indices: list[list[int]]) -> dict[str, Any]:
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    return {
        "table": backend.from_numpy(table),
        **{f"i{number}": backend.from_numpy(np.array(each)) for number, each in enumerate(indices)},
    }


def test_the_first_wrong_node_is_named_and_the_next_run_is_judged_by_itself(
    both: tuple[TorchBackend, TorchBackend],
) -> None:
    _, backend = both
    program = backend.program(lookups(4))
    for _ in range(2):
        with pytest.raises(ExecutionError, match=r"node 2 embedding\(.* at model.py:2 failed: index 3 ") as raised:
            program.run(given_to(backend, [[0, 1], [2, 2], [0, 3], [7, 0]]))
        assert raised.value.index == 2 and isinstance(raised.value.__cause__, IndexError)
        made = program.run(given_to(backend, [[0, 1]] * 4))
        assert backend.to_numpy(made["y3"]).tolist() == [[0, 1], [2, 3]]


def test_a_run_that_was_stopped_leaves_nothing_to_the_next(both: tuple[TorchBackend, TorchBackend]) -> None:
    _, backend = both
    program = backend.program(lookups(2))
    calls = iter([None, KeyboardInterrupt()])

    def stop() -> None:
        error = next(calls)
        if error is not None:
            raise error

    with pytest.raises(KeyboardInterrupt):
        program.run(given_to(backend, [[9, 9], [0, 0]]), stop)
    program.run(given_to(backend, [[0, 0], [0, 0]]))


def test_constants_are_judged_when_the_graph_is_prepared(both: tuple[TorchBackend, TorchBackend]) -> None:
    builder = GraphBuilder()
    (x,) = builder.node("arange", [], {"start": 0, "step": 1, "length": 3, "dtype": "int64"})
    (index,) = builder.node("full", [], {"shape": [2], "value": 5, "dtype": "int64"})
    (found,) = builder.node("index_select", [x, index], {"dim": 0})
    builder.output("y", "metric", found)
    for backend in both:
        with pytest.raises(ExecutionError, match=r"node 2 index_select.*index 5 is out of range"):
            backend.program(builder.build())


@pytest.mark.parametrize("op", ["gather", "index", "index_select"])
def test_no_index_into_nothing_is_harmless(both: tuple[TorchBackend, TorchBackend], op: str) -> None:
    inputs = {"x": np.zeros(0, np.float32), "i": np.zeros(0, np.int64)}
    assert [outcome(backend, graph_of(op, inputs, {"dim": 0}), inputs) for backend in both] == [[], []]
    inputs["i"] = np.zeros(1, np.int64)
    for backend in both:
        text, kind = outcome(backend, graph_of(op, inputs, {"dim": 0}), inputs)
        assert "out of range for a dimension of size 0" in text and issubclass(kind, IndexError)


def test_nothing_in_a_run_waits_for_the_device(
    both: tuple[TorchBackend, TorchBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a card each of these stops the host until everything before it has been computed."""
    _, backend = both
    builder = GraphBuilder()
    table = builder.input("table", "parameter", "float32", (3, 2))
    index = builder.input("index", "batch", "int64", (4,))
    numbers = builder.input("numbers", "batch", "int64", (4,))
    seed, step = (builder.input(name, name, "int64", ()) for name in ("seed", "step"))
    (rows,) = builder.node("embedding", [table, index])
    (kept,) = builder.node("index_select", [rows, numbers], {"dim": 0})
    (halves,) = builder.node("floor_divide", [index, numbers])
    (powers,) = builder.node("pow", [index, numbers])
    (scores,) = builder.node("log_softmax", [kept], {"dim": 1})
    loss, _ = builder.node("nll_loss_forward", [scores, numbers, None], {"reduction": "sum", "ignore_index": -100})
    (mask,) = builder.node("random_bernoulli", [seed, step], {"shape": [4, 2], "p": 0.5, "stream": 1})
    for name, value in (("a", halves), ("b", powers), ("c", loss), ("d", mask)):
        builder.output(name, "metric", value)
    program = backend.program(builder.build())
    given = {
        "table": torch.ones(3, 2), "index": torch.tensor([0, 1, 2, 0]), "numbers": torch.tensor([1, 1, 1, 1]),
        "seed": torch.tensor(1), "step": torch.tensor(2),
    }  # fmt: skip
    settled = []
    settle = backend.checks.settle

    def refuse(*_: Any) -> Any:
        raise AssertionError("the host waited for the device in the middle of a run")

    def late() -> Any:
        monkeypatch.undo()
        settled.append(len(backend.checks._kept))
        return settle()

    for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    monkeypatch.setattr(backend.checks, "settle", late)
    program.run(given)
    assert settled == [5]


def test_a_call_that_is_of_no_node_is_a_bug(both: tuple[TorchBackend, TorchBackend]) -> None:
    _, backend = both
    program = backend.program(lookups(2))
    assert isinstance(program, torch_checks.CheckedProgram)
    calls = [program._call(node) for node in program.graph.nodes]
    assert [program._place_of(call) for call in calls] == [0, 1]
    other = backend.program(lookups(1))
    assert isinstance(other, torch_checks.CheckedProgram)
    with pytest.raises(AssertionError, match="of no node"):
        other._place_of(calls[1])
