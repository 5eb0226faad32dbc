"""The real application under a client: from source, and as the packaged app version that volunteers get."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from apps.packaging import build
from apps.packaging.build import BuiltApp
from boinc_project.contract.codecs import KINDS
from boinc_project.contract.microtask import UPDATE_FILE
from boinc_project.contract.opset import OPSET
from tests.mini_client import AUTHENTICATOR, MiniClient, session_members, spawn_client, wait_for
from tests.tiny_microtask import expected_gradient, microtask_files, read_result

REPOSITORY = Path(__file__).resolve().parents[2]
FROM_SOURCE = [sys.executable, "-m", "apps.gradient"]
SOURCE_ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY)}

Start = Callable[..., MiniClient]


@pytest.fixture(scope="module")
def packaged(tmp_path_factory: pytest.TempPathFactory) -> BuiltApp:
    """The packaged application; built once for a state of the sources, then taken from the project's
    cache."""
    return build.build_app(tmp_path_factory.mktemp("project"), cache_dir=build.CACHE)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    clients: list[MiniClient] = []

    def starter(command: list[str], files: dict[str, bytes], root: Path = tmp_path, **settings: object) -> MiniClient:
        client = MiniClient(
            root,
            command,
            inputs=files,
            outputs=(UPDATE_FILE,),
            environment={**SOURCE_ENVIRONMENT, **settings.pop("environment", {})},  # type: ignore[dict-item]
            **settings,  # type: ignore[arg-type]
        )
        clients.append(client)
        client.start()
        return client

    yield starter
    for client in clients:
        client.close()


def begins(client: MiniClient) -> list[int]:
    """The step each start began at, from the log."""
    return [
        int(line.split(" steps from ")[1].split(",")[0])
        for line in client.stderr().splitlines()
        if " steps from " in line
    ]


def same_update(client: MiniClient, files: dict[str, bytes], other: MiniClient) -> bool:
    mine = read_result(client.output(UPDATE_FILE), files).tensors
    theirs = read_result(other.output(UPDATE_FILE), files).tensors
    return all(np.array_equal(mine[name], theirs[name]) for name in theirs)


def test_the_application_computes_the_gradient_of_its_microtask(start: Start) -> None:
    files = microtask_files(40)
    client = start(FROM_SOURCE, files)
    assert client.wait() == 0, client.stderr()
    assert client.finish_status() == 0
    update = read_result(client.output(UPDATE_FILE), files)
    wanted = expected_gradient(files)
    assert np.linalg.norm(update.tensors["gradient/w"] - wanted) < 1e-5 * np.linalg.norm(wanted)
    assert update.metadata["workunit"] == client.workunit
    assert AUTHENTICATOR not in client.stderr()


def test_wrong_input_ends_with_a_marked_status_and_a_sentence(start: Start) -> None:
    files = microtask_files(2)
    files["state.safetensors"] = files["state.safetensors"][:-1]
    client = start(FROM_SOURCE, files)
    assert client.wait() == 10
    assert client.finish_status() == 10
    assert "state.safetensors" in client.stderr() and "Traceback" not in client.stderr()


def test_suspended_quit_and_killed_the_real_application_gives_the_same_update(start: Start, tmp_path: Path) -> None:
    files = microtask_files(400, batch=256, features=256)
    undisturbed = start(FROM_SOURCE, files, root=tmp_path / "undisturbed")
    assert undisturbed.wait(120) == 0
    client = start(FROM_SOURCE, files, root=tmp_path / "disturbed")
    choose = random.Random(4)
    for number in range(6):
        wait_for(lambda n=number: len(begins(client)) > n or client.finish_status() == 0, 30, "start")
        time.sleep(choose.uniform(0.0, 0.4))
        assert client.process is not None
        if client.process.poll() is not None:
            break
        if number % 3 == 0:
            client.suspend()
            wait_for(client.all_read, 5, "suspend read")
            client.quit()
        elif number % 3 == 1:
            client.quit()
        else:
            client.process.kill()
        client.wait(20)
        client.start()
    assert client.wait(120) == 0
    assert begins(client) == sorted(begins(client)), "progress went backwards"
    assert same_update(client, files, undisturbed)


@pytest.mark.parametrize("backend", ["numpy", "opencl"])
def test_a_suspended_real_task_uses_no_cpu_within_2_s(start: Start, backend: str) -> None:
    if backend == "opencl":
        pytest.importorskip("pyopencl", reason="pyopencl is not installed")
        from apps.gradient.opencl import device

        try:
            device.find_devices()
        except device.OpenCLMissing as error:
            pytest.skip(f"no OpenCL driver is installed: {error}")
    files = microtask_files(500, batch=512, features=1536)
    client = start([*FROM_SOURCE, "--backend", backend], files, ncpus=2)
    wait_for(lambda: client.fraction_done() > 0, 60, "progress")
    client.suspend()
    time.sleep(2)
    before = client.tree_cpu()
    time.sleep(5)
    assert client.tree_cpu() - before < 0.05
    client.resume()
    at = client.fraction_done()
    wait_for(lambda: client.fraction_done() > at, 5, "progress after resume")
    client.abort()
    assert client.wait(10) == 194


# The packaged application


def test_the_package_has_boincs_layout_and_declares_its_api_version(packaged: BuiltApp) -> None:
    assert packaged.folder.parts[-4:] == ("apps", "gradient", "1.00", build.PLATFORM)
    names = sorted(path.name for path in packaged.folder.iterdir())
    assert names == [build.OPERATORS_FILE, packaged.program.name, "version.xml"]
    known = json.loads((packaged.folder / build.OPERATORS_FILE).read_text())
    assert (set(known["operators"]), set(known["codecs"])) == (set(OPSET), set(KINDS))
    text = (packaged.folder / "version.xml").read_text()
    assert "<api_version>7.20.5</api_version>" in text and "<main_program/>" in text
    assert "dont_throttle" not in text
    assert os.access(packaged.program, os.X_OK)
    assert 10e6 < packaged.size < 60e6
    assert packaged.glibc.startswith("2.")


def test_the_package_is_taken_from_the_cache_and_never_replaced_by_other_bytes(
    packaged: BuiltApp, tmp_path: Path
) -> None:
    cache = build.CACHE
    again = build.build_app(tmp_path, cache_dir=cache)
    assert again.reused and again.program.read_bytes() == packaged.program.read_bytes()
    again.program.write_bytes(b"another program")
    with pytest.raises(build.BuildError, match="higher version"):
        build.build_app(tmp_path, cache_dir=cache)


def test_the_package_works_in_a_folder_with_blanks_and_accents_and_leaves_nothing_outside(
    packaged: BuiltApp, start: Start, tmp_path: Path
) -> None:
    files = microtask_files(40)
    root = tmp_path / "Žofia Nuñez 模型"
    home = tmp_path / "home"
    home.mkdir()
    client = start(
        [str(packaged.program)],
        files,
        root=root,
        environment={
            "PYTHONIOENCODING": "cp1252",
            "LC_ALL": "C",
            "TMPDIR": str(home),
            "HOME": str(home),
            "PYTHONPATH": "",
        },
    )
    assert client.wait() == 0, client.stderr()
    wanted = expected_gradient(files)
    found = read_result(client.output(UPDATE_FILE), files).tensors["gradient/w"]
    assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
    assert client.stderr().isascii()
    assert not list(home.iterdir())
    assert not [path for path in client.slot.iterdir() if path.name.startswith("_MEI")], "unpacked files left"
    assert {path.name for path in client.project.iterdir()} == {client.physical(name) for name in (*files, UPDATE_FILE)}


def test_a_killed_boot_loader_takes_the_package_with_it_and_the_next_start_cleans_up(
    packaged: BuiltApp, start: Start
) -> None:
    files = microtask_files(200, batch=128, features=768)
    client = start([str(packaged.program)], files)
    wait_for(lambda: client.fraction_done() > 0, 30, "progress")
    assert len(client.processes()) == 3, "boot loader, supervisor, worker"
    assert client.process is not None
    client.process.kill()
    client.process.wait()
    wait_for(lambda: not client.processes(), 5, "tree gone")
    left = {path.name for path in client.slot.iterdir() if path.name.startswith("_MEI")}
    assert len(left) == 1
    client.start()
    wait_for(lambda: len(begins(client)) == 2, 30, "second start")
    now = {path.name for path in client.slot.iterdir() if path.name.startswith("_MEI")}
    assert len(now) == 1 and now != left
    assert client.wait(60) == 0
    assert not [path for path in client.slot.iterdir() if path.name.startswith("_MEI")]


def test_a_killed_client_takes_the_package_with_it_within_35_s(packaged: BuiltApp, tmp_path: Path) -> None:
    files = microtask_files(600, batch=256, features=1536)
    MiniClient(tmp_path, [], inputs=files, outputs=(UPDATE_FILE,))
    client, task = spawn_client(tmp_path, [str(packaged.program)])
    try:
        wait_for(lambda: len(session_members(task)) == 3, 30, "boot loader, supervisor, worker")
        time.sleep(1)
        client.kill()
        client.wait()
        wait_for(lambda: not session_members(task), 35, "tree gone")
    finally:
        client.kill()
        for process in session_members(task):
            process.kill()


def test_quit_abort_and_sigterm_reach_through_the_boot_loader(packaged: BuiltApp, start: Start) -> None:
    files = microtask_files(600, batch=256, features=1536)
    client = start([str(packaged.program)], files)
    for word, code in (("<quit/>", 0), ("<abort/>", 194)):
        wait_for(lambda: client.fraction_done() > 0, 30, "progress")
        client.send(word)
        assert client.wait(15) == code
        assert client.finish_status() is None
        client.statuses.clear()
        client.start()
    wait_for(lambda: client.fraction_done() > 0, 30, "progress")
    assert client.process is not None
    client.process.terminate()
    client.wait(15)
    assert client.temporary_exit() == (30, "stopped by SIGTERM")
    wait_for(lambda: not client.processes(), 5, "tree gone")


def test_the_package_runs_alone_and_says_what_is_missing(packaged: BuiltApp, tmp_path: Path) -> None:
    done = subprocess.run([packaged.program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 10
    assert "microtask.json" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
