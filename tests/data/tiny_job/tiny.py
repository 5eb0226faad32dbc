"""A job that trains in moments: which of three directions is a point of six dimensions nearest to?"""

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn


def model() -> nn.Module:
    """163 parameters."""
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each sample, [B]."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def metrics(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whether each sample is classified correctly, [B]."""
    return {"accuracy": model(batch["x"]).argmax(1) == batch["y"]}


def data() -> dict[str, dict[str, np.ndarray]]:
    """250 points to learn from and 50 held out; 250 is no multiple of the batch size."""
    generator = np.random.default_rng(5)
    x = generator.standard_normal((300, 6)).astype(np.float32)
    y = (x @ generator.standard_normal((6, 3))).argmax(1).astype(np.int64)
    return {"train": {"x": x[:250], "y": y[:250]}, "test": {"x": x[250:], "y": y[250:]}}


class LowRank(nn.Module):
    """A frozen linear layer and a trained product of two thin matrices (LoRA, Hu et al. 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    """The model with frozen layers and adapters of rank 2 on them: 82 of 245 parameters are trained."""
    layers = model()
    return nn.Sequential(LowRank(layers[0], 2), nn.Tanh(), LowRank(layers[2], 2))
