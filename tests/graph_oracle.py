"""The oracle of the export: the same step by an exported graph and by eager PyTorch.

What it is: run a graph on a backend with a model's own tensors, run the model eagerly in float32 and
float64 (with dropout masks drawn from the graph's own random streams), and measure how far apart they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.gradient.backends import Backend, open_backend
from boinc_project.contract import philox
from boinc_project.contract.graph import Graph
from work_generator.export import ExportedGraph
from work_generator.export.program import kept_constants

BACKENDS = ("numpy", "torch")
Batch = Mapping[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]
Arrays = dict[str, Any]


def run(graph: Graph, inputs: Mapping[str, Any], backend: str | Backend) -> Arrays:
    """Outputs of a graph, as numpy arrays; every node's types are verified on the way."""
    opened = open_backend(backend, 1, "cpu") if isinstance(backend, str) else backend
    given = {name: opened.from_numpy(np.asarray(array)) for name, array in inputs.items()}
    made = opened.program(graph, verify=True).run(given)
    return {name: np.array(opened.to_numpy(value)) for name, value in made.items()}


def inputs_of(
    exported: ExportedGraph, model: nn.Module, batch: Batch, mask: Any = None, seed: int = 1, step: int = 0
) -> Arrays:
    """What a runner would feed: state, constants, batch, mask, seed and step."""
    size = len(next(iter(batch.values())))
    changing = {each.name for each in exported.graph.inputs_of_kind("buffer")}
    return {
        **{f"parameter/{n}": p.detach().numpy() for n, p in model.named_parameters() if p.requires_grad},
        **{f"buffer/{n}": b.detach().numpy() for n, b in model.named_buffers()},
        **kept_constants(model, changing),
        **exported.constants,
        **{f"batch/{n}": t.numpy() for n, t in batch.items()},
        "mask": np.ones(size, np.float32) if mask is None else mask,
        "seed": np.array(seed, np.int64),
        "step": np.array(step, np.int64),
    }


def eager(model: nn.Module, loss: Loss, batch: Batch, dtype: torch.dtype) -> dict[str, Tensor]:
    """gradient/*, buffer/* and metric/loss of one eager training step in the dtype, in float64."""
    model = copy.deepcopy(model).to(dtype).train()
    cast = {name: t.to(dtype) if t.is_floating_point() else t for name, t in batch.items()}
    size = len(next(iter(batch.values())))
    losses = loss(model, cast)
    total = losses.sum() if losses.dim() else losses * size
    total.backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {
        **{f"gradient/{n}": torch.zeros_like(p) if p.grad is None else p.grad for n, p in trained.items()},
        **{f"buffer/{n}": b.double() for n, b in model.named_buffers()},
        "metric/loss": total.detach(),
    }


def distance(found: Mapping[str, Any], reference: Mapping[str, Tensor], prefix: str = "gradient/") -> float:
    """Largest over tensors t of |a_t - b_t| / (|b_t| + |b| sqrt(n_t / n)), b the reference.

    The second term is the floor that tensors of mathematically zero gradient need (an attention's key
    bias is pure rounding noise).
    """
    names = [name for name in reference if name.startswith(prefix)]
    count = sum(reference[name].numel() for name in names)
    norm = sum(float(reference[name].double().square().sum()) for name in names) ** 0.5
    worst = 0.0
    for name in names:
        b = reference[name].detach().double()
        a = torch.as_tensor(found[name]).detach().double()
        assert a.shape == b.shape, name
        allowed = float(b.norm()) + norm * (b.numel() / count) ** 0.5
        worst = max(worst, float((a - b).norm()) / allowed if allowed else float((a - b).norm()))
    return worst


def assert_as_exact_as_eager(
    exported: ExportedGraph,
    model: nn.Module,
    loss: Loss,
    batch: Batch,
    seed: int = 1,
    step: int = 0,
    backends: Sequence[str | Backend] = BACKENDS,
) -> None:
    """On every backend the graph's error against float64 is at most 3 times eager float32's own."""
    streams = sum(node.op.startswith("random_") for node in exported.graph.nodes)
    with dropout_from_philox(seed, step) as drawn:
        reference = eager(model, loss, batch, torch.float64)
    assert len(drawn) == streams, "the graph draws as often as the model drops"
    with dropout_from_philox(seed, step):
        single = eager(model, loss, batch, torch.float32)
    allowed = 3 * distance(single, reference)
    assert 0 < allowed < 1e-4, "eager float32 itself is sane"
    for backend in backends:
        made = run(exported.graph, inputs_of(exported, model, batch, seed=seed, step=step), backend)
        found = distance(made, reference)
        assert found <= allowed, f"{backend}: error {found:.2e}, eager's own is {allowed / 3:.2e}"
        relative = abs(made["metric/loss"] - float(reference["metric/loss"])) / abs(float(reference["metric/loss"]))
        assert relative < 1e-5, backend
        buffers = {n: t for n, t in reference.items() if n in made and n.startswith("buffer/")}
        assert distance(made, buffers, "buffer/") < 1e-5, backend


@contextmanager
def dropout_from_philox(seed: int, step: int) -> Iterator[list[int]]:
    """Let eager dropout use the masks that a graph draws: stream n for the n-th dropout of the step."""
    drawn: list[int] = []
    saved = F.dropout, torch.dropout, F.scaled_dot_product_attention

    def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        mask = philox.bernoulli(seed, step, len(drawn), x.numel(), 1 - p)
        drawn.append(len(drawn))
        return x * (torch.from_numpy(mask).reshape(x.shape).to(x.dtype) / (1 - p))

    def attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **named: Any,
    ) -> Tensor:
        scale = named.get("scale")
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -torch.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return dropout(scores.softmax(-1), dropout_p) @ v

    F.dropout, torch.dropout, F.scaled_dot_product_attention = dropout, dropout, attention  # type: ignore[assignment]
    try:
        yield drawn
    finally:
        F.dropout, torch.dropout, F.scaled_dot_product_attention = saved  # type: ignore[assignment]
