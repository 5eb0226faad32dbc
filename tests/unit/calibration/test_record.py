"""calibration.json: read as written, bound to what it was measured for, and heeded by `job create`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from boinc_project.calibration import record
from boinc_project.calibration.record import Calibration, LocalSteps
from boinc_project.calibration.spread import Band, Noise
from boinc_project.contract.errors import ContractError
from boinc_project.job_config import JobConfig, JobError, TrustSection
from tests.tiny_project import exported

BAND = Band(5, 21, 1e-7, 2e-7, 3e-7, "delta/0.weight", {"delta": 3e-7, "metric": 1e-8}, {"tf32": 4e-4, "half": 0.7})


def made(largest: int = 40, bound_to: str = "a" * 64, **fields: Any) -> Calibration:
    given: dict[str, Any] = {
        "job": "tiny-diloco", "bound_to": bound_to, "made": "2026-01-01T00:00:00Z", "software": {"numpy": "2"},
        "replicas": ("numpy", "torch, 1 thread"), "absent": {"opencl": "no driver"}, "versions": ("version 0",),
        "gradient": dataclasses.replace(BAND, steps=1), "delta": BAND, "noise": (Noise("k.bias", 0, 4, 4, 1.4),),
        "local_steps": LocalSteps(largest, largest, 500, ("numpy", "opencl")),
    }  # fmt: skip
    return Calibration(**{**given, **fields})


def config(steps: int = 5, **inner: Any) -> JobConfig:
    job, _ = exported("diloco.toml")
    assert job.config.inner_optimizer is not None
    return dataclasses.replace(
        job.config,
        train=dataclasses.replace(job.config.train, local_steps=steps),
        inner_optimizer=dataclasses.replace(job.config.inner_optimizer, **inner),
    )


def binding(of: JobConfig) -> str:
    _, graphs = exported("diloco.toml")
    return record.binding(of, graphs.gradient, graphs.optimizer)


@pytest.mark.parametrize("what", [made(), made(delta=None, local_steps=None)])
def test_a_calibration_is_read_as_it_was_written(tmp_path: Path, what: Calibration) -> None:
    record.write(what, tmp_path / record.FILE)
    assert record.find(tmp_path) == what


def test_a_folder_without_a_calibration_has_none(tmp_path: Path) -> None:
    assert record.find(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "boinc-train-calibration", "version": 2}', "\x00"])
def test_a_file_that_is_no_calibration_is_refused_with_the_remedy(tmp_path: Path, text: str) -> None:
    (tmp_path / record.FILE).write_text(text)
    with pytest.raises(JobError, match="run boinc-train calibrate again, or remove it"):
        record.find(tmp_path)


def test_a_cut_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ContractError):
        Calibration.from_json(made().to_json().encode()[:-20], "calibration.json")


def test_it_is_bound_to_what_decides_how_far_copies_part_and_not_to_the_number_of_steps() -> None:
    base = config()
    assert binding(config(7)) == binding(base)
    assert binding(dataclasses.replace(base, codec=dataclasses.replace(base.codec, kind="int8"))) != binding(base)
    assert binding(config(lr=0.1)) != binding(base)


@pytest.mark.parametrize(
    ("steps", "inner", "calibration", "remedy"),
    [
        (51, {}, None, "run boinc-train calibrate to measure"),
        (2, {"eps": 1e-8}, None, "set eps = 1e-06 in .inner_optimizer., or run boinc-train calibrate"),
        (41, {}, "fresh", "up to 40 local steps"),
        (51, {}, "stale", "calibration.json is stale"),
    ],
)
def test_more_local_steps_than_agreement_can_judge_are_refused(
    steps: int, inner: dict[str, Any], calibration: str | None, remedy: str
) -> None:
    job = config(steps, **inner)
    found = {"fresh": made(bound_to=binding(job)), "stale": made(), None: None}[calibration]
    with pytest.raises(JobError, match=remedy) as refusal:
        record.check(job, binding(job), found)
    assert "Lower local_steps" in str(refusal.value)


@pytest.mark.parametrize(
    ("steps", "inner", "largest"),
    [(50, {}, None), (2, {"eps": 1e-8}, 2), (50, {"kind": "sgd", "eps": 1e-8}, None), (300, {}, 300)],
)
def test_as_many_as_agreement_can_judge_are_allowed(steps: int, inner: dict[str, Any], largest: int | None) -> None:
    job = config(steps, **inner)
    found = (
        None
        if largest is None
        else made(largest, bound_to=binding(job), delta=dataclasses.replace(BAND, steps=steps, apart={"half": 0.7}))
    )
    notes = record.check(job, binding(job), found)
    assert len(notes) == (found is None) and all("tolerance 0.001 is a guess" in note for note in notes)


def test_a_stale_calibration_is_told() -> None:
    (note,) = record.check(config(), binding(config()), made())
    assert "run boinc-train calibrate again" in note


@pytest.mark.parametrize(
    ("tolerance", "expected"),
    [(1e-7, "below what honest copies need"), (5e-4, "lets tf32 pass"), (1e-5, None)],
)
def test_a_tolerance_that_the_measurement_speaks_against_is_told(tolerance: float, expected: str | None) -> None:
    job = config()
    job = dataclasses.replace(job, workunit=dataclasses.replace(job.workunit, tolerance=tolerance))
    notes = record.check(job, binding(job), made(bound_to=binding(job)))
    assert [True] * len(notes) == [expected is not None and expected in note for note in notes]
    assert len(notes) == (expected is not None)


def test_a_tolerance_measured_at_another_number_of_steps_says_nothing() -> None:
    (note,) = record.check(config(6), binding(config()), made(bound_to=binding(config())))
    assert "measured at 5 local steps, not 6" in note


def test_sync_jobs_have_no_limit_of_steps() -> None:
    job, graphs = exported()
    assert record.check(job.config, record.binding(job.config, graphs.gradient, graphs.optimizer), None) == []


def test_norm_bound_and_loss_probe_together_allow_any_number_of_steps() -> None:
    job = config(400)
    for norm, probe in ((3.0, 0.0), (0.0, 0.9)):
        one = dataclasses.replace(job, trust=TrustSection(norm_bound=norm, loss_probe=probe))
        with pytest.raises(JobError, match=r"norm_bound = 3\.0 and loss_probe = 0\.9"):
            record.check(one, binding(one), None)
    both = dataclasses.replace(job, trust=TrustSection(norm_bound=3.0, loss_probe=0.9))
    assert record.check(both, binding(both), None) == []
