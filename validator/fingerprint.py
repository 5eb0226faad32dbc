"""What stays of an update when its payload is gone: the largest values of every tensor and where they are.

The construction is that of TOPLOC (Ong et al. 2025, https://arxiv.org/abs/2501.16007), adapted: the server makes it
from the decoded payload, for gradients instead of activations, and keeps positions and values as they are, because
nobody has to be kept from choosing them. A volunteer never sends one.

A fingerprint has at most max(1/1000 of the update as float32, 1 KiB) bytes. Little-endian, in the order of names:

    1 byte       format, 1
    float32 [t]  norm of each tensor
    float32 [t]  largest magnitude of each tensor
    uint16 or uint32 [k]   positions within their tensors, larger magnitudes first, equal ones by position
    int16 [k]    values in units of the tensor's largest magnitude / 32767

(In small updates magnitudes within 1.5e-8 of the tensor's largest one count as equal.)

Every tensor has the same number of positions, or all of its own if it has fewer. If not even one for each fits, the
largest tensors have theirs. Integer tensors have none. A fingerprint is read with the types of its update.
"""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import family_of, squared_norm

Array = npt.NDArray[Any]

FORMAT = 1
_FIRST = bytes([FORMAT])
SHARE, LEAST_BYTES = 1000, 1024  # bytes: 1/1000 of the dense size, or so many
UNITS = 32767
_TOGETHER = 8192  # elements of an update whose tensors are handled in one go
_PLACE_BITS, _STEP_BITS = 13, 26  # of their places; of magnitudes, in steps below the largest of their tensor
_OWNER_BIT = _PLACE_BITS + _STEP_BITS + 1
_GROUP = 64  # elements of a large tensor of which only the largest is looked at first
_WORK = ("gradient", "delta")  # families of what was computed; buffers and metrics only go along


@dataclass(frozen=True)
class Layout:
    """Where things are in the fingerprints of one kind of update.

    names     its tensors, in order; sizes: their elements; starts: where they begin when they are laid end to end
    counts    positions marked of each
    marked    the tensor of each marked position; marked_starts: where that begins
    owner     the tensor of each element, and keys: that and its place, to be sorted by; empty if the update is large
    picks     places of the marked ones among the elements sorted by tensor and magnitude
    first     where the positions of the two largest of each gradient or delta are in a fingerprint, and first_starts:
              where their tensors begin
    families  tensors and elements of each family
    """

    names: tuple[str, ...]
    sizes: Array
    starts: Array
    counts: Array
    marked: Array
    marked_starts: Array
    owner: Array
    keys: Array
    picks: Array
    first: struct.Struct
    first_starts: tuple[int, ...]
    families: tuple[tuple[Array, int], ...]
    position_type: str
    nbytes: int


def max_bytes(types: Mapping[str, TensorType]) -> int:
    """No fingerprint of such an update is larger."""
    return max(4 * sum(_size(kind) for kind in types.values()) // SHARE, LEAST_BYTES)


def layout_of(types: Mapping[str, TensorType]) -> Layout | None:
    """The layout for updates of these types; None if they have no number in them."""
    return _layout(tuple((name, _size(kind)) for name, kind in types.items() if _is_float(kind)), max_bytes(types))


def _is_float(kind: TensorType) -> bool:
    return kind.dtype.startswith("float")


def _size(kind: TensorType) -> int:
    size = 1
    for extent in kind.shape:
        size *= extent
    return size


@functools.lru_cache(maxsize=64)
def _layout(tensors: tuple[tuple[str, int], ...], limit: int) -> Layout | None:
    full = [(name, size) for name, size in tensors if size]
    if not full:
        return None
    each = (2 if max(size for _, size in full) <= 1 << 16 else 4) + 2
    fitting = sorted(full, key=lambda one: (-one[1], one[0]))[: (limit - 1) // (8 + each)]
    names, numbers = zip(*sorted(fitting), strict=True)
    sizes = np.array(numbers)
    low, high = 1, limit
    while low < high:  # the largest number for each tensor that fits
        middle = (low + high + 1) // 2
        if 1 + 8 * len(names) + each * int(np.minimum(sizes, middle).sum()) <= limit:
            low = middle
        else:
            high = middle - 1
    counts = np.minimum(sizes, low)
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    index = np.arange(len(names))
    marked = np.repeat(index, counts)
    owner = np.repeat(index, sizes if sizes.sum() <= _TOGETHER else 0)
    of_family = [family_of(name) for name in names]
    ends = np.cumsum(counts).tolist()
    first = [
        end - int(count) + rank
        for family, count, end in zip(of_family, counts, ends, strict=True)
        for rank in range(min(int(count), 2))
        if family in _WORK
    ]
    members = [np.array([i for i, found in enumerate(of_family) if found == one]) for one in sorted(set(of_family))]
    return Layout(
        names=names,
        sizes=sizes,
        starts=starts,
        counts=counts,
        marked=marked,
        marked_starts=starts[marked],
        owner=owner,
        keys=(owner.astype(np.int64) << _OWNER_BIT) + (1 << (_STEP_BITS + _PLACE_BITS)) + np.arange(owner.size),
        picks=np.concatenate([start + np.arange(n) for start, n in zip(starts, counts, strict=True)]),
        first=_picker(first, 4 if each == 6 else 2, 1 + 8 * len(names)),
        first_starts=tuple(starts[marked[at]].item() for at in first),
        families=tuple((each_one, int(sizes[each_one].sum())) for each_one in members),
        position_type="<u2" if each == 4 else "<u4",
        nbytes=1 + 8 * len(names) + each * int(counts.sum()),
    )


def _picker(places: Sequence[int], width: int, offset: int) -> struct.Struct:
    """Reads the positions at these places of a fingerprint, and nothing between them."""
    text, at = f"<{offset}x", 0
    for place in places:
        text += f"{(place - at) * width}x{'I' if width == 4 else 'H'}"
        at = place + 1
    return struct.Struct(text)


def fingerprints(updates: Sequence[Mapping[str, Array]], layout: Layout) -> list[bytes]:
    """The fingerprints of decoded updates with finite values."""
    if not updates:
        return []
    norms, tops, places, values = (_of_small if layout.owner.size else _of_large)(updates, layout)
    heads = np.concatenate((norms, tops), axis=1, dtype="<f4", casting="same_kind")
    positions = (places - layout.marked_starts).astype(layout.position_type)
    units = values.astype("<i2")
    rows = zip(heads, positions, units, strict=True)
    return [_FIRST + head.tobytes() + at.tobytes() + unit.tobytes() for head, at, unit in rows]


def _of_small(updates: Sequence[Mapping[str, Array]], layout: Layout) -> tuple[Array, Array, Array, Array]:
    """Norms, largest magnitudes, marked places and quantised values, a row for each update, in a few steps for all."""
    flat = np.concatenate([update[name].reshape(-1) for update in updates for name in layout.names], dtype=np.float64)
    flat = flat.reshape(len(updates), -1)
    sizes = np.abs(flat)
    tops = np.maximum.reduceat(sizes, layout.starts, axis=1)
    norms = np.sqrt(np.add.reduceat(flat * flat, layout.starts, axis=1))
    scales = 1.0 / np.where(tops > 0, tops, np.inf)
    sizes *= scales.take(layout.owner, axis=1)
    # Sorting numbers is faster than sorting by them: tensor, steps below the largest, and place in one integer each.
    keys = layout.keys - ((sizes * (1 << _STEP_BITS)).astype(np.int64) << _PLACE_BITS)
    keys.sort(axis=1)
    places = keys.take(layout.picks, axis=1) & ((1 << _PLACE_BITS) - 1)
    values = flat.take(places + np.arange(len(updates))[:, None] * flat.shape[1]) * scales.take(layout.marked, axis=1)
    return norms, tops, places, np.rint(values * UNITS)


def _of_large(updates: Sequence[Mapping[str, Array]], layout: Layout) -> tuple[Array, Array, Array, Array]:
    """The same, tensor by tensor."""
    marks = list(zip(layout.names, layout.counts.tolist(), strict=True))
    found = [[_of_tensor(update[name].reshape(-1), count) for name, count in marks] for update in updates]
    norms, tops = (np.array([[tensor[i] for tensor in row] for row in found]) for i in (0, 1))
    places, values = (np.stack([np.concatenate([tensor[i] for tensor in row]) for row in found]) for i in (2, 3))
    return norms, tops, places + layout.marked_starts, values


def _of_tensor(flat: Array, count: int) -> tuple[float, float, Array, Array]:
    places = _largest(flat, count)
    top = abs(float(flat[places[0]]))
    values = np.rint(flat[places] * np.float64(UNITS / top if top else 0.0))
    return math.sqrt(squared_norm(flat)), top, places, values


def _largest(flat: Array, count: int) -> Array:
    """Places of the elements of the largest magnitude, larger ones first, equal ones by place.

    Of a large tensor the magnitudes are never all laid out: its elements are dealt to groups, of which no more than
    those with the `count` largest maxima can hold any of them.
    """
    groups = flat.size // _GROUP
    if groups <= 2 * count:
        candidates = np.arange(flat.size)
    else:
        dealt = flat[: groups * _GROUP].reshape(_GROUP, groups)  # a group is a column
        maxima = np.maximum(dealt.max(axis=0), -dealt.min(axis=0))
        least = np.partition(maxima, groups - count)[groups - count]
        inside = np.arange(_GROUP)[:, None] * groups + np.flatnonzero(maxima >= least)
        candidates = np.concatenate((inside.reshape(-1), np.arange(groups * _GROUP, flat.size)))
        candidates = np.sort(candidates[np.abs(flat[candidates]) >= least])
    return candidates[np.argsort(-np.abs(flat[candidates]), kind="stable")[:count]]


@dataclass(frozen=True)
class Marks:
    """A fingerprint that has been read: float64 norms, largest magnitudes and values, places in ascending order."""

    norms: Array
    tops: Array
    places: Array
    values: Array
    units: Array  # of the values
    least: Array  # of each tensor, the magnitude that no unmarked element exceeds; 0 if all are marked


def read(blob: bytes, layout: Layout) -> Marks | None:
    """The marks of a fingerprint; None if it is none of this layout (another format, other types)."""
    if len(blob) != layout.nbytes or blob[0] != FORMAT:
        return None
    tensors, count = len(layout.names), int(layout.counts.sum())
    norms, tops = (np.frombuffer(blob, "<f4", tensors, 1 + 4 * tensors * i).astype(np.float64) for i in (0, 1))
    positions = np.frombuffer(blob, layout.position_type, count, 1 + 8 * tensors).astype(np.int64)
    units = np.frombuffer(blob, "<i2", count, len(blob) - 2 * count).astype(np.float64)
    if (positions >= layout.sizes[layout.marked]).any():
        return None
    values = units * (tops / UNITS)[layout.marked]
    last = np.abs(values[np.cumsum(layout.counts) - 1])
    places = positions + layout.starts[layout.marked]
    order = np.argsort(places)
    least = np.where(layout.counts < layout.sizes, last, 0.0)
    return Marks(norms, tops, places[order], values[order], units[order], least)


def estimate(a: Marks, b: Marks, layout: Layout) -> float:
    """Estimated distance (validator/agreement.py) of the two updates.

    Of each tensor: the relative difference at the positions that either marks, taken to be that of the whole
    tensor; a value that one of them does not mark is the one nearest to the other's that it can be. And the difference
    of the norms, which the true distance cannot be below. It is exact, up to a step of the quantisation (1.5e-5 of the
    tensor's largest value), where everything is marked. What it cannot see is a change at positions that are small
    in both and that leaves the norm as it is.
    """
    places = np.union1d(a.places, b.places)
    owners = np.searchsorted(layout.starts, places, side="right") - 1
    of_a, of_b = _at(places, owners, a, b), _at(places, owners, b, a)
    tensors = len(layout.names)
    apart, seen_a, seen_b = (
        np.sqrt(np.bincount(owners, weights=column * column, minlength=tensors)) for column in (of_a - of_b, of_a, of_b)
    )
    means, seen = (a.norms + b.norms) / 2, (seen_a + seen_b) / 2
    apart *= np.where(seen > 0, means / np.where(seen > 0, seen, 1.0), 1.0)
    apart = np.maximum(apart, np.abs(a.norms - b.norms))
    worst = 0.0
    for members, elements in layout.families:
        norm = np.sqrt((a.norms[members] @ a.norms[members] + b.norms[members] @ b.norms[members]) / 2)
        floor = means[members] + norm * np.sqrt(layout.sizes[members] / elements)
        worst = max(worst, float(np.max(apart[members] / np.where(floor > 0, floor, 1.0))))
    return worst


def _at(places: Array, owners: Array, mine: Marks, other: Marks) -> Array:
    """The values of `mine` at these places: marked, or what comes nearest to the marked value of `other`."""
    found = np.zeros(places.size)
    known = np.isin(places, mine.places, assume_unique=True)
    found[known] = mine.values
    lacking = ~known
    limit = mine.least[owners[lacking]]
    theirs = other.values[np.isin(other.places, places[lacking], assume_unique=True)]
    found[lacking] = np.clip(theirs, -limit, limit)
    return found


def unlikeness(a: Marks, b: Marks, layout: Layout) -> float:
    """How far the work in `a` is from a multiple of that in `b`: 0 if it is one (of any sign), 1 if nothing of it is.

    sqrt(1 - cos^2) of gradients and deltas at the positions that both mark; 1 if these are fewer than half.
    """
    work = np.array([_is_work(name) for name in layout.names])
    places, in_a, in_b = np.intersect1d(a.places, b.places, assume_unique=True, return_indices=True)
    kept = work[np.searchsorted(layout.starts, places, side="right") - 1]
    if 2 * int(kept.sum()) < int(layout.counts[work].sum()) or not kept.any():
        return 1.0
    of_a, of_b = a.values[in_a[kept]], b.values[in_b[kept]]
    squares = float(of_a @ of_a) * float(of_b @ of_b)
    if squares == 0.0:
        return 1.0
    return float(np.sqrt(max(0.0, 1.0 - float(of_a @ of_b) ** 2 / squares)))


def work_norm(blob: bytes, layout: Layout) -> float:
    """Norm of all gradients or deltas together."""
    norms = np.frombuffer(blob, "<f4", len(layout.names), 1).astype(np.float64)
    return float(np.linalg.norm([n for n, name in zip(norms, layout.names, strict=True) if _is_work(name)]))


def _is_work(name: str) -> bool:
    return name.split("/", 1)[0] in _WORK


def heads(blob: bytes, layout: Layout) -> frozenset[int]:
    """Where the very largest values of the work are: a quick look before `unlikeness`."""
    return frozenset(map(operator.add, layout.first.unpack_from(blob), layout.first_starts))
