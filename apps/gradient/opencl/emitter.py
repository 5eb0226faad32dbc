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

import numpy as np

from apps.gradient.backends.backend import Call, Number
from apps.gradient.opencl import chain_text
from apps.gradient.opencl.chains import Chain, Chains
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
from boinc_project.contract.opset import TensorType, infer, number

Inputs = Sequence[Optional[View]]
Lower = Callable[[Call, Inputs, "Emitter"], Sequence[View]]

ERROR_WORDS = 2  # of the fault report, see values.Fault


class Emitter:
    """Collects the launches of a graph. `ops` is the table of lowering functions by operator."""

    def __init__(self, device: DeviceFacts, ops: Mapping[str, Lower]) -> None:
        self.device = device
        self.storages: list[Storage] = []
        self.constants: dict[int, np.ndarray[Any, Any]] = {}  # by storage: what is uploaded once
        self.node = 0  # of the graph, for error messages
        self._ops = ops
        self._items: list[Launch | Chain] = []
        self._chains = Chains()

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

    def copy(self, source: View, target: View, disjoint: bool = False) -> None:
        """Copy values of the same shape and dtype; both may be strided. `disjoint`: no other copy goes there."""
        if not disjoint:
            self._complete([target.storage])
        self.chain("copy", {}, [source], target)

    def constant(self, array: np.ndarray[Any, Any]) -> View:
        """A tensor with these values, which are known beforehand."""
        view = self.fresh(array.dtype.name, array.shape)
        self.constants[view.storage.number] = array
        return view

    def number_of(self, view: View) -> Number | None:
        """The number that fills a tensor, where it is known before anything runs."""
        found = self._chains.number_of(view)
        return None if found is None else number(found)

    def number(self, value: Number, dtype: str, shape: Sequence[int] = ()) -> View:
        """A tensor filled with a number."""
        written = value if math.isfinite(value) else str(float(value))  # as JSON has to write it
        attrs = {"shape": list(shape), "value": written, "dtype": dtype}
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
        in_place: bool = False,
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
        launch = Launch(
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
            in_place=in_place,
        )
        read, written = launch.storages()
        self._complete(sorted(read | written, key=lambda storage: storage.number))
        self._items.append(launch)

    def chain(self, op: str, attrs: Mapping[str, Any], inputs: Sequence[View], out: View) -> None:
        """Compute an elementwise operator over the elements of `out`, in one kernel with its neighbours."""
        self._items += self._chains.append(op, attrs, inputs, out, self.node)

    def _complete(self, storages: Sequence[Storage]) -> None:
        self._items += self._chains.complete(storages)

    # The end.

    def finish(self, outputs: Sequence[View]) -> list[Launch]:
        """The launches that compute these, in order: without those of which nothing is read."""
        self._complete([view.storage for view in outputs])
        needed = {view.storage.number for view in outputs}
        kept: list[Launch | chain_text.Kernel] = []
        for item in reversed(self._items):
            if isinstance(item, Chain):
                kernels = chain_text.kernels_of(item, needed, self.device)
                if kernels:
                    kept += kernels[::-1]
                    needed |= chain_text.reads_of(item, needed)
                continue
            read, written = item.storages()
            if needed & {storage.number for storage in written}:
                kept.append(item)
                needed |= {storage.number for storage in read | written}
        return self._named(kept[::-1])

    def _named(self, items: Sequence[Launch | chain_text.Kernel]) -> list[Launch]:
        """Chains' kernels put into one source for each vector width, equal ones once."""
        names: dict[int, dict[str, str]] = {}
        for item in items:
            if isinstance(item, chain_text.Kernel):
                known = names.setdefault(item.width, {})
                known.setdefault(item.text, f"chain_{len(known)}")
        sources = {
            width: Source(
                chain_text.FUNCTIONS,
                "\n".join(text.replace("KERNEL", name, 1) for text, name in known.items()),
            )
            for width, known in names.items()
        }
        return [
            item.launch(sources[item.width], names[item.width][item.text])
            if isinstance(item, chain_text.Kernel)
            else item
            for item in items
        ]
