"""A job's graphs: what `boinc-train export` prints and the work generator publishes.

What it is: the three graphs of a job (gradient, inner optimizer, evaluation) with the tensors that go
into them. What it is not: tracing, translation or clean-up (tracing.py, lowering.py, draft.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from boinc_project.contract.graph import Graph
from work_generator.export.context import DTYPES
from work_generator.export.draft import Draft
from work_generator.export.errors import ExportError
from work_generator.export.lowering import Lowering
from work_generator.export.optimizer import export_optimizer
from work_generator.export.smaller import smaller_graphs
from work_generator.export.tracing import Loss, Trace, split_parameters, trace_evaluation, trace_gradient
from work_generator.job import Job
from work_generator.references import siblings_importable

Array = NDArray[np.generic]
Constants = dict[str, Array]

LEFT_OUT = "the last samples of a pass over the data that do not fill a batch are left out"


@dataclass(frozen=True, kw_only=True)
class ExportedGraph:
    """One graph and the constants that travel with it.

    `needs_full_batches`: samples of a batch are mixed (scalar loss, batch norm in training mode), so
    that a padded batch would give a different result.
    """

    graph: Graph
    constants: Mapping[str, Array]
    needs_full_batches: bool


@dataclass(frozen=True, kw_only=True)
class ExportedJob:
    """Everything that a job's microtasks are made of, in the contract's names.

    `state`: parameter/<name> and buffer/<name> of version 0; what each version is made of.
    `constants`: constant/<name>, published once: frozen parameters, buffers that training does not
    change, and tensors that the model holds or builds. A graph names only those that it needs.
    `state_dict`: name in the admin's model.state_dict() -> name in `state` or `constants` (several
    names may share one tensor, as tied weights do).
    `smaller`: graphs like `gradient` by their batch size, for parts of its batch (smaller.py); mostly none.
    `needs_full_batches`, `evaluation_needs_full_batches`: pad no batch of that graph.
    `notes`: sentences worth telling the admin, beside those of the Job.
    """

    gradient: Graph
    smaller: Mapping[int, Graph]
    optimizer: Graph | None
    evaluation: Graph
    state: Mapping[str, Array]
    constants: Mapping[str, Array]
    state_dict: Mapping[str, str]
    needs_full_batches: bool
    evaluation_needs_full_batches: bool
    notes: tuple[str, ...]


def _check_target(target: str | None, evaluation: Graph) -> None:
    """Refuse a target that no evaluation would ever tell."""
    prefix = "metric/"
    names = [each.name[len(prefix) :] for each in evaluation.outputs if each.name.startswith(prefix)]
    if target is not None and target not in names:
        known = ", ".join(name for name in names if name != "weight")
        raise ExportError(
            f'target_metric "{target}" in [train] is not among what the job tells of a version: {known}; '
            "use one of these, or return it from the metrics function"
        )


def export_job(job: Job) -> ExportedJob:
    """Trace the job's model and translate it into the opset.

    Raises ExportError (one sentence: operator, line of the model, remedy) for what cannot be written.
    """
    config = job.config
    batch = sample_batch(job.data["train"], config.data.batch_size)
    held_out = job.data.get("test", job.data["train"])
    evaluation_batch = sample_batch(held_out, config.data.evaluation_batch_size)
    with siblings_importable(job.folder):  # the admin's functions may import when they are called
        gradient = export_gradient(job.model, job.loss, batch, job.folder)
        changing = {each.name for each in gradient.graph.inputs_of_kind("buffer")}
        evaluation = export_evaluation(job.model, job.loss, job.metrics, evaluation_batch, job.folder, changing)
        _check_target(config.train.target_metric, evaluation.graph)
        trained, _ = split_parameters(job.model)
        buffers = {f"buffer/{name}": b for name, b in job.model.named_buffers()}
        tensors = {f"parameter/{name}": p for name, p in trained.items()}
        tensors.update({name: b for name, b in buffers.items() if name in changing})
        state = {name: to_array(tensor) for name, tensor in tensors.items()}
        constants = {**kept_constants(job.model, changing), **gradient.constants, **evaluation.constants}
        smaller, note = smaller_graphs(
            gradient.graph,
            {f"batch/{name}": to_array(tensor) for name, tensor in batch.items()},
            (state, constants),
            gradient.needs_full_batches,
            lambda size: (
                export_gradient(job.model, job.loss, {n: t[:size] for n, t in batch.items()}, job.folder).graph
            ),
        )
    optimizer = None
    if config.inner_optimizer is not None:
        optimizer = export_optimizer({n: tuple(p.shape) for n, p in trained.items()}, config.inner_optimizer)
    return ExportedJob(
        gradient=gradient.graph,
        smaller=smaller,
        optimizer=optimizer,
        evaluation=evaluation.graph,
        state=state,
        constants=constants,
        state_dict=state_dict_names(job.model, changing),
        needs_full_batches=gradient.needs_full_batches,
        evaluation_needs_full_batches=evaluation.needs_full_batches,
        notes=tuple(text for text in (LEFT_OUT if gradient.needs_full_batches else "", note) if text),
    )


def _check_that_it_can_learn(graph: Graph) -> None:
    """Refuse a job whose gradients are the same numbers whatever the parameters and the batch are."""
    varying = {number for number, each in enumerate(graph.inputs) if each.kind in ("parameter", "batch", "mask")}
    value = len(graph.inputs)
    for node in graph.nodes:
        depends = any(number in varying for number in node.inputs)
        for _ in node.outputs:
            if depends:
                varying.add(value)
            value += 1
    if not any(output.value in varying for output in graph.outputs if output.kind == "gradient"):
        raise ExportError("no parameter of the model influences the loss; compute the loss from what the model returns")


def export_gradient(
    model: nn.Module, loss: Loss, batch: Mapping[str, Tensor], folder: Path | None = None
) -> ExportedGraph:
    """Graph of one forward and backward pass in training mode, for batches of the sample batch's size.

    `folder` is the admin's, whose files errors and nodes name. Buffers that training does not change
    become constants.
    """
    trace = trace_gradient(model, loss, batch, folder)
    unchanged = _unchanged_buffers(trace)
    made = _translated(trace, unchanged, "gradient", random=True)
    _check_that_it_can_learn(made.graph)
    return made


def export_evaluation(
    model: nn.Module,
    loss: Loss,
    metrics: Loss | None,
    batch: Mapping[str, Tensor],
    folder: Path | None = None,
    changing: set[str] | None = None,
) -> ExportedGraph:
    """Graph of loss and metrics in evaluation mode, as sums over the real samples of a batch.

    `changing`: names (buffer/<name>) of the buffers that are part of a version; the others are
    constants. All of them count as part of a version where it is not given.
    """
    trace = trace_evaluation(model, loss, metrics, batch, folder)
    buffers = {name for name, _ in trace.inputs if name.startswith("buffer/")}
    return _translated(trace, buffers - (buffers if changing is None else changing), "evaluation", random=False)


def sample_batch(fields: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """The first `size` samples, from the beginning again where there are fewer."""
    return {name: t[torch.arange(size) % t.shape[0]] for name, t in fields.items()}


def kept_constants(model: nn.Module, changing: set[str]) -> Constants:
    """Frozen parameters and buffers outside `changing`, under their constant/<name>."""
    _, frozen = split_parameters(model)
    still = {n: b for n, b in model.named_buffers() if f"buffer/{n}" not in changing}
    return {f"constant/{name}": to_array(t) for name, t in {**frozen, **still}.items()}


def state_dict_names(model: nn.Module, changing: set[str]) -> dict[str, str]:
    """Name in model.state_dict() -> name in the job's state or constants; tied names share one."""
    trained, _ = split_parameters(model)
    homes: dict[int, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        kind = "parameter" if name in trained else "constant"
        kind = "buffer" if name not in trained and f"buffer/{name}" in changing else kind
        homes[id(tensor)] = f"{kind}/{name}"
    everything = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    by_name = {name: homes[id(tensor)] for name, tensor in everything}
    return {name: by_name[name] for name in model.state_dict() if name in by_name}


def to_array(tensor: Tensor) -> Array:
    """A contiguous numpy copy."""
    return np.array(tensor.detach().cpu().contiguous().numpy(), copy=True, order="C")


def _unchanged_buffers(trace: Trace) -> set[str]:
    """Buffers that come out as they went in: the trace returns the clone of the input and nothing else did.

    A batch norm changes its clone in place, which the trace does not show as an output of its own; its
    running statistics are therefore looked for by name of the operator.
    """
    placeholders = [n for n in trace.module.graph.nodes if n.op == "placeholder"]
    names = dict(zip(placeholders, (name for name, _ in trace.inputs), strict=False))
    changed_in_place = {
        argument
        for node in trace.module.graph.nodes
        if str(node.target) == "aten.native_batch_norm.default" and node.args[5]
        for argument in node.args[3:5]
    }
    results = next(n for n in trace.module.graph.nodes if n.op == "output").args[0]
    unchanged = set()
    for name, result in zip(trace.outputs, results, strict=True):
        source = result
        while getattr(source, "target", None) is torch.ops.aten.clone.default and source not in changed_in_place:
            source = source.args[0]
        if name.startswith("buffer/") and names.get(source) == name:
            unchanged.add(name)
    return unchanged


def _translated(trace: Trace, constant_buffers: set[str], what: str, *, random: bool) -> ExportedGraph:
    draft = Draft()
    inputs = []
    for name, tensor in trace.inputs:
        if tensor.dtype not in DTYPES:
            raise ExportError(f"{name} is {tensor.dtype}; the opset has float32, int64, int32, uint8 and bool")
        kind, _, rest = name.partition("/")
        if name in constant_buffers:
            kind, name = "constant", f"constant/{rest}"
        inputs.append(draft.input(name, kind, DTYPES[tensor.dtype], tuple(tensor.shape)))
    drawn = (draft.input("seed", "seed", "int64", ()), draft.input("step", "step", "int64", ())) if random else None
    lowering = Lowering(draft, drawn)
    results = lowering.walk(trace.module, inputs)
    for name, value in zip(trace.outputs, results, strict=True):
        if name not in constant_buffers:
            draft.output(name, name.partition("/")[0], value)
    draft.drop_unused_inputs("constant")
    return ExportedGraph(
        graph=draft.build(),
        constants={name: to_array(tensor) for name, tensor in lowering.constants.items()},
        needs_full_batches=trace.mixes_samples or lowering.mixes_samples,
    )
