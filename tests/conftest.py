"""Fixtures that several folders of tests use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import databases

# Mesa's OpenCL shows llvmpipe only if asked, and asks itself once, when the first test of a process looks for devices.
os.environ.setdefault("RUSTICL_ENABLE", "llvmpipe")
# OpenCL drivers keep what they build in the repository, and nothing in the home folder.
DRIVERS = Path(__file__).resolve().parents[1] / ".cache" / "drivers"
# tests/standard run as the owner of a project, who may not write here and needs no OpenCL.
with contextlib.suppress(PermissionError):
    DRIVERS.mkdir(parents=True, exist_ok=True)
    for _variable in ("POCL_CACHE_DIR", "MESA_SHADER_CACHE_DIR"):
        os.environ.setdefault(_variable, str(DRIVERS))


@pytest.fixture(params=databases.parameters(databases.SQLITE, databases.MARIADB))
def each_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on SQLite and once on MariaDB; this is the kind of database."""
    with databases.chosen(request.param):
        yield request.param
