"""Decides what to issue: pure functions from what is there to what should be done.

What it is: the rules of supply (which slots of the open round need a workunit, which straggler needs another
copy, when a job is finished, which published files nobody needs any more). What it is not: it reads no
database and writes nothing (__main__.py does).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from boinc_project.gt_tables import MicrotaskState
from boinc_project.job_config import JobConfig, SupplySection
from boinc_project.states import NEVER
from boinc_project.store import Ended
from boinc_project.supply_limits import MAX_ATTEMPTS
from work_generator.speed_classes import Place

Row = Mapping[str, Any]
_OVER = (MicrotaskState.FAILED, MicrotaskState.CANCELLED)


@dataclass(frozen=True)
class Issue:
    """Make a workunit for this slot; `attempt` counts from 0. The microtask of a slot is always the same.

    `place`: its batches, where microtasks have unlike numbers of them (speed_classes.py).
    """

    slot: int
    attempt: int
    place: Place | None = None


def slots_to_issue(microtasks: Sequence[Row], slots: int) -> list[Issue]:
    """Slots of the open round that have no live workunit and still may have one."""
    wanted = []
    by_slot = _by_slot(microtasks)
    for slot in range(slots):
        attempts = sorted(by_slot.get(slot, []), key=lambda m: int(m["attempt"]))
        if not attempts:
            wanted.append(Issue(slot, 0))
        elif attempts[-1]["state"] in _OVER and _failures(attempts) < MAX_ATTEMPTS:
            wanted.append(Issue(slot, int(attempts[-1]["attempt"]) + 1))
    return wanted


def flow_to_issue(microtasks: Sequence[Row], next_slot: int, in_flight: int) -> list[Issue]:
    """What a flow lacks of its `in_flight` open microtasks: first those that failed, again, then new slots.

    `microtasks` are those of all versions whose results are still applied: what is older and still out no longer
    counts as open. `next_slot` is the first slot that nobody has had.
    """
    by_slot = _by_slot(microtasks)
    lacking = in_flight - sum(1 for row in microtasks if row["state"] == MicrotaskState.ISSUED)
    newest = {slot: max(attempts, key=lambda m: int(m["attempt"])) for slot, attempts in sorted(by_slot.items())}
    again = [
        Issue(slot, int(row["attempt"]) + 1)
        for slot, row in newest.items()
        if row["state"] in _OVER and _failures(by_slot[slot]) < MAX_ATTEMPTS
    ]
    fresh = [Issue(slot, 0) for slot in range(next_slot, next_slot + lacking - len(again))]
    return [*again, *fresh][: max(0, lacking)]


def skipped_slots(microtasks: Sequence[Row]) -> list[int]:
    """Slots whose workunits failed so often that their samples are left out."""
    return [slot for slot, attempts in sorted(_by_slot(microtasks).items()) if _failures(attempts) >= MAX_ATTEMPTS]


def hopeless(config: JobConfig, microtasks: Sequence[Row]) -> bool:
    """Whether every slot failed on every try: all of a round, or as many in a row as a flow has out at a time."""
    given_up = skipped_slots(microtasks)
    if not config.policy.flow:
        return len(given_up) == config.train.microtasks_per_version
    folded = any(row["state"] == MicrotaskState.FOLDED for row in microtasks)
    return not folded and len(given_up) >= config.aggregation.in_flight


def slots_of(microtasks: Sequence[Row]) -> dict[str, int]:
    """The slot of each workunit that was not withdrawn, by its name."""
    return {str(m["workunit_name"]): int(m["slot"]) for m in microtasks if m["state"] != MicrotaskState.CANCELLED}


def _by_slot(microtasks: Sequence[Row]) -> dict[int, list[Row]]:
    found: dict[int, list[Row]] = {}
    for row in microtasks:
        found.setdefault(int(row["slot"]), []).append(row)
    return found


def _failures(attempts: Sequence[Row]) -> int:
    return sum(1 for attempt in attempts if attempt["state"] == MicrotaskState.FAILED)


@dataclass(frozen=True)
class Failure:
    """Why a job stops: so many of its newest version's tasks failed, on so many hosts."""

    errors: int
    tasks: int
    hosts: int
    app_version: int | None  # the only one that failed, by its id; None if several did


def failing(ended: Sequence[Ended], section: SupplySection) -> Failure | None:
    """Whether so many tasks of a version fail that issuing more would only cost volunteers their time and quota.

    At least `failing_after` of them must have ended, `failing_share` of these in errors; both by hosts and by slots.
    No host counts for more than its part, `failing_after` divided by the hosts that answered, and two hosts at least
    must have failed: one broken computer, however fast it fails, is its owner's trouble and not the job's. The same
    holds for slots: one whose samples nobody can compute is skipped after its last try, and the others go on.
    """
    hosts, slots = _tallies((each.host, each) for each in ended), _tallies((each.slot, each) for each in ended)
    if not (_mostly_fail(hosts, section) and _mostly_fail(slots, section)):
        return None
    versions = {each.app_version for each in ended if each.errors}
    errors, tasks = (sum(column) for column in zip(*hosts, strict=True))
    failed = sum(1 for wrong, _ in hosts if wrong)
    return Failure(errors, tasks, failed, versions.pop() if len(versions) == 1 else None)


def _tallies(ended: Iterable[tuple[int, Ended]]) -> list[tuple[int, int]]:
    """(errors, tasks) of each host or slot."""
    found: dict[int, tuple[int, int]] = {}
    for key, each in ended:
        errors, tasks = found.get(key, (0, 0))
        found[key] = errors + each.errors, tasks + each.errors + each.successes
    return list(found.values())


def _mostly_fail(tallies: Sequence[tuple[int, int]], section: SupplySection) -> bool:
    """Whether tasks fail on or in at least two of these hosts or slots, none of which counts for more than its part."""
    if not section.failing_after or sum(1 for errors, _ in tallies if errors) < 2:
        return False
    part = math.ceil(section.failing_after / len(tallies))
    counted = sum(min(tasks, part) for _, tasks in tallies)
    wrong = sum(errors * min(tasks, part) / tasks for errors, tasks in tallies)
    return counted >= section.failing_after and wrong >= section.failing_share * counted - 1e-9


def straggling(
    config: JobConfig, workunit: Row, counts: Mapping[str, int], now: int, straggler_after_s: float | None = None
) -> bool:
    """Whether a workunit needs one more copy because those it has take too long.

    Only while BOINC's transitioner would accept it: no canonical result, no error, nothing unsent, and room
    within max_success_results and max_total_results. The slow copies stay in progress and are still judged.
    """
    after = config.supply.straggler_after_s if straggler_after_s is None else straggler_after_s
    copies = counts["unsent"] + counts["in_progress"] + counts["over"]
    return (
        workunit["canonical_resultid"] == 0
        and workunit["error_mask"] == 0
        and workunit["transition_time"] < NEVER
        and counts["unsent"] == 0
        and counts["in_progress"] > 0
        and now - counts["last_sent"] >= after
        and workunit["target_nresults"] < config.workunit.target_nresults + config.supply.extra_replicas
        and workunit["target_nresults"] < workunit["max_success_results"]
        and copies < workunit["max_total_results"]
    )


def waits_for_its_class(config: JobConfig, counts: Mapping[str, int], now: int) -> bool:
    """Whether a copy has waited so long for a host of its speed class that any host may have it: that class may have
    fewer hosts than a workunit needs."""
    return (
        bool(config.class_steps)
        and counts["unsent"] > 0
        and counts["in_progress"] + counts["over"] > 0
        and now - counts["last_sent"] >= config.supply.straggler_after_s
    )


def overlooked(workunit: Row, counts: Mapping[str, int], now: int) -> bool:
    """Whether nobody does anything about a workunit: its copies are over, none is wanted, none waits for a verdict.

    It happens when a second copy is reported in the second, and the moment, in which the transitioner handles the
    report of the first: then it sets the next look, which may be ten days away, over the scheduler's wish.
    """
    return (
        counts["unsent"] == counts["in_progress"] == 0
        and workunit["canonical_resultid"] == 0
        and workunit["error_mask"] == 0
        and workunit["need_validate"] == 0
        and workunit["transition_time"] > now
    )


def stop_reason(config: JobConfig, versions: Sequence[Row], create_time: int, now: float) -> str:
    """Why the job is finished, or ''. `versions` are rows of gt_version in order."""
    newest = int(versions[-1]["version"]) if versions else 0
    if newest >= config.train.max_versions:
        return f"version {newest} is the last one asked for (max_versions)"
    if config.train.max_hours and now - create_time > config.train.max_hours * 3600:
        return f"{config.train.max_hours:g} hours have passed (max_hours)"
    metric, target = config.train.target_metric, config.train.target_value
    if metric and target is not None:
        for row in reversed(versions):
            found = json.loads(row["evaluation"]).get(metric) if row["evaluation"] else None
            if found is None:
                continue
            reached = found <= target if metric == "loss" else found >= target
            if reached:
                return f"{metric} {found:.4g} of version {row['version']} reaches {target:g} (target_value)"
    return ""
