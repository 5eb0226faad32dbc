"""A model with what a state may hold besides matrices: running statistics, a counter, an embedding, a scalar."""

import torch
from torch import Tensor, nn


class Counted(nn.Module):
    """Points of six dimensions, and the index of the largest of them as a word; 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(6, 5)
        self.first = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))) * self.scale + self.words(x.argmax(1)))


def model() -> nn.Module:
    """91 trained numbers."""
    return Counted()
