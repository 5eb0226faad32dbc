"""Replays a job's ledger: from the oldest version and the payloads that are kept.

What it is: the proof that the model is what the volunteers' validated gradients make of it, and nothing else.
What it is not: it writes nothing, and it cannot tell whether a gradient was right (the validator did).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from assimilator.apply import compute, contributions_of
from boinc_project import store
from boinc_project.contract.errors import ContractError
from boinc_project.database import Database
from boinc_project.job_folder import sha256, state_bytes
from boinc_project.store import JobRow


def replay(database: Database, job: JobRow) -> dict[int, str]:
    """Version -> SHA-256 of its state, from the oldest version that is kept to the current one, computed in memory.

    Raises ContractError if a kept file is not the recorded one, FileNotFoundError if a payload is gone.
    """
    with database.read() as connection:
        kept = [row for row in store.versions(connection, job.id) if version_is_kept(job, row)]
    if not kept:
        raise ContractError(f"job {job.name!r} keeps no version to begin from")
    first = int(kept[0]["version"])
    digests = {first: str(kept[0]["state_sha256"])}
    state: Mapping[str, Any] = job.folder.read_state(first, digests[first])
    optimizer: Mapping[str, Any] = job.folder.read_optimizer(first, str(kept[0]["optimizer_sha256"]))
    for version in range(first, job.current_version):
        with database.read() as connection:
            members = store.round_members(connection, job.id, version + 1)
            if members is None:
                raise ContractError(f"job {job.name!r} has no record of the round of version {version + 1}")
            _, contributions = contributions_of(connection, job, version, members)
        made = compute(job.config, version, lambda: (state, optimizer), contributions)  # noqa: B023
        state, optimizer = made.state, made.optimizer
        digests[version + 1] = sha256(state_bytes(state))
    return digests


def version_is_kept(job: JobRow, row: store.Row) -> bool:
    """Whether the state of a version is still on the server's disk (`keep_versions` in [supply])."""
    return job.folder.state_path(int(row["version"]), str(row["state_sha256"])).exists()
