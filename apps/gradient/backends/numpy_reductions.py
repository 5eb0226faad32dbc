"""Reductions, softmax, normalisation and losses of the numpy backend.

Shape suffixes: N batch, C channels, G groups, L everything spatial, M rows, D normalised elements.
Float sums are made in blocks or pairwise, never as one long chain, so that their error stays near that of
PyTorch's; see `sum_float`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from apps.gradient.backends.backend import Call, Kernel, Prepare
from apps.gradient.backends.numpy_indexing import check_range

Array = np.ndarray[Any, Any]
_F = np.float32

SUM_BLOCK = 64  # rows added in one chain; partial sums are then added again in blocks


def sum_float(x: Array, dims: Sequence[int]) -> Array:
    """Float32 sum over dims, which are dropped; adjacent dimensions are summed together, the last ones first."""
    shape = x.shape
    result = np.ascontiguousarray(x)
    for first, last in reversed(_runs(sorted(dims))):
        count, after = math.prod(shape[first : last + 1]), math.prod(shape[last + 1 :])
        rows = result.reshape(-1, count, after) if result.size else np.zeros((0, count, after), np.float32)
        if not result.size:
            kept = tuple(size for axis, size in enumerate(shape) if axis not in dims)
            return np.zeros(kept, np.float32)
        result = rows.reshape(-1, count).sum(axis=1) if after == 1 else _column_sums(rows)
        shape = (*shape[:first], *shape[last + 1 :])
    return result.reshape(shape)


def _runs(dims: Sequence[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for dim in dims:
        if runs and runs[-1][1] == dim - 1:
            runs[-1] = (runs[-1][0], dim)
        else:
            runs.append((dim, dim))
    return runs


def _column_sums(x: Array) -> Array:
    """[A, count, B] -> [A, B]. Blocks are multiplied by a row of ones: BLAS is the fastest adder there is."""
    while x.shape[1] > SUM_BLOCK:
        blocks = x.shape[1] // SUM_BLOCK
        whole = x[:, : blocks * SUM_BLOCK].reshape(-1, SUM_BLOCK, x.shape[2])
        partial = np.matmul(np.ones((1, SUM_BLOCK), np.float32), whole).reshape(x.shape[0], blocks, x.shape[2])
        rest = x[:, blocks * SUM_BLOCK :]
        if rest.shape[1]:
            partial = np.concatenate((partial, rest.sum(axis=1, keepdims=True)), axis=1)
        x = partial
    total: Array = x.sum(axis=1)
    return total


# --- reductions -----------------------------------------------------------------------------------------------


def _sum(call: Call) -> Kernel:
    dims, out = tuple(call.attrs["dims"]), call.outputs[0]
    if out.dtype == "float32":
        return lambda x: sum_float(x, dims).reshape(out.shape)
    return lambda x: np.asarray(x.sum(axis=dims, dtype=np.int64)).reshape(out.shape)


def _mean(call: Call) -> Kernel:
    dims, out = tuple(call.attrs["dims"]), call.outputs[0]
    count = _F(math.prod(call.input(0).shape[dim] for dim in dims))
    return lambda x: (sum_float(x, dims) / count).reshape(out.shape)


def _prod(call: Call) -> Kernel:
    dims, keepdim, dtype = tuple(call.attrs["dims"]), call.attrs["keepdim"], call.outputs[0].dtype
    return lambda x: np.multiply.reduce(x, axis=dims, dtype=dtype, keepdims=keepdim)


def _reduce(function: Any) -> Prepare:
    def prepare(call: Call) -> Kernel:
        dims, keepdim = tuple(call.attrs["dims"]), call.attrs["keepdim"]
        return lambda x: function(x, axis=dims, keepdims=keepdim)

    return prepare


def _argreduce(function: Any) -> Prepare:
    """The first of equal elements; NaN counts as the extreme."""

    def prepare(call: Call) -> Kernel:
        dim, shape = call.attrs["dim"], call.outputs[0].shape
        return lambda x: np.asarray(function(x, axis=dim)).reshape(shape)

    return prepare


def _cumsum(call: Call) -> Kernel:
    """Float sums are carried in float64, as ATen does on CPUs, and rounded."""
    dim, dtype = call.attrs["dim"], call.outputs[0].dtype
    carry = np.float64 if dtype == "float32" else np.int64
    return lambda x: np.cumsum(x, axis=dim, dtype=carry).astype(dtype, copy=False)


# --- softmax --------------------------------------------------------------------------------------------------


def _softmax(call: Call) -> Kernel:
    dim = call.attrs["dim"]

    def kernel(x: Array) -> Array:
        out: Array = x - x.max(axis=dim, keepdims=True)
        np.exp(out, out=out)
        out /= out.sum(axis=dim, keepdims=True)
        return out

    return _or_empty(call, kernel)


def _log_softmax(call: Call) -> Kernel:
    dim = call.attrs["dim"]

    def kernel(x: Array) -> Array:
        out: Array = x - x.max(axis=dim, keepdims=True)
        out -= np.log(np.exp(out).sum(axis=dim, keepdims=True))
        return out

    return _or_empty(call, kernel)


def _softmax_backward(call: Call) -> Kernel:
    """out (grad - sum(grad out))."""
    dim = call.attrs["dim"]

    def kernel(grad: Array, out: Array) -> Array:
        result = grad * out
        total = result.sum(axis=dim, keepdims=True)
        result -= out * total
        return result

    return kernel


def _log_softmax_backward(call: Call) -> Kernel:
    """grad - exp(out) sum(grad)."""
    dim = call.attrs["dim"]

    def kernel(grad: Array, out: Array) -> Array:
        result = np.exp(out)
        result *= grad.sum(axis=dim, keepdims=True)
        np.subtract(grad, result, out=result)
        return result

    return kernel


def _or_empty(call: Call, kernel: Kernel) -> Kernel:
    """An empty tensor has no maximum, but is its own softmax."""
    return kernel if call.outputs[0].numel else (lambda x: x)


# --- normalisation ------------------------------------------------------------------------------------------------


def _normalised(x_MD: Array, eps: np.float32) -> tuple[Array, Array, Array]:
    """Rows with mean 0 and variance 1, and their former mean [M] and 1 / standard deviation [M]."""
    count = _F(x_MD.shape[1])
    mean_M = x_MD.sum(axis=1) / count
    out_MD = x_MD - mean_M[:, None]
    variance_M = np.einsum("md,md->m", out_MD, out_MD) / count
    rstd_M = np.reciprocal(np.sqrt(variance_M + eps))
    out_MD *= rstd_M[:, None]
    return out_MD, mean_M, rstd_M


def _normalised_backward(grad_MD: Array, hat_MD: Array, rstd_M: Array) -> Array:
    """rstd (grad - mean(grad) - hat mean(grad hat)); hat is the normalised x and is overwritten."""
    count = _F(hat_MD.shape[1])
    along = np.einsum("md,md->m", grad_MD, hat_MD) / count
    hat_MD *= -along[:, None]
    hat_MD += grad_MD
    hat_MD -= (grad_MD.sum(axis=1) / count)[:, None]
    hat_MD *= rstd_M[:, None]
    return hat_MD


def _scaled(hat: Array, weight: Array | None, bias: Array | None) -> Array:
    """hat * weight + bias, in place."""
    if weight is not None:
        hat *= weight
    if bias is not None:
        hat += bias
    return hat


def _native_layer_norm(call: Call) -> Kernel:
    x_type, eps = call.input(0), _F(call.attrs["eps"])
    size = math.prod(call.attrs["normalized_shape"])
    rows = x_type.numel // size
    statistics = call.outputs[1].shape

    def kernel(x: Array, weight: Array | None, bias: Array | None) -> tuple[Array, Array, Array]:
        hat_MD, mean_M, rstd_M = _normalised(x.reshape(rows, size), eps)
        out = _scaled(hat_MD.reshape(x_type.shape), weight, bias)
        return out, mean_M.reshape(statistics), rstd_M.reshape(statistics)

    return kernel


def _native_layer_norm_backward(call: Call) -> Kernel:
    x_type, mask = call.input(1), call.attrs["output_mask"]
    inner = tuple(call.attrs["normalized_shape"])
    size = math.prod(inner)
    rows = x_type.numel // size

    def kernel(grad: Array, x: Array, mean: Array, rstd: Array, weight: Array | None, bias: Array | None) -> Any:
        grad_MD, rstd_M = grad.reshape(rows, size), rstd.reshape(rows)
        hat_MD = x.reshape(rows, size) - mean.reshape(rows, 1)
        hat_MD *= rstd_M[:, None]
        made = []
        if mask[1]:
            made.append(sum_float(grad_MD * hat_MD, (0,)).reshape(inner))
        if mask[2]:
            made.append(sum_float(grad_MD, (0,)).reshape(inner))
        if mask[0]:
            inward = grad_MD if weight is None else grad_MD * weight.reshape(size)
            made.insert(0, _normalised_backward(inward, hat_MD, rstd_M).reshape(x_type.shape))
        return made if len(made) > 1 else made[0]

    return kernel


def _native_group_norm(call: Call) -> Kernel:
    x_type, eps, groups = call.input(0), _F(call.attrs["eps"]), call.attrs["groups"]
    batch, channels = x_type.shape[:2]
    per_channel = (channels,) + (1,) * (len(x_type.shape) - 2)

    def kernel(x: Array, weight: Array | None, bias: Array | None) -> tuple[Array, Array, Array]:
        hat_MD, mean_M, rstd_M = _normalised(x.reshape(batch * groups, x_type.numel // (batch * groups)), eps)
        w, b = (None if v is None else v.reshape(per_channel) for v in (weight, bias))
        out = _scaled(hat_MD.reshape(x_type.shape), w, b)
        return out, mean_M.reshape(batch, groups), rstd_M.reshape(batch, groups)

    return kernel if batch else lambda x, *_: (x, *(np.zeros((0, groups), np.float32),) * 2)


def _native_group_norm_backward(call: Call) -> Kernel:
    x_type, mask, groups = call.input(1), call.attrs["output_mask"], call.attrs["groups"]
    batch, channels = x_type.shape[:2]
    rows = batch * groups
    size = math.prod(x_type.shape[1:]) // groups

    def kernel(grad: Array, x: Array, mean: Array, rstd: Array, weight: Array | None) -> Any:
        grad_NCL, rstd_M = grad.reshape(batch, channels, size * groups // channels), rstd.reshape(rows)
        hat_MD = x.reshape(rows, size) - mean.reshape(rows, 1)
        hat_MD *= rstd_M[:, None]
        made = []
        if mask[1]:
            made.append(sum_float(grad_NCL * hat_MD.reshape(grad_NCL.shape), (0, 2)))
        if mask[2]:
            made.append(sum_float(grad_NCL, (0, 2)))
        if mask[0]:
            inward = grad_NCL if weight is None else grad_NCL * weight[:, None]
            gx = _normalised_backward(inward.reshape(rows, size), hat_MD, rstd_M)
            made.insert(0, gx.reshape(x_type.shape))
        return made if len(made) > 1 else made[0]

    return kernel


def _native_batch_norm(call: Call) -> Kernel:
    """Training: statistics of this batch, and running ones moved by `momentum` (variance unbiased there only)."""
    x_type, training = call.input(0), call.attrs["training"]
    eps, momentum = _F(call.attrs["eps"]), _F(call.attrs["momentum"])
    batch, channels = x_type.shape[:2]
    positions = math.prod(x_type.shape[2:])
    count = _F(batch * positions)
    unbiased = _F(batch * positions / max(batch * positions - 1, 1))

    def kernel(
        x: Array, weight: Array | None, bias: Array | None, running_mean: Array, running_var: Array
    ) -> tuple[Array, ...]:
        x_NCL = x.reshape(batch, channels, positions)
        mean_C = sum_float(x_NCL, (0, 2)) / count if training else running_mean
        hat_NCL = x_NCL - mean_C[:, None]
        variance_C = sum_float(np.square(hat_NCL), (0, 2)) / count if training else running_var
        invstd_C = np.reciprocal(np.sqrt(variance_C + eps))
        hat_NCL *= (invstd_C if weight is None else invstd_C * weight)[:, None]
        if bias is not None:
            hat_NCL += bias[:, None]
        out = hat_NCL.reshape(x_type.shape)
        if not training:
            return out, mean_C, invstd_C, running_mean, running_var
        new_mean = (_F(1) - momentum) * running_mean + momentum * mean_C
        new_var = (_F(1) - momentum) * running_var + momentum * (variance_C * unbiased)
        return out, mean_C, invstd_C, new_mean, new_var

    return kernel


def _native_batch_norm_backward(call: Call) -> Kernel:
    x_type, mask = call.input(1), call.attrs["output_mask"]
    training, eps = call.attrs["training"], _F(call.attrs["eps"])
    batch, channels = x_type.shape[:2]
    positions = math.prod(x_type.shape[2:])
    count = _F(batch * positions)

    def kernel(
        grad: Array,
        x: Array,
        weight: Array | None,
        running_mean: Array,
        running_var: Array,
        save_mean: Array,
        save_invstd: Array,
    ) -> Any:
        grad_NCL = grad.reshape(batch, channels, positions)
        mean_C = save_mean if training else running_mean
        invstd_C = save_invstd if training else np.reciprocal(np.sqrt(running_var + eps))
        hat_NCL = x.reshape(grad_NCL.shape) - mean_C[:, None]
        hat_NCL *= invstd_C[:, None]
        gw_C, gb_C = sum_float(grad_NCL * hat_NCL, (0, 2)), sum_float(grad_NCL, (0, 2))
        scale_C = invstd_C if weight is None else invstd_C * weight
        if training:
            hat_NCL *= (-gw_C / count)[:, None]
            hat_NCL += grad_NCL
            hat_NCL -= (gb_C / count)[:, None]
            hat_NCL *= scale_C[:, None]
        else:
            np.multiply(grad_NCL, scale_C[:, None], out=hat_NCL)
        made = [m for m, wanted in zip((hat_NCL.reshape(x_type.shape), gw_C, gb_C), mask) if wanted]
        return made if len(made) > 1 else made[0]

    return kernel


# --- negative log likelihood --------------------------------------------------------------------------------------


def _targets(target: Array, classes: int, ignore_index: int) -> tuple[Array, Array]:
    """Valid class numbers (0 where ignored) and which are kept."""
    kept = target != ignore_index
    safe = np.where(kept, target, 0)
    check_range(safe, classes)
    return safe, kept


def _class_axis(call: Call, position: int) -> int:
    return 0 if len(call.input(position).shape) == 1 else 1


def _nll_loss_forward(call: Call) -> Kernel:
    """loss = -weight[target] x[target], 0 where ignored; mean divides by the sum of the weights used.

    total_weight is that sum, and 0 for reduction 'none', as in ATen.
    """
    axis = _class_axis(call, 0)
    classes, ignore_index = call.input(0).shape[axis], call.attrs["ignore_index"]
    reduction = call.attrs["reduction"]

    def kernel(x: Array, target: Array, weight: Array | None) -> tuple[Any, Any]:
        safe, kept = _targets(target, classes, ignore_index)
        used = kept.astype(np.float32) if weight is None else np.where(kept, weight[safe], _F(0))
        picked = np.take_along_axis(x, np.expand_dims(safe, axis), axis).reshape(target.shape)
        losses = np.where(kept, -picked * used, _F(0))
        if reduction == "none":
            return losses, np.zeros((), np.float32)
        every = tuple(range(losses.ndim))
        total, total_weight = sum_float(losses, every), sum_float(used, every)
        return (total / total_weight if reduction == "mean" else total), total_weight

    return kernel


def _nll_loss_backward(call: Call) -> Kernel:
    axis = _class_axis(call, 1)
    x_type, ignore_index = call.input(1), call.attrs["ignore_index"]
    reduction, classes = call.attrs["reduction"], call.input(1).shape[axis]

    def kernel(grad: Array, x: Array, target: Array, weight: Array | None, total_weight: Array) -> Array:
        safe, kept = _targets(target, classes, ignore_index)
        scale = -grad / total_weight if reduction == "mean" else -grad
        values = np.where(kept, scale if weight is None else scale * weight[safe], _F(0))
        out = np.zeros(x_type.shape, np.float32)
        places = np.expand_dims(safe, axis)
        np.put_along_axis(out, places, np.expand_dims(values, axis).astype(np.float32, copy=False), axis)
        return out

    return kernel


OPS: dict[str, Prepare] = {
    "sum": _sum,
    "mean": _mean,
    "amax": _reduce(np.max),
    "amin": _reduce(np.min),
    "prod": _prod,
    "any": _reduce(np.any),
    "all": _reduce(np.all),
    "argmax": _argreduce(np.argmax),
    "argmin": _argreduce(np.argmin),
    "cumsum": _cumsum,
    "native_layer_norm": _native_layer_norm,
    "native_layer_norm_backward": _native_layer_norm_backward,
    "native_group_norm": _native_group_norm,
    "native_group_norm_backward": _native_group_norm_backward,
    "native_batch_norm": _native_batch_norm,
    "native_batch_norm_backward": _native_batch_norm_backward,
    "softmax": _softmax,
    "log_softmax": _log_softmax,
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
    "nll_loss_forward": _nll_loss_forward,
    "nll_loss_backward": _nll_loss_backward,
}
