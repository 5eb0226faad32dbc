"""A short autotuner: how fast each tile of matrix products is on this device, measured once and remembered.

The tiles of tiles.py are tried on one product, three times each, and their shares of the device's peak replace the
usual ones that `choose` decides by. Nothing depends on it: where measuring fails or makes no sense, these stay.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyopencl as cl

from apps.gradient.opencl import matrix, movement
from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.peak import Peak
from apps.gradient.opencl.plan import make_plan
from apps.gradient.opencl.programs import BuildFailed, Programs, cache_key, kernel_text
from apps.gradient.opencl.runtime import DeviceTensor, Pool, PreparedPlan, upload
from apps.gradient.opencl.tiles import Tile, default_tiles
from boinc_project.contract.errors import UnfitHost
from boinc_project.contract.graph import Graph, GraphBuilder

ROUNDS = 3
DIFFERENT = 1.25
NEVER = 1e-3  # the share of a tile that this device cannot build or run
SENSIBLE = (0.02, 1.2)  # shares between which the best tile of any device lies


@dataclass(frozen=True)
class Tuning:
    """What was measured: the device's peak and each tile's rate, in floating-point operations per second."""

    peak: float
    tiles: tuple[Tile, ...]
    rates: tuple[float, ...]

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the peak."""
        return tuple(max(NEVER, rate / self.peak) for rate in self.rates)


def tuned(facts: DeviceFacts, pool: Pool, programs: Programs, folder: Path) -> DeviceFacts:
    """The facts with the tiles' shares, from the folder or measured now; unchanged if that fails."""
    key = _key(facts)
    tiles = default_tiles(facts)
    shares = read(folder, key, len(tiles))
    if shares is None:
        try:
            shares = measure(facts, pool, programs).shares
        except (cl.Error, BuildFailed, UnfitHost):
            return facts
        if not sensible(shares):
            return facts
        write(folder, key, shares)
    return replace(facts, tuned=believed(tiles, shares))


def believed(tiles: Sequence[Tile], shares: Sequence[float]) -> tuple[float, ...]:
    """The shares to decide by: the usual ones of this kind of device, scaled, unless a tile clearly differs.

    Three runs on a busy computer do not rank tiles that are much alike.
    """
    scale = statistics.median(share / tile.efficiency for tile, share in zip(tiles, shares))
    expected = [scale * tile.efficiency for tile in tiles]
    return tuple(
        usual if usual / DIFFERENT <= share <= usual * DIFFERENT else share for usual, share in zip(expected, shares)
    )


def sensible(shares: Sequence[float]) -> bool:
    """Whether shares may be true of a device."""
    return all(math.isfinite(each) for each in shares) and SENSIBLE[0] <= max(shares) <= SENSIBLE[1]


def measure(facts: DeviceFacts, pool: Pool, programs: Programs) -> Tuning:
    """Try every tile, in turn and three times, so that what else the machine does falls on all of them."""
    tiles = default_tiles(facts)
    size = 512 if facts.kind == "cpu" and facts.compute_units <= 8 else 1024
    graph = _product(size)
    draws = np.random.default_rng(0)
    given = {name: upload(pool, draws.standard_normal((size, size)).astype(np.float32)) for name in ("a", "b")}
    peak = Peak(pool.queue, facts, programs)
    runs = [_prepared(graph, _only(facts, place, len(tiles)), pool, programs) for place in range(len(tiles))]
    best = [math.inf] * len(tiles)
    rates = []
    for number in range(ROUNDS + 1):
        rates.append(peak.rate())
        for place, run in enumerate(runs):
            seconds = math.inf if run is None else _seconds(run, given)
            if number:  # the first only warms up: drivers compile late
                best[place] = min(best[place], seconds)
    return Tuning(max(rates), tiles, tuple(2 * size**3 / seconds for seconds in best))


def _product(size: int) -> Graph:
    builder = GraphBuilder()
    a, b = (builder.input(name, "constant", "float32", (size, size)) for name in ("a", "b"))
    builder.output("c", "metric", builder.node("mm", [a, b])[0])
    return builder.build()


def _only(facts: DeviceFacts, place: int, count: int) -> DeviceFacts:
    """The facts of a device on which one tile is by far the best."""
    return replace(facts, tuned=tuple(1.0 if each == place else 1e-9 for each in range(count)))


def _prepared(graph: Graph, facts: DeviceFacts, pool: Pool, programs: Programs) -> PreparedPlan | None:
    """The product on one tile; None if the device refuses it."""
    try:
        plan = make_plan(graph, facts, {**movement.OPS, **matrix.OPS}, frozenset())
        return PreparedPlan(plan, pool, programs)
    except (cl.Error, BuildFailed):
        return None


def _seconds(run: PreparedPlan, given: dict[str, DeviceTensor]) -> float:
    start = time.perf_counter()
    try:
        run.run(given)
        run.pool.queue.finish()
    except cl.Error:
        return math.inf
    return time.perf_counter() - start


# Remembering.


def _key(facts: DeviceFacts) -> str:
    """Device, driver, tiles and kernels: what a measurement is true for."""
    device = (facts.name, facts.vendor, facts.platform, facts.driver, str(facts.compute_units), str(facts.group_form))
    text = kernel_text("gemm.cl") + kernel_text("pack.cl")
    return cache_key(device, text, [str(tile) for tile in default_tiles(facts)])


def _path(folder: Path, key: str) -> Path:
    return folder / f"tuning-{key[:40]}.json"


def read(folder: Path, key: str, count: int) -> tuple[float, ...] | None:
    """Remembered shares; None if there are none, or none that make sense."""
    try:
        content = json.loads(_path(folder, key).read_text(encoding="ascii"))
        if content["key"] != key or len(content["shares"]) != count:
            return None
        shares = tuple(float(each) for each in content["shares"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return shares if sensible(shares) else None


def write(folder: Path, key: str, shares: Sequence[float]) -> None:
    """Remember shares; a folder that cannot be written does no harm."""
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(".tmp", "tuning-", folder)
        with open(descriptor, "w", encoding="ascii") as file:
            json.dump({"key": key, "shares": [round(each, 4) for each in shares]}, file)
        os.replace(temporary, _path(folder, key))
