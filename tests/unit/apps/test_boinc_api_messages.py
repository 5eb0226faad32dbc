"""What application and client say to each other: init_data.xml, link files, channels, texts, markers."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.gradient import boinc_messages
from apps.gradient.boinc_messages import (
    CHANNEL_BYTES,
    CHANNELS,
    SHARED_BYTES,
    InitData,
    SharedMemory,
    finish_status,
    open_shared_memory,
    parse_init_data,
    read_init_data,
    resolve,
    status_message,
    write_marker,
)

TYPICAL = """<app_init_data>
<major_version>7</major_version>
<app_name>gradient</app_name>
<project_preferences><ncpus>99</ncpus><wu_name>trap</wu_name></project_preferences>
<user_name>A & B < C</user_name>
<project_dir>/var/lib/boinc/projects/x &amp; y</project_dir>
<authenticator>0123456789abcdef0123456789abcdef</authenticator>
<wu_name>digits_1</wu_name>
<result_name>digits_1_0</result_name>
<client_pid>4711</client_pid>
<wu_cpu_time>12.500000</wu_cpu_time>
<checkpoint_period>60.000000</checkpoint_period>
<ncpus>2.500000</ncpus>
<gpu_type></gpu_type>
<host_info><p_ncpus>64</p_ncpus><client_pid>1</client_pid></host_info>
</app_init_data>
"""


def test_fields_are_read_and_others_keep_their_defaults() -> None:
    init = parse_init_data(TYPICAL)
    assert init == InitData(
        app_name="gradient",
        project_dir="/var/lib/boinc/projects/x & y",
        wu_name="digits_1",
        result_name="digits_1_0",
        client_pid=4711,
        wu_cpu_time=12.5,
        checkpoint_period=60.0,
        ncpus=2.5,
    )
    assert init.threads == 2


def test_the_authenticator_is_nowhere_in_the_parsed_fields() -> None:
    assert "0123456789abcdef" not in repr(parse_init_data(TYPICAL))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", InitData()),
        ("<app_init_data>\n<ncpus>many</ncpus>\n", InitData()),
        ("<ncpus>nan</ncpus><slot>1e999</slot>", InitData()),
        ("<wu_name>a\n<slot>3</slot>", InitData(slot=3)),
        ("<project_dir>/home/A & B/x</project_dir>", InitData(project_dir="/home/A & B/x")),
        ("<project_dir>/home/&copy/&lt;</project_dir>", InitData(project_dir="/home/&copy/<")),
        ("<unknown><slot>2</slot></unknown>", InitData(slot=2)),
    ],
)
def test_malformed_init_data_gives_what_can_be_read(text: str, expected: InitData) -> None:
    assert parse_init_data(text) == expected


@given(st.text())
def test_no_text_makes_the_parser_fail(text: str) -> None:
    parse_init_data(text)
    parse_init_data(TYPICAL[: len(text) * 17] + text)


def test_zero_cpus_still_gives_a_thread() -> None:
    assert parse_init_data("<ncpus>0.1</ncpus>").threads == 1


def test_no_init_data_file_means_standalone(tmp_path: Path) -> None:
    assert read_init_data(str(tmp_path)) is None


def test_bytes_that_are_not_utf8_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "init_data.xml").write_bytes(b"<user_name>\xff\xfe\x00</user_name><slot>5</slot>")
    found = read_init_data(str(tmp_path))
    assert found is not None and found.slot == 5


def test_a_link_file_resolves_to_its_target(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text("<soft_link>../../projects/p/real name.json</soft_link>\n")
    assert resolve("in.json", str(tmp_path)) == f"{tmp_path}/../../projects/p/real name.json"


def test_a_symlink_a_plain_file_and_a_missing_file_resolve_to_themselves(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(bytes(range(256)))
    (tmp_path / "link").symlink_to("plain")
    for name in ("plain", "link", "missing"):
        assert resolve(name, str(tmp_path)) == f"{tmp_path}/{name}"


def test_only_the_first_511_characters_can_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "late").write_text(" " * 600 + "<soft_link>x</soft_link>\n")
    assert resolve("late", str(tmp_path)) == f"{tmp_path}/late"


def test_the_channels_stand_in_boincs_order() -> None:
    assert SHARED_BYTES == 8192
    assert CHANNELS.index("process_control_request") == 0
    assert CHANNELS.index("heartbeat") == 4
    assert CHANNELS.index("app_status") == 5
    assert CHANNELS.index("trickle_down") == 7


def test_a_message_is_written_once_and_read_once() -> None:
    buffer = mmap.mmap(-1, SHARED_BYTES)
    shared = SharedMemory(buffer)
    assert shared.receive("heartbeat") is None
    assert shared.send("app_status", "first")
    assert buffer[5 * CHANNEL_BYTES : 5 * CHANNEL_BYTES + 7] == b"\x01first\0"
    assert not shared.is_free("app_status")
    assert not shared.send("app_status", "second")
    assert shared.receive("app_status") == "first"
    assert shared.is_free("app_status")
    assert shared.send("app_status", "third")


def test_a_message_never_leaves_its_channel() -> None:
    buffer = mmap.mmap(-1, SHARED_BYTES)
    SharedMemory(buffer).send("app_status", "x" * 5000)
    assert buffer[6 * CHANNEL_BYTES :] == bytes(2 * CHANNEL_BYTES)
    assert buffer[6 * CHANNEL_BYTES - 1] == 0
    buffer[0:CHANNEL_BYTES] = b"\x01" + b"\xff" * (CHANNEL_BYTES - 1)
    assert len(SharedMemory(buffer).receive("process_control_request") or "") == CHANNEL_BYTES - 1


def test_a_missing_or_short_shared_memory_file_is_none(tmp_path: Path) -> None:
    assert open_shared_memory(InitData(), str(tmp_path)) is None
    (tmp_path / "boinc_mmap_file").write_bytes(bytes(100))
    assert open_shared_memory(InitData(), str(tmp_path)) is None
    (tmp_path / "boinc_mmap_file").write_bytes(bytes(8192))
    assert open_shared_memory(InitData(), str(tmp_path)) is not None


def test_the_status_message_always_holds_both_cpu_times() -> None:
    assert status_message(12.5, 10.0, 0.25) == (
        "<current_cpu_time>1.250000e+01</current_cpu_time>\n"
        "<checkpoint_cpu_time>1.000000e+01</checkpoint_cpu_time>\n"
        "<fraction_done>2.500000e-01</fraction_done>\n"
    )


def test_markers_hold_one_line_an_item_in_ascii(tmp_path: Path) -> None:
    write_marker(boinc_messages.FINISH_FILE, ["3", "naïve\nsecond line", ""], str(tmp_path))
    assert (tmp_path / "boinc_finish_called").read_bytes() == b"3\nna\\xefve second line\n\n"
    assert [path.name for path in tmp_path.iterdir()] == ["boinc_finish_called"]


@pytest.mark.parametrize(
    ("content", "status"),
    [(b"0\n", 0), (b"42\nwhy\n\n", 42), (b"256", 0), (b"", 1), (b"\xff\xfe", 1), (b"-1\n", 255)],
)
def test_a_found_finish_marker_gives_its_status(tmp_path: Path, content: bytes, status: int) -> None:
    assert finish_status(str(tmp_path)) is None
    (tmp_path / "boinc_finish_called").write_bytes(content)
    assert finish_status(str(tmp_path)) == status
