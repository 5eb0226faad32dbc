"""Convolution and pooling of the numpy backend, for one to three spatial dimensions (pooling: two).

Shape suffixes: N batch, C input channels, O output channels, G groups, K kernel positions times channels of a
group, L output positions. A convolution is a matrix product of the weights with the windows of the padded input
(im2col, copied a few samples or rows at a time); its input gradient adds the windows back (col2im). A transposed
convolution is the input gradient of a plain one, so three functions serve all six cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apps.gradient.backends.backend import Call, Kernel, Prepare
from apps.gradient.backends.numpy_indexing import check_range
from apps.gradient.backends.numpy_reductions import sum_float

Array = np.ndarray[Any, Any]

WINDOW_ELEMENTS = 4 << 20  # of copied windows at a time (16 MiB)


@dataclass(frozen=True)
class Chunk:
    """A part of a convolution's work: samples, output positions (of L), and the rows of the padded x they need."""

    samples: slice
    positions: slice
    rows: slice
    out: tuple[int, ...]


@dataclass(frozen=True)
class Geometry:
    """A plain convolution from x [N,C,*size] to y [N,O,*out] with w [O,C/groups,*kernel]."""

    batch: int
    channels: int
    features: int
    groups: int
    size: tuple[int, ...]
    out: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def depthwise(self) -> bool:
        """One input and one output channel a group: too thin for matrix products."""
        return self.groups == self.channels == self.features

    @property
    def window(self) -> int:
        """K."""
        return self.channels // self.groups * math.prod(self.kernel)

    def padded(self, x: Array) -> Array:
        """x with zeros around it."""
        if not any(self.padding):
            return np.ascontiguousarray(x)
        out = np.zeros(self.padded_shape(x.shape[0]), np.float32)
        out[self.inside()] = x
        return out

    def padded_shape(self, batch: int) -> tuple[int, ...]:
        return (batch, self.channels, *(s + 2 * p for s, p in zip(self.size, self.padding)))

    def inside(self) -> tuple[Any, ...]:
        """The part of the padded x that is x."""
        return (slice(None), slice(None), *(slice(p, p + s) for s, p in zip(self.size, self.padding)))

    def taps(self) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
        """Each kernel position and the elements of the padded x that it meets, one for each output position."""
        return _taps(self.kernel, self.stride, self.dilation, self.out)

    def chunks(self) -> Iterator[Chunk]:
        """Samples and rows of the output in pieces whose windows are at most WINDOW_ELEMENTS (or one row)."""
        per_row = max(1, self.groups * self.window * math.prod(self.out[1:]))
        rows = max(1, WINDOW_ELEMENTS // per_row)
        samples = max(1, rows // self.out[0])
        for sample in range(0, self.batch, samples):
            for row in range(0, self.out[0], rows):
                yield self._chunk(sample, min(sample + samples, self.batch), row, min(row + rows, self.out[0]))

    def _chunk(self, sample: int, stop_sample: int, row: int, stop_row: int) -> Chunk:
        along = math.prod(self.out[1:])
        first = row * self.stride[0]
        last = (stop_row - 1) * self.stride[0] + self.dilation[0] * (self.kernel[0] - 1)
        return Chunk(
            samples=slice(sample, stop_sample),
            positions=slice(row * along, stop_row * along),
            rows=slice(first, last + 1),
            out=(stop_row - row, *self.out[1:]),
        )

    def windows(self, padded: Array, chunk: Chunk) -> Array:
        """[n, G, K, l] of a chunk of the padded x; copied unless the kernel is 1 with stride 1."""
        part = padded[chunk.samples, :, chunk.rows]
        steps = part.strides[2:]
        view = np.lib.stride_tricks.as_strided(
            part,
            shape=(*part.shape[:2], *self.kernel, *chunk.out),
            strides=(
                *part.strides[:2],
                *(s * d for s, d in zip(steps, self.dilation)),
                *(s * d for s, d in zip(steps, self.stride)),
            ),
            writeable=False,
        )
        return view.reshape(part.shape[0], self.groups, self.window, math.prod(chunk.out))


def _taps(
    kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int], out: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[Any, ...]]]:
    for position in itertools.product(*map(range, kernel)):
        spatial = (slice(p * d, p * d + (n - 1) * s + 1, s) for p, d, s, n in zip(position, dilation, stride, out))
        yield position, (slice(None), slice(None), *spatial)


def _forward(x: Array, w: Array, g: Geometry) -> Array:
    padded = g.padded(x)
    out = np.zeros((g.batch, g.features, *g.out), np.float32)
    if g.depthwise:
        for position, region in g.taps():
            out += padded[region] * _tap_weight(w, position)
        return out
    out_NGOL = out.reshape(g.batch, g.groups, g.features // g.groups, math.prod(g.out))
    w_GOK = np.ascontiguousarray(w).reshape(g.groups, g.features // g.groups, g.window)
    for chunk in g.chunks():
        out_NGOL[chunk.samples, :, :, chunk.positions] = np.matmul(w_GOK, g.windows(padded, chunk))
    return out


def _weight_gradient(grad: Array, x: Array, g: Geometry) -> Array:
    padded = g.padded(x)
    shape = (g.features, g.channels // g.groups, *g.kernel)
    if g.depthwise:
        gw = np.zeros(shape, np.float32)
        every = (0, *range(2, grad.ndim))
        for position, region in g.taps():
            at: Any = (slice(None), 0, *position)
            gw[at] = sum_float(padded[region] * grad, every)
        return gw
    grad_NGOL = np.ascontiguousarray(grad).reshape(g.batch, g.groups, g.features // g.groups, math.prod(g.out))
    gw_GOK = np.zeros((g.groups, g.features // g.groups, g.window), np.float32)
    for chunk in g.chunks():
        grad_part = grad_NGOL[chunk.samples, :, :, chunk.positions]
        each = np.matmul(grad_part, g.windows(padded, chunk).transpose(0, 1, 3, 2))
        gw_GOK += sum_float(each, (0,))
    return gw_GOK.reshape(shape)


def _input_gradient(grad: Array, w: Array, g: Geometry) -> Array:
    padded: Array = np.zeros(g.padded_shape(g.batch), np.float32)
    inside = g.inside()
    if g.depthwise:
        for position, region in g.taps():
            padded[region] += grad * _tap_weight(w, position)
        cropped: Array = padded[inside]
        return cropped
    grad_NGOL = np.ascontiguousarray(grad).reshape(g.batch, g.groups, g.features // g.groups, math.prod(g.out))
    w_GKO = np.ascontiguousarray(w).reshape(g.groups, g.features // g.groups, g.window).transpose(0, 2, 1)
    for chunk in g.chunks():
        columns = np.matmul(w_GKO, grad_NGOL[chunk.samples, :, :, chunk.positions])
        columns = columns.reshape(-1, g.channels, *g.kernel, *chunk.out)
        part = padded[chunk.samples, :, chunk.rows]
        for position, region in _taps(g.kernel, g.stride, g.dilation, chunk.out):
            part[region] += columns[(slice(None), slice(None), *position)]
    cropped = padded[inside]
    return cropped


def _tap_weight(w: Array, position: tuple[int, ...]) -> Array:
    """[C, 1, ...] of a depthwise kernel at one position."""
    place: Any = (slice(None), 0, *position)
    weight: Array = w[place].reshape(-1, *(1,) * len(position))
    return weight


def _geometry(x: Sequence[int], y: Sequence[int], w: Sequence[int], attrs: Mapping[str, Any]) -> Geometry:
    return Geometry(
        batch=x[0],
        channels=x[1],
        features=y[1],
        groups=attrs["groups"],
        size=tuple(x[2:]),
        out=tuple(y[2:]),
        kernel=tuple(w[2:]),
        stride=tuple(attrs["stride"]),
        padding=tuple(attrs["padding"]),
        dilation=tuple(attrs["dilation"]),
    )


def _convolution(call: Call) -> Kernel:
    x, w, out = call.input(0).shape, call.input(1).shape, call.outputs[0].shape
    transposed = call.attrs["transposed"]
    g = _geometry(out, x, w, call.attrs) if transposed else _geometry(x, out, w, call.attrs)
    per_channel = (out[1],) + (1,) * (len(out) - 2)

    def kernel(array: Array, weight: Array, bias: Array | None) -> Array:
        result = _input_gradient(array, weight, g) if transposed else _forward(array, weight, g)
        if bias is not None:
            result += bias.reshape(per_channel)
        return result

    return kernel


def _convolution_backward(call: Call) -> Kernel:
    y, x, w = call.input(0).shape, call.input(1).shape, call.input(2).shape
    transposed, mask = call.attrs["transposed"], call.attrs["output_mask"]
    g = _geometry(y, x, w, call.attrs) if transposed else _geometry(x, y, w, call.attrs)

    def kernel(grad: Array, array: Array, weight: Array) -> Any:
        made = []
        if mask[0]:
            made.append(_forward(grad, weight, g) if transposed else _input_gradient(grad, weight, g))
        if mask[1]:
            made.append(_weight_gradient(*((array, grad) if transposed else (grad, array)), g))
        if mask[2]:
            made.append(sum_float(grad, (0, *range(2, grad.ndim))))
        return made if len(made) > 1 else made[0]

    return kernel


# --- pooling --------------------------------------------------------------------------------------------------


def _pool_padded(x: Array, call: Call, out: Sequence[int], fill: float) -> Array:
    """x with `fill` around it, as far as the last window reaches (ceil_mode lets it reach beyond the padding)."""
    dilation = call.attrs.get("dilation", (1, 1))
    shape = list(x.shape)
    inside = [slice(None), slice(None)]
    for axis in (0, 1):
        padding, kernel = call.attrs["padding"][axis], call.attrs["kernel_size"][axis]
        reach = (out[2 + axis] - 1) * call.attrs["stride"][axis] + dilation[axis] * (kernel - 1) + 1
        inside.append(slice(padding, padding + x.shape[2 + axis]))
        shape[2 + axis] = max(reach, padding + x.shape[2 + axis])
    padded = np.full(shape, fill, np.float32)
    padded[tuple(inside)] = x
    return padded


def _max_pool2d(call: Call) -> Kernel:
    """The maximum and its flat position in the plane: the first of equals, NaN above all, as ATen finds them."""
    attrs, (out_type, _) = call.attrs, call.outputs
    width = call.input(0).shape[3]
    rows, columns = (_first_inside(attrs, axis, out_type.shape[2 + axis]) for axis in (0, 1))
    taps = list(_taps(attrs["kernel_size"], attrs["stride"], attrs["dilation"], out_type.shape[2:]))
    starts = [np.arange(n) * s - p for n, s, p in zip(out_type.shape[2:], attrs["stride"], attrs["padding"])]

    def kernel(x: Array) -> tuple[Array, Array]:
        padded = _pool_padded(x, call, out_type.shape, -np.inf)
        best = np.full(out_type.shape, -np.inf, np.float32)
        where = np.zeros(out_type.shape, np.int64)
        where[...] = rows[:, None] * width + columns
        for (row, column), region in taps:
            value = padded[region]
            better = value > best
            better |= np.isnan(value)
            at_row = starts[0] + row * attrs["dilation"][0]
            at_column = starts[1] + column * attrs["dilation"][1]
            np.copyto(best, value, where=better)
            np.copyto(where, at_row[:, None] * width + at_column, where=better)
        return best, where

    return kernel


def _first_inside(attrs: Mapping[str, Any], axis: int, count: int) -> Array:
    """First input position of each window along one axis that is not padding."""
    start = np.arange(count, dtype=np.int64) * attrs["stride"][axis] - attrs["padding"][axis]
    dilation = attrs["dilation"][axis]
    first: Array = start + -(np.minimum(start, 0) // dilation) * dilation
    return first


def _max_pool2d_backward(call: Call) -> Kernel:
    x_type = call.input(1)
    plane = math.prod(x_type.shape[2:])
    planes = math.prod(x_type.shape[:2])

    def kernel(grad: Array, x: Array, indices: Array) -> Array:
        check_range(indices, plane)
        places = indices.reshape(planes, -1) + np.arange(planes, dtype=np.int64)[:, None] * plane
        total = np.bincount(places.reshape(-1), grad.reshape(-1), minlength=planes * plane)
        return total.astype(np.float32).reshape(x_type.shape)

    return kernel if x_type.numel else lambda grad, x, indices: x


def _divisors(call: Call, size: Sequence[int], out: Sequence[int]) -> Array:
    """What each window's sum is divided by, [OH, OW]."""
    attrs = call.attrs
    if attrs["divisor_override"] is not None:
        return np.full(tuple(out), attrs["divisor_override"], np.float32)
    counts = []
    for axis in (0, 1):
        padding = attrs["padding"][axis]
        start = np.arange(out[axis]) * attrs["stride"][axis] - padding
        stop = np.minimum(start + attrs["kernel_size"][axis], size[axis] + padding)
        if not attrs["count_include_pad"]:
            start, stop = np.maximum(start, 0), np.minimum(stop, size[axis])
        counts.append((stop - start).astype(np.float32))
    divisors: Array = counts[0][:, None] * counts[1]
    return divisors


def _avg_pool2d(call: Call) -> Kernel:
    attrs, out = call.attrs, call.outputs[0]
    divisors = _divisors(call, call.input(0).shape[2:], out.shape[2:])

    def kernel(x: Array) -> Array:
        padded = _pool_padded(x, call, out.shape, 0.0)
        total = np.zeros(out.shape, np.float32)
        for _, region in _taps(attrs["kernel_size"], attrs["stride"], (1, 1), out.shape[2:]):
            total += padded[region]
        total /= divisors
        return total

    return kernel


def _avg_pool2d_backward(call: Call) -> Kernel:
    attrs, out, x_type = call.attrs, call.input(0), call.input(1)
    divisors = _divisors(call, x_type.shape[2:], out.shape[2:])
    top, left = attrs["padding"]
    height, width = x_type.shape[2:]

    def kernel(grad: Array, x: Array) -> Array:
        padded = np.zeros_like(_pool_padded(x, call, out.shape, 0.0))
        share = grad / divisors
        for _, region in _taps(attrs["kernel_size"], attrs["stride"], (1, 1), out.shape[2:]):
            padded[region] += share
        return padded[:, :, top : top + height, left : left + width]

    return kernel


OPS: dict[str, Prepare] = {
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _max_pool2d,
    "max_pool2d_with_indices_backward": _max_pool2d_backward,
    "avg_pool2d": _avg_pool2d,
    "avg_pool2d_backward": _avg_pool2d_backward,
}
