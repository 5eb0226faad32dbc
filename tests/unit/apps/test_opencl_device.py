"""Which OpenCL device a task gets: tables of fake platforms, and what is said of real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("pyopencl")

from apps.gradient.boinc_messages import parse_init_data
from apps.gradient.opencl import device as devices
from apps.gradient.opencl.device import DeviceNotFound, Request, Sighting, choose, request_of_task, request_of_text

AMD_NAMES = ("Advanced Micro Devices, Inc.", "AMD", "ATI Technologies Inc.")


def seen(place: str, kind: str, vendor: str, name: str, platform: str, gpu_index: int = -1, **more: object) -> Sighting:
    number, position = (int(each) for each in place.split(":"))
    values = {"max_work_group": 256, "device_version": "OpenCL 1.2", **more}
    return Sighting(
        platform=number,
        position=position,
        gpu_index=gpu_index,
        kind=kind,
        vendor=devices.vendor_of(vendor),
        vendor_name=vendor,
        name=name,
        platform_name=platform,
        **values,  # type: ignore[arg-type]
    )


def four_platforms(amd: str = AMD_NAMES[0]) -> list[Sighting]:
    """POCL, NVIDIA with two cards, AMD with its processor and two cards, and one that mixes vendors."""
    return [
        seen("0:0", "cpu", "GenuineIntel", "pthread-haswell", "Portable Computing Language"),
        seen("1:0", "gpu", "NVIDIA Corporation", "GeForce GTX 650", "NVIDIA CUDA", 0),
        seen("1:1", "gpu", "NVIDIA Corporation", "GeForce GTX 650", "NVIDIA CUDA", 1),
        seen("2:0", "cpu", "AuthenticAMD", "AMD Phenom(tm) II X4", "AMD Accelerated Parallel Processing"),
        seen("2:1", "gpu", amd, "Cypress", "AMD Accelerated Parallel Processing", 0),
        seen("2:2", "gpu", amd, "Cypress", "AMD Accelerated Parallel Processing", 1),
        seen("3:0", "cpu", "Intel", "Intel(R) Core(TM) i7", "Apple"),
        seen("3:1", "gpu", amd, "ATI Radeon HD 6750M", "Apple", 0),
    ]


def init(gpu_type: str, index: int | None = None, number: int = 0) -> str:
    field = "" if index is None else f"<gpu_opencl_dev_index>{index}</gpu_opencl_dev_index>\n"
    return (
        f"<app_init_data>\n<gpu_type>{gpu_type}</gpu_type>\n<gpu_device_num>{number}</gpu_device_num>\n{field}"
        "</app_init_data>\n"
    )


def chosen(text: str, found: list[Sighting]) -> str | None:
    try:
        return choose(found, request_of_task(parse_init_data(text))).place
    except DeviceNotFound:
        return None


@pytest.mark.parametrize("amd", AMD_NAMES)
@pytest.mark.parametrize(
    ("task", "place"),
    [
        (init("ATI", 1), "2:2"),
        (init("ATI", 0), "2:1"),
        (init("NVIDIA", 0), "1:0"),
        (init("NVIDIA", 1, number=0), "1:1"),
        (init("ATI", None, number=1), "2:2"),
        (init("ATI", -1, number=1), "2:2"),
        (init("NVIDIA", None, number=1), "1:1"),
        (init("NVIDIA", None, number=2), None),
        (init("intel_gpu", 0), None),
        (init("ATI", 5), None),
        (init("apple_gpu", 0), None),
    ],
)
def test_the_clients_words_lead_to_its_card_or_to_none(amd: str, task: str, place: str | None) -> None:
    assert chosen(task, four_platforms(amd)) == place


@pytest.mark.parametrize("gpu_type", ["ATI", "AMD", *AMD_NAMES])
def test_every_spelling_of_amd_is_one_vendor(gpu_type: str) -> None:
    assert chosen(init(gpu_type, 0), four_platforms()) == "2:1"


def test_a_task_for_the_processor_gets_a_processor() -> None:
    assert chosen(init(""), four_platforms()) == "0:0"
    assert chosen(init(""), four_platforms()[1:3]) is None


def test_a_task_for_a_gpu_never_gets_a_processor() -> None:
    processors = [each for each in four_platforms() if each.kind == "cpu"]
    for gpu_type in ("ATI", "NVIDIA", "intel_gpu", "GenuineIntel", "Intel"):
        assert chosen(init(gpu_type, 0), processors) is None
        assert chosen(init(gpu_type, None), processors) is None


def test_the_message_names_what_was_wanted_and_what_there_is() -> None:
    with pytest.raises(DeviceNotFound, match=r"does not show the AMD GPU with index 5; it shows: 0:0 pthread-haswell"):
        choose(four_platforms(), request_of_task(parse_init_data(init("ATI", 5))))
    with pytest.raises(DeviceNotFound, match="it shows: none"):
        choose([], Request())


RUSTICL = "AMD CYPRESS (DRM 2.50.0 / 6.1.0, LLVM 15.0.6)"


def one_card_in_three_drivers(**first: object) -> list[Sighting]:
    return [
        seen("0:0", "gpu", "AMD", RUSTICL, "Clover", 0),
        seen("1:0", "gpu", "AMD", RUSTICL, "rusticl", 0, device_version="OpenCL 3.0"),
        seen("2:0", "gpu", AMD_NAMES[0], "Cypress", "AMD Accelerated Parallel Processing", 0, **first),
    ]


def test_one_card_in_three_drivers_is_one_card_and_its_vendors_driver_is_used() -> None:
    found = one_card_in_three_drivers()
    assert [[each.place for each in card] for card in devices.cards(found)] == [["0:0", "1:0", "2:0"]]
    assert chosen(init("ATI", 0), found) == "2:0"
    assert chosen(init("ATI", None, number=0), found) == "2:0"
    assert chosen(init("ATI", None, number=1), found) is None  # not the same card once more
    assert chosen(init("ATI", 0), found[:2]) == "1:0"  # Rusticl before Clover
    assert choose(found, Request()).place == "2:0"


def test_a_driver_that_does_not_work_is_passed_over_for_the_same_card() -> None:
    assert chosen(init("ATI", 0), one_card_in_three_drivers(usable=False)) == "1:0"
    assert chosen(init("ATI", 0), one_card_in_three_drivers(device_version="OpenCL 1.0")) == "1:0"
    alone = [replace(one_card_in_three_drivers()[2], usable=False)]
    with pytest.raises(DeviceNotFound, match=r"Cypress .* is not available"):
        choose(alone, Request(kind="gpu"))
    with pytest.raises(DeviceNotFound, match=r"has only OpenCL 1\.0; 1.1 is needed"):
        choose([replace(alone[0], usable=True, device_version="OpenCL 1.0")], Request(kind="gpu"))


def test_two_equal_cards_in_two_drivers_are_two_cards() -> None:
    found = [
        seen("0:0", "gpu", "AMD", RUSTICL, "rusticl", 0),
        seen("0:1", "gpu", "AMD", RUSTICL, "rusticl", 1),
        seen("1:0", "gpu", "AMD", "Cypress", "AMD Accelerated Parallel Processing", 0),
        seen("1:1", "gpu", "AMD", "Cypress", "AMD Accelerated Parallel Processing", 1),
    ]
    assert [[each.place for each in card] for card in devices.cards(found)] == [["0:0", "1:0"], ["0:1", "1:1"]]
    assert chosen(init("ATI", None, number=1), found) == "1:1"
    # Where both drivers tell the places on the bus, these decide: here they count the cards in opposite order.
    told = [replace(each, address=(bus, 0, 0)) for each, bus in zip(found, (1, 2, 2, 1), strict=True)]
    assert [[each.place for each in card] for card in devices.cards(told)] == [["0:0", "1:1"], ["0:1", "1:0"]]
    assert chosen(init("ATI", 1), told) == "1:0"


def test_two_models_of_one_vendor_are_two_cards() -> None:
    found = [
        seen("0:0", "gpu", "AMD", "Cypress", "AMD Accelerated Parallel Processing", 0),
        seen("1:0", "gpu", "AMD", "AMD Radeon RX 7900 XTX (radeonsi, navi31, LLVM 15.0.6)", "rusticl", 0),
    ]
    assert len(devices.cards(found)) == 2
    rocm = seen("2:0", "gpu", AMD_NAMES[0], "gfx1100", "AMD Accelerated Parallel Processing", 0)
    assert len(devices.cards([*found, replace(rocm, board="AMD Radeon RX 7900 XTX")])) == 2


@pytest.mark.parametrize(
    ("text", "place"),
    [("cpu", "0:0"), ("gpu", "1:0"), ("2:2", "2:2"), ("apple:1", "3:1"), ("NVIDIA CUDA:1", "1:1"), (None, "1:0")],
)
def test_a_text_names_a_device(text: str | None, place: str) -> None:
    assert choose(four_platforms(), request_of_text(text)).place == place


@pytest.mark.parametrize("text", ["3:7", "9:0", "portable:1", "gpu"])
def test_a_text_that_names_none_finds_none(text: str) -> None:
    with pytest.raises(DeviceNotFound):
        choose([each for each in four_platforms() if each.kind == "cpu"], request_of_text(text))


@pytest.mark.parametrize("text", ["tpu", "1", ":1", "0:", "0:-1", "0:x"])
def test_a_text_that_is_no_device_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be cpu, gpu or PLATFORM:INDEX"):
        request_of_text(text)


def test_without_a_gpu_and_without_a_wish_the_processor_is_used() -> None:
    assert choose(four_platforms()[:1], request_of_text(None)).place == "0:0"


# What a device can do.


@pytest.mark.parametrize(
    ("name", "board", "native", "width"),
    [
        ("Cypress", "", 4, 4),
        (RUSTICL, "", 1, 4),
        ("Barts", "AMD Radeon HD 6800 Series", 4, 4),
        ("Unknown", "ATI Radeon HD 5800 Series", 1, 4),
        ("Tahiti", "AMD Radeon HD 7900 Series", 1, 1),
        ("gfx1100", "AMD Radeon RX 7900 XTX", 1, 1),
        ("AMD Radeon RX 6800 (radeonsi, navi21, LLVM 15.0.6)", "", 1, 1),
        ("Oland", "AMD Radeon HD 8570", 1, 1),
    ],
)
def test_float4_is_for_cards_with_vector_lanes(name: str, board: str, native: int, width: int) -> None:
    card = seen("0:0", "gpu", "AMD", name, "AMD", 0, board=board, native_width=native)
    assert devices.facts(card, {}).vector_width == width


def test_facts_follow_the_kind_of_device() -> None:
    memory = {"global_memory": 1 << 30, "max_allocation": 1 << 30, "local_memory": 32768}
    card = devices.facts(seen("0:0", "gpu", "AMD", "Cypress", "AMD", 0, **memory), {})
    assert (card.group_form, card.wavefront, card.kind) == (True, 64, "gpu")
    assert card.global_memory == int(0.8 * (1 << 30))  # the display needs some
    assert card.max_allocation <= card.global_memory
    nvidia = devices.facts(seen("0:0", "gpu", "NVIDIA Corporation", "H100", "NVIDIA CUDA", 0), {})
    assert (nvidia.group_form, nvidia.wavefront) == (True, 32)
    small = devices.facts(seen("0:0", "gpu", "NVIDIA Corporation", "X", "NVIDIA CUDA", 0, max_work_group=8), {})
    assert small.wavefront == 8
    processor = devices.facts(seen("0:0", "cpu", "GenuineIntel", "x", "y", native_width=1), {})
    assert (processor.group_form, processor.vector_width) == (False, 4)


def test_a_double_has_the_limits_of_an_old_card() -> None:
    big = {"global_memory": 1 << 40, "max_allocation": 1 << 38, "local_memory": 1 << 20, "max_work_group": 4096}
    processor = seen("0:0", "cpu", "GenuineIntel", "x", "y", **big)
    known = devices.facts(processor, devices.limits_of_text("cypress, max_work_group=64, group_form=1"))
    assert known.max_allocation == 128 << 20
    assert known.global_memory == int(0.8 * (1 << 30))
    assert known.max_work_group == known.wavefront == 64
    assert known.local_memory == 32 << 10
    assert known.group_form
    assert devices.facts(processor, {"max_work_group": 9999}).max_work_group == 4096  # a limit never adds


def test_limits_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = seen("0:0", "cpu", "GenuineIntel", "x", "y", max_work_group=4096)
    monkeypatch.setenv(devices.LIMITS_VARIABLE, "max_work_group=128")
    assert devices.facts(processor).max_work_group == 128
    monkeypatch.setenv(devices.LIMITS_VARIABLE, "memory=1")
    with pytest.raises(ValueError, match="'memory=1' is not NAME=NUMBER"):
        devices.facts(processor)


def test_versions_are_read_from_the_drivers_text() -> None:
    def version(text: str) -> tuple[int, int]:
        return seen("0:0", "gpu", "AMD", "x", "y", 0, device_version=text).version

    assert version("OpenCL 1.1 AMD-APP-SDK-v2.5 (684.213)") == (1, 1)
    assert version("OpenCL 3.0 PoCL HSTR: pthread") == (3, 0)
    assert version("") == (0, 0)
