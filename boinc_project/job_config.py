"""The admin's job.toml, checked key by key, as one frozen record that every daemon reads.

What it is: the only reader of job.toml; it needs no torch and runs none of the admin's code. What it is
not: the model, loss and data that it names (work_generator/job.py loads those).
Every key, its bounds and its default stand once, in the section classes below; docs/job.md is the
same table in words. Everything wrong is a JobError: file, line, what is wrong, what to write.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from boinc_project.contract.codecs import COMPRESSIONS, KINDS, PARAMETERS, VALUE_KINDS, Codec
from boinc_project.contract.downlink import MAX_DELTAS
from boinc_project.contract.errors import ContractError
from boinc_project.policies import POLICIES, PolicyFacts

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "cosine", "linear")
RULES = (
    "mean", "median", "trimmed_mean", "krum", "multi_krum", "centered_clipping", "geometric_median", "norm_bound",
)  # fmt: skip
MIXINGS = ("none", "nearest_neighbour")
INNER_STATES = ("reset", "shipped")
AGE_WEIGHTS = ("polynomial", "constant", "hinge")

REFERENCE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")

# BOINC puts names into file names and URLs; these words have a meaning in its server's paths or templates.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
NAME_WORDS_REFUSED = ("download", "upload", "nodelete")
METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

MAX_COUNT = 1_000_000
MAX_SECONDS = 90 * 86400  # BOINC's delay_bound; longer deadlines outlive most volunteers' interest

MAX_SIZE_CLASSES = 10  # BOINC's own limit (db/boinc_db_types.h)

# Relative L2 distance within which two copies agree. One gradient of honest hosts differs by under
# 1e-6 and TF32 by 4e-4; 200 local AdamW steps differ by 6e-4; looser than 1e-3 leaves room for lies.
GRADIENT_TOLERANCE = 1e-4
LOCAL_STEPS_TOLERANCE = 1e-3
# Before they are encoded: honest copies of one gradient, and of some hundred local steps with eps = 1e-6.
GRADIENT_DISTANCE, LOCAL_STEPS_DISTANCE = 1e-6, 3e-5
CODEC_MARGIN = 3.0

Check = Callable[[object], object]


class JobError(ValueError):
    """The admin's job.toml, Python files or data are wrong; the message is one sentence with the remedy."""


def reference_file(folder: Path, reference: str) -> Path:
    """The file that `module:function` names; raises JobError for a malformed reference."""
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise JobError(f'"{reference}" is not of the form "module:function"; write for example "digits:model"')
    return folder.joinpath(*match["module"].split(".")).with_suffix(".py")


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception as `TypeName: first line of its text`, short enough for one sentence."""
    text = " ".join(str(error).strip().split("\n")[0].split())
    return f"{type(error).__name__}: {text}"[:limit].rstrip(": ")


class _Wrong(Exception):
    """A value does not fit its key; the text says what is expected and an example."""


def _key(check: Check, doc: str, **default: object) -> Any:
    return field(metadata={"check": check, "doc": doc}, **default)  # type: ignore[call-overload]


def _integer(low: int, high: int, example: int) -> Check:
    def check(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _Wrong(f"must be a whole number from {low} to {high}|{example}")
        return value

    return check


def _number(low: float, high: float, example: float, *, above: bool = False) -> Check:
    def check(value: object) -> object:
        fits = not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)
        if not fits or not low <= float(value) <= high or (above and float(value) == low):  # type: ignore[arg-type]
            bounds = f"above {low:g} and up to {high:g}" if above else f"from {low:g} to {high:g}"
            raise _Wrong(f"must be a number {bounds}|{example:g}")
        return float(value)  # type: ignore[arg-type]

    return check


def _text(low: int, high: int, example: str) -> Check:
    def check(value: object) -> object:
        if not isinstance(value, str) or not low <= len(value.strip()) <= high or not value.isprintable():
            raise _Wrong(f'must be a text of {low} to {high} printable characters on one line|"{example}"')
        return value.strip()

    return check


def _choice(*allowed: str) -> Check:
    def check(value: object) -> object:
        if value not in allowed:
            raise _Wrong(f'must be one of {", ".join(allowed)}|"{allowed[0]}"')
        return value

    return check


def _flag(value: object) -> object:
    if not isinstance(value, bool):
        raise _Wrong("must be true or false|true")
    return value


def _betas(value: object) -> object:
    if (
        not isinstance(value, list)
        or len(value) != 2
        or any(isinstance(b, bool) or not isinstance(b, int | float) or not 0 <= b < 1 for b in value)
    ):
        raise _Wrong("must be two numbers from 0 to below 1|[0.9, 0.999]")
    return tuple(float(b) for b in value)


def _speeds(value: object) -> object:
    fits = isinstance(value, list) and all(isinstance(v, int | float) and not isinstance(v, bool) for v in value)
    if fits and not value:
        return ()
    speeds = tuple(float(v) for v in value) if fits else ()  # type: ignore[attr-defined]
    falling = all(left > right > 0 for left, right in itertools.pairwise(speeds))
    if not 2 <= len(speeds) <= MAX_SIZE_CLASSES or speeds[0] != 1.0 or not falling:
        raise _Wrong(
            f"must be 2 to {MAX_SIZE_CLASSES} falling numbers above 0, of which the first is 1|[1.0, 0.5, 0.25]"
        )
    return speeds


def _name(value: object) -> object:
    if not isinstance(value, str) or NAME.fullmatch(value) is None or any(w in value for w in NAME_WORDS_REFUSED):
        raise _Wrong(
            "must be 1 to 32 of a-z, 0-9, _ and -, beginning with a letter or digit, "
            f'without the words {", ".join(NAME_WORDS_REFUSED)}|"digits"'
        )
    return value


def _metric_name(value: object) -> object:
    if not isinstance(value, str) or METRIC_NAME.fullmatch(value) is None:
        raise _Wrong('must be "loss" or the name of one of your metrics|"accuracy"')
    return value


def _function(value: object) -> object:
    if not isinstance(value, str):
        raise _Wrong('must be a text "module:function"|"digits:model"')
    try:
        reference_file(Path(), value)
    except JobError as error:
        raise _Wrong('must be of the form "module:function"|"digits:model"') from error
    return value


def _file(value: object) -> object:
    if not isinstance(value, str) or not value:
        raise _Wrong('must be the path of a file, relative to the folder of job.toml|"weights.safetensors"')
    return value


@dataclass(frozen=True, kw_only=True)
class JobSection:
    """[job]: what it is called and how volunteers are told about it."""

    name: str = _key(_name, "name of the job, part of every workunit's and file's name")
    description: str = _key(_text(10, 500, "Learns to read handwritten digits."), "one sentence for volunteers")
    seed: int = _key(_integer(0, 2**63 - 1, 1), "seed of initial weights, shuffling and dropout", default=0)


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """[model]: the admin's functions that make the model and its loss."""

    factory: str = _key(_function, "function () -> torch.nn.Module")
    loss: str = _key(_function, "function (model, batch) -> loss of each sample, [B], or a scalar mean")
    metrics: str | None = _key(_function, "function (model, batch) -> {name: value of each sample, [B]}", default=None)
    pretrained: str | None = _key(_file, "safetensors file with the weights to start from", default=None)


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """[data]: where samples come from and how many go into a batch."""

    source: str = _key(_function, 'function () -> {"train": {field: array [N, ...]}, "test": {...}}')
    license: str = _key(_text(2, 200, "CC-BY-4.0"), "licence of the data, shown to volunteers")
    batch_size: int = _key(_integer(1, 65536, 64), "samples of one batch")
    evaluation_batch_size: int = _key(
        _integer(0, 65536, 256), "samples of one evaluation batch; 0: as batch_size", default=0
    )
    shard_samples: int = _key(
        _integer(0, 2**31, 4096), "samples of one published data file; 0: sized by bytes", default=0
    )


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    """[train]: what a version of the model is made of and when to stop."""

    policy: str = _key(_choice(*POLICIES), "how results become the next version")
    microtasks_per_version: int = _key(_integer(1, 4096, 4), "contributions that make one version")
    batches_per_microtask: int = _key(
        _integer(1, 4096, 1), "without [inner_optimizer]: batches whose gradient one microtask sums", default=1
    )
    local_steps: int = _key(_integer(1, 500, 50), "with [inner_optimizer]: steps of it in one microtask", default=1)
    speed_classes: tuple[float, ...] = _key(
        _speeds,
        "speeds of the classes of hosts, the fastest first: a microtask for a slower class has so much fewer steps",
        default=(),
    )
    max_versions: int = _key(_integer(1, MAX_COUNT, 100), "stop after this version")
    target_metric: str | None = _key(_metric_name, "stop once this held-out metric reaches target_value", default=None)
    target_value: float | None = _key(
        _number(-1e30, 1e30, 0.95), "the value to reach (loss: or below; others: or above)", default=None
    )
    max_hours: float | None = _key(_number(0, 24 * 3650, 48, above=True), "stop after so many hours", default=None)
    evaluate_every: int = _key(_integer(0, MAX_COUNT, 5), "versions between held-out evaluations; 0: never", default=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """[optimizer]: applied on the server to each version; with [inner_optimizer] it is the outer one."""

    kind: str = _key(_choice(*OPTIMIZERS), "sgd or adamw, as torch.optim has them", default="sgd")
    lr: float = _key(_number(0, 100, 0.001, above=True), "learning rate")
    momentum: float = _key(_number(0, 1, 0.9), "sgd: momentum", default=0.0)
    nesterov: bool = _key(_flag, "sgd: Nesterov's form of the momentum", default=False)
    betas: tuple[float, float] = _key(_betas, "adamw: decay of the two running means", default=(0.9, 0.999))
    eps: float = _key(_number(0, 1, 1e-8, above=True), "adamw: added to the denominator", default=1e-8)
    weight_decay: float = _key(_number(0, 10, 0.01), "adamw: decoupled decay; sgd: added to the gradient", default=0.0)


@dataclass(frozen=True, kw_only=True)
class InnerOptimizerSection(OptimizerSection):
    """[inner_optimizer]: the optimizer of local steps, run by volunteers."""

    kind: str = _key(_choice(*OPTIMIZERS), "sgd or adamw, as torch.optim has them", default="adamw")
    eps: float = _key(
        _number(0, 1, 1e-6, above=True),
        "adamw: added to the denominator; 1e-6 keeps honest replicas close",
        default=1e-6,
    )
    max_norm: float = _key(
        _number(0, 1e6, 1.0), "clip the gradient to this norm before each step; 0: no clipping", default=0.0
    )
    state: str = _key(
        _choice(*INNER_STATES),
        "its state is reset to zero in every microtask, or shipped: averaged and part of the version",
        default="reset",
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """[schedule]: factor on the learning rate by version: that of [inner_optimizer], or else of [optimizer]."""

    kind: str = _key(_choice(*SCHEDULES), "constant, cosine or linear decay", default="constant")
    warmup_versions: int = _key(_integer(0, MAX_COUNT, 10), "versions of linear warm-up", default=0)
    total_versions: int = _key(_integer(0, MAX_COUNT, 100), "version at which decay ends; 0: max_versions", default=0)
    min_ratio: float = _key(_number(0, 1, 0.1), "factor at the end of decay", default=0.0)

    def ratio(self, version: int) -> float:
        """Factor on the learning rate of the step from `version` to the next; version 0 is the initial model."""
        if version < self.warmup_versions:
            return (version + 1) / self.warmup_versions
        if self.kind == "constant":
            return 1.0
        span = max(self.total_versions - self.warmup_versions, 1)
        done = min((version - self.warmup_versions) / span, 1.0)
        left = 1.0 - done if self.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_ratio + (1.0 - self.min_ratio) * left


@dataclass(frozen=True, kw_only=True)
class AggregationSection:
    """[aggregation]: how contributions that are late, or from hosts that may lie, are put together."""

    in_flight: int = _key(
        _integer(0, 100_000, 32), "microtasks that are out at a time; 0: twice microtasks_per_version", default=0
    )
    max_age: int = _key(
        _integer(0, 10_000, 20), "versions after which a contribution is credited, not applied", default=20
    )
    age_weight: str = _key(
        _choice(*AGE_WEIGHTS),
        "weight by age s in versions: polynomial (1 + s)^-a, constant 1, or hinge: 1 up to b, then 1 / (1 + c (s - b))",
        default="polynomial",
    )
    age_exponent: float = _key(_number(0, 10, 0.5), "a of the polynomial; 0.5 is FedBuff's", default=0.5)
    age_hinge: int = _key(_integer(0, 10_000, 4), "b of the hinge", default=4)
    age_slope: float = _key(_number(0, 1000, 10.0), "c of the hinge", default=10.0)
    host_weights: bool = _key(
        _flag, "a contribution counts by its host's reliability in this kind of work, at least half", default=False
    )
    mixing_rate: float = _key(
        _number(0, 1, 0.6, above=True), "share that a contribution's model has in the next one", default=0.6
    )
    compensation: float = _key(
        _number(0, 10, 0.1), "strength of the correction for what has been moved since a result was begun", default=0.1
    )
    momentum_every: int = _key(
        _integer(0, MAX_COUNT, 32),
        "contributions between two updates of the outer momentum; 0: microtasks_per_version",
        default=0,
    )
    grace_s: float = _key(
        _number(0, MAX_SECONDS, 60.0), "seconds for which a version that could be made waits for more", default=0.0
    )
    parts: int = _key(_integer(1, 1024, 4), "parts of the model, of which a microtask sends one", default=1)
    anchor_every: int = _key(
        _integer(1, 10_000, 5), "versions from one gradient that the server computes itself to the next", default=5
    )
    anchor_batches: int = _key(
        _integer(0, 4096, 16), "batches of it (local steps, with [inner_optimizer]); 0: those of a microtask", default=0
    )
    anchor_max_age: int = _key(
        _integer(0, 10_000, 20), "versions after which it says nothing about a version any more", default=20
    )
    anchor_strength: float = _key(
        _number(0, 1, 0.5), "share of a step from which directions without its support are taken out", default=0.5
    )
    anchor_floor: float = _key(
        _number(1e-6, 1e6, 0.1),
        "squared singular value that counts half, as a multiple of its matrix's mean one",
        default=0.1,
    )
    rule: str = _key(_choice(*RULES), "how contributions become one step", default="mean")
    byzantine: int = _key(
        _integer(0, 2048, 5), "contributions of one version that may be wrong: f of the robust rules", default=0
    )
    tau: float = _key(_number(0, 1e9, 10.0, above=True), "radius of centered clipping", default=10.0)
    clip_iterations: int = _key(_integer(1, 100, 1), "iterations of centered clipping", default=1)
    mixing: str = _key(_choice(*MIXINGS), "pre-step: each contribution averaged with those nearest", default="none")


@dataclass(frozen=True, kw_only=True)
class CodecSection:
    """[codec]: how a result is encoded for the way back."""

    kind: str = _key(_choice(*KINDS), "how the numbers are written", default="dense")
    block: int = _key(_integer(16, 65536, 256), "int8, fp4, qsgd: elements that share one scale", default=256)
    share: float = _key(
        _number(1e-6, 1, 0.015625),
        "random-k, top-k, dct-top-k: share of the numbers that travel",
        default=1 / 64,
    )
    values: str = _key(_choice(*VALUE_KINDS), "random-k, top-k, dct-top-k: how these are written", default="dense")
    levels: int = _key(_integer(1, 127, 7), "qsgd: magnitudes besides 0", default=7)
    rank: int = _key(_integer(1, 256, 4), "low-rank: columns of the factors", default=4)
    iterations: int = _key(
        _integer(0, 8, 1), "low-rank: iterations towards the best factors; 0: a fixed projection", default=1
    )
    compression: str = _key(_choice(*COMPRESSIONS), "compression of the encoded file", default="zstd")

    def codec(self) -> Codec:
        """The codec of the job's microtasks. Raises ContractError."""
        return Codec(**{each.name: getattr(self, each.name) for each in dataclasses.fields(self)})


@dataclass(frozen=True, kw_only=True)
class WorkunitSection:
    """[workunit]: BOINC's workunit fields of the same names, and how closely copies must agree."""

    min_quorum: int = _key(
        _integer(1, 10, 2), "copies that must be there; more than half of so many must agree", default=2
    )
    target_nresults: int = _key(_integer(0, 20, 2), "copies issued at first; 0: min_quorum", default=0)
    max_error_results: int = _key(_integer(1, 100, 6), "errors after which the workunit fails", default=6)
    max_total_results: int = _key(
        _integer(1, 200, 12), "copies of all kinds after which the workunit fails", default=12
    )
    max_success_results: int = _key(_integer(1, 20, 6), "successes without agreement after which it fails", default=6)
    delay_bound_s: int = _key(_integer(60, MAX_SECONDS, 86400), "deadline of a copy, seconds", default=86400)
    priority: int = _key(_integer(-1000, 1000, 0), "BOINC's priority of the workunit", default=0)
    program_disk_mb: int = _key(
        _integer(300, 100_000, 500),
        "disk that the volunteers' program may take, MB; a host without it gets no task",
        default=500,
    )
    tolerance: float = _key(
        _number(0, 0.1, 1e-3),
        "relative L2 distance within which copies agree; 0: 1e-4 for gradients, 1e-3 for local steps, more for coarse"
        " codecs",
        default=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class SupplySection:
    """[supply]: when a slow microtask gets help, what stays on disk, and what the lines carry."""

    straggler_after_s: int = _key(
        _integer(1, MAX_SECONDS, 600),
        "a microtask whose copies were all sent so long ago gets a further copy, seconds",
        default=600,
    )
    extra_replicas: int = _key(_integer(0, 10, 1), "further copies of one microtask at most", default=1)
    failing_after: int = _key(
        _integer(0, 1_000_000, 10),
        "tasks of a version that must have ended before their errors can stop the job; 0: they never do",
        default=10,
    )
    failing_share: float = _key(
        _number(0, 1, 0.5, above=True),
        "the share of errors among them that stops the job",
        default=0.5,
    )
    keep_versions: int = _key(
        _integer(0, 1_000_000, 100),
        "newest versions whose weights and gradients stay on the server's disk; 0: all of them",
        default=0,
    )
    keyframe_every: int = _key(
        _integer(1, MAX_DELTAS + 1, 8),
        "versions from one that is published whole to the next; those between are published as int8 deltas",
        default=1,
    )
    host_bandwidth: float = _key(
        _number(0, 1e12, 1e6, above=True),
        "a volunteer's line, bytes/s; for advice on task length",
        default=1e6,
    )
    server_bandwidth: float = _key(
        _number(0, 1e12, 1e7, above=True),
        "the server's line, bytes/s; for advice on task length",
        default=1e7,
    )

    def is_keyframe(self, version: int) -> bool:
        """Whether a version is published whole."""
        return version % self.keyframe_every == 0


@dataclass(frozen=True, kw_only=True)
class TrustSection:
    """[trust]: whose copies confirm one another, when one is enough, and what the server recomputes."""

    adaptive_replication: bool = _key(
        _flag, "one copy is enough from a host with a good record; all others get a second one", default=False
    )
    audit_floor: float = _key(
        _number(0, 1, 0.05, above=True),
        "adaptive_replication: least share of such copies that get a second one all the same",
        default=0.05,
    )
    newcomer_days: float = _key(
        _number(0, 3650, 7), "users and hosts younger than so many days are newcomers", default=0.0
    )
    newcomer_results: int = _key(
        _integer(0, 10_000, 5), "hosts with fewer valid results of this kind of work are newcomers", default=0
    )
    independent_devices: bool = _key(
        _flag, "GPUs of one family and driver are one vote: another kind of device must confirm them", default=False
    )
    spot_check_share: float = _key(
        _number(0, 1, 0.02), "share of workunits that the server computes itself before they are accepted", default=0.0
    )
    replay_disputes: bool = _key(
        _flag, "what volunteers cannot agree on is computed by the server instead of failing", default=False
    )
    replay_backend: str = _key(_choice("numpy", "torch"), "what the server computes with", default="numpy")
    norm_bound: float = _key(
        _number(0, 1e6, 3.0),
        "an update whose norm is over so many times the median of the job's last ones is not accepted; 0: no bound",
        default=0.0,
    )
    loss_probe: float = _key(
        _number(0, 1, 0.9),
        "local steps: the share of the usual gain on held-out data that an update must bring; 0: not tried",
        default=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """The whole of job.toml, every key checked and every default filled in.

    `folder` is where job.toml lies; paths and `module:function` references are relative to it.
    """

    job: JobSection
    model: ModelSection
    data: DataSection
    train: TrainSection
    optimizer: OptimizerSection
    inner_optimizer: InnerOptimizerSection | None
    schedule: ScheduleSection
    aggregation: AggregationSection
    codec: CodecSection
    workunit: WorkunitSection
    supply: SupplySection
    trust: TrustSection
    folder: Path

    def canonical_json(self) -> str:
        """The same settings give the same text: sorted keys, no blanks, without the folder."""
        content = dataclasses.asdict(self)
        del content["folder"]
        return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)

    @staticmethod
    def from_json(text: str, folder: Path) -> JobConfig:
        """The configuration again from `canonical_json()`, checked as job.toml is."""
        content = {
            section: {key: value for key, value in keys.items() if value is not None}
            for section, keys in json.loads(text).items()
            if keys is not None
        }
        return _config(content, _Source(Path("stored job"), ""), folder)

    @property
    def policy(self) -> PolicyFacts:
        """What everybody knows of the policy."""
        return POLICIES[self.train.policy]

    @property
    def mode(self) -> str:
        """Of the job's microtasks: `local-steps` of the inner optimizer, or one `gradient`."""
        return "gradient" if self.inner_optimizer is None else "local-steps"

    @property
    def steps(self) -> int:
        """Batches of one microtask; with speed classes, of one for the fastest."""
        return self.train.batches_per_microtask if self.inner_optimizer is None else self.train.local_steps

    @property
    def class_steps(self) -> tuple[int, ...]:
        """Batches of a microtask by BOINC's size class, the slowest hosts' first; empty without speed classes.

        DyLU (Liu et al. 2024, https://arxiv.org/abs/2401.09135): H_w = floor(v_w / v_max H).
        """
        return tuple(math.floor(speed * self.steps + 1e-9) for speed in reversed(self.train.speed_classes))

    @property
    def ships_state(self) -> bool:
        """Whether the inner optimizer's state is part of versions and updates."""
        return self.inner_optimizer is not None and self.inner_optimizer.state == "shipped"

    def inner_step(self, version: int) -> int | None:
        """Steps that a version's state of the inner optimizer has seen, `local_steps` a version; None: it has none."""
        return version * self.train.local_steps if self.ships_state else None

    @property
    def grace_s(self) -> float | None:
        """Seconds for which a version that could be made waits for more contributions; None: it takes no more."""
        return self.aggregation.grace_s if "grace_s" in self.policy.keys else None

    @property
    def fragments(self) -> int:
        """Fragments that versions take turns in: updates from versions of unlike ones cannot be compared in size."""
        return self.aggregation.parts if self.policy.parts_by == "tensors" else 1

    def first_useful_version(self, current: int) -> int:
        """The oldest version whose results are applied while `current` is the newest."""
        return max(0, current - self.aggregation.max_age) if self.policy.flow else max(0, current)

    def learning_rate(self, version: int) -> float:
        """What makes `version`+1: the scheduled rate of [inner_optimizer] or, without one, of [optimizer]."""
        section = self.inner_optimizer if self.inner_optimizer is not None else self.optimizer
        return section.lr * self.schedule.ratio(version)


# Section name -> class, in the order of the documentation. The same classes name the keys allowed.
SECTIONS: Mapping[str, type[Any]] = {
    "job": JobSection,
    "model": ModelSection,
    "data": DataSection,
    "train": TrainSection,
    "optimizer": OptimizerSection,
    "inner_optimizer": InnerOptimizerSection,
    "schedule": ScheduleSection,
    "aggregation": AggregationSection,
    "codec": CodecSection,
    "workunit": WorkunitSection,
    "supply": SupplySection,
    "trust": TrustSection,
}


@dataclass(frozen=True)
class _Source:
    """The text of job.toml, to name the line of a key in an error."""

    path: Path
    text: str

    def error(self, section: str, key: str | None, problem: str) -> JobError:
        line = find_line(self.text, section, key)
        place = f"{self.path} line {line}" if line else f"{self.path}"
        return JobError(f"{place}: {problem}")


def load_config(path: Path) -> JobConfig:
    """Read and check job.toml (or the folder that holds one) without running any of the admin's code.

    Raises JobError: one sentence with the file, the line of the key and the remedy.
    """
    path = path / "job.toml" if path.is_dir() else path
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise JobError(f"there is no job file {path}; give the path of a job.toml or of its folder") from error
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path} cannot be read as a UTF-8 text ({one_line(error)}); check the file") from error
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _toml_error(path, error) from error
    return _config(content, _Source(path, text), path.parent)


def find_line(text: str, section: str, key: str | None) -> int:
    """Number of the line that sets `key` of `[section]`; of the section's header if the key is not there; else 0."""
    header = 0
    current = ""
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        opened = re.match(r"\[\s*([\w-]+)\s*\]", stripped)
        if opened:
            current = opened[1]
            header = number if current == section and not header else header
            continue
        name = re.match(r'"?([\w-]+)"?\s*(?:\.\s*"?([\w-]+)"?\s*)?=', stripped)
        if name is None:
            continue
        if current == section and key is not None and name[1] == key and name[2] is None:
            return number
        if not current and name[1] == section:  # `section.key = ...` or `section = {...}` at the top
            if key is None or name[2] in (None, key):
                return number
            header = header or number
        if not current and key is None and not section and name[2] is None:
            return number
    return header


def _toml_error(path: Path, error: tomllib.TOMLDecodeError) -> JobError:
    at = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
    what = re.sub(r"\s*\(at .*\)", "", str(error)).rstrip(".")
    place = f"{path} line {at[1]} column {at[2]}" if at else f"{path} at its end"
    return JobError(f"{place} is not valid TOML ({what}); correct that line")


def _config(content: Mapping[str, Any], source: _Source, folder: Path) -> JobConfig:
    for name, value in content.items():
        if name not in SECTIONS:
            raise source.error(name, None, f"unknown section [{name}]; {_did_you_mean(name, SECTIONS)}")
        if not isinstance(value, dict):
            raise source.error(name, None, f'"{name}" must be a section; write [{name}] on a line of its own')
    sections: dict[str, Any] = {}
    for name in ("train", *(each for each in SECTIONS if each != "train")):
        given = content.get(name, {})
        if name == "train":
            sections[name] = _section(name, given, source)
            chosen: str = sections[name].policy
            policy = POLICIES[chosen]
            continue
        if name == "inner_optimizer" and policy.inner is not True and not (policy.inner is None and name in content):
            if given:
                raise source.error(
                    name,
                    None,
                    f'[inner_optimizer] has no meaning for policy = "{chosen}"; remove it or change the policy',
                )
            sections[name] = None
            continue
        if name == "optimizer" and not policy.outer:
            if given and source.text:
                raise source.error(
                    name, None, f'policy = "{chosen}" takes no step of [optimizer]; remove it or change the policy'
                )
            given = {"lr": 1.0}  # of no meaning; the section is there for all policies
        if name == "optimizer" and given.get("kind", "sgd") == "sgd":
            given = {**policy.outer_defaults, **given}
        if name == "aggregation":
            foreign = next((key for key in given if key in _keys_of(name) and key not in policy.keys), None)
            if foreign is not None and source.text:
                fitting = ", ".join(each for each, facts in POLICIES.items() if foreign in facts.keys)
                raise source.error(
                    name,
                    foreign,
                    f'{foreign} in [aggregation] has no meaning for policy = "{chosen}" (it has for {fitting});'
                    " remove it or change the policy",
                )
            given = {**policy.defaults, **given}
        sections[name] = _section(name, given, source)
    return _resolved(JobConfig(folder=folder, **sections), content, source)


def _keys_of(name: str) -> Mapping[str, dataclasses.Field[Any]]:
    return {each.name: each for each in dataclasses.fields(SECTIONS[name])}


def _section(name: str, given: Mapping[str, Any], source: _Source) -> Any:
    keys = _keys_of(name)
    values: dict[str, object] = {}
    for key, value in given.items():
        if key not in keys:
            raise source.error(name, key, f"unknown key {key} in [{name}]; {_did_you_mean(key, keys)}")
        try:
            values[key] = keys[key].metadata["check"](value)
        except _Wrong as wrong:
            expected, example = str(wrong).split("|")
            shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
            raise source.error(
                name, key, f"{key} in [{name}] {expected}, not {shown}; write for example {key} = {example}"
            ) from None
    for key, each in keys.items():
        if key not in values and each.default is dataclasses.MISSING:
            try:
                each.metadata["check"](None)
                example = "..."
            except _Wrong as wrong:
                example = str(wrong).split("|")[1]
            raise source.error(
                name,
                None,
                f"[{name}] lacks {key} ({each.metadata['doc']}); add for example {key} = {example}",
            )
    return SECTIONS[name](**values)


def _did_you_mean(name: str, allowed: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]}?" if close else f"remove it or use one of {', '.join(allowed)}"


def _resolved(config: JobConfig, content: Mapping[str, Any], source: _Source) -> JobConfig:
    """Defaults that depend on other keys filled in, and keys checked against one another and the folder."""
    train, workunit = config.train, config.workunit
    local = config.inner_optimizer is not None
    for key, fits, where in (("local_steps", local, "with"), ("batches_per_microtask", not local, "without")):
        if key in content["train"] and getattr(train, key) != 1 and not fits:
            raise source.error(
                "train", key, f"{key} has a meaning only {where} an [inner_optimizer]; remove it or change the policy"
            )
    _check_speed_classes(config, source)
    if config.trust.loss_probe and not local:
        raise source.error(
            "trust", "loss_probe", "loss_probe judges local steps; remove it, or add an [inner_optimizer]"
        )
    aggregation = _resolved_aggregation(config, source)
    if (train.target_metric is None) != (train.target_value is None):
        lacking = "target_value" if train.target_value is None else "target_metric"
        present = "target_metric" if train.target_value is None else "target_value"
        raise source.error(
            "train",
            present,
            f"{present} in [train] needs {lacking} beside it; add {lacking} or remove {present}",
        )
    if train.target_metric not in (None, "loss") and config.model.metrics is None:
        raise source.error(
            "train",
            "target_metric",
            f'target_metric "{train.target_metric}" needs metrics in [model]; add metrics or use "loss"',
        )
    if train.target_metric is not None and not train.evaluate_every:
        raise source.error(
            "train",
            "evaluate_every",
            "target_metric needs held-out evaluation; set evaluate_every to 1 or more",
        )
    for name, optimizer in (("optimizer", config.optimizer), ("inner_optimizer", config.inner_optimizer)):
        if optimizer is not None and optimizer.nesterov and not (optimizer.kind == "sgd" and optimizer.momentum > 0):
            raise source.error(
                name,
                "nesterov",
                f'nesterov in [{name}] needs kind = "sgd" and a momentum above 0; set both or remove nesterov',
            )
    if config.ships_state:
        _check_shipped(config, source)
    codec = _codec(config.codec, content, source)
    workunit = dataclasses.replace(
        workunit,
        target_nresults=workunit.target_nresults or workunit.min_quorum,
        tolerance=workunit.tolerance or _tolerance(local, codec),
    )
    if workunit.target_nresults < workunit.min_quorum:
        raise source.error(
            "workunit",
            "target_nresults",
            "target_nresults in [workunit] is below min_quorum; make it at least as large",
        )
    for key in ("max_total_results", "max_success_results"):
        if getattr(workunit, key) < workunit.target_nresults:
            raise source.error(
                "workunit", key, f"{key} in [workunit] is below target_nresults; make it at least as large"
            )
    if config.trust.adaptive_replication and workunit.min_quorum > 2:
        raise source.error(
            "trust",
            "adaptive_replication",
            "adaptive_replication in [trust] begins with one copy and then wants two that agree, so that min_quorum ="
            f" {workunit.min_quorum} in [workunit] would not hold; set min_quorum = 2, or leave it off",
        )
    if config.trust.adaptive_replication and min(workunit.max_success_results, workunit.max_total_results - 1) < 2:
        raise source.error(
            "trust",
            "adaptive_replication",
            "adaptive_replication in [trust] needs room for second copies; in [workunit] set max_success_results to"
            " 2 or more and max_total_results to 3 or more",
        )
    for key in ("max_success_results", "max_error_results"):
        if getattr(workunit, key) > workunit.max_total_results:
            raise source.error(
                "workunit",
                "max_total_results",
                f"max_total_results in [workunit] is below {key} ({getattr(workunit, key)}); raise it or lower that",
            )
    for section, key in (("model", "factory"), ("model", "loss"), ("model", "metrics"), ("data", "source")):
        reference = getattr(getattr(config, section), key)
        if reference is not None and source.text and not reference_file(config.folder, reference).is_file():
            file = reference_file(config.folder, reference)
            raise source.error(
                section,
                key,
                f'{key} = "{reference}" needs the file {file}, which does not exist; create it or correct the name',
            )
    if config.model.pretrained is not None and source.text and not (config.folder / config.model.pretrained).is_file():
        raise source.error(
            "model",
            "pretrained",
            f"the file {config.folder / config.model.pretrained} does not exist; correct the path or remove pretrained",
        )
    schedule = dataclasses.replace(config.schedule, total_versions=config.schedule.total_versions or train.max_versions)
    if source.text and schedule.ratio(train.max_versions - 1) == 0:
        raise source.error(
            "schedule",
            "total_versions" if "total_versions" in content.get("schedule", {}) else "warmup_versions",
            f"the learning rate is 0 in the last of max_versions = {train.max_versions}, where volunteers would compute"
            " for nothing; in [schedule] raise total_versions, lower warmup_versions, or set a min_ratio above 0",
        )
    return dataclasses.replace(
        config,
        workunit=workunit,
        aggregation=aggregation,
        schedule=schedule,
        data=dataclasses.replace(
            config.data, evaluation_batch_size=config.data.evaluation_batch_size or config.data.batch_size
        ),
    )


def _check_speed_classes(config: JobConfig, source: _Source) -> None:
    """Every class has steps of its own, and nothing compares updates of unlike numbers of steps."""
    steps, local, section = config.class_steps, config.inner_optimizer is not None, config.aggregation
    if not steps:
        return
    key = "local_steps" if local else "batches_per_microtask"
    if steps[0] < 1 or len(set(steps)) < len(steps):
        shown = ", ".join(
            f"{each:g} -> {count}" for each, count in zip(config.train.speed_classes, steps[::-1], strict=True)
        )
        raise source.error(
            "train",
            "speed_classes",
            f"speed_classes in [train] must leave each class a number of steps of its own, at least 1 ({shown} of"
            f" {key} = {config.steps}); raise {key} or write fewer classes",
        )
    if config.ships_state:
        raise source.error(
            "inner_optimizer",
            "state",
            'state = "shipped" in [inner_optimizer] counts local_steps for every version, and with speed_classes slower'
            " hosts take fewer; remove state, or speed_classes from [train]",
        )
    if local and (section.rule != "mean" or section.mixing != "none"):
        key = "mixing" if section.mixing != "none" else "rule"
        raise source.error(
            "aggregation",
            key,
            f'{key} = "{getattr(section, key)}" in [aggregation] takes slower hosts\' shorter updates for wrong ones;'
            f" remove {key}, or speed_classes from [train]",
        )


def _check_shipped(config: JobConfig, source: _Source) -> None:
    """That the inner optimizer has a state, that all of it can be sent, and that no copy alone can freeze it."""
    inner = config.inner_optimizer
    assert inner is not None
    if inner.kind == "sgd" and not inner.momentum:
        raise source.error(
            "inner_optimizer",
            "state",
            'state = "shipped" in [inner_optimizer] needs an optimizer that has a state; set kind = "adamw" or a'
            " momentum, or remove state",
        )
    if config.policy.parts_by:
        raise source.error(
            "inner_optimizer",
            "state",
            f'state = "shipped" in [inner_optimizer] does not go with policy = "{config.train.policy}", whose results'
            " hold a part of the model; remove state or change the policy",
        )
    if inner.kind == "adamw" and config.trust.adaptive_replication and not inner.max_norm:
        raise source.error(
            "inner_optimizer",
            "state",
            'state = "shipped" in [inner_optimizer] with adaptive_replication in [trust] needs max_norm: without it one'
            " lie about second moments, accepted without a second copy, would stop the model from moving; set max_norm"
            " = 1.0",
        )


def _resolved_aggregation(config: JobConfig, source: _Source) -> AggregationSection:
    """[aggregation] with the defaults that depend on other keys, checked against those."""
    section, count, kept = config.aggregation, config.train.microtasks_per_version, config.supply.keep_versions
    if config.policy.flow and 0 < kept <= section.max_age:
        raise source.error(
            "supply",
            "keep_versions",
            f"keep_versions in [supply] must be above max_age ({section.max_age}), so that late results find their"
            f" version; write for example keep_versions = {2 * section.max_age + 10}",
        )
    if config.train.policy == "delayed-nesterov" and not config.optimizer.nesterov:
        raise source.error(
            "optimizer",
            "nesterov",
            'policy = "delayed-nesterov" needs kind = "sgd", nesterov = true and a momentum in [optimizer]',
        )
    if config.train.policy == "anchored" and section.anchor_max_age < section.anchor_every:
        raise source.error(
            "aggregation",
            "anchor_max_age",
            f"anchor_max_age in [aggregation] must be at least anchor_every ({section.anchor_every}), or most versions"
            f" are made without an anchor; write for example anchor_max_age = {4 * section.anchor_every}",
        )
    if section.momentum_every % count:
        raise source.error(
            "aggregation",
            "momentum_every",
            f"momentum_every in [aggregation] must be a multiple of microtasks_per_version ({count});"
            f" write for example momentum_every = {4 * count}",
        )
    if config.policy.parts_by == "elements" and count % section.parts:
        raise source.error(
            "aggregation",
            "parts",
            f"microtasks_per_version ({count}) must be a multiple of parts ({section.parts}), so that each part is sent"
            " equally often; change one of them",
        )
    if section.rule in ("trimmed_mean", "krum", "multi_krum") and not section.byzantine:
        raise source.error(
            "aggregation", "rule", f'rule = "{section.rule}" needs byzantine, the number of contributions of a version'
            " that may be wrong; write for example byzantine = 1",
        )  # fmt: skip
    least = 2 * section.byzantine + (3 if "krum" in section.rule else 1)
    if count < least:
        raise source.error(
            "aggregation",
            "byzantine",
            f"byzantine = {section.byzantine} needs microtasks_per_version of at least {least}; raise that or lower it",
        )
    return dataclasses.replace(
        section,
        in_flight=(section.in_flight or 2 * count) if config.policy.flow else 0,
        momentum_every=section.momentum_every or (count if "momentum_every" in config.policy.keys else 0),
    )


def _codec(section: CodecSection, content: Mapping[str, Any], source: _Source) -> Codec:
    """The codec of a section all of whose given keys belong to its kind."""
    for key in content.get("codec", {}):
        default = next(each.default for each in dataclasses.fields(section) if each.name == key)
        known = ("kind", "compression", *PARAMETERS[section.kind])
        if key not in known and getattr(section, key) != default:
            kinds = " and ".join(kind for kind in KINDS if key in PARAMETERS[kind] and kind != "dense")
            raise source.error("codec", key, f"{key} in [codec] belongs to {kinds}; remove it or change the kind")
    try:
        return section.codec()
    except ContractError as error:
        raise source.error("codec", "block", f"{error}; write for example block = 256") from error


def _tolerance(local: bool, codec: Codec) -> float:
    """What copies may differ by once decoded: rounding makes more of a small difference, as much as the codec says."""
    least = LOCAL_STEPS_TOLERANCE if local else GRADIENT_TOLERANCE
    honest = LOCAL_STEPS_DISTANCE if local else GRADIENT_DISTANCE
    return max(least, float(f"{CODEC_MARGIN * codec.method.spread(honest):.2g}"))
