"""Model versions on their way down: a keyframe, and deltas that lead from one version to the next.

A keyframe is a whole state. A delta holds what to add to each parameter of the version before, as int8 codes, and the
buffers whole. A version *is* the state that comes out, the same bits on the server and on every volunteer's computer:

    parameter = base + code * scale        both operations in float32, each rounded once, in numpy on all of them

so that gradients are those of the version that the server means. What rounding leaves out of a delta stays with the
server, which takes each delta from its own exact weights (assimilator/downlink.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from boinc_project.contract.codecs import Codec
from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType
from boinc_project.contract.tensorfile import FileTensor

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]

DELTA_CODEC = Codec("int8", 256, "none")
DELTA_METADATA: Mapping[str, Any] = {"format": "boinc-train-delta"}
MAX_DELTAS = 31  # after a keyframe, of one microtask


def is_coded(name: str, dtype: str) -> bool:
    """Whether a tensor of a state travels as a difference; the others travel whole."""
    return name.startswith("parameter/") and dtype == "float32"


def make_delta(base: Tensors, wanted: Tensors) -> dict[str, Array]:
    """The tensors of the delta that leads from the state `base` as near to the state `wanted` as int8 codes come."""
    whole = {name: array for name, array in wanted.items() if not is_coded(name, array.dtype.name)}
    with np.errstate(over="ignore", invalid="ignore"):  # the caller sees that what comes out is not finite
        steps = {name: wanted[name] - base[name] for name in wanted if name not in whole}
        return {**DELTA_CODEC.encode(steps), **whole}


def apply_delta(base: Tensors, delta: Tensors, what: str = "delta") -> dict[str, Array]:
    """The state after a delta, tensor by tensor of `base`. Raises ContractError if the delta does not fit it."""
    types = {name: TensorType(array.dtype.name, array.shape) for name, array in base.items()}
    coded = {name: kind for name, kind in types.items() if is_coded(name, kind.dtype)}
    needed = DELTA_CODEC.encoded_types(coded)
    needed.update({name: FileTensor(kind.dtype, kind.shape) for name, kind in types.items() if name not in coded})
    for name, wanted in needed.items():
        array = delta.get(name)
        if array is None:
            raise ContractError(f"{what} lacks {name!r}", fault="missing_tensor")
        if array.dtype.name != wanted.dtype or array.shape != wanted.shape:
            raise ContractError(f"{what}: {name!r} is {array.dtype} {array.shape}, not {wanted}", fault="shape")
    found: dict[str, Array] = {}
    with np.errstate(over="ignore", invalid="ignore"):  # a forged file's; the loss tells
        for name, kind in types.items():
            if name not in coded:
                found[name] = delta[name]
                continue
            found[name] = np.array(base[name], order="C")
            flat = found[name].reshape(-1)
            for where, values in DELTA_CODEC.in_pieces(delta, name, kind):
                flat[where] += values
    return found
