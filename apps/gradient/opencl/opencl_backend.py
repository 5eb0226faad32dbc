"""The OpenCL backend: any OpenCL 1.1 device, from a Radeon HD 5870 to a CPU."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pyopencl as cl

from apps.gradient.backends.backend import Program
from apps.gradient.boinc_messages import DRIVER_CACHE, InitData
from apps.gradient.opencl import (
    convolution,
    elementwise,
    indexing,
    losses,
    matrix,
    movement,
    normalisation,
    pooling,
    random_numbers,
    reductions,
    sorting,
    tune,
)
from apps.gradient.opencl import device as devices
from apps.gradient.opencl.emitter import Lower
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.plan import make_plan
from apps.gradient.opencl.programs import Programs, keep_drivers_in
from apps.gradient.opencl.recompute import recomputed
from apps.gradient.opencl.runtime import DeviceTensor, Pool, PreparedPlan, download, upload
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import OPSET, TensorType

Array = np.ndarray[Any, Any]

CACHE_FOLDER = "opencl_cache"  # in the project's folder on a volunteer's computer; docs/volunteer.md names it

LARGE_SHARE = 0.25  # of the device's memory: where passing values take more, cheap ones are not kept

_CHEAP = frozenset(elementwise.OPS)
_FAMILIES: Mapping[str, Lower] = {
    **movement.OPS,
    **indexing.OPS,
    **sorting.OPS,
    **elementwise.OPS,
    **reductions.OPS,
    **matrix.OPS,
    **convolution.OPS,
    **pooling.OPS,
    **normalisation.OPS,
    **losses.OPS,
    **random_numbers.OPS,
}

OPS: Mapping[str, Lower] = {name: _FAMILIES[name] for name in OPSET}


class OpenclProgram:
    """A planned graph on a device."""

    def __init__(self, graph: Graph, backend: OpenclBackend, verify: bool, consume: AbstractSet[str]) -> None:
        self._backend, self._verify = backend, verify
        self.plan = make_plan(graph, backend.facts, backend.ops, consume)
        if self.plan.arena_bytes > LARGE_SHARE * backend.facts.global_memory:
            leaner = recomputed(graph, _CHEAP, self.plan.arena_bytes // 1000)
            other = make_plan(leaner, backend.facts, backend.ops, consume)
            self.plan = min(self.plan, other, key=lambda plan: plan.arena_bytes)
        self.graph = self.plan.graph
        self._prepared = PreparedPlan(self.plan, backend.pool, backend.programs)

    def run(
        self, inputs: Mapping[str, DeviceTensor], check: Callable[[], None] | None = None
    ) -> dict[str, DeviceTensor]:
        """See backend.Program."""
        for wanted in self.graph.inputs:
            if wanted.name not in inputs:
                raise ValueError(f"graph input {wanted.name!r} is missing")
            if inputs[wanted.name].type != wanted.type:
                raise ValueError(f"graph input {wanted.name!r} must be {wanted.type}, not {inputs[wanted.name].type}")
        made = self._prepared.run(inputs, check)
        if self._verify:
            types = self.graph.output_types()
            assert {name: tensor.type for name, tensor in made.items()} == types, (made, types)
        return made


class OpenclBackend:
    """One device with its queue, buffers and programs."""

    name = "opencl"

    def __init__(self, handle: Any, facts: DeviceFacts, cache: Path | None = None, careful: bool = False) -> None:
        """`cache` is a folder for what later processes need not do again; `careful` builds without optimising."""
        self.ops, self.handle, self.cache, self.careful = OPS, handle, cache, careful
        self.context = cl.Context([handle])
        self.queue = cl.CommandQueue(self.context, handle)
        self.pool = Pool(self.context, self.queue, facts)
        self.programs = Programs(self.context, handle, facts, cache, careful)
        self.facts = facts if cache is None else tune.tuned(facts, self.pool, self.programs, cache)

    def program(self, graph: Graph, verify: bool = False, consume: AbstractSet[str] = frozenset()) -> Program:
        """A graph planned for the device."""
        missing = sorted(graph.operators() - set(self.ops))
        if missing:
            raise ValueError(f"the {self.name} backend lacks {', '.join(missing)}")
        return OpenclProgram(graph, self, verify, consume)

    def describe(self) -> Mapping[str, str]:
        """Device, driver and precision settings."""
        return {
            "backend": "opencl",
            "device": self.facts.name,
            "vendor": self.facts.vendor,
            "platform": self.facts.platform,
            "driver": self.facts.driver,
            "pyopencl": cl.VERSION_TEXT,
            "precision": "float32",
            "optimiser": "off" if self.careful else "on",
        }

    def scope(self) -> AbstractContextManager[Any]:
        """Nothing to set."""
        return nullcontext()

    def from_numpy(self, array: Array) -> DeviceTensor:
        """A copy on the device."""
        return upload(self.pool, np.asarray(array))

    def to_numpy(self, tensor: DeviceTensor) -> Array:
        """A copy on the host."""
        return download(self.pool, tensor)

    def type_of(self, tensor: DeviceTensor) -> TensorType:
        """The dtype and shape."""
        return tensor.type

    def synchronize(self) -> None:
        """Wait for the device."""
        self.queue.finish()


def open_backend(threads: int, device: str | InitData | None) -> OpenclBackend:
    """The backend on a device named `cpu`, `gpu` or PLATFORM:INDEX, or on the one that BOINC's client reserved for a
    task; None takes a GPU if there is one. Raises DeviceNotFound.

    A task keeps what was built, measured and tested in a folder of its project's own.
    """
    if not isinstance(device, InitData):
        found = devices.choose(devices.find_devices(), devices.request_of_text(device))
        return OpenclBackend(found.handle, _facts(found))
    cache = Path(device.project_dir) / CACHE_FOLDER if device.project_dir else None
    if cache is not None:
        keep_drivers_in(Path(device.project_dir) / DRIVER_CACHE)
    found = devices.choose(devices.find_devices(), devices.request_of_task(device))
    return OpenclBackend(found.handle, _facts(found), cache)


def _facts(found: devices.Sighting) -> DeviceFacts:
    try:
        return devices.facts(found)
    except ValueError as error:  # in the variable that gives a device smaller limits
        raise UnfitHost(str(error)) from error
