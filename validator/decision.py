"""What the validator does with a workunit: one pure decision over all of its copies.

The branches are those of BOINC's handle_wu (sched/validator.cpp): a canonical result exists already (late
results are judged against it), or a set of viable results may form a quorum. Nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from boinc_project.states import NEVER, AssimilateState, ErrorMask, Outcome, ServerState, ValidateState
from validator.agreement import Copy, Verdict, judge

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
    """New fields of one result row, and what its host's record needs to know.

    differs   invalid, but close enough to be an honest disagreement
    alone     valid without anybody else's copy beside it
    refuted   invalid by the server's own computation
    """

    validate_state: ValidateState
    outcome: Outcome | None = None
    reason: str = ""
    differs: bool = False
    alone: bool = False
    refuted: bool = False


@dataclass(frozen=True)
class Decision:
    """Everything to write for one workunit, or `retry` (write nothing, look again later), or `replay`: why the server
    must compute the microtask itself first (write nothing, look again when that is done)."""

    results: Mapping[int, ResultChange] = field(default_factory=dict)
    canonical: int | None = None
    workunit: Mapping[str, Any] = field(default_factory=dict)
    retire_unsent: bool = False
    retry: bool = False
    replay: str = ""
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
        return [*fresh, *settled(workunit, results)] if fresh else []
    return [int(row["id"]) for row in viable] if len(viable) >= workunit["min_quorum"] else []


def settled(workunit: Row, results: Sequence[Row]) -> list[int]:
    """Ids of the canonical result, unless its row is gone, and of those that were found valid beside it."""
    canonical = workunit["canonical_resultid"]
    return [
        int(row["id"])
        for row in results
        if row["id"] == canonical or (is_viable(row) and row["validate_state"] == ValidateState.VALID)
    ]


@dataclass(frozen=True)
class Evidence:
    """What a decision is taken from.

    sanity     for each id of `needed`: what reading its files gave, and why
    distances  of each pair of good copies, keyed by (smaller id, larger id)
    tolerance  the largest distance of copies that agree
    voters     who made a result, by its id; copies of one voter are one vote
    estimates  of good copies whose canonical file is gone: the distance that its fingerprint tells, or that of another
               valid copy if that one is nearer
    reasons    why copies are no votes of their own, by id (validator/voters.py)
    established  ids of the copies whose makers may carry a quorum; None: all
    not_alone  of a workunit for which one copy may be enough: why this one is not, by id, or ''; None: no such workunit
    check      why the server must compute this microtask itself before a result is canonical; '': it need not
    copied     copies that look as if they had not been computed: before one of them is valid, the server must compute
               the microtask (one that disagrees is invalid anyway, and must not cost the server's time)
    disputes   whether the server computes what the copies do not agree on
    replayed   distances of the good copies to what the server computed; None: it has not, or could not
    hopeless   whether the server has tried to compute it, and could not
    """

    workunit: Row
    results: Sequence[Row]
    sanity: Mapping[int, tuple[Sanity, str]]
    distances: Mapping[tuple[int, int], float]
    tolerance: float
    voters: Mapping[int, Hashable]
    estimates: Mapping[int, float] = field(default_factory=dict)
    reasons: Mapping[int, str] = field(default_factory=dict)
    established: Set[int] | None = None
    not_alone: Mapping[int, str] | None = None
    check: str = ""
    copied: Set[int] = frozenset()
    disputes: bool = False
    replayed: Mapping[int, float] | None = None
    hopeless: bool = False

    def compared(self, identifier: int, canonical: int, valid: Sequence[int] = ()) -> ResultChange:
        """The verdict over a readable copy beside the canonical result, or beside the nearest of those that are valid.

        In a chain A~B~C each of the three may become the canonical one, as they come in. So that nobody loses by
        that, a late copy is valid too that is within the tolerance of another valid one: all it earns is credit.
        """
        beside = {canonical, *valid}
        apart, nearest = min((self.distances[min(identifier, i), max(identifier, i)], i) for i in beside)
        name = "the canonical result" if nearest == canonical else f"[RESULT#{nearest}], which is valid"
        reason = f"distance {apart:.2g} to {name}"
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
    beside = settled(workunit, results)
    away = [sanity[i][1] for i in beside if sanity[i][0] == Sanity.TRANSIENT]
    if away:
        return Decision(retry=True, note=away[0])
    readable = [i for i in beside if sanity[i][0] == Sanity.GOOD]
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
            changes[identifier] = evidence.compared(identifier, canonical, readable)
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
            known = evidence.established is None or identifier in evidence.established
            copies.append(Copy(identifier, evidence.voters[identifier], known))
    ids = [copy.identifier for copy in copies]
    if ids and evidence.replayed is not None:
        return _by_replay(evidence, ids, changes)
    raised, why = _raised_quorum(evidence, ids)
    votes = raised // 2 + 1  # BOINC's rule: a majority of the quorum must agree
    verdict = judge(copies, evidence.distances, evidence.tolerance, votes) if len(copies) >= raised else None
    if verdict is not None and verdict.canonical is not None:
        check = evidence.check or ("a copy of it looks copied" if evidence.copied & verdict.valid else "")
        if check:
            return Decision(replay=check)
        alone = evidence.not_alone is not None and raised == 1
        for identifier in verdict.valid:
            changes[identifier] = ResultChange(ValidateState.VALID, alone=alone)
        for identifier in verdict.invalid:
            changes[identifier] = evidence.compared(identifier, verdict.canonical)
        return _found(verdict.canonical, changes)
    if evidence.disputes and copies and (reason := _beyond_agreement(evidence, len(copies), verdict)):
        return Decision(replay=reason)
    return _no_consensus(evidence, ids, changes, raised, why)


def _found(canonical: int, changes: Mapping[int, ResultChange]) -> Decision:
    """A canonical result."""
    return Decision(
        changes,
        canonical=canonical,
        workunit={
            "need_validate": 0,
            "canonical_resultid": canonical,
            "assimilate_state": int(AssimilateState.READY),
            # Not now: the assimilator wakes the transitioner when it is done (facts in sched/validator.cpp).
            "transition_time": NEVER,
        },
        retire_unsent=True,
    )


def _raised_quorum(evidence: Evidence, ids: Sequence[int]) -> tuple[int, str]:
    """The quorum that these copies need, and why it is more than the workunit's own.

    Where one copy may be enough, two that are there must agree: one of them is not picked over the other. Copies
    without a vote do not count here: beside one of them another may still stand alone.
    """
    min_quorum = int(evidence.workunit["min_quorum"])
    voting = [identifier for identifier in ids if evidence.voters[identifier] is not None]
    if min_quorum > 1 or evidence.not_alone is None or not voting:
        return min_quorum, ""
    if len(voting) > 1:
        return 2, ""
    why = evidence.not_alone.get(voting[0], "")
    return (2, why) if why else (1, "")


def _beyond_agreement(evidence: Evidence, good: int, verdict: Verdict | None) -> str:
    """Why more copies would not help, or ''."""
    workunit = evidence.workunit
    if verdict is not None and verdict.camps:
        return "two camps have the votes"
    if good >= workunit["max_success_results"]:
        return f"{good} copies do not agree"
    if len(evidence.results) >= workunit["max_total_results"] and good >= workunit["target_nresults"]:
        return f"no more than {workunit['max_total_results']} copies are made, and those that are there do not agree"
    return ""


def _by_replay(evidence: Evidence, ids: Sequence[int], changes: dict[int, ResultChange]) -> Decision:
    """The server's own computation is there: copies within the tolerance of it are valid, whoever agrees with whom.

    Others differ honestly up to HONEST_DISTANCE and are refuted beyond it. If none is valid, another copy is made; the
    server's update is no result and is never folded.
    """
    assert evidence.replayed is not None
    apart = evidence.replayed
    for identifier in ids:
        reason = f"distance {apart[identifier]:.2g} to what the server computed"
        if apart[identifier] <= evidence.tolerance:
            changes[identifier] = ResultChange(ValidateState.VALID, reason=reason)
        else:
            differs = apart[identifier] <= HONEST_DISTANCE
            changes[identifier] = ResultChange(
                ValidateState.INVALID, reason=reason, differs=differs, refuted=not differs
            )
    valid = [identifier for identifier in ids if apart[identifier] <= evidence.tolerance]
    if valid:
        return _found(min(valid, key=lambda i: (apart[i], i)), changes)
    return Decision(
        changes, workunit={"need_validate": 0, "transition_time": SOON}, note="no copy is what the server computed"
    )


def _no_consensus(
    evidence: Evidence, undecided: Sequence[int], changes: dict[int, ResultChange], quorum: int, why: str
) -> Decision:
    """More copies must tell: ask for one more, unless there have been too many successes already."""
    workunit = evidence.workunit
    fields: dict[str, Any] = {"need_validate": 0}
    good = len(undecided)
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
    if quorum > workunit["min_quorum"]:
        fields["min_quorum"] = quorum
        wanted = int(fields["target_nresults"] if "target_nresults" in fields else workunit["target_nresults"])
        fields["target_nresults"] = max(quorum, wanted)
    note = f"a second copy is needed: {why}" if why else f"no agreement among {good} copies"
    note = "; ".join([note, *(evidence.reasons[i] for i in undecided if i in evidence.reasons)])
    return Decision(changes, workunit=fields, note=note)


def doubted(evidence: Evidence, decision: Decision, why: str) -> Decision:
    """What follows if copies agree on an update that other evidence speaks against: nobody is judged by it.

    The server computes the microtask itself where the job has it settle disputes. Else one more copy is to compute the
    same; if more than a quorum agree already, the workunit fails, and its samples go into a fresh one.
    """
    if evidence.disputes:
        return Decision(replay=why)
    unit = evidence.workunit
    broken = {i: each for i, each in decision.results.items() if each.outcome == Outcome.VALIDATE_ERROR}
    agreed = sum(each.validate_state == ValidateState.VALID for each in decision.results.values())
    readable = sorted(set(decision.results) - set(broken))
    made = _no_consensus(evidence, readable, broken, int(unit["min_quorum"]), "")
    fields = dict(made.workunit)
    if agreed > unit["min_quorum"]:
        fields.pop("target_nresults", None)
        mask = int(unit["error_mask"]) | int(ErrorMask.TOO_MANY_SUCCESS_RESULTS)
        fields.update(error_mask=mask, transition_time=SOON)
    return Decision(made.results, workunit=fields, note=f"{agreed} copies agree, but {why}")
