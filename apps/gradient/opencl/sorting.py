"""Stable sorting: sort, topk, and the sorted row numbers that indexing needs (sort.cl)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.rows import launch_items
from apps.gradient.opencl.values import C_TYPES, Define, Read, View, Write

#: Elements that are ranked by comparing each with all. Small sorts are a matter of launches: few, large blocks.
SMALL, SMALL_BLOCK, BLOCK = 1 << 16, 128, 32


def sorted_rows(emit: Emitter, x: View, keep: int, descending: bool = False) -> tuple[View, View]:
    """The first `keep` of the sorted rows of x [M, n], dense: values and the places (int32) that they came from."""
    rows, length = x.shape
    block = SMALL_BLOCK if x.numel <= SMALL else BLOCK
    defines: dict[str, Define] = {"T": C_TYPES[x.dtype], "DESCENDING": int(descending), "BLOCK": block}
    defines["IS_FLOAT"] = int(x.dtype == "float32")
    runs, kept = -(-length // block), min(block, keep, length)
    last = min(kept, length - (runs - 1) * block)
    stride = (runs - 1) * kept + last
    keys, order = emit.fresh(x.dtype, (rows, stride)), emit.fresh("int32", (rows, stride))
    sizes = (min(block, length), runs, rows)
    launch_items(
        emit,
        "sort.cl",
        "sort_blocks",
        sizes,
        [Read(x), Write(keys), Write(order), length, runs, rows, kept, stride],
        defines=defines,
        flops=x.numel * min(block, length),
    )
    while runs > 1:
        out_kept, merged_runs = min(2 * kept, keep), (runs + 1) // 2
        out_last = min(out_kept, last if runs % 2 else kept + last)
        out_stride = (merged_runs - 1) * out_kept + out_last
        merged = emit.fresh(x.dtype, (rows, out_stride)), emit.fresh("int32", (rows, out_stride))
        sizes = (kept, runs, rows)
        launch_items(
            emit,
            "sort.cl",
            "sort_merge",
            sizes,
            [
                *(Read(keys), Read(order), Write(merged[0]), Write(merged[1])),
                *(runs, rows, kept, last, stride, out_kept, out_stride),
            ],
            defines=defines,
            flops=rows * stride * kept.bit_length(),
        )
        (keys, order), runs, kept, last, stride = merged, merged_runs, out_kept, out_last, out_stride
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
        made.append(_permuted(view.reshaped((*lines.shape[:-1], keep)), back))
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
