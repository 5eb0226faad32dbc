"""The OpenCL devices that tests run on: PoCL as a CPU and in the form for GPUs, and Mesa's Rusticl.

    pocl       item per row, wide vectors: what a CPU gets
    pocl_gpu   the same device treated as a Radeon HD 5870: work-group per row, float4, its limits of memory
    rusticl    llvmpipe through Mesa's stack, the one that an old Radeon has on today's Linux; as a GPU

A driver that is not installed skips its tests, and says so.
"""

from __future__ import annotations

import dataclasses
import os
from functools import cache

import pytest

DEVICES = ("pocl", "pocl_gpu", "rusticl")


@cache
def open_device(name: str):  # type: ignore[no-untyped-def]
    """The backend on one of DEVICES."""
    os.environ.setdefault("RUSTICL_ENABLE", "llvmpipe")  # read when the first platform is asked for
    pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    from apps.gradient.backends.backend import DeviceNotFound
    from apps.gradient.opencl import device as devices
    from apps.gradient.opencl.opencl_backend import OpenclBackend

    platform = "rusticl" if name == "rusticl" else "Portable"
    try:
        found = devices.choose(devices.find_devices(), devices.request_of_text(f"{platform}:0"))
    except (devices.OpenCLMissing, DeviceNotFound) as error:
        pytest.skip(f"the OpenCL driver for {name} is not installed: {error}")
    facts = devices.facts(found)
    if name != "pocl":
        limits = devices.CYPRESS_LIMITS
        facts = dataclasses.replace(
            facts,
            group_form=True,
            vector_width=4,
            max_work_group=min(facts.max_work_group, limits["max_work_group"]),
            local_memory=min(facts.local_memory, limits["local_memory"]),
            max_allocation=min(facts.max_allocation, limits["max_allocation"]),
            global_memory=min(facts.global_memory, limits["global_memory"]),
        )
    return OpenclBackend(found.handle, facts)
