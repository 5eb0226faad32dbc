"""The opset: every operator a graph may name, what it takes, what it gives and what it costs.

What it is: a table (`OPSET`, at the end of this file) from an operator's name to its signature, its shape
rule and its cost. Names and meaning are ATen's where ATen has the operator; the values an operator computes are
specified by the numpy backend (`apps/gradient/backends/numpy_backend.py`).
What it is not: arithmetic. Nothing here allocates a tensor, so a graph from a stranger can be checked safely:
all sizes are Python ints, dimensions and ranks are bounded here, element counts and memory by the caller.

A signature reads `name(inputs; attributes)`: `[b]` is an input that may be absent (None), `idx...` stands for
one or more inputs and comes last, `dim?` is an attribute that may be null. Attributes are strict: all must be
given, none added, each of the kind that `_ATTRIBUTE_KINDS` states for its name. They are in canonical form,
which spares every backend the same special cases:

- dimensions count from 0 (never negative), slices satisfy 0 <= start <= stop <= size and step >= 1;
- a reduction's `dims` are exactly the dimensions reduced (an empty list reduces none);
- a number that JSON cannot hold is written 'inf', '-inf' or 'nan' (see `number`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

from boinc_project.contract.errors import ContractError

OPSET_VERSION = 1

DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
INTEGER_RANGE: Mapping[str, tuple[int, int]] = {
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint8": (0, 255),
}
MAX_DIMENSION = 2**40  # elements along one axis; products are Python ints and cannot overflow
MAX_RANK = 8
MAX_NODE_INPUTS = 4096  # cat and index; far above any model seen
MAX_FLOAT32 = 3.4028234663852886e38


class OpsetError(ContractError):
    """A node that the opset does not allow; the text names the operator, its inputs and what is wrong."""


@dataclass(frozen=True)
class TensorType:
    """A dtype of `DTYPE_BYTES` and a static shape (`()` is a 0-d tensor)."""

    dtype: str
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise OpsetError(f"dtype {_short(self.dtype)} is not one of {', '.join(DTYPE_BYTES)}")
        if not isinstance(self.shape, tuple) or len(self.shape) > MAX_RANK:
            raise OpsetError(f"shape {_short(self.shape)} is not a tuple of at most {MAX_RANK} sizes")
        for size in self.shape:
            if type(size) is not int or not 0 <= size <= MAX_DIMENSION:
                raise OpsetError(f"shape {_short(self.shape)}: every size must be an int from 0 to 2**40")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


Attributes = Mapping[str, Any]
Inputs = Sequence[Optional[TensorType]]
Outputs = tuple[TensorType, ...]
InferRule = Callable[[Inputs, Attributes], Outputs]
FlopsRule = Callable[[Inputs, Attributes, Outputs], int]


@dataclass(frozen=True)
class OpSpec:
    """One row of the table, parsed from its signature."""

    name: str
    signature: str
    inputs: tuple[str, ...]
    optional: tuple[bool, ...]
    variadic: bool  # the last input may be repeated
    attributes: Mapping[str, bool]  # name -> may be null
    infer: InferRule
    flops: FlopsRule


def infer(op: str, inputs: Inputs, attrs: Attributes) -> Outputs:
    """Types of the outputs of `op`; raises OpsetError naming the operator, the shapes or the attribute."""
    spec = OPSET.get(op) if isinstance(op, str) else None
    if spec is None:
        raise OpsetError(f"operator {_short(op)} is not in opset {OPSET_VERSION}")
    try:
        _check_inputs(spec, inputs)
        _check_attributes(spec, attrs)
        return spec.infer(inputs, attrs)
    except OpsetError as error:
        types = ", ".join("none" if t is None else str(t) for t in list(inputs)[:8])
        raise OpsetError(f"{op}({types}): {error}") from None


def flops(op: str, inputs: Inputs, attrs: Attributes, outputs: Outputs) -> int:
    """Floating-point operations of one node, for run-time estimates (transcendentals count `_HEAVY` each)."""
    return OPSET[op].flops(inputs, attrs, outputs)


def number(value: int | float | str) -> int | float:
    """The value of a number attribute: an int, a finite float, or 'inf', '-inf', 'nan' as a float."""
    return float(value) if isinstance(value, str) else value


def attribute_number(value: int | float) -> int | float | str:
    """The opposite of `number`: how a number is written in a graph's attributes."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


# --- attributes: the name says the kind ---------------------------------------------------------------------


def _is_int(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _is_number(value: object) -> bool:
    if type(value) is float:
        return math.isfinite(value)
    return _is_int(value) or (isinstance(value, str) and value in ("inf", "-inf", "nan"))


def _is_ints(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= 2 * MAX_RANK and all(map(_is_int, value))


def _is_sizes(value: object) -> bool:
    return (
        isinstance(value, (list, tuple))
        and len(value) <= MAX_RANK
        and all(type(v) is int and 0 <= v <= MAX_DIMENSION for v in value)
    )


def _is_size(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_DIMENSION


def _is_positive(value: object) -> bool:
    return _is_size(value) and value != 0


def _is_bool(value: object) -> bool:
    return type(value) is bool


def _is_eps(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1  # type: ignore[operator]


def _is_mask3(value: object) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 3 and all(map(_is_bool, value)) and any(value)


def _is_word(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32


_Kind = tuple[Callable[[object], bool], str]
_SIZE: _Kind = (_is_size, "an int from 0 to 2**40")
_SIZES: _Kind = (_is_sizes, f"a list of at most {MAX_RANK} ints from 0 to 2**40")
_INT: _Kind = (_is_int, "a 64-bit int")
_BOOL: _Kind = (_is_bool, "true or false")
_NUMBER: _Kind = (_is_number, "an int, a finite float, 'inf', '-inf' or 'nan'")
_SCALAR: _Kind = (lambda v: _is_bool(v) or _is_number(v), "a number, or a bool where the dtype is bool")
_UNIT: _Kind = (_is_eps, "a number from 0 to 1")
_POSITIVE: _Kind = (_is_positive, "an int from 1 to 2**40")

_ATTRIBUTE_KINDS: Mapping[str, _Kind] = {
    "accumulate": _BOOL,
    "approximate": (lambda v: isinstance(v, str) and v in ("none", "tanh"), "'none' or 'tanh'"),
    "ceil_mode": _BOOL,
    "count_include_pad": _BOOL,
    "descending": _BOOL,
    "dilation": _SIZES,
    "dim": _SIZE,
    "dims": _SIZES,
    "divisor_override": _POSITIVE,
    "dtype": (lambda v: isinstance(v, str) and v in DTYPE_BYTES, f"one of {', '.join(DTYPE_BYTES)}"),
    "eps": _UNIT,
    "groups": _POSITIVE,
    "ignore_index": _INT,
    "k": _SIZE,
    "keepdim": _BOOL,
    "kernel_size": _SIZES,
    "largest": _BOOL,
    "length": _SIZE,
    "max": _NUMBER,
    "min": _NUMBER,
    "momentum": _UNIT,
    "normalized_shape": _SIZES,
    "num_weights": _SIZE,
    "output_mask": (_is_mask3, "a list of three bools, at least one of them true"),
    "output_padding": _SIZES,
    "p": _UNIT,
    "pad": (_is_ints, f"a list of at most {2 * MAX_RANK} ints"),
    "padding": _SIZES,
    "padding_idx": _INT,
    "reduction": (lambda v: isinstance(v, str) and v in ("none", "mean", "sum"), "'none', 'mean' or 'sum'"),
    "shape": _SIZES,
    "start": _NUMBER,
    "step": _NUMBER,
    "stop": _SIZE,
    "stream": (_is_word, "an int from 0 to 2**32 - 1"),
    "stride": _SIZES,
    "threshold": _NUMBER,
    "training": _BOOL,
    "transposed": _BOOL,
    "value": _SCALAR,
}


def _check_inputs(spec: OpSpec, inputs: Inputs) -> None:
    if len(inputs) > MAX_NODE_INPUTS:
        raise OpsetError(f"{len(inputs)} inputs, at most {MAX_NODE_INPUTS} are allowed")
    fewest = len(spec.inputs)
    if len(inputs) < fewest or (len(inputs) > fewest and not spec.variadic):
        raise OpsetError(f"{len(inputs)} inputs given, the signature is {spec.signature}")
    for position, given in enumerate(inputs):
        slot = min(position, fewest - 1)
        if given is None and not spec.optional[slot]:
            raise OpsetError(f"input {position} ({spec.inputs[slot]}) is missing")


def _check_attributes(spec: OpSpec, attrs: Attributes) -> None:
    for name in attrs:
        if name not in spec.attributes:
            raise OpsetError(f"unknown attribute {_short(name)}, the signature is {spec.signature}")
    for name, may_be_null in spec.attributes.items():
        if name not in attrs:
            raise OpsetError(f"attribute {name} is missing, the signature is {spec.signature}")
        accepts, description = _ATTRIBUTE_KINDS[name]
        if attrs[name] is None and may_be_null:
            continue
        if not accepts(attrs[name]):
            raise OpsetError(f"attribute {name} is {_short(attrs[name])}, it must be {description}")


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "an int beyond 64 bits"
    return text if len(text) <= 80 else text[:77] + "..."


# --- checks shared by the rules -----------------------------------------------------------------------------

_FLOATS = ("float32",)
_INTEGERS = ("int64", "int32", "uint8")
_NUMERIC = _FLOATS + _INTEGERS
_BOOLS = ("bool",)
_ANY = _NUMERIC + _BOOLS
_INDEX = ("int64",)


def _need(condition: bool, reason: str) -> None:
    if not condition:
        raise OpsetError(reason)


def _given(inputs: Inputs, position: int) -> TensorType:
    given = inputs[position]
    assert given is not None, "optional inputs are looked up with inputs[i]"
    return given


def _need_dtype(given: TensorType, dtypes: tuple[str, ...], what: str) -> None:
    _need(given.dtype in dtypes, f"{what} must be {' or '.join(dtypes)}, not {given.dtype}")


def _need_type(given: TensorType | None, dtype: str, shape: Sequence[int], what: str) -> None:
    """An absent optional input passes."""
    if given is not None:
        wanted = TensorType(dtype, tuple(shape))
        _need(given == wanted, f"{what} must be {wanted}, not {given}")


def _need_dim(dim: int, rank: int, what: str = "dim") -> None:
    _need(dim < rank, f"attribute {what} is {dim}, the tensor has {rank} dimensions")


def _need_dims(dims: Sequence[int], rank: int) -> None:
    for dim in dims:
        _need_dim(dim, rank, "dims")
    _need(len(set(dims)) == len(dims), f"attribute dims {list(dims)} names a dimension twice")


def _need_value(value: Any, dtype: str, what: str) -> None:
    """A number attribute that becomes an element of `dtype` must be representable in it."""
    if dtype == "bool":
        _need(_is_bool(value), f"attribute {what} is {_short(value)}, it must be a bool for dtype bool")
    elif dtype in INTEGER_RANGE:
        low, high = INTEGER_RANGE[dtype]
        _need(type(value) is int and low <= value <= high, f"attribute {what} {_short(value)} is no {dtype}")
    else:
        _need(not _is_bool(value), f"attribute {what} is a bool, it must be a number for dtype {dtype}")
        finite = abs(number(value)) <= MAX_FLOAT32 or isinstance(value, str)
        _need(finite, f"attribute {what} {_short(value)} is beyond float32; write 'inf' or '-inf'")


def broadcast(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The common shape under numpy's rule; raises OpsetError where there is none."""
    rank = max(len(shape) for shape in shapes)
    common = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1:
                _need(common[axis] in (1, size), f"shapes {' and '.join(map(_show, shapes))} do not broadcast")
                common[axis] = size
    return tuple(common)


def _show(shape: Sequence[int]) -> str:
    return "[" + ",".join(map(str, shape)) + "]"


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


# --- shape rules: movement ----------------------------------------------------------------------------------


def _reshape(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    out = TensorType(x.dtype, tuple(attrs["shape"]))
    _need(out.numel == x.numel, f"shape {_show(out.shape)} holds {out.numel} elements, not {x.numel}")
    return (out,)


def _permute(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, dims = _given(inputs, 0), attrs["dims"]
    _need(sorted(dims) == list(range(len(x.shape))), f"attribute dims {list(dims)} is no permutation")
    return (TensorType(x.dtype, tuple(x.shape[d] for d in dims)),)


def _expand(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, shape = _given(inputs, 0), tuple(attrs["shape"])
    _need(
        len(shape) >= len(x.shape) and broadcast(x.shape, shape) == shape,
        f"{_show(x.shape)} does not expand to {_show(shape)}",
    )
    return (TensorType(x.dtype, shape),)


def _sliced(x: TensorType, attrs: Attributes) -> TensorType:
    dim, start, stop, step = attrs["dim"], attrs["start"], attrs["stop"], attrs["step"]
    _need_dim(dim, len(x.shape))
    _need(type(start) is int and type(step) is int, "start and step must be ints")
    _need(0 <= start <= stop <= x.shape[dim], f"slice {start}:{stop} is not within size {x.shape[dim]}")
    _need(1 <= step <= MAX_DIMENSION, f"step is {step}, it must be positive")
    return TensorType(x.dtype, _with(x.shape, dim, len(range(start, stop, step))))


def _slice(inputs: Inputs, attrs: Attributes) -> Outputs:
    return (_sliced(_given(inputs, 0), attrs),)


def _slice_scatter(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, src = _given(inputs, 0), _given(inputs, 1)
    _need_type(src, x.dtype, _sliced(x, attrs).shape, "src")
    return (x,)


def _cat(inputs: Inputs, attrs: Attributes) -> Outputs:
    first, dim = _given(inputs, 0), attrs["dim"]
    _need_dim(dim, len(first.shape))
    total = 0
    for position in range(len(inputs)):
        x = _given(inputs, position)
        _need(
            x.dtype == first.dtype
            and len(x.shape) == len(first.shape)
            and _with(x.shape, dim, 0) == _with(first.shape, dim, 0),
            f"input {position} is {x}: all must agree in dtype and in every dimension but {dim}",
        )
        total += x.shape[dim]
    return (TensorType(first.dtype, _with(first.shape, dim, total)),)


def _constant_pad_nd(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, pad = _given(inputs, 0), attrs["pad"]
    _need(len(pad) % 2 == 0 and len(pad) <= 2 * len(x.shape), f"attribute pad has {len(pad)} entries")
    _need_value(attrs["value"], x.dtype, "value")
    shape = list(x.shape)
    for pair in range(len(pad) // 2):  # pairs start at the last dimension; a negative pad crops
        axis, before, after = len(shape) - 1 - pair, pad[2 * pair], pad[2 * pair + 1]
        _need(min(before, 0) + min(after, 0) + shape[axis] >= 0, f"pad {list(pad)} crops more than there is")
        shape[axis] += before + after
    return (TensorType(x.dtype, tuple(shape)),)


def _flip(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    _need_dims(attrs["dims"], len(x.shape))
    return (x,)


def _cast(inputs: Inputs, attrs: Attributes) -> Outputs:
    return (TensorType(attrs["dtype"], _given(inputs, 0).shape),)


# --- shape rules: indexing ----------------------------------------------------------------------------------


def _need_index(x: TensorType, index: TensorType, dim: int) -> None:
    _need_dtype(index, _INDEX, "index")
    _need_dim(dim, len(x.shape))
    _need(len(index.shape) == len(x.shape), "index must have as many dimensions as x")
    for axis, (size, limit) in enumerate(zip(index.shape, x.shape)):
        _need(axis == dim or size <= limit, f"index is larger than x in dimension {axis}")


def _gather(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, index = _given(inputs, 0), _given(inputs, 1)
    _need_index(x, index, attrs["dim"])
    return (TensorType(x.dtype, index.shape),)


def _scatter(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, index, src = (_given(inputs, i) for i in range(3))
    _need_index(x, index, attrs["dim"])
    _need(
        src.dtype == x.dtype and len(src.shape) == len(x.shape) and all(i <= s for i, s in zip(index.shape, src.shape)),
        f"src must be {x.dtype} and at least as large as index, not {src}",
    )
    return (x,)


def _scatter_add(inputs: Inputs, attrs: Attributes) -> Outputs:
    _need_dtype(_given(inputs, 0), _NUMERIC, "x")
    return _scatter(inputs, attrs)


def _indexed(x: TensorType, indices: Inputs, dim: int) -> tuple[int, ...]:
    count = len(indices)
    _need(dim + count <= len(x.shape), f"{count} indices from dim {dim} exceed {len(x.shape)} dimensions")
    for index in indices:
        assert index is not None
        _need_dtype(index, _INDEX, "index")
    common = broadcast(*(index.shape for index in indices if index is not None))
    return (*x.shape[:dim], *common, *x.shape[dim + count :])


def _index(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    return (TensorType(x.dtype, _indexed(x, inputs[1:], attrs["dim"])),)


def _index_put(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, values = _given(inputs, 0), _given(inputs, 1)
    if attrs["accumulate"]:
        _need_dtype(x, _NUMERIC, "x")
    shape = _indexed(x, inputs[2:], attrs["dim"])
    _need(
        values.dtype == x.dtype and broadcast(values.shape, shape) == shape,
        f"values must be {x.dtype} and broadcast to {_show(shape)}, not {values}",
    )
    return (x,)


def _index_select(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, index, dim = _given(inputs, 0), _given(inputs, 1), attrs["dim"]
    _need_dtype(index, _INDEX, "index")
    _need_dim(dim, len(x.shape))
    _need(len(index.shape) == 1, "index must have one dimension")
    return (TensorType(x.dtype, _with(x.shape, dim, index.shape[0])),)


def _embedding(inputs: Inputs, attrs: Attributes) -> Outputs:
    weight, indices = _given(inputs, 0), _given(inputs, 1)
    _need_dtype(weight, _FLOATS, "weight")
    _need_dtype(indices, _INDEX, "indices")
    _need(len(weight.shape) == 2, "weight must have two dimensions")
    return (TensorType(weight.dtype, (*indices.shape, weight.shape[1])),)


def _embedding_dense_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    grad, indices = _given(inputs, 0), _given(inputs, 1)
    _need_dtype(grad, _FLOATS, "grad")
    _need_dtype(indices, _INDEX, "indices")
    _need(len(grad.shape) == len(indices.shape) + 1 and grad.shape[:-1] == indices.shape, "grad fits no indices")
    return (TensorType(grad.dtype, (attrs["num_weights"], grad.shape[-1])),)


def _topk(inputs: Inputs, attrs: Attributes) -> Outputs:
    x, k, dim = _given(inputs, 0), attrs["k"], attrs["dim"]
    _need_dtype(x, _NUMERIC, "x")
    _need_dim(dim, len(x.shape))
    _need(k <= x.shape[dim], f"k is {k}, dimension {dim} has {x.shape[dim]} elements")
    shape = _with(x.shape, dim, k)
    return TensorType(x.dtype, shape), TensorType("int64", shape)


def _sort(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    _need_dtype(x, _NUMERIC, "x")
    _need_dim(attrs["dim"], len(x.shape))
    return x, TensorType("int64", x.shape)


# --- shape rules: constants and random numbers --------------------------------------------------------------


def _full(inputs: Inputs, attrs: Attributes) -> Outputs:
    _need_value(attrs["value"], attrs["dtype"], "value")
    return (TensorType(attrs["dtype"], tuple(attrs["shape"])),)


def _arange(inputs: Inputs, attrs: Attributes) -> Outputs:
    start, step, length, dtype = attrs["start"], attrs["step"], attrs["length"], attrs["dtype"]
    _need(dtype in _NUMERIC, "arange of bool has no meaning")
    for what in ("start", "step"):
        _need(not isinstance(attrs[what], str), f"attribute {what} must be finite")
    if dtype in INTEGER_RANGE:
        _need(type(start) is int and type(step) is int, f"start and step must be ints for dtype {dtype}")
        _need_value(start, dtype, "start")
        _need_value(start + step * max(length - 1, 0), dtype, "(start + step * (length - 1))")
    return (TensorType(dtype, (length,)),)


def _random(inputs: Inputs, attrs: Attributes) -> Outputs:
    for position, what in enumerate(("seed", "step")):
        _need_type(_given(inputs, position), "int64", (), what)
    return (TensorType("float32", tuple(attrs["shape"])),)


# --- shape rules: elementwise -------------------------------------------------------------------------------


def _unary(dtypes: tuple[str, ...], result: str | None = None) -> InferRule:
    def rule(inputs: Inputs, attrs: Attributes) -> Outputs:
        x = _given(inputs, 0)
        _need_dtype(x, dtypes, "x")
        return (TensorType(result or x.dtype, x.shape),)

    return rule


def _clamp(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    _need_dtype(x, _NUMERIC, "x")
    for what in ("min", "max"):
        if attrs[what] is not None:
            _need_value(attrs[what], x.dtype, what)
    return (x,)


def _binary(dtypes: tuple[str, ...], result: str | None = None) -> InferRule:
    def rule(inputs: Inputs, attrs: Attributes) -> Outputs:
        a, b = _given(inputs, 0), _given(inputs, 1)
        _need_dtype(a, dtypes, "a")
        _need(a.dtype == b.dtype, "both operands must have one dtype; insert a cast")
        return (TensorType(result or a.dtype, broadcast(a.shape, b.shape)),)

    return rule


def _where(inputs: Inputs, attrs: Attributes) -> Outputs:
    condition, a, b = (_given(inputs, i) for i in range(3))
    _need_dtype(condition, _BOOLS, "condition")
    _need(a.dtype == b.dtype, "both operands must have one dtype; insert a cast")
    return (TensorType(a.dtype, broadcast(condition.shape, a.shape, b.shape)),)


def _pairwise(inputs: Inputs, attrs: Attributes) -> Outputs:
    """Backward operators of elementwise functions: grad and x (or out) of one type, no broadcasting."""
    grad, x = _given(inputs, 0), _given(inputs, 1)
    _need_dtype(grad, _FLOATS, "grad")
    _need_type(x, grad.dtype, grad.shape, "the second input")
    return (grad,)


# --- shape rules: reductions --------------------------------------------------------------------------------


def _reduced(x: TensorType, dims: Sequence[int], keepdim: bool) -> tuple[int, ...]:
    _need_dims(dims, len(x.shape))
    if keepdim:
        return tuple(1 if d in dims else size for d, size in enumerate(x.shape))
    return tuple(size for d, size in enumerate(x.shape) if d not in dims)


def _accumulator(dtype: str) -> str:
    return dtype if dtype == "float32" else "int64"


def _sum(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    return (TensorType(_accumulator(x.dtype), _reduced(x, attrs["dims"], attrs["keepdim"])),)


def _reduce(dtypes: tuple[str, ...], empty_allowed: bool) -> InferRule:
    def rule(inputs: Inputs, attrs: Attributes) -> Outputs:
        x, dims = _given(inputs, 0), attrs["dims"]
        _need_dtype(x, dtypes, "x")
        out = TensorType(x.dtype, _reduced(x, dims, attrs["keepdim"]))
        _need(empty_allowed or all(x.shape[d] for d in dims), "an empty dimension has no such value")
        return (out,)

    return rule


def _argreduce(inputs: Inputs, attrs: Attributes) -> Outputs:
    """A null dim means the flattened tensor; keepdim then keeps every dimension as 1."""
    x, dim = _given(inputs, 0), attrs["dim"]
    _need_dtype(x, _NUMERIC, "x")
    dims = range(len(x.shape)) if dim is None else (dim,)
    out = TensorType("int64", _reduced(x, dims, attrs["keepdim"]))
    _need(all(x.shape[d] for d in dims), "an empty dimension has no such index")
    return (out,)


def _cumsum(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    _need_dim(attrs["dim"], len(x.shape))
    return (TensorType(_accumulator(x.dtype), x.shape),)


# --- shape rules: matrices and convolutions -----------------------------------------------------------------


def _mm(inputs: Inputs, attrs: Attributes) -> Outputs:
    return (_product(_given(inputs, 0), _given(inputs, 1), rank=2),)


def _bmm(inputs: Inputs, attrs: Attributes) -> Outputs:
    return (_product(_given(inputs, 0), _given(inputs, 1), rank=3),)


def _addmm(inputs: Inputs, attrs: Attributes) -> Outputs:
    bias = _given(inputs, 0)
    out = _product(_given(inputs, 1), _given(inputs, 2), rank=2)
    _need(
        bias.dtype == out.dtype and broadcast(bias.shape, out.shape) == out.shape,
        f"bias must be {out.dtype} and broadcast to {_show(out.shape)}, not {bias}",
    )
    return (out,)


def _product(a: TensorType, b: TensorType, rank: int) -> TensorType:
    _need_dtype(a, _FLOATS, "a")
    _need_dtype(b, _FLOATS, "b")
    _need(len(a.shape) == rank and len(b.shape) == rank, f"both operands must have {rank} dimensions")
    _need(a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2], "inner or batch sizes differ")
    return TensorType(a.dtype, (*a.shape[:-1], b.shape[-1]))


def convolution_output(x: TensorType, w: TensorType, attrs: Attributes) -> TensorType:
    """Type of `convolution`'s output: x [N,C,*], w [O,C/groups,*], transposed [C,O/groups,*]; 1 to 3 axes."""
    _need_dtype(x, _FLOATS, "x")
    _need_dtype(w, _FLOATS, "w")
    axes, groups, transposed = len(x.shape) - 2, attrs["groups"], attrs["transposed"]
    _need(1 <= axes <= 3 and len(w.shape) == axes + 2, "x and w must both be [.,.,*] with 1 to 3 spatial axes")
    for what in ("stride", "padding", "dilation", "output_padding"):
        _need(len(attrs[what]) == axes, f"attribute {what} must have {axes} entries")
    _need(min(attrs["stride"]) >= 1 and min(attrs["dilation"]) >= 1, "stride and dilation must be positive")
    _need(all(w.shape), "w must not be empty")
    _need(x.shape[1] % groups == 0 and w.shape[0] % groups == 0, f"channels do not divide into {groups} groups")
    channels = w.shape[0] if transposed else w.shape[1] * groups
    _need(x.shape[1] == channels, f"x has {x.shape[1]} channels, w wants {channels}")
    spatial = []
    for axis in range(axes):
        size, kernel = x.shape[axis + 2], w.shape[axis + 2]
        stride, padding = attrs["stride"][axis], attrs["padding"][axis]
        reach = attrs["dilation"][axis] * (kernel - 1) + 1
        extra = attrs["output_padding"][axis]
        if transposed:
            _need(
                extra < max(stride, attrs["dilation"][axis]),
                "output_padding must be below stride or dilation",
            )
            out = (size - 1) * stride - 2 * padding + reach + extra
        else:
            _need(extra == 0, "output_padding belongs to transposed convolutions")
            out = (size + 2 * padding - reach) // stride + 1
        _need(size >= 1 and out >= 1, f"spatial size {size} is too small for the kernel")
        spatial.append(out)
    features = w.shape[1] * groups if transposed else w.shape[0]
    return TensorType(x.dtype, (x.shape[0], features, *spatial))


def _convolution(inputs: Inputs, attrs: Attributes) -> Outputs:
    out = convolution_output(_given(inputs, 0), _given(inputs, 1), attrs)
    _need_type(inputs[2], out.dtype, (out.shape[1],), "b")
    return (out,)


def _convolution_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    grad, x, w = (_given(inputs, i) for i in range(3))
    out = convolution_output(x, w, attrs)
    _need_type(grad, out.dtype, out.shape, "grad")
    return _masked((x, w, TensorType(out.dtype, (out.shape[1],))), attrs)


def _masked(outputs: Sequence[TensorType], attrs: Attributes) -> Outputs:
    return tuple(out for out, wanted in zip(outputs, attrs["output_mask"]) if wanted)


# --- shape rules: pooling -----------------------------------------------------------------------------------


def pool2d_output(x: TensorType, attrs: Attributes) -> tuple[int, ...]:
    """Shape of a 2-d pooling's output, rounded as ATen's `pooling_output_shape` does: x [N,C,H,W]."""
    _need_dtype(x, _FLOATS, "x")
    _need(len(x.shape) == 4, "x must have four dimensions")
    dilations = attrs.get("dilation", (1, 1))
    for what in ("kernel_size", "stride", "padding", "dilation"):
        _need(len(attrs.get(what, dilations)) == 2, f"attribute {what} must have two entries")
    _need(min(*attrs["kernel_size"], *attrs["stride"], *dilations) >= 1, "kernel, stride, dilation start at 1")
    spatial = []
    for size, kernel, stride, padding, dilation in zip(
        x.shape[2:], attrs["kernel_size"], attrs["stride"], attrs["padding"], dilations
    ):
        _need(padding <= kernel // 2, "padding must be at most half of kernel_size")
        room = size + 2 * padding - dilation * (kernel - 1) - 1
        out = (room + (stride - 1 if attrs["ceil_mode"] else 0)) // stride + 1
        if attrs["ceil_mode"] and (out - 1) * stride >= size + padding:
            out -= 1  # the last window would start in the padding on the far side
        _need(size >= 1 and room >= 0 and out >= 1, f"spatial size {size} is too small for the kernel")
        spatial.append(out)
    return (*x.shape[:2], *spatial)


def _max_pool2d(inputs: Inputs, attrs: Attributes) -> Outputs:
    shape = pool2d_output(_given(inputs, 0), attrs)
    return TensorType("float32", shape), TensorType("int64", shape)


def _max_pool2d_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    grad, x, indices = (_given(inputs, i) for i in range(3))
    shape = pool2d_output(x, attrs)
    _need_type(grad, "float32", shape, "grad")
    _need_type(indices, "int64", shape, "indices")
    return (x,)


def _avg_pool2d(inputs: Inputs, attrs: Attributes) -> Outputs:
    return (TensorType("float32", pool2d_output(_given(inputs, 0), attrs)),)


def _avg_pool2d_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    grad, x = _given(inputs, 0), _given(inputs, 1)
    _need_type(grad, "float32", pool2d_output(x, attrs), "grad")
    return (x,)


# --- shape rules: normalisation -----------------------------------------------------------------------------


def _layer_norm_types(x: TensorType, attrs: Attributes) -> tuple[TensorType, TensorType]:
    """Types of the statistics (normalised dimensions kept as 1) and of weight and bias."""
    _need_dtype(x, _FLOATS, "x")
    inner = tuple(attrs["normalized_shape"])
    outer = len(x.shape) - len(inner)
    _need(len(inner) >= 1 and outer >= 0 and x.shape[outer:] == inner, "normalized_shape must end x's shape")
    _need(all(inner), "an empty normalized_shape has no mean")
    return TensorType(x.dtype, x.shape[:outer] + (1,) * len(inner)), TensorType(x.dtype, inner)


def _native_layer_norm(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    statistics, weight = _layer_norm_types(x, attrs)
    for position, what in ((1, "w"), (2, "b")):
        _need_type(inputs[position], weight.dtype, weight.shape, what)
    return x, statistics, statistics


def _native_layer_norm_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 1)
    statistics, weight = _layer_norm_types(x, attrs)
    _need_types(inputs, ("grad", x), None, ("mean", statistics), ("rstd", statistics), ("w", weight), ("b", weight))
    return _norm_gradients(x, weight, inputs[4], attrs)


def _group_norm_types(x: TensorType, attrs: Attributes) -> tuple[TensorType, TensorType]:
    _need_dtype(x, _FLOATS, "x")
    groups = attrs["groups"]
    _need(len(x.shape) >= 2 and x.shape[1] % groups == 0, f"x must be [N,C,*] with C divisible by {groups}")
    _need(all(x.shape[1:]), "an empty group has no mean")
    return TensorType(x.dtype, (x.shape[0], groups)), TensorType(x.dtype, (x.shape[1],))


def _native_group_norm(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    statistics, weight = _group_norm_types(x, attrs)
    _need_types(inputs, None, ("w", weight), ("b", weight))
    return x, statistics, statistics


def _native_group_norm_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 1)
    statistics, weight = _group_norm_types(x, attrs)
    _need_types(inputs, ("grad", x), None, ("mean", statistics), ("rstd", statistics), ("w", weight))
    return _norm_gradients(x, weight, inputs[4], attrs)


def _batch_norm_type(x: TensorType, attrs: Attributes) -> TensorType:
    """Type of everything there is one of per channel."""
    _need_dtype(x, _FLOATS, "x")
    _need(len(x.shape) >= 2, "x must be [N,C,*]")
    values = x.shape[0] * math.prod(x.shape[2:])
    _need(values > 1 or not attrs["training"], "training needs more than one value per channel")
    return TensorType(x.dtype, (x.shape[1],))


def _native_batch_norm(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    channel = _batch_norm_type(x, attrs)
    _need_types(inputs, None, ("w", channel), ("b", channel), ("running_mean", channel), ("running_var", channel))
    return x, channel, channel, channel, channel


def _native_batch_norm_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 1)
    channel = _batch_norm_type(x, attrs)
    names = ("w", "running_mean", "running_var", "save_mean", "save_invstd")
    _need_types(inputs, ("grad", x), None, *((name, channel) for name in names))
    return _norm_gradients(x, channel, inputs[2], attrs)


def _norm_gradients(x: TensorType, weight: TensorType, given: TensorType | None, attrs: Attributes) -> Outputs:
    """A gradient of weight or bias needs a weight: ATen takes their shape from it."""
    mask = attrs["output_mask"]
    _need(given is not None or not (mask[1] or mask[2]), "output_mask asks for the gradient of an absent w")
    return _masked((x, weight, weight), attrs)


def _need_types(inputs: Inputs, *wanted: tuple[str, TensorType] | None) -> None:
    """Each input against its (name, type); None skips one."""
    for given, pair in zip(inputs, wanted):
        if pair is not None:
            _need_type(given, pair[1].dtype, pair[1].shape, pair[0])


# --- shape rules: softmax and losses ------------------------------------------------------------------------


def _softmax(inputs: Inputs, attrs: Attributes) -> Outputs:
    x = _given(inputs, 0)
    _need_dtype(x, _FLOATS, "x")
    _need_dim(attrs["dim"], len(x.shape))
    return (x,)


def _softmax_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    _need_dim(attrs["dim"], len(_given(inputs, 0).shape))
    return _pairwise(inputs, attrs)


def _nll_loss_types(x: TensorType, target: TensorType, weight: TensorType | None, attrs: Attributes) -> TensorType:
    """Type of the loss; x is [C], [N,C] or [N,C,*], target is x without C."""
    _need_dtype(x, _FLOATS, "x")
    _need(len(x.shape) >= 1, "x must be [C], [N,C] or [N,C,*]")
    channel = 0 if len(x.shape) == 1 else 1
    without = x.shape[:channel] + x.shape[channel + 1 :]
    _need_type(target, "int64", without, "target")
    _need_type(weight, x.dtype, (x.shape[channel],), "weight")
    return TensorType(x.dtype, without if attrs["reduction"] == "none" else ())


def _nll_loss_forward(inputs: Inputs, attrs: Attributes) -> Outputs:
    loss = _nll_loss_types(_given(inputs, 0), _given(inputs, 1), inputs[2], attrs)
    return loss, TensorType(loss.dtype, ())


def _nll_loss_backward(inputs: Inputs, attrs: Attributes) -> Outputs:
    grad, x, target = (_given(inputs, i) for i in range(3))
    loss = _nll_loss_types(x, target, inputs[3], attrs)
    _need_type(grad, loss.dtype, loss.shape, "grad")
    _need_type(_given(inputs, 4), loss.dtype, (), "total_weight")
    return (x,)


# --- costs --------------------------------------------------------------------------------------------------

_HEAVY = 10  # exp, tanh, erf ... cost about ten multiplications on CPUs and GPUs alike


def _largest(inputs: Inputs, outputs: Outputs) -> int:
    return max(t.numel for t in (*inputs, *outputs) if t is not None)


def _per_element(cost: int) -> FlopsRule:
    """`cost` operations for each element of the largest tensor."""
    return lambda inputs, attrs, outputs: cost * _largest(inputs, outputs)


def _sort_flops(inputs: Inputs, attrs: Attributes, outputs: Outputs) -> int:
    x = _given(inputs, 0)
    return x.numel * max(x.shape[attrs["dim"]], 1).bit_length()


def _matrix_flops(inputs: Inputs, attrs: Attributes, outputs: Outputs) -> int:
    a = _given(inputs, len(inputs) - 2)  # addmm's bias comes first
    return 2 * outputs[0].numel * a.shape[-1]


def _window_flops(inputs: Inputs, attrs: Attributes, outputs: Outputs) -> int:
    """Pooling, forward and backward: one operation for each element of each window."""
    windows = pool2d_output(_given(inputs, min(len(inputs) - 1, 1)), attrs)
    return math.prod(windows) * math.prod(attrs["kernel_size"])


def _convolution_products(x: TensorType, w: TensorType, attrs: Attributes) -> int:
    """Multiply-adds, counted as two: each weight meets each position of the side that the kernel visits."""
    side = x if attrs["transposed"] else convolution_output(x, w, attrs)
    return 2 * side.shape[0] * math.prod(side.shape[2:]) * w.numel


def _convolution_flops(inputs: Inputs, attrs: Attributes, outputs: Outputs) -> int:
    return _convolution_products(_given(inputs, 0), _given(inputs, 1), attrs) + outputs[0].numel


def _convolution_backward_flops(inputs: Inputs, attrs: Attributes, outputs: Outputs) -> int:
    mask = attrs["output_mask"]
    products = _convolution_products(_given(inputs, 1), _given(inputs, 2), attrs)
    return products * (bool(mask[0]) + bool(mask[1])) + _given(inputs, 0).numel * bool(mask[2])


_FREE = _per_element(0)
_LIGHT = _per_element(1)
_COSTLY = _per_element(_HEAVY)


# --- the table ----------------------------------------------------------------------------------------------


def _parse(signature: str, rule: InferRule, cost: FlopsRule) -> OpSpec:
    match = re.fullmatch(r"(\w+)\(([^;]*)(?:; (.*))?\)", signature)
    assert match, f"signature {signature!r} does not parse"
    names = [part.strip() for part in match.group(2).split(",") if part.strip()]
    attributes = [part.strip() for part in (match.group(3) or "").split(",") if part.strip()]
    return OpSpec(
        name=match.group(1),
        signature=signature,
        inputs=tuple(name.strip("[].") for name in names),
        optional=tuple(name.startswith("[") for name in names),
        variadic=bool(names) and names[-1].endswith("..."),
        attributes={name.rstrip("?"): name.endswith("?") for name in attributes},
        infer=rule,
        flops=cost,
    )


_CONV = "stride, padding, dilation, transposed, output_padding, groups"
_MAX_POOL = "kernel_size, stride, padding, dilation, ceil_mode"
_AVG_POOL = "kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override?"

_float_unary = _unary(_FLOATS)
_numeric_unary = _unary(_NUMERIC)
_arithmetic = _binary(_NUMERIC)
_comparison = _binary(_ANY, "bool")
_logical = _binary(_BOOLS)
_bitwise = _binary((*_INTEGERS, "bool"))

_ROWS: list[tuple[str, InferRule, FlopsRule]] = [
    # movement
    ("reshape(x; shape)", _reshape, _FREE),
    ("permute(x; dims)", _permute, _FREE),
    ("expand(x; shape)", _expand, _FREE),
    ("slice(x; dim, start, stop, step)", _slice, _FREE),
    ("cat(x...; dim)", _cat, _FREE),
    ("constant_pad_nd(x; pad, value)", _constant_pad_nd, _FREE),
    ("flip(x; dims)", _flip, _FREE),
    ("slice_scatter(x, src; dim, start, stop, step)", _slice_scatter, _FREE),
    ("cast(x; dtype)", _cast, _FREE),
    # indexing: every index is checked at run time; only index and index_put let negative ones wrap
    ("gather(x, index; dim)", _gather, _FREE),
    ("scatter(x, index, src; dim)", _scatter, _FREE),
    ("scatter_add(x, index, src; dim)", _scatter_add, _LIGHT),
    ("index(x, idx...; dim)", _index, _FREE),
    ("index_put(x, values, idx...; dim, accumulate)", _index_put, _LIGHT),
    ("index_select(x, index; dim)", _index_select, _FREE),
    ("embedding(weight, indices)", _embedding, _FREE),
    ("embedding_dense_backward(grad, indices; num_weights, padding_idx)", _embedding_dense_backward, _LIGHT),
    ("topk(x; k, dim, largest)", _topk, _sort_flops),
    ("sort(x; dim, descending)", _sort, _sort_flops),
    # constants
    ("full(; shape, value, dtype)", _full, _FREE),
    ("arange(; start, step, length, dtype)", _arange, _LIGHT),
    # one operand
    ("neg(x)", _numeric_unary, _LIGHT),
    ("abs(x)", _numeric_unary, _LIGHT),
    ("sign(x)", _numeric_unary, _LIGHT),
    ("exp(x)", _float_unary, _COSTLY),
    ("expm1(x)", _float_unary, _COSTLY),
    ("log(x)", _float_unary, _COSTLY),
    ("log1p(x)", _float_unary, _COSTLY),
    ("sqrt(x)", _float_unary, _LIGHT),
    ("rsqrt(x)", _float_unary, _LIGHT),
    ("reciprocal(x)", _float_unary, _LIGHT),
    ("sin(x)", _float_unary, _COSTLY),
    ("cos(x)", _float_unary, _COSTLY),
    ("tanh(x)", _float_unary, _COSTLY),
    ("sigmoid(x)", _float_unary, _COSTLY),
    ("erf(x)", _float_unary, _COSTLY),
    ("relu(x)", _numeric_unary, _LIGHT),
    ("silu(x)", _float_unary, _COSTLY),
    ("floor(x)", _float_unary, _LIGHT),
    ("ceil(x)", _float_unary, _LIGHT),
    ("round(x)", _float_unary, _LIGHT),
    ("trunc(x)", _float_unary, _LIGHT),
    ("logical_not(x)", _unary(_BOOLS), _LIGHT),
    ("isnan(x)", _unary(_FLOATS, "bool"), _LIGHT),
    ("isinf(x)", _unary(_FLOATS, "bool"), _LIGHT),
    ("gelu(x; approximate)", _float_unary, _COSTLY),
    ("clamp(x; min?, max?)", _clamp, _LIGHT),
    # two operands of one dtype, broadcast; where has a bool before them
    ("add(a, b)", _arithmetic, _LIGHT),
    ("sub(a, b)", _arithmetic, _LIGHT),
    ("mul(a, b)", _arithmetic, _LIGHT),
    ("div(a, b)", _binary(_FLOATS), _LIGHT),
    ("pow(a, b)", _arithmetic, _COSTLY),
    ("maximum(a, b)", _arithmetic, _LIGHT),
    ("minimum(a, b)", _arithmetic, _LIGHT),
    ("remainder(a, b)", _arithmetic, _LIGHT),
    ("fmod(a, b)", _arithmetic, _LIGHT),
    ("floor_divide(a, b)", _arithmetic, _LIGHT),
    ("eq(a, b)", _comparison, _LIGHT),
    ("ne(a, b)", _comparison, _LIGHT),
    ("lt(a, b)", _comparison, _LIGHT),
    ("le(a, b)", _comparison, _LIGHT),
    ("gt(a, b)", _comparison, _LIGHT),
    ("ge(a, b)", _comparison, _LIGHT),
    ("logical_and(a, b)", _logical, _LIGHT),
    ("logical_or(a, b)", _logical, _LIGHT),
    ("logical_xor(a, b)", _logical, _LIGHT),
    ("bitwise_and(a, b)", _bitwise, _LIGHT),
    ("bitwise_or(a, b)", _bitwise, _LIGHT),
    ("where(condition, a, b)", _where, _LIGHT),
    # backward of elementwise functions
    ("gelu_backward(grad, x; approximate)", _pairwise, _COSTLY),
    ("threshold_backward(grad, x; threshold)", _pairwise, _LIGHT),
    ("tanh_backward(grad, out)", _pairwise, _per_element(3)),
    ("sigmoid_backward(grad, out)", _pairwise, _per_element(3)),
    ("silu_backward(grad, x)", _pairwise, _COSTLY),
    # reductions
    ("sum(x; dims, keepdim)", _sum, _LIGHT),
    ("mean(x; dims, keepdim)", _reduce(_FLOATS, empty_allowed=False), _LIGHT),
    ("amax(x; dims, keepdim)", _reduce(_NUMERIC, empty_allowed=False), _LIGHT),
    ("amin(x; dims, keepdim)", _reduce(_NUMERIC, empty_allowed=False), _LIGHT),
    ("prod(x; dims, keepdim)", _sum, _LIGHT),
    ("any(x; dims, keepdim)", _reduce(_BOOLS, empty_allowed=True), _LIGHT),
    ("all(x; dims, keepdim)", _reduce(_BOOLS, empty_allowed=True), _LIGHT),
    ("argmax(x; dim?, keepdim)", _argreduce, _LIGHT),
    ("argmin(x; dim?, keepdim)", _argreduce, _LIGHT),
    ("cumsum(x; dim)", _cumsum, _LIGHT),
    # matrices
    ("mm(a, b)", _mm, _matrix_flops),
    ("bmm(a, b)", _bmm, _matrix_flops),
    ("addmm(bias, a, b)", _addmm, _matrix_flops),
    # convolution and pooling
    (f"convolution(x, w, [b]; {_CONV})", _convolution, _convolution_flops),
    (
        f"convolution_backward(grad, x, w; {_CONV}, output_mask)",
        _convolution_backward,
        _convolution_backward_flops,
    ),
    (f"max_pool2d_with_indices(x; {_MAX_POOL})", _max_pool2d, _window_flops),
    (f"max_pool2d_with_indices_backward(grad, x, indices; {_MAX_POOL})", _max_pool2d_backward, _LIGHT),
    (f"avg_pool2d(x; {_AVG_POOL})", _avg_pool2d, _window_flops),
    (f"avg_pool2d_backward(grad, x; {_AVG_POOL})", _avg_pool2d_backward, _window_flops),
    # normalisation; a backward gives only the outputs its mask asks for, in the order x, w, b
    ("native_layer_norm(x, [w], [b]; normalized_shape, eps)", _native_layer_norm, _per_element(8)),
    (
        "native_layer_norm_backward(grad, x, mean, rstd, [w], [b]; normalized_shape, output_mask)",
        _native_layer_norm_backward,
        _per_element(12),
    ),
    ("native_group_norm(x, [w], [b]; groups, eps)", _native_group_norm, _per_element(8)),
    (
        "native_group_norm_backward(grad, x, mean, rstd, [w]; groups, output_mask)",
        _native_group_norm_backward,
        _per_element(12),
    ),
    (
        "native_batch_norm(x, [w], [b], running_mean, running_var; training, momentum, eps)",
        _native_batch_norm,
        _per_element(8),
    ),
    (
        "native_batch_norm_backward(grad, x, [w], running_mean, running_var, save_mean, save_invstd;"
        " training, eps, output_mask)",
        _native_batch_norm_backward,
        _per_element(12),
    ),
    # softmax and losses
    ("softmax(x; dim)", _softmax, _COSTLY),
    ("log_softmax(x; dim)", _softmax, _COSTLY),
    ("softmax_backward(grad, out; dim)", _softmax_backward, _per_element(4)),
    ("log_softmax_backward(grad, out; dim)", _softmax_backward, _COSTLY),
    ("nll_loss_forward(x, target, [weight]; reduction, ignore_index)", _nll_loss_forward, _LIGHT),
    (
        "nll_loss_backward(grad, x, target, [weight], total_weight; reduction, ignore_index)",
        _nll_loss_backward,
        _LIGHT,
    ),
    # random numbers: Philox4x32-10 (Salmon et al. 2011), see contract/philox.py
    ("random_bernoulli(seed, step; p, shape, stream)", _random, _COSTLY),
    ("random_uniform(seed, step; shape, stream)", _random, _COSTLY),
]


def _table() -> dict[str, OpSpec]:
    table: dict[str, OpSpec] = {}
    for signature, rule, cost in _ROWS:
        spec = _parse(signature, rule, cost)
        assert spec.name not in table, f"{spec.name} is listed twice"
        assert set(spec.attributes) <= set(_ATTRIBUTE_KINDS), f"{spec.name} has an attribute of no stated kind"
        table[spec.name] = spec
    return table


OPSET: Mapping[str, OpSpec] = _table()
