"""Matrix products on OpenCL against PyTorch on the same processor, packing included.

Each shape is a graph of a few independent products, so that what a graph costs besides them is shared as it is in
training. The two take turns with pauses between them, because PyTorch's and the OpenCL driver's threads would
otherwise wait actively for work on each other's cores. A time is the lower quartile of all rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from apps.gradient.opencl import device as devices
from apps.gradient.opencl.opencl_backend import OpenclBackend, OpenclProgram
from apps.gradient.opencl.peak import Peak
from boinc_project.contract.graph import GraphBuilder
from scripts.benchmarks.common import BenchmarkFailed

PAUSE_S = 0.06
FLOPS_AT_ONCE = 2e9  # so many, if products are small, or
MOST_PRODUCTS = 16  # so many products, in one run
AGREEMENT = 1e-5  # largest relative L2 difference of the results


@dataclass(frozen=True)
class Shape:
    """A product [m, k] [k, n]; operands named in `turned` lie in memory transposed, as a Linear layer has them."""

    m: int
    n: int
    k: int
    turned: str = ""
    batch: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def products(self) -> int:
        return max(1, min(MOST_PRODUCTS, round(FLOPS_AT_ONCE / self.flops)))

    def __str__(self) -> str:
        batch = f"{self.batch} x " if self.batch > 1 else ""
        turned = f", {' and '.join(self.turned)} transposed" if self.turned else ""
        return f"{batch}{self.m} x {self.n} x {self.k}{turned}"


PEAK_SHAPE = Shape(1024, 1024, 1024)
CLBLAST_SHAPES = (Shape(512, 512, 512), PEAK_SHAPE)
SHAPES = (
    Shape(512, 512, 512),
    PEAK_SHAPE,
    Shape(2048, 2048, 2048),
    # A transformer's layers: forward, and the gradients of input and weight.
    Shape(256, 2048, 512, "b"),
    Shape(256, 512, 2048, "b"),
    Shape(256, 2048, 512),
    Shape(256, 512, 2048),
    Shape(2048, 1536, 512, "b"),
    Shape(1536, 512, 2048, "a"),
    Shape(256, 256, 64, "b", batch=32),
    Shape(256, 64, 256, batch=32),
    Shape(32, 512, 512, "b"),
    Shape(32, 512, 512),
    Shape(8, 2048, 512, "b"),
    Shape(1, 2048, 512, "b"),
    Shape(1, 2048, 512),
    # Ragged.
    Shape(4096, 64, 64),
    Shape(511, 513, 509),
    Shape(127, 1000, 333, "b"),
    Shape(1000, 100, 784),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="OpenCL device: cpu, gpu or PLATFORM:INDEX (default cpu)")
    parser.add_argument("--rounds", type=int, default=12, help="measured rounds (default 12)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """Speeds relative to PyTorch's (median_ratio_torch, min_ratio_torch) and CLBlast's, and percent_of_peak."""
    torch.set_num_threads(os.cpu_count() or 1)
    found = devices.choose(devices.find_devices(), devices.request_of_text(options.device))
    backend = OpenclBackend(found.handle, devices.facts(found))
    peak = Peak(backend.queue, backend.facts, backend.programs)
    sgemm = _clblast()
    ratios: dict[Shape, float] = {}
    metrics: dict[str, float] = {}
    clblast: list[float] = []
    for shape in SHAPES:
        contest = _Contest(shape, backend)
        runs: dict[str, Callable[[], None]] = {"opencl": contest.ours, "torch": contest.theirs}
        if shape in CLBLAST_SHAPES and sgemm is not None:
            runs["clblast"] = contest.clblast(sgemm)
        seconds, rates = _rounds(runs, options.rounds, peak if shape == PEAK_SHAPE else None)
        times = {name: statistics.quantiles(values, n=4)[0] / shape.products for name, values in seconds.items()}
        speeds = ", ".join(f"{name} {shape.flops / value / 1e9:.1f}" for name, value in times.items())
        ratios[shape] = times["torch"] / times["opencl"]
        print(f"{shape}: {speeds} GFLOPS, ratio {ratios[shape]:.2f}", flush=True)
        if "clblast" in times:
            clblast.append(times["clblast"] / times["opencl"])
        if rates:
            best = statistics.quantiles(rates, n=4)[2]
            metrics["percent_of_peak"] = 100 * shape.flops / times["opencl"] / best
            print(f"peak: {best / 1e9:.1f} GFLOPS in a loop of multiply-adds", flush=True)
    metrics["median_ratio_torch"] = statistics.median(ratios.values())
    metrics["min_ratio_torch"] = min(ratios.values())
    if clblast:
        metrics["ratio_clblast"] = statistics.median(clblast)
    return metrics


def _rounds(
    runs: dict[str, Callable[[], None]], rounds: int, peak: Peak | None
) -> tuple[dict[str, list[float]], list[float]]:
    """Seconds of each run of each, and rates of the peak loop between them."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    rates = []
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE_S)
            run()  # wakes the threads
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
        if peak is not None:
            time.sleep(PAUSE_S)
            rates += [peak.rate(), peak.rate()]
    return seconds, rates


class _Contest:
    """The same products for both."""

    def __init__(self, shape: Shape, backend: OpenclBackend) -> None:
        draws = np.random.default_rng(0)
        self._shape, self._backend = shape, backend
        batch = (shape.batch,) if shape.batch > 1 else ()
        sizes = {"a": (shape.m, shape.k), "b": (shape.k, shape.n)}
        builder = GraphBuilder()
        arrays, values = {}, {}
        for name in (f"{side}{number}" for number in range(shape.products) for side in "ab"):
            size = sizes[name[0]]
            stored = size[::-1] if name[0] in shape.turned else size
            arrays[name] = draws.standard_normal((*batch, *stored)).astype(np.float32)
            values[name] = builder.input(name, "batch", "float32", (*batch, *stored))
        for name in values:
            if name[0] in shape.turned:
                dims = [0, 2, 1] if batch else [1, 0]
                (values[name],) = builder.node("permute", [values[name]], {"dims": dims})
        for number in range(shape.products):
            (made,) = builder.node("bmm" if batch else "mm", [values[f"a{number}"], values[f"b{number}"]])
            builder.output(f"c{number}", "metric", made)
        self._program = OpenclProgram(builder.build(), backend, False, frozenset())
        self._given = {name: backend.from_numpy(array) for name, array in arrays.items()}
        tensors = {
            name: torch.from_numpy(a).mT if name[0] in shape.turned else torch.from_numpy(a)
            for name, a in arrays.items()
        }
        self._pairs = [(tensors[f"a{number}"], tensors[f"b{number}"]) for number in range(shape.products)]
        self._outs = [torch.matmul(a, b) for a, b in self._pairs]
        self._check(backend.to_numpy(self._program.run(self._given)["c0"]))

    def _check(self, made: np.ndarray) -> None:
        wanted = self._outs[0].numpy()
        if not np.linalg.norm(made - wanted) <= AGREEMENT * np.linalg.norm(wanted):
            raise BenchmarkFailed(f"the product {self._shape} is wrong")

    def ours(self) -> None:
        self._program.run(self._given)
        self._backend.synchronize()

    def theirs(self) -> None:
        for (a, b), out in zip(self._pairs, self._outs, strict=True):
            torch.matmul(a, b, out=out)

    def clblast(self, sgemm: Callable[..., int]) -> Callable[[], None]:
        """CLBlast on the same device and buffers; operands must not be transposed."""
        shape, backend = self._shape, self._backend
        m, n, k = shape.m, shape.n, shape.k
        out = backend.from_numpy(np.zeros((m, n), np.float32))
        queue = ctypes.c_void_p(backend.queue.int_ptr)

        def run() -> None:
            for number in range(shape.products):
                tensors = (self._given[f"a{number}"], self._given[f"b{number}"], out)
                a, b, c = (ctypes.c_void_p(each.buffer.int_ptr) for each in tensors)
                status = _sgemm(sgemm, (m, n, k), a, b, c, queue)
                if status:
                    raise BenchmarkFailed(f"CLBlast returned status {status}")
            backend.synchronize()

        run()
        self._check(backend.to_numpy(out) if shape.products == 1 else self._outs[0].numpy())
        return run


def _sgemm(
    sgemm: Callable[..., int],
    sizes: tuple[int, int, int],
    a: ctypes.c_void_p,
    b: ctypes.c_void_p,
    c: ctypes.c_void_p,
    queue: ctypes.c_void_p,
) -> int:
    """CLBlastSgemm, row-major, nothing transposed, on tensors without offsets."""
    size, zero = ctypes.c_size_t, ctypes.c_size_t(0)
    m, n, k = sizes
    one, none = ctypes.c_float(1.0), ctypes.c_float(0.0)
    return sgemm(
        101, 111, 111, size(m), size(n), size(k),
        one, a, zero, size(k), b, zero, size(n), none, c, zero, size(n), ctypes.byref(queue), None,
    )  # fmt: skip


def _clblast() -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = ctypes.CDLL("libclblast.so.1").CLBlastSgemm
    except OSError:
        print("CLBlast (libclblast1) is not installed: no ratio_clblast")
        return None
    return function
