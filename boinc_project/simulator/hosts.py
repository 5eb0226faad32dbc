"""What a simulated host is like: its speed, its lines, and when it is on."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

Interval = tuple[float, float]


class HostsError(ValueError):
    """A host cannot be like that, or a trace cannot be read; the message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A volunteer's computer. Times are seconds from the beginning of the simulation.

    flops        operations per second of one processor, as the application reaches them
    down, up     bytes per second of the line
    latency      seconds that each file costs besides
    jitter       sigma of the log-normal factor by which the runtime of each task differs: others use the computer, too
    active       when it is on: (from, to), ascending, without overlaps; the last `to` may be infinite
    period       seconds after which `active` begins again; 0: never, and after the last one the host is gone for good
    leaves       when it is gone for good in any case
    address      that the scheduler sees; by default one in a network of its own
    """

    name: str
    flops: float
    processors: int = 1
    down: float = 2.5e6
    up: float = 1e6
    latency: float = 0.05
    jitter: float = 0.0
    active: tuple[Interval, ...] = ((0.0, math.inf),)
    period: float = 0.0
    leaves: float = math.inf
    address: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "address", self.address or own_address(self.name))
        try:
            ipaddress.ip_address(self.address)
        except ValueError:
            raise HostsError(f"host {self.name}: {self.address[:50]!r} is no IP address") from None
        numbers = (self.flops, self.down, self.up)
        if not all(math.isfinite(value) and value > 0 for value in numbers):
            raise HostsError(f"host {self.name}: speed and bandwidth must be above 0, not {numbers}")
        if not 1 <= self.processors <= 4096 or not 0 <= self.latency < math.inf:
            raise HostsError(f"host {self.name}: it needs 1 to 4096 processors and a latency of 0 seconds or more")
        if not 0 <= self.jitter <= 3:
            raise HostsError(f"host {self.name}: its jitter must be 0 to 3, not {self.jitter}")
        last = 0.0
        for start, end in self.active:
            if not last <= start < end:  # NaN fails as well
                raise HostsError(f"host {self.name}: the interval from {start} to {end} is empty or out of order")
            last = end
        if self.period and not last <= self.period < math.inf:
            raise HostsError(
                f"host {self.name}: its intervals end at {last}, after its period of {self.period} seconds"
            )

    def intervals(self) -> Iterator[Interval]:
        """When it is on, in order; endless for a host that comes again and again."""
        base = 0.0
        while self.active:
            for start, end in self.active:
                if base + start >= self.leaves:
                    return
                yield base + start, min(base + end, self.leaves)
            if not self.period:
                return
            base += self.period

    def seconds_on(self, until: float) -> float:
        """Seconds for which it is on before a moment."""
        total = 0.0
        for start, end in self.intervals():
            if start >= until:
                break
            total += min(end, until) - start
        return total


def own_address(name: str) -> str:
    """A public IPv6 address in a /48 that hosts of other names are not in (but for one chance in 2^36)."""
    network = int.from_bytes(hashlib.sha256(name.encode()).digest()[:5], "big") >> 4
    return str(ipaddress.IPv6Address(0x2A0 << 116 | network << 80 | 1))


def with_departures(hosts: Sequence[Host], share: float, horizon: float, seed: int) -> list[Host]:
    """The same hosts, of which this share, drawn at random, leaves for good, each at a uniformly drawn moment before
    `horizon`."""
    draws = np.random.default_rng([seed, 0xD0])
    leaving = set(draws.permutation(len(hosts))[: round(share * len(hosts))].tolist())
    moments = draws.uniform(0.0, horizon, len(hosts))
    return [
        dataclasses.replace(host, leaves=float(moments[number])) if number in leaving else host
        for number, host in enumerate(hosts)
    ]
