"""Lowering: an operator of the graph becomes kernel launches on views.

An operator has one lowering function: it is given the node (`Call`), the views of its inputs and an `Emitter`,
asks the emitter for fresh tensors and launches, and returns the views of its outputs, which may be views of its
inputs. Nothing is computed here; the emitter only remembers, in order, what is to be launched.

    Lower = (call, inputs, emit) -> outputs

Elementwise operators are not launched at once: see elementwise.py, which makes one kernel of a chain of them.
Reading a view (`emit.launch`, `emit.dense`) completes what it depends on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Callable, Optional

from apps.gradient.backends.backend import Call, Number, element_strides
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.values import (
    DEVICE_BYTES,
    Argument,
    Define,
    Launch,
    Read,
    Source,
    Storage,
    View,
    Write,
    whole,
)
from boinc_project.contract.opset import TensorType, infer

Inputs = Sequence[Optional[View]]
Lower = Callable[[Call, Inputs, "Emitter"], Sequence[View]]

ERROR_WORDS = 2  # of the fault report, see values.Fault


class Emitter:
    """Collects the launches of a graph. `ops` is the table of lowering functions by operator."""

    def __init__(self, device: DeviceFacts, ops: Mapping[str, Lower]) -> None:
        self.device = device
        self.launches: list[Launch] = []
        self.storages: list[Storage] = []
        self.node = 0  # of the graph, for error messages
        self._ops = ops

    # Tensors.

    def fresh(self, dtype: str, shape: Sequence[int]) -> View:
        """A new dense tensor, for an output or for scratch. Its contents are undefined until a launch writes them."""
        storage = Storage(len(self.storages), dtype, max(1, math.prod(shape)))
        self.storages.append(storage)
        return whole(storage, shape)

    def like(self, type_: TensorType) -> View:
        """A new dense tensor of this type."""
        return self.fresh(type_.dtype, type_.shape)

    def dense(self, view: View) -> View:
        """The same values, dense: the view itself or a copy of it."""
        if view.is_dense:
            return view
        target = self.fresh(view.dtype, view.shape)
        self.copy(view, target)
        return target

    def reshaped(self, view: View, shape: Sequence[int]) -> View:
        """The values in another shape, copied only if they do not follow one another."""
        return self.dense(view).reshaped(shape)

    def copy(self, source: View, target: View) -> None:
        """Copy values of the same shape and dtype; both may be strided."""
        from apps.gradient.opencl.movement import emit_copy

        emit_copy(self, source, target)

    def number(self, value: Number, dtype: str, shape: Sequence[int] = ()) -> View:
        """A tensor filled with a number."""
        attrs = {"shape": list(shape), "value": value, "dtype": dtype}
        return self.apply("full", [], attrs)[0]

    # Operators and launches.

    def apply(self, op: str, inputs: Inputs, attrs: Mapping[str, Any] | None = None) -> Sequence[View]:
        """Lower another operator, as a part of this one."""
        types = tuple(None if view is None else view.type for view in inputs)
        attributes = dict(attrs or {})
        call = Call(op, attributes, types, infer(op, types, attributes), (None,) * len(types))
        return self._ops[op](call, inputs, self)

    def launch(
        self,
        file: str,
        kernel: str,
        global_size: Sequence[int],
        arguments: Sequence[Argument],
        *,
        defines: Mapping[str, Define] | None = None,
        local_size: Sequence[int] | None = None,
        split: int | None = None,
        flops: int = 0,
        nbytes: int | None = None,
    ) -> None:
        """Remember a launch of `kernel` in `kernels/<file>`.

        `global_size` counts the items that have work: it is rounded up to the local size, so a kernel compares its
        place with a size that it is given. Without `local_size` dimension 0 is cut into wavefronts. A launch with no
        items is left out. `nbytes` defaults to all elements of the views once.
        """
        if 0 in global_size:
            return
        local = tuple(local_size or (self.device.wavefront, *(1,) * (len(global_size) - 1)))
        assert len(local) == len(global_size) and math.prod(local) <= self.device.max_work_group, (kernel, local)
        rounded = tuple(-(-size // step) * step for size, step in zip(global_size, local))
        moved = sum(
            each.view.numel * DEVICE_BYTES[each.view.dtype] for each in arguments if isinstance(each, (Read, Write))
        )
        self.add(
            Launch(
                source=Source(file),
                kernel=kernel,
                defines=tuple(sorted((defines or {}).items())),
                global_size=rounded,
                local_size=local,
                arguments=tuple(arguments),
                split=split,
                flops=flops,
                nbytes=moved if nbytes is None else nbytes,
                node=self.node,
            )
        )

    def add(self, launch: Launch) -> None:
        """Append a launch; completes pending elementwise values that it reads."""
        self.launches.append(launch)


def expanded(view: View, shape: Sequence[int]) -> View:
    """The view broadcast to a shape as numpy does it: sizes of 1 are repeated by strides of 0."""
    missing = len(shape) - len(view.shape)
    strides = [0] * missing + [
        0 if size == 1 and wanted != 1 else stride
        for size, stride, wanted in zip(view.shape, view.strides, shape[missing:])
    ]
    return View(view.storage, tuple(shape), tuple(strides), view.offset)


def collapsed(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Fewest dimensions that walk the same elements in the same order, for several stride lists at once.

    Dimensions of size 1 are dropped and neighbours are joined where every list allows it.
    """
    kept = [axis for axis, size in enumerate(shape) if size != 1]
    sizes: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for axis in kept:
        if sizes and all(walk[-1] == given[axis] * shape[axis] for walk, given in zip(walks, strides)):
            sizes[-1] *= shape[axis]
            for walk, given in zip(walks, strides):
                walk[-1] = given[axis]
        else:
            sizes.append(shape[axis])
            for walk, given in zip(walks, strides):
                walk.append(given[axis])
    return tuple(sizes), [tuple(walk) for walk in walks]


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a dense tensor."""
    return element_strides(shape)
