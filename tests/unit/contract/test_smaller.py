"""Graphs of smaller batches: the same inputs and outputs but for the batch, and nothing that parts would do twice."""

from __future__ import annotations

import pytest

from boinc_project.contract.errors import ContractError
from boinc_project.contract.graph import Graph, GraphBuilder
from boinc_project.contract.smaller import check_smaller, whole_batches_only
from tests.tiny_microtask import least_squares


def made(
    batch: int,
    *,
    mask: int | None = None,
    rows: str = "batch",
    output: str = "metric/loss",
    op: str = "",
    buffer: bool = False,
) -> Graph:
    """sum of x * mask[:, None], with variations."""
    build = GraphBuilder()
    seed = build.input("seed", "seed", "int64", ())
    step = build.input("step", "step", "int64", ())
    mean = build.input("buffer/mean", "buffer", "float32", (3,))
    x = build.input("batch/x", rows, "float32", (batch, 3))
    weights = build.input("mask", "mask", "float32", (mask or batch, 1))
    if op:
        attrs = {"shape": [batch, 3], "stream": 0}
        (x,) = build.node("random_uniform", [seed, step], attrs)
    (masked,) = build.node("mul", [x, weights] if mask is None else [x, x])
    (total,) = build.node("sum", [masked], {"dims": [0, 1], "keepdim": False})
    build.output(output, "metric", total)
    if buffer:
        build.output("buffer/mean", "buffer", mean)
    return build.build()


def test_the_same_step_on_half_the_batch_is_accepted() -> None:
    check_smaller(made(4), 4, made(2), 2)
    check_smaller(least_squares(64, 8), 64, least_squares(16, 8), 16)


@pytest.mark.parametrize(
    ("graph", "smaller", "reason"),
    [
        (made(4), made(1), "other inputs"),
        (made(4), made(2, mask=4), "other inputs"),
        (made(4, rows="constant"), made(2, rows="constant"), "other inputs"),
        (made(4), made(2, output="metric/other"), "other outputs"),
        (made(4), made(2, op="random_uniform"), "random numbers"),
        (made(4, op="random_uniform"), made(2), "random numbers"),
        (made(4, buffer=True), made(2, buffer=True), "changes buffers"),
        (least_squares(4, 8), least_squares(2, 9), "other inputs"),
    ],
)
def test_a_graph_that_differs_in_more_than_the_batch_is_refused(graph: Graph, smaller: Graph, reason: str) -> None:
    with pytest.raises(ContractError, match=reason) as caught:
        check_smaller(graph, 4, smaller, 2)
    assert caught.value.fault == "batch"


def test_a_plain_step_may_be_computed_in_parts() -> None:
    assert whole_batches_only(made(4)) == ""
