"""Tries updates on held-out data (boinc_project/background_runs.py) while others are judged.

Prober.gain(...)   the loss of the version minus the loss after the update; NotYet until both are known

Where the job's codec is unbiased and noisy (random-k, qsgd), one update alone raises the loss, and only the mean over
many lowers it: what is tried is then a shorter step, of the length that is good by itself (Method.variance).
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
from collections import OrderedDict
from collections.abc import Mapping

import numpy as np

from boinc_project import local_run
from boinc_project.background_runs import BackgroundRuns, Start
from boinc_project.contract import whole_file
from boinc_project.contract.codecs import Array
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import FileRef
from boinc_project.contract.update import update_types
from boinc_project.held_out import evaluation_microtask, held_out_batches, metric_means
from boinc_project.job_folder import state_bytes
from boinc_project.store import JobRow
from validator import loss_probe

log = logging.getLogger("validator")

REMEMBERED = 1000  # losses
AT_ONCE = max(1, (os.cpu_count() or 1) // 2)  # processes

Key = tuple[int, int, str]  # job, version, SHA-256 of the payload ('' for the version itself)


class NotYet(Exception):
    """The update is being tried; ask again in the next pass."""


class Prober:
    """Losses of versions and of updates on held-out batches. What is not known yet is being computed."""

    def __init__(self, start: Start = local_run.start) -> None:
        self._losses: OrderedDict[Key, float] = OrderedDict()
        self._runs: BackgroundRuns[Key] = BackgroundRuns("probe", AT_ONCE, start=start)

    def gain(self, job: JobRow, version: int, state: str, payload: str, update: Mapping[str, Array]) -> float:
        """How much the update with that SHA-256 lowers the loss of the version with that state; -inf if what comes out
        is not finite. Raises NotYet, FileNotFoundError (the version's state is not kept), LocalRunFailed."""
        self._collect()
        before, after = (job.id, version, ""), (job.id, version, payload)
        if before not in self._losses or after not in self._losses:
            base = job.folder.read_state(version, state)
            for key, values in ((before, base), (after, _applied(base, update, _step_length(job)))):
                if key not in self._losses and key not in self._runs and self._runs.room:
                    self._start(job, key, values)
            raise NotYet
        if not math.isfinite(self._losses[before]):
            raise local_run.LocalRunFailed(f"version {version} of job {job.name} could not be evaluated")
        return self._losses[before] - self._losses[after]

    def stop(self) -> None:
        """End what is under way."""
        self._runs.stop()

    def _start(self, job: JobRow, key: Key, state: Mapping[str, Array]) -> None:
        _, version, payload = key
        folder = self._runs.folder(job.folder.path, f"{version}_{payload[:16]}")
        data = state_bytes(state)
        whole_file.write_bytes(folder / "probed.safetensors", data)
        everything = held_out_batches(job)
        # The same ones for all updates from a version. They need not be secret: nobody has the held-out data.
        draws = np.random.Generator(np.random.Philox(key=[job.config.job.seed, version]))
        count = min(len(everything), loss_probe.batches(job.config.steps))
        chosen = [everything[i] for i in sorted(draws.permutation(len(everything))[:count])]
        reference = FileRef(hashlib.sha256(data).hexdigest(), len(data))
        microtask, files = evaluation_microtask(job, version, reference, folder / "probed.safetensors", chosen)
        graph = Graph.from_bytes(job.folder.evaluation_graph_path.read_bytes())
        self._runs.begin(key, folder, microtask, files, update_types(graph, "evaluation", microtask.steps))

    def _collect(self) -> None:
        for each in self._runs.ended():
            if each.update is None:
                job, version = each.microtask.job, each.microtask.base_version
                log.warning("[JOB %s] trying an update from version %d failed: %s", job, version, each.why)
            self._losses[each.key] = math.inf if each.update is None else metric_means(each.update)["loss"]
            if len(self._losses) > REMEMBERED:
                self._losses.popitem(last=False)


def _step_length(job: JobRow) -> float:
    """Share of an update that is tried."""
    return 1.0 / (1.0 + job.config.codec.codec().method.variance)


def _applied(base: Mapping[str, Array], update: Mapping[str, Array], length: float) -> dict[str, Array]:
    """The state that a local training ended with, or that share of its way: delta = start - end."""
    found: dict[str, Array] = {}
    for name, array in base.items():
        kind, _, rest = name.partition("/")
        delta = update.get(f"delta/{rest}") if kind == "parameter" else None
        found[name] = array - np.float32(length) * delta if delta is not None else update.get(name, array)
    return found
