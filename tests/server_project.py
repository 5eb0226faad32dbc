"""A small BOINC project for the server's tests: an app, accounts, workunits and requests."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from boinc_project import app_versions, database, templates
from boinc_project.database import Database
from boinc_project.project_tree import ProjectTree, create_project
from boinc_project.server import accounts
from tests import databases
from tests.ports import kept_port

WIRE = Path(__file__).parent / "data" / "wire"

#: An application that any Linux runs: copies its input in upper case.
UPPERCASE_APP = r"""#!/bin/sh
resolve() { sed -n 's/.*<soft_link>\(.*\)<\/soft_link>.*/\1/p' "$1"; }
tr a-z A-Z < "$(resolve in)" > "$(resolve out)" || exit 3
echo 0 > boinc_finish_called
exit 0
"""


def make_project(folder: Path, **options: str | int | float) -> ProjectTree:
    """A project on a free port of loopback, without the pauses that real clients are asked to make.

    It is made on the database that the test runs with (tests/databases.py).
    """
    url = f"http://127.0.0.1:{kept_port()}/test/"
    quick: dict[str, str | int | float] = {"min_sendwork_interval": 0, **databases.project_options(), **options}
    return create_project(folder, master_url=url, long_name="Test Project", options=quick)


def publish_app(tree: ProjectTree, db: Database, script: str = UPPERCASE_APP) -> int:
    """Publish the script as version 1.0 of app `uppercase`; returns the app's id."""
    leaf = tree.project_dir / "apps" / "uppercase" / "1.0" / "x86_64-pc-linux-gnu"
    leaf.mkdir(parents=True)
    (leaf / "uppercase_1.0").write_text(script)
    (leaf / "version.xml").write_text(
        "<version><file><physical_name>uppercase_1.0</physical_name><main_program/></file>"
        "<api_version>7.20.5</api_version></version>"
    )
    appid = app_versions.add_app(db, "uppercase", "Upper case")
    app_versions.update_versions(tree, db)
    output = [templates.OutputReference(open_name="out", max_nbytes=2_000_000)]
    (tree.project_dir / "templates" / "uppercase_out").write_text(templates.output_template(output))
    return appid


def add_workunits(
    tree: ProjectTree, db: Database, appid: int, count: int, *, prefix: str = "w", **columns: Any
) -> list[str]:
    """Insert workunits named PREFIX_k as a work generator does; returns the names."""
    columns = {
        "rsc_fpops_est": 1e9,
        "rsc_fpops_bound": 1e15,
        "rsc_memory_bound": 1e7,
        "rsc_disk_bound": 1e7,
        "delay_bound": 86400,
        "min_quorum": 1,
        "target_nresults": 1,
        "max_error_results": 3,
        "max_total_results": 6,
        "max_success_results": 4,
        **columns,
    }
    beside = {name: columns.pop(name) for name in ("priority", "size_class", "transitioner_flags") if name in columns}
    template = templates.input_template([templates.InputReference(open_name="in")], **columns)
    rows, now = [], int(time.time())
    for number in range(count):
        file = tree.stage_file(f"input {number}\n".encode(), f"in_{prefix}_{number}")
        document = templates.workunit_document(template, [file])
        rows.append(
            templates.new_workunit(
                document,
                name=f"{prefix}_{number}",
                appid=appid,
                result_template_file="templates/uppercase_out",
                now=now,
                **beside,
            )
        )
    with db.transaction() as connection:
        connection.execute(database.workunit.insert(), rows)
    return [row["name"] for row in rows]


def add_user(db: Database, name: str) -> str:
    """Create an account with the password `secret`; returns its key."""
    email = f"{name}@example.org"
    with db.transaction() as connection:
        user = accounts.create_account(
            connection,
            email=email,
            passwd_hash=accounts.password_hash("secret", email),
            name=name,
            now=int(time.time()),
        )
    return str(user["authenticator"])


def rows(db: Database, table: sa.Table, **columns: Any) -> list[dict[str, Any]]:
    """Rows whose columns have these values, by id."""
    query = sa.select(table).where(*(table.c[name] == value for name, value in columns.items()))
    if "id" in table.c:
        query = query.order_by(table.c.id)
    with db.read() as connection:
        return [dict(row) for row in connection.execute(query).mappings()]


def wire_body(name: str) -> bytes:
    """The body of a recorded HTTP message."""
    head, separator, body = (WIRE / name).read_bytes().partition(b"\r\n\r\n")
    return body if separator else head


def as_host(body: bytes, *, key: str, hostid: int, cpid: str = "") -> bytes:
    """A recorded scheduler request in the name of another account and host."""
    body = re.sub(rb"(<authenticator>)[^<]*", rb"\g<1>" + key.encode(), body, count=1)
    body = re.sub(rb"(<hostid>)[^<]*", rb"\g<1>" + str(hostid).encode(), body, count=1)
    if cpid:
        body = re.sub(rb"(<host_cpid>)[^<]*", rb"\g<1>" + cpid.encode(), body, count=1)
    return body
