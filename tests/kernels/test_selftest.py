"""The known-answer test before a task: right devices pass, one wrong element stops it, and it is remembered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opencl_devices import DEVICES, open_device

pytest.importorskip("pyopencl")

from apps.gradient.opencl import selftest
from apps.gradient.opencl.programs import kernel_folder
from apps.gradient.opencl.selftest import CASES, WrongResults
from boinc_project.contract.opset import OPSET

SOME = frozenset({"add", "gelu", "sum", "argmax"})
MEASURING = {"peak.cl"}  # no operator's


def test_every_operator_is_among_the_cases() -> None:
    assert {case.op for case in CASES} == set(OPSET)
    assert set(selftest.EVERY_TIME) <= set(OPSET)


@pytest.mark.parametrize(
    "device", [*(pytest.param(each, marks=pytest.mark.long) for each in ("pocl", "pocl_gpu")), "rusticl"]
)
def test_a_right_device_passes(device: str) -> None:
    backend = open_device(device)
    assert selftest.check(backend, set(OPSET)) == len(OPSET)


@pytest.mark.parametrize("device", DEVICES)
def test_every_file_of_kernels_is_launched(device: str) -> None:
    from apps.gradient.opencl.plan import make_plan

    backend = open_device(device)
    graph, _ = selftest.graph_of(CASES)
    launched = {each.source.file for each in make_plan(graph, backend.facts, backend.ops, frozenset()).launches}
    assert launched == {path.name for path in kernel_folder().glob("*.cl")} - MEASURING


class Faulty:
    """A backend that gives one wrong element of one operator."""

    def __init__(self, backend: Any, op: str, change: Any) -> None:
        self._backend, self._op, self._change = backend, op, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def program(self, graph: Any) -> Any:
        return _FaultyProgram(self._backend, self._backend.program(graph), self._op, self._change)


class _FaultyProgram:
    def __init__(self, backend: Any, program: Any, op: str, change: Any) -> None:
        self._backend, self._program, self._op, self._change = backend, program, op, change

    def run(self, inputs: Mapping[str, Any], wait: Any = None) -> dict[str, Any]:
        made: dict[str, Any] = self._program.run(inputs, wait)
        name = next((each for each in made if each.partition("/")[0] == self._op), None)
        if name is not None:
            array = np.array(self._backend.to_numpy(made[name]))
            array.flat[array.size // 2] = self._change(array.flat[array.size // 2])
            made[name] = self._backend.from_numpy(array)
        return made


@pytest.mark.parametrize(
    ("op", "change"),
    [
        ("add", lambda value: value * np.float32(1.01)),
        ("gelu", lambda value: np.float32(np.nan)),
        ("sum", lambda value: np.float32(0.0)),
        ("argmax", lambda value: value + 1),
    ],
)
def test_one_wrong_element_is_found(op: str, change: Any, tmp_path: Path) -> None:
    backend = Faulty(open_device("pocl"), op, change)
    with pytest.raises(WrongResults, match=rf"device gives wrong results: .* operator {op}: 1 of \d+ elements"):
        selftest.check(backend, SOME, tmp_path)
    assert not list(tmp_path.iterdir()), "what failed is not remembered as right"


def test_what_was_right_is_remembered_and_a_few_are_tried_every_time(tmp_path: Path) -> None:
    backend = open_device("pocl")
    assert selftest.check(backend, SOME, tmp_path / "new") == 4
    assert selftest.check(backend, SOME, tmp_path / "new") == 2  # gelu and sum
    assert selftest.check(backend, SOME | {"mul"}, tmp_path / "new") == 5  # another task needs more
    assert selftest.check(backend, SOME, None) == 4
    faulty = Faulty(backend, "gelu", lambda value: value + np.float32(1.0))
    with pytest.raises(WrongResults):
        selftest.check(faulty, SOME, tmp_path / "new")


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert selftest.check(open_device("pocl"), SOME, tmp_path / "file" / "cache") == 4


def test_a_request_to_stop_ends_the_test() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with pytest.raises(Stop):
        selftest.check(open_device("pocl"), SOME, None, stop)


@pytest.mark.parametrize(
    ("ours", "right", "same"),
    [
        ([1.0, np.nan, np.inf], [1.0, np.nan, np.inf], True),
        ([1.0, 2.0], [1.00005, 2.0], True),
        ([1.0, 2.0], [1.001, 2.0], False),
        ([1.0, 1e-7], [1.0, 0.0], True),  # small beside the largest
        ([1.0, np.nan], [1.0, 1.0], False),
        ([np.inf], [-np.inf], False),
        ([0.0, 0.0], [1.0, 2.0], False),  # a kernel that never ran
    ],
)
def test_roundings_are_no_faults_and_wrong_elements_are(ours: list[float], right: list[float], same: bool) -> None:
    found = selftest.difference(np.array(ours, np.float32), np.array(right, np.float32))
    assert (found == "") is same


def test_a_compiler_that_knows_opencl_c_1_1_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    from apps.gradient.opencl import programs
    from apps.gradient.opencl.opencl_backend import OpenclBackend

    known = open_device("rusticl")
    monkeypatch.setattr(programs, "_language", lambda *_: (1, 1))
    monkeypatch.setattr(programs, "OPTIONS", (*programs.OPTIONS, "-cl-std=CL1.1"))
    assert selftest.check(OpenclBackend(known.handle, known.facts), set(OPSET)) == len(OPSET)
