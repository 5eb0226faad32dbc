"""Hosts from traces: what the formats mean, and one sentence for what cannot be used."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from boinc_project.simulator.hosts import Host, HostsError, with_departures
from boinc_project.simulator.synthetic import synthetic_hosts
from boinc_project.simulator.traces import failure_trace_hosts, fedscale_hosts, read_trace

DEVICES = {
    "1": {"computation": 10.0, "communication": 8000.0, "active": [0, 200], "inactive": [100, 300], "finish_time": 400},
    "2": {"computation": 20.0, "communication": 80.0, "active": [50], "inactive": [900], "finish_time": 400},
    "3": {"computation": 5.0, "communication": 800.0},
}
EVENTS = (
    "# event_id\tcomponent_id\tnode_id\tplatform_id\tnode_name\tevent_type\tevent_start_time\tevent_stop_time"
    "\tevent_end_reason\n"
    "0\t1\t7\t0\tseven\t1\t1000.5\t1100\tNULL\n"
    "1\t1\t7\t0\tseven\t0\t1100\t1200\tNULL\n"
    "2\t1\t7\t0\tseven\t1\t1200\t1300\tNULL\n"
    "3\t1\t8\t0\teight\t0\t1000\t2000\tNULL\n"
    "4\t1\t9\t0\tnine\t1\t1150\t1250\tNULL\n"
)


def test_fedscale_devices_are_on_between_active_and_inactive_again_and_again() -> None:
    first, second, third = fedscale_hosts(json.dumps(DEVICES), flops=4e9)
    intervals = first.intervals()
    assert [next(intervals) for _ in range(4)] == [(0, 100), (200, 300), (400, 500), (600, 700)]
    assert second.active == ((50.0, 400.0),)  # nothing outlasts the trace
    assert third.active == ((0.0, math.inf),)


def test_fedscale_speeds_are_relative_to_the_median_device_and_lines_are_in_kilobits() -> None:
    first, second, third = fedscale_hosts(json.dumps(DEVICES), flops=4e9)
    assert (first.flops, second.flops, third.flops) == (4e9, 2e9, 8e9)
    assert (first.down, first.up, second.down) == (1e6, 1e6, 1e4)


def test_failure_trace_components_are_on_while_available_and_time_begins_with_the_first_event() -> None:
    seven, nine = failure_trace_hosts(EVENTS, 0, flops=4e9)
    assert seven.active == ((0.5, 100.0), (200.0, 300.0))
    assert nine.active == ((150.0, 250.0),)
    assert seven.name != nine.name


def test_failure_traces_without_a_first_line_and_with_spaces_are_read_too() -> None:
    text = "\n".join(EVENTS.replace("\t", " ").splitlines()[1:])
    assert [each.active for each in failure_trace_hosts(text, 0, flops=4e9)] == [
        ((0.5, 100.0), (200.0, 300.0)),
        ((150.0, 250.0),),
    ]


def test_both_formats_are_recognised_in_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(DEVICES))
    (tmp_path / "event_trace.tab").write_text(EVENTS)
    assert len(read_trace(tmp_path / "a.json", 2, 0)) == 2
    assert len(read_trace(tmp_path / "event_trace.tab", 2, 0)) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x04\x95", "pickle"),
        (b"\xff\xfe", "no text"),
        (b"{", "no JSON"),
        (b"{" + b'"a":{' * 5000, "no JSON"),
        (b"{}", "1 to"),
        (b'{"1": 3}', "needs a computation"),
        (b'{"1": {"computation": NaN, "communication": 1}}', "NaN"),
        (b'{"1": {"computation": 1e999, "communication": 1}}', "needs a computation"),
        (b'{"1": {"computation": true, "communication": 1}}', "needs a computation"),
        (b'{"1": {"computation": 1, "communication": 1, "active": [1], "finish_time": 9}}', "one length"),
        (
            b'{"1": {"computation": 1, "communication": 1, "active": [5], "inactive": [4], "finish_time": 9}}',
            "becomes active at 5",
        ),
        (b"", "no availability"),
        (b"1 2 3\n", "columns"),
        (b"0 1 7 0 x 5 1 2 N\n", "event_type"),
        (b"0 1 7 0 x 1 2 1 N\n", "stop no earlier"),
        (b"0 1 7 0 x 1 nan 1 N\n", "Unix seconds"),
        (b"# event_type only\n", "names no column component_id"),
        (b"0 1 7 0 x 1 1 2 N\n", "ask for no more"),
    ],
)  # fmt: skip
def test_a_wrong_trace_gets_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(HostsError, match="trace") as caught:
        read_trace(path, 2, 0)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_missing_trace_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(HostsError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none", 1, 0)


def test_drawn_hosts_follow_from_the_seed_and_the_first_ones_from_nothing_else() -> None:
    assert synthetic_hosts(9, 4, on_share=0.5)[:3] == synthetic_hosts(3, 4, on_share=0.5)
    assert synthetic_hosts(3, 4) != synthetic_hosts(3, 5)


def test_drawn_hosts_have_the_speed_and_availability_that_is_stated() -> None:
    hosts = synthetic_hosts(400, 1, on_share=0.4, mean_session_s=3600.0)
    ordered = sorted(host.flops for host in hosts)
    assert ordered[200] == pytest.approx(4e9, rel=0.1)
    horizon = 30 * 86400.0
    share = sum(host.seconds_on(horizon) for host in hosts) / (400 * horizon)
    assert share == pytest.approx(0.4, abs=0.05)


def test_a_host_is_on_in_its_intervals_until_it_leaves() -> None:
    host = Host(name="a", flops=1e9, active=((10.0, 20.0), (30.0, 40.0)), period=100.0, leaves=135.0)
    assert list(host.intervals()) == [(10, 20), (30, 40), (110, 120), (130, 135)]
    assert host.seconds_on(35.0) == 15.0
    assert host.seconds_on(1000.0) == 35.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"flops": 0.0}, {"down": math.inf}, {"up": math.nan}, {"processors": 0}, {"latency": -1.0},
        {"active": ((5.0, 5.0),)}, {"active": ((5.0, 9.0), (8.0, 10.0))}, {"active": ((math.nan, 9.0),)},
        {"active": ((0.0, 9.0),), "period": 5.0},
    ],
)  # fmt: skip
def test_an_impossible_host_is_refused(wrong: dict[str, object]) -> None:
    values: dict[str, object] = {"name": "a", "flops": 1e9, **wrong}
    with pytest.raises(HostsError, match="host a"):
        Host(**values)  # type: ignore[arg-type]


def test_departures_take_the_stated_share_before_the_horizon() -> None:
    hosts = with_departures(synthetic_hosts(10, 1), 0.5, 1000.0, 3)
    gone = [host for host in hosts if host.leaves < math.inf]
    assert len(gone) == 5
    assert all(0 <= host.leaves < 1000 for host in gone)
    assert hosts == with_departures(synthetic_hosts(10, 1), 0.5, 1000.0, 3)
    assert hosts != with_departures(synthetic_hosts(10, 1), 0.5, 1000.0, 4)
