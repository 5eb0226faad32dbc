"""dense: float32 as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from boinc_project.contract.codecs import method
from boinc_project.contract.codecs.method import WHOLE, Array, CodecSeed, Method, Parts, Shape
from boinc_project.contract.tensorfile import FileTensor


@dataclass(frozen=True)
class Dense(Method):
    """4 bytes a value."""

    kind: ClassVar[str] = "dense"

    def parts(self, shape: Shape) -> dict[str, FileTensor]:
        return {WHOLE: FileTensor("float32", shape)}

    def encode(self, array: Array, name: str, seed: CodecSeed) -> dict[str, Array]:
        return {WHOLE: array}

    def pieces(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Iterator[tuple[slice, Array]]:
        flat = parts[WHOLE].reshape(-1)
        for start in range(0, flat.size, method.PIECE_ELEMENTS):
            where = slice(start, min(start + method.PIECE_ELEMENTS, flat.size))
            yield where, flat[where]

    def decode(self, parts: Parts, shape: Shape, name: str, seed: CodecSeed) -> Array:
        return parts[WHOLE]
