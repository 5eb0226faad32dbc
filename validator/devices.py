"""What a result was computed with: families of GPUs and their drivers, families of processors.

Three say something of it, and none of them is the server itself:

    the app version    for which make of GPU, or for the processor, the task was sent: the server's own record
    the client         names and drivers of the host's GPUs, make and model of its processor: host.misc (BOINC 8.3 and
                       the embedded server), host.serialnum (older servers), host.p_vendor, host.p_model
    the application    in the result's file, beside its numbers: the device that it has opened, and its driver

The client names one card of each make, maybe not the one that computed; the application knows it, but the file is a
stranger's. So the application's word is used where it can only cost a vote, and never where it could gain one: it ties
a copy to others of the device it names, beside the client's word, or puts it into a blocked group. Who lies about both
gains one vote of a family, and meets audits and spot checks like everybody. Drift is told from the records alone.

A processor's family is a group whose drift is told and which can be blocked; it is no tie: two processors that are
right are alike, and one that is broken is one host.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from boinc_project.standard.plan_classes import processor_of

#: Generalized app versions of the anonymous platform (result.app_version_id) and their processors.
_ANONYMOUS = {-3: "nvidia", -4: "amd", -5: "intel_gpu", -6: "apple_gpu"}

#: The first field of an entry of host.serialnum (BOINC `lib/coproc.cpp`, summary_string), and `type` in host.misc
#: (summary_string_json), for each processor.
_TYPES = {
    "CUDA": "nvidia", "NVIDIA": "nvidia", "nvidia": "nvidia", "CAL": "amd", "ATI": "amd", "AMD": "amd", "amd": "amd",
    "INTEL": "intel_gpu", "intel_gpu": "intel_gpu", "intel": "intel_gpu", "apple": "apple_gpu",
}  # fmt: skip
_ENTRY = re.compile(r"\[([^\[\]]*)\]")
#: BOINC prints the object with names as they came, so that it may be no JSON; its lines are always these.
_GPU = re.compile(
    r'"type": "([^"]*)",\s*"model": "([^"]*)",\s*"count": -?\d+,\s*"ram_mb": -?\d+,\s*"driver_version": "([^"]*)"'
)
_MOST_CHARACTERS = 100  # of a name
_SIGNATURE = re.compile(r"\[(Family \d+ Model \d+)[^\]]*\]")
_CLOCK = re.compile(r"\s*@.*|\[.*")

#: Processor (nvidia, amd, intel_gpu, apple_gpu), name, driver.
Gpu = tuple[str, str, str]


def gpus_of(serialnum: str, misc: str) -> list[Gpu]:
    """The GPUs of a host as its client reported them."""
    found = [(type_, name, driver) for type_, name, driver in _GPU.findall(misc)]
    for entry in _ENTRY.findall(serialnum):
        parts = [*entry.split("|"), "", "", "", ""]
        found.append((parts[0], parts[1], parts[4]))
    return [(_TYPES[type_], _clean(name), _clean(driver)) for type_, name, driver in found if type_ in _TYPES]


def device_of(plan_class: str, app_version_id: int, gpus: Sequence[Gpu]) -> tuple[str, str]:
    """Family and driver of the GPU that a task was sent to; ('', '') for a processor, only the make if no more is
    known."""
    processor = processor_of(plan_class) if app_version_id > 0 else _ANONYMOUS.get(app_version_id, "cpu")
    if processor == "cpu":
        return "", ""
    for make, name, driver in gpus:
        if make == processor:
            return name or processor, driver
    return processor, ""


def reported_device(said: Mapping[str, Any]) -> tuple[str, str]:
    """Family and driver of the GPU that a result's file names (apps/gradient: backend.describe); ('', '') for none."""
    about = said.get("device")
    if not isinstance(about, Mapping):
        return "", ""
    name, driver = about.get("device"), about.get("driver")
    if not isinstance(name, str) or _clean(name).lower() in ("", "cpu"):
        return "", ""
    return _clean(name), _clean(driver) if isinstance(driver, str) else ""


def cpu_family(vendor: str, model: str) -> str:
    """Make and family of a processor: `GenuineIntel Family 6 Model 142` (the client adds that on x86), or its model
    without the clock."""
    signature = _SIGNATURE.search(model)
    return _clean(f"{vendor} {signature[1] if signature else _CLOCK.sub('', model)}")


def _clean(text: str) -> str:
    """One line of printable characters, not long."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:_MOST_CHARACTERS]
