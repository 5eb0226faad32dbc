"""A small real microtask for tests of the application: least squares, its gradient summed over many
batches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from boinc_project.contract import tensorfile
from boinc_project.contract.codecs import Codec
from boinc_project.contract.graph import Graph, GraphBuilder
from boinc_project.contract.microtask import (
    GRAPH_FILE,
    MICROTASK_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    Batch,
    FileRef,
    Microtask,
    shard_file,
    smaller_graph_file,
)
from boinc_project.contract.update import Update, read_update, update_types


def least_squares(batch: int, features: int) -> Graph:
    """loss = sum mask * (x w - y)^2; x [batch, features], w [features, features], y like x."""
    build = GraphBuilder()
    w = build.input("parameter/w", "parameter", "float32", [features, features])
    x = build.input("batch/x", "batch", "float32", [batch, features])
    y = build.input("batch/y", "batch", "float32", [batch, features])
    mask = build.input("mask", "mask", "float32", [batch])
    (prediction,) = build.node("mm", [x, w])
    (difference,) = build.node("sub", [prediction, y])
    (column,) = build.node("reshape", [mask], {"shape": [batch, 1]})
    (masked,) = build.node("mul", [difference, column])
    (squares,) = build.node("mul", [masked, difference])
    (loss,) = build.node("sum", [squares], {"dims": [0, 1], "keepdim": False})
    (weight,) = build.node("sum", [mask], {"dims": [0], "keepdim": False})
    (turned,) = build.node("permute", [x], {"dims": [1, 0]})
    (half,) = build.node("mm", [turned, masked])
    (gradient,) = build.node("add", [half, half])
    build.output("gradient/w", "gradient", gradient)
    build.output("metric/loss", "metric", loss)
    build.output("metric/weight", "metric", weight)
    return build.build()


def descent(features: int) -> Graph:
    """Gradient descent with momentum: m = m / 2 + gradient / weight; w = w - rate * m."""
    build = GraphBuilder()
    shape = (features, features)
    w = build.input("parameter/w", "parameter", "float32", shape)
    gradient = build.input("gradient/w", "gradient", "float32", shape)
    m = build.input("optimizer/w/m", "optimizer", "float32", shape)
    weight = build.input("weight", "weight", "float32", ())
    rate = build.input("learning_rate", "learning_rate", "float32", ())
    (half,) = build.node("full", [], {"shape": [], "value": 0.5, "dtype": "float32"})
    (kept,) = build.node("mul", [m, half])
    (mean,) = build.node("div", [gradient, weight])
    (momentum,) = build.node("add", [kept, mean])
    (change,) = build.node("mul", [momentum, rate])
    (moved,) = build.node("sub", [w, change])
    build.output("parameter/w", "parameter", moved)
    build.output("optimizer/w/m", "optimizer", momentum)
    return build.build()


def microtask_files(
    steps: int,
    batch: int = 64,
    features: int = 32,
    seed: int = 1,
    mode: str = "gradient",
    smaller: Sequence[int] = (),
    last: int | None = None,
) -> dict[str, bytes]:
    """All input files of the microtask, by open name.

    smaller   sizes of smaller batches of which it has graphs too
    last      samples of the last batch (None: it is full)
    """
    rng = np.random.default_rng(seed)
    graph = least_squares(batch, features)
    rows = 2 * batch
    files = {
        GRAPH_FILE: graph.to_bytes(),
        **{smaller_graph_file(size): least_squares(size, features).to_bytes() for size in smaller},
        **({OPTIMIZER_FILE: descent(features).to_bytes()} if mode == "local-steps" else {}),
        STATE_FILE: tensorfile.to_bytes({"parameter/w": rng.standard_normal((features, features)).astype(np.float32)}),
        shard_file(0): tensorfile.to_bytes(
            {
                "batch/x": rng.standard_normal((rows, features)).astype(np.float32),
                "batch/y": rng.standard_normal((rows, features)).astype(np.float32),
            }
        ),
    }
    counts = [batch] * (steps - 1) + [last or batch]
    batches = tuple(Batch((0,) * n, tuple(int(row) for row in rng.permutation(rows)[:n])) for n in counts)
    microtask = Microtask(
        job="tiny",
        mode=mode,
        base_version=0,
        slot=0,
        files={name: FileRef(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()},
        batch_size=batch,
        batches=batches,
        learning_rates=((0.0 if mode == "gradient" else 0.01),) * steps,
        seed=seed,
        first_step=0,
        codec=Codec(),
    )
    return {MICROTASK_FILE: microtask.to_json(), **files}


def read_result(path: Path, files: dict[str, bytes]) -> Update:
    """The update that the application wrote for these files, checked as the server checks it."""
    microtask = Microtask.from_json(files[MICROTASK_FILE])
    types = update_types(Graph.from_bytes(files[GRAPH_FILE]), microtask.mode, microtask.steps)
    return read_update(path.read_bytes(), types, microtask.codec, microtask.digest())


def expected_gradient(files: dict[str, bytes]) -> np.ndarray:
    """The same gradient in float64 numpy, written down independently of the graph."""
    microtask = Microtask.from_json(files[MICROTASK_FILE])
    w = tensorfile.from_bytes(files[STATE_FILE]).tensors["parameter/w"].astype(np.float64)
    shard = tensorfile.from_bytes(files[shard_file(0)]).tensors
    total = np.zeros_like(w)
    for each in microtask.batches:
        x = shard["batch/x"][list(each.rows)].astype(np.float64)
        y = shard["batch/y"][list(each.rows)].astype(np.float64)
        total += 2 * x.T @ (x @ w - y)
    return total
