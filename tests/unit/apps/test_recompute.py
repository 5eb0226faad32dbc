"""Values that are computed again: the same bits, and less memory at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from apps.gradient.backends import open_backend
from apps.gradient.opencl.elementwise import OPS
from apps.gradient.opencl.recompute import recomputed
from boinc_project.contract.graph import Graph, GraphBuilder
from tests import random_graphs

CHEAP = frozenset(OPS)


@settings(max_examples=25, deadline=None)
@given(random_graphs.graphs())
def test_a_graph_in_which_values_are_made_again_computes_the_same_bits(graph: Graph) -> None:
    other = recomputed(graph, CHEAP, least_bytes=1, far=3)
    backend, arrays = open_backend("numpy"), random_graphs.inputs()
    wanted, found = backend.program(graph).run(arrays), backend.program(other).run(arrays)
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array)
    assert other.inputs == graph.inputs and [o.name for o in other.outputs] == [o.name for o in graph.outputs]


def layers(count: int) -> Graph:
    """y = gelu(x w), `count` times, and backward: each layer's x w and its gelu(x w) are read again, the last first."""
    builder = GraphBuilder()
    x = builder.input("x", "batch", "float32", (32, 32))
    w = builder.input("w", "parameter", "float32", (32, 32))
    kept = []
    for _ in range(count):
        (product,) = builder.node("mm", [x, w])
        (flat,) = builder.node("reshape", [product], {"shape": [1024]})
        (active,) = builder.node("gelu", [flat], {"approximate": "none"})
        (x,) = builder.node("reshape", [active], {"shape": [32, 32]})
        kept.append((flat, x))
    grad = x
    for flat, x in reversed(kept):
        (turned,) = builder.node("permute", [x], {"dims": [1, 0]})
        (for_weight,) = builder.node("mm", [turned, grad])
        (row,) = builder.node("reshape", [for_weight], {"shape": [1024]})
        (back,) = builder.node("gelu_backward", [row, flat], {"approximate": "none"})
        (grad,) = builder.node("reshape", [back], {"shape": [32, 32]})
    builder.output("grad", "metric", grad)
    return builder.build()


def test_activations_are_not_kept_for_the_backward_half() -> None:
    graph = layers(12)
    other = recomputed(graph, CHEAP, least_bytes=1024)
    again = [node.op for node in other.nodes].count("gelu") - 12
    assert 6 <= again < 12  # the last layers' are needed at once
    backend = open_backend("numpy")
    draws = np.random.default_rng(1)
    arrays = {name: 0.2 * draws.standard_normal((32, 32)).astype(np.float32) for name in "xw"}
    wanted, found = (backend.program(each).run(arrays)["grad"] for each in (graph, other))
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("count", "least"), [(12, 1 << 20), (2, 1024)], ids=["small values", "few nodes"])
def test_what_gains_nothing_is_left_as_it_is(count: int, least: int) -> None:
    graph = layers(count)
    assert recomputed(graph, CHEAP, least) is graph


def test_a_value_is_kept_where_an_operator_that_made_it_is_not_cheap() -> None:
    graph = layers(12)
    assert recomputed(graph, CHEAP - {"gelu"}, 1024) is graph
