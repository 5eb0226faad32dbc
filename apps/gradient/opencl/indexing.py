"""Indexing: gather, scatter, index, index_put, embedding and their like (index.cl, sort.cl).

Whatever is put or added at repeated places goes through a stable sort of the places: each element of the result is
then written once, by one item that knows everything that belongs there, in a fixed order. No atomics.

A outer, R the dimension that is indexed, I indices, B inner.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call
from apps.gradient.opencl import sorting
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.movement import region
from apps.gradient.opencl.rows import axes, column_width, launch_items
from apps.gradient.opencl.values import C_TYPES, Define, Fault, Read, View, Write
from apps.gradient.opencl.walks import expanded
from boinc_project.contract.opset import broadcast

CHUNK = 64  # values that one item of put adds itself; as in index.cl
FEW = 16  # indices per line that every element of the line looks through


def gather(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    x, index = inputs
    assert x is not None and index is not None
    out, dim = emit.like(call.outputs[0]), call.attrs["dim"]
    if not out.numel:
        return [out]
    x, index = emit.dense(_reached(x, index.shape, dim)), emit.dense(index)
    outer, count, inner = axes(index.shape, dim)
    sizes = (inner, count, outer)
    launch_items(
        emit,
        "index.cl",
        "gather",
        sizes,
        [Read(x), Read(index), Write(out), *sizes, axes(x.shape, dim)[1], Fault()],
        defines={"T": C_TYPES[x.dtype]},
        nbytes=3 * out.storage.nbytes,
    )
    return [out]


def _reached(x: View, shape: Sequence[int], dim: int) -> View:
    """The part of x that an index of this shape, smaller in other dimensions perhaps, reaches."""
    for axis, size in enumerate(shape):
        if axis != dim and size != x.shape[axis]:
            x = region(x, axis, 0, size, 1)
    return x


def _scatter(add: bool) -> Lower:
    """Where an index is repeated, the last value in row-major order stays, or all are added."""

    def lower(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
        x, index, src = inputs
        assert x is not None and index is not None and src is not None
        if not index.numel or not x.numel:
            return [x]
        dim = call.attrs["dim"]
        for axis, size in enumerate(index.shape):
            src = region(src, axis, 0, size, 1)
        part = _reached(x, index.shape, dim)
        changed = _scattered(emit, emit.dense(part), emit.dense(index), emit.dense(src), dim, add)
        if part.shape == x.shape:
            return [changed]
        out = emit.like(call.outputs[0])
        emit.copy(x, out)
        emit.copy(changed, _reached(out, index.shape, dim))
        return [out]

    return lower


def _scattered(emit: Emitter, x: View, index: View, src: View, dim: int, add: bool) -> View:
    """x [A, R, B] with src [A, I, B] at index [A, I, B]."""
    outer, count, inner = axes(index.shape, dim)
    size = axes(x.shape, dim)[1]
    out = emit.fresh(x.dtype, x.shape)
    defines: dict[str, Define] = {"T": C_TYPES[x.dtype], "ADD": int(add), "BYTE": int(x.dtype == "uint8")}
    if count <= FEW:
        sizes: tuple[int, ...] = (inner, size, outer)
        launch_items(
            emit,
            "index.cl",
            "scatter_few",
            sizes,
            [Read(x), Read(index), Read(src), Write(out), *sizes, count, Fault()],
            defines=defines,
        )
    elif not emit.device.group_form:
        emit.copy(x, out)
        sizes = (inner, outer)
        launch_items(
            emit,
            "index.cl",
            "scatter_lines",
            sizes,
            [Read(index), Read(src), Write(out), *sizes, size, count, Fault()],
            defines=defines,
        )
    else:
        places = emit.fresh("int32", (index.numel,))
        sizes = (inner, count, outer)
        launch_items(
            emit,
            "index.cl",
            "scatter_places",
            sizes,
            [Read(index), Write(places), *sizes, size, Fault()],
        )
        flat = src.reshaped((1, src.numel, 1))
        return _put(emit, x.reshaped((1, x.numel, 1)), places, flat, add=add).reshaped(x.shape)
    return out


def _put(
    emit: Emitter, x: View | None, rows: View, values: View, *, add: bool, size: int = 0, left_out: int = -1
) -> View:
    """x [A, R, B] (zeros if None, with R = size) with values [A, I, B] at rows [I] of int32; all dense.

    Nothing is put at row `left_out`.
    """
    device, (outer, count, inner) = emit.device, values.shape
    size = size if x is None else x.shape[1]
    out = emit.fresh(values.dtype, (outer, size, inner))
    keys, order = sorting.sorted_rows(emit, rows.reshaped((1, count)), count)
    starts = emit.fresh("int32", (size + 1,))
    launch_items(
        emit,
        "index.cl",
        "segment_starts",
        (size + 1,),
        [Read(keys), Write(starts), count, size],
    )
    views = [values, *([] if x is None else [x])]
    width = 1 if values.dtype == "int64" else column_width(device, inner, *(view.offset for view in views))
    defines: dict[str, Define] = {"T": C_TYPES[values.dtype], "VW": width}
    parts = -(-count // CHUNK)
    chunks = values
    if add and parts > 1:
        chunks = emit.fresh(values.dtype, (outer, parts, inner))
        sizes = (_along(device, inner // width), parts, outer)
        launch_items(
            emit,
            "index.cl",
            "chunk_sums",
            sizes,
            [Read(values), Read(keys), Read(order), Write(chunks), inner, parts, outer, count],
            defines=defines,
            uncut=1,
            flops=values.numel,
        )
    sizes = (_along(device, inner // width), size, outer)
    launch_items(
        emit,
        "index.cl",
        "put",
        sizes,
        [
            *(Read(values if x is None else x), Read(values), Read(order), Read(starts), Read(chunks), Write(out)),
            *(inner, size, outer, count, parts, left_out),
        ],
        defines={**defines, "ADD": int(add), "HAS_X": int(x is not None), "BYTE": int(values.dtype == "uint8")},
        uncut=1,
        flops=values.numel,
    )
    return out


def _along(device: DeviceFacts, vectors: int) -> int:
    """Items along the inner dimension: on processors one takes all of a row, which costs it one search."""
    return vectors if device.group_form else 1


def _row_numbers(emit: Emitter, indices: Sequence[View], sizes: Sequence[int], wraps: bool) -> View:
    """Index tensors of one shape as checked row numbers (int32, flat) of a tensor with these sizes."""
    count = indices[0].numel
    before: View | None = None
    for given, size in zip(indices, sizes):
        index, rows = emit.dense(given), emit.fresh("int32", (count,))
        launch_items(
            emit,
            "index.cl",
            "row_numbers",
            (count,),
            [
                *(Read(index), Read(index if before is None else before), Write(rows)),
                *(count, size, int(before is None), Fault()),
            ],
            defines={"WRAPS": int(wraps)},
        )
        before = rows
    assert before is not None
    return before


def _taken(emit: Emitter, x: View, indices: Sequence[View], dim: int, out: View, wraps: bool) -> View:
    """x with the dimensions from dim replaced by what the indices pick."""
    if not out.numel:
        return out
    picked = x.shape[dim : dim + len(indices)]
    sizes = math.prod(x.shape[:dim]), math.prod(picked), math.prod(x.shape[dim + len(indices) :])
    single = len(indices) == 1
    rows = emit.dense(indices[0]) if single else _row_numbers(emit, indices, picked, wraps)
    x, (outer, size, inner), count = emit.dense(x), sizes, rows.numel
    width = 1 if x.dtype == "int64" else column_width(emit.device, inner, x.offset)
    items = (_along(emit.device, inner // width), count, outer)
    defines: dict[str, Define] = {"T": C_TYPES[x.dtype], "INDEX": C_TYPES[rows.dtype], "VW": width}
    launch_items(
        emit,
        "index.cl",
        "take",
        items,
        [Read(x), Read(rows), Write(out), inner, count, outer, size, Fault()],
        defines={**defines, "CHECKED": int(single), "WRAPS": int(wraps)},
        uncut=1,
        nbytes=2 * out.storage.nbytes,
    )
    return out


def index_select(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    x, index = inputs
    assert x is not None and index is not None
    return [_taken(emit, x, [index], call.attrs["dim"], emit.like(call.outputs[0]), wraps=False)]


def embedding(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    weight, indices = inputs
    assert weight is not None and indices is not None
    return [_taken(emit, weight, [indices], 0, emit.like(call.outputs[0]), wraps=False)]


def index(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """Negative indices count from the end."""
    x, indices = inputs[0], _broadcast(inputs[1:])
    assert x is not None
    return [_taken(emit, x, indices, call.attrs["dim"], emit.like(call.outputs[0]), wraps=True)]


def _broadcast(indices: Inputs) -> list[View]:
    given = [view for view in indices if view is not None]
    common = broadcast(*(view.shape for view in given))
    return [expanded(view, common) for view in given]


def index_put(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """Negative indices count from the end; where one is repeated, the last value stays or all are added."""
    x, values, indices = inputs[0], inputs[1], _broadcast(inputs[2:])
    assert x is not None and values is not None
    count, dim = indices[0].numel, call.attrs["dim"]
    if not count or not x.numel:
        return [x]
    before, picked, after = x.shape[:dim], x.shape[dim : dim + len(indices)], x.shape[dim + len(indices) :]
    outer, size, inner = (math.prod(sizes) for sizes in (before, picked, after))
    rows = _row_numbers(emit, indices, picked, wraps=True)
    lines = emit.reshaped(expanded(values, (*before, *indices[0].shape, *after)), (outer, count, inner))
    out = _put(emit, emit.reshaped(x, (outer, size, inner)), rows, lines, add=call.attrs["accumulate"])
    return [out.reshaped(x.shape)]


def embedding_dense_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """Rows of `padding_idx` get no gradient."""
    grad, indices = inputs
    assert grad is not None and indices is not None
    out, count = call.outputs[0], indices.numel
    if not count or not out.numel:
        return [emit.number(0.0, out.dtype, out.shape)]
    size, inner = out.shape
    rows = _row_numbers(emit, [indices], [size], wraps=False)
    lines = emit.reshaped(grad, (1, count, inner))
    padding_idx = call.attrs["padding_idx"]
    left_out = padding_idx if 0 <= padding_idx < size else -1
    return [_put(emit, None, rows, lines, add=True, size=size, left_out=left_out).reshaped(out.shape)]


OPS: Mapping[str, Lower] = {
    "gather": gather,
    "scatter": _scatter(add=False),
    "scatter_add": _scatter(add=True),
    "index": index,
    "index_put": index_put,
    "index_select": index_select,
    "embedding": embedding,
    "embedding_dense_backward": embedding_dense_backward,
}
