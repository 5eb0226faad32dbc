"""Movement: reshape, permute, expand, slice and flip are views; cat, pad and slice_scatter are copies into parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.values import View
from apps.gradient.opencl.walks import collapsed, expanded
from boinc_project.contract.opset import number


def reshape(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """A view where the strides allow it, else a dense copy."""
    (x,) = inputs
    assert x is not None
    shape = call.outputs[0].shape
    return [split_view(x, shape) or emit.reshaped(x, shape)]


def split_view(x: View, shape: Sequence[int]) -> View | None:
    """x in another shape without a copy, or None if its walk cannot be cut that way."""
    if x.is_dense:
        return x.reshaped(shape)
    sizes, (strides,) = collapsed(x.shape, x.strides)
    if 0 in x.shape:
        return None
    found: list[int] = []
    groups = list(zip(sizes, strides))
    for size in reversed(shape):
        if size == 1:
            found.append(0)
            continue
        if not groups or groups[-1][0] % size:
            return None
        have, stride = groups.pop()
        found.append(stride)
        if have > size:
            groups.append((have // size, stride * size))
    return View(x.storage, tuple(shape), tuple(reversed(found)), x.offset)


def permute(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    (x,) = inputs
    assert x is not None
    dims = call.attrs["dims"]
    return [View(x.storage, tuple(x.shape[d] for d in dims), tuple(x.strides[d] for d in dims), x.offset)]


def expand(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    (x,) = inputs
    assert x is not None
    return [expanded(x, call.outputs[0].shape)]


def region(x: View, dim: int, start: int, stop: int, step: int) -> View:
    """x[..., start:stop:step, ...] along one dimension."""
    shape, strides = list(x.shape), list(x.strides)
    shape[dim] = max(0, -(-(stop - start) // step))
    offset = x.offset + start * strides[dim] if shape[dim] else x.offset
    strides[dim] *= step
    return View(x.storage, tuple(shape), tuple(strides), offset)


def slice_(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    (x,) = inputs
    assert x is not None
    return [region(x, call.attrs["dim"], call.attrs["start"], call.attrs["stop"], call.attrs["step"])]


def flip(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    (x,) = inputs
    assert x is not None
    strides, offset = list(x.strides), x.offset
    for dim in call.attrs["dims"]:
        offset += max(0, x.shape[dim] - 1) * strides[dim]
        strides[dim] = -strides[dim]
    return [View(x.storage, x.shape, tuple(strides), offset)]


def cat(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    out, dim = emit.like(call.outputs[0]), call.attrs["dim"]
    at = 0
    for x in inputs:
        assert x is not None
        size = x.shape[dim]
        emit.copy(x, region(out, dim, at, at + size, 1), disjoint=True)
        at += size
    return [out]


def slice_scatter(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    x, source = inputs
    assert x is not None and source is not None
    out = emit.like(call.outputs[0])
    emit.copy(x, out)
    attrs = call.attrs
    emit.copy(source, region(out, attrs["dim"], attrs["start"], attrs["stop"], attrs["step"]))
    return [out]


def constant_pad_nd(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    """Pairs of `pad` start at the last dimension; a negative entry crops."""
    (x,) = inputs
    assert x is not None
    type_ = call.outputs[0]
    out, pad = emit.like(type_), call.attrs["pad"]
    emit.copy(expanded(emit.number(number(call.attrs["value"]), type_.dtype), type_.shape), out)
    source, target = x, out
    for axis, size in enumerate(x.shape):
        pair = len(x.shape) - 1 - axis
        before, after = pad[2 * pair : 2 * pair + 2] or (0, 0)
        source = region(source, axis, max(-before, 0), size - max(-after, 0), 1)
        target = region(target, axis, max(before, 0), type_.shape[axis] - max(after, 0), 1)
    emit.copy(source, target)
    return [out]


OPS: Mapping[str, Lower] = {
    "reshape": reshape,
    "permute": permute,
    "expand": expand,
    "slice": slice_,
    "cat": cat,
    "constant_pad_nd": constant_pad_nd,
    "flip": flip,
    "slice_scatter": slice_scatter,
}
