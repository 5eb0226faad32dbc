"""The codec that a microtask names: one of the methods with its parameters, over all tensors of an update."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from typing import Any, Callable

import numpy as np

from boinc_project.contract.canonical import Taker
from boinc_project.contract.codecs.dct_top_k import DctTopK
from boinc_project.contract.codecs.dense import Dense
from boinc_project.contract.codecs.fp4 import Fp4
from boinc_project.contract.codecs.int8 import Int8
from boinc_project.contract.codecs.low_rank import LowRank
from boinc_project.contract.codecs.method import MAX_BLOCK, Array, CodecSeed, Method, Shape, elements
from boinc_project.contract.codecs.part import Part
from boinc_project.contract.codecs.qsgd import Qsgd
from boinc_project.contract.codecs.random_k import RandomK
from boinc_project.contract.codecs.sign import Sign
from boinc_project.contract.codecs.top_k import TopK
from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType
from boinc_project.contract.tensorfile import FileTensor

#: Codec -> the parameters that it has. (dense's block means nothing; its documents have always held one.)
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "dense": ("block",),
    "int8": ("block",),
    "fp4": ("block",),
    "sign": (),
    "qsgd": ("levels", "block"),
    "random-k": ("share", "values", "block"),
    "low-rank": ("rank", "iterations"),
    "top-k": ("share", "values", "block"),
    "dct-top-k": ("share", "values", "block"),
}
KINDS = tuple(PARAMETERS)
VALUE_KINDS = ("dense", "int8", "fp4")  # how the values that a sparse codec has chosen may be coded
COMPRESSIONS = ("zstd", "none")
CODED = "float32"  # tensors of other types (counters of batch norm) travel as they are
AS_IT_IS = Dense()


@dataclass(frozen=True)
class Codec:
    """A codec and its parameters as the microtask names them; those that the kind does not have keep their defaults.

    kind         one of KINDS
    block        values that share one scale (int8, fp4, qsgd, and values coded so)
    compression  "zstd" or "none": of the whole file, see update.py
    share        values that travel, as a share of all (random-k, top-k, dct-top-k)
    values       how those are coded, one of VALUE_KINDS
    levels       qsgd's s
    rank, iterations   low-rank's
    part         which values of an update travel at all
    seed         what random numbers are drawn from; the microtask sets it, and no document of a codec holds it
    """

    kind: str = "dense"
    block: int = 256
    compression: str = "zstd"
    share: float = 1 / 64
    values: str = "dense"
    levels: int = 7
    rank: int = 4
    iterations: int = 1
    part: Part = field(default=Part())
    seed: CodecSeed = field(default=CodecSeed(), compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ContractError(f"codec {self.kind!r} is unknown; use one of {', '.join(KINDS)}", fault="codec")
        if self.compression not in COMPRESSIONS:
            raise ContractError(f"compression {self.compression!r} is unknown; use 'zstd' or 'none'", fault="codec")
        if self.values not in VALUE_KINDS:
            raise ContractError(f"values {self.values!r} are unknown; use one of {VALUE_KINDS}", fault="codec")
        own = ("kind", "compression", "part", "seed", *PARAMETERS[self.kind])
        for each in fields(self):
            if each.name not in own and getattr(self, each.name) != each.default:
                raise ContractError(f"codec {self.kind} has no {each.name}", fault="codec")
        if not 1 <= self.block <= MAX_BLOCK:
            raise ContractError(f"codec block {self.block} is not between 1 and {MAX_BLOCK}", fault="codec")
        _ = self.method

    @cached_property
    def method(self) -> Method:
        return _method(self)

    @property
    def differs_by_slot(self) -> bool:
        """Whether the same update is sent otherwise from each slot."""
        return self.kind in ("qsgd", "random-k") or self.part.count > 1

    def seeded(self, seed: CodecSeed) -> Codec:
        """The codec of the microtask with this seed. It is made for every microtask, and checked once."""
        found = copy.copy(self)
        object.__setattr__(found, "seed", seed)
        return found

    def to_document(self) -> dict[str, Any]:
        names = ("kind", "compression", *PARAMETERS[self.kind])
        found = {name: getattr(self, name) for name in names}
        return found if self.part.count == 1 else {**found, "part": self.part.to_document()}

    @staticmethod
    def from_document(take: Taker) -> Codec:
        kind = take.text("kind", 16)
        known = PARAMETERS.get(kind, ())
        if kind in PARAMETERS:
            take.only("kind", "compression", "part", *known)
        readers: Mapping[str, Callable[[], Any]] = {
            "block": lambda: take.integer("block", 1, MAX_BLOCK),
            "share": lambda: take.number("share", 0, 1),
            "values": lambda: take.text("values", 8),
            "levels": lambda: take.integer("levels", 1, 127),
            "rank": lambda: take.integer("rank", 1, 1 << 20),
            "iterations": lambda: take.integer("iterations", 0, 1 << 20),
        }
        given: dict[str, Any] = {name: readers[name]() for name in known}
        part = Part.from_document(take.object("part")) if take.has("part") else Part()
        return Codec(kind=kind, compression=take.text("compression", 8), part=part, **given)

    def encoded_types(self, types: Mapping[str, TensorType]) -> dict[str, FileTensor]:
        """Names and types of the tensors in the file for an update with these types."""
        found: dict[str, FileTensor] = {}
        travelling = self.part.of_tensors(types)
        for name, kind in types.items():
            if kind.dtype != CODED:
                found[name] = FileTensor(kind.dtype, kind.shape)
            elif name in travelling:
                inner = self.part.inner(kind.shape, name, self.seed)
                found.update({name + part: each for part, each in self.method.parts(inner).items()})
        return found

    def encode(self, tensors: Mapping[str, Array]) -> dict[str, Array]:
        """Update tensors -> file tensors."""
        found: dict[str, Array] = {}
        travelling = self.part.of_tensors({n: TensorType(a.dtype.name, a.shape) for n, a in tensors.items()})
        for name, array in tensors.items():
            if array.dtype != CODED:
                found[name] = array
            elif name in travelling:
                values = self.part.take(array, name, self.seed)
                found.update({name + part: each for part, each in self.method.encode(values, name, self.seed).items()})
        return found

    def check(self, tensors: Mapping[str, Array], types: Mapping[str, TensorType]) -> None:
        """Refuse file tensors (already checked against `encoded_types`) with codes that mean nothing: InvalidResult."""
        if type(self.method).check is Method.check:  # no codes of this method are without meaning
            return
        for name, kind in types.items():
            if kind.dtype == CODED and self.carries(tensors, name, kind):
                inner = self.part.inner(kind.shape, name, self.seed)
                self.method.check(self._parts(tensors, name, inner), inner, name)

    def carries(self, tensors: Mapping[str, Array], name: str, kind: TensorType) -> bool:
        """Whether anything of a tensor of the update is among the file's tensors."""
        if self.part.count == 1:
            return True
        inner = self.part.inner(kind.shape, name, self.seed)
        return kind.dtype != CODED or all(name + part in tensors for part in self.method.parts(inner))

    def in_pieces(self, tensors: Mapping[str, Array], name: str, kind: TensorType) -> Iterator[tuple[slice, Array]]:
        """(place in the flat tensor, its values) until the tensor is complete: what `decode` gives, bit for bit.

        The values are good until the next piece is asked for. What does not travel is zero.
        """
        if kind.dtype != CODED:
            return AS_IT_IS.pieces({"": tensors[name]}, kind.shape, name, self.seed)
        if not self.carries(tensors, name, kind):
            return AS_IT_IS.pieces({"": np.zeros(kind.shape, np.float32)}, kind.shape, name, self.seed)
        inner = self.part.inner(kind.shape, name, self.seed)
        parts = self._parts(tensors, name, inner)
        if not self.part.is_strided:
            return self.method.pieces(parts, inner, name, self.seed)
        return self.part.spread(self.method.decode(parts, inner, name, self.seed), kind.shape, name, self.seed)

    def decode(self, tensors: Mapping[str, Array], types: Mapping[str, TensorType]) -> dict[str, Array]:
        """File tensors (already checked) -> update tensors of these types."""
        found: dict[str, Array] = {}
        for name, kind in types.items():
            if kind.dtype != CODED:
                found[name] = tensors[name]
            elif self.part.count == 1:
                found[name] = self.method.decode(self._parts(tensors, name, kind.shape), kind.shape, name, self.seed)
            else:
                whole = np.zeros(elements(kind.shape), np.float32)
                for where, values in self.in_pieces(tensors, name, kind):
                    whole[where] = values
                found[name] = whole.reshape(kind.shape)
        return found

    def _parts(self, tensors: Mapping[str, Array], name: str, inner: Shape) -> dict[str, Array]:
        return {part: tensors[name + part] for part in self.method.parts(inner)}


@lru_cache(maxsize=64)
def _method(codec: Codec) -> Method:
    block, share = codec.block, codec.share
    of_values: Mapping[str, Callable[[], Method]] = {
        "dense": Dense,
        "int8": lambda: Int8(block),
        "fp4": lambda: Fp4(block),
    }
    of_tensors: Mapping[str, Callable[[], Method]] = {
        **of_values,
        "sign": Sign,
        "qsgd": lambda: Qsgd(codec.levels, block),
        "random-k": lambda: RandomK(share, of_values[codec.values]()),
        "low-rank": lambda: LowRank(codec.rank, codec.iterations),
        "top-k": lambda: TopK(share, of_values[codec.values]()),
        "dct-top-k": lambda: DctTopK(share, of_values[codec.values]()),
    }
    return of_tensors[codec.kind]()
