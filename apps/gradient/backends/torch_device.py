"""Which device PyTorch computes a task on, how it has to compute there, and what its errors mean.

    device_of_task or device_of_text -> start (precision, known answers, share of memory)
    circumstance                        what an error of CUDA or HIP says

Deciding is in pure functions of numbers and texts; those that ask PyTorch are thin.

Which card. BOINC's client counts NVIDIA's cards as CUDA shows them to the client itself (`client/gpu_nvidia.cpp`:
cuDeviceGet(0), cuDeviceGet(1), ...) and hands that number to the task. How CUDA counts depends on two environment
variables, CUDA_DEVICE_ORDER and CUDA_VISIBLE_DEVICES, which the client neither sets nor changes. The task inherits the
client's environment (`client/app_start.cpp`), so CUDA counts alike in both:

    neither is set               the fastest card first, in both
    CUDA_DEVICE_ORDER is set     by place on the PCI bus if it says so, in both
    CUDA_VISIBLE_DEVICES is set  the cards that it names, from 0, in both

So neither variable is touched here: setting the order for the task alone would exchange the cards of a computer with
different ones. init_data.xml has the PCI addresses of the cards that the client uses, too; where PyTorch tells them,
they have to confirm the number, and if they do not, no card is taken.

AMD's cards the client knows through OpenCL only. The task's place on its OpenCL platform is HIP's number, since both
come from the same driver, unless HIP_VISIBLE_DEVICES (or CUDA_VISIBLE_DEVICES, which HIP reads as well) hides cards
from HIP alone: then the number is looked up in its list. ROCR_VISIBLE_DEVICES hides them from both.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch

from apps.gradient.backends.backend import ContextLost, DeviceNotFound, WrongResults
from apps.gradient.boinc_messages import InitData
from boinc_project.contract.errors import TooLittleMemory, UnfitHost

Address = tuple[int, int, int]  # PCI domain, bus, device

VENDORS: Mapping[str, str] = {"NVIDIA": "NVIDIA", "ATI": "AMD", "AMD": "AMD"}  # gpu_type of init_data.xml -> maker

#: Of a card's memory, what is left to the display and to programs that start later: the larger of the two.
RESERVE_SHARE = 0.05
RESERVE_BYTES = 256 << 20
LEAST_BYTES = 256 << 20  # with less there is no use in beginning


@dataclass(frozen=True)
class Build:
    """The PyTorch that is installed: versions of CUDA or of HIP that it was made for ('' if it was not), and the
    architectures that it has code for."""

    version: str
    cuda: str = ""
    hip: str = ""
    architectures: tuple[str, ...] = ()

    @property
    def vendor(self) -> str:
        """Whose cards it drives; '' if none."""
        return "AMD" if self.hip else "NVIDIA" if self.cuda else ""


@dataclass(frozen=True)
class Card:
    """A card as PyTorch shows it. `architecture` is sm_86 or gfx1030; `address` is None if PyTorch does not tell."""

    index: int
    name: str
    architecture: str
    address: Address | None = None


# Before CUDA starts.


def prepare_environment(environment: MutableMapping[str, str]) -> None:
    """What CUDA's libraries read once, when they start.

    NVIDIA_TF32_OVERRIDE=1 would make them use TF32 whatever a program asks for; 0 forbids it. cuBLAS gives the same
    bits twice only with one of two sizes of workspace.
    """
    environment["NVIDIA_TF32_OVERRIDE"] = "0"
    if environment.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"


# Which card: pure.


def check_vendor(gpu_type: str, build: Build) -> None:
    """Raise UnfitHost unless this PyTorch drives such cards: it calls AMD's `cuda` too, and would take another."""
    wanted = VENDORS.get(gpu_type)
    if wanted is None:
        raise UnfitHost(f"the torch backend computes on NVIDIA and AMD cards, not on {gpu_type}")
    if build.vendor != wanted:
        made = f"for {build.vendor} cards" if build.vendor else "for processors only"
        raise UnfitHost(
            f"this task is for an {wanted} card, and the PyTorch of this program ({build.version}) is {made}"
        )


def number_of_task(init: InitData, vendor: str, environment: Mapping[str, str]) -> int | None:
    """The number of the task's card as PyTorch counts; None if the client gave none."""
    if vendor == "NVIDIA":
        return init.gpu_device_num if init.gpu_device_num >= 0 else None
    number = init.gpu_opencl_dev_index if init.gpu_opencl_dev_index >= 0 else init.gpu_device_num
    if number < 0:
        return None
    for variable in ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"):
        if variable in environment:
            return _place(number, variable, environment[variable])
    return number


def _place(number: int, variable: str, visible: str) -> int:
    """The place of a card in the list of those that HIP may show."""
    listed = [each.strip() for each in visible.split(",")]
    if not all(each.isdigit() for each in listed):
        raise DeviceNotFound(f"{variable} names cards by other than numbers; unset it for BOINC's client")
    if str(number) not in [str(int(each)) for each in listed]:
        raise DeviceNotFound(f"{variable} hides the card {number} that the client reserved for this task")
    return [int(each) for each in listed].index(number)


def choose(number: int | None, addresses: Sequence[Address], cards: Sequence[Card]) -> Card:
    """The card with this number, or the only one; never another.

    addresses  of the cards that the client uses, in its order (some may be unused, so that it is not theirs by number)

    Raises DeviceNotFound if it is not there, or if the addresses and the number do not belong together.
    """
    if number is None and len(cards) != 1:
        raise DeviceNotFound(f"the client did not say which of {len(cards)} cards this task is for")
    found = cards[0] if number is None else next((card for card in cards if card.index == number), None)
    if found is None:
        raise DeviceNotFound(f"PyTorch does not show the card {number} that the client reserved for this task")
    places = {card.address: card for card in cards if card.address is not None}
    told = all(map(any, addresses)) and len(set(addresses)) == len(addresses)  # else a client that does not know them
    if not addresses or not told or len(places) < len(cards):
        return found
    if all(each in places for each in addresses):  # if one is missing, the others may have moved up
        seen = [places[each].index for each in addresses]
        if found.address in addresses and seen == sorted(seen):
            return found
        if len(addresses) == 1:
            return places[addresses[0]]
        if len(addresses) == len(cards) and number is not None:  # the client uses all, so it counts in this order
            return places[addresses[number]]
    raise DeviceNotFound(
        f"the card {number} that the client reserved for this task is not at any place on the bus that the client"
        " names; restart the client"
    )


def check_architecture(card: Card, build: Build) -> None:
    """Raise UnfitHost if PyTorch has no code for the card."""
    if build.architectures and not any(serves(each, card.architecture) for each in build.architectures):
        raise UnfitHost(
            f"the PyTorch of this program ({build.version}) has no code for {card.name} ({card.architecture}), only"
            f" for {', '.join(build.architectures)}"
        )


def serves(code: str, device: str) -> bool:
    """Whether code for one architecture runs on a device of another.

    sm_XY runs on devices of the same major version and the same minor one or later; compute_XY is compiled by the
    driver for any later device; an `a` (sm_90a) binds it to the very architecture (CUDA Programming Guide, compute
    capabilities). gfx names have to be equal, or begin as a generic one does (gfx10-3-generic).
    """
    if device.startswith("gfx"):
        if code.endswith("-generic"):
            return device.startswith(code[: -len("-generic")].replace("-", ""))
        return device.partition(":")[0] == code.partition(":")[0]
    match = re.fullmatch(r"(sm|compute)_(\d+)(a?)f?", code)
    if match is None or not device.startswith("sm_"):
        return False
    has, wanted = int(match[2]), int(device.rpartition("_")[2])
    if match[3]:
        return has == wanted
    if match[1] == "compute":
        return wanted >= has
    return wanted // 10 == has // 10 and wanted >= has


def not_started(text: str) -> Exception:
    """What it means that CUDA or HIP did not start, by what PyTorch says (c10/cuda/CUDAFunctions.cpp)."""
    first = text.strip().partition("\n")[0].partition("(Triggered")[0].strip()
    if "driver on your system is too old" in first or "insufficient for CUDA runtime" in first:
        version = re.search(r"found version (\d+)", first)
        has = f" (CUDA {int(version[1]) // 1000}.{int(version[1]) % 1000 // 10})" if version else ""
        return UnfitHost(f"the graphics driver{has} is too old for this program: install a newer one")
    if re.search(r"[Ff]ound no .*driver on your system", first):
        return UnfitHost("no driver for the graphics card is installed on this computer")
    if "not compiled with" in first:
        return UnfitHost("the PyTorch of this program computes on processors only")
    if re.search(r"No \w+ GPUs are available|no CUDA-capable device", first):
        return DeviceNotFound("PyTorch shows no card on this computer now")
    return DeviceNotFound(f"the graphics driver does not start now; restart the computer if it stays so: {first}")


# What its errors mean: pure.

_NO_CODE = r"no kernel image|invalid device function|ARCH_MISMATCH"
_NO_MEMORY = r"out of memory|ALLOC_FAILED|ALLOCATION_FAILED|DefaultCPUAllocator|hipErrorOutOfMemory|AllocFailed"
# Errors of a call, after which everything else goes on: whoever asked is at fault.
_OF_THE_CALL = (
    r"invalid argument|invalid configuration argument|too many resources requested|operation not supported"
    r"|invalid resource handle|STATUS_INVALID_VALUE|STATUS_NOT_SUPPORTED|STATUS_BAD_PARAM"
)
_OF_THE_DEVICE = (
    r"\b(?:CUDA|HIP) (?:driver )?error\b|CUBLAS_STATUS_|HIPBLAS_STATUS_|rocblas_status_|CUDNN_STATUS_|miopenStatus"
    r"|cusparseStatus|CUSOLVER_STATUS_|launch timed out|unspecified launch failure|uncorrectable ECC"
)


def circumstance(error: BaseException | None) -> Exception | None:
    """The circumstance that an error of PyTorch tells of, None if it is a fault of what was asked for.

    TooLittleMemory, UnfitHost, ContextLost, or WrongResults where a check inside a kernel of PyTorch failed, because
    everything that it could object to has been checked.
    """
    if not isinstance(error, RuntimeError):
        return None
    text = str(error)
    first = text.strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError) or re.search(_NO_MEMORY, text):
        return TooLittleMemory(first)
    accelerator = getattr(torch, "AcceleratorError", None)  # since PyTorch 2.8
    of_device = accelerator is not None and isinstance(error, accelerator)
    if not of_device and not re.search(_OF_THE_DEVICE, text):
        return None
    if re.search(_NO_CODE, text):
        return UnfitHost(f"the PyTorch of this program has no code for this card: {first}")
    if "device-side assert" in text:
        return WrongResults(f"a check inside PyTorch failed on the card, which must not happen: {first}")
    if re.search(_OF_THE_CALL, text):
        return None
    return ContextLost(f"the card stopped working: {first}")


# How it has to compute.


def set_precision() -> None:
    """Float32 products in float32 (TF32 differs by 4e-4, a thousand honest replicas' distance), same bits twice."""
    torch.set_float32_matmul_precision("highest")
    for switch, value in (
        ("allow_tf32", False),
        ("allow_fp16_reduced_precision_reduction", False),
        ("allow_bf16_reduced_precision_reduction", False),
        ("allow_fp16_accumulation", False),
    ):
        if hasattr(torch.backends.cuda.matmul, switch):  # the last one came with PyTorch 2.7
            setattr(torch.backends.cuda.matmul, switch, value)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation.*")


def precision(device: torch.device) -> dict[str, str]:
    """How products and sums are computed on a device: read from PyTorch, not from what was asked for."""
    products = torch.get_float32_matmul_precision()
    about = {"precision": "float32", "products": products, "tf32": _on(products != "highest")}
    if device.type != "cuda":
        return about
    matmul = torch.backends.cuda.matmul
    about["tf32"] = _on(
        matmul.allow_tf32 or torch.backends.cudnn.allow_tf32 or os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
    )
    reduced = (
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        getattr(matmul, "allow_fp16_accumulation", False),
    )
    about["reduced sums"] = _on(any(reduced))
    about["deterministic"] = _on(torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic)
    return about


def _on(value: bool) -> str:
    return "on" if value else "off"


def wrong_answers(device: torch.device) -> list[str]:
    """Operations with a known exact answer that the device gets wrong, by name.

    1 + 2^-12 needs more than the 10 bits of TF32's mantissa and fewer than float32's, and products with one and zero
    are exact in any order; so are sums of whole numbers below 2^24.
    """
    size, fine = 64, 1 + 2.0**-12
    fines, one = torch.full((size, size), fine), torch.eye(size)
    image = torch.full((1, 8, 16, 16), fine)
    middle = torch.nn.functional.pad(torch.eye(8)[:, :, None, None], (1, 1, 1, 1))  # a convolution that changes nothing
    places = torch.arange(size)
    a, b, x, w, index = (each.to(device) for each in (fines, one, image, middle, places.flip(0)))
    numbers = torch.arange(4096, dtype=torch.float32, device=device)
    answers: Mapping[str, tuple[Callable[[], torch.Tensor], torch.Tensor]] = {
        "product of matrices": (lambda: torch.mm(a, b), fines),
        "batched product": (lambda: torch.bmm(a[None], b[None]), fines[None]),
        "convolution": (lambda: torch.convolution(x, w, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), image),
        "sum": (lambda: numbers.sum(), torch.tensor(4095 * 4096 / 2)),
        "gather": (lambda: torch.index_select(index, 0, index), places),
    }
    return [name for name, (compute, right) in answers.items() if not torch.equal(compute().cpu(), right)]


def memory_share(free: int, total: int) -> float:
    """The share of a card's memory that this process may take, of which so many bytes are free now.

    Raises DeviceNotFound if others have nearly all of it: they may be gone later.
    """
    allowed = free - max(RESERVE_BYTES, int(RESERVE_SHARE * total))
    if allowed < LEAST_BYTES:
        raise DeviceNotFound(f"other programs use the card's memory: {free >> 20} of {total >> 20} MiB are free")
    return min(1.0, allowed / total)


# Asking PyTorch.


def installed() -> Build:
    """The PyTorch that is installed."""
    return Build(
        torch.__version__, torch.version.cuda or "", torch.version.hip or "", tuple(torch.cuda.get_arch_list())
    )


def find_cards(vendor: str) -> list[Card]:
    """The cards that PyTorch shows, after starting CUDA or HIP. Raises UnfitHost or DeviceNotFound if it does not
    start."""
    prepare_environment(os.environ)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about other cards than ours, and in more words than one sentence
            torch.cuda.init()  # type: ignore[no-untyped-call]
        return [_card(index, vendor) for index in range(torch.cuda.device_count())]
    except (RuntimeError, AssertionError) as error:
        raise not_started(str(error)) from error


def _card(index: int, vendor: str) -> Card:
    about: Any = torch.cuda.get_device_properties(index)
    address = None
    if hasattr(about, "pci_bus_id"):  # newer PyTorch
        address = (int(about.pci_domain_id), int(about.pci_bus_id), int(about.pci_device_id))
    architecture = about.gcnArchName if vendor == "AMD" else f"sm_{about.major}{about.minor}"
    return Card(index, about.name, architecture, address)


def device_of_task(init: InitData) -> torch.device:
    """The device that BOINC's client reserved for a task. Raises UnfitHost or DeviceNotFound."""
    if not init.gpu_type:
        return torch.device("cpu")
    build = installed()
    check_vendor(init.gpu_type, build)
    number = number_of_task(init, build.vendor, os.environ)
    addresses = init.nvidia_addresses if build.vendor == "NVIDIA" else ()
    card = choose(number, addresses, find_cards(build.vendor))
    check_architecture(card, build)
    return torch.device("cuda", card.index)


def device_of_text(text: str | None) -> torch.device:
    """The device of a name: `cpu`, `cuda`, `cuda:N` (AMD's cards are called cuda too); None takes a card if there is
    one. Raises UnfitHost."""
    wanted = text or ("cuda" if torch.cuda.is_available() else "cpu")
    match = re.fullmatch(r"cpu|cuda(?::(\d{1,2}))?", wanted)
    if match is None:
        raise UnfitHost(f"the torch backend runs on cpu, cuda or cuda:<number>, not on {wanted!r}")
    if wanted == "cpu":
        return torch.device("cpu")
    build = installed()
    if not build.vendor:
        raise UnfitHost(
            f"there is no {wanted} here: the PyTorch of this program ({build.version}) is for processors only"
        )
    try:
        cards = find_cards(build.vendor)
    except DeviceNotFound as error:
        raise UnfitHost(str(error)) from error
    number = int(match.group(1) or 0)
    if number >= len(cards):
        raise UnfitHost(f"there is no {wanted} here: PyTorch shows {len(cards)} cards")
    check_architecture(cards[number], build)
    return torch.device("cuda", number)


def listing() -> list[str]:
    """The cards of this computer, a line each, with what keeps a task from running there. Raises UnfitHost or
    DeviceNotFound if there are none."""
    build = installed()
    if not build.vendor:
        raise UnfitHost(f"the PyTorch of this program ({build.version}) is for processors only")
    lines = []
    for card in find_cards(build.vendor):
        try:
            check_architecture(card, build)
            fit = ""
        except UnfitHost as error:
            fit = f": {error}"
        lines.append(f"cuda:{card.index}  {card.name} ({card.architecture}){fit}")
    return lines


def start(device: torch.device) -> None:
    """Get a device ready: precision for all, and for a card known answers and its share of memory.

    Raises UnfitHost, DeviceNotFound, WrongResults, TooLittleMemory or ContextLost.
    """
    if device.type != "cuda":
        return
    set_precision()
    try:
        torch.cuda.set_device(device)
        wrong = wrong_answers(device)
        torch.cuda.empty_cache()
        share = memory_share(*torch.cuda.mem_get_info(device))
        torch.cuda.set_per_process_memory_fraction(share, device)
    except RuntimeError as error:
        found = circumstance(error)
        if found is None:
            raise
        raise found from error
    if wrong:
        raise WrongResults(f"{torch.cuda.get_device_name(device)} computes wrong numbers: {', '.join(wrong)}")


def describe(device: torch.device) -> dict[str, str]:
    """A device, its driver and how it computes, for a result's metadata."""
    about = {"device": "cpu", **precision(device)}
    if device.type == "cuda":
        build = installed()
        card = _card(device.index or 0, build.vendor)
        about["device"] = card.name
        about["architecture"] = card.architecture
        about["runtime"] = f"hip {build.hip}" if build.hip else f"cuda {build.cuda}"
        about["driver"] = driver_version()
    return about


def driver_version(folder: Path = Path("/")) -> str:
    """The graphics driver's version, where Linux tells; '' elsewhere."""
    for name in ("proc/driver/nvidia/version", "sys/module/amdgpu/version"):
        try:
            text = (folder / name).read_text(encoding="ascii", errors="replace")
        except OSError:
            continue
        match = re.search(r"\b\d+\.\d+(?:\.\d+)*\b", text)
        return match[0] if match else ""
    return ""
