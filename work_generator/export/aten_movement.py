"""ATen's operators that move elements without changing them: views, copies, slices, joins, indexing, sorting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from work_generator.export.context import Context, Entry, dim_of, dims_of
from work_generator.export.draft import Scalar, Value


def _same(c: Context, x: Value, *_: Any, **__: Any) -> Value:
    """Views and copies that change neither values nor, in our order of elements, shape."""
    return c.cast(x, c.type.dtype)


def _view(c: Context, x: Value, *_: Any, **__: Any) -> Value:
    """Anything that keeps the order of elements: the traced shape says the rest."""
    return c.reshape(x, c.type.shape)


def _expand(c: Context, x: Value, *_: Any, **__: Any) -> Value:
    return c.one("expand", [x], shape=list(c.type.shape))


def _permute(c: Context, x: Value, dims: Sequence[int]) -> Value:
    return c.one("permute", [x], dims=[dim_of(d, len(x.shape)) for d in dims])


def _transpose(c: Context, x: Value, a: int = 0, b: int = 1) -> Value:
    dims = list(range(len(x.shape)))
    if len(dims) > 1:
        a, b = dim_of(a, len(dims)), dim_of(b, len(dims))
        dims[a], dims[b] = dims[b], dims[a]
    return c.one("permute", [x], dims=dims)


def _bounds(size: int, start: int | None, stop: int | None) -> tuple[int, int]:
    """A slice's ends as the opset wants them: 0 <= start <= stop <= size."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


def _slice(c: Context, x: Value, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Value:
    dim = dim_of(dim, len(x.shape))
    first, last = _bounds(x.shape[dim], start, stop)
    return c.one("slice", [x], dim=dim, start=first, stop=last, step=step)


def _select(c: Context, x: Value, dim: int, index: int) -> Value:
    dim = dim_of(dim, len(x.shape))
    index %= x.shape[dim]
    return c.reshape(c.one("slice", [x], dim=dim, start=index, stop=index + 1, step=1), c.type.shape)


def _split(c: Context, x: Value, sizes: int | Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    dim = dim_of(dim, len(x.shape))
    if isinstance(sizes, int):
        total = x.shape[dim]
        sizes = [min(sizes, total - first) for first in range(0, total, sizes)]
    parts, first = [], 0
    for size in sizes:
        parts.append(c.one("slice", [x], dim=dim, start=first, stop=first + size, step=1))
        first += size
    return tuple(parts)


def _unbind(c: Context, x: Value, dim: int = 0) -> tuple[Value, ...]:
    return tuple(_select_at(c, x, dim_of(dim, len(x.shape)), i) for i in range(x.shape[dim_of(dim, len(x.shape))]))


def _select_at(c: Context, x: Value, dim: int, index: int) -> Value:
    part = c.one("slice", [x], dim=dim, start=index, stop=index + 1, step=1)
    return c.reshape(part, [s for d, s in enumerate(x.shape) if d != dim])


def _cat(c: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    # ATen lets 1-d empty tensors join anything.
    parts = [c.cast(t, c.type.dtype) for t in tensors if t.shape != (0,)] or list(tensors[:1])
    return c.one("cat", parts, dim=dim_of(dim, len(parts[0].shape)))


def _stack(c: Context, tensors: Sequence[Value], dim: int = 0) -> Value:
    rank = len(c.type.shape)
    dim = dim_of(dim, rank)
    shape = [1 if d == dim else size for d, size in enumerate(c.type.shape)]
    return c.one("cat", [c.reshape(c.cast(t, c.type.dtype), shape) for t in tensors], dim=dim)


def _pad(c: Context, x: Value, pad: Sequence[int], value: Scalar = 0) -> Value:
    number = c.scalar(value, x.dtype).producer
    assert number is not None
    return c.one("constant_pad_nd", [x], pad=list(pad), value=number.attrs["value"])


def _flip(c: Context, x: Value, dims: Sequence[int]) -> Value:
    return c.one("flip", [x], dims=dims_of(dims, len(x.shape)))


def _slice_scatter(
    c: Context, x: Value, src: Value, dim: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Value:
    dim = dim_of(dim, len(x.shape))
    first, last = _bounds(x.shape[dim], start, stop)
    if (first, last, step) == (0, x.shape[dim], 1):
        return c.cast(src, x.dtype)
    return c.one("slice_scatter", [x, c.cast(src, x.dtype)], dim=dim, start=first, stop=last, step=step)


def _select_scatter(c: Context, x: Value, src: Value, dim: int, index: int) -> Value:
    dim = dim_of(dim, len(x.shape))
    index %= x.shape[dim]
    part = c.reshape(c.cast(src, x.dtype), [1 if d == dim else s for d, s in enumerate(x.shape)])
    return c.one("slice_scatter", [x, part], dim=dim, start=index, stop=index + 1, step=1)


def _copy(c: Context, x: Value, src: Value, *_: Any) -> Value:
    return c.one("expand", [c.cast(src, x.dtype)], shape=list(x.shape))


def _repeat(c: Context, x: Value, repeats: Sequence[int]) -> Value:
    sizes = [1] * (len(repeats) - len(x.shape)) + list(x.shape)
    pairs = [(times, size) for times, size in zip(repeats, sizes, strict=True)]
    apart = c.reshape(x, [n for _, size in pairs for n in (1, size)])
    return c.reshape(c.one("expand", [apart], shape=[n for pair in pairs for n in pair]), c.type.shape)


def _strided_places(c: Context, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None) -> Value:
    """Where the elements of a strided view lie in the flattened x, int64 of the view's shape."""
    if not c.contiguous:
        raise c.refuse("depends on how a tensor lies in memory", "use reshape, permute, slices or index instead")
    places = c.scalar(offset or 0, "int64")
    for d, (count, step) in enumerate(zip(size, stride, strict=True)):
        line = c.one("arange", [], start=0, step=step, length=count, dtype="int64")
        shape = [count if each == d else 1 for each in range(len(size))]
        places = c.one("add", [places, c.reshape(line, shape)])
    return places


def _as_strided(c: Context, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> Value:
    """A view by strides, which autograd uses for assignments to slices, as a lookup."""
    places = _strided_places(c, x, size, stride, offset)
    return c.one("index", [c.reshape(x, [x.type.numel]), places], dim=0)


def _as_strided_scatter(
    c: Context, x: Value, src: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Value:
    places = _strided_places(c, x, size, stride, offset)
    flat = c.reshape(x, [x.type.numel])
    return c.reshape(c.one("index_put", [flat, c.cast(src, x.dtype), places], dim=0, accumulate=False), x.shape)


# --- indexing ---


def _gather(c: Context, x: Value, dim: int, index: Value, *, sparse_grad: bool = False) -> Value:
    if not x.shape:
        return c.reshape(x, index.shape)
    return c.one("gather", [x, c.cast(index, "int64")], dim=dim_of(dim, len(x.shape)))


def _scatter(op: str) -> Entry:
    def entry(c: Context, x: Value, dim: int, index: Value, src: Value | Scalar) -> Value:
        source = c.cast(src, x.dtype) if isinstance(src, Value) else c.full(index.shape, src, x.dtype)
        return c.one(op, [x, c.cast(index, "int64"), source], dim=dim_of(dim, len(x.shape)))

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


def _index_put(c: Context, x: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False) -> Value:
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
    moved = c.one("index_put", [c.one("permute", [x], dims=order), values, *given], dim=0, accumulate=accumulate)
    return c.one("permute", [moved], dims=[order.index(d) for d in range(len(order))])


def _index_select(c: Context, x: Value, dim: int, index: Value) -> Value:
    return c.one("index_select", [x, c.cast(index, "int64")], dim=dim_of(dim, len(x.shape)))


def _embedding(c: Context, weight: Value, indices: Value, *_: Any, **__: Any) -> Value:
    return c.one("embedding", [weight, c.cast(indices, "int64")])


def _embedding_backward(
    c: Context, grad: Value, indices: Value, num_weights: int, padding_idx: int, by_frequency: bool
) -> Value:
    if by_frequency:
        raise c.refuse("scales by frequency", "set scale_grad_by_freq=False")
    index = c.cast(indices, "int64")
    return c.one("embedding_dense_backward", [grad, index], num_weights=num_weights, padding_idx=padding_idx)


def _topk(c: Context, x: Value, k: int, dim: int = -1, largest: bool = True, _sorted: bool = True) -> tuple[Value, ...]:
    return c.many("topk", [x], k=k, dim=dim_of(dim, len(x.shape)), largest=largest)


def _sort(c: Context, x: Value, dim: int = -1, descending: bool = False) -> tuple[Value, ...]:
    return c.many("sort", [x], dim=dim_of(dim, len(x.shape)), descending=descending)


def _sort_stable(
    c: Context, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> tuple[Value, ...]:
    return _sort(c, x, dim, descending)


ENTRIES: Mapping[str, Entry] = {
    # views copies joins
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
    "aten.repeat.default": _repeat,
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _as_strided_scatter,
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
}
