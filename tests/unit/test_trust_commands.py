"""`trust show`, `block` and `unblock`, and what `status` tells of refuted hosts."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner
from rich.console import Console

from boinc_project import database
from boinc_project.cli import status
from boinc_project.cli import trust as commands
from boinc_project.cli.main import main
from boinc_project.gt_tables import gt_blocked, gt_fingerprint, gt_trust
from tests.tiny_project import TinyProject, tiny_project
from validator.drift import findings
from validator.records import judged_pairs


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def ran(project: TinyProject, *words: str) -> tuple[int, str]:
    done = CliRunner().invoke(main, ["trust", *words, "--project", str(project.tree.project_dir)])
    return done.exit_code, done.output


def drawn(group: object) -> str:
    out = io.StringIO()
    Console(file=out, width=250).print(group)
    return out.getvalue()


def trail(number: int, result: int, host: int, verdict: str, distance: float | None) -> dict[str, object]:
    return {
        "workunit_name": f"wu{number}", "result_id": result, "host_id": host, "user_id": host, "app_version_id": 1,
        "kind": "gradient:abc", "verdict": verdict, "distance": distance, "judge_time": time.time(), "marks": b"",
    }  # fmt: skip


def test_a_drifting_driver_is_named_and_can_be_blocked_and_unblocked(project: TinyProject) -> None:
    project.change(database.app_version, 1, plan_class="cuda_gt")
    for host in range(1, 9):
        project.add_host(host, host)
        driver = "666" if host <= 2 else "535"
        project.change(database.host, host, serialnum=f"[CUDA|GTX 1080|1|8192MB|{driver}|300]")
    with project.db.transaction() as connection:
        for n in range(90):
            first, second = 1 + n % 8, 1 + (n % 8 + 1 + n // 8) % 8
            if first == second:
                continue
            apart = (3e-5 if min(first, second) <= 2 else 3e-7) * (1 + n / 100)
            rows = [trail(n, 2 * n, first, "canonical", None), trail(n, 2 * n + 1, second, "valid", apart)]
            connection.execute(gt_fingerprint.insert(), rows)
    with project.db.read() as connection:
        found = [one.group for one in findings(judged_pairs(connection, time.time())) if one.drifts]
    assert found == ["driver:GTX 1080 666"]
    code, text = ran(project, "show")
    assert code == 0 and "drifts" in text
    assert "groups that drift" not in drawn(status.render(project.db)), "the validator has not looked yet"
    project.validator().one_pass()
    assert "boinc-train trust block 'driver:GTX 1080 666'" in drawn(status.render(project.db))
    config = project.tree.project_dir / "config.xml"
    config.write_text(config.read_text().replace("</config>", "<gt_drift_ratio>1e4</gt_drift_ratio></config>"))
    with TinyProject(project.tree.project_dir) as less_strict:
        less_strict.validator().one_pass()
    assert "groups that drift" not in drawn(status.render(project.db)), "what was found before is forgotten"
    assert "drifts" not in ran(project, "show")[1]
    code, text = ran(project, "block", "class:cuda_gt", "--note", "wrong sums")
    assert (code, text) == (0, "class:cuda_gt is blocked\n")
    assert ran(project, "block", "class:cuda_gt") == (0, "class:cuda_gt was blocked already\n")
    assert [(row["name"], row["note"]) for row in project.rows(gt_blocked)] == [("class:cuda_gt", "wrong sums")]
    assert "class:cuda_gt" in ran(project, "show")[1]
    assert ran(project, "unblock", "class:cuda_gt") == (0, "class:cuda_gt votes again\n")
    assert project.rows(gt_blocked) == []


@pytest.mark.parametrize(
    "words",
    [
        ("block", "cuda_gt"),
        ("block", "host:"),
        ("block", "cards:1"),
        ("unblock", "host:1"),
        ("block", "host:abc"),
        ("block", "host: 1"),
        ("block", "user:-1"),
    ],
)
def test_a_wrong_group_is_a_sentence_that_says_what_to_do(project: TinyProject, words: tuple[str, str]) -> None:
    code, text = ran(project, *words)
    assert code == 2 and text.startswith("boinc-train: ") and len(text.splitlines()) == 1


def test_a_host_that_the_server_refuted_is_named_with_what_was_accepted_from_it_alone(project: TinyProject) -> None:
    assert "refuted" not in drawn(status.render(project.db))
    record = {"host_id": 7, "kind": "gradient:abc", "failed_check": time.time(), "bad": 1.0, "judge_time": time.time()}
    with project.db.transaction() as connection:
        connection.execute(gt_trust.insert(), record)
        connection.execute(gt_fingerprint.insert(), trail(1, 1, 7, "alone", None))
        connection.execute(gt_fingerprint.insert(), trail(2, 2, 7, "valid", 0.0))
    for text in (drawn(status.render(project.db)), drawn(commands.render(project.db, time.time()))):
        assert re.search(r"refuted \d+ s ago; accepted without a second copy before: wu1", text), text


def test_records_of_hosts_fit_a_terminal_and_only_remarks_that_there_are_need_a_column(project: TinyProject) -> None:
    record = {"host_id": 7, "kind": "local-steps:0748e03b46fba76e", "valid": 1021, "good": 40.0, "alone": 12}
    with project.db.transaction() as connection:
        connection.execute(gt_trust.insert(), {**record, "judge_time": time.time()})
    out = io.StringIO()
    Console(file=out, width=80).print(commands.render(project.db, time.time()))
    text = out.getvalue()
    assert "remarks" not in text
    for word in ("local", "steps", "0748e0", "reliable", "differs", "judged"):
        assert f" {word} " in text
    assert max(map(len, text.splitlines())) <= 80 and all(line[-1] in "┓┃┩│┘" for line in text.splitlines()[1:4])


@pytest.mark.parametrize(
    ("name", "value", "limits"),
    [
        ("gt_drift_ratio", "often", "from 1 to 1e+06"),
        ("gt_drift_ratio", "nan", "from 1 to 1e+06"),
        ("gt_drift_ratio", "-2", "from 1 to 1e+06"),
        ("gt_drift_false_discoveries", "5", "from 0 to 1"),
    ],
)
def test_a_limit_of_drift_that_makes_no_sense_is_a_sentence(
    project: TinyProject, name: str, value: str, limits: str
) -> None:
    config = project.tree.project_dir / "config.xml"
    config.write_text(config.read_text().replace("</config>", f"<{name}>{value}</{name}></config>"))
    code, text = ran(project, "show")
    assert code != 0 and len(text.splitlines()) == 1
    assert f"<{name}> must be a number {limits}, not '{value}'" in text


@pytest.mark.usefixtures("each_database")
def test_what_waited_for_a_blocked_host_is_judged_again_once_it_votes(project: TinyProject) -> None:
    pair = [result for result in project.issue() if result["workunitid"] == 1]
    assert ran(project, "block", "host:1", "--note", "a mistake")[0] == 0
    assert "boinc-train trust unblock host:1" in drawn(status.render(project.db))
    for user, result in enumerate(pair, 1):
        project.answer(result, user=user)
    project.transitioner.run_once()
    project.validator().one_pass()
    project.transitioner.run_once()
    project.validator().one_pass()
    assert not project.unit_of(pair[0])["canonical_resultid"]
    assert ran(project, "unblock", "host:1") == (0, "host:1 votes again\n")
    project.validator().one_pass()
    assert project.unit_of(pair[0])["canonical_resultid"]
    assert "blocked" not in drawn(status.render(project.db))
