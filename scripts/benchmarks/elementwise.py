"""What fusing a chain of elementwise operators gains: GELU's backward written out, dropout, a bias and a residual.

The same graph is run as it is, and with every intermediate value asked for as an output of a graph of its own, so
that each operator is a kernel that reads and writes memory.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from apps.gradient.opencl import device as devices
from apps.gradient.opencl.opencl_backend import OpenclBackend, OpenclProgram
from apps.gradient.opencl.runtime import DeviceTensor
from boinc_project.contract.graph import Graph, GraphBuilder

ELEMENTS = 1 << 20
#: Operator and its second operand, one after another on one tensor.
CHAIN = (("mul", "x"), ("add", "y"), ("relu", None), ("sub", "x"), ("mul", "y"))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", help="OpenCL device: cpu, gpu or PLATFORM:INDEX (default cpu)")
    parser.add_argument("--repeats", type=int, default=60, help="measured repeats (default 60)")


def measure(options: argparse.Namespace) -> dict[str, float]:
    """fusion_gain: time of one kernel for each operator over the time of the fused one."""
    found = devices.choose(devices.find_devices(), devices.request_of_text(options.device))
    backend = OpenclBackend(found.handle, devices.facts(found))
    draws = np.random.default_rng(0)
    given = {name: backend.from_numpy(draws.standard_normal(ELEMENTS).astype(np.float32)) for name in ("x", "y")}
    fused = OpenclProgram(_graph(CHAIN), backend, False, frozenset())
    single = [OpenclProgram(_graph((step,)), backend, False, frozenset()) for step in CHAIN]
    assert len(fused.plan.launches) == 1 and all(len(each.plan.launches) == 1 for each in single)

    def together() -> DeviceTensor:
        return fused.run({"v": given["x"], **given})["out"]

    def apart() -> DeviceTensor:
        value = given["x"]
        for program in single:
            value = program.run({"v": value, **given})["out"]
        return value

    np.testing.assert_allclose(backend.to_numpy(together()), backend.to_numpy(apart()), rtol=1e-5, atol=1e-6)
    seconds: dict[str, list[float]] = {"fused": [], "apart": []}
    for number in range(options.repeats + 5):
        for name, run in (("fused", together), ("apart", apart)):
            start = time.perf_counter()
            run()
            backend.synchronize()
            if number >= 5:
                seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rate = 3 * 4 * ELEMENTS / medians["fused"] / 1e9
    print(f"{len(CHAIN)} operators on {ELEMENTS} elements: fused {1e3 * medians['fused']:.3f} ms ({rate:.1f} GB/s),"
          f" one by one {1e3 * medians['apart']:.3f} ms")  # fmt: skip
    return {"fusion_gain": medians["apart"] / medians["fused"], "fused_gb_per_s": rate}


def _graph(chain: tuple[tuple[str, str | None], ...]) -> Graph:
    builder = GraphBuilder()
    inputs = {name: builder.input(name, "batch", "float32", (ELEMENTS,)) for name in ("v", "x", "y")}
    value = inputs["v"]
    for op, other in chain:
        (value,) = builder.node(op, [value] if other is None else [value, inputs[other]])
    builder.output("out", "metric", value)
    return builder.build()
