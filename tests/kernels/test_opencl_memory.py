"""Memory that values share in a plan: random graphs compute the same where everything is reused as in numpy."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from opencl_devices import open_device

from apps.gradient.backends import open_backend
from boinc_project.contract.graph import Graph
from tests import random_graphs
from validator.agreement import distance


@pytest.mark.parametrize("device", ["pocl", "pocl_gpu"])
@settings(
    max_examples=3,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # every smaller example would be built by a driver's compiler
    suppress_health_check=list(HealthCheck),
)
@given(graph=random_graphs.graphs())
def test_random_graphs_compute_what_numpy_computes(device: str, graph: Graph) -> None:
    arrays, backend = random_graphs.inputs(), open_device(device)
    program = backend.program(graph)
    given_ = {name: backend.from_numpy(array) for name, array in arrays.items()}
    for _ in range(2):  # the second run finds what the first one left in the arenas
        made = {name: backend.to_numpy(tensor) for name, tensor in program.run(given_).items()}
        assert distance(made, open_backend("numpy").program(graph).run(arrays)) <= 1e-5
