"""Fixtures that several folders of tests use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests import databases

# Mesa's OpenCL shows llvmpipe only if asked, and asks itself once, when the first test of a process looks for devices.
os.environ.setdefault("RUSTICL_ENABLE", "llvmpipe")


@pytest.fixture(params=databases.parameters(databases.SQLITE, databases.MARIADB))
def each_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on SQLite and once on MariaDB; this is the kind of database."""
    with databases.chosen(request.param):
        yield request.param
