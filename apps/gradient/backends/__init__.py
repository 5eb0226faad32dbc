"""Backends: the same operators on numpy, PyTorch and OpenCL.

A backend's library is imported when the backend is opened and not before: the app runs where PyTorch and
PyOpenCL are not installed.
"""

from __future__ import annotations

import importlib

from apps.gradient.backends.backend import Backend, Call, Kernel, OutOfRange, Prepare, Program, Tensor
from apps.gradient.boinc_messages import InitData
from boinc_project.contract.errors import UnfitHost

__all__ = ["BACKEND_MODULES", "Backend", "Call", "Kernel", "OutOfRange", "Prepare", "Program", "Tensor", "open_backend"]

BACKEND_MODULES = {
    "numpy": "apps.gradient.backends.numpy_backend",
    "torch": "apps.gradient.backends.torch_backend",
    "opencl": "apps.gradient.opencl.opencl_backend",
}


def open_backend(name: str, threads: int = 1, device: str | InitData | None = None) -> Backend:
    """Open a backend with so many CPU threads on a device: by name, the one that BOINC's client reserved for a task
    (its init data), or the backend's default (None).

    Raises ValueError for an unknown name, UnfitHost where the library or the device is missing, DeviceNotFound where
    the reserved device is not there now.
    """
    if name not in BACKEND_MODULES:
        raise ValueError(f"there is no backend {name!r}; choose one of {', '.join(BACKEND_MODULES)}")
    try:
        module = importlib.import_module(BACKEND_MODULES[name])
    except ImportError as error:
        raise UnfitHost(f"the {name} backend needs a library that is not installed here: {error}") from error
    backend: Backend = module.open_backend(max(1, threads), device)
    return backend
