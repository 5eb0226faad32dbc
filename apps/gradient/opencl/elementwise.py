"""Elementwise operators, and the constants: entries of chains (chains.py), or numbers and arrays known beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.values import View

#: The operators of chain_text.py's tables.
_OPERATORS = (
    "cast", "neg", "abs", "sign", "exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "reciprocal", "sin", "cos", "tanh",
    "sigmoid", "erf", "relu", "silu", "floor", "ceil", "round", "trunc", "logical_not", "isnan", "isinf", "gelu",
    "clamp", "add", "sub", "mul", "div", "pow", "maximum", "minimum", "remainder", "fmod", "floor_divide", "eq", "ne",
    "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "where",
    "gelu_backward", "threshold_backward", "tanh_backward", "sigmoid_backward", "silu_backward", "full",
)  # fmt: skip


def elementwise(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """An entry of a chain."""
    out = emit.like(call.outputs[0])
    emit.chain(call.op, call.attrs, [view for view in inputs if view is not None], out)
    return [out]


def arange(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """start + i * step: exact in integers; in float64, then rounded, for float32. Made here and uploaded once."""
    start, step, length = call.attrs["start"], call.attrs["step"], call.attrs["length"]
    dtype = call.outputs[0].dtype
    if dtype == "float32":
        return [emit.constant((float(start) + np.arange(length) * float(step)).astype(np.float32))]
    values = (int(start) + np.arange(length, dtype=np.int64) * int(step)).astype(dtype)
    return [emit.constant(values)]


OPS: Mapping[str, Lower] = {**dict.fromkeys(_OPERATORS, elementwise), "arange": arange}
