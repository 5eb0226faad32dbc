"""`boinc-train simulate`: what it prints, and one sentence for what cannot be simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from boinc_project.cli.main import main
from boinc_project.cli.simulate import LIES
from boinc_project.simulator.lies import BEHAVIOURS
from tests.tiny_project import TINY_JOB


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_it_prints_figures_with_their_definitions_and_draws_them(tmp_path: Path) -> None:
    picture, figures = tmp_path / "a.png", tmp_path / "a.json"
    files = ("--plot", str(picture), "--json", str(figures))
    result = simulate(str(TINY_JOB / "job.toml"), "--hosts", "4", "--lie", "sign_flip", "--liars", "1", *files)
    assert result.exit_code == 0, result.output
    assert "version 4 after" in result.output
    assert "goodput: unique applied host-seconds" in result.output
    assert picture.read_bytes()[:4] == b"\x89PNG"
    found = json.loads(figures.read_text())
    assert found["state"] == "finished"
    assert 0 < found["goodput"] < 1
    assert [version["version"] for version in found["versions"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--lie", "alie"), "belong together"),
        (("--hosts", "3", "--lie", "alie", "--liars", "4"), "at most 3"),
        (("--leave", "0.5"), "--hours"),
        (("--trace", "nowhere.json"), "cannot be read"),
        (("--plot", "no/such/folder/a.png"), "does not exist"),
    ],
)
def test_a_mistake_gets_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    result = simulate(str(TINY_JOB / "job.toml"), *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_every_lie_can_be_named() -> None:
    assert {*LIES, "honest"} == set(BEHAVIOURS)
