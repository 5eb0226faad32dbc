"""What every codec is: parameters, and how they turn one float32 tensor into parts to send and back.

The parts of a tensor are tensors of the file: part "#codes" of `delta/w` is the tensor `delta/w#codes`, part "" is
`delta/w` itself. Encoding happens on a volunteer's computer, all else on the server too, so whatever decoding
computes is elementwise, in a fixed order: the same file gives the same bits on every computer.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from boinc_project.contract.errors import ContractError, InvalidResult
from boinc_project.contract.tensorfile import FileTensor

Array = npt.NDArray[Any]
Shape = tuple[int, ...]
Parts = Mapping[str, Array]

WHOLE = ""  # the part that has the tensor's own name
CODES_SUFFIX = "#codes"
SCALES_SUFFIX = "#scales"

MAX_BLOCK = 1 << 20
PIECE_ELEMENTS = 1 << 15  # decoded at a time where a whole tensor would cost memory


@dataclass(frozen=True)
class CodecSeed:
    """Where a microtask's codec draws from: the job's seed, the version it starts from, its slot.

    Replicas of a microtask have the same one, and so has the server. The numbers drawn for a tensor have nothing in
    common with those of another tensor, slot or version, nor with dropout's: each use has its own Philox key.
    """

    seed: int = 0
    version: int = 0
    slot: int = 0

    def key(self, use: str, name: str) -> int:
        """The key for one use in one tensor of this microtask."""
        return _key(use, self.seed, self.version, self.slot, name)

    def shared_key(self, use: str, name: str) -> int:
        """The same for all slots of a version."""
        return _key(use, self.seed, self.version, -1, name)


def _key(*what: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:8], "little", signed=True)


class Method(ABC):
    """One codec with its parameters; each is a frozen dataclass in a file of its own."""

    kind: ClassVar[str]

    @abstractmethod
    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        """Suffix -> type of every part of a tensor of this shape."""

    @abstractmethod
    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        """The parts of a finite float32 tensor."""

    @abstractmethod
    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        """(place in the flat tensor, its values) until it is complete; values are good until the next are asked for."""

    def decode(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Array:
        """All pieces together."""
        found = np.zeros(elements(shape), np.float32)
        for where, values in self.pieces(parts, shape, name, seed):
            found[where] = values
        return found.reshape(shape)

    def check(self, parts: Parts, shape: Shape, place: str) -> None:
        """Refuse parts (of the right types, with any contents) that `encode` does not make and `pieces` could not use.

        Raises InvalidResult. Values are not looked at: that they are finite is checked for all files.
        """
        return

    @property
    def variance(self) -> float:
        """w of E||C(x) - x||^2 <= w ||x||^2 for an unbiased C; 0 for all others, which are much closer to x.

        One decoded update of a large w is mostly noise, which the mean over many takes out; C(x) / (1 + w) is a step
        that is good by itself (Richtarik et al. 2021, https://arxiv.org/abs/2106.05203, section 2).
        """
        return 0.0

    def spread(self, distance: float) -> float:
        """Relative distance, once decoded, of two updates that were at this (small) distance: see `rounded_apart`."""
        return distance


def rounded_apart(distance: float, step: float) -> float:
    """What rounding makes of a distance: a value that lies near the edge between two codes falls to either side.

    For an update of root mean square 1 with normally distributed differences of size d and codes that are `step`
    apart, a share of about 0.8 d / step of the codes differs (0.8: the mean of |N(0, 1)|), each by `step`:
    together d^2 + 0.8 d step, squared.
    """
    return float((distance * distance + 0.8 * distance * step) ** 0.5)


def elements(shape: Shape) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """A tensor of two or more dimensions seen as a matrix: the first dimension against all others."""
    return shape[0], elements(shape[1:])


def in_range(kind: str, key: str, value: float, low: float, high: float) -> None:
    """Refuse a parameter that is out of bounds; raises ContractError."""
    if not low <= value <= high:
        raise ContractError(f"codec {kind}: {key} = {value} is not between {low} and {high}", fault="codec")


def even_block(kind: str, block: int) -> None:
    """Refuse blocks that would not begin with a byte where two codes share one; raises ContractError."""
    in_range(kind, "block", block, 2, MAX_BLOCK)
    if block % 2:
        raise ContractError(f"codec {kind}: block {block} is odd; two values share a byte", fault="codec")


def share_of(count: int, share: float) -> int:
    """How many of `count` values a share of them is: rounded, at least one of any; 0 of none."""
    return min(count, max(1, int(share * count + 0.5)))


def flat_float32(array: Array) -> Array:
    return np.ascontiguousarray(array, dtype=np.float32).reshape(-1)


def unusable(place: str, what: str) -> InvalidResult:
    return InvalidResult(f"update tensor {place!r}: {what}", fault="codes")
