"""Which card PyTorch computes on, how it computes there, and what its errors mean: driven by stubs, without a card."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.gradient.backends import torch_device
from apps.gradient.backends.backend import ContextLost, DeviceNotFound, WrongResults
from apps.gradient.backends.torch_device import Build, Card, choose, circumstance, serves
from apps.gradient.boinc_messages import InitData, parse_init_data
from boinc_project.contract.errors import TooLittleMemory, UnfitHost

CUDA = Build("2.9.1+cu126", cuda="12.6", architectures=("sm_50", "sm_80", "sm_86", "sm_90", "compute_90"))
ROCM = Build("2.9.1+rocm6.4", hip="6.4", architectures=("gfx906", "gfx1030", "gfx11-generic"))
PROCESSOR = Build("2.9.1+cpu")

A, B, C = ((0, bus, 0) for bus in (1, 2, 3))


def cards(*addresses: torch_device.Address | None) -> list[Card]:
    return [Card(index, f"card {index}", "sm_86", address) for index, address in enumerate(addresses)]


def one_sentence(error: BaseException) -> bool:
    text = str(error)
    return bool(text) and "\n" not in text and len(text) < 300


# Whose card.


@pytest.mark.parametrize(
    ("gpu_type", "build", "serves_it"),
    [
        ("NVIDIA", CUDA, True), ("NVIDIA", ROCM, False), ("NVIDIA", PROCESSOR, False),
        ("ATI", ROCM, True), ("ATI", CUDA, False), ("ATI", PROCESSOR, False),
        ("intel_gpu", CUDA, False), ("intel_gpu", ROCM, False), ("apple_gpu", CUDA, False), ("Mali", PROCESSOR, False),
    ],
)  # fmt: skip
def test_a_task_for_one_makers_card_never_runs_on_anothers(gpu_type: str, build: Build, serves_it: bool) -> None:
    if serves_it:
        torch_device.check_vendor(gpu_type, build)
        return
    with pytest.raises(UnfitHost) as raised:
        torch_device.check_vendor(gpu_type, build)
    assert one_sentence(raised.value)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", UnfitHost, "no driver"),
        ("The NVIDIA driver on your system is too old (found version 11040). Please update", UnfitHost, r"CUDA 11\.4"),
        ("CUDA driver version is insufficient for CUDA runtime version", UnfitHost, "too old"),
        ("Torch not compiled with CUDA enabled", UnfitHost, "processors only"),
        ("No CUDA GPUs are available", DeviceNotFound, "no card"),
        ("No HIP GPUs are available", DeviceNotFound, "no card"),
        (
            "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling"
            " NumCudaDevices() that might have already set an error? Error 803: system has unsupported display"
            " driver / cuda driver combination",
            DeviceNotFound,
            "restart the computer.*803",
        ),
        ("CUDA unknown error - this may be due to an incorrectly set up environment", DeviceNotFound, "unknown error"),
    ],
)
def test_why_cuda_does_not_start_decides_between_never_and_later(text: str, kind: type, says: str) -> None:
    error = torch_device.not_started(text + "\n\nCUDA call was originally invoked at:\n  File ...")
    assert type(error) is kind and "\n" not in str(error)
    with pytest.raises(kind, match=says):
        raise error


@pytest.mark.parametrize(
    ("code", "device", "runs"),
    [
        ("sm_86", "sm_86", True), ("sm_80", "sm_86", True), ("sm_86", "sm_80", False), ("sm_80", "sm_90", False),
        ("sm_90", "sm_90", True), ("sm_90a", "sm_90", True), ("sm_90a", "sm_91", False), ("sm_50", "sm_35", False),
        ("compute_90", "sm_120", True), ("compute_90", "sm_90", True), ("compute_90", "sm_86", False),
        ("compute_90a", "sm_120", False), ("sm_100", "sm_103", True), ("sm_100f", "sm_103", True),
        ("sm_120", "sm_120", True), ("sm_120", "sm_100", False),
        ("gfx1030", "gfx1030", True), ("gfx906", "gfx906:sramecc+:xnack-", True), ("gfx906", "gfx900", False),
        ("gfx90a", "gfx90a:sramecc+:xnack-", True), ("gfx11-generic", "gfx1101", True),
        ("gfx11-generic", "gfx1201", False), ("gfx10-3-generic", "gfx1032", True),
        ("gfx10-3-generic", "gfx1010", False),
        ("gfx1030", "sm_86", False), ("sm_86", "gfx1030", False), ("nonsense", "sm_86", False),
    ],
)  # fmt: skip
def test_code_runs_on_the_devices_that_the_makers_say_it_does(code: str, device: str, runs: bool) -> None:
    assert serves(code, device) is runs


def test_a_card_without_code_is_refused_with_both_architectures() -> None:
    old = Card(0, "GeForce GTX 680", "sm_30")
    with pytest.raises(UnfitHost, match=r"no code for GeForce GTX 680 \(sm_30\), only for sm_50") as raised:
        torch_device.check_architecture(old, CUDA)
    assert one_sentence(raised.value)
    torch_device.check_architecture(replace(old, architecture="sm_52"), CUDA)
    torch_device.check_architecture(old, replace(CUDA, architectures=()))  # a build that does not say is tried


# Which card.


@dataclass(frozen=True)
class Situation:
    """The client's number and addresses, and PyTorch's cards, for which `wanted` is the card (None: not found)."""

    about: str
    number: int | None
    client: tuple[torch_device.Address, ...]
    shown: tuple[torch_device.Address | None, ...]
    wanted: int | None


SITUATIONS = [
    Situation("one card, no addresses", 0, (), (None,), 0),
    Situation("two cards, no addresses", 1, (), (None, None), 1),
    Situation("a card that is not shown", 2, (), (None, None), None),
    Situation("no card is shown", 0, (A,), (), None),
    Situation("a client that gives no number, one card", None, (), (A,), 0),
    Situation("a client that gives no number, two cards", None, (), (A, B), None),
    Situation("the addresses confirm the number", 1, (A, B), (A, B), 1),
    Situation("the client uses the first and third of three", 2, (A, C), (A, B, C), 2),
    Situation("the client uses the second only", 1, (B,), (A, B), 1),
    Situation("the fastest first, in both", 0, (B, A), (B, A), 0),
    Situation("counted the other way round: the client uses all, so its place is its number", 0, (A, B), (B, A), 1),
    Situation("counted the other way round, the only one that the client uses", 1, (B,), (B, A), 0),
    Situation("counted the other way round, two of three are used", 0, (A, B), (C, B, A), None),
    Situation("the card at the address is hidden now", 0, (A,), (B,), None),
    Situation("one of two is gone, and the other moved up", 0, (A, B), (B,), None),
    Situation("a client without CUDA's addresses", 1, ((0, 0, 0), (0, 0, 0)), (A, B), 1),
    Situation("a client that knows one address of two", 1, (A, (0, 0, 0)), (A, B), 1),
    Situation("a client that gives one address twice", 1, (A, A), (A, B), 1),
    Situation("two parts of one card have one address", 1, (A, B), (A, A), 1),
    Situation("a PyTorch that does not tell addresses", 1, (A, B), (None, None), 1),
]


@pytest.mark.parametrize("each", SITUATIONS, ids=lambda each: each.about)
def test_the_card_is_the_one_that_the_client_reserved_or_none(each: Situation) -> None:
    if each.wanted is not None:
        assert choose(each.number, each.client, cards(*each.shown)).index == each.wanted
        return
    with pytest.raises(DeviceNotFound) as raised:
        choose(each.number, each.client, cards(*each.shown))
    assert one_sentence(raised.value)


@pytest.mark.parametrize(
    ("vendor", "environment", "given", "wanted"),
    [
        ("NVIDIA", {}, (1, 0), 1),
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": "3,2"}, (1, 0), 1),  # the client counts the visible ones, too
        ("NVIDIA", {"CUDA_VISIBLE_DEVICES": "GPU-8f2a"}, (0, 0), 0),
        ("NVIDIA", {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, (1, -1), 1),
        ("NVIDIA", {}, (-1, 2), None),
        ("AMD", {}, (2, 1), 1),  # the place on the platform, not among all sightings of cards
        ("AMD", {}, (2, -1), 2),
        ("AMD", {}, (-1, -1), None),
        ("AMD", {"ROCR_VISIBLE_DEVICES": "1"}, (0, 0), 0),
        ("AMD", {"HIP_VISIBLE_DEVICES": "2, 1"}, (0, 1), 1),
        ("AMD", {"CUDA_VISIBLE_DEVICES": "1"}, (0, 1), 0),
        ("AMD", {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "7"}, (0, 1), 0),
    ],
)
def test_the_number_follows_what_the_environment_hides_from_hip_alone(
    vendor: str, environment: dict[str, str], given: tuple[int, int], wanted: int | None
) -> None:
    init = InitData(gpu_type=vendor, gpu_device_num=given[0], gpu_opencl_dev_index=given[1])
    assert torch_device.number_of_task(init, vendor, environment) == wanted


@pytest.mark.parametrize("visible", ["0", "0,2", "GPU-1a2b", "", "-1"])
def test_a_card_that_is_hidden_from_hip_is_not_found(visible: str) -> None:
    with pytest.raises(DeviceNotFound, match="HIP_VISIBLE_DEVICES") as raised:
        torch_device.number_of_task(
            InitData(gpu_type="ATI", gpu_opencl_dev_index=1), "AMD", {"HIP_VISIBLE_DEVICES": visible}
        )
    assert one_sentence(raised.value)


HOST_INFO = """
<host_info><p_model>a &lt;coproc_cuda&gt; b</p_model>
  <coprocs><coproc_cuda>
   <count>2</count> <name>NVIDIA GeForce GTX 1080</name>
<pci_info>
   <bus_id>1</bus_id>
   <device_id>0</device_id>
   <domain_id>0</domain_id>
</pci_info>
<pci_info>
   <bus_id>101</bus_id>
   <device_id>4</device_id>
   <domain_id>1</domain_id>
</pci_info>
</coproc_cuda></coprocs></host_info>
"""


def test_the_clients_addresses_are_read_in_its_order() -> None:
    text = f"<app_init_data><gpu_type>NVIDIA</gpu_type><gpu_device_num>1</gpu_device_num>{HOST_INFO}</app_init_data>"
    init = parse_init_data(text)
    assert init.nvidia_addresses == ((0, 1, 0), (1, 101, 4)) and init.gpu_device_num == 1


@pytest.mark.parametrize(
    "text",
    [
        "<app_init_data></app_init_data>",
        f"<project_preferences>{HOST_INFO}</project_preferences>",  # a volunteer's own text is no address
        f"<global_preferences>{HOST_INFO}</global_preferences>",
        HOST_INFO.replace("<bus_id>101</bus_id>", ""),
        HOST_INFO.replace("101", "9" * 30),
        HOST_INFO.replace("coproc_cuda", "coproc_ati"),
        HOST_INFO.replace("host_info", "other"),
    ],
)
def test_addresses_that_are_not_the_clients_or_not_readable_do_not_count(text: str) -> None:
    assert parse_init_data(text).nvidia_addresses == ()


# With PyTorch's functions replaced.


@dataclass
class Properties:
    """What torch.cuda.get_device_properties gives."""

    name: str
    major: int = 8
    minor: int = 6
    gcnArchName: str = "gfx1030"
    pci_domain_id: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0


class Cuda:
    """torch.cuda with cards that are not there; a test may change them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cards = [Properties("first", pci_bus_id=1), Properties("second", pci_bus_id=2)]
        self.start_error: Exception | None = None
        self.free, self.total = 7 << 30, 8 << 30
        self.fraction: float | None = None
        self.chosen: Any = None
        self.build = ("12.6", None, ["sm_86"])
        monkeypatch.setattr(torch.cuda, "init", self._init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(self.cards))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: self.cards[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: self.cards[device.index].name)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: self.build[2])
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free, self.total))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(self, "chosen", device))
        monkeypatch.setattr(
            torch.cuda, "set_per_process_memory_fraction", lambda share, device: setattr(self, "fraction", share)
        )
        self._monkeypatch = monkeypatch
        self.made_for("12.6", None, ["sm_86"])

    def made_for(self, cuda: str | None, hip: str | None, architectures: list[str]) -> None:
        self.build = (cuda, hip, architectures)
        self._monkeypatch.setattr(torch.version, "cuda", cuda)
        self._monkeypatch.setattr(torch.version, "hip", hip)

    def _init(self) -> None:
        assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0" and os.environ["CUBLAS_WORKSPACE_CONFIG"]
        warnings.warn("Found GPU0 first which is of cuda capability 3.5", stacklevel=2)
        if self.start_error is not None:
            raise self.start_error


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch, settings: None) -> Cuda:
    return Cuda(monkeypatch)


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch's settings and the environment are as they were when the test has ended."""
    for variable in ("NVIDIA_TF32_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(variable, "set for the test")
        monkeypatch.delenv(variable)
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    switches = [name for name in ("allow_tf32", "allow_fp16_reduced_precision_reduction",
                                  "allow_bf16_reduced_precision_reduction", "allow_fp16_accumulation")
                if hasattr(matmul, name)]  # fmt: skip
    before = [getattr(matmul, name) for name in switches]
    of_cudnn = cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic
    filled = torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings():
        yield
    for name, value in zip(switches, before, strict=True):
        setattr(matmul, name, value)
    cudnn.allow_tf32, cudnn.benchmark, cudnn.deterministic = of_cudnn
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def task(**fields: Any) -> InitData:
    return InitData(**{"gpu_type": "NVIDIA", "gpu_device_num": 0, **fields})


def test_a_task_gets_its_card(cuda: Cuda) -> None:
    assert torch_device.device_of_task(task(gpu_device_num=1)) == torch.device("cuda:1")
    assert torch_device.device_of_task(task(gpu_device_num=1, nvidia_addresses=((0, 2, 0),))) == torch.device("cuda:1")
    assert torch_device.device_of_task(InitData()) == torch.device("cpu")
    with pytest.raises(DeviceNotFound, match="not at any place on the bus"):
        torch_device.device_of_task(task(gpu_device_num=1, nvidia_addresses=((0, 9, 0),)))


def test_amds_cards_need_a_build_for_them_and_are_called_cuda(cuda: Cuda) -> None:
    with pytest.raises(UnfitHost, match=r"for an AMD card, and the PyTorch of this program .* is for NVIDIA"):
        torch_device.device_of_task(task(gpu_type="ATI", gpu_opencl_dev_index=1))
    cuda.made_for(None, "6.4", ["gfx1030"])
    assert torch_device.device_of_task(task(gpu_type="ATI", gpu_opencl_dev_index=1)) == torch.device("cuda:1")


def test_a_card_is_looked_for_before_its_fitness(cuda: Cuda) -> None:
    cuda.cards[1].major, cuda.cards[1].minor = 3, 5
    with pytest.raises(UnfitHost, match=r"no code for second \(sm_35\)"):
        torch_device.device_of_task(task(gpu_device_num=1))
    with pytest.raises(DeviceNotFound, match="does not show the card 2"):
        torch_device.device_of_task(task(gpu_device_num=2))
    cuda.start_error = RuntimeError("No CUDA GPUs are available")
    with pytest.raises(DeviceNotFound, match="no card on this computer now"):
        torch_device.device_of_task(task())


def test_devices_by_name(cuda: Cuda) -> None:
    assert torch_device.device_of_text("cpu") == torch.device("cpu")
    assert torch_device.device_of_text("cuda") == torch_device.device_of_text(None) == torch.device("cuda:0")
    assert torch_device.device_of_text("cuda:1") == torch.device("cuda:1")
    for wrong in ("cuda:2", "cuda:", "mps", "gpu", "cuda:1 ", "rocm"):
        with pytest.raises(UnfitHost):
            torch_device.device_of_text(wrong)
    cuda.made_for(None, None, [])
    with pytest.raises(UnfitHost, match="for processors only"):
        torch_device.device_of_text("cuda")


def test_the_listing_says_what_keeps_a_card_from_computing(cuda: Cuda) -> None:
    cuda.cards[0].major, cuda.cards[0].minor = 3, 5
    first, second = torch_device.listing()
    assert first.startswith("cuda:0  first (sm_35): ") and "no code" in first
    assert second == "cuda:1  second (sm_86)"


def test_the_order_in_which_cuda_counts_is_left_as_the_client_has_it(
    settings: None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client counts by its own environment, and a task inherits that."""
    torch_device.device_of_task(task())
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0", "set before CUDA starts"
    assert "CUDA_DEVICE_ORDER" not in os.environ and "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    torch_device.prepare_environment(os.environ)
    assert os.environ["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"


# How it computes.


@pytest.mark.parametrize("workspace", [None, ":16:8", ":0:0"])
def test_libraries_are_forbidden_tf32_whatever_the_user_has_set(workspace: str | None) -> None:
    environment = {"NVIDIA_TF32_OVERRIDE": "1", **({"CUBLAS_WORKSPACE_CONFIG": workspace} if workspace else {})}
    torch_device.prepare_environment(environment)
    assert environment["NVIDIA_TF32_OVERRIDE"] == "0"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == (":16:8" if workspace == ":16:8" else ":4096:8")


def spoil_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def spoil_convolutions() -> None:
    torch.backends.cudnn.allow_tf32 = True


def spoil_override() -> None:
    os.environ["NVIDIA_TF32_OVERRIDE"] = "1"


def spoil_sums() -> None:
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True


def spoil_determinism() -> None:
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("spoil", "key", "value"),
    [
        (spoil_products, "tf32", "on"), (spoil_convolutions, "tf32", "on"), (spoil_override, "tf32", "on"),
        (spoil_sums, "reduced sums", "on"), (spoil_determinism, "deterministic", "off"),
    ],
)  # fmt: skip
def test_a_result_says_how_it_was_computed_and_not_how_it_should_have_been(
    settings: None, spoil: Any, key: str, value: str
) -> None:
    torch_device.prepare_environment(os.environ)
    torch_device.set_precision()
    right = torch_device.precision(torch.device("cuda:0"))
    assert right == {
        "precision": "float32", "products": "highest", "tf32": "off", "reduced sums": "off", "deterministic": "on"
    }  # fmt: skip
    spoil()
    assert torch_device.precision(torch.device("cuda:0"))[key] == value


def test_a_result_of_the_processor_says_so_too(settings: None) -> None:
    about = torch_device.describe(torch.device("cpu"))
    assert about == {"device": "cpu", "precision": "float32", "products": "highest", "tf32": "off"}
    torch.set_float32_matmul_precision("high")
    assert torch_device.describe(torch.device("cpu"))["tf32"] == "on"


def test_a_card_is_described_with_its_architecture_and_driver(
    settings: None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_device, "driver_version", lambda: "550.54")
    about = torch_device.describe(torch.device("cuda:1"))
    wanted = {"device": "second", "architecture": "sm_86", "runtime": "cuda 12.6", "driver": "550.54"}
    assert wanted.items() <= about.items()


def test_the_drivers_version_is_read_where_linux_has_it(tmp_path: Path) -> None:
    assert torch_device.driver_version(tmp_path) == ""
    path = tmp_path / "proc/driver/nvidia/version"
    path.parent.mkdir(parents=True)
    path.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\n")
    assert torch_device.driver_version(tmp_path) == "550.54.14"


def test_known_answers_are_right_here() -> None:
    assert torch_device.wrong_answers(torch.device("cpu")) == []


def tf32(x: Any) -> Any:
    """As tensor cores read their factors: the low 13 bits of the mantissa rounded off."""
    return ((x.contiguous().view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize(
    ("function", "broken", "named"),
    [
        ("mm", lambda right: lambda a, b: right(tf32(a), tf32(b)), "product of matrices"),
        ("bmm", lambda right: lambda a, b: right(tf32(a), tf32(b)), "batched product"),
        ("convolution", lambda right: lambda x, w, *rest: right(tf32(x), tf32(w), *rest), "convolution"),
        ("index_select", lambda right: lambda x, dim, index: right(x, dim, index.roll(1)), "gather"),
    ],
)
def test_known_answers_find_reduced_precision_and_wrong_elements(
    settings: None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, function: str, broken: Any, named: str
) -> None:
    monkeypatch.setattr(torch, function, broken(getattr(torch, function)))
    assert torch_device.wrong_answers(torch.device("cpu")) == [named]
    monkeypatch.setattr(torch_device, "wrong_answers", lambda device: [named])
    with pytest.raises(WrongResults, match=f"second computes wrong numbers: {named}"):
        torch_device.start(torch.device("cuda:1"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("CUDA error: no kernel image is available for execution on the device", UnfitHost),
        ("CUDA error: out of memory", TooLittleMemory),
        ("CUDA error: unspecified launch failure", ContextLost),
        ("something else", RuntimeError),
    ],
)
def test_a_card_that_fails_at_once_ends_the_start(
    settings: None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch, error: str, kind: type
) -> None:
    def fail(device: Any) -> list[str]:
        raise RuntimeError(error)

    monkeypatch.setattr(torch_device, "wrong_answers", fail)
    with pytest.raises(kind):
        torch_device.start(torch.device("cuda:0"))


def test_memory_that_others_use_is_left_to_them(settings: None, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_device, "wrong_answers", lambda device: [])
    torch_device.start(torch.device("cuda:1"))
    assert cuda.chosen == torch.device("cuda:1") and cuda.fraction is not None
    taken = cuda.fraction * cuda.total
    assert cuda.free - taken >= torch_device.RESERVE_BYTES and taken > 6 << 30
    cuda.free = 400 << 20
    with pytest.raises(DeviceNotFound, match="400 of 8192 MiB are free"):
        torch_device.start(torch.device("cuda:1"))


@pytest.mark.parametrize("total", [1 << 30, 8 << 30, 80 << 30])
@pytest.mark.parametrize("share", [0.7, 0.9, 1.0])
def test_the_share_of_memory_leaves_a_reserve_of_what_is_free(total: int, share: float) -> None:
    free = int(share * total)
    reserve = free - torch_device.memory_share(free, total) * total
    assert reserve >= 0.99 * max(torch_device.RESERVE_BYTES, torch_device.RESERVE_SHARE * total)


# What its errors mean.


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."), TooLittleMemory),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported late"), TooLittleMemory),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), TooLittleMemory),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: not enough memory"), TooLittleMemory),
        (RuntimeError("CUDA error: unspecified launch failure"), ContextLost),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), ContextLost),
        (RuntimeError("CUDA error: uncorrectable ECC error encountered"), ContextLost),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), ContextLost),
        (RuntimeError("CUDA error: unknown error"), ContextLost),
        (RuntimeError("CUDA driver error: device is lost"), ContextLost),
        (RuntimeError("HIP error: unspecified launch failure"), ContextLost),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"), ContextLost),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), ContextLost),
        (RuntimeError("CUDA error: no kernel image is available for execution on the device"), UnfitHost),
        (RuntimeError("HIP error: invalid device function"), UnfitHost),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ARCH_MISMATCH"), UnfitHost),
        (RuntimeError("CUDA error: device-side assert triggered"), WrongResults),
        (RuntimeError("CUDA error: invalid configuration argument"), None),
        (RuntimeError("CUDA error: invalid argument"), None),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), None),
        (ValueError("CUDA error: a text of somebody else"), None),
        (IndexError("index 7 is out of range"), None),
        (None, None),
    ],
    ids=lambda value: str(value)[:50],
)  # fmt: skip
def test_errors_of_cuda_and_hip_say_what_to_do(error: Exception | None, kind: type | None) -> None:
    found = circumstance(error)
    assert found is None if kind is None else type(found) is kind and one_sentence(found)


def test_any_error_of_the_accelerator_is_one_of_the_device() -> None:
    if not hasattr(torch, "AcceleratorError"):
        pytest.skip("this PyTorch has no class for errors of accelerators")
    assert type(circumstance(torch.AcceleratorError("a text that nobody knows"))) is ContextLost
