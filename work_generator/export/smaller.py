"""Graphs of a half and a quarter of a job's batch, for devices with little memory (boinc_project/contract/smaller.py).

    smaller_graphs  -> which sizes, traced -> looked at from outside -> compared by numbers with the whole batch

What it is: a decision with reasons, and a proof by example: the application computes the sample batch whole and in
parts, and the sums must agree. What it is not: tracing (program.py passes that in).
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project import local_run
from boinc_project.contract import tensorfile
from boinc_project.contract.codecs import Codec
from boinc_project.contract.errors import ContractError
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import (
    CONSTANTS_FILE,
    GRAPH_FILE,
    STATE_FILE,
    Batch,
    FileRef,
    Microtask,
    shard_file,
)
from boinc_project.contract.smaller import check_smaller, whole_batches_only
from boinc_project.contract.update import squared_norm, update_types
from work_generator.export.errors import ExportError

Array = npt.NDArray[Any]

LEAST_PEAK_BYTES = 100_000_000  # a job whose step needs no more fits on every device that is worth its work
DIVISORS = (2, 4)
LARGEST_RATIO = 0.8  # of a smaller graph's peak memory to that of the next larger: else it helps nobody
TOLERANCE = 1e-5  # relative L2 distance of each sum; sums in another order differ by less than 1e-6, copies may by 1e-4


def smaller_graphs(
    graph: Graph,
    batch: Mapping[str, Array],
    tensors: tuple[Mapping[str, Array], Mapping[str, Array]],
    mixes_samples: bool,
    traced: Callable[[int], Graph],
) -> tuple[dict[int, Graph], str]:
    """(graphs by batch size, a sentence on what is not offered or "").

    batch          batch/<field> -> the sample batch that `graph` was traced with
    tensors        state and constants
    mixes_samples  the graph needs full batches
    traced         traces the graph for the batch's first samples; may raise ExportError
    """
    size = len(next(iter(batch.values())))
    peak = graph.peak_bytes()
    if peak <= LEAST_PEAK_BYTES:
        return {}, ""
    reason = "its samples are mixed" if mixes_samples else whole_batches_only(graph)
    sizes = [size // divisor for divisor in DIVISORS if size % divisor == 0]
    if not reason and not sizes:
        reason = f"batch_size {size} is odd"
    found: dict[int, Graph] = {}
    if not reason:
        reason = _add_graphs(found, sizes, graph, batch, tensors, traced)
    if not reason:
        return found, ""
    offered = f"no batch smaller than {min(found)}" if found else "no smaller batch"
    return found, f"a step needs {peak / 1e6:.0f} MB, and {offered} is offered to devices with less: {reason}"


def _add_graphs(
    found: dict[int, Graph],
    sizes: list[int],
    graph: Graph,
    batch: Mapping[str, Array],
    tensors: tuple[Mapping[str, Array], Mapping[str, Array]],
    traced: Callable[[int], Graph],
) -> str:
    """Add those that are right and useful; returns why one was not added, or "" (of no use is no reason)."""
    whole, size, peak = None, len(next(iter(batch.values()))), graph.peak_bytes()
    for part in sizes:
        try:
            smaller = traced(part)
            check_smaller(graph, size, smaller, part)
        except (ExportError, ContractError) as error:
            return str(error)
        if smaller.peak_bytes() > LARGEST_RATIO * peak:
            return ""
        try:
            whole = whole or _sums(graph, size, batch, tensors)
            parts = _sums(smaller, part, batch, tensors)
        except local_run.LocalRunFailed as error:
            return f"the comparison failed ({error})"
        name, distance = _farthest(whole, parts)
        if not distance <= TOLERANCE:
            return f"the sum of {name} over parts of {part} samples differs by {distance:.1g} of its norm"
        found[part], peak = smaller, smaller.peak_bytes()
    return ""


def _sums(
    graph: Graph, size: int, batch: Mapping[str, Array], tensors: tuple[Mapping[str, Array], Mapping[str, Array]]
) -> dict[str, Array]:
    """Gradients and metrics of the sample batch, summed over batches of `size` by the application (numpy backend)."""
    state, constants = tensors
    files = {
        GRAPH_FILE: graph.to_bytes(),
        STATE_FILE: tensorfile.to_bytes(state),
        shard_file(0): tensorfile.to_bytes(batch),
        **({CONSTANTS_FILE: tensorfile.to_bytes(constants)} if constants else {}),
    }
    samples = len(next(iter(batch.values())))
    batches = tuple(Batch((0,) * size, tuple(range(start, start + size))) for start in range(0, samples, size))
    microtask = Microtask(
        job="comparison",
        mode="gradient",
        base_version=0,
        slot=0,
        files={name: FileRef(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()},
        batch_size=size,
        batches=batches,
        learning_rates=(0.0,) * len(batches),
        seed=0,
        first_step=0,
        codec=Codec("dense", 256, "none"),
    )
    with tempfile.TemporaryDirectory(prefix="boinc-train-parts-") as folder:
        paths = {name: Path(folder) / f"given_{name}" for name in files}
        for name, data in files.items():
            paths[name].write_bytes(data)
        arguments = ("--backend", "numpy", "--nthreads", str(os.cpu_count() or 1))
        run = local_run.start(Path(folder) / "slot", microtask, paths, arguments)
        try:
            update = run.update(update_types(graph, microtask.mode, microtask.steps))
        finally:
            run.stop()
    return {name: array.sum(0) if name.startswith("metric/") else array for name, array in update.tensors.items()}


def _farthest(whole: Mapping[str, Array], parts: Mapping[str, Array]) -> tuple[str, float]:
    """The name and relative L2 difference of the sum that differs most.

    To a gradient's own norm is added its share of the norm of all: the gradient of a parameter without influence
    (the key bias of attention) is rounding noise.
    """
    gradients = [array for name, array in whole.items() if name.startswith("gradient/")]
    elements = sum(array.size for array in gradients)
    norm = math.sqrt(sum(squared_norm(array) for array in gradients))
    worst = ("", 0.0)
    for name, array in whole.items():
        scale = math.sqrt(squared_norm(array))
        if name.startswith("gradient/"):
            scale += norm * math.sqrt(array.size / elements)
        difference = math.sqrt(squared_norm(np.asarray(array - parts[name])))
        if difference > worst[1] * scale:
            worst = (name, difference / scale if scale else math.inf)
    return worst
