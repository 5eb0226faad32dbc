"""The inner optimizer's graph equals torch.optim within float32 rounding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.graph_oracle import BACKENDS, run
from work_generator.export import export_optimizer, optimizer_slots

SHAPES: dict[str, tuple[int, ...]] = {"weight": (5, 4), "bias": (5,), "scale": ()}
SAMPLES = 8
STEPS = 5


@dataclass(frozen=True)
class Settings:
    kind: str = "sgd"
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 0.0


CASES = {
    "sgd": Settings(),
    "sgd with weight decay": Settings(weight_decay=0.1),
    "sgd with momentum": Settings(momentum=0.9, weight_decay=0.01),
    "sgd with nesterov": Settings(momentum=0.9, nesterov=True),
    "adamw": Settings(kind="adamw"),
    "adamw with decay and eps": Settings(kind="adamw", betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1),
    "adamw, clipped": Settings(kind="adamw", weight_decay=0.01, max_norm=0.5),
    "sgd, hardly clipped": Settings(momentum=0.5, max_norm=1e6),
}


def of_torch(settings: Settings, parameters: list[torch.Tensor], rate: float) -> torch.optim.Optimizer:
    if settings.kind == "adamw":
        return torch.optim.AdamW(
            parameters,
            lr=rate,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            foreach=False,
        )
    return torch.optim.SGD(
        parameters,
        lr=rate,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        weight_decay=settings.weight_decay,
        foreach=False,
    )


def start() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int) -> dict[str, torch.Tensor]:
    """Sums over SAMPLES samples."""
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) * SAMPLES for name, shape in SHAPES.items()}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_five_steps_equal_those_of_torch(name: str, backend: str) -> None:
    settings = CASES[name]
    graph = export_optimizer(SHAPES, settings)
    ours: dict[str, Any] = {f"parameter/{n}": t.numpy() for n, t in start().items()}
    for n, shape in SHAPES.items():
        ours.update({f"optimizer/{n}.{slot}": np.zeros(shape, np.float32) for slot in optimizer_slots(settings)})
    theirs = {n: t.double().requires_grad_() for n, t in start().items()}
    optimizer = of_torch(settings, list(theirs.values()), 0.1)
    for step in range(STEPS):
        rate = 0.1 / (step + 1)
        given = {
            **ours,
            **{f"gradient/{n}": g.numpy() for n, g in gradients(step).items()},
            "weight": np.float32(SAMPLES),
            "learning_rate": np.float32(rate),
            "step": np.int64(step),
        }
        ours = run(graph, given, backend)
        for n, g in gradients(step).items():
            theirs[n].grad = g.double() / SAMPLES
        if settings.max_norm:
            torch.nn.utils.clip_grad_norm_(list(theirs.values()), settings.max_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        for n, t in theirs.items():
            np.testing.assert_allclose(ours[f"parameter/{n}"], t.detach().numpy(), rtol=2e-6, atol=1e-6)
    for n, t in theirs.items():
        for slot in optimizer_slots(settings):
            kept = optimizer.state[t][slot].numpy()
            np.testing.assert_allclose(ours[f"optimizer/{n}.{slot}"], kept, rtol=5e-6, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_batch_without_real_samples_moves_nothing_but_the_decay(backend: str) -> None:
    graph = export_optimizer({"w": (3,)}, Settings(kind="adamw", weight_decay=0.0))
    zeros = np.zeros(3, np.float32)
    given = {"parameter/w": np.ones(3, np.float32), "gradient/w": zeros, "weight": np.float32(0), "step": np.int64(0)}
    given |= {"optimizer/w.exp_avg": zeros, "optimizer/w.exp_avg_sq": zeros, "learning_rate": np.float32(1)}
    made = run(graph, given, backend)
    assert np.array_equal(made["parameter/w"], np.ones(3, np.float32))


def test_slots_are_those_of_torch() -> None:
    assert optimizer_slots(Settings()) == ()
    assert optimizer_slots(Settings(momentum=0.9)) == ("momentum_buffer",)
    assert optimizer_slots(replace(Settings(), kind="adamw")) == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("size", "finite"), [(1e18, True), (1e20, False)])
def test_gradients_whose_norm_overflows_are_not_clipped_to_zeros_in_silence(
    size: float, finite: bool, backend: str
) -> None:
    """O28: a norm that overflows is a failure of the run; of finite ones nothing changes."""
    graph = export_optimizer({"w": (3,)}, Settings(max_norm=1.0))
    given = {"parameter/w": np.ones(3, np.float32), "gradient/w": np.full(3, size, np.float32)}
    made = run(graph, {**given, "weight": np.float32(1), "learning_rate": np.float32(1), "step": np.int64(0)}, backend)
    assert np.isfinite(made["parameter/w"]).all() == finite
    if finite:
        np.testing.assert_allclose(made["parameter/w"], 1 - 3**-0.5, rtol=1e-6)
