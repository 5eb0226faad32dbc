"""Adapter jobs (LoRA): what is frozen travels once, what is trained in every version; the weights come out whole."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from safetensors.numpy import load_file

from assimilator.replay import replay
from boinc_project import database
from boinc_project.contract.microtask import CONSTANTS_FILE, STATE_FILE
from boinc_project.gt_tables import gt_file, gt_microtask
from tests.tiny_project import Changes, TinyProject, exported, tiny_project

ADAPTERS: Changes = (("tiny:model", "tiny:adapted"),)


@pytest.fixture(params=["job.toml", "diloco.toml"])
def project(request: pytest.FixtureRequest) -> Iterator[TinyProject]:
    with tiny_project(request.param, changes=ADAPTERS) as made:
        yield made


def test_only_adapters_are_state_and_in_the_updates(project: TinyProject) -> None:
    project.make_version()
    state = project.job.folder.read_state(1, project.version_digests()[1])
    assert sorted(state) == [f"parameter/{i}.{m}.weight" for i in (0, 2) for m in ("down", "up")]
    types = project.job.folder.update_types(project.job.config.mode, project.job.config.steps)
    moved = [name for name in types if name.startswith(("gradient/", "delta/"))]
    assert len(moved) == 4 and project.job.facts.constants is not None


def test_frozen_weights_are_one_file_for_all_versions_and_stay_with_the_hosts(project: TinyProject) -> None:
    project.make_version()
    project.make_version()
    tasks = [project.microtask_of(str(task["workunit_name"])) for task in project.rows(gt_microtask)]
    assert len({task.files[STATE_FILE].sha256 for task in tasks}) == 2
    assert len({task.files[CONSTANTS_FILE].sha256 for task in tasks}) == 1
    (frozen,) = project.rows(gt_file, kind="constants")
    for unit in project.rows(database.workunit):
        (info,) = [
            each for each in str(unit["xml_doc"]).split("<file_info>") if frozen["name"] in each.split("</name>")[0]
        ]
        assert "<sticky/>" in info.split("</file_info>")[0]


def test_adapters_learn_and_the_whole_model_comes_out(project: TinyProject) -> None:
    for _ in range(3):
        project.make_version()
    assert list(replay(project.db, project.job).values()) == project.version_digests()
    losses = [version["loss"] for version in project.versions() if version["loss"] is not None]
    assert losses[-1] < losses[0]
    names = project.job.facts.state_dict
    whole = exported("job.toml", ADAPTERS)[0].model.state_dict()
    assert set(names) == set(whole)
    constants = load_file(project.job.folder.constants_path)
    for name in ("0.base.weight", "2.base.bias"):
        np.testing.assert_array_equal(constants[names[name]], whole[name].numpy())
