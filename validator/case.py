"""A workunit to be judged, as the database had it, and what is to be written for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from boinc_project import store
from boinc_project.contract.codecs import Array
from boinc_project.gt_tables import Judgement
from boinc_project.states import ValidateState
from boinc_project.store import JobRow
from validator.decision import Decision, ResultChange
from validator.fingerprint import Layout, fingerprints
from validator.voters import Records

_TOGETHER = 32  # updates whose fingerprints are made in one go: their numbers stay in the processor's cache
_INFINITE = 1e9  # a distance that a database can hold, for updates whose integers differ


@dataclass(frozen=True)
class Case:
    """A workunit with its results by ascending id, the microtask behind it and that one's job."""

    unit: store.Row
    results: Sequence[store.Row]
    task: store.Row
    job: JobRow
    records: Records | None = None  # of the results' makers; None where nothing asks for them

    @property
    def id(self) -> int:
        return int(self.unit["id"])

    @property
    def name(self) -> str:
        return str(self.unit["name"])

    def __str__(self) -> str:
        number = f"#{self.id}" if self.id > 0 else ""  # of one that BOINC may have purged (validator/rechecks.py)
        return f"[WU{number} {self.unit['name']}]"


@dataclass(frozen=True)
class Unmarked:
    """Small updates whose fingerprints nothing has needed yet, by result id; many of them are made in one go."""

    layout: Layout
    tensors: Mapping[int, Mapping[str, Array]]
    marks: dict[int, bytes]  # of the verdict


def make_marks(verdicts: Sequence[Verdict]) -> None:
    """Make the fingerprints that are still to be made."""
    by_layout: dict[int, list[tuple[Unmarked, int]]] = {}
    for verdict in verdicts:
        if (unmarked := verdict.unmarked) is not None:
            settled = (i for i in unmarked.tensors if (c := verdict.decision.results.get(i)) and _word(c, False))
            by_layout.setdefault(id(unmarked.layout), []).extend((unmarked, i) for i in settled)
    for wanted in by_layout.values():
        for start in range(0, len(wanted), _TOGETHER):
            part = wanted[start : start + _TOGETHER]
            blobs = fingerprints([unmarked.tensors[i] for unmarked, i in part], part[0][0].layout)
            for (unmarked, i), blob in zip(part, blobs, strict=True):
                unmarked.marks[i] = blob


@dataclass(frozen=True)
class Verdict:
    """What is to be written for a case.

    Of the readable payloads, by result id: `digests`, `marks` (fingerprints), `distances` to the canonical one;
    `suspicions` says of which of them why they look copied. `unmarked`: what `marks` are still to be made from.
    `accepted` is the row of gt_accepted, if there is one.
    """

    case: Case
    decision: Decision
    digests: Mapping[int, str]
    marks: Mapping[int, bytes]
    distances: Mapping[int, float]
    suspicions: Mapping[int, str]
    kind: str
    accepted: store.Row | None = None
    unmarked: Unmarked | None = None

    def caught(self) -> list[store.Row]:
        """The readable results that this verdict finds beyond the tolerance. Those as near as unlike hardware comes are
        among them: a small lie is told from rounding by nothing but what else its host has sent."""
        found = []
        for row in self.case.results:
            change = self.decision.results.get(int(row["id"]))
            if change is None or change.validate_state == row["validate_state"]:
                continue
            if change.validate_state == ValidateState.INVALID and int(row["id"]) in self.digests:
                found.append(row)
        return found

    def trails(self, now: float) -> list[store.Row]:
        """Rows of gt_fingerprint for the results that this verdict settles."""
        found: list[store.Row] = []
        for row in self.case.results:
            identifier = int(row["id"])
            change = self.decision.results.get(identifier)
            word = None if change is None else _word(change, identifier == self.decision.canonical)
            if word is not None and identifier in self.marks:
                apart = self.distances.get(identifier)
                found.append(
                    {
                        "workunit_name": self.case.name,
                        "result_id": identifier,
                        "host_id": int(row["hostid"]),
                        "user_id": int(row["userid"]),
                        "app_version_id": int(row["app_version_id"]),
                        "kind": self.kind,
                        "verdict": str(word),
                        "distance": apart if apart is None or math.isfinite(apart) else _INFINITE,
                        "judge_time": now,
                        "marks": self.marks[identifier],
                    }
                )
        return found


def _word(change: ResultChange, canonical: bool) -> Judgement | None:
    """What a row of gt_fingerprint calls a verdict; None for one that is none yet."""
    if change.validate_state == ValidateState.VALID:
        if change.alone:
            return Judgement.ALONE
        return Judgement.CANONICAL if canonical else Judgement.VALID
    if change.validate_state == ValidateState.INVALID:
        return Judgement.DIFFERS if change.differs else Judgement.FAULTY
    return Judgement.TOO_LATE if change.validate_state == ValidateState.TOO_LATE else None
