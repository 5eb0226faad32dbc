"""Fixtures that several folders of tests use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import databases


@pytest.fixture(params=databases.parameters(databases.SQLITE, databases.MARIADB))
def each_database(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs once on SQLite and once on MariaDB; this is the kind of database."""
    with databases.chosen(request.param):
        yield request.param
