"""The torch backend: the opset on PyTorch's own operators, for CUDA, ROCm and the CPU.

Each operator is the ATen operator of the same name where there is one; the kernels of the hot ones are PyTorch's
functions themselves, with no Python between the executor and them. Precision is plain float32 (TF32 off) and
algorithms are deterministic where PyTorch has such ones, because replicas are compared (torch_device.py). Indices and
divisors are checked here although ATen checks many of them on CPUs (torch_checks.py): on a GPU that is done when a run
has ended, so that nothing in a run waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from typing import Any, Callable

import numpy as np
import torch
from torch import Tensor

from apps.gradient.backends import torch_device
from apps.gradient.backends.backend import Call, Kernel, Prepare, Program
from apps.gradient.backends.torch_checks import Checks, program
from apps.gradient.boinc_messages import InitData
from apps.gradient.executor import ExecutionError
from boinc_project.contract import philox
from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import OPSET, TensorType, number

aten: Any = torch.ops.aten

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "int64": torch.int64,
    "int32": torch.int32,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


CheckedPrepare = Callable[[Call, Checks], Kernel]


def plain(function: Kernel) -> Prepare:
    """An operator that PyTorch has under this or another name."""
    return lambda call: function


def with_attributes(function: Callable[..., Any], *names: str) -> Prepare:
    """function(inputs ..., attributes ...) in the order of the names."""

    def prepare(call: Call) -> Kernel:
        values = tuple(call.attrs[name] for name in names)
        return lambda *tensors: function(*tensors, *values)

    return prepare


# --- movement, constants and indexing -----------------------------------------------------------------------------


def _reshape(call: Call) -> Kernel:
    shape = call.outputs[0].shape
    return lambda x: x.reshape(shape)


def _permute(call: Call) -> Kernel:
    dims = tuple(call.attrs["dims"])
    return lambda x: x.permute(dims)


def _expand(call: Call) -> Kernel:
    shape = call.outputs[0].shape
    return lambda x: x.expand(shape)


def _slice(call: Call) -> Kernel:
    a = call.attrs
    region = (*(slice(None),) * a["dim"], slice(a["start"], a["stop"], a["step"]))
    return lambda x: x[region]


def _slice_scatter(call: Call) -> Kernel:
    a = call.attrs
    dim, start, stop, step = a["dim"], a["start"], a["stop"], a["step"]
    return lambda x, src: torch.slice_scatter(x, src, dim, start, stop, step)


def _cat(call: Call) -> Kernel:
    dim = call.attrs["dim"]
    return lambda *xs: torch.cat(xs, dim)


def _constant_pad_nd(call: Call) -> Kernel:
    pad, value = list(call.attrs["pad"]), number(call.attrs["value"])
    return lambda x: torch.constant_pad_nd(x, pad, value)


def _cast(call: Call) -> Kernel:
    dtype = DTYPES[call.outputs[0].dtype]
    return lambda x: x.to(dtype)


def _gather(call: Call, checks: Checks) -> Kernel:
    dim, size = call.attrs["dim"], call.input(0).shape[call.attrs["dim"]]

    def kernel(x: Tensor, index: Tensor) -> Tensor:
        return torch.gather(x, dim, checks.index(call, index, size))

    return kernel


def _scatter(function: Callable[..., Tensor]) -> CheckedPrepare:
    def prepare(call: Call, checks: Checks) -> Kernel:
        dim, size = call.attrs["dim"], call.input(0).shape[call.attrs["dim"]]

        def kernel(x: Tensor, index: Tensor, src: Tensor) -> Tensor:
            return function(x, dim, checks.index(call, index, size), src)

        return kernel

    return prepare


def _index(call: Call, checks: Checks) -> Kernel:
    dim, sizes = call.attrs["dim"], call.input(0).shape[call.attrs["dim"] :]

    def kernel(x: Tensor, *indices: Tensor) -> Any:
        good = [checks.index(call, index, size, wraps=True) for index, size in zip(indices, sizes)]
        return aten.index.Tensor(x, [None] * dim + good)

    return kernel


def _index_put(call: Call, checks: Checks) -> Kernel:
    dim, accumulate = call.attrs["dim"], call.attrs["accumulate"]
    sizes = call.input(0).shape[dim:]

    def kernel(x: Tensor, values: Tensor, *indices: Tensor) -> Any:
        good = [checks.index(call, index, size, wraps=True) for index, size in zip(indices, sizes)]
        return aten.index_put.default(x, [None] * dim + good, values, accumulate)

    return kernel


def _index_select(call: Call, checks: Checks) -> Kernel:
    dim, size = call.attrs["dim"], call.input(0).shape[call.attrs["dim"]]

    def kernel(x: Tensor, index: Tensor) -> Tensor:
        return torch.index_select(x, dim, checks.index(call, index, size))

    return kernel


def _embedding(call: Call, checks: Checks) -> Kernel:
    size = call.input(0).shape[0]

    def kernel(weight: Tensor, indices: Tensor) -> Tensor:
        return torch.embedding(weight, checks.index(call, indices, size))

    return kernel


def _embedding_dense_backward(call: Call, checks: Checks) -> Kernel:
    num_weights, padding_idx = call.attrs["num_weights"], call.attrs["padding_idx"]

    def kernel(grad: Tensor, indices: Tensor) -> Any:
        good = checks.index(call, indices, num_weights)
        return aten.embedding_dense_backward.default(grad, good, num_weights, padding_idx, False)

    return kernel


def _sort(call: Call) -> Kernel:
    dim, descending = call.attrs["dim"], call.attrs["descending"]
    return lambda x: tuple(torch.sort(x, stable=True, dim=dim, descending=descending))


def _topk(call: Call) -> Kernel:
    """The first k of the stable sort: torch.topk leaves the order of equal elements open."""
    dim, largest, k = call.attrs["dim"], call.attrs["largest"], call.attrs["k"]

    def kernel(x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = torch.sort(x, stable=True, dim=dim, descending=largest)
        return values.narrow(dim, 0, k), order.narrow(dim, 0, k)

    return kernel


# --- elementwise ----------------------------------------------------------------------------------------------


def _clamp(call: Call) -> Kernel:
    low, high = (None if call.attrs[k] is None else number(call.attrs[k]) for k in ("min", "max"))
    if low is None and high is None:
        return lambda x: x
    return lambda x: torch.clamp(x, low, high)


def _pow(call: Call, checks: Checks) -> Kernel:
    exponent = call.immediates[1]
    if call.outputs[0].dtype != "float32":
        return lambda a, b: torch.pow(a, checks.power(call, b))
    if exponent is None:
        return torch.pow
    return lambda x, _: torch.pow(x, exponent)


def _division(
    function: Callable[[Tensor, Tensor], Tensor], for_minus_one: Callable[[Tensor], Tensor]
) -> CheckedPrepare:
    """Integers refuse a zero divisor; a / -1 is taken apart because the lowest integer would trap the CPU."""

    def prepare(call: Call, checks: Checks) -> Kernel:
        def of_integers(a: Tensor, b: Tensor) -> Tensor:
            b = checks.divisor(call, b)
            if not b.dtype.is_signed:
                return function(a, b)
            minus_one = b == -1
            return torch.where(minus_one, for_minus_one(a), function(a, torch.where(minus_one, 1, b)))

        return function if call.outputs[0].dtype == "float32" else of_integers

    return prepare


def _threshold_backward(call: Call) -> Kernel:
    threshold = float(number(call.attrs["threshold"]))
    return lambda grad, x: aten.threshold_backward.default(grad, x, threshold)


def _gelu(call: Call) -> Kernel:
    approximate = call.attrs["approximate"]
    return lambda x: torch.nn.functional.gelu(x, approximate=approximate)


def _gelu_backward(call: Call) -> Kernel:
    approximate = call.attrs["approximate"]
    return lambda grad, x: aten.gelu_backward.default(grad, x, approximate=approximate)


# --- reductions -----------------------------------------------------------------------------------------------


def _reduce(function: Callable[..., Tensor]) -> Prepare:
    """PyTorch reads an empty list of dims as all of them; here it is none."""

    def prepare(call: Call) -> Kernel:
        dims, keepdim = tuple(call.attrs["dims"]), call.attrs["keepdim"]
        if not dims:
            dtype = DTYPES[call.outputs[0].dtype]
            return lambda x: x.to(dtype)
        return lambda x: function(x, dims, keepdim)

    return prepare


def _prod(call: Call) -> Kernel:
    """torch.prod takes one dimension: the reduced ones are moved to the end and joined."""
    dims, out = call.attrs["dims"], call.outputs[0]
    kept = [d for d in range(len(call.input(0).shape)) if d not in dims]
    sizes = [call.input(0).shape[d] for d in kept]
    count = math.prod(call.input(0).shape[d] for d in dims)
    order = (*kept, *dims)
    return lambda x: torch.prod(x.permute(order).reshape(*sizes, count), -1).reshape(out.shape)


def _argreduce(function: Callable[..., Tensor]) -> Prepare:
    def prepare(call: Call) -> Kernel:
        dim, shape = call.attrs["dim"], call.outputs[0].shape
        return lambda x: function(x, dim).reshape(shape)

    return prepare


# --- convolution, pooling, normalisation --------------------------------------------------------------------------


def _masked(results: Any, mask: Any) -> Any:
    made = tuple(result for result, wanted in zip(results, mask) if wanted)
    return made if len(made) > 1 else made[0]


_CONVOLUTION = ("stride", "padding", "dilation", "transposed", "output_padding", "groups")


def _convolution(call: Call) -> Kernel:
    values = [call.attrs[name] for name in _CONVOLUTION]
    return lambda x, w, b: torch.convolution(x, w, b, *values)


def _convolution_backward(call: Call) -> Kernel:
    values = [call.attrs[name] for name in _CONVOLUTION]
    mask, features = call.attrs["output_mask"], [call.input(0).shape[1]]
    operator = aten.convolution_backward.default
    return lambda grad, x, w: _masked(operator(grad, x, w, features, *values, mask), mask)


_MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode")
_AVG_POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def _max_pool2d_backward(call: Call, checks: Checks) -> Kernel:
    values = [call.attrs[name] for name in _MAX_POOL]
    plane = math.prod(call.input(1).shape[2:])
    operator = aten.max_pool2d_with_indices_backward.default

    def kernel(grad: Tensor, x: Tensor, indices: Tensor) -> Any:
        return operator(grad, x, *values, checks.index(call, indices, plane))

    return kernel


def _dense(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """ATen's layer and group norm read weights and statistics as if they were contiguous, whatever their strides."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _native_layer_norm(call: Call) -> Kernel:
    shape, eps = list(call.attrs["normalized_shape"]), call.attrs["eps"]
    return lambda x, w, b: torch.native_layer_norm(x, shape, w, b, eps)


def _native_layer_norm_backward(call: Call) -> Kernel:
    shape, mask = list(call.attrs["normalized_shape"]), call.attrs["output_mask"]
    operator = aten.native_layer_norm_backward.default

    def kernel(grad: Tensor, x: Tensor, *rest: Tensor | None) -> Any:
        mean, rstd, w, b = _dense(rest)
        like_b = w if b is None else b  # ATen looks at the shape of b only
        return _masked(operator(grad, x, shape, mean, rstd, w, like_b, mask), mask)

    return kernel


def _native_group_norm(call: Call) -> Kernel:
    batch, channels, *spatial = call.input(0).shape
    sizes = (batch, channels, math.prod(spatial), call.attrs["groups"])
    eps = call.attrs["eps"]
    return lambda *tensors: aten.native_group_norm.default(*_dense(tensors), *sizes, eps)


def _native_group_norm_backward(call: Call) -> Kernel:
    batch, channels, *spatial = call.input(1).shape
    sizes, mask = (batch, channels, math.prod(spatial), call.attrs["groups"]), call.attrs["output_mask"]
    operator = aten.native_group_norm_backward.default
    return lambda *tensors: _masked(operator(*_dense(tensors), *sizes, mask), mask)


def _native_batch_norm(call: Call) -> Kernel:
    """ATen moves the running statistics in place; here they are new values."""
    training, momentum, eps = (call.attrs[k] for k in ("training", "momentum", "eps"))

    def train(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor) -> Any:
        mean, var = mean.clone(), var.clone()
        return (*torch.native_batch_norm(x, w, b, mean, var, True, momentum, eps), mean, var)

    def evaluate(x: Tensor, w: Tensor | None, b: Tensor | None, mean: Tensor, var: Tensor) -> Any:
        out = torch.native_batch_norm(x, w, b, mean, var, False, momentum, eps)[0]
        return out, mean, torch.rsqrt(var + eps), mean, var

    return train if training else evaluate


def _native_batch_norm_backward(call: Call) -> Kernel:
    training, eps, mask = (call.attrs[k] for k in ("training", "eps", "output_mask"))
    operator = aten.native_batch_norm_backward.default

    def kernel(grad: Tensor, x: Tensor, w: Tensor | None, *statistics: Tensor) -> Any:
        return _masked(operator(grad, x, w, *statistics, training, eps, mask), mask)

    return kernel


# --- softmax and losses -------------------------------------------------------------------------------------------


def _softmax_backward(function: Callable[..., Tensor]) -> Prepare:
    def prepare(call: Call) -> Kernel:
        dim = call.attrs["dim"]
        return lambda grad, out: function(grad, out, dim, torch.float32)

    return prepare


_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}  # at::Reduction


def _nll_loss_forward(call: Call, checks: Checks) -> Kernel:
    """ATen has [C], [N,C] and [N,C,H,W]; other shapes are laid out as [N,C,1,L]."""
    classes = call.input(0).shape[0 if len(call.input(0).shape) == 1 else 1]
    reduction, ignore_index = _REDUCTIONS[call.attrs["reduction"]], call.attrs["ignore_index"]
    spatial = len(call.input(0).shape) > 2
    operator = aten.nll_loss2d_forward.default if spatial else aten.nll_loss_forward.default
    out = call.outputs[0].shape

    def kernel(x: Tensor, target: Tensor, weight: Tensor | None) -> Any:
        target = checks.targets(call, target, classes, ignore_index)
        if spatial:
            x, target = x.flatten(2).unsqueeze(2), target.flatten(1).unsqueeze(1)
        loss, total_weight = operator(x, target, weight, reduction, ignore_index)
        if reduction == 0:  # ATen gives a total for [C] and none for the other shapes
            total_weight = torch.zeros_like(total_weight)
        return loss.reshape(out), total_weight

    return kernel


def _nll_loss_backward(call: Call, checks: Checks) -> Kernel:
    shape = call.input(1).shape
    classes = shape[0 if len(shape) == 1 else 1]
    reduction, ignore_index = _REDUCTIONS[call.attrs["reduction"]], call.attrs["ignore_index"]
    spatial = len(shape) > 2
    operator = aten.nll_loss2d_backward.default if spatial else aten.nll_loss_backward.default

    def kernel(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, total_weight: Tensor) -> Any:
        target = checks.targets(call, target, classes, ignore_index)
        if spatial:
            x, target = x.flatten(2).unsqueeze(2), target.flatten(1).unsqueeze(1)
            grad = grad.reshape(target.shape) if reduction == 0 else grad
        return operator(grad, x, target, weight, reduction, ignore_index, total_weight).reshape(shape)

    return kernel


# --- random numbers -----------------------------------------------------------------------------------------------


def philox_uniform(seed: Tensor, step: Tensor, stream: int, count: int) -> Tensor:
    """`boinc_project.contract.philox.uniform` in 64-bit integer tensors, where products wrap as unsigned ones do.

    Seed and step stay on the device: reading them would make the host wait.
    """
    mask = philox.MASK
    block = torch.arange(-(-count // 4), dtype=torch.int64, device=seed.device)
    x0, x1, x2, x3 = block & mask, block >> 32, step & mask, torch.full_like(seed, stream)
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(philox.ROUNDS):
        product0, product1 = x0 * philox.MULTIPLIERS[0], x2 * philox.MULTIPLIERS[1]
        x0 = ((product1 >> 32) & mask) ^ x1 ^ k0
        x2 = ((product0 >> 32) & mask) ^ x3 ^ k1
        x1, x3 = product1 & mask, product0 & mask
        k0, k1 = (k0 + philox.KEY_INCREMENTS[0]) & mask, (k1 + philox.KEY_INCREMENTS[1]) & mask
    words = torch.stack((x0, x1, x2, x3), 1).reshape(-1)[:count]
    return (words >> 8).to(torch.float32) * 2.0**-24


def _random_uniform(call: Call) -> Kernel:
    stream, (out,) = call.attrs["stream"], call.outputs
    return lambda seed, step: philox_uniform(seed, step, stream, out.numel).reshape(out.shape)


def _random_bernoulli(call: Call) -> Kernel:
    p = float(np.float32(call.attrs["p"]))
    uniform = _random_uniform(call)
    return lambda seed, step: (uniform(seed, step) < p).to(torch.float32)


def _table(device: torch.device, checks: Checks) -> dict[str, Prepare]:
    """The operators; the two without inputs need to be told the device."""

    def checked(prepare: CheckedPrepare) -> Prepare:
        return lambda call: prepare(call, checks)

    def full(call: Call) -> Kernel:
        out, value = call.outputs[0], number(call.attrs["value"])
        dtype = DTYPES[out.dtype]
        return lambda: torch.full(out.shape, value, dtype=dtype, device=device)

    def arange(call: Call) -> Kernel:
        start, step, length = call.attrs["start"], call.attrs["step"], call.attrs["length"]
        dtype = DTYPES[call.outputs[0].dtype]
        work = torch.float64 if dtype == torch.float32 else torch.int64
        return lambda: (torch.arange(length, dtype=work, device=device) * step + start).to(dtype)

    return {
        "reshape": _reshape,
        "permute": _permute,
        "expand": _expand,
        "slice": _slice,
        "cat": _cat,
        "constant_pad_nd": _constant_pad_nd,
        "flip": with_attributes(torch.flip, "dims"),
        "slice_scatter": _slice_scatter,
        "cast": _cast,
        "gather": checked(_gather),
        "scatter": checked(_scatter(torch.scatter)),
        "scatter_add": checked(_scatter(torch.scatter_add)),
        "index": checked(_index),
        "index_put": checked(_index_put),
        "index_select": checked(_index_select),
        "embedding": checked(_embedding),
        "embedding_dense_backward": checked(_embedding_dense_backward),
        "topk": _topk,
        "sort": _sort,
        "full": full,
        "arange": arange,
        "neg": plain(torch.neg),
        "abs": plain(torch.abs),
        "sign": plain(torch.sign),
        "exp": plain(torch.exp),
        "expm1": plain(torch.expm1),
        "log": plain(torch.log),
        "log1p": plain(torch.log1p),
        "sqrt": plain(torch.sqrt),
        "rsqrt": plain(torch.rsqrt),
        "reciprocal": plain(torch.reciprocal),
        "sin": plain(torch.sin),
        "cos": plain(torch.cos),
        "tanh": plain(torch.tanh),
        "sigmoid": plain(torch.sigmoid),
        "erf": plain(torch.erf),
        "relu": plain(torch.relu),
        "silu": plain(torch.nn.functional.silu),
        "floor": plain(torch.floor),
        "ceil": plain(torch.ceil),
        "round": plain(torch.round),
        "trunc": plain(torch.trunc),
        "logical_not": plain(torch.logical_not),
        "isnan": plain(torch.isnan),
        "isinf": plain(torch.isinf),
        "gelu": _gelu,
        "clamp": _clamp,
        "add": plain(torch.add),
        "sub": plain(torch.sub),
        "mul": plain(torch.mul),
        "div": plain(torch.div),
        "pow": checked(_pow),
        "maximum": plain(torch.maximum),
        "minimum": plain(torch.minimum),
        "remainder": checked(_division(torch.remainder, torch.zeros_like)),
        "fmod": checked(_division(torch.fmod, torch.zeros_like)),
        "floor_divide": checked(_division(torch.floor_divide, torch.neg)),
        "eq": plain(torch.eq),
        "ne": plain(torch.ne),
        "lt": plain(torch.lt),
        "le": plain(torch.le),
        "gt": plain(torch.gt),
        "ge": plain(torch.ge),
        "logical_and": plain(torch.logical_and),
        "logical_or": plain(torch.logical_or),
        "logical_xor": plain(torch.logical_xor),
        "bitwise_and": plain(torch.bitwise_and),
        "bitwise_or": plain(torch.bitwise_or),
        "where": plain(torch.where),
        "gelu_backward": _gelu_backward,
        "threshold_backward": _threshold_backward,
        "tanh_backward": plain(aten.tanh_backward.default),
        "sigmoid_backward": plain(aten.sigmoid_backward.default),
        "silu_backward": plain(aten.silu_backward.default),
        "sum": _reduce(torch.sum),
        "mean": _reduce(torch.mean),
        "amax": _reduce(torch.amax),
        "amin": _reduce(torch.amin),
        "prod": _prod,
        "any": _reduce(torch.any),
        "all": _reduce(torch.all),
        "argmax": _argreduce(torch.argmax),
        "argmin": _argreduce(torch.argmin),
        "cumsum": with_attributes(torch.cumsum, "dim"),
        "mm": plain(torch.mm),
        "bmm": plain(torch.bmm),
        "addmm": plain(torch.addmm),
        "convolution": _convolution,
        "convolution_backward": _convolution_backward,
        "max_pool2d_with_indices": with_attributes(aten.max_pool2d_with_indices.default, *_MAX_POOL),
        "max_pool2d_with_indices_backward": checked(_max_pool2d_backward),
        "avg_pool2d": with_attributes(aten.avg_pool2d.default, *_AVG_POOL),
        "avg_pool2d_backward": with_attributes(aten.avg_pool2d_backward.default, *_AVG_POOL),
        "native_layer_norm": _native_layer_norm,
        "native_layer_norm_backward": _native_layer_norm_backward,
        "native_group_norm": _native_group_norm,
        "native_group_norm_backward": _native_group_norm_backward,
        "native_batch_norm": _native_batch_norm,
        "native_batch_norm_backward": _native_batch_norm_backward,
        "softmax": with_attributes(torch.softmax, "dim"),
        "log_softmax": with_attributes(torch.log_softmax, "dim"),
        "softmax_backward": _softmax_backward(torch._softmax_backward_data),
        "log_softmax_backward": _softmax_backward(torch._log_softmax_backward_data),
        "nll_loss_forward": checked(_nll_loss_forward),
        "nll_loss_backward": checked(_nll_loss_backward),
        "random_bernoulli": _random_bernoulli,
        "random_uniform": _random_uniform,
    }


class TorchBackend:
    """Runs on one device of PyTorch; `threads` limits the CPU side.

    deferred_checks  look at indices and divisors when a run has ended (on a card, and in tests), not node by node
    """

    name = "torch"

    def __init__(self, device: torch.device, threads: int, deferred_checks: bool | None = None) -> None:
        self.device, self.threads = device, threads
        torch.set_num_threads(threads)
        self.checks = Checks(device.type == "cuda" if deferred_checks is None else deferred_checks)
        table = _table(device, self.checks)
        self.ops: Mapping[str, Prepare] = {name: table[name] for name in OPSET}

    def program(self, graph: Graph, verify: bool = False, consume: AbstractSet[str] = frozenset()) -> Program:
        """The operators one after another; a value's memory is freed after its last use."""
        return program(graph, self, self.checks, verify)

    def describe(self) -> Mapping[str, str]:
        """Device, library versions and precision settings."""
        about = {"backend": "torch", "torch": torch.__version__, "threads": str(self.threads)}
        with translated():
            return {**about, **torch_device.describe(self.device)}

    @contextmanager
    def scope(self) -> Iterator[None]:
        """No autograd: the graph holds its own backward. What the device does to a node is no node's fault."""
        with translated(), torch.inference_mode():
            yield

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """On the CPU the array's memory is shared where PyTorch can use it as it is."""
        usable = array.flags.writeable and array.flags.c_contiguous
        with translated():
            return torch.from_numpy(array if usable else array.copy(order="C")).to(self.device)

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """Copied from a GPU; shared on the CPU."""
        with translated():
            return tensor.cpu().numpy()

    def type_of(self, tensor: Tensor) -> TensorType:
        """The dtype and shape."""
        return TensorType(_NAMES.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))

    def synchronize(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            with translated():
                torch.cuda.synchronize(self.device)


@contextmanager
def translated() -> Iterator[None]:
    """PyTorch's errors that tell of circumstances as ours, wherever they come out.

    A card computes behind the host's back, so its errors come out of whatever is asked of it next.
    """
    try:
        yield
    except Exception as error:
        found = torch_device.circumstance(error.__cause__ if isinstance(error, ExecutionError) else error)
        if found is None:
            raise
        raise found from error


def open_backend(threads: int, device: str | InitData | None) -> TorchBackend:
    """The backend on `cpu`, `cuda` or `cuda:<number>` (ROCm devices are called cuda too), or on the device that
    BOINC's client reserved for a task; None takes the best.

    Raises UnfitHost, WrongResults, TooLittleMemory, ContextLost, and DeviceNotFound for a task's device.
    """
    if isinstance(device, InitData):
        chosen = torch_device.device_of_task(device)
    else:
        chosen = torch_device.device_of_text(device)
    torch_device.start(chosen)
    return TorchBackend(chosen, threads)
