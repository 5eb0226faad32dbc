"""Graphs of smaller batches: the same step on a part of the batch, for a device on which the whole does not fit.

The loss of a batch is a sum over its samples, so gradients and metrics of its parts add up to those of the whole
(in float32 within rounding). That holds only where a step does nothing else with its batch: no random numbers (each
part would draw those of the first one) and no buffers (each part would change them).
"""

from __future__ import annotations

from boinc_project.contract.errors import ContractError
from boinc_project.contract.graph import Graph, GraphInput

SLICED_KINDS = frozenset({"batch", "mask"})  # inputs whose first dimension is the batch
RANDOM_OPERATORS = frozenset({"random_bernoulli", "random_uniform"})


def whole_batches_only(graph: Graph) -> str:
    """Why no batch of this graph may be computed in parts, as the end of a sentence; empty if it may."""
    random = sorted(graph.operators() & RANDOM_OPERATORS)
    if random:
        return f"a step draws random numbers ({random[0]}) for its whole batch"
    if graph.outputs_of_kind("buffer"):
        return "a step changes buffers of the model"
    return ""


def check_smaller(graph: Graph, batch_size: int, smaller: Graph, size: int) -> None:
    """Raise ContractError unless `smaller` looks like `graph` but for batches of `size` instead of `batch_size`.

    That it computes the same is for whoever makes the graph to see to.
    """
    for each in (graph, smaller):
        reason = whole_batches_only(each)
        if reason:
            raise ContractError(f"the graph for batches of {size} cannot be used: {reason}", fault="batch")
    expected = tuple(_sliced(each, batch_size, size) for each in graph.inputs)
    if smaller.inputs != expected:
        raise ContractError(
            f"the graph for batches of {size} has other inputs than that of {batch_size}", fault="batch"
        )
    kinds = [[(output.name, output.kind) for output in each.outputs] for each in (graph, smaller)]
    if kinds[0] != kinds[1] or graph.output_types() != smaller.output_types():
        raise ContractError(
            f"the graph for batches of {size} has other outputs than that of {batch_size}", fault="batch"
        )


def _sliced(each: GraphInput, batch_size: int, size: int) -> GraphInput:
    if each.kind not in SLICED_KINDS or each.shape[:1] != (batch_size,):
        return each
    return GraphInput(each.name, each.kind, each.dtype, (size, *each.shape[1:]))
