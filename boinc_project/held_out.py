"""Evaluation of a model on held-out data, as a microtask for this machine: the data never leave the server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from boinc_project.contract.codecs import Codec
from boinc_project.contract.microtask import (
    CONSTANTS_FILE,
    GRAPH_FILE,
    STATE_FILE,
    Batch,
    FileRef,
    Microtask,
    shard_file,
)
from boinc_project.contract.update import Update
from boinc_project.store import JobRow


def metric_means(update: Update) -> dict[str, float]:
    """Metric -> mean over all samples of an evaluation."""
    sums = {n[len("metric/") :]: float(a.astype("float64").sum()) for n, a in update.tensors.items()}
    weight = sums.pop("weight")
    return {name: total / max(weight, 1.0) for name, total in sums.items()}


def held_out_batches(job: JobRow) -> list[Batch]:
    """All held-out samples in batches; a batch that is not full is left out where the graph needs full ones."""
    facts, size = job.facts, job.config.data.evaluation_batch_size
    batches = []
    for number, shard in enumerate(facts.test):
        for start in range(0, shard.rows, size):
            count = min(size, shard.rows - start)
            if count < size and facts.evaluation_full_batches:
                continue
            batches.append(Batch((number,) * count, tuple(range(start, start + count))))
    return batches


def evaluation_microtask(
    job: JobRow, version: int, state: FileRef, path: Path, batches: Sequence[Batch] | None = None
) -> tuple[Microtask, dict[str, Path]]:
    """The microtask that evaluates a state, which lies at `path`, on these batches (all held-out ones if None), and
    where its files lie by open name."""
    facts, folder = job.facts, job.folder
    chosen = tuple(held_out_batches(job) if batches is None else batches)
    refs = {GRAPH_FILE: FileRef(facts.evaluation.sha256, facts.evaluation.size), STATE_FILE: state}
    paths = {GRAPH_FILE: folder.evaluation_graph_path, STATE_FILE: path}
    if facts.constants is not None:
        refs[CONSTANTS_FILE] = FileRef(facts.constants.sha256, facts.constants.size)
        paths[CONSTANTS_FILE] = folder.constants_path
    for number, shard in enumerate(facts.test):
        refs[shard_file(number)] = FileRef(shard.file.sha256, shard.file.size)
        paths[shard_file(number)] = folder.shard_path("test", number)
    microtask = Microtask(
        job=job.name,
        mode="evaluation",
        base_version=version,
        slot=0,
        files=refs,
        batch_size=job.config.data.evaluation_batch_size,
        batches=chosen,
        learning_rates=(0.0,) * len(chosen),
        seed=job.config.job.seed,
        first_step=0,
        codec=Codec("dense", 256, "none"),
    )
    return microtask, paths
