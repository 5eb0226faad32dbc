"""Layer, group and batch norm, forward and backward (norm.cl, norm_backward.cl).

A layer norm is one kernel a pass. Group and batch norms have kernels for their sums only: what is done to every
element afterwards is a chain of elementwise operators, which may go on with the activation that follows.

N batch, C channels, G groups, L positions; rows [M, D] of a layer norm.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.reductions import column_segment, total
from apps.gradient.opencl.rows import (
    column_vectors,
    column_width,
    launch_items,
    launch_rows,
    vector_width,
)
from apps.gradient.opencl.values import Define, Read, View, Write

MERGED_AT_ONCE = 128  # parts whose moments one item merges


def native_layer_norm(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    x, weight, bias = (None if view is None else emit.dense(view) for view in inputs)
    assert x is not None
    length = math.prod(call.attrs["normalized_shape"])
    rows = x.numel // length
    out, mean, rstd = (emit.like(type_) for type_ in call.outputs)
    width = _row_width(emit, length, x, weight, bias)
    launch_rows(
        emit,
        "norm.cl",
        "layer_norm",
        (rows,),
        length,
        width,
        [
            *(Read(x), Read(x if weight is None else weight), Read(x if bias is None else bias)),
            *(Write(out), Write(mean), Write(rstd), rows, length, float(call.attrs["eps"])),
        ],
        {"WEIGHTED": int(weight is not None), "BIASED": int(bias is not None)},
        flops=8 * x.numel,
    )
    return [out, mean, rstd]


def native_layer_norm_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    grad, x, mean, rstd, weight = (None if view is None else emit.dense(view) for view in inputs[:5])
    assert grad is not None and x is not None and mean is not None and rstd is not None
    mask, inner = call.attrs["output_mask"], tuple(call.attrs["normalized_shape"])
    length = math.prod(inner)
    rows = x.numel // length
    made: list[View | None] = [None, None, None]
    if mask[0]:
        out = made[0] = emit.fresh("float32", x.shape)
        width = _row_width(emit, length, x, grad, weight)
        launch_rows(
            emit,
            "norm_backward.cl",
            "layer_norm_backward",
            (rows,),
            length,
            width,
            [
                *(Read(grad), Read(x), Read(mean), Read(rstd), Read(x if weight is None else weight)),
                *(Write(out), rows, length),
            ],
            {"WEIGHTED": int(weight is not None)},
            flops=10 * x.numel,
        )
    if mask[1] or mask[2]:
        made[2], made[1] = _parts(_column_sums(emit, grad, x, mean, rstd, (rows, length), by_row=True))
    return [view.reshaped(type_.shape) for view, type_ in zip(_wanted(made, mask), call.outputs)]


def native_group_norm(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    given, weight, bias = inputs
    assert given is not None
    x, groups = emit.dense(given), call.attrs["groups"]
    batch, channels = x.shape[:2]
    out, *statistics = (emit.like(type_) for type_ in call.outputs)
    if not x.numel:
        return [out, *statistics]
    rows, length = batch * groups, x.numel // (batch * groups)
    mean, squares = _row_moments(emit, x, rows, length)
    rstd = _inverse_deviation(emit, _chain(emit, "div", squares, float(length)), float(call.attrs["eps"]))
    shape, of_group = (batch, groups, channels // groups, length * groups // channels), (batch, groups, 1, 1)
    hat = _chain(emit, "sub", x.reshaped(shape), mean.reshaped(of_group))
    hat = _chain(emit, "mul", hat, rstd.reshaped(of_group))
    for op, view in (("mul", weight), ("add", bias)):
        if view is not None:
            hat = _chain(emit, op, hat, emit.reshaped(view, (groups, channels // groups, 1)))
    return [hat.reshaped(out.shape), *(view.reshaped((batch, groups)) for view in (mean, rstd))]


def native_group_norm_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    grad, x, mean, rstd, weight = (None if view is None else emit.dense(view) for view in inputs)
    assert grad is not None and x is not None and mean is not None and rstd is not None
    mask, groups = call.attrs["output_mask"], call.attrs["groups"]
    batch, channels = x.shape[:2]
    if not x.numel:
        return [emit.number(0.0, type_.dtype, type_.shape) for type_ in call.outputs]
    positions, share = x.numel // (batch * channels), channels // groups
    length = positions * share
    sums = _row_sums(emit, grad, x, mean, rstd, (batch, channels, positions), (groups, share))
    made: list[View | None] = [None, None, None]
    if mask[0]:
        shape, of_group = (batch, groups, share, positions), (batch, groups, 1, 1)
        of_channel = None if weight is None else weight.reshaped((groups, share, 1))
        by_group = sums.reshaped((2, batch, groups, share, 1))
        if of_channel is not None:
            by_group = _chain(emit, "mul", by_group, of_channel)
        of_groups = total(emit, by_group.reshaped((2, batch * groups, share)), [2])
        inward = grad.reshaped(shape)
        if of_channel is not None:
            inward = _chain(emit, "mul", inward, of_channel)
        numbers = _coefficients(emit, of_groups, rstd, None, length)
        made[0] = _inward(emit, inward, x.reshaped(shape), mean, numbers, of_group)
    if mask[1] or mask[2]:
        made[2], made[1] = _parts(total(emit, sums, [1]))
    return [view.reshaped(type_.shape) for view, type_ in zip(_wanted(made, mask), call.outputs)]


def native_batch_norm(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """Training: statistics of this batch, and running ones moved by `momentum` (variance unbiased there only)."""
    given, weight, bias, running_mean, running_var = inputs
    assert given is not None and running_mean is not None and running_var is not None
    x, eps, momentum = emit.dense(given), float(call.attrs["eps"]), float(call.attrs["momentum"])
    batch, channels = x.shape[:2]
    positions = math.prod(x.shape[2:])
    if call.attrs["training"]:
        mean, squares = _channel_moments(emit, x, batch, channels, positions)
        invstd, new_mean, new_var = (emit.fresh("float32", (channels,)) for _ in range(3))
        count = batch * positions
        launch_items(
            emit,
            "norm.cl",
            "batch_norm_finish",
            (channels,),
            [
                *(Read(mean), Read(squares), Read(emit.dense(running_mean)), Read(emit.dense(running_var))),
                *(Write(invstd), Write(new_mean), Write(new_var), channels),
                *(float(count), count / max(count - 1, 1), momentum, eps),
            ],
        )
    else:
        mean, new_mean, new_var = running_mean, running_mean, running_var
        invstd = _inverse_deviation(emit, running_var, eps)
    of_channel = (channels, *(1,) * (len(x.shape) - 2))
    vectors = [None if view is None else emit.reshaped(view, of_channel) for view in (mean, invstd, weight, bias)]
    out = x
    for op, vector in zip(("sub", "mul", "mul", "add"), vectors):
        if vector is not None:
            out = _chain(emit, op, out, vector)
    return [out, mean, invstd, new_mean, new_var]


def native_batch_norm_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    grad, x, weight, running_mean, running_var, mean, invstd = (
        None if view is None else emit.dense(view) for view in inputs
    )
    assert grad is not None and x is not None and mean is not None and invstd is not None
    assert running_mean is not None and running_var is not None
    training, mask = call.attrs["training"], call.attrs["output_mask"]
    batch, channels = x.shape[:2]
    positions = math.prod(x.shape[2:])
    if not training:
        mean, invstd = running_mean, _inverse_deviation(emit, running_var, float(call.attrs["eps"]))
    if not x.numel:
        return [emit.number(0.0, type_.dtype, type_.shape) for type_ in call.outputs]
    made: list[View | None] = [None, None, None]
    if positions == 1:
        sums = _column_sums(emit, grad, x, mean, invstd, (batch, channels), by_row=False)
    else:
        sums = total(emit, _row_sums(emit, grad, x, mean, invstd, (batch, channels, positions), (0, 1)), [1])
    made[2], made[1] = _parts(sums)
    of_channel = (channels, *(1,) * (len(x.shape) - 2))
    if mask[0] and training:
        numbers = _coefficients(emit, sums, invstd, weight, batch * positions)
        made[0] = _inward(emit, grad, x, mean, numbers, of_channel)
    elif mask[0]:
        out = _chain(emit, "mul", grad, invstd.reshaped(of_channel))
        made[0] = out if weight is None else _chain(emit, "mul", out, weight.reshaped(of_channel))
    return _wanted(made, mask)


# Parts.


def _chain(emit: Emitter, op: str, a: View, b: View | float) -> View:
    return emit.apply(op, [a, b if isinstance(b, View) else emit.number(float(b), "float32")])[0]


def _coefficients(emit: Emitter, sums: View, rstd: View, weight: View | None, count: int) -> View:
    """Of grad_x, from the sums [2, C] of its gradient and of that times hat: see norm_backward.cl."""
    channels = sums.shape[1]
    out = emit.fresh("float32", (3, channels))
    launch_items(
        emit,
        "norm_backward.cl",
        "norm_coefficients",
        (channels,),
        [
            *(Read(sums), Read(rstd), Read(rstd if weight is None else weight), Write(out)),
            *(channels, float(count)),
        ],
        defines={"WEIGHTED": int(weight is not None)},
    )
    return out


def _inward(emit: Emitter, grad: View, x: View, mean: View, coefficients: View, shape: Sequence[int]) -> View:
    """grad_x = ((grad - p) - (x - mean) q) r, where mean and the coefficients broadcast in this shape."""
    p, q, r = (view.reshaped(shape) for view in _parts(coefficients))
    along = _chain(emit, "mul", _chain(emit, "sub", x, mean.reshaped(shape)), q)
    return _chain(emit, "mul", _chain(emit, "sub", _chain(emit, "sub", grad, p), along), r)


def _inverse_deviation(emit: Emitter, variance: View, eps: float) -> View:
    return emit.apply("reciprocal", emit.apply("sqrt", [_chain(emit, "add", variance, eps)]))[0]


def _row_width(emit: Emitter, length: int, *views: View | None) -> int:
    return vector_width(emit.device, length, *(view.offset for view in views if view is not None))


def _row_moments(emit: Emitter, x: View, rows: int, length: int) -> tuple[View, View]:
    """Mean and sum of squared distances of each row: [rows] each."""
    mean, squares = emit.fresh("float32", (rows,)), emit.fresh("float32", (rows,))
    launch_rows(
        emit,
        "norm.cl",
        "moments",
        (rows,),
        length,
        _row_width(emit, length, x),
        [Read(x), Write(mean), Write(squares), rows, length],
        flops=4 * x.numel,
    )
    return mean, squares


def _channel_moments(emit: Emitter, x: View, batch: int, channels: int, positions: int) -> tuple[View, View]:
    """Mean and sum of squared distances of each channel of [N, C, L]: [C] each."""
    parts, each, count = batch, positions, batch * positions
    if positions > 1:
        mean, squares = _row_moments(emit, x, batch * channels, positions)
    else:
        mean = squares = x
    leaf = positions == 1
    while parts > 1 or leaf:
        segment = MERGED_AT_ONCE if parts >= 2 * MERGED_AT_ONCE else parts
        merged = -(-parts // segment)
        out = emit.fresh("float32", (merged, channels)), emit.fresh("float32", (merged, channels))
        last = count - (parts - 1) * each
        sizes = (channels, merged)
        launch_items(
            emit,
            "norm.cl",
            "moments_merge",
            sizes,
            [
                *(Read(mean), Read(squares), Write(out[0]), Write(out[1]), channels, parts, segment, merged),
                *(float(each), float(last)),
            ],
            defines={"LEAF": int(leaf)},
            flops=6 * parts * channels,
        )
        (mean, squares), parts, each, leaf = out, merged, each * segment, False
    return mean.reshaped((channels,)), squares.reshaped((channels,))


def _row_sums(
    emit: Emitter, grad: View, x: View, mean: View, rstd: View, sizes: tuple[int, int, int], place: tuple[int, int]
) -> View:
    """Sums of grad and of grad hat over L: [2, N, C]. mean and rstd of (n, c) are at n * place[0] + c / place[1]."""
    batch, channels, positions = sizes
    sums = emit.fresh("float32", (2, batch, channels))
    width = _row_width(emit, positions, grad, x)
    launch_rows(
        emit,
        "norm_backward.cl",
        "norm_sums",
        (channels, batch),
        positions,
        width,
        [Read(grad), Read(x), Read(mean), Read(rstd), Write(sums), channels, batch, positions, *place],
        {"WEIGHTED": 0},
        flops=5 * x.numel,
    )
    return sums


def _column_sums(
    emit: Emitter, grad: View, x: View, mean: View, rstd: View, sizes: tuple[int, int], by_row: bool
) -> View:
    """Sums of grad and of grad hat over the rows of [M, D]: [2, D]."""
    device, (rows, columns) = emit.device, sizes
    if rows == 0:
        return emit.number(0.0, "float32", (2, columns))
    of_columns = () if by_row else (mean.offset, rstd.offset)
    width = column_width(device, columns, grad.offset, x.offset, *of_columns)
    segment = column_segment(device, rows, columns // width)
    segments = -(-rows // segment)
    sums = emit.fresh("float32", (2, segments, columns))
    vectors = column_vectors(device, columns, width, most=32)
    global_size = (columns // (width * vectors), segments)
    defines: dict[str, Define] = {"VW": width, "NV": vectors, "BY_ROW": int(by_row)}
    launch_items(
        emit,
        "norm_backward.cl",
        "norm_sums_columns",
        global_size,
        [Read(grad), Read(x), Read(mean), Read(rstd), Write(sums), columns, rows, segment, segments],
        defines=defines,
        flops=5 * x.numel,
    )
    return total(emit, sums, [1])


def _parts(both: View) -> list[View]:
    """x[0], x[1], ... of a dense x."""
    count, shape, strides = both.shape[0], both.shape[1:], both.strides[1:]
    return [View(both.storage, shape, strides, both.offset + part * math.prod(shape)) for part in range(count)]


def _wanted(made: Sequence[View | None], mask: Sequence[bool]) -> list[View]:
    return [view for view, wanted in zip(made, mask) if wanted and view is not None]


OPS: Mapping[str, Lower] = {
    "native_layer_norm": native_layer_norm,
    "native_layer_norm_backward": native_layer_norm_backward,
    "native_group_norm": native_group_norm,
    "native_group_norm_backward": native_group_norm_backward,
    "native_batch_norm": native_batch_norm,
    "native_batch_norm_backward": native_batch_norm_backward,
}
