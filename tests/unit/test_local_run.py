"""What `boinc-train run` says when the program did not succeed: its last words, without the log around them."""

from __future__ import annotations

from pathlib import Path

import pytest

from boinc_project import local_run
from tests.tiny_microtask import microtask_files


@pytest.mark.parametrize(
    ("limits", "words"),
    [("bogus=1", "'bogus=1' is not NAME=NUMBER"), ("max_work_group=0", "'max_work_group=0' is not NAME=NUMBER")],
)
def test_wrong_limits_of_a_device_are_told_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: str, words: str
) -> None:
    pytest.importorskip("pyopencl")
    monkeypatch.setenv("BOINC_TRAIN_DEVICE_LIMITS", limits)
    found = failure(tmp_path, ("--backend", "opencl"))
    assert "\n" not in found and "Traceback" not in found
    assert words in found or "no OpenCL driver is installed" in found


def test_an_unknown_option_is_told_without_time_and_process_number(tmp_path: Path) -> None:
    found = failure(tmp_path, ("--bogus", "1"))
    assert found.startswith("the application ended with status 14: unknown or incomplete option '--bogus'")


def failure(folder: Path, arguments: tuple[str, ...]) -> str:
    files = {}
    for name, data in microtask_files(1).items():
        files[name] = folder / f"file_{name}"
        files[name].write_bytes(data)
    microtask = local_run.Microtask.from_json(files.pop(local_run.MICROTASK_FILE).read_bytes())
    run = local_run.start(folder / "slot", microtask, files, arguments)
    with pytest.raises(local_run.LocalRunFailed) as caught:
        run.update({})
    return str(caught.value)
