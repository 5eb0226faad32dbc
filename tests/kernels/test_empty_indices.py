"""Indexing with nothing: empty index tensors, empty dimensions, the first 0 of many, as eager PyTorch has it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch
from op_cases import Draw, OpCase
from operator_oracle import assert_as_exact_as_eager
from test_operators_against_pytorch import run, strided

from apps.gradient.backends import Backend, open_backend
from apps.gradient.backends.torch_backend import TorchBackend


def f(*shape: int) -> Draw:
    return Draw("float32", shape)


def ints(*shape: int) -> Draw:
    return Draw("int64", shape, high=3)


def cases() -> Iterator[OpCase]:
    for x, index, dim in (
        ((5, 3), (0, 3), 0),
        ((5, 3), (5, 0), 1),
        ((0, 3), (0, 3), 0),
        ((0, 3), (0, 2), 1),
        ((4,), (0,), 0),
    ):
        yield OpCase("gather", (f(*x), ints(*index)), {"dim": dim})
        for op, draw in product(("scatter", "scatter_add"), (f, ints)):
            yield OpCase(op, (draw(*x), ints(*index), draw(*index)), {"dim": dim})
            larger = tuple(size + 2 for size in index)
            yield OpCase(op, (draw(*x), ints(*index), draw(*larger)), {"dim": dim})
    for x, indices, dim in (
        ((5, 3), [(0,)], 0),
        ((5, 3), [(0,)], 1),
        ((0, 3), [(0,)], 0),
        ((0, 3), [(2,)], 1),
        ((5, 3), [(2, 0)], 1),
        ((5, 3), [(0,), ()], 0),
        ((3, 7, 5, 2), [(0, 1), (4,)], 1),
        ((3, 7, 5, 2), [(0, 1), (1,)], 0),
        ((4,), [(0,)], 0),
    ):
        drawn = [ints(*shape) for shape in indices]
        yield OpCase("index", (f(*x), *drawn), {"dim": dim})
        common = np.broadcast_shapes(*indices)
        full = (*x[:dim], *common, *x[dim + len(indices) :])
        whole_and_broadcast = {full, full[1:], tuple(1 for _ in full), ()}
        for accumulate, draw, values in product((False, True), (f, ints), sorted(whole_and_broadcast)):
            yield OpCase("index_put", (draw(*x), draw(*values), *drawn), {"dim": dim, "accumulate": accumulate})
    for x, dim in (((5, 3), 0), ((5, 3), 1), ((0, 3), 0), ((4,), 0)):
        yield OpCase("index_select", (f(*x), ints(0)), {"dim": dim})
    for shape in ((0,), (3, 0), (0, 3)):
        yield OpCase("embedding", (f(5, 3), ints(*shape)))
        yield OpCase("embedding", (f(5, 0), ints(*shape)))
        for padding_idx in (-1, 0):
            attrs = {"num_weights": 5, "padding_idx": padding_idx}
            yield OpCase("embedding_dense_backward", (f(*shape, 3), ints(*shape)), attrs)
    for x, dim, flag in product(((0, 3), (3, 0), (0,)), (0, 1), (False, True)):
        if dim < len(x):
            yield OpCase("sort", (f(*x),), {"dim": dim, "descending": flag})
            yield OpCase("topk", (f(*x),), {"k": 0, "dim": dim, "largest": flag})
            yield OpCase("topk", (ints(5, 3),), {"k": 0, "dim": dim, "largest": flag})


@pytest.fixture(scope="module", params=["numpy", "torch", "torch with deferred checks"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    threads = torch.get_num_threads()
    if request.param == "torch with deferred checks":
        yield TorchBackend(torch.device("cpu"), 1, deferred_checks=True)
    else:
        yield open_backend(request.param, threads=1, device="cpu")
    torch.set_num_threads(threads)


@pytest.mark.parametrize("case", list(cases()), ids=lambda case: case.id[:150])
def test_an_operator_that_indexes_nothing_gives_what_pytorch_gives(case: OpCase, backend: Backend) -> None:
    for lay_out in (lambda array, backend: backend.from_numpy(array), strided):
        assert_as_exact_as_eager(case, run(case, backend, lay_out))
