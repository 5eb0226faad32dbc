"""Convolutions in one to three dimensions and their gradients: windows as matrices (im2col.cl) and products of these.

Shapes: x [N, C, D, H, W], y [N, O, OD, OH, OW], w [O, C / G, KD, KH, KW], with leading axes of size 1 where there are
fewer. Suffixes as in the numpy backend: G groups, K window (channels of a group times kernel positions), L output
positions. A transposed convolution is the input gradient of a plain one, so three functions serve all six cases.

The windows are written as the packed panels of a product, at most COLUMN_BYTES of them at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from apps.gradient.backends.backend import Call
from apps.gradient.opencl.emitter import Emitter, Inputs, Lower
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.matrix import Panels, multiply, product, side
from apps.gradient.opencl.reductions import total
from apps.gradient.opencl.rows import plain_range
from apps.gradient.opencl.tiles import Product, Side, choose
from apps.gradient.opencl.values import Argument, Read, View, Write

COLUMN_BYTES = 64 << 20
THIN = 4  # most output channels of a group with one input channel that are computed without matrices
TALLEST = 64  # rows of a panel, at most


@dataclass(frozen=True)
class Geometry:
    """A plain convolution from x to y, with three spatial axes."""

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
    def thin(self) -> bool:
        """One input channel in each group, and few output channels: too thin for products."""
        return self.channels == self.groups and self.features <= THIN * self.groups

    @property
    def pointwise(self) -> bool:
        """Whether the windows are x itself."""
        return max(*self.kernel, *self.stride) == 1 and not any(self.padding)

    @property
    def group_channels(self) -> int:
        return self.channels // self.groups

    @property
    def group_features(self) -> int:
        return self.features // self.groups

    @property
    def taps(self) -> int:
        return math.prod(self.kernel)

    @property
    def window(self) -> int:
        """K."""
        return self.group_channels * self.taps

    @property
    def positions(self) -> int:
        """L."""
        return math.prod(self.out)

    @property
    def pixels(self) -> int:
        """Positions of x."""
        return math.prod(self.size)

    def numbers(self) -> list[Argument]:
        """GEOMETRY of the kernels, without the channels."""
        return [*self.size, *self.out, *self.kernel, *self.stride, *self.padding, *self.dilation]


def _geometry(x: Sequence[int], y: Sequence[int], w: Sequence[int], attrs: Mapping[str, Any]) -> Geometry:
    missing = 5 - len(x)
    ones = (1,) * missing
    return Geometry(
        batch=x[0],
        channels=x[1],
        features=y[1],
        groups=attrs["groups"],
        size=(*ones, *x[2:]),
        out=(*ones, *y[2:]),
        kernel=(*ones, *w[2:]),
        stride=(*ones, *attrs["stride"]),
        padding=((0,) * missing + tuple(attrs["padding"])),
        dilation=(*ones, *attrs["dilation"]),
    )


def convolution(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    x, w, bias = inputs
    assert x is not None and w is not None
    x, w = emit.dense(x), emit.dense(w)
    out = call.outputs[0].shape
    if call.attrs["transposed"]:
        made = _input_gradient(emit, x, w, _geometry(out, x.shape, w.shape, call.attrs), bias)
    else:
        made = _forward(emit, x, w, _geometry(x.shape, out, w.shape, call.attrs), bias)
    return [made.reshaped(out)]


def convolution_backward(call: Call, inputs: Inputs, emit: Emitter) -> Sequence[View]:
    grad, x, w = inputs
    assert grad is not None and x is not None and w is not None
    grad, x, w = emit.dense(grad), emit.dense(x), emit.dense(w)
    transposed, mask = call.attrs["transposed"], call.attrs["output_mask"]
    if transposed:
        g = _geometry(grad.shape, x.shape, w.shape, call.attrs)
    else:
        g = _geometry(x.shape, grad.shape, w.shape, call.attrs)
    made = []
    if mask[0]:
        given = _forward(emit, grad, w, g, None) if transposed else _input_gradient(emit, grad, w, g, None)
        made.append(given.reshaped(x.shape))
    if mask[1]:
        sides = (x, grad) if transposed else (grad, x)
        made.append(_weight_gradient(emit, *sides, g).reshaped(w.shape))
    if mask[2]:
        made.append(total(emit, grad, (0, *range(2, len(grad.shape)))))
    return made


# The three functions.


def _forward(emit: Emitter, x: View, w: View, g: Geometry, bias: View | None) -> View:
    """y [N, O, OD, OH, OW]."""
    y = emit.fresh("float32", (g.batch, g.features, *g.out))
    if y.numel == 0:
        return y
    if g.thin:
        _thin(emit, "depthwise", x, w, g, bias, y, (g.out[2], g.features * g.out[0] * g.out[1], g.batch))
        return y
    w_GOK = w.reshaped((g.groups, g.group_features, g.window))
    shared = bias if g.groups == 1 else None
    for samples, positions in _chunks(emit.device, g):
        batch, length = len(samples) * g.groups, len(positions)
        part = View(
            y.storage,
            (batch, g.group_features, length),
            (g.group_features * g.positions, g.positions, 1),
            samples.start * g.features * g.positions + positions.start,
        )
        along = None if shared is None else View(shared.storage, part.shape, (0, shared.strides[0], 0), shared.offset)
        if g.pointwise:
            windows = View(
                x.storage,
                (batch, g.window, length),
                (g.window * g.positions, g.positions, 1),
                x.offset + samples.start * g.channels * g.positions + positions.start,
            )
            multiply(emit, w_GOK, windows, part, along)
            continue
        wanted = Product(batch, g.window, side(emit.device, w_GOK), Side(length, batch, 0, 0, ready=True))
        recipe = choose(emit.device, wanted)
        height = recipe.tile.rows if recipe.turned else recipe.tile.columns
        count = -(-length // height)
        panels = emit.fresh("float32", (batch, count, g.window, height))
        sizes = (g.window, count, batch)
        emit.launch(
            "im2col.cl",
            "windows",
            sizes,
            [Read(_samples(x, samples)), g.group_channels, *g.numbers(), positions.start, length, Write(panels)],
            defines={"T": height, "COPIES": int(not emit.device.group_form)},
            local_size=plain_range(emit.device, sizes),
            split=0,
        )
        product(emit, w_GOK, Panels(panels, length, g.window), part, along, recipe)
    if bias is not None and shared is None:
        return emit.apply("add", [y, emit.reshaped(bias, (g.features, 1, 1, 1))], {})[0]
    return y


def _weight_gradient(emit: Emitter, grad: View, x: View, g: Geometry) -> View:
    """[G, O / G, K], from the gradient of y."""
    if g.thin and g.batch:
        return _thin_weight(emit, grad, x, g)
    shape = (g.groups, g.group_features, g.window)
    made: View | None = None
    for samples, positions in _chunks(emit.device, g) if g.batch else ():
        length = len(positions)
        k = len(samples) * length
        grad_GONL = View(
            grad.storage,
            (g.groups, g.group_features, len(samples), length),
            (g.group_features * g.positions, g.positions, g.features * g.positions, 1),
            grad.offset + samples.start * g.features * g.positions + positions.start,
        )
        summed = emit.fresh("float32", shape)
        if g.pointwise:
            x_GCNL = View(
                x.storage,
                (g.groups, g.window, len(samples), length),
                (g.window * g.positions, g.positions, g.channels * g.positions, 1),
                x.offset + samples.start * g.channels * g.positions + positions.start,
            )
            wanted = Product(g.groups, k, side(emit.device, grad_GONL), side(emit.device, x_GCNL))
            product(emit, grad_GONL, x_GCNL, summed, made, choose(emit.device, wanted))
            made = summed
            continue
        wanted = Product(g.groups, k, side(emit.device, grad_GONL), Side(g.window, g.groups, 0, 0, ready=True))
        recipe = choose(emit.device, wanted)
        height = recipe.tile.rows if recipe.turned else recipe.tile.columns
        count = -(-g.window // height)
        panels = emit.fresh("float32", (g.groups, count, k, height))
        vector = _vector(emit.device, g)
        sizes = (-(-k // vector), count, g.groups)
        walk: list[Argument] = [g.group_channels, *g.numbers(), positions.start, length, g.groups, len(samples)]
        emit.launch(
            "im2col.cl",
            "windows_turned",
            sizes,
            [Read(_samples(x, samples)), *walk, Write(panels)],
            defines={"T": height, "UNIT": int(g.stride[2] == 1), "VW": vector},
            local_size=plain_range(emit.device, sizes),
            split=0,
        )
        product(emit, grad_GONL, Panels(panels, g.window, k), summed, made, recipe)
        made = summed
    return emit.dense(emit.number(0.0, "float32", shape)) if made is None else made


def _input_gradient(emit: Emitter, grad: View, w: View, g: Geometry, bias: View | None) -> View:
    """The gradient of x, [N, C, D, H, W], from that of y; or a transposed convolution of `grad`."""
    made = emit.fresh("float32", (g.batch, g.channels, *g.size))
    if made.numel == 0:
        return made
    if g.thin:
        sizes = (g.size[2], g.channels * g.size[0] * g.size[1], g.batch)
        _thin(emit, "depthwise_input", grad, w, g, bias, made, sizes)
        return made
    limit = _column_elements(emit.device)
    of_sample = g.groups * g.window * g.positions
    if of_sample <= limit or g.group_channels == g.groups == 1:
        step = max(1, limit // of_sample)
        for start in range(0, g.batch, step):
            samples = range(start, min(start + step, g.batch))
            part = replace(g, batch=len(samples))
            _columns(emit, _samples(grad, samples), w, part, bias, _samples(made, samples), w.offset)
        return made
    # One sample is too much: a few channels of one group at a time.
    channels = max(1, limit // (g.taps * g.positions))
    for sample in range(g.batch):
        for group in range(g.groups):
            for first in range(0, g.group_channels, channels):
                count = min(channels, g.group_channels - first)
                part = replace(g, batch=1, channels=count, features=g.group_features, groups=1)
                channel = group * g.group_channels + first
                at = grad.offset + (sample * g.features + group * g.group_features) * g.positions
                target = made.offset + (sample * g.channels + channel) * g.pixels
                weights = w.offset + group * g.group_features * g.window + first * g.taps
                _columns(
                    emit,
                    View(grad.storage, (1, g.group_features, *g.out), grad.strides, at),
                    w,
                    part,
                    None if bias is None else View(bias.storage, (count,), bias.strides, bias.offset + channel),
                    View(made.storage, (1, count, *g.size), made.strides, target),
                    weights,
                    g.window,
                )
    return made


def _columns(
    emit: Emitter,
    grad: View,
    w: View,
    g: Geometry,
    bias: View | None,
    made: View,
    weight_at: int,
    weight_row: int = 0,
) -> None:
    """`made` from `grad` and the weights at `weight_at`, whose rows are `weight_row` (default K) elements apart."""
    row = weight_row or g.window
    batch = g.batch * g.groups
    w_GKO = View(w.storage, (g.groups, g.window, g.group_features), (g.group_features * row, 1, row), weight_at)
    grad_BOL = View(
        grad.storage,
        (batch, g.group_features, g.positions),
        (g.group_features * g.positions, g.positions, 1),
        grad.offset,
    )
    if g.pointwise:
        target = View(made.storage, (batch, g.window, g.pixels), (g.window * g.pixels, g.pixels, 1), made.offset)
        if bias is None or g.groups == 1:
            along = None if bias is None else View(bias.storage, target.shape, (0, bias.strides[0], 0), bias.offset)
            multiply(emit, w_GKO, grad_BOL, target, along)
            return
    columns = emit.fresh("float32", (batch, g.window, g.positions))
    multiply(emit, w_GKO, grad_BOL, columns)
    vector = _vector(emit.device, g)
    sizes = (-(-g.size[2] // vector), g.group_channels * g.size[0] * g.size[1], batch)
    given: list[Argument] = [] if bias is None else [Read(emit.dense(bias))]
    emit.launch(
        "im2col.cl",
        "columns_added",
        sizes,
        [Read(columns), g.group_channels, *g.numbers(), g.groups, *given, Write(made)],
        defines={"BIAS": int(bias is not None), "UNIT": int(g.stride[2] == 1), "VW": vector},
        local_size=plain_range(emit.device, sizes),
        split=1,
        flops=batch * g.window * g.positions,
    )


def _vector(device: DeviceFacts, g: Geometry) -> int:
    """Neighbours along the last axis that one item makes."""
    return device.vector_width if g.stride[2] == 1 and not device.group_form else 1


def _thin_weight(emit: Emitter, grad: View, x: View, g: Geometry) -> View:
    """The weight gradient without matrices: each sample's, and their sum."""
    made = emit.fresh("float32", (g.batch, g.features, g.taps))
    sizes = (g.taps, g.features, g.batch)
    emit.launch(
        "depthwise.cl",
        "depthwise_weight",
        sizes,
        [Read(x), Read(grad), g.groups, g.group_features, *g.numbers(), g.batch, Write(made)],
        defines={"BIAS": 0, "UNIT": int(g.stride[2] == 1), "VW": _vector(emit.device, g)},
        local_size=plain_range(emit.device, sizes),
        split=2,
        flops=2 * g.batch * g.features * g.positions * g.taps,
    )
    return total(emit, made, (0,))


def _thin(
    emit: Emitter, kernel: str, x: View, w: View, g: Geometry, bias: View | None, out: View, sizes: Sequence[int]
) -> None:
    """A kernel of depthwise.cl; `sizes` are those of what it makes."""
    vector = _vector(emit.device, g)
    sizes = (-(-sizes[0] // vector), *sizes[1:])
    given: list[Argument] = [] if bias is None else [Read(emit.dense(bias))]
    emit.launch(
        "depthwise.cl",
        kernel,
        sizes,
        [Read(x), Read(w), *given, g.groups, g.group_features, *g.numbers(), Write(out)],
        defines={"BIAS": int(bias is not None), "UNIT": int(g.stride[2] == 1), "VW": vector},
        local_size=plain_range(emit.device, sizes),
        split=1,
        flops=2 * g.batch * g.features * g.positions * g.taps,
    )


# Parts.


def _column_elements(device: DeviceFacts) -> int:
    """Windows that are in memory at once."""
    return min(COLUMN_BYTES, device.max_allocation // 4) // 4


def _chunks(device: DeviceFacts, g: Geometry) -> Iterator[tuple[range, range]]:
    """Samples and output positions in parts whose windows stay within the bound, as far as one position allows."""
    limit = _column_elements(device)
    window = g.groups * (g.window + TALLEST)
    samples = max(1, limit // max(1, window * (g.positions + TALLEST)))
    positions = g.positions
    if window * (g.positions + TALLEST) > limit:
        positions = max(TALLEST, limit // window // TALLEST * TALLEST)
    for sample in range(0, g.batch, samples):
        for position in range(0, g.positions, positions):
            yield (
                range(sample, min(sample + samples, g.batch)),
                range(position, min(position + positions, g.positions)),
            )


def _samples(x: View, samples: range) -> View:
    """Some of the samples of a dense tensor."""
    each = math.prod(x.shape[1:])
    return View(x.storage, (len(samples), *x.shape[1:]), x.strides, x.offset + samples.start * each)


OPS: Mapping[str, Lower] = {"convolution": convolution, "convolution_backward": convolution_backward}
