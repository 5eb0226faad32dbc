"""Values that are computed again where they are needed rather than kept: less memory for a little more work.

A training graph keeps many values of its forward half for the backward one. Some of them are elementwise functions
of values that are kept anyway, gelu of a layer's output above all. Such a value is forgotten after its last early
use and made again just before its first late one, by copies of the nodes that made it; the numbers are the same
bits. (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", for cheap operators only.)

Pure: a graph comes in, a graph goes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from boinc_project.contract.graph import Graph, GraphBuilder, Node

FAR = 24  # nodes between two uses: less is within a layer, where nothing is gained
MOST_COPIES = 12  # nodes copied for one value
VIEWS = frozenset({"reshape", "permute", "expand", "slice", "flip"})  # their outputs share memory with their inputs


class _Uses:
    """Which node makes a value and which nodes read its memory, through views of it or not."""

    def __init__(self, graph: Graph) -> None:
        self.inputs = len(graph.inputs)
        self.maker: dict[int, int] = {}
        self.root = {value: value for value in range(len(graph.inputs))}  # the value whose memory it shares
        self.readers: dict[int, list[int]] = {}  # root -> nodes that are no views, in order
        self.views: dict[int, list[int]] = {}  # root -> values that are views of it
        value = len(graph.inputs)
        for index, node in enumerate(graph.nodes):
            given = [each for each in node.inputs if each is not None]
            for made in range(value, value + len(node.outputs)):
                self.maker[made] = index
                self.root[made] = self.root[given[0]] if node.op in VIEWS else made
                if node.op in VIEWS:
                    self.views.setdefault(self.root[made], []).append(made)
            value += len(node.outputs)
            if node.op not in VIEWS:
                for root in {self.root[each] for each in given}:
                    self.readers.setdefault(root, []).append(index)
        self.outputs = {self.root[output.value] for output in graph.outputs}


def recomputed(graph: Graph, cheap: AbstractSet[str], least_bytes: int, far: int = FAR) -> Graph:
    """The graph in which values of at least `least_bytes` that `cheap` operators make are not kept for long.

    A value is made again only from what is in memory at that moment anyway, and only if `far` nodes lie between two
    of its uses.
    """
    uses = _Uses(graph)
    types = graph.value_types()
    gone: dict[int, tuple[int, int]] = {}  # root -> the nodes between which it is not in memory
    again: dict[int, list[int]] = {}  # node -> values to make again before it, in order
    for value, index in uses.maker.items():
        node = graph.nodes[index]
        if node.op not in cheap or uses.root[value] != value or value in uses.outputs:
            continue
        gap = _widest_gap([index, *uses.readers.get(value, ())])
        if types[value].nbytes < least_bytes or gap[1] - gap[0] < far:
            continue
        if _is_cheap(graph, uses, gone, cheap, value, gap[1]):
            gone[value] = gap
            again.setdefault(gap[1], []).append(value)
    return _rewritten(graph, uses, gone, again) if again else graph


def _widest_gap(places: Sequence[int]) -> tuple[int, int]:
    """Neighbours that are farthest apart."""
    return max(zip(places, places[1:]), key=lambda pair: pair[1] - pair[0], default=(0, 0))


def _is_there(uses: _Uses, gone: Mapping[int, tuple[int, int]], value: int, at: int) -> bool:
    """Whether a value is in memory when node `at` begins, whatever is done about the value in question."""
    root = uses.root[value]
    if root < uses.inputs or root in uses.outputs:
        return True
    if root in gone and gone[root][0] < at < gone[root][1]:
        return False
    return uses.readers.get(root, [-1])[-1] >= at


def _is_cheap(
    graph: Graph, uses: _Uses, gone: Mapping[int, tuple[int, int]], cheap: AbstractSet[str], value: int, at: int
) -> bool:
    """Whether a few cheap nodes make a value from what is in memory at a place."""
    wanted = [value]
    copied: set[int] = set()
    while wanted and len(copied) < MOST_COPIES:
        index = uses.maker[wanted.pop()]
        if index in copied:
            continue
        node = graph.nodes[index]
        if node.op not in cheap and node.op not in VIEWS:
            return False
        copied.add(index)
        absent = (e for e in node.inputs if e is not None and not _is_there(uses, gone, e, at))
        wanted += absent
    return not wanted


def _rewritten(
    graph: Graph, uses: _Uses, gone: Mapping[int, tuple[int, int]], again: Mapping[int, Sequence[int]]
) -> Graph:
    builder = GraphBuilder()
    now = {value: builder.input(i.name, i.kind, i.dtype, i.shape) for value, i in enumerate(graph.inputs)}

    def append(node: Node, names: Mapping[int, int]) -> tuple[int, ...]:
        given = [None if each is None else names[each] for each in node.inputs]
        return builder.node(node.op, given, node.attrs, node.where)

    def make_again(value: int, at: int, names: dict[int, int]) -> int:
        """`names` are the present ones, with what is made again on the way to `value`."""
        node = graph.nodes[uses.maker[value]]
        for each in node.inputs:
            if each is not None and not _is_there(uses, gone, each, at):
                make_again(each, at, names)
        (names[value],) = append(node, names)
        return names[value]

    value = len(graph.inputs)
    for index, node in enumerate(graph.nodes):
        for wanted in again.get(index, ()):
            now[wanted] = make_again(wanted, index, dict(now))
            for view in uses.views.get(wanted, ()):
                if uses.maker[view] < index:  # those that nobody reads from here on cost nothing
                    (now[view],) = append(graph.nodes[uses.maker[view]], now)
        for made in append(node, now):
            now[value] = made
            value += 1
    for output in graph.outputs:
        builder.output(output.name, output.kind, now[output.value])
    return builder.build()
