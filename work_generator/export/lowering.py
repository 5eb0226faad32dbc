"""From ATen operators to the opset: one table, one entry per ATen operator.

What it is: `LOWERINGS`, a literal table from ATen's name to the function that writes the opset's nodes
for it, and `lower`, which walks a trace through the table. What it is not: tracing (tracing.py) or
clean-up (draft.py).
An entry receives a `Context` (what it may write with) and the ATen arguments, tensors as `Value`s.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType
from work_generator.export.draft import Draft, Scalar, Value
from work_generator.export.errors import ExportError

DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}
# Constants that the model builds while it runs are evaluated here only while they are small.
MAX_CONSTANT_BYTES = 64 << 10
# Up to here the result travels; above, the operators that make it do, and are run once a task.
MAX_LITERAL_BYTES = 512


@dataclass
class Context:
    """What an entry of the table writes with: the draft, the result's type and the model's line."""

    draft: Draft
    target: str
    out: Sequence[TensorType | None]
    where: str
    random: tuple[Value, Value] | None  # seed and step; None where nothing may be random

    def one(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> Value:
        return self.draft.one(op, inputs, attrs, self.where)

    def many(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> tuple[Value, ...]:
        return self.draft.node(op, inputs, attrs, self.where)

    def scalar(self, value: Scalar, dtype: str) -> Value:
        return self.draft.scalar(value, dtype, self.where)

    def full(self, shape: Sequence[int], value: Scalar, dtype: str) -> Value:
        return self.draft.full(shape, value, dtype, self.where)

    def cast(self, x: Value, dtype: str) -> Value:
        return self.one("cast", [x], dtype=dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return self.one("reshape", [x], shape=list(shape))

    @property
    def type(self) -> TensorType:
        """Type of the (first) result."""
        first = self.out[0]
        assert first is not None, self.target
        return first

    def operand(self, x: Value | Scalar, dtype: str) -> Value:
        """A tensor or Python number as a value of this dtype."""
        return self.cast(x, dtype) if isinstance(x, Value) else self.scalar(x, dtype)

    def refuse(self, problem: str, remedy: str) -> ExportError:
        return refusal(self.target, problem, self.where, remedy)


Entry = Callable[..., Value | tuple[Value | None, ...]]


def refusal(target: str, problem: str, where: str, remedy: str) -> ExportError:
    """The one sentence of a refusal."""
    return ExportError(f"{target} {problem} (at {where or 'a line outside the model'}): {remedy}")


def promoted(*operands: Value | Scalar) -> str:
    """The dtype in which ATen computes with these operands."""
    result: Any = None
    for x in operands:
        # result_type weighs tensors with dimensions over 0-d ones over Python numbers.
        sample: Any = (
            torch.empty([1] * min(len(x.shape), 1), dtype=TORCH_DTYPES[x.dtype])
            if isinstance(x, Value)
            else x
        )
        result = sample if result is None else _wider(result, sample)
    dtype = result.dtype if isinstance(result, Tensor) else torch.result_type(torch.empty(()), result)
    return DTYPES.get(dtype, "float32")


def _wider(a: Any, b: Any) -> Tensor:
    dims = max((x.dim() for x in (a, b) if isinstance(x, Tensor)), default=0)
    return torch.empty([1] * dims, dtype=torch.result_type(a, b))


# --- helpers that make entries ---


def _unary(op: str, *, floating: bool = False, **attrs: Any) -> Entry:
    def entry(c: Context, x: Value, *_: Any, **__: Any) -> Value:
        return c.one(op, [c.cast(x, c.type.dtype if floating else x.dtype)], **attrs)

    return entry


def _binary(op: str, *, boolean: str | None = None) -> Entry:
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
        return c.one(op, [_truth(c, a), _truth(c, b)])

    return entry


def _bitwise(op: str, logical: str) -> Entry:
    def entry(c: Context, a: Value | Scalar, b: Value | Scalar) -> Value:
        dtype = c.type.dtype
        return c.one(logical if dtype == "bool" else op, [c.operand(a, dtype), c.operand(b, dtype)])

    return entry


def _truth(c: Context, x: Value | Scalar) -> Value:
    if not isinstance(x, Value):
        return c.scalar(bool(x), "bool")
    return x if x.dtype == "bool" else c.one("ne", [x, c.scalar(0, x.dtype)])


def _dim(dim: int, rank: int) -> int:
    return dim % rank if rank else 0


def _dims(dims: Any, rank: int) -> list[int]:
    """ATen's dims (None, an int, or a list, [] meaning all) as the opset's."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(rank))
    return [_dim(d, rank) for d in ([dims] if isinstance(dims, int) else dims)] if rank else []


def _pair(value: Any, default: Any = None) -> list[int]:
    chosen = default if value in (None, []) else value
    both = [chosen] if isinstance(chosen, int) else list(chosen)
    return both * 2 if len(both) == 1 else both


# --- elementwise ---


def _rsub(c: Context, a: Value, b: Value | Scalar, alpha: Scalar = 1) -> Value:
    return _one(_binary("sub")(c, b, c.one("mul", [a, c.scalar(alpha, a.dtype)])))


def _div_mode(c: Context, a: Value | Scalar, b: Value | Scalar, *, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return _one(_binary("div")(c, a, b))
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
    return c.one("where", [_truth(c, condition), c.operand(a, dtype), c.operand(b, dtype)])


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


# --- movement ---


def _same(c: Context, x: Value, *_: Any, **__: Any) -> Value:
    """Views and copies that change neither values nor, in our order of elements, shape."""
    return c.cast(x, c.type.dtype)


def _view(c: Context, x: Value, *_: Any, **__: Any) -> Value:
    """Anything that keeps the order of elements: the traced shape says the rest."""
    return c.reshape(x, c.type.shape)


def _expand(c: Context, x: Value, *_: Any, **__: Any) -> Value:
    return c.one("expand", [x], shape=list(c.type.shape))


def _permute(c: Context, x: Value, dims: Sequence[int]) -> Value:
    return c.one("permute", [x], dims=[_dim(d, len(x.shape)) for d in dims])


def _transpose(c: Context, x: Value, a: int = 0, b: int = 1) -> Value:
    dims = list(range(len(x.shape)))
    if len(dims) > 1:
        a, b = _dim(a, len(dims)), _dim(b, len(dims))
        dims[a], dims[b] = dims[b], dims[a]
    return c.one("permute", [x], dims=dims)


def _bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """A slice's ends as the opset wants them: 0 <= start <= stop <= size."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


def _slice(c: Context, x: Value, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Value:
    dim = _dim(dim, len(x.shape))
    first, last = _bounds(x.shape[dim], start, stop)
    return c.one("slice", [x], dim=dim, start=first, stop=last, step=step)


def _select(c: Context, x: Value, dim: int, index: int) -> Value:
    dim = _dim(dim, len(x.shape))
    index %= x.shape[dim]
    return c.reshape(c.one("slice", [x], dim=dim, start=index, stop=index + 1, step=1), c.type.shape)


def _split(c: Context, x: Value, sizes: int | Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    dim = _dim(dim, len(x.shape))
    if isinstance(sizes, int):
        total = x.shape[dim]
        sizes = [min(sizes, total - first) for first in range(0, total, sizes)]
    parts, first = [], 0
    for size in sizes:
        parts.append(c.one("slice", [x], dim=dim, start=first, stop=first + size, step=1))
        first += size
    return tuple(parts)


def _unbind(c: Context, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(
        _select_at(c, x, _dim(dim, len(x.shape)), i) for i in range(x.shape[_dim(dim, len(x.shape))])
    )


def _select_at(c: Context, x: Value, dim: int, index: int) -> Value:
    part = c.one("slice", [x], dim=dim, start=index, stop=index + 1, step=1)
    return c.reshape(part, [s for d, s in enumerate(x.shape) if d != dim])


def _cat(c: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    # ATen lets 1-d empty tensors join anything.
    parts = [c.cast(t, c.type.dtype) for t in tensors if t.shape != (0,)] or list(tensors[:1])
    return c.one("cat", parts, dim=_dim(dim, len(parts[0].shape)))


def _stack(c: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    rank = len(c.type.shape)
    dim = _dim(dim, rank)
    shape = [1 if d == dim else size for d, size in enumerate(c.type.shape)]
    return c.one("cat", [c.reshape(c.cast(t, c.type.dtype), shape) for t in tensors], dim=dim)


def _pad(c: Context, x: Value, pad: Sequence[int], value: Scalar = 0) -> Value:
    number = c.scalar(value, x.dtype).producer
    assert number is not None
    return c.one("constant_pad_nd", [x], pad=list(pad), value=number.attrs["value"])


def _flip(c: Context, x: Value, dims: Sequence[int]) -> Value:
    return c.one("flip", [x], dims=_dims(dims, len(x.shape)))


def _slice_scatter(
    c: Context, x: Value, src: Value, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    dim = _dim(dim, len(x.shape))
    first, last = _bounds(x.shape[dim], start, stop)
    if (first, last, step) == (0, x.shape[dim], 1):
        return c.cast(src, x.dtype)
    return c.one("slice_scatter", [x, c.cast(src, x.dtype)], dim=dim, start=first, stop=last, step=step)


def _select_scatter(c: Context, x: Value, src: Value, dim: int, index: int) -> Value:
    dim = _dim(dim, len(x.shape))
    index %= x.shape[dim]
    part = c.reshape(c.cast(src, x.dtype), [1 if d == dim else s for d, s in enumerate(x.shape)])
    return c.one("slice_scatter", [x, part], dim=dim, start=index, stop=index + 1, step=1)


def _copy(c: Context, x: Value, src: Value, *_: Any) -> Value:
    return c.one("expand", [c.cast(src, x.dtype)], shape=list(x.shape))


# --- indexing ---


def _gather(c: Context, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not x.shape:
        return c.reshape(x, index.shape)
    return c.one("gather", [x, c.cast(index, "int64")], dim=_dim(dim, len(x.shape)))


def _scatter(op: str) -> Entry:
    def entry(c: Context, x: Value, dim: int, index: Value, src: Value | Scalar) -> Value:
        source = c.cast(src, x.dtype) if isinstance(src, Value) else c.full(index.shape, src, x.dtype)
        return c.one(op, [x, c.cast(index, "int64"), source], dim=_dim(dim, len(x.shape)))

    return entry


def _index_places(c: Context, x: Value, indices: Sequence[Value | None]) -> tuple[list[int], list[Value]]:
    places = [d for d, index in enumerate(indices) if index is not None]
    given = [index for index in indices if index is not None]
    if any(index.dtype in ("bool", "uint8") for index in given):
        raise c.refuse(
            "picks elements by a mask, so its result's size depends on the data",
            "use torch.where or multiply by the mask",
        )
    return places, [c.cast(index, "int64") for index in given]


def _index(c: Context, x: Value, indices: Sequence[Value | None]) -> Value:
    places, given = _index_places(c, x, indices)
    if places == list(range(places[0], places[0] + len(places))):
        return c.one("index", [x, *given], dim=places[0])
    # With indices apart ATen puts their dimensions first; so does moving them to the front.
    rest = [d for d in range(len(x.shape)) if d not in places]
    return c.one("index", [c.one("permute", [x], dims=[*places, *rest]), *given], dim=0)


def _index_put(
    c: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Value:
    given = [index for index in indices if index is not None]
    values = c.cast(values, x.dtype)
    if len(given) == 1 and given[0].dtype == "bool" and not accumulate and values.type.numel == 1:
        before = next(d for d, index in enumerate(indices) if index is not None)
        after = len(x.shape) - before - len(given[0].shape)
        mask = c.reshape(given[0], (*given[0].shape, *[1] * after))
        return c.one("where", [mask, c.reshape(values, ()), x])
    places, given = _index_places(c, x, indices)
    if places == list(range(places[0], places[0] + len(places))):
        return c.one("index_put", [x, values, *given], dim=places[0], accumulate=accumulate)
    order = [*places, *(d for d in range(len(x.shape)) if d not in places)]
    moved = c.one(
        "index_put", [c.one("permute", [x], dims=order), values, *given], dim=0, accumulate=accumulate
    )
    return c.one("permute", [moved], dims=[order.index(d) for d in range(len(order))])


def _index_select(c: Context, x: Value, dim: int, index: Value) -> Value:
    return c.one("index_select", [x, c.cast(index, "int64")], dim=_dim(dim, len(x.shape)))


def _embedding(c: Context, weight: Value, indices: Value, *_: Any, **__: Any) -> Value:
    return c.one("embedding", [weight, c.cast(indices, "int64")])


def _embedding_backward(
    c: Context, grad: Value, indices: Value, num_weights: int, padding_idx: int, by_frequency: bool
) -> Value:
    if by_frequency:
        raise c.refuse("scales by frequency", "set scale_grad_by_freq=False")
    index = c.cast(indices, "int64")
    return c.one("embedding_dense_backward", [grad, index], num_weights=num_weights, padding_idx=padding_idx)


def _topk(
    c: Context, x: Value, k: int, dim: int = -1, largest: bool = True, _sorted: bool = True
) -> tuple[Value, ...]:
    return c.many("topk", [x], k=k, dim=_dim(dim, len(x.shape)), largest=largest)


def _sort(c: Context, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, ...]:
    return c.many("sort", [x], dim=_dim(dim, len(x.shape)), descending=descending)


def _sort_stable(
    c: Context, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Value, ...]:
    return _sort(c, x, dim, descending)


# --- constants and random numbers ---


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
        raise c.refuse(
            "draws random numbers in evaluation mode", "draw them in training mode only (self.training)"
        )
    stream = c.draft.streams
    c.draft.streams += 1
    return c.one("random_uniform", list(c.random), shape=list(shape), stream=stream)


def _bernoulli(c: Context, x: Value, p: Scalar = 0.5, *, generator: None = None) -> Value:
    if c.random is None:
        raise c.refuse(
            "draws random numbers in evaluation mode", "draw them in training mode only (self.training)"
        )
    stream = c.draft.streams
    c.draft.streams += 1
    drawn = c.one("random_bernoulli", list(c.random), p=float(p), shape=list(c.type.shape), stream=stream)
    return c.cast(drawn, c.type.dtype)


def _bernoulli_tensor(c: Context, p: Value, *, generator: None = None) -> Value:
    return c.cast(c.one("lt", [_uniform(c, c.type.shape), c.cast(p, "float32")]), c.type.dtype)


def _rand(c: Context, *_: Any, **__: Any) -> Value:
    return c.cast(_uniform(c, c.type.shape), c.type.dtype)


def _uniform_between(
    c: Context, _: Value, low: float = 0.0, high: float = 1.0, *, generator: None = None
) -> Value:
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
        raise c.refuse(
            f"draws from {high - low} numbers, more than float32 tells apart", "draw from at most 2**24"
        )
    scaled = c.one("mul", [_uniform(c, c.type.shape), c.scalar(high - low, "float32")])
    whole = c.cast(c.one("floor", [scaled]), c.type.dtype)
    return c.one("add", [whole, c.scalar(low, c.type.dtype)])


# --- reductions ---


def _sum(c: Context, x: Value, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    if c.type.dtype == "float32":
        x = c.cast(x, "float32")
    return c.one("sum", [x], dims=_dims(dims, len(x.shape)), keepdim=keepdim)


def _reduction(op: str) -> Entry:
    def entry(c: Context, x: Value, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
        if c.type.dtype == "float32":
            x = c.cast(x, "float32")
        if op in ("amax", "amin") and x.dtype == "bool":
            return c.one(
                "any" if op == "amax" else "all", [x], dims=_dims(dims, len(x.shape)), keepdim=keepdim
            )
        if op in ("any", "all"):
            x = _truth(c, x)
        return c.one(op, [x], dims=_dims(dims, len(x.shape)), keepdim=keepdim)

    return entry


def _extreme(op: str, where: str) -> Entry:
    """max.dim and min.dim: values and where they are."""

    def entry(c: Context, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        if not x.shape:
            return x, c.scalar(0, "int64")
        dim = _dim(dim, len(x.shape))
        return c.one(op, [x], dims=[dim], keepdim=keepdim), c.one(where, [x], dim=dim, keepdim=keepdim)

    return entry


def _argument(op: str) -> Entry:
    def entry(c: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if not x.shape:
            return c.scalar(0, "int64")
        return c.one(op, [x], dim=None if dim is None else _dim(dim, len(x.shape)), keepdim=keepdim)

    return entry


def _variance(
    c: Context, x: Value, dims: Any = None, unbiased: Any = True, keepdim: bool = False, **named: Any
) -> Value:
    correction = named.get("correction", 1 if unbiased else 0)
    return _variance_about(
        c, x, dims, 1 if correction is None else correction, named.get("keepdim", keepdim)
    )[0]


def _variance_about(
    c: Context, x: Value, dims: Any, correction: Scalar, keepdim: bool
) -> tuple[Value, Value]:
    reduced = _dims(dims, len(x.shape))
    count = 1
    for d in reduced:
        count *= x.shape[d]
    mean = c.one("mean", [x], dims=reduced, keepdim=True)
    away = c.one("sub", [x, mean])
    total = c.one("sum", [c.one("mul", [away, away])], dims=reduced, keepdim=keepdim)
    kept = mean if keepdim else c.reshape(mean, [s for d, s in enumerate(x.shape) if d not in reduced])
    return c.one("div", [total, c.scalar(max(count - correction, 0), "float32")]), kept


def _var_mean(
    c: Context, x: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Value, Value]:
    return _variance_about(c, x, dims, 1 if correction is None else correction, keepdim)


def _cumsum(c: Context, x: Value, dim: int, *, dtype: Any = None) -> Value:
    if not x.shape:
        return c.cast(x, c.type.dtype)
    if c.type.dtype == "float32":
        x = c.cast(x, "float32")
    return c.one("cumsum", [x], dim=_dim(dim, len(x.shape)))


# --- matrices ---


def _mm(c: Context, a: Value, b: Value) -> Value:
    return c.one("mm", [a, b])


def _bmm(c: Context, a: Value, b: Value) -> Value:
    return c.one("bmm", [a, b])


def _times(c: Context, x: Value, factor: Scalar) -> Value:
    return c.one("mul", [x, c.scalar(factor, x.dtype)])


def _addmm(c: Context, bias: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    if alpha == 1 and beta == 1:
        return c.one("addmm", [bias, a, b])
    product = _times(c, c.one("mm", [a, b]), alpha)
    return product if beta == 0 else c.one("add", [_times(c, bias, beta), product])


def _baddbmm(c: Context, bias: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    product = _times(c, c.one("bmm", [a, b]), alpha)
    return product if beta == 0 else c.one("add", [_times(c, bias, beta), product])


def _mv(c: Context, a: Value, x: Value) -> Value:
    return c.reshape(c.one("mm", [a, c.reshape(x, (x.shape[0], 1))]), c.type.shape)


def _dot(c: Context, a: Value, b: Value) -> Value:
    return c.one("sum", [c.one("mul", [a, b])], dims=[0], keepdim=False)


# --- convolution and pooling ---


def _convolution_attrs(
    stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> dict[str, Any]:
    return {
        "stride": list(stride),
        "padding": list(padding),
        "dilation": list(dilation),
        "transposed": transposed,
        "output_padding": list(output_padding),
        "groups": groups,
    }


def _convolution(c: Context, x: Value, w: Value, b: Value | None, *settings: Any) -> Value:
    return c.one("convolution", [x, w, b], **_convolution_attrs(*settings))


def _masked(made: Sequence[Value], mask: Sequence[bool]) -> tuple[Value | None, ...]:
    """The opset gives only the wanted outputs; ATen has None for the others."""
    left = iter(made)
    return tuple(next(left) if wanted else None for wanted in mask)


def _convolution_backward(
    c: Context, grad: Value, x: Value, w: Value, _: Any, *settings: Any
) -> tuple[Value | None, ...]:
    *conv, mask = settings
    attrs = {**_convolution_attrs(*conv), "output_mask": list(mask)}
    return _masked(c.many("convolution_backward", [grad, x, w], **attrs), mask)


def _max_pool_attrs(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> dict[str, Any]:
    size = _pair(kernel)
    return {
        "kernel_size": size,
        "stride": _pair(stride, size),
        "padding": _pair(padding, 0),
        "dilation": _pair(dilation, 1),
        "ceil_mode": ceil,
    }


def _planes(c: Context, x: Value) -> Value:
    """[C,H,W] as [1,C,H,W]."""
    return x if len(x.shape) == 4 else c.reshape(x, (1, *x.shape))


def _max_pool(
    c: Context,
    x: Value,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> tuple[Value, ...]:
    made = c.many(
        "max_pool2d_with_indices", [_planes(c, x)], **_max_pool_attrs(kernel, stride, padding, dilation, ceil)
    )
    return tuple(c.reshape(v, v.shape[len(v.shape) - len(x.shape) :]) for v in made)


def _max_pool_backward(
    c: Context,
    grad: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
    indices: Value,
) -> Value:
    inputs = [_planes(c, v) for v in (grad, x, indices)]
    made = c.one(
        "max_pool2d_with_indices_backward", inputs, **_max_pool_attrs(kernel, stride, padding, dilation, ceil)
    )
    return c.reshape(made, x.shape)


def _avg_pool_attrs(
    kernel: Any, stride: Any, padding: Any, ceil: bool, count_pad: bool, divisor: Any
) -> dict[str, Any]:
    size = _pair(kernel)
    return {
        "kernel_size": size,
        "stride": _pair(stride, size),
        "padding": _pair(padding, 0),
        "ceil_mode": ceil,
        "count_include_pad": count_pad,
        "divisor_override": divisor,
    }


def _avg_pool(
    c: Context,
    x: Value,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil: bool = False,
    count_pad: bool = True,
    divisor: Any = None,
) -> Value:
    attrs = _avg_pool_attrs(kernel, stride, padding, ceil, count_pad, divisor)
    return c.reshape(c.one("avg_pool2d", [_planes(c, x)], **attrs), c.type.shape)


def _avg_pool_backward(
    c: Context,
    grad: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    count_pad: bool,
    divisor: Any,
) -> Value:
    attrs = _avg_pool_attrs(kernel, stride, padding, ceil, count_pad, divisor)
    return c.reshape(c.one("avg_pool2d_backward", [_planes(c, grad), _planes(c, x)], **attrs), x.shape)


def _adaptive_attrs(c: Context, x: Value, out: Sequence[int]) -> dict[str, Any]:
    sizes = x.shape[-2:]
    if any(size % wanted for size, wanted in zip(sizes, out, strict=True)):
        raise c.refuse(
            f"pools {list(sizes)} to {list(out)}, which does not divide",
            "choose an output size that divides the input's",
        )
    kernel = [size // wanted for size, wanted in zip(sizes, out, strict=True)]
    return _avg_pool_attrs(kernel, kernel, 0, False, True, None)


def _adaptive_avg_pool(c: Context, x: Value, size: Sequence[int]) -> Value:
    return c.reshape(c.one("avg_pool2d", [_planes(c, x)], **_adaptive_attrs(c, x, size)), c.type.shape)


def _adaptive_avg_pool_backward(c: Context, grad: Value, x: Value) -> Value:
    attrs = _adaptive_attrs(c, x, grad.shape[-2:])
    return c.reshape(c.one("avg_pool2d_backward", [_planes(c, grad), _planes(c, x)], **attrs), x.shape)


# --- normalisation ---


def _layer_norm(
    c: Context, x: Value, shape: Sequence[int], w: Value | None, b: Value | None, eps: float
) -> tuple[Value, ...]:
    return c.many("native_layer_norm", [x, w, b], normalized_shape=list(shape), eps=eps)


def _layer_norm_backward(
    c: Context,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    rstd: Value,
    w: Value | None,
    b: Value | None,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    inputs = [grad, x, mean, rstd, w, b]
    made = c.many("native_layer_norm_backward", inputs, normalized_shape=list(shape), output_mask=list(mask))
    return _masked(made, mask)


def _group_norm(
    c: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> tuple[Value, ...]:
    return c.many("native_group_norm", [x, w, b], groups=groups, eps=eps)


def _group_norm_backward(
    c: Context,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    w: Value | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    made = c.many(
        "native_group_norm_backward", [grad, x, mean, rstd, w], groups=groups, output_mask=list(mask)
    )
    return _masked(made, mask)


def _running(c: Context, x: Value, mean: Value | None, var: Value | None) -> tuple[Value, Value]:
    """Running statistics, or those a module without them stands for."""
    channels = [x.shape[1]]
    return mean or c.full(channels, 0.0, "float32"), var or c.full(channels, 1.0, "float32")


def _batch_norm(
    c: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Five outputs: ATen's three, and the running statistics that ATen changes in place (see `lower`)."""
    inputs = [x, w, b, *_running(c, x, mean, var)]
    return c.many("native_batch_norm", inputs, training=training, momentum=momentum, eps=eps)


def _batch_norm_backward(
    c: Context,
    grad: Value,
    x: Value,
    w: Value | None,
    mean: Value | None,
    var: Value | None,
    save_mean: Value,
    save_invstd: Value,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    statistics = _running(c, x, mean, var)
    if save_mean.shape != (x.shape[1],):  # evaluation mode saves nothing
        save_mean, save_invstd = statistics
    inputs = [grad, x, w, *statistics, save_mean, save_invstd]
    made = c.many("native_batch_norm_backward", inputs, training=training, eps=eps, output_mask=list(mask))
    return _masked(made, mask)


# --- softmax and losses ---

REDUCTIONS = ("none", "mean", "sum")


def _softmax(op: str) -> Entry:
    def entry(c: Context, x: Value, dim: int, half_to_float: bool = False) -> Value:
        if not x.shape:
            return c.reshape(c.one(op, [c.reshape(x, (1,))], dim=0), ())
        return c.one(op, [x], dim=_dim(dim, len(x.shape)))

    return entry


def _softmax_backward(op: str) -> Entry:
    def entry(c: Context, grad: Value, out: Value, dim: int, dtype: Any = None) -> Value:
        return c.one(op, [grad, out], dim=_dim(dim, len(out.shape)))

    return entry


def _nll_loss(
    c: Context, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> tuple[Value, ...]:
    inputs = [x, c.cast(target, "int64"), weight]
    return c.many("nll_loss_forward", inputs, reduction=REDUCTIONS[reduction], ignore_index=ignore_index)


def _nll_loss_backward(
    c: Context,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total: Value,
) -> Value:
    inputs = [grad, x, c.cast(target, "int64"), weight, total]
    return c.one("nll_loss_backward", inputs, reduction=REDUCTIONS[reduction], ignore_index=ignore_index)


def _one(made: Value | tuple[Value | None, ...]) -> Value:
    assert isinstance(made, Value), made
    return made


# --- the table ---

LOWERINGS: Mapping[str, Entry] = {
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
    "aten.logical_not.default": lambda c, x: c.one("logical_not", [_truth(c, x)]),
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
    # backward of elementwise functions
    "aten.gelu_backward.default": _gelu_backward,
    "aten.threshold_backward.default": _threshold_backward,
    "aten.tanh_backward.default": _backward("tanh_backward"),
    "aten.sigmoid_backward.default": _backward("sigmoid_backward"),
    "aten.silu_backward.default": _backward("silu_backward"),
    # movement
    **{
        f"aten.{name}.default": _same
        for name in (
            "clone",
            "alias",
            "detach",
            "lift_fresh_copy",
            "lift_fresh",
            "lift",
            "_to_copy",
            "contiguous",
        )
    },
    "aten.to.dtype": _same,
    "prims.convert_element_type.default": _same,
    **{
        f"aten.{name}": _view
        for name in (
            "view.default",
            "_unsafe_view.default",
            "reshape.default",
            "_reshape_alias.default",
            "unsqueeze.default",
            "squeeze.default",
            "squeeze.dim",
            "squeeze.dims",
            "flatten.using_ints",
        )
    },
    "aten.expand.default": _expand,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.t.default": _transpose,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.split_with_sizes.default": _split,
    "aten.split.Tensor": _split,
    "aten.unbind.int": _unbind,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.constant_pad_nd.default": _pad,
    "aten.flip.default": _flip,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.copy.default": _copy,
    # indexing
    "aten.gather.default": _gather,
    "aten.scatter.src": _scatter("scatter"),
    "aten.scatter.value": _scatter("scatter"),
    "aten.scatter_add.default": _scatter("scatter_add"),
    "aten.index.Tensor": _index,
    "aten._unsafe_index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten._unsafe_index_put.default": _index_put,
    "aten.index_select.default": _index_select,
    "aten.embedding.default": _embedding,
    "aten.embedding_dense_backward.default": _embedding_backward,
    "aten.topk.default": _topk,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort_stable,
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
    # reductions
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
    "aten.mean.dim": _reduction("mean"),
    "aten.mean.default": _reduction("mean"),
    "aten.amax.default": _reduction("amax"),
    "aten.amin.default": _reduction("amin"),
    "aten.max.default": _reduction("amax"),
    "aten.min.default": _reduction("amin"),
    "aten.max.dim": _extreme("amax", "argmax"),
    "aten.min.dim": _extreme("amin", "argmin"),
    "aten.prod.default": _reduction("prod"),
    "aten.prod.dim_int": _reduction("prod"),
    "aten.any.default": _reduction("any"),
    "aten.any.dim": _reduction("any"),
    "aten.any.dims": _reduction("any"),
    "aten.all.default": _reduction("all"),
    "aten.all.dim": _reduction("all"),
    "aten.all.dims": _reduction("all"),
    "aten.argmax.default": _argument("argmax"),
    "aten.argmin.default": _argument("argmin"),
    "aten.var.correction": _variance,
    "aten.var.dim": _variance,
    "aten.var_mean.correction": _var_mean,
    "aten.cumsum.default": _cumsum,
    # matrices
    "aten.mm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.mv.default": _mv,
    "aten.dot.default": _dot,
    # convolution and pooling
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_backward,
    "aten.avg_pool2d.default": _avg_pool,
    "aten.avg_pool2d_backward.default": _avg_pool_backward,
    "aten._adaptive_avg_pool2d.default": _adaptive_avg_pool,
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_avg_pool_backward,
    # normalisation
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    # softmax and losses
    "aten._softmax.default": _softmax("softmax"),
    "aten._log_softmax.default": _softmax("log_softmax"),
    "aten._softmax_backward_data.default": _softmax_backward("softmax_backward"),
    "aten._log_softmax_backward_data.default": _softmax_backward("log_softmax_backward"),
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
}

REMEDIES: Mapping[str, str] = {
    "aten.nonzero": "its result's size depends on the data: use torch.where(mask, a, b) or multiply by the mask",
    "aten.masked_select": "its result's size depends on the data: use torch.where(mask, a, b) or multiply by the mask",
    "aten._unique2": "its result's size depends on the data: count with one_hot and sum instead",
    "aten.unique": "its result's size depends on the data: count with one_hot and sum instead",
    "aten._fft": "complex numbers are not in the opset: use real arithmetic, for example a convolution",
    "aten.complex": "complex numbers are not in the opset: keep real and imaginary parts as two tensors",
    "aten.view_as_complex": "complex numbers are not in the opset: write the rotation with sin and cos",
    "aten.as_strided": "use reshape, permute, unfold by slices, or index instead",
}
DEFAULT_REMEDY = "write that line with operators of the opset (docs/own_model.md lists them)"


def without_remedy_of(target: str) -> str:
    """The remedy for an operator that the table does not have."""
    for prefix, remedy in REMEDIES.items():
        if target.startswith(prefix):
            return remedy
    return DEFAULT_REMEDY


# --- walking a trace through the table ---


class Lowering:
    """One walk: fx nodes in order, each replaced by what its entry writes into the draft."""

    def __init__(self, draft: Draft, random: tuple[Value, Value] | None) -> None:
        self.draft = draft
        self.random = random
        self.values: dict[fx.Node, Any] = {}
        self.constants: dict[str, Tensor] = {}  # tensors found in the trace that must travel, by input name
        self.known: dict[fx.Node, Tensor] = {}  # small values that do not depend on any input
        self.mixes_samples = False
        self._constant_inputs: dict[str, Value] = {}

    def walk(self, module: fx.GraphModule, inputs: Sequence[Value]) -> list[Value]:
        """Values of the trace's outputs."""
        waiting = iter(inputs)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(waiting)
            elif node.op == "get_attr":
                self.known[node] = _attribute(module, str(node.target)).detach()
            elif node.op == "call_function" and node.target is operator.getitem:
                self._getitem(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                results = [self._resolved(each) for each in node.args[0]]
                return [r if isinstance(r, Value) else self.draft.scalar(r, "float32") for r in results]
        raise AssertionError("a traced graph ends in its outputs")

    def _getitem(self, node: fx.Node) -> None:
        source, position = node.args
        if source in self.known:
            self.known[node] = self.known[source][position]  # type: ignore[index]
        else:
            self.values[node] = self.values[source][position]  # type: ignore[index]

    def _call(self, node: fx.Node) -> None:
        if not self._is_known(node):
            self.values[node] = self._emitted(node)

    def _emitted(self, node: fx.Node) -> Any:
        """What the table's entry writes for the node."""
        target = str(node.target)
        if target not in LOWERINGS:
            target = target.replace("_copy.", ".")  # view_copy and its like are views without sharing
        where = _where_of(node)
        entry = LOWERINGS.get(target)
        if entry is None:
            raise refusal(str(node.target), "is not in the opset", where, without_remedy_of(target))
        context = Context(self.draft, target, _types(node, where), where, self.random)
        arguments = [self._resolved(a) for a in node.args]
        named = {key: self._resolved(a) for key, a in node.kwargs.items()}
        try:
            made = entry(context, *arguments, **named)
        except ContractError as error:
            raise refusal(
                target, f"cannot be written in the opset: {error}", where, DEFAULT_REMEDY
            ) from error
        except TypeError as error:
            problem = f"is called with arguments that are not supported ({error})"
            raise refusal(target, problem, where, DEFAULT_REMEDY) from error
        self._check_types(context, made)
        if target == "aten.native_batch_norm.default":
            made = self._updated_statistics(node, made)  # type: ignore[arg-type]
        return made

    def _is_known(self, node: fx.Node) -> bool:
        """Compute a small node whose inputs are all known, so that only its result need be written."""
        if (
            not isinstance(node.target, torch._ops.OpOverload)
            or torch.Tag.nondeterministic_seeded in node.target.tags
        ):
            return False
        values = [v for v in (node.meta.get("val"),) if isinstance(v, Tensor)]
        if len(values) != 1 or values[0].numel() * values[0].element_size() > MAX_CONSTANT_BYTES:
            return False
        if any(each not in self.known for each in node.all_input_nodes):
            return False
        if "empty" in str(node.target):
            self.known[node] = torch.zeros(values[0].shape, dtype=values[0].dtype)
            return True
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        self.known[node] = node.target(*arguments[0], **arguments[1])  # type: ignore[index]
        return True

    def _resolved(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in self.known and argument not in self.values:
                self.values[argument] = self._written(argument)
            return self.values[argument]
        if isinstance(argument, list | tuple):
            return [self._resolved(each) for each in argument]
        return argument

    def _written(self, node: fx.Node) -> Any:
        """A known tensor as the cheapest value: one number, a progression, or an input that travels once."""
        tensor, where = self.known[node], _where_of(node)
        if tensor.dtype == torch.float64 and tensor.dim() == 0:
            return tensor.item()  # as a Python number it follows the other operand's dtype, as ATen has it
        if tensor.dtype in (torch.float64, torch.float16, torch.bfloat16):
            tensor = tensor.float()
        if tensor.dtype in (torch.int16, torch.int8):
            tensor = tensor.long()
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise refusal(str(node.target), f"makes {tensor.dtype}", where, "use float32 or int64")
        if not tensor.numel():
            return self.draft.full(tensor.shape, 0, dtype, where)
        first = tensor.flatten()[0]
        if bool((tensor == first).all()) or (tensor.is_floating_point() and bool(tensor.isnan().all())):
            return self.draft.full(tensor.shape, first.item(), dtype, where)
        if tensor.dim() == 1 and dtype == "int64":
            start, step, length = int(first), int(tensor[1] - tensor[0]), len(tensor)
            if torch.equal(tensor, torch.arange(length) * step + start):
                attrs = {"start": start, "step": step, "length": length, "dtype": dtype}
                return self.draft.one("arange", [], attrs, where)
        if node.op == "call_function" and tensor.numel() * tensor.element_size() > MAX_LITERAL_BYTES:
            try:  # computing a mask anew is cheaper than sending it
                return self._emitted(node)
            except ExportError:
                pass  # its result is known all the same
        return self._constant(tensor.contiguous(), dtype)

    def _constant(self, tensor: Tensor, dtype: str) -> Value:
        """An input named by its content, so that equal tensors of all graphs of a job are one."""
        content = f"{dtype}{list(tensor.shape)}".encode() + tensor.numpy().tobytes()
        name = f"constant/traced.{hashlib.sha256(content).hexdigest()[:16]}"
        if name not in self.constants:
            self.constants[name] = tensor
            self._constant_inputs[name] = self.draft.input(name, "constant", dtype, tensor.shape)
        return self._constant_inputs[name]

    def _updated_statistics(self, node: fx.Node, made: tuple[Value, ...]) -> tuple[Value, ...]:
        """ATen changes the running statistics in place: whoever reads them later reads the new ones."""
        if node.args[5]:
            self.mixes_samples = True
            for argument, value in zip(node.args[3:5], made[3:], strict=True):
                if isinstance(argument, fx.Node):
                    self.values[argument] = value
        return made[:3]

    def _check_types(self, context: Context, made: Any) -> None:
        """An entry must give what ATen gave; anything else is a fault of the table, not of the model."""
        results = made if isinstance(made, tuple) else (made,)
        for value, expected in zip(results, context.out, strict=False):
            if value is not None and expected is not None and value.type != expected:
                # Empty statistics of a batch norm in evaluation mode have no counterpart.
                if context.target == "aten.native_batch_norm.default" and 0 in expected.shape:
                    continue
                raise AssertionError(f"{context.target} gave {value.type}, ATen gives {expected}")


def _attribute(module: fx.GraphModule, path: str) -> Tensor:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor), path
    return found


def _where_of(node: fx.Node) -> str:
    """The model's line; a backward node takes it from the nearest forward node that it reads."""
    where = node.meta.get("where")
    if where is None:
        for source in node.all_input_nodes:
            found = source.meta.get("where")
            if found:
                where = found if found.startswith("backward of ") else f"backward of {found}"
        node.meta["where"] = where = where or ""
    return str(where)


def _types(node: fx.Node, where: str) -> list[TensorType | None]:
    values = node.meta.get("val")
    return [_type(node, v, where) for v in (values if isinstance(values, list | tuple) else [values])]


def _type(node: fx.Node, value: Any, where: str) -> TensorType | None:
    if not isinstance(value, Tensor):
        return None
    if value.dtype not in DTYPES:
        name = str(value.dtype).removeprefix("torch.")
        raise refusal(
            str(node.target), f"makes {name}", where, "use float32 (no .half(), .double(), autocast) or int64"
        )
    if any(not isinstance(size, int) for size in value.shape):
        raise refusal(
            str(node.target),
            "has a dynamic shape",
            where,
            "make every shape a number that is known beforehand",
        )
    return TensorType(DTYPES[value.dtype], tuple(value.shape))
