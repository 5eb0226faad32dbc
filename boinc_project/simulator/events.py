"""Virtual time: a heap of moments and what is to be done at each of them."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(order=True)
class Event:
    """Something that is to happen; of one moment, what was planned first comes first."""

    when: float
    number: int
    action: Callable[[], None] = field(compare=False)
    cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.cancelled = True


class Events:
    """What is still to happen. `now` is the moment of the event in progress, in seconds."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self._heap: list[Event] = []
        self._numbers = itertools.count()

    def read(self) -> float:
        """The virtual time, for boinc_project.clock."""
        return self.now

    def at(self, when: float, action: Callable[[], None]) -> Event:
        """Plan something for a moment; one that has passed is now."""
        if math.isnan(when):
            raise ValueError("an event needs a moment, not NaN")
        event = Event(max(when, self.now), next(self._numbers), action)
        heapq.heappush(self._heap, event)
        return event

    def after(self, seconds: float, action: Callable[[], None]) -> Event:
        return self.at(self.now + seconds, action)

    def run(self, until: Callable[[], bool], end: float = math.inf) -> bool:
        """Let things happen until `until()` holds after one of them; False if `end` or the last event came first."""
        while self._heap:
            event = heapq.heappop(self._heap)
            if event.cancelled:
                continue
            if event.when > end:
                heapq.heappush(self._heap, event)
                self.now = end
                return False
            self.now = event.when
            event.action()
            if until():
                return True
        return False
