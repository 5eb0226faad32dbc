"""`scripts/bench agreement`: its arithmetic, and that it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.benchmarks.agreement import Look, safe_steps, whole
from scripts.benchmarks.common import REPOSITORY


def look(steps: int, distance: float, l2: float = 0.0) -> Look:
    return Look(steps, distance, l2, "delta/w", None, None)


def test_safe_steps_end_at_the_first_number_at_which_copies_are_too_far_apart() -> None:
    seen = [look(1, 1e-6), look(10, 1e-3, 2e-3), look(20, 2e-3), look(30, 1e-4)]
    assert safe_steps(seen) == 10
    assert safe_steps(seen, "l2") == 1
    assert safe_steps([look(1, 0.5)]) == 0


def test_the_whole_update_is_relative_to_the_reference_and_knows_no_metrics() -> None:
    reference = {"delta/a": np.float32([3, 0]), "delta/b": np.float32([4]), "metric/loss": np.float32([9])}
    other = {"delta/a": np.float32([3, 1]), "delta/b": np.float32([4]), "metric/loss": np.float32([1])}
    assert whole(reference, other) == pytest.approx(0.2)


@pytest.mark.long
def test_it_runs_and_its_last_line_is_json(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.benchmarks", "agreement", "--quick", "--seeds", "1"]
    plot = tmp_path / "plot.png"
    done = subprocess.run([*command, "--plot", str(plot)], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    metrics = json.loads(done.stdout.splitlines()[-1])["metrics"]
    assert 0 < metrics["gradient_p99"] < 1e-5 < metrics["gradient_tf32"]
    assert metrics["largest_safe_steps"] == 8 and plot.stat().st_size > 1000
