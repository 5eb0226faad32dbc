"""One description for each case of each operator, read by every test (and benchmark) of a backend.

A case names an operator, how its inputs are drawn and its attributes. Sizes lie around 1, 32 and 64, where
work-groups and vector registers end. `arrays()` draws the inputs: the same numbers everywhere, every time.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np

from boinc_project.contract.opset import OPSET

Array = np.ndarray[Any, Any]
SIZES = (1, 31, 32, 33, 63, 64, 65)


@dataclass(frozen=True)
class Draw:
    """How one input is drawn: a dtype, a shape and where the values lie (integers: low <= value < high)."""

    dtype: str
    shape: tuple[int, ...]
    kind: str = "normal"  # normal | positive | unit | probability | special | integers
    low: int = 0
    high: int = 2

    def array(self, rng: np.random.Generator) -> Array:
        if self.dtype == "bool":
            return np.asarray(rng.random(self.shape) < 0.5)
        if self.dtype != "float32":
            return rng.integers(self.low, self.high, self.shape, dtype=np.int64).astype(self.dtype)
        values = {
            "normal": lambda: rng.standard_normal(self.shape),
            "positive": lambda: np.exp(rng.standard_normal(self.shape)),
            "unit": lambda: rng.uniform(-1, 1, self.shape),
            "probability": lambda: rng.random(self.shape),
            "integers": lambda: rng.integers(self.low, self.high, self.shape),
            "special": lambda: _special(self.shape),
        }[self.kind]()
        return np.asarray(values, np.float32)


def _special(shape: tuple[int, ...]) -> Array:
    """Zeros of both signs, infinities, NaN, halves, subnormal, large and small numbers, over and over."""
    values = [0.0, -0.0, np.inf, -np.inf, np.nan, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-40, 1e30, -1e30, 1e-30, 1.0, -1.0, 88.0]
    return np.resize(np.array(values, np.float32), shape)


@dataclass(frozen=True)
class OpCase:
    """An operator on drawn inputs; `finish` may make some inputs consistent with others (a softmax's output)."""

    op: str
    inputs: tuple[Draw | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[list[Any]], None] | None = None

    @property
    def id(self) -> str:
        inputs = "-".join("none" if d is None else _short(d) for d in self.inputs)
        attrs = "-".join(f"{k}={v}" for k, v in self.attrs.items())
        return f"{self.op}-{inputs}-{attrs}".replace(" ", "")

    def arrays(self) -> list[Array | None]:
        """The inputs, None where one is absent."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        made = [None if draw is None else draw.array(rng) for draw in self.inputs]
        if self.finish is not None:
            self.finish(made)
        return made


def _short(draw: Draw) -> str:
    kind = "" if draw.kind in ("normal", "integers") else draw.kind
    return f"{draw.dtype}{list(draw.shape)}{kind}"


def f(*shape: int, kind: str = "normal") -> Draw:
    """float32 input."""
    return Draw("float32", shape, kind)


def ints(*shape: int, high: int, low: int = 0, dtype: str = "int64") -> Draw:
    """Integer input, low <= value < high."""
    return Draw(dtype, shape, "integers", low, high)


def bools(*shape: int) -> Draw:
    return Draw("bool", shape)


# --- elementwise ------------------------------------------------------------------------------------------------------

_UNARY = ("neg", "abs", "sign", "exp", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "silu", "floor", "ceil")
_UNARY += ("round", "trunc", "isnan", "isinf", "reciprocal")
_UNARY_POSITIVE = ("log", "log1p", "sqrt", "rsqrt")
_ARITHMETIC = ("add", "sub", "mul", "maximum", "minimum")
_DIVISION = ("remainder", "fmod", "floor_divide")
_COMPARISON = ("eq", "ne", "lt", "le", "gt", "ge")
_BROADCASTS = (((33,), (33,)), ((65, 1), (1, 31)), ((), (64,)), ((2, 1, 3), (5, 1)), ((1,), ()), ((0, 3), (1, 3)))


def elementwise() -> Iterator[OpCase]:
    for op in (*_UNARY, *_UNARY_POSITIVE):
        kind = "positive" if op in _UNARY_POSITIVE else "normal"
        for n in SIZES:
            yield OpCase(op, (f(n, kind=kind),))
        for shape in ((), (0, 3), (33, 65), (3, 1, 31)):
            yield OpCase(op, (f(*shape, kind=kind),))
        if op not in ("sin", "cos"):
            yield OpCase(op, (f(33, kind="special"),))
    for op in ("neg", "abs", "sign", "relu"):
        for dtype in ("int64", "int32"):
            yield OpCase(op, (ints(33, low=-9, high=9, dtype=dtype),))
    yield OpCase("logical_not", (bools(33),))
    for approximate in ("none", "tanh"):
        for shape in ((1,), (33,), (65, 33), (40000,)):
            yield OpCase("gelu", (f(*shape),), {"approximate": approximate})
            yield OpCase("gelu_backward", (f(*shape), f(*shape)), {"approximate": approximate})
    for low, high in ((-0.5, 0.5), (None, 0.25), (0, None), (1, -1), ("-inf", 1.5), (None, None)):
        yield OpCase("clamp", (f(65),), {"min": low, "max": high})
    yield OpCase("clamp", (f(33, kind="special"),), {"min": -1.0, "max": 1.0})
    yield OpCase("clamp", (ints(33, low=-9, high=9),), {"min": -2, "max": 3})
    yield from _binary()
    yield from _backward()


def _binary() -> Iterator[OpCase]:
    for op in (*_ARITHMETIC, "div", "pow", *_DIVISION, *_COMPARISON):
        kind = "positive" if op == "pow" else "normal"
        for a, b in _BROADCASTS:
            yield OpCase(op, (f(*a, kind=kind), f(*b)))
        for n in SIZES:
            yield OpCase(op, (f(n, kind=kind), f(n)))
        if op not in ("div", "pow"):
            for dtype in ("int64", "int32"):
                low = 1 if op in _DIVISION else -9
                yield OpCase(op, (ints(3, 33, low=-9, high=9, dtype=dtype), ints(33, low=low, high=9, dtype=dtype)))
    for op in (*_ARITHMETIC, *_COMPARISON, "div"):
        yield OpCase(op, (f(17, 1, kind="special"), f(17, kind="special")))
    for op in _DIVISION:
        yield OpCase(op, (ints(33, low=-9, high=9), ints(33, low=-9, high=0)))
        yield OpCase(op, (ints(33, high=200, dtype="uint8"), ints(33, low=1, high=9, dtype="uint8")))
    yield OpCase("pow", (ints(33, low=-4, high=5), ints(33, high=6)))
    for op in ("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or"):
        yield OpCase(op, (bools(33), bools(3, 33)))
    for op in ("bitwise_and", "bitwise_or"):
        yield OpCase(op, (ints(33, low=-99, high=99, dtype="int32"), ints(1, low=-99, high=99, dtype="int32")))
    yield OpCase("where", (bools(5, 1), f(33), f(5, 33)))
    yield OpCase("where", (bools(65), f(), f(65)))
    yield OpCase("where", (bools(31), ints(31, high=9), ints(31, high=9)))
    for dtype, to in product(("float32", "int64", "int32", "uint8", "bool"), repeat=2):
        draw = bools(33) if dtype == "bool" else Draw(dtype, (33,), "integers", 0, 5)
        yield OpCase("cast", (draw,), {"dtype": to})
    yield OpCase("cast", (f(65),), {"dtype": "int64"})


def _backward() -> Iterator[OpCase]:
    for n in SIZES:
        yield OpCase("threshold_backward", (f(n), f(n)), {"threshold": 0})
        yield OpCase("tanh_backward", (f(n), f(n, kind="unit")))
        yield OpCase("sigmoid_backward", (f(n), f(n, kind="probability")))
        yield OpCase("silu_backward", (f(n), f(n)))
    yield OpCase("threshold_backward", (f(3, 33), f(3, 33)), {"threshold": 0.25})


# --- movement and indexing --------------------------------------------------------------------------------------------


def movement() -> Iterator[OpCase]:
    yield OpCase("reshape", (f(6, 33),), {"shape": [3, 66]})
    yield OpCase("reshape", (f(1),), {"shape": []})
    yield OpCase("reshape", (f(0, 3),), {"shape": [3, 0, 2]})
    yield OpCase("permute", (f(3, 31, 5),), {"dims": [2, 0, 1]})
    yield OpCase("permute", (f(),), {"dims": []})
    yield OpCase("expand", (f(33, 1),), {"shape": [2, 33, 65]})
    yield OpCase("expand", (f(),), {"shape": [3]})
    for start, stop, step in ((0, 33, 1), (5, 20, 1), (1, 32, 3), (7, 7, 2)):
        region = {"dim": 1, "start": start, "stop": stop, "step": step}
        length = len(range(start, stop, step))
        yield OpCase("slice", (f(3, 33, 2),), region)
        yield OpCase("slice_scatter", (f(3, 33, 2), f(3, length, 2)), region)
    yield OpCase("cat", (f(3, 1, 2), f(3, 33, 2), f(3, 0, 2)), {"dim": 1})
    yield OpCase("cat", (ints(4, high=9),), {"dim": 0})
    for pad in ([1, 2], [0, 3, 2, 0], [-1, 2, 1, -3], [], [1, 1, 1, 1, 1, 1]):
        yield OpCase("constant_pad_nd", (f(3, 5, 33),), {"pad": pad, "value": 0.5})
    yield OpCase("constant_pad_nd", (f(3),), {"pad": [1, 1], "value": "-inf"})
    yield OpCase("flip", (f(3, 33, 2),), {"dims": [0, 2]})
    yield OpCase("full", (), {"shape": [3, 33], "value": -0.1, "dtype": "float32"})
    yield OpCase("full", (), {"shape": [], "value": True, "dtype": "bool"})
    yield OpCase("full", (), {"shape": [0, 2], "value": 7, "dtype": "int64"})
    yield OpCase("arange", (), {"start": 3, "step": -2, "length": 65, "dtype": "int64"})
    yield OpCase("arange", (), {"start": 0.1, "step": 0.3, "length": 33, "dtype": "float32"})
    yield OpCase("arange", (), {"start": 0, "step": 1, "length": 0, "dtype": "int32"})


def indexing() -> Iterator[OpCase]:
    for dim, index in ((0, (9, 31)), (1, (7, 65)), (1, (3, 2))):
        yield OpCase("gather", (f(7, 33) if dim else f(7, 31), ints(*index, high=7 if dim == 0 else 33)), {"dim": dim})
    yield OpCase("scatter", (f(5, 33), ints(5, 9, high=33), f(5, 31)), {"dim": 1}, _distinct)
    yield OpCase("scatter", (ints(33, high=99), ints(31, high=33), ints(31, high=99)), {"dim": 0}, _distinct)
    yield OpCase("scatter_add", (f(5, 33), ints(4, 65, high=33), f(5, 65)), {"dim": 1})
    yield OpCase("scatter_add", (f(5, 3, 2), ints(64, 3, 1, high=5), f(64, 3, 2)), {"dim": 0})
    yield OpCase("scatter_add", (ints(7, high=9), ints(65, high=7), ints(65, high=9)), {"dim": 0})
    yield OpCase("index", (f(33, 5), ints(65, low=-33, high=33)), {"dim": 0})
    yield OpCase("index", (f(3, 7, 5, 2), ints(31, 1, high=7), ints(4, low=-5, high=5)), {"dim": 1})
    yield OpCase("index", (f(3, 7), ints(high=3), ints(9, high=7)), {"dim": 0})
    for accumulate in (False, True):
        finish = None if accumulate else _distinct_put
        attrs = {"dim": 0, "accumulate": accumulate}
        yield OpCase("index_put", (f(33, 5), f(31, 5), ints(31, low=-33, high=33)), attrs, finish)
        attrs = {"dim": 1, "accumulate": accumulate}
        yield OpCase("index_put", (f(3, 33, 2), f(2), ints(31, high=33)), attrs, finish)
    attrs = {"dim": 1, "accumulate": True}
    yield OpCase("index_put", (f(2, 7, 5, 3), f(2, 6, 4, 3), ints(6, 1, high=7), ints(4, low=-5, high=5)), attrs)
    yield OpCase("index_put", (ints(7, high=9), ints(33, high=9), ints(33, high=7)), {"dim": 0, "accumulate": True})
    yield OpCase("index_select", (f(5, 33), ints(65, high=33)), {"dim": 1})
    for n, d in product((1, 33, 65), (1, 31, 64)):
        yield OpCase("embedding", (f(n, d), ints(3, 7, high=n)))
        for padding_idx in (-1, 0):
            attrs = {"num_weights": n, "padding_idx": padding_idx}
            yield OpCase("embedding_dense_backward", (f(5, 33, d), ints(5, 33, high=n)), attrs)
    yield OpCase("embedding", (f(5, 3), ints(0, high=5)))
    yield OpCase("embedding_dense_backward", (f(0, 3), ints(0, high=5)), {"num_weights": 5, "padding_idx": -1})
    for dim, flag in product((0, 1), (False, True)):
        yield OpCase("sort", (f(33, 65),), {"dim": dim, "descending": flag})
        yield OpCase("sort", (ints(33, 31, high=5),), {"dim": dim, "descending": flag})
        yield OpCase("sort", (f(33, 2, kind="special"),), {"dim": dim, "descending": flag})
        yield OpCase("topk", (f(33, 65),), {"k": 7, "dim": dim, "largest": flag})
        yield OpCase("topk", (ints(9, 31, high=5),), {"k": 9, "dim": dim, "largest": flag})


def _distinct(made: list[Any]) -> None:
    """No index twice along dim, where the result would be any one of the values."""
    x, index = made[0], made[1]
    for row in index.reshape(-1, index.shape[-1]):
        row[:] = np.random.default_rng(1).permutation(x.shape[-1])[: row.size]


def _distinct_put(made: list[Any]) -> None:
    size = 33
    made[2][:] = np.random.default_rng(2).permutation(size)[: made[2].size]


# --- reductions, matrices, softmax, losses ----------------------------------------------------------------------------


def reductions() -> Iterator[OpCase]:
    shapes = [((n,), [0]) for n in SIZES] + [((33, 65), [0]), ((33, 65), [1]), ((65, 33, 31), [1]), ((), [])]
    shapes += [((5, 3, 31, 2), [0, 2]), ((5, 3, 31, 2), [0, 1, 2, 3]), ((5, 3, 31, 2), []), ((5, 3, 31), [2, 1])]
    shapes += [((300, 7), [0]), ((2, 200, 3), [1]), ((1000, 65), [0])]
    for (shape, dims), keepdim in product(shapes, (False, True)):
        attrs = {"dims": dims, "keepdim": keepdim}
        for op in ("sum", "mean", "amax", "amin"):
            yield OpCase(op, (f(*shape),), attrs)
        for op in ("any", "all"):
            yield OpCase(op, (bools(*shape),), attrs)
        if math.prod(shape[d] for d in dims) <= 100:
            yield OpCase("prod", (f(*shape),), attrs)
    attrs = {"dims": [1], "keepdim": False}
    for dtype in ("int64", "int32", "uint8"):
        yield OpCase("sum", (ints(3, 33, high=200, dtype=dtype),), attrs)
        yield OpCase("prod", (ints(3, 5, high=9, dtype=dtype),), attrs)
        yield OpCase("amax", (ints(3, 33, high=200, dtype=dtype),), attrs)
    yield OpCase("sum", (bools(3, 33),), attrs)
    for op in ("sum", "prod", "any", "all"):
        draw = bools(3, 0) if op in ("any", "all") else f(3, 0)
        yield OpCase(op, (draw,), attrs)
        yield OpCase(op, (bools(0, 3) if op in ("any", "all") else f(0, 3),), attrs)
    yield OpCase("sum", (f(17, kind="special"),), {"dims": [0], "keepdim": False})
    yield OpCase("amax", (f(3, 17, kind="special"),), {"dims": [0], "keepdim": False})
    for op, dim, keepdim in product(("argmax", "argmin"), (0, 1, None), (False, True)):
        yield OpCase(op, (f(33, 65),), {"dim": dim, "keepdim": keepdim})
        yield OpCase(op, (ints(31, 7, high=4),), {"dim": dim, "keepdim": keepdim})
        yield OpCase(op, (f(3, 17, kind="special"),), {"dim": dim, "keepdim": keepdim})
    for dim in (0, 1):
        yield OpCase("cumsum", (f(33, 65),), {"dim": dim})
        yield OpCase("cumsum", (ints(31, 7, high=9, dtype="int32"),), {"dim": dim})
        yield OpCase("cumsum", (bools(31, 7),), {"dim": dim})


def matrices() -> Iterator[OpCase]:
    for m, k, n in [(s, s, s) for s in SIZES] + [(1, 65, 31), (33, 1, 64), (65, 63, 1), (3, 300, 5), (7, 0, 5)]:
        yield OpCase("mm", (f(m, k), f(k, n)))
        yield OpCase("bmm", (f(3, m, k), f(3, k, n)))
        yield OpCase("addmm", (f(n), f(m, k), f(k, n)))
    yield OpCase("addmm", (f(33, 1), f(33, 5), f(5, 31)))
    yield OpCase("addmm", (f(), f(3, 5), f(5, 31)))


def _softmax(x: Array, dim: int) -> Array:
    e = np.exp(x.astype(np.float64) - x.max(axis=dim, keepdims=True))
    return (e / e.sum(axis=dim, keepdims=True)).astype(np.float32)


def _softmax_output(dim: int, log: bool) -> Callable[[list[Any]], None]:
    def finish(made: list[Any]) -> None:
        out = _softmax(made[1], dim)
        made[1] = np.log(out.astype(np.float64)).astype(np.float32) if log else out

    return finish


def softmax_and_losses() -> Iterator[OpCase]:
    for shape, dim in [((3, n), 1) for n in SIZES] + [
        ((33, 5), 0),
        ((2, 65, 3), 1),
        ((31,), 0),
        ((0, 3), 1),
        ((2, 1000), 1),
    ]:
        for log in (False, True):
            name = "log_softmax" if log else "softmax"
            yield OpCase(name, (f(*shape),), {"dim": dim})
            finish = _softmax_output(dim, log) if math.prod(shape) else None
            yield OpCase(f"{name}_backward", (f(*shape), f(*shape)), {"dim": dim}, finish)
    for shape in ((5,), (33, 7), (4, 65, 3), (2, 5, 3, 2)):
        classes = shape[0] if len(shape) == 1 else shape[1]
        target = shape[1:] if len(shape) == 1 else (shape[0], *shape[2:])
        for reduction, weighted, ignore in product(("none", "mean", "sum"), (False, True), (-100, 1)):
            attrs = {"reduction": reduction, "ignore_index": ignore}
            weight = f(classes, kind="positive") if weighted else None
            index = ints(*target, high=classes) if target else ints(high=1)
            yield OpCase("nll_loss_forward", (f(*shape), index, weight), attrs)
            grad = f(*target) if reduction == "none" else f()
            total = f(kind="positive")
            yield OpCase("nll_loss_backward", (grad, f(*shape), index, weight, total), attrs)
    attrs = {"reduction": "sum", "ignore_index": -100}
    yield OpCase("nll_loss_forward", (f(9, 5), ints(9, high=5), None), attrs, _ignore_some)


def _ignore_some(made: list[Any]) -> None:
    made[1][::3] = -100


# --- convolution, pooling, normalisation ------------------------------------------------------------------------------


def _conv(axes: int, **changes: Any) -> dict[str, Any]:
    attrs: dict[str, Any] = {
        "stride": [1] * axes,
        "padding": [0] * axes,
        "dilation": [1] * axes,
        "transposed": False,
        "output_padding": [0] * axes,
        "groups": 1,
    }
    return {**attrs, **changes}


_CONVOLUTIONS: tuple[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]], ...] = (
    ((2, 3, 9, 8), (5, 3, 3, 3), _conv(2)),
    ((2, 3, 9, 8), (5, 3, 3, 2), _conv(2, stride=[2, 1], padding=[1, 1])),
    ((1, 4, 33, 31), (6, 2, 3, 3), _conv(2, padding=[1, 1], dilation=[2, 1], groups=2)),
    ((3, 6, 7, 7), (6, 1, 5, 5), _conv(2, padding=[2, 2], groups=6)),  # depthwise
    ((3, 4, 7, 7), (8, 1, 3, 3), _conv(2, stride=[2, 2], groups=4)),  # depthwise, two outputs each
    ((2, 65, 5, 5), (33, 65, 1, 1), _conv(2)),
    ((2, 3, 8, 8), (4, 3, 1, 1), _conv(2, stride=[2, 2])),
    ((2, 3, 8, 8), (16, 3, 4, 4), _conv(2, stride=[4, 4])),  # a vision transformer's patches
    ((2, 3, 65), (4, 3, 3), _conv(1, stride=[2], padding=[1])),
    ((1, 2, 5, 6, 7), (3, 2, 2, 3, 2), _conv(3, stride=[1, 2, 1], padding=[1, 0, 1])),
    ((2, 4, 5, 6), (4, 3, 3, 3), _conv(2, transposed=True)),
    (
        (2, 4, 5, 6),
        (4, 2, 3, 2),
        _conv(2, transposed=True, stride=[2, 3], padding=[1, 0], output_padding=[1, 2], groups=2),
    ),
    ((2, 4, 5, 5), (4, 1, 3, 3), _conv(2, transposed=True, stride=[2, 2], dilation=[2, 2], groups=4)),
    ((2, 4, 31), (4, 3, 2), _conv(1, transposed=True, stride=[2])),
)


def _convolution_out(x: tuple[int, ...], w: tuple[int, ...], attrs: Mapping[str, Any]) -> tuple[int, ...]:
    from boinc_project.contract.opset import TensorType, convolution_output

    return convolution_output(TensorType("float32", x), TensorType("float32", w), attrs).shape


def convolutions() -> Iterator[OpCase]:
    for x, w, attrs in _CONVOLUTIONS:
        out = _convolution_out(x, w, attrs)
        yield OpCase("convolution", (f(*x), f(*w), None), attrs)
        yield OpCase("convolution", (f(*x), f(*w), f(out[1])), attrs)
        yield OpCase("convolution_backward", (f(*out), f(*x), f(*w)), {**attrs, "output_mask": [True, True, True]})
        yield OpCase("convolution_backward", (f(*out), f(*x), f(*w)), {**attrs, "output_mask": [False, True, False]})


def pools() -> Iterator[OpCase]:
    from boinc_project.contract.opset import TensorType, pool2d_output

    for x, kernel, stride, padding, dilation, ceil_mode in (
        ((2, 3, 8, 9), [2, 2], [2, 2], [0, 0], [1, 1], False),
        ((2, 3, 9, 9), [3, 3], [2, 2], [1, 1], [1, 1], False),
        ((2, 3, 33, 31), [3, 2], [2, 3], [1, 0], [1, 1], True),
        ((1, 2, 9, 10), [2, 3], [1, 2], [1, 1], [2, 3], True),
        ((1, 1, 5, 5), [5, 5], [1, 1], [2, 2], [1, 1], False),
    ):
        attrs: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "padding": padding, "dilation": dilation}
        attrs["ceil_mode"] = ceil_mode
        out = pool2d_output(TensorType("float32", x), attrs)
        plane = x[2] * x[3]
        yield OpCase("max_pool2d_with_indices", (f(*x),), attrs)
        yield OpCase("max_pool2d_with_indices", (f(*x, kind="special"),), attrs)
        yield OpCase("max_pool2d_with_indices_backward", (f(*out), f(*x), ints(*out, high=plane)), attrs)
        if dilation != [1, 1]:
            continue
        undilated = {name: value for name, value in attrs.items() if name != "dilation"}
        for count_include_pad, divisor in ((True, None), (False, None), (True, 3)):
            average = {**undilated, "count_include_pad": count_include_pad, "divisor_override": divisor}
            yield OpCase("avg_pool2d", (f(*x),), average)
            yield OpCase("avg_pool2d_backward", (f(*out), f(*x)), average)


def _statistics(made: list[Any], x: Array, rows: int, places: tuple[int, int], eps: float) -> None:
    lines = x.reshape(rows, -1).astype(np.float64)
    mean, variance = lines.mean(axis=1), lines.var(axis=1)
    made[places[0]] = mean.reshape(made[places[0]].shape).astype(np.float32)
    made[places[1]] = (1 / np.sqrt(variance + eps)).reshape(made[places[1]].shape).astype(np.float32)


def _row_statistics(rows: int) -> Callable[[list[Any]], None]:
    return lambda made: _statistics(made, made[1], rows, (2, 3), 1e-5)


def _channel_statistics(made: list[Any]) -> None:
    x = np.moveaxis(made[1], 1, 0)
    _statistics(made, np.ascontiguousarray(x), x.shape[0], (5, 6), 1e-5)


_MASKS = ([True, True, True], [True, False, False], [False, True, True])


def normalisations() -> Iterator[OpCase]:
    for outer, inner in [((3,), (n,)) for n in SIZES] + [
        ((65, 2), (33,)),
        ((), (31,)),
        ((3,), (5, 7)),
        ((300,), (64,)),
    ]:
        shape, ones = outer + inner, outer + (1,) * len(inner)
        attrs = {"normalized_shape": list(inner), "eps": 1e-5}
        yield OpCase("native_layer_norm", (f(*shape), f(*inner), f(*inner)), attrs)
        yield OpCase("native_layer_norm", (f(*shape), None, None), attrs)
        for mask in _MASKS:
            weight = f(*inner) if mask[1] else None
            inputs = (f(*shape), f(*shape), f(*ones), f(*ones), weight, None)
            attrs = {"normalized_shape": list(inner), "output_mask": mask}
            finish = _row_statistics(math.prod(outer))
            yield OpCase("native_layer_norm_backward", inputs, attrs, finish)
    for shape, groups in (((2, 6, 5, 7), 3), ((3, 4, 65), 1), ((5, 4), 2), ((1, 33, 3), 33)):
        c = shape[1]
        yield OpCase("native_group_norm", (f(*shape), f(c), f(c)), {"groups": groups, "eps": 1e-5})
        yield OpCase("native_group_norm", (f(*shape), None, None), {"groups": groups, "eps": 1e-5})
        for mask in _MASKS:
            statistics = f(shape[0], groups)
            inputs = (f(*shape), f(*shape), statistics, statistics, f(c) if mask[1] else None)
            finish = _row_statistics(shape[0] * groups)
            yield OpCase("native_group_norm_backward", inputs, {"groups": groups, "output_mask": mask}, finish)
    for shape, training in product(((5, 3), (33, 4, 7), (2, 5, 31, 9)), (True, False)):
        c = shape[1]
        running = (f(c), f(c, kind="positive"))
        attrs = {"training": training, "momentum": 0.1, "eps": 1e-5}
        yield OpCase("native_batch_norm", (f(*shape), f(c), f(c), *running), attrs)
        yield OpCase("native_batch_norm", (f(*shape), None, None, *running), attrs)
        for mask in _MASKS:
            weight = f(c) if mask[1] else None
            inputs = (f(*shape), f(*shape), weight, *running, f(c), f(c))
            attrs = {"training": training, "eps": 1e-5, "output_mask": mask}
            yield OpCase("native_batch_norm_backward", inputs, attrs, _channel_statistics)


# --- random numbers ---------------------------------------------------------------------------------------------------


def randoms() -> Iterator[OpCase]:
    seeds = (ints(low=-(2**62), high=2**62), ints(high=2**40))
    for shape in ([1], [31], [3, 33], [65], [], [0, 2], [3, 5, 7]):
        yield OpCase("random_uniform", seeds, {"shape": shape, "stream": 7})
        yield OpCase("random_bernoulli", seeds, {"p": 0.9, "shape": shape, "stream": 2**32 - 1})
    yield OpCase("random_bernoulli", seeds, {"p": 0, "shape": [9], "stream": 0})
    yield OpCase("random_bernoulli", seeds, {"p": 1, "shape": [9], "stream": 0})


_FAMILIES = (
    elementwise,
    movement,
    indexing,
    reductions,
    matrices,
    softmax_and_losses,
    convolutions,
    pools,
    normalisations,
    randoms,
)


def _all() -> dict[str, list[OpCase]]:
    found: dict[str, list[OpCase]] = {op: [] for op in OPSET}
    seen = set()
    for family in _FAMILIES:
        for case in family():
            if case.id not in seen:
                seen.add(case.id)
                found[case.op].append(case)
    return found


CASES: Mapping[str, list[OpCase]] = _all()
