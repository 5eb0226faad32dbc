"""The validator's decision: every branch of BOINC's handle_wu, and those where ours differs on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from boinc_project.states import NEVER, AssimilateState, ErrorMask, Outcome, ServerState, ValidateState
from validator.decision import HONEST_DISTANCE, SOON, Decision, Evidence, ResultChange, Sanity, decide, needed

UNIT = {
    "canonical_resultid": 0,
    "min_quorum": 2,
    "target_nresults": 2,
    "max_success_results": 4,
    "max_total_results": 12,
    "error_mask": 0,
}
GOOD, INVALID, TRANSIENT = (Sanity.GOOD, ""), (Sanity.INVALID, "bad file (truncated)"), (Sanity.TRANSIENT, "disk away")
INCONCLUSIVE = ResultChange(ValidateState.INCONCLUSIVE)


def row(identifier: int, validate: ValidateState = ValidateState.INIT, **columns: Any) -> dict[str, Any]:
    return {
        "id": identifier,
        "server_state": ServerState.OVER,
        "outcome": Outcome.SUCCESS,
        "validate_state": validate,
        **columns,
    }


def run(
    results: list[dict[str, Any]],
    values: Mapping[int, float] | None = None,
    sanity: Mapping[int, tuple[Sanity, str]] | None = None,
    voters: Mapping[int, Any] | None = None,
    known: Mapping[str, Any] | None = None,
    **unit: Any,
) -> Decision:
    """Decide when the copies' contents are these numbers, which agree within 1."""
    workunit = {**UNIT, **unit}
    read = {identifier: (sanity or {}).get(identifier, GOOD) for identifier in needed(workunit, results)}
    values = values or {}
    good = sorted(i for i, (kind, _) in read.items() if kind == Sanity.GOOD)
    distances = {(i, j): abs(values.get(i, 0.0) - values.get(j, 0.0)) for i, j in itertools.combinations(good, 2)}
    who = {int(r["id"]): (voters or {}).get(int(r["id"]), f"user {r['id']}") for r in results}
    return decide(Evidence(workunit, results, read, distances, 1.0, who, **(known or {})))


CANONICAL = {"canonical_resultid": 1}
WON = {"need_validate": 0, "assimilate_state": int(AssimilateState.READY), "transition_time": NEVER}


def test_fewer_copies_than_the_quorum_only_clear_the_flag() -> None:
    assert run([row(1)]) == Decision(workunit={"need_validate": 0})


@pytest.mark.parametrize(
    "other",
    [
        row(2, server_state=ServerState.IN_PROGRESS, outcome=Outcome.INIT),
        row(2, outcome=Outcome.CLIENT_ERROR),
        row(2, outcome=Outcome.VALIDATE_ERROR, validate=ValidateState.INVALID),
        row(2, validate=ValidateState.INVALID),
        row(2, outcome=Outcome.NO_REPLY),
    ],
)
def test_copies_that_failed_or_were_found_invalid_do_not_count_towards_the_quorum(other: dict[str, Any]) -> None:
    assert needed(UNIT, [row(1), other]) == []
    assert run([row(1), other]) == Decision(workunit={"need_validate": 0})


def test_two_agreeing_copies_make_a_canonical_result_and_retire_what_was_not_sent() -> None:
    found = run([row(1), row(2)])
    assert found.canonical in (1, 2)
    assert found.results == {1: ResultChange(ValidateState.VALID), 2: ResultChange(ValidateState.VALID)}
    assert found.workunit == {**WON, "canonical_resultid": found.canonical}
    assert found.retire_unsent and not found.retry


def test_the_copy_that_differs_from_an_agreeing_pair_is_invalid_without_being_an_error() -> None:
    found = run([row(1), row(2, ValidateState.INCONCLUSIVE), row(3)], {3: 9.0})
    assert found.results[3].validate_state == ValidateState.INVALID
    assert found.results[3].outcome is None
    assert {i for i, change in found.results.items() if change.validate_state == ValidateState.VALID} == {1, 2}


def test_two_copies_that_differ_are_inconclusive_and_one_more_is_asked_for() -> None:
    found = run([row(1), row(2)], {2: 9.0})
    assert found.canonical is None
    assert found.results == {1: INCONCLUSIVE, 2: INCONCLUSIVE}
    assert found.workunit == {"need_validate": 0, "target_nresults": 3, "transition_time": SOON}


def test_no_further_copy_is_asked_for_while_one_is_under_way() -> None:
    found = run([row(1), row(2)], {2: 9.0}, target_nresults=3)
    assert found.workunit == {"need_validate": 0}


def test_more_successes_than_allowed_without_agreement_end_the_workunit_as_an_error() -> None:
    results = [row(i, ValidateState.INCONCLUSIVE) for i in range(1, 6)]
    found = run(results, {i: 5.0 * i for i in range(1, 6)}, error_mask=1)
    assert found.workunit == {
        "need_validate": 0,
        "error_mask": 1 | ErrorMask.TOO_MANY_SUCCESS_RESULTS,
        "transition_time": SOON,
    }


def test_exactly_as_many_successes_as_allowed_still_get_one_more_copy() -> None:
    results = [row(i, ValidateState.INCONCLUSIVE) for i in range(1, 5)]
    found = run(results, {i: 5.0 * i for i in range(1, 5)}, target_nresults=4)
    assert found.workunit == {"need_validate": 0, "target_nresults": 5, "transition_time": SOON}


def test_an_invalid_file_is_an_error_of_its_result_and_the_other_copy_waits_for_a_partner() -> None:
    found = run([row(1), row(2)], sanity={2: INVALID})
    assert found.results == {
        1: INCONCLUSIVE,
        2: ResultChange(ValidateState.INVALID, Outcome.VALIDATE_ERROR, "bad file (truncated)"),
    }
    assert found.workunit["need_validate"] == 0
    assert found.workunit["transition_time"] == SOON, "the transitioner makes the replacement"


def test_the_only_copy_being_invalid_wakes_the_transitioner_for_another() -> None:
    found = run([row(1)], sanity={1: INVALID}, min_quorum=1, target_nresults=1)
    assert found.results[1].outcome == Outcome.VALIDATE_ERROR
    assert found.workunit == {"need_validate": 0, "transition_time": SOON}


def test_all_copies_invalid_leave_nothing_inconclusive() -> None:
    found = run([row(1), row(2)], sanity={1: INVALID, 2: INVALID})
    assert {change.outcome for change in found.results.values()} == {Outcome.VALIDATE_ERROR}
    assert "error_mask" not in found.workunit


@pytest.mark.parametrize("others", [{}, {1: INVALID}])
def test_storage_that_is_away_changes_nothing_at_all(others: dict[int, Any]) -> None:
    found = run([row(1), row(2), row(3)], sanity={**others, 3: TRANSIENT})
    assert found.retry and found.note == "disk away"
    assert not found.results and not found.workunit and found.canonical is None


def test_one_user_s_two_copies_are_no_quorum_and_a_copy_of_somebody_else_is_asked_for() -> None:
    results, same = [row(1), row(2)], {1: "mallory", 2: "mallory"}
    found = run(results, voters=same)
    assert found.canonical is None
    assert found.workunit == {"need_validate": 0, "target_nresults": 3, "transition_time": SOON}
    third = run([*results, row(3)], {3: 9.0}, voters=same)
    assert third.canonical is None, "one honest vote against one dishonest vote"
    fourth = run([*results, row(3), row(4)], {3: 9.0, 4: 9.1}, voters=same)
    assert fourth.canonical in (3, 4)
    assert {i for i, c in fourth.results.items() if c.validate_state == ValidateState.INVALID} == {1, 2}


def test_a_quorum_of_three_needs_two_agreeing_votes() -> None:
    found = run([row(1), row(2), row(3)], {3: 9.0}, min_quorum=3, target_nresults=3)
    assert found.canonical in (1, 2)
    assert run([row(1), row(2)], min_quorum=3, target_nresults=3) == Decision(workunit={"need_validate": 0})


def test_a_late_copy_is_judged_against_the_canonical_one() -> None:
    results = [row(1, ValidateState.VALID), row(2, ValidateState.VALID), row(3), row(4)]
    found = run(results, {4: 9.0}, **CANONICAL)
    assert {i: c.validate_state for i, c in found.results.items()} == {3: ValidateState.VALID, 4: ValidateState.INVALID}
    assert found.workunit == {"need_validate": 0, "transition_time": SOON}
    assert found.canonical is None and not found.retire_unsent


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
@pytest.mark.parametrize("values", [(0.0, 0.9, 1.8), (1.8, 0.9, 0.0), (0.9, 0.0, 1.8), (0.0, 0.5, 0.9)])
def test_in_a_chain_everybody_is_valid_in_whatever_order_the_copies_come_in(
    order: tuple[int, ...], values: tuple[float, ...]
) -> None:
    known, unit, states = dict(enumerate(values, 1)), {"target_nresults": 3}, dict[int, ValidateState]()
    for identifier in order:
        states[identifier] = ValidateState.INIT
        found = run([row(i, state) for i, state in sorted(states.items())], known, **unit)
        unit |= {"canonical_resultid": found.canonical} if found.canonical else {}
        states.update({i: change.validate_state for i, change in found.results.items()})
    assert unit["canonical_resultid"] and set(states.values()) == {ValidateState.VALID}


def test_a_late_copy_that_is_near_another_valid_one_says_so_and_is_no_excuse_beyond() -> None:
    results = [row(1, ValidateState.VALID), row(2, ValidateState.VALID), row(3), row(4)]
    found = run(results, {2: 0.9, 3: 1.8, 4: 2.0}, **CANONICAL)
    assert found.results[3].validate_state == ValidateState.VALID
    assert "[RESULT#2], which is valid" in found.results[3].reason
    assert found.results[4].validate_state == ValidateState.INVALID, "3 is not valid yet"


@pytest.mark.parametrize("away", [1, 2])
def test_late_copies_wait_while_a_valid_one_cannot_be_read(away: int) -> None:
    results = [row(1, ValidateState.VALID), row(2, ValidateState.VALID), row(3)]
    assert run(results, sanity={away: TRANSIENT}, **CANONICAL) == Decision(retry=True, note="disk away")


def test_a_late_copy_with_a_bad_file_is_an_error() -> None:
    found = run([row(1, ValidateState.VALID), row(3)], sanity={3: INVALID}, **CANONICAL)
    assert found.results == {3: ResultChange(ValidateState.INVALID, Outcome.VALIDATE_ERROR, INVALID[1])}


def test_a_late_copy_is_too_late_and_not_invalid_when_we_deleted_the_canonical_file() -> None:
    found = run([row(1, ValidateState.VALID), row(3)], sanity={1: INVALID}, **CANONICAL)
    assert found.results[3].validate_state == ValidateState.TOO_LATE
    assert found.results[3].outcome is None
    assert found.workunit == {"need_validate": 0, "transition_time": SOON}


def test_a_late_copy_beside_a_canonical_result_whose_row_is_gone_is_too_late_and_the_flag_is_cleared() -> None:
    found = run([row(3)], **CANONICAL)
    assert found.results[3].validate_state == ValidateState.TOO_LATE
    assert found.workunit["need_validate"] == 0


@pytest.mark.parametrize("apart, differs", [(0.004, True), (HONEST_DISTANCE, True), (0.06, False), (9.0, False)])
@pytest.mark.parametrize("late", [False, True])
def test_a_small_disagreement_is_told_from_another_computation(apart: float, differs: bool, late: bool) -> None:
    results = [row(1, ValidateState.VALID if late else ValidateState.INIT), row(2), row(3)]
    unit = {**UNIT, **(CANONICAL if late else {})}
    read = dict.fromkeys(needed(unit, results), GOOD)
    distances = {(1, 2): 0.0, (1, 3): apart, (2, 3): apart}
    found = decide(Evidence(unit, results, read, distances, 0.001, {1: "a", 2: "b", 3: "c"}))
    assert found.results[3].validate_state == ValidateState.INVALID
    assert found.results[3].differs is differs and not found.results[2].differs


@pytest.mark.parametrize("away", [1, 3])
def test_late_copies_wait_while_storage_is_away(away: int) -> None:
    found = run([row(1, ValidateState.VALID), row(3)], sanity={away: TRANSIENT}, **CANONICAL)
    assert found.retry and not found.results and not found.workunit


def test_nothing_to_judge_beside_a_canonical_result_reads_no_file_and_clears_the_flag() -> None:
    results = [row(1, ValidateState.VALID), row(2, ValidateState.VALID), row(3, ValidateState.TOO_LATE)]
    assert needed({**UNIT, **CANONICAL}, results) == []
    assert run(results, **CANONICAL) == Decision(workunit={"need_validate": 0})


def test_results_judged_before_are_never_judged_again() -> None:
    results = [row(1, ValidateState.VALID), row(2, ValidateState.VALID), row(3)]
    assert set(run(results, **CANONICAL).results) == {3}


@pytest.mark.parametrize("order", list(itertools.permutations([1, 2, 3])))
def test_the_decision_does_not_depend_on_the_order_of_the_rows(order: tuple[int, ...]) -> None:
    rows = {i: row(i) for i in (1, 2, 3)}
    values = {1: 0.0, 2: 0.9, 3: 1.8}
    assert run([rows[i] for i in order], values) == run([rows[1], rows[2], rows[3]], values)


# --- one copy that may be enough --------------------------------------------------------------------------------------

ONE = {"min_quorum": 1, "target_nresults": 1}


def test_a_copy_that_may_stand_alone_is_canonical() -> None:
    found = run([row(1)], known={"not_alone": {1: ""}}, **ONE)
    assert found.canonical == 1 and found.results[1] == ResultChange(ValidateState.VALID, alone=True)


def test_a_copy_that_may_not_stand_alone_raises_quorum_and_copies_in_the_row() -> None:
    found = run([row(1)], known={"not_alone": {1: "an audit"}}, **ONE)
    assert found.canonical is None and found.results == {1: INCONCLUSIVE}
    assert found.workunit == {
        "need_validate": 0, "min_quorum": 2, "target_nresults": 2, "transition_time": SOON,
    }  # fmt: skip
    assert "an audit" in found.note


def test_a_second_copy_under_way_is_not_asked_for_twice() -> None:
    found = run([row(1)], known={"not_alone": {1: "an audit"}}, min_quorum=1, target_nresults=2)
    assert found.workunit == {"need_validate": 0, "min_quorum": 2, "target_nresults": 2}


@pytest.mark.parametrize("apart", [0.0, 9.0])
def test_two_copies_that_are_there_must_agree_even_if_each_might_stand_alone(apart: float) -> None:
    found = run([row(1), row(2)], {2: apart}, known={"not_alone": {1: "", 2: ""}}, **ONE)
    assert (found.canonical is not None) is (apart == 0)
    assert not any(change.alone for change in found.results.values())
    if apart:
        assert (found.workunit["min_quorum"], found.workunit["target_nresults"]) == (2, 3)


def test_a_job_s_own_quorum_of_one_is_left_alone_without_adaptive_replication() -> None:
    found = run([row(1)], **ONE)
    assert found.canonical == 1 and not found.results[1].alone


def test_a_second_invalid_copy_leaves_the_first_to_stand_alone_or_not() -> None:
    found = run([row(1), row(2)], sanity={2: INVALID}, known={"not_alone": {1: "an audit"}}, **ONE)
    assert found.canonical is None and found.workunit["min_quorum"] == 2
    assert found.workunit["transition_time"] == SOON


# --- what the server computes itself ----------------------------------------------------------------------------------


def test_a_workunit_that_is_drawn_writes_nothing_until_the_server_has_computed_it() -> None:
    found = run([row(1), row(2)], known={"check": "drawn"})
    assert found == Decision(replay="drawn")


def test_a_drawn_workunit_without_agreement_is_not_computed_yet() -> None:
    found = run([row(1), row(2)], {2: 9.0}, known={"check": "drawn"})
    assert found.replay == "" and found.workunit["target_nresults"] == 3


def test_the_server_s_computation_decides_over_any_majority() -> None:
    replayed = {1: 9.0, 2: 9.0, 3: 0.5, 4: HONEST_DISTANCE}
    results = [row(i) for i in (1, 2, 3)]
    found = run(results, {1: 9.0, 2: 9.0}, known={"replayed": replayed, "check": "drawn"})
    assert found.canonical == 3 and found.retire_unsent
    assert found.workunit == {**WON, "canonical_resultid": 3}
    assert [found.results[i].refuted for i in (1, 2, 3)] == [True, True, False]


def test_a_copy_near_the_server_s_computation_differs_and_is_not_refuted() -> None:
    found = decide(
        Evidence(UNIT, [row(1), row(2)], {1: GOOD, 2: GOOD}, {(1, 2): 0.02}, 0.001, {1: "a", 2: "b"},
                 replayed={1: 0.02, 2: 0.0005})
    )  # fmt: skip
    assert found.canonical == 2
    assert (found.results[1].differs, found.results[1].refuted) == (True, False)


def test_the_copy_nearest_to_the_server_s_computation_is_canonical_and_a_tie_goes_to_the_smaller_id() -> None:
    assert run([row(1), row(2)], known={"replayed": {1: 0.4, 2: 0.3}}).canonical == 2
    assert run([row(1), row(2)], known={"replayed": {1: 0.3, 2: 0.3}}).canonical == 1


def test_if_no_copy_is_what_the_server_computed_all_are_invalid_and_more_are_made() -> None:
    found = run([row(1), row(2)], known={"replayed": {1: 9.0, 2: 9.0}})
    assert found.canonical is None and found.workunit == {"need_validate": 0, "transition_time": SOON}
    assert {change.validate_state for change in found.results.values()} == {ValidateState.INVALID}


DISPUTES = {"disputes": True}


def test_two_camps_with_the_votes_and_copies_beyond_the_limit_go_to_the_server() -> None:
    camps = run([row(i) for i in (1, 2, 3, 4)], {3: 9.0, 4: 9.0}, known=DISPUTES, max_success_results=9)
    assert "two camps" in camps.replay
    limit = run([row(i) for i in (1, 2, 3, 4)], {i: 9.0 * i for i in (1, 2, 3, 4)}, known=DISPUTES)
    assert limit == Decision(replay="4 copies do not agree")
    errors = [row(i, outcome=Outcome.CLIENT_ERROR) for i in range(3, 13)]
    total = run([row(1), row(2), *errors], {2: 9.0}, known=DISPUTES)
    assert "no more than 12 copies" in total.replay


def test_an_ordinary_disagreement_asks_for_one_more_copy_before_the_server_is_asked() -> None:
    found = run([row(1), row(2)], {2: 9.0}, known=DISPUTES)
    assert found.replay == "" and found.workunit["target_nresults"] == 3


# --- late copies beside a canonical file that is gone -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("apart", "expected"),
    [(1.0, ValidateState.VALID), (1.01, ValidateState.INVALID), (None, ValidateState.TOO_LATE)],
)
def test_a_late_copy_is_judged_by_the_fingerprint_where_that_is_clear(
    apart: float | None, expected: ValidateState
) -> None:
    known = {"estimates": {} if apart is None else {3: apart}}
    found = run([row(1, ValidateState.VALID), row(3)], sanity={1: INVALID}, known=known, **CANONICAL)
    assert found.results[3].validate_state == expected and found.results[3].outcome is None


def test_between_tolerance_and_honest_distance_the_fingerprint_says_nothing() -> None:
    results = [row(1, ValidateState.VALID), row(3)]
    evidence = Evidence({**UNIT, **CANONICAL}, results, {1: INVALID, 3: GOOD}, {}, 1e-4, {3: "c"}, {3: 0.01})
    assert decide(evidence).results[3].validate_state == ValidateState.TOO_LATE


def test_a_copy_that_looks_copied_costs_the_server_s_time_only_where_it_would_be_accepted() -> None:
    """Or anybody could have the server compute every workunit, by sending one old update again and again."""
    results, values = [row(1), row(2), row(3)], {1: 0.0, 2: 0.0, 3: 9.0}
    known = {"copied": frozenset({3}), "disputes": True}
    found = run(results, values, known=known)
    assert found.canonical in (1, 2) and not found.replay
    assert found.results[3].validate_state == ValidateState.INVALID
    for wrong in (1, 2):
        assert "looks copied" in run(results, values, known={**known, "copied": frozenset({wrong})}).replay
    assert not run(results[1:], values, known=known).replay, "two copies that do not agree are no dispute yet"
