"""The admin's job.toml, checked key by key, as one frozen record that every daemon reads.

What it is: the only reader of job.toml; it needs no torch and runs none of the admin's code. What it is
not: the model, loss and data that it names (work_generator/job.py loads those).
Every key, its bounds and its default stand once, in the section classes below; docs/job.md is the
same table in words. Everything wrong is a JobError: file, line, what is wrong, what to write.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POLICIES = ("sync", "diloco")
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "cosine", "linear")
CODECS = ("dense", "int8")
COMPRESSIONS = ("zstd", "none")

REFERENCE = re.compile(r"(?P<module>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*):(?P<function>[A-Za-z_]\w*)")

# BOINC puts names into file names and URLs; these words have a meaning in its server's paths or templates.
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
NAME_WORDS_REFUSED = ("download", "upload", "nodelete")
METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")

MAX_COUNT = 1_000_000
MAX_SECONDS = 90 * 86400  # BOINC's delay_bound; longer deadlines outlive most volunteers' interest

# Relative L2 distance within which two copies agree. One gradient of honest hosts differs by under
# 1e-6 and TF32 by 4e-4; 200 local AdamW steps differ by 6e-4; looser than 1e-3 leaves room for lies.
SYNC_TOLERANCE = 1e-4
DILOCO_TOLERANCE = 1e-3

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
        _integer(1, 4096, 1), "sync: batches whose gradient one microtask sums", default=1
    )
    local_steps: int = _key(_integer(1, 500, 50), "diloco: steps of the inner optimizer in one microtask", default=1)
    max_versions: int = _key(_integer(1, MAX_COUNT, 100), "stop after this version")
    target_metric: str | None = _key(_metric_name, "stop once this held-out metric reaches target_value", default=None)
    target_value: float | None = _key(
        _number(-1e30, 1e30, 0.95), "the value to reach (loss: or below; others: or above)", default=None
    )
    max_hours: float | None = _key(_number(0, 24 * 3650, 48, above=True), "stop after so many hours", default=None)
    evaluate_every: int = _key(_integer(0, MAX_COUNT, 5), "versions between held-out evaluations; 0: never", default=1)


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """[optimizer]: applied on the server to each version (sync: the optimizer; diloco: the outer one)."""

    kind: str = _key(_choice(*OPTIMIZERS), "sgd or adamw, as torch.optim has them", default="sgd")
    lr: float = _key(_number(0, 100, 0.001, above=True), "learning rate")
    momentum: float = _key(_number(0, 1, 0.9), "sgd: momentum", default=0.0)
    nesterov: bool = _key(_flag, "sgd: Nesterov's form of the momentum", default=False)
    betas: tuple[float, float] = _key(_betas, "adamw: decay of the two running means", default=(0.9, 0.999))
    eps: float = _key(_number(0, 1, 1e-8, above=True), "adamw: added to the denominator", default=1e-8)
    weight_decay: float = _key(_number(0, 10, 0.01), "adamw: decoupled decay; sgd: added to the gradient", default=0.0)


@dataclass(frozen=True, kw_only=True)
class InnerOptimizerSection(OptimizerSection):
    """[inner_optimizer]: diloco's optimizer of the local steps, run by volunteers; its state starts at zero."""

    kind: str = _key(_choice(*OPTIMIZERS), "sgd or adamw, as torch.optim has them", default="adamw")
    eps: float = _key(
        _number(0, 1, 1e-6, above=True),
        "adamw: added to the denominator; 1e-6 keeps honest replicas close",
        default=1e-6,
    )
    max_norm: float = _key(
        _number(0, 1e6, 1.0), "clip the gradient to this norm before each step; 0: no clipping", default=0.0
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """[schedule]: factor on the learning rate by version (sync: [optimizer] lr; diloco: [inner_optimizer] lr)."""

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
class CodecSection:
    """[codec]: how a result is encoded for the way back."""

    kind: str = _key(_choice(*CODECS), "dense (float32) or int8 (blockwise)", default="dense")
    block: int = _key(_integer(16, 65536, 256), "int8: elements that share one scale", default=256)
    compression: str = _key(_choice(*COMPRESSIONS), "compression of the encoded file", default="zstd")


@dataclass(frozen=True, kw_only=True)
class WorkunitSection:
    """[workunit]: BOINC's workunit fields of the same names, and how closely copies must agree."""

    min_quorum: int = _key(_integer(1, 10, 2), "copies that must agree", default=2)
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
        "relative L2 distance within which copies agree; 0: 1e-4 for sync, 1e-3 for diloco",
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

    def learning_rate(self, version: int) -> float:
        """What makes `version`+1: the scheduled rate of [optimizer] (sync) or [inner_optimizer] (diloco)."""
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
    "codec": CodecSection,
    "workunit": WorkunitSection,
    "supply": SupplySection,
    "trust": TrustSection,
}
# DiLoCo's outer optimizer (Douillard et al. 2023, table 5): Nesterov, learning rate 0.7, momentum 0.9.
DILOCO_OUTER: Mapping[str, object] = {"kind": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}


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
    policy = content.get("train", {}).get("policy")
    sections: dict[str, Any] = {}
    for name in SECTIONS:
        given = content.get(name, {})
        if name == "inner_optimizer" and policy != "diloco":
            if given:
                raise source.error(
                    name,
                    None,
                    '[inner_optimizer] belongs to policy = "diloco"; remove it or change the policy',
                )
            sections[name] = None
            continue
        if name == "optimizer" and policy == "diloco" and given.get("kind", "sgd") == "sgd":
            given = {**DILOCO_OUTER, **given}
        sections[name] = _section(name, given, source)
    return _resolved(JobConfig(folder=folder, **sections), content, source)


def _section(name: str, given: Mapping[str, Any], source: _Source) -> Any:
    keys = {f.name: f for f in dataclasses.fields(SECTIONS[name])}
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
    diloco = train.policy == "diloco"
    for key, belongs in (("local_steps", "diloco"), ("batches_per_microtask", "sync")):
        if key in content["train"] and getattr(train, key) != 1 and train.policy != belongs:
            raise source.error("train", key, f'{key} belongs to policy = "{belongs}"; remove it or change the policy')
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
    workunit = dataclasses.replace(
        workunit,
        target_nresults=workunit.target_nresults or workunit.min_quorum,
        tolerance=workunit.tolerance or (DILOCO_TOLERANCE if diloco else SYNC_TOLERANCE),
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
    return dataclasses.replace(
        config,
        workunit=workunit,
        schedule=dataclasses.replace(
            config.schedule, total_versions=config.schedule.total_versions or train.max_versions
        ),
        data=dataclasses.replace(
            config.data, evaluation_batch_size=config.data.evaluation_batch_size or config.data.batch_size
        ),
    )
