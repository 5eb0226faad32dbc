"""The numpy backend: the specification of every operator, and the CPU app where PyTorch is absent.

The operators stand in four files by family; this one has the matrix products, joins the tables and opens the
backend. Values are numpy arrays of the opset's dtypes and may be views of one another, so no operator writes
to its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import threadpoolctl

from apps.gradient.backends import (
    numpy_convolution,
    numpy_elementwise,
    numpy_indexing,
    numpy_reductions,
)
from apps.gradient.backends.backend import Call, Kernel, Prepare, Program
from apps.gradient.boinc_messages import InitData
from apps.gradient.executor import Executor
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import OPSET, TensorType

Array = np.ndarray[Any, Any]


def _for_blas(x: Array) -> Array:
    """x, copied if BLAS could not take it as it is: numpy's own matrix loop is a hundred times slower."""
    itemsize, (rows, columns) = x.itemsize, x.strides[-2:]
    plain = columns == itemsize and rows >= itemsize * x.shape[-1]
    transposed = rows == itemsize and columns >= itemsize * x.shape[-2]
    return x if plain or transposed else np.ascontiguousarray(x)


def _matmul(a: Array, b: Array) -> Array:
    product: Array = np.matmul(_for_blas(a), _for_blas(b))
    return product


def _addmm(bias: Array, a: Array, b: Array) -> Array:
    out = _matmul(a, b)
    out += bias
    return out


def _product(call: Call) -> Kernel:
    return _matmul


def _biased_product(call: Call) -> Kernel:
    return _addmm


_FAMILIES: dict[str, Prepare] = {
    "mm": _product,
    "bmm": _product,
    "addmm": _biased_product,
    **numpy_indexing.OPS,
    **numpy_elementwise.OPS,
    **numpy_reductions.OPS,
    **numpy_convolution.OPS,
}

OPS: Mapping[str, Prepare] = {name: _FAMILIES[name] for name in OPSET}


class NumpyBackend:
    """Runs on the CPU; only matrix products use several threads.

    The thread number is set in the loaded BLAS (threadpoolctl) rather than by environment variables, which BLAS
    reads only once, when numpy is first imported, long before the app knows how many processors it was given.
    """

    name = "numpy"
    ops = OPS

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._limits = threadpoolctl.threadpool_limits(limits=threads, user_api="blas")

    def program(self, graph: Graph, verify: bool = False, consume: AbstractSet[str] = frozenset()) -> Program:
        """The operators one after another; a value's memory is freed after its last use."""
        return Executor(graph, self, verify)

    def describe(self) -> Mapping[str, str]:
        """Device, library versions and precision settings."""
        blas = {
            f"{p['internal_api']} {p['version']}" for p in threadpoolctl.threadpool_info() if p["user_api"] == "blas"
        }
        return {
            "backend": "numpy",
            "device": "cpu",
            "numpy": np.__version__,
            "blas": ", ".join(sorted(blas)),
            "threads": str(self.threads),
            "precision": "float32",
        }

    def scope(self) -> AbstractContextManager[Any]:
        """Infinities and NaN are values here, not warnings: the update's finiteness is checked at the end."""
        return np.errstate(all="ignore")

    def from_numpy(self, array: Array) -> Array:
        """The array itself."""
        return array

    def to_numpy(self, tensor: Any) -> Array:
        """The array itself (0-d results of numpy are scalars and become arrays here)."""
        return np.asarray(tensor)

    def type_of(self, tensor: Any) -> TensorType:
        """The dtype and shape."""
        return TensorType(tensor.dtype.name, tensor.shape)

    def synchronize(self) -> None:
        """Nothing to wait for."""


def open_backend(threads: int, device: str | InitData | None) -> NumpyBackend:
    """The backend on the CPU, which is all that a task can mean; any other device is refused by its name."""
    if isinstance(device, str) and device != "cpu":
        raise UnfitHost(f"the numpy backend runs on the cpu, not on {device!r}")
    return NumpyBackend(threads)
