"""Stable sorting: sort, topk, and the sorted row numbers that indexing needs (sort.cl)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.movement import region
from apps.gradient.opencl.rows import plain_range
from apps.gradient.opencl.values import C_TYPES, Define, Read, View, Write

BLOCK = 128  # elements that are ranked by comparing each with all: few enough, and then fewer merges


def sorted_rows(emit: Emitter, x: View, keep: int, descending: bool = False) -> tuple[View, View]:
    """x [M, n], dense, sorted along its rows: values [M, n], and the places [M, n] (int32) that they came from.

    Only the first `keep` of each row are defined.
    """
    rows, length = x.shape
    sizes, local = (length, rows), plain_range(emit.device, (length, rows))
    defines: dict[str, Define] = {"T": C_TYPES[x.dtype], "DESCENDING": int(descending), "BLOCK": BLOCK}
    defines["IS_FLOAT"] = int(x.dtype == "float32")
    keys, order = emit.fresh(x.dtype, x.shape), emit.fresh("int32", x.shape)
    emit.launch(
        "sort.cl",
        "sort_blocks",
        sizes,
        [Read(x), Write(keys), Write(order), length, rows, keep],
        defines=defines,
        local_size=local,
        split=1 if rows > 1 else 0,
        flops=x.numel * min(BLOCK, length),
    )
    width = BLOCK
    while width < length:
        merged = emit.fresh(x.dtype, x.shape), emit.fresh("int32", x.shape)
        emit.launch(
            "sort.cl",
            "sort_merge",
            sizes,
            [Read(keys), Read(order), Write(merged[0]), Write(merged[1]), length, rows, keep, width],
            defines=defines,
            local_size=local,
            split=1 if rows > 1 else 0,
            flops=x.numel * width.bit_length(),
        )
        keys, order = merged
        width *= 2
    return keys, order


def _sort(call: Call, inputs: Inputs, emit: Emitter, keep: int, descending: bool) -> Sequence[View]:
    """The first `keep` along dim, and where they were."""
    (x,) = inputs
    assert x is not None
    if call.outputs[0].numel == 0:
        return [emit.like(type_) for type_ in call.outputs]
    rank = len(x.shape)
    if rank == 0:
        return [x, emit.number(0, "int64")]
    dim = call.attrs["dim"]
    there = [axis for axis in range(rank) if axis != dim] + [dim]
    lines = emit.dense(_permuted(x, there))
    length = x.shape[dim]
    made = []
    for view in sorted_rows(emit, lines.reshaped((x.numel // length, length)), keep, descending):
        back = [there.index(axis) for axis in range(rank)]
        made.append(region(_permuted(view.reshaped(lines.shape), back), dim, 0, keep, 1))
    return [made[0], *emit.apply("cast", [made[1]], {"dtype": "int64"})]


def _permuted(view: View, dims: Sequence[int]) -> View:
    shape, strides = (tuple(each[dim] for dim in dims) for each in (view.shape, view.strides))
    return View(view.storage, shape, strides, view.offset)


def sort(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    shape = call.outputs[0].shape
    return _sort(call, inputs, emit, shape[call.attrs["dim"]] if shape else 1, call.attrs["descending"])


def topk(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """The first k of the stable sort."""
    return _sort(call, inputs, emit, call.attrs["k"], call.attrs["largest"])


OPS: Mapping[str, Lower] = {"topk": topk, "sort": sort}
