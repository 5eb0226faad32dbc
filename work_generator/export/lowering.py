"""From a trace to the opset: walks the ATen operators through the translation tables.

What it is: `LOWERINGS`, all tables together (ATen's name -> entry), and `Lowering`, which applies them.
What it is not: tracing (tracing.py), the entries (aten_*.py) or clean-up (draft.py).
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType
from work_generator.export import (
    aten_constants,
    aten_elementwise,
    aten_movement,
    aten_networks,
    aten_reductions,
)
from work_generator.export.context import (
    DEFAULT_REMEDY,
    DTYPES,
    Context,
    Entry,
    refusal,
    without_remedy_of,
)
from work_generator.export.draft import Draft, Value
from work_generator.export.errors import ExportError

# Constants that the model builds while it runs are evaluated here only while they are small.
MAX_CONSTANT_BYTES = 64 << 10

LOWERINGS: Mapping[str, Entry] = {
    **aten_elementwise.ENTRIES,
    **aten_movement.ENTRIES,
    **aten_constants.ENTRIES,
    **aten_reductions.ENTRIES,
    **aten_networks.ENTRIES,
}


class Lowering:
    """One walk: fx nodes in order, each replaced by what its entry writes into the draft."""

    def __init__(self, draft: Draft, random: tuple[Value, Value] | None) -> None:
        self.draft = draft
        self.random = random
        self.values: dict[fx.Node, Any] = {}
        self.constants: dict[str, Tensor] = {}  # tensors found in the trace that must travel, by input name
        self.known: dict[fx.Node, Tensor] = {}  # small values that do not depend on any input
        self.mixes_samples = False
        self._constant_inputs: dict[str, Value] = {}

    def walk(self, module: fx.GraphModule, inputs: Sequence[Value]) -> list[Value]:
        """Values of the trace's outputs."""
        waiting = iter(inputs)
        for node in module.graph.nodes:
            _where_of(node)
            if node.op == "placeholder":
                self.values[node] = next(waiting)
            elif node.op == "get_attr":
                self.known[node] = _attribute(module, str(node.target)).detach()
            elif node.op == "call_function" and node.target is operator.getitem:
                self._getitem(node)
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                results = [self._resolved(each) for each in node.args[0]]
                return [r if isinstance(r, Value) else self.draft.scalar(r, "float32") for r in results]
        raise AssertionError("a traced graph ends in its outputs")

    def _getitem(self, node: fx.Node) -> None:
        source, position = node.args
        if source in self.known:
            self.known[node] = self.known[source][position]  # type: ignore[index]
        else:
            self.values[node] = self.values[source][position]  # type: ignore[index]

    def _call(self, node: fx.Node) -> None:
        if not self._is_known(node):
            self.values[node] = self._emitted(node)

    def _emitted(self, node: fx.Node) -> Any:
        """What the table's entry writes for the node."""
        target = str(node.target)
        if target not in LOWERINGS:
            target = target.replace("_copy.", ".")  # view_copy and its like are views without sharing
        where = _where_of(node)
        entry = LOWERINGS.get(target)
        if entry is None:
            raise refusal(str(node.target), "is not in the opset", where, without_remedy_of(target))
        context = Context(self.draft, target, _types(node, where), where, self.random, _is_contiguous(node))
        arguments = [self._resolved(a) for a in node.args]
        named = {key: self._resolved(a) for key, a in node.kwargs.items()}
        try:
            made = entry(context, *arguments, **named)
        except ContractError as error:
            raise refusal(target, f"cannot be written in the opset: {error}", where, DEFAULT_REMEDY) from error
        except TypeError as error:
            problem = f"is called with arguments that are not supported ({error})"
            raise refusal(target, problem, where, DEFAULT_REMEDY) from error
        self._check_types(context, made)
        if target == "aten.native_batch_norm.default":
            made = self._updated_statistics(node, made)  # type: ignore[arg-type]
        return made

    def _is_known(self, node: fx.Node) -> bool:
        """Compute a small node whose inputs are all known, so that only its result need be written."""
        if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
            return False
        values = [v for v in (node.meta.get("val"),) if isinstance(v, Tensor)]
        if len(values) != 1 or values[0].numel() * values[0].element_size() > MAX_CONSTANT_BYTES:
            return False
        if any(each not in self.known for each in node.all_input_nodes):
            return False
        if "empty" in str(node.target):
            self.known[node] = torch.zeros(values[0].shape, dtype=values[0].dtype)
            return True
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        self.known[node] = node.target(*arguments[0], **arguments[1])
        return True

    def _resolved(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in self.known and argument not in self.values:
                self.values[argument] = self._written(argument)
            return self.values[argument]
        if isinstance(argument, list | tuple):
            return [self._resolved(each) for each in argument]
        return argument

    def _written(self, node: fx.Node) -> Any:
        """A known tensor as the cheapest value: one number, a progression, or an input that travels once."""
        tensor, where = self.known[node], _where_of(node)
        if tensor.dtype == torch.float64 and tensor.dim() == 0:
            return tensor.item()  # as a Python number it follows the other operand's dtype, as ATen has it
        if tensor.dtype in (torch.float64, torch.float16, torch.bfloat16):
            tensor = tensor.float()
        if tensor.dtype in (torch.int16, torch.int8):
            tensor = tensor.long()
        dtype = DTYPES.get(tensor.dtype)
        if dtype is None:
            raise refusal(str(node.target), f"makes {tensor.dtype}", where, "use float32 or int64")
        if not tensor.numel():
            return self.draft.full(tensor.shape, 0, dtype, where)
        first = tensor.flatten()[0]
        if bool((tensor == first).all()) or (tensor.is_floating_point() and bool(tensor.isnan().all())):
            return self.draft.full(tensor.shape, first.item(), dtype, where)
        if dtype == "int64":
            flat = tensor.flatten()
            start, step, length = int(first), int(flat[1] - flat[0]), len(flat)
            if torch.equal(flat, torch.arange(length) * step + start):
                attrs = {"start": start, "step": step, "length": length, "dtype": dtype}
                line = self.draft.one("arange", [], attrs, where)
                return self.draft.one("reshape", [line], {"shape": list(tensor.shape)}, where)
        if node.op == "call_function":
            try:  # an executor computes what depends on no input once, which is cheaper than sending it
                return self._emitted(node)
            except ExportError:
                pass  # its result is known all the same
        return self._constant(tensor.contiguous(), dtype)

    def _constant(self, tensor: Tensor, dtype: str) -> Value:
        """An input named by its content, so that equal tensors of all graphs of a job are one."""
        content = f"{dtype}{list(tensor.shape)}".encode() + tensor.numpy().tobytes()
        name = f"constant/traced.{hashlib.sha256(content).hexdigest()[:16]}"
        if name not in self.constants:
            self.constants[name] = tensor
            self._constant_inputs[name] = self.draft.input(name, "constant", dtype, tensor.shape)
        return self._constant_inputs[name]

    def _updated_statistics(self, node: fx.Node, made: tuple[Value, ...]) -> tuple[Value, ...]:
        """ATen changes the running statistics in place: whoever reads them later reads the new ones."""
        if node.args[5]:
            self.mixes_samples = True
            for argument, value in zip(node.args[3:5], made[3:], strict=True):
                if isinstance(argument, fx.Node):
                    self.values[argument] = value
        return made[:3]

    def _check_types(self, context: Context, made: Any) -> None:
        """An entry must give what ATen gave; anything else is a fault of the table, not of the model."""
        results = made if isinstance(made, tuple) else (made,)
        for value, expected in zip(results, context.out, strict=False):
            if value is not None and expected is not None and value.type != expected:
                # Empty statistics of a batch norm in evaluation mode have no counterpart.
                if context.target == "aten.native_batch_norm.default" and 0 in expected.shape:
                    continue
                raise AssertionError(f"{context.target} gave {value.type}, ATen gives {expected}")


def _attribute(module: fx.GraphModule, path: str) -> Tensor:
    found: Any = module
    for part in path.split("."):
        found = getattr(found, part)
    assert isinstance(found, Tensor), path
    return found


def _where_of(node: fx.Node) -> str:
    """The model's line; a backward node takes it from the nearest forward node that it reads."""
    where = node.meta.get("where")
    if where is None:
        for source in node.all_input_nodes:
            found = source.meta.get("where")
            if found:
                where = found if found.startswith("backward of ") else f"backward of {found}"
        node.meta["where"] = where = where or ""
    return str(where)


def _is_contiguous(node: fx.Node) -> bool:
    sources = node.all_input_nodes
    first = sources[0].meta.get("val") if sources else None
    return first.is_contiguous() if isinstance(first, Tensor) else True


def _types(node: fx.Node, where: str) -> list[TensorType | None]:
    values = node.meta.get("val")
    return [_type(node, v, where) for v in (values if isinstance(values, list | tuple) else [values])]


def _type(node: fx.Node, value: Any, where: str) -> TensorType | None:
    if not isinstance(value, Tensor):
        return None
    if value.dtype not in DTYPES:
        name = str(value.dtype).removeprefix("torch.")
        raise refusal(
            str(node.target), f"makes {name}", where, "use float32 (no .half(), .double(), autocast) or int64"
        )
    if any(not isinstance(size, int) for size in value.shape):
        raise refusal(
            str(node.target),
            "has a dynamic shape",
            where,
            "make every shape a number that is known beforehand",
        )
    return TensorType(DTYPES[value.dtype], tuple(value.shape))
