"""`boinc-train calibrate` on the tiny jobs, and the replicas that it computes with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result

from apps.gradient.executor import apply
from boinc_project.calibration import record
from boinc_project.calibration.measure import HALF, farthest
from boinc_project.calibration.replicas import half_precision, replicas, short_mantissa, threads_kept
from boinc_project.calibration.workbench import Workbench
from boinc_project.cli.main import main
from tests.tiny_project import TINY_JOB, exported, tiny_project


def calibrate(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["calibrate", *(str(each) for each in arguments)])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY_JOB, tmp_path / "job"))


# --- precision --------------------------------------------------------------------------------------------------------


def test_a_short_mantissa_keeps_so_many_bits_and_rounds_halves_to_even() -> None:
    x = torch.tensor([1.0, 1 + 2**-10, 1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-11 + 2**-20, -3.0e38, 0.0, -0.0])
    wanted = [1.0, 1 + 2**-10, 1.0, 1 + 2**-9, 1 + 2**-10, -3.0e38, 0.0, -0.0]
    assert short_mantissa(x, 10).tolist() == pytest.approx(wanted, rel=2**-11)
    assert short_mantissa(x, 10)[:5].tolist() == wanted[:5]
    special = torch.tensor([float("inf"), float("-inf"), float("nan")])
    assert torch.equal(short_mantissa(special, 10).nan_to_num(7.0), special.nan_to_num(7.0))


def test_seven_bits_are_bfloat16() -> None:
    x = torch.from_numpy(np.random.default_rng(1).standard_normal(1000).astype(np.float32))
    assert torch.equal(short_mantissa(x, 7), x.to(torch.bfloat16).to(torch.float32))


def test_half_precision_saturates() -> None:
    assert half_precision(torch.tensor([1e6, -1e6, 1.0])).tolist() == [65504.0, -65504.0, 1.0]


def test_every_replica_multiplies_matrices_as_closely_as_it_should() -> None:
    draws = np.random.default_rng(2)
    a, b = (draws.standard_normal(shape).astype(np.float32) for shape in ((20, 300), (300, 10)))
    exact = a.astype(np.float64) @ b
    bounds = {"tf32": (1e-5, 1e-3), "float16": (1e-5, 1e-3), "bfloat16": (5e-4, 1e-2)}
    with threads_kept():
        ways = replicas(random_numbers=False)
        for each in (*ways.honest, *ways.imprecise):
            backend = each.open()
            (made,) = apply(backend, "mm", [backend.from_numpy(a), backend.from_numpy(b)])
            error = float(np.linalg.norm(backend.to_numpy(made) - exact) / np.linalg.norm(exact))
            low, high = bounds.get(each.name, (0.0, 1e-6))
            assert low <= error <= high, (each.name, error)


def test_with_random_numbers_no_replica_takes_the_samples_in_another_order() -> None:
    with threads_kept():
        assert not any(each.shuffle for each in replicas(random_numbers=True).honest)


# --- trails -----------------------------------------------------------------------------------------------------------


def test_a_trail_that_went_back_computes_what_it_had_computed() -> None:
    job, graphs = exported("diloco.toml")
    bench = Workbench.of(job, graphs)
    with threads_kept():
        trail = bench.trail(replicas(False).honest[0], graphs.state, 0, 0, 10)
        trail.advance(4)
        mark = trail.mark()
        trail.advance(9)
        first = trail.update()
        trail.back(mark)
        assert trail.step == 4
        trail.advance(9)
    assert all(np.array_equal(first[name], array) for name, array in trail.update().items())
    assert len(first["metric/loss"]) == 9


def test_the_widest_pair_is_followed_and_the_one_farthest_from_it() -> None:
    drift = {frozenset(pair): 1.0 for pair in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))}
    drift[frozenset((1, 3))] = 5.0
    drift[frozenset((2, 3))] = 2.0
    assert farthest(drift, 4, 3) == [1, 3, 2]
    assert farthest({frozenset((0, 1)): 0.0}, 2, 3) == [0, 1]


# --- the command ------------------------------------------------------------------------------------------------------


def test_local_steps_are_measured_written_and_heeded(folder: Path) -> None:
    toml = folder / "diloco.toml"
    done = calibrate(toml, "--microtasks", 1, "--warm-up", 8, "--max-steps", 12)
    assert done.exit_code == 0, done.output
    for words in ("tf32", "of the work, doubled", "tolerance proposed", "up to 12 local steps", "Write tolerance ="):
        assert words in " ".join(done.output.split()), done.output
    found = record.find(folder)
    job, graphs = exported("diloco.toml")
    assert found is not None and found.delta is not None and found.local_steps is not None
    assert found.bound_to == record.binding(job.config, graphs.gradient, graphs.optimizer)
    assert (
        found.delta.steps == 5 and found.local_steps.largest == 12 and found.versions == ("version 0", "after 8 steps")
    )
    assert 0 < found.delta.largest < 1e-5 < found.delta.apart["tf32"] and found.delta.separable
    assert set(found.delta.apart) == set(found.gradient.apart) == {"tf32", "float16", "bfloat16", HALF}
    (copy := folder / "more.toml").write_text(
        toml.read_text().replace("local_steps = 5", "local_steps = 13").replace("tiny-diloco", "more")
    )
    with tiny_project() as project:
        refused = CliRunner().invoke(main, ["job", "create", str(copy), "--project", str(project.tree.project_dir)])
        assert refused.exit_code == 2 and "up to 12 local steps" in refused.stderr
        assert len(project.rows(record_table())) == 1


def record_table() -> Any:
    from boinc_project.gt_tables import gt_job

    return gt_job


def test_gradients_are_measured_and_printed_as_json(folder: Path) -> None:
    other = folder / "elsewhere.json"
    done = calibrate(folder, "--microtasks", 1, "--warm-up", 5, "--json", "--output", other)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document == json.loads(other.read_text()) and not (folder / record.FILE).exists()
    assert document["delta"] is None and document["local_steps"] is None
    assert document["gradient"]["steps"] == 3 and document["tolerance"] == document["gradient"]["tolerance"] < 1e-4


def test_a_place_that_cannot_be_written_to_is_a_mistake_told_before_anything_is_computed(folder: Path) -> None:
    done = calibrate(folder, "--output", folder / "nowhere" / "calibration.json")
    assert done.exit_code == 2 and "does not exist; create it or choose another --output" in done.stderr


def test_a_job_that_does_not_stay_finite_is_a_mistake(folder: Path) -> None:
    text = (folder / "job.toml").read_text().replace('kind = "adamw"', 'kind = "sgd"').replace("lr = 0.05", "lr = 1e2")
    (folder / "tiny.py").write_text(
        (folder / "tiny.py").read_text().replace('reduction="none")', 'reduction="none").exp().exp()')
    )
    (folder / "job.toml").write_text(text)
    done = calibrate(folder, "--microtasks", 1, "--warm-up", 50)
    assert done.exit_code == 2 and "lower the learning rate" in done.stderr, done.output
