"""What a training looked like: a picture of the loss and a report in JSON.

collect(...)  -> plain numbers from the database
draw(...)     -> loss, held-out metrics and staleness by version and by time, as PNG
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from boinc_project import store
from boinc_project.database import Database, host, result
from boinc_project.gt_tables import gt_ledger
from boinc_project.states import ServerState, ValidateState
from boinc_project.store import JobRow


def collect(database: Database, job_name: str) -> dict[str, Any]:
    """Versions, results and hosts of a job as plain data."""
    with database.read() as connection:
        job = store.job_named(connection, job_name)
        assert job is not None, job_name
        versions = store.versions(connection, job.id)
        ledger = list(
            connection.execute(
                sa.select(gt_ledger).where(gt_ledger.c.job_id == job.id).order_by(gt_ledger.c.intake_time)
            )
            .mappings()
            .all()
        )
        valid = (
            sa.select(
                result.c.hostid,
                sa.func.count(),
                sa.func.sum(result.c.granted_credit),
                sa.func.sum(result.c.elapsed_time),
                sa.func.avg(result.c.received_time - result.c.sent_time),
            )
            .where(
                result.c.appid == job.appid,
                result.c.server_state == int(ServerState.OVER),
                result.c.validate_state == int(ValidateState.VALID),
            )
            .group_by(result.c.hostid)
        )
        hosts: list[dict[str, Any]] = [
            {
                "host": int(hostid),
                "valid_results": int(number),
                "credit": float(credit),
                "compute_seconds": float(elapsed),
                "mean_turnaround_seconds": float(turnaround),
            }
            for hostid, number, credit, elapsed, turnaround in connection.execute(valid)
        ]
        names = {int(i): str(n) for i, n in connection.execute(sa.select(host.c.id, host.c.domain_name))}
        statement = sa.select(sa.func.count()).select_from(result).where(result.c.appid == job.appid)
        results = int(connection.execute(statement).scalar_one())
    for entry in hosts:
        entry["name"] = names.get(entry["host"], "")
    return {
        "job": job.name,
        "state": str(job.state),
        "note": job.note,
        "policy": job.config.train.policy,
        "versions": [_version(row, versions[0]) for row in versions],
        "contributions": [_contribution(dict(row), versions) for row in ledger],
        "results": results,
        "valid_results": sum(entry["valid_results"] for entry in hosts),
        "hosts": hosts,
        "made": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _version(row: Mapping[str, Any], first: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": int(row["version"]),
        "seconds": round(float(row["create_time"]) - float(first["create_time"]), 3),
        "loss": row["loss"],
        "samples": int(row["samples"]),
        "contributions": int(row["contributions"]),
        "held_out": json.loads(row["evaluation"]) if row["evaluation"] else None,
        "state_sha256": str(row["state_sha256"]),
    }


def _contribution(row: Mapping[str, Any], versions: list[store.Row]) -> dict[str, Any]:
    """One gradient: its age in versions when it was applied, and in seconds from its base version to then."""
    made = {int(v["version"]): float(v["create_time"]) for v in versions}
    applied, base = row["applied_version"], int(row["base_version"])
    age = None if applied is None else int(applied) - 1 - base
    seconds = None
    if applied is not None and base in made and int(applied) in made:
        seconds = round(made[int(applied)] - made[base], 3)
    return {
        "workunit": str(row["workunit_name"]),
        "base_version": base,
        "applied_version": applied,
        "age_versions": age,
        "age_seconds": seconds,
        "loss": row["loss"],
        "disposition": str(row["disposition"]),
    }


def draw(report: Mapping[str, Any], path: Path) -> None:
    """The report's curves as a PNG of 1200 x 500 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    trained = [v for v in report["versions"] if v["loss"] is not None]
    # A version's training loss was measured on the version before it, from which its gradients were computed.
    left.plot([v["version"] - 1 for v in trained], [v["loss"] for v in trained], "o-", label="training loss")
    held = [v for v in report["versions"] if v["held_out"]]
    left.plot([v["version"] for v in held], [v["held_out"]["loss"] for v in held], "s--", label="held-out loss")
    left.set(xlabel="model version", ylabel="loss per sample", title=f"{report['job']}: loss")
    left.set_ylim(bottom=0)
    left.grid(alpha=0.3)
    left.legend()
    others = sorted({name for v in held for name in v["held_out"] if name != "loss"})
    for name in others:
        right.plot(
            [v["seconds"] for v in held], [v["held_out"].get(name) for v in held], "o-", label=f"held-out {name}"
        )
    ages = [(c["applied_version"], c["age_seconds"]) for c in report["contributions"] if c["age_seconds"] is not None]
    seconds = {v["version"]: v["seconds"] for v in report["versions"]}
    twin = right.twinx() if others else right
    twin.plot([seconds[v] for v, _ in ages], [age for _, age in ages], ".", color="gray", label="age of gradients (s)")
    twin.set_ylabel("age of a gradient when applied, seconds")
    twin.set_ylim(bottom=0)
    right.set(
        xlabel="seconds since the job was made",
        title=f"{len(report['hosts'])} hosts, {report['valid_results']} valid results",
    )
    right.grid(alpha=0.3)
    lines = [*right.get_lines(), *(twin.get_lines() if twin is not right else [])]
    right.legend(lines, [str(line.get_label()) for line in lines], loc="best")
    figure.savefig(path)


def job_of(database: Database, name: str) -> JobRow:
    """The job's row."""
    with database.read() as connection:
        job = store.job_named(connection, name)
    assert job is not None, name
    return job
