"""What commands print: each note once, text with brackets as it is, and nothing cut at 80 columns."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from boinc_project import store
from boinc_project.cli.jobs import trust_text
from boinc_project.cli.main import main
from boinc_project.gt_tables import JobState, gt_microtask
from boinc_project.job_config import TrustSection
from tests.tiny_project import TINY_JOB, TinyProject, tiny_project

NOTE = "learning stopped: start a new job from these weights ([model] pretrained) at a lower rate"


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


@pytest.fixture
def job_of_doubles(tmp_path: Path) -> Path:
    """The tiny job by another name, with data that must be converted."""
    folder = tmp_path / "job"
    shutil.copytree(TINY_JOB, folder, ignore=shutil.ignore_patterns("__pycache__"))
    text = (folder / "tiny.py").read_text()
    assert ".astype(np.float32)" in text
    (folder / "doubles.py").write_text(text.replace(".astype(np.float32)", ""))
    toml = (folder / "job.toml").read_text().replace("tiny:", "doubles:").replace('name = "tiny"', 'name = "doubles"')
    (folder / "job.toml").write_text(toml)
    return folder / "job.toml"


def printed(*arguments: Any) -> str:
    found = CliRunner().invoke(main, [str(each) for each in arguments], env={"COLUMNS": "80"})
    assert found.exit_code == 0, (found.output, found.exception)
    return found.output


@pytest.mark.parametrize("command", ["export", "job create"])
def test_each_note_on_a_job_is_printed_once(project: TinyProject, job_of_doubles: Path, command: str) -> None:
    options = ["--project", project.tree.project_dir] if command == "job create" else []
    text = " ".join(printed(*command.split(), job_of_doubles, *options).split())
    for split in ("train", "test"):
        assert text.count(f'"{split}"/"x" was converted from float64 to float32') == 1
    assert text.count("note: ") == 2


@pytest.mark.parametrize("command", [["status"], ["job", "list"], ["job", "show", "tiny"]], ids=" ".join)
def test_a_job_s_note_is_shown_whole(project: TinyProject, command: list[str]) -> None:
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.FAILED, NOTE)
    text = printed(*command, "--project", project.tree.project_dir)
    assert "…" not in text and max(len(line) for line in text.splitlines()) <= 80
    words = [word for line in text.splitlines() for word in line.strip("│ ").rpartition("│")[2].split()]
    assert " ".join(NOTE.split()) in " ".join(words)


def test_a_job_with_speed_classes_is_shown_with_the_steps_of_each() -> None:
    changes = (("local_steps = 5", "local_steps = 8\nspeed_classes = [1.0, 0.5, 0.25]"),)
    with tiny_project("diloco.toml", changes=changes) as project:
        project.issue()
        text = " ".join(printed("job", "show", project.job.name, "--project", project.tree.project_dir).split())
        assert "slowest hosts first: 2, 4, 8" in text
        for row in project.rows(gt_microtask):
            assert f"slot {row['slot']} (class {row['size_class']}, {row['steps']} steps): issued" in text


@pytest.mark.parametrize(
    ("section", "text"),
    [
        (TrustSection(), ""),
        (
            TrustSection(adaptive_replication=True, spot_check_share=0.4),
            "adaptive_replication = true, spot_check_share = 0.4",
        ),
    ],
)
def test_what_a_job_asks_for_beyond_agreement_is_one_line(section: TrustSection, text: str) -> None:
    assert trust_text(section) == text
