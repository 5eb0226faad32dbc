"""Hosts of unlike speeds in the simulator: steps in proportion, equal intervals, and no host that waits for another."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from assimilator.replay import replay
from boinc_project import database
from boinc_project.gt_tables import gt_microtask
from boinc_project.simulator.hosts import Host
from boinc_project.simulator.simulation import Settings, Simulation, simulated
from tests.tiny_project import Changes, exported
from work_generator import publish, workunits

STEP_FLOPS = 1e9


def changes(policy: str, versions: int, aggregation: str = "", classes: str = "[1.0, 0.5, 0.25]") -> Changes:
    speeds = f"local_steps = 8\nspeed_classes = {classes}" if classes else "local_steps = 8"
    section = f"[aggregation]\n{aggregation}\n[schedule]" if aggregation else "[schedule]"
    supply = "[supply]\nstraggler_after_s = 120\n\n[workunit]"
    return (
        ('policy = "diloco"', f'policy = "{policy}"'), ("local_steps = 5", speeds), ("[schedule]", section),
        ("max_versions = 4", f"max_versions = {versions}"), ("[workunit]", supply),
    )  # fmt: skip


DELAYED = "in_flight = 18\nmax_age = 30\nmomentum_every = 4"


def hosts(*speeds: int, each: int = 2) -> list[Host]:
    return [Host(name=f"h{speed}-{n}", flops=1e8 * speed, latency=0.01) for speed in speeds for n in range(each)]


@pytest.fixture(autouse=True)
def steps_cost_what_they_are_said_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workunits, "STARTUP_FLOPS", 0.0)
    monkeypatch.setattr(publish, "step_flops", lambda *graphs: int(STEP_FLOPS))


def done(simulation: Simulation) -> dict[str, list[dict[str, Any]]]:
    """Results that came back, in the order in which they were sent, by the name of their host."""
    names = {int(row["id"]): str(row["domain_name"]) for row in simulation.project.rows(database.host)}
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(simulation.project.rows(database.result), key=lambda row: (row["sent_time"], row["id"])):
        if row["received_time"]:
            found.setdefault(names[int(row["hostid"])], []).append(row)
    return found


def settled(rows: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
    """Those after the hosts have become known."""
    return rows[len(rows) // 3 :]


def test_hosts_of_speeds_1_2_4_take_steps_in_proportion_and_equal_times() -> None:
    with simulated(*exported("diloco.toml", changes("delayed-nesterov", 36, DELAYED)), hosts(1, 2, 4)) as simulation:
        simulation.run()
        assert simulation.project.job.state == "finished"
        assert simulation.project.job.config.class_steps == (2, 4, 8)
        times = {}
        for name, rows in done(simulation).items():
            own = {"1": 0, "2": 1, "4": 2}[name[1]]
            kept = settled(rows)
            assert statistics.mode(row["size_class"] for row in kept) == own
            assert sum(row["size_class"] == own for row in kept) >= 0.6 * len(kept)
            times[name] = statistics.median(row["elapsed_time"] for row in kept)
        assert set(times.values()) == {2 * STEP_FLOPS / 1e8}
        digests = {int(v): d for v, d in replay(simulation.project.db, simulation.project.job).items()}
        assert len(digests) == 37
        spans = [(int(row["first_batch"]), int(row["steps"])) for row in simulation.project.rows(gt_microtask)
                 if row["attempt"] == 0]  # fmt: skip
        end = 0
        for first, steps in sorted(spans):
            assert first == end
            end += steps


def test_a_class_with_fewer_hosts_than_the_quorum_still_gets_its_tasks_confirmed() -> None:
    crowd = [*hosts(1, 2), *hosts(4, each=1)]
    with simulated(
        *exported("diloco.toml", changes("buffered", 20, "in_flight = 12\nmax_age = 30")), crowd
    ) as simulation:
        simulation.run()
        assert simulation.project.job.state == "finished"
        rows = [row for row in simulation.project.rows(gt_microtask) if row["size_class"] == 2]
        assert sum(row["state"] == "folded" for row in rows) >= 5


@pytest.mark.long
@pytest.mark.parametrize("policy", ["diloco", "sync"])
def test_rounds_end_earlier_where_slow_hosts_have_fewer_steps(policy: str) -> None:
    def seconds(classes: str) -> float:
        if policy == "sync":
            toml = "job.toml"
            given: Changes = (("batches_per_microtask = 3", f"batches_per_microtask = 8\nspeed_classes = {classes}"),
                              ("max_versions = 4", "max_versions = 12"),
                              ("microtasks_per_version = 2", "microtasks_per_version = 6"))  # fmt: skip
        else:
            toml, given = "diloco.toml", changes(policy, 12, classes=classes)
            given = (*given, ("microtasks_per_version = 2", "microtasks_per_version = 6"))
        with simulated(*exported(toml, given), hosts(1, 4), Settings()) as simulation:
            simulation.run()
            assert simulation.project.job.current_version == 12
            last = [moment.when for moment in simulation.moments]
            return last[-1] - last[6]

    assert seconds("[1.0, 0.25]") < 0.8 * seconds("[]")
