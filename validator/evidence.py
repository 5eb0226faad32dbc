"""What a decision is taken from: reads the copies of a workunit, compares them, and looks at what is known of them.

    Judge.verdict(case): read the files -> fingerprints, distances, suspicions, voters -> decide

Nothing is written here, and nothing decided (validator/decision.py).
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from boinc_project import store
from boinc_project.contract.codecs import Array
from boinc_project.contract.errors import ContractError, InvalidResult, TransientError
from boinc_project.contract.microtask import essentials
from boinc_project.database import Database
from boinc_project.project_tree import ProjectTree
from validator import traces
from validator.agreement import pair_distances
from validator.case import Case, Verdict
from validator.copies import Copies, step_as_update
from validator.decision import Evidence, Sanity, decide, is_open, is_viable, needed
from validator.doubts import Doubts
from validator.fingerprint import Layout, estimate, fingerprints, layout_of, read
from validator.sanity import load

log = logging.getLogger("validator")


@dataclass
class Reading:
    """What reading the copies of a workunit gave: of each its sanity, of the readable ones what they hold."""

    sanity: dict[int, tuple[Sanity, str]] = field(default_factory=dict)
    tensors: dict[int, Mapping[str, Array]] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    metadata: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    marks: dict[int, bytes] = field(default_factory=dict)


@dataclass
class Judge:
    """Gathers the evidence over one workunit after the other. Not thread-safe."""

    tree: ProjectTree
    database: Database
    one_vote_per_user: bool = True
    copies: Copies = field(default_factory=Copies)

    def __post_init__(self) -> None:
        self.doubts = Doubts(self.database)

    def verdict(self, case: Case) -> Verdict:
        """Read the copies and decide. Raises NotYet while an update is being tried on held-out data."""
        microtask = essentials(str(case.task["document"]))
        kind = f"{microtask.mode}:{microtask.graph_sha256[:16]}"
        types = case.job.folder.update_types(microtask.mode, microtask.steps)
        reading = Reading()
        by_id = {int(row["id"]): row for row in case.results}
        for identifier in needed(case.unit, case.results):
            try:
                payload = load(self.tree, by_id[identifier], types, microtask.codec, str(case.task["digest"]))
            except InvalidResult as error:
                reading.sanity[identifier] = (Sanity.INVALID, f"{error} ({error.fault})")
            except TransientError as error:
                reading.sanity[identifier] = (Sanity.TRANSIENT, str(error))
            else:
                reading.sanity[identifier] = (Sanity.GOOD, "")
                reading.tensors[identifier], reading.digests[identifier] = payload.update.tensors, payload.sha256
                reading.metadata[identifier] = payload.update.metadata
        estimates, suspicions = dict[int, float](), dict[int, str]()
        if (layout := layout_of(types)) is not None:
            blobs = fingerprints(list(reading.tensors.values()), layout)
            reading.marks.update(zip(reading.tensors, blobs, strict=True))
            estimates = self._estimates(case, reading, layout)
            suspicions = self._suspicions(case, reading, layout, kind)
        pairs = pair_distances(reading.tensors)
        tolerance = case.job.config.workunit.tolerance
        voters = self._voters(case)
        evidence = Evidence(case.unit, case.results, reading.sanity, pairs, tolerance, voters, estimates)
        decision, accepted = self.doubts.considered(case, evidence, decide(evidence), reading.tensors, reading.digests)
        canonical = int(decision.canonical or case.unit["canonical_resultid"] or 0)
        apart = {i: pairs[min(i, canonical), max(i, canonical)] for i in _others(reading.tensors, canonical)}
        apart = apart or estimates
        return Verdict(case, decision, reading.digests, reading.marks, apart, suspicions, kind, accepted)

    def _voters(self, case: Case) -> dict[int, Hashable]:
        column = "userid" if self.one_vote_per_user else "hostid"
        return {int(row["id"]): int(row[column]) for row in case.results if is_viable(row)}

    def _estimates(self, case: Case, reading: Reading, layout: Layout) -> dict[int, float]:
        """Distances of late copies to a canonical result whose file is gone, as far as its fingerprint is there."""
        canonical = int(case.unit["canonical_resultid"])
        if not canonical or reading.sanity.get(canonical, (Sanity.INVALID, ""))[0] != Sanity.INVALID:
            return {}
        with self.database.read() as connection:
            kept = read(traces.of_canonical(connection, case.name, canonical), layout)
        mine = {identifier: read(blob, layout) for identifier, blob in reading.marks.items()}
        return {i: estimate(kept, each, layout) for i, each in mine.items() if kept is not None and each is not None}

    # Copied work.

    def _suspicions(self, case: Case, reading: Reading, layout: Layout, kind: str) -> dict[int, str]:
        """Why some of the copies that are not judged yet look as if they had not been computed."""
        found: dict[int, str] = {}
        job, version = case.job, int(case.task["version"])
        for row in case.results:
            identifier, host_id = int(row["id"]), int(row["hostid"])
            if identifier not in reading.marks or not is_open(row):
                continue
            if not self.copies.knows(host_id):
                with self.database.read() as connection:
                    self.copies.remember(host_id, traces.recent(connection, host_id), kind, layout)
            blob = reading.marks[identifier]
            if earlier := self.copies.sent_before(host_id, case.name, kind, blob, layout):
                found[identifier] = f"it is a multiple of what this host returned for {earlier}"
            elif version > 0 and self.copies.is_step(
                (job.id, version, kind), blob, layout, lambda: self._step(case, layout.names)
            ):
                found[identifier] = f"it is a multiple of the public step from version {version - 1} to {version}"
        return found

    def _step(self, case: Case, names: tuple[str, ...]) -> dict[str, Array] | None:
        """The server's step to the version that the microtask begins from; None if a state is gone."""
        job, version = case.job, int(case.task["version"])
        with self.database.read() as connection:
            rows = [store.version_row(connection, job.id, each) for each in (version - 1, version)]
        try:
            before, after = (
                job.folder.read_state(int(row["version"]), str(row["state_sha256"])) for row in rows if row is not None
            )
        except (OSError, ValueError, ContractError):
            return None
        return step_as_update(before, after, names)


def _others(readable: Mapping[int, Any], canonical: int) -> list[int]:
    """The readable copies beside the canonical one; none if that one cannot be read."""
    return [identifier for identifier in readable if identifier != canonical] if canonical in readable else []
