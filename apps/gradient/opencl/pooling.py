"""Pooling over the last two dimensions: maximum with its place, and average; forward and backward (pool.cl).

Shapes: x [N, C, H, W], y, grad and places [N, C, OH, OW].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.rows import plain_range
from apps.gradient.opencl.values import Argument, Define, Fault, Read, View, Write


def _walk(call: Call, x: Sequence[int], out: Sequence[int]) -> list[Argument]:
    """GEOMETRY and planes of the kernels."""
    attrs = call.attrs
    windows = [*attrs["kernel_size"], *attrs["stride"], *attrs["padding"], *attrs.get("dilation", (1, 1))]
    return [*x[2:], *out[2:], *windows, math.prod(x[:2])]


def _launch(
    emit: Emitter,
    kernel: str,
    sizes: Sequence[int],
    arguments: Sequence[Argument],
    call: Call,
    defines: Mapping[str, Define] | None = None,
) -> None:
    emit.launch(
        "pool.cl",
        kernel,
        sizes,
        arguments,
        defines=defines,
        local_size=plain_range(emit.device, sizes),
        split=len(sizes) - 1,
        flops=math.prod(sizes) * math.prod(call.attrs["kernel_size"]),
    )


def _planes(shape: Sequence[int]) -> tuple[int, int, int]:
    """Items for the elements of [N, C, H, W]."""
    return shape[3], shape[2], math.prod(shape[:2])


def max_pool2d_with_indices(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    (x,) = inputs
    assert x is not None
    y, places = (emit.like(type_) for type_ in call.outputs)
    walk = _walk(call, x.shape, y.shape)
    _launch(emit, "max_pool", _planes(y.shape), [Read(emit.dense(x)), *walk, Write(y), Write(places)], call)
    return [y, places]


def max_pool2d_with_indices_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """A gather, except for planes in which a place lies outside its window: a graph may have any places."""
    grad, x, places = inputs
    assert grad is not None and x is not None and places is not None
    grad, places = emit.dense(grad), emit.dense(places)
    out = emit.like(call.outputs[0])
    walk = _walk(call, x.shape, grad.shape)
    planes, rows = math.prod(x.shape[:2]), grad.shape[2]
    strange, whole = emit.fresh("int32", (planes, rows)), emit.fresh("int32", (planes,))
    _launch(emit, "max_pool_check", (rows, planes), [Read(places), *walk, Write(strange), Fault()], call)
    _launch(emit, "max_pool_strange", (planes,), [Read(strange), planes, rows, Write(whole)], call)
    given: list[Argument] = [Read(grad), Read(places), Read(whole), *walk, Write(out)]
    _launch(emit, "max_pool_gather", _planes(x.shape), given, call)
    _launch(emit, "max_pool_scatter", (planes,), given, call)
    return [out]


def _average(call: Call) -> tuple[int, dict[str, Define]]:
    divisor = call.attrs.get("divisor_override")
    return divisor or 0, {"PADDED": int(call.attrs["count_include_pad"])}


def avg_pool2d(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    (x,) = inputs
    assert x is not None
    y = emit.like(call.outputs[0])
    divisor, defines = _average(call)
    walk = _walk(call, x.shape, y.shape)
    _launch(emit, "avg_pool", _planes(y.shape), [Read(emit.dense(x)), *walk, divisor, Write(y)], call, defines)
    return [y]


def avg_pool2d_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    grad, x = inputs
    assert grad is not None and x is not None
    out = emit.like(call.outputs[0])
    divisor, defines = _average(call)
    walk = _walk(call, x.shape, grad.shape)
    given: list[Argument] = [Read(emit.dense(grad)), *walk, divisor, Write(out)]
    _launch(emit, "avg_pool_backward", _planes(x.shape), given, call, defines)
    return [out]


OPS: Mapping[str, Lower] = {
    "max_pool2d_with_indices": max_pool2d_with_indices,
    "max_pool2d_with_indices_backward": max_pool2d_with_indices_backward,
    "avg_pool2d": avg_pool2d,
    "avg_pool2d_backward": avg_pool2d_backward,
}
