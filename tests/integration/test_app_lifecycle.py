"""The task under a client: ending, suspension, the client's death, kills and odd paths (BOINC's application
interface)."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from apps.gradient.boinc_messages import DRIVER_CACHE
from tests.mini_client import AUTHENTICATOR, MiniClient, session_members, spawn_client, wait_for

WORKER = Path(__file__).with_name("lifecycle_worker.py")

Start = Callable[..., MiniClient]


def command(*options: str) -> list[str]:
    return [sys.executable, str(WORKER), *options]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start the worker with options in a fresh slot; everything left of it ends with the test."""
    clients: list[MiniClient] = []

    def starter(*options: str, root: Path = tmp_path, **settings: object) -> MiniClient:
        client = MiniClient(root, command(*options), **settings)  # type: ignore[arg-type]
        clients.append(client)
        client.start()
        return client

    yield starter
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bytes]:
    """The output of a run that nobody disturbs, by its number of steps."""
    known: dict[int, bytes] = {}

    def output(steps: int) -> bytes:
        if steps not in known:
            options = command("--steps", str(steps), "--call", "none")
            client = MiniClient(tmp_path_factory.mktemp("undisturbed"), options, checkpoint_period=1000)
            client.start()
            assert client.wait() == 0
            known[steps] = client.output().read_bytes()
        return known[steps]

    return output


def running(client: MiniClient) -> None:
    wait_for(lambda: client.fraction_done() > 0, 20, "progress")


# Ending


def test_a_task_ends_with_output_final_status_and_marker(start: Start) -> None:
    client = start("--steps", "60")
    assert client.wait() == 0
    assert client.finish_status() == 0
    assert client.output().stat().st_size == 256
    assert client.statuses[-1].fraction_done == 1.0
    assert client.cpu_time > 0, "the client saw no checkpoint"
    assert (client.slot / "out.bin").read_text().startswith("<soft_link>"), "the link file was overwritten"


def test_the_marker_comes_after_the_output_and_the_process_is_gone_within_5_s_of_it(start: Start) -> None:
    client = start("--steps", "5", "--helpers", "3", "--end", "hang")
    wait_for(lambda: client.finish_status() is not None, 20, "finish marker")
    marked = time.monotonic()
    assert client.output().exists()
    assert client.wait() == 0
    wait_for(lambda: not client.processes(), 5 - (time.monotonic() - marked), "helpers gone")


@pytest.mark.parametrize(
    ("options", "status"),
    [
        (["--end", "early-exception"], 1),
        (["--end", "sys-exit-0"], 1),
        (["--end", "hard-exit-0"], 1),
        (["--end", "segv"], 3),
        (["--status", "42"], 42),
    ],
)
def test_every_failure_leaves_a_marker_with_its_status(start: Start, options: list[str], status: int) -> None:
    client = start("--steps", "2", *options)
    assert client.wait() == status
    assert client.finish_status() == status
    assert f"called boinc_finish({status})" in client.stderr()


@pytest.mark.parametrize(("end", "kept"), [("segv", False), ("early-exception", True), ("killed", True)])
def test_only_a_crash_empties_what_opencl_drivers_keep(start: Start, tmp_path: Path, end: str, kept: bool) -> None:
    damaged = tmp_path / "projects" / "example.org_train" / DRIVER_CACHE / "AB" / "program.so"
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"")
    beside = damaged.parents[2] / "builds.bin"
    beside.write_bytes(b"ours")
    client = start("--end", end)
    client.wait()
    assert damaged.exists() == kept and beside.exists()
    assert ("emptied" in client.stderr()) != kept


def test_an_unexpected_exception_leaves_its_traceback_and_no_secret(start: Start) -> None:
    client = start("--end", "early-exception")
    client.wait()
    assert "Traceback" in client.stderr() and "ValueError: bad input" in client.stderr()
    assert AUTHENTICATOR not in client.stderr()
    assert client.stderr().isascii()


def test_a_temporary_exit_gives_delay_and_reason(start: Start) -> None:
    client = start("--end", "temporary")
    assert client.wait() == 0
    assert client.finish_status() is None
    assert client.temporary_exit() == (77, "the GPU is busy")


def test_a_full_disk_waits_for_its_owner_to_make_room(start: Start) -> None:
    client = start("--end", "disk-full")
    assert client.wait() == 0
    assert client.finish_status() is None
    assert client.temporary_exit() == (600, "the disk is full")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_polite_signal_gives_a_temporary_exit(start: Start, number: signal.Signals) -> None:
    client = start("--steps", "5000")
    running(client)
    assert client.process is not None
    client.process.send_signal(number)
    assert client.wait(10) == 0
    assert client.finish_status() is None
    assert client.temporary_exit() == (30, f"stopped by {number.name}")
    assert not client.processes()


def test_a_worker_killed_for_memory_tries_again_later(start: Start) -> None:
    client = start("--steps", "2", "--end", "killed")
    assert client.wait() == 0
    found = client.temporary_exit()
    assert found is not None and found[0] == 300 and "SIGKILL" in found[1]
    assert client.finish_status() is None


def test_killed_between_output_and_marker_the_next_start_does_not_compute_again(start: Start) -> None:
    client = start("--steps", "20", "--end", "stay-after-output")
    wait_for(lambda: (client.slot / "outputs.json").exists(), 20, "outputs noted")
    before = client.output().stat().st_mtime_ns
    assert client.process is not None
    client.process.kill()
    client.wait()
    assert client.finish_status() is None
    client.start()
    assert client.wait() == 0
    assert client.finish_status() == 0
    assert client.stderr().count("starts at step") == 1
    assert client.output().stat().st_mtime_ns == before


def test_a_marker_found_at_the_start_ends_the_task_with_its_status(start: Start) -> None:
    client = start("--steps", "2", "--status", "9")
    client.wait()
    client.start()
    assert client.wait(10) == 9
    assert client.stderr().count("starts at step") == 1
    assert "finished already" in client.stderr()


def test_quit_ends_at_once_without_a_marker_and_abort_gives_194(start: Start) -> None:
    client = start("--steps", "5000", "--call", "blas", "--size", "3000")
    wait_for(lambda: "starts at" in client.stderr(), 20, "start")
    time.sleep(0.5)
    client.quit()
    assert client.wait(10) == 0
    assert client.finish_status() is None and client.temporary_exit() is None
    client.start()
    wait_for(lambda: client.stderr().count("starts at") == 2, 20, "second start")
    client.abort()
    assert client.wait(10) == 194
    assert not client.processes()


def test_a_quit_waits_for_the_checkpoint_being_written(start: Start) -> None:
    client = start("--steps", "5000", "--slow-checkpoint", "3")
    wait_for(lambda: (client.slot / "checkpoint.0").exists(), 20, "first checkpoint")
    client.quit()
    began = time.monotonic()
    assert client.wait(20) == 0
    assert time.monotonic() - began > 1.5


# Suspension


@pytest.mark.parametrize(
    "options",
    [
        ["--call", "sleepless", "--helpers", "2"],
        ["--call", "blas", "--size", "4000"],  # one call of about a second on all threads
        ["--call", "sleepless", "--slow-checkpoint", "1.5"],  # in a critical section most of the time
    ],
    ids=["helpers", "inside-a-long-BLAS-call", "inside-slow-checkpoints"],
)
def test_within_2_s_of_suspend_no_process_of_the_task_uses_cpu(start: Start, options: list[str]) -> None:
    client = start("--steps", "1000000", *options, ncpus=2, checkpoint_period=2)
    wait_for(lambda: "starts at" in client.stderr(), 20, "start")
    time.sleep(1)
    client.suspend()
    time.sleep(2)
    assert client.all_read(), "the suspend message was not read"
    seen, before = len(client.statuses), client.tree_cpu()
    time.sleep(5)
    rested = client.tree_cpu()
    assert rested - before < 0.05
    assert len(client.statuses) == seen, "a suspended task reported status"
    client.resume()
    wait_for(lambda: client.tree_cpu() - rested > 0.05, 5, "computing after resume")
    wait_for(lambda: len(client.statuses) > seen, 5, "status after resume")
    client.quit()
    assert client.wait(20) == 0


@pytest.mark.parametrize("times", [8, pytest.param(50, marks=pytest.mark.long)])
def test_suspended_at_random_moments_the_result_is_that_of_an_undisturbed_run(
    start: Start, undisturbed: Callable[..., bytes], times: int
) -> None:
    steps = 40 * times
    client = start("--steps", str(steps))
    running(client)
    choose = random.Random(3)
    for _ in range(times):
        time.sleep(choose.uniform(0.0, 0.5))
        client.suspend()
        time.sleep(choose.uniform(0.0, 0.4))
        client.resume()
    assert client.wait(300) == 0
    assert client.output().read_bytes() == undisturbed(steps)


def test_suspended_then_quit_then_started_it_continues_from_its_checkpoint(
    start: Start, undisturbed: Callable[..., bytes]
) -> None:
    client = start("--steps", "150")
    wait_for(lambda: client.fraction_done() > 0.3, 20, "progress")
    client.suspend()
    wait_for(client.all_read, 5, "suspend read")
    client.quit()
    assert client.wait(10) == 0
    client.start()
    assert client.wait() == 0
    steps = [int(line.split(" step ")[1].split()[0]) for line in client.stderr().splitlines() if "starts at" in line]
    assert steps[0] == 0 and steps[1] >= 45
    assert client.output().read_bytes() == undisturbed(150)


# The client's death, and two copies


@pytest.mark.parametrize("suspended", [False, True], ids=["running", "suspended"])
def test_when_the_client_is_killed_the_whole_tree_is_gone_within_35_s(tmp_path: Path, suspended: bool) -> None:
    client, task = spawn_client(tmp_path, command("--steps", "1000000", "--call", "sleepless", "--helpers", "2"))
    try:
        wait_for(lambda: len(session_members(task)) == 4, 20, "supervisor, worker and two helpers")
        if suspended:
            for process in session_members(task):
                if process.pid != task:
                    process.suspend()
        client.kill()
        client.wait()
        wait_for(lambda: not session_members(task), 35, "tree gone")
    finally:
        client.kill()
        for process in session_members(task):
            process.kill()
    assert not (tmp_path / "slots" / "0" / "boinc_finish_called").exists()


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_when_the_supervisor_is_killed_worker_and_helpers_die_at_once(start: Start, stopped: bool) -> None:
    client = start("--steps", "1000000", "--call", "sleepless", "--helpers", "2")
    wait_for(lambda: len(client.processes()) == 4, 20, "supervisor, worker and two helpers")
    if stopped:
        client.suspend()
        wait_for(lambda: [p.status() for p in client.processes()].count(psutil.STATUS_STOPPED) == 3, 5, "stopped")
    assert client.process is not None
    client.process.kill()
    client.process.wait()
    wait_for(lambda: not client.processes(), 5, "tree gone")


def test_without_client_pid_a_silent_client_is_dead_after_the_heartbeat_time(start: Start) -> None:
    client = start("--steps", "5000", "--heartbeat-timeout", "3", client_pid=0)
    running(client)
    client.heartbeat = False
    assert client.wait(20) == 0
    assert client.finish_status() is None and client.temporary_exit() is None
    assert "no heartbeat" in client.stderr()


def test_with_a_living_client_pid_a_silent_client_is_only_busy(start: Start) -> None:
    client = start("--steps", "300", "--heartbeat-timeout", "1")
    client.heartbeat = False
    assert client.wait() == 0
    assert client.finish_status() == 0


def test_a_second_copy_touches_nothing_and_leaves_by_a_temporary_exit(start: Start) -> None:
    first = start("--steps", "5000")
    running(first)
    with open(first.slot / "stderr.txt", "ab") as stderr:
        second = subprocess.run(command("--lock-wait", "1"), cwd=first.slot, stderr=stderr, timeout=30)
    assert second.returncode == 0
    found = first.temporary_exit()
    assert found is not None and found[0] == 600 and "another copy" in found[1]
    assert first.finish_status() is None and not first.output().exists()
    assert first.process is not None and first.process.poll() is None
    first.quit()
    assert first.wait(10) == 0


def test_a_second_copy_takes_over_once_the_first_is_gone(start: Start, undisturbed: Callable[..., bytes]) -> None:
    first = start("--steps", "150")
    running(first)
    assert first.process is not None
    threading.Timer(1.0, first.process.kill).start()
    second = subprocess.run(command("--steps", "150", "--lock-wait", "20"), cwd=first.slot, timeout=60)
    assert second.returncode == 0
    assert first.finish_status() == 0
    assert first.output().read_bytes() == undisturbed(150)


def test_leftovers_of_another_task_are_ignored(start: Start, undisturbed: Callable[..., bytes], tmp_path: Path) -> None:
    other = start("--steps", "5000", root=tmp_path / "other", workunit="wu_other")
    running(other)
    other.quit()
    other.wait()
    slot = tmp_path / "mine" / "slots" / "0"
    (slot / "folder" / "deep").mkdir(parents=True)
    (slot / "_MEIstale" / "numpy").mkdir(parents=True)
    (slot / "stderr.txt").write_bytes(b"another task's words\n")
    (slot / "update.safetensors").write_bytes(b"another task's output")
    (slot / "checkpoint.tmp").write_bytes(b"half")
    for name in ("checkpoint.0", "checkpoint.1"):
        (slot / name).write_bytes((other.slot / name).read_bytes())
    client = start("--steps", "100", root=tmp_path / "mine")
    assert client.wait() == 0
    assert "checkpoint.0 is not used: it belongs to another task" in client.stderr()
    assert "starts at step 0 of 100" in client.stderr()
    assert client.output().read_bytes() == undisturbed(100)
    assert not (slot / "_MEIstale").exists()
    assert [path.name for path in client.project.iterdir()] == ["wu_1_out.bin"]


def test_no_file_appears_outside_the_slot_but_the_output(start: Start, tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    client = start("--steps", "20", environment={"HOME": str(home), "TMPDIR": str(home)})
    assert client.wait() == 0
    assert not list(home.iterdir())
    assert [path.name for path in client.project.iterdir()] == ["wu_1_out.bin"]
    assert sorted(path.name for path in client.slot.iterdir()) == [
        "boinc_finish_called",
        "boinc_mmap_file",
        "checkpoint.0",
        "checkpoint.1",
        "init_data.xml",
        "out.bin",
        "outputs.json",
        "stderr.txt",
    ]


# Kills and odd places


def kill_at_random(start: Start, kills: int, expected: bytes, steps: int, seed: int) -> None:
    choose = random.Random(seed)
    client = start("--steps", str(steps), "--slow-checkpoint", "0")
    for number in range(kills):
        wait_for(
            lambda n=number: client.stderr().count("starts at") > n or client.finish_status() == 0,
            30,
            "start",
        )
        time.sleep(choose.uniform(0.0, 0.3))
        assert client.process is not None
        if client.process.poll() is not None:
            break
        client.process.kill()
        client.wait()
        wait_for(lambda: not client.processes(), 5, "tree gone")
        client.start()
    assert client.wait(300) == 0
    assert client.finish_status() == 0
    begins = [int(line.split(" step ")[1].split()[0]) for line in client.stderr().splitlines() if "starts at" in line]
    assert begins == sorted(begins), "progress went backwards"
    assert client.output().read_bytes() == expected


def test_killed_at_10_random_points_the_result_is_that_of_an_undisturbed_run(
    start: Start, undisturbed: Callable[..., bytes]
) -> None:
    kill_at_random(start, 10, undisturbed(150), 150, seed=11)


@pytest.mark.long
def test_killed_at_200_random_points_the_result_is_that_of_an_undisturbed_run(
    start: Start, undisturbed: Callable[..., bytes]
) -> None:
    kill_at_random(start, 200, undisturbed(2000), 2000, seed=12)


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_folder_with_blanks_and_accents_works_under_any_locale(
    start: Start, undisturbed: Callable[..., bytes], tmp_path: Path, locale: dict[str, str]
) -> None:
    root = tmp_path / "Žofia Nuñez 模型"
    settings = {"PYTHONIOENCODING": "cp1252", "TMPDIR": str(root), **locale}
    client = start("--steps", "100", root=root, environment=settings)
    assert client.wait() == 0
    assert client.output().read_bytes() == undisturbed(100)
    assert client.stderr().isascii()
    failing = start("--end", "early-exception", root=root / "slot 0", environment=settings)
    assert failing.wait() == 1
    assert "bad input" in failing.stderr() and failing.stderr().isascii()
