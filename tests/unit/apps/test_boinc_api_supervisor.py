"""The block between worker and supervisor, the supervisor's bookkeeping, and the worker's side of the
interface."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from apps.gradient import boinc_api
from apps.gradient.boinc_api import Abort, Boinc, Quit
from apps.gradient.boinc_messages import SHARED_BYTES, InitData, SharedMemory
from apps.gradient.boinc_supervisor import (
    OUTCOME_FINISH,
    REQUEST_ABORT,
    REQUEST_QUIT,
    Block,
    Supervisor,
    ThreadWorker,
    Timing,
    process_cpu_time,
    process_identity,
)

REPOSITORY = Path(__file__).resolve().parents[3]


def boinc(block: Block, **fields: object) -> Boinc:
    return Boinc(InitData(**fields), block, standalone=False, process=True)  # type: ignore[arg-type]


def test_the_block_gives_back_what_was_put_in() -> None:
    block = Block()
    assert (block.suspended, block.request, block.critical, block.outcome()) == (False, 0, False, None)
    block.suspended, block.request, block.critical = True, REQUEST_QUIT, True
    block.fraction_done, block.checkpoints, block.checkpoint_period = 0.25, 7, 60.0
    assert (block.suspended, block.request, block.critical) == (True, REQUEST_QUIT, True)
    assert (block.fraction_done, block.checkpoints, block.checkpoint_period) == (0.25, 7, 60.0)
    block.publish(OUTCOME_FINISH, -3, "naïve" + "x" * 5000)
    found = block.outcome()
    assert found is not None and found[:2] == (OUTCOME_FINISH, -3)
    assert found[2].startswith("na\\xefvexxx") and len(found[2]) == 2000


@pytest.mark.parametrize(
    ("given", "kept"), [(-1.0, 0.0), (2.0, 1.0), (float("nan"), 0.0), (float("inf"), 0.0), (0.5, 0.5)]
)
def test_a_fraction_stays_between_0_and_1(given: float, kept: float) -> None:
    block = Block()
    block.fraction_done = given
    assert block.fraction_done == kept


def test_check_raises_for_quit_and_abort_but_not_in_a_critical_section() -> None:
    block = Block()
    task = boinc(block)
    task.check()
    block.request = REQUEST_QUIT
    with task.critical_section():
        assert block.critical
        with task.critical_section():
            task.check()
        assert block.critical
        task.check()
    assert not block.critical
    with pytest.raises(Quit):
        task.check()
    block.request = REQUEST_ABORT
    with pytest.raises(Abort):
        task.check()


def test_quit_is_not_caught_by_except_exception() -> None:
    assert not issubclass(Quit, Exception) and not issubclass(Abort, Exception)


def test_check_waits_while_suspended() -> None:
    block = Block()
    block.suspended = True
    task = boinc(block)
    began = time.monotonic()

    def resume() -> None:
        block.suspended = False

    threading.Timer(0.3, resume).start()
    task.check()
    assert time.monotonic() - began >= 0.25


def test_time_to_checkpoint_follows_the_users_interval() -> None:
    block = Block()
    task = boinc(block)
    block.checkpoint_period = 1000.0
    assert not task.time_to_checkpoint()
    block.checkpoint_period = 0.0
    assert task.time_to_checkpoint()
    task.checkpoint_completed()
    assert block.checkpoints == 1
    block.checkpoint_period = 1000.0
    assert not task.time_to_checkpoint()


def test_each_checkpoint_changes_the_reported_checkpoint_time_even_without_new_cpu_time() -> None:
    """The client sees a checkpoint by that change alone (client/app_control.cpp)."""
    buffer = mmap.mmap(-1, SHARED_BYTES)
    shared, client = SharedMemory(buffer), SharedMemory(buffer)
    block = Block()
    init = InitData(wu_cpu_time=1e6)
    supervisor = Supervisor(init, shared, block, ThreadWorker(), Timing(), print)
    seen = []
    for number in range(3):
        block.checkpoints = number
        assert supervisor._send_status(0.5)
        text = client.receive("app_status") or ""
        seen.append(float(text.split("<checkpoint_cpu_time>")[1].split("<")[0]))
    assert seen[0] == 1e6 and len(set(seen)) >= 2 and seen == sorted(seen)


def test_a_process_is_known_by_number_and_start_time() -> None:
    assert process_identity(os.getpid()) == process_identity(os.getpid())
    assert process_identity(os.getpid()) not in (None, b"")
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
        assert process_identity(child.pid) is None


def test_a_zombie_counts_as_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.read()
        deadline = time.monotonic() + 10
        while process_identity(child.pid) is not None:  # it has ended and nobody has collected it
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_cpu_time_of_a_process_is_in_seconds() -> None:
    assert abs(process_cpu_time(os.getpid()) - sum(os.times()[:4])) < 0.5


def test_without_init_data_a_task_runs_alone_and_its_status_is_the_exit_status(tmp_path: Path) -> None:
    for body, status, said in [
        ("return 7", 7, ""),
        ("boinc.finish(9, 'a reason')", 9, "a reason"),
        ("boinc.temporary_exit(60, 'no GPU')", 1, "no GPU"),
        ("raise ValueError('odd “quotes”')", 1, "odd \\u201cquotes\\u201d"),
        ("boinc.check(); print(boinc.standalone, boinc.threads); return 0", 0, ""),
    ]:
        script = f"from apps.gradient.boinc_api import run\ndef main(boinc):\n    {body}\nrun(main)\n"
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            timeout=60,
        )
        assert (done.returncode, said in done.stderr.decode("ascii")) == (status, True), done.stderr
    assert not list(tmp_path.iterdir())


def test_strangers_unpacked_folders_are_removed_and_our_own_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MEIold", "_MEIown", "other"):
        (tmp_path / name / "deep").mkdir(parents=True)
    (tmp_path / "_MEIfile").write_text("not a folder")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "_MEIPASS", str(tmp_path / "_MEIown"), raising=False)
    boinc_api.remove_strangers()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_MEIfile", "_MEIown", "other"]


def test_the_interface_needs_nothing_but_the_standard_library() -> None:
    """It is imported before the worker is forked: numpy's or torch's threads must not exist by then."""
    names = ("numpy", "torch", "safetensors")
    script = f"import sys, apps.gradient.boinc_api; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.strip() == "[]"
