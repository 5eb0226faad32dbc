"""Chains: elementwise operators that become one kernel.

An elementwise operator is not launched when it is lowered. It becomes an entry of a chain: a pending kernel whose
entries all walk over the same number of elements. A later elementwise operator that reads a pending value in the
order in which it is made joins the chain, and chains meet where an operator reads from two. The chain is completed,
that is put among the launches, when something else reads one of its values. At the end, values that nobody reads
are not stored at all: that is what fusion saves.

    entry = operator(operands) -> one value per element;  operand = an earlier entry, a tensor in memory, or a number

Correctness needs no analysis of the graph: a chain is completed before anything that reads its values, and its own
inputs were completed before it, since reading them completes them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from apps.gradient.backends.backend import Number
from apps.gradient.opencl.values import Storage, View
from apps.gradient.opencl.walks import collapsed, expanded

MAX_ENTRIES = 48  # of one chain: more only makes the compiler slow
MAX_LOADS = 8  # tensors in memory that one chain reads


@dataclass(frozen=True)
class Ref:
    """An operand: the value of an earlier entry."""

    entry: int


@dataclass(frozen=True)
class Load:
    """An operand: a tensor in memory, walked in the shape of its view."""

    view: View


@dataclass(frozen=True)
class Literal:
    """An operand: a number."""

    value: Number


Operand = Union[Ref, Load, Literal]


@dataclass
class Entry:
    """One operator of a chain. `store` is where its value belongs; `node` is the graph's, for messages."""

    op: str
    attrs: Mapping[str, Any]
    dtype: str
    operand_dtypes: tuple[str, ...]
    operands: tuple[Operand, ...]
    store: View
    node: int


@dataclass(eq=False)
class Chain:
    """A pending or completed kernel over `numel` elements. `cuts` are the sizes of the trailing blocks in which all
    walks can be followed together (each divides the next; the last is numel)."""

    numel: int
    cuts: tuple[int, ...]
    entries: list[Entry] = field(default_factory=list)

    def loads(self) -> set[View]:
        """Tensors in memory that it reads."""
        return {o.view for e in self.entries for o in e.operands if isinstance(o, Load)}

    def absorb(self, other: Chain, cuts: tuple[int, ...]) -> None:
        """Take over the entries of another chain, which does not depend on this one."""
        shift = len(self.entries)
        for entry in other.entries:
            operands = tuple(Ref(o.entry + shift) if isinstance(o, Ref) else o for o in entry.operands)
            self.entries.append(
                Entry(entry.op, entry.attrs, entry.dtype, entry.operand_dtypes, operands, entry.store, entry.node)
            )
        self.cuts = cuts


def cuts_of(view: View) -> tuple[int, ...]:
    """Sizes of the trailing blocks of a view's walk, joined where the walk is regular."""
    sizes, _ = collapsed(view.shape, view.strides)
    found: list[int] = []
    block = 1
    for size in reversed(sizes):
        block *= size
        found.append(block)
    return tuple(found) or (1,)


def merged(*lists: Sequence[int]) -> tuple[int, ...] | None:
    """Cuts that refine all of these, or None if some do not nest."""
    cuts = sorted({cut for each in lists for cut in each})
    return tuple(cuts) if all(b % a == 0 for a, b in zip(cuts, cuts[1:])) else None


def strides_at(view: View, cuts: Sequence[int]) -> tuple[int, ...]:
    """The view's stride along each block of a chain, outermost first."""
    sizes, (strides,) = collapsed(view.shape, view.strides)
    found: list[int] = []
    inner, axis, block = 1, len(sizes) - 1, sizes[-1] if sizes else 1
    below = 1
    for cut in cuts:
        while axis > 0 and below >= block:
            inner, axis = block, axis - 1
            block *= sizes[axis]
        found.append(strides[axis] * (below // inner) if sizes else 0)
        below = cut
    return tuple(reversed(found))


class Chains:
    """The pending chains of an emitter."""

    def __init__(self) -> None:
        self._pending: dict[int, list[Chain]] = {}  # storage -> chains that will write to it
        self._values: dict[int, tuple[Chain, int]] = {}  # storage -> the entry whose value fills it, while pending
        self._numbers: dict[int, Number] = {}  # storage -> the number that fills it
        self.completed: list[Chain] = []

    def number_of(self, view: View) -> Number | None:
        """The number that fills a tensor, if that is known."""
        return self._numbers.get(view.storage.number)

    def append(
        self,
        op: str,
        attrs: Mapping[str, Any],
        inputs: Sequence[View],
        store: View,
        node: int,
    ) -> list[Chain]:
        """Add an operator over the elements of `store`; returns chains that had to be completed first, in order."""
        if store.numel == 0:
            return []
        done: list[Chain] = []
        views = [expanded(view, store.shape) for view in inputs]
        joined: list[Chain] = []
        for view in views:
            number = view.storage.number
            if number in self._numbers or number not in self._pending:
                continue
            chain = self._values.get(number, (None, 0))[0]
            if chain is not None and self._in_order(view, chain):
                if chain not in joined:
                    joined.append(chain)
            else:
                done += self.complete([view.storage])
        joined = [chain for chain in joined if not any(chain is each for each in done)]
        loads = [v for v in views if v.storage.number not in self._values and v.storage.number not in self._numbers]
        chain, more = self._host(joined, loads, store)
        done += more
        operands = tuple(self._operand(view, chain) for view in views)
        entry = Entry(op, attrs, store.dtype, tuple(v.dtype for v in inputs), operands, store, node)
        chain.entries.append(entry)
        for number in {store.storage.number}:
            self._pending.setdefault(number, [])
            if chain not in self._pending[number]:
                self._pending[number].append(chain)
        if store.numel == store.storage.elements and store.is_dense:
            self._values[store.storage.number] = (chain, len(chain.entries) - 1)
            if op == "full":
                self._numbers[store.storage.number] = attrs["value"]
        return done

    def complete(self, storages: Sequence[Storage]) -> list[Chain]:
        """The pending chains that write to these, which are pending no more, in an order that they can run in."""
        found: list[Chain] = []
        for storage in storages:
            for chain in list(self._pending.get(storage.number, ())):
                if chain not in found:
                    found.append(chain)
                self._forget(chain)
        return found

    def rest(self) -> list[Chain]:
        """All that are pending still."""
        found: list[Chain] = []
        for chains in list(self._pending.values()):
            for chain in list(chains):
                if chain not in found:
                    found.append(chain)
                self._forget(chain)
        return found

    def _forget(self, chain: Chain) -> None:
        for entry in chain.entries:
            number = entry.store.storage.number
            writers = [each for each in self._pending.get(number, []) if each is not chain]
            if writers:
                self._pending[number] = writers
            else:
                self._pending.pop(number, None)
            if number in self._values and self._values[number][0] is chain:
                del self._values[number]

    def _in_order(self, view: View, chain: Chain) -> bool:
        """Whether a view of a pending value reads its elements as the chain makes them."""
        return view.numel == chain.numel and view.is_dense and view.offset == 0

    def _operand(self, view: View, chain: Chain) -> Operand:
        number = view.storage.number
        if number in self._numbers:
            return Literal(self._numbers[number])
        if number in self._values and self._values[number][0] is chain:
            return Ref(self._values[number][1])
        return Load(view)

    def _host(self, joined: list[Chain], loads: Sequence[View], store: View) -> tuple[Chain, list[Chain]]:
        """The chain that takes a new entry with these walks, and chains that cannot and are completed."""
        own = [cuts_of(view) for view in (*loads, store)]
        done: list[Chain] = []
        chosen: Chain | None = None
        for chain in sorted(joined, key=lambda each: -len(each.entries)):
            cuts = merged(chain.cuts, *own, *([chosen.cuts] if chosen else []))
            size = len(chain.entries) + (len(chosen.entries) if chosen else 0)
            read = {*loads, *chain.loads(), *(chosen.loads() if chosen else ())}
            if cuts is None or size >= MAX_ENTRIES or len(read) > MAX_LOADS:
                self._forget(chain)
                done.append(chain)
            elif chosen is None:
                chosen = chain
                chosen.cuts = cuts
            else:
                self._merge(chosen, chain, cuts)
        if chosen is None:
            cuts = merged(*own)
            chosen = Chain(store.numel, cuts if cuts is not None else (store.numel,))
        return chosen, done

    def _merge(self, chosen: Chain, chain: Chain, cuts: tuple[int, ...]) -> None:
        shift = len(chosen.entries)
        chosen.absorb(chain, cuts)
        for number, writers in self._pending.items():
            if any(each is chain for each in writers):
                kept = [each for each in writers if each is not chain and each is not chosen]
                self._pending[number] = [*kept, chosen]
        for number, (owner, entry) in list(self._values.items()):
            if owner is chain:
                self._values[number] = (chosen, entry + shift)


def is_whole(view: View) -> bool:
    """Whether a view is all of its storage, in order."""
    return view.is_dense and view.offset == 0 and math.prod(view.shape) == view.storage.elements
