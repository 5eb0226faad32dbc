"""Which application versions a host can run, how fast, and on which of its processors. Pure.

Sources: BOINC `sched/sched_version.cpp` (choice and speed of a version), `sched/plan_class_spec.{h,cpp}` and
`sched/sched_customize.cpp` (plan classes), `lib/coproc.cpp`. That part of the plan-class language is known here which
our own classes use: the processor type follows from the name as on a stock server, and `plan_class_spec.xml` may add
limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lxml import etree

from boinc_project.server.messages import Coprocessor, OpenclVersion, SchedulerRequest, clamped

Row = Mapping[str, Any]

#: What `p_fpops` of exactly 1e9 stands for: the client did not measure (BOINC `sched/credit.h`).
UNMEASURED_FPOPS, ASSUMED_FPOPS = 1e9, 4.3e9

#: Range in which a host's claim about its speed is believed (FLOP/s): one processor core, one GPU.
#: Limits of run time are computed from it, so that an absurd claim must not kill good tasks in seconds.
CPU_FLOPS_RANGE = (1e8, 1e12)
GPU_FLOPS_RANGE = (1e9, 1e15)

#: Share of a GPU's claimed peak that real applications reach, on average; a plan class may say otherwise.
GPU_EFFICIENCY = 0.1

#: Completed jobs after which the measured speed of a host with a version replaces the claimed one.
MIN_SAMPLES = 10


@dataclass(frozen=True, kw_only=True)
class PlanClass:
    """The elements of a `<plan_class>` that this server follows (0: no limit)."""

    name: str
    gpu_type: str = ""  # as in app versions: NVIDIA, ATI, intel_gpu; '' for CPU
    needs_opencl: bool = False
    needs_cuda: bool = False
    needs_cal: bool = False
    min_gpu_ram: float = 0.0  # bytes
    cpu_fraction: float = 0.1  # processors used beside a GPU
    gpu_fraction: float = 1.0  # GPUs used by one job
    max_threads: int = 1
    min_ncpus: int = 0
    flops_scale: float = 1.0
    gpu_flops_scale: float = GPU_EFFICIENCY  # share of a GPU's claimed peak
    # Ranges from the lowest to the highest that will do.
    opencl_version: tuple[int, int] = (0, 0)  # 100 * major + minor; passes where the host does not say
    opencl_revision: tuple[int, int] = (0, 0)
    cal_target: tuple[int, int] = (0, 0)
    cuda_version: tuple[int, int] = (0, 0)
    compute_capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class UsableVersion:
    """An app version that this host can run, with what it would use and how fast it would be."""

    row: Row  # app_version row with `platform` (its name) added
    resource: str  # CPU, NVIDIA, ATI, intel_gpu, ...
    avg_ncpus: float
    gpus: float
    flops: float  # FLOP/s of one job

    @property
    def id(self) -> int:
        return int(self.row["id"])

    @property
    def instances(self) -> float:
        """How much of its resource one job occupies."""
        return self.gpus if self.gpus else self.avg_ncpus


@dataclass(frozen=True)
class VersionTable:
    """The static part of the choice: every version of every app, and the plan classes."""

    versions: Sequence[Row] = ()
    plan_classes: Mapping[str, PlanClass] = field(default_factory=dict)

    def usable(self, request: SchedulerRequest, speeds: Mapping[int, Row]) -> dict[int, list[UsableVersion]]:
        """Per app id, the versions that the host can run, fastest first.

        `speeds` are the host's host_app_version rows by app version id.
        """
        found: dict[int, list[UsableVersion]] = {}
        for row in self._newest(request):
            plan = self.plan_classes.get(row["plan_class"]) or plan_class_by_name(row["plan_class"])
            usable = _usable(row, plan, request, speeds.get(row["id"]))
            if usable is not None:
                found.setdefault(int(row["appid"]), []).append(usable)
        for versions in found.values():
            versions.sort(key=lambda version: -version.flops)
        return found

    def _newest(self, request: SchedulerRequest) -> Iterator[Row]:
        """The newest version of each (app, platform, plan class) that this client may use."""
        newest: dict[tuple[int, str, str], Row] = {}
        for row in self.versions:
            client = request.core_client_version
            too_new = row["max_core_version"] and client > _full(row["max_core_version"])
            if row["deprecated"] or row["platform"] not in request.platforms:
                continue
            if client < _full(row["min_core_version"]) or too_new:
                continue
            key = (row["appid"], row["platform"], row["plan_class"])
            if key not in newest or row["version_num"] > newest[key]["version_num"]:
                newest[key] = row
        # The client's preferred platform comes first where speeds are equal (the sort above is stable).
        yield from sorted(newest.values(), key=lambda row: request.platforms.index(row["platform"]))


def _full(version: int) -> int:
    return version * 100 if version < 10000 else version


def plan_class_by_name(name: str) -> PlanClass:
    """What a stock server and client conclude from the name of a plan class (facts that projects rely on).

    `cuda` or `nvidia` means NVIDIA; `ati` or `amd` means AMD, even inside other words; `intel_gpu` Intel; anything
    else a processor, with an OpenCL driver for it if `opencl` occurs.
    """
    lowered = name.lower()
    opencl = "opencl" in lowered
    if "cuda" in lowered or "nvidia" in lowered:
        return PlanClass(name=name, gpu_type="NVIDIA", needs_opencl=opencl, needs_cuda=not opencl)
    if "ati" in lowered or "amd" in lowered:
        return PlanClass(name=name, gpu_type="ATI", needs_opencl=opencl, needs_cal=not opencl)
    if "intel_gpu" in lowered:
        return PlanClass(name=name, gpu_type="intel_gpu", needs_opencl=opencl)
    if lowered.startswith("mt") or "_mt" in lowered:
        return PlanClass(name=name, max_threads=64)
    return PlanClass(name=name, needs_opencl=opencl)


def read_plan_classes(path: Path) -> dict[str, PlanClass]:
    """The plan classes of a `plan_class_spec.xml`; none if the file does not exist. ValueError if broken."""
    if not path.is_file():
        return {}
    parser = etree.XMLParser(resolve_entities=False, no_network=True)
    try:
        root = etree.fromstring(path.read_bytes(), parser)
    except etree.XMLSyntaxError as error:
        raise ValueError(f"{path} is not well-formed XML: {error.msg}") from error
    classes = (_read_plan_class(element) for element in root.iterfind("plan_class"))
    return {each.name: each for each in classes}


_GPU_TYPES = {"nvidia": "NVIDIA", "ati": "ATI", "amd": "ATI"}


def _read_plan_class(element: etree._Element) -> PlanClass:
    name = (element.findtext("name") or "").strip()
    by_name = plan_class_by_name(name)
    declared = (element.findtext("gpu_type") or "").strip()
    gpu_type = _GPU_TYPES.get(declared, "intel_gpu" if declared.startswith("intel") else declared)

    def number(tag: str, default: float) -> float:
        return clamped(element.findtext(tag), default)

    def between(tag: str) -> tuple[int, int]:
        return int(number(f"min_{tag}", 0)), int(number(f"max_{tag}", 0))

    return PlanClass(
        name=name,
        gpu_type=gpu_type or by_name.gpu_type,
        needs_opencl=element.find("opencl") is not None or by_name.needs_opencl,
        needs_cuda=element.find("cuda") is not None or by_name.needs_cuda,
        needs_cal=element.find("cal") is not None,
        min_gpu_ram=number("min_gpu_ram_mb", 0) * (1 << 20),
        cpu_fraction=number("cpu_frac", 0.1),
        gpu_fraction=number("ngpus", 1) or 1.0,
        max_threads=int(number("max_threads", by_name.max_threads)),
        min_ncpus=int(number("min_ncpus", 0)),
        flops_scale=number("projected_flops_scale", 1) or 1.0,
        gpu_flops_scale=number("gpu_peak_flops_scale", GPU_EFFICIENCY) or GPU_EFFICIENCY,
        opencl_version=between("opencl_version"),
        opencl_revision=between("opencl_driver_revision"),
        cal_target=between("cal_target"),
        cuda_version=between("cuda_version"),
        compute_capability=between("nvidia_compcap"),
    )


def _usable(row: Row, plan: PlanClass, request: SchedulerRequest, speed: Row | None) -> UsableVersion | None:
    if plan.gpu_type:
        return _usable_on_gpu(row, plan, request, speed)
    threads = float(max(1, min(plan.max_threads, request.host.p_ncpus)))
    if request.host.p_ncpus < plan.min_ncpus:
        return None
    if plan.needs_opencl and not any(_has_opencl(each, plan) for each in request.opencl_cpus):
        return None
    flops = cpu_flops(request.host.p_fpops) * threads * plan.flops_scale
    flops = _measured(speed) or flops
    return UsableVersion(row=row, resource="CPU", avg_ncpus=threads, gpus=0.0, flops=flops)


def _usable_on_gpu(row: Row, plan: PlanClass, request: SchedulerRequest, speed: Row | None) -> UsableVersion | None:
    coproc = next((each for each in request.coprocs if each.type == plan.gpu_type), None)
    if coproc is None or coproc.count < 1 or not _has_what_it_needs(coproc, plan):
        return None
    flops = _measured(speed) or gpu_flops(coproc.peak_flops) * plan.gpu_flops_scale * plan.flops_scale
    return UsableVersion(
        row=row,
        resource=plan.gpu_type,
        avg_ncpus=plan.cpu_fraction,
        gpus=plan.gpu_fraction,
        flops=flops * plan.gpu_fraction,
    )


def _has_what_it_needs(coproc: Coprocessor, plan: PlanClass) -> bool:
    return (
        (coproc.has_opencl or not plan.needs_opencl)
        and (coproc.has_cuda or not plan.needs_cuda)
        and (coproc.has_cal or not plan.needs_cal)
        and coproc.memory_bytes >= plan.min_gpu_ram
        and (_has_opencl(coproc.opencl, plan) or not plan.needs_opencl)
        and _within(coproc.cal_target, plan.cal_target)
        and _within(coproc.cuda_version, plan.cuda_version)
        and _within(coproc.compute_capability, plan.compute_capability)
    )


def _has_opencl(given: OpenclVersion, plan: PlanClass) -> bool:
    """A device whose version is unknown passes, as on a stock server."""
    return not given.version or (
        _within(given.version, plan.opencl_version) and _within(given.revision, plan.opencl_revision)
    )


def _within(value: int, limits: tuple[int, int]) -> bool:
    """Whether a value lies between two limits; 0 is no limit."""
    lowest, highest = limits
    return value >= lowest and (not highest or value <= highest)


def cpu_flops(claimed: float) -> float:
    """FLOP/s to expect of one processor that claims this benchmark value."""
    if claimed <= 0 or claimed == UNMEASURED_FPOPS:
        return ASSUMED_FPOPS
    low, high = CPU_FLOPS_RANGE
    return min(max(claimed, low), high)


def gpu_flops(claimed: float) -> float:
    """Peak FLOP/s to believe of one GPU that claims this."""
    low, high = GPU_FLOPS_RANGE
    return min(max(claimed, low), high)


def _measured(speed: Row | None) -> float:
    """FLOP/s of this host's earlier jobs with this version (et_avg is seconds per FLOP); 0 if unknown."""
    if speed is None or speed["et_n"] < MIN_SAMPLES or not speed["et_avg"] > 0:
        return 0.0
    return min(max(1.0 / float(speed["et_avg"]), CPU_FLOPS_RANGE[0]), GPU_FLOPS_RANGE[1])
