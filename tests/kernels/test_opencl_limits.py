"""Within the limits of a Radeon HD 5870: 128 MB a buffer, 1 GB in all, work-groups of 256."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opencl_devices import open_device
from torch import Tensor, nn

from apps.gradient.opencl.device import CYPRESS_LIMITS, MEMORY_SHARE
from boinc_project.job_config import InnerOptimizerSection
from work_generator.export import export_gradient
from work_generator.export.optimizer import export_optimizer

WIDTH, LAYERS, HEADS, WORDS, LENGTH, BATCH = 512, 6, 8, 4096, 256, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projections, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        parts = self.projections(self.first(x)).split(WIDTH, 2)
        q, k, v = (part.view(batch, length, HEADS, WIDTH // HEADS).transpose(1, 2) for part in parts)
        scores = (q @ k.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v
        x = x + self.joined(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.second(x))))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1]))
        for block in self.blocks:
            y = block(y)
        return self.head(self.norm(y))


def next_word(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]).transpose(1, 2), batch["y"], reduction="none").mean(1)


@pytest.mark.long
def test_a_gpt_of_23_million_parameters_trains_within_one_gigabyte() -> None:
    torch.manual_seed(0)
    model, draws = Gpt(), torch.Generator().manual_seed(1)
    batch = {name: torch.randint(0, WORDS, (BATCH, LENGTH), generator=draws) for name in ("x", "y")}
    exported = export_gradient(model, next_word, batch)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    step_graph = export_optimizer(shapes, InnerOptimizerSection(kind="adamw", lr=1e-3))
    backend = open_device("pocl_gpu")
    backend.pool.peak = backend.pool.used
    gradient = backend.program(exported.graph)
    optimizer = backend.program(step_graph, consume=frozenset({"parameter", "optimizer"}))
    arrays: dict[str, Any] = {f"parameter/{n}": p.detach().numpy() for n, p in model.named_parameters()}
    arrays |= {f"batch/{name}": tensor.numpy() for name, tensor in batch.items()}
    arrays |= {each.name: np.zeros(each.shape, np.float32) for each in step_graph.inputs_of_kind("optimizer")}
    arrays |= {**exported.constants, "mask": np.ones(BATCH, np.float32), "seed": np.array(1, np.int64)}
    values = {name: backend.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    values["learning_rate"] = backend.from_numpy(np.array(1e-3, np.float32))
    losses = []
    for number in range(3):
        values["step"] = backend.from_numpy(np.array(number, np.int64))
        made = gradient.run({each.name: values[each.name] for each in exported.graph.inputs})
        losses.append(float(backend.to_numpy(made["metric/loss"])) / BATCH)
        given = {**values, **made, "weight": made["metric/weight"]}
        values.update(optimizer.run({each.name: given[each.name] for each in step_graph.inputs}))
        del made, given  # or two generations of gradients were alive in the next step
    with torch.no_grad():
        first = float(next_word(model, batch).mean())
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert losses[2] < losses[1] < losses[0]
    assert backend.pool.peak <= MEMORY_SHARE * CYPRESS_LIMITS["global_memory"]
