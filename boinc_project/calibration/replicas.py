"""Ways to compute one microtask: those that honest volunteers use, and those that must be told apart.

Honest: every backend that this machine has (numpy; PyTorch on one and two threads and on a card; OpenCL), and other
hardware emulated on PyTorch: sums in another order, one unit in the last place on every matrix product. Imprecise:
what cards do when they are allowed to, emulated on PyTorch's CPU kernels:

    tf32      factors of products rounded to 10 bits of mantissa, sums in float32 (NVIDIA A100 whitepaper, 2020)
    float16   factors and products in IEEE half precision, sums in float32
    bfloat16  factors and products with 7 bits of mantissa, sums in float32
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apps.gradient.backends import Backend, Call, Kernel, Prepare, open_backend
from apps.gradient.backends.backend import DeviceNotFound
from apps.gradient.backends.torch_backend import TorchBackend
from boinc_project.contract.errors import UnfitHost

#: Operators that multiply and add up, and which of their inputs are factors.
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "convolution": (0, 1), "convolution_backward": (0, 1, 2)}

Rounding = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Replica:
    """One way to compute a microtask.

    name     as tables and calibration.json have it
    open     makes its backend
    threads  CPU threads of PyTorch while it computes
    shuffle  whether the samples of each batch come in another order
    """

    name: str
    open: Callable[[], Backend]
    threads: int = 1
    shuffle: bool = False


@dataclass(frozen=True)
class Replicas:
    """What this machine can compute with. The first honest one is the specification. absent: backend -> reason."""

    honest: tuple[Replica, ...]
    imprecise: tuple[Replica, ...]
    absent: dict[str, str]


def replicas(random_numbers: bool) -> Replicas:
    """All replicas of this machine; `random_numbers`: whether the graph draws any.

    Random numbers belong to places in a batch, so with them another order of the samples is other work.
    """
    honest = [
        Replica("numpy", lambda: open_backend("numpy")),
        Replica("torch, 1 thread", _torch),
        Replica("torch, 2 threads", lambda: open_backend("torch", 2, "cpu"), threads=2),
    ]
    absent: dict[str, str] = {}
    for name, device in (("torch", "cuda"), ("opencl", None)):
        label = f"{name}, {device}" if device else name
        try:
            open_backend(name, 1, device)
        except (UnfitHost, DeviceNotFound, ValueError) as error:
            absent[label] = " ".join(str(error).split())
        else:
            honest.append(Replica(label, lambda name=name, device=device: open_backend(name, 1, device)))  # type: ignore[misc]
    honest.append(Replica("products in another order", lambda: _altered(_reordered)))
    honest.append(Replica("products one ulp off", lambda: _altered(_OneUlp(7))))
    if not random_numbers:
        honest.append(Replica("samples in another order", _torch, shuffle=True))
    imprecise = (
        Replica("tf32", lambda: _altered(_Rounded(lambda x: short_mantissa(x, 10)))),
        Replica("float16", lambda: _altered(_Rounded(half_precision, of_products=True))),
        Replica("bfloat16", lambda: _altered(_Rounded(lambda x: short_mantissa(x, 7), of_products=True))),
    )
    return Replicas(tuple(honest), imprecise, absent)


@contextmanager
def threads_kept() -> Iterator[None]:
    """PyTorch's number of threads belongs to the process; it is put back in the end."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def short_mantissa(x: Tensor, bits: int) -> Tensor:
    """float32 values rounded to so many bits of mantissa, halves to even; infinities and NaN stay what they are."""
    drop = 23 - bits
    codes = x.contiguous().view(torch.int32)
    last = (codes >> drop) & 1
    rounded = (codes + ((1 << (drop - 1)) - 1) + last) & ~((1 << drop) - 1)
    return torch.where(torch.isfinite(x), rounded.view(torch.float32), x)


def half_precision(x: Tensor) -> Tensor:
    """float32 values as float16 holds them; what is too large for it is its largest number."""
    return x.clamp(-65504.0, 65504.0).to(torch.float16).to(torch.float32)


def _torch() -> Backend:
    return open_backend("torch", 1, "cpu")


Alteration = Callable[[str, Call, Kernel], Kernel]


def _altered(alter: Alteration) -> Backend:
    """PyTorch on one thread with other kernels for products."""
    backend = _torch()
    assert isinstance(backend, TorchBackend)

    def prepare(op: str, usual: Prepare) -> Prepare:
        return lambda call: alter(op, call, usual(call))

    backend.ops = {op: prepare(op, usual) if op in PRODUCTS else usual for op, usual in backend.ops.items()}
    return backend


@dataclass(frozen=True)
class _Rounded:
    """Factors rounded before a product, and the product too where `of_products` says so."""

    rounding: Rounding
    of_products: bool = False

    def __call__(self, op: str, call: Call, kernel: Kernel) -> Kernel:
        factors = PRODUCTS[op]

        def run(*given: Tensor | None) -> Any:
            made = kernel(*(self.rounding(x) if i in factors and x is not None else x for i, x in enumerate(given)))
            return _each(made, self.rounding) if self.of_products else made

        return run


class _OneUlp:
    """Every element of a product moved by at most one unit in the last place, up, down or not at all."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.Philox(seed))

    def __call__(self, op: str, call: Call, kernel: Kernel) -> Kernel:
        return lambda *given: _each(kernel(*given), self._moved)

    def _moved(self, x: Tensor) -> Tensor:
        move = torch.from_numpy(self._random.integers(-1, 2, tuple(x.shape), np.int8))
        return (x.contiguous().view(torch.int32) + torch.where(x == 0, 0, move)).view(torch.float32)


def _reordered(op: str, call: Call, kernel: Kernel) -> Kernel:
    """The sum of a matrix product taken in another (fixed, drawn) order; convolutions are left as they are."""
    if op not in ("mm", "bmm", "addmm"):
        return kernel
    left, right = PRODUCTS[op]
    order = torch.from_numpy(np.random.Generator(np.random.Philox(11)).permutation(call.input(left).shape[-1]))

    def run(*given: Tensor) -> Any:
        made = list(given)
        made[left], made[right] = given[left][..., order], given[right].index_select(-2, order)
        return kernel(*made)

    return run


def _each(made: Any, change: Rounding) -> Any:
    """The change on each float tensor of a kernel's outputs."""
    if isinstance(made, Tensor):
        return change(made) if made.dtype == torch.float32 else made
    return tuple(_each(one, change) if one is not None else None for one in made)
