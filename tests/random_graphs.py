"""Random graphs of elementwise operators, views and products, in which old values are read again late."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from boinc_project.contract.graph import Graph, GraphBuilder

SIZE = 6  # every value is [6, 6] or a view of one
_ONE = ("gelu", "neg", "relu", "abs", "silu")
_TWO = ("add", "sub", "mul", "maximum")


@st.composite
def graphs(draw: Any, nodes: int = 40) -> Graph:
    """Two inputs, up to `nodes` operators, and the last few values as outputs."""
    builder = GraphBuilder()
    square = [builder.input(name, "batch", "float32", (SIZE, SIZE)) for name in ("a", "b")]
    for _ in range(draw(st.integers(nodes // 2, nodes))):
        kind = draw(st.sampled_from(("one", "one", "two", "two", "product", "turned", "flat")))
        first, second = (square[draw(st.integers(0, len(square) - 1))] for _ in range(2))
        if kind == "one":
            op = draw(st.sampled_from(_ONE))
            made = builder.node(op, [first], {"approximate": "none"} if op == "gelu" else {})
        elif kind == "two":
            made = builder.node(draw(st.sampled_from(_TWO)), [first, second])
        elif kind == "product":
            (scaled,) = builder.node("sigmoid", [first])
            made = builder.node("mm", [scaled, second])
        elif kind == "turned":
            made = builder.node("permute", [first], {"dims": [1, 0]})
        else:
            (row,) = builder.node("reshape", [first], {"shape": [1, SIZE * SIZE]})
            made = builder.node("reshape", builder.node("relu", [row]), {"shape": [SIZE, SIZE]})
        (value,) = builder.node("clamp", made, {"min": -2.0, "max": 2.0})  # or values would grow without bound
        square += [made[0], value]
    total = square[-1]
    for value in square:
        if draw(st.booleans()):  # half of them are read at the very end
            (total,) = builder.node("add", [total, value])
    for place, value in enumerate([total, *square[-3:]]):
        builder.output(f"out{place}", "metric", value)
    return builder.build()


def inputs() -> dict[str, np.ndarray[Any, Any]]:
    """Values for the inputs of `graphs`."""
    draws = np.random.default_rng(5)
    return {name: draws.standard_normal((SIZE, SIZE)).astype(np.float32) for name in ("a", "b")}
