"""The published rates: how often lies are accepted by a quorum, and by adaptive replication with audits.

Copies are drawn at random among many hosts; all bad ones are accomplices who return the same wrong update. The
decisions are the validator's own; nothing is read or written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from boinc_project.reliability import is_distrusted, is_trusted, reliability
from boinc_project.states import Outcome, ServerState, ValidateState
from validator import rechecks
from validator.decision import Decision, Evidence, Sanity, decide, needed
from validator.lottery import Lottery
from validator.replication import why_not_alone
from validator.voters import Independence, Witness, count_votes


def fresh_record() -> dict[str, Any]:
    counts = {"good": 0.0, "bad": 0.0, "unlike": 0.0, "consecutive_valid": 0}
    return {**counts, "judge_time": 0.0, "failed_check": 0.0}


@dataclass
class World:
    """Hosts of which the first `f` share is bad, and what has become of their workunits."""

    f: float
    hosts: int = 1000
    copies: int = 0
    records: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.draw = random.Random(0)

    def judge(
        self, number: int, quorum: int, extra: Callable[[dict[int, int]], Mapping[str, Any]] = lambda hosts: {}
    ) -> tuple[bool, int, Decision]:
        """Send copies until the workunit has a canonical result: whether that is wrong, copies, the decision."""
        unit = {"canonical_resultid": 0, "min_quorum": quorum, "target_nresults": quorum, "max_success_results": 20,
                "max_total_results": 40, "error_mask": 0}  # fmt: skip
        hosts: dict[int, int] = {}
        wrong: dict[int, bool] = {}
        while True:
            while len(hosts) < unit["target_nresults"]:
                host = self.draw.randrange(self.hosts)
                if host not in hosts.values():
                    identifier = 100 * number + len(hosts)
                    hosts[identifier], wrong[identifier] = host, host < self.f * self.hosts
            rows = [
                {"id": i, "server_state": ServerState.OVER, "outcome": Outcome.SUCCESS, "validate_state": 0}
                for i in hosts
            ]
            sane = dict.fromkeys(needed(unit, rows), (Sanity.GOOD, ""))
            apart = {(i, j): float(wrong[i] != wrong[j]) for i in sane for j in sane if i < j}
            known = {"voters": hosts, **extra(hosts)}
            found = decide(Evidence(unit, rows, sane, apart, 1e-3, **known))
            unit.update({name: v for name, v in found.workunit.items() if name in unit and v != -1})
            if found.canonical is not None:
                self.copies += len(hosts)
                self.enter(found, hosts)
                return wrong[found.canonical], len(hosts), found

    def enter(self, found: Decision, hosts: Mapping[int, int]) -> None:
        """What validator/books.py does to gt_trust; time stands still."""
        for identifier, change in found.results.items():
            record = self.records.setdefault(hosts[identifier], fresh_record())
            if change.validate_state == ValidateState.VALID and not change.alone:
                record["good"] += 1
                record["consecutive_valid"] += 1
            elif change.validate_state == ValidateState.INVALID and not change.differs:
                record["bad"] += 1
                record["consecutive_valid"] = 0


@pytest.mark.parametrize("word", ["bad", "unlike"])
def test_whoever_lies_whenever_it_is_trusted_is_believed_alone_less_and_less(word: str) -> None:
    """The cleverest of liars: it knows its own record, and behaves whenever a second copy would be made in any case."""
    lottery, count, record = Lottery(b"secret"), 6000, fresh_record()
    lies: list[int] = []
    for number in range(count):
        trusted = is_trusted(record, 0.0)
        witness = Witness(1, 1, trusted=trusted, reliability=reliability(record, 0.0))
        if not why_not_alone(witness, lottery, 0.05, f"wu{number}", number, ""):
            lies.append(number)
        elif trusted:
            record[word] += 1
            record["consecutive_valid"] = 0
        else:
            record["good"] += 1
            record["consecutive_valid"] += 1
    assert lies, "it is trusted at first"
    assert len(lies) / count < 0.04, "where only the last ten counted it was a third"


def believed_lies(seed: int) -> int:
    """A host with 60 good results returns 1000 more, a small bias in 10 % of them: how many lies nobody ever sees.

    What was accepted alone is computed again after each lie that a second copy showed, as in validator/rechecks.py.
    """
    draw, lottery, record = random.Random(seed), Lottery(str(seed).encode()), fresh_record()
    record.update(good=60.0, consecutive_valid=60)
    alone: list[bool] = []  # the newest last: whether it is a lie
    for number in range(1000):
        lies = draw.random() < 0.1
        witness = Witness(1, 1, trusted=is_trusted(record, 0.0), reliability=reliability(record, 0.0))
        if not why_not_alone(witness, lottery, 0.05, f"wu{number}", number, ""):
            alone.append(lies)
        elif lies:
            record.update(unlike=record["unlike"] + 1, consecutive_valid=0)
            waiting = rechecks.MOST
            while waiting and alone:
                waiting = rechecks.MOST if alone.pop() else waiting - 1
        else:
            record.update(good=record["good"] + 1, consecutive_valid=record["consecutive_valid"] + 1)
    return sum(alone)


def test_few_of_a_tenth_of_lies_are_never_seen() -> None:
    """O10: over 20 seeds. Without any audit all 100 would be; audits alone leave 23 on average."""
    seen = [believed_lies(seed) for seed in range(20)]
    assert sum(seen) / 20 < 8 and sorted(seen)[10] <= 2, seen


@pytest.mark.parametrize("f", [0.05, 0.2, 0.4])
def test_a_quorum_of_two_accepts_what_theory_says(f: float) -> None:
    """All bad hosts collude, third copies on disagreement: f^2 (3 - 2f) of the results are wrong, and 2 + 2f(1 - f)
    copies are made of each."""
    world, count = World(f), 4000
    bad = sum(world.judge(n, 2)[0] for n in range(count)) / count
    assert bad == pytest.approx(f * f * (3 - 2 * f), abs=0.02)
    assert world.copies / count == pytest.approx(2 + 2 * f * (1 - f), abs=0.05)


def test_adaptive_replication_with_audits_accepts_nearly_every_copy_and_hardly_any_lie() -> None:
    """5 % of the hosts are accomplices who lie always; counted after the others have earned their trust. No share above
    1 / (1 + f + audits) is possible, 0.9 to 0.91: a liar's copy needs another beside it."""
    lottery, world = Lottery(b"secret"), World(0.05, hosts=100)

    def alone(number: int, hosts: Mapping[int, int]) -> dict[str, Any]:
        why = {}
        for identifier, host in hosts.items():
            record = world.records.get(host)
            witness = Witness(host, host, trusted=is_trusted(record, 0.0), reliability=reliability(record, 0.0))
            why[identifier] = why_not_alone(witness, lottery, 0.05, f"wu{number}", identifier, "")
        voters = {i: None if is_distrusted(world.records.get(host), 0.0) else host for i, host in hosts.items()}
        return {"not_alone": why, "voters": voters}

    def run(first: int, count: int) -> int:
        return sum(world.judge(n, 1, lambda hosts: alone(n, hosts))[0] for n in range(first, first + count))  # noqa: B023

    run(0, 4000)
    world.copies = 0
    bad = run(4000, 3000) / 3000
    assert bad < 0.005
    assert 3000 / world.copies >= 0.88


def test_a_broken_family_of_cards_never_confirms_itself_in_a_thousand_workunits() -> None:
    """O26: 30 % of the hosts have one family with one broken driver and return the same wrong numbers."""
    world = World(0.3)

    def by_device(hosts: Mapping[int, int]) -> dict[str, Any]:
        made = {
            i: Witness(
                host,
                host,
                devices=frozenset({"Broken 5700 20101" if host < world.f * world.hosts else f"Good {host % 3}"}),
            )
            for i, host in hosts.items()
        }
        votes = count_votes(made, {}, Independence(devices=True))
        return {"voters": votes.voters, "established": votes.established}

    assert sum(world.judge(n, 2, by_device)[0] for n in range(1000)) == 0
    trusting = World(0.3)
    assert sum(trusting.judge(n, 2)[0] for n in range(200)) > 0, "without independence it does"
