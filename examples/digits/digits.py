"""Handwritten digits that scikit-learn ships (1,797 images of 8x8 pixels): model, loss, metrics, data.

Legend: B samples of a batch, 10 classes; x [B, 8, 8] float32, y [B] int64.
"""

import numpy as np
import torch.nn.functional as F
from torch import Tensor, nn

TRAIN_SAMPLES = 1437  # four fifths; the rest is held out


def model() -> nn.Module:
    """A perceptron with one hidden layer: 19,210 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of each sample, [B]."""
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def metrics(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Whether each sample is classified correctly, [B]; averaged, the accuracy."""
    return {"accuracy": model(batch["x"]).argmax(1) == batch["y"]}


def data() -> dict[str, dict[str, np.ndarray]]:
    """Images with mean 0 and standard deviation 1, and their digits, in a fixed shuffled order."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    x = digits.images[order].astype(np.float32)
    x = (x - x[:TRAIN_SAMPLES].mean()) / x[:TRAIN_SAMPLES].std()
    y = digits.target[order].astype(np.int64)
    return {
        "train": {"x": x[:TRAIN_SAMPLES], "y": y[:TRAIN_SAMPLES]},
        "test": {"x": x[TRAIN_SAMPLES:], "y": y[TRAIN_SAMPLES:]},
    }
