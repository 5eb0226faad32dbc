"""Whole simulations of the tiny job: the real daemons' versions, the same every time, at the stated cost."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from boinc_project import clock, database
from boinc_project.gt_tables import Disposition, gt_ledger, gt_round
from boinc_project.simulator import project
from boinc_project.simulator.client import Habits
from boinc_project.simulator.hosts import Host, with_departures
from boinc_project.simulator.lies import Apart, Behaviour, Drop, SignFlip
from boinc_project.simulator.report import Report, report_of
from boinc_project.simulator.simulation import Settings, simulated
from boinc_project.simulator.synthetic import synthetic_hosts
from tests.tiny_project import exported, tiny_project
from validator.voters import network_of
from work_generator.export import ExportedJob
from work_generator.job import Job

HOSTS = synthetic_hosts(5, 1)


def with_settings(job: Job, **sections: Mapping[str, Any]) -> Job:
    """The job with other values in its sections."""
    changes = {name: dataclasses.replace(getattr(job.config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **changes))


def run(
    job: tuple[Job, ExportedJob] | None = None, hosts: list[Host] = HOSTS, settings: Settings | None = None,
    behaviours: Mapping[str, Behaviour] | None = None,
) -> Report:  # fmt: skip
    with simulated(*(job or exported()), hosts, settings, behaviours) as simulation:
        simulation.run()
        return report_of(simulation)


@functools.cache
def calm() -> Report:
    """The tiny job as it is, on HOSTS, of whom all are honest."""
    return run()


@pytest.mark.parametrize("toml", ["job.toml", "diloco.toml"])
def test_its_versions_are_bit_for_bit_those_of_the_real_daemons(toml: str) -> None:
    with tiny_project(toml) as real:
        for _ in range(4):
            real.make_version()
        digests = tuple(real.version_digests())
    report = calm() if toml == "job.toml" else run(exported(toml))
    assert report.state == "finished"
    assert report.digests == digests


def test_churn_and_rounding_that_a_quorum_bears_change_no_honest_version() -> None:
    hosts = with_departures(synthetic_hosts(8, 2, on_share=0.5, mean_session_s=60.0, flops_sigma=1.0), 0.3, 300.0, 1)
    assert run(hosts=hosts).digests == calm().digests


def test_a_job_whose_loss_becomes_nan_fails_as_it_does_with_real_clients() -> None:
    job, made = exported()
    train = {**job.data["train"], "x": torch.full_like(job.data["train"]["x"], math.inf)}
    report = run((dataclasses.replace(job, data={**job.data, "train": train}), made))
    assert report.state == "failed"
    assert "exit status 12" in report.note and "the loss is not a number" in report.note


def test_the_seed_decides_everything() -> None:
    settings = Settings(seed=3, noise=1e-7)
    hosts = synthetic_hosts(6, 3, on_share=0.6, mean_session_s=120.0)
    first, second = run(hosts=hosts, settings=settings), run(hosts=hosts, settings=settings)
    assert first == second
    assert run(hosts=hosts, settings=dataclasses.replace(settings, seed=4)) != first


def test_the_seed_decides_what_is_looked_at_by_the_server_too() -> None:
    job, made = exported()
    checked = with_settings(job, trust={"spot_check_share": 0.5})
    liars = {host.name: SignFlip() for host in HOSTS[:3]}
    first, second = (run((checked, made), behaviours=liars) for _ in range(2))
    assert first == second


def test_time_is_virtual_inside_and_real_again_afterwards() -> None:
    with simulated(*exported(), HOSTS) as simulation:
        begin = clock.now()
        simulation.run()
        assert clock.now() - begin == simulation.elapsed > 10
        job = simulation.project.job
        assert job.create_time == int(begin)
    assert clock.now() != begin + simulation.elapsed


def test_it_ends_at_its_horizon_where_nobody_works() -> None:
    gone = [dataclasses.replace(host, leaves=1.0) for host in HOSTS]
    report = run(hosts=gone, settings=Settings(horizon=3600.0))
    assert (report.state, report.last.version, report.applied_s) == ("running", 0, 0.0)


def test_colluding_liars_are_accepted_where_they_meet_and_counted() -> None:
    job, made = exported()
    longer = with_settings(job, train={"max_versions": 4, "microtasks_per_version": 6})
    liars = {host.name: SignFlip() for host in HOSTS[:3]}
    together = run((longer, made), behaviours=liars)
    assert together.accepted == 24
    assert 7 < together.accepted_bad < 24  # 3 of 5: (3/5)(2/4) + 2(3/5)(2/4)(2/3) = 0.7 of 24 if drawn at random
    apart = run((longer, made), behaviours={name: Apart(liar) for name, liar in liars.items()})
    assert apart.accepted_bad == 0
    assert apart.copies_per_accepted > together.copies_per_accepted > 2
    assert apart.digests != together.digests


def test_droppers_cost_time_and_nothing_else() -> None:
    job, made = exported()
    patient = with_settings(job, supply={"straggler_after_s": 60})
    all_work = run((patient, made))
    report = run((patient, made), behaviours={host.name: Drop() for host in HOSTS[:3]})
    assert report.digests == all_work.digests
    assert report.last.when_s > all_work.last.when_s
    assert report.goodput < all_work.goodput


def test_what_is_counted_adds_up() -> None:
    report = calm()
    assert report.sent == 2 * report.accepted == 16
    assert report.applied_samples == sum(version.samples for version in report.versions)
    assert 0 < report.applied_s < report.last.used_s <= report.last.available_s
    # Each copy's update, and what each host downloads of them: with quorum 2 nothing travels once.
    assert report.last.bytes_up > 16 * 900
    assert report.last.bytes_down > 16 * 1500
    assert [version.version for version in report.versions] == [0, 1, 2, 3, 4]
    times = [version.when_s for version in report.versions]
    assert times == sorted(times)


def test_tasks_on_a_host_with_jitter_take_unlike_times_and_make_the_same_versions() -> None:
    jittery = synthetic_hosts(5, 1, jitter=0.5)
    assert [host.flops for host in jittery] == [host.flops for host in HOSTS]
    report = run(hosts=jittery)
    assert report.digests == calm().digests
    assert report.applied_s != calm().applied_s


def test_sticky_files_travel_to_a_host_once() -> None:
    one = [Host(name="a", flops=4e9), Host(name="b", flops=4e9)]
    job, made = exported()
    short = run((with_settings(job, train={"max_versions": 1}), made), hosts=one)
    long = run((with_settings(job, train={"max_versions": 10}), made), hosts=one)
    # Graph and shards come with the first version; then there are microtasks and states.
    later = (long.last.bytes_down - short.last.bytes_down) / 9
    assert later < 0.6 * short.last.bytes_down


def test_hosts_without_work_come_again_when_the_project_says_or_back_off() -> None:
    job, made = exported()
    calls = {}
    for delay in (10, 0):
        settings = Settings(options={"gt_dry_rpc_delay": delay}, horizon=3600.0)
        # One host alone makes no quorum: it is given one copy of each workunit and then none.
        with simulated(job, made, [Host(name="a", flops=4e9)], settings) as simulation:
            simulation.run()
            calls[delay] = simulation.clients[0].traffic.messages / 10_000
    assert calls[10] > 200
    assert 3 <= calls[0] <= 10


def test_two_hosts_of_one_name_and_behaviours_of_nobody_are_refused() -> None:
    with pytest.raises(ValueError, match="one name"), simulated(*exported(), [HOSTS[0], HOSTS[0]]):
        pass
    with pytest.raises(ValueError, match="unknown hosts"), simulated(*exported(), HOSTS, None, {"x": Drop()}):
        pass


def test_an_evaluation_is_there_for_the_versions_that_ask_for_one() -> None:
    job, made = exported()
    report = run((with_settings(job, train={"evaluate_every": 2}), made))
    assert report.last.evaluation["accuracy"] > 0.5
    assert math.isfinite(report.last.evaluation["loss"])
    assert not report.versions[1].evaluation


def test_what_a_killed_simulation_left_goes_with_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(project, "MEMORY", tmp_path)
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    left = tmp_path / f"{project.PREFIX}{process.pid}-abc"
    mine = tmp_path / f"{project.PREFIX}{os.getpid()}-abc"
    for folder in (left, mine):
        (folder / "project").mkdir(parents=True)
    with project.private_folder() as folder:
        assert folder.parent == tmp_path
        assert not left.exists()
        assert mine.exists()
    assert not folder.exists()


def test_simulated_hosts_come_from_networks_of_their_own_and_newcomers_from_one_are_no_quorum() -> None:
    job, made = exported()
    job = with_settings(job, trust={"newcomer_days": 30.0}, train={"max_versions": 1})
    states = []
    for hosts in (HOSTS, [dataclasses.replace(host, address=f"203.0.114.{n}") for n, host in enumerate(HOSTS)]):
        with simulated(job, made, hosts, Settings(horizon=1200.0)) as simulation:
            simulation.run()
            networks = {network_of(row["external_ip_addr"]) for row in simulation.project.rows(database.host)}
            states.append((len(networks), report_of(simulation).state))
    assert states == [(5, "finished"), (1, "running")]


def test_an_anchored_flow_learns_from_results_that_are_many_versions_old() -> None:
    changes = (
        ('policy = "sync"', 'policy = "anchored"'),
        ("max_versions = 4", "max_versions = 40"),
        ("evaluate_every = 0", "evaluate_every = 40"),
        ("[schedule]", "[aggregation]\nin_flight = 16\n\n[schedule]"),
        ("min_quorum = 2", "min_quorum = 1"),
        ("lr = 0.05", "lr = 0.02"),
    )
    hosts = [Host(name=f"host{number}", flops=4e9) for number in range(16)]
    settings = Settings(habits=Habits(tasks_per_processor=1))
    with simulated(*exported(changes=changes), hosts, settings) as simulation:
        simulation.run()
        report = report_of(simulation)
        rounds = simulation.project.rows(gt_round)
        applied = [row for row in simulation.project.rows(gt_ledger) if row["disposition"] == Disposition.APPLIED]
    ages = [int(row["applied_version"]) - 1 - int(row["base_version"]) for row in applied]
    assert sum(ages) / len(ages) > 5
    first = report.versions[1].loss
    assert first is not None and report.last.evaluation["loss"] < 0.75 * first
    behind = [int(row["version"]) - 1 - int(row["anchor_version"]) for row in rounds if row["anchor_version"] >= 0]
    assert len(behind) > 30 and 0 < max(behind) <= 20
