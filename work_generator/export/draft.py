"""The graph while it is being written: appending a node first tries to do without it.

What it is: a thin layer over the contract's GraphBuilder whose `node` simplifies on the way in
(no-op views and casts, chains of views, arithmetic on uniform values, common subexpressions), and
whose `build` leaves out what no output needs. What it is not: arithmetic on tensors; only scalars
are folded here, so building stays cheap whatever the model's size.
Words: a value is *uniform* if all its elements are one known number (`full`, and views of it).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from boinc_project.contract.graph import Graph, GraphBuilder
from boinc_project.contract.opset import INTEGER_RANGE, MAX_FLOAT32, TensorType, attribute_number, infer

Scalar = bool | int | float

# Operators whose operands broadcast, so that an `expand` before them is a waste.
BROADCASTING = frozenset(
    {
        *("add", "sub", "mul", "div", "pow", "maximum", "minimum", "remainder", "fmod", "floor_divide"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"),
        *("bitwise_and", "bitwise_or", "where"),
    }
)
VIEWS = frozenset({"reshape", "permute", "expand", "slice", "flip"})
RANDOM = frozenset({"random_bernoulli", "random_uniform"})

_UNIFORM_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
}
_UNIFORM_UNARY: Mapping[str, Callable[[Any], Any]] = {
    "neg": np.negative,
    "logical_not": np.logical_not,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "sqrt": np.sqrt,
}


@dataclass(eq=False)
class Value:
    """One value of the draft; compared by identity."""

    type: TensorType
    producer: Item | None = None
    uniform: Scalar | None = None  # the one number all elements are, if known

    @property
    def dtype(self) -> str:
        return self.type.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape


@dataclass(eq=False)
class Item:
    """One node of the draft."""

    op: str
    inputs: tuple[Value | None, ...]
    attrs: dict[str, Any]
    where: str
    outputs: tuple[Value, ...] = field(default=())


class Draft:
    """Inputs, nodes and outputs in the order in which they are declared."""

    def __init__(self) -> None:
        self.inputs: list[tuple[str, str, Value]] = []
        self.items: list[Item] = []
        self.outputs: list[tuple[str, str, Value]] = []
        self.streams = 0  # random nodes so far; each draws from a Philox stream of its own
        self._known: dict[str, Item] = {}
        self._numbers: dict[Value, int] = {}

    def input(self, name: str, kind: str, dtype: str, shape: Sequence[int]) -> Value:
        """Declare an input of the graph."""
        value = Value(TensorType(dtype, tuple(shape)))
        self.inputs.append((name, kind, value))
        return value

    def output(self, name: str, kind: str, value: Value) -> None:
        """Declare an output of the graph."""
        self.outputs.append((name, kind, value))

    def scalar(self, value: Scalar, dtype: str, where: str = "") -> Value:
        """A 0-d `full` of a Python number, rounded to the dtype as ATen does."""
        return self.node("full", [], {"shape": [], "value": _fitting(value, dtype), "dtype": dtype}, where)[0]

    def full(self, shape: Sequence[int], value: Scalar, dtype: str, where: str = "") -> Value:
        """A tensor of one number: a 0-d `full`, expanded."""
        return self.one("expand", [self.scalar(value, dtype, where)], {"shape": list(shape)}, where)

    def one(
        self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Any] | None = None, where: str = ""
    ) -> Value:
        """`node` for an operator with one output."""
        (value,) = self.node(op, inputs, attrs, where)
        return value

    def node(
        self, op: str, inputs: Sequence[Value | None], attrs: Mapping[str, Any] | None = None, where: str = ""
    ) -> tuple[Value, ...]:
        """The outputs of `op`, by a new node only if nothing simpler gives the same values."""
        attributes = dict(attrs or {})
        types = infer(op, [None if v is None else v.type for v in inputs], attributes)
        if op in BROADCASTING:
            inputs = self._without_expands(inputs, types[0].shape)
        simpler = self._simpler(op, inputs, attributes, types[0], where)
        if simpler is not None:
            assert simpler.type == types[0], (op, simpler.type, types[0])
            return (simpler,)
        key = json.dumps([op, [self._number(v) for v in inputs], attributes], sort_keys=True)
        if op not in RANDOM and key in self._known:
            return self._known[key].outputs
        item = Item(op, tuple(inputs), attributes, where)
        item.outputs = tuple(Value(t, item) for t in types)
        if op == "full":
            item.outputs[0].uniform = _number_of(attributes["value"])
        elif op in VIEWS and inputs[0] is not None:
            item.outputs[0].uniform = inputs[0].uniform
        self.items.append(item)
        self._known[key] = item
        return item.outputs

    def drop_unused_inputs(self, kind: str) -> None:
        """Forget inputs of a kind that no output needs."""
        read = {v for item in self._needed() for v in item.inputs} | {v for _, _, v in self.outputs}
        self.inputs = [each for each in self.inputs if each[1] != kind or each[2] in read]

    def build(self) -> Graph:
        """The checked graph of what the outputs need; every declared input stays."""
        needed = self._needed()
        builder = GraphBuilder()
        numbers = {v: builder.input(name, kind, v.dtype, v.shape) for name, kind, v in self.inputs}
        for item in self.items:
            if item in needed:
                made = builder.node(
                    item.op,
                    [None if v is None else numbers[v] for v in item.inputs],
                    item.attrs,
                    where=item.where,
                )
                numbers.update(zip(item.outputs, made, strict=True))
        for name, kind, value in self.outputs:
            builder.output(name, kind, numbers[value])
        return builder.build()

    def _needed(self) -> set[Item]:
        needed: set[Item] = set()
        waiting = [value.producer for _, _, value in self.outputs]
        while waiting:
            item = waiting.pop()
            if item is not None and item not in needed:
                needed.add(item)
                waiting.extend(v.producer for v in item.inputs if v is not None)
        return needed

    def _number(self, value: Value | None) -> int | None:
        return None if value is None else self._numbers.setdefault(value, len(self._numbers))

    # --- simplifications: each gives a value that already exists or is cheaper, or None ---

    def _without_expands(self, inputs: Sequence[Value | None], shape: tuple[int, ...]) -> list[Value | None]:
        """Operands before their `expand`, as long as the result keeps its shape."""
        slim = list(inputs)
        for position, value in enumerate(slim):
            if value is not None and value.producer is not None and value.producer.op == "expand":
                trial = [*slim[:position], value.producer.inputs[0], *slim[position + 1 :]]
                shapes = [v.shape for v in trial if v is not None]
                if np.broadcast_shapes(*shapes) == shape:
                    slim = trial
        return slim

    def _simpler(
        self, op: str, inputs: Sequence[Value | None], attrs: dict[str, Any], out: TensorType, where: str
    ) -> Value | None:
        if op in VIEWS or op == "cast":
            x = inputs[0]
            assert x is not None, op
            return self._simpler_view(op, x, attrs, out, where)
        if op == "where":
            return self._simpler_where(inputs, out, where)
        if op == "full" and attrs["shape"]:
            return self.full(attrs["shape"], _number_of(attrs["value"]), attrs["dtype"], where)
        if op == "sum" and not attrs["dims"] and inputs[0] is not None and out == inputs[0].type:
            return inputs[0]
        if op == "cat" and len(inputs) == 1:
            return inputs[0]
        uniform = [None if v is None else v.uniform for v in inputs]
        if op in _UNIFORM_UNARY and uniform[0] is not None:
            return self._folded(_UNIFORM_UNARY[op], inputs, out, where)
        if op in _UNIFORM_BINARY:
            if uniform[0] is not None and uniform[1] is not None:
                return self._folded(_UNIFORM_BINARY[op], inputs, out, where)
            return self._neutral(op, inputs, uniform, out, where)
        return None

    def _simpler_view(self, op: str, x: Value, attrs: dict[str, Any], out: TensorType, where: str) -> Value | None:
        if op == "cast":
            if x.dtype == out.dtype:
                return x
            if x.uniform is not None:
                return self.full(out.shape, x.uniform, out.dtype, where)
            return None
        if x.uniform is not None:
            scalar = self.scalar(x.uniform, x.dtype, where)
            return None if op == "expand" and x is scalar and out.shape else self._expanded(scalar, out.shape, where)
        if op == "permute":
            if list(attrs["dims"]) == list(range(len(x.shape))):
                return x
            if _same_order(x.shape, attrs["dims"]):  # only dimensions of size 1 move
                return self.one("reshape", [x], {"shape": list(out.shape)}, where)
            if x.producer is not None and x.producer.op == "permute":
                first = x.producer.attrs["dims"]
                dims = [first[d] for d in attrs["dims"]]
                return self.one("permute", [x.producer.inputs[0]], {"dims": dims}, where)
            return None
        if out.shape == x.shape and op != "flip":
            return x
        if op == "reshape" and x.producer is not None and x.producer.op == "reshape":
            return self.one("reshape", [x.producer.inputs[0]], {"shape": list(out.shape)}, where)
        if op == "expand" and x.producer is not None and x.producer.op == "expand":
            return self.one("expand", [x.producer.inputs[0]], {"shape": list(out.shape)}, where)
        return None

    def _expanded(self, scalar: Value, shape: tuple[int, ...], where: str) -> Value:
        return scalar if not shape else self.one("expand", [scalar], {"shape": list(shape)}, where)

    def _simpler_where(self, inputs: Sequence[Value | None], out: TensorType, where: str) -> Value | None:
        condition, a, b = inputs
        assert condition is not None and a is not None and b is not None
        chosen = a if a is b or condition.uniform is True else (b if condition.uniform is False else None)
        if chosen is None:
            return None
        return self.one("expand", [chosen], {"shape": list(out.shape)}, where)

    def _neutral(
        self,
        op: str,
        inputs: Sequence[Value | None],
        uniform: list[Scalar | None],
        out: TensorType,
        where: str,
    ) -> Value | None:
        """x*1, x/1, x+0, x-0, x and true, x or false: the other operand, expanded if need be."""
        left, right = inputs[0], inputs[1]
        neutral = {"add": 0, "sub": 0, "mul": 1, "div": 1, "logical_and": True, "logical_or": False}.get(op)
        if neutral is None:
            return None
        kept = None
        if uniform[1] is not None and uniform[1] == neutral:
            kept = left
        elif uniform[0] is not None and uniform[0] == neutral and op not in ("sub", "div"):
            kept = right
        if kept is None or kept.dtype != out.dtype:
            return None
        return self.one("expand", [kept], {"shape": list(out.shape)}, where)

    def _folded(
        self, function: Callable[..., Any], inputs: Sequence[Value | None], out: TensorType, where: str
    ) -> Value | None:
        """The operator done on the numbers, in the operands' own precision."""
        operands = [np.dtype(v.dtype).type(v.uniform) for v in inputs if v is not None]
        with np.errstate(all="ignore"):
            result = function(*operands)
        return self.full(out.shape, result.item(), out.dtype, where)


def _same_order(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether the dimensions larger than 1 keep their order."""
    larger = [d for d in dims if shape[d] != 1]
    return larger == sorted(larger)


def _number_of(value: bool | int | float | str) -> Scalar:
    return float(value) if isinstance(value, str) else value


def _fitting(value: Scalar, dtype: str) -> bool | int | float | str:
    """A Python number as an attribute that holds exactly what ATen would store in the dtype."""
    if dtype == "bool":
        return bool(value)
    if dtype in INTEGER_RANGE:
        low, high = INTEGER_RANGE[dtype]
        return min(max(int(value), low), high)
    number = float(value)
    if math.isfinite(number):
        number = float(np.float32(number)) if abs(number) <= MAX_FLOAT32 else math.copysign(math.inf, number)
    return attribute_number(number)
