"""Arguments that no kernel of PyTorch may be given: indices beyond their dimension, zero divisors, negative powers.

On a GPU a bad index kills the process's device context, and a few CPU operators read and write wherever they are told.
Where values lie in the host's memory they are looked at first, and a bad one stops the node. On a GPU looking means
waiting until everything before it has been computed, so there it is done later: the node gets a value that cannot do
harm instead, the extremes of what it was meant to get are kept on the device, and all of them are fetched together
when the run has ended. The results of a run with a fault are not used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch
from torch import Tensor

from apps.gradient.backends.backend import Backend, Call, out_of_range
from apps.gradient.executor import Executor, failure
from boinc_project.contract.graph import Graph

Judge = Callable[[int, int], Optional[Exception]]  # the error of an argument with these extremes, if it is one


def fault_of_index(low: int, high: int, size: int, wraps: bool) -> Exception | None:
    """The error of an index tensor with the values low..high: 0..size-1 are valid, with `wraps` also -size..-1."""
    least = -size if wraps else 0
    if low >= least and high < size:
        return None
    return out_of_range(low if low < least else 0, high, size)


@dataclass(frozen=True)
class Extremes:
    """What is kept of an argument until the run has ended."""

    call: Call
    low: Tensor
    high: Tensor
    judge: Judge


class Checks:
    """The checks of one backend; each method gives the argument that the kernel may have.

    deferred   look when the run has ended, and not before each node
    """

    def __init__(self, deferred: bool) -> None:
        self.deferred = deferred
        self._kept: list[Extremes] = []

    def index(self, call: Call, index: Tensor, size: int, wraps: bool = False) -> Tensor:
        """Indices into a dimension of `size`."""
        if not index.numel():
            return index
        if not size:  # nothing is harmless
            raise out_of_range(0, 0, size)
        self._look(call, torch.aminmax(index), lambda low, high: fault_of_index(low, high, size, wraps))
        return index.clamp(-size if wraps else 0, size - 1) if self.deferred else index

    def targets(self, call: Call, target: Tensor, classes: int, ignore_index: int) -> Tensor:
        """Class numbers; `ignore_index` may be anything."""
        if not self.deferred:
            try:  # usually nothing is ignored and one pass over the targets is enough
                return self.index(call, target, classes)
            except IndexError:
                self.index(call, torch.where(target == ignore_index, 0, target), classes)
                return target
        ignored = target == ignore_index
        return torch.where(ignored, ignore_index, self.index(call, torch.where(ignored, 0, target), classes))

    def divisor(self, call: Call, divisor: Tensor) -> Tensor:
        """Integers to divide by."""
        zero = divisor == 0
        wrong = "integer division by zero"
        self._look(call, (zero.any(),) * 2, lambda _, any_zero: ZeroDivisionError(wrong) if any_zero else None)
        return torch.where(zero, 1, divisor) if self.deferred else divisor

    def power(self, call: Call, exponent: Tensor) -> Tensor:
        """Exponents of integers."""
        wrong = "integers to negative integer powers are not allowed"
        self._look(call, ((exponent < 0).any(),) * 2, lambda _, negative: ValueError(wrong) if negative else None)
        return exponent.clamp(min=0) if self.deferred else exponent

    def _look(self, call: Call, extremes: tuple[Tensor, Tensor], judge: Judge) -> None:
        low, high = extremes
        if self.deferred:
            self._kept.append(Extremes(call, low, high, judge))
            return
        fault = judge(*torch.stack((low, high)).tolist())  # one wait for the device, not two
        if fault is not None:
            raise fault

    def begin(self) -> None:
        """A run begins; nothing of an earlier one counts."""
        self._kept.clear()

    def settle(self) -> tuple[Call, Exception] | None:
        """The first fault of the run, which is waited for, and the call that it is of."""
        kept, self._kept = self._kept, []
        if not kept:
            return None
        extremes = torch.stack([each.to(torch.int64) for pair in kept for each in (pair.low, pair.high)]).tolist()
        for pair, low, high in zip(kept, extremes[::2], extremes[1::2]):
            fault = pair.judge(low, high)
            if fault is not None:
                return pair.call, fault
        return None


class CheckedProgram(Executor):
    """A graph whose arguments are judged when a run has ended; nothing waits for the device before."""

    def __init__(self, graph: Graph, backend: Backend, checks: Checks, verify: bool = False) -> None:
        self._checks = checks
        checks.begin()
        super().__init__(graph, backend, verify)
        with backend.scope():
            self._settle()  # nodes of constants were computed while planning

    def _run_steps(self, values: list[Any], check: Callable[[], None] | None) -> None:
        self._checks.begin()
        super()._run_steps(values, check)
        self._settle()

    def _settle(self) -> None:
        found = self._checks.settle()
        if found is not None:
            call, fault = found
            raise failure(self.graph, self._place_of(call), fault) from fault

    def _place_of(self, call: Call) -> int:
        """The node that a call is of: the only one with these very objects."""
        for index, node in enumerate(self.graph.nodes):
            if node.outputs is call.outputs and node.attrs is call.attrs and node.op == call.op:
                return index
        raise AssertionError(f"{call.op} is of no node")


def program(graph: Graph, backend: Backend, checks: Checks, verify: bool) -> Executor:
    """A graph prepared for a backend with these checks."""
    return CheckedProgram(graph, backend, checks, verify) if checks.deferred else Executor(graph, backend, verify)
