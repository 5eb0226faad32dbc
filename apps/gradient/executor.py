"""The executor: runs a graph node by node on a backend.

What it is: a plan made once and a loop that follows it.

    Executor(graph, backend)   -> prepare every node, fold constants, find each value's last use
    Executor.run(inputs)       -> kernel after kernel; a value is dropped after its last use; outputs by name

What it is not: a judge of graphs. The graph has been read and checked by `boinc_project.contract.graph` and its
memory need has been bounded by the caller. The shape of this (run, node by node, free after last use, name the
node that failed) follows torch.fx.Interpreter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable

from apps.gradient.backends.backend import Backend, Call, DeviceLost, Kernel, Number, Tensor
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.graph import Graph, GraphBuilder, Node
from boinc_project.contract.opset import OPSET, TensorType

__all__ = ["Backend", "ExecutionError", "Executor", "apply", "missing_operators"]

# Values that need no input (masks, position numbers) are computed once and kept, within these bounds, so that
# keeping them cannot double the memory a graph was admitted with.
FOLD_BYTES_EACH = 4 << 20
FOLD_BYTES_TOTAL = 64 << 20

# What is not a node's fault, and passes as it is.
CIRCUMSTANCES = (MemoryError, UnfitHost, DeviceLost)

ABSENT = -1  # where an optional input is missing; the list of values ends with None


class ExecutionError(RuntimeError):
    """A node failed; the text names its number, operator, input types and the model's line."""

    def __init__(self, index: int, node: Node, types: str, cause: BaseException) -> None:
        place = f" at {node.where}" if node.where else ""
        reason = str(cause) or type(cause).__name__
        super().__init__(f"node {index} {node.op}({types}){place} failed: {reason}")
        self.index, self.op, self.where = index, node.op, node.where


def failure(graph: Graph, index: int, cause: BaseException) -> ExecutionError:
    """The error of a graph's node."""
    node, values = graph.nodes[index], graph.value_types()
    types = ", ".join("none" if value is None else str(values[value]) for value in node.inputs)
    return ExecutionError(index, node, types, cause)


@dataclass(frozen=True)
class _Step:
    """One node of the plan: values[first : first+count] = kernel(values[arguments]); then drop `dead`."""

    index: int
    kernel: Kernel
    arguments: tuple[int, ...]
    first: int
    count: int
    dead: tuple[int, ...]


class Executor:
    """A graph prepared for a backend whose operators run one after another; `run` may be called any number of times.

    With `verify` every output's dtype and shape is compared with the graph's: for tests and for new backends.
    """

    def __init__(self, graph: Graph, backend: Backend, verify: bool = False) -> None:
        missing = sorted(graph.operators() - set(backend.ops))
        if missing:
            raise ValueError(f"the {backend.name} backend lacks {', '.join(missing)}")
        self.graph, self.backend, self._verify = graph, backend, verify
        self._types = graph.value_types()
        self._constants: list[Tensor | None] = [None] * (len(self._types) + 1)
        with backend.scope():
            self._steps = self._plan()

    def run(self, inputs: Mapping[str, Tensor], check: Callable[[], None] | None = None) -> dict[str, Tensor]:
        """Outputs by name for inputs by name (more inputs than the graph names are allowed).

        `check` is called before each node and stops the run by raising; its exception passes unchanged. Outputs
        may share memory with inputs. Raises ValueError for a missing or wrong input, ExecutionError for a node.
        """
        values = list(self._constants)
        for position, wanted in enumerate(self.graph.inputs):
            if wanted.name not in inputs:
                raise ValueError(f"graph input {wanted.name!r} is missing")
            given = self.backend.type_of(inputs[wanted.name])
            if given != self._types[position]:
                raise ValueError(f"graph input {wanted.name!r} must be {self._types[position]}, not {given}")
            values[position] = inputs[wanted.name]
        with self.backend.scope():
            self._run_steps(values, check)
        return {output.name: values[output.value] for output in self.graph.outputs}

    def _run_steps(self, values: list[Tensor | None], check: Callable[[], None] | None) -> None:
        get = values.__getitem__
        for index, kernel, arguments, first, count, dead in self._loop:
            if check is not None:
                check()
            try:  # the results go straight into the list: a name for them would keep them alive
                if count == 1:
                    values[first] = kernel(*map(get, arguments))
                else:
                    values[first : first + count] = kernel(*map(get, arguments))
            except CIRCUMSTANCES:
                raise
            except Exception as error:
                raise self._failure(index, error) from error
            if self._verify:
                self._check_outputs(index, values[first : first + count])
            for value in dead:
                values[value] = None

    # --- the plan -----------------------------------------------------------------------------------------------

    def _plan(self) -> list[_Step]:
        last_use = self.graph.last_uses()
        folded_bytes = 0
        steps = []
        first = len(self.graph.inputs)
        for index, node in enumerate(self.graph.nodes):
            made = range(first, first + len(node.outputs))
            try:
                kernel = self.backend.ops[node.op](self._call(node))
            except Exception as error:
                raise self._failure(index, error) from error
            size = sum(self._types[value].nbytes for value in made)
            if self._foldable(node) and size <= FOLD_BYTES_EACH and folded_bytes + size <= FOLD_BYTES_TOTAL:
                folded_bytes += size
                self._fold(index, node, kernel, made)
            else:
                used = {value for value in node.inputs if value is not None and self._constants[value] is None}
                dead = [v for v in sorted(used | set(made)) if last_use.get(v, index) == index]
                arguments = tuple(ABSENT if value is None else value for value in node.inputs)
                steps.append(_Step(index, kernel, arguments, first, len(made), tuple(dead)))
            first = made.stop
        self._drop_unused_constants(steps)
        self._loop = [(s.index, s.kernel, s.arguments, s.first, s.count, s.dead) for s in steps]
        return steps

    def _call(self, node: Node) -> Call:
        types = tuple(None if value is None else self._types[value] for value in node.inputs)
        return Call(node.op, node.attrs, types, node.outputs, tuple(map(self._immediate, node.inputs)))

    def _immediate(self, value: int | None) -> Number | None:
        if value is None or self._constants[value] is None or self._types[value].shape:
            return None
        number: Number = self.backend.to_numpy(self._constants[value]).item()
        return number

    def _foldable(self, node: Node) -> bool:
        return all(value is not None and self._constants[value] is not None for value in node.inputs)

    def _fold(self, index: int, node: Node, kernel: Kernel, made: range) -> None:
        try:
            result = kernel(*(self._constants[value] for value in node.inputs if value is not None))
        except Exception as error:
            raise self._failure(index, error) from error
        self._constants[made.start : made.stop] = [result] if len(made) == 1 else list(result)
        if self._verify:
            self._check_outputs(index, self._constants[made.start : made.stop])

    def _drop_unused_constants(self, steps: list[_Step]) -> None:
        used = {value for step in steps for value in step.arguments}
        used |= {output.value for output in self.graph.outputs}
        for value in range(len(self._constants)):
            if value not in used:
                self._constants[value] = None

    # --- failures -----------------------------------------------------------------------------------------------

    def _failure(self, index: int, cause: Exception) -> ExecutionError:
        return failure(self.graph, index, cause)

    def _check_outputs(self, index: int, made: list[Any]) -> None:
        node = self.graph.nodes[index]
        given: tuple[TensorType, ...] = tuple(map(self.backend.type_of, made))
        if given != node.outputs:
            text = ", ".join(map(str, given))
            raise self._failure(index, TypeError(f"the {self.backend.name} backend made {text}"))


def apply(
    backend: Backend, op: str, tensors: Sequence[Tensor | None], attrs: Mapping[str, Any] | None = None
) -> tuple[Tensor, ...]:
    """One operator on tensors, as a graph of one node. Raises what fails."""
    builder = GraphBuilder()
    given = {f"in{i}": tensor for i, tensor in enumerate(tensors) if tensor is not None}
    types = {name: backend.type_of(tensor) for name, tensor in given.items()}
    values = {name: builder.input(name, "constant", kind.dtype, kind.shape) for name, kind in types.items()}
    for number, value in enumerate(builder.node(op, [values.get(f"in{i}") for i in range(len(tensors))], attrs)):
        builder.output(f"out{number}", "metric", value)
    try:
        return tuple(backend.program(builder.build()).run(given).values())
    except ExecutionError as error:
        raise (error.__cause__ or error) from None


def missing_operators(backend: Backend) -> list[str]:
    """Operators of the opset that a backend lacks; empty for every backend that is released."""
    return sorted(set(OPSET) - set(backend.ops))
