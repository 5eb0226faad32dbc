"""Microtasks for hosts of unlike speeds: which class a new one is for, how many steps it has, and which batches.

DyLU (Liu et al. 2024, https://arxiv.org/abs/2401.09135, section 5): a worker takes H_w = floor(v_w / v_max H) steps, so
that all need the same time. Adapted: a volunteer's speed is that of its BOINC size class
(boinc_project/size_classes.py), and the class belongs to the workunit, so that its copies have the same steps.

The batches of an epoch are dealt out in the order in which slots are first issued, each slot taking as many as it has
steps. A slot keeps its place for ever: issued again, after an error, a rollback or a crash, it has the same batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from boinc_project.job_config import JobConfig
from boinc_project.size_classes import Measured, size_class

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Place:
    """Batches first_batch to first_batch + steps - 1 of the job, for hosts of BOINC's size class (-1: for all)."""

    first_batch: int
    steps: int
    size_class: int = -1


def uniform(config: JobConfig, version: int, slot: int) -> Place:
    """The place of a microtask where all have the same steps: the slots of a round, round after round; in a flow they
    run on by themselves."""
    number = slot if config.policy.flow else version * config.train.microtasks_per_version + slot
    return Place(number * config.steps, config.steps)


def placed(
    config: JobConfig, slots: Sequence[int], microtasks: Sequence[Row], demand: Sequence[int], first_batch: int
) -> list[Place]:
    """The places of these slots, which are about to be issued.

    microtasks   the attempts so far at these slots, and everything that is open
    demand       by class, how much work its hosts have had lately
    first_batch  the first batch that no slot has
    """
    known = {int(row["slot"]): row for row in microtasks}
    fresh = sum(1 for slot in slots if slot not in known)
    there = Counter(int(row["size_class"]) for row in microtasks if row["state"] == "issued")
    there.update(int(known[slot]["size_class"]) for slot in slots if slot in known)
    steps = config.class_steps
    classes = iter(classes_of_new([there[number] for number in range(len(steps))], demand, fresh, config.policy.flow))
    found = []
    for slot in slots:
        if slot in known:
            row = known[slot]
            found.append(Place(int(row["first_batch"]), int(row["steps"]), int(row["size_class"])))
        else:
            number = next(classes)
            found.append(Place(first_batch, steps[number], number))
            first_batch += steps[number]
    return found


def classes_of_new(there: Sequence[int], demand: Sequence[int], count: int, each_has_one: bool) -> list[int]:
    """Classes of `count` new microtasks, so that what is out follows the demand (by the divisors of Sainte-Lague).

    there         open microtasks by class
    each_has_one  whether a class without any gets the first: its hosts may be about to come
    """
    counts, weights = list(there), list(demand) if any(demand) else [1] * len(there)
    fastest_first = range(len(counts) - 1, -1, -1)
    found: list[int] = []
    for _ in range(count):
        bare = [number for number in fastest_first if each_has_one and not counts[number]]
        wanted = [number for number in fastest_first if weights[number]]
        chosen = bare[0] if bare else min(wanted, key=lambda n: Fraction(2 * counts[n] + 1, weights[n]))
        counts[chosen] += 1
        found.append(chosen)
    return found


def demand_of(
    classes: int, census: Sequence[float] | None, tasks: Iterable[Row], measured: Iterable[Measured]
) -> list[int]:
    """By class, the tasks that its hosts have or have had: hostid, app_version_id and size_class of their results.

    A host that has not been measured, or a project without a census, counts for the class of what it was sent.
    """
    speeds = {(each.host_id, each.app_version_id): each.speed for each in measured}
    found = [0] * classes
    for task in tasks:
        speed = speeds.get((int(task["hostid"]), int(task["app_version_id"])))
        number = int(task["size_class"]) if speed is None or census is None else size_class(census, speed)
        if 0 <= number < classes:
            found[number] += 1
    return found
