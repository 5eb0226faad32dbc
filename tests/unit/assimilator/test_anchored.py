"""The policy `anchored`: its formula in float64, degenerate cases, and anchors through crash, rollback and replay."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sqlalchemy as sa

from assimilator import anchors as anchors_module
from assimilator.anchors import Anchors, anchor_seed
from assimilator.apply import anchor_to_use
from assimilator.exact import product
from assimilator.optimizers import Sgd
from assimilator.policies.anchored import Anchored, _factors, attenuated, factors
from assimilator.policies.policy import Anchor, OuterStep
from assimilator.replay import replay
from boinc_project.cli.jobs import roll_back
from boinc_project.gt_tables import JobState, MicrotaskState, gt_microtask, gt_round, gt_version
from boinc_project.job_config import JobError, load_config
from boinc_project.local_run import LocalRunFailed
from boinc_project.simulator.computing import Evaluation
from tests.tiny_project import TinyProject, exported, tiny_project
from tests.unit.assimilator.test_policies import STATES, contribution, deltas, round_of

STEP = OuterStep(Sgd(), lambda version: 0.5)
KEYS = "[aggregation]\nin_flight = 3\nmax_age = 2\nanchor_every = 2\nanchor_max_age = 3\n{keys}\n[schedule]"
LOCAL_STEPS = (('policy = "diloco"', 'policy = "anchored"'), ("[schedule]", KEYS.format(keys="anchor_strength = 0.9")))
GRADIENTS = (('policy = "sync"', 'policy = "anchored"'), ("[schedule]", KEYS.format(keys="anchor_batches = 5")))
JOBS = {"gradients": ("job.toml", GRADIENTS), "local steps": ("diloco.toml", LOCAL_STEPS)}


def reference(g: np.ndarray[Any, Any], a: np.ndarray[Any, Any], strength: float, floor: float) -> Any:
    """The formula of the docstring, entry by entry."""
    u, s, vt = np.linalg.svd(a.astype(float), full_matrices=False)
    gains = s**2 / (s**2 + floor * np.mean(s**2))
    c = u.T @ g.astype(float) @ vt.T
    for i, j in np.ndindex(*c.shape):
        c[i, j] *= np.sqrt(gains[i] * gains[j])
    return (1 - strength) * g + strength * u @ c @ vt


def matrix(seed: int, rows: int, columns: int, rank: int | None = None) -> Any:
    draws = np.random.default_rng(seed)
    if rank is None:
        return draws.standard_normal((rows, columns)).astype(np.float32)
    return (draws.standard_normal((rows, rank)) @ draws.standard_normal((rank, columns))).astype(np.float32)


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (3, 8), (40, 7), (2, 3000)])
@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e20])
def test_directions_count_by_the_support_of_the_anchor(rows: int, columns: int, scale: float) -> None:
    g, a = matrix(1, rows, columns), np.float32(scale) * matrix(2, rows, columns)
    kept = _factors({"w": a}, ())
    found = attenuated(g, kept["left/w"], kept["values/w"], kept["right/w"], 0.7, 0.1)
    np.testing.assert_allclose(found, reference(g, matrix(2, rows, columns), 0.7, 0.1), rtol=1e-4, atol=1e-5)


def test_a_matrix_and_its_transpose_are_treated_alike() -> None:
    g, a = matrix(1, 6, 4), matrix(2, 6, 4)
    one, other = _factors({"w": a}, ()), _factors({"w": a.T.copy()}, ())
    found = attenuated(g, one["left/w"], one["values/w"], one["right/w"], 0.8, 0.3)
    turned = attenuated(g.T.copy(), other["left/w"], other["values/w"], other["right/w"], 0.8, 0.3)
    np.testing.assert_allclose(found, turned.T, rtol=1e-4, atol=1e-6)


def test_what_the_anchor_does_not_support_is_taken_out_and_what_it_does_stays() -> None:
    a = matrix(3, 20, 12, rank=2)
    honest = a + 0.01 * matrix(4, 20, 12)
    hostile = matrix(5, 20, 12)
    hostile *= np.linalg.norm(honest) / np.linalg.norm(hostile)
    kept = _factors({"w": a}, ())

    def after(g: Any) -> Any:
        return attenuated(g, kept["left/w"], kept["values/w"], kept["right/w"], 1.0, 0.01)

    assert np.linalg.norm(after(honest) - honest) < 0.1 * np.linalg.norm(honest)
    assert np.linalg.norm(after(hostile)) < 0.3 * np.linalg.norm(hostile)


def test_products_are_the_same_in_every_order_of_summation() -> None:
    a, b = matrix(1, 7, 5000).astype(float), matrix(2, 5000, 3).astype(float)
    found = product(a, b)
    np.testing.assert_allclose(found, a @ b, rtol=1e-4, atol=1e-3)
    for start in range(0, 5000, 2048):  # of a part the sum is exact: no order changes it
        order = np.arange(start, min(start + 2048, 5000))[::-1]
        part = product(a[:, order], b[order])
        assert np.array_equal(part, product(a[:, order[::-1]], b[order[::-1]]))
    assert not product(np.zeros((2, 3)), np.zeros((3, 2))).any()


def test_no_factors_are_kept_of_vectors_single_rows_embeddings_and_zeros() -> None:
    tensors = {
        "vector": matrix(1, 5, 1)[:, 0], "scalar": np.float32(1), "row": matrix(1, 1, 5), "column": matrix(1, 5, 1),
        "zero": np.zeros((3, 3), np.float32), "table": matrix(1, 9, 4), "kernel": matrix(1, 8, 27).reshape(8, 3, 3, 3),
    }  # fmt: skip
    assert {name.partition("/")[2] for name in _factors(tensors, {"table"})} == {"kernel"}


def anchor(version: int = 5, seed: int = 9) -> Anchor:
    kept = _factors({"w": matrix(seed, 3, 4)}, ())
    return Anchor(version, lambda: kept)


def test_it_is_fedbuff_s_step_over_the_attenuated_matrices() -> None:
    arrived = [contribution(slot, 7, deltas(slot), age_weight=0.5) for slot in range(3)]
    made = Anchored(STEP, 0.6, 0.2).advance(dataclasses.replace(round_of(arrived), anchor=anchor()))
    mean = {name: sum(0.5 * deltas(slot)[f"delta/{name}"].astype(float) for slot in range(3)) / 3 for name in "wb"}
    expected = {"w": reference(mean["w"], matrix(9, 3, 4), 0.6, 0.2), "b": mean["b"]}
    for name, g in expected.items():
        moved = STATES[7][f"parameter/{name}"] - 0.5 * g
        np.testing.assert_allclose(made.state[f"parameter/{name}"], moved, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["no anchor", "no strength"])
def test_without_an_anchor_it_is_buffered(how: str) -> None:
    arrived = [contribution(slot, 7, deltas(slot)) for slot in range(3)]
    policy = Anchored(STEP, 0.0 if how == "no strength" else 0.5, 0.1)
    made = policy.advance(dataclasses.replace(round_of(arrived), anchor=None if how == "no anchor" else anchor()))
    plain = STEP.advance(round_of(arrived))
    assert all(np.array_equal(array, plain.state[name]) for name, array in made.state.items())


def test_the_order_of_arrival_changes_no_bit() -> None:
    arrived = [contribution(slot, base, deltas(slot), 3 + slot) for slot, base in ((0, 7), (1, 5), (0, 4))]
    results = set()
    for order in itertools.permutations(arrived):
        made = Anchored(STEP, 0.6, 0.2).advance(dataclasses.replace(round_of(order), anchor=anchor()))
        results.add(b"".join(array.tobytes() for _, array in sorted(made.state.items())))
    assert len(results) == 1


def test_an_anchor_that_is_too_old_or_not_there_corrects_nothing() -> None:
    job, _ = exported(*JOBS["gradients"])
    assert [anchor_to_use(job.config, version, 4) for version in (4, 5, 7, 8)] == [4, 4, 4, -1]
    assert anchor_to_use(job.config, 0, -1) == -1
    assert anchor_to_use(exported()[0].config, 4, 4) == -1, "of another policy"


@pytest.fixture(params=JOBS)
def project(request: pytest.FixtureRequest) -> Iterator[TinyProject]:
    toml, changes = JOBS[request.param]
    with tiny_project(toml, changes=changes) as made:
        yield made


def train(project: TinyProject, anchors: Anchors, until: int = 4, turns: int = 60) -> None:
    """To a version, newest and oldest open microtasks in turns."""
    assimilator = project.assimilator()
    assimilator.anchors = anchors
    for turn in range(turns):
        if project.job.current_version == until:
            return
        project.issue()
        names = [str(r["workunit_name"]) for r in project.rows(gt_microtask, state=str(MicrotaskState.ISSUED))]
        name = names[-1 if turn % 3 else 0]
        for row in project.issue():
            if project.unit_of(row)["name"] == name:
                project.answer(row)
        project.transitioner.run_once()
        project.validator().one_pass()
        assimilator.one_pass()
        project.transitioner.run_once()
    raise AssertionError("it does not get there")


def used(project: TinyProject) -> list[int]:
    """Of each version the one whose anchor corrected the step to it."""
    return [int(row["anchor_version"]) for row in project.rows(gt_round)]


def test_versions_name_the_anchor_that_corrected_them_and_replay_to_the_same_bytes(project: TinyProject) -> None:
    train(project, Anchors(project.db, Evaluation))
    found = used(project)
    assert len(found) == 4 and max(found) >= 2, found
    assert all(version < number for number, version in enumerate(found, 1)), "it lags"
    assert [replay(project.db, project.job)[version] for version in range(5)] == project.version_digests()
    assert {version for version, _ in project.job.folder.anchor_files()} >= {v for v in found if v >= 0}


def test_an_anchor_changes_the_weights(project: TinyProject) -> None:
    train(project, Anchors(project.db, Evaluation))
    toml, changes = JOBS["gradients" if project.job.config.inner_optimizer is None else "local steps"]
    with tiny_project(toml, changes=changes) as other:
        none = Anchors(other.db, Evaluation)
        none._due = lambda job: None  # type: ignore[method-assign]
        train(other, none)
        assert used(other) == [-1] * 4
        assert other.version_digests() != project.version_digests()


def test_a_crash_after_the_round_was_committed_uses_the_anchor_that_it_names(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Meanwhile a newer anchor is finished; the version is the same as without the crash."""
    train(project, Anchors(project.db, Evaluation), until=2)
    with monkeypatch.context() as patched:
        patched.setattr("assimilator.apply.compute", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(project, Anchors(project.db, Evaluation), until=3)
    assert project.job.current_version == 2
    chosen = used(project)[2]
    later = Anchors(project.db, Evaluation)
    later.poll([project.job])
    later.poll([project.job])
    train(project, Anchors(project.db, Evaluation), until=3)
    assert used(project)[2] == chosen
    assert replay(project.db, project.job)[3] == project.version_digests()[3]


def set_first(project: TinyProject, **values: str) -> None:
    """Write over columns of version 0."""
    with project.db.transaction() as connection:
        connection.execute(sa.update(gt_version).where(gt_version.c.version == 0).values(**values))


def test_an_anchor_computed_again_has_the_same_bytes(project: TinyProject) -> None:
    names = set()
    for _ in range(2):
        made = Anchors(project.db, Evaluation)
        assert made.poll([project.job]) and made.poll([project.job])
        set_first(project, anchor_sha256="")
        names |= {path.name for _, path in project.job.folder.anchor_files()}
    assert len(names) == 1


def test_an_anchor_is_due_every_so_many_versions_and_not_of_other_jobs(project: TinyProject) -> None:
    made = Anchors(project.db, Evaluation)
    assert made.poll([project.job])
    assert made.poll([project.job]) and not made.poll([project.job]), "version 0 has one"
    job = dataclasses.replace(project.job, current_version=1)
    assert not made.poll([job])
    assert not made.poll([dataclasses.replace(project.job, state=JobState.FINISHED, current_version=4)])


def test_a_rollback_takes_the_anchors_of_later_versions_along(project: TinyProject) -> None:
    train(project, Anchors(project.db, Evaluation))
    before = project.version_digests()
    roll_back(project.tree, project.db, project.job.name, 1)
    assert all(version <= 1 for version, _ in project.job.folder.anchor_files())
    assert [row["anchor_sha256"] != "" for row in project.versions()] == [True, False]
    assert project.version_digests() == before[:2]


def test_what_a_rollback_made_meaningless_is_not_recorded(project: TinyProject) -> None:
    made = Anchors(project.db, Evaluation)
    assert made.poll([project.job]) and made.busy
    set_first(project, state_sha256="0" * 64)
    made.poll([project.job])
    assert [row["anchor_sha256"] for row in project.versions()] == [""]


def test_a_run_that_fails_is_not_tried_again_at_that_version(
    project: TinyProject, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*arguments: Any) -> Any:
        raise LocalRunFailed("no memory")

    monkeypatch.setattr(Evaluation, "update", fails)
    made = Anchors(project.db, Evaluation)
    assert made.poll([project.job]) and made.poll([project.job]) and not made.poll([project.job])
    assert "anchor of version 0 failed: no memory" in caplog.text


def test_its_batches_are_nobody_s() -> None:
    assert anchor_seed(1) != anchor_seed(2)
    assert 0 <= anchor_seed(2**63 - 1) < 2**56


def test_old_anchors_are_deleted_when_no_round_that_is_kept_can_need_them(tmp_path: Path) -> None:
    toml, changes = JOBS["gradients"]
    more = (("max_versions = 4", "max_versions = 20"), ("[workunit]", "[supply]\nkeep_versions = 4\n\n[workunit]"))
    with tiny_project(toml, changes=(*changes, *more)) as project:
        train(project, Anchors(project.db, Evaluation), until=12, turns=100)
        there = {version for version, _ in project.job.folder.anchor_files()}
        oldest = min(int(path[0]) for path in project.job.folder.version_files())
        assert oldest - 3 <= min(there) and max(there) >= 10
        again: Mapping[int, str] = replay(project.db, project.job)
        assert all(digest == project.version_digests()[version] for version, digest in again.items())


def test_the_embeddings_of_the_graph_are_left_alone() -> None:
    graph = exported()[1].gradient
    gradients = {i.name.partition("/")[2]: matrix(1, *i.shape) if len(i.shape) == 2 else np.ones(i.shape, np.float32)
                 for i in graph.inputs_of_kind("parameter")}  # fmt: skip
    assert factors(gradients, graph).keys() == _factors(gradients, ()).keys()
    assert anchors_module.factors is factors


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("anchor_max_age = 3", "anchor_max_age = 1", "anchor_max_age in [aggregation] must be at least anchor_every"),
        ('policy = "anchored"', 'policy = "buffered"', "has no meaning for policy"),
        ("anchor_every = 2", "anchor_floor = 0", "anchor_floor"),
    ],
)
def test_wrong_keys_get_one_sentence(old: str, new: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "tiny.py").write_text("")
    text = (Path(__file__).parents[2] / "data" / "tiny_job" / "job.toml").read_text()
    for before, after in (*GRADIENTS, (old, new)):
        text = text.replace(before, after)
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(JobError) as caught:
        load_config(tmp_path)
    assert words in str(caught.value)
