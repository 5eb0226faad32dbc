"""Checkpoints: two generations, bound to their task, and never a reason to fail."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from apps.gradient.checkpoint import Checkpoint, CheckpointStore

BINDING = {"workunit": "wu_1", "result": "wu_1_0", "microtask": "a" * 64}


def store(folder: Path, log: list[str] | None = None, **binding: str) -> CheckpointStore:
    return CheckpointStore({**BINDING, **binding}, (log if log is not None else []).append, folder)


def at(step: int, size: int = 8) -> Checkpoint:
    return Checkpoint(step, {"value/w": np.full(size, step, np.float32)}, {"note": step})


def saved(folder: Path, steps: int) -> None:
    each = store(folder)
    each.load()
    for step in range(1, steps + 1):
        assert each.save(at(step))


def test_the_newest_checkpoint_comes_back_whole_and_writable(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    found = store(tmp_path).load()
    assert found is not None and (found.step, dict(found.extra)) == (3, {"note": 3})
    assert np.array_equal(found.tensors["value/w"], np.full(8, 3, np.float32))
    found.tensors["value/w"][0] = 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint.0", "checkpoint.1"]


def test_an_empty_slot_starts_afresh_in_silence(tmp_path: Path) -> None:
    log: list[str] = []
    assert store(tmp_path, log).load() is None
    assert log == []


def truncate_to_nothing(path: Path) -> None:
    path.write_bytes(b"")


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def raise_the_generation(path: Path) -> None:
    data = path.read_bytes().split(b" ", 3)
    path.write_bytes(b" ".join([data[0], data[1], b"999", data[3]]))


def append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def become_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = [truncate_to_nothing, halve, flip_a_byte, raise_the_generation, append, become_a_folder]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_checkpoint_gives_the_previous_one_and_a_line_in_the_log(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    saved(tmp_path, 5)
    damage(tmp_path / "checkpoint.0")  # generations 1, 3, 5
    log: list[str] = []
    each = store(tmp_path, log)
    found = each.load()
    assert found is not None and found.step == 4
    assert len(log) == 1 and log[0].startswith("checkpoint.0 is not used: ")
    if damage is not become_a_folder:
        assert each.save(at(5)) and each.save(at(6))
        again = store(tmp_path).load()
        assert again is not None and again.step == 6


@pytest.mark.parametrize("damage", DAMAGE)
def test_two_damaged_checkpoints_give_a_fresh_start(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    saved(tmp_path, 2)
    for name in ("checkpoint.0", "checkpoint.1"):
        damage(tmp_path / name)
    log: list[str] = []
    assert store(tmp_path, log).load() is None
    assert len(log) == 2


@pytest.mark.parametrize("field", list(BINDING))
def test_another_tasks_checkpoints_are_ignored_and_overwritten_in_time(tmp_path: Path, field: str) -> None:
    saved(tmp_path, 9)
    log: list[str] = []
    each = store(tmp_path, log, **{field: "another"})
    assert each.load() is None
    assert all("belongs to another task" in line for line in log) and len(log) == 2
    assert each.save(at(1))
    again = store(tmp_path, **{field: "another"}).load()
    assert again is not None and again.step == 1


def test_a_full_disk_keeps_the_old_checkpoint_and_says_so(tmp_path: Path) -> None:
    log: list[str] = []
    each = store(tmp_path, log)
    assert each.save(at(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # stands for the full disk
    try:
        assert not each.save(at(2, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(log) == 1 and log[0].startswith("no checkpoint at step 2: ")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.0"]
    found = store(tmp_path).load()
    assert found is not None and found.step == 1
    assert each.save(at(3))


def test_a_half_written_temporary_file_is_removed(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.tmp").write_bytes(b"half")
    store(tmp_path).load()
    assert not list(tmp_path.iterdir())


def test_complete_outputs_are_recognised_and_changed_ones_are_not(tmp_path: Path) -> None:
    output = tmp_path / "update"
    output.write_bytes(b"result")
    each = store(tmp_path)
    assert not each.outputs_complete({"update": output})
    each.outputs_written({"update": output})
    assert store(tmp_path).outputs_complete({"update": output})
    assert not store(tmp_path, workunit="another").outputs_complete({"update": output})
    assert not store(tmp_path).outputs_complete({"update": output, "second": output})
    output.write_bytes(b"resulT")
    assert not store(tmp_path).outputs_complete({"update": output})
    output.unlink()
    assert not store(tmp_path).outputs_complete({"update": output})
    (tmp_path / "outputs.json").write_bytes(b"[]")
    assert not store(tmp_path).outputs_complete({"update": output})
