"""What a device can do, as plain data: everything that lowering, planning and tuning decide by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceFacts:
    """One OpenCL device, or a double of one with smaller limits.

    name, vendor, platform, driver   as the driver writes them
    version          OpenCL version of the device, (1, 1) or higher
    kind             gpu | cpu | accelerator
    group_form       rows are reduced by a work-group each, in local memory (GPUs); else by one item each, with
                     wide vectors (CPUs, where a barrier costs more than it brings)
    vector_width     floats that one item handles at once: 4 on VLIW cards, 1 or 2 on later GPUs, 8 or 16 on CPUs
    wavefront        work-items that run in step; the usual work-group
    max_work_group   most work-items of a group
    local_memory     bytes of a group
    compute_units, clock_mhz   as reported
    max_allocation   bytes of the largest buffer
    global_memory    bytes in all that this process may use
    tuned            what the tiles of matrix products were measured to reach, see tune.py; empty: not measured
    """

    name: str
    vendor: str
    platform: str
    driver: str
    version: tuple[int, int]
    kind: str
    group_form: bool
    vector_width: int
    wavefront: int
    max_work_group: int
    local_memory: int
    compute_units: int
    clock_mhz: int
    max_allocation: int
    global_memory: int
    tuned: tuple[float, ...] = ()
