"""Which OpenCL device a task uses, and what that device can do.

    find_devices -> choose(found, request) -> facts

A task's device is the one that BOINC's client reserved for it, never another: a card that is not there ends in
`DeviceNotFound`, which the app turns into a temporary exit. Nothing here asks a person, and no environment variable
of PyOpenCL has a say.

Sources: BOINC `client/gpu_opencl.cpp` (how the client numbers devices), `api/boinc_opencl.cpp` (how its own C++ apps
find the device again).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyopencl as cl

from apps.gradient.backends.backend import DeviceNotFound
from apps.gradient.boinc_messages import InitData
from apps.gradient.opencl.facts import DeviceFacts
from boinc_project.contract.errors import UnfitHost

#: Smaller limits than the device's own, for tests on a device that has more: `max_work_group=64,global_memory=1e9`.
LIMITS_VARIABLE = "BOINC_TRAIN_DEVICE_LIMITS"

#: Of a device's memory, what we use at most: the display, the driver and other programs live there too.
MEMORY_SHARE = 0.8

#: A Radeon HD 5870 as its drivers describe it; such a double of any other device keeps us honest.
CYPRESS_LIMITS: Mapping[str, int] = {
    "max_allocation": 128 << 20,
    "global_memory": 1 << 30,
    "max_work_group": 256,
    "local_memory": 32 << 10,
}

OLDEST_VERSION = (1, 1)

# Chips with five or four arithmetic units per lane, by the names that drivers give: AMD's before 2012.
_VLIW_CHIP = re.compile(
    r"\b(?:rv7[1379]0|cypress|hemlock|juniper|redwood|cedar|barts|turks|caicos|cayman|antilles|trillian|palm|wrestler"
    r"|loveland|ontario|zacate|sumo2?|beavercreek|winterpark|aruba|devastator|scrapper)\b"
)
_VLIW_BOARD = re.compile(r"\b(?:radeon|firepro|firegl|mobility)\b.*\bhd [456]\d\d\d")
_LATER_CHIP = re.compile(
    r"\b(?:gfx[0-9a-f]+|navi\d+|vega\d+|polaris\d+|tahiti|pitcairn|verde|capeverde|oland|hainan|bonaire|hawaii|kaveri"
    r"|kabini|mullins|spectre|spooky|kalindi|tonga|iceland|topaz|fiji|carrizo|stoney|ellesmere|baffin|lexa|raven|renoir"
    r"|arcturus|aldebaran)\b"
)


class OpenCLMissing(UnfitHost):
    """No OpenCL driver is installed on this computer."""


@dataclass(frozen=True)
class Sighting:
    """One device as one platform (driver) shows it; the same card may be seen through several platforms.

    platform, position   places of the platform among all, and of the device among all of its platform
    gpu_index            place among the GPUs and accelerators of its platform, -1 for a processor
    kind                 gpu | cpu | accelerator
    vendor               amd | nvidia | intel | apple, or the driver's word in lower case
    address              where it sits on the PCI bus, if the driver tells
    handle               PyOpenCL's device; None in tests
    """

    platform: int
    position: int
    gpu_index: int
    kind: str
    vendor: str
    name: str
    platform_name: str
    board: str = ""
    vendor_name: str = ""
    platform_version: str = ""
    device_version: str = "OpenCL 1.1"
    driver: str = ""
    address: tuple[int, ...] | None = None
    usable: bool = True  # the driver says that the device and its compiler are available
    native_width: int = 1
    wavefront: int = 0
    max_work_group: int = 1
    local_memory: int = 0
    compute_units: int = 1
    clock_mhz: int = 0
    max_allocation: int = 0
    global_memory: int = 0
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def version(self) -> tuple[int, int]:
        """OpenCL version of the device, (0, 0) if its text is not understood."""
        match = re.match(r"OpenCL (\d+)\.(\d+)", self.device_version)
        return (int(match[1]), int(match[2])) if match else (0, 0)

    @property
    def place(self) -> str:
        """For messages, and as a request's text."""
        return f"{self.platform}:{self.position}"


@dataclass(frozen=True)
class Request:
    """Which device is wanted.

    kind       gpu, cpu, or any (a GPU if there is one)
    vendor     only a device of this vendor
    gpu_index  place among the GPUs of its platform, as the client counts; None if it does not say
    number     place among the vendor's cards, as clients before 7.0.12 count
    platform, position   from a text: the platform's place or a part of its name, and the place in it
    """

    kind: str = "any"
    vendor: str = ""
    gpu_index: int | None = None
    number: int | None = None
    platform: str = ""
    position: int | None = None


# What is asked for.


def request_of_task(init: InitData) -> Request:
    """The device that the client reserved for a task."""
    if not init.gpu_type:
        return Request(kind="cpu")
    vendor = vendor_of(init.gpu_type)
    if init.gpu_opencl_dev_index >= 0:
        return Request(kind="gpu", vendor=vendor, gpu_index=init.gpu_opencl_dev_index)
    return Request(kind="gpu", vendor=vendor, number=max(0, init.gpu_device_num))


def request_of_text(text: str | None) -> Request:
    """`cpu`, `gpu`, `PLATFORM:INDEX` (a platform's place or a part of its name), or None for whatever there is.

    Raises ValueError for anything else.
    """
    if text is None or text == "":
        return Request()
    if text in ("cpu", "gpu"):
        return Request(kind=text)
    platform, colon, position = text.rpartition(":")
    if not colon or not platform or not position.isdigit():
        raise ValueError(f"the device must be cpu, gpu or PLATFORM:INDEX (such as 0:1 or rusticl:0), not {text!r}")
    return Request(platform=platform, position=int(position))


def vendor_of(text: str, vendor_id: int = 0) -> str:
    """One word for a vendor, from the many spellings that drivers and clients use."""
    known = {0x1002: "amd", 0x1022: "amd", 0x10DE: "nvidia", 0x8086: "intel"}
    lowered = text.lower()
    if re.search(r"\b(?:amd|ati)\b|advanced micro devices|authenticamd", lowered):
        return "amd"
    for word in ("nvidia", "intel", "apple"):
        if word in lowered:
            return word
    if lowered.startswith("cuda"):
        return "nvidia"
    return known.get(vendor_id, lowered.strip())


# Choosing: pure.


def choose(found: Sequence[Sighting], request: Request) -> Sighting:
    """The sighting to use. Raises DeviceNotFound; a device that was not asked for is never taken instead.

    A platform is one driver, and a card may be seen through several. The client's index is relative to a platform
    that it does not name: like BOINC's own library we take the first platform whose device at that place is of
    the right vendor. That settles the card. It is then used through the driver of its own vendor if one shows it,
    before Mesa's Rusticl, before any other, with Mesa's Clover last: the client took the card's memory and speed from
    the vendor's driver too, and Clover is known to crash on larger kernels.
    """
    if request.platform:
        wanted = [each for each in _of_platform(found, request.platform) if each.position == request.position]
        return _usable(wanted, found, request)[0]
    if request.kind == "cpu":
        return _usable([each for each in found if each.kind == "cpu"], found, request)[0]
    gpus = [each for each in found if each.kind != "cpu" and request.vendor in ("", each.vendor)]
    if request.gpu_index is not None:
        gpus = [each for each in gpus if each.gpu_index == request.gpu_index]
        if gpus:
            gpus = next(card for card in cards(found) if gpus[0] in card)
    elif request.number is not None:
        counted = cards(gpus)
        gpus = counted[request.number] if request.number < len(counted) else []
    elif gpus:
        graphics = [card for card in cards(gpus) if any(_fit(each) for each in card)]
        gpus = graphics[0] if graphics else gpus
    elif request.kind == "any":
        return _usable([each for each in found if each.kind == "cpu"], found, request)[0]
    return sorted(_usable(gpus, found, request), key=_driver_rank)[0]


def cards(found: Sequence[Sighting]) -> list[list[Sighting]]:
    """Physical devices, each with its sightings, in the order of their first ones.

    Two sightings are one card if their places on the PCI bus are equal; where a driver does not tell, if they
    share a name and are the same in number among the devices of that name on their own platforms.
    """
    found_cards: list[list[Sighting]] = []
    for each in found:
        for card in found_cards:
            if all(other.platform != each.platform for other in card) and _same_card(card[0], each, found):
                card.append(each)
                break
        else:
            found_cards.append([each])
    return found_cards


def _same_card(first: Sighting, second: Sighting, found: Sequence[Sighting]) -> bool:
    if (first.kind == "cpu") != (second.kind == "cpu") or first.vendor != second.vendor:
        return False
    if first.address is not None and second.address is not None:
        return first.address == second.address
    shared = designations(first) & designations(second)
    return bool(shared) and _number(first, shared, found) == _number(second, shared, found)


def _number(one: Sighting, names: set[str], found: Sequence[Sighting]) -> int:
    """Place of a device among those of its platform that have one of these names."""
    alike = [each for each in found if each.platform == one.platform and designations(each) & names]
    return alike.index(one)


def designations(device: Sighting) -> set[str]:
    """Names of a device as other drivers may write them too: model, board and chip, in lower case."""
    names = set()
    for text in (device.name.lower(), device.board.lower()):
        plain = re.sub(r"\(.*", "", text)
        plain = re.sub(r"^(?:amd|ati|nvidia|intel)(?:\(r\))?\s+", "", plain.strip()).strip()
        names.update({plain} - {""})
        names.update(_VLIW_CHIP.findall(text), _LATER_CHIP.findall(text))
    return names


def _of_platform(found: Sequence[Sighting], text: str) -> list[Sighting]:
    if text.isdigit():
        return [each for each in found if each.platform == int(text)]
    named = [each for each in found if text.lower() in each.platform_name.lower()]
    return [each for each in named if each.platform == named[0].platform]


def _fit(device: Sighting) -> bool:
    return device.usable and device.version >= OLDEST_VERSION


def _usable(wanted: Sequence[Sighting], found: Sequence[Sighting], request: Request) -> list[Sighting]:
    """Those that can be used; DeviceNotFound with the reason if none can."""
    usable = [each for each in wanted if _fit(each)]
    if usable:
        return usable
    listed = "; ".join(f"{each.place} {each.name} ({each.kind}, {each.platform_name})" for each in found) or "none"
    if wanted:
        one = wanted[0]
        reason = (
            f"has only {one.device_version}; 1.1 is needed"
            if one.usable
            else "is not available: its driver or its compiler is not working"
        )
        raise DeviceNotFound(f"{one.name} (OpenCL device {one.place}) {reason}")
    raise DeviceNotFound(f"OpenCL does not show {described(request)}; it shows: {listed}")


def described(request: Request) -> str:
    """A request in words."""
    if request.platform:
        return f"device {request.position} of platform {request.platform}"
    kind = {"gpu": "GPU", "cpu": "processor", "any": "device"}[request.kind]
    names = {"amd": "AMD ", "nvidia": "NVIDIA ", "intel": "Intel "}
    kind = names.get(request.vendor, f"{request.vendor} " if request.vendor else "") + kind
    if request.gpu_index is not None:
        return f"the {kind} with index {request.gpu_index}"
    return f"the {kind} with number {request.number}" if request.number is not None else f"any {kind}"


def _driver_rank(device: Sighting) -> tuple[int, int]:
    platform = device.platform_name.lower()
    own = vendor_of(device.platform_name) == device.vendor or (device.vendor == "nvidia" and "cuda" in platform)
    rank = 0 if own else 1 if "rusticl" in platform else 3 if "clover" in platform else 2
    return rank, device.platform


# What it can do.


def facts(device: Sighting, limits: Mapping[str, int] | None = None) -> DeviceFacts:
    """What lowering and planning decide by; `limits` (default: those of the environment) make a lesser double."""
    if limits is None:
        limits = limits_of_text(os.environ.get(LIMITS_VARIABLE, ""))
    device = double(device, limits)
    memory = int(MEMORY_SHARE * device.global_memory)
    return DeviceFacts(
        name=device.name,
        vendor=device.vendor_name,
        platform=device.platform_name,
        driver=device.driver,
        version=device.version,
        kind=device.kind,
        group_form=device.kind == "gpu" or "group_form" in limits,
        vector_width=vector_width(device),
        wavefront=wavefront(device),
        max_work_group=device.max_work_group,
        local_memory=device.local_memory,
        compute_units=device.compute_units,
        clock_mhz=device.clock_mhz,
        max_allocation=min(device.max_allocation, memory),
        global_memory=memory,
    )


def double(device: Sighting, limits: Mapping[str, int]) -> Sighting:
    """The same device as if its driver gave smaller numbers, where `limits` has smaller ones."""
    smaller: dict[str, Any] = {
        name: min(getattr(device, name), limit) for name, limit in limits.items() if name in CYPRESS_LIMITS
    }
    return replace(device, **smaller)


def limits_of_text(text: str) -> dict[str, int]:
    """`max_work_group=64,global_memory=1000000000`, or `cypress`; with `group_form=1` in the form for GPUs.

    ValueError for anything else.
    """
    found: dict[str, int] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        if part == "cypress":
            found.update(CYPRESS_LIMITS)
            continue
        name, _, number = part.partition("=")
        if name not in (*CYPRESS_LIMITS, "group_form") or not number.isdigit() or int(number) < 1:
            names = ", ".join([*sorted(CYPRESS_LIMITS), "group_form"])
            raise ValueError(f"{LIMITS_VARIABLE}: {part!r} is not NAME=NUMBER with a NAME of {names}")
        found[name] = int(number)
    return found


def is_vliw(device: Sighting) -> bool:
    """Whether each lane of it is a small vector machine (AMD's cards before 2012), so that float4 pays."""
    if device.kind != "gpu" or device.vendor != "amd":
        return False
    text = f"{device.name} {device.board}".lower()
    return bool(_VLIW_CHIP.search(text) or (_VLIW_BOARD.search(text) and not _LATER_CHIP.search(text)))


def vector_width(device: Sighting) -> int:
    """Floats that one item handles at once."""
    if device.kind == "gpu":
        return 4 if is_vliw(device) else max(1, min(device.native_width, 4))
    # A processor has SSE at least; drivers that vectorise across items say 1. There is nothing wider than float16.
    return max(4, min(device.native_width, 16))


def wavefront(device: Sighting) -> int:
    """Items that run in step, as the driver says or as is usual; bounded by the largest work-group."""
    usual = 32 if device.vendor == "nvidia" and device.kind == "gpu" else 64
    return min(device.wavefront or usual, device.max_work_group)


# Looking: the one place that asks the drivers.


def listing(found: Sequence[Sighting]) -> list[str]:
    """A line for each device, for its owner."""
    return [
        f"{each.place}  {each.kind:<5} {each.board or each.name}, {each.global_memory >> 20} MB,"
        f" {each.device_version.strip()} (driver {each.driver} of {each.platform_name})"
        f"{'' if _fit(each) else ' - cannot be used'}"
        for each in found
    ]


_NO_DRIVER = (
    "no OpenCL driver is installed; for a graphics card install its maker's, for the processor PoCL (Debian's package "
    "pocl-opencl-icd)"
)


def find_devices() -> list[Sighting]:
    """Every device of every platform, as the drivers list them. Raises OpenCLMissing if there is no driver."""
    try:
        platforms = cl.get_platforms()
    except cl.Error as error:
        raise OpenCLMissing(f"{_NO_DRIVER} ({error})") from error
    if not platforms:
        raise OpenCLMissing(_NO_DRIVER)
    return [each for number, platform in enumerate(platforms) for each in _devices_of(number, platform)]


def _devices_of(number: int, platform: Any) -> Iterable[Sighting]:
    try:
        devices = platform.get_devices()
    except cl.Error:  # an old driver's way to say that it has none
        return
    gpu_index = 0
    for position, device in enumerate(devices):
        kind = _kind(_info(device, "TYPE", 0))
        yield _sighting(number, position, -1 if kind == "cpu" else gpu_index, kind, platform, device)
        gpu_index += kind != "cpu"


def _kind(bits: int) -> str:
    if bits & cl.device_type.GPU:
        return "gpu"
    return "cpu" if bits & cl.device_type.CPU else "accelerator"


def _sighting(number: int, position: int, gpu_index: int, kind: str, platform: Any, device: Any) -> Sighting:
    extensions = str(_info(device, "EXTENSIONS", "")).split()
    amd = "cl_amd_device_attribute_query" in extensions
    nvidia = "cl_nv_device_attribute_query" in extensions
    vendor_name = str(_info(device, "VENDOR", ""))
    return Sighting(
        platform=number,
        position=position,
        gpu_index=gpu_index,
        kind=kind,
        vendor=vendor_of(vendor_name, int(_info(device, "VENDOR_ID", 0))),
        name=_text(_info(device, "NAME", "")),
        platform_name=_text(_platform_info(platform, "NAME")),
        board=_text(_info(device, "BOARD_NAME_AMD", "")) if amd else "",
        vendor_name=_text(vendor_name),
        platform_version=_text(_platform_info(platform, "VERSION")),
        device_version=_text(_info(device, "VERSION", "")),
        driver=_text(_info(device, "DRIVER_VERSION", "")),
        address=_address(device, amd, nvidia),
        usable=bool(_info(device, "AVAILABLE", True)) and bool(_info(device, "COMPILER_AVAILABLE", True)),
        native_width=int(_info(device, "NATIVE_VECTOR_WIDTH_FLOAT", 1)),
        wavefront=int(_info(device, "WAVEFRONT_WIDTH_AMD" if amd else "WARP_SIZE_NV", 0)) if amd or nvidia else 0,
        max_work_group=max(1, int(_info(device, "MAX_WORK_GROUP_SIZE", 1))),
        local_memory=int(_info(device, "LOCAL_MEM_SIZE", 0)),
        compute_units=max(1, int(_info(device, "MAX_COMPUTE_UNITS", 1))),
        clock_mhz=int(_info(device, "MAX_CLOCK_FREQUENCY", 0)),
        max_allocation=int(_info(device, "MAX_MEM_ALLOC_SIZE", 0)),
        global_memory=int(_info(device, "GLOBAL_MEM_SIZE", 0)),
        handle=device,
    )


def _address(device: Any, amd: bool, nvidia: bool) -> tuple[int, ...] | None:
    """Bus, device and function, which both vendors' drivers tell in their own ways."""
    if amd:
        topology = _info(device, "TOPOLOGY_AMD", None)
        if topology is not None and hasattr(topology, "bus"):
            # An old driver gives these as signed bytes.
            return (int(topology.bus) & 0xFF, int(topology.device) & 0xFF, int(topology.function) & 0xFF)
    if nvidia:
        bus, slot = _info(device, "PCI_BUS_ID_NV", None), _info(device, "PCI_SLOT_ID_NV", None)
        if bus is not None and slot is not None:
            return (int(bus), int(slot) >> 3, int(slot) & 7)
    return None


def _info(device: Any, name: str, default: Any) -> Any:
    """One fact of a device; the default if this driver, or this PyOpenCL, does not know the question."""
    key = getattr(cl.device_info, name, None)
    if key is None:
        return default
    try:
        return device.get_info(key)
    except (cl.Error, ValueError, UnicodeDecodeError):
        return default


def _platform_info(platform: Any, name: str) -> str:
    try:
        return str(platform.get_info(getattr(cl.platform_info, name)))
    except (cl.Error, UnicodeDecodeError):
        return ""


def _text(value: Any) -> str:
    """A driver's text without the blanks and terminators that some add."""
    return str(value).replace("\0", " ").strip()
