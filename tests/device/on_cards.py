"""Operators and steps of the examples on a card's backend, measured against the processor."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import operator_oracle
import pytest
import torch
from op_cases import CASES, OpCase

from apps.gradient.backends import Backend, open_backend
from boinc_project.contract.graph import Graph, GraphBuilder
from tests.graph_oracle import distance, inputs_of, run
from work_generator.export import export_gradient
from work_generator.export.program import sample_batch
from work_generator.job import Job

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EXAMPLE_NAMES = ("digits", "digits_cnn", "gpt_chars")  # a small MLP, a small CNN, a small GPT

#: Worst errors of a card's float32 functions, of the value: CUDA's powf has 4 units in the last place, others 1 or 2
#: (CUDA Programming Guide, mathematical functions), and gradients multiply some of them.
ULPS_OF_VALUE = 12 * 2.0**-23

#: Largest relative difference of a tensor after one step (tests/graph_oracle.py): float32 in another order is at 1e-6,
#: TF32 at 4e-4.
ONE_STEP = 2e-5


def assert_operator_is_exact(op: str, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every case of an operator is as exact as eager PyTorch's float32 on the processor, against its float64."""
    monkeypatch.setattr(operator_oracle, "ULPS_OF_VALUE", ULPS_OF_VALUE)
    wrong = []
    for case in CASES[op]:
        try:
            operator_oracle.assert_as_exact_as_eager(case, computed(case, backend))
        except AssertionError as error:
            wrong.append(f"{case.id}: {error}")
    assert not wrong, f"{len(wrong)} of {len(CASES[op])} cases:\n" + "\n".join(wrong)


def computed(case: OpCase, backend: Backend) -> list[Any]:
    arrays = case.arrays()
    builder = GraphBuilder()
    values = [
        None if each is None else builder.input(f"in{place}", "constant", each.dtype.name, each.shape)
        for place, each in enumerate(arrays)
    ]
    for number, value in enumerate(builder.node(case.op, values, case.attrs)):
        builder.output(f"out{number}", "metric", value)
    given = {f"in{place}": backend.from_numpy(each) for place, each in enumerate(arrays) if each is not None}
    made = backend.program(builder.build(), verify=True).run(given)
    return [np.array(backend.to_numpy(each)) for each in made.values()]


@functools.cache
def step_of(name: str) -> tuple[Graph, dict[str, Any]]:
    """The gradient graph of an example for eight samples, and what it is given."""
    job = Job.load(EXAMPLES / name)
    batch = sample_batch(job.data["train"], 8)
    exported = export_gradient(job.model, job.loss, batch)
    return exported.graph, inputs_of(exported, job.model, batch)


def assert_step_agrees(name: str, backend: Backend) -> None:
    """One step of an example agrees with the numpy backend's, gradients and loss."""
    graph, inputs = step_of(name)
    ours, reference = run(graph, inputs, backend), run(graph, inputs, open_backend("numpy", 2))
    apart = distance(ours, {key: torch.from_numpy(array) for key, array in reference.items()})
    assert apart <= ONE_STEP, f"{name}: {apart:.1e}"
    np.testing.assert_allclose(ours["metric/loss"], reference["metric/loss"], rtol=1e-5)


def assert_runs_are_alike(name: str, backend: Backend) -> None:
    """Two runs of one step of an example give the same bits."""
    graph, inputs = step_of(name)
    first, second = run(graph, inputs, backend), run(graph, inputs, backend)
    for key, array in first.items():
        np.testing.assert_array_equal(array, second[key], key)
