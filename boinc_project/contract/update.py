"""The update: what one microtask gives back, as one file.

Tensors by name:
    gradient/<parameter>   float32, gradient of the summed loss           (mode gradient)
    delta/<parameter>      float32, start minus end                       (mode local-steps)
    buffer/<buffer>        the buffers after the last step                (gradient, local-steps)
    optimizer/<name>       the inner optimizer's state after it           (local-steps whose state is shipped)
    metric/<name>          float32 [steps], summed over the samples of each step (all modes)
The first two are encoded by the microtask's codec; the others always travel as they are. The file is a
tensor file (tensorfile.py), in one zstd frame if the codec says so. Its metadata is a stranger's text: it
may be shown, escaped, and never decides.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import zstandard

from boinc_project.contract import canonical, tensorfile
from boinc_project.contract.codecs import Array, Codec, CodecSeed
from boinc_project.contract.errors import ContractError, InvalidResult
from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import TensorType
from boinc_project.contract.tensorfile import FileTensor

FORMAT = "boinc-train-update"
MAX_METADATA_BYTES = 64 << 10
_CACHED = 8192  # elements as float64 that stay in the processor's cache
LARGEST = 1e18  # magnitude of an element: float32 holds its square, and the sum of a hundred of them
ENCODED_PREFIXES = ("gradient/", "delta/")


@dataclass(frozen=True)
class Update:
    """A decoded update: tensors by name, and the volunteer's own (untrusted) description."""

    tensors: Mapping[str, Array]
    metadata: Mapping[str, Any]


def update_types(graph: Graph, mode: str, steps: int, shipped: Graph | None = None) -> dict[str, TensorType]:
    """Name -> type of every tensor that a microtask of this mode over this graph gives back. `shipped`: the graph of
    the inner optimizer, if its state is."""
    types = graph.output_types()
    found: dict[str, TensorType] = {}
    for output in graph.outputs:
        if output.kind == "metric":
            found[output.name] = TensorType("float32", (steps,))
        elif (output.kind == "buffer" and mode != "evaluation") or (output.kind == "gradient" and mode == "gradient"):
            found[output.name] = types[output.name]
        elif output.kind == "gradient" and mode == "local-steps":
            found["delta/" + output.name[len("gradient/") :]] = types[output.name]
    if shipped is not None:
        found.update({each.name: each.type for each in shipped.inputs_of_kind("optimizer")})
    return found


def family_of(name: str) -> str:
    """The tensors of an update with which one is compared: of an optimizer's state each kind of moment is one."""
    family, _, rest = name.partition("/")
    return f"{family}.{rest.rpartition('.')[2]}" if family == "optimizer" else family


@dataclass(frozen=True)
class UpdateForm:
    """What the file of an update must hold: made once for all copies of a microtask.

    tensors    names and types of those in the file: the encoded ones replaced by their codes
    coded      those of the update that are encoded
    max_bytes  no honest update file is larger: data, header, metadata, and zstd's worst expansion
    """

    types: Mapping[str, TensorType]
    codec: Codec
    tensors: Mapping[str, FileTensor]
    coded: Mapping[str, TensorType]
    max_bytes: int

    def read(self, data: bytes, microtask_digest: str) -> Update:
        """Check and decode a stranger's file. Raises InvalidResult; nothing larger than it should be is allocated."""
        file = self._checked(data, microtask_digest)
        with np.errstate(invalid="ignore", over="ignore"):
            tensors = self.codec.decode(file.tensors, self.coded)
        tensors.update({n: file.tensors[n] for n in self.types if n not in tensors})
        _check_finite(tensors, InvalidResult)
        return Update(tensors, file.metadata)

    def open(self, data: bytes, microtask_digest: str) -> OpenUpdate:
        """Check a file without decoding it. What it holds is finite; what it decodes to may still overflow, which is
        for `read` to find. Raises InvalidResult."""
        file = self._checked(data, microtask_digest)
        _check_finite(file.tensors, InvalidResult)
        return OpenUpdate(file.tensors, self.types, self.codec, file.metadata)

    def _checked(self, data: bytes, microtask_digest: str) -> tensorfile.TensorFile:
        """The tensors and metadata that belong there, with any values."""
        if not data:
            raise InvalidResult("the update file is empty", fault="empty")
        if len(data) > self.max_bytes:
            raise InvalidResult(f"the update file has {len(data)} bytes, more than {self.max_bytes}", fault="too_large")
        if self.codec.compression == "zstd":
            data = canonical.decompress(data, self.max_bytes, "update", InvalidResult)
        file = tensorfile.from_bytes(data, self.tensors, "update", InvalidResult)
        if file.metadata.get("format") != FORMAT:
            raise InvalidResult("this is not an update file", fault="format")
        if file.metadata.get("microtask") != microtask_digest:
            raise InvalidResult("the update belongs to another microtask", fault="wrong_microtask")
        if len(canonical.dumps(dict(file.metadata))) > MAX_METADATA_BYTES + 1024:
            raise InvalidResult("the update's metadata is too long", fault="too_large")
        self.codec.check(file.tensors, self.coded)
        return file


def update_form(types: Mapping[str, TensorType], codec: Codec) -> UpdateForm:
    """The form of updates of these types in this codec."""
    # The seed counts where the sizes of what travels depend on it.
    made = _form(tuple(types.items()), codec, codec.seed if codec.part.is_strided else None)
    return made if made.codec.seed == codec.seed else replace(made, codec=codec)


@functools.lru_cache(maxsize=64)  # the same for all updates of a job
def _form(types: tuple[tuple[str, TensorType], ...], codec: Codec, _seed: CodecSeed | None) -> UpdateForm:
    coded = {name: kind for name, kind in types if name.startswith(ENCODED_PREFIXES)}
    plain = {name: FileTensor(kind.dtype, kind.shape) for name, kind in types if name not in coded}
    found = {**codec.encoded_types(coded), **plain}
    inside = 4096 + 2 * MAX_METADATA_BYTES + sum(kind.nbytes + 2 * len(n) + 200 for n, kind in found.items())
    most = inside + inside // 128 + 1024 if codec.compression == "zstd" else inside
    return UpdateForm(dict(types), codec, found, coded, most)


def max_update_bytes(types: Mapping[str, TensorType], codec: Codec) -> int:
    """No honest update file is larger, in bytes."""
    return update_form(types, codec).max_bytes


def write_update(
    tensors: Mapping[str, Array], types: Mapping[str, TensorType], metadata: Mapping[str, Any], codec: Codec
) -> bytes:
    """The file for these tensors (which must have exactly these types); refuses non-finite ones (ContractError)."""
    for name, kind in types.items():
        array = tensors[name]
        if array.dtype.name != kind.dtype or array.shape != kind.shape:
            raise ContractError(f"update tensor {name!r} is {array.dtype} {array.shape}, not {kind}", fault="shape")
    _check_finite(tensors, ContractError)
    if len(canonical.dumps(dict(metadata))) > MAX_METADATA_BYTES:
        raise ContractError("the update's metadata is too long", fault="too_large")
    coded = {name: tensors[name] for name in types if name.startswith(ENCODED_PREFIXES)}
    plain = {name: tensors[name] for name in types if name not in coded}
    data = tensorfile.to_bytes({**codec.encode(coded), **plain}, {**metadata, "format": FORMAT})
    return canonical.compress(data) if codec.compression == "zstd" else data


@dataclass(frozen=True)
class OpenUpdate:
    """An update whose file has been checked and whose encoded tensors have not been decoded.

    It holds the file's own tensors and no more, so that an update can be summed in little memory.
    """

    file: Mapping[str, Array]
    types: Mapping[str, TensorType]
    codec: Codec
    metadata: Mapping[str, Any]

    def plain(self, name: str) -> Array:
        """A tensor that travels as it is (buffer/*, metric/*)."""
        return self.file[name]

    def carries(self, name: str) -> bool:
        """Whether anything of a tensor has travelled (codecs/part.py)."""
        return not name.startswith(ENCODED_PREFIXES) or self.codec.carries(self.file, name, self.types[name])

    @property
    def part(self) -> int:
        """Which part of the values has travelled: those of one part may be averaged with one another."""
        return self.codec.part.index

    def pieces(self, name: str) -> Iterator[tuple[slice, Array]]:
        """(place in the flat tensor, its values), piece by piece; each is good until the next one is asked for."""
        codec = self.codec if name.startswith(ENCODED_PREFIXES) else Codec()
        return codec.in_pieces(self.file, name, self.types[name])


def read_update(data: bytes, types: Mapping[str, TensorType], codec: Codec, microtask_digest: str) -> Update:
    """Check and decode a stranger's file (UpdateForm.read)."""
    return update_form(types, codec).read(data, microtask_digest)


def open_update(data: bytes, types: Mapping[str, TensorType], codec: Codec, microtask_digest: str) -> OpenUpdate:
    """Check a file without decoding it (UpdateForm.open)."""
    return update_form(types, codec).open(data, microtask_digest)


def judged_metrics(data: bytes, codec: Codec) -> dict[str, Array]:
    """metric/* of an update that was checked before and has not changed since (the caller compared its digest).

    Nothing behind them is expanded: in a file of int8 codes they lie near the beginning.
    """
    source: Any = zstandard.ZstdDecompressor().stream_reader(data) if codec.compression == "zstd" else io.BytesIO(data)
    header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
    places = {n: e["data_offsets"] for n, e in header.items() if n.startswith("metric/")}
    body = source.read(max((end for _, end in places.values()), default=0))
    return {name: np.frombuffer(body[start:end], "<f4") for name, (start, end) in places.items()}


def squared_norm(array: Array) -> float:
    """Sum of squares in float64 (so that 3e38 does not overflow)."""
    flat = array.reshape(-1)
    scratch = np.empty(min(_CACHED, flat.size))
    total = 0.0
    for start in range(0, flat.size, _CACHED):
        piece = scratch[: min(_CACHED, flat.size - start)]
        piece[...] = flat[start : start + _CACHED]
        total += float(piece @ piece)
    return total


def _check_finite(tensors: Mapping[str, Array], fault_type: type[ContractError]) -> None:
    """Refuse NaN, infinity, and tensors so large that an optimizer could not keep their squares in float32."""
    for name, array in tensors.items():
        if array.dtype.kind != "f" or array.size == 0:
            continue
        top = max(float(array.max()), -float(array.min()))  # NaN propagates through max and min
        if not math.isfinite(top):
            raise fault_type(f"update tensor {name!r} holds NaN or infinity", fault="not_finite")
        if top > LARGEST:
            raise fault_type(f"update tensor {name!r} holds {top:.3g}; its square would overflow", fault="not_finite")
