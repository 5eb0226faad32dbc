"""What generator, assimilator and job.toml have to know of an aggregation policy, whatever its arithmetic.

    rounds   `microtasks_per_version` fixed microtasks over the current version; the next one when all are closed
    flow     `in_flight` microtasks are out at a time, each over the version that is current when it is issued;
             the next version from those that come back first, whatever their age
The arithmetic of each policy is one file of assimilator/policies/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PolicyFacts:
    """flow: see above. inner: whether volunteers take steps of [inner_optimizer] (None: if it is given). outer:
    whether the server takes a step of [optimizer]. keys: what [aggregation] may say. defaults: of its keys.
    parts_by: how updates are cut into parts of which a microtask sends one ("": they are not)."""

    flow: bool
    inner: bool | None
    outer: bool
    keys: frozenset[str]
    outer_defaults: Mapping[str, object]
    defaults: Mapping[str, object]
    parts_by: str = ""


# DiLoCo's outer optimizer (Douillard et al. 2023, table 5): Nesterov, learning rate 0.7, momentum 0.9.
_DILOCO_OUTER: Mapping[str, object] = {"kind": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}

_RULE = frozenset({"rule", "byzantine", "tau", "clip_iterations", "mixing"})
_AGE = frozenset({"age_weight", "age_exponent", "age_hinge", "age_slope"})
_ANCHOR = frozenset({"anchor_every", "anchor_batches", "anchor_max_age", "anchor_strength", "anchor_floor"})
_FLOW = frozenset({"in_flight", "max_age"})


def _policy(
    *,
    flow: bool,
    inner: bool | None,
    keys: frozenset[str],
    outer: Mapping[str, object] | None = None,
    parts_by: str = "",
    **defaults: object,
) -> PolicyFacts:
    """`outer`: defaults of [optimizer], or None where the policy has no step of it."""
    known = keys | {"host_weights"} | (_FLOW if flow else frozenset()) | ({"parts"} if parts_by else frozenset())
    return PolicyFacts(flow, inner, outer is not None, known, outer or {}, defaults, parts_by)


POLICIES: Mapping[str, PolicyFacts] = {
    "sync": _policy(flow=False, inner=False, outer={}, keys=_RULE),
    "diloco": _policy(flow=False, inner=True, outer=_DILOCO_OUTER, keys=_RULE),
    "streaming-diloco": _policy(flow=False, inner=True, outer=_DILOCO_OUTER, keys=_RULE, parts_by="tensors", parts=4),
    "partition": _policy(flow=False, inner=None, outer={}, keys=frozenset(), parts_by="elements", parts=4),
    "buffered": _policy(flow=True, inner=None, outer={}, keys=_RULE | _AGE),
    "anchored": _policy(flow=True, inner=None, outer={}, keys=_RULE | _AGE | _ANCHOR),
    "delay-compensated": _policy(flow=True, inner=True, outer={}, keys=_AGE | {"compensation"}, age_weight="constant"),
    "async": _policy(flow=True, inner=True, keys=_AGE | {"mixing_rate"}, mixing_rate=0.6),
    "vc-asgd": _policy(flow=True, inner=True, keys=frozenset({"mixing_rate"}), mixing_rate=0.05, age_weight="constant"),
    "delayed-nesterov": _policy(
        flow=True, inner=True, outer=_DILOCO_OUTER, keys=_RULE | {"momentum_every"}, age_weight="constant"
    ),
    "decoupled-diloco": _policy(
        flow=True, inner=True, outer=_DILOCO_OUTER, keys=frozenset({"grace_s"}), age_weight="constant", grace_s=60.0
    ),
}
