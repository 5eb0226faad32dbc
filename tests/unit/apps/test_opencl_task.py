"""What a task does with its OpenCL device before it computes: where the cache lies, the test, and how it may end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("pyopencl")

from apps.gradient import __main__ as app
from apps.gradient.backends.backend import DeviceNotFound, WrongResults
from apps.gradient.boinc_messages import InitData
from apps.gradient.opencl import device as devices
from apps.gradient.opencl import opencl_backend, selftest
from apps.gradient.opencl.programs import BuildFailed

ROOT = Path(__file__).resolve().parents[3]


class Ended(Exception):
    """How a task ended."""


class Client:
    """Stands for boinc_api.Boinc."""

    threads = 1
    init = InitData()

    def __init__(self) -> None:
        self.lines: list[str] = []

    def log(self, text: str) -> None:
        self.lines.append(text)

    def finish(self, status: int, message: str = "") -> NoReturn:
        raise Ended("finish", status, message)

    def temporary_exit(self, delay_s: int, reason: str) -> NoReturn:
        raise Ended("temporary", delay_s, reason)


@pytest.mark.parametrize(
    ("error", "kind", "status"),
    [
        (WrongResults("device gives wrong results: Cypress"), "finish", app.EXIT_WRONG_DEVICE),
        (BuildFailed("kernels/gemm.cl does not build"), "finish", app.EXIT_UNFIT_HOST),
        (devices.OpenCLMissing("no OpenCL driver is installed"), "finish", app.EXIT_UNFIT_HOST),
        (DeviceNotFound("OpenCL does not show the AMD GPU with index 0"), "temporary", app.DEVICE_LOST_DELAY_S),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, Exception) else None,
)
def test_a_device_that_will_not_do_ends_the_task_in_one_clear_way(
    error: Exception, kind: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(app, "_compute", fail)
    monkeypatch.setattr(app.sys, "argv", ["gradient"])
    with pytest.raises(Ended) as caught:
        app.compute(Client(), "opencl")  # type: ignore[arg-type]
    assert caught.value.args[:2] == (kind, status)
    assert str(error) in caught.value.args[2]


def test_a_compilers_words_are_in_the_log_and_their_first_line_in_the_message(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "kernels/gemm.cl does not build: line 1\n" + "\n".join(f"line {number}" for number in range(2, 90))

    def fail(*_: object) -> NoReturn:
        raise BuildFailed(words)

    monkeypatch.setattr(app, "_compute", fail)
    monkeypatch.setattr(app.sys, "argv", ["gradient"])
    client = Client()
    with pytest.raises(Ended) as caught:
        app.compute(client, "opencl")  # type: ignore[arg-type]
    assert words in client.lines[0]
    assert caught.value.args[2].endswith("does not build: line 1")


def test_a_task_keeps_what_it_built_in_its_projects_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: list[Any] = []
    fake = devices.Sighting(0, 0, -1, "cpu", "intel", "x", "y", device_version="OpenCL 1.2", max_work_group=64)
    monkeypatch.setattr(devices, "find_devices", lambda: [fake])
    monkeypatch.setattr(opencl_backend, "OpenclBackend", lambda *given: made.append(given))
    monkeypatch.setattr(opencl_backend, "keep_drivers_in", made.append)
    opencl_backend.open_backend(1, replace(InitData(), project_dir=str(tmp_path)))
    assert made[0] == tmp_path / "opencl_cache" / "drivers"
    assert made[1][2] == tmp_path / "opencl_cache"
    opencl_backend.open_backend(1, InitData())
    assert made[2][2] is None, "without a client nothing is kept"
    assert list(tmp_path.iterdir()) == []


class Backend:
    """Stands for an OpenclBackend whose tests end as told."""

    def __init__(self, *_: object, careful: bool = False) -> None:
        self.careful, self.cache, self.handle, self.facts = careful, None, None, None


def outcomes(*faults: str) -> Callable[..., int]:
    left = list(faults)

    def check(*_: object) -> int:
        fault = left.pop(0)
        if fault:
            raise WrongResults(fault)
        return 1

    return check


def test_a_right_device_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "check", outcomes(""))
    backend: Any = Backend()
    assert selftest.trusted(backend, set(), print) is backend


def test_code_that_is_always_wrong_is_built_without_the_optimiser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "check", outcomes("exp: 1.5", "exp: 1.5", ""))
    monkeypatch.setattr(selftest, "OpenclBackend", Backend)
    client, backend = Client(), Backend()
    assert selftest.trusted(backend, set(), client.log).careful  # type: ignore[arg-type]
    assert "without the compiler's optimiser" in client.lines[0]


@pytest.mark.parametrize(
    "faults", [("exp: 1.5", ""), ("exp: 1.5", "exp: 1.7"), ("exp: 1.5", "exp: 1.5", "exp: 1.5")], ids=" then ".join
)
def test_a_device_that_is_wrong_now_and_then_or_in_any_case_is_not_believed(
    faults: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "check", outcomes(*faults))
    monkeypatch.setattr(selftest, "OpenclBackend", Backend)
    with pytest.raises(WrongResults, match="exp: 1"):
        selftest.trusted(Backend(), set(), print)  # type: ignore[arg-type]


def test_the_owner_of_a_computer_can_list_its_devices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = devices.Sighting(
        0, 1, 0, "gpu", "amd", "Cypress", "AMD-APP", "ATI Radeon HD 5800 Series", device_version="OpenCL 1.0"
    )
    monkeypatch.setattr(devices, "find_devices", lambda: [old])
    assert app.show_devices() == 0
    assert capsys.readouterr().out.startswith("0:1  gpu   ATI Radeon HD 5800 Series, 0 MB, OpenCL 1.0 (driver ")

    def missing() -> NoReturn:
        raise devices.OpenCLMissing("no OpenCL driver is installed")

    monkeypatch.setattr(devices, "find_devices", missing)
    assert app.show_devices() == 1
    assert "no OpenCL driver is installed" in capsys.readouterr().out


def test_nothing_is_written_in_the_home_folder(tmp_path: Path) -> None:
    script = (
        "import numpy as np\n"
        "from apps.gradient.backends import open_backend\n"
        "from apps.gradient.boinc_messages import InitData\n"
        f"backend = open_backend('opencl', 1, InitData(project_dir={str(tmp_path / 'project')!r}))\n"
        "from apps.gradient.opencl import selftest\n"
        "print(selftest.check(backend, {'add', 'mm'}, backend.cache))\n"
    )
    kept = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    made = subprocess.run([sys.executable, "-c", script], env=kept, capture_output=True, text=True, timeout=300)
    if "does not show" in made.stderr or "no OpenCL driver" in made.stderr:
        pytest.skip("no OpenCL driver for processors is installed")
    assert made.stdout == "2\n", made.stderr
    assert not (tmp_path / "home").exists()
    assert list((tmp_path / "project" / "opencl_cache").glob("selftest-*"))
