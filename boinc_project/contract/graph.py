"""The graph: a flat list of operators with static shapes, as plain data.

What it is: the whole computation of one step, written in the opset (opset.py), readable with the
standard library. What it is not: it holds no weights and no Python code. Values are numbered: the
graph's inputs are 0..n-1, then every node's outputs follow in order, so each value is made once.

Legend of the file form (canonical JSON, compressed with zstd):
    inputs   [{"name", "kind", "dtype", "shape"}]
    nodes    [{"op", "inputs": [value or null], "attrs", "outputs": [{"dtype", "shape"}], "where"}]
    outputs  [{"name", "kind", "value"}]
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from boinc_project.contract import canonical
from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import OPSET, OPSET_VERSION, TensorType, flops, infer

FORMAT = "boinc-train-graph"
MAX_GRAPH_BYTES = 32 << 20  # of JSON, after decompression; a 24-layer GPT step takes about 2 MB
MAX_NODES = 50_000
MAX_WHERE_CHARS = 200
MAX_VALUE_ELEMENTS = 1 << 34

INPUT_KINDS = frozenset(
    {
        "parameter",
        "buffer",
        "optimizer",
        "constant",
        "batch",
        "mask",
        "seed",
        "step",
        "learning_rate",
        "gradient",
        "weight",
    }
)
OUTPUT_KINDS = frozenset({"parameter", "buffer", "optimizer", "gradient", "metric"})


class GraphError(ContractError):
    """A graph is not well-formed; the message names the node."""


@dataclass(frozen=True)
class GraphInput:
    """A value given from outside for each step; `kind` says by whom (INPUT_KINDS)."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def type(self) -> TensorType:
        return TensorType(self.dtype, self.shape)


@dataclass(frozen=True)
class Node:
    """One operator: values in, attributes, types of the values out, and the model's line it came from."""

    op: str
    inputs: tuple[int | None, ...]
    attrs: Mapping[str, Any]
    outputs: tuple[TensorType, ...]
    where: str = ""


@dataclass(frozen=True)
class GraphOutput:
    """A value that the step hands back; `kind` is one of OUTPUT_KINDS."""

    name: str
    kind: str
    value: int


@dataclass(frozen=True)
class Graph:
    """Inputs, nodes in executable order, outputs. Made by GraphBuilder or `Graph.from_bytes`, both checked."""

    inputs: tuple[GraphInput, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[GraphOutput, ...]
    opset: int = OPSET_VERSION

    def value_types(self) -> list[TensorType]:
        """The type of every value, in value order."""
        types = [each.type for each in self.inputs]
        for node in self.nodes:
            types.extend(node.outputs)
        return types

    def output_types(self) -> dict[str, TensorType]:
        """Name -> type of each output, in order."""
        types = self.value_types()
        return {each.name: types[each.value] for each in self.outputs}

    def inputs_of_kind(self, *kinds: str) -> tuple[GraphInput, ...]:
        return tuple(each for each in self.inputs if each.kind in kinds)

    def outputs_of_kind(self, *kinds: str) -> tuple[GraphOutput, ...]:
        return tuple(each for each in self.outputs if each.kind in kinds)

    def operators(self) -> set[str]:
        """The names of the operators used."""
        return {node.op for node in self.nodes}

    def flops(self) -> int:
        """Floating-point operations of one run (a multiply-add counts two)."""
        types = self.value_types()
        total = 0
        for node in self.nodes:
            inputs = [None if v is None else types[v] for v in node.inputs]
            total += flops(node.op, inputs, node.attrs, node.outputs)
        return total

    def peak_bytes(self) -> int:
        """Bytes of all values alive at once, at worst, when each value is freed after its last use.

        Graph inputs count from the beginning to the end; views are counted as copies, so this is an
        upper estimate of what an executor needs besides operators' scratch memory.
        """
        types = self.value_types()
        last_use = self.last_uses()
        alive = sum(each.type.nbytes for each in self.inputs)
        peak = alive
        first = len(self.inputs)
        for index, node in enumerate(self.nodes):
            made = range(first, first + len(node.outputs))
            first += len(node.outputs)
            alive += sum(types[v].nbytes for v in made)
            peak = max(peak, alive)
            dying = {v for v in node.inputs if v is not None and v >= len(self.inputs)} | set(made)
            alive -= sum(types[v].nbytes for v in dying if last_use.get(v, index) == index)
        return peak

    def last_uses(self) -> dict[int, int]:
        """Value -> index of the last node that reads it; outputs of the graph never die."""
        last: dict[int, int] = {}
        for index, node in enumerate(self.nodes):
            for value in node.inputs:
                if value is not None:
                    last[value] = index
        for output in self.outputs:
            last[output.value] = len(self.nodes)
        return last

    def to_json(self) -> bytes:
        """Canonical JSON: the same graph gives the same bytes everywhere."""
        return canonical.dumps(
            {
                "format": FORMAT,
                "opset": self.opset,
                "inputs": [
                    {"name": i.name, "kind": i.kind, "dtype": i.dtype, "shape": list(i.shape)} for i in self.inputs
                ],
                "nodes": [
                    {
                        "op": n.op,
                        "inputs": list(n.inputs),
                        "attrs": dict(n.attrs),
                        "outputs": [{"dtype": t.dtype, "shape": list(t.shape)} for t in n.outputs],
                        "where": n.where,
                    }
                    for n in self.nodes
                ],
                "outputs": [{"name": o.name, "kind": o.kind, "value": o.value} for o in self.outputs],
            }
        )

    def digest(self) -> str:
        """SHA-256 of the canonical JSON, 64 hex digits."""
        return hashlib.sha256(self.to_json()).hexdigest()

    def to_bytes(self) -> bytes:
        """The file form: canonical JSON in one zstd frame that states its content size."""
        return canonical.compress(self.to_json())

    @staticmethod
    def from_bytes(data: bytes) -> Graph:
        """Read and check a graph file; raises ContractError that names the fault and the node."""
        return Graph.from_json(canonical.decompress(data, MAX_GRAPH_BYTES, "graph"))

    @staticmethod
    def from_json(text: bytes) -> Graph:
        """Read and check the JSON form; raises ContractError that names the fault and the node."""
        if len(text) > MAX_GRAPH_BYTES:
            raise GraphError(f"graph has {len(text)} bytes of JSON, more than {MAX_GRAPH_BYTES}", fault="too_large")
        return _from_document(canonical.loads(text, "graph"))


class GraphBuilder:
    """Builds a graph node by node; types are inferred and checked as it goes."""

    def __init__(self) -> None:
        self._inputs: list[GraphInput] = []
        self._nodes: list[Node] = []
        self._outputs: list[GraphOutput] = []
        self._types: list[TensorType] = []

    def input(self, name: str, kind: str, dtype: str, shape: Sequence[int]) -> int:
        """Declare an input; all inputs come before the first node. Returns its value number."""
        if self._nodes:
            raise GraphError(f"input {name!r} is declared after the first node")
        self._inputs.append(GraphInput(name, kind, dtype, tuple(shape)))
        self._types.append(self._inputs[-1].type)
        return len(self._types) - 1

    def node(
        self,
        op: str,
        inputs: Sequence[int | None],
        attrs: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> tuple[int, ...]:
        """Append an operator and return the value numbers of its outputs."""
        attributes = dict(attrs or {})
        types = infer(op, [None if v is None else self._types[v] for v in inputs], attributes)
        self._nodes.append(Node(op, tuple(inputs), attributes, types, where[:MAX_WHERE_CHARS]))
        first = len(self._types)
        self._types.extend(types)
        return tuple(range(first, len(self._types)))

    def type_of(self, value: int) -> TensorType:
        return self._types[value]

    def output(self, name: str, kind: str, value: int) -> None:
        self._outputs.append(GraphOutput(name, kind, value))

    def build(self) -> Graph:
        """The finished, checked graph."""
        graph = Graph(tuple(self._inputs), tuple(self._nodes), tuple(self._outputs))
        check(graph)
        return graph


def check(graph: Graph) -> None:
    """Raise GraphError unless the graph is well-formed: names, kinds, order of values, types, sizes."""
    if graph.opset != OPSET_VERSION:
        raise GraphError(
            f"graph is written in opset {graph.opset}; this program knows opset {OPSET_VERSION}",
            fault="opset",
        )
    if len(graph.nodes) > MAX_NODES:
        raise GraphError(f"graph has {len(graph.nodes)} nodes, more than {MAX_NODES}", fault="too_large")
    _check_names([each.name for each in graph.inputs], "input")
    _check_names([each.name for each in graph.outputs], "output")
    types: list[TensorType] = []
    for each in graph.inputs:
        if each.kind not in INPUT_KINDS:
            raise GraphError(f"graph input {each.name!r} has unknown kind {each.kind!r}", fault="kind")
        _check_type(each.type, f"graph input {each.name!r}")
        types.append(each.type)
    for index, node in enumerate(graph.nodes):
        place = f"graph node {index} ({node.op})"
        if node.op not in OPSET:
            raise GraphError(f"{place}: no such operator in opset {OPSET_VERSION}", fault="operator")
        for value in node.inputs:
            if value is not None and not 0 <= value < len(types):
                raise GraphError(f"{place}: reads value {value}, which does not exist yet", fault="order")
        try:
            expected = infer(node.op, [None if v is None else types[v] for v in node.inputs], node.attrs)
        except ContractError as error:
            raise GraphError(f"{place}: {error}", fault="types") from error
        if expected != node.outputs:
            raise GraphError(f"{place}: declares outputs {node.outputs}, makes {expected}", fault="types")
        for made in expected:
            _check_type(made, place)
        types.extend(expected)
    for output in graph.outputs:
        if output.kind not in OUTPUT_KINDS:
            raise GraphError(f"graph output {output.name!r} has unknown kind {output.kind!r}", fault="kind")
        if not 0 <= output.value < len(types):
            raise GraphError(f"graph output {output.name!r} names value {output.value}, which does not exist")


def _check_names(names: Sequence[str], what: str) -> None:
    seen = set()
    for name in names:
        if not name or len(name) > 500 or not name.isprintable():
            raise GraphError(f"graph {what} has an unusable name {name[:80]!r}", fault="name")
        if name in seen:
            raise GraphError(f"graph {what} {name!r} appears twice", fault="duplicate_name")
        seen.add(name)


def _check_type(kind: TensorType, place: str) -> None:
    if len(kind.shape) > 16 or kind.numel > MAX_VALUE_ELEMENTS:
        raise GraphError(f"{place}: shape {kind.shape} is out of bounds", fault="too_large")


def _from_document(document: Any) -> Graph:
    take = canonical.Taker(document, "graph", GraphError)
    take.only("format", "opset", "inputs", "nodes", "outputs")
    if take.text("format") != FORMAT:
        raise GraphError(f"this is not a graph file (format {document['format']!r})", fault="format")
    inputs = []
    for item in take.items("inputs", MAX_NODES):
        item.only("name", "kind", "dtype", "shape")
        inputs.append(GraphInput(item.text("name"), item.text("kind"), item.text("dtype"), item.integers("shape")))
    nodes = []
    for item in take.items("nodes", MAX_NODES):
        item.only("op", "inputs", "attrs", "outputs", "where")
        outputs = []
        for made in item.items("outputs", 64):
            made.only("dtype", "shape")
            outputs.append(TensorType(made.text("dtype"), made.integers("shape")))
        where = item.text("where")
        if len(where) > MAX_WHERE_CHARS:
            raise GraphError(f"{item.place}: `where` is longer than {MAX_WHERE_CHARS} characters", fault="too_large")
        attrs = item.mapping("attrs")
        nodes.append(Node(item.text("op"), item.optional_integers("inputs"), attrs, tuple(outputs), where))
    results = []
    for item in take.items("outputs", MAX_NODES):
        item.only("name", "kind", "value")
        results.append(GraphOutput(item.text("name"), item.text("kind"), item.integer("value")))
    graph = Graph(tuple(inputs), tuple(nodes), tuple(results), take.integer("opset"))
    check(graph)
    return graph
