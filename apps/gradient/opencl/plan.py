"""The plan of a graph: its launches in order, and where every value lies. Pure: no device is needed to make one.

    lower every node -> launches without dead ones -> lives of the storages -> places in arenas

A value is *given* (an input of the graph), *kept* (an output, a constant; they outlive a run and have memory of
their own) or *passing* (placed in an arena, which is shared by values that are never alive together).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from apps.gradient.backends.backend import Call
from apps.gradient.executor import failure
from apps.gradient.opencl.chains import is_whole
from apps.gradient.opencl.emitter import Emitter, Lower
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.memory import DoesNotFit, Layout, Life, lay_out
from apps.gradient.opencl.values import Fault, Launch, Read, Storage, View, Write
from boinc_project.contract.errors import TooLittleMemory
from boinc_project.contract.graph import Graph

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Plan:
    """A graph ready for a device.

    inputs     storage number of each graph input, by name
    outputs    by name: the storage that becomes the output, or the name of the input that is it, unchanged
    taken      outputs that use the memory of an input of the same name, which is gone after the run
    constants  arrays to upload once, by storage number
    layout     places of the passing storages
    fault      whether any launch reports bad indices
    """

    graph: Graph
    launches: tuple[Launch, ...]
    storages: tuple[Storage, ...]
    inputs: Mapping[str, int]
    outputs: Mapping[str, int | str]
    taken: AbstractSet[str]
    constants: Mapping[int, Array]
    layout: Layout
    fault: bool

    @property
    def arena_bytes(self) -> int:
        """Device memory for passing values."""
        return sum(self.layout.arenas)


def make_plan(graph: Graph, facts: DeviceFacts, ops: Mapping[str, Lower], consume: AbstractSet[str]) -> Plan:
    """Plan a graph. Inputs of the kinds in `consume` may be overwritten by the output of the same name.

    Raises ExecutionError for a node that cannot be lowered, TooLittleMemory if a tensor is too large for the device.
    """
    emit = Emitter(facts, ops)
    inputs = [emit.like(each.type) for each in graph.inputs]
    for each, view in zip(graph.inputs, inputs):
        _check_size(f"input {each.name}", view.storage, facts)
    values: list[View] = list(inputs)
    for index, node in enumerate(graph.nodes):
        emit.node = index
        given = [None if value is None else values[value] for value in node.inputs]
        types = tuple(None if view is None else view.type for view in given)
        numbers = tuple(None if view is None or view.shape else emit.number_of(view) for view in given)
        try:
            made = ops[node.op](Call(node.op, node.attrs, types, node.outputs, numbers), given, emit)
        except Exception as error:
            raise failure(graph, index, error) from error
        assert tuple(view.type for view in made) == node.outputs, (node.op, made, node.outputs)
        values += made
    outputs, ends = _outputs(graph, emit, values, len(inputs))
    launches = emit.finish(ends)
    launches, outputs, taken = _take_inputs(graph, launches, inputs, outputs, consume)
    kept = {view.storage.number for view in inputs} | set(emit.constants)
    kept |= {each for each in outputs.values() if isinstance(each, int)}
    launches = _reuse(launches, kept)
    used = {storage.number for launch in launches for side in launch.storages() for storage in side}
    try:
        layout = lay_out(_lives(launches, kept), facts.max_allocation)
    except DoesNotFit as error:
        raise TooLittleMemory(f"{error} ({facts.name})") from error
    for number in sorted(kept):
        _check_size("a tensor", emit.storages[number], facts)
    return Plan(
        graph=graph,
        launches=tuple(launches),
        storages=tuple(emit.storages),
        inputs={each.name: view.storage.number for each, view in zip(graph.inputs, inputs)},
        outputs=outputs,
        taken=taken,
        constants={number: array for number, array in emit.constants.items() if number in used | set(outputs.values())},
        layout=layout,
        fault=any(isinstance(argument, Fault) for launch in launches for argument in launch.arguments),
    )


def _check_size(what: str, storage: Storage, facts: DeviceFacts) -> None:
    if storage.nbytes > facts.max_allocation:
        raise TooLittleMemory(
            f"{what} has {storage.nbytes} bytes; the largest buffer of {facts.name} is {facts.max_allocation} bytes"
        )


def _outputs(
    graph: Graph, emit: Emitter, values: Sequence[View], inputs: int
) -> tuple[dict[str, int | str], list[View]]:
    """What each output is, and the views to compute. An output has a storage of its own, or is an input."""
    found: dict[str, int | str] = {}
    ends: list[View] = []
    names = [each.name for each in graph.inputs]
    for output in graph.outputs:
        view = values[output.value]
        number = view.storage.number
        if number < inputs and is_whole(view) and view.type == graph.inputs[number].type:
            found[output.name] = names[number]
            continue
        if number < inputs or number in found.values() or number in emit.constants or not is_whole(view):
            target = emit.like(view.type)
            emit.copy(view, target)
            view = target
        found[output.name] = view.storage.number
        ends.append(view)
    return found, ends


def _take_inputs(
    graph: Graph,
    launches: list[Launch],
    inputs: Sequence[View],
    outputs: dict[str, int | str],
    consume: AbstractSet[str],
) -> tuple[list[Launch], dict[str, int | str], set[str]]:
    """Let outputs take the memory of the inputs of their name, where the launch that makes one is the last to read
    the other, and reads each element before it writes it (a chain does, if both are walked alike)."""
    last_read: dict[int, int] = {}
    writer: dict[int, list[int]] = {}
    for index, launch in enumerate(launches):
        read, written = launch.storages()
        last_read.update({storage.number: index for storage in read})
        for storage in written:
            writer.setdefault(storage.number, []).append(index)
    passed_on = {each for each in outputs.values() if isinstance(each, str)}
    replaced: dict[Storage, Storage] = {}
    taken: set[str] = set()
    for each, view in zip(graph.inputs, inputs):
        made = outputs.get(each.name)
        if each.kind not in consume or not isinstance(made, int) or each.name in passed_on:
            continue
        writers = writer.get(made, [])
        if len(writers) != 1 or last_read.get(view.storage.number, -1) > writers[0]:
            continue
        launch = launches[writers[0]]
        reads = [a.view for a in launch.arguments if isinstance(a, Read) and a.view.storage == view.storage]
        writes = [a.view for a in launch.arguments if isinstance(a, Write) and a.view.storage.number == made]
        alike = launch.in_place and all(is_whole(v) for v in (*reads, *writes)) and len(writes) == 1
        if alike and writes[0].storage.dtype == view.dtype and last_read.get(made, -1) < 0:
            replaced[writes[0].storage] = view.storage
            outputs[each.name] = view.storage.number
            taken.add(each.name)
    return [_renamed(launch, replaced) for launch in launches], outputs, taken


def _reuse(launches: list[Launch], kept: AbstractSet[int]) -> list[Launch]:
    """Let a passing value take the memory of one that the launch which makes it reads for the last time."""
    ends = _ends(launches)
    replaced: dict[Storage, Storage] = {}
    for index, launch in enumerate(launches):
        if not launch.in_place:
            continue
        views: dict[Storage, list[View]] = {}
        for argument in launch.arguments:
            if isinstance(argument, (Read, Write)) and argument.view.storage.number not in kept:
                views.setdefault(argument.view.storage, []).append(argument.view)
        whole_ones = [storage for storage, walks in views.items() if all(map(is_whole, walks))]
        read, written = launch.storages()
        free = [storage for storage in whole_ones if storage not in written and ends[storage][1] == index]
        for target in whole_ones:
            if target not in written or target in read or ends[target][0] != index:
                continue
            for source in free:
                if (source.dtype, source.elements) == (target.dtype, target.elements):
                    replaced[target] = replaced.get(source, source)
                    free.remove(source)
                    break
    return [_renamed(launch, replaced) for launch in launches]


def _renamed(launch: Launch, replaced: Mapping[Storage, Storage]) -> Launch:
    def other(argument: Any) -> Any:
        if isinstance(argument, (Read, Write)) and argument.view.storage in replaced:
            return replace(argument, view=replace(argument.view, storage=replaced[argument.view.storage]))
        return argument

    return replace(launch, arguments=tuple(map(other, launch.arguments)))


def _lives(launches: Sequence[Launch], kept: AbstractSet[int]) -> list[Life]:
    """The lives of the passing storages."""
    return [Life(s.number, s.nbytes, *ends) for s, ends in _ends(launches).items() if s.number not in kept]


def _ends(launches: Sequence[Launch]) -> dict[Storage, tuple[int, int]]:
    """The first and the last launch that uses each storage."""
    ends: dict[Storage, tuple[int, int]] = {}
    for index, launch in enumerate(launches):
        read, written = launch.storages()
        for storage in read | written:
            ends[storage] = (ends.get(storage, (index, index))[0], index)
    return ends
