"""Hosts from public availability traces. Files are strangers': bounded, and wrong ones give one sentence.

FedScale (https://github.com/SymbioticLab/FedScale, dataset `device_info`): speed and bandwidth of mobile devices, and
for each device the moments at which it becomes active and inactive, which come again after `finish_time`. It publishes
them as pickles; a pickle can run code when it is read, so here the same dictionaries are read as JSON:
    {"1": {"computation": ms per sample, "communication": kbit/s, "active": [s, ...], "inactive": [s, ...],
           "finish_time": s}, ...}
Its speeds are those of one phone model's inference, so they are taken as relative: the median device has the speed
that the caller names. Bandwidth holds for both directions.

Failure Trace Archive (https://fta.scem.westernsydney.edu.au, Kondo et al. 2010), event_trace.tab: one line for each
time a component was available (event_type 1) or not (0), with the columns
    event_id component_id node_id platform_id node_name event_type event_start_time event_stop_time event_end_reason
in Unix seconds, tabs between them, in the order of its first line if that names them. A node of it has no speed:
those are drawn as synthetic hosts have them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from boinc_project.simulator.hosts import Host, HostsError, Interval
from boinc_project.simulator.synthetic import synthetic_hosts

MAX_TRACE_BYTES = 1 << 30
MAX_HOSTS = 100_000
MAX_INTERVALS = 1_000_000

FTA_COLUMNS = (
    "event_id", "component_id", "node_id", "platform_id", "node_name", "event_type", "event_start_time",
    "event_stop_time", "event_end_reason",
)  # fmt: skip


def read_trace(path: Path, count: int, seed: int, *, flops: float = 4e9) -> list[Host]:
    """The first `count` hosts of a trace, whichever of the formats it has. Raises HostsError."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(MAX_TRACE_BYTES + 1)
    except OSError as error:
        raise HostsError(f"the trace {path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_TRACE_BYTES:
        raise HostsError(f"the trace {path} has more than {MAX_TRACE_BYTES} bytes; cut it to the hosts you need")
    if data[:1] == b"\x80":
        raise HostsError(f"{path} is a pickle, which could run code; convert it to JSON where you trust it (json.dump)")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise HostsError(f"the trace {path} is no text; give a FedScale trace as JSON or an event_trace.tab") from error
    try:
        if text.lstrip()[:1] == "{":
            hosts = fedscale_hosts(text, flops=flops)
        else:
            hosts = failure_trace_hosts(text, seed, flops=flops)
    except HostsError as error:
        raise HostsError(f"the trace {path} cannot be used: {error}") from error
    if len(hosts) < count:
        raise HostsError(f"the trace {path} has {len(hosts)} usable hosts; ask for no more than these")
    return hosts[:count]


def fedscale_hosts(text: str, *, flops: float) -> list[Host]:
    """Hosts in the order of the file; `flops` is the median device's speed."""
    try:
        devices = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise HostsError(f"it is no JSON ({str(error)[:100]})") from error
    if not isinstance(devices, dict) or not 0 < len(devices) <= MAX_HOSTS:
        raise HostsError(f"it must be an object of 1 to {MAX_HOSTS} devices")
    computation = {name: _number(device, name, "computation") for name, device in devices.items()}
    median = statistics.median(computation.values())
    found = []
    for name, device in devices.items():
        line = _number(device, name, "communication") * 125.0
        active: tuple[Interval, ...] = ((0.0, math.inf),)
        period = 0.0
        if "active" in device:
            period = _number(device, name, "finish_time")
            active = _intervals(device, name, period)
        if not active:
            continue  # never there
        found.append(
            Host(
                name=f"device{name[:40]}", flops=flops * median / computation[name], down=line, up=line, active=active,
                period=period,
            )
        )  # fmt: skip
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is no number")


def _number(device: Any, name: str, key: str) -> float:
    value = device.get(key) if isinstance(device, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e15:
        raise HostsError(f"device {name[:40]!r} needs a {key} above 0")
    return float(value)


def _intervals(device: Mapping[str, Any], name: str, period: float) -> tuple[Interval, ...]:
    starts, ends = device.get("active"), device.get("inactive")
    lists = isinstance(starts, list) and isinstance(ends, list)
    if not lists or len(starts) != len(ends) or len(starts) > MAX_INTERVALS:  # type: ignore[arg-type]
        raise HostsError(f"device {name[:40]!r} needs lists `active` and `inactive` of one length")
    found: list[Interval] = []
    for start, end in zip(starts, ends, strict=True):  # type: ignore[arg-type]
        usable = all(isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x < 1e12 for x in (start, end))
        if not usable or end < start:
            raise HostsError(f"device {name[:40]!r} becomes active at {start!r} and inactive at {end!r}"[:200])
        found.append((float(start), min(float(end), period)))
    return _joined([each for each in found if each[0] < each[1]])


def failure_trace_hosts(text: str, seed: int, *, flops: float) -> list[Host]:
    """One host for each component with an availability, in the order in which they appear. Time begins with the
    earliest event; a component is gone after its last availability."""
    lines = text.splitlines()
    columns: Sequence[str] = FTA_COLUMNS
    if lines and "event_type" in lines[0]:
        columns = lines.pop(0).lstrip("# ").split()
    wanted = ("component_id", "node_id", "event_type", "event_start_time", "event_stop_time")
    missing = [name for name in wanted if name not in columns]
    if missing:
        raise HostsError(f"its first line names no column {missing[0]}")
    places = [columns.index(name) for name in wanted]
    by_component: dict[tuple[str, str], list[Interval]] = {}
    begin, events = math.inf, 0
    for number, line in enumerate(lines, 2):
        fields = [field.strip() for field in line.split("\t")] if "\t" in line else line.split()
        if not fields or line.startswith("#"):
            continue
        if len(fields) <= max(places):
            raise HostsError(f"line {number} has {len(fields)} columns, {max(places) + 1} are needed")
        component, node, kind, start, end = (fields[place] for place in places)
        interval = _moment(start, number), _moment(end, number)
        if kind not in ("0", "1") or interval[1] < interval[0]:
            raise HostsError(f"line {number} must have event_type 0 or 1 and stop no earlier than it starts")
        events += 1
        begin = min(begin, interval[0])
        if kind == "1" and interval[0] < interval[1]:
            by_component.setdefault((node, component), []).append(interval)
        if events > MAX_INTERVALS or len(by_component) > MAX_HOSTS:
            raise HostsError(f"it has more than {MAX_INTERVALS} events or {MAX_HOSTS} components")
    if not by_component:
        raise HostsError("it holds no availability (event_type 1)")
    drawn = synthetic_hosts(len(by_component), seed, flops=flops)
    return [
        dataclasses.replace(
            like, name=f"node{node[:30]}.{component[:10]}",
            active=_joined(sorted((start - begin, end - begin) for start, end in intervals)),
        )
        for like, ((node, component), intervals) in zip(drawn, by_component.items(), strict=True)
    ]  # fmt: skip


def _moment(text: str, line: int) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 1e12:
        raise HostsError(f"line {line} has the time {text[:40]!r}; it must be Unix seconds")
    return value


def _joined(intervals: Sequence[Interval]) -> tuple[Interval, ...]:
    """Ascending intervals, those that overlap or touch made one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return tuple(found)
