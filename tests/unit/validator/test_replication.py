"""Adaptive replication, blocked groups and newcomers, by the daemon on a real database."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest

from boinc_project import database, store
from boinc_project.gt_tables import gt_blocked, gt_fingerprint, gt_trust
from boinc_project.reliability import member_weight
from boinc_project.states import ValidateState
from tests.tiny_project import TinyProject, tiny_project
from tests.trusting import gradients_of, judged, kind_of, trusted, unsent, with_gradients, with_trust
from validator import __main__ as validator_module
from validator.drift import Finding
from validator.lottery import project_lottery

VALID, INVALID, INCONCLUSIVE = ValidateState.VALID, ValidateState.INVALID, ValidateState.INCONCLUSIVE


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def unit_of(project: TinyProject, result: dict[str, Any]) -> dict[str, Any]:
    return project.unit_of(result)


def adaptive(project: TinyProject, floor: float = 1e-6) -> list[dict[str, Any]]:
    with_trust(project, adaptive_replication=True, audit_floor=floor)
    results = project.issue()
    assert len({r["workunitid"] for r in results}) == len(results), "one copy each"
    return results


@pytest.mark.usefixtures("each_database")
def test_a_trusted_host_s_one_copy_is_canonical_and_raises_its_trust_by_nothing(project: TinyProject) -> None:
    first, _ = adaptive(project)
    trusted(project, 1, kind_of(project))
    (before,) = project.rows(gt_trust, host_id=1)
    project.answer(first, user=1)
    judged(project)
    assert unit_of(project, first)["canonical_resultid"] == first["id"]
    assert [row["verdict"] for row in project.rows(gt_fingerprint)] == ["alone"]
    (after,) = project.rows(gt_trust, host_id=1)
    assert after["good"] == pytest.approx(before["good"], rel=1e-4) and after["valid"] == before["valid"] + 1
    assert (after["consecutive_valid"], after["alone"]) == (before["consecutive_valid"], 1)
    (version,) = project.rows(database.host_app_version, host_id=1)
    assert version["consecutive_valid"] == 3, "nor the record that BOINC keeps"


@pytest.mark.usefixtures("each_database")
def test_an_unknown_host_s_copy_waits_for_a_second_one_also_after_a_restart(project: TinyProject) -> None:
    first, _ = adaptive(project)
    project.answer(first, user=1)
    judged(project)
    unit = unit_of(project, first)
    assert (unit["canonical_resultid"], unit["min_quorum"], unit["target_nresults"]) == (0, 2, 2)
    (second,) = unsent(project, unit["id"])
    project.change(database.workunit, unit["id"], need_validate=1)
    judged(project)
    assert unit_of(project, first)["canonical_resultid"] == 0, "alone it is never canonical"
    project.answer(second, user=2)
    judged(project)
    assert unit_of(project, first)["canonical_resultid"]
    assert [(row["good"], row["alone"]) for row in project.rows(gt_trust)] == [(1.0, 0)] * 2


def test_an_audit_is_drawn_after_the_upload_by_the_secret(project: TinyProject) -> None:
    results = adaptive(project, floor=0.5)
    trusted(project, 1, kind_of(project))
    for result in results:
        project.answer(result, user=1)
    judged(project)
    lottery = project_lottery(project.tree)
    for result in results:
        unit = unit_of(project, result)
        drawn = lottery.drawn(0.5, "audit", unit["name"], result["id"])
        assert bool(unit["canonical_resultid"]) is not drawn
        assert len(unsent(project, unit["id"])) == drawn


@pytest.mark.parametrize("lie", [-1.0, 0.97])
def test_a_failed_audit_ends_single_replication_for_that_host(project: TinyProject, lie: float) -> None:
    """Also if the lie is as small as the difference of unlike hardware: that small a bias is the likeliest to pay."""
    first, other = adaptive(project, floor=1.0)
    trusted(project, 1, kind_of(project), good=100)
    project.answer(first, project.changed_update(unit_of(project, first), lambda g: lie * g), user=1)
    judged(project)
    unit = unit_of(project, first)["id"]
    for user in (2, 3):
        (more,) = unsent(project, unit)
        project.answer(more, user=user)
        judged(project)
    (row,) = project.rows(database.result, id=first["id"])
    assert row["validate_state"] == INVALID
    with_trust(project, adaptive_replication=True, audit_floor=1e-6)
    project.answer(other, user=1)
    judged(project)
    assert unit_of(project, other)["min_quorum"] == 2


def test_a_trusted_copy_that_repeats_another_gradient_gets_a_second_one(project: TinyProject) -> None:
    with_trust(project, adaptive_replication=True, audit_floor=1e-6)
    trusted(project, 1, kind_of(project))
    first, other = project.issue()
    project.answer(first, user=1)
    judged(project)
    old = gradients_of(project, unit_of(project, first))
    project.answer(other, with_gradients(project, unit_of(project, other), lambda n: old[n]), user=1)
    judged(project)
    assert unit_of(project, other)["canonical_resultid"] == 0
    assert len(unsent(project, other["workunitid"])) == 1


@pytest.mark.usefixtures("each_database")
def test_a_blocked_group_s_copies_are_no_votes_and_are_still_credited_when_they_are_right(
    project: TinyProject,
) -> None:
    pair = [r for r in project.issue() if r["workunitid"] == 1]
    with project.db.transaction() as connection:
        connection.execute(gt_blocked.insert(), {"name": "host:1", "create_time": 1.0})
    for result, user in zip(pair, (1, 2), strict=True):
        project.answer(result, user=user)
    judged(project)
    assert unit_of(project, pair[0])["canonical_resultid"] == 0
    (third,) = unsent(project, 1)
    project.answer(third, user=3)
    judged(project)
    assert unit_of(project, pair[0])["canonical_resultid"] in {pair[1]["id"], third["id"]}
    states = {r["validate_state"] for r in project.rows(database.result, workunitid=1)}
    assert states == {int(VALID)}


def test_two_fresh_accounts_carry_no_quorum_and_three_do(project: TinyProject) -> None:
    with_trust(project, newcomer_days=7)
    pair = [r for r in project.issue() if r["workunitid"] == 1]
    for result, user in zip(pair, (1, 2), strict=True):
        project.answer(result, user=user)
    judged(project)
    assert unit_of(project, pair[0])["canonical_resultid"] == 0
    (third,) = unsent(project, 1)
    project.answer(third, user=3)
    judged(project)
    assert unit_of(project, pair[0])["canonical_resultid"]


def test_fresh_accounts_of_one_network_are_one_vote(project: TinyProject) -> None:
    with_trust(project, newcomer_days=7)
    pair = [r for r in project.issue() if r["workunitid"] == 1]
    for user in (1, 2, 3):
        project.add_host(user, user)
        project.change(database.host, user, external_ip_addr=f"8.8.4.{user}")
    for result, user in zip(pair, (1, 2), strict=True):
        project.answer(result, user=user)
    judged(project)
    (third,) = unsent(project, 1)
    project.answer(third, user=3)
    judged(project)
    assert unit_of(project, pair[0])["canonical_resultid"] == 0
    (fourth,) = unsent(project, 1)
    project.add_host(4, 4)
    project.change(database.user, 4, create_time=1)
    project.change(database.host, 4, create_time=1)
    project.answer(fourth, user=4)
    judged(project)
    assert unit_of(project, pair[0])["canonical_resultid"], "somebody known and one vote of the network"


def test_a_trusted_copy_of_a_strange_size_gets_a_second_one(project: TinyProject) -> None:
    first, _ = adaptive(project)
    trusted(project, 1, kind_of(project))
    validator = project.validator()
    validator.judge.norms[kind_of(project), 3, 0] = deque([1e-6] * 9)
    project.answer(first, user=1)
    project.transitioner.run_once()
    validator.one_pass()
    unit = unit_of(project, first)
    assert (unit["canonical_resultid"], unit["min_quorum"]) == (0, 2)


def test_what_size_is_usual_survives_a_restart(project: TinyProject) -> None:
    """O10: a copy a hundred times as large as those before it never stands alone, whenever daemons are restarted."""
    first, other = adaptive(project)
    trusted(project, 1, kind_of(project))
    project.answer(first, user=1)
    judged(project)
    (kept,) = project.rows(gt_fingerprint, verdict="alone")
    with project.db.transaction() as connection:
        connection.execute(gt_fingerprint.insert(), [{**kept, "result_id": 1000 + n} for n in range(8)])
    project.answer(other, project.changed_update(unit_of(project, other), lambda g: 100 * g), user=1)
    judged(project)
    unit = unit_of(project, other)
    assert (unit["canonical_resultid"], unit["min_quorum"]) == (0, 2)


@pytest.mark.usefixtures("each_database")
def test_the_records_of_hosts_are_read_by_kind_of_work(project: TinyProject) -> None:
    trusted(project, 1, kind_of(project), good=100)
    with project.db.read() as connection:
        rows = store.trust_rows(connection, kind_of(project), [1, 2])
        assert store.trust_rows(connection, "other", [1]) == {}
    assert set(rows) == {1} and member_weight(rows[1], time.time()) > 0.98


@pytest.mark.parametrize("fault", ["gone", "garbled"])
def test_without_its_secret_what_needs_a_draw_waits_with_one_sentence_and_all_else_is_judged(
    project: TinyProject, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, other = adaptive(project)
    trusted(project, 1, kind_of(project))
    key = project.tree.config.key_dir / "upload_private"
    whole = key.read_bytes()
    key.unlink() if fault == "gone" else key.write_bytes(whole[:100] + b"\xff")
    try:
        project.answer(first, user=1)
        project.answer(other, user=2)  # of a host that nobody knows: no draw
        project.transitioner.run_once()
        moment = [time.time()]
        validator = project.validator(clock=lambda: moment[0])
        for _ in range(8):
            validator.one_pass()
            moment[0] += 300.0
        lines = [r for r in caplog.records if r.levelname == "CRITICAL"]
        assert len(lines) == 1 and not lines[0].exc_info and "\n" not in lines[0].message
        assert str(key) in lines[0].message and "let the user that runs the daemons read it" in lines[0].message
        (waiting,) = project.rows(database.result, id=first["id"])
        assert waiting["validate_state"] == ValidateState.INIT and unit_of(project, first)["need_validate"] == 1
        assert unit_of(project, other)["min_quorum"] == 2, "judged: a second copy is asked for"
    finally:
        key.write_bytes(whole)
    validator.one_pass()
    assert unit_of(project, first)["canonical_resultid"] == first["id"]


def test_a_trusted_host_of_a_group_that_drifts_does_not_stand_alone(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drifting = Finding("user:1", 100, 1e-3, 30.0, 1e-9, drifts=True)
    monkeypatch.setattr(validator_module, "findings", lambda pairs, limits: [drifting])
    first, second = adaptive(project)
    for host in (1, 2):
        trusted(project, host, kind_of(project))
    project.answer(first, user=1)
    project.answer(second, user=2)
    with caplog.at_level("INFO", "validator"):
        judged(project)
    assert not unit_of(project, first)["canonical_resultid"] and unsent(project, first["workunitid"])
    assert "a second copy is needed: user:1 drifts" in caplog.text
    assert unit_of(project, second)["canonical_resultid"], "others do"
