"""What `status` shows of a project: staleness and errors too, and nothing of volunteers' text unescaped."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
from rich.console import Console

from boinc_project import database
from boinc_project.cli.status import render, staleness
from boinc_project.states import Outcome, ServerState
from tests.tiny_project import TinyProject, tiny_project


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def shown(project: TinyProject) -> str:
    out = io.StringIO()
    Console(file=out, width=250).print(render(project.db))
    return out.getvalue()


def test_staleness_is_shown_in_versions_and_seconds_once_gradients_were_applied(project: TinyProject) -> None:
    with project.db.read() as connection:
        assert staleness(connection, project.job_id) == ""
    project.make_version()
    project.make_version()
    with project.db.read() as connection:
        assert staleness(connection, project.job_id).startswith("0 versions, ")
    assert "0 versions, " in shown(project)


def test_errors_are_counted_by_exit_status_with_the_last_words_of_the_newest(project: TinyProject) -> None:
    assert "exit status" not in shown(project)
    results = project.issue()
    for number, result in enumerate(results):
        project.change(
            database.result, result["id"], server_state=int(ServerState.OVER), outcome=int(Outcome.CLIENT_ERROR),
            exit_status=11 if number else 12, hostid=number, stderr_out="<core_client>\n[red]no memory[/red] left\n",
        )  # fmt: skip
    text = shown(project)
    lines = [line for line in text.splitlines() if "[red]no memory[/red] left" in line]
    assert len(results) > 2 and len(lines) == 2
    commonest = [cell.strip() for cell in lines[0].strip("│ ").split("│")]
    assert commonest[:4] == ["gradient", "11", str(len(results) - 1), str(len(results) - 1)]


def test_results_that_wait_for_the_validator_are_told_from_those_that_nobody_needs(project: TinyProject) -> None:
    first, second, *_ = project.issue()
    project.answer(first)
    over = {"server_state": int(ServerState.OVER), "outcome": int(Outcome.DIDNT_NEED)}
    project.change(database.result, second["id"], **over)
    (line,) = [line for line in shown(project).splitlines() if line.startswith("│ gradient")]
    assert [cell.strip() for cell in line.strip("│ ").split("│")][1:] == ["2", "0", "1", "0", "0", "0", "0"]
