"""What tests of trust do with a tiny project: change its [trust], give hosts a record, forge gradients."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import sqlalchemy as sa

from boinc_project import database
from boinc_project.contract.update import read_update, update_types, write_update
from boinc_project.gt_tables import gt_job, gt_trust
from boinc_project.simulator.computing import Evaluation
from boinc_project.states import ServerState
from tests.tiny_project import TinyProject


def with_trust(project: TinyProject, **keys: Any) -> None:
    """Set keys of [trust] in the running job."""
    settings = json.loads(project.job.config.canonical_json())
    settings["trust"].update(keys)
    with project.db.transaction() as connection:
        connection.execute(sa.update(gt_job).values(config=json.dumps(settings)))


def judged(project: TinyProject, **fields: Any) -> None:
    """A fresh validator, as after a restart; what it computes itself it computes in this process."""
    project.transitioner.run_once()
    project.validator(**{"start": Evaluation, **fields}).one_pass()
    project.transitioner.run_once()


def trusted(project: TinyProject, host: int, kind: str, good: float = 1e9) -> None:
    if not project.rows(database.host, id=host):
        project.add_host(host, host)
    row = {"host_id": host, "kind": kind, "valid": 50, "consecutive_valid": 50, "good": good, "judge_time": time.time()}
    with project.db.transaction() as connection:
        connection.execute(gt_trust.delete().where(gt_trust.c.host_id == host))
        connection.execute(gt_trust.insert(), row)


def kind_of(project: TinyProject) -> str:
    return f"gradient:{project.job.facts.graph.sha256[:16]}"


def unsent(project: TinyProject, unit: int) -> list[dict[str, Any]]:
    return project.rows(database.result, workunitid=unit, server_state=int(ServerState.UNSENT))


def with_gradients(project: TinyProject, unit: dict[str, Any], gradient_of: Callable[[str], Any]) -> bytes:
    """The honest update with other gradients, by the names of their parameters."""
    microtask = project.microtask_of(unit["name"])
    types = update_types(project.job.folder.gradient_graph, microtask.mode, microtask.steps)
    found = read_update(project.honest_update(unit), types, microtask.codec, microtask.digest())
    tensors = {
        n: gradient_of(n.replace("gradient/", "parameter/")).astype(a.dtype) if n.startswith("gradient/") else a
        for n, a in found.tensors.items()
    }
    return write_update(tensors, types, found.metadata, microtask.codec)


def gradients_of(project: TinyProject, unit: dict[str, Any]) -> dict[str, Any]:
    microtask = project.microtask_of(unit["name"])
    types = update_types(project.job.folder.gradient_graph, microtask.mode, microtask.steps)
    found = read_update(project.honest_update(unit), types, microtask.codec, microtask.digest())
    return {n.replace("gradient/", "parameter/"): a for n, a in found.tensors.items()}
