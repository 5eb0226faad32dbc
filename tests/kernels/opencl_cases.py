"""Cases of operators at sizes where other forms of the kernels are chosen, as one graph on an OpenCL device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from op_cases import OpCase
from opencl_devices import open_device
from operator_oracle import assert_as_exact_as_eager

from boinc_project.contract.graph import GraphBuilder

Array = np.ndarray[Any, Any]


def assert_exact(device: str, cases: Sequence[OpCase]) -> None:
    """Every output of every case is right to a small multiple of eager PyTorch's own error."""
    wrong = []
    for case, ours in zip(cases, computed(device, cases, [case.arrays() for case in cases]), strict=True):
        try:
            assert_as_exact_as_eager(case, ours)
        except AssertionError as error:
            wrong.append(f"{case.id}: {error}")
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(wrong)


def computed(device: str, cases: Sequence[OpCase], inputs: Sequence[Sequence[Array | None]]) -> list[list[Array]]:
    """The outputs of each case, given the inputs of each."""
    backend, builder = open_device(device), GraphBuilder()
    arrays = {
        f"in{number}_{place}": array
        for number, given in enumerate(inputs)
        for place, array in enumerate(given)
        if array is not None
    }
    values = {name: builder.input(name, "constant", a.dtype.name, a.shape) for name, a in arrays.items()}
    outputs = []
    for number, (case, given) in enumerate(zip(cases, inputs, strict=True)):
        places = [values.get(f"in{number}_{place}") for place in range(len(given))]
        made = builder.node(case.op, places, case.attrs, "opencl_cases.py")
        outputs.append([f"out{number}_{place}" for place in range(len(made))])
        for name, value in zip(outputs[-1], made, strict=True):
            builder.output(name, "metric", value)
    program = backend.program(builder.build(), verify=True)
    found = program.run({name: backend.from_numpy(array) for name, array in arrays.items()})
    return [[backend.to_numpy(found[name]) for name in names] for names in outputs]
