"""n workers that train one perceptron on scikit-learn's digits together, some of them bad: for rules against attacks.

The model is that of examples/digits with fewer hidden units. In each step every worker takes the gradient of a batch
of its own, drawn from all training samples; bad ones replace theirs; a rule makes one vector of the n; one step of SGD
follows. Momentum is damped, m <- beta m + (1 - beta) g, and may be kept in two places:
    worker   each worker sends its momentum, which it keeps from step to step (as published for most rules)
    server   workers send gradients, the server keeps the momentum of the aggregate (adapted: volunteers keep nothing)
Attacks know all honest vectors of the step (boinc_project/simulator/lies.py has their definitions and sources).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: From the vectors [n, d] and the previous aggregate [d] to the aggregate [d], all float32.
Aggregate = Callable[[Array, Array], Array]

CLASSES, PIXELS = 10, 64
TRAIN_SAMPLES = 1437
N = 25


@dataclass(frozen=True)
class Training:
    """What all runs share. `momentum` is beta; accuracy is the mean over the last `averaged` evaluations."""

    steps: int = 300
    batch: int = 32
    hidden: int = 64
    rate: float = 1.0
    momentum: float = 0.9
    every: int = 10
    averaged: int = 4


#: Name -> the lie from the honest vectors [n - f, d] and the bad workers' own vectors over turned labels [f, d].
ATTACKS: dict[str, Callable[[Array, Array], Array]] = {
    "none": lambda honest, flipped: honest[: len(flipped)],
    "sign_flip": lambda honest, flipped: np.broadcast_to(-honest.mean(0), flipped.shape),
    "alie": lambda honest, flipped: np.broadcast_to(honest.mean(0) - 1.5 * honest.std(0), flipped.shape),
    "ipm_0.1": lambda honest, flipped: np.broadcast_to(-0.1 * honest.mean(0), flipped.shape),
    "ipm_2": lambda honest, flipped: np.broadcast_to(-2.0 * honest.mean(0), flipped.shape),
    "label_flip": lambda honest, flipped: flipped,
    "mimic": lambda honest, flipped: np.broadcast_to(honest[0], flipped.shape),
}


class Digits:
    """The data: x [1797, 64] with mean 0 and standard deviation 1, y [1797]; the last fifth is held out."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = np.random.default_rng(0).permutation(len(digits.target))
        x = digits.data[order].astype(np.float32)
        self.x = (x - x[:TRAIN_SAMPLES].mean()) / x[:TRAIN_SAMPLES].std()
        self.y = digits.target[order].astype(np.int64)


class Perceptron:
    """64 - hidden - 10, parameters in one float32 vector."""

    def __init__(self, hidden: int) -> None:
        self.hidden = hidden
        sizes = (PIXELS * hidden, hidden, hidden * CLASSES, CLASSES)
        self.ends = np.cumsum(sizes)
        self.size = int(self.ends[-1])

    def initial(self, seed: int) -> Array:
        draws = np.random.default_rng([seed, 1])
        first = draws.uniform(-1, 1, PIXELS * self.hidden) / np.sqrt(PIXELS)
        second = draws.uniform(-1, 1, self.hidden * CLASSES) / np.sqrt(self.hidden)
        parts = [first, np.zeros(self.hidden), second, np.zeros(CLASSES)]
        made: Array = np.concatenate(parts).astype(np.float32)
        return made

    def _parts(self, w: Array) -> tuple[Array, Array, Array, Array]:
        a, b, c, _ = self.ends
        return w[:a].reshape(PIXELS, self.hidden), w[a:b], w[b:c].reshape(self.hidden, CLASSES), w[c:]

    def accuracy(self, w: Array, x: Array, y: Array) -> float:
        first, bias, second, last = self._parts(w)
        scores = np.maximum(x @ first + bias, 0) @ second + last
        return float((scores.argmax(1) == y).mean())

    def gradients(self, w: Array, x: Array, y: Array) -> Array:
        """Mean cross-entropy's gradients of k batches: x [k, b, 64], y [k, b] -> [k, d]."""
        first, bias, second, last = self._parts(w)
        k, b = y.shape
        z = x @ first + bias
        h = np.maximum(z, 0)
        s = h @ second + last
        s -= s.max(-1, keepdims=True)
        p = np.exp(s)
        p /= p.sum(-1, keepdims=True)
        p[np.arange(k)[:, None], np.arange(b), y] -= 1
        p /= b
        dz = (p @ second.T) * (z > 0)
        parts = [x.transpose(0, 2, 1) @ dz, dz.sum(1), h.transpose(0, 2, 1) @ p, p.sum(1)]
        made: Array = np.concatenate([each.reshape(k, -1) for each in parts], axis=1).astype(np.float32)
        return made


def accuracy(
    digits: Digits, training: Training, aggregate: Aggregate, attack: str, f: int, seed: int, *, at_workers: bool
) -> float:
    """Held-out accuracy after a training of N workers, the last f of them bad. NaN weights count as chance."""
    model, beta = Perceptron(training.hidden), training.momentum
    w, draws = model.initial(seed), np.random.default_rng([seed, 2])
    x, y = digits.x[:TRAIN_SAMPLES], digits.y[:TRAIN_SAMPLES]
    kept: Array = np.zeros((N + f, model.size), np.float32)
    previous = np.zeros(model.size, np.float32)
    momentum = np.zeros(model.size, np.float32)
    found = []
    for step in range(1, training.steps + 1):
        rows = draws.integers(0, TRAIN_SAMPLES, (N, training.batch))
        turned = CLASSES - 1 - y[rows[N - f :]]
        with np.errstate(over="ignore", invalid="ignore"):
            vectors = model.gradients(w, x[np.concatenate([rows, rows[N - f :]])], np.concatenate([y[rows], turned]))
            if at_workers:
                kept = beta * kept + np.float32(1 - beta) * vectors
                vectors = kept
            honest, flipped = vectors[: N - f], vectors[N:]
            sent = np.concatenate([honest, ATTACKS[attack](honest, flipped)]).astype(np.float32)
            if not np.isfinite(sent).all():
                return 1 / CLASSES
            previous = np.asarray(aggregate(sent, previous), np.float32)
            momentum = previous if at_workers else beta * momentum + np.float32(1 - beta) * previous
            w = w - np.float32(training.rate) * momentum
        if step % training.every == 0:
            found.append(model.accuracy(w, digits.x[TRAIN_SAMPLES:], digits.y[TRAIN_SAMPLES:]))
    return float(np.mean(found[-training.averaged :]))
