"""The choice of app versions: plan classes, clamped speeds, platforms."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from boinc_project import database
from boinc_project.database import new_row
from boinc_project.server.messages import Coprocessor, HostInfo, SchedulerRequest
from boinc_project.server.versions import (
    PlanClass,
    VersionTable,
    cpu_flops,
    gpu_flops,
    plan_class_by_name,
    read_plan_classes,
)

LINUX, WINDOWS = "x86_64-pc-linux-gnu", "windows_x86_64"
REQUEST = SchedulerRequest(
    core_client_version=72005,
    platforms=(LINUX, "i686-pc-linux-gnu"),
    host=HostInfo(p_ncpus=4, p_fpops=1e10),
    coprocs=(Coprocessor(type="ATI", count=1, peak_flops=2.72e12, has_opencl=True, memory_bytes=1 << 30),),
)


def version(number: int, **columns: Any) -> dict[str, Any]:
    values = {"appid": 1, "version_num": 100, "plan_class": "", **columns}
    platform = values.pop("platform", LINUX)
    return {"id": number, "platform": platform, **new_row(database.app_version, **values)}


def ids(table: VersionTable, request: SchedulerRequest = REQUEST, **speeds: Any) -> list[int]:
    return [each.id for each in table.usable(request, speeds.get("speeds", {})).get(1, [])]


@pytest.mark.parametrize(
    ("claimed", "used"),
    [
        (1e9, 4.3e9),
        (0, 4.3e9),
        (-1e12, 4.3e9),
        (2.7e9, 2.7e9),
        (1, 1e8),
        (4.3e19, 1e12),
        (float("inf"), 1e12),
    ],
)
def test_cpu_speed_claims_are_clamped(claimed: float, used: float) -> None:
    assert cpu_flops(claimed) == used


@pytest.mark.parametrize(("claimed", "used"), [(4.3e19, 1e15), (0, 1e9), (2.72e12, 2.72e12)])
def test_gpu_speed_claims_are_clamped(claimed: float, used: float) -> None:
    assert gpu_flops(claimed) == used


@pytest.mark.parametrize("speed", [1e9, 2.7e12, 1e14, 1e15, 4.3e19])
def test_time_limit_of_a_bounded_job_is_never_seconds(speed: float) -> None:
    """Field case O19: the client's limit is rsc_fpops_bound / flops, from what the server sends."""
    request = replace(REQUEST, host=HostInfo(p_fpops=speed), coprocs=())
    (usable,) = VersionTable(versions=[version(1)]).usable(request, {})[1]
    est, bound = 1e12, 1e16
    assert bound / usable.flops >= 1800
    assert bound / usable.flops >= 10 * est / usable.flops


def test_newest_version_of_the_hosts_platforms_counts() -> None:
    table = VersionTable(
        versions=[
            version(1),
            version(2, version_num=101),
            version(3, version_num=102, deprecated=1),
            version(4, version_num=900, platform=WINDOWS),
            version(5, version_num=103, min_core_version=900),
            version(6, version_num=90, platform="i686-pc-linux-gnu"),
        ]
    )
    assert ids(table) == [2, 6]
    assert ids(table, replace(REQUEST, platforms=("arm",))) == []


def test_fastest_processor_comes_first() -> None:
    table = VersionTable(versions=[version(1), version(2, plan_class="opencl_ati_101")])
    assert ids(table) == [2, 1]
    assert ids(table, replace(REQUEST, coprocs=())) == [1]


def test_measured_speed_replaces_the_claim() -> None:
    table = VersionTable(versions=[version(1)])
    speed = new_row(database.host_app_version, et_n=20, et_avg=1e-9)
    (usable,) = table.usable(REQUEST, {1: speed})[1]
    assert usable.flops == pytest.approx(1e9)
    (claimed,) = table.usable(REQUEST, {1: {**speed, "et_n": 3}})[1]
    assert claimed.flops == 1e10


NAMES = [
    ("", PlanClass(name="")),
    ("opencl_ati_101", PlanClass(name="opencl_ati_101", gpu_type="ATI", needs_opencl=True)),
    ("cuda_12", PlanClass(name="cuda_12", gpu_type="NVIDIA", needs_cuda=True)),
    ("opencl_nvidia", PlanClass(name="opencl_nvidia", gpu_type="NVIDIA", needs_opencl=True)),
    ("ati14", PlanClass(name="ati14", gpu_type="ATI", needs_cal=True)),
    ("opencl_intel_gpu", PlanClass(name="opencl_intel_gpu", gpu_type="intel_gpu", needs_opencl=True)),
    ("simulation", PlanClass(name="simulation", gpu_type="ATI", needs_cal=True)),
    ("mt", PlanClass(name="mt", max_threads=64)),
]


@pytest.mark.parametrize(("name", "expected"), NAMES)
def test_plan_class_names_mean_what_stock_boinc_takes_them_for(name: str, expected: PlanClass) -> None:
    assert plan_class_by_name(name) == expected


def test_plan_class_spec_adds_limits(tmp_path: Path) -> None:
    path = tmp_path / "plan_class_spec.xml"
    assert read_plan_classes(path) == {}
    path.write_text(
        "<plan_classes><plan_class><name>opencl_ati_big</name><gpu_type>amd</gpu_type><opencl/>"
        "<min_gpu_ram_mb>2048</min_gpu_ram_mb><cpu_frac>0.5</cpu_frac></plan_class></plan_classes>"
    )
    table = VersionTable(versions=[version(1, plan_class="opencl_ati_big")], plan_classes=read_plan_classes(path))
    assert ids(table) == []
    (radeon,) = REQUEST.coprocs
    request = replace(REQUEST, coprocs=(replace(radeon, memory_bytes=4 << 30),))
    (usable,) = table.usable(request, {})[1]
    assert (usable.resource, usable.avg_ncpus, usable.gpus) == ("ATI", 0.5, 1)
    path.write_text("<broken")
    with pytest.raises(ValueError, match="well-formed"):
        read_plan_classes(path)
