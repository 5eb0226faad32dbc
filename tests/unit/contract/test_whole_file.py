"""Files that are whole or absent: a failed write changes nothing, and temporary names are known for what they are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from boinc_project.contract import whole_file

NAMES = ("a", "state_000001_0123456789abcdef.safetensors", "x" * 255, "ü" * 127, ".hidden")


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_file_of_any_name_is_written_and_written_anew(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole_file.write_bytes(path, b"old")
    whole_file.write_chunks(path, [b"n", memoryview(b"ew")])
    assert path.read_bytes() == b"new"
    assert [each.name for each in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_failed_write_leaves_neither_the_file_nor_a_temporary_one(
    tmp_path: Path, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state.safetensors"
    whole_file.write_bytes(path, b"old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, failing, full)
    with pytest.raises(OSError, match="No space"):
        whole_file.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["state.safetensors"]


def test_temporary_names_differ_each_time_and_no_other_name_looks_like_one() -> None:
    made = {whole_file.temporary_name(name) for name in (*NAMES, *NAMES)}
    assert len(made) == 2 * len(NAMES)
    assert all(whole_file.TEMPORARY.fullmatch(name) for name in made)
    others = ("checkpoint.tmp", ".config.xml.tmp", "file.0123456789abcdef.tmp", ".file.0123456789abcdef", ".a.0123.tmp")
    assert not any(whole_file.TEMPORARY.fullmatch(name) for name in (*NAMES, *others))
