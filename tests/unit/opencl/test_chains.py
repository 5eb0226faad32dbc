"""Chains: which elementwise operators share a kernel, and what it stores."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from apps.gradient.opencl import elementwise, movement
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.movement import split_view
from apps.gradient.opencl.plan import Plan, make_plan
from apps.gradient.opencl.values import Storage, View, Write
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.graph import GraphBuilder

FACTS = DeviceFacts(
    name="double", vendor="none", platform="none", driver="1", version=(1, 1), kind="gpu", group_form=True,
    vector_width=4, wavefront=64, max_work_group=256, local_memory=32768, compute_units=20, clock_mhz=850,
    max_allocation=128 << 20, global_memory=1 << 30,
)  # fmt: skip
OPS = {**elementwise.OPS, **movement.OPS}


@pytest.fixture
def builder() -> Iterator[GraphBuilder]:
    yield GraphBuilder()


def planned(builder: GraphBuilder, *values: int, consume: frozenset[str] = frozenset()) -> Plan:
    for number, value in enumerate(values):
        builder.output(f"y{number}", "metric", value)
    return make_plan(builder.build(), FACTS, OPS, consume)


def stores(plan: Plan) -> list[int]:
    return [sum(isinstance(each, Write) for each in launch.arguments) for launch in plan.launches]


def test_a_row_of_operators_is_one_launch_that_stores_only_its_end(builder: GraphBuilder) -> None:
    value = builder.input("x", "batch", "float32", (64, 33))
    for op in ("exp", "neg", "tanh", "sqrt", "relu"):
        (value,) = builder.node(op, [value])
    assert stores(planned(builder, value)) == [1]


def test_a_value_that_two_chains_need_is_stored_once(builder: GraphBuilder) -> None:
    x = builder.input("x", "batch", "float32", (8, 4))
    (a,) = builder.node("exp", [x])
    (turned,) = builder.node("permute", [a], {"dims": [1, 0]})
    (b,) = builder.node("neg", [turned])
    (c,) = builder.node("tanh", [a])
    plan = planned(builder, b, c)
    assert stores(plan) == [1, 1, 1]


def test_nothing_is_launched_for_values_that_nobody_reads(builder: GraphBuilder) -> None:
    x = builder.input("x", "batch", "float32", (8,))
    (y,) = builder.node("exp", [x])
    builder.node("neg", [y])
    (flat,) = builder.node("reshape", [x], {"shape": [2, 4]})
    builder.node("tanh", [flat])
    assert stores(planned(builder, y)) == [1]


def test_numbers_are_written_into_the_kernel(builder: GraphBuilder) -> None:
    x = builder.input("x", "batch", "float32", (8,))
    (half,) = builder.node("full", [], {"shape": [], "value": 0.5, "dtype": "float32"})
    (y,) = builder.node("mul", [x, half])
    plan = planned(builder, y)
    assert stores(plan) == [1] and "(real)(0.5f)" in plan.launches[0].source.text


def test_layers_of_different_sizes_share_a_kernel(builder: GraphBuilder) -> None:
    shapes = ((64, 32), (16,), (3, 5, 8))
    inputs = [builder.input(f"x{number}", "batch", "float32", shape) for number, shape in enumerate(shapes)]
    plan = planned(builder, *(builder.node("tanh", [x])[0] for x in inputs))
    assert len({(each.source, each.kernel) for each in plan.launches}) == 1 and len(plan.launches) == 3


def test_an_optimizer_step_writes_over_what_it_replaces() -> None:
    builder = GraphBuilder()
    parameter = builder.input("parameter/w", "parameter", "float32", (100,))
    gradient = builder.input("gradient/w", "gradient", "float32", (100,))
    rate = builder.input("learning_rate", "learning_rate", "float32", ())
    (step,) = builder.node("mul", [gradient, rate])
    (after,) = builder.node("sub", [parameter, step])
    builder.output("parameter/w", "parameter", after)
    plan = make_plan(builder.build(), FACTS, OPS, frozenset({"parameter"}))
    assert plan.taken == {"parameter/w"} and plan.arena_bytes == 0
    untouched = make_plan(builder.build(), FACTS, OPS, frozenset())
    assert untouched.taken == set()


@pytest.mark.parametrize("broadcast", [True, False])
def test_an_input_read_by_others_is_not_written_over(broadcast: bool) -> None:
    """Element i of the new value must not need another element of the old one, nor a later kernel any of them."""
    builder = GraphBuilder()
    parameter = builder.input("parameter/w", "parameter", "float32", (4, 4))
    if broadcast:
        (row,) = builder.node("slice", [parameter], {"dim": 0, "start": 0, "stop": 1, "step": 1})
        (after,) = builder.node("sub", [parameter, row])
    else:
        (after,) = builder.node("neg", [parameter])
    builder.output("parameter/w", "parameter", after)
    if not broadcast:
        (turned,) = builder.node("permute", [parameter], {"dims": [1, 0]})
        (again,) = builder.node("add", [after, turned])
        builder.output("metric/x", "metric", again)
    plan = make_plan(builder.build(), FACTS, OPS, frozenset({"parameter"}))
    assert plan.taken == set()


def test_a_tensor_larger_than_the_largest_buffer_is_refused_before_anything_starts(builder: GraphBuilder) -> None:
    x = builder.input("parameter/w", "parameter", "float32", (50 << 20,))
    (y,) = builder.node("exp", [x])
    with pytest.raises(UnfitHost, match=r"input parameter/w has 209715200 bytes; the largest buffer .* 134217728"):
        planned(builder, y)


def test_a_strided_view_is_reshaped_without_a_copy_where_its_walk_allows_it() -> None:
    storage = Storage(0, "float32", 24)
    turned = View(storage, (4, 6), (1, 4))
    cases = {(2, 2, 6): (2, 1, 4), (4, 2, 3): (1, 12, 4), (24,): None, (8, 3): None, (4, 1, 6): (1, 0, 4)}
    for shape, strides in cases.items():
        view = split_view(turned, shape)
        assert (None if view is None else view.strides) == strides, shape
    values = np.arange(24)
    seen = np.lib.stride_tricks.as_strided(values, (4, 6), (8, 32)).reshape(2, 2, 6)
    again = np.lib.stride_tricks.as_strided(values, (2, 2, 6), (16, 8, 32))
    np.testing.assert_array_equal(seen, again)
