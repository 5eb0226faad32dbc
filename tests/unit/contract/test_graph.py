"""The graph's file form: canonical, strict against hostile documents; and what it says about cost."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project.contract import canonical
from boinc_project.contract.errors import ContractError
from boinc_project.contract.estimates import memory_bytes, step_flops, tensor_bytes
from boinc_project.contract.graph import Graph, GraphBuilder, GraphError
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import update_types
from tests.mutations import VALUES, paths, replaced
from tests.tiny_microtask import least_squares

GRAPH = least_squares(batch=8, features=4)
TEXT = GRAPH.to_json()
PATHS = paths(json.loads(TEXT))[1:]


def changed(*path: Any, value: Any) -> bytes:
    """The document with one value replaced."""
    return json.dumps(replaced(json.loads(TEXT), path, value)).encode()


def test_a_graph_is_read_back_as_it_was_written() -> None:
    assert Graph.from_bytes(GRAPH.to_bytes()) == GRAPH
    assert Graph.from_json(TEXT).to_json() == TEXT
    assert Graph.from_json(TEXT).digest() == GRAPH.digest()


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (changed("format", value="pickle"), "format"),
        (changed("opset", value=2), "opset"),
        (changed("nodes", 0, "op", value="exec"), "operator"),
        (changed("nodes", 0, "inputs", value=[0, 99]), "order"),
        (changed("nodes", 0, "inputs", value=[0, 6]), "order"),
        (changed("nodes", 0, "inputs", value=[0, -1]), "type"),
        (changed("nodes", 0, "inputs", value=[0]), "types"),
        (changed("nodes", 0, "inputs", value=[0, None]), "types"),
        (changed("nodes", 0, "outputs", value=[]), "types"),
        (changed("nodes", 0, "outputs", 0, "shape", value=[8, 5]), "types"),
        (changed("nodes", 2, "attrs", "shape", value=[8, 2**40]), "types"),
        (changed("nodes", 2, "attrs", "more", value=1), "types"),
        (changed("nodes", 2, "where", value="x" * 201), "too_large"),
        (changed("inputs", 0, "kind", value="path"), "kind"),
        (changed("inputs", 0, "dtype", value="float64"), "invalid"),
        (changed("inputs", 0, "shape", value=[2**40, 2**40]), "too_large"),
        (changed("inputs", 0, "shape", value=[-1, 4]), "invalid"),
        (changed("inputs", 0, "name", value="batch/x"), "duplicate_name"),
        (changed("inputs", 0, "name", value="a\nb"), "name"),
        (changed("outputs", 0, "kind", value="file"), "kind"),
        (changed("outputs", 0, "value", value=10_000), "invalid"),
        (changed("outputs", 0, "value", value=-1), "invalid"),
        (b"[]", "type"),
        (b"{}", "missing_key"),
    ],
)
def test_malformed_graphs_are_refused_by_name(text: bytes, fault: str) -> None:
    with pytest.raises(ContractError) as caught:
        Graph.from_json(text)
    assert caught.value.fault == fault


def test_a_refused_node_is_named_with_its_operator_and_shapes() -> None:
    with pytest.raises(GraphError, match=r"graph node 0 \(mm\): mm\(float32\[8,4\], none\)"):
        Graph.from_json(changed("nodes", 0, "inputs", value=[1, None]))


def test_a_bomb_in_the_place_of_a_graph_is_refused_before_it_is_expanded() -> None:
    with pytest.raises(ContractError) as caught:
        Graph.from_bytes(canonical.compress(bytes(33 << 20)))
    assert caught.value.fault == "too_large"


@settings(max_examples=400)
@given(st.sampled_from(PATHS), VALUES, st.booleans())
def test_mutated_graphs_raise_contract_errors_or_are_read_to_the_same_graph(
    path: tuple[Any, ...], value: Any, remove: bool
) -> None:
    document = replaced(json.loads(TEXT), path, value, remove=remove)
    try:
        found = Graph.from_json(json.dumps(document).encode())
    except ContractError:
        return
    assert Graph.from_json(found.to_json()) == found
    found.flops()
    found.peak_bytes()


@settings(max_examples=200)
@given(st.integers(0, len(TEXT) - 1), st.integers(0, 255))
def test_graphs_with_a_damaged_byte_raise_contract_errors_or_are_read(place: int, byte: int) -> None:
    damaged = bytearray(TEXT)
    damaged[place] = byte
    with contextlib.suppress(ContractError):
        Graph.from_json(bytes(damaged))


def test_peak_bytes_frees_each_value_after_its_last_use() -> None:
    build = GraphBuilder()
    value = build.input("x", "batch", "float32", [1000])
    for _ in range(10):
        (value,) = build.node("neg", [value])
    build.output("metric/loss", "metric", value)
    # The input (kept), the value read and the value made.
    assert build.build().peak_bytes() == 3 * 4000


def test_peak_bytes_keeps_what_a_later_node_or_an_output_still_needs() -> None:
    build = GraphBuilder()
    x = build.input("x", "batch", "float32", [1000])
    (kept,) = build.node("neg", [x])
    (other,) = build.node("exp", [x])
    (third,) = build.node("add", [other, other])
    (total,) = build.node("add", [third, kept])
    build.output("metric/a", "metric", total)
    build.output("metric/b", "metric", other)
    assert build.build().peak_bytes() == 5 * 4000


def test_flops_of_a_step_are_those_of_its_matrix_products_and_little_more() -> None:
    graph = least_squares(batch=64, features=128)
    products = 2 * (2 * 64 * 128 * 128)
    assert products <= step_flops(graph, None) <= 1.1 * products
    assert step_flops(graph, graph) == 2 * step_flops(graph, None)


def test_memory_estimate_covers_values_inputs_data_and_the_update() -> None:
    types = update_types(GRAPH, "gradient", 3)
    inputs = tensor_bytes(each.type for each in GRAPH.inputs)
    expected = GRAPH.peak_bytes() + inputs + 1000 + 3 * tensor_bytes(types.values())
    assert memory_bytes(GRAPH, None, types, 1000) == expected
    assert memory_bytes(GRAPH, GRAPH, types, 0) > memory_bytes(GRAPH, None, types, 0)


@pytest.mark.parametrize(
    ("mode", "names"),
    [
        ("gradient", {"gradient/w", "metric/loss", "metric/weight"}),
        ("local-steps", {"delta/w", "metric/loss", "metric/weight"}),
        ("evaluation", {"metric/loss", "metric/weight"}),
    ],
)
def test_what_a_microtask_gives_back_depends_on_its_mode(mode: str, names: set[str]) -> None:
    types = update_types(GRAPH, mode, 5)
    assert set(types) == names
    assert types["metric/loss"] == TensorType("float32", (5,))
