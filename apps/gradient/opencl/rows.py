"""How rows and columns of a tensor are shared out among work-items: sizes and defines of a launch, in one place.

A reduction, a softmax or a norm sees a tensor as [A, R, B]: outer, along the operation, inner. Where B = 1 the
elements of a row follow one another, and a row belongs to

    one item, which takes `VW` elements at once (processors), or
    LANES items of a work-group, which meet in local memory (GPUs; `DeviceFacts.group_form`).

Where B > 1, items lie along B and each walks down its own columns, on every device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.values import Define

GROUP = 64  # most items of a group: a wavefront of the GPUs that matter
LANES = (16, 64)  # items that share a row; few choices, because each is a program to compile
BUSY_GROUPS = 4  # groups that a compute unit should have at least, to hide its waiting


def axes(shape: Sequence[int], dim: int) -> tuple[int, int, int]:
    """Sizes [A, R, B] before, at and after a dimension; a 0-d tensor is one element."""
    if not shape:
        return 1, 1, 1
    return math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :])


def plain_range(device: DeviceFacts, sizes: Sequence[int]) -> tuple[int, ...]:
    """A local size for items that do not work together: along the first dimensions that have any work.

    On processors a group is run by one thread, so small problems are cut into smaller groups.
    """
    left = _power_below(min(GROUP, device.max_work_group))
    if not device.group_form:
        left = min(left, _power_below(math.prod(sizes) // (BUSY_GROUPS * device.compute_units)))
    local = []
    for size in sizes:
        step = min(left, _power_above(size))
        local.append(step)
        left //= step
    return tuple(local)


def vector_width(device: DeviceFacts, *multiples: int) -> int:
    """Neighbouring elements that an item takes at once: the device's number, or 1.

    GPUs load vectors only from places that are multiples of the vector: there, all of `multiples` (offsets and
    strides) must be. Processors load from anywhere. What is left of a row is taken singly.
    """
    width = device.vector_width
    return 1 if device.group_form and any(each % width for each in multiples) else width


def column_width(device: DeviceFacts, columns: int, *multiples: int) -> int:
    """The same for items that lie along a row, where the number must divide the columns: none are left."""
    width = vector_width(device, *multiples)
    return width if columns % width == 0 else 1


def column_vectors(device: DeviceFacts, columns: int, width: int, most: int = 64) -> int:
    """Neighbouring vectors of an item that walks down columns: on processors up to `most` elements."""
    if device.group_form or width == 1:
        return 1
    vectors = most // width
    while vectors > 1 and columns % (width * vectors):
        vectors //= 2
    return vectors


@dataclass(frozen=True)
class RowLaunch:
    """How a kernel `<name>_item` or `<name>_group` is launched on rows."""

    suffix: str
    global_size: tuple[int, ...]
    local_size: tuple[int, ...]
    defines: Mapping[str, Define]
    split: int


def row_launch(device: DeviceFacts, length: int, width: int, rows: Sequence[int]) -> RowLaunch:
    """For rows of `length` elements, counted along one or two dimensions; an item takes `width` elements at once."""
    if not device.group_form:
        return RowLaunch("item", tuple(rows), plain_range(device, rows), {"VW": width}, 0)
    group = _power_below(min(GROUP, device.max_work_group))
    lanes = min(group, next((each for each in LANES if each * width >= length), LANES[-1]))
    together = group // lanes
    defines: Mapping[str, Define] = {"VW": width, "LANES": lanes, "ROWS": together}
    return RowLaunch("group", (lanes, *rows), (lanes, together, 1)[: 1 + len(rows)], defines, 1)


def segments(device: DeviceFacts, length: int, parallel: int, shortest: int) -> int:
    """Into how many parts of at least `shortest` a row or column is cut, where `parallel` groups work already."""
    wanted = BUSY_GROUPS * device.compute_units
    if parallel >= wanted or length < 2 * shortest:
        return 1
    return min(-(-wanted // max(parallel, 1)), length // shortest)


def _power_below(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def _power_above(number: int) -> int:
    return 1 << (max(number, 1) - 1).bit_length()
