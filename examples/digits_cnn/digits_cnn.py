"""Handwritten digits by a small convolutional network with batch norm and dropout.

It shows what the perceptron of ../digits does not: buffers (running statistics) that are averaged
over the contributions to a version, and random numbers that are the same on every volunteer's PC.
Legend: B samples of a batch, 10 classes; x [B, 8, 8] float32, y [B] int64.
"""

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

TRAIN_SAMPLES = 1437  # four fifths; the rest is held out


def model() -> nn.Module:
    """Two convolutions and a linear layer: 4,650 parameters."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8)),
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(96, 10),
    )


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each sample, [B]."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def metrics(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whether each sample is classified correctly, [B]; averaged, the accuracy."""
    return {"accuracy": model(batch["x"]).argmax(1) == batch["y"]}


def data() -> dict[str, dict[str, np.ndarray]]:
    """Images with values from 0 to 1 and their digits, in a fixed shuffled order."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = (digits.images[order] / 16).astype(np.float32)
    y = digits.target[order].astype(np.int64)
    return {
        "train": {"x": x[:TRAIN_SAMPLES], "y": y[:TRAIN_SAMPLES]},
        "test": {"x": x[TRAIN_SAMPLES:], "y": y[TRAIN_SAMPLES:]},
    }
