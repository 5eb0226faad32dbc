"""A small GPT over characters, on a text that every Python carries: the language's own help topics.

Legend: B samples, T = 64 characters of context, V = 128 ASCII codes, E = 128 features, H = 4 heads.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

CONTEXT = 64
VOCABULARY = 128
FEATURES = 128
HEADS = 4
LAYERS = 3


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a layer norm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(FEATURES)
        self.qkv = nn.Linear(FEATURES, 3 * FEATURES)
        self.project = nn.Linear(FEATURES, FEATURES)
        self.norm2 = nn.LayerNorm(FEATURES)
        self.widen = nn.Linear(FEATURES, 4 * FEATURES)
        self.narrow = nn.Linear(4 * FEATURES, FEATURES)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        q, k, v = (p.view(b, t, HEADS, e // HEADS).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(b, t, e))
        return x + self.narrow(F.gelu(self.widen(self.norm2(x))))


class GPT(nn.Module):
    """Radford et al. 2019 without dropout; the output layer shares the character embedding. 0.6M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, FEATURES)
        self.positions = nn.Embedding(CONTEXT, FEATURES)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(FEATURES)
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Layers that add to the residual stream start smaller, as in GPT-2.
                scale = (2 * LAYERS) ** -0.5 if name.endswith(("project.weight", "narrow.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
        self.head.weight = self.characters.weight

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1], device=ids.device)
        x = self.characters(ids) + self.positions(places)
        return self.head(self.norm(self.blocks(x)))


def model() -> nn.Module:
    """The GPT with its initial weights."""
    return GPT()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy of the next character over each sample, [B], in nats."""
    text = batch["text"].long()
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none").mean(1)


def data() -> dict[str, dict[str, np.ndarray]]:
    """Pieces of CONTEXT + 1 characters, each beginning where the one before ended; every tenth is held out."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    codes = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)
    count = (len(codes) - 1) // CONTEXT
    pieces = np.lib.stride_tricks.sliding_window_view(codes, CONTEXT + 1)[: count * CONTEXT : CONTEXT]
    held_out = np.arange(count) % 10 == 9
    return {"train": {"text": pieces[~held_out].copy()}, "test": {"text": pieces[held_out].copy()}}
