"""The next character from the eight before it, by a perceptron (Bengio et al. 2003), on Python's own help topics.

13,504 parameters, 418,000 characters to learn from: too many to be learnt by heart, so that the held-out loss goes on
falling with every sample. Legend: B samples of T = 16 characters to predict, each with N = 8 before the first.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 8
TARGETS = 16
VOCABULARY = 128
FEATURES = 8
HIDDEN = 64


class Perceptron(nn.Module):
    """Features of the last characters, one hidden layer, a score for each next character."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, FEATURES)
        self.hidden = nn.Linear(CONTEXT * FEATURES, HIDDEN)
        self.scores = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        features = self.characters(ids)  # [B, N + T - 1, features]
        windows = torch.cat([features[:, i : i + TARGETS] for i in range(CONTEXT)], 2)
        scores: Tensor = self.scores(F.relu(self.hidden(windows)))
        return scores


def model() -> nn.Module:
    """The perceptron with its initial weights."""
    return Perceptron()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the targets of each sample, [B], in nats."""
    text = batch["text"].long()
    scores = model(text[:, :-1])
    return F.cross_entropy(scores.transpose(1, 2), text[:, CONTEXT:], reduction="none").mean(1)


def losses(parameters: dict[str, Tensor], text: Tensor) -> Tensor:
    """Mean of `loss` over a batch for P models at once, [P]: parameters [P, ...] by name, text [P, B, N + T]."""
    models, batch, _ = text.shape
    ids = text.long() + VOCABULARY * torch.arange(models).view(-1, 1, 1)
    features = parameters["characters.weight"].reshape(-1, FEATURES)[ids[:, :, :-1]]  # [P, B, N + T - 1, features]
    windows = torch.cat([features[:, :, i : i + TARGETS] for i in range(CONTEXT)], 3).view(models, batch * TARGETS, -1)
    weights = {name: parameters[f"{name}.weight"].transpose(1, 2) for name in ("hidden", "scores")}
    biases = {name: parameters[f"{name}.bias"].unsqueeze(1) for name in ("hidden", "scores")}
    hidden = F.relu(torch.baddbmm(biases["hidden"], windows, weights["hidden"]))
    scores = torch.baddbmm(biases["scores"], hidden, weights["scores"])
    targets = text[:, :, CONTEXT:].long().reshape(-1)
    each = F.cross_entropy(scores.view(-1, VOCABULARY), targets, reduction="none")
    return each.view(models, -1).mean(1)


def data() -> dict[str, dict[str, np.ndarray]]:
    """Pieces of N + T characters whose targets follow one another; every tenth is held out."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)
    pieces = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + TARGETS)[::TARGETS]
    held_out = np.arange(len(pieces)) % 10 == 9
    train = pieces[~held_out]
    train = train[: len(train) // 64 * 64]  # whole batches
    return {"train": {"text": train.copy()}, "test": {"text": pieces[held_out].copy()}}
