"""Tests of this folder need a live project of a standard BOINC server; without one they are skipped and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live_project import MISSING, LiveProject, Trained, trained_job


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests of this folder, in one line per file, where there is no project."""
    for item in items:
        if MISSING and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def project() -> Iterator[LiveProject]:
    """The project that BOINC_PROJECT_DIR names."""
    found = LiveProject.open()
    yield found
    found.db.close()


@pytest.fixture(scope="session")
def trained(project: LiveProject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    """A tiny job trained to its end in the project; it takes some minutes."""
    with trained_job(project, tmp_path_factory.mktemp("live")) as done:
        yield done
