"""Replays a job's ledger: from version 0 and the payloads that are kept to the digest of every version.

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


def replay(database: Database, job: JobRow) -> list[str]:
    """SHA-256 of the state of each version from 0 to the current one, computed anew in memory.

    Raises ContractError if version 0 or a payload is not the recorded one, FileNotFoundError if one is gone.
    """
    with database.read() as connection:
        first = store.version_row(connection, job.id, 0)
    assert first is not None, job.name
    digests = [str(first["state_sha256"])]
    state: Mapping[str, Any] = job.folder.read_state(0, digests[0])
    optimizer: Mapping[str, Any] = {}
    for version in range(job.current_version):
        with database.read() as connection:
            members = store.round_members(connection, job.id, version + 1)
            if members is None:
                raise ContractError(f"job {job.name!r} has no record of the round of version {version + 1}")
            _, contributions = contributions_of(connection, job, version, members)
        made = compute(job.config, version, state, optimizer, contributions)
        state, optimizer = made.state, made.optimizer
        digests.append(sha256(state_bytes(state)))
    return digests
