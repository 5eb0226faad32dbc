"""The workers of `scripts/bench byzantine` compute gradients as PyTorch does, and lie as the papers say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scripts.benchmarks.digits_workers import ATTACKS, Digits, Perceptron, Training, accuracy


def test_gradients_are_pytorchs() -> None:
    model, draws = Perceptron(8), np.random.default_rng(0)
    w = model.initial(1)
    x = draws.standard_normal((2, 5, 64)).astype(np.float32)
    y = draws.integers(0, 10, (2, 5))
    parameter = torch.tensor(w, requires_grad=True)
    first, bias, second, last = torch.split(parameter, [512, 8, 80, 10])
    for number, found in enumerate(model.gradients(w, x, y)):
        hidden = torch.relu(torch.tensor(x[number]) @ first.view(64, 8) + bias)
        loss = torch.nn.functional.cross_entropy(hidden @ second.view(8, 10) + last, torch.tensor(y[number]))
        (expected,) = torch.autograd.grad(loss, parameter, retain_graph=True)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-6)


def test_lies_are_made_of_the_honest_vectors() -> None:
    honest = np.array([[1, 2], [3, 2], [5, 8]], np.float32)
    flipped = np.array([[9, 9]], np.float32)
    made = {name: lie(honest, flipped)[0] for name, lie in ATTACKS.items()}
    assert made["sign_flip"] == pytest.approx([-3, -4])
    assert made["alie"] == pytest.approx(np.array([3, 4]) - 1.5 * honest.std(0))
    assert made["ipm_0.1"] == pytest.approx([-0.3, -0.4])
    assert made["ipm_2"] == pytest.approx([-6, -8])
    assert made["label_flip"] == pytest.approx([9, 9])
    assert made["mimic"] == pytest.approx([1, 2])


@pytest.mark.parametrize("at_workers", [False, True])
def test_honest_workers_learn_and_liars_stop_a_mean(at_workers: bool) -> None:
    digits, training = Digits(), Training(steps=60, batch=16, hidden=32)

    def mean(rows: np.ndarray, previous: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return rows.mean(0)

    honest = accuracy(digits, training, mean, "none", 0, 0, at_workers=at_workers)
    attacked = accuracy(digits, training, mean, "ipm_2", 11, 0, at_workers=at_workers)
    assert honest > 0.9
    assert attacked < 0.5
