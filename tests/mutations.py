"""Values and places with which tests of strict readers damage a good JSON document."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

VALUES = st.sampled_from(
    [None, True, False, 0, 1, -1, 2**40, 2**63, 2**64, 0.5, 1e300, "", "x", "gradient", [], [0], [[0]], {}, {"a": 1}]
)


def paths(document: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON document, the whole of it first."""
    items: Any = ()
    if isinstance(document, dict):
        items = document.items()
    elif isinstance(document, list):
        items = enumerate(document)
    return [prefix, *(path for key, value in items for path in paths(value, (*prefix, key)))]


def replaced(document: Any, path: tuple[Any, ...], value: Any, *, remove: bool = False) -> Any:
    """A copy of the document with another value at a place, or without that place."""
    document = copy.deepcopy(document)
    inner = document
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return document
