"""Buffers, and running a plan: the part of the backend that talks to the device.

A `DeviceTensor` is a value that outlives a run: it owns a buffer, which returns to the pool when nobody holds the
tensor any more. In steady state the pool hands out the same buffers run after run, so that the arguments of a
kernel, bound when a plan is made, are bound again only where a buffer has changed.
"""

from __future__ import annotations

import time
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
from boinc_project.contract.errors import TooLittleMemory
from boinc_project.contract.opset import TensorType

Array = np.ndarray[Any, Any]

_DEVICE_DTYPES = {"float32": np.float32, "int64": np.int64, "int32": np.int32, "uint8": np.int32, "bool": np.int32}
_ZEROS = np.zeros(1 << 20, np.uint8)

#: No launch is meant to keep a device busy for longer: a screen freezes, and drivers reset a GPU after 2 s.
LONGEST_LAUNCH_S = 0.2
#: Work that may be queued before we wait, so that a request to suspend is followed soon.
QUEUED_S = 0.5
#: Estimates are never taken to be more wrong than that: what looks so is a process that was stopped.
SLOWEST = 64.0
#: Times below say little about the device, and nothing that matters: what is done so soon need not be cut.
SHORT_S = 0.05

#: What drivers answer when a device has been reset, has hung or is gone; and when memory runs out only in use.
_GONE = frozenset(
    {
        cl.status_code.DEVICE_NOT_AVAILABLE,
        cl.status_code.EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST,
        cl.status_code.INVALID_CONTEXT,
        cl.status_code.INVALID_COMMAND_QUEUE,
    }
)
_LOST = _GONE | {cl.status_code.OUT_OF_RESOURCES, cl.status_code.OUT_OF_HOST_MEMORY}


@contextmanager
def driver_faults(facts: DeviceFacts) -> Iterator[None]:
    """A driver's errors as ours: DeviceLost, or TooLittleMemory."""
    try:
        yield
    except cl.Error as error:
        if error.code == cl.status_code.MEM_OBJECT_ALLOCATION_FAILURE:
            raise TooLittleMemory(f"{facts.name} ran out of memory: {error}") from error
        if error.code in _LOST:
            raise DeviceLost(f"{facts.name} stopped working: {error}") from error
        raise


class Buffer(cl.Buffer):  # type: ignore[misc]
    """A buffer of the device that weak references may point to."""


class Pool:
    """Buffers by size. `used` counts all bytes that the device holds for us."""

    def __init__(self, context: Any, queue: Any, facts: DeviceFacts) -> None:
        self.context, self.queue, self.facts = context, queue, facts
        self.used = self.peak = 0
        self._free: dict[int, list[Any]] = {}
        self.pace = Pace()

    def take(self, nbytes: int) -> Any:
        """A buffer of at least so many bytes; a new one is zeroed. Raises TooLittleMemory when the device is full."""
        size = padded(nbytes)
        if self._free.get(size):
            return self._free[size].pop()
        if self.used + size > self.facts.global_memory:
            self._drop_free()
        if self.used + size > self.facts.global_memory or size > self.facts.max_allocation:
            raise TooLittleMemory(
                f"{self.facts.name} has {self.facts.global_memory} bytes for us and {self.used} are taken:"
                f" {size} more do not fit (largest buffer {self.facts.max_allocation})"
            )
        buffer = self._fresh(size)
        if buffer is None:
            self._drop_free()
            buffer = self._fresh(size, last_try=True)
        self.used += size
        self.peak = max(self.peak, self.used)
        return buffer

    def _fresh(self, size: int, last_try: bool = False) -> Any:
        """A new buffer, or None where the device refuses it and something may yet be given up for it."""
        try:
            buffer = Buffer(self.context, cl.mem_flags.READ_WRITE, size)
            for start in range(0, size, _ZEROS.size):  # also the first touch: drivers promise memory that is not there
                cl.enqueue_copy(
                    self.queue, buffer, _ZEROS[: min(_ZEROS.size, size - start)], dst_offset=start, is_blocking=False
                )
        except (cl.MemoryError, cl.RuntimeError) as error:
            if error.code in _GONE:
                raise DeviceLost(f"{self.facts.name} stopped working: {error}") from error
            if not last_try and any(self._free.values()):
                return None
            raise TooLittleMemory(
                f"{self.facts.name} refused a buffer of {size} bytes, with {self.used} of {self.facts.global_memory}"
                f" taken: {error}"
            ) from error
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
            pool.pace.drained()
    return host.reshape(tensor.type.shape).astype(tensor.type.dtype, copy=False)


class Speed:
    """How fast the device is, for estimates: floating-point operations and bytes per second."""

    def __init__(self, facts: DeviceFacts) -> None:
        lanes = 16 if facts.kind == "gpu" else 4
        self.flops = 0.1 * facts.compute_units * max(facts.clock_mhz, 300) * 1e6 * lanes * facts.vector_width
        self.bytes = 2e9 if facts.kind == "gpu" else 1e9

    def seconds(self, launch: Launch) -> float:
        return launch.flops / self.flops + launch.nbytes / self.bytes


class Pace:
    """Keeps what is queued short: the device always has work, and is done with it soon after nothing more comes.

    Launches are queued in chunks of half of QUEUED_S; once a chunk is full, the one before it is waited for.
    `slowness` is how much longer than estimated the last chunks took (never below 1), so that a device slower than
    we think is given less at once.
    """

    def __init__(self) -> None:
        self.slowness = 1.0
        self._chunks: list[tuple[Any, float, float]] = []  # queued: last event, estimated seconds, when begun
        self._seconds = self._begun = self._done = 0.0

    def add(self, event: Any, seconds: float) -> bool:
        """Note a launch; returns whether its chunk is full."""
        if not self._seconds:
            self._begun = time.monotonic()
        self._seconds += seconds
        if self._seconds * self.slowness <= QUEUED_S / 2:
            return False
        self._chunks.append((event, self._seconds, self._begun))
        self._seconds = 0.0
        return True

    def wait(self) -> None:
        """Wait until only the newest chunk is left."""
        while len(self._chunks) > 1:
            event, seconds, begun = self._chunks.pop(0)
            event.wait()
            self._learn(seconds, begun)

    def drained(self) -> None:
        """Note that everything queued has been done."""
        seconds = self._seconds + sum(seconds for _, seconds, _ in self._chunks)
        if seconds:
            self._learn(seconds, self._chunks[0][2] if self._chunks else self._begun)
        self._chunks.clear()
        self._seconds = 0.0

    def _learn(self, seconds: float, begun: float) -> None:
        now = time.monotonic()
        took = now - max(begun, self._done)
        self._done = now
        # A process that was stopped in between measures the pause too: one chunk must not weigh much.
        high = 4 * self.slowness if took > SHORT_S else self.slowness
        ratio = min(max(took / seconds, self.slowness / 4), high)
        self.slowness = min(max(1.0, (self.slowness * ratio) ** 0.5), SLOWEST)


class PreparedPlan:
    """A plan with its buffers and kernels; `run` may be called any number of times."""

    def __init__(self, plan: Plan, pool: Pool, programs: Programs) -> None:
        self.plan, self.pool = plan, pool
        self._types = plan.graph.output_types()
        speed = Speed(pool.facts)
        self._arenas = [self._own(size) for size in plan.layout.arenas]
        self._constants = {number: upload(pool, array) for number, array in plan.constants.items()}
        self._fault = self._own(8)
        #: storage -> (kernel, argument) pairs to set when its buffer changes; and the buffer they have now
        self._bindings: dict[int, list[tuple[Any, int]]] = {}
        self._bound: dict[int, weakref.ref[Any]] = {}
        self._queue: list[tuple[Any, tuple[int, ...], tuple[int, ...], tuple[int, ...] | None, float]] = []
        for launch in plan.launches:
            kernel = programs.kernel(launch.source, launch.kernel, launch.defines)
            self._bind(kernel, launch)
            self._queue += [(kernel, *piece) for piece in _pieces(launch, speed.seconds(launch))]

    def _own(self, nbytes: int) -> Any:
        """A buffer that returns to the pool with this plan's end."""
        buffer = self.pool.take(nbytes)
        weakref.finalize(self, self.pool.give_back, buffer)
        return buffer

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
        bound = self._bound.get(number)
        if bound is None or bound() is not buffer:
            self._bound[number] = weakref.ref(buffer)  # weak: what the pool gives up must go
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
        """Queue every launch; `check` is called before the first and after each chunk, with QUEUED_S of work ahead."""
        queue, pace = self.pool.queue, self.pool.pace
        if check is not None:
            check()
        for kernel, size, local, offset, seconds in self._queue:
            event = cl.enqueue_nd_range_kernel(queue, kernel, size, local, offset)
            if pace.add(event, seconds):
                queue.flush()
                pace.wait()
                if check is not None:
                    check()
        queue.flush()

    def _raise_faults(self) -> None:
        words = np.zeros(2, np.int32)
        cl.enqueue_copy(self.pool.queue, words, self._fault, is_blocking=True)
        self.pool.pace.drained()
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
