"""The plan classes of our app versions for GPUs and for OpenCL, as entries of BOINC's `plan_class_spec.xml`.

Sources: BOINC `sched/plan_class_spec.cpp` (elements), `sched/sched_version.cpp` and the client's `cs_scheduler.cpp`
(meaning of substrings of a class's name). The name decides for which processor a version is: the server looks for
`cuda` or `nvidia`, then `ati` or `amd`, then `intel_gpu`; so `simulation` would be a class for AMD cards.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Substrings with a meaning, in the order in which the scheduler looks for them.
_PROCESSORS = (
    ("cuda", "nvidia"), ("nvidia", "nvidia"), ("ati", "amd"), ("amd", "amd"), ("intel_gpu", "intel_gpu"),
    ("apple_gpu", "apple_gpu"),
)  # fmt: skip
#: Substrings that make a class one for many threads or for virtual machines.
_SPECIAL = ("mt", "vbox", "nci", "sse")


@dataclass(frozen=True, kw_only=True)
class PlanClass:
    """One `<plan_class>`; `elements` in order, '' for a flag."""

    name: str
    processor: str  # nvidia, amd, intel_gpu or cpu
    about: str
    elements: tuple[tuple[str, str], ...]

    def lines(self) -> list[str]:
        """The entry, one element a line, indented from 0."""
        body = [f"    <{tag}>{value}</{tag}>" if value else f"    <{tag}/>" for tag, value in self.elements]
        return ["<plan_class>", f"    <name>{self.name}</name>", *body, "</plan_class>"]


def _opencl(name: str, processor: str, about: str, share: str, *more: tuple[str, str]) -> PlanClass:
    elements = (
        ("gpu_type", {"amd": "ati"}.get(processor, processor)),
        ("opencl", ""),
        ("min_opencl_version", "101"),
        *more,
        ("min_gpu_ram_mb", "900"),
        ("gpu_ram_used_mb", "700"),
        ("cpu_frac", "0.3"),
        ("gpu_peak_flops_scale", share),
    )
    return PlanClass(name=name, processor=processor, about=about, elements=elements)


# Chips by their numbers in CAL, the interface that AMD's drivers had beside OpenCL until about 2015 (BOINC
# `client/gpu_amd.cpp`): 8 is the first that OpenCL 1.1 runs on (Cypress, Radeon HD 5800), 20 the first of GCN (Tahiti).
_FIRST_VLIW, _LAST_VLIW, _FIRST_GCN = "8", "19", "20"

# Memory is what the smallest useful card has left beside its display; a job's own need stands in its workunits.
# gpu_peak_flops_scale: the share of peak speed that training reaches, for the first estimate of a task's time;
# BOINC replaces it by what it measures.
CLASSES = (
    PlanClass(
        name="cuda_gt",
        processor="nvidia",
        about="NVIDIA cards with CUDA 11.8 or later",
        elements=(
            ("gpu_type", "nvidia"),
            ("cuda", ""),
            ("min_cuda_version", "11080"),
            ("min_nvidia_compcap", "500"),
            ("min_gpu_ram_mb", "2000"),
            ("gpu_ram_used_mb", "1500"),
            ("cpu_frac", "0.5"),
            ("gpu_peak_flops_scale", "0.2"),
        ),
    ),
    _opencl("opencl_nvidia_gt", "nvidia", "NVIDIA cards through OpenCL", "0.1"),
    # What an old card reaches of a peak that counts five units a lane is less than half of what a later one does.
    _opencl(
        "opencl_ati_vliw_gt",
        "amd",
        "ATI and AMD cards of 2009 to 2011 with AMD's driver: Radeon HD 5000 and HD 6000 series",
        "0.04",
        ("min_cal_target", _FIRST_VLIW),
        ("max_cal_target", _LAST_VLIW),
    ),
    _opencl(
        "opencl_ati_gcn_gt",
        "amd",
        "AMD cards since 2012 (GCN) with AMD's driver of before 2016",
        "0.1",
        ("min_cal_target", _FIRST_GCN),
    ),
    # A host without CAL says nothing of its chip's kind. Number 0 is below the first card with OpenCL 1.1.
    _opencl(
        "opencl_ati_gt",
        "amd",
        "AMD cards with later drivers, and any with Mesa's",
        "0.1",
        ("max_cal_target", str(int(_FIRST_VLIW) - 1)),
    ),
    _opencl("opencl_intel_gpu_gt", "intel_gpu", "Intel's graphics through OpenCL", "0.1"),
    PlanClass(
        name="opencl_cpu_gt",
        processor="cpu",
        about="processors with an OpenCL driver of their own, such as PoCL",
        elements=(("opencl", ""), ("min_opencl_version", "101"), ("max_threads", "8")),
    ),
)


def specification() -> str:
    """A whole plan_class_spec.xml of our classes."""
    lines = [f"    {line}" for each in CLASSES for line in each.lines()]
    return "\n".join(["<plan_classes>", *lines, "</plan_classes>"]) + "\n"


def processor_of(plan_class: str) -> str:
    """Which processor BOINC takes a class of this name to be for; 'cpu' if none of its words occurs in it."""
    return next((processor for word, processor in _PROCESSORS if word in plan_class), "cpu")


def special_words(plan_class: str) -> list[str]:
    """Further words with a meaning that occur in the name."""
    return [word for word in _SPECIAL if word in plan_class]
