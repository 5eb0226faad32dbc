"""Tests that need a graphics card. Where there is none they are skipped, and say why; `pytest tests/device` is one
prepared run of a few minutes for a computer that has one.

    torch_card    the torch backend on the card that PyTorch takes by itself
    opencl_card   the OpenCL backend on a card that an OpenCL driver shows
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))  # the cases of operators, and their oracle

# Interpreters of OpenCL on the processor, whatever kind of device they say they are.
SOFTWARE = ("llvmpipe", "softpipe", "pthread", "cpu-")


@pytest.fixture(scope="session")
def torch_card() -> Iterator[Any]:
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    from apps.gradient.backends import open_backend, torch_device
    from apps.gradient.backends.backend import DeviceNotFound
    from boinc_project.contract.errors import UnfitHost

    build = torch_device.installed()
    if not build.vendor:
        pytest.skip(f"needs a graphics card, and the PyTorch installed here ({build.version}) is for processors only")
    threads = torch.get_num_threads()
    try:
        backend = open_backend("torch", 2, "cuda")
    except (UnfitHost, DeviceNotFound) as error:
        pytest.skip(f"needs a graphics card: {error}")
    yield backend
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def opencl_card() -> Any:
    pytest.importorskip("pyopencl", reason="pyopencl is not installed")
    from apps.gradient.backends.backend import DeviceNotFound
    from apps.gradient.opencl import device as devices
    from apps.gradient.opencl.opencl_backend import OpenclBackend

    try:
        shown = devices.find_devices()
        cards = [each for each in shown if not any(word in each.name.lower() for word in SOFTWARE)]
        found = devices.choose(cards, devices.request_of_text("gpu"))
    except (devices.OpenCLMissing, DeviceNotFound) as error:
        pytest.skip(f"needs a graphics card that OpenCL shows: {error}")
    return OpenclBackend(found.handle, devices.facts(found))
