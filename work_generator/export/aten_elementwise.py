"""ATen's elementwise operators: one operand, two operands, and their backward forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from work_generator.export.context import Context, Entry, promoted, truth
from work_generator.export.draft import Scalar, Value


def _unary(op: str, *, floating: bool = False, **attrs: Any) -> Entry:
    def entry(c: Context, x: Value, *_: Any, **__: Any) -> Value:
        return c.one(op, [c.cast(x, c.type.dtype if floating else x.dtype)], **attrs)

    return entry


def _binary(op: str, *, boolean: str | None = None) -> Callable[..., Value]:
    """Arithmetic in the result's dtype; `boolean` is the operator for two bools."""

    def entry(c: Context, a: Value | Scalar, b: Value | Scalar, *, alpha: Scalar = 1) -> Value:
        dtype = c.type.dtype
        if dtype == "bool" and boolean is not None:
            return c.one(boolean, [c.operand(a, "bool"), c.operand(b, "bool")])
        right = c.operand(b, dtype)
        if alpha != 1:
            right = c.one("mul", [right, c.scalar(alpha, dtype)])
        return c.one(op, [c.operand(a, dtype), right])

    return entry


def _comparison(op: str) -> Entry:
    def entry(c: Context, a: Value | Scalar, b: Value | Scalar) -> Value:
        dtype = promoted(a, b)
        return c.one(op, [c.operand(a, dtype), c.operand(b, dtype)])

    return entry


def _logical(op: str) -> Entry:
    def entry(c: Context, a: Value | Scalar, b: Value | Scalar) -> Value:
        return c.one(op, [truth(c, a), truth(c, b)])

    return entry


def _bitwise(op: str, logical: str) -> Entry:
    def entry(c: Context, a: Value | Scalar, b: Value | Scalar) -> Value:
        dtype = c.type.dtype
        return c.one(logical if dtype == "bool" else op, [c.operand(a, dtype), c.operand(b, dtype)])

    return entry


def _rsub(c: Context, a: Value, b: Value | Scalar, alpha: Scalar = 1) -> Value:
    return _binary("sub")(c, b, c.one("mul", [a, c.scalar(alpha, a.dtype)]))


def _div_mode(c: Context, a: Value | Scalar, b: Value | Scalar, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _binary("div")(c, a, b)
    dtype = promoted(a, b)
    left, right = c.operand(a, dtype), c.operand(b, dtype)
    if rounding_mode == "floor":
        return c.one("floor_divide", [left, right])
    if dtype == "float32":
        return c.one("trunc", [c.one("div", [left, right])])
    # Towards zero: the floor of the magnitudes with the sign put back.
    magnitude = c.one("floor_divide", [c.one("abs", [left]), c.one("abs", [right])])
    return c.one("mul", [magnitude, c.one("mul", [c.one("sign", [left]), c.one("sign", [right])])])


def _power(c: Context, x: Value | Scalar, exponent: Value | Scalar) -> Value:
    dtype = c.type.dtype
    left = c.operand(x, dtype)
    if isinstance(exponent, Value):
        return c.one("pow", [left, c.operand(exponent, dtype)])
    if exponent == 0:
        return c.full(c.type.shape, 1, dtype)
    if exponent == 1:
        return left
    if exponent in (2, 3):  # as ATen computes them
        square = c.one("mul", [left, left])
        return square if exponent == 2 else c.one("mul", [square, left])
    simple = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}.get(exponent)
    if simple is not None and dtype == "float32":
        return c.one(simple, [left])
    return c.one("pow", [left, c.scalar(exponent, dtype)])


def _where(c: Context, condition: Value, a: Value | Scalar, b: Value | Scalar) -> Value:
    dtype = c.type.dtype
    return c.one("where", [truth(c, condition), c.operand(a, dtype), c.operand(b, dtype)])


def _masked_fill(c: Context, x: Value, mask: Value, value: Value | Scalar) -> Value:
    return _where(c, mask, value, x)


def _clamp(c: Context, x: Value, low: Any = None, high: Any = None, **named: Any) -> Value:
    low, high = named.get("min", low), named.get("max", high)
    result = c.cast(x, c.type.dtype)
    if isinstance(low, Value) or isinstance(high, Value):
        if low is not None:
            result = c.one("maximum", [result, c.operand(low, result.dtype)])
        return result if high is None else c.one("minimum", [result, c.operand(high, result.dtype)])
    kind = int if result.dtype != "float32" else float
    bounds = [None if b is None else kind(b) for b in (low, high)]
    for bound, op in zip(bounds, ("maximum", "minimum"), strict=True):
        if bound is not None:
            result = c.one(op, [result, c.scalar(bound, result.dtype)])
    return result


def _leaky_relu(c: Context, x: Value, slope: Scalar = 0.01) -> Value:
    zero, scaled = c.scalar(0, x.dtype), c.one("mul", [x, c.scalar(slope, x.dtype)])
    return c.one("where", [c.one("gt", [x, zero]), x, scaled])


def _elu(c: Context, x: Value, alpha: Scalar = 1, scale: Scalar = 1, input_scale: Scalar = 1) -> Value:
    zero = c.scalar(0, x.dtype)
    curved = c.one("expm1", [c.one("mul", [x, c.scalar(input_scale, x.dtype)])])
    curved = c.one("mul", [curved, c.scalar(float(alpha) * float(scale), x.dtype)])
    straight = c.one("mul", [x, c.scalar(scale, x.dtype)])
    return c.one("where", [c.one("gt", [x, zero]), straight, curved])


def _scaled(op: str, before: float | None, after: float | None) -> Entry:
    """f(x * before) * after, for logarithms and powers of other bases."""

    def entry(c: Context, x: Value) -> Value:
        result = c.cast(x, "float32")
        if before is not None:
            result = c.one("mul", [result, c.scalar(before, "float32")])
        result = c.one(op, [result])
        return result if after is None else c.one("mul", [result, c.scalar(after, "float32")])

    return entry


def _tan(c: Context, x: Value) -> Value:
    return c.one("div", [c.one("sin", [x]), c.one("cos", [x])])


def _backward(op: str, **attrs: Any) -> Entry:
    """Backward of an elementwise function: grad and x of one shape."""

    def entry(c: Context, grad: Value, x: Value, *_: Any, **__: Any) -> Value:
        return c.one(op, [c.one("expand", [grad], shape=list(x.shape)), x], **attrs)

    return entry


def _gelu(c: Context, x: Value, *, approximate: str = "none") -> Value:
    return c.one("gelu", [x], approximate=approximate)


def _gelu_backward(c: Context, grad: Value, x: Value, *, approximate: str = "none") -> Value:
    return c.one("gelu_backward", [grad, x], approximate=approximate)


def _threshold_backward(c: Context, grad: Value, x: Value, threshold: Scalar) -> Value:
    return c.one("threshold_backward", [grad, x], threshold=threshold)


ENTRIES: Mapping[str, Entry] = {
    # one operand
    "aten.neg.default": _unary("neg"),
    "aten.abs.default": _unary("abs"),
    "aten.sign.default": _unary("sign"),
    "aten.sgn.default": _unary("sign"),
    "aten.exp.default": _unary("exp", floating=True),
    "aten.expm1.default": _unary("expm1", floating=True),
    "aten.log.default": _unary("log", floating=True),
    "aten.log1p.default": _unary("log1p", floating=True),
    "aten.log2.default": _scaled("log", None, 1.4426950408889634),
    "aten.log10.default": _scaled("log", None, 0.4342944819032518),
    "aten.exp2.default": _scaled("exp", 0.6931471805599453, None),
    "aten.sqrt.default": _unary("sqrt", floating=True),
    "aten.rsqrt.default": _unary("rsqrt", floating=True),
    "aten.reciprocal.default": _unary("reciprocal", floating=True),
    "aten.sin.default": _unary("sin", floating=True),
    "aten.cos.default": _unary("cos", floating=True),
    "aten.tan.default": _tan,
    "aten.tanh.default": _unary("tanh", floating=True),
    "aten.sigmoid.default": _unary("sigmoid", floating=True),
    "aten.erf.default": _unary("erf", floating=True),
    "aten.relu.default": _unary("relu"),
    "aten.silu.default": _unary("silu"),
    "aten.floor.default": _unary("floor", floating=True),
    "aten.ceil.default": _unary("ceil", floating=True),
    "aten.round.default": _unary("round", floating=True),
    "aten.trunc.default": _unary("trunc", floating=True),
    "aten.logical_not.default": lambda c, x: c.one("logical_not", [truth(c, x)]),
    "aten.bitwise_not.default": lambda c, x: c.one("logical_not", [x]),
    "aten.isnan.default": _unary("isnan"),
    "aten.isinf.default": _unary("isinf"),
    "aten.gelu.default": _gelu,
    "aten.leaky_relu.default": _leaky_relu,
    "aten.elu.default": _elu,
    "aten.clamp.default": _clamp,
    "aten.clamp.Tensor": _clamp,
    "aten.clamp_min.default": lambda c, x, low: _clamp(c, x, low, None),
    "aten.clamp_min.Tensor": lambda c, x, low: _clamp(c, x, low, None),
    "aten.clamp_max.default": lambda c, x, high: _clamp(c, x, None, high),
    "aten.clamp_max.Tensor": lambda c, x, high: _clamp(c, x, None, high),
    "aten.hardtanh.default": lambda c, x, low=-1.0, high=1.0: _clamp(c, x, low, high),
    # two operands
    "aten.add.Tensor": _binary("add", boolean="logical_or"),
    "aten.add.Scalar": _binary("add", boolean="logical_or"),
    "aten.sub.Tensor": _binary("sub"),
    "aten.sub.Scalar": _binary("sub"),
    "aten.rsub.Scalar": _rsub,
    "aten.rsub.Tensor": _rsub,
    "aten.mul.Tensor": _binary("mul", boolean="logical_and"),
    "aten.mul.Scalar": _binary("mul", boolean="logical_and"),
    "aten.div.Tensor": _binary("div"),
    "aten.div.Scalar": _binary("div"),
    "aten.div.Tensor_mode": _div_mode,
    "aten.div.Scalar_mode": _div_mode,
    "aten.floor_divide.default": lambda c, a, b: _div_mode(c, a, b, rounding_mode="floor"),
    "aten.pow.Tensor_Scalar": _power,
    "aten.pow.Tensor_Tensor": _power,
    "aten.pow.Scalar": _power,
    "aten.maximum.default": _binary("maximum", boolean="logical_or"),
    "aten.minimum.default": _binary("minimum", boolean="logical_and"),
    "aten.remainder.Tensor": _binary("remainder"),
    "aten.remainder.Scalar": _binary("remainder"),
    "aten.fmod.Tensor": _binary("fmod"),
    "aten.fmod.Scalar": _binary("fmod"),
    **{
        f"aten.{name}.{kind}": _comparison(name)
        for name in ("eq", "ne", "lt", "le", "gt", "ge")
        for kind in ("Tensor", "Scalar")
    },
    "aten.logical_and.default": _logical("logical_and"),
    "aten.logical_or.default": _logical("logical_or"),
    "aten.logical_xor.default": _logical("logical_xor"),
    "aten.bitwise_and.Tensor": _bitwise("bitwise_and", "logical_and"),
    "aten.bitwise_and.Scalar": _bitwise("bitwise_and", "logical_and"),
    "aten.bitwise_or.Tensor": _bitwise("bitwise_or", "logical_or"),
    "aten.bitwise_or.Scalar": _bitwise("bitwise_or", "logical_or"),
    "aten.bitwise_xor.Tensor": _logical("logical_xor"),
    "aten.where.self": _where,
    "aten.where.ScalarOther": _where,
    "aten.where.ScalarSelf": _where,
    "aten.where.Scalar": _where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill.Tensor": _masked_fill,
    # backward
    "aten.gelu_backward.default": _gelu_backward,
    "aten.threshold_backward.default": _threshold_backward,
    "aten.tanh_backward.default": _backward("tanh_backward"),
    "aten.sigmoid_backward.default": _backward("sigmoid_backward"),
    "aten.silu_backward.default": _backward("silu_backward"),
}
