"""The kernel of a chain: the one place where kernel text is made by a program.

Text is put together from this file's own table, from kernel and variable names that are numbers, and from numbers
that were checked; nothing of a graph's names or strings gets in. The functions behind the operators, and the types
`real` and `ints` (VW neighbouring elements), are in kernels/functions.cl.

What differs from kernel to kernel is the operators and how each tensor is walked; sizes, strides and places are
arguments, so that layers of different sizes share a kernel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from apps.gradient.opencl.chains import Chain, Entry, Literal, Load, Operand, Ref, is_whole, strides_at
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.values import C_TYPES, DEVICE_BYTES, Argument, Fault, Launch, Read, Source, View, Write
from apps.gradient.opencl.walks import collapsed
from boinc_project.contract.opset import TensorType, number
from boinc_project.contract.opset import flops as operator_flops

FUNCTIONS = "functions.cl"
MAX_RANGES = 3  # dimensions of an OpenCL range
MAX_TENSORS = 12  # that one kernel reads or writes
FLAT_BELOW = 16  # items along the innermost dimension: fewer are walked as one range, with divisions

#: Operators by the kind of their first operand. {0}, {1}, {2} are operands, {T} the type of the value.
_ANY_NUMBER = {
    "neg": "-{0}",
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "mul": "{0} * {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
}
_OF_FLOATS = {
    **_ANY_NUMBER,
    **{name: name + "({0})" for name in ("exp", "expm1", "log", "log1p", "sqrt", "rsqrt", "sin", "cos", "tanh")},
    **{name: name + "({0})" for name in ("floor", "ceil", "trunc", "isnan", "isinf")},
    **{name: f"op_{name}({{0}})" for name in ("sign", "sigmoid", "erf", "relu", "silu")},
    **{
        name: f"op_{name}({{0}}, {{1}})"
        for name in ("maximum", "minimum", "remainder", "floor_divide", "silu_backward")
    },
    "abs": "fabs({0})",
    "round": "rint({0})",
    "reciprocal": "(real)(1.0f) / {0}",
    "div": "{0} / {1}",
    "fmod": "fmod({0}, {1})",
    "pow": "op_pow({0}, {1})",
    "tanh_backward": "{0} * ((real)(1.0f) - {1} * {1})",
    "sigmoid_backward": "{0} * ((real)(1.0f) - {1}) * {1}",
}
_OF_INTEGERS = {
    **_ANY_NUMBER,
    "abs": "{0} < 0 ? -{0} : {0}",
    "sign": "(({0} > 0) & 1) - (({0} < 0) & 1)",
    "relu": "{0} > 0 ? {0} : ({T})(0)",
    "maximum": "{0} > {1} ? {0} : {1}",
    "minimum": "{0} < {1} ? {0} : {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
}
_OF_MASKS = {
    "logical_not": "NOT({0})",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
    "logical_xor": "{0} ^ {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    **{name: text.replace("{0}", "({0} & 1)").replace("{1}", "({1} & 1)")
       for name, text in _ANY_NUMBER.items() if name not in ("neg", "add", "sub", "mul")},
}  # fmt: skip
_POWERS = {
    1.0: "{0}",
    2.0: "{0} * {0}",
    3.0: "{0} * {0} * {0}",
    0.5: "sqrt({0})",
    -0.5: "rsqrt({0})",
    -1.0: "(real)(1.0f) / {0}",
}
_DIVISIONS = ("remainder", "fmod", "floor_divide")
_INTEGER_KINDS = ("int32", "int64", "uint8")


@dataclass(frozen=True)
class Kernel:
    """A chain's kernel: its text (with the name still open as KERNEL), and how to launch it."""

    text: str
    width: int
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    arguments: tuple[Argument, ...]
    flops: int
    nbytes: int
    node: int

    def launch(self, source: Source, name: str) -> Launch:
        """The launch of this kernel under its name in a source."""
        split = len(self.global_size) - 1
        return Launch(
            source, name, (("VW", self.width),), self.global_size, self.local_size, self.arguments,
            split, self.flops, self.nbytes, self.node, in_place=True,
        )  # fmt: skip


def kernels_of(chain: Chain, needed: set[int], device: DeviceFacts) -> list[Kernel]:
    """The kernel of a chain that stores what is needed of it: none if that is nothing, several if it is much."""
    stored = [index for index, entry in enumerate(chain.entries) if entry.store.storage.number in needed]
    if chain.numel == 0:
        return []
    writers = []
    while stored:
        writer = _Writer(chain, stored, device)
        most = max(1, MAX_TENSORS - len(writer.loads))
        if len(stored) > most:
            writer = _Writer(chain, stored[:most], device)
        writers.append(writer)
        stored = stored[most:]
    return [writer.kernel() for writer in writers]


def reads_of(chain: Chain, needed: set[int]) -> set[int]:
    """Storages that the stored entries of a chain come from."""
    used = _used(chain, [i for i, entry in enumerate(chain.entries) if entry.store.storage.number in needed])
    return {
        operand.view.storage.number
        for index in used
        for operand in chain.entries[index].operands
        if isinstance(operand, Load)
    }


def _used(chain: Chain, stored: Sequence[int]) -> list[int]:
    """Entries that the stored ones are computed from, in order."""
    wanted = set(stored)
    for index in range(len(chain.entries) - 1, -1, -1):
        if index in wanted:
            wanted |= {operand.entry for operand in chain.entries[index].operands if isinstance(operand, Ref)}
    return sorted(wanted)


class _Writer:
    """Writes one kernel."""

    def __init__(self, chain: Chain, stored: Sequence[int], device: DeviceFacts) -> None:
        self.chain, self.device = chain, device
        self.stored = list(stored)
        self.used = _used(chain, stored)
        self.loads: list[View] = []
        for index in self.used:
            for operand in chain.entries[index].operands:
                if isinstance(operand, Load) and operand.view not in self.loads:
                    self.loads.append(operand.view)
        self.stores = [chain.entries[index].store for index in stored]
        self.sizes, self.walks = self._walk()
        self.checked = any(self._may_fail(chain.entries[index]) for index in self.used)
        self.width, self.tail = self._width()
        self.flat = self._is_flat()

    # How the elements are walked.

    def _walk(self) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """Sizes of the dimensions, and the strides of loads and stores along them; innermost last."""
        cuts = self.chain.cuts
        blocks = [cut // below for below, cut in zip((1, *cuts), cuts)][::-1]
        sizes, walks = collapsed(blocks, *(strides_at(view, cuts) for view in (*self.loads, *self.stores)))
        return (sizes, walks) if sizes else ((1,), [(0,) for _ in walks])

    def _width(self) -> tuple[int, bool]:
        """Elements of one item, and whether the last item may reach into the padding behind the tensors."""
        views = [*self.loads, *self.stores]
        dtypes = {entry.dtype for entry in map(self.chain.entries.__getitem__, self.used)}
        dtypes |= {view.dtype for view in views}
        scalar = any(self._is_scalar(self.chain.entries[index]) for index in self.used)
        if "int64" in dtypes or scalar or self.device.vector_width < 2:
            return 1, False
        inner = [walk[-1] for walk in self.walks]
        if any(stride not in (0, 1) for stride in inner) or any(s != 1 for s in inner[len(self.loads) :]):
            return 1, False
        width, size = self.device.vector_width, self.sizes[-1]
        moving = [(view, walk) for view, walk in zip(views, self.walks) if walk[-1] == 1]
        if len(self.sizes) == 1 and all(is_whole(view) for view, _ in moving):
            return (width, True) if size > 1 else (1, False)
        while width > 1 and (
            size % width or any(view.offset % width or any(s % width for s in walk[:-1]) for view, walk in moving)
        ):
            width //= 2
        return width, False

    def _is_flat(self) -> bool:
        """Whether one range is walked with divisions, rather than a range of several dimensions."""
        items = -(-self.sizes[-1] // self.width)
        return len(self.sizes) > MAX_RANGES or (len(self.sizes) > 1 and items < FLAT_BELOW)

    # Text.

    def kernel(self) -> Kernel:
        lines: list[str] = []
        for place, view in enumerate(self.loads):
            lines.append(f"    {self._type(view.dtype)} x{place} = {self._load(place, view)};")
        for index in self.used:
            entry = self.chain.entries[index]
            lines += [f"    {line}" for line in self._entry(index, entry)]
        for place, index in enumerate(self.stored):
            view, walk = self.stores[place], self.walks[len(self.loads) + place]
            lines.append(f"    {self._store(place, view, walk, f'v{index}')}")
        parameters, arguments = self._parameters()
        text = f"__kernel void KERNEL({', '.join(parameters)})\n{{\n"
        text += "\n".join([*self._position(), *lines]) + "\n}\n"
        sizes, local = self._sizes()
        flops = sum(self._flops(self.chain.entries[index]) for index in self.used)
        moved = sum(
            math.prod(size for size, stride in zip(self.sizes, walk) if stride) * DEVICE_BYTES[view.dtype]
            for view, walk in zip([*self.loads, *self.stores], self.walks)
        )
        node = self.chain.entries[self.stored[-1]].node
        return Kernel(text, self.width, sizes, local, tuple(arguments), flops * self.chain.numel, moved, node)

    def _flops(self, entry: Entry) -> int:
        """Operations for one element."""
        if entry.op in ("copy", "full", "cast"):
            return 0
        types = tuple(TensorType(dtype, ()) for dtype in entry.operand_dtypes)
        return operator_flops(entry.op, types, entry.attrs, (TensorType(entry.dtype, ()),))

    def _items(self) -> tuple[int, ...]:
        """Items along each dimension, innermost first."""
        inner = -(-self.sizes[-1] // self.width)
        return (inner, *self.sizes[-2::-1])

    def _sizes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        items = self._items()
        if self.flat:
            items = (math.prod(items),)
        most = min(256 if not self.device.group_form else self.device.wavefront, self.device.max_work_group)
        first = 1
        while first < most and first < items[0]:
            first *= 2
        local = [first, 1, 1]
        if len(items) > 1:
            while local[0] * local[1] < self.device.wavefront and local[1] < items[1]:
                local[1] *= 2
        sizes = tuple(-(-size // step) * step for size, step in zip(items, local))
        return sizes, tuple(local[: len(items)])

    def _position(self) -> list[str]:
        dimensions = len(self.sizes)
        if self.flat:
            lines = ["    int rest = (int)get_global_id(0);"]
            whole = " * ".join(f"n{d}" for d in range(dimensions))
            lines.append(f"    if (rest >= {whole}) return;")
            for d in range(dimensions - 1):
                lines.append(f"    const int i{d} = rest % n{d}; rest /= n{d};")
            return [*lines, f"    const int i{dimensions - 1} = rest;"]
        lines = [f"    const int i{d} = (int)get_global_id({d});" for d in range(dimensions)]
        guard = " || ".join(f"i{d} >= n{d}" for d in range(dimensions))
        return [*lines, f"    if ({guard}) return;"]

    def _index(self, number: int, walk: Sequence[int], in_vectors: bool) -> str:
        """The element (or vector) of tensor `number` that this item handles."""
        terms = []
        for d, stride in enumerate(reversed(walk)):
            if stride == 0:
                continue
            if d == 0 and stride == 1:
                terms.append("i0" if in_vectors or self.width == 1 else f"i0 * {self.width}")
            else:
                terms.append(f"i{d} * s{number}_{d}")
        return " + ".join(terms) or "0"

    def _load(self, number: int, view: View) -> str:
        walk = self.walks[number]
        if self.width > 1 and walk[-1] == 1:
            outer = self._outer(number, walk)
            load = "LOAD_REAL" if view.dtype == "float32" else "LOAD_INTS"
            text = f"{load}(i0, a{number} + a{number}_at{outer})"
        else:
            text = f"a{number}[a{number}_at + {self._index(number, walk, False)}]"
            if self.width > 1:
                text = f"({self._type(view.dtype)})({text})"
        return f"({text}) != ({self._type('bool')})(0)" if view.dtype == "bool" else text

    def _outer(self, number: int, walk: Sequence[int]) -> str:
        terms = [f" + i{d} * s{number}_{d}" for d, stride in enumerate(reversed(walk)) if d and stride]
        return "".join(terms)

    def _store(self, number: int, view: View, walk: Sequence[int], value: str) -> str:
        number += len(self.loads)
        if view.dtype == "bool":
            value = f"{value} & 1"
        if self.width > 1:
            return f"STORE({value}, i0, a{number} + a{number}_at{self._outer(number, walk)});"
        return f"a{number}[a{number}_at + {self._index(number, walk, False)}] = {value};"

    def _parameters(self) -> tuple[list[str], list[Argument]]:
        parameters: list[str] = []
        arguments: list[Argument] = []
        for place, view in enumerate([*self.loads, *self.stores]):
            reads = place < len(self.loads)
            qualifier = "const " if reads else ""
            parameters += [f"__global {qualifier}{C_TYPES[view.dtype]} *a{place}", f"int a{place}_at"]
            arguments.append(Read(view) if reads else Write(view))
            for d, stride in enumerate(reversed(self.walks[place])):
                if stride and not (d == 0 and stride == 1):
                    parameters.append(f"int s{place}_{d}")
                    arguments.append(stride)
        for d, size in enumerate(self._items()):
            parameters.append(f"int n{d}")
            arguments.append(size)
        if self.checked:
            parameters += ["__global int *fault", "int fault_at", "int node"]
            arguments.append(Fault())
        return parameters, arguments

    def _type(self, dtype: str) -> str:
        return {"float32": "real", "int64": "long"}.get(dtype, "ints")

    # Operators.

    def _is_scalar(self, entry: Entry) -> bool:
        """Integer division and powers are written for one element at a time."""
        return entry.dtype in _INTEGER_KINDS and entry.op in (*_DIVISIONS, "pow")

    def _may_fail(self, entry: Entry) -> bool:
        return self._is_scalar(entry)

    def _entry(self, index: int, entry: Entry) -> list[str]:
        operands = [self._operand(o, dtype) for o, dtype in zip(entry.operands, entry.operand_dtypes)]
        type_ = self._type(entry.dtype)
        if self._is_scalar(entry):
            return self._checked_integer(index, entry, operands)
        text = self._text(entry, operands).format(*operands, T=type_)
        if entry.dtype == "uint8" and entry.op != "copy":
            text = f"({text}) & 255"
        return [f"const {type_} v{index} = {text};"]

    def _text(self, entry: Entry, operands: Sequence[str]) -> str:
        op, attrs = entry.op, entry.attrs
        kind = entry.operand_dtypes[0] if entry.operand_dtypes else entry.dtype
        if op == "copy":
            return "{0}"
        if op == "full":
            return self._literal(number(attrs["value"]), entry.dtype)
        if op == "cast":
            return self._cast(kind, entry.dtype)
        if op == "where":
            return "{0} ? {1} : {2}"
        if op == "clamp":
            return self._clamp(attrs, entry.dtype)
        if op == "threshold_backward":
            return f"{{1}} <= {self._literal(number(attrs['threshold']), 'float32')} ? ({{T}})(0) : {{0}}"
        if op in ("gelu", "gelu_backward"):
            name = f"op_{op}" if attrs["approximate"] == "none" else f"op_gelu_tanh{op[4:]}"
            return f"{name}({', '.join(['{0}', '{1}'][: len(operands)])})"
        if op == "pow" and isinstance(entry.operands[1], Literal):
            special = _POWERS.get(float(entry.operands[1].value))
            if special is not None:
                return special
        table = _OF_FLOATS if kind == "float32" else _OF_MASKS if kind == "bool" else _OF_INTEGERS
        return table[op]

    def _clamp(self, attrs: Mapping[str, Any], dtype: str) -> str:
        text = "{0}"
        for bound, op in (("min", "maximum"), ("max", "minimum")):
            if attrs[bound] is None:
                continue
            literal = self._literal(number(attrs[bound]), dtype)
            if dtype == "float32":
                text = f"op_{op}({text}, {literal})"
            else:
                sign = ">" if op == "maximum" else "<"
                text = f"({text} {sign} {literal} ? {text} : {literal})"
        return text

    def _checked_integer(self, index: int, entry: Entry, operands: Sequence[str]) -> list[str]:
        """Integer division and powers: a divisor of zero or a negative exponent is reported, and 1 taken for it."""
        type_ = "long" if entry.dtype == "int64" else "int"
        wrong = f"{operands[1]} == 0" if entry.op in _DIVISIONS else f"{operands[1]} < 0"
        value = f"{type_}_{entry.op}({operands[0]}, b{index})"
        if entry.dtype == "uint8":
            value = f"{value} & 255"
        return [
            f"{type_} b{index} = {operands[1]};",
            f"if ({wrong}) {{ fault[fault_at] = {entry.node + 1}; fault[fault_at + 1] = 0; b{index} = 1; }}",
            f"const {type_} v{index} = {value};",
        ]

    def _operand(self, operand: Operand, dtype: str) -> str:
        if isinstance(operand, Ref):
            return f"v{operand.entry}"
        if isinstance(operand, Load):
            return f"x{self.loads.index(operand.view)}"
        return self._literal(number(operand.value), dtype)

    def _literal(self, value: Any, dtype: str) -> str:
        """A number as this kernel's type; every literal is made here, from a number."""
        if dtype == "float32":
            wide = float(np.float32(value))
            if math.isnan(wide):
                return "(real)(NAN)"
            if math.isinf(wide):
                return "(real)(INFINITY)" if wide > 0 else "(real)(-INFINITY)"
            text = f"{wide:.9g}"
            return f"(real)({text if any(c in text for c in '.e') else text + '.0'}f)"
        if dtype == "bool":
            return f"({self._type(dtype)})({(1 if self.width == 1 else -1) if value else 0})"
        whole = int(value)
        if dtype == "int64":
            return "(-9223372036854775807L - 1L)" if whole == -(2**63) else f"(long)({whole}L)"
        return "(ints)(-2147483647 - 1)" if whole == -(2**31) else f"(ints)({whole})"

    def _cast(self, before: str, after: str) -> str:
        if before == after:
            return "{0}"
        if after == "bool":
            return "{0} != (" + self._type(before) + ")(0)" if before != "int64" else "(int)({0} != 0)"
        value = "({0} & 1)" if before == "bool" else "{0}"
        if after == "float32":
            return f"TO_REAL({value})"
        if after == "int64":
            return f"(long)({value})"
        return f"TO_INTS({value})" if before == "float32" else f"(int)({value})" if before == "int64" else value
