"""Convolutions and pooling on OpenCL beyond the operator cases: bounded memory, and places from the forward pass."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from opencl_devices import DEVICES, open_device

from apps.gradient.opencl import convolution
from boinc_project.contract.graph import GraphBuilder

Array = np.ndarray[Any, Any]
PLAIN = {"stride": [1, 1], "padding": [1, 1], "dilation": [1, 1], "transposed": False, "output_padding": [0, 0]}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("device", [pytest.param("pocl", marks=pytest.mark.long), "pocl_gpu"])
def test_windows_in_memory_at_once_are_bounded(device: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bound below one sample's windows the results stay, and no scratch is larger than the bound allows."""
    backend, builder, rng = open_device(device), GraphBuilder(), np.random.default_rng(0)
    arrays = {
        "grad": rng.standard_normal((3, 10, 17, 19), np.float32),
        "x": rng.standard_normal((3, 8, 17, 19), np.float32),
        "w": rng.standard_normal((10, 8 // groups, 3, 3), np.float32),
    }
    values = {name: builder.input(name, "constant", "float32", a.shape) for name, a in arrays.items()}
    attrs = {**PLAIN, "groups": groups}
    made = [builder.node("convolution", [values["x"], values["w"], None], attrs)[0]]
    backward = {**attrs, "output_mask": [True, True, False]}
    made += builder.node("convolution_backward", [values["grad"], values["x"], values["w"]], backward)
    for number, value in enumerate(made):
        builder.output(f"out{number}", "metric", value)
    graph = builder.build()
    given = {name: backend.from_numpy(array) for name, array in arrays.items()}

    def results() -> list[Array]:
        return [backend.to_numpy(tensor) for tensor in backend.program(graph).run(given).values()]

    whole = results()
    bound = 40_000  # bytes; the windows of a sample take 8 * 9 * 17 * 19 floats
    monkeypatch.setattr(convolution, "COLUMN_BYTES", bound)
    program = backend.program(graph)
    written = {storage for launch in program.plan.launches for storage in launch.storages()[1]}  # type: ignore[attr-defined]
    outputs = set(program.plan.outputs.values())  # type: ignore[attr-defined]
    assert max(each.nbytes for each in written if each.number not in outputs) <= bound
    for ours, wanted in zip(results(), whole, strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-4)
    x, w = torch.from_numpy(arrays["x"]), torch.from_numpy(arrays["w"])
    np.testing.assert_allclose(whole[0], F.conv2d(x, w, padding=1, groups=groups).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_gradient_goes_where_the_maximum_was(device: str) -> None:
    """One plane with a place outside its window does not change what the others get."""
    backend, rng = open_device(device), np.random.default_rng(0)
    window = {"kernel_size": [3, 2], "stride": [2, 2], "padding": [1, 0], "dilation": [1, 2], "ceil_mode": True}
    x = rng.standard_normal((2, 3, 13, 11)).astype(np.float32)
    y, places = F.max_pool2d(torch.from_numpy(x), return_indices=True, **window)
    grad = rng.standard_normal(y.shape).astype(np.float32)
    strange = places.numpy().copy()
    strange[1, 2, 0, 0] = 13 * 11 - 1
    builder = GraphBuilder()
    arrays = {"x": x, "grad": grad, "strange": strange}
    values = {name: builder.input(name, "constant", a.dtype.name, a.shape) for name, a in arrays.items()}
    made = builder.node("max_pool2d_with_indices", [values["x"]], window)
    given = ([values["grad"], values["x"], made[1]], [values["grad"], values["x"], values["strange"]])
    results = (*made, *(builder.node("max_pool2d_with_indices_backward", each, window)[0] for each in given))
    for name, value in zip(("y", "places", "own", "foreign"), results, strict=True):
        builder.output(name, "metric", value)
    program = backend.program(builder.build(), verify=True)
    ours = {name: backend.to_numpy(tensor) for name, tensor in program.run(
        {name: backend.from_numpy(array) for name, array in arrays.items()}
    ).items()}  # fmt: skip
    np.testing.assert_array_equal(ours["y"], y.numpy())
    np.testing.assert_array_equal(ours["places"], places.numpy())
    for name, at in (("own", places.numpy()), ("foreign", strange)):
        wanted = np.zeros((2, 3, 13 * 11), np.float64)
        for plane in np.ndindex(2, 3):
            np.add.at(wanted[plane], at[plane].reshape(-1), grad[plane].reshape(-1))
        np.testing.assert_allclose(ours[name], wanted.reshape(x.shape), rtol=1e-6, atol=1e-6)


def test_a_double_with_a_small_ceiling_keeps_its_windows_below_it() -> None:
    facts = dataclasses.replace(open_device("pocl").facts, max_allocation=1 << 20)
    assert 4 * convolution._column_elements(facts) <= (1 << 20) // 4
