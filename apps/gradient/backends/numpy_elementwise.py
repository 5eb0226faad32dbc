"""Elementwise operators of the numpy backend: one operand, two operands, and their backward operators.

Where numpy has the function, the table names it. The rest are formulas of several steps; those run over blocks
that stay in the CPU's cache (`in_blocks`) and write into arrays they already own. Constants are np.float32:
with numpy 1.x a Python float would turn a 0-d float32 into float64.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import numpy as np

from apps.gradient.backends.backend import Call, Kernel, Prepare
from boinc_project.contract import philox
from boinc_project.contract.opset import number

Array = np.ndarray[Any, Any]

BLOCK = 1 << 15  # elements; with the few work arrays of a formula, about the size of a second-level cache
_F = np.float32
_ONE, _HALF, _ZERO = _F(1), _F(0.5), _F(0)


def plain(function: Kernel) -> Prepare:
    """An operator that numpy has under another or the same name."""
    return lambda call: function


def in_blocks(formula: Callable[..., None], *arrays: Array) -> Array:
    """Fill a new float32 array: formula(block of each input ..., block of the output)."""
    out = np.zeros(arrays[0].shape, np.float32)
    flat = [np.ascontiguousarray(array).reshape(-1) for array in (*arrays, out)]
    for first in range(0, out.size, BLOCK):
        formula(*(array[first : first + BLOCK] for array in flat))
    return out


# erf(x) = x * P(x*x) / Q(x*x) on |x| <= 3.9375 (beyond, erf is 1 in float32). The coefficients were fitted for
# this file by weighted least squares to a relative error of 2e-8; evaluated in float64 and rounded, the result is
# within 0.85 units in the last place.
_ERF_LIMIT = 3.9375
_ERF_P = (
    1.12837914478,
    0.191068665664,
    0.0528218025343,
    0.00379019479746,
    0.00028475821512,
    2.03592609396e-06,
)
_ERF_Q = (1.0, 0.502662899639, 0.114369671147, 0.0150188024014, 0.00116724725414, 3.79390173675e-05)


def erf_block(x: Array) -> Array:
    """erf of a 1-d block, float32."""
    wide = np.clip(x, _F(-_ERF_LIMIT), _F(_ERF_LIMIT)).astype(np.float64)
    square = wide * wide
    top, bottom = square * _ERF_P[5], square * _ERF_Q[5]
    for p, q in zip(_ERF_P[4:0:-1], _ERF_Q[4:0:-1]):
        top += p
        top *= square
        bottom += q
        bottom *= square
    top += _ERF_P[0]
    top *= wide
    bottom += _ERF_Q[0]
    top /= bottom
    return top.astype(np.float32)


def _erf(x: Array, out: Array) -> None:
    out[...] = erf_block(x)


def sigmoid_block(x: Array, out: Array) -> None:
    """1 / (1 + exp(-x)); exp overflows to infinity where the result is 0."""
    np.negative(x, out=out)
    np.exp(out, out=out)
    out += _ONE
    np.reciprocal(out, out=out)


def _silu(x: Array, out: Array) -> None:
    sigmoid_block(x, out)
    out *= x


def _silu_backward(grad: Array, x: Array, out: Array) -> None:
    """s (1 + x (1 - s)) grad with s = sigmoid(x)."""
    sigmoid_block(x, out)
    rest = _ONE - out
    rest *= x
    rest += _ONE
    out *= rest
    out *= grad


_SQRT_HALF = _F(math.sqrt(0.5))
_SQRT_2_OVER_PI = _F(math.sqrt(2 / math.pi))
_INV_SQRT_2PI = _F(1 / math.sqrt(2 * math.pi))
_CUBIC = _F(0.044715)  # Hendrycks, Gimpel: "Gaussian error linear units" (2016), the tanh form


def _gelu(x: Array, out: Array) -> None:
    """x/2 (1 + erf(x / sqrt 2))."""
    out[...] = erf_block(x * _SQRT_HALF)
    out += _ONE
    out *= x
    out *= _HALF


def _gelu_backward(grad: Array, x: Array, out: Array) -> None:
    """(cdf(x) + x pdf(x)) grad, of the standard normal distribution."""
    out[...] = erf_block(x * _SQRT_HALF)
    out += _ONE
    out *= _HALF
    density = x * x
    density *= -_HALF
    np.exp(density, out=density)
    density *= _INV_SQRT_2PI
    density *= x
    out += density
    out *= grad


def _gelu_tanh_inner(x: Array) -> Array:
    inner = x * x
    inner *= _CUBIC
    inner += _ONE
    inner *= x
    inner *= _SQRT_2_OVER_PI
    np.tanh(inner, out=inner)
    return inner


def _gelu_tanh(x: Array, out: Array) -> None:
    """x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))."""
    np.add(_gelu_tanh_inner(x), _ONE, out=out)
    out *= x
    out *= _HALF


def _gelu_tanh_backward(grad: Array, x: Array, out: Array) -> None:
    tanh = _gelu_tanh_inner(x)
    slope = x * x  # of the inner function: sqrt(2/pi) (1 + 3 * 0.044715 x^2)
    slope *= _F(3) * _CUBIC
    slope += _ONE
    slope *= _SQRT_2_OVER_PI
    slope *= x
    np.multiply(tanh, tanh, out=out)
    np.subtract(_ONE, out, out=out)
    out *= slope
    out += tanh
    out += _ONE
    out *= _HALF
    out *= grad


def _tanh_backward(grad: Array, y: Array, out: Array) -> None:
    np.multiply(y, y, out=out)
    np.subtract(_ONE, out, out=out)
    out *= grad


def _sigmoid_backward(grad: Array, y: Array, out: Array) -> None:
    np.subtract(_ONE, y, out=out)
    out *= y
    out *= grad


def _blocked(formula: Callable[..., None]) -> Prepare:
    return lambda call: lambda *arrays: in_blocks(formula, *arrays)


def _by_approximation(exact: Callable[..., None], tanh: Callable[..., None]) -> Prepare:
    def prepare(call: Call) -> Kernel:
        formula = tanh if call.attrs["approximate"] == "tanh" else exact
        return lambda *arrays: in_blocks(formula, *arrays)

    return prepare


def _threshold_backward(call: Call) -> Kernel:
    threshold = _F(number(call.attrs["threshold"]))
    return lambda grad, x: np.where(x <= threshold, _ZERO, grad)


def _relu(call: Call) -> Kernel:
    zero = np.dtype(call.outputs[0].dtype).type(0)
    return lambda x: np.maximum(x, zero)


def _clamp(call: Call) -> Kernel:
    """min(max(x, low), high): where the bounds cross, the upper one wins."""
    to_dtype = np.dtype(call.outputs[0].dtype).type
    low, high = (None if call.attrs[k] is None else to_dtype(number(call.attrs[k])) for k in ("min", "max"))
    if low is None:
        return (lambda x: x) if high is None else (lambda x: np.minimum(x, high))
    if high is None:
        return lambda x: np.maximum(x, low)
    return lambda x: np.minimum(np.maximum(x, low), high)


def _cast(call: Call) -> Kernel:
    """Towards zero for float to integer; what does not fit the integer is unspecified."""
    dtype = np.dtype(call.outputs[0].dtype)
    return lambda x: x.astype(dtype, copy=False)


_POWERS: dict[float, Kernel] = {
    # np.power costs fifteen multiplications; these exponents are what models use
    1.0: np.positive,
    2.0: np.square,
    3.0: lambda x: x * x * x,
    0.5: np.sqrt,
    -0.5: lambda x: np.reciprocal(np.sqrt(x)),
    -1.0: np.reciprocal,
}


def _pow(call: Call) -> Kernel:
    if call.outputs[0].dtype != "float32":
        return np.power  # raises for negative integer exponents
    exponent = call.immediates[1]
    special = None if exponent is None else _POWERS.get(float(exponent))
    return np.power if special is None else lambda x, _: special(x)


def _division(function: Kernel) -> Prepare:
    """Integers refuse a zero divisor; floats follow IEEE 754."""

    def checked(a: Array, b: Array) -> Array:
        if not np.all(b):
            raise ZeroDivisionError("integer division by zero")
        result: Array = function(a, b)
        return result

    return lambda call: function if call.outputs[0].dtype == "float32" else checked


def _random_uniform(call: Call) -> Kernel:
    stream, (out,) = call.attrs["stream"], call.outputs
    return lambda seed, step: philox.uniform(int(seed), int(step), stream, out.numel).reshape(out.shape)


def _random_bernoulli(call: Call) -> Kernel:
    stream, p, (out,) = call.attrs["stream"], call.attrs["p"], call.outputs
    return lambda seed, step: philox.bernoulli(int(seed), int(step), stream, out.numel, p).reshape(out.shape)


OPS: dict[str, Prepare] = {
    "cast": _cast,
    "neg": plain(np.negative),
    "abs": plain(np.absolute),
    "sign": plain(lambda x: np.subtract(x > 0, x < 0, dtype=x.dtype)),  # NaN has sign 0, as in ATen
    "exp": plain(np.exp),
    "expm1": plain(np.expm1),
    "log": plain(np.log),
    "log1p": plain(np.log1p),
    "sqrt": plain(np.sqrt),
    "rsqrt": plain(lambda x: np.reciprocal(np.sqrt(x))),
    "reciprocal": plain(np.reciprocal),
    "sin": plain(np.sin),
    "cos": plain(np.cos),
    "tanh": plain(np.tanh),
    "sigmoid": _blocked(sigmoid_block),
    "erf": _blocked(_erf),
    "relu": _relu,
    "silu": _blocked(_silu),
    "floor": plain(np.floor),
    "ceil": plain(np.ceil),
    "round": plain(np.rint),  # halves to even
    "trunc": plain(np.trunc),
    "logical_not": plain(np.logical_not),
    "isnan": plain(np.isnan),
    "isinf": plain(np.isinf),
    "gelu": _by_approximation(_gelu, _gelu_tanh),
    "clamp": _clamp,
    "add": plain(np.add),
    "sub": plain(np.subtract),
    "mul": plain(np.multiply),
    "div": plain(np.divide),
    "pow": _pow,
    "maximum": plain(np.maximum),  # NaN wins, as in ATen
    "minimum": plain(np.minimum),
    "remainder": _division(np.remainder),  # the divisor's sign
    "fmod": _division(np.fmod),  # the dividend's sign
    "floor_divide": _division(np.floor_divide),
    "eq": plain(np.equal),
    "ne": plain(np.not_equal),
    "lt": plain(np.less),
    "le": plain(np.less_equal),
    "gt": plain(np.greater),
    "ge": plain(np.greater_equal),
    "logical_and": plain(np.logical_and),
    "logical_or": plain(np.logical_or),
    "logical_xor": plain(np.logical_xor),
    "bitwise_and": plain(np.bitwise_and),
    "bitwise_or": plain(np.bitwise_or),
    "where": plain(np.where),
    "gelu_backward": _by_approximation(_gelu_backward, _gelu_tanh_backward),
    "threshold_backward": _threshold_backward,
    "tanh_backward": _blocked(_tanh_backward),
    "sigmoid_backward": _blocked(_sigmoid_backward),
    "silu_backward": _blocked(_silu_backward),
    "random_bernoulli": _random_bernoulli,
    "random_uniform": _random_uniform,
}
