"""The inner optimizer's state that travels with the version: through every station, and against lies about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apps.gradient.backends import open_backend
from apps.gradient.checkpoint import Checkpoint
from apps.gradient.runner import Run, load
from assimilator.policies.model_mixing import ModelMixing
from assimilator.replay import replay
from boinc_project import database, store
from boinc_project.cli.jobs import roll_back
from boinc_project.contract.errors import ContractError, InvalidResult
from boinc_project.contract.microtask import MICROTASK_FILE, Microtask, MicrotaskError, essentials
from boinc_project.contract.update import Update, family_of, read_update, write_update
from boinc_project.gt_tables import gt_microtask
from boinc_project.inner_state import bounded, largest_ratio, objection
from boinc_project.job_config import InnerOptimizerSection, JobError, load_config
from boinc_project.job_folder import file_sha256, sha256, state_bytes
from boinc_project.states import ValidateState
from tests.tiny_project import SHIPPED, TINY_JOB, TinyProject, exported, tiny_project
from tests.unit.assimilator.test_policies import contribution, round_of
from validator.agreement import distance
from validator.sanity import check_inner_state
from work_generator.publish import first_state

PLAIN = InnerOptimizerSection(lr=0.1)


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project("diloco.toml", changes=SHIPPED) as made:
        yield made


def moments(state: Any) -> dict[str, Any]:
    return {name: array for name, array in state.items() if name.startswith("optimizer/")}


def state_of(project: TinyProject, version: int) -> dict[str, Any]:
    return project.job.folder.read_state(version, project.version_digests()[version])


def test_the_first_version_s_state_is_zero_and_later_ones_are_the_mean_of_what_came_back(project: TinyProject) -> None:
    first = moments(state_of(project, 0))
    parameters = [name for name in state_of(project, 0) if name.startswith("parameter/")]
    assert len(first) == 2 * len(parameters) and not any(array.any() for array in first.values())
    units = project.validate_round()
    returned = []
    for unit in units:
        microtask = project.microtask_of(str(unit["name"]))
        assert microtask.inner_step == 0 and microtask.ships_state
        types = project.job.folder.update_types(microtask.mode, microtask.steps, True)
        data = project.honest_update(unit)
        update = read_update(data, types, microtask.codec, microtask.digest())
        returned.append((microtask.samples, update.tensors))
    project.assimilator().one_pass()
    assert project.job.current_version == 1
    found = moments(state_of(project, 1))
    for name, array in found.items():
        total = sum(samples for samples, _ in returned)
        mean = sum(samples * tensors[name].astype(float) for samples, tensors in returned) / total
        np.testing.assert_allclose(array, mean, rtol=1e-6, atol=1e-12)
        assert array.any()


def test_the_steps_are_counted_on_and_everything_replays_to_the_same_bytes(project: TinyProject) -> None:
    for _ in range(3):
        project.make_version()
    steps = project.job.config.train.local_steps
    found = {int(r["version"]): Microtask.from_json(str(r["document"]).encode()) for r in project.rows(gt_microtask)}
    assert [found[version].inner_step for version in range(3)] == [0, steps, 2 * steps]
    assert all(essentials(each.to_json()).ships_state for each in found.values())
    again = replay(project.db, project.job)
    assert [again[version] for version in range(4)] == project.version_digests()


def test_a_rollback_takes_the_state_back(project: TinyProject) -> None:
    for _ in range(2):
        project.make_version()
    before = project.version_digests()
    roll_back(project.tree, project.db, project.job.name, 1)
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, store.JobState.RUNNING)
    project.make_version()
    assert project.version_digests() == before


def test_versions_that_are_published_as_deltas_bring_the_state_whole() -> None:
    changes = (*SHIPPED, ("[workunit]", "[supply]\nkeyframe_every = 3\n\n[workunit]"))
    with tiny_project("diloco.toml", changes=changes) as project:
        for _ in range(4):
            project.make_version()
        assert all(array.any() for array in moments(state_of(project, 4)).values())
        again = replay(project.db, project.job)
        assert [again[version] for version in range(5)] == project.version_digests()


def test_local_steps_in_two_microtasks_are_those_of_one_torch_optimizer(tmp_path: Path) -> None:
    """One host, outer rate 1: the state that goes down, comes back and goes down again is that of AdamW."""
    outer = "lr = 1.0\nmomentum = 0.0\nnesterov = false"
    changes = (
        *SHIPPED,
        ("microtasks_per_version = 2", "microtasks_per_version = 1"),
        ("lr = 0.7\nmomentum = 0.9", outer),
    )
    with tiny_project("diloco.toml", changes=changes) as project:
        for _ in range(3):
            project.make_version()
        config = project.job.config
        assert config.inner_optimizer is not None
        tasks = [Microtask.from_json(str(r["document"]).encode()) for r in project.rows(gt_microtask)][:3]
        state, graph = state_of(project, 0), project.job.folder.gradient_graph
        weights = {n[10:]: torch.nn.Parameter(torch.tensor(a)) for n, a in state.items() if n.startswith("parameter/")}
        section = config.inner_optimizer
        optimizer = torch.optim.AdamW(
            weights.values(), lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
        )
        program = open_backend("numpy", 1).program(graph)
        for task in tasks:
            folder = tmp_path / str(task.base_version)
            folder.mkdir()
            (folder / MICROTASK_FILE).write_bytes(task.to_json())
            loaded = load(lambda name, task=task, folder=folder: _place(project, folder, task, name))
            run = Run(loaded, open_backend("numpy", 1))
            for index, batch in enumerate(task.batches):
                given = {**{f"parameter/{n}": p.detach().numpy() for n, p in weights.items()}, **loaded.constants}
                given.update({n: a for n, a in loaded.state.items() if n.startswith("buffer/")}, **run._batch(batch))
                given.update(seed=np.array(task.seed), step=np.array(task.first_step + index))
                found = program.run({each.name: given[each.name] for each in graph.inputs})
                for name, parameter in weights.items():
                    parameter.grad = torch.tensor(found[f"gradient/{name}"] / found["metric/weight"])
                for group in optimizer.param_groups:
                    group["lr"] = task.learning_rates[index]
                if section.max_norm:
                    torch.nn.utils.clip_grad_norm_(weights.values(), section.max_norm)
                optimizer.step()
        last = state_of(project, 3)
        for name, parameter in weights.items():
            np.testing.assert_allclose(last[f"parameter/{name}"], parameter.detach(), rtol=2e-4, atol=2e-5)
            kept = optimizer.state[parameter]
            np.testing.assert_allclose(last[f"optimizer/{name}.exp_avg"], kept["exp_avg"], rtol=2e-3, atol=1e-6)
            np.testing.assert_allclose(last[f"optimizer/{name}.exp_avg_sq"], kept["exp_avg_sq"], rtol=2e-3, atol=1e-8)


def _place(project: TinyProject, folder: Path, task: Microtask, name: str) -> Path:
    if name == MICROTASK_FILE:
        return folder / name
    kept = project.job.folder
    places = [*(kept.path / "graphs").iterdir(), *(kept.path / "shards").iterdir(), *(kept.path / "versions").iterdir()]
    return next(path for path in places if file_sha256(path) == task.files[name].sha256)


@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_backends_go_on_from_the_same_state_and_a_checkpoint_holds_it(
    project: TinyProject, backend: str, tmp_path: Path
) -> None:
    project.make_version()
    project.issue()
    task = Microtask.from_json(str(project.rows(gt_microtask, version=1)[0]["document"]).encode())
    (tmp_path / MICROTASK_FILE).write_bytes(task.to_json())
    loaded = load(lambda name: _place(project, tmp_path, task, name))
    assert loaded.microtask.inner_step == task.steps
    runs = [Run(loaded, open_backend(name, 1)) for name in (backend, "numpy")]
    for run in runs:
        run.step()
    kept = runs[0].progress()
    for run in runs:
        while not run.done:
            run.step()
    update, reference = runs[0].update(), runs[1].update()
    assert set(update) == set(project.job.folder.update_types(task.mode, task.steps, True))
    assert distance(update, reference) < 1e-4
    again = Run(loaded, open_backend(backend, 1))
    again.restore(Checkpoint(kept.step, kept.tensors))
    while not again.done:
        again.step()
    assert all(np.array_equal(array, update[name]) for name, array in again.update().items())


def test_a_state_that_lacks_what_was_promised_is_not_run(project: TinyProject, tmp_path: Path) -> None:
    project.issue()
    task = Microtask.from_json(str(project.rows(gt_microtask)[0]["document"]).encode())
    plain = dataclasses.replace(task, inner_step=None)
    assert "inner_step" not in plain.to_json().decode() and plain.digest() != task.digest()
    with pytest.raises(MicrotaskError, match="no inner optimizer"):
        Microtask.from_json(task.to_json().replace(b'"local-steps"', b'"gradient"'))
    reset = exported("diloco.toml")[1]
    assert not moments(reset.state)
    data = state_bytes(reset.state)
    (tmp_path / "state").write_bytes(data)
    files = {**task.files, "state.safetensors": dataclasses.replace(task.files["state.safetensors"],
             sha256=sha256(data), size=len(data))}  # fmt: skip
    broken = dataclasses.replace(task, files=files)
    (tmp_path / MICROTASK_FILE).write_bytes(broken.to_json())
    with pytest.raises(ContractError, match="lacks 'optimizer/"):
        load(lambda name: tmp_path / "state" if name == "state.safetensors" else _place(project, tmp_path, task, name))


def lie(project: TinyProject, change: Any) -> int:
    """Both copies of a workunit tell the same lie; the validate state of one of them."""
    results = project.issue()
    unit = project.unit_of(results[0])
    for row in results:
        if row["workunitid"] == unit["id"]:
            project.answer(row, _changed(project, unit, change))
    project.transitioner.run_once()
    project.validator().one_pass()
    return int(project.rows(database.result, workunitid=unit["id"])[0]["validate_state"])


def _changed(project: TinyProject, unit: Any, change: Any) -> bytes:
    microtask = project.microtask_of(str(unit["name"]))
    types = project.job.folder.update_types(microtask.mode, microtask.steps, True)
    update = read_update(project.honest_update(unit), types, microtask.codec, microtask.digest())
    tensors = {name: change(name, np.array(array)) for name, array in update.tensors.items()}
    return write_update(tensors, types, update.metadata, microtask.codec)


def _negative(name: str, array: Any) -> Any:
    return -array if name.endswith(".exp_avg_sq") else array


def _vanishing(name: str, array: Any) -> Any:
    return np.float32(1e-6) * array if name.endswith(".exp_avg_sq") else array


@pytest.mark.parametrize("change", [_negative, _vanishing])
def test_colluding_hosts_cannot_return_a_state_that_no_gradients_make(project: TinyProject, change: Any) -> None:
    assert lie(project, lambda name, array: array) == ValidateState.VALID
    assert lie(project, change) == ValidateState.INVALID


def test_copies_whose_states_part_do_not_agree() -> None:
    honest = {"delta/w": np.ones(50, np.float32), "optimizer/w.exp_avg": np.full(50, 1.0, np.float32),
              "optimizer/w.exp_avg_sq": np.full(50, 1e-6, np.float32)}  # fmt: skip
    other = {**honest, "optimizer/w.exp_avg_sq": np.full(50, 1.1e-6, np.float32)}
    assert distance(honest, other) > 0.04, "the first moment does not hide the second"
    assert family_of("optimizer/w.exp_avg_sq") != family_of("optimizer/w.exp_avg")
    assert family_of("delta/a.b") == "delta"


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9), (0.95, 0.95)])
def test_no_gradients_break_the_bound_and_means_keep_it(betas: tuple[float, float]) -> None:
    section = dataclasses.replace(PLAIN, betas=betas)
    draws = np.random.default_rng(1)
    m, v = np.zeros((3, 400)), np.zeros((3, 400))
    for step in range(300):
        g = draws.standard_normal((3, 400)) * np.exp(3 * draws.standard_normal((3, 400)))
        g[0] = (betas[0] / betas[1]) ** (299 - step)  # the worst case: in proportion to the weights
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g**2
    for mean, square in [*zip(m, v, strict=True), (m.mean(0), v.mean(0))]:
        state = {"optimizer/w.exp_avg": mean.astype(np.float32), "optimizer/w.exp_avg_sq": square.astype(np.float32)}
        assert objection(state, section) == ""
        kept = bounded(state, section)
        np.testing.assert_allclose(kept["optimizer/w.exp_avg"], state["optimizer/w.exp_avg"], rtol=1e-5)
    assert np.abs(m[0]).max() > 0.9 * largest_ratio(betas) * np.sqrt(v[0]).max(), "it is tight"
    assert largest_ratio((0.99, 0.9)) == np.inf


def test_what_a_rule_makes_is_brought_back_within_the_bounds() -> None:
    state = {"optimizer/w.exp_avg": np.float32([5, -5, 0.1]), "optimizer/w.exp_avg_sq": np.float32([1e-4, 1e-4, 9.0]),
             "parameter/w": np.float32([1, 2, 3])}  # fmt: skip
    section = dataclasses.replace(PLAIN, max_norm=2.0)
    kept = bounded(state, section)
    assert objection(state, section) and not objection(kept, section)
    np.testing.assert_allclose(kept["optimizer/w.exp_avg"], [0.0727, -0.0727, 0.1], rtol=1e-2)
    np.testing.assert_allclose(kept["optimizer/w.exp_avg_sq"], [1e-4, 1e-4, 4.0], rtol=1e-6)
    assert np.array_equal(kept["parameter/w"], state["parameter/w"])
    assert bounded(kept, section)["optimizer/w.exp_avg"].tobytes() == kept["optimizer/w.exp_avg"].tobytes()


@pytest.mark.parametrize(
    ("mean", "square", "max_norm", "words"),
    [(0.0, -1e-9, 0.0, "negative"), (0.1, 1e-6, 0.0, "times the root"), (0.0, 4.1, 2.0, "max_norm")],
)
def test_an_impossible_state_is_named(mean: float, square: float, max_norm: float, words: str) -> None:
    tensors = {"optimizer/w.exp_avg": np.float32([mean]), "optimizer/w.exp_avg_sq": np.float32([square])}
    with pytest.raises(InvalidResult, match=words):
        check_inner_state(Update(tensors, {}), dataclasses.replace(PLAIN, max_norm=max_norm))
    check_inner_state(Update(tensors, {}), None)
    check_inner_state(Update({"optimizer/w.momentum_buffer": np.float32([9])}, {}), PLAIN)


def test_model_mixing_mixes_the_state_like_the_model() -> None:
    given = {"delta/w": np.zeros((3, 4), np.float32), "delta/b": np.zeros(5, np.float32),
             "optimizer/w.exp_avg": np.full((3, 4), 2, np.float32)}  # fmt: skip
    made = round_of([contribution(0, 7, given)])
    state, optimizer = made.load()
    state["optimizer/w.exp_avg"] = np.ones((3, 4), np.float32)
    mixed = ModelMixing(0.25).advance(dataclasses.replace(made, load=lambda: (state, optimizer)))
    np.testing.assert_allclose(mixed.state["optimizer/w.exp_avg"], 1.25)


def test_reset_is_the_default_and_changes_no_byte_of_a_microtask() -> None:
    job, made = exported("diloco.toml")
    assert not job.config.ships_state and job.config.inner_step(5) is None
    assert set(first_state(job.config, made)) == set(made.state)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([('kind = "adamw"', 'kind = "sgd"')], "needs an optimizer that has a state"),
        ([('policy = "diloco"', 'policy = "streaming-diloco"')], "does not go with policy"),
        ([('state = "shipped"', 'state = "kept"')], "must be one of reset, shipped"),
        ([("[train]", "[trust]\nadaptive_replication = true\n\n[train]")], "needs max_norm"),
    ],
)
def test_wrong_settings_get_one_sentence(changes: list[tuple[str, str]], words: str, tmp_path: Path) -> None:
    text = (TINY_JOB / "diloco.toml").read_text().replace(*SHIPPED[0])
    head, _, rest = text.partition("[inner_optimizer]")
    for old, new in changes:
        if old.startswith("kind") and old not in rest:
            rest = f"\n{new}{rest}"
        else:
            head, rest = head.replace(old, new), rest.replace(old, new)
    (tmp_path / "job.toml").write_text(f"{head}[inner_optimizer]{rest}")
    (tmp_path / "tiny.py").write_text("")
    with pytest.raises(JobError) as caught:
        load_config(tmp_path)
    assert words in str(caught.value)
