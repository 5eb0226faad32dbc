"""What `status` shows of a project: staleness and errors too, and nothing of volunteers' text unescaped."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from boinc_project import database, store
from boinc_project.cli.status import QUEUE_COLUMNS, render, staleness
from boinc_project.gt_tables import JobState, gt_job, gt_version
from boinc_project.states import Outcome, ServerState
from tests.tiny_project import TinyProject, tiny_project


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def shown(project: TinyProject, width: int = 250) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(render(project.db))
    return out.getvalue()


def columns(text: str) -> list[str]:
    """The body of each column of each table, without its line breaks and spaces."""
    found: list[str] = []
    for table in text.split("┏")[1:]:
        lines = [line.split("│")[1:-1] for line in table.splitlines() if line.startswith("│")]
        found += ["".join(part.replace(" ", "") for part in column) for column in zip(*lines, strict=True)]
    return found


HEADINGS = (
    "job", "state", "version", "last", "note", "loss", "held-out", "s/version", "staleness", "app", "unsent", "in",
    "progress", "to", "judge", "valid", "invalid", "errors", "no", "reply", "of", "exit", "status", "tasks", "hosts",
    "words", "host", "user", "name", "CPUs", "credit", "contact", "daemon", "process", "pass",
)  # fmt: skip
LONG_NOTE = "every microtask of version 1 failed 3 times: see [model] pretrained, or the log of the volunteers"


def large_project(project: TinyProject) -> None:
    """What is in the tables is as wide as it gets in practice."""
    project.make_version()
    project.make_version()
    job = project.job
    with project.db.transaction() as connection:
        store.set_job_state(connection, job.id, JobState.FINISHED, LONG_NOTE)
        metrics = '{"accuracy": 0.95312, "loss": 0.0001234, "perplexity": 123.4}'
        config = job.config.canonical_json().replace('"max_versions":4', '"max_versions":100000')
        connection.execute(gt_version.update().values(evaluation=metrics, loss=1.2345e-05))
        connection.execute(gt_job.update().values(config=config, current_version=99999, name="digits_of_the_lab"))
        connection.execute(database.app.update().values(name="gradient_of_the_other_kind"))
        for name in ("work_generator gradient_of_the_other_kind 0/2", "validator gradient_of_the_other_kind 11/12"):
            store.beat(connection, name, 4194303)
        for number in range(1, 4):
            row = database.new_row(
                database.host, id=9_000_000 + number, userid=8_000_000, p_ncpus=256,
                domain_name=f"node{number}.cluster.physics.example", total_credit=1.25e9,
                rpc_time=int(time.time()) - 5000,
            )  # fmt: skip
            connection.execute(database.host.insert(), row)
            failed = database.new_row(
                database.result, name=f"failed{number}", workunitid=1, appid=project.appid, hostid=number,
                server_state=int(ServerState.OVER), outcome=int(Outcome.CLIENT_ERROR), exit_status=-1073741819 + number,
                stderr_out="the graph needs 123456789 bytes, more than this computer has",
            )  # fmt: skip
            connection.execute(database.result.insert(), failed)


@pytest.mark.parametrize("width", [80, 100, 250])
def test_nothing_is_cut_in_a_terminal_of_80_columns_or_more(project: TinyProject, width: int) -> None:
    large_project(project)
    text = shown(project, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    headings = {word for line in text.splitlines() if line.startswith("┃") for word in line.replace("┃", " ").split()}
    assert headings == set(HEADINGS)
    for value in (
        "digits_of_the_lab", "99999/100000", "finished", LONG_NOTE, "1.234e-05", "accuracy 0.9531", "perplexity 123.4",
        "0 versions,", "gradient_of_the_other_kind", "-1073741818", "than this computer has", "9000001", "8000000",
        "node3.cluster.physics.example", "256", "1.25e+09", "validator gradient_of_the_other_kind 11/12", "4194303",
    ):  # fmt: skip
        assert any(value.replace(" ", "") in column for column in columns(text)), value


def test_large_counts_stand_in_one_line_at_80_columns(project: TinyProject, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = {key: 123450 + number for number, key in enumerate((*QUEUE_COLUMNS, "unneeded"))}
    monkeypatch.setattr("boinc_project.cli.status.result_counts", lambda *_: numbers)
    (line,) = [line for line in shown(project, 80).splitlines() if line.startswith("│ gradient")]
    assert [cell.strip() for cell in line.strip("│ ").split("│")][1:] == [str(numbers[key]) for key in QUEUE_COLUMNS]


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


@pytest.mark.parametrize(
    ("hosts", "shown_as"),
    [([7] * 50, "1: #7"), ([7] * 50 + [1, 2], "3, mostly #7"), ([1, 2, 3], "3"), ([1, 1, 2, 2], "2"), ([4], "1")],
)
def test_a_host_on_which_most_errors_happened_is_named(project: TinyProject, hosts: list[int], shown_as: str) -> None:
    with project.db.transaction() as connection:
        for number, host in enumerate(hosts):
            row = database.new_row(
                database.result, name=f"failed{number}", workunitid=1, appid=project.appid, hostid=host, exit_status=12,
                server_state=int(ServerState.OVER), outcome=int(Outcome.CLIENT_ERROR),
            )  # fmt: skip
            connection.execute(database.result.insert(), row)
    (line,) = [line for line in shown(project).splitlines() if line.startswith("│ gradient") and "│ 12 " in line]
    assert [cell.strip() for cell in line.strip("│ ").split("│")][2:4] == [str(len(hosts)), shown_as]


def test_results_that_wait_for_the_validator_are_told_from_those_that_nobody_needs(project: TinyProject) -> None:
    first, second, *_ = project.issue()
    project.answer(first)
    over = {"server_state": int(ServerState.OVER), "outcome": int(Outcome.DIDNT_NEED)}
    project.change(database.result, second["id"], **over)
    (line,) = [line for line in shown(project).splitlines() if line.startswith("│ gradient")]
    assert [cell.strip() for cell in line.strip("│ ").split("│")][1:] == ["2", "0", "1", "0", "0", "0", "0"]
