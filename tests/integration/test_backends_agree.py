"""Copies of one workunit, computed by numpy, PyTorch and OpenCL, agree for the validator and form a quorum."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from apps.gradient.backends import Backend, open_backend
from apps.gradient.backends.backend import DeviceNotFound
from apps.gradient.runner import Run, load
from boinc_project import database
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.update import read_update, write_update
from boinc_project.states import ValidateState
from tests.tiny_project import SHIPPED, Changes, TinyProject, tiny_project

BACKENDS = ("numpy", "torch", "opencl")


def opened(name: str) -> Backend:
    try:
        return open_backend(name, 1, "cpu")
    except (UnfitHost, DeviceNotFound) as error:
        pytest.skip(f"no {name} backend here: {error}")


def update_by(project: TinyProject, unit: Mapping[str, Any], name: str) -> bytes:
    """The update that the application sends for a workunit when it computes with this backend."""
    files = re.findall(r"<file_name>(.*?)</file_name>\s*<open_name>(.*?)</open_name>", str(unit["xml_doc"]))
    where = {open_name: project.tree.download_path(physical) for physical, open_name in files}
    loaded = load(lambda open_name: where[open_name])
    run = Run(loaded, opened(name))
    while not run.done:
        run.step()
    metadata = {"microtask": loaded.digest, "workunit": unit["name"], "backend": name}
    return write_update(run.update(), loaded.types, metadata, loaded.microtask.codec)


JOBS: dict[str, tuple[str, Changes]] = {
    "gradient": ("job.toml", ()),
    "local steps": ("diloco.toml", ()),
    "shipped state": ("diloco.toml", SHIPPED),
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("pair", list(combinations(BACKENDS, 2)), ids=" and ".join)
def test_copies_of_two_backends_form_a_quorum(pair: tuple[str, str], job: str) -> None:
    toml, changes = JOBS[job]
    with tiny_project(toml, changes=changes) as project:
        if changes:
            project.make_version()  # in the first version the state is zero
        results = project.issue()
        copies: dict[int, list[dict[str, Any]]] = {}
        for result in results:
            copies.setdefault(result["workunitid"], []).append(result)
        assert all(len(each) == 2 for each in copies.values())
        for group in copies.values():
            unit = project.unit_of(group[0])
            updates = [update_by(project, unit, name) for name in pair]
            assert different(project, unit, *updates), "the backends round differently, or this shows nothing"
            for result, update in zip(group, updates, strict=True):
                project.answer(result, update)
        project.transitioner.run_once()
        project.validator().one_pass()
        states = {row["validate_state"] for row in project.rows(database.result)}
        assert states == {int(ValidateState.VALID)}
        assert all(unit["canonical_resultid"] for unit in project.rows(database.workunit))


def different(project: TinyProject, unit: Mapping[str, Any], first: bytes, second: bytes) -> bool:
    """Whether two updates differ in any number."""
    microtask = project.microtask_of(str(unit["name"]))
    types = project.job.folder.update_types(microtask.mode, microtask.steps, microtask.ships_state)
    sides = [read_update(each, types, microtask.codec, microtask.digest()).tensors for each in (first, second)]
    return any(not np.array_equal(sides[0][name], sides[1][name]) for name in sides[0])
