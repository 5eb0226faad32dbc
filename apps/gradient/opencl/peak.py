"""The device's highest rate of multiply-adds, measured (peak.cl)."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pyopencl as cl

from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.programs import Programs
from apps.gradient.opencl.values import Source

CHAINS = 12
SHORTEST_S = 0.02
MOST_STEPS = 1 << 20


class Peak:
    """Measures floating-point operations per second, over and over."""

    def __init__(self, queue: Any, facts: DeviceFacts, programs: Programs) -> None:
        self._queue = queue
        width = 4 if facts.kind == "gpu" else facts.vector_width
        self._kernel = programs.kernel(Source("peak.cl"), "multiply_add", {"VW": width, "CHAINS": CHAINS})
        self._local = min(facts.wavefront, facts.max_work_group) if facts.kind == "gpu" else 1
        self._items = facts.compute_units * (self._local * 32 if facts.kind == "gpu" else 8)
        self._out = cl.Buffer(queue.context, cl.mem_flags.WRITE_ONLY, 4 * self._items)
        self._flops_of_step = 2 * CHAINS * width * self._items
        self._steps = 256
        self._seconds()  # drivers compile at the first launch
        while self._seconds() < SHORTEST_S and self._steps < MOST_STEPS:
            self._steps *= 2

    def rate(self) -> float:
        """Operations per second (a multiply-add is two) in one run of some milliseconds."""
        return self._flops_of_step * self._steps / self._seconds()

    def _seconds(self) -> float:
        self._kernel.set_args(self._out, np.int32(0), np.int32(self._steps))
        start = time.perf_counter()
        cl.enqueue_nd_range_kernel(self._queue, self._kernel, (self._items,), (self._local,))
        self._queue.finish()
        return time.perf_counter() - start
