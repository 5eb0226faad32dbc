"""From the admin's model to one flat list of ATen operators with static shapes.

What it is: the only place that runs torch's tracer. make_fx around functionalize around
grad_and_value writes down every ATen operator of one forward (and backward) pass on a sample batch.
What it is not: the opset; lowering.py translates what comes out of here.
Each node carries `meta["where"]`: the line and module of the model it came from.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from boinc_project.job_config import one_line
from work_generator.export.errors import ExportError
from work_generator.references import is_inside

aten = torch.ops.aten

# The opset has these whole; decomposing them costs 1.4-1.9 times the running time of a small GPT.
KEPT_WHOLE = (
    aten.native_layer_norm,
    aten.native_layer_norm_backward,
    aten.native_group_norm,
    aten.native_group_norm_backward,
    aten.native_batch_norm,
    aten.native_batch_norm_backward,
    aten.gelu_backward,
    aten.silu,
    aten.silu_backward,
    aten._softmax_backward_data,
    aten._log_softmax_backward_data,
    aten.embedding_dense_backward,
    aten.nll_loss_forward,
    aten.nll_loss_backward,
    aten.nll_loss2d_forward,
    aten.nll_loss2d_backward,
    aten.threshold_backward,
    aten.tanh_backward,
    aten.sigmoid_backward,
    aten.avg_pool2d_backward,
    aten.max_pool2d_with_indices_backward,
    aten._adaptive_avg_pool2d,
    aten._adaptive_avg_pool2d_backward,
    aten.upsample_nearest2d,
)
OWN_FILES = str(Path(__file__).resolve().parent.parent)
TORCH_FILES = str(Path(torch.__file__).resolve().parent)
DATA_DEPENDENT_SIGNS = ("_local_scalar_dense", "data-dependent", "DataDependent", "aten.item")

Loss = Callable[[nn.Module, Mapping[str, Tensor]], Any]


@dataclass(frozen=True)
class Trace:
    """A traced pass: `module.graph` holds the operators; its placeholders and outputs are named in order.

    Names are those of the contract: parameter/<name>, buffer/<name>, constant/<name>, batch/<field>, mask.
    """

    module: fx.GraphModule
    inputs: tuple[tuple[str, Tensor], ...]
    outputs: tuple[str, ...]
    mixes_samples: bool  # the loss or a metric is a mean over the batch: only full batches are right


class _Program(nn.Module):
    """The model and the admin's function of it as one module, so that tensors can be swapped in by name."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self, batch: Mapping[str, Tensor]) -> Any:
        return self.function(self.model, batch)


def split_parameters(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(trained, frozen) parameters by torch name; a tensor shared by several modules appears once."""
    named = dict(model.named_parameters())
    trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
    return trained, {name: p.detach() for name, p in named.items() if not p.requires_grad}


def trace_gradient(model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], folder: Path | None) -> Trace:
    """Trace forward and backward in training mode.

    Outputs: gradient/<name> of the sum of per-sample losses over real samples, buffer/<name> after the
    step, metric/loss (that sum) and metric/weight (number of real samples).
    """
    trained, frozen = split_parameters(model)
    buffers = {name: b.detach() for name, b in model.named_buffers()}
    program = _Program(model, loss)
    size = _batch_size(batch)
    scalar = False

    def step(
        trained: dict[str, Tensor],
        frozen: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: dict[str, Tensor],
        mask: Tensor,
    ) -> list[Tensor]:
        def total(trained: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            nonlocal scalar
            # Cloned, because a module may update its buffers in place; what the clone ends as is returned.
            state = {name: b.clone() for name, b in buffers.items()}
            result = _run(program, {**trained, **frozen, **state}, batch, folder)
            scalar = _check_loss(result, size)
            value = result * size if scalar else (result.float() * mask).sum()
            return value, state

        gradients, (value, state) = torch.func.grad_and_value(total, has_aux=True)(trained)
        return [*gradients.values(), *state.values(), value, mask.sum()]

    model.train()
    module = _traced(step, (trained, frozen, buffers, dict(batch), torch.ones(size)), program, folder)
    outputs = (*_named("gradient", trained), *_named("buffer", buffers), "metric/loss", "metric/weight")
    return Trace(module, _inputs(trained, frozen, buffers, batch, size), outputs, scalar)


def trace_evaluation(
    model: nn.Module, loss: Loss, metrics: Loss | None, batch: Mapping[str, Tensor], folder: Path | None
) -> Trace:
    """Trace loss and metrics in evaluation mode. Outputs: metric/loss, metric/weight, metric/<name> (sums)."""
    trained, frozen = split_parameters(model)
    buffers = {name: b.detach() for name, b in model.named_buffers()}
    programs = [_Program(model, loss)] + ([_Program(model, metrics)] if metrics is not None else [])
    size = _batch_size(batch)
    names: list[str] = []
    scalar = False

    def step(
        trained: dict[str, Tensor],
        frozen: dict[str, Tensor],
        buffers: dict[str, Tensor],
        batch: dict[str, Tensor],
        mask: Tensor,
    ) -> list[Tensor]:
        nonlocal scalar
        state = {name: b.clone() for name, b in buffers.items()}
        tensors = {**trained, **frozen, **state}
        names.clear()
        with torch.no_grad():
            result = _run(programs[0], tensors, batch, folder)
            scalar = _check_loss(result, size)
            sums = [result * size if scalar else (result.float() * mask).sum(), mask.sum()]
            if metrics is not None:
                found = _run(programs[1], tensors, batch, folder)
                for name, value in _check_metrics(found, size).items():
                    names.append(name)
                    sums.append((value.to(torch.float32) * mask).sum())
        return sums

    model.eval()
    module = _traced(step, (trained, frozen, buffers, dict(batch), torch.ones(size)), programs[0], folder)
    outputs = ("metric/loss", "metric/weight", *(f"metric/{name}" for name in names))
    return Trace(module, _inputs(trained, frozen, buffers, batch, size), outputs, scalar)


def _named(kind: str, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    return tuple(f"{kind}/{name}" for name in tensors)


def _inputs(
    trained: Mapping[str, Tensor],
    frozen: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batch: Mapping[str, Tensor],
    size: int,
) -> tuple[tuple[str, Tensor], ...]:
    groups = (("parameter", trained), ("constant", frozen), ("buffer", buffers), ("batch", batch))
    named = [(f"{kind}/{name}", t) for kind, tensors in groups for name, t in tensors.items()]
    return (*named, ("mask", torch.ones(size)))


def _batch_size(batch: Mapping[str, Tensor]) -> int:
    return int(next(iter(batch.values())).shape[0])


def _run(program: _Program, tensors: Mapping[str, Tensor], batch: Mapping[str, Tensor], folder: Path | None) -> Any:
    """The program on these tensors, every operator marked with the line and module that called it."""
    swapped = {f"model.{name}": tensor for name, tensor in tensors.items()}
    with _module_names(program.model) as path, _Places(folder, path):
        return torch.func.functional_call(program, swapped, (dict(batch),), tie_weights=True)


def _check_loss(result: Any, size: int) -> bool:
    """Whether the loss is a scalar mean; raises ExportError if it is neither that nor one number a sample."""
    if not isinstance(result, Tensor):
        raise ExportError(
            f"the loss function returned {type(result).__name__}; return a tensor with one loss per sample, "
            f"shape [{size}]"
        )
    if not result.is_floating_point():
        raise ExportError(f"the loss is {_dtype(result)}; return float32")
    if result.dim() and result.shape != (size,):
        raise ExportError(
            f"the loss has shape {list(result.shape)} for a batch of {size}; return one loss per sample, "
            f"shape [{size}], for example by .flatten(1).mean(1)"
        )
    return result.dim() == 0


def _check_metrics(found: Any, size: int) -> dict[str, Tensor]:
    if not isinstance(found, Mapping):
        raise ExportError(
            f"the metrics function returned {type(found).__name__}; return a dict of name -> one value per sample, "
            f"shape [{size}]"
        )
    for name, value in found.items():
        if not isinstance(name, str) or not name.isidentifier() or name in ("loss", "weight"):
            raise ExportError(
                f'metric {name!r} cannot be used as a name; use letters, digits and _, not "loss" or "weight"'
            )
        if not isinstance(value, Tensor) or value.shape != (size,):
            shape = f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
            raise ExportError(f'metric "{name}" has {shape}; return one value per sample, shape [{size}]')
    return dict(found)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# --- the tracer ---


def _traced(
    step: Callable[..., list[Tensor]], arguments: tuple[Any, ...], program: _Program, folder: Path | None
) -> fx.GraphModule:
    """Run make_fx; what the model's code raises becomes an ExportError that names the line."""
    chooser = getattr(program.model, "set_attn_implementation", None)
    attempts: list[Callable[[], fx.GraphModule]] = [
        lambda: _make_fx(step, arguments),
        # Hugging Face models look at their masks unless they know that they are being exported.
        lambda: _exporting(step, arguments),
    ]
    if callable(chooser):
        # Some look at values only in their fused attention; the plain one traces.
        attempts.append(lambda: (chooser("eager"), _exporting(step, arguments))[1])
    for attempt in attempts:
        try:
            return attempt()
        except ExportError:
            raise
        except Exception as error:
            if not _is_data_dependent(error) or attempt is attempts[-1]:
                raise _explained(error, folder) from error
    raise AssertionError("the last attempt returns or raises")


def _exporting(step: Callable[..., list[Tensor]], arguments: tuple[Any, ...]) -> fx.GraphModule:
    """Trace while torch.compiler says that a model is being exported."""
    saved = torch.compiler.is_compiling, torch.compiler.is_exporting
    torch.compiler.is_compiling = torch.compiler.is_exporting = lambda: True
    try:
        return _make_fx(step, arguments)
    finally:
        torch.compiler.is_compiling, torch.compiler.is_exporting = saved


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """How ATen's other operators fall apart into those that the tables have."""
    table = dict(core_aten_decompositions())
    for packet in KEPT_WHOLE:
        for overload in packet.overloads():  # type: ignore[no-untyped-call]
            table.pop(getattr(packet, overload), None)
    return table


def _make_fx(step: Callable[..., list[Tensor]], arguments: tuple[Any, ...]) -> fx.GraphModule:
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # of torch about its own internals; the admin cannot act on them
        stack.enter_context(torch.random.fork_rng(devices=[]))
        # Without these two, backend-specific fused operators (attention, LSTM) appear in the graph.
        stack.enter_context(torch.backends.mkldnn.flags(enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.enter_context(_one_hot_without_looking())
        functional = torch.func.functionalize(step)
        return make_fx(functional, decomposition_table=_decompositions(), tracing_mode="real")(*arguments)


@contextmanager
def _one_hot_without_looking() -> Iterator[None]:
    """Replace F.one_hot, which looks at its values to check them, by a comparison while tracing."""
    original = F.one_hot

    def one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes < 1:
            return original(tensor, num_classes)
        return (tensor.unsqueeze(-1) == torch.arange(num_classes)).to(torch.int64)

    F.one_hot = one_hot
    try:
        yield
    finally:
        F.one_hot = original


def _is_data_dependent(error: BaseException) -> bool:
    return any(sign in f"{type(error).__name__} {error}" for sign in DATA_DEPENDENT_SIGNS)


def _explained(error: Exception, folder: Path | None) -> ExportError:
    """One sentence: what stopped the tracer, at which line, what to do."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    place = describe_place(frames, folder) or "a line outside the model"
    if _is_data_dependent(error):
        return ExportError(
            f"the model looks at the value of a tensor while it runs (aten._local_scalar_dense) at {place}; "
            "a graph is the same for all data: use torch.where instead of if, avoid .item(), and pass attention mask "
            "and position ids explicitly from the loss function"
        )
    if "autograd.Function" in str(error) or "setup_context" in str(error):
        return ExportError(
            f"the model uses a custom torch.autograd.Function at {place}; write it with ordinary torch operations"
        )
    return ExportError(f"the model or its loss failed at {place}: {one_line(error)}; correct that line")


def describe_place(frames: list[tuple[str, int]], folder: Path | None) -> str:
    """`modeling_bert.py:120, called from digits.py:12`, from frames outermost first; "" if all are torch's."""
    outside = [f for f in frames if not f[0].startswith((OWN_FILES, TORCH_FILES, "<"))]
    admins = [f for f in outside if folder is not None and is_inside(folder, f[0])]
    if not outside:
        return ""
    if not admins and folder is not None:
        return ""
    nearest = outside[-1]
    text = f"{short_file(nearest[0])}:{nearest[1]}"
    if admins and admins[-1] != nearest:
        text += f", called from {short_file(admins[-1][0])}:{admins[-1][1]}"
    return text


def short_file(filename: str) -> str:
    """A file name without this machine's folders: after site-packages, else the last part."""
    parts = Path(filename).parts
    if "site-packages" in parts:
        return "/".join(parts[len(parts) - parts[::-1].index("site-packages") :])
    return parts[-1]


class _Places(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Marks the nodes made while an operator is dispatched with the model's line and module.

    It sits above the tracer's own mode, so that one call here covers the operators it decomposes into.
    """

    def __init__(self, folder: Path | None, path: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.folder = folder
        self.path = path

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        mode = get_proxy_mode()
        if mode is None:
            return func(*args, **(kwargs or {}))
        graph = mode.tracer.graph
        last = next(iter(reversed(graph.nodes)), None)
        result = func(*args, **(kwargs or {}))
        where = None
        for node in reversed(graph.nodes):
            if node is last:
                break
            where = where or self._where(sys._getframe(1))
            node.meta.setdefault("where", where)
        return result

    def _where(self, frame: FrameType | None) -> str:
        while frame is not None:
            filename = frame.f_code.co_filename
            if not filename.startswith((OWN_FILES, TORCH_FILES, "<")):
                place = f"{short_file(filename)}:{frame.f_lineno}"
                return f"{place} {self.path[-1]}".strip()
            frame = frame.f_back
        return self.path[-1]


@contextmanager
def _module_names(model: nn.Module) -> Iterator[list[str]]:
    """The name of the module that is running, kept by hooks: the last entry of the list."""
    path = [""]
    handles = []
    for name, module in model.named_modules():

        def enter(module: nn.Module, arguments: Any, name: str = name) -> None:
            path.append(name)

        def leave(module: nn.Module, arguments: Any, result: Any) -> None:
            path.pop()

        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        yield path
    finally:
        for handle in handles:
            handle.remove()
