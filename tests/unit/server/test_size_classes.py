"""BOINC's size classes: the census, a host's class, what it is sent, and when results may be sent at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from boinc_project import database, size_classes
from boinc_project.database import new_row
from boinc_project.server.messages import Coprocessor
from boinc_project.server.size_regulator import MOST_UNSENT, SizeRegulator
from boinc_project.server.transitioner import Transitioner
from boinc_project.server.versions import VersionTable
from boinc_project.states import ServerState
from tests.server_project import add_workunits, make_project, publish_app, rows
from tests.unit.server.test_server_scheduler import INFO, NOW, WORK, joined, run, sent, version

CENSUS = {1: (2e9, 8e9)}
BIG = replace(WORK, cpu_req_secs=1e6, work_req_seconds=1e6)

#: What html/ops/size_census.php (PHP 8.2) writes for these speeds and 2, 3 and 4 classes.
SPEEDS = (4e8, 1e8, 2e8, 8e8, 1.5e8, 3e8, 1e9)
WRITTEN = {2: "3.000000e+8", 3: "2.000000e+8 4.000000e+8", 4: "1.500000e+8 3.000000e+8 8.000000e+8"}


@pytest.mark.parametrize("classes", WRITTEN)
def test_the_census_is_that_of_boinc_and_its_file_is_read(classes: int, tmp_path: Path) -> None:
    path = size_classes.census_path(tmp_path, "gradient")
    assert size_classes.read_census(path, classes) is None
    path.write_text(WRITTEN[classes].replace(" ", "\n") + "\n")
    assert size_classes.read_census(path, classes) == size_classes.quantiles(SPEEDS, classes)
    assert size_classes.read_census(path, classes + 1) is None, "the feeder ends on a file that is too short"


def test_a_project_without_hosts_has_them_all_in_the_fastest_class() -> None:
    assert size_classes.quantiles((), 3) == (0.0, 0.0)
    assert size_classes.size_class((0.0, 0.0), 1.0) == 2


@pytest.mark.parametrize(("speed", "expected"), [(1e9, 0), (2e9, 1), (7.9e9, 1), (8e9, 2), (1e15, 2)])
def test_a_host_is_of_the_class_below_whose_quantile_it_is(speed: float, expected: int) -> None:
    assert size_classes.size_class(CENSUS[1], speed) == expected


def of_class(number: int, size_class: int, **columns: Any) -> dict[str, Any]:
    return joined(number, wu_size_class=size_class, priority=0, **columns)


@pytest.mark.parametrize(
    ("flops", "order"),
    [  # own class first, then smaller tasks, then larger ones; those without a class are as small ones
        (1.1e9, [1, 4, 2, 3]),
        (5e9, [2, 1, 4, 3]),
        (9e9, [3, 1, 2, 4]),
    ],
)
def test_a_host_is_sent_its_own_class_first_then_what_is_smaller(flops: float, order: list[int]) -> None:
    request = replace(BIG, host=replace(INFO, p_fpops=flops, p_ncpus=4))
    candidates = [of_class(1, 0), of_class(2, 1), of_class(3, 2), of_class(4, -1)]
    assert sent(run(request, candidates=candidates, census=CENSUS)) == order
    assert sent(run(request, candidates=candidates)) == [1, 2, 3, 4], "without size classes by age"


def test_a_host_that_is_on_half_of_the_time_is_half_as_fast() -> None:
    request = replace(BIG, host=replace(INFO, p_fpops=9e9, p_ncpus=1, on_frac=0.5))
    candidates = [of_class(1, 0), of_class(2, 1), of_class(3, 2)]
    assert sent(run(request, candidates=candidates, census=CENSUS))[0] == 2
    seldom = replace(request, host=replace(request.host, on_frac=0.001))
    assert sent(run(seldom, candidates=candidates, census=CENSUS))[0] == 1, "9e8: less than a tenth is not believed"


def test_priority_counts_beside_the_size_as_in_boinc_s_score() -> None:
    request = replace(BIG, host=replace(INFO, p_fpops=1.1e9, p_ncpus=1))
    urgent = {**of_class(3, 2), "priority": 8}
    assert sent(run(request, candidates=[of_class(1, 0), urgent], census=CENSUS))[0] == 3
    assert sent(run(request, candidates=[of_class(1, 0), {**urgent, "priority": 6}], census=CENSUS))[0] == 1


def test_each_processor_of_a_host_has_the_class_of_its_own_version() -> None:
    table = VersionTable(versions=[version(), version(id=2, plan_class="opencl_nvidia_gt")])
    card = Coprocessor(type="NVIDIA", name="x", count=1, peak_flops=1e12, memory_bytes=8e9, has_opencl=True,
                       request_seconds=1.0, request_instances=1.0)  # fmt: skip
    request = replace(BIG, host=replace(INFO, p_fpops=1.1e9, p_ncpus=1), coprocs=(card,))
    decision = run(request, candidates=[of_class(1, 0), of_class(2, 1), of_class(3, 2)], census=CENSUS, versions=table)
    given = {each.result["id"]: each.version.resource for each in decision.changes.sent}
    assert given[3] == "NVIDIA" and given[1] == "CPU"


# The regulator.


@pytest.mark.usefixtures("each_database")
def test_results_of_each_class_are_released_as_they_are_needed(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        appid = publish_app(tree, db)
        with db.transaction() as connection:
            connection.execute(sa.update(database.app).values(n_size_classes=3))
        add_workunits(tree, db, appid, 40, prefix="slow", size_class=0)
        add_workunits(tree, db, appid, 3, prefix="fast", size_class=2)
        add_workunits(tree, db, appid, 2, prefix="any", size_class=-1)
        Transitioner(db, tree.config, upload_key=None).run_once()
        states = {str(row["name"]): row["server_state"] for row in rows(db, database.result)}
        assert {states[name] for name in states if name.startswith("any")} == {ServerState.UNSENT}
        assert {states[name] for name in states if not name.startswith("any")} == {ServerState.INACTIVE}
        regulator = SizeRegulator(tree, db, clock=lambda: NOW)
        most, inactive = MOST_UNSENT // 3, len(states) - 2
        slow = sum(1 for name in states if name.startswith("slow"))
        assert regulator.run_once() == min(most, slow) + (inactive - slow)
        assert regulator.run_once() == 0
        unsent = rows(db, database.result, server_state=int(ServerState.UNSENT), size_class=0)
        assert [row["workunitid"] for row in unsent] == sorted(row["workunitid"] for row in unsent)[:most]
        with db.transaction() as connection:
            taken = [row["id"] for row in unsent[: most // 2]]
            gone = sa.update(database.result).where(database.result.c.id.in_(taken)).values(server_state=4)
            connection.execute(gone)
        assert regulator.run_once() == 0, "half of them are still there"
        with db.transaction() as connection:
            one = sa.update(database.result).where(database.result.c.id == unsent[-1]["id"]).values(server_state=4)
            connection.execute(one)
        assert regulator.run_once() == most // 2 + 1
        assert regulator.released == min(most, slow) + (inactive - slow) + most // 2 + 1


def test_the_embedded_census_counts_the_measured_hosts_that_still_come(tmp_path: Path) -> None:
    tree = make_project(tmp_path / "project")
    with tree.database() as db:
        publish_app(tree, db)
        with db.transaction() as connection:
            connection.execute(sa.update(database.app).values(n_size_classes=2))
            for number, (speed, on, seen) in enumerate(
                [(1e9, 1.0, NOW), (4e9, 0.5, NOW), (9e9, 1.0, 0), (8e9, 1, NOW)], 1
            ):
                host = new_row(database.host, id=number, userid=1, rpc_time=seen, on_frac=on, active_frac=1.0)
                connection.execute(database.host.insert(), host)
                measured = new_row(
                    database.host_app_version, host_id=number, app_version_id=1, et_n=3, et_avg=1 / speed
                )
                connection.execute(database.host_app_version.insert(), measured)
        SizeRegulator(tree, db, clock=lambda: NOW).run_once()
    assert size_classes.read_census(size_classes.census_path(tree.project_dir, "uppercase"), 2) == pytest.approx((2e9,))
