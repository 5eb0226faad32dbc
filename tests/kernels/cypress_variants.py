"""Every kernel variant that can be launched on a Radeon HD 5870, found without one.

Planning needs no device, so the graphs of all operator cases, of products and reductions of many sizes, and of the
example models are planned for a Cypress, and their launches collected; to these come what the tuner may try (a
module's `VARIANTS`) and every file of kernels/ as it stands.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from op_cases import CASES, OpCase, f, ints

from apps.gradient.opencl.facts import DeviceFacts
from boinc_project.contract.graph import Graph, GraphBuilder
from work_generator.export import export_job
from work_generator.job import Job

ROOT = Path(__file__).resolve().parents[2]

CYPRESS = DeviceFacts(
    name="Cypress",
    vendor="Advanced Micro Devices, Inc.",
    platform="AMD Accelerated Parallel Processing",
    driver="1800.11 (VM)",
    version=(1, 2),
    kind="gpu",
    group_form=True,
    vector_width=4,
    wavefront=64,
    max_work_group=256,
    local_memory=32 << 10,
    compute_units=20,
    clock_mhz=850,
    max_allocation=256 << 20,
    global_memory=858993459,
)


@dataclass
class Variant:
    """A program: a file with what is appended to it, and defines. `launched` are the kernels that are used of it,
    each with its largest work-group; of a program that nothing plans to launch, all."""

    file: str
    more: str
    defines: tuple[str, ...]
    launched: dict[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.file}{'+chains' if self.more else ''} {' '.join(self.defines)}"


def variants(device: DeviceFacts = CYPRESS, examples: bool = True) -> list[Variant]:
    """All of them, each program once; `examples`: with those of the example jobs."""
    from apps.gradient.opencl import opencl_backend
    from apps.gradient.opencl.plan import make_plan
    from apps.gradient.opencl.programs import define_options, kernel_folder

    found: dict[tuple[str, str, tuple[str, ...]], Variant] = {}

    def add(file: str, more: str, defines: Iterable[tuple[str, int | str]]) -> Variant:
        options = tuple(define_options(defines))
        return found.setdefault((file, more, options), Variant(file, more, options))

    for graph in graphs(set(opencl_backend.OPS), examples):
        for launch in make_plan(graph, device, opencl_backend.OPS, frozenset()).launches:
            variant = add(launch.source.file, launch.source.text, launch.defines)
            size = math.prod(launch.local_size)
            variant.launched[launch.kernel] = max(size, variant.launched.get(launch.kernel, 0))
    for file, defines in candidates():
        add(file, "", tuple(defines.items()))
    for path in sorted(kernel_folder().glob("*.cl")):
        add(path.name, "", ())
    return list(found.values())


def candidates() -> Iterator[tuple[str, dict[str, int | str]]]:
    """What the modules of the backend may try beyond that: their `VARIANTS`."""
    from apps.gradient import opencl

    for module in pkgutil.iter_modules(opencl.__path__):
        yield from getattr(importlib.import_module(f"{opencl.__name__}.{module.name}"), "VARIANTS", ())


def graphs(known: set[str], examples: bool) -> Iterator[Graph]:
    """Graphs of the operators that are known."""
    cases = [case for op, cases in CASES.items() if op in known for case in cases]
    cases += [case for case in large_cases() if case.op in known]
    yield graph_of(cases)
    for graph in example_graphs() if examples else ():
        if graph.operators() <= known:
            yield graph


def graph_of(cases: Iterable[OpCase]) -> Graph:
    """One graph of many independent nodes: each case as it is, and with every other element of wider inputs."""
    cases, builder = [(case, strided) for case in cases for strided in (False, True)], GraphBuilder()
    inputs: list[list[int | None]] = []
    for number, (case, strided) in enumerate(cases):
        inputs.append([])
        for place, draw in enumerate(case.inputs):
            shape = () if draw is None else draw.shape
            if strided and shape:
                shape = (*shape[:-1], 2 * shape[-1])
            name = f"in{number}_{place}"
            inputs[-1].append(None if draw is None else builder.input(name, "constant", draw.dtype, shape))
    for number, ((case, strided), values) in enumerate(zip(cases, inputs, strict=True)):
        given = [
            _every_other(builder, value, draw.shape) if strided and value is not None and draw and draw.shape else value
            for value, draw in zip(values, case.inputs, strict=True)
        ]
        for place, made in enumerate(builder.node(case.op, given, case.attrs)):
            builder.output(f"out{number}_{place}", "metric", made)
    return builder.build()


def _every_other(builder: GraphBuilder, value: int, shape: tuple[int, ...]) -> int:
    dim, size = len(shape) - 1, shape[-1]
    (made,) = builder.node("slice", [value], {"dim": dim, "start": 0, "stop": 2 * size, "step": 2})
    return made


def large_cases() -> Iterator[OpCase]:
    """Sizes at which other forms are chosen: long rows, many rows, products that starve or fill the card."""
    for m, k, n in (
        *((2048, 512, 512), (512, 2048, 512), (512, 512, 2048), (1024, 1024, 1024), (32, 4096, 32), (1, 2048, 512)),
        *((2048, 512, 1), (2048, 64, 2048), (61, 67, 71), (2047, 513, 511), (8, 512, 4096), (2048, 513, 65)),
    ):
        yield OpCase("mm", (f(m, k), f(k, n)))
        yield OpCase("addmm", (f(n), f(m, k), f(k, n)))
    for b, m, k, n in ((64, 256, 64, 256), (64, 256, 256, 64), (4, 33, 65, 31), (64, 1, 64, 256)):
        yield OpCase("bmm", (f(b, m, k), f(b, k, n)))
    for shape, dims in (((2048, 512), [1]), ((2048, 512), [0]), ((8, 256, 4096), [0, 1]), ((1 << 20,), [0])):
        for op in ("sum", "mean", "amax"):
            yield OpCase(op, (f(*shape),), {"dims": dims, "keepdim": False})
        yield OpCase("argmax", (f(*shape),), {"dim": dims[-1], "keepdim": False})
        yield OpCase("cumsum", (f(*shape),), {"dim": dims[-1]})
    for rows, width in ((2048, 4096), (16384, 256), (4, 50257)):
        for op in ("softmax", "log_softmax"):
            yield OpCase(op, (f(rows, width),), {"dim": 1})
            yield OpCase(f"{op}_backward", (f(rows, width), f(rows, width)), {"dim": 1})
    for width in (512, 4096):
        yield OpCase("native_layer_norm", (f(2048, width), f(width), f(width)), _layer_norm(width))
    yield OpCase("embedding", (f(4096, 512), ints(8, 256, high=4096)))
    backward = {"num_weights": 4096, "padding_idx": -1}
    yield OpCase("embedding_dense_backward", (f(8, 256, 512), ints(8, 256, high=4096)), backward)


def _layer_norm(width: int) -> dict[str, object]:
    return {"normalized_shape": [width], "eps": 1e-5}


def example_graphs() -> Iterator[Graph]:
    """The graphs of the example jobs: long chains of elementwise operators are only in such."""
    for job in sorted((ROOT / "examples").glob("*/job.toml")):
        exported = export_job(Job.load(job))
        yield exported.gradient
        yield exported.evaluation
        if exported.optimizer is not None:
            yield exported.optimizer
