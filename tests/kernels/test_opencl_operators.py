"""Every operator of the OpenCL backend against eager PyTorch, in the forms for CPUs and for GPUs.

All cases of an operator are one graph: its kernels are built once, and a plan of many launches is what is tested.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
from op_cases import CASES
from opencl_devices import DEVICES, open_device
from operator_oracle import assert_as_exact_as_eager

from boinc_project.contract.graph import GraphBuilder
from boinc_project.contract.opset import OPSET

Array = np.ndarray[Any, Any]


@cache
def computed(device: str, op: str, strided: bool) -> list[list[Array]]:
    """The outputs of each case of an operator; `strided`: its inputs are every other element of wider tensors."""
    backend, builder = open_device(device), GraphBuilder()
    drawn = [case.arrays() for case in CASES[op]]
    arrays: dict[str, Array] = {}
    for number, each in enumerate(drawn):
        for place, array in enumerate(each):
            if array is not None:
                wide = strided and array.ndim > 0
                arrays[f"in{number}_{place}"] = np.repeat(array, 2, axis=array.ndim - 1) if wide else array
    values = {name: builder.input(name, "constant", a.dtype.name, a.shape) for name, a in arrays.items()}
    outputs = []
    for number, (case, each) in enumerate(zip(CASES[op], drawn, strict=True)):
        given: list[int | None] = []
        for place, array in enumerate(each):
            value = values.get(f"in{number}_{place}")
            if value is not None and array is not None and strided and array.ndim:
                dim, size = array.ndim - 1, array.shape[-1]
                (value,) = builder.node("slice", [value], {"dim": dim, "start": 0, "stop": 2 * size, "step": 2})
            given.append(value)
        made = builder.node(op, given, case.attrs, "op_cases.py")
        outputs.append([f"out{number}_{place}" for place in range(len(made))])
        for name, value in zip(outputs[-1], made, strict=True):
            builder.output(name, "metric", value)
    program = backend.program(builder.build(), verify=True)
    inputs = {name: backend.from_numpy(array) for name, array in arrays.items()}
    found = {name: backend.to_numpy(tensor) for name, tensor in program.run(inputs).items()}
    for name, array in arrays.items():
        np.testing.assert_array_equal(backend.to_numpy(inputs[name]), array, f"{op} wrote to {name}")
    return [[found[name] for name in names] for names in outputs]


#: What is compiled with every run of the tests; other forms are, with the long ones: a minute of a compiler each.
ALWAYS = {("pocl_gpu", True), ("rusticl", False)}
FORMS = [
    pytest.param(
        device,
        strided,
        id=f"{device}-{'strided' if strided else 'dense'}",
        marks=[] if (device, strided) in ALWAYS else pytest.mark.long,
    )
    for device in DEVICES
    for strided in (False, True)
]


@pytest.mark.parametrize("op", list(OPSET))
@pytest.mark.parametrize(("device", "strided"), FORMS)
def test_operator_is_as_exact_as_eager_pytorch(device: str, op: str, strided: bool) -> None:
    wrong = []
    for case, ours in zip(CASES[op], computed(device, op, strided), strict=True):
        try:
            assert_as_exact_as_eager(case, ours)
        except AssertionError as error:
            wrong.append(f"{case.id}: {error}")
    assert not wrong, f"{len(wrong)} of {len(CASES[op])} cases:\n" + "\n".join(wrong[:5])
