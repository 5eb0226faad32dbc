"""Work that was not done: updates that are a multiple of what the host has sent before, or of the server's own step.

    an old update sent again   a volunteer's gradient for one microtask returned for another, scaled or not
    the public step            the difference of the last two published states returned as if it had been computed
    a stranger's file          the same bytes from two hosts, though they hold the times that the work took

Beside an honest copy such an update disagrees and is invalid anyway. It matters where a copy stands alone or where
accomplices form the quorum, and so a finding is a reason to look closer and no verdict: full-batch training with tiny
steps makes neighbouring gradients nearly equal in all honesty.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from boinc_project.contract.codecs import Array
from validator.fingerprint import Layout, fingerprints, heads, read, unlikeness
from validator.traces import RECENT

#: Updates nearer than this to a multiple of one another are copies. Two gradients of different samples are farther
#: apart by the noise of their batches; a copier who adds so much noise no longer has a copy.
COPY = 0.01
LEAST_SECONDS = 1.0
_HOSTS, _STEPS = 10_000, 8  # remembered at most

Heads = frozenset[int]
#: Fingerprints of a host's last results, the newest first: (workunit name, kind, marks).
Recent = list[tuple[str, str, bytes]]


@dataclass(frozen=True)
class _Seen:
    workunit_name: str
    kind: str
    blob: bytes
    heads: Heads


@dataclass
class Copies:
    """What hosts have sent lately, and the server's last steps. Not thread-safe."""

    hosts: OrderedDict[int, deque[_Seen]] = field(default_factory=OrderedDict)
    steps: OrderedDict[tuple[int, int, str, str], bytes] = field(default_factory=OrderedDict)

    def knows(self, host_id: int) -> bool:
        return host_id in self.hosts

    def remember(self, host_id: int, recent: Recent, kind: str, layout: Layout) -> None:
        """What the database knows of a host that was not met before, as far as it is of this kind."""
        known: deque[_Seen] = deque(maxlen=RECENT)
        for name, kind_then, blob in reversed(recent):
            if kind_then == kind and read(blob, layout) is not None:
                known.append(_Seen(name, kind, blob, heads(blob, layout)))
        self.hosts[host_id] = known
        if len(self.hosts) > _HOSTS:
            self.hosts.popitem(last=False)

    def sent_before(self, host_id: int, workunit_name: str, kind: str, blob: bytes, layout: Layout) -> str:
        """The workunit whose update from this host this one is a multiple of, or ''. It is remembered from now on."""
        mine, known = heads(blob, layout), self.hosts.setdefault(host_id, deque(maxlen=RECENT))
        self.hosts.move_to_end(host_id)
        others = [seen for seen in known if seen.workunit_name != workunit_name and seen.kind == kind]
        if all(seen.workunit_name != workunit_name for seen in known):
            known.append(_Seen(workunit_name, kind, blob, mine))
        for seen in others:
            if 2 * len(mine & seen.heads) >= len(mine) and _is_multiple(blob, seen.blob, layout):
                return seen.workunit_name
        return ""

    def is_step(
        self,
        key: tuple[int, int, str, str],
        blob: bytes,
        layout: Layout,
        difference: Callable[[], Mapping[str, Array] | None],
    ) -> bool:
        """Whether an update is a multiple of the server's step to the version it began from.

        `key`: job, version, kind, and the microtask where each draws by itself what travels; `difference` computes the
        step's update the first time it is needed, None if the states are gone.
        """
        if key not in self.steps:
            made = difference()
            self.steps[key] = b"" if made is None else fingerprints([_complete(made, layout)], layout)[0]
            if len(self.steps) > _STEPS:
                self.steps.popitem(last=False)
        step = self.steps[key]
        if not step:
            return False
        mine = heads(blob, layout)
        return 2 * len(mine & heads(step, layout)) >= len(mine) and _is_multiple(blob, step, layout)


def _is_multiple(blob: bytes, other: bytes, layout: Layout) -> bool:
    a, b = read(blob, layout), read(other, layout)
    return a is not None and b is not None and unlikeness(a, b, layout) < COPY


def _complete(made: Mapping[str, Array], layout: Layout) -> dict[str, Array]:
    """The difference with the tensors that a step has not (metrics, buffers) as zeros."""
    sizes = dict(zip(layout.names, layout.sizes.tolist(), strict=True))
    return {name: made[name] if name in made else np.zeros(size, np.float32) for name, size in sizes.items()}


def step_as_update(before: Mapping[str, Array], after: Mapping[str, Array], names: tuple[str, ...]) -> dict[str, Array]:
    """The server's step between two states, under the names of an update's gradients or deltas."""
    found = {}
    for name in names:
        family, _, parameter = name.partition("/")
        key = f"parameter/{parameter}"
        if family in ("gradient", "delta") and key in before and key in after:
            found[name] = before[key] - after[key]
    return found


def same_file(digests: Mapping[int, str], metadata: Mapping[int, Mapping[str, Any]]) -> dict[int, str]:
    """Result id -> digest, of copies that are the same bytes as another one and that hold times of their own.

    Two runs of a second or more never take the same milliseconds in every stage and the same memory; a file that
    says nothing of them, or of a run too short to tell, says nothing here.
    """
    number: dict[str, int] = {}
    for digest in digests.values():
        number[digest] = number.get(digest, 0) + 1
    return {i: digest for i, digest in digests.items() if number[digest] > 1 and _is_timed(metadata.get(i, {}))}


def _is_timed(metadata: Mapping[str, Any]) -> bool:
    seconds = metadata.get("seconds")
    if not isinstance(seconds, Mapping) or not metadata.get("peak_memory"):
        return False
    return sum(value for value in seconds.values() if isinstance(value, float)) >= LEAST_SECONDS
