"""ATen's operators without tensor operands: constants and random numbers.

Random numbers come from Philox (Salmon et al. 2011), from the task's seed and step; each operator draws
from a stream of its own, so every backend and every replica sees the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from work_generator.export.context import Context, Entry
from work_generator.export.draft import Scalar, Value


def _filled(value: Scalar) -> Entry:
    """Zeros, ones, and `empty`, which must not show uninitialised memory."""

    def entry(c: Context, *_: Any, **__: Any) -> Value:
        return c.full(c.type.shape, value, c.type.dtype)

    return entry


def _full(c: Context, _: Any, value: Value | Scalar, **__: Any) -> Value:
    if isinstance(value, Value):
        return c.one("expand", [c.reshape(c.cast(value, c.type.dtype), ())], shape=list(c.type.shape))
    return c.full(c.type.shape, value, c.type.dtype)


def _new_full(c: Context, _: Any, __: Any, value: Scalar, **___: Any) -> Value:
    return c.full(c.type.shape, value, c.type.dtype)


def _scalar_tensor(c: Context, value: Scalar, **_: Any) -> Value:
    return c.scalar(value, c.type.dtype)


def _arange(c: Context, start: Scalar, stop: Scalar, step: Scalar = 1, **_: Any) -> Value:
    length, dtype = c.type.shape[0], c.type.dtype
    kind = int if dtype != "float32" else float
    return c.one("arange", [], start=kind(start), step=kind(step), length=length, dtype=dtype)


def _uniform(c: Context, shape: Sequence[int]) -> Value:
    """Numbers from [0, 1), from a Philox stream of this node's own."""
    if c.random is None:
        raise c.refuse("draws random numbers in evaluation mode", "draw them in training mode only (self.training)")
    stream = c.draft.streams
    c.draft.streams += 1
    return c.one("random_uniform", list(c.random), shape=list(shape), stream=stream)


def _bernoulli(c: Context, x: Value, p: Scalar = 0.5, *, generator: None = None) -> Value:
    if c.random is None:
        raise c.refuse("draws random numbers in evaluation mode", "draw them in training mode only (self.training)")
    stream = c.draft.streams
    c.draft.streams += 1
    drawn = c.one("random_bernoulli", list(c.random), p=float(p), shape=list(c.type.shape), stream=stream)
    return c.cast(drawn, c.type.dtype)


def _bernoulli_tensor(c: Context, p: Value, *, generator: None = None) -> Value:
    return c.cast(c.one("lt", [_uniform(c, c.type.shape), c.cast(p, "float32")]), c.type.dtype)


def _rand(c: Context, *_: Any, **__: Any) -> Value:
    return c.cast(_uniform(c, c.type.shape), c.type.dtype)


def _uniform_between(c: Context, _: Value, low: float = 0.0, high: float = 1.0, *, generator: None = None) -> Value:
    spread = c.one("mul", [_uniform(c, c.type.shape), c.scalar(high - low, "float32")])
    return c.one("add", [spread, c.scalar(low, "float32")])


def _randn(c: Context, *_: Any, **__: Any) -> Value:
    """Box and Muller 1958: two uniforms make one normal number."""
    one = c.scalar(1.0, "float32")
    radius = c.one("log", [c.one("sub", [one, _uniform(c, c.type.shape)])])
    radius = c.one("sqrt", [c.one("mul", [radius, c.scalar(-2.0, "float32")])])
    angle = c.one("mul", [_uniform(c, c.type.shape), c.scalar(2 * torch.pi, "float32")])
    return c.one("mul", [radius, c.one("cos", [angle])])


def _normal(c: Context, _: Value, mean: float = 0.0, std: float = 1.0, *, generator: None = None) -> Value:
    spread = c.one("mul", [_randn(c), c.scalar(std, "float32")])
    return c.one("add", [spread, c.scalar(mean, "float32")])


def _randint(c: Context, *numbers: Any, **_: Any) -> Value:
    ends = [n for n in numbers if isinstance(n, int) and not isinstance(n, bool)]
    low, high = (0, ends[0]) if len(ends) == 1 else (ends[0], ends[1])
    if high - low > 1 << 24:
        raise c.refuse(f"draws from {high - low} numbers, more than float32 tells apart", "draw from at most 2**24")
    scaled = c.one("mul", [_uniform(c, c.type.shape), c.scalar(high - low, "float32")])
    whole = c.cast(c.one("floor", [scaled]), c.type.dtype)
    return c.one("add", [whole, c.scalar(low, c.type.dtype)])


ENTRIES: Mapping[str, Entry] = {
    # constants
    **{
        f"aten.{name}": _filled(0)
        for name in (
            "empty.memory_format",
            "empty_permuted.default",
            "empty_strided.default",
            "empty_like.default",
            "new_empty.default",
            "new_empty_strided.default",
            "zeros.default",
            "zeros_like.default",
            "new_zeros.default",
            "zero.default",
        )
    },
    **{f"aten.{name}.default": _filled(1) for name in ("ones", "ones_like", "new_ones")},
    "aten.full.default": _full,
    "aten.full_like.default": _full,
    "aten.fill.Scalar": _full,
    "aten.fill.Tensor": _full,
    "aten.new_full.default": _new_full,
    "aten.scalar_tensor.default": _scalar_tensor,
    "aten.arange.start_step": _arange,
    "aten.arange.start": _arange,
    "aten.arange.default": lambda c, stop, **named: _arange(c, 0, stop, **named),
    # random numbers
    "aten.bernoulli.p": _bernoulli,
    "aten.bernoulli.default": _bernoulli_tensor,
    "aten.rand.default": _rand,
    "aten.rand_like.default": _rand,
    "aten.uniform.default": _uniform_between,
    "aten.randn.default": _randn,
    "aten.randn_like.default": _randn,
    "aten.normal_functional.default": _normal,
    "aten.randint.default": _randint,
    "aten.randint.low": _randint,
    "aten.randint_like.default": _randint,
    "aten.randint_like.low_dtype": _randint,
}
