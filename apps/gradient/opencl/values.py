"""Where a value lies in device memory, and how a kernel is launched on such values. Plain data, no OpenCL.

What a launch may assume: every storage is zeroed memory with an alignment of 128 bytes, inside a buffer that no
launch leaves. A tensor is passed as two kernel arguments, the buffer and the place of its first element in it
(`__global float *x, int x_at`), because sub-buffers need alignments that old drivers disagree about.

On the device `bool` and `uint8` take a whole int: old GPUs write single bytes slowly or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

from apps.gradient.backends.backend import element_strides
from boinc_project.contract.opset import TensorType

#: The type that a kernel sees for each dtype of the opset, and its bytes.
C_TYPES: Mapping[str, str] = {"float32": "float", "int64": "long", "int32": "int", "uint8": "int", "bool": "int"}
DEVICE_BYTES: Mapping[str, int] = {"float32": 4, "int64": 8, "int32": 4, "uint8": 4, "bool": 4}


@dataclass(frozen=True)
class Storage:
    """A run of elements of one dtype; `number` identifies it within a plan."""

    number: int
    dtype: str
    elements: int

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self.elements * DEVICE_BYTES[self.dtype]


@dataclass(frozen=True)
class View:
    """A tensor: a walk over a storage. `strides` and `offset` count elements; a stride may be 0 or negative."""

    storage: Storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @property
    def dtype(self) -> str:
        return self.storage.dtype

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_dense(self) -> bool:
        """Whether the elements follow one another as in a fresh tensor (from any offset)."""
        expected = element_strides(self.shape)
        return self.numel == 0 or all(
            size == 1 or stride == wanted for size, stride, wanted in zip(self.shape, self.strides, expected)
        )

    def reshaped(self, shape: Sequence[int]) -> View:
        """The same elements in another shape; the view must be dense."""
        assert self.is_dense and math.prod(shape) == self.numel, (self, shape)
        return View(self.storage, tuple(shape), element_strides(shape), self.offset)


def whole(storage: Storage, shape: Sequence[int]) -> View:
    """A dense tensor that fills a storage."""
    return View(storage, tuple(shape), element_strides(shape))


@dataclass(frozen=True)
class Read:
    """A kernel argument pair: the kernel reads elements of this tensor."""

    view: View


@dataclass(frozen=True)
class Write:
    """A kernel argument pair: the kernel writes (and may read) elements of this tensor."""

    view: View


@dataclass(frozen=True)
class Fault:
    """A kernel argument pair and an int: where the kernel reports an index out of range, and as which node.

    `__global int *fault, int fault_at, int node`; on a bad index the kernel stores node + 1 in fault[fault_at] and the
    index in fault[fault_at + 1], and goes on with index 0 (several items may store: any of them will do).
    """


Argument = Union[Read, Write, Fault, int, float]
Define = Union[int, str]


@dataclass(frozen=True)
class Source:
    """Kernel text: a file of kernels/, and after it generated text (elementwise chains only)."""

    file: str
    text: str = ""


@dataclass(frozen=True)
class Launch:
    """One kernel execution. Sizes have one to three dimensions; global sizes are multiples of the local ones.

    `split` names a dimension along which the launch may be cut into pieces, each with its own global offset:
    the kernel must find its place there by get_global_id alone. `flops` and `nbytes` are estimates of its work.
    `in_place`: what it writes may lie where a dense tensor of that size lies that it reads, because an element is
    read for the last time before the same item, or one that waits for it, writes the element at its place.
    """

    source: Source
    kernel: str
    defines: tuple[tuple[str, Define], ...]
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    arguments: tuple[Argument, ...]
    split: int | None
    flops: int
    nbytes: int
    node: int
    in_place: bool = False

    def storages(self) -> tuple[set[Storage], set[Storage]]:
        """What it reads, what it writes."""
        read = {each.view.storage for each in self.arguments if isinstance(each, Read)}
        written = {each.view.storage for each in self.arguments if isinstance(each, Write)}
        return read, written
