"""calibration.json: what was measured for a job, what it holds for, and what `job create` makes of it.

The file lies beside job.toml. It holds for one gradient graph, one inner optimizer and rate, and one codec: `bound_to`
is the SHA-256 of these. Whoever changes them is told that the calibration is stale.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boinc_project.calibration.spread import LIMIT, Band, Noise
from boinc_project.contract import canonical, whole_file
from boinc_project.contract.canonical import Taker
from boinc_project.contract.errors import ContractError
from boinc_project.contract.graph import Graph
from boinc_project.job_config import JobConfig, JobError

FILE = "calibration.json"
FORMAT, VERSION = "boinc-train-calibration", 1

#: Local steps that are allowed without a calibration, if AdamW's eps is SMALL_EPS or more. On a GPT of a million
#: parameters honest copies stayed within LIMIT for 80, 210 and 480 steps from three seeds (docs/calibrate.md). With a
#: smaller eps the noise of tensors whose true gradient is zero (the key bias of attention) becomes steps of full size,
#: from the first step on.
DEFAULT_STEPS = 50
SMALL_EPS = 1e-6


@dataclass(frozen=True)
class LocalSteps:
    """The search for the largest number of local steps at which honest copies stay within the limit.

    largest    that number; 0: they are farther apart after the first step; `searched_to`: no limit was found
    float32    the same for updates that no codec has rounded
    replicas   the copies that were followed: the farthest of all at the job's own number of steps
    """

    largest: int
    float32: int
    searched_to: int
    replicas: tuple[str, ...]


@dataclass(frozen=True)
class Calibration:
    """What `boinc-train calibrate` found. `delta` and `local_steps` are None for jobs without local steps."""

    job: str
    bound_to: str
    made: str
    software: Mapping[str, str]
    replicas: tuple[str, ...]
    absent: Mapping[str, str]
    versions: tuple[str, ...]
    gradient: Band
    delta: Band | None
    noise: tuple[Noise, ...]
    local_steps: LocalSteps | None

    @property
    def judged(self) -> Band:
        """The band of what the validator will compare."""
        return self.delta or self.gradient

    def to_json(self) -> str:
        """Readable JSON; the proposed tolerance and its margins stand there too."""

        def of_band(band: Band) -> dict[str, Any]:
            told = {"nearest": band.nearest, "margin": band.margin, "tolerance": band.tolerance}
            return {**asdict(band), **told, "separable": band.separable}

        document = {
            **asdict(self),
            "format": FORMAT,
            "version": VERSION,
            "limit": LIMIT,
            "tolerance": self.judged.tolerance,
            "gradient": of_band(self.gradient),
            "delta": None if self.delta is None else of_band(self.delta),
        }
        return json.dumps(document, indent=2, sort_keys=True, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: bytes, place: str) -> Calibration:
        """Raises ContractError."""
        take = Taker(canonical.loads(text, place, ContractError), place, ContractError)
        if take.text("format") != FORMAT or take.integer("version") != VERSION:
            raise ContractError(f"{place} is not of format version {VERSION}", fault="format")
        return Calibration(
            job=take.text("job"),
            bound_to=take.text("bound_to", 64),
            made=take.text("made"),
            software=_texts(take, "software"),
            replicas=_list(take, "replicas"),
            absent=_texts(take, "absent"),
            versions=_list(take, "versions"),
            gradient=_band(take.object("gradient")),
            delta=None if take.value("delta") is None else _band(take.object("delta")),
            noise=tuple(
                Noise(
                    n.text("tensor", 512), n.integer("first"), n.integer("last"), n.integer("rows"), n.number("ratio")
                )
                for n in take.items("noise", 100_000)
            ),
            local_steps=None if take.value("local_steps") is None else _steps(take.object("local_steps")),
        )


def _texts(take: Taker, name: str) -> dict[str, str]:
    return {str(key): str(value) for key, value in take.mapping(name).items()}


def _list(take: Taker, name: str) -> tuple[str, ...]:
    return tuple(str(value) for value in take.value(name))


def _numbers(take: Taker, name: str) -> dict[str, float]:
    inner = take.object(name)
    return {str(key): inner.number(str(key)) for key in take.mapping(name)}


def _band(take: Taker) -> Band:
    return Band(
        steps=take.integer("steps", 1),
        pairs=take.integer("pairs", 1),
        p50=take.number("p50"),
        p99=take.number("p99"),
        largest=take.number("largest"),
        worst=take.text("worst", 512),
        families=_numbers(take, "families"),
        apart=_numbers(take, "apart"),
    )


def _steps(take: Taker) -> LocalSteps:
    return LocalSteps(
        take.integer("largest", 0), take.integer("float32", 0), take.integer("searched_to", 1), _list(take, "replicas")
    )


def binding(config: JobConfig, gradient: Graph, optimizer: Graph | None) -> str:
    """SHA-256 (64 hex digits) of everything that decides how far copies part, but for the number of local steps."""
    section = config.inner_optimizer or config.optimizer
    content = {
        "gradient": hashlib.sha256(gradient.to_bytes()).hexdigest(),
        "optimizer": None if optimizer is None else hashlib.sha256(optimizer.to_bytes()).hexdigest(),
        "rate": section.lr,
        "batches": config.train.batches_per_microtask,
        # What the file is compressed with changes no number.
        "codec": {key: value for key, value in asdict(config.codec).items() if key != "compression"},
        "pretrained": config.model.pretrained,
    }
    return hashlib.sha256(canonical.dumps(content)).hexdigest()


def write(calibration: Calibration, path: Path) -> None:
    """Write the file, whole or not at all."""
    whole_file.write_bytes(path, calibration.to_json().encode())


def find(folder: Path) -> Calibration | None:
    """The calibration in the folder of a job.toml. Raises JobError for a file that cannot be used."""
    path = folder / FILE
    try:
        return Calibration.from_json(path.read_bytes(), FILE)
    except FileNotFoundError:
        return None
    except (OSError, ContractError, TypeError, ValueError) as error:
        raise JobError(f"{path} cannot be used ({error}); run boinc-train calibrate again, or remove it") from error


def check(config: JobConfig, bound_to: str, found: Calibration | None) -> list[str]:
    """Refuse a job whose honest copies would part too far to be judged by agreement; otherwise notes for the admin.

    `bound_to` is `binding` of the job as it is now. Raises JobError with the remedy.
    """
    fresh = found if found is not None and found.bound_to == bound_to else None
    notes = []
    if found is not None and fresh is None:
        notes.append(
            f"{FILE} was measured for another graph, optimizer, rate or codec, so it does not count;"
            " run boinc-train calibrate again"
        )
    if config.inner_optimizer is not None:
        _check_local_steps(config, fresh, stale=bool(notes))
    if fresh is not None:
        notes += _tolerance_notes(config, fresh)
    elif config.inner_optimizer is not None and not notes and not _has_other_evidence(config):
        notes.append(
            f"tolerance {config.workunit.tolerance:g} is a guess: after few local steps results of reduced precision"
            " (TF32, float16) lie within it; run boinc-train calibrate, which proposes one for this job"
        )
    return notes


def steps_allowed(config: JobConfig, fresh: Calibration | None) -> int:
    """The most local steps for which agreement alone is evidence enough."""
    if fresh is not None and fresh.local_steps is not None:
        return fresh.local_steps.largest
    return 0 if _small_eps(config) else DEFAULT_STEPS


def _has_other_evidence(config: JobConfig) -> bool:
    return bool(config.trust.norm_bound and config.trust.loss_probe)


def _small_eps(config: JobConfig) -> bool:
    inner = config.inner_optimizer
    return inner is not None and inner.kind == "adamw" and inner.eps < SMALL_EPS


def _check_local_steps(config: JobConfig, fresh: Calibration | None, stale: bool) -> None:
    steps, allowed = config.train.local_steps, steps_allowed(config, fresh)
    if steps <= allowed or _has_other_evidence(config):
        return
    if fresh is not None:
        why = f"honest copies of this job stay within {LIMIT:g} up to {allowed} local steps ({FILE})"
    elif _small_eps(config):
        why = (
            f"with AdamW and an eps below {SMALL_EPS:g} copies of models with attention part at the first step;"
            f" set eps = {SMALL_EPS:g} in [inner_optimizer], or run boinc-train calibrate to measure this one"
        )
    elif stale:
        why = f"{FILE} is stale, and without one {allowed} are allowed; run boinc-train calibrate again"
    else:
        why = f"without a calibration {allowed} are allowed; run boinc-train calibrate to measure how many may be"
    raise JobError(
        f"local_steps in [train] is {steps}, too many to be judged by agreement alone: {why}. Lower local_steps, or"
        " set norm_bound = 3.0 and loss_probe = 0.9 in [trust]"
    )


def _tolerance_notes(config: JobConfig, fresh: Calibration) -> list[str]:
    band, tolerance = fresh.judged, config.workunit.tolerance
    steps = config.train.local_steps if fresh.delta is not None else band.steps
    if steps != band.steps:
        return [f"{FILE} was measured at {band.steps} local steps, not {steps}, so it says nothing of the tolerance"]
    if tolerance < band.largest:
        return [
            f"tolerance {tolerance:g} is below what honest copies need ({band.largest:.2g} was measured);"
            f" write tolerance = {band.tolerance:g} into [workunit]"
        ]
    if tolerance >= band.apart[band.nearest]:
        return [
            f"tolerance {tolerance:g} lets {band.nearest} pass (it is {band.apart[band.nearest]:.2g} away);"
            f" write tolerance = {band.tolerance:g} into [workunit]"
        ]
    return []
