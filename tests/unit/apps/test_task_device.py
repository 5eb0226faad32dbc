"""The device of a task is the one that the client reserved for it, on every backend."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apps.gradient.backends import open_backend
from apps.gradient.backends.backend import DeviceNotFound
from apps.gradient.boinc_messages import InitData
from boinc_project.contract.errors import UnfitHost


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_a_task_without_a_card_is_computed_on_the_processor(backend: str) -> None:
    assert open_backend(backend, 1, InitData()).describe()["device"] == "cpu"


def test_an_opencl_task_without_a_card_is_computed_on_the_processor() -> None:
    pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    from apps.gradient.opencl.device import OpenCLMissing
    from apps.gradient.opencl.opencl_backend import open_backend as open_opencl

    try:
        backend = open_opencl(1, InitData())
    except (OpenCLMissing, DeviceNotFound) as error:
        pytest.skip(f"no OpenCL driver for processors is installed: {error}")
    assert backend.facts.kind == "cpu"


@pytest.mark.parametrize("vendor", ["NVIDIA", "ATI", "intel_gpu"])
def test_a_card_that_is_not_there_is_not_replaced_by_another_device(vendor: str) -> None:
    task = replace(InitData(), gpu_type=vendor, gpu_device_num=7, gpu_opencl_dev_index=7)
    with pytest.raises((DeviceNotFound, UnfitHost)):
        open_backend("torch", 1, task)
    pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    from apps.gradient.opencl.device import OpenCLMissing

    with pytest.raises((DeviceNotFound, OpenCLMissing)):
        open_backend("opencl", 1, task)
