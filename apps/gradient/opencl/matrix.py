"""Matrix products: mm, bmm, addmm, and the products that convolutions are made of.

A product is one launch of gemm.cl on register tiles, with up to two launches of pack.cl before it, and one that
sums up after it where K was cut into parts; or one launch of gemv.cl where a side has a single row. tiles.py
decides; this module emits.

Shapes: a [batch, M, K], b [batch, K, N], c [batch, M, N], all by strides; a bias is read as [M, N] by strides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.tiles import Product, Recipe, Side, Tile, choose, parts_of_row
from apps.gradient.opencl.values import Argument, Define, Read, View, Write
from apps.gradient.opencl.walks import expanded


@dataclass(frozen=True)
class Panels:
    """A packed operand, [batch, panels, K, height]; one that all of the batch share has a batch of 1."""

    view: View
    rows: int
    k: int

    @property
    def batch_stride(self) -> int:
        return 0 if self.view.shape[0] == 1 else math.prod(self.view.shape[1:])


Operand = Union[View, Panels]

GROUP_WORK = 200_000  # multiply-adds of a work-group, on CPUs: some microseconds
PANEL_BYTES = 128 << 20  # of a packed operand: a larger one is packed in parts
LONG_K = 1024  # steps of k in one launch, on CPUs, if there are many more
LARGE_FLOATS = 1 << 20  # what stays in the last-level cache of a CPU
CACHED_FLOATS = 64 << 10  # what stays in the second-level cache of a CPU


def mm(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    a, b = inputs
    assert a is not None and b is not None
    out = emit.like(call.outputs[0])
    multiply(emit, _batched(a), _batched(b), _batched(out))
    return [out]


def bmm(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    a, b = inputs
    assert a is not None and b is not None
    out = emit.like(call.outputs[0])
    multiply(emit, a, b, out)
    return [out]


def addmm(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    bias, a, b = inputs
    assert bias is not None and a is not None and b is not None
    out = emit.like(call.outputs[0])
    multiply(emit, _batched(a), _batched(b), _batched(out), _batched(expanded(bias, out.shape)))
    return [out]


def _batched(x: View) -> View:
    return View(x.storage, (1, *x.shape), (0, *x.strides), x.offset)


def multiply(emit: Emitter, a: View, b: View, c: View, bias: View | None = None) -> None:
    """c = a b + bias, each [batch, ., .]. A batch of a or b that is smaller than c's divides it: it is used in turn."""
    right = turned(b)
    if c.numel == 0:
        return
    if c.shape[1] == 1 and _is_row_product(right, a, c):
        _row_product(emit, right, a, turned(c), None if bias is None else turned(bias))
    elif c.shape[2] == 1 and _is_row_product(a, right, c):
        _row_product(emit, a, right, c, bias)
    else:
        wanted = Product(c.shape[0], a.shape[2], side(emit.device, a), side(emit.device, right))
        recipe = choose(emit.device, wanted)
        cut = None if _fits(emit.device, wanted, recipe) else _cut(a, right, c)
        if cut is None:
            product(emit, a, right, c, bias, recipe)
            return
        axis, half = cut
        for part in (range(half), range(half, c.shape[axis])):
            multiply(
                emit,
                a if axis == 2 or a.shape[axis] == 1 else _part(a, axis, part),
                b if axis == 1 or b.shape[axis] == 1 else _part(b, axis, part),
                _part(c, axis, part),
                None if bias is None else _part(bias, axis, part),
            )


def _fits(device: DeviceFacts, wanted: Product, recipe: Recipe) -> bool:
    """Whether packed operands are of a size that may be taken from the device's memory in passing."""
    seen = wanted.turned() if recipe.turned else wanted
    packed = ((seen.left, recipe.pack_a), (seen.right, recipe.pack_b))
    most = max((each.batches * each.rows * wanted.k for each, packs in packed if packs), default=0)
    return 4 * most <= min(PANEL_BYTES, device.max_allocation // 4)


def _cut(a: View, right: View, c: View) -> tuple[int, int] | None:
    """The axis of c along which the larger packed operand is halved, and where; None if it cannot be."""
    if max(_batches(a), _batches(right)) > 1:
        plain = all(_batches(each) in (1, c.shape[0]) for each in (a, right))
        return (0, c.shape[0] // 2) if plain else None
    axis = 1 if a.shape[1] >= right.shape[1] else 2
    size = c.shape[axis]
    halves = (size // 2 + -(size // 2) % step for step in (64, 8, 1))  # whole tiles, where there are several
    return next(((axis, half) for half in halves if 0 < half < size), None)


def _part(x: View, axis: int, part: range) -> View:
    """x[.., part, ..] along one axis."""
    shape = (*x.shape[:axis], len(part), *x.shape[axis + 1 :])
    return View(x.storage, shape, x.strides, x.offset + part.start * x.strides[axis])


def side(device: DeviceFacts, x: View) -> Side:
    """An operand as tiles.py sees it."""
    batches = 1 if x.strides[0] == 0 else x.shape[0]
    return Side(x.shape[1], batches, x.strides[1], x.strides[-1], _loads_vectors(device, x), len(x.shape) == 3)


def product(emit: Emitter, left: Operand, right: Operand, c: View, bias: View | None, recipe: Recipe) -> None:
    """c = left right^T + bias, as the recipe says; operands that are packed already fit its tile.

    left is [batch, M, K] and right [batch, N, K], or [batch, ., K_outer, K_inner] where K walks two levels.
    """
    if recipe.turned:
        left, right, c = right, left, turned(c)
        bias = None if bias is None else turned(bias)
    tile, device = recipe.tile, emit.device
    batch, m, n = c.shape
    if recipe.pack_a and isinstance(left, View):
        left = pack(emit, left, tile.rows)
    if recipe.pack_b and isinstance(right, View):
        right = pack(emit, right, tile.columns)
    k = left.k if isinstance(left, Panels) else left.shape[2]
    left_batches, right_batches = _batches(left), _batches(right)
    repeats = 1 if left_batches not in (1, batch) else 2 if right_batches not in (1, batch) else 0
    parts, part_k = _parts(k, recipe.parts)
    sums = emit.fresh("float32", (parts, batch, m, n)) if parts > 1 else None
    target = c if sums is None else View(sums.storage, c.shape, sums.strides[1:])
    inside = m % tile.rows == 0 and n % tile.columns == 0
    defines: dict[str, Define] = {
        "TM": tile.rows,
        "NV": tile.across,
        "VW": tile.vector,
        "A_PACKED": int(isinstance(left, Panels)),
        "A_VECTORS": int(device.group_form and tile.rows % 4 == 0 and isinstance(left, Panels)),
        "B_PACKED": int(isinstance(right, Panels)),
        "REPEATS": repeats,
        "EDGE": int(not inside) if device.group_form else 2,
        "STORE_VECTORS": int(target.strides[2] == 1 and _loads_vectors(device, target)),
        "SPLIT": int(sums is not None),
    }
    operands: list[Argument] = []
    if isinstance(left, Panels):
        operands += [Read(left.view), left.batch_stride, 0, 0]
    else:
        operands += [Read(left), _batch_stride(left), *left.strides[1:]]
    if isinstance(right, Panels):
        operands += [Read(right.view), right.batch_stride, 0]
    else:
        operands += [Read(right), _batch_stride(right), right.strides[2]]
    if repeats:
        operands.append(left_batches if repeats == 1 else right_batches)
    results: list[Argument] = [Write(target), *target.strides]
    if sums is not None:
        results += [parts, part_k, batch * m * n]
    across, down = -(-n // tile.columns), -(-m // tile.rows)
    for steps in [range(k)] if device.group_form or sums is not None else _stretches(k):
        biased = bias if sums is None and steps.start == 0 else None
        emit.launch(
            "gemm.cl",
            "gemm",
            (across, down, batch * parts),
            [*operands, *_bias_arguments(biased), *results, m, n, k, steps.start, steps.stop],
            defines={**defines, "BIAS": _bias_kind(biased), "MORE": int(steps.start > 0)},
            local_size=_tile_local(device, (across, down, batch * parts), tile, len(steps) // parts),
            split=1,
            flops=2 * batch * m * n * len(steps),
        )
    if sums is not None:
        _sum_parts(emit, sums, c, bias)


def _stretches(k: int) -> list[range]:
    """Parts of K that a CPU adds to the result one after the other, so that the panels of a tile stay in its caches."""
    if k < LONG_K + LONG_K // 2:
        return [range(k)]
    step = -(-k // -(-k // LONG_K))
    step += -step % 16
    return [range(start, min(start + step, k)) for start in range(0, k, step)]


def _parts(k: int, wanted: int) -> tuple[int, int]:
    """Parts of K and the steps of each, a multiple of 16 so that vectors stay where they may be loaded."""
    if wanted <= 1:
        return 1, k
    steps = -(-k // wanted)
    steps += -steps % 16
    return -(-k // steps), steps


def _sum_parts(emit: Emitter, sums: View, c: View, bias: View | None) -> None:
    parts, (batch, m, n) = sums.shape[0], c.shape
    emit.launch(
        "gemm.cl",
        "gemm_sum",
        (n, m, batch),
        [Read(sums), parts, batch * m * n, *_bias_arguments(bias), Write(c), *c.strides, m, n],
        defines={"BIAS": _bias_kind(bias)},
        split=1,
        flops=parts * batch * m * n,
    )


def _bias_kind(bias: View | None) -> int:
    """BIAS of gemm.cl."""
    if bias is None:
        return 0
    down, along = (stride if size > 1 else 0 for stride, size in zip(bias.strides[1:], bias.shape[1:]))
    return 1 if down == 0 else 2 if along == 0 else 3


def _bias_arguments(bias: View | None) -> list[Argument]:
    return [] if bias is None else [Read(bias), _batch_stride(bias), *bias.strides[1:]]


def turned(x: View) -> View:
    """The last two dimensions exchanged."""
    shape, strides = x.shape, x.strides
    return View(x.storage, (shape[0], shape[2], shape[1]), (strides[0], strides[2], strides[1]), x.offset)


def _batches(x: Operand) -> int:
    if isinstance(x, View):
        return 1 if x.strides[0] == 0 else x.shape[0]
    return x.view.shape[0]


def _batch_stride(x: View) -> int:
    return 0 if x.shape[0] == 1 else x.strides[0]


def _tile_local(device: DeviceFacts, tiles: tuple[int, int, int], tile: Tile, steps: int) -> tuple[int, int, int]:
    """Work-group of gemm.cl, of few different sizes, for so many tiles that sum up `steps` of k.

    A CPU's thread runs the items of a group one after the other, along dimension 0 first, and the tiles of a row of
    tiles share its rows of a. If b is too large for the last cache, a group is as wide as the columns of b that the
    second one holds, for the next rows to find them there.
    """
    across, down, deep = tiles
    if device.group_form:
        most = min(device.wavefront, device.max_work_group)
        rows = 8
        while rows > 1 and (rows >= 2 * down or rows * rows > most):
            rows //= 2
        return most // rows, rows, 1
    items = min(16, device.max_work_group)  # several groups for each unit, each with some microseconds of work
    work, panel = tile.rows * tile.columns * steps, tile.columns * steps
    while items > 1 and items * work > GROUP_WORK and across * down * deep < items * 4 * device.compute_units:
        items //= 2
    wide = items
    large = across * panel > LARGE_FLOATS
    while wide > 1 and (wide >= 2 * across or (large and wide * panel > CACHED_FLOATS)):
        wide //= 2
    return wide, items // wide, 1


# Packing.


def pack(emit: Emitter, x: View, height: int) -> Panels:
    """Pack x [batch, rows, K], or [batch, rows, K_outer, K_inner] where K walks two levels."""
    device = emit.device
    if x.strides[0] == 0:
        x = View(x.storage, (1, *x.shape[1:]), x.strides, x.offset)
    if len(x.shape) == 3:
        x = View(x.storage, (*x.shape[:2], 1, x.shape[2]), (*x.strides[:2], 0, x.strides[2]), x.offset)
    batch, rows, outer, inner = x.shape
    if outer == 1 or x.strides[2] == inner * x.strides[3]:
        outer, inner = 1, outer * inner
    k, count = outer * inner, -(-rows // height)
    panels = Panels(emit.fresh("float32", (batch, count, k, height)), rows, k)
    vectors = height % 2 == 0 and _loads_vectors(device, x)
    steps = 1
    if x.strides[1] == 1 and outer == 1 and vectors:
        kernel, steps = "pack_rows", 1 if device.group_form else 8
    elif x.strides[3] == 1 and (outer == 1 or inner % 4 == 0) and vectors:
        kernel, steps = "pack_inner", 4
    else:
        kernel = "pack"
    walk: list[Argument] = [x.strides[1], inner, x.strides[2], x.strides[3], x.strides[0]]
    sizes = (-(-k // steps), count, batch)
    emit.launch(
        "pack.cl",
        kernel,
        sizes,
        [Read(x), rows, k, *walk, Write(panels.view)],
        defines={"T": height, "STEPS": steps if kernel == "pack_rows" else 1, "TWO_LEVELS": int(outer > 1)},
        local_size=_pack_local(device, kernel, sizes),
        split=0,
    )
    return panels


def _loads_vectors(device: DeviceFacts, x: View) -> bool:
    """Whether vectors along the axis of stride 1 may be loaded: from anywhere on a CPU, else from multiples of 4."""
    strides = [stride for stride, size in zip(x.strides, x.shape) if size > 1 and stride != 1]
    return not device.group_form or not any(each % 4 for each in (x.offset, *strides))


def _pack_local(device: DeviceFacts, kernel: str, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Few different sizes. GPUs read and write side by side along k; so do CPUs, if k is what lies side by side."""
    along, across = {"pack": (16, 16), "pack_rows": (1, 64), "pack_inner": (256, 1)}[kernel]
    if device.group_form:
        along, across = device.wavefront, 1
    while along * across > device.max_work_group:
        along, across = max(1, along // 2), max(1, across // 2)
    while along > 8 and along >= 2 * sizes[0]:
        along //= 2
        across *= 2
    while across > 1 and across >= 2 * sizes[1]:
        across //= 2
    return along, across, 1


# One row.


def _is_row_product(w: View, x: View, c: View) -> bool:
    """Whether dot products along w's rows are the way: w [batch, N, K] with its elements along k, or none along n."""
    plain = all(_batches(each) in (1, c.shape[0]) for each in (w, x))
    return plain and (w.strides[2] == 1 or w.strides[1] != 1)


def _row_product(emit: Emitter, w: View, x: View, c: View, bias: View | None) -> None:
    """c [batch, N, 1] = w [batch, N, K] times x [batch, 1, K], + bias [batch, N, 1]."""
    device = emit.device
    batch, n, k = c.shape[0], w.shape[1], w.shape[2]
    if k > 1 and x.strides[2] != 1:
        x = emit.dense(x)
    vectors = w.strides[2] == 1 and _loads_vectors(device, w) and _loads_vectors(device, x)
    vector = (4 if device.group_form else device.vector_width) if vectors else 1
    parts, part_k = _parts(k, parts_of_row(device, batch * n, k))
    sums = emit.fresh("float32", (parts, batch, n, 1)) if parts > 1 else None
    target = c if sums is None else View(sums.storage, c.shape, sums.strides[1:])
    defines: dict[str, Define] = {"VW": vector, "SPLIT": int(parts > 1), "BIAS": int(bias is not None and parts == 1)}
    arguments: list[Argument] = [Read(w), _batch_stride(w), *w.strides[1:], Read(x), _batch_stride(x)]
    if bias is not None and parts == 1:
        arguments += [Read(bias), _batch_stride(bias), bias.strides[1]]
    arguments += [Write(target), *target.strides[:2]]
    if parts > 1:
        arguments += [parts, part_k, batch * n]
    arguments += [n, k]
    if device.group_form:
        lanes = min(64, 1 << (device.max_work_group.bit_length() - 1))
        rows = max(1, min(4, device.max_work_group // lanes)) if k < 1024 and n >= 4 else 1
        defines.update({"LANES": lanes, "ROWS": rows})
        emit.launch(
            "gemv.cl",
            "gemv_group",
            (lanes, n, batch * parts),
            arguments,
            defines=defines,
            local_size=(lanes, rows, 1),
            split=1,
            flops=2 * batch * n * k,
        )
    else:
        emit.launch(
            "gemv.cl",
            "gemv_item",
            (n, 1, batch * parts),
            arguments,
            defines=defines,
            local_size=_row_local(device, n, batch * parts),
            split=0,
            flops=2 * batch * n * k,
        )
    if sums is not None:
        _sum_parts(emit, sums, c, bias)


def _row_local(device: DeviceFacts, n: int, deep: int) -> tuple[int, int, int]:
    items = min(64, device.max_work_group)
    while items > 1 and n * deep < items * 4 * device.compute_units:
        items //= 2
    return items, 1, 1


OPS: Mapping[str, Lower] = {"mm": mm, "bmm": bmm, "addmm": addmm}
