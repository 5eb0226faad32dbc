"""What the validator does with a workunit: one pure decision over all of its copies.

The branches are those of BOINC's handle_wu (sched/validator.cpp): a canonical result exists already (late
results are judged against it), or a set of viable results may form a quorum. Nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from boinc_project.states import NEVER, AssimilateState, ErrorMask, Outcome, ServerState, ValidateState
from validator.agreement import Copy, judge

Row = Mapping[str, Any]

#: Copies farther apart than their tolerance, but no farther than this, differ as unlike hardware does (reduced
#: precision, a drifting card); beyond it somebody computed something else.
HONEST_DISTANCE = 0.05


#: As a new transition_time: the transitioner is to look at the workunit (store.soon() says which number that is).
SOON = -1


class Sanity(Enum):
    """What reading one result's files gave."""

    GOOD = "good"
    INVALID = "invalid"  # the volunteer's file is wrong
    TRANSIENT = "transient"  # our storage is away


@dataclass(frozen=True)
class ResultChange:
    """New fields of one result row. `differs`: invalid, but close enough to be an honest disagreement."""

    validate_state: ValidateState
    outcome: Outcome | None = None
    reason: str = ""
    differs: bool = False


@dataclass(frozen=True)
class Decision:
    """Everything to write for one workunit, or `retry` (write nothing, look again later)."""

    results: Mapping[int, ResultChange] = field(default_factory=dict)
    canonical: int | None = None
    workunit: Mapping[str, Any] = field(default_factory=dict)
    retire_unsent: bool = False
    retry: bool = False
    note: str = ""


def is_viable(row: Row) -> bool:
    """OVER, SUCCESS and not found invalid."""
    return bool(
        row["server_state"] == ServerState.OVER
        and row["outcome"] == Outcome.SUCCESS
        and row["validate_state"] != ValidateState.INVALID
    )


def is_open(row: Row) -> bool:
    """Viable and not judged yet."""
    return is_viable(row) and row["validate_state"] in (ValidateState.INIT, ValidateState.INCONCLUSIVE)


def needed(workunit: Row, results: Sequence[Row]) -> list[int]:
    """Ids of the results whose files must be read before deciding."""
    viable = [row for row in results if is_viable(row)]
    if workunit["canonical_resultid"]:
        fresh = [int(row["id"]) for row in viable if is_open(row)]
        return [*fresh, *_canonical_id(workunit, results)] if fresh else []
    return [int(row["id"]) for row in viable] if len(viable) >= workunit["min_quorum"] else []


def _canonical_id(workunit: Row, results: Sequence[Row]) -> list[int]:
    """The canonical result's id, unless its row is gone."""
    return [int(row["id"]) for row in results if row["id"] == workunit["canonical_resultid"]]


@dataclass(frozen=True)
class Evidence:
    """What a decision is taken from.

    sanity     for each id of `needed`: what reading its files gave, and why
    distances  of each pair of good copies, keyed by (smaller id, larger id)
    tolerance  the largest distance of copies that agree
    voters     who made a result, by its id; copies of one voter are one vote
    estimates  of good copies whose canonical file is gone: the distance that the two fingerprints tell
    """

    workunit: Row
    results: Sequence[Row]
    sanity: Mapping[int, tuple[Sanity, str]]
    distances: Mapping[tuple[int, int], float]
    tolerance: float
    voters: Mapping[int, Hashable]
    estimates: Mapping[int, float] = field(default_factory=dict)

    def compared(self, identifier: int, canonical: int) -> ResultChange:
        """The verdict over a readable copy beside the canonical result."""
        apart = self.distances[min(identifier, canonical), max(identifier, canonical)]
        reason = f"distance {apart:.2g} to the canonical result"
        if apart <= self.tolerance:
            return ResultChange(ValidateState.VALID, reason=reason)
        return ResultChange(ValidateState.INVALID, reason=reason, differs=apart <= HONEST_DISTANCE)

    def estimated(self, identifier: int) -> ResultChange:
        """The verdict over a readable copy when the canonical file is gone: we deleted the evidence ourselves, so
        nobody is to blame unless its fingerprint speaks clearly.

        Within the tolerance it is valid: what it earns is credit, nothing of it is folded, so that a change which the
        fingerprint cannot see gains nothing. Farther than honest hardware differs it is invalid: the estimate is
        then far above its own error. Between the two it is too late.
        """
        apart = self.estimates.get(identifier)
        if apart is None:
            return ResultChange(ValidateState.TOO_LATE, reason="the canonical file is gone")
        reason = f"estimated distance {apart:.2g} to the canonical result, whose file is gone"
        if apart <= self.tolerance:
            return ResultChange(ValidateState.VALID, reason=reason)
        if apart > HONEST_DISTANCE:
            return ResultChange(ValidateState.INVALID, reason=reason)
        return ResultChange(ValidateState.TOO_LATE, reason=reason)


def decide(evidence: Evidence) -> Decision:
    """Decide over a workunit."""
    return _late_results(evidence) if evidence.workunit["canonical_resultid"] else _quorum(evidence)


def _late_results(evidence: Evidence) -> Decision:
    """Judge what came after the canonical result."""
    workunit, results, sanity = evidence.workunit, evidence.results, evidence.sanity
    canonical = int(workunit["canonical_resultid"])
    fresh = [int(row["id"]) for row in results if is_open(row) and row["id"] != canonical]
    if not fresh:
        return Decision(workunit={"need_validate": 0})
    of_canonical = sanity.get(canonical, (Sanity.INVALID, "its row is gone"))
    if of_canonical[0] == Sanity.TRANSIENT:
        return Decision(retry=True, note=of_canonical[1])
    changes: dict[int, ResultChange] = {}
    for identifier in fresh:
        kind, reason = sanity[identifier]
        if kind == Sanity.TRANSIENT:
            return Decision(retry=True, note=reason)
        if kind == Sanity.INVALID:
            changes[identifier] = ResultChange(ValidateState.INVALID, Outcome.VALIDATE_ERROR, reason)
        elif of_canonical[0] == Sanity.INVALID:
            changes[identifier] = evidence.estimated(identifier)
        else:
            changes[identifier] = evidence.compared(identifier, canonical)
    return Decision(changes, workunit={"need_validate": 0, "transition_time": SOON})


def _quorum(evidence: Evidence) -> Decision:
    """Look for a canonical result among the viable ones."""
    workunit, results, sanity = evidence.workunit, evidence.results, evidence.sanity
    viable = [row for row in results if is_viable(row)]
    min_quorum = int(workunit["min_quorum"])
    if len(viable) < min_quorum:
        return Decision(workunit={"need_validate": 0})
    transient = [sanity[int(row["id"])][1] for row in viable if sanity[int(row["id"])][0] == Sanity.TRANSIENT]
    if transient:
        return Decision(retry=True, note=transient[0])
    changes: dict[int, ResultChange] = {}
    copies = []
    for row in viable:
        identifier = int(row["id"])
        kind, reason = sanity[identifier]
        if kind == Sanity.INVALID:
            changes[identifier] = ResultChange(ValidateState.INVALID, Outcome.VALIDATE_ERROR, reason)
        else:
            copies.append(Copy(identifier, evidence.voters[identifier]))
    votes = min_quorum // 2 + 1  # BOINC's rule: a majority of the quorum must agree
    enough = len(copies) >= min_quorum
    verdict = judge(copies, evidence.distances, evidence.tolerance, votes) if enough else None
    if verdict is not None and verdict.canonical is not None:
        for identifier in verdict.valid:
            changes[identifier] = ResultChange(ValidateState.VALID)
        for identifier in verdict.invalid:
            changes[identifier] = evidence.compared(identifier, verdict.canonical)
        return Decision(
            changes,
            canonical=verdict.canonical,
            workunit={
                "need_validate": 0,
                "canonical_resultid": verdict.canonical,
                "assimilate_state": int(AssimilateState.READY),
                # Not now: the assimilator wakes the transitioner when it is done (facts in sched/validator.cpp).
                "transition_time": NEVER,
            },
            retire_unsent=True,
        )
    return _no_consensus(workunit, len(copies), changes, [copy.identifier for copy in copies])


def _no_consensus(workunit: Row, good: int, changes: dict[int, ResultChange], undecided: Sequence[int]) -> Decision:
    """More copies must tell: ask for one more, unless there have been too many successes already."""
    fields: dict[str, Any] = {"need_validate": 0}
    for identifier in undecided:
        changes[identifier] = ResultChange(ValidateState.INCONCLUSIVE)
    if any(change.validate_state == ValidateState.INVALID for change in changes.values()):
        fields["transition_time"] = SOON
    if good > workunit["max_success_results"]:
        fields["error_mask"] = int(workunit["error_mask"]) | int(ErrorMask.TOO_MANY_SUCCESS_RESULTS)
        fields["transition_time"] = SOON
    elif good >= workunit["target_nresults"]:
        fields["target_nresults"] = good + 1
        fields["transition_time"] = SOON
    return Decision(changes, workunit=fields, note=f"no agreement among {good} copies")


def doubted(evidence: Evidence, decision: Decision, why: str) -> Decision:
    """What follows if copies agree on an update that other evidence speaks against: nobody is judged by it.

    One more copy is to compute the same; if more than a quorum agree already, the workunit fails, and its samples go
    into a fresh one.
    """
    unit = evidence.workunit
    broken = {i: each for i, each in decision.results.items() if each.outcome == Outcome.VALIDATE_ERROR}
    agreed = sum(each.validate_state == ValidateState.VALID for each in decision.results.values())
    readable = sorted(set(decision.results) - set(broken))
    made = _no_consensus(unit, len(readable), broken, readable)
    fields = dict(made.workunit)
    if agreed > unit["min_quorum"]:
        fields.pop("target_nresults", None)
        mask = int(unit["error_mask"]) | int(ErrorMask.TOO_MANY_SUCCESS_RESULTS)
        fields.update(error_mask=mask, transition_time=SOON)
    return Decision(made.results, workunit=fields, note=f"{agreed} copies agree, but {why}")
