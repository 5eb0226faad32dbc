"""Arithmetic on walks: broadcasting, and joining dimensions that can be walked as one."""

from __future__ import annotations

from collections.abc import Sequence

from apps.gradient.opencl.values import View


def expanded(view: View, shape: Sequence[int]) -> View:
    """The view broadcast to a shape as numpy does it: sizes of 1 are repeated by strides of 0."""
    missing = len(shape) - len(view.shape)
    strides = [0] * missing + [
        0 if size == 1 and wanted != 1 else stride
        for size, stride, wanted in zip(view.shape, view.strides, shape[missing:])
    ]
    return View(view.storage, tuple(shape), tuple(strides), view.offset)


def collapsed(shape: Sequence[int], *strides: Sequence[int]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Fewest dimensions that walk the same elements in the same order, for several stride lists at once.

    Dimensions of size 1 are dropped and neighbours are joined where every list allows it.
    """
    sizes: list[int] = []
    walks: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(walk[-1] == given[axis] * size for walk, given in zip(walks, strides)):
            sizes[-1] *= size
            for walk, given in zip(walks, strides):
                walk[-1] = given[axis]
        else:
            sizes.append(size)
            for walk, given in zip(walks, strides):
                walk.append(given[axis])
    return tuple(sizes), [tuple(walk) for walk in walks]
