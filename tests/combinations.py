"""Settings of job.toml in combination: texts of whole files, and sets of them in which all pairs of values occur."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from boinc_project.contract.codecs import KINDS
from boinc_project.job_config import RULES
from boinc_project.policies import POLICIES

Combination = dict[str, str]

#: What each thing may be, as lines of job.toml by section; the first of each is what most jobs have.
LINES: Mapping[str, Mapping[str, Mapping[str, Sequence[str]]]] = {
    "policy": {name: {"train": [f'policy = "{name}"']} for name in POLICIES},
    "model": {
        "plain": {"model": ['factory = "tiny:model"']},
        "adapted": {"model": ['factory = "tiny:adapted"']},
        "counted": {"model": ['factory = "counted:model"']},
    },
    "inner": {
        "none": {},
        "adamw": {"inner_optimizer": ["lr = 0.02"]},
        "clipped": {"inner_optimizer": ["lr = 0.02", "max_norm = 0.5", "weight_decay = 0.01"]},
        "sgd": {"inner_optimizer": ['kind = "sgd"', "lr = 0.05"]},
        "adamw shipped": {"inner_optimizer": ["lr = 0.02", 'state = "shipped"']},
        "clipped shipped": {"inner_optimizer": ["lr = 0.02", 'state = "shipped"', "max_norm = 0.5"]},
        "momentum shipped": {
            "inner_optimizer": ['kind = "sgd"', "lr = 0.05", "momentum = 0.9", "nesterov = true", 'state = "shipped"']
        },
    },
    "outer": {
        "none": {},
        "sgd": {"optimizer": ["lr = 0.5"]},
        "nesterov": {"optimizer": ["lr = 0.1", "momentum = 0.9", "nesterov = true"]},
        "plain momentum": {"optimizer": ["lr = 0.1", "momentum = 0.5", "nesterov = false", "weight_decay = 0.01"]},
        "adamw": {"optimizer": ['kind = "adamw"', "lr = 0.02", "weight_decay = 0.01"]},
    },
    "codec": {
        **{kind: {"codec": [f'kind = "{kind}"']} for kind in KINDS},
        "random-k of fp4": {"codec": ['kind = "random-k"', 'values = "fp4"', "share = 0.3", "block = 16"]},
        "top-k of int8": {"codec": ['kind = "top-k"', 'values = "int8"', "share = 1.0"]},
        "dct of fp4": {"codec": ['kind = "dct-top-k"', 'values = "fp4"', "share = 1e-6"]},
        "fine qsgd": {"codec": ['kind = "qsgd"', "levels = 127", "block = 16", 'compression = "none"']},
        "projection": {"codec": ['kind = "low-rank"', "rank = 1", "iterations = 0"]},
        "wide low-rank": {"codec": ['kind = "low-rank"', "rank = 256"]},
    },
    "count": {
        "2": {"train": ["microtasks_per_version = 2"]},
        "1": {"train": ["microtasks_per_version = 1"]},
        "4": {"train": ["microtasks_per_version = 4"]},
        "5": {"train": ["microtasks_per_version = 5"]},
    },
    "classes": {
        "none": {},
        "two": {"train": ["speed_classes = [1.0, 0.5]"]},
        "three": {"train": ["speed_classes = [1.0, 0.7, 0.3]"]},
    },
    "parts": {"none": {}, **{n: {"aggregation": [f"parts = {n}"]} for n in ("1", "2", "4", "1024")}},
    "rule": {
        "none": {},
        **{name: {"aggregation": [f'rule = "{name}"', "byzantine = 1"]} for name in RULES},
        "mixed": {"aggregation": ['mixing = "nearest_neighbour"', "byzantine = 1"]},
        "mixed median": {"aggregation": ['mixing = "nearest_neighbour"', 'rule = "median"', "byzantine = 1"]},
    },
    "age": {
        "none": {},
        "hinge": {"aggregation": ['age_weight = "hinge"', "age_hinge = 0"]},
        "polynomial": {"aggregation": ['age_weight = "polynomial"', "age_exponent = 10"]},
    },
    "flow": {
        "none": {},
        "narrow": {"aggregation": ["in_flight = 1", "max_age = 0"]},
        "wide": {"aggregation": ["in_flight = 9", "max_age = 1"]},
    },
    "hosts": {"none": {}, "weighed": {"aggregation": ["host_weights = true"]}},
    "own": {
        "none": {},
        "grace": {"aggregation": ["grace_s = 0"]},
        "mixing rate": {"aggregation": ["mixing_rate = 1"]},
        "no compensation": {"aggregation": ["compensation = 0"]},
        "compensation": {"aggregation": ["compensation = 10"]},
        "momentum": {"aggregation": ["momentum_every = 20"]},
        "anchors": {"aggregation": ["anchor_every = 1", "anchor_strength = 1", "anchor_batches = 7"]},
        "anchors of one version": {"aggregation": ["anchor_every = 2", "anchor_max_age = 2", "anchor_strength = 0"]},
    },
    "downlink": {"none": {}, "deltas": {"supply": ["keyframe_every = 2"]}, "32": {"supply": ["keyframe_every = 32"]}},
    "kept": {"none": {}, "one": {"supply": ["keep_versions = 1"]}, "three": {"supply": ["keep_versions = 3"]}},
    "schedule": {
        "none": {},
        "cosine": {"schedule": ['kind = "cosine"', "warmup_versions = 1"]},
        "linear": {"schedule": ['kind = "linear"', "total_versions = 1", "min_ratio = 0.1"]},
    },
    "copies": {
        "none": {},
        "one": {"workunit": ["min_quorum = 1"]},
        "three": {"workunit": ["min_quorum = 2", "target_nresults = 3"]},
    },
    "trust": {
        "none": {},
        "adaptive": {"trust": ["adaptive_replication = true", "audit_floor = 1"]},
        "newcomers": {"trust": ["newcomer_days = 7", "newcomer_results = 2"]},
        "devices": {"trust": ["independent_devices = true"]},
        "spot checks": {"trust": ["spot_check_share = 1"]},
        "disputes": {"trust": ["replay_disputes = true"]},
        "norms": {"trust": ["norm_bound = 50"]},
        "probe": {"trust": ["norm_bound = 50", "loss_probe = 1e-9"]},
        "all": {
            "trust": [
                "adaptive_replication = true", "newcomer_days = 7", "newcomer_results = 2",
                "independent_devices = true", "spot_check_share = 0.5", "replay_disputes = true", "norm_bound = 50",
            ]
        },
    },
    "evaluation": {"none": {"train": ["evaluate_every = 0"]}, "every": {"train": ["evaluate_every = 1"]}},
}  # fmt: skip

_ALWAYS: Mapping[str, Sequence[str]] = {
    "job": ['name = "tiny"', 'description = "A job for tests that trains in moments."', "seed = 3"],
    "model": ['loss = "tiny:loss"', 'metrics = "tiny:metrics"'],
    "data": ['source = "tiny:data"', 'license = "CC0-1.0"', "batch_size = 16", "shard_samples = 100"],
    "train": ["max_versions = 3"],
    "workunit": ["delay_bound_s = 3600"],
}


def text_of(combination: Mapping[str, str]) -> str:
    """The job.toml of a combination."""
    steps = "batches_per_microtask = 4" if combination["inner"] == "none" else "local_steps = 4"
    found: dict[str, list[str]] = {section: list(lines) for section, lines in _ALWAYS.items()}
    found["train"].append(steps)
    for name, choice in combination.items():
        for section, lines in LINES[name][choice].items():
            found.setdefault(section, []).extend(lines)
    # Of a key that two choices set the last one counts.
    return "\n".join(
        f"[{section}]\n" + "\n".join({line.partition(" = ")[0]: line for line in lines}.values()) + "\n"
        for section, lines in found.items()
    )


def fitted(combination: Combination) -> Combination:
    """The nearest combination that, as far as the documentation says, is a job."""
    made, facts = dict(combination), POLICIES[combination["policy"]]
    if facts.inner is False:
        made["inner"] = "none"
    elif facts.inner and made["inner"] == "none":
        made["inner"] = "adamw"
    if not facts.outer:
        made["outer"] = "none"
    elif made["outer"] == "none" and not facts.outer_defaults:
        made["outer"] = "sgd"
    if made["policy"] == "delayed-nesterov" and made["outer"] != "none":
        made["outer"] = "nesterov"
    for name in ("rule", "age", "flow", "own", "parts"):
        keys = {line.partition(" = ")[0] for line in LINES[name][made[name]].get("aggregation", ())}
        if keys - facts.keys:
            made[name] = "none"
    if "grace_s" in facts.keys:
        made["own"] = "grace"
    if facts.parts_by == "tensors" and made["parts"] != "1":
        made["parts"] = "2"  # in more some part of one of the models would have no tensor
    shipped = made["inner"].endswith("shipped")
    if shipped and facts.parts_by:
        made["inner"] = "sgd"
    if made["classes"] != "none" and shipped:
        made["classes"] = "none"
    if made["classes"] != "none" and made["inner"] != "none":
        made["rule"] = "none"
    if made["rule"] not in ("none",):
        made["count"] = "5"
    if facts.parts_by == "elements":
        made["rule"] = "none"
        made["count"] = "4"
        if made["parts"] == "1024":
            made["parts"] = "2"
    if made["own"] == "momentum" and made["count"] not in ("1", "2", "4", "5"):
        made["own"] = "none"
    if facts.flow and made["kept"] != "none":
        if made["flow"] == "none":
            made["kept"] = "none"
        elif made["flow"] == "wide":
            made["kept"] = "three"
    if made["inner"] == "adamw shipped" and "adaptive_replication = true" in LINES["trust"][made["trust"]].get(
        "trust", ()
    ):
        made["inner"] = "clipped shipped"  # moments of a copy alone must be bounded
    if made["trust"] == "probe" and made["inner"] == "none":
        made["trust"] = "norms"
    return made


def any_combination(draws: random.Random) -> Combination:
    """One of all, whether or not it is a job."""
    return {name: draws.choice(list(choices)) for name, choices in LINES.items()}


@functools.cache
def covering(seed: int, most: int, candidates: int = 20) -> tuple[Combination, ...]:
    """Combinations that are jobs, each with as many pairs of values as possible that none before it had.

    Greedy (Cohen et al. 1997, "The AETG system"): of some random candidates the one with most new pairs.
    """
    draws, seen, found = random.Random(seed), set[Any](), []
    for number in range(most):
        offered = [fitted(any_combination(draws)) for _ in range(candidates)]
        policy = list(POLICIES)[number % len(POLICIES)]
        offered = [fitted({**each, "policy": policy}) for each in offered]
        best = max(offered, key=lambda each: len(_pairs(each) - seen))
        seen |= _pairs(best)
        found.append(best)
    return tuple(found)


def _pairs(combination: Mapping[str, str]) -> set[Any]:
    return set(itertools.combinations(sorted(combination.items()), 2))
