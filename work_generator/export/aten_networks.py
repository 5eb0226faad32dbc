"""ATen's operators that are layers of networks: convolution, pooling, normalisation, softmax, losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from work_generator.export.context import Context, Entry, dim_of
from work_generator.export.draft import Value


def _pair(value: Any, default: Any = None) -> list[int]:
    chosen = default if value in (None, []) else value
    both = [chosen] if isinstance(chosen, int) else list(chosen)
    return both * 2 if len(both) == 1 else both


def _convolution_attrs(
    stride: Any, padding: Any, dilation: Any, transposed: bool, output_padding: Any, groups: int
) -> dict[str, Any]:
    return {
        "stride": list(stride),
        "padding": list(padding),
        "dilation": list(dilation),
        "transposed": transposed,
        "output_padding": list(output_padding),
        "groups": groups,
    }


def _convolution(c: Context, x: Value, w: Value, b: Value | None, *settings: Any) -> Value:
    return c.one("convolution", [x, w, b], **_convolution_attrs(*settings))


def _masked(made: Sequence[Value], mask: Sequence[bool]) -> tuple[Value | None, ...]:
    """The opset gives only the wanted outputs; ATen has None for the others."""
    left = iter(made)
    return tuple(next(left) if wanted else None for wanted in mask)


def _convolution_backward(
    c: Context, grad: Value, x: Value, w: Value, _: Any, *settings: Any
) -> tuple[Value | None, ...]:
    *conv, mask = settings
    attrs = {**_convolution_attrs(*conv), "output_mask": list(mask)}
    return _masked(c.many("convolution_backward", [grad, x, w], **attrs), mask)


def _max_pool_attrs(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> dict[str, Any]:
    size = _pair(kernel)
    return {
        "kernel_size": size,
        "stride": _pair(stride, size),
        "padding": _pair(padding, 0),
        "dilation": _pair(dilation, 1),
        "ceil_mode": ceil,
    }


def _planes(c: Context, x: Value) -> Value:
    """[C,H,W] as [1,C,H,W]."""
    return x if len(x.shape) == 4 else c.reshape(x, (1, *x.shape))


def _max_pool(
    c: Context,
    x: Value,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> tuple[Value, ...]:
    made = c.many(
        "max_pool2d_with_indices", [_planes(c, x)], **_max_pool_attrs(kernel, stride, padding, dilation, ceil)
    )
    return tuple(c.reshape(v, v.shape[len(v.shape) - len(x.shape) :]) for v in made)


def _max_pool_backward(
    c: Context,
    grad: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
    indices: Value,
) -> Value:
    inputs = [_planes(c, v) for v in (grad, x, indices)]
    made = c.one("max_pool2d_with_indices_backward", inputs, **_max_pool_attrs(kernel, stride, padding, dilation, ceil))
    return c.reshape(made, x.shape)


def _avg_pool_attrs(
    kernel: Any, stride: Any, padding: Any, ceil: bool, count_pad: bool, divisor: Any
) -> dict[str, Any]:
    size = _pair(kernel)
    return {
        "kernel_size": size,
        "stride": _pair(stride, size),
        "padding": _pair(padding, 0),
        "ceil_mode": ceil,
        "count_include_pad": count_pad,
        "divisor_override": divisor,
    }


def _avg_pool(
    c: Context,
    x: Value,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil: bool = False,
    count_pad: bool = True,
    divisor: Any = None,
) -> Value:
    attrs = _avg_pool_attrs(kernel, stride, padding, ceil, count_pad, divisor)
    return c.reshape(c.one("avg_pool2d", [_planes(c, x)], **attrs), c.type.shape)


def _avg_pool_backward(
    c: Context,
    grad: Value,
    x: Value,
    kernel: Any,
    stride: Any,
    padding: Any,
    ceil: bool,
    count_pad: bool,
    divisor: Any,
) -> Value:
    attrs = _avg_pool_attrs(kernel, stride, padding, ceil, count_pad, divisor)
    return c.reshape(c.one("avg_pool2d_backward", [_planes(c, grad), _planes(c, x)], **attrs), x.shape)


def _adaptive_attrs(c: Context, x: Value, out: Sequence[int]) -> dict[str, Any]:
    sizes = x.shape[-2:]
    if any(size % wanted for size, wanted in zip(sizes, out, strict=True)):
        raise c.refuse(
            f"pools {list(sizes)} to {list(out)}, which does not divide",
            "choose an output size that divides the input's",
        )
    kernel = [size // wanted for size, wanted in zip(sizes, out, strict=True)]
    return _avg_pool_attrs(kernel, kernel, 0, False, True, None)


def _adaptive_avg_pool(c: Context, x: Value, size: Sequence[int]) -> Value:
    return c.reshape(c.one("avg_pool2d", [_planes(c, x)], **_adaptive_attrs(c, x, size)), c.type.shape)


def _adaptive_avg_pool_backward(c: Context, grad: Value, x: Value) -> Value:
    attrs = _adaptive_attrs(c, x, grad.shape[-2:])
    return c.reshape(c.one("avg_pool2d_backward", [_planes(c, grad), _planes(c, x)], **attrs), x.shape)


def _whole_scales(c: Context, small: Sequence[int], large: Sequence[int]) -> list[int]:
    if any(b % a for a, b in zip(small, large, strict=True)):
        raise c.refuse(f"scales {list(small)} to {list(large)}", "scale by whole numbers")
    return [b // a for a, b in zip(small, large, strict=True)]


def _upsample(c: Context, x: Value, size: Sequence[int], *_: Any) -> Value:
    n, channels, height, width = x.shape
    down, right = _whole_scales(c, (height, width), size)
    apart = c.reshape(x, (n, channels, height, 1, width, 1))
    return c.reshape(c.one("expand", [apart], shape=[n, channels, height, down, width, right]), c.type.shape)


def _upsample_backward(c: Context, grad: Value, size: Sequence[int], shape: Sequence[int], *_: Any) -> Value:
    n, channels, height, width = shape
    down, right = _whole_scales(c, (height, width), size)
    apart = c.reshape(grad, (n, channels, height, down, width, right))
    return c.one("sum", [apart], dims=[3, 5], keepdim=False)


# --- normalisation ---


def _layer_norm(
    c: Context, x: Value, shape: Sequence[int], w: Value | None, b: Value | None, eps: float
) -> tuple[Value, ...]:
    return c.many("native_layer_norm", [x, w, b], normalized_shape=list(shape), eps=eps)


def _layer_norm_backward(
    c: Context,
    grad: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    rstd: Value,
    w: Value | None,
    b: Value | None,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    inputs = [grad, x, mean, rstd, w, b]
    made = c.many("native_layer_norm_backward", inputs, normalized_shape=list(shape), output_mask=list(mask))
    return _masked(made, mask)


def _group_norm(
    c: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    eps: float,
) -> tuple[Value, ...]:
    return c.many("native_group_norm", [x, w, b], groups=groups, eps=eps)


def _group_norm_backward(
    c: Context,
    grad: Value,
    x: Value,
    mean: Value,
    rstd: Value,
    w: Value | None,
    n: int,
    channels: int,
    area: int,
    groups: int,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    made = c.many("native_group_norm_backward", [grad, x, mean, rstd, w], groups=groups, output_mask=list(mask))
    return _masked(made, mask)


def _running(c: Context, x: Value, mean: Value | None, var: Value | None) -> tuple[Value, Value]:
    """Running statistics, or those a module without them stands for."""
    channels = [x.shape[1]]
    return mean or c.full(channels, 0.0, "float32"), var or c.full(channels, 1.0, "float32")


def _batch_norm(
    c: Context,
    x: Value,
    w: Value | None,
    b: Value | None,
    mean: Value | None,
    var: Value | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, ...]:
    """Five outputs: ATen's three, and the running statistics that ATen changes in place (see `lower`)."""
    inputs = [x, w, b, *_running(c, x, mean, var)]
    return c.many("native_batch_norm", inputs, training=training, momentum=momentum, eps=eps)


def _batch_norm_backward(
    c: Context,
    grad: Value,
    x: Value,
    w: Value | None,
    mean: Value | None,
    var: Value | None,
    save_mean: Value,
    save_invstd: Value,
    training: bool,
    eps: float,
    mask: Sequence[bool],
) -> tuple[Value | None, ...]:
    statistics = _running(c, x, mean, var)
    if save_mean.shape != (x.shape[1],):  # evaluation mode saves nothing
        save_mean, save_invstd = statistics
    inputs = [grad, x, w, *statistics, save_mean, save_invstd]
    made = c.many("native_batch_norm_backward", inputs, training=training, eps=eps, output_mask=list(mask))
    return _masked(made, mask)


# --- softmax and losses ---

REDUCTIONS = ("none", "mean", "sum")


def _softmax(op: str) -> Entry:
    def entry(c: Context, x: Value, dim: int, half_to_float: bool = False) -> Value:
        if not x.shape:
            return c.reshape(c.one(op, [c.reshape(x, (1,))], dim=0), ())
        return c.one(op, [x], dim=dim_of(dim, len(x.shape)))

    return entry


def _softmax_backward(op: str) -> Entry:
    def entry(c: Context, grad: Value, out: Value, dim: int, dtype: Any = None) -> Value:
        return c.one(op, [grad, out], dim=dim_of(dim, len(out.shape)))

    return entry


def _nll_loss(
    c: Context, x: Value, target: Value, weight: Value | None, reduction: int, ignore_index: int
) -> tuple[Value, ...]:
    inputs = [x, c.cast(target, "int64"), weight]
    return c.many("nll_loss_forward", inputs, reduction=REDUCTIONS[reduction], ignore_index=ignore_index)


def _nll_loss_backward(
    c: Context,
    grad: Value,
    x: Value,
    target: Value,
    weight: Value | None,
    reduction: int,
    ignore_index: int,
    total: Value,
) -> Value:
    inputs = [grad, x, c.cast(target, "int64"), weight, total]
    return c.one("nll_loss_backward", inputs, reduction=REDUCTIONS[reduction], ignore_index=ignore_index)


def _one(made: Value | tuple[Value | None, ...]) -> Value:
    assert isinstance(made, Value), made
    return made


ENTRIES: Mapping[str, Entry] = {
    # convolution and pooling
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.max_pool2d_with_indices.default": _max_pool,
    "aten.max_pool2d_with_indices_backward.default": _max_pool_backward,
    "aten.avg_pool2d.default": _avg_pool,
    "aten.avg_pool2d_backward.default": _avg_pool_backward,
    "aten._adaptive_avg_pool2d.default": _adaptive_avg_pool,
    "aten._adaptive_avg_pool2d_backward.default": _adaptive_avg_pool_backward,
    "aten.upsample_nearest2d.default": _upsample,
    "aten.upsample_nearest2d_backward.default": _upsample_backward,
    # normalisation
    "aten.native_layer_norm.default": _layer_norm,
    "aten.native_layer_norm_backward.default": _layer_norm_backward,
    "aten.native_group_norm.default": _group_norm,
    "aten.native_group_norm_backward.default": _group_norm_backward,
    "aten.native_batch_norm.default": _batch_norm,
    "aten.native_batch_norm_backward.default": _batch_norm_backward,
    # softmax and losses
    "aten._softmax.default": _softmax("softmax"),
    "aten._log_softmax.default": _softmax("log_softmax"),
    "aten._softmax_backward_data.default": _softmax_backward("softmax_backward"),
    "aten._log_softmax_backward_data.default": _softmax_backward("log_softmax_backward"),
    "aten.nll_loss_forward.default": _nll_loss,
    "aten.nll_loss_backward.default": _nll_loss_backward,
    "aten.nll_loss2d_forward.default": _nll_loss,
    "aten.nll_loss2d_backward.default": _nll_loss_backward,
}
