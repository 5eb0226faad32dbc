"""The server's optimizers take the steps of torch.optim."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from assimilator.optimizers import PIECE_ELEMENTS, AdamW, Optimizer, Sgd, step_in_place
from boinc_project.contract.update import LARGEST

STEPS = 10
SHAPES = {"a": (7, 5), "b": (), "c": (11,)}
CASES: list[tuple[Optimizer, type[torch.optim.Optimizer], dict[str, Any]]] = [
    (Sgd(), torch.optim.SGD, {}),
    (Sgd(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    (Sgd(momentum=0.9), torch.optim.SGD, {"momentum": 0.9}),
    (Sgd(momentum=0.9, weight_decay=0.01), torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (Sgd(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (
        Sgd(momentum=0.8, nesterov=True, weight_decay=0.05),
        torch.optim.SGD,
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.05},
    ),
    (AdamW(), torch.optim.AdamW, {"weight_decay": 0.0}),
    (AdamW(weight_decay=0.1), torch.optim.AdamW, {"weight_decay": 0.1}),
    (AdamW((0.8, 0.95), 1e-6, 0.01), torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.01}),
]


@pytest.mark.parametrize(("ours", "theirs", "options"), CASES, ids=lambda value: str(value)[:60])
def test_ten_steps_with_a_changing_rate_equal_torch(
    ours: Optimizer, theirs: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    generator = np.random.default_rng(6)
    values = {n: generator.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
    parameters = {n: torch.nn.Parameter(torch.tensor(a)) for n, a in values.items()}
    optimizer = theirs(parameters.values(), lr=0.1, **options)
    state: dict[str, Any] = {}
    for number in range(1, STEPS + 1):
        rate = 0.1 / number
        gradient = {n: generator.standard_normal(s).astype(np.float32) for n, s in SHAPES.items()}
        gradient["c"][:3] = 0  # a row that an embedding did not see
        optimizer.param_groups[0]["lr"] = rate
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(gradient[name])
        optimizer.step()
        values, state = ours.step(values, gradient, state, number, rate)
        for name, parameter in parameters.items():
            assert values[name].dtype == np.float32 and values[name].shape == SHAPES[name]
            np.testing.assert_allclose(values[name], parameter.detach().numpy(), rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("ours", [case[0] for case in CASES], ids=str)
def test_a_step_changes_neither_its_parameters_nor_its_state_and_keeps_float32(ours: Optimizer) -> None:
    parameters = {"w": np.ones(3, np.float32)}
    gradient = {"w": np.full(3, 0.5, np.float32)}
    _, state = ours.step(parameters, gradient, {}, 1, 0.1)
    kept = {name: array.copy() for name, array in state.items()}
    ours.step(parameters, gradient, state, 2, 0.1)
    np.testing.assert_array_equal(parameters["w"], 1)
    np.testing.assert_array_equal(gradient["w"], np.float32(0.5))
    for name, array in state.items():
        np.testing.assert_array_equal(array, kept[name])
        assert array.dtype == np.float32


@pytest.mark.parametrize("ours", [case[0] for case in CASES], ids=str)
def test_steps_in_place_give_the_bits_of_steps_on_whole_tensors(ours: Optimizer) -> None:
    generator = np.random.default_rng(7)
    shapes = {**SHAPES, "layer/d": (PIECE_ELEMENTS + 3,), "e": (3, PIECE_ELEMENTS), "f": (0, 2)}
    whole = {n: np.asarray(generator.standard_normal(s), np.float32) for n, s in shapes.items()}
    frozen = {n: a.copy() for n, a in whole.items()}
    for array in frozen.values():
        array.flags.writeable = False  # as tensors that were read from bytes
    place: dict[str, Any] = dict(frozen)
    state: dict[str, Any] = {}
    state_in_place: dict[str, Any] = {}
    for number in (1, 2, 3):
        gradient = {n: np.asarray(generator.standard_normal(s), np.float32) for n, s in shapes.items()}
        whole, state = ours.step(whole, gradient, state, number, 0.1)
        state_in_place = step_in_place(ours, place, gradient, state_in_place, number, 0.1)
        for found, expected in ((place, whole), (state_in_place, state)):
            assert list(found) == list(expected)
            assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in expected.items()}
            assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in expected.items()}


@pytest.mark.parametrize("ours", [case[0] for case in CASES], ids=str)
def test_the_largest_values_that_an_update_may_hold_leave_it_finite(ours: Optimizer) -> None:
    values, state = {"w": np.zeros(2, np.float32)}, dict[str, Any]()
    for number in range(1, 100):
        values, state = ours.step(values, {"w": np.float32([LARGEST, -LARGEST])}, state, number, 0.1)
    assert all(np.isfinite(array).all() for array in (*values.values(), *state.values()))
