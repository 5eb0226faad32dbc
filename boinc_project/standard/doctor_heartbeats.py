"""Doctor's look at gt_heartbeat: whether our daemons make their passes, and which rows are of daemons given up."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sqlalchemy.engine import Connection

from boinc_project import store
from boinc_project.daemon import Options
from boinc_project.daemon_start import heartbeat_name
from boinc_project.gt_tables import gt_heartbeat
from boinc_project.standard import schema, steps
from boinc_project.standard.findings import Finding, Patient, age, error, note, warning
from boinc_project.standard.running import may_be
from boinc_project.standard.steps import Daemon

LATE_S = 120.0  # passes may take a while; a heartbeat comes every ten seconds
DAEMON_NAMES = tuple(name.removeprefix("gt_") for name in steps.DAEMONS)

Beats = Mapping[str, Mapping[str, Any]]  # rows of gt_heartbeat by daemon


def check_heartbeats(patient: Patient, connection: Connection) -> Iterator[Finding]:
    """Daemons that have not made a pass lately."""
    if schema.own_tables(connection)[1]:
        return
    beats: Beats = {str(row["daemon"]): row for row in store.heartbeats(connection)}
    named = named_instances(patient.daemons) if patient.standard else set()
    for name in DAEMON_NAMES:
        of_this = {daemon: row for daemon, row in beats.items() if daemon.split(" ")[0] == name}
        wanted = {daemon for daemon in named if daemon.split(" ")[0] == name}
        if wanted:
            yield from _named(patient, of_this, sorted(wanted))
            yield from _given_up(patient, connection, of_this, wanted)
        else:
            yield from _unknown(patient, of_this, name)


def named_instances(daemons: Sequence[Daemon]) -> set[str]:
    """The keys in gt_heartbeat of the daemons that bin/start runs."""
    return {
        heartbeat_name(each.program.removeprefix("gt_"), Options(app=each.app, mod=each.mod))
        for each in daemons
        if each.program in steps.DAEMONS and each.pid_file and not each.disabled
    }


def _named(patient: Patient, beats: Beats, wanted: Sequence[str]) -> Iterator[Finding]:
    for daemon in wanted:
        if daemon not in beats:
            yield error(f"gt_{daemon} has never ended a pass", "run bin/start, and see its log")
        elif (seconds := _silent_s(patient, beats[daemon])) > LATE_S:
            yield error(_late(daemon, beats[daemon], seconds), _revival(daemon, int(beats[daemon]["pid"])))


def _revival(daemon: str, pid: int) -> str:
    """What to do about a silent daemon: bin/start starts none whose process still holds its lock."""
    hangs = f"see its log; if nothing happens there, end process {pid} and run bin/start"
    return hangs if may_be(pid, f"gt_{daemon.split(' ')[0]}") else "see its log, then run bin/start"


def _given_up(patient: Patient, connection: Connection, beats: Beats, wanted: set[str]) -> Iterator[Finding]:
    """Instances that config.xml does not name: an earlier share of --mod, an app that was taken out."""
    for daemon, row in beats.items():
        if daemon in wanted:
            continue
        seconds = _silent_s(patient, row)
        if seconds > LATE_S:
            yield note(
                f"{_late(daemon, row, seconds)}, and config.xml does not name it (any more)",
                f"forget it: {_sql_command(connection, daemon)}",
            )
        else:
            yield note(
                f"{_late(daemon, row, seconds)}, but config.xml does not name it",
                f"if process {row['pid']} is still that daemon, end it or add it to <daemons>",
            )


def _unknown(patient: Patient, beats: Beats, name: str) -> Iterator[Finding]:
    """Where nothing says which instances there should be, as long as one of them lives the others may be given up."""
    start = "run bin/start" if patient.standard else f"boinc-train serve {patient.folder}"
    if not beats:
        yield error(f"gt_{name} has never ended a pass", f"{start}, and see its log")
    silent = {daemon: _silent_s(patient, row) for daemon, row in beats.items()}
    report = error if all(seconds > LATE_S for seconds in silent.values()) else warning
    for daemon, seconds in silent.items():
        if seconds > LATE_S:
            yield report(_late(daemon, beats[daemon], seconds), f"see its log, then {start}")


def _silent_s(patient: Patient, row: Mapping[str, Any]) -> float:
    return patient.now - float(row["time"])


def _late(daemon: str, row: Mapping[str, Any], seconds: float) -> str:
    return f"gt_{daemon} (process {row['pid']}) ended its last pass {age(seconds)} ago"


def _sql_command(connection: Connection, daemon: str) -> str:
    """A command line that removes the row; daemons' names need no escaping in SQL."""
    statement = f"DELETE FROM {gt_heartbeat.name} WHERE daemon = '{daemon}'"
    url = connection.engine.url
    if connection.dialect.name == "sqlite":
        client = ["sqlite3", str(url.database)]
    else:
        host = [] if url.host in (None, "localhost") else ["-h", str(url.host)]
        port = [] if url.port is None else ["-P", str(url.port)]
        client = ["mariadb", *host, *port, "-u", str(url.username), "-p", str(url.database), "-e"]
    return f'{shlex.join(client)} "{statement}"'
