"""The OpenCL backend on a real card."""

from __future__ import annotations

from typing import Any

import pytest
from on_cards import EXAMPLE_NAMES, assert_operator_is_exact, assert_runs_are_alike, assert_step_agrees

from apps.gradient.opencl import selftest
from boinc_project.contract.opset import OPSET


def test_the_card_passes_the_test_before_a_task(opencl_card: Any) -> None:
    lines: list[str] = []
    assert selftest.trusted(opencl_card, frozenset(OPSET), lines.append, lambda: None) is not None


@pytest.mark.parametrize("op", OPSET)
def test_operator_is_as_exact_as_on_the_processor(op: str, opencl_card: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_operator_is_exact(op, opencl_card, monkeypatch)


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_a_step_of_an_example_agrees_with_the_processors(name: str, opencl_card: Any) -> None:
    assert_step_agrees(name, opencl_card)


@pytest.mark.parametrize("name", EXAMPLE_NAMES)
def test_two_runs_give_the_same_bits(name: str, opencl_card: Any) -> None:
    assert_runs_are_alike(name, opencl_card)
