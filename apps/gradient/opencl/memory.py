"""Places for storages: offsets into a few arenas, so that what is never alive at once shares memory.

Pure arithmetic. An arena is one buffer, no larger than the device allows; a place is a byte offset in it.
Storages are placed from the largest to the smallest, each at the lowest offset that is free for its whole life
(a greedy form of dynamic storage allocation; within a few percent of the liveness peak on training graphs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 256  # bytes: a memory channel's stretch on old Radeons, and room for the widest vector's tail


class DoesNotFit(Exception):
    """One storage is larger than any buffer of the device may be; the text has both sizes."""


@dataclass(frozen=True)
class Life:
    """A storage's size in bytes and the first and last launch that uses it."""

    storage: int
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Place:
    """Where a storage lies: which arena, and how many bytes from its start."""

    arena: int
    offset: int


@dataclass(frozen=True)
class Layout:
    """Places by storage, and the bytes of each arena."""

    places: Mapping[int, Place]
    arenas: tuple[int, ...]


def padded(nbytes: int) -> int:
    """Bytes rounded up to the alignment."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


def liveness_peak(lives: Sequence[Life]) -> int:
    """Most bytes that are alive at once: no layout takes less."""
    steps = sorted({life.first for life in lives})
    return max((sum(padded(e.nbytes) for e in lives if e.first <= at <= e.last) for at in steps), default=0)


def lay_out(lives: Sequence[Life], largest: int) -> Layout:
    """Place all storages in arenas of at most `largest` bytes. Raises DoesNotFit for a storage larger than that."""
    arenas: list[list[tuple[int, int, Life]]] = []  # per arena: (offset, end, whose)
    sizes: list[int] = []
    places: dict[int, Place] = {}
    for life in sorted(lives, key=lambda e: (-e.nbytes, e.first, e.storage)):
        need = padded(life.nbytes)
        if need > largest:
            raise DoesNotFit(
                f"a tensor of {life.nbytes} bytes is larger than the largest buffer of this device, {largest} bytes"
            )
        best: Place | None = None
        growth = 0
        for number, taken in enumerate(arenas):
            at = _gap(taken, life, need)
            if at + need > largest:
                continue
            grows = max(0, at + need - sizes[number])
            if best is None or grows < growth:
                best, growth = Place(number, at), grows
            if grows == 0:
                break
        if best is None:
            arenas.append([])
            sizes.append(0)
            best = Place(len(arenas) - 1, 0)
        arenas[best.arena].append((best.offset, best.offset + need, life))
        sizes[best.arena] = max(sizes[best.arena], best.offset + need)
        places[life.storage] = best
    return Layout(places, tuple(sizes))


def _gap(taken: Sequence[tuple[int, int, Life]], life: Life, need: int) -> int:
    """The lowest offset where so many bytes are free while this storage lives."""
    busy = sorted((start, end) for start, end, other in taken if other.first <= life.last and life.first <= other.last)
    at = 0
    for start, end in busy:
        if start - at >= need:
            break
        at = max(at, end)
    return at
