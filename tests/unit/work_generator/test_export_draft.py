"""The draft leaves out what is not needed and keeps the values."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from boinc_project.contract.opset import OPSET
from tests.graph_oracle import run
from work_generator.export.draft import Draft
from work_generator.export.lowering import LOWERINGS

ROOT = Path(__file__).resolve().parents[3]


def ops(draft: Draft) -> list[str]:
    return [node.op for node in draft.build().nodes]


def test_views_that_change_nothing_vanish() -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (2, 3))
    y = draft.one("reshape", [x], {"shape": [2, 3]})
    y = draft.one("permute", [y], {"dims": [0, 1]})
    y = draft.one("expand", [y], {"shape": [2, 3]})
    y = draft.one("slice", [y], {"dim": 1, "start": 0, "stop": 3, "step": 1})
    y = draft.one("cast", [y], {"dtype": "float32"})
    assert y is x


def test_chains_of_views_become_one() -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (2, 3, 4))
    there = draft.one("permute", [x], {"dims": [2, 0, 1]})
    assert draft.one("permute", [there], {"dims": [1, 2, 0]}) is x
    flat = draft.one("reshape", [draft.one("reshape", [x], {"shape": [6, 4]})], {"shape": [24]})
    draft.output("metric/x", "metric", flat)
    assert ops(draft) == ["reshape"]


def test_equal_nodes_are_computed_once_but_random_ones_are_not() -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (3,))
    seed, step = (draft.input(name, name, "int64", ()) for name in ("seed", "step"))
    assert draft.one("exp", [x]) is draft.one("exp", [x])
    attrs = {"p": 0.5, "shape": [3], "stream": 0}
    assert draft.one("random_bernoulli", [seed, step], attrs) is not draft.one("random_bernoulli", [seed, step], attrs)


def test_numbers_are_folded_and_broadcast_instead_of_expanded() -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (2, 3))
    two = draft.full((2, 3), 2.0, "float32")
    six = draft.one("mul", [two, draft.scalar(3.0, "float32")])
    draft.output("metric/x", "metric", draft.one("add", [x, six]))
    graph = draft.build()
    assert [node.op for node in graph.nodes] == ["full", "add"]
    assert graph.nodes[0].attrs["value"] == 6.0 and graph.nodes[0].outputs[0].shape == ()


def test_an_expand_that_makes_the_shape_stays() -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (1, 3))
    wide = draft.one("expand", [x], {"shape": [2, 3]})
    draft.output("metric/x", "metric", draft.one("mul", [wide, wide]))
    made = run(draft.build(), {"batch/x": np.ones((1, 3), np.float32)}, "numpy")
    assert made["metric/x"].shape == (2, 3)


@pytest.mark.parametrize(("op", "number"), [("mul", 1.0), ("div", 1.0), ("add", 0.0), ("sub", 0.0)])
def test_neutral_operands_vanish(op: str, number: float) -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (2, 3))
    assert draft.one(op, [x, draft.scalar(number, "float32")]) is x
    if op in ("div", "sub"):
        assert draft.one(op, [draft.scalar(number, "float32"), x]) is not x


def test_where_with_a_known_condition_is_its_branch() -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (2, 3))
    y = draft.input("batch/y", "batch", "float32", (2, 3))
    assert draft.one("where", [draft.full((2, 3), True, "bool"), x, y]) is x
    assert draft.one("where", [draft.scalar(False, "bool"), x, y]) is y


def test_nodes_that_no_output_needs_are_left_out() -> None:
    draft = Draft()
    x = draft.input("batch/x", "batch", "float32", (2,))
    draft.one("exp", [x])
    draft.output("metric/x", "metric", draft.one("neg", [x]))
    assert ops(draft) == ["neg"]


def test_scalars_are_rounded_to_their_dtype_as_aten_does() -> None:
    draft = Draft()
    assert draft.scalar(0.1, "float32").uniform == float(np.float32(0.1))
    assert draft.scalar(1e300, "float32").uniform == float("inf")
    assert draft.scalar(True, "int64").uniform == 1
    assert draft.scalar(-3.4028234663852886e38, "float32").uniform == -3.4028234663852886e38


def test_every_operator_of_the_opset_is_documented_for_admins() -> None:
    text = (ROOT / "docs" / "own_model.md").read_text()
    assert set(OPSET) <= set(re.findall(r"`(\w+)`", text))


def test_every_entry_of_the_tables_names_an_aten_operator() -> None:
    assert all(re.fullmatch(r"(aten|prims)\.\w+\.\w+", name) for name in LOWERINGS)
