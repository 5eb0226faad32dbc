"""Virtual time and the stations where hosts' work is done."""

from __future__ import annotations

import math

import pytest

from boinc_project.simulator.events import Events
from boinc_project.simulator.station import Station


def never() -> bool:
    return False


def test_events_happen_in_the_order_of_their_moments_then_of_their_planning() -> None:
    events, seen = Events(), list[str]()
    events.at(5, lambda: seen.append("b"))
    events.at(5, lambda: seen.append("c"))
    events.at(1, lambda: events.after(1, lambda: seen.append("a")))
    events.at(3, lambda: seen.append("x")).cancel()
    events.run(never)
    assert seen == ["a", "b", "c"]


def test_a_run_ends_when_asked_or_at_its_end_and_can_go_on() -> None:
    events, seen = Events(), list[int]()
    for moment in (1, 2, 3):
        events.at(moment, lambda moment=moment: seen.append(moment))  # type: ignore[misc]
    assert events.run(lambda: len(seen) == 1)
    assert not events.run(never, end=2.5)
    assert (seen, events.now) == ([1, 2], 2.5)
    assert not events.run(never)
    assert seen == [1, 2, 3]


def test_the_past_is_now_and_no_moment_is_refused() -> None:
    events = Events(10.0)
    assert events.at(3.0, never).when == 10.0
    with pytest.raises(ValueError, match="NaN"):
        events.at(math.nan, never)


def station(servers: int) -> tuple[Events, Station, list[tuple[str, float]]]:
    events, done = Events(), list[tuple[str, float]]()
    made = Station(events, servers)
    made.turn_on()
    return events, made, done


def test_work_is_done_in_order_by_as_many_servers_as_there_are() -> None:
    events, place, done = station(2)
    for name, seconds in (("a", 4.0), ("b", 1.0), ("c", 2.0)):
        place.add(seconds, lambda name=name: done.append((name, events.now)))  # type: ignore[misc]
    events.run(never)
    assert done == [("b", 1.0), ("c", 3.0), ("a", 4.0)]
    assert place.used == 7.0


def test_while_it_is_off_nothing_goes_on_and_nothing_is_lost() -> None:
    events, place, done = station(1)
    place.add(4.0, lambda: done.append(("a", events.now)))
    events.at(1.0, place.turn_off)
    events.at(2.0, lambda: place.add(1.0, lambda: done.append(("b", events.now))) and None)
    events.at(10.0, place.turn_on)
    events.run(never)
    assert done == [("a", 13.0), ("b", 14.0)]
    assert place.used == 5.0


def test_only_what_has_not_begun_can_be_taken_back() -> None:
    events, place, done = station(1)
    begun = place.add(4.0, lambda: done.append(("a", events.now)))
    waiting = place.add(1.0, lambda: done.append(("b", events.now)))
    assert not place.remove(begun)
    assert place.remove(waiting)
    events.run(never)
    assert done == [("a", 4.0)]


def test_what_is_cleared_never_ends() -> None:
    events, place, done = station(1)
    place.add(4.0, lambda: done.append(("a", events.now)))
    events.at(1.0, place.clear)
    events.run(never)
    assert (done, place.used) == ([], 1.0)
