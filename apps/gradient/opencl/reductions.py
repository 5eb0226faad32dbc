"""Reductions: sum, mean, amax, amin, prod, any, all, argmax, argmin and cumsum (reduce.cl, argreduce.cl, scan.cl).

One pass combines dimensions that can be walked as one, [A, R, B] -> [A, B]; other reduced dimensions take further
passes, the one whose elements follow one another first. A long R is cut into segments, whose results are combined
by another pass.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apps.gradient.backends.backend import Call, Number, element_strides
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.rows import (
    GROUP,
    axes,
    column_vectors,
    column_width,
    launch_items,
    launch_rows,
    segments,
    vector_width,
)
from apps.gradient.opencl.values import C_TYPES, Define, Read, View, Write
from apps.gradient.opencl.walks import collapsed

ROW_SEGMENT = 4096  # elements of a row in one pass, where there are too few rows
COLUMN_SEGMENT = 64  # shortest part of a column
CACHED_SEGMENT = 64  # part of a column on processors: the lines of so many rows stay in the cache
SCAN_SEGMENT = 256


@dataclass(frozen=True)
class Rule:
    """How elements are combined. `start` is the result of none, as a C expression for each type; `empty` its value."""

    op: str
    start: Mapping[str, str]
    empty: Number | None


_SUM = Rule("OP_SUM", {"float": "0", "int": "0", "long": "0"}, 0)
_PROD = Rule("OP_PROD", {"float": "1", "int": "1", "long": "1"}, 1)
_MAX = Rule("OP_MAX", {"float": "-INFINITY", "int": "INT_MIN", "long": "LONG_MIN"}, None)
_MIN = Rule("OP_MIN", {"float": "INFINITY", "int": "INT_MAX", "long": "LONG_MAX"}, None)
_ANY = Rule("OP_MAX", {"int": "0"}, False)
_ALL = Rule("OP_MIN", {"int": "1"}, True)


def _reduction(rule: Rule, mean: bool = False) -> Lower:
    def lower(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
        (x,) = inputs
        assert x is not None
        out = call.outputs[0]
        dims = call.attrs["dims"]
        divisor = math.prod(x.shape[dim] for dim in dims) if mean else 1
        return [reduced(emit, rule, x, dims, out.dtype, divisor).reshaped(out.shape)]

    return lower


def total(emit: Emitter, x: View, dims: Sequence[int]) -> View:
    """The float sum over dims, which are dropped."""
    return reduced(emit, _SUM, x, dims, "float32", 1)


def reduced(emit: Emitter, rule: Rule, x: View, dims: Sequence[int], dtype: str, divisor: int) -> View:
    """The dense result of this dtype, without the reduced dimensions; divided by `divisor` at last."""
    kept = tuple(size for axis, size in enumerate(x.shape) if axis not in dims)
    if x.numel == 0:
        return emit.number(0 if rule.empty is None else rule.empty, dtype, kept)
    long_dims = [dim for dim in dims if x.shape[dim] != 1]
    if not long_dims:
        alone = emit.dense(x) if x.dtype == dtype else emit.apply("cast", [x], {"dtype": dtype})[0]
        return alone.reshaped(kept)
    run = _adjacent(x, long_dims)
    left = [axis for axis in range(len(x.shape)) if axis not in run]
    shape, strides = tuple(x.shape[axis] for axis in left), [x.strides[axis] for axis in left]
    outer, (walk, _) = collapsed(shape, strides, element_strides(shape))
    if len(outer) > 2:
        return reduced(emit, rule, emit.dense(x), dims, dtype, divisor)
    length, stride = math.prod(x.shape[dim] for dim in run), x.strides[run[-1]]
    last = len(run) == len(long_dims)
    out = emit.fresh(dtype, shape)
    combine = _Pass(emit, rule, divisor if last else 1)
    if len(outer) < 2 and stride == 1:
        combine.rows(x, out, *((outer[0], walk[0]) if outer else (1, 0)), length)
    else:
        missing = 2 - len(outer)
        combine.columns(x, out, (*(1,) * missing, *outer), (*(0,) * missing, *walk), length, stride)
    rest = [left.index(dim) for dim in dims if dim not in run]
    return out.reshaped(kept) if last else reduced(emit, rule, out, rest, dtype, divisor)


def _adjacent(x: View, dims: Sequence[int]) -> list[int]:
    """Those of the reduced dimensions that one pass takes: neighbours walked as one, with the smallest stride."""
    best: list[int] = []
    run: list[int] = []
    for dim in sorted(dims):
        neighbours = bool(run) and all(x.shape[axis] == 1 for axis in range(run[-1] + 1, dim))
        run = [*run, dim] if neighbours and x.strides[run[-1]] == x.strides[dim] * x.shape[dim] else [dim]
        if not best or best[0] == run[0] or abs(x.strides[dim]) <= abs(x.strides[best[-1]]):
            best = run
    return best


@dataclass(frozen=True)
class _Pass:
    """Combines one dimension; the result is divided by `divisor`."""

    emit: Emitter
    rule: Rule
    divisor: int

    def rows(self, x: View, out: View, rows: int, row_stride: int, length: int) -> None:
        """Each row's elements are adjacent."""
        device = self.emit.device
        segment, parts = row_segments(device, rows, length)
        made = out if parts == 1 else self.emit.fresh(out.dtype, (rows, parts))
        width = vector_width(device, x.offset, row_stride if rows > 1 else 0) if _same(x, made) else 1
        launch_rows(
            self.emit,
            "reduce.cl",
            "reduce_rows",
            (rows, parts),
            segment,
            width,
            [Read(x), Write(made), rows, length, row_stride, segment, parts, float(self.divisor)],
            self.defines(x, made, parts),
            flops=rows * length,
        )
        if parts > 1:
            self.rows(made, out, rows, parts, parts)

    def columns(
        self, x: View, out: View, outer: Sequence[int], strides: Sequence[int], length: int, stride: int
    ) -> None:
        """`outer` is [A, B] and `strides` those of x along them; elements of a column are `stride` apart."""
        device = self.emit.device
        segment = column_segment(device, length, math.prod(outer))
        parts = -(-length // segment)
        a, b = outer
        made = out if parts == 1 else self.emit.fresh(out.dtype, (a, parts, b))
        self.column_launch(x, made, (a, b), strides, length, stride, segment)
        if parts > 1:
            self.columns(made, out, outer, (parts * b, 1), parts, b)

    def column_launch(
        self,
        x: View,
        out: View,
        outer: Sequence[int],
        strides: Sequence[int],
        length: int,
        stride: int,
        segment: int,
    ) -> None:
        """One result for each segment: out [A, S, B]."""
        device, (a, b), parts = self.emit.device, outer, -(-length // segment)
        adjacent = _same(x, out) and (b == 1 or strides[1] == 1)
        width = column_width(device, b, x.offset, out.offset, strides[0], stride) if adjacent else 1
        vectors = column_vectors(device, b, width)
        sizes = (b // (width * vectors), a, parts)
        launch_items(
            self.emit,
            "reduce.cl",
            "reduce_columns",
            sizes,
            [Read(x), Write(out), b, a, length, strides[0], stride, strides[1], segment, parts, float(self.divisor)],
            defines={**self.defines(x, out, parts), "VW": width, "NV": vectors},
            flops=a * b * length,
        )

    def defines(self, x: View, out: View, parts: int) -> dict[str, Define]:
        """Of the kernels of reduce.cl."""
        source, target = C_TYPES[x.dtype], C_TYPES[out.dtype]
        return {
            "IN": source,
            "ACC": target,
            "IS_FLOAT": int(target == "float"),
            "OP": self.rule.op,
            "START": self.rule.start[target],
            "MEAN": int(parts == 1 and self.divisor != 1),
        }


def _same(x: View, out: View) -> bool:
    """Whether vectors of x can be combined: they are what the result is made of, and not long."""
    return C_TYPES[x.dtype] == C_TYPES[out.dtype] != "long"


def row_segments(device: DeviceFacts, rows: int, length: int) -> tuple[int, int]:
    """Length and number of the parts in which a row is searched or combined first."""
    groups = rows if device.group_form else rows // GROUP
    if segments(device, length, groups, ROW_SEGMENT) == 1:
        return length, 1
    return ROW_SEGMENT, -(-length // ROW_SEGMENT)


def column_segment(device: DeviceFacts, length: int, columns: int) -> int:
    """Length of the parts in which columns are combined first, where `columns` items lie side by side."""
    if device.group_form:
        return -(-length // segments(device, length, columns // GROUP, COLUMN_SEGMENT))
    return CACHED_SEGMENT if length >= 2 * CACHED_SEGMENT else length


def _argreduction(smallest: bool) -> Lower:
    """The index of the first extreme element along dim; a null dim means the flattened tensor."""

    def lower(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
        (given,) = inputs
        assert given is not None
        out, x = emit.like(call.outputs[0]), emit.dense(given)
        dim = call.attrs["dim"]
        a, r, b = (1, x.numel, 1) if dim is None else axes(x.shape, dim)
        if x.numel:
            defines: dict[str, Define] = {"T": C_TYPES[x.dtype], "SMALLEST": int(smallest)}
            defines["IS_FLOAT"] = int(x.dtype == "float32")
            _search_rows(emit, x, out, a, r, defines) if b == 1 else _search_columns(emit, x, out, (a, r, b), defines)
        return [out]

    return lower


def _search_rows(emit: Emitter, x: View, out: View, rows: int, length: int, defines: Mapping[str, Define]) -> None:
    device = emit.device
    segment, parts = row_segments(device, rows, length)
    found = out if parts == 1 else emit.fresh("int32", (rows, parts))
    launch_rows(
        emit,
        "argreduce.cl",
        "arg_rows",
        (rows, parts),
        segment,
        1,
        [Read(x), Write(found), rows, length, segment, parts],
        {**defines, "OUT": C_TYPES[found.dtype]},
        flops=x.numel,
    )
    if parts > 1:
        launch_items(
            emit,
            "argreduce.cl",
            "arg_segments",
            (rows,),
            [Read(x), Read(found), Write(out), rows, length, parts],
            defines=defines,
            nbytes=rows * parts * 8,
        )


def _search_columns(
    emit: Emitter, x: View, out: View, sizes: tuple[int, int, int], defines: Mapping[str, Define]
) -> None:
    a, r, b = sizes
    launch_items(
        emit,
        "argreduce.cl",
        "arg_columns",
        (b, a),
        [Read(x), Write(out), b, a, r],
        defines={**defines, "OUT": "long"},
        flops=x.numel,
    )


def cumsum(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """Sums of the segments first, then each segment from the sum of those before it."""
    (given,) = inputs
    assert given is not None
    out, x = emit.like(call.outputs[0]), emit.dense(given)
    if x.numel == 0:
        return [out]
    a, r, b = axes(x.shape, call.attrs["dim"])
    groups = a * b // GROUP
    parts = segments(emit.device, r, groups, SCAN_SEGMENT)
    segment = -(-r // parts)
    parts = -(-r // segment)
    defines: dict[str, Define] = {"IN": C_TYPES[x.dtype], "ACC": C_TYPES[out.dtype]}
    defines["IS_FLOAT"] = int(out.dtype == "float32")
    carry = out
    if parts > 1:
        carry = emit.fresh(out.dtype, (a, parts, b))
        _Pass(emit, _SUM, 1).column_launch(x, carry, (a, b), (r * b, 1), r, b, segment)
        launch_items(
            emit,
            "scan.cl",
            "scan_carries",
            (b, a),
            [Write(carry), b, a, parts],
            defines,
            nbytes=2 * carry.storage.nbytes,
        )
    launch_items(
        emit,
        "scan.cl",
        "scan_segments",
        (b, parts, a),
        [Read(x), Read(carry) if parts > 1 else Read(x), Write(out), b, r, a, segment, parts],
        defines=defines,
        flops=x.numel,
    )
    return [out]


OPS: Mapping[str, Lower] = {
    "sum": _reduction(_SUM),
    "mean": _reduction(_SUM, mean=True),
    "amax": _reduction(_MAX),
    "amin": _reduction(_MIN),
    "prod": _reduction(_PROD),
    "any": _reduction(_ANY),
    "all": _reduction(_ALL),
    "argmax": _argreduction(smallest=False),
    "argmin": _argreduction(smallest=True),
    "cumsum": cumsum,
}
