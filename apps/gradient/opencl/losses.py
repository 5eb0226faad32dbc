"""Softmax, log-softmax and the negative log likelihood, forward and backward (softmax.cl, nll.cl)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call, element_strides
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.reductions import total
from apps.gradient.opencl.rows import axes, column_width, launch_items, launch_rows, vector_width
from apps.gradient.opencl.values import Argument, Define, Fault, Read, View, Write

EXPONENTIAL = 10  # operations that an exp is counted as


def _softmax(kernel: str, log: bool) -> Lower:
    """One input (forward) or two (backward), all of the output's shape."""

    def lower(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
        given = [emit.dense(view) for view in inputs if view is not None]
        out = emit.like(call.outputs[0])
        if out.numel:
            _along(emit, kernel, [*given, out], axes(out.shape, call.attrs["dim"]), log)
        return [out]

    return lower


def _along(emit: Emitter, kernel: str, tensors: Sequence[View], sizes: tuple[int, int, int], log: bool) -> None:
    device, (outer, length, inner) = emit.device, sizes
    offsets = [view.offset for view in tensors]
    arguments: list[Argument] = [*(Read(view) for view in tensors[:-1]), Write(tensors[-1])]
    defines: dict[str, Define] = {"LOG": int(log)}
    flops = EXPONENTIAL * tensors[-1].numel
    if inner == 1:
        width = vector_width(device, length if outer > 1 else 0, *offsets)
        arguments += [outer, length]
        launch_rows(emit, "softmax.cl", kernel, (outer,), length, width, arguments, defines, flops=flops, in_place=True)
        return
    width = column_width(device, inner, *offsets)
    defines.update({"VW": width, "RECOMPUTE": int(device.group_form)})
    launch_items(
        emit,
        "softmax.cl",
        f"{kernel}_columns",
        (inner // width, outer),
        [*arguments, inner, length, outer],
        defines,
        flops=flops,
        in_place=True,
    )


def _halves(number: int) -> tuple[int, int]:
    """The lower and upper 32 bits of a signed 64-bit number, as signed numbers."""
    low = number & 0xFFFFFFFF
    return low - (1 << 32) if low >= 1 << 31 else low, number >> 32


def nll_loss_forward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """The loss, and the sum of the weights used (0 for reduction 'none')."""
    x, target, weight = inputs
    assert x is not None and target is not None
    batch, classes, positions = _sizes(x)
    reduction, loss = call.attrs["reduction"], call.outputs[0]
    both = emit.fresh("float32", (2, batch * positions))
    if both.numel:
        sizes = (positions, batch)
        logits, weights = emit.dense(x), emit.dense(x if weight is None else weight)
        launch_items(
            emit,
            "nll.cl",
            "nll_forward",
            sizes,
            [
                *(Read(logits), Read(emit.dense(target)), Read(weights), Write(both)),
                *(positions, classes, batch, *_halves(call.attrs["ignore_index"]), Fault()),
            ],
            defines={"WEIGHTED": int(weight is not None)},
            nbytes=24 * batch * positions,
        )
    if reduction == "none":
        losses = View(both.storage, loss.shape, element_strides(loss.shape), both.offset)
        return [losses, emit.number(0.0, "float32")]
    sums = total(emit, both, [1])
    value, used = (View(sums.storage, (), (), sums.offset + place) for place in range(2))
    return [emit.apply("div", [value, used])[0] if reduction == "mean" else value, used]


def nll_loss_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """grad_x, with one nonzero element for each position."""
    grad, x, target, weight, total_weight = inputs
    assert grad is not None and x is not None and target is not None and total_weight is not None
    batch, classes, positions = _sizes(x)
    out = emit.like(call.outputs[0])
    grad, reduction = emit.dense(grad), call.attrs["reduction"]
    per_class = positions == 1
    sizes = (classes, batch) if per_class else (positions, classes, batch)
    launch_items(
        emit,
        "nll.cl",
        "nll_backward",
        sizes,
        [
            *(Read(grad), Read(emit.dense(target)), Read(grad if weight is None else emit.dense(weight))),
            *(Read(emit.dense(total_weight)), Write(out)),
            *(positions, classes, batch, *_halves(call.attrs["ignore_index"]), Fault()),
        ],
        defines={
            "WEIGHTED": int(weight is not None),
            "MEAN": int(reduction == "mean"),
            "EACH": int(reduction == "none"),
            "PER_CLASS": int(per_class),
        },
    )
    return [out]


def _sizes(x: View) -> tuple[int, int, int]:
    """[N, C, L] of x, which is [C], [N, C] or [N, C, ...]."""
    if len(x.shape) == 1:
        return 1, x.shape[0], 1
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


OPS: Mapping[str, Lower] = {
    "softmax": _softmax("softmax", log=False),
    "log_softmax": _softmax("softmax", log=True),
    "softmax_backward": _softmax("softmax_backward", log=False),
    "log_softmax_backward": _softmax("softmax_backward", log=True),
    "nll_loss_forward": nll_loss_forward,
    "nll_loss_backward": nll_loss_backward,
}
