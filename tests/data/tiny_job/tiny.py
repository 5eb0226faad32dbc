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
