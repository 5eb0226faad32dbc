"""The server's optimizers: one step on float32 parameters, as torch.optim takes it.

Each is a pure function (parameters, gradient, state, step number) -> (parameters, state), elementwise in
float32 in the order torch uses, so a training through volunteers equals plain PyTorch to rounding.

    SGD      Sutskever et al. 2013 as torch.optim.SGD: g += wd*p; v = m*v + g; g = g + m*v (Nesterov) or v; p -= lr*g
    AdamW    Loshchilov & Hutter 2019, https://arxiv.org/abs/1711.05101, as torch.optim.AdamW
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]
PIECE_ELEMENTS = 1 << 16  # of one tensor are stepped at a time, so that the temporaries stay small


class Optimizer(Protocol):
    """One step: `state` is what the previous step returned ({} before the first); `number` counts from 1."""

    def step(
        self, parameters: Tensors, gradient: Tensors, state: Tensors, number: int, lr: float
    ) -> tuple[dict[str, Array], dict[str, Array]]: ...


@dataclass(frozen=True)
class Sgd:
    """torch.optim.SGD with dampening 0."""

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def step(
        self, parameters: Tensors, gradient: Tensors, state: Tensors, number: int, lr: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        new_parameters: dict[str, Array] = {}
        new_state: dict[str, Array] = {}
        rate, momentum, decay = np.float32(lr), np.float32(self.momentum), np.float32(self.weight_decay)
        for name, p in parameters.items():
            g = gradient[name]
            if self.weight_decay:
                g = g + decay * p
            if self.momentum:
                velocity = state.get(f"momentum/{name}")
                v = g.copy() if velocity is None else momentum * velocity + g
                new_state[f"momentum/{name}"] = v
                g = g + momentum * v if self.nesterov else v
            new_parameters[name] = p - rate * g
        return new_parameters, new_state


@dataclass(frozen=True)
class AdamW:
    """torch.optim.AdamW (decoupled weight decay)."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def step(
        self, parameters: Tensors, gradient: Tensors, state: Tensors, number: int, lr: float
    ) -> tuple[dict[str, Array], dict[str, Array]]:
        beta1, beta2 = self.betas
        step_size = np.float32(lr / (1 - beta1**number))
        root_correction = np.float32(math.sqrt(1 - beta2**number))
        keep = np.float32(1 - lr * self.weight_decay)
        new_parameters: dict[str, Array] = {}
        new_state: dict[str, Array] = {}
        for name, p in parameters.items():
            g = gradient[name]
            m = state.get(f"exp_avg/{name}", np.float32(0))
            v = state.get(f"exp_avg_sq/{name}", np.float32(0))
            m = m + np.float32(1 - beta1) * (g - m)
            v = np.float32(beta2) * v + np.float32(1 - beta2) * (g * g)
            denominator = np.sqrt(v) / root_correction + np.float32(self.eps)
            new_parameters[name] = p * keep - step_size * (m / denominator)
            new_state[f"exp_avg/{name}"] = m
            new_state[f"exp_avg_sq/{name}"] = v
        return new_parameters, new_state


def step_in_place(
    optimizer: Optimizer, parameters: dict[str, Array], gradient: Tensors, state: Tensors, number: int, lr: float
) -> dict[str, Array]:
    """Take one step, writing over `parameters` and the arrays of `state`; returns the new state.

    Bit for bit what `optimizer.step` gives (every operation is elementwise), without second copies of the model.
    """
    keys: dict[str, list[str]] = {}  # of each parameter's state, which are called KIND/NAME
    for key in state:
        keys.setdefault(key.partition("/")[2], []).append(key)
    new_state: dict[str, Array] = {}
    for name in list(parameters):
        parameters[name] = writable(parameters[name])
        new_state.update({key: writable(state[key]) for key in keys.get(name, ())})
        flat, slope = parameters[name].reshape(-1), gradient[name].reshape(-1)
        for start in range(0, max(1, flat.size), PIECE_ELEMENTS):
            where = slice(start, start + PIECE_ELEMENTS)
            old = {key: new_state[key].reshape(-1)[where] for key in keys.get(name, ())}
            stepped, kept = optimizer.step({name: flat[where]}, {name: slope[where]}, old, number, lr)
            flat[where] = stepped[name]
            for key, piece in kept.items():
                if key not in new_state:
                    new_state[key] = np.empty(parameters[name].shape, np.float32)
                new_state[key].reshape(-1)[where] = piece
    return new_state


def writable(array: Array) -> Array:
    """The array itself if it may be written over, else a copy."""
    return array if array.flags.writeable and array.flags.c_contiguous else np.array(array, order="C")
