"""What a microtask costs: operations, memory and disk, computed from its graphs alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import TensorType


def tensor_bytes(types: Iterable[TensorType]) -> int:
    """Bytes of all these tensors together."""
    return sum(kind.nbytes for kind in types)


def memory_bytes(gradient: Graph, optimizer: Graph | None, update: Mapping[str, TensorType], data_bytes: int) -> int:
    """Upper estimate of the memory that the application needs for a microtask, in bytes, program not included.

    Values of the larger graph at their peak, the inputs that stay beside it twice (as read and as given to
    the backend), the shards, and the update three times (tensors, encoded, file).
    """
    peak = max(graph.peak_bytes() for graph in (gradient, optimizer) if graph is not None)
    held = [gradient] if optimizer is None else [gradient, optimizer]
    inputs = sum(tensor_bytes(each.type for each in graph.inputs) for graph in held)
    return peak + inputs + data_bytes + 3 * tensor_bytes(update.values())


def step_flops(gradient: Graph, optimizer: Graph | None) -> int:
    """Floating-point operations of one step."""
    return gradient.flops() + (optimizer.flops() if optimizer is not None else 0)
