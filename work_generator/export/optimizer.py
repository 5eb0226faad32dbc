"""The inner optimizer as a graph: one step of SGD or AdamW on every parameter.

What it is: the arithmetic of torch.optim.SGD and torch.optim.AdamW (single-tensor form, dampening 0,
no amsgrad), in their order of operations, so that results differ by float32 rounding only. What it
is not: the server's optimizer, which never travels.
The gradient that comes in is a sum over samples; it is divided by the number of samples first.
`step` counts from 0, and the optimizer's state starts at zero with every microtask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Protocol

from boinc_project.contract.graph import Graph
from work_generator.export.draft import Draft, Value

CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm


class OptimizerSettings(Protocol):
    """What job.toml's [inner_optimizer] says; `InnerOptimizerSection` is one."""

    @property
    def kind(self) -> str: ...
    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def max_norm(self) -> float: ...


def optimizer_slots(settings: OptimizerSettings) -> tuple[str, ...]:
    """Names of the state tensors kept per parameter, as torch.optim calls them."""
    if settings.kind == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if settings.momentum else ()


def export_optimizer(parameters: Mapping[str, Sequence[int]], settings: OptimizerSettings) -> Graph:
    """Graph of one optimizer step for float32 parameters (torch name -> shape).

    Inputs: parameter/*, gradient/* (sums over samples), optimizer/<name>.<slot>, weight (number of
    samples), learning_rate, step. Outputs: parameter/* and optimizer/*.
    """
    draft = Draft()
    slots = optimizer_slots(settings)
    declared = {
        kind: {n: draft.input(f"{kind}/{n}", kind, "float32", shape) for n, shape in parameters.items()}
        for kind in ("parameter", "gradient")
    }
    state = {
        name: [draft.input(f"optimizer/{name}.{slot}", "optimizer", "float32", shape) for slot in slots]
        for name, shape in parameters.items()
    }
    weight = draft.input("weight", "weight", "float32", ())
    rate = draft.input("learning_rate", "learning_rate", "float32", ())
    step = draft.input("step", "step", "int64", ())

    samples = draft.one("maximum", [weight, draft.scalar(1.0, "float32")])
    gradients = {n: draft.one("div", [g, samples], None, n) for n, g in declared["gradient"].items()}
    if settings.max_norm:
        gradients = _clipped(draft, gradients, settings.max_norm)
    update = _AdamW(draft, settings, rate, step) if settings.kind == "adamw" else _SGD(draft, settings, rate)
    results = {n: update(declared["parameter"][n], gradients[n], state[n], n) for n in parameters}
    for name, (parameter, _) in results.items():
        draft.output(f"parameter/{name}", "parameter", parameter)
    for name, (_, kept) in results.items():
        for slot, value in zip(slots, kept, strict=True):
            draft.output(f"optimizer/{name}.{slot}", "optimizer", value)
    return draft.build()


def _clipped(draft: Draft, gradients: dict[str, Value], max_norm: float) -> dict[str, Value]:
    """Gradients scaled down to the norm `max_norm` over all parameters, as clip_grad_norm_ does."""
    total: Value | None = None
    for name, gradient in gradients.items():
        squares = draft.one("mul", [gradient, gradient], None, name)
        dims = list(range(len(gradient.shape)))
        part = draft.one("sum", [squares], {"dims": dims, "keepdim": False}, name)
        total = part if total is None else draft.one("add", [total, part])
    assert total is not None, "a model without parameters is refused before"
    norm = draft.one("add", [draft.one("sqrt", [total]), draft.scalar(CLIP_EPS, "float32")])
    factor = draft.one("div", [draft.scalar(max_norm, "float32"), norm])
    factor = draft.one("minimum", [factor, draft.scalar(1.0, "float32")])
    # 0, and NaN where the squares overflow: gradients too large to be measured would silently become zeros.
    factor = draft.one("add", [factor, draft.one("sub", [total, total])])
    return {name: draft.one("mul", [gradient, factor], None, name) for name, gradient in gradients.items()}


class _SGD:
    """Sutskever et al. 2013 as torch.optim.SGD writes it; velocity starts at zero, which equals its first step."""

    def __init__(self, draft: Draft, settings: OptimizerSettings, rate: Value) -> None:
        self.draft, self.settings, self.rate = draft, settings, rate

    def __call__(self, w: Value, grad: Value, state: list[Value], where: str) -> tuple[Value, list[Value]]:
        def op(name: str, a: Value, b: Value) -> Value:
            return self.draft.one(name, [a, b], None, where)

        def number(value: float) -> Value:
            return self.draft.scalar(value, "float32")

        if self.settings.weight_decay:
            grad = op("add", grad, op("mul", w, number(self.settings.weight_decay)))
        kept = []
        if state:
            velocity = op("add", op("mul", state[0], number(self.settings.momentum)), grad)
            kept = [velocity]
            ahead = op("mul", velocity, number(self.settings.momentum))
            grad = op("add", grad, ahead) if self.settings.nesterov else velocity
        return op("sub", w, op("mul", grad, self.rate)), kept


class _AdamW:
    """Loshchilov and Hutter 2019 as torch.optim.AdamW writes it."""

    def __init__(self, draft: Draft, settings: OptimizerSettings, rate: Value, step: Value) -> None:
        self.draft, self.settings, self.rate = draft, settings, rate
        one = draft.scalar(1.0, "float32")
        count = draft.one("add", [draft.one("cast", [step], {"dtype": "float32"}), one])
        # 1 - beta**t in float32 would lose the digits that matter for small t; expm1 keeps them.
        self.correction1, correction2 = (
            draft.one("neg", [draft.one("expm1", [draft.one("mul", [count, self._log(beta)])])])
            for beta in settings.betas
        )
        self.root2 = draft.one("sqrt", [correction2])
        self.step_size = draft.one("div", [rate, self.correction1])
        decay = draft.one("mul", [rate, draft.scalar(settings.weight_decay, "float32")])
        self.shrink = draft.one("sub", [one, decay])

    def _log(self, beta: float) -> Value:
        return self.draft.scalar(math.log(beta) if beta else -math.inf, "float32")

    def __call__(self, w: Value, grad: Value, state: list[Value], where: str) -> tuple[Value, list[Value]]:
        def op(name: str, a: Value, b: Value) -> Value:
            return self.draft.one(name, [a, b], None, where)

        def number(value: float) -> Value:
            return self.draft.scalar(value, "float32")

        (mean, square), (beta1, beta2) = state, self.settings.betas
        if self.settings.weight_decay:
            w = op("mul", w, self.shrink)
        mean = op("add", mean, op("mul", op("sub", grad, mean), number(1 - beta1)))
        square = op("add", op("mul", square, number(beta2)), op("mul", op("mul", grad, grad), number(1 - beta2)))
        root = self.draft.one("sqrt", [square], None, where)
        denominator = op("add", op("div", root, self.root2), number(self.settings.eps))
        return op("sub", w, op("mul", op("div", mean, denominator), self.step_size)), [mean, square]
