"""Flows: microtasks without rounds, late results, and everything that a crash or a rollback makes of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from assimilator.apply import flow_to_commit, host_weights
from assimilator.replay import replay
from boinc_project import database, store
from boinc_project.cli.jobs import roll_back
from boinc_project.gt_tables import Disposition, JobState, MicrotaskState, gt_ledger, gt_microtask, gt_trust, gt_version
from boinc_project.job_config import JobError, load_config
from boinc_project.policies import POLICIES
from boinc_project.reliability import member_weight
from boinc_project.states import ServerState
from tests.tiny_project import Changes, TinyProject, exported, tiny_project
from work_generator.supply import Issue, flow_to_issue

LOCAL = (("[optimizer]\nlr = 0.7\nmomentum = 0.9\n\n", ""),)


def flow(policy: str, *changes: tuple[str, str], keys: str = "") -> Changes:
    """Changes that make tests/data/tiny_job/diloco.toml a flow."""
    outer = () if POLICIES[policy].outer else LOCAL
    section = f"[aggregation]\nin_flight = 3\nmax_age = 2\n{keys}\n[schedule]"
    return (('policy = "diloco"', f'policy = "{policy}"'), ("[schedule]", section), *outer, *changes)


FLOWS = {
    "buffered": flow("buffered"),
    "delay-compensated": flow("delay-compensated"),
    "async": flow("async"),
    "vc-asgd": flow("vc-asgd"),
    "delayed-nesterov": flow("delayed-nesterov", keys="momentum_every = 4"),
    "decoupled-diloco": flow("decoupled-diloco", keys="grace_s = 0"),
    "median": flow("buffered", keys='rule = "median"'),
    "clipping": flow("buffered", keys='rule = "centered_clipping"'),
}


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project("diloco.toml", changes=FLOWS["buffered"]) as made:
        yield made


def unsent(project: TinyProject) -> dict[str, list[dict[str, Any]]]:
    """Workunit name -> its results that nobody has had, oldest first."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in project.rows(database.result, server_state=int(ServerState.UNSENT)):
        found.setdefault(str(project.unit_of(row)["name"]), []).append(row)
    return found


def finish(project: TinyProject, *names: str) -> None:
    """Two honest hosts report these workunits; they are validated and taken in, and a version is made if it can be."""
    for name in names:
        for row in unsent(project)[name]:
            project.answer(row)
    project.transitioner.run_once()
    project.validator().one_pass()
    project.assimilator().one_pass()
    project.transitioner.run_once()


def open_names(project: TinyProject) -> list[str]:
    return [str(r["workunit_name"]) for r in project.rows(gt_microtask, state=str(MicrotaskState.ISSUED))]


def train(project: TinyProject) -> None:
    """To the end, with turns of the newest and the oldest open microtask, so that some results are late."""
    for turn in range(60):
        project.issue()
        waiting = open_names(project)
        if not waiting:
            return
        finish(project, waiting[-1 if turn % 3 else 0])
    raise AssertionError("the job does not end")


@pytest.mark.parametrize("name", FLOWS)
def test_a_flow_trains_and_its_ledger_replays_to_the_same_bytes(name: str) -> None:
    with tiny_project("diloco.toml", changes=FLOWS[name]) as project:
        train(project)
        assert project.job.state == JobState.FINISHED and project.job.current_version == 4
        found = project.version_digests()
        assert len(set(found)) == 5
        again = replay(project.db, project.job)
        assert [again[version] for version in range(5)] == found
        ages = {int(r["applied_version"]) - 1 - int(r["base_version"])
                for r in project.rows(gt_ledger, disposition=str(Disposition.APPLIED))}  # fmt: skip
        assert ages >= {0, 1}, "some were late"


def test_so_many_microtasks_are_out_at_a_time_each_over_the_newest_version(project: TinyProject) -> None:
    project.issue()
    tasks = project.rows(gt_microtask)
    assert [(t["version"], t["slot"]) for t in tasks] == [(0, 0), (0, 1), (0, 2)]
    project.issue()
    assert len(project.rows(gt_microtask)) == 3
    finish(project, tasks[1]["workunit_name"])
    project.issue()
    assert project.job.current_version == 0, "a version is made of two"
    finish(project, tasks[2]["workunit_name"])
    project.issue()
    assert project.job.current_version == 1
    placed = [(t["version"], t["slot"], t["state"]) for t in project.rows(gt_microtask)]
    assert placed == [(0, 0, "issued"), (0, 1, "folded"), (0, 2, "folded"), (0, 3, "issued"), (1, 4, "issued")]


def test_no_two_microtasks_of_a_flow_share_a_batch_whatever_their_version(project: TinyProject) -> None:
    seen: list[Any] = []
    for _ in range(3):
        project.issue()
        finish(project, *open_names(project)[:2])
    for task in project.rows(gt_microtask):
        made = project.microtask_of(str(task["workunit_name"]))
        assert made.first_step == task["slot"] * 5 and made.base_version == task["version"]
        seen.append((task["slot"], made.batches))
    assert [slot for slot, _ in seen] == list(range(len(seen)))
    firsts = [batches[0] for _, batches in seen[:3]]
    assert len({(b.shards, b.rows) for b in firsts}) == 3


def test_a_result_that_is_too_old_is_credited_and_not_applied(project: TinyProject) -> None:
    project.issue()
    late = open_names(project)[0]
    copies = unsent(project)[late]
    now = int(time.time())
    for row in copies:
        project.change(
            database.result, row["id"], server_state=int(ServerState.IN_PROGRESS), sent_time=now,
            report_deadline=now + 3600,
        )  # fmt: skip
    for _ in range(3):
        project.issue()
        finish(project, *[name for name in open_names(project) if name != late][:2])
    assert project.job.current_version == 3
    assert len(open_names(project)) == 4 - 2 or late in open_names(project)
    before = project.version_digests()
    for row in copies:
        project.answer(row)
    project.transitioner.run_once()
    project.validator().one_pass()
    project.assimilator().one_pass()
    (entry,) = project.rows(gt_ledger, workunit_name=late)
    assert entry["disposition"] == Disposition.TOO_OLD and entry["applied_version"] is None
    granted = [row["granted_credit"] for row in project.rows(database.result, workunitid=copies[0]["workunitid"])]
    assert all(credit > 0 for credit in granted)
    assert project.version_digests() == before


def test_what_waits_until_it_is_too_old_is_marked_when_the_next_version_is_made() -> None:
    config = exported("diloco.toml", FLOWS["buffered"])[0].config

    def entry(base: int, slot: int, time: float = 0.0) -> dict[str, Any]:
        return {"base_version": base, "slot": slot, "intake_time": time, "workunit_name": f"{base}.{slot}"}

    old, first, second, third = entry(1, 0), entry(4, 9, 1.0), entry(2, 1, 2.0), entry(4, 7, 3.0)
    chosen, late = flow_to_commit(config, 4, [old, third, second, first], 10.0)
    assert chosen == [second, first] and late == [old]
    chosen, late = flow_to_commit(config, 4, [old, first], 10.0)
    assert chosen is None and late == [old]


def test_with_a_grace_window_all_take_part_that_are_there_when_it_ends() -> None:
    config = exported("diloco.toml", flow("decoupled-diloco", keys="grace_s = 30"))[0].config
    entries = [{"base_version": 0, "slot": slot, "intake_time": 10.0 * slot, "workunit_name": str(slot)}
               for slot in range(4)]  # fmt: skip
    assert flow_to_commit(config, 0, entries[:1], 1e9)[0] is None, "two are needed"
    assert flow_to_commit(config, 0, entries[:2], 39.0)[0] is None, "the window is open"
    assert flow_to_commit(config, 0, entries, 40.0)[0] == entries


def test_a_task_nobody_has_begun_is_cancelled_when_it_has_become_too_old(project: TinyProject) -> None:
    project.issue()
    late = open_names(project)[0]
    for _ in range(3):
        project.issue()
        finish(project, *[name for name in open_names(project) if name != late][:2])
    project.issue()
    (task,) = project.rows(gt_microtask, workunit_name=late)
    assert task["state"] == MicrotaskState.CANCELLED and "applied" in task["note"]


def test_a_failed_microtask_of_a_flow_is_issued_again_over_the_newest_version(project: TinyProject) -> None:
    project.issue()
    names = open_names(project)
    with project.db.transaction() as connection:
        store.set_microtask(connection, names[0], MicrotaskState.FAILED, "errors")
    finish(project, *names[1:])
    project.issue()
    again = [(t["version"], t["slot"], t["attempt"]) for t in project.rows(gt_microtask) if t["slot"] == 0]
    assert again == [(0, 0, 0), (1, 0, 1)]
    first, second = (project.microtask_of(t["workunit_name"]) for t in project.rows(gt_microtask) if t["slot"] == 0)
    assert first.batches == second.batches


def task(slot: int, state: MicrotaskState, attempt: int = 0) -> dict[str, Any]:
    return {"slot": slot, "state": str(state), "attempt": attempt}


@pytest.mark.parametrize(
    ("tasks", "issues"),
    [
        ([], [Issue(9, 0), Issue(10, 0), Issue(11, 0)]),
        ([task(slot, MicrotaskState.ISSUED) for slot in range(3)], []),
        ([task(slot, MicrotaskState.ISSUED) for slot in range(5)], []),
        ([task(0, MicrotaskState.FAILED), task(1, MicrotaskState.ISSUED)], [Issue(0, 1), Issue(9, 0)]),
        ([task(0, MicrotaskState.FAILED, a) for a in range(3)], [Issue(9, 0), Issue(10, 0), Issue(11, 0)]),
        ([task(s, MicrotaskState.FAILED) for s in range(5)], [Issue(0, 1), Issue(1, 1), Issue(2, 1)]),
        ([task(0, MicrotaskState.CANCELLED), task(1, MicrotaskState.FOLDED)], [Issue(0, 1), Issue(9, 0), Issue(10, 0)]),
    ],
)
def test_what_a_flow_issues(tasks: list[Any], issues: list[Issue]) -> None:
    assert flow_to_issue(tasks, 9, 3) == issues


def test_a_rollback_drops_late_results_that_later_versions_had_taken(project: TinyProject) -> None:
    project.issue()
    old = open_names(project)[0]
    for _ in range(2):
        project.issue()
        finish(project, *[name for name in open_names(project) if name != old][-2:])
    project.issue()
    finish(project, old, next(name for name in open_names(project) if name != old))
    assert project.job.current_version == 3
    (entry,) = project.rows(gt_ledger, workunit_name=old)
    assert (entry["base_version"], entry["applied_version"]) == (0, 3)
    roll_back(project.tree, project.db, project.job.name, 2)
    (entry,) = project.rows(gt_ledger, workunit_name=old)
    assert entry["disposition"] == Disposition.DROPPED
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.RUNNING)
    project.issue()
    slot = project.rows(gt_microtask, workunit_name=old)[0]["slot"]
    assert [row["attempt"] for row in project.rows(gt_microtask, slot=slot)] == [0, 1], (
        "its samples are dealt out again"
    )
    finish(project, *open_names(project)[:2])
    assert project.job.current_version == 3
    assert replay(project.db, project.job)[3] == project.rows(gt_version, version=3)[0]["state_sha256"]


def test_old_versions_stay_as_long_as_late_results_need_them() -> None:
    changes = flow(
        "async", ("[workunit]", "[supply]\nkeep_versions = 3\n\n[workunit]"), ("max_versions = 4", "max_versions = 9")
    )
    with tiny_project("diloco.toml", changes=changes) as project:
        train(project)
        assert project.job.current_version == 9
        kept = sorted(version for version, path in project.job.folder.version_files() if path.name.startswith("state"))
        assert kept == [5, 6, 7, 8, 9], "three, and two more for results of age 2"
        again = replay(project.db, project.job)
        assert sorted(again) == [7, 8, 9] and list(again.values()) == project.version_digests()[7:]


def test_contributions_can_count_by_the_record_of_their_hosts() -> None:
    changes = flow("buffered", keys="host_weights = true")
    with tiny_project("diloco.toml", changes=changes) as project:
        train(project)
        weights = [row["weight"] for row in project.rows(gt_ledger) if row["disposition"] == Disposition.APPLIED]
        assert min(weights) >= 0.5 * 3**-0.5 and max(weights) < 1, "nobody has been here long"
        (version,) = project.rows(gt_version, version=4)
        assert replay(project.db, project.job)[4] == version["state_sha256"]
        records = {int(r["host_id"]): r for r in project.rows(gt_trust)}
        with project.db.read() as connection:
            entries = store.ledger_of_version(connection, project.job_id, 0)
            found = host_weights(connection, project.job.config, entries)
        expected = [member_weight(records[int(entry["hostid"])], time.time()) for entry in entries]
        assert found == pytest.approx(expected, rel=1e-3)


MISTAKES = {
    "key of another policy": ((("[schedule]", "[aggregation]\ngrace_s = 5\n[schedule]"),), "grace_s .* has no meaning"),
    "optimizer of async": ((('"diloco"', '"async"'),), r"takes no step of \[optimizer\]"),
    "versions gone too soon": (
        flow("buffered", ("[workunit]", "[supply]\nkeep_versions = 2\n\n[workunit]")), "keep_versions .* above max_age"
    ),
    "momentum out of step": (flow("delayed-nesterov", keys="momentum_every = 3"), "must be a multiple of"),
    "plain momentum": (
        flow("delayed-nesterov", ("lr = 0.7", "lr = 0.7\nnesterov = false")), "needs kind = .sgd., nesterov = true"
    ),
    "rule without a number": (flow("buffered", keys='rule = "krum"'), "needs byzantine"),
    "too many liars": (flow("buffered", keys='rule = "krum"\nbyzantine = 1'), "microtasks_per_version of at least 5"),
    "no inner optimizer": (
        (('"diloco"', '"async"'), *LOCAL, ('[inner_optimizer]\nkind = "adamw"\nlr = 0.02', "")), "lacks lr"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_wrong_aggregation_gets_one_sentence(name: str, tmp_path: Path) -> None:
    changes, says = MISTAKES[name]
    folder = Path(__file__).parents[1] / "data" / "tiny_job"
    text = (folder / "diloco.toml").read_text()
    for old, new in changes:
        text = text.replace(old, new)
    (tmp_path / "job.toml").write_text(text)
    (tmp_path / "tiny.py").write_text((folder / "tiny.py").read_text())
    with pytest.raises(JobError, match=says) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", POLICIES)
def test_the_configuration_of_every_policy_survives_its_storage(name: str, tmp_path: Path) -> None:
    changes = flow(name) if POLICIES[name].flow else (('policy = "diloco"', f'policy = "{name}"'),)
    if POLICIES[name].parts_by:
        changes = (*changes, ("[schedule]", "[aggregation]\nparts = 2\n[schedule]"))
    config = exported("job.toml")[0].config if name == "sync" else exported("diloco.toml", changes)[0].config
    assert type(config).from_json(config.canonical_json(), config.folder) == config
