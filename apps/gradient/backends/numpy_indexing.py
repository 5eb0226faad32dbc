"""Movement and indexing operators of the numpy backend.

Movement gives views wherever numpy can. Every index tensor is range-checked before it is used; only `index` and
`index_put` let negative indices count from the end, as ATen does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from apps.gradient.backends.backend import Call, Kernel, Prepare, element_strides, out_of_range
from boinc_project.contract.opset import number

Array = np.ndarray[Any, Any]


def check_range(index: Array, size: int, wraps: bool = False) -> None:
    """Raise OutOfRange unless all are in 0..size-1 (or, with `wraps`, -size..size-1)."""
    if index.size:
        low, high = int(index.min()), int(index.max())
        if low < (-size if wraps else 0) or high >= size:
            raise out_of_range(low if low < 0 else 0, high, size)


def add_rows(out: Array, rows: Array, values: Array) -> None:
    """out[rows[i]] += values[i] for out [V,D], rows [n] (checked), values [n,D]; repeated rows add up.

    Sorting first and summing each run is many times faster than np.add.at, and the order of the sum is fixed.
    """
    if rows.size == 0 or values.shape[1] == 0:
        return
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    starts = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1))
    out[ordered[starts]] += np.add.reduceat(values[order], starts, axis=0)


# --- movement -------------------------------------------------------------------------------------------------


def _reshape(call: Call) -> Kernel:
    shape = call.outputs[0].shape
    return lambda x: x.reshape(shape)


def _permute(call: Call) -> Kernel:
    dims = tuple(call.attrs["dims"])
    return lambda x: x.transpose(dims)


def _expand(call: Call) -> Kernel:
    shape = call.outputs[0].shape
    return lambda x: np.broadcast_to(x, shape)


def _region(attrs: Any) -> tuple[slice, ...]:
    whole = (slice(None),) * attrs["dim"]
    return (*whole, slice(attrs["start"], attrs["stop"], attrs["step"]))


def _slice(call: Call) -> Kernel:
    region = _region(call.attrs)
    return lambda x: x[region]


def _slice_scatter(call: Call) -> Kernel:
    region = _region(call.attrs)

    def kernel(x: Array, src: Array) -> Array:
        out = x.copy()
        out[region] = src
        return out

    return kernel


def _cat(call: Call) -> Kernel:
    dim = call.attrs["dim"]
    return lambda *xs: np.concatenate(xs, axis=dim)


def _constant_pad_nd(call: Call) -> Kernel:
    """Pairs of `pad` start at the last dimension; a negative entry crops."""
    x, out = call.input(0), call.outputs[0]
    pad, value = call.attrs["pad"], number(call.attrs["value"])
    source, target = [], []
    for axis, size in enumerate(x.shape):
        pair = len(x.shape) - 1 - axis
        before, after = pad[2 * pair : 2 * pair + 2] or (0, 0)
        source.append(slice(max(-before, 0), size - max(-after, 0)))
        target.append(slice(max(before, 0), out.shape[axis] - max(after, 0)))
    source_region, target_region = tuple(source), tuple(target)

    def kernel(array: Array) -> Array:
        padded = np.full(out.shape, value, out.dtype)
        padded[target_region] = array[source_region]
        return padded

    return kernel


def _flip(call: Call) -> Kernel:
    dims = tuple(call.attrs["dims"])
    return lambda x: np.flip(x, dims)


# --- constants ------------------------------------------------------------------------------------------------


def _full(call: Call) -> Kernel:
    out, value = call.outputs[0], number(call.attrs["value"])
    return lambda: np.full(out.shape, value, out.dtype)


def _arange(call: Call) -> Kernel:
    """start + i * step: exact in integers; in float64, then rounded, for float32."""
    start, step, length = call.attrs["start"], call.attrs["step"], call.attrs["length"]
    dtype = call.outputs[0].dtype
    work = np.float64 if dtype == "float32" else np.int64
    return lambda: (work(start) + np.arange(length, dtype=work) * work(step)).astype(dtype)


# --- indexing along one dimension ---------------------------------------------------------------------------------


def _within(index: Array, dim: int) -> tuple[slice, ...]:
    """The part of x that an index of smaller other dimensions reaches."""
    return tuple(slice(None) if axis == dim else slice(size) for axis, size in enumerate(index.shape))


def _gather(call: Call) -> Kernel:
    dim, size = call.attrs["dim"], call.input(0).shape[call.attrs["dim"]]

    def kernel(x: Array, index: Array) -> Array:
        check_range(index, size)
        return np.take_along_axis(x[_within(index, dim)], index, dim)

    return kernel


def _scatter(call: Call) -> Kernel:
    """Where an index is repeated, the last value in row-major order stays."""
    dim, size = call.attrs["dim"], call.input(0).shape[call.attrs["dim"]]

    def kernel(x: Array, index: Array, src: Array) -> Array:
        check_range(index, size)
        out = x.copy()
        np.put_along_axis(out[_within(index, dim)], index, src[tuple(map(slice, index.shape))], dim)
        return out

    return kernel


def _scatter_add(call: Call) -> Kernel:
    x_type, dim = call.input(0), call.attrs["dim"]
    strides = element_strides(x_type.shape)

    def kernel(x: Array, index: Array, src: Array) -> Array:
        check_range(index, x_type.shape[dim])
        place = index * strides[dim]
        for axis, size in enumerate(index.shape):
            if axis != dim:
                steps = np.arange(size, dtype=np.int64) * strides[axis]
                place += steps.reshape([-1 if a == axis else 1 for a in range(index.ndim)])
        return _add_at(x, place.reshape(-1), src[tuple(map(slice, index.shape))].reshape(-1))

    return kernel


def _add_at(x: Array, places: Array, values: Array) -> Array:
    """A copy of x with values[i] added at flat position places[i]; float sums are made in float64."""
    if x.dtype == np.float32:
        total = np.bincount(places, values, minlength=x.size)[: x.size]
        return (x + total.reshape(x.shape)).astype(np.float32)
    out = x.copy()
    np.add.at(out.reshape(-1), places, values)
    return out


def _index_select(call: Call) -> Kernel:
    dim, size = call.attrs["dim"], call.input(0).shape[call.attrs["dim"]]

    def kernel(x: Array, index: Array) -> Array:
        check_range(index, size)
        return np.take(x, index, axis=dim)

    return kernel


# --- indexing with several tensors --------------------------------------------------------------------------------


def _place(indices: Sequence[Array], sizes: Sequence[int], dim: int) -> tuple[Any, ...]:
    for index, size in zip(indices, sizes):
        check_range(index, size, wraps=True)
    return (*(slice(None),) * dim, *indices)


def _index(call: Call) -> Kernel:
    dim, sizes = call.attrs["dim"], call.input(0).shape[call.attrs["dim"] :]
    return lambda x, *indices: x[_place(indices, sizes, dim)]


def _index_put(call: Call) -> Kernel:
    x_type, dim, count = call.input(0), call.attrs["dim"], len(call.inputs) - 2
    sizes = x_type.shape[dim : dim + count]
    before, after = x_type.shape[:dim], x_type.shape[dim + count :]
    strides = element_strides(sizes)
    height, width = math.prod(sizes), math.prod(before + after)  # said, since of an empty array no -1 can be found

    def put(x: Array, values: Array, *indices: Array) -> Array:
        out = x.copy()
        out[_place(indices, sizes, dim)] = values
        return out

    def accumulate(x: Array, values: Array, *indices: Array) -> Array:
        _place(indices, sizes, dim)
        rows: Any = np.int64(0)
        for index, size, stride in zip(indices, sizes, strides):
            rows = rows + np.where(index < 0, index + size, index) * stride
        # [before, indexed dimensions, after] -> rows of [before, after], and the values likewise
        full = np.broadcast_to(values, before + rows.shape + after)
        lines = np.moveaxis(full.reshape(*before, rows.size, *after), dim, 0).reshape(rows.size, width)
        table = np.moveaxis(x.reshape(*before, height, *after), dim, 0)
        out = table.reshape(height, width).copy()
        add_rows(out, rows.reshape(-1), lines)
        return np.moveaxis(out.reshape(table.shape), 0, dim).reshape(x_type.shape)

    return accumulate if call.attrs["accumulate"] else put


def _embedding(call: Call) -> Kernel:
    size = call.input(0).shape[0]

    def kernel(weight: Array, indices: Array) -> Array:
        check_range(indices, size)
        return np.take(weight, indices, axis=0)

    return kernel


def _embedding_dense_backward(call: Call) -> Kernel:
    """Rows of `padding_idx` get no gradient."""
    out, padding_idx = call.outputs[0], call.attrs["padding_idx"]

    def kernel(grad: Array, indices: Array) -> Array:
        check_range(indices, out.shape[0])
        result = np.zeros(out.shape, np.float32)
        add_rows(result, indices.reshape(-1), grad.reshape(indices.size, out.shape[1]))
        if 0 <= padding_idx < out.shape[0]:
            result[padding_idx] = 0
        return result

    return kernel


# --- sorting --------------------------------------------------------------------------------------------------


def stable_order(x: Array, dim: int, descending: bool) -> Array:
    """Indices that sort x along dim; equal elements keep their order, NaN counts as the largest."""
    if not descending:
        return np.argsort(x, axis=dim, kind="stable")
    backwards = np.argsort(np.flip(x, dim), axis=dim, kind="stable")
    return np.flip(x.shape[dim] - 1 - backwards, dim)


def _sort(call: Call) -> Kernel:
    dim, descending = call.attrs["dim"], call.attrs["descending"]

    def kernel(x: Array) -> tuple[Array, Array]:
        order = stable_order(x, dim, descending)
        return np.take_along_axis(x, order, dim), order

    return kernel


def _topk(call: Call) -> Kernel:
    """The first k of the stable sort."""
    dim, largest, k = call.attrs["dim"], call.attrs["largest"], call.attrs["k"]

    def kernel(x: Array) -> tuple[Array, Array]:
        order = stable_order(x, dim, largest)[(*(slice(None),) * dim, slice(k))]
        return np.take_along_axis(x, order, dim), order

    return kernel


OPS: dict[str, Prepare] = {
    "reshape": _reshape,
    "permute": _permute,
    "expand": _expand,
    "slice": _slice,
    "cat": _cat,
    "constant_pad_nd": _constant_pad_nd,
    "flip": _flip,
    "slice_scatter": _slice_scatter,
    "gather": _gather,
    "scatter": _scatter,
    "scatter_add": _scatter_add,
    "index": _index,
    "index_put": _index_put,
    "index_select": _index_select,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_dense_backward,
    "topk": _topk,
    "sort": _sort,
    "full": _full,
    "arange": _arange,
}
