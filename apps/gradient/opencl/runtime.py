"""Buffers, and running a plan: the part of the backend that talks to the device.

A `DeviceTensor` is a value that outlives a run: it owns a buffer, which returns to the pool when nobody holds the
tensor any more. In steady state the pool hands out the same buffers run after run, so that the arguments of a
kernel, bound when a plan is made, are bound again only where a buffer has changed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Callable

import numpy as np
import pyopencl as cl

from apps.gradient.backends.backend import DeviceLost, OutOfRange
from apps.gradient.executor import failure
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.memory import padded
from apps.gradient.opencl.plan import Plan
from apps.gradient.opencl.programs import Programs
from apps.gradient.opencl.values import DEVICE_BYTES, Fault, Launch, Read, Write
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.opset import TensorType

Array = np.ndarray[Any, Any]

_DEVICE_DTYPES = {"float32": np.float32, "int64": np.int64, "int32": np.int32, "uint8": np.int32, "bool": np.int32}
_ZEROS = np.zeros(1 << 20, np.uint8)

#: No launch is meant to keep a device busy for longer: a screen freezes, and drivers reset a GPU after 2 s.
LONGEST_LAUNCH_S = 0.2
#: Work that may be queued before we wait, so that a request to suspend is followed soon.
QUEUED_S = 0.5


#: What drivers answer when a device has been reset, has hung or is gone; and when memory runs out only in use.
_LOST = frozenset(
    {
        cl.status_code.DEVICE_NOT_AVAILABLE,
        cl.status_code.OUT_OF_RESOURCES,
        cl.status_code.OUT_OF_HOST_MEMORY,
        cl.status_code.EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST,
        cl.status_code.INVALID_CONTEXT,
        cl.status_code.INVALID_COMMAND_QUEUE,
    }
)


@contextmanager
def driver_faults(facts: DeviceFacts) -> Iterator[None]:
    """A driver's errors as ours: DeviceLost, or UnfitHost where memory ran out."""
    try:
        yield
    except cl.Error as error:
        if error.code == cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE:
            raise UnfitHost(f"{facts.name} ran out of memory: {error}") from error
        if error.code in _LOST:
            raise DeviceLost(f"{facts.name} stopped working: {error}") from error
        raise


class Pool:
    """Buffers by size. `used` counts all bytes that the device holds for us."""

    def __init__(self, context: Any, queue: Any, facts: DeviceFacts) -> None:
        self.context, self.queue, self.facts = context, queue, facts
        self.used = self.peak = 0
        self._free: dict[int, list[Any]] = {}

    def take(self, nbytes: int) -> Any:
        """A buffer of at least so many bytes; a new one is zeroed. Raises UnfitHost when the device is full."""
        size = padded(nbytes)
        if self._free.get(size):
            return self._free[size].pop()
        if self.used + size > self.facts.global_memory:
            self._drop_free()
        if self.used + size > self.facts.global_memory or size > self.facts.max_allocation:
            raise UnfitHost(
                f"{self.facts.name} has {self.facts.global_memory} bytes for us and {self.used} are taken:"
                f" {size} more do not fit (largest buffer {self.facts.max_allocation})"
            )
        try:
            buffer = cl.Buffer(self.context, cl.mem_flags.READ_WRITE, size)
            for start in range(0, size, _ZEROS.size):  # also the first touch: drivers promise memory that is not there
                cl.enqueue_copy(
                    self.queue, buffer, _ZEROS[: min(_ZEROS.size, size - start)], dst_offset=start, is_blocking=False
                )
        except (cl.MemoryError, cl.RuntimeError) as error:
            raise UnfitHost(f"{self.facts.name} refused a buffer of {size} bytes: {error}") from error
        self.used += size
        self.peak = max(self.peak, self.used)
        return buffer

    def give_back(self, buffer: Any) -> None:
        self._free.setdefault(buffer.size, []).append(buffer)

    def _drop_free(self) -> None:
        for size, buffers in self._free.items():
            self.used -= size * len(buffers)
        self._free.clear()


class DeviceTensor:
    """A dense tensor in a buffer of its own. Values do not change while anybody holds it."""

    def __init__(self, pool: Pool, type_: TensorType, buffer: Any) -> None:
        self.type, self.buffer = type_, buffer
        self._pool = pool
        self._finalizer = weakref.finalize(self, pool.give_back, buffer)

    def release(self) -> Any:
        """Its buffer, for another tensor; this one is gone."""
        self._finalizer.detach()
        buffer, self.buffer = self.buffer, None
        return buffer


def upload(pool: Pool, array: Array) -> DeviceTensor:
    """A tensor with an array's values."""
    type_ = TensorType(array.dtype.name, array.shape)
    host = np.ascontiguousarray(array, dtype=_DEVICE_DTYPES[array.dtype.name])
    tensor = DeviceTensor(pool, type_, pool.take(max(1, host.nbytes)))
    if host.size:
        with driver_faults(pool.facts):
            cl.enqueue_copy(pool.queue, tensor.buffer, host.reshape(-1), is_blocking=True)
    return tensor


def download(pool: Pool, tensor: DeviceTensor) -> Array:
    """A tensor's values; waits for everything that was asked for before."""
    host = np.zeros(tensor.type.numel, _DEVICE_DTYPES[tensor.type.dtype])
    if host.size:
        with driver_faults(pool.facts):
            cl.enqueue_copy(pool.queue, host, tensor.buffer, is_blocking=True)
    return host.reshape(tensor.type.shape).astype(tensor.type.dtype, copy=False)


class Speed:
    """How fast the device is, for estimates: floating-point operations and bytes per second."""

    def __init__(self, facts: DeviceFacts) -> None:
        lanes = 16 if facts.kind == "gpu" else 4
        self.flops = 0.1 * facts.compute_units * max(facts.clock_mhz, 300) * 1e6 * lanes * facts.vector_width
        self.bytes = 2e9 if facts.kind == "gpu" else 1e9

    def seconds(self, launch: Launch) -> float:
        return launch.flops / self.flops + launch.nbytes / self.bytes


class PreparedPlan:
    """A plan with its buffers and kernels; `run` may be called any number of times."""

    def __init__(self, plan: Plan, pool: Pool, programs: Programs) -> None:
        self.plan, self.pool = plan, pool
        self._types = plan.graph.output_types()
        speed = Speed(pool.facts)
        self._arenas = [pool.take(size) for size in plan.layout.arenas]
        self._constants = {number: upload(pool, array) for number, array in plan.constants.items()}
        self._fault = pool.take(8)
        #: storage -> (kernel, argument) pairs to set when its buffer changes; and the buffer they have now
        self._bindings: dict[int, list[tuple[Any, int]]] = {}
        self._bound: dict[int, Any] = {}
        self._queue: list[tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, float]] = []
        for launch in plan.launches:
            kernel = programs.kernel(launch.source, launch.kernel, launch.defines)
            self._bind(kernel, launch)
            self._queue += [(kernel, *piece) for piece in _pieces(launch, speed.seconds(launch))]

    def _bind(self, kernel: Any, launch: Launch) -> None:
        """Set the arguments that never change; remember the others."""
        position = 0
        for argument in launch.arguments:
            if isinstance(argument, (Read, Write)):
                number = argument.view.storage.number
                place = self.plan.layout.places.get(number)
                item = DEVICE_BYTES[argument.view.dtype]
                if place is not None:
                    kernel.set_arg(position, self._arenas[place.arena])
                    at = argument.view.offset + place.offset // item
                else:
                    at = argument.view.offset
                    if number in self._constants:
                        kernel.set_arg(position, self._constants[number].buffer)
                    else:
                        self._bindings.setdefault(number, []).append((kernel, position))
                kernel.set_arg(position + 1, np.int32(at))
                position += 2
            elif isinstance(argument, Fault):
                kernel.set_arg(position, self._fault)
                kernel.set_arg(position + 1, np.int32(0))
                kernel.set_arg(position + 2, np.int32(launch.node))
                position += 3
            else:
                number_type = np.float32 if isinstance(argument, float) else np.int32
                kernel.set_arg(position, number_type(argument))
                position += 1

    def _use(self, number: int, buffer: Any) -> None:
        if self._bound.get(number) is not buffer:
            self._bound[number] = buffer
            for kernel, position in self._bindings.get(number, ()):
                kernel.set_arg(position, buffer)

    def run(
        self, inputs: Mapping[str, DeviceTensor], check: Callable[[], None] | None = None
    ) -> dict[str, DeviceTensor]:
        """Outputs by name; the inputs that the plan takes are gone afterwards."""
        plan, pool = self.plan, self.pool
        for name, number in plan.inputs.items():
            self._use(number, inputs[name].buffer)
        fresh: dict[str, DeviceTensor] = {}
        for name, made in plan.outputs.items():
            if isinstance(made, int) and name not in plan.taken:
                storage = plan.storages[made]
                fresh[name] = DeviceTensor(pool, self._types[name], pool.take(storage.nbytes))
                self._use(made, fresh[name].buffer)
        with driver_faults(pool.facts):
            if plan.fault:
                cl.enqueue_copy(pool.queue, self._fault, _ZEROS[:8], is_blocking=False)
            self._launch(check)
            if plan.fault:
                self._raise_faults()
        for name in plan.taken:
            fresh[name] = DeviceTensor(pool, self._types[name], inputs[name].release())
        return {name: inputs[made] if isinstance(made, str) else fresh[name] for name, made in plan.outputs.items()}

    def _launch(self, check: Callable[[], None] | None) -> None:
        """Queue every launch; `check` is called now and then, and at most QUEUED_S of work lie ahead of it."""
        queue = self.pool.queue
        ahead, waiting = 0.0, None
        if check is not None:
            check()
        for kernel, size, local, offset, seconds in self._queue:
            event = cl.enqueue_nd_range_kernel(queue, kernel, size, local, offset)
            ahead += seconds
            if ahead > QUEUED_S / 2:
                queue.flush()
                if waiting is not None:
                    waiting.wait()
                if check is not None and not self.plan.taken:
                    check()  # a run that overwrites its inputs is not left half-way
                ahead, waiting = 0.0, event
        queue.flush()

    def _raise_faults(self) -> None:
        words = np.zeros(2, np.int32)
        cl.enqueue_copy(self.pool.queue, words, self._fault, is_blocking=True)
        if words[0]:
            index = int(words[0]) - 1
            cause = _cause(self.plan.graph.nodes[index].op, int(words[1]))
            raise failure(self.plan.graph, index, cause) from cause


def _cause(op: str, value: int) -> Exception:
    """What a fault report of an operator means."""
    if op in ("remainder", "fmod", "floor_divide"):
        return ZeroDivisionError("integer division by zero")
    if op == "pow":
        return ValueError("integers to negative integer powers are not allowed")
    return OutOfRange(f"index {value} is out of range")


def _pieces(
    launch: Launch, seconds: float
) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, float]]:
    """(size, local size, offset, estimated seconds) of the parts in which a launch is queued."""
    axis = launch.split
    if axis is None or seconds <= LONGEST_LAUNCH_S:
        return [(launch.global_size, launch.local_size, None, seconds)]
    step = launch.local_size[axis]
    groups = launch.global_size[axis] // step
    size = max(1, int(groups * LONGEST_LAUNCH_S / seconds)) * step
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, float]] = []
    for start in range(0, launch.global_size[axis], size):
        count = min(size, launch.global_size[axis] - start)
        sizes = (*launch.global_size[:axis], count, *launch.global_size[axis + 1 :])
        offset = tuple(start if d == axis else 0 for d in range(len(sizes)))
        pieces.append((sizes, launch.local_size, offset, seconds * count / launch.global_size[axis]))
    return pieces
