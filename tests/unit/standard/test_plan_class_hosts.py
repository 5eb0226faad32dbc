"""Which app version each kind of host is sent: the classes that `install` writes, fed with what clients report.

Two judges: the rules of BOINC's own scheduler, in the few lines below, and the embedded scheduler. What hosts report
follows lib/coproc.cpp and lib/opencl_boinc.cpp; texts of drivers are as clients have logged them.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.sax.saxutils import escape

import pytest
from lxml import etree

from boinc_project import database
from boinc_project.database import new_row
from boinc_project.server.messages import parse_request
from boinc_project.server.versions import VersionTable, read_plan_classes
from boinc_project.standard.plan_classes import CLASSES

LINUX = "x86_64-pc-linux-gnu"
GB = 1 << 30


@dataclass(frozen=True)
class Host:
    """A host's GPU as its client reports it, and the classes whose versions it may get, best first."""

    about: str
    element: str  # of <coprocs>; '' for a processor with OpenCL
    fields: tuple[tuple[str, object], ...]
    opencl: tuple[str, str, float] | None  # vendor, device version, memory in bytes
    classes: tuple[str, ...]


def radeon(about: str, target: int, version: str, *classes: str, vendor: str = "AMD", memory: float = GB) -> Host:
    cal = (("have_cal", 1), ("CALVersion", "1.4.1848"), ("target", target)) if target else (("have_cal", 0),)
    fields = (("count", 1), ("peak_flops", 2.7e12), ("localRAM", memory / (1 << 20)), *cal)
    return Host(about, "coproc_ati", fields, (vendor, version, memory), classes)


def geforce(about: str, capability: tuple[int, int], cuda: int, version: str, memory: float, *classes: str) -> Host:
    major, minor = capability
    fields = (
        *(("count", 1), ("peak_flops", 8e11), ("have_cuda", 1), ("cudaVersion", cuda), ("totalGlobalMem", memory)),
        *(("major", major), ("minor", minor)),
    )
    return Host(about, "coproc_cuda", fields, ("NVIDIA Corporation", version, memory), classes)


HOSTS = (
    radeon("HD 5870, Catalyst with OpenCL 1.1", 8, "OpenCL 1.1 AMD-APP (898.1)", "opencl_ati_vliw_gt"),
    radeon("HD 5870, Stream SDK", 8, "OpenCL 1.1 AMD-APP-SDK-v2.5 (684.213)", "opencl_ati_vliw_gt"),
    radeon("HD 5870, Catalyst with OpenCL 1.2", 8, "OpenCL 1.2 AMD-APP (1084.4)", "opencl_ati_vliw_gt"),
    radeon("HD 5870, the last Catalyst", 8, "OpenCL 1.2 AMD-APP (1800.11)", "opencl_ati_vliw_gt"),
    *(
        radeon(f"HD 5870 of {vendor}", 8, "OpenCL 1.2 AMD-APP (1084.4)", "opencl_ati_vliw_gt", vendor=vendor)
        for vendor in ("AMD", "ATI Technologies Inc.", "Advanced Micro Devices, Inc.")
    ),
    radeon("HD 6970, Catalyst", 15, "OpenCL 1.2 AMD-APP (1800.11)", "opencl_ati_vliw_gt", memory=2 * GB),
    radeon("HD 5870, Mesa's Clover", 0, "OpenCL 1.1 Mesa 22.3.6", "opencl_ati_gt"),
    radeon("HD 5870, Mesa's Rusticl", 0, "OpenCL 3.0 ", "opencl_ati_gt"),
    radeon("HD 7970, Catalyst", 20, "OpenCL 1.2 AMD-APP (1800.11)", "opencl_ati_gcn_gt", memory=3 * GB),
    radeon("RX 480, Windows driver of 2019", 0, "OpenCL 2.0 AMD-APP (2841.5)", "opencl_ati_gt", memory=8 * GB),
    radeon("RX 7900, ROCm", 0, "OpenCL 2.0 ", "opencl_ati_gt", memory=24 * GB),
    radeon("HD 4870: OpenCL 1.0 only", 5, "OpenCL 1.0 AMD-APP (898.1)"),
    radeon("HD 5450 with 512 MB", 11, "OpenCL 1.2 AMD-APP (1084.4)", memory=GB / 2),
    geforce("GTX 650", (3, 0), 10020, "OpenCL 1.2 CUDA", 1 * GB, "opencl_nvidia_gt"),
    geforce("H100", (9, 0), 12020, "OpenCL 3.0 CUDA", 80 * GB, "cuda_gt", "opencl_nvidia_gt"),
    geforce("H100, a driver of CUDA 11.4", (9, 0), 11040, "OpenCL 3.0 CUDA", 80 * GB, "opencl_nvidia_gt"),
    Host(
        "Intel Arc",
        "coproc_intel_gpu",
        (("count", 1), ("peak_flops", 1e12)),
        ("Intel(R) Corporation", "OpenCL 3.0 NEO ", 8 * GB),
        ("opencl_intel_gpu_gt",),
    ),
    Host(
        "Intel graphics without OpenCL",
        "coproc_intel_gpu",
        (("count", 1), ("peak_flops", 1e11), ("have_opencl", 0)),
        None,
        (),
    ),
    Host("processor with PoCL", "", (), ("GenuineIntel", "OpenCL 3.0 PoCL HSTR: pthread", 8 * GB), ("opencl_cpu_gt",)),
    Host("processor without OpenCL", "", (), None, ()),
)  # fmt: skip


def request_of(host: Host) -> bytes:
    """A scheduler request of the host."""

    def tags(pairs: tuple[tuple[str, object], ...]) -> str:
        return "".join(f"<{name}>{escape(str(value))}</{name}>\n" for name, value in pairs)

    info = ""
    if host.opencl is not None:
        vendor, version, memory = host.opencl
        info = tags(
            (
                *(("name", host.about), ("vendor", vendor), ("global_mem_size", int(memory))),
                ("opencl_device_version", version),
            )
        )
    if host.element:
        opencl = f"<coproc_opencl>\n{info}</coproc_opencl>\n" if info else ""
        have = "" if host.opencl is None else "<have_opencl>1</have_opencl>\n"
        coprocs = f"<{host.element}>\n{tags(host.fields)}{have}{opencl}</{host.element}>\n"
        processor = ""
    else:
        coprocs = ""
        processor = (
            f"<opencl_cpu_prop>\n<platform_vendor>x</platform_vendor>\n<opencl_cpu_info>\n{info}</opencl_cpu_info>\n"
            "</opencl_cpu_prop>\n"
            if info
            else ""
        )
    return (
        "<scheduler_request>\n<core_client_major_version>7</core_client_major_version>\n"
        f"<platform_name>{LINUX}</platform_name>\n"
        f"<host_info>\n<p_ncpus>4</p_ncpus>\n<p_fpops>3e9</p_fpops>\n{processor}</host_info>\n"
        f"<coprocs>\n{coprocs}</coprocs>\n</scheduler_request>\n"
    ).encode()


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> VersionTable:
    """A version for each class and one for any processor, with the file that `install` writes."""
    path = tmp_path_factory.mktemp("project") / "plan_class_spec.xml"
    lines = [line for each in CLASSES for line in each.lines()]
    path.write_text("<plan_classes>\n" + "\n".join(lines) + "\n</plan_classes>\n")
    names = ["", *(each.name for each in CLASSES)]
    versions = [
        {"id": number, "platform": LINUX, **new_row(database.app_version, appid=1, version_num=100, plan_class=name)}
        for number, name in enumerate(names, 1)
    ]
    return VersionTable(versions=versions, plan_classes=read_plan_classes(path))


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.about)
def test_the_embedded_scheduler_sends_each_host_what_it_can_run(host: Host, table: VersionTable) -> None:
    usable = table.usable(parse_request(request_of(host)), {})[1]
    names = [each.row["plan_class"] for each in usable]
    assert tuple(name for name in names if name) == host.classes
    assert "" in names, "any host can run the version for processors"
    assert host.classes == () or names[0] == host.classes[0], "the best version is the fastest"


@pytest.mark.parametrize("host", HOSTS, ids=lambda host: host.about)
def test_boincs_own_rules_send_each_host_what_it_can_run(host: Host) -> None:
    classes = [etree.fromstring("\n".join(each.lines())) for each in CLASSES]
    assert {each.findtext("name") for each in classes if passes(each, host)} == set(host.classes)


# BOINC's rules, restated from sched/plan_class_spec.cpp as far as our classes use them.

ELEMENTS = {"ati": "coproc_ati", "amd": "coproc_ati", "nvidia": "coproc_cuda", "intel_gpu": "coproc_intel_gpu"}
KNOWN = {
    *("name", "gpu_type", "opencl", "cuda", "min_opencl_version", "min_cal_target", "max_cal_target"),
    *("min_gpu_ram_mb", "gpu_ram_used_mb", "cpu_frac", "gpu_peak_flops_scale", "min_cuda_version"),
    *("min_nvidia_compcap", "max_threads"),
}


def passes(spec: etree._Element, host: Host) -> bool:
    assert {str(child.tag) for child in spec} <= KNOWN, "this judge knows only these"
    gpu_type, fields = spec.findtext("gpu_type"), dict(host.fields)

    def limit(tag: str) -> float:
        return float(spec.findtext(tag) or 0)

    def number(field: str) -> float:
        return float(str(fields.get(field, 0)))

    if (ELEMENTS[gpu_type] if gpu_type else "") != host.element:
        return False
    memory = number("totalGlobalMem")
    if spec.find("opencl") is not None:
        if host.opencl is None:
            return False
        _, version, memory = host.opencl
        digits = version.removeprefix("OpenCL ")
        if limit("min_opencl_version") > 100 * int(digits[0]) + int(digits[2]):
            return False
    if gpu_type == "nvidia" and spec.find("cuda") is not None:
        capability = 100 * number("major") + number("minor")
        if number("cudaVersion") < limit("min_cuda_version") or capability < limit("min_nvidia_compcap"):
            return False
    if gpu_type == "ati":
        if limit("min_cal_target") and number("target") < limit("min_cal_target"):
            return False
        if limit("max_cal_target") and number("target") > limit("max_cal_target"):
            return False
    return not gpu_type or memory >= limit("min_gpu_ram_mb") * (1 << 20)
