"""What a decision is taken from: reads the copies of a workunit, compares them, and looks at what is known of them.

    Judge.verdict(case): read the files -> fingerprints, distances, suspicions, voters -> decide

Nothing is written here, and nothing decided (validator/decision.py).
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from boinc_project import local_run, store
from boinc_project.background_runs import Start
from boinc_project.clock import now
from boinc_project.contract.codecs import Array, Codec
from boinc_project.contract.errors import ContractError, InvalidResult, TransientError
from boinc_project.contract.microtask import FileRef, essentials
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import update_form
from boinc_project.database import Database
from boinc_project.job_config import TrustSection
from boinc_project.project_tree import ProjectTree
from boinc_project.reliability import kind_of
from boinc_project.store import JobRow
from validator import traces
from validator.agreement import distance, pair_distances
from validator.case import Case, Unmarked, Verdict
from validator.copies import Copies, same_file, step_as_update
from validator.decision import Evidence, Sanity, decide, is_open, is_viable, needed
from validator.doubts import Doubts
from validator.fingerprint import Layout, estimate, fingerprints, layout_of, read, work_norm
from validator.lottery import ProjectDraws
from validator.replays import Replays
from validator.replication import LEAST_NORM, STRANGE_NORM, why_not_alone
from validator.sanity import check_inner_state, load
from validator.voters import Independence, Newcomers, Witness, count_votes, witness_of

_LAYOUTS = 64
_NOTHING_ASKED = TrustSection()
NORMS, LEAST_NORMS = 99, 9  # of the latest updates, whose median is usual

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
    independence: Independence = field(default_factory=Independence)
    drifting: frozenset[str] = frozenset()  # names of groups, of which no copy stands alone
    clock: Callable[[], float] = now
    start: Start = local_run.start  # what computes something on the server
    copies: Copies = field(default_factory=Copies)
    layouts: dict[int, tuple[Mapping[str, TensorType], Layout | None]] = field(default_factory=dict)
    norms: dict[tuple[str, int, int], deque[float]] = field(default_factory=dict)  # by kind, steps and fragment

    def __post_init__(self) -> None:
        self.draws = ProjectDraws(self.tree)
        self.doubts = Doubts(self.database, self.start)
        self.replays = Replays(self._state_of, self.start)

    def verdict(self, case: Case) -> Verdict:
        """Read the copies and decide. Raises NotYet while an update is being tried on held-out data; NoSecret where a
        draw is needed and the project's upload key cannot be read."""
        microtask = essentials(str(case.task["document"]))
        kind = kind_of(microtask.mode, microtask.graph_sha256)
        types = case.job.folder.update_types(microtask.mode, microtask.steps, microtask.ships_state)
        form, reading = update_form(types, microtask.codec), Reading()
        by_id = {int(row["id"]): row for row in case.results}
        for identifier in needed(case.unit, case.results):
            try:
                payload = load(self.tree, by_id[identifier], form, str(case.task["digest"]))
                check_inner_state(payload.update, case.job.config.inner_optimizer)
            except InvalidResult as error:
                reading.sanity[identifier] = (Sanity.INVALID, f"{error} ({error.fault})")
            except TransientError as error:
                reading.sanity[identifier] = (Sanity.TRANSIENT, str(error))
            else:
                reading.sanity[identifier] = (Sanity.GOOD, "")
                reading.tensors[identifier], reading.digests[identifier] = payload.update.tensors, payload.sha256
                reading.metadata[identifier] = payload.update.metadata
        estimates, suspicions = dict[int, float](), dict[int, str]()
        layout, unmarked, plain = self._layout(types), None, _is_plain(case)
        if layout is not None and plain and layout.owner.size:
            unmarked = Unmarked(layout, reading.tensors, reading.marks)
        elif layout is not None:
            blobs = fingerprints(list(reading.tensors.values()), layout)
            reading.marks.update(zip(reading.tensors, blobs, strict=True))
        if layout is not None and not plain:
            estimates = self._estimates(case, reading, layout)
            alike = f"{kind}/{microtask.steps}"  # more steps make a longer update, with more metrics
            suspicions = self._suspicions(case, reading, layout, kind, alike, microtask.codec)
            if case.job.config.trust.adaptive_replication:
                self._look_at_norms(case, reading, layout, kind, microtask.steps, suspicions)
        pairs = pair_distances(reading.tensors)
        tolerance = case.job.config.workunit.tolerance
        witnesses = self._witnesses(case, kind, reading.metadata)
        rules = self.independence
        if case.job.config.trust.independent_devices:
            rules = replace(rules, devices=True)
        files = same_file(reading.digests, reading.metadata)
        votes = count_votes(witnesses, files, rules)
        evidence = Evidence(
            case.unit,
            case.results,
            reading.sanity,
            pairs,
            tolerance,
            votes.voters,
            estimates,
            votes.reasons,
            established=votes.established,
            not_alone=self._not_alone(case, witnesses, suspicions),
            **self._by_server(case, reading, suspicions),
        )
        decision, accepted = self.doubts.considered(case, evidence, decide(evidence), reading.tensors, reading.digests)
        canonical = int(decision.canonical or case.unit["canonical_resultid"] or 0)
        apart = {i: pairs[min(i, canonical), max(i, canonical)] for i in _others(reading.tensors, canonical)}
        apart = apart or estimates
        return Verdict(case, decision, reading.digests, reading.marks, apart, suspicions, kind, accepted, unmarked)

    def _state_of(self, job: JobRow, version: int) -> FileRef | None:
        with self.database.read() as connection:
            row = store.version_row(connection, job.id, version)
        return None if row is None else FileRef(str(row["state_sha256"]), int(row["state_bytes"]))

    def _by_server(self, case: Case, reading: Reading, suspicions: Mapping[int, str]) -> dict[str, Any]:
        """What the server computes, or has computed, of this microtask itself: fields of Evidence."""
        trust = case.job.config.trust
        done, tensors = self.replays.of(case.name)
        if case.unit["canonical_resultid"]:
            return {}
        if done and tensors is None:
            return {"hopeless": True}
        if tensors is not None:
            return {"replayed": {i: distance(tensors, mine) for i, mine in reading.tensors.items()}}
        check = ""
        if trust.spot_check_share and self.draws.drawn(trust.spot_check_share, "spot", case.name):
            check = "it is drawn for a spot check"
        may_compute = trust.spot_check_share or trust.replay_disputes
        copied = frozenset(suspicions) if may_compute else frozenset[int]()
        return {"check": check, "copied": copied, "disputes": trust.replay_disputes}

    # Who made them.

    def _witnesses(self, case: Case, kind: str, said: Mapping[int, Mapping[str, Any]]) -> dict[int, Witness]:
        """The makers of the viable copies."""
        viable = {int(row["id"]): row for row in case.results if is_viable(row)}
        if case.records is None:
            return {i: Witness(user=int(row["userid"]), host=int(row["hostid"])) for i, row in viable.items()}
        trust, now = case.job.config.trust, self.clock()
        newcomers = Newcomers(trust.newcomer_days, trust.newcomer_results)
        return {i: witness_of(row, kind, case.records, newcomers, now, said.get(i)) for i, row in viable.items()}

    def _not_alone(
        self, case: Case, witnesses: Mapping[int, Witness], suspicions: Mapping[int, str]
    ) -> dict[int, str] | None:
        """Why copies need a second one beside them, where the job lets one be enough."""
        trust = case.job.config.trust
        if not trust.adaptive_replication or case.unit["canonical_resultid"] or int(case.unit["min_quorum"]) > 1:
            return None
        return {
            i: why_not_alone(witness, self.draws, trust.audit_floor, case.name, i, suspicions.get(i, ""), self.drifting)
            for i, witness in witnesses.items()
        }

    def _layout(self, types: Mapping[str, TensorType]) -> Layout | None:
        """The layout for updates of these types; a job's folder gives the same object again and again."""
        kept = self.layouts.get(id(types))
        if kept is None or kept[0] is not types:
            if len(self.layouts) >= _LAYOUTS:
                self.layouts.clear()
            kept = self.layouts[id(types)] = (types, layout_of(types))
        return kept[1]

    def _estimates(self, case: Case, reading: Reading, layout: Layout) -> dict[int, float]:
        """Distances of late copies to a canonical result whose file is gone, or to the nearest of the copies that were
        valid with it, as far as their fingerprints are there."""
        canonical = int(case.unit["canonical_resultid"])
        if not canonical or reading.sanity.get(canonical, (Sanity.INVALID, ""))[0] != Sanity.INVALID:
            return {}
        with self.database.read() as connection:
            blobs = traces.of_valid(connection, case.name)
        if canonical not in blobs:
            return {}
        kept = [marks for blob in blobs.values() if (marks := read(blob, layout)) is not None]
        mine = {identifier: read(blob, layout) for identifier, blob in reading.marks.items()}
        return {
            i: min(estimate(other, each, layout) for other in kept)
            for i, each in mine.items()
            if kept and each is not None and i not in blobs
        }

    # Copied work.

    def _suspicions(
        self, case: Case, reading: Reading, layout: Layout, kind: str, alike: str, codec: Codec
    ) -> dict[int, str]:
        """Why some of the copies that are not judged yet look as if they had not been computed."""
        found: dict[int, str] = {}
        job, version = case.job, int(case.task["version"])
        drawn = case.name if codec.differs_by_slot else ""  # the same step is sent otherwise from each slot
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
                (job.id, version, alike, drawn), blob, layout, lambda: self._step(case, layout.names, codec)
            ):
                found[identifier] = f"it is a multiple of the public step from version {version - 1} to {version}"
        return found

    def _look_at_norms(
        self, case: Case, reading: Reading, layout: Layout, kind: str, steps: int, suspicions: dict[int, str]
    ) -> None:
        """Find updates whose size is nothing like that of the latest ones of their kind, number of steps and
        fragment."""
        fragments = case.job.config.fragments
        fragment = int(case.task["version"]) % fragments
        latest = self.norms.get((kind, steps, fragment))
        if latest is None:  # after a restart what is usual is not unknown
            with self.database.read() as connection:
                kept = traces.latest(connection, kind, steps, (fragment, fragments), NORMS)
            known = [work_norm(blob, layout) for blob in reversed(kept) if len(blob) == layout.nbytes]
            latest = self.norms[kind, steps, fragment] = deque(known, maxlen=NORMS)
        for identifier, blob in reading.marks.items():
            norm = work_norm(blob, layout)
            usual = statistics.median(latest) if len(latest) >= LEAST_NORMS else norm
            if not usual * LEAST_NORM <= norm <= usual * STRANGE_NORM:
                suspicions.setdefault(identifier, f"its norm is {norm:.3g} where {usual:.3g} is usual")
            latest.append(norm)

    def _step(self, case: Case, names: tuple[str, ...], codec: Codec) -> dict[str, Array] | None:
        """The server's step to the version that the microtask begins from, as whoever returns it must encode it; None
        if a state is gone."""
        job, version = case.job, int(case.task["version"])
        with self.database.read() as connection:
            rows = [store.version_row(connection, job.id, each) for each in (version - 1, version)]
        try:
            before, after = (
                job.folder.read_state(int(row["version"]), str(row["state_sha256"])) for row in rows if row is not None
            )
        except (OSError, ValueError, ContractError):
            return None
        step = step_as_update(before, after, names)
        return codec.decode(codec.encode(step), {n: TensorType(a.dtype.name, a.shape) for n, a in step.items()})


def _is_plain(case: Case) -> bool:
    """Whether nothing depends on fingerprints: no late copy, and a job that asks for nothing but its quorum."""
    return not case.unit["canonical_resultid"] and case.job.config.trust == _NOTHING_ASKED


def _others(readable: Mapping[int, Any], canonical: int) -> list[int]:
    """The readable copies beside the canonical one; none if that one cannot be read."""
    return [identifier for identifier in readable if identifier != canonical] if canonical in readable else []
