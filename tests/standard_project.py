"""A project tree as BOINC's make_project leaves it, with nothing of BOINC's programs in it.

On a real MariaDB, or on SQLite where a test is not about the database and should be quick.

Files are written out by hand after `py/Boinc/setup_project.py` and `tools/make_project`: for tests of what is put
into such a project. The programs in bin/ and cgi-bin/ are stubs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import sqlalchemy as sa

from boinc_project import database, signing
from boinc_project.config import ProjectConfig
from boinc_project.database import Database
from boinc_project.standard.steps import DAEMONS
from tests import mariadb

PLATFORMS = ("windows_x86_64", "x86_64-pc-linux-gnu", "anonymous")

#: As make_project writes it: minidom's pretty printing, the text of an element on a line of its own.
GENERATED = """<?xml version="1.0" ?>
<boinc>
    <config>
{options}
    </config>
    <tasks>
        <task>
            <cmd>
                antique_file_deleter -d 2
            </cmd>
            <period>
                24 hours
            </period>
            <disabled>
                0
            </disabled>
            <output>
                antique_file_deleter.out
            </output>
        </task>
        <task>
            <cmd>
                run_in_ops ./update_uotd.php
            </cmd>
            <period>
                1 days
            </period>
            <output>
                update_uotd.out
            </output>
        </task>
    </tasks>
    <daemons>
        <daemon>
            <cmd>
                feeder -d 3
            </cmd>
        </daemon>
        <daemon>
            <cmd>
                transitioner -d 3
            </cmd>
        </daemon>
        <daemon>
            <cmd>
                file_deleter -d 3
            </cmd>
        </daemon>
    </daemons>
</boinc>
"""

#: As admins leave it after some years: comments, tabs, odd indentation, non-ASCII, an old daemon in a comment.
LIVED_IN = """<boinc>
<!-- Wartung: Jörg, Tel. 123 & <daemons> bitte nicht anfassen -->
  <config>
{options}
\t<!-- <next_rpc_delay>99</next_rpc_delay> -->
  </config>
  <daemons>
\t<daemon><cmd>feeder -d 3 </cmd></daemon> <!-- </daemons> -->

     <daemon>
    <cmd>transitioner -d 3 --mod 2 0</cmd> <output>tr0.log</output><pid_file>tr0.pid</pid_file>
     </daemon>
     <daemon>
    <cmd>transitioner -d 3 --mod 2 1</cmd> <output>tr1.log</output><pid_file>tr1.pid</pid_file>
     </daemon>
     <!-- <daemon><cmd>gt_validator -app gradient</cmd></daemon> -->
     <daemon><cmd>file_deleter</cmd><disabled>1</disabled></daemon>   <!-- since March -->
  </daemons>
  <tasks/>
</boinc>"""

ONE_LINE = "<boinc><config>{options}</config><daemons><daemon><cmd>feeder</cmd></daemon></daemons></boinc>"
NO_DAEMONS = "<boinc>\n    <config>\n{options}\n    </config>\n</boinc>\n"
EMPTY_DAEMONS = "<boinc>\n    <config>\n{options}\n    </config>\n    <daemons/>\n    <tasks>\n    </tasks>\n</boinc>\n"

SHAPES: Mapping[str, str] = {
    "generated": GENERATED,
    "crlf": GENERATED.replace("\n", "\r\n"),
    "lived_in": LIVED_IN,
    "one_line": ONE_LINE,
    "no_daemons": NO_DAEMONS,
    "empty_daemons": EMPTY_DAEMONS,
}

PROJECT_XML = """<boinc>
    <platform>
        <name>windows_x86_64</name>
        <user_friendly_name>Microsoft Windows running on an AMD x86_64 or Intel EM64T CPU</user_friendly_name>
    </platform>
    <platform>
        <name>x86_64-pc-linux-gnu</name>
        <user_friendly_name>Linux running on an AMD x86_64 or Intel EM64T CPU</user_friendly_name>
    </platform>
    <app>
        <name>uppercase</name>
        <user_friendly_name>upperCASE</user_friendly_name>
    </app>
</boinc>
"""


def options_of(folder: Path, url: sa.URL, **changes: str | None) -> dict[str, str]:
    """The elements of `<config>` that make_project writes."""
    master = "http://127.0.0.1/test/"
    options: dict[str, str | None] = {
        "upload_dir": f"{folder}/upload",
        "long_name": "Test & Project",
        "sched_debug_level": "3",
        "cache_md5_info": "1",
        "upload_url": "http://127.0.0.1/test_cgi/file_upload_handler",
        "disable_account_creation": "0",
        "uldl_dir_fanout": "1024",
        "disable_web_account_creation": "0",
        "log_dir": f"{folder}/log_testhost",
        "app_dir": f"{folder}/apps",
        "fuh_debug_level": "3",
        "one_result_per_user_per_wu": "0",
        "send_result_abort": "1",
        "max_wus_to_send": "50",
        "daily_result_quota": "500",
        "min_sendwork_interval": "6",
        "shmem_key": "0x11117a3b",
        "master_url": master,
        "download_url": f"{master}download",
        "download_dir": f"{folder}/download",
        "key_dir": f"{folder}/keys",
        "host": os.uname().nodename.partition(".")[0],
        "dont_generate_upload_certificates": "1",
        "ignore_upload_certificates": "1",
        "db_name": str(url.database),
        "db_user": str(url.username),
        "db_passwd": str(url.password),
        "db_host": f"{url.host}:{url.port}",
    }
    options.update(changes)
    return {name: value for name, value in options.items() if value is not None}


def config_xml(shape: str, options: Mapping[str, str]) -> bytes:
    """config.xml in one of the SHAPES."""
    newline = "\r\n" if shape == "crlf" else "\n"
    escaped = {name: value.replace("&", "&amp;") for name, value in options.items()}
    if shape in ("generated", "crlf"):
        indent = " " * 8
        body = newline.join(
            newline.join((f"{indent}<{name}>", f"{indent}    {value}", f"{indent}</{name}>"))
            for name, value in escaped.items()
        )
    else:
        body = newline.join(f"\t <{name}>{value}</{name}>" for name, value in escaped.items())
    return SHAPES[shape].format(options=body).encode()


def make_standard_project(
    folder: Path, *, on: str = "sqlite", shape: str = "generated", **changes: str | None
) -> Database:
    """Make the tree in `folder` and BOINC's tables in a new database; returns the database.

    `on`: mariadb (a database of the shared server) or sqlite. `changes` are elements of `<config>` to set or, with
    None, to leave out.
    """
    if on == "mariadb":
        url = mariadb.new_database()
    else:
        url = sa.URL.create("mysql+pymysql", "boincadm", "secret", host="127.0.0.1", database="test")
        changes = {"gt_database_url": "sqlite:///project.sqlite", **changes}
    host = os.uname().nodename.partition(".")[0]
    for name in (
        "apps", "archives", "bin", "cgi-bin", "download", "html/inc", "html/ops", "html/user", "keys", "py/Boinc",
        "templates", "upload", f"log_{host}", f"pid_{host}", f"tmp_{host}",
    ):  # fmt: skip
        (folder / name).mkdir(parents=True)
    for name in ("upload", f"log_{host}"):
        (folder / name).chmod(0o2770)
    for name in ("bin/start", "bin/xadd", "bin/update_versions", "cgi-bin/cgi", "cgi-bin/file_upload_handler"):
        (folder / name).write_text("#!/bin/sh\nexit 0\n")
        (folder / name).chmod(0o755)
    for name in ("stop", "status"):
        (folder / "bin" / name).symlink_to(folder / "bin" / "start")
    for name in ("code_sign", "upload"):
        signing.write_key_pair(folder / "keys", name)
    (folder / "project.xml").write_text(PROJECT_XML)
    (folder / "test.cronjob").write_text(f"0,5,10,15 * * * * cd {folder} ; {folder}/bin/start --cron\n")
    (folder / "config.xml").write_bytes(config_xml(shape, options_of(folder, url, **changes)))
    db = Database(ProjectConfig.load(folder).database_url)
    db.create_tables(database.metadata)
    with db.transaction() as connection:
        for name in PLATFORMS:
            row = database.new_row(database.platform, name=name, user_friendly_name=name)
            connection.execute(database.platform.insert(), row)
        row = database.new_row(database.app, name="uppercase", user_friendly_name="upperCASE")
        connection.execute(database.app.insert(), row)
    return db


def make_programs(folder: Path) -> dict[str, Path]:
    """Stand-ins for the programs of a virtual environment."""
    folder.mkdir(parents=True)
    made = {name: folder / name for name in DAEMONS}
    for path in made.values():
        path.write_text("#!/bin/sh\nexit 0\n")
        path.chmod(0o755)
    return made


def fingerprint(folder: Path) -> dict[str, str]:
    """Every file, folder and link below `folder` but our record: kind, mode and contents."""
    found: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.partition("/")[0] == "gt_install" or name.startswith("project.sqlite"):
            continue
        if path.is_symlink():
            found[name] = f"-> {os.readlink(path)}"
        elif path.is_dir():
            found[name] = "folder"
        else:
            found[name] = f"{path.stat().st_mode:o} {hashlib.sha256(path.read_bytes()).hexdigest()}"
    return found


def contents(db: Database) -> dict[str, list[tuple[object, ...]]]:
    """All tables and their rows, without creation times."""
    with db.read() as connection:
        found = {}
        for name in sorted(sa.inspect(connection).get_table_names()):
            columns = [c["name"] for c in sa.inspect(connection).get_columns(name) if c["name"] != "create_time"]
            query = sa.text(f"SELECT {', '.join(f'`{c}`' for c in columns)} FROM `{name}` ORDER BY 1")
            found[name] = [tuple(row) for row in connection.execute(query)]
        return found
