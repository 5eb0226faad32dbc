"""Every operator of the opset in plain eager PyTorch: what the backends are compared with.

Each function takes the node's tensors (None where absent) and attributes and gives a tuple. Backward operators are
derived by autograd from the public forward function wherever there is one, so the reference shares no formula with
the backends. All work in whatever float dtype they are given; the tests call them in float32 and float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from boinc_project.contract.opset import number

Attrs = Mapping[str, Any]
Reference = Callable[..., tuple[Tensor, ...]]
_INTS = {"int64": torch.int64, "int32": torch.int32, "uint8": torch.uint8, "bool": torch.bool}


def dtype_of(name: str, like: torch.dtype) -> torch.dtype:
    """The dtype named; float32 becomes the float dtype the reference runs in."""
    return _INTS.get(name, like)


def one(function: Callable[..., Tensor]) -> Reference:
    return lambda inputs, attrs, real: (function(*inputs),)


def _gradients(forward: Callable[..., Tensor], grad: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    with torch.enable_grad():
        return torch.autograd.grad(forward(*leaves), leaves, grad, materialize_grads=True, allow_unused=True)


def _masked(grads: Any, mask: Any) -> tuple[Tensor, ...]:
    return tuple(g for g, wanted in zip(grads, mask, strict=True) if wanted)


def _slices(attrs: Attrs) -> tuple[slice, ...]:
    return (*(slice(None),) * attrs["dim"], slice(attrs["start"], attrs["stop"], attrs["step"]))


def _slice_scatter(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    out = inputs[0].clone()
    out[_slices(attrs)] = inputs[1]
    return (out,)


def _index_put(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    x, values, *indices = inputs
    at = [torch.arange(size).reshape(-1, *(1,) * 20) for size in x.shape[: attrs["dim"]]]
    assert len(at) <= 1
    full = (slice(None),) * attrs["dim"] + tuple(indices)
    out = x.clone()
    if not attrs["accumulate"]:
        out[full] = values
        return (out,)
    places = torch.arange(x.numel()).reshape(x.shape)[full]
    return (x.reshape(-1).index_add(0, places.reshape(-1), values.expand(places.shape).reshape(-1)).reshape(x.shape),)


def _topk(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    values, order = torch.sort(inputs[0], dim=attrs["dim"], descending=attrs["largest"], stable=True)
    return values.narrow(attrs["dim"], 0, attrs["k"]), order.narrow(attrs["dim"], 0, attrs["k"])


def _embedding_dense_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    grad, indices = inputs
    out = torch.zeros(attrs["num_weights"], grad.shape[-1], dtype=grad.dtype)
    out.index_add_(0, indices.reshape(-1), grad.reshape(-1, grad.shape[-1]))
    if attrs["padding_idx"] >= 0:
        out[attrs["padding_idx"]] = 0
    return (out,)


def _full(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    return (torch.full(attrs["shape"], number(attrs["value"]), dtype=dtype_of(attrs["dtype"], real)),)


def _arange(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    values = [attrs["start"] + i * attrs["step"] for i in range(attrs["length"])]
    return (torch.tensor(values, dtype=dtype_of(attrs["dtype"], real)),)


def _clamp(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    low, high = (None if attrs[k] is None else number(attrs[k]) for k in ("min", "max"))
    return (inputs[0] if low is None and high is None else torch.clamp(inputs[0], low, high),)


def _reduction(function: Callable[..., Tensor]) -> Reference:
    def reference(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
        x = inputs[0]
        for dim in sorted(attrs["dims"], reverse=True):
            x = function(x, dim, keepdim=attrs["keepdim"])
        return (x,)

    return reference


def _mean(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    dims = attrs["dims"]
    return (torch.mean(inputs[0], dims, keepdim=attrs["keepdim"]) if dims else inputs[0],)


def _sum(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    dims = attrs["dims"]
    return (torch.sum(inputs[0], dims, keepdim=attrs["keepdim"]) if dims else inputs[0],)


def _argreduction(function: Callable[..., Tensor]) -> Reference:
    def reference(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
        x, dim, keepdim = inputs[0], attrs["dim"], attrs["keepdim"]
        if dim is None:
            return (function(x.reshape(-1)).reshape((1,) * x.ndim if keepdim else ()),)
        return (function(x, dim, keepdim=keepdim),)

    return reference


def _convolve(x: Tensor, w: Tensor, b: Tensor | None, attrs: Attrs) -> Tensor:
    axes = x.ndim - 2
    rest = {"stride": attrs["stride"], "padding": attrs["padding"], "dilation": attrs["dilation"]}
    if attrs["transposed"]:
        function: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[axes - 1]
        return function(x, w, b, output_padding=attrs["output_padding"], groups=attrs["groups"], **rest)
    function = (F.conv1d, F.conv2d, F.conv3d)[axes - 1]
    return function(x, w, b, groups=attrs["groups"], **rest)


def _convolution_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    grad, x, w = inputs
    b = torch.zeros(grad.shape[1], dtype=grad.dtype)
    return _masked(_gradients(lambda x, w, b: _convolve(x, w, b, attrs), grad, x, w, b), attrs["output_mask"])


def _max_pool2d(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(F.max_pool2d(inputs[0], **attrs, return_indices=True))


def _max_pool2d_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    grad, x, indices = inputs
    out = torch.zeros_like(x).flatten(2)
    return (out.scatter_add(2, indices.flatten(2), grad.flatten(2)).reshape(x.shape),)


def _avg_pool2d(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    return (F.avg_pool2d(inputs[0], **attrs),)


def _avg_pool2d_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    return _gradients(lambda x: F.avg_pool2d(x, **attrs), inputs[0], inputs[1])


def _native_layer_norm(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    x, w, b = inputs
    dims = tuple(range(x.ndim - len(attrs["normalized_shape"]), x.ndim))
    mean, rstd = x.mean(dims, keepdim=True), torch.rsqrt(x.var(dims, correction=0, keepdim=True) + attrs["eps"])
    return F.layer_norm(x, attrs["normalized_shape"], w, b, attrs["eps"]), mean, rstd


def _norm_backward(grad: Tensor, x: Tensor, w: Tensor | None, mask: Any, forward: Any, shape: Any) -> Any:
    weight = torch.ones(shape, dtype=x.dtype) if w is None else w
    return _masked(_gradients(forward, grad, x, weight, torch.zeros_like(weight)), mask)


def _native_layer_norm_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    """mean and rstd given belong to x with eps 1e-5: autograd computes them again."""
    grad, x, _, _, w, _ = inputs
    shape = attrs["normalized_shape"]
    return _norm_backward(grad, x, w, attrs["output_mask"], lambda x, w, b: F.layer_norm(x, shape, w, b, 1e-5), shape)


def _native_group_norm(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    x, w, b = inputs
    grouped = x.reshape(x.shape[0], attrs["groups"], -1)
    rstd = torch.rsqrt(grouped.var(2, correction=0) + attrs["eps"])
    return F.group_norm(x, attrs["groups"], w, b, attrs["eps"]), grouped.mean(2), rstd


def _native_group_norm_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    grad, x, _, _, w = inputs

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.group_norm(x, attrs["groups"], w, b, 1e-5)

    return _norm_backward(grad, x, w, attrs["output_mask"], forward, x.shape[1])


def _native_batch_norm(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    x, w, b, mean, var = inputs
    new_mean, new_var = mean.clone(), var.clone()
    out = F.batch_norm(x, new_mean, new_var, w, b, attrs["training"], attrs["momentum"], attrs["eps"])
    dims = (0, *range(2, x.ndim))
    used = (x.mean(dims), x.var(dims, correction=0)) if attrs["training"] else (mean, var)
    return out, used[0], torch.rsqrt(used[1] + attrs["eps"]), new_mean, new_var


def _native_batch_norm_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    grad, x, w, mean, var, _, _ = inputs

    def forward(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.batch_norm(x, mean.clone(), var.clone(), w, b, attrs["training"], 0.1, attrs["eps"])

    return _norm_backward(grad, x, w, attrs["output_mask"], forward, x.shape[1])


def _softmax_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    return (torch._softmax_backward_data(inputs[0], inputs[1], attrs["dim"], inputs[0].dtype),)


def _log_softmax_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    return (torch._log_softmax_backward_data(inputs[0], inputs[1], attrs["dim"], inputs[0].dtype),)


def _nll_loss_forward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    x, target, weight = inputs
    loss = F.nll_loss(x, target, weight, ignore_index=attrs["ignore_index"], reduction=attrs["reduction"])
    kept = target != attrs["ignore_index"]
    used = torch.where(kept, torch.ones_like(target, dtype=real) if weight is None else weight[target * kept], 0)
    return loss, torch.zeros((), dtype=real) if attrs["reduction"] == "none" else used.sum()


def _nll_loss_backward(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    """By the total weight given, which need not be the one of these targets."""
    grad, x, target, weight, total = inputs
    if attrs["reduction"] == "mean":
        grad = grad / total
    reduction = "none" if attrs["reduction"] == "none" else "sum"

    def forward(x: Tensor) -> Tensor:
        return F.nll_loss(x, target, weight, ignore_index=attrs["ignore_index"], reduction=reduction)

    return _gradients(forward, grad, x)


# --- random numbers, one number at a time in Python's integers --------------------------------------------------------


def philox_word(seed: int, step: int, stream: int, element: int) -> int:
    """The 32-bit word of one element (Salmon et al. 2011)."""
    block = element // 4
    counter = [block % 2**32, block // 2**32, step % 2**32, stream]
    key = [seed % 2**32, (seed // 2**32) % 2**32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * counter[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * counter[2], 2**32)
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter[element % 4]


def _random_uniform(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    seed, step = (int(each) for each in inputs)
    count = torch.zeros(attrs["shape"]).numel()
    words = [philox_word(seed, step, attrs["stream"], i) >> 8 for i in range(count)]
    return ((torch.tensor(words, dtype=torch.float64) * 2.0**-24).to(real).reshape(attrs["shape"]),)


def _random_bernoulli(inputs: Any, attrs: Attrs, real: torch.dtype) -> tuple[Tensor, ...]:
    (uniform,) = _random_uniform(inputs, attrs, torch.float64)
    return ((uniform < torch.tensor(attrs["p"], dtype=torch.float32).double()).to(real),)


REFERENCE: Mapping[str, Reference] = {
    "reshape": lambda i, a, r: (i[0].reshape(a["shape"]),),
    "permute": lambda i, a, r: (i[0].permute(a["dims"]),),
    "expand": lambda i, a, r: (i[0].expand(a["shape"]),),
    "slice": lambda i, a, r: (i[0][_slices(a)],),
    "cat": lambda i, a, r: (torch.cat(i, a["dim"]),),
    "constant_pad_nd": lambda i, a, r: (F.pad(i[0], a["pad"], value=number(a["value"])),),
    "flip": lambda i, a, r: (torch.flip(i[0], a["dims"]),),
    "slice_scatter": _slice_scatter,
    "cast": lambda i, a, r: (i[0].to(dtype_of(a["dtype"], r)),),
    "gather": lambda i, a, r: (torch.gather(i[0], a["dim"], i[1]),),
    "scatter": lambda i, a, r: (torch.scatter(i[0], a["dim"], i[1], i[2]),),
    "scatter_add": lambda i, a, r: (torch.scatter_add(i[0], a["dim"], i[1], i[2]),),
    "index": lambda i, a, r: (i[0][(slice(None),) * a["dim"] + tuple(i[1:])],),
    "index_put": _index_put,
    "index_select": lambda i, a, r: (torch.index_select(i[0], a["dim"], i[1]),),
    "embedding": lambda i, a, r: (F.embedding(i[1], i[0]),),
    "embedding_dense_backward": _embedding_dense_backward,
    "topk": _topk,
    "sort": lambda i, a, r: tuple(torch.sort(i[0], dim=a["dim"], descending=a["descending"], stable=True)),
    "full": _full,
    "arange": _arange,
    "neg": one(torch.neg),
    "abs": one(torch.abs),
    "sign": one(torch.sign),
    "exp": one(torch.exp),
    "expm1": one(torch.expm1),
    "log": one(torch.log),
    "log1p": one(torch.log1p),
    "sqrt": one(torch.sqrt),
    "rsqrt": one(torch.rsqrt),
    "reciprocal": one(torch.reciprocal),
    "sin": one(torch.sin),
    "cos": one(torch.cos),
    "tanh": one(torch.tanh),
    "sigmoid": one(torch.sigmoid),
    "erf": one(torch.erf),
    "relu": one(torch.relu),
    "silu": one(F.silu),
    "floor": one(torch.floor),
    "ceil": one(torch.ceil),
    "round": one(torch.round),
    "trunc": one(torch.trunc),
    "logical_not": one(torch.logical_not),
    "isnan": one(torch.isnan),
    "isinf": one(torch.isinf),
    "gelu": lambda i, a, r: (F.gelu(i[0], approximate=a["approximate"]),),
    "clamp": _clamp,
    "add": one(torch.add),
    "sub": one(torch.sub),
    "mul": one(torch.mul),
    "div": one(torch.div),
    "pow": one(torch.pow),
    "maximum": one(torch.maximum),
    "minimum": one(torch.minimum),
    "remainder": one(torch.remainder),
    "fmod": one(torch.fmod),
    "floor_divide": one(torch.floor_divide),
    "eq": one(torch.eq),
    "ne": one(torch.ne),
    "lt": one(torch.lt),
    "le": one(torch.le),
    "gt": one(torch.gt),
    "ge": one(torch.ge),
    "logical_and": one(torch.logical_and),
    "logical_or": one(torch.logical_or),
    "logical_xor": one(torch.logical_xor),
    "bitwise_and": one(torch.bitwise_and),
    "bitwise_or": one(torch.bitwise_or),
    "where": one(torch.where),
    "gelu_backward": lambda i, a, r: _gradients(lambda x: F.gelu(x, approximate=a["approximate"]), i[0], i[1]),
    "threshold_backward": lambda i, a, r: (torch.where(i[1] <= a["threshold"], torch.zeros_like(i[0]), i[0]),),
    "tanh_backward": lambda i, a, r: (i[0] * (1 - i[1] * i[1]),),
    "sigmoid_backward": lambda i, a, r: (i[0] * (1 - i[1]) * i[1],),
    "silu_backward": lambda i, a, r: _gradients(F.silu, i[0], i[1]),
    "sum": _sum,
    "mean": _mean,
    "amax": _reduction(torch.amax),
    "amin": _reduction(torch.amin),
    "prod": _reduction(torch.prod),
    "any": _reduction(torch.any),
    "all": _reduction(torch.all),
    "argmax": _argreduction(torch.argmax),
    "argmin": _argreduction(torch.argmin),
    "cumsum": lambda i, a, r: (torch.cumsum(i[0], a["dim"]),),
    "mm": one(torch.mm),
    "bmm": one(torch.bmm),
    "addmm": one(torch.addmm),
    "convolution": lambda i, a, r: (_convolve(i[0], i[1], i[2], a),),
    "convolution_backward": _convolution_backward,
    "max_pool2d_with_indices": _max_pool2d,
    "max_pool2d_with_indices_backward": _max_pool2d_backward,
    "avg_pool2d": _avg_pool2d,
    "avg_pool2d_backward": _avg_pool2d_backward,
    "native_layer_norm": _native_layer_norm,
    "native_layer_norm_backward": _native_layer_norm_backward,
    "native_group_norm": _native_group_norm,
    "native_group_norm_backward": _native_group_norm_backward,
    "native_batch_norm": _native_batch_norm,
    "native_batch_norm_backward": _native_batch_norm_backward,
    "softmax": lambda i, a, r: (torch.softmax(i[0], a["dim"]),),
    "log_softmax": lambda i, a, r: (torch.log_softmax(i[0], a["dim"]),),
    "softmax_backward": _softmax_backward,
    "log_softmax_backward": _log_softmax_backward,
    "nll_loss_forward": _nll_loss_forward,
    "nll_loss_backward": _nll_loss_backward,
    "random_bernoulli": _random_bernoulli,
    "random_uniform": _random_uniform,
}
