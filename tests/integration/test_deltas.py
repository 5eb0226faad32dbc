"""Versions that are published as deltas: the same bytes on both sides, replayed, rolled back, retired, fetched once."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from apps.gradient.runner import load
from assimilator.downlink import OWN
from assimilator.replay import replay
from boinc_project import database, store
from boinc_project.cli.jobs import roll_back
from boinc_project.contract import tensorfile
from boinc_project.contract.microtask import is_state
from boinc_project.gt_tables import FileState, JobState, gt_file
from boinc_project.scripted_volunteer import ScriptedVolunteer
from boinc_project.states import ServerState
from boinc_project.supply_limits import download_advice
from tests.tiny_project import TinyProject, tiny_project
from tests.training import train

on_each_database = pytest.mark.usefixtures("each_database")


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project("deltas.toml") as made:
        yield made


def inputs(unit: dict[str, Any]) -> dict[str, str]:
    """Open name -> physical name of a workunit's inputs."""
    pairs = re.findall(r"<file_name>(.*?)</file_name>\s*<open_name>(.*?)</open_name>", str(unit["xml_doc"]))
    return {open_name: name for name, open_name in pairs}


def version_row(project: TinyProject, version: int) -> Any:
    with project.db.read() as connection:
        return store.version_row(connection, project.job_id, version)


def own_weights(project: TinyProject, version: int) -> dict[str, Any]:
    kept = project.job.folder.read_optimizer(version, str(version_row(project, version)["optimizer_sha256"]))
    return {name[len(OWN) :]: array for name, array in kept.items() if name.startswith(OWN)}


def published_states(project: TinyProject) -> list[tuple[int, str]]:
    rows = project.rows(gt_file, state=str(FileState.PUBLISHED))
    return sorted((row["version"], row["kind"]) for row in rows if row["kind"] in ("state", "delta"))


def test_a_volunteer_decodes_each_version_to_the_server_s_own_bytes(project: TinyProject) -> None:
    kinds = []
    for version in range(5):
        result = project.issue()[0]
        names = inputs(project.unit_of(result))
        loaded = load(lambda name, names=names: project.tree.download_path(names[name]))  # type: ignore[misc]
        state = project.job.folder.read_state(version, str(version_row(project, version)["state_sha256"]))
        assert {name: a.tobytes() for name, a in loaded.state.items()} == {n: a.tobytes() for n, a in state.items()}
        kinds.append(sorted(name for name in names if is_state(name)))
        project.make_version()
    whole, first, second = "state.safetensors", "delta_0.safetensors", "delta_1.safetensors"
    assert kinds == [[whole], [first, whole], [first, second, whole], [whole], [first, whole]]


def test_rounding_stays_with_the_server_and_does_not_add_up(project: TinyProject) -> None:
    with tiny_project("job.toml") as plain:  # the same but for its name and keyframes
        plain.make_version()
        first = plain.job.folder.read_state(1, plain.version_digests()[1])
    with tiny_project("deltas.toml") as project:
        for version in range(1, 5):
            project.make_version()
            published = project.job.folder.read_state(version, str(version_row(project, version)["state_sha256"]))
            own = own_weights(project, version)
            assert bool(own) == (version != 3), "at a keyframe the published weights are the server's own"
            for row in project.rows(gt_file, version=version, kind="delta"):
                delta = tensorfile.read(project.tree.download_path(row["name"])).tensors
                for name, array in own.items():
                    half = 0.5 * np.repeat(delta[f"{name}#scales"], 256)[: array.size].reshape(array.shape)
                    assert (np.abs(array - published[name]) <= half * 1.001 + 1e-7).all()
            if version == 1:
                assert {n: a.tobytes() for n, a in own.items()} == {n: a.tobytes() for n, a in first.items()}


def test_the_ledger_is_replayed_to_the_same_bytes_also_from_a_version_that_is_a_delta(project: TinyProject) -> None:
    for _ in range(5):
        project.make_version()
    digests = project.version_digests()
    assert list(replay(project.db, project.job).values()) == digests
    for version, path in project.job.folder.version_files():
        if version < 1:
            path.unlink()
    assert replay(project.db, project.job) == dict(enumerate(digests[1:], 1))


@on_each_database
def test_a_job_goes_on_from_a_delta_to_which_it_was_taken_back(project: TinyProject) -> None:
    for _ in range(4):
        project.make_version()
    digests = project.version_digests()
    roll_back(project.tree, project.db, project.job.name, 1)
    with project.db.transaction() as connection:
        store.set_job_state(connection, project.job_id, JobState.RUNNING, "")
        store.begin_afresh(connection, project.job)
    for _ in range(3):
        project.make_version()
    assert project.version_digests() == digests, "the same rounds over the same bytes"
    assert list(replay(project.db, project.job).values()) == digests


@on_each_database
def test_a_keyframe_and_its_deltas_stay_until_the_next_keyframe(project: TinyProject) -> None:
    seen = []
    for _ in range(4):
        project.make_version()
        project.generator()._take_back(project.job)
        seen.append(published_states(project))
    assert seen == [
        [(0, "state"), (1, "delta")],
        [(0, "state"), (1, "delta"), (2, "delta")],
        [(3, "state")],
        [(3, "state"), (4, "delta")],
    ]


@on_each_database
def test_a_workunit_in_progress_keeps_all_files_that_it_lists(project: TinyProject) -> None:
    project.make_version()
    project.make_version()
    late = project.issue()[0]
    needed = {name for open_name, name in inputs(project.unit_of(late)).items() if is_state(open_name)}
    assert len(needed) == 3
    project.make_version()
    project.change(database.result, int(late["id"]), server_state=int(ServerState.IN_PROGRESS))
    project.generator()._take_back(project.job)
    assert needed <= {row["name"] for row in project.rows(gt_file, state=str(FileState.PUBLISHED))}
    assert all(project.tree.download_path(name).exists() for name in needed)
    project.change(database.result, int(late["id"]), server_state=int(ServerState.OVER))
    project.generator()._take_back(project.job)
    assert published_states(project) == [(3, "state")]


def test_hosts_fetch_each_keyframe_and_delta_once(
    project: TinyProject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: Counter[tuple[Path, str]] = Counter()
    content = ScriptedVolunteer._content

    def counted(self: ScriptedVolunteer, file: Any) -> bytes:
        fetched[(self.data_dir, file.name)] += 1
        return content(self, file)

    monkeypatch.setattr(ScriptedVolunteer, "_content", counted)
    train(project, tmp_path)
    assert set(fetched.values()) == {1}, [each for each in fetched.items() if each[1] > 1]
    states = {name for _, name in fetched if re.search(r"_v\d+_[0-9a-f]{16}[._]", name) and name.endswith("tensors")}
    assert sum("_from_" in name for name in states) == 3, "versions 1, 2 and 4"
    assert sum("_from_" not in name for name in states) == 2, "versions 0 and 3"


def test_the_advice_counts_deltas(project: TinyProject) -> None:
    config = project.job.config
    assert "on average" in download_advice(config, 4e6)
    plain = dataclasses.replace(config, supply=dataclasses.replace(config.supply, keyframe_every=1))
    assert "4 MB to download:" in download_advice(plain, 4e6)
    assert "2.01 MB to download on average" in download_advice(config, 4e6)
