"""The autotuner: what it remembers, what it believes, and that nothing depends on it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from opencl_devices import open_device

from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.tiles import choose, default_tiles, tiles_of

SHARES = (0.5, 0.8, 0.4, 0.3, 0.2)


@pytest.fixture
def facts() -> DeviceFacts:
    return open_device("pocl").facts  # type: ignore[no-any-return]


def test_a_measurement_is_made_once_and_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from apps.gradient.opencl import tune

    backend = open_device("pocl")
    calls = []
    measured = tune.measure

    def measure(*arguments: object) -> tune.Tuning:
        calls.append(1)
        return measured(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "SENSIBLE", (0.0, 1e9))  # this computer may be busy
    first = tune.tuned(backend.facts, backend.pool, backend.programs, tmp_path)
    again = tune.tuned(backend.facts, backend.pool, backend.programs, tmp_path)
    other = dataclasses.replace(backend.facts, driver="another")
    tune.tuned(other, backend.pool, backend.programs, tmp_path)
    assert len(first.tuned) == len(default_tiles(backend.facts)) and all(share > 0 for share in first.tuned)
    assert again.tuned == pytest.approx(first.tuned, abs=1e-3)
    assert len(calls) == 2, "once for each driver"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"key": 1, "shares": [1, 2]}', '{"key": KEY, "shares": [9, 9, 9, 9, 9]}']
)
def test_a_damaged_file_is_no_measurement(content: str, tmp_path: Path, facts: DeviceFacts) -> None:
    from apps.gradient.opencl import tune

    key = tune._key(facts)
    tune.write(tmp_path, key, SHARES)
    assert tune.read(tmp_path, key, 5) == SHARES
    assert tune.read(tmp_path, key, 4) is None
    (path,) = tmp_path.iterdir()
    path.write_text(content.replace("KEY", json.dumps(key)))
    assert tune.read(tmp_path, key, 5) is None


def test_where_measuring_fails_the_usual_shares_stay(
    tmp_path: Path, facts: DeviceFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    from apps.gradient.opencl import tune
    from apps.gradient.opencl.programs import BuildFailed

    def fails(*_: object) -> tune.Tuning:
        raise BuildFailed("no compiler")

    backend = open_device("pocl")
    monkeypatch.setattr(tune, "measure", fails)
    assert tune.tuned(facts, backend.pool, backend.programs, tmp_path) == facts
    monkeypatch.setattr(tune, "measure", lambda *_: tune.Tuning(1e12, default_tiles(facts), (1.0,) * 5))
    assert tune.tuned(facts, backend.pool, backend.programs, tmp_path) == facts
    assert list(tmp_path.iterdir()) == []


def test_small_differences_do_not_change_the_ranking_and_large_ones_do(facts: DeviceFacts) -> None:
    from apps.gradient.opencl import tune

    tiles = default_tiles(facts)
    usual = [tile.efficiency for tile in tiles]
    noisy = [share * factor for share, factor in zip(usual, (0.9, 1.0, 1.1, 1.0, 1.0), strict=True)]
    assert max(range(5), key=tune.believed(tiles, noisy).__getitem__) == 0
    slow_first = [share * factor for share, factor in zip(usual, (0.4, 1.0, 1.0, 1.0, 1.0), strict=True)]
    tuned = dataclasses.replace(facts, tuned=tune.believed(tiles, slow_first))
    assert tiles_of(tuned)[0].efficiency < tiles_of(tuned)[1].efficiency
    from test_tiles import product

    assert choose(tuned, product(1024, 1024, 1024)).tile.rows == tiles[1].rows


def test_the_command_shows_each_tile_and_the_peak() -> None:
    open_device("pocl")  # skips where there is no driver
    from boinc_project.cli.main import main

    done = CliRunner().invoke(main, ["tune", "--device", "Portable:0"])
    assert done.exit_code == 0, done.output
    assert "measured peak" in done.output and "% of the peak" in done.output.replace("\n", " ")
    assert sum(" x " in line and "of" not in line for line in done.output.splitlines()) == 5
    wrong = CliRunner().invoke(main, ["tune", "--device", "Portable:77"])
    assert wrong.exit_code == 2 and "device" in wrong.output
