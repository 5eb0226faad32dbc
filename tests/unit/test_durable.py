"""Many files at once: all in place and whole, or none; published files keep BOINC's companions and names."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from boinc_project import durable
from boinc_project.durable import FEW, FileBatch
from boinc_project.project_tree import ImmutableNameError, ProjectTree
from tests.server_project import make_project

COUNTS = pytest.mark.parametrize("count", [1, FEW, FEW + 1, 50])


def contents(folder: Path, count: int) -> dict[Path, bytes]:
    return {folder / f"{number % 7:x}" / f"file{number}": bytes([number]) * 100_000 for number in range(count)}


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}


@COUNTS
def test_all_files_of_a_batch_are_in_place_after_commit_and_none_before(tmp_path: Path, count: int) -> None:
    wanted = contents(tmp_path, count)
    with FileBatch(count) as batch:
        for path, data in wanted.items():
            batch.add(path, data)
        assert not any(path.exists() for path in wanted)
        batch.commit()
    assert {path: path.read_bytes() for path in files_in(tmp_path)} == wanted


@COUNTS
def test_a_batch_that_is_not_committed_leaves_nothing(tmp_path: Path, count: int) -> None:
    with pytest.raises(ZeroDivisionError), FileBatch(count) as batch:
        for path, data in contents(tmp_path, count).items():
            batch.add(path, data)
        raise ZeroDivisionError
    assert files_in(tmp_path) == set()


@COUNTS
def test_bytes_are_durable_before_the_names_and_the_names_before_commit_returns(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    for owner, name, step in (
        (os, "replace", "rename"), (durable, "sync_device", "sync"), (durable, "sync_folder", "sync"),
        (os, "fsync", "flush"),
    ):  # fmt: skip
        real = getattr(owner, name)

        def noted(*arguments: Any, real: Any = real, step: str = step) -> Any:
            steps.append(step)
            return real(*arguments)

        monkeypatch.setattr(owner, name, noted)
    with FileBatch(count) as batch:
        for path, data in contents(tmp_path, count).items():
            batch.add(path, data)
        batch.commit()
    first, last = steps.index("rename"), len(steps) - 1 - steps[::-1].index("rename")
    assert {"sync", "flush"} & set(steps[:first]), "the bytes come first"
    assert "sync" in steps[last:], "and the names are flushed after the last renaming"
    if count > FEW:
        assert steps.count("sync") == 2 and "flush" not in steps, "however many files, two waits"


def test_a_disk_that_cannot_take_the_bytes_is_an_error_and_nothing_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(durable, "sync_device", full)
    with pytest.raises(OSError, match="No space left"), FileBatch(20) as batch:
        for path, data in contents(tmp_path, 20).items():
            batch.add(path, data)
        batch.commit()
    assert files_in(tmp_path) == set()


@pytest.fixture
def tree(tmp_path: Path) -> ProjectTree:
    return make_project(tmp_path / "project")


def test_many_files_are_published_as_each_by_itself_would_be(tree: ProjectTree) -> None:
    wanted = {f"file_{number}": f"content {number}".encode() for number in range(30)}
    staged = tree.stage_files(wanted)
    for name, data in wanted.items():
        md5 = hashlib.md5(data).hexdigest()
        assert staged[name] == tree.stage_file(data, name)
        assert tree.download_path(name).read_bytes() == data
        assert tree.download_path(f"{name}").with_name(f"{name}.md5").read_text() == f"{md5} {len(data)}\n"
    assert tree.stage_files(wanted) == staged, "publishing them again changes nothing"


def test_a_published_name_keeps_its_content_and_its_companions_are_mended(tree: ProjectTree) -> None:
    tree.stage_files({"one": b"1", "two": b"2"})
    with pytest.raises(ImmutableNameError, match="two is already published"):
        tree.stage_files({"new": b"n", "two": b"other"})
    assert tree.download_path("two").read_bytes() == b"2"
    assert not tree.download_path("new").exists()
    companion = tree.download_path("one").with_name("one.md5")
    companion.write_bytes(b"")
    tree.stage_files({"one": b"1"})
    assert companion.read_text().endswith(" 1\n")
