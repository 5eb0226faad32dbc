"""What a backend is: a table from operator to the function that prepares one node, and a few conversions.

Preparing and running are apart: an entry of the table is called once for each node of a graph with everything
that is known before any tensor exists (`Call`), and returns the `Kernel` that each run then calls with tensors
only. Choosing a variant, resolving attributes and compiling happen once; running has nothing left to decide.

Every backend has the same operators as the opset. The numpy backend is the specification.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Callable, Protocol, Union

import numpy as np

from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import TensorType

Tensor = Any  # the backend's own tensor class
Kernel = Callable[..., Any]  # the node's inputs (None where absent) -> its output, or a tuple where several
Prepare = Callable[["Call"], Kernel]
Number = Union[int, float, bool]


@dataclass(frozen=True)
class Call:
    """What is known of a node before it runs.

    `immediates` gives, for each input, its value where it is a 0-d constant, otherwise None: a backend may use
    the number instead of the tensor (which is passed all the same).
    """

    op: str
    attrs: Mapping[str, Any]
    inputs: tuple[TensorType | None, ...]
    outputs: tuple[TensorType, ...]
    immediates: tuple[Number | None, ...]

    def input(self, position: int) -> TensorType:
        """The type of an input that is not optional."""
        given = self.inputs[position]
        assert given is not None, f"{self.op}: input {position} is absent"
        return given


class OutOfRange(IndexError):
    """A tensor holds an index beyond the dimension it selects from."""


class DeviceLost(Exception):
    """The device stopped working in the middle (its driver was reset, or it went away); a fresh start may work."""


class ContextLost(DeviceLost):
    """The device stopped working and took this process's hold of it along: only another process can use it again.

    So it is with CUDA and HIP: after such an error every further call fails, until the process ends.
    """


class DeviceNotFound(Exception):
    """The device that the task is meant for is not there now; it may be after a restart of its driver."""


class WrongResults(Exception):
    """The device computes wrong numbers; no result of it may be sent."""


class Program(Protocol):
    """A graph prepared for a backend; it may be run any number of times."""

    def run(self, inputs: Mapping[str, Tensor], check: Callable[[], None] | None = None) -> dict[str, Tensor]:
        """Outputs by name for inputs by name (more inputs than the graph names are allowed).

        `check` is called often and stops the run by raising; its exception passes unchanged, and what the run may
        consume is then undefined. Outputs may share memory with inputs. Raises ValueError for a missing or wrong
        input, ExecutionError for a node that failed, TooLittleMemory or MemoryError, and DeviceLost.
        """


class Backend(Protocol):
    """Where a graph runs."""

    @property
    def name(self) -> str:
        """`numpy`, `torch` or `opencl`."""

    @property
    def ops(self) -> Mapping[str, Any]:
        """Operator -> how the backend prepares it; the keys are those of OPSET, in its order."""

    def program(self, graph: Graph, verify: bool = False, consume: AbstractSet[str] = frozenset()) -> Program:
        """A graph prepared for this backend.

        verify   compare every value's dtype and shape with the graph's: for tests and for new backends
        consume  kinds of inputs that are not needed after a run: an output of the same name may take their memory
        """

    def describe(self) -> Mapping[str, str]:
        """Device, library versions and precision settings, for the result's metadata."""

    def scope(self) -> AbstractContextManager[Any]:
        """Entered around every run (floating-point error state, no autograd, ...)."""

    def from_numpy(self, array: np.ndarray[Any, Any]) -> Tensor:
        """A tensor with the array's dtype, shape and values; it may share memory with the array."""

    def to_numpy(self, tensor: Tensor) -> np.ndarray[Any, Any]:
        """The tensor's values on the host; it may share memory with the tensor."""

    def type_of(self, tensor: Tensor) -> TensorType:
        """The tensor's dtype and shape."""

    def synchronize(self) -> None:
        """Wait until everything asked for has been computed."""


def out_of_range(low: int, high: int, size: int) -> OutOfRange:
    """The error of an index tensor with the values low..high where 0..size-1 are valid."""
    return OutOfRange(f"index {low if low < 0 else high} is out of range for a dimension of size {size}")


def element_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Distance in elements between neighbours along each dimension of a dense tensor."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)
