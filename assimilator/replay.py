"""Replays a job's ledger: from the oldest version and the payloads that are kept.

What it is: the proof that the model is what the volunteers' validated gradients make of it, and nothing else.
What it is not: it writes nothing, and it cannot tell whether a gradient was right (the validator did).
"""

from __future__ import annotations

import dataclasses

from assimilator.apply import compute, read_round
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
    margin = job.config.aggregation.max_age if job.config.policy.flow and int(kept[0]["version"]) else 0
    oldest = kept[min(margin, len(kept) - 1)]  # what is kept of the versions before it serves late contributions
    first = int(oldest["version"])
    digests = {first: str(oldest["state_sha256"])}
    state = job.folder.read_state(first, digests[first])
    optimizer = job.folder.read_optimizer(first, str(oldest["optimizer_sha256"]))
    for version in range(first, job.current_version):
        with database.read() as connection:
            members = store.round_members(connection, job.id, version + 1)
            if members is None:
                raise ContractError(f"job {job.name!r} has no record of the round of version {version + 1}")
            _, recorded = read_round(connection, job, version, members)
        made = compute(job.config, dataclasses.replace(recorded, load=lambda: (state, optimizer)))  # noqa: B023
        state, optimizer = made.state, made.optimizer
        digests[version + 1] = sha256(state_bytes(state))
    return digests


def version_is_kept(job: JobRow, row: store.Row) -> bool:
    """Whether the state of a version is still on the server's disk (`keep_versions` in [supply])."""
    return job.folder.state_path(int(row["version"]), str(row["state_sha256"])).exists()
