"""Known answers: does this device compute what numpy computes? Asked before a task, of every operator.

A driver may build wrong code without a word, a card may be broken or overclocked, and two alike confirm one another's
errors. So a task begins with small graphs whose results are compared with the numpy backend's. All operators that it
needs are tried once for each driver and each set of kernels (the cache folder remembers); a few are tried every time.

What it is not: a measure of precision. Devices round differently, and divide and take exponentials less exactly; what
it finds are wrong elements, wrong indices, and kernels that never ran.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable

import numpy as np

from apps.gradient.backends import open_backend
from apps.gradient.backends.backend import WrongResults
from apps.gradient.opencl.opencl_backend import OpenclBackend
from apps.gradient.opencl.plan import make_plan
from apps.gradient.opencl.programs import cache_key, kernel_text
from apps.gradient.opencl.values import Launch
from boinc_project.contract.graph import Graph, GraphBuilder

Array = np.ndarray[Any, Any]

#: Of the value itself and of the largest one in its tensor: drivers' worst, and sums of some hundred terms.
TOLERANCE_OF_VALUE = 1e-4
TOLERANCE_OF_LARGEST = 2e-5

MOST_MARKS = 32  # of tests that were passed, in the cache folder


@dataclass(frozen=True)
class Draw:
    """How an input is drawn; equal ones of a graph are one input."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    positive: bool = False
    high: int = 2  # integers lie below
    number: int = 0  # tells inputs apart that are drawn alike
    distinct: bool = False  # a permutation of 0..n-1

    def array(self, rng: np.random.Generator) -> Array:
        if self.distinct:
            return rng.permutation(self.shape[0]).astype(self.dtype)
        if self.dtype == "bool":
            return np.asarray(rng.random(self.shape) < 0.5)
        if self.dtype != "float32":
            return rng.integers(0, self.high, self.shape).astype(self.dtype)
        values = rng.standard_normal(self.shape)
        return np.asarray(np.exp(0.5 * values) if self.positive else values, np.float32)


@dataclass(frozen=True)
class Case:
    """An operator on drawn inputs; None for an input that is absent."""

    op: str
    inputs: tuple[Draw | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


def real(*shape: int, number: int = 0) -> Draw:
    return Draw(shape, number=number)


def positive(*shape: int, number: int = 0) -> Draw:
    return Draw(shape, positive=True, number=number)


def whole(*shape: int, high: int, dtype: str = "int64") -> Draw:
    return Draw(shape, dtype, high=high)


def truth(*shape: int) -> Draw:
    return Draw(shape, "bool")


def permutation(n: int) -> Draw:
    return Draw((n,), "int64", distinct=True)


def _cases() -> Iterable[Case]:
    x, y, p = real(33, 65), real(33, 65, number=1), positive(33, 65)
    m = truth(33, 65)
    unary = ("neg", "abs", "sign", "exp", "expm1", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "silu", "floor")
    for op in (*unary, "ceil", "round", "trunc", "isnan", "isinf", "reciprocal"):
        yield Case(op, (p if op == "reciprocal" else x,))
    for op in ("log", "log1p", "sqrt", "rsqrt"):
        yield Case(op, (p,))
    for op in ("add", "sub", "mul", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"):
        yield Case(op, (x, y))
    for op in ("div", "remainder", "fmod", "floor_divide"):
        yield Case(op, (p, positive(33, 65, number=1)))
    yield Case("pow", (p, x))
    for op in ("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or"):
        yield Case(op, (m, truth(65)))
    yield Case("logical_not", (m,))
    yield Case("where", (m, x, y))
    yield Case("clamp", (x,), {"min": -0.5, "max": 0.5})
    for approximate in ("none", "tanh"):
        yield Case("gelu", (x,), {"approximate": approximate})
        yield Case("gelu_backward", (y, x), {"approximate": approximate})
    yield Case("threshold_backward", (y, x), {"threshold": 0.0})
    for op in ("tanh_backward", "sigmoid_backward", "silu_backward"):
        yield Case(op, (y, x))
    yield from _movement()
    yield from _indexing()
    yield from _sums()
    yield from _products()
    yield from _layers()


def _movement() -> Iterable[Case]:
    x = real(5, 33, 7)
    yield Case("reshape", (x,), {"shape": [33, 35]})
    yield Case("permute", (x,), {"dims": [2, 0, 1]})
    yield Case("expand", (real(33, 1),), {"shape": [33, 65]})
    yield Case("slice", (x,), {"dim": 1, "start": 3, "stop": 31, "step": 2})
    yield Case("cat", (x, real(5, 9, 7)), {"dim": 1})
    yield Case("constant_pad_nd", (x,), {"pad": [1, 2, 0, 3], "value": 1.5})
    yield Case("flip", (x,), {"dims": [0, 2]})
    yield Case("slice_scatter", (x, real(5, 14, 7)), {"dim": 1, "start": 3, "stop": 31, "step": 2})
    yield Case("cast", (whole(33, 65, high=99),), {"dtype": "float32"})
    yield Case("full", (), {"shape": [33], "value": 2.5, "dtype": "float32"})
    yield Case("arange", (), {"start": 3, "step": 2, "length": 65, "dtype": "int64"})


def _indexing() -> Iterable[Case]:
    x, rows = real(33, 65), whole(70, high=33)
    index = whole(33, 31, high=65)
    yield Case("gather", (x, index), {"dim": 1})
    yield Case("scatter", (real(65), permutation(65), real(65, number=1)), {"dim": 0})
    yield Case("scatter_add", (x, index, real(33, 31)), {"dim": 1})
    yield Case("index", (x, whole(70, high=65)), {"dim": 1})
    yield Case("index_put", (x, real(70, 65), rows), {"dim": 0, "accumulate": True})
    yield Case("index_put", (x, real(33, 65), permutation(33)), {"dim": 0, "accumulate": False})
    yield Case("index_select", (x, rows), {"dim": 0})
    yield Case("embedding", (x, whole(9, 8, high=33)))
    yield Case(
        "embedding_dense_backward", (real(9, 8, 65), whole(9, 8, high=33)), {"num_weights": 33, "padding_idx": 2}
    )
    yield Case("topk", (x,), {"k": 9, "dim": 1, "largest": True})
    yield Case("sort", (x,), {"dim": 1, "descending": False})


def _sums() -> Iterable[Case]:
    x, attrs = real(33, 300), {"dims": [1], "keepdim": False}
    for op in ("sum", "mean", "amax", "amin"):
        yield Case(op, (x,), attrs)
        yield Case(op, (x,), {"dims": [0], "keepdim": True})
    yield Case("sum", (real(1, 9000),), attrs)  # in two passes
    yield Case("prod", (positive(33, 9),), attrs)
    for op in ("any", "all"):
        yield Case(op, (truth(33, 3),), attrs)
    for op in ("argmax", "argmin"):
        yield Case(op, (x,), {"dim": 1, "keepdim": False})
        yield Case(op, (x,), {"dim": 0, "keepdim": False})
    yield Case("cumsum", (real(33, 65),), {"dim": 1})
    yield Case("cumsum", (real(33, 65),), {"dim": 0})


def _products() -> Iterable[Case]:
    for m, k, n in ((64, 64, 64), (33, 65, 31), (130, 300, 70), (7, 1000, 9), (1, 600, 65), (65, 600, 1)):
        yield Case("mm", (real(m, k), real(k, n)))
    yield Case("bmm", (real(3, 33, 17), real(3, 17, 65)))
    yield Case("addmm", (real(65), real(40, 33), real(33, 65)))
    conv = {"stride": [2, 1], "padding": [1, 1], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0]}
    image = real(2, 4, 9, 8)
    for groups, weight in ((2, real(6, 2, 3, 3)), (4, real(4, 1, 3, 3))):  # the second is depthwise
        attrs, channels = {**conv, "groups": groups}, weight.shape[0]
        yield Case("convolution", (image, weight, real(channels)), attrs)
        masked = {**attrs, "output_mask": [True, True, True]}
        yield Case("convolution_backward", (real(2, channels, 5, 8), image, weight), masked)


def _layers() -> Iterable[Case]:
    x, y = real(33, 65), real(33, 65, number=1)
    for name in ("softmax", "log_softmax"):
        yield Case(name, (x,), {"dim": 1})
        yield Case(f"{name}_backward", (y, x), {"dim": 1})
    loss = {"reduction": "sum", "ignore_index": -100}
    yield Case("nll_loss_forward", (x, whole(33, high=65), positive(65)), loss)
    yield Case("nll_loss_backward", (real(), x, whole(33, high=65), positive(65), positive()), loss)
    layer = {"normalized_shape": [65]}
    yield Case("native_layer_norm", (x, real(65), real(65, number=1)), {**layer, "eps": 1e-5})
    saved = (real(33, 1), positive(33, 1))
    yield Case(
        "native_layer_norm_backward", (y, x, *saved, real(65), None), {**layer, "output_mask": [True, True, True]}
    )
    image, grad, of_channel = real(2, 6, 5, 7), real(2, 6, 5, 7, number=1), real(6)
    yield Case("native_group_norm", (image, of_channel, of_channel), {"groups": 3, "eps": 1e-5})
    saved = (real(2, 3), positive(2, 3))
    yield Case(
        "native_group_norm_backward",
        (grad, image, *saved, of_channel),
        {"groups": 3, "output_mask": [True, True, True]},
    )
    batch = {"training": True, "eps": 1e-5}
    running = (of_channel, positive(6))
    yield Case("native_batch_norm", (image, of_channel, of_channel, *running), {**batch, "momentum": 0.1})
    saved = (of_channel, positive(6))
    yield Case(
        "native_batch_norm_backward",
        (grad, image, of_channel, *running, *saved),
        {**batch, "output_mask": [True, True, True]},
    )
    pool = {"kernel_size": [3, 2], "stride": [2, 2], "padding": [1, 0], "ceil_mode": False}
    largest = {**pool, "dilation": [1, 1]}
    average = {**pool, "count_include_pad": False, "divisor_override": None}
    out = real(2, 6, 3, 3)
    yield Case("max_pool2d_with_indices", (image,), largest)
    yield Case("max_pool2d_with_indices_backward", (out, image, whole(2, 6, 3, 3, high=35)), largest)
    yield Case("avg_pool2d", (image,), average)
    yield Case("avg_pool2d_backward", (out, image), average)
    seeds = (whole(high=1 << 40), whole(high=1 << 20))
    yield Case("random_uniform", seeds, {"shape": [3, 33], "stream": 7})
    yield Case("random_bernoulli", seeds, {"p": 0.9, "shape": [65], "stream": 3})


CASES: tuple[Case, ...] = tuple(_cases())

#: Tried before every task that has them: each works differently, and they take part in most trainings.
EVERY_TIME = ("gelu", "permute", "embedding", "sum", "addmm", "softmax", "native_layer_norm", "random_uniform")


def trusted(
    backend: OpenclBackend,
    operators: AbstractSet[str],
    log: Callable[[str], None],
    wait: Callable[[], None] | None = None,
) -> OpenclBackend:
    """The backend if it passes `check`, else the same device with the compiler's optimiser off if that does.

    Wrong twice in the very same way is wrong code, which another way of building may mend. A device that is wrong
    now and then is not believed at all. Raises WrongResults.
    """
    try:
        check(backend, operators, backend.cache, wait)
        return backend
    except WrongResults as error:
        first = str(error)
    try:
        check(backend, operators, backend.cache, wait)
    except WrongResults as error:
        if str(error) != first or backend.careful:
            raise
    else:
        raise WrongResults(f"{first}; not so when tried again")
    log(f"{first}; trying without the compiler's optimiser")
    careful = OpenclBackend(backend.handle, backend.facts, backend.cache, careful=True)
    check(careful, operators, careful.cache, wait)
    return careful


def check(
    backend: OpenclBackend,
    operators: AbstractSet[str],
    folder: Path | None = None,
    wait: Callable[[], None] | None = None,
) -> int:
    """Try a task's operators on the device; returns how many were tried. Raises WrongResults.

    `folder` remembers that all of them were right with this driver and these kernels; then only a few are tried.
    `wait` is called now and then, and may end the test by raising.
    """
    cases = [case for case in CASES if case.op in operators]
    graph, arrays = graph_of(cases)
    mark = None if folder is None else folder / f"selftest-{_key(backend, graph)[:40]}"
    if mark is not None and mark.is_file():
        cases = [case for case in cases if case.op in EVERY_TIME]
        graph, arrays = graph_of(cases)
    compare(backend, graph, arrays, wait)
    if mark is not None:
        _leave(mark)
    return len({case.op for case in cases})


def graph_of(cases: Iterable[Case]) -> tuple[Graph, dict[str, Array]]:
    """One graph of all cases, with its inputs."""
    given, builder, rng = list(cases), GraphBuilder(), np.random.default_rng(20)
    draws = dict.fromkeys(draw for case in given for draw in case.inputs if draw is not None)
    arrays = {f"in{number}": draw.array(rng) for number, draw in enumerate(draws)}
    values = {draw: builder.input(name, "constant", draw.dtype, draw.shape) for draw, name in zip(draws, arrays)}
    for number, case in enumerate(given):
        inputs = [None if draw is None else values[draw] for draw in case.inputs]
        for place, value in enumerate(builder.node(case.op, inputs, case.attrs, "self-test")):
            builder.output(f"{case.op}/{number}/{place}", "metric", value)
    return builder.build(), arrays


def compare(
    backend: OpenclBackend,
    graph: Graph,
    arrays: Mapping[str, Array],
    wait: Callable[[], None] | None = None,
) -> None:
    """Run the graph on the device and with numpy. Raises WrongResults at the first difference."""
    numpy = open_backend("numpy")
    right = numpy.program(graph).run({name: numpy.from_numpy(array) for name, array in arrays.items()})
    found = backend.program(graph).run({name: backend.from_numpy(array) for name, array in arrays.items()}, wait)
    for name, expected in right.items():
        fault = difference(backend.to_numpy(found[name]), np.asarray(numpy.to_numpy(expected)))
        if fault:
            raise WrongResults(
                f"device gives wrong results: {backend.facts.name} with driver {backend.facts.driver} of"
                f" {backend.facts.platform}, operator {name.partition('/')[0]}: {fault}"
            )


def difference(ours: Array, right: Array) -> str:
    """What is wrong with a tensor, '' if nothing is."""
    if right.dtype != np.float32 or right.size == 0:
        wrong = ours != right
    else:
        largest = np.abs(right[np.isfinite(right)]).max(initial=0.0)
        with np.errstate(invalid="ignore"):
            near = np.abs(ours - right) <= TOLERANCE_OF_VALUE * np.abs(right) + TOLERANCE_OF_LARGEST * largest
        wrong = ~((near & np.isfinite(right)) | (ours == right) | (np.isnan(ours) & np.isnan(right)))
    if not wrong.any():
        return ""
    place = tuple(int(each) for each in np.argwhere(wrong)[0])
    return f"{int(wrong.sum())} of {right.size} elements, first at {place}: {ours[place]} instead of {right[place]}"


def _key(backend: OpenclBackend, graph: Graph) -> str:
    """Names a driver with the kernels that a test launches on it."""
    launches = make_plan(graph, backend.facts, backend.ops, frozenset()).launches
    texts = sorted({f"{kernel_text(launch.source.file)}\n{launch.source.text}" for launch in launches})
    return cache_key(backend.programs.identity, "\n".join(texts), map(_form, launches))


def _form(launch: Launch) -> str:
    defines = " ".join(f"{name}={value}" for name, value in launch.defines)
    return f"{launch.source.file} {launch.kernel} {defines} {launch.global_size} {launch.local_size}"


def _leave(mark: Path) -> None:
    """Make an empty file, if the folder allows it."""
    with contextlib.suppress(OSError):
        mark.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".tmp", "selftest-", mark.parent)
        os.close(descriptor)
        os.replace(temporary, mark)
        older = sorted(mark.parent.glob("selftest-*"), key=lambda path: path.stat().st_mtime)
        for path in older[:-MOST_MARKS]:
            path.unlink()
