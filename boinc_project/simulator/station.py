"""A host's processors, or its line in one direction: work is done in the order in which it came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from boinc_project.simulator.events import Event, Events


@dataclass(eq=False)
class Piece:
    """Some seconds of work, and what follows it."""

    left: float
    done: Callable[[], None]
    since: float = 0.0
    event: Event | None = None


class Station:
    """`servers` pieces at a time, each by one server. While it is off nothing goes on and nothing is lost."""

    def __init__(self, events: Events, servers: int) -> None:
        self._events = events
        self._servers = servers
        self._waiting: deque[Piece] = deque()
        self._working: list[Piece] = []
        self._is_on = False
        self._used = 0.0

    @property
    def used(self) -> float:
        """Server-seconds worked so far."""
        running = sum(self._events.now - piece.since for piece in self._working if piece.event is not None)
        return self._used + running

    @property
    def idle(self) -> int:
        """Servers without work."""
        return self._servers - len(self._working)

    def add(self, seconds: float, done: Callable[[], None]) -> Piece:
        piece = Piece(seconds, done)
        self._waiting.append(piece)
        self._go_on()
        return piece

    def remove(self, piece: Piece) -> bool:
        """Take back what has not begun; False if it has."""
        if piece not in self._waiting:
            return False
        self._waiting.remove(piece)
        return True

    def turn_on(self) -> None:
        self._is_on = True
        for piece in self._working:
            self._start(piece)
        self._go_on()

    def turn_off(self) -> None:
        self._is_on = False
        for piece in self._working:
            if piece.event is not None:
                piece.event.cancel()
                self._stop(piece)

    def clear(self) -> None:
        """Forget all work."""
        self.turn_off()
        self._waiting.clear()
        self._working.clear()

    def _go_on(self) -> None:
        while self._is_on and self._waiting and self.idle > 0:
            piece = self._waiting.popleft()
            self._working.append(piece)
            self._start(piece)

    def _start(self, piece: Piece) -> None:
        piece.since = self._events.now
        piece.event = self._events.after(piece.left, lambda: self._end(piece))

    def _stop(self, piece: Piece) -> None:
        worked = self._events.now - piece.since
        self._used += worked
        piece.left = max(0.0, piece.left - worked)
        piece.event = None

    def _end(self, piece: Piece) -> None:
        self._stop(piece)
        self._working.remove(piece)
        self._go_on()
        piece.done()
