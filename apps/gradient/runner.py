"""Runs one microtask: read and check its files, take its steps, write the update.

Bird's eye view, in call order: `load` -> `Run.restore` -> `Run.step` (once per batch) -> `Run.update`.
What it is not: it knows nothing about BOINC (__main__.py does) and nothing about how an operator computes
(backends/).

A volunteer's computer trusts nobody here: over plain HTTP a forged reply can name any files, so sizes,
digests, shapes, and memory are checked before anything is allocated.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import numpy as np
import numpy.typing as npt

from apps.gradient.backends.backend import Backend, Program
from apps.gradient.checkpoint import Checkpoint
from boinc_project.contract import tensorfile
from boinc_project.contract.downlink import apply_delta
from boinc_project.contract.errors import ContractError, TooLittleMemory
from boinc_project.contract.estimates import memory_bytes
from boinc_project.contract.graph import Graph, GraphBuilder
from boinc_project.contract.microtask import (
    CONSTANTS_FILE,
    GRAPH_FILE,
    MAX_MICROTASK_BYTES,
    MICROTASK_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Batch,
    Microtask,
    delta_file,
    shard_file,
    smaller_graph_file,
)
from boinc_project.contract.opset import TensorType
from boinc_project.contract.smaller import check_smaller
from boinc_project.contract.update import update_types

Array = npt.NDArray[Any]


class NotFinite(ContractError):
    """The loss became NaN or infinite; no update is written."""


@dataclass(frozen=True)
class Form:
    """The gradient graph for batches of `batch_size` samples: the microtask's own, or one for equal parts of them."""

    batch_size: int
    graph: Graph


@dataclass
class Loaded:
    """A microtask with all its files read and checked.

    `forms`: the ways to compute a batch that the memory limit allows, the whole batch (or the largest part) first.
    """

    microtask: Microtask
    digest: str
    gradient: Graph
    optimizer: Graph | None
    state: Mapping[str, Array]
    constants: Mapping[str, Array]
    shards: list[Mapping[str, Array]]
    types: Mapping[str, TensorType]
    forms: tuple[Form, ...]

    @property
    def operators(self) -> frozenset[str]:
        """Every operator that running this takes; gradients of several batches are added up."""
        graphs = [each.graph for each in self.forms] + ([] if self.optimizer is None else [self.optimizer])
        return frozenset({"add"}.union(*(graph.operators() for graph in graphs)))

    def memory_estimate(self, form: Form) -> int:
        """Bytes that running this takes at worst."""
        data = sum(array.nbytes for shard in self.shards for array in shard.values())
        return memory_bytes(form.graph, self.optimizer, self.types, data)


def load(
    resolve: Callable[[str], Path],
    memory_limit: float | None = None,
    read_graph: Callable[[bytes], Graph] = Graph.from_bytes,
) -> Loaded:
    """Read a microtask and its files.

    `memory_limit` is in bytes; `read_graph` reads a graph's file (who loads the same one often may remember it).
    Raises ContractError (a file is not what the microtask names, or breaks the contract) or TooLittleMemory (it needs
    more memory than the limit, even on the smallest parts of a batch).
    """
    text = _bounded_read(resolve(MICROTASK_FILE), MICROTASK_FILE, MAX_MICROTASK_BYTES)
    microtask = Microtask.from_json(text)
    total = sum(ref.size for ref in microtask.files.values())
    if memory_limit and total > memory_limit:
        raise TooLittleMemory(f"the input files have {total} bytes; this task may use {memory_limit:.0f}")

    def contents(name: str) -> bytes:
        ref = microtask.files[name]
        data = _bounded_read(resolve(name), name, ref.size)
        if len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            raise ContractError(f"input file {name} is not the one that the microtask names", fault="digest")
        return data

    gradient = read_graph(contents(GRAPH_FILE))
    forms = [Form(microtask.batch_size, gradient)]
    for size in microtask.smaller_batches:
        forms.append(Form(size, read_graph(contents(smaller_graph_file(size)))))
        check_smaller(gradient, microtask.batch_size, forms[-1].graph, size)
    optimizer = read_graph(contents(OPTIMIZER_FILE)) if microtask.mode == "local-steps" else None
    least = min(form.graph.peak_bytes() for form in forms)
    if memory_limit and least > memory_limit:
        raise TooLittleMemory(f"a step needs {least} bytes; this task may use {memory_limit:.0f}")
    state_types = {i.name: i.type for i in gradient.inputs_of_kind("parameter", "buffer")}
    shipped = optimizer if microtask.ships_state else None
    if shipped is not None:
        state_types.update({i.name: i.type for i in shipped.inputs_of_kind("optimizer")})
    state = _take(contents(STATE_FILE), state_types, STATE_FILE)
    for number in range(microtask.delta_count):
        name = delta_file(number)
        state = apply_delta(state, tensorfile.from_bytes(contents(name), None, name).tensors, name)
    constant_types = {i.name: i.type for i in gradient.inputs_of_kind("constant")}
    constants: Mapping[str, Array] = {}
    if constant_types:
        if CONSTANTS_FILE not in microtask.files:
            raise ContractError(f"the graph needs constants, but {CONSTANTS_FILE} is missing", fault="missing_file")
        constants = _take(contents(CONSTANTS_FILE), constant_types, CONSTANTS_FILE)
    shards = [_shard(contents(shard_file(k)), k, gradient, microtask) for k in range(microtask.shard_count)]
    for batch in microtask.batches:
        for shard, row in zip(batch.shards, batch.rows):
            rows = next(iter(shards[shard].values())).shape[0]
            if row >= rows:
                raise ContractError(f"a batch names row {row} of shard {shard}, which has {rows}", fault="batch")
    types = update_types(gradient, microtask.mode, microtask.steps, shipped)
    digest = microtask.digest()
    loaded = Loaded(microtask, digest, gradient, optimizer, state, constants, shards, types, tuple(forms))
    if memory_limit:
        needs = [loaded.memory_estimate(form) for form in forms]
        loaded.forms = tuple(form for form, need in zip(forms, needs) if need <= memory_limit)
        if not loaded.forms:
            least = min(needs)
            raise TooLittleMemory(f"this task needs {least} bytes of memory; it may use {memory_limit:.0f}")
    return loaded


def _take(data: bytes, types: Mapping[str, TensorType], name: str) -> dict[str, Array]:
    """The tensors of a file that a graph wants; the file may hold more (an evaluation needs less state)."""
    tensors = tensorfile.from_bytes(data, None, name).tensors
    for wanted, kind in types.items():
        array = tensors.get(wanted)
        if array is None:
            raise ContractError(f"{name} lacks {wanted!r}", fault="missing_tensor")
        if array.dtype.name != kind.dtype or array.shape != kind.shape:
            raise ContractError(f"{name}: {wanted!r} is {array.dtype} {array.shape}, not {kind}", fault="shape")
    return {wanted: tensors[wanted] for wanted in types}


def _bounded_read(path: Path, name: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise ContractError(f"input file {name} cannot be read: {error.strerror}", fault="missing_file") from error
    if len(data) > limit:
        raise ContractError(f"input file {name} has more than {limit} bytes", fault="too_large")
    return data


def _shard(data: bytes, number: int, graph: Graph, microtask: Microtask) -> Mapping[str, Array]:
    """One data shard: for each batch input of the graph a tensor of the same name, rows first."""
    tensors = tensorfile.from_bytes(data, None, shard_file(number)).tensors
    rows = None
    for each in graph.inputs_of_kind("batch"):
        array = tensors.get(each.name)
        if array is None:
            raise ContractError(f"shard {number} lacks {each.name!r}", fault="missing_tensor")
        if array.ndim == 0 or array.dtype.name != each.dtype or array.shape[1:] != each.shape[1:]:
            raise ContractError(
                f"shard {number}: {each.name!r} is {array.dtype} {array.shape}, the graph wants rows of"
                f" {each.dtype} {each.shape[1:]}",
                fault="shape",
            )
        if each.shape[0] != microtask.batch_size:
            raise ContractError(
                f"the graph takes {each.shape[0]} samples, the microtask has batches of {microtask.batch_size}",
                fault="batch",
            )
        if rows is not None and array.shape[0] != rows:
            raise ContractError(f"shard {number}: its tensors differ in their number of rows", fault="shape")
        rows = array.shape[0]
    return tensors


@dataclass
class Timings:
    """Seconds of wall time, for the update's metadata."""

    load: float = 0.0
    compile: float = 0.0
    compute: float = 0.0
    encode: float = 0.0


class Run:
    """The state of a microtask between steps.

    `values` holds the backend's tensors by input name: parameter/*, buffer/*, optimizer/*. In gradient
    mode `sums` accumulates gradient/*. `metrics` has one float per step and metric. `form` says how batches
    are computed: whole, or in parts whose gradients and metrics are summed.

    Every method may raise TooLittleMemory or MemoryError, and DeviceLost: then the run is over, and only a
    checkpoint tells where a new one may begin.
    """

    def __init__(
        self, loaded: Loaded, backend: Backend, timings: Timings | None = None, form: Form | None = None
    ) -> None:
        self.loaded = loaded
        self.backend = backend
        self.timings = timings or Timings()
        self.form = form or loaded.forms[0]
        self.step_number = 0
        start = time.monotonic()
        graph, mode = self.form.graph, loaded.microtask.mode
        self._gradient = backend.program(graph)
        in_place = frozenset({"parameter", "optimizer"})
        self._optimizer = backend.program(loaded.optimizer, consume=in_place) if loaded.optimizer else None
        sums = mode == "gradient" and loaded.microtask.steps > 1
        self._adder = _adder(backend, graph, "gradient") if sums else None
        whole = self.form.batch_size == loaded.microtask.batch_size
        self._parts = None if whole else _adder(backend, graph, "gradient", "metric")
        self._constants = {name: backend.from_numpy(array) for name, array in loaded.constants.items()}
        self._values = {name: backend.from_numpy(array) for name, array in loaded.state.items()}
        if loaded.optimizer is not None:
            for each in loaded.optimizer.inputs_of_kind("optimizer"):
                if each.name not in self._values:
                    self._values[each.name] = backend.from_numpy(np.zeros(each.shape, each.dtype))
        self._sums: dict[str, Any] = {}
        self._metrics: dict[str, list[float]] = {
            output.name: [] for output in loaded.gradient.outputs_of_kind("metric")
        }
        self._seed = backend.from_numpy(np.array(loaded.microtask.seed, np.int64))
        self.timings.compile += time.monotonic() - start

    @property
    def done(self) -> bool:
        return self.step_number >= self.loaded.microtask.steps

    def step(self, check: Callable[[], None] | None = None) -> None:
        """Take the next step. Raises NotFinite if its loss is NaN or infinite, and what `check` raises."""
        start = time.monotonic()
        microtask = self.loaded.microtask
        index = self.step_number
        outputs = self._outputs(index, check)
        metrics = {name: float(self.backend.to_numpy(outputs[name])) for name in self._metrics}
        for name, value in metrics.items():
            if not math.isfinite(value):
                raise NotFinite(f"{name} is {value} at step {index + 1} of {microtask.steps}", fault="not_finite")
        if microtask.mode == "local-steps":
            self._local_step(outputs, index, check)
        elif microtask.mode == "gradient":
            self._accumulate(outputs, check)
        if microtask.mode != "evaluation":
            for output in self.loaded.gradient.outputs_of_kind("buffer"):
                self._values[output.name] = outputs[output.name]
        for name, value in metrics.items():
            self._metrics[name].append(value)
        self.step_number += 1
        self.timings.compute += time.monotonic() - start

    def _outputs(self, index: int, check: Callable[[], None] | None) -> dict[str, Any]:
        """What the graph gives for a whole batch: if that is computed in parts, the sums over them."""
        microtask, size = self.loaded.microtask, self.form.batch_size
        batch = microtask.batches[index]
        arrays = self._batch(batch)
        given: dict[str, Any] = {**self._constants, **self._values, "seed": self._seed}
        given["step"] = self.backend.from_numpy(np.array(microtask.first_step + index, np.int64))
        found: dict[str, Any] = {}
        for first in range(0, batch.samples, size):  # a part of nothing but padding would add zero
            part = {name: self.backend.from_numpy(array[first : first + size]) for name, array in arrays.items()}
            made = self._gradient.run(_wanted({**given, **part}, self.form.graph), check)
            if found:
                assert self._parts is not None
                made = self._parts.run({**found, **_fresh(made)}, check)
            found = made
        return found

    def _batch(self, batch: Batch) -> dict[str, Array]:
        """Gather the samples of one batch; missing ones are copies of the first, masked out."""
        size = self.loaded.microtask.batch_size
        missing = size - batch.samples
        shards = np.array(batch.shards + batch.shards[:1] * missing)
        rows = np.array(batch.rows + batch.rows[:1] * missing)
        found: dict[str, Array] = {}
        for each in self.loaded.gradient.inputs_of_kind("batch"):
            array = np.empty(each.shape, each.dtype)
            for number in np.unique(shards):
                here = shards == number
                array[here] = self.loaded.shards[number][each.name][rows[here]]
            found[each.name] = array
        mask = np.zeros(size, np.float32)
        mask[: batch.samples] = 1
        found["mask"] = mask
        return found

    def _accumulate(self, outputs: Mapping[str, Any], check: Callable[[], None] | None) -> None:
        made = {output.name: outputs[output.name] for output in self.loaded.gradient.outputs_of_kind("gradient")}
        if self._sums:
            assert self._adder is not None
            made = self._adder.run({**self._sums, **_fresh(made)}, check)
        self._sums = made

    def _local_step(self, outputs: Mapping[str, Any], index: int, check: Callable[[], None] | None) -> None:
        assert self._optimizer is not None and self.loaded.optimizer is not None
        rate = self.loaded.microtask.learning_rates[index]
        inputs = {**self._values, **{k: v for k, v in outputs.items() if k.startswith("gradient/")}}
        inputs["weight"] = outputs["metric/weight"]
        inputs["learning_rate"] = self.backend.from_numpy(np.array(rate, np.float32))
        inner_step = (self.loaded.microtask.inner_step or 0) + index
        inputs["step"] = self.backend.from_numpy(np.array(inner_step, np.int64))
        stepped = self._optimizer.run(_wanted(inputs, self.loaded.optimizer), check)
        self._values.update(stepped)

    def progress(self) -> Checkpoint:
        """All that the remaining steps need, as arrays of its own (not views of values that may change)."""
        tensors = {f"value/{name}": self.backend.to_numpy(value) for name, value in self._values.items()}
        if self.loaded.microtask.mode == "gradient":  # parameters do not move: only buffers and sums do
            tensors = {n: a for n, a in tensors.items() if n.startswith("value/buffer/")}
        tensors.update({f"sum/{name}": self.backend.to_numpy(value) for name, value in self._sums.items()})
        tensors.update({name: np.array(values, np.float64).view(np.int64) for name, values in self._metrics.items()})
        return Checkpoint(self.step_number, {n: np.array(a) for n, a in tensors.items()})

    def restore(self, progress: Checkpoint) -> None:
        """Continue after `progress.step` steps. Raises ContractError if the checkpoint does not fit."""
        values = dict(self._values)
        types = self.loaded.gradient.output_types()
        sums: dict[str, Any] = {}
        metrics: dict[str, list[float]] = {}
        for name, array in progress.tensors.items():
            if name.startswith("value/") and name[len("value/") :] in values:
                before = self.backend.to_numpy(values[name[len("value/") :]])
                if before.shape != array.shape or before.dtype != array.dtype:
                    raise ContractError(f"checkpoint tensor {name!r} has another shape", fault="shape")
                values[name[len("value/") :]] = self.backend.from_numpy(np.array(array))
            elif name.startswith("sum/") and name[len("sum/") :] in types:
                if types[name[len("sum/") :]].shape != array.shape:
                    raise ContractError(f"checkpoint tensor {name!r} has another shape", fault="shape")
                sums[name[len("sum/") :]] = self.backend.from_numpy(np.array(array))
            elif name in self._metrics:
                metrics[name] = np.array(array, np.int64).view(np.float64).tolist()
            else:
                raise ContractError(f"checkpoint tensor {name!r} does not belong there", fault="extra_tensor")
        if not 0 < progress.step <= self.loaded.microtask.steps or any(
            len(metrics.get(name, [])) != progress.step for name in self._metrics
        ):
            raise ContractError("the checkpoint's step does not fit its metrics", fault="steps")
        if self.loaded.microtask.mode == "gradient" and set(sums) != {
            output.name for output in self.loaded.gradient.outputs_of_kind("gradient")
        }:
            raise ContractError("the checkpoint lacks sums", fault="missing_tensor")
        self._values, self._sums, self._metrics, self.step_number = values, sums, metrics, progress.step

    def update(self) -> dict[str, Array]:
        """The update's tensors after the last step, as `update_types` lists them."""
        assert self.done, (self.step_number, self.loaded.microtask.steps)
        found: dict[str, Array] = {}
        for name in self.loaded.types:
            if name.startswith("delta/"):
                parameter = "parameter/" + name[len("delta/") :]
                found[name] = self.loaded.state[parameter] - self.backend.to_numpy(self._values[parameter])
            elif name.startswith("gradient/"):
                found[name] = self.backend.to_numpy(self._sums[name])
            elif name.startswith(("buffer/", "optimizer/")):
                found[name] = self.backend.to_numpy(self._values[name])
            else:
                found[name] = np.array(self._metrics[name], np.float32)
        return {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in found.items()}

    def losses(self) -> list[float]:
        """Mean loss per step so far."""
        weights = self._metrics.get("metric/weight", [])
        return [total / max(weight, 1.0) for total, weight in zip(self._metrics.get("metric/loss", []), weights)]


def _adder(backend: Backend, graph: Graph, *kinds: str) -> Program:
    """Adds a graph's outputs of these kinds (`fresh/NAME`) to sums of earlier ones, on the backend's own device."""
    types = graph.output_types()
    summed = graph.outputs_of_kind(*kinds)
    builder = GraphBuilder()
    before = {o.name: builder.input(o.name, "optimizer", types[o.name].dtype, types[o.name].shape) for o in summed}
    fresh = {
        o.name: builder.input(f"fresh/{o.name}", "gradient", types[o.name].dtype, types[o.name].shape) for o in summed
    }
    for output in summed:
        (total,) = builder.node("add", [before[output.name], fresh[output.name]])
        builder.output(output.name, output.kind, total)
    # An output may be one of the graph's inputs, which is needed again.
    aliased = any(output.value < len(graph.inputs) for output in summed)
    return backend.program(builder.build(), consume=frozenset() if aliased else frozenset({"optimizer"}))


def _fresh(values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"fresh/{name}": value for name, value in values.items()}


def _wanted(values: Mapping[str, Any], graph: Graph) -> dict[str, Any]:
    """Those of the values that the graph takes."""
    return {each.name: values[each.name] for each in graph.inputs}
