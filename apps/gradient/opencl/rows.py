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

from apps.gradient.opencl.emitter import Emitter
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.values import Argument, Define

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


def launch_items(
    emit: Emitter,
    file: str,
    kernel: str,
    sizes: Sequence[int],
    arguments: Sequence[Argument],
    defines: Mapping[str, Define] | None = None,
    *,
    uncut: int = 0,
    flops: int = 0,
    nbytes: int | None = None,
    in_place: bool = False,
) -> None:
    """A launch of items that do not work together. The first `uncut` dimensions must not be cut into pieces."""
    if 0 in sizes:
        return
    local = plain_range(emit.device, sizes)
    split = _split_axis(sizes, local, uncut)
    emit.launch(
        file,
        kernel,
        sizes,
        arguments,
        defines=defines,
        local_size=local,
        split=split,
        flops=flops,
        nbytes=nbytes,
        in_place=in_place,
    )


def launch_rows(
    emit: Emitter,
    file: str,
    kernel: str,
    rows: Sequence[int],
    length: int,
    width: int,
    arguments: Sequence[Argument],
    defines: Mapping[str, Define] | None = None,
    *,
    flops: int,
    in_place: bool = False,
) -> None:
    """A launch of `<kernel>_item` or `<kernel>_group` on rows of `length` elements, `width` at a time.

    The rows are counted along one or two dimensions: 0 and 1 of the range, or 1 and 2 behind a row's lanes.
    """
    if 0 in rows:
        return
    device = emit.device
    if device.group_form:
        group = _power_below(min(GROUP, device.max_work_group))
        lanes = min(group, next((each for each in LANES if each * width >= length), LANES[-1]))
        suffix, shape = "group", {"LANES": lanes, "ROWS": group // lanes}
        sizes, local = (lanes, *rows), (lanes, group // lanes, 1)[: 1 + len(rows)]
    else:
        suffix, shape, sizes, local = "item", {}, tuple(rows), plain_range(device, rows)
    emit.launch(
        file,
        f"{kernel}_{suffix}",
        sizes,
        arguments,
        defines={**(defines or {}), **shape, "VW": width},
        local_size=local,
        split=_split_axis(sizes, local),
        flops=flops,
        in_place=in_place,
    )


def _split_axis(sizes: Sequence[int], local: Sequence[int], first: int = 0) -> int:
    """The dimension, from `first` on, with the most groups: along it a launch can be cut into the most pieces."""
    return max(range(first, len(sizes)), key=lambda axis: -(-sizes[axis] // local[axis]))


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
