"""Tries updates on held-out data, in processes of their own (boinc_project/local_run.py), while others are judged.

Prober.gain(...)   the loss of the version minus the loss after the update; NotYet until both are known
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from boinc_project import local_run
from boinc_project.contract import whole_file
from boinc_project.contract.codecs import Array
from boinc_project.contract.errors import ContractError
from boinc_project.contract.graph import Graph
from boinc_project.contract.microtask import FileRef
from boinc_project.contract.opset import TensorType
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


@dataclass
class _Running:
    run: local_run.LocalRun
    types: Mapping[str, TensorType]
    name: str


class Prober:
    """Losses of versions and of updates on held-out batches. What is not known yet is being computed."""

    def __init__(self) -> None:
        self._losses: OrderedDict[Key, float] = OrderedDict()
        self._running: dict[Key, _Running] = {}

    def gain(self, job: JobRow, version: int, state: str, payload: str, update: Mapping[str, Array]) -> float:
        """How much the update with that SHA-256 lowers the loss of the version with that state; -inf if what comes out
        is not finite. Raises NotYet, FileNotFoundError (the version's state is not kept), LocalRunFailed."""
        self._collect()
        before, after = (job.id, version, ""), (job.id, version, payload)
        if before not in self._losses or after not in self._losses:
            base = job.folder.read_state(version, state)
            for key, values in ((before, base), (after, _applied(base, update))):
                if key not in self._losses and key not in self._running and len(self._running) < AT_ONCE:
                    self._start(job, key, values)
            raise NotYet
        if not math.isfinite(self._losses[before]):
            raise local_run.LocalRunFailed(f"version {version} of job {job.name} could not be evaluated")
        return self._losses[before] - self._losses[after]

    def stop(self) -> None:
        """End what is under way."""
        for each in self._running.values():
            each.run.stop()
            shutil.rmtree(each.run.folder, ignore_errors=True)
        self._running.clear()

    def _start(self, job: JobRow, key: Key, state: Mapping[str, Array]) -> None:
        local_run.remove_leftovers(job.folder.path, "probe_*_*_*")
        _, version, payload = key
        folder = job.folder.path / f"probe_{version}_{payload[:16]}_{os.getpid()}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
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
        types = update_types(graph, "evaluation", microtask.steps)
        self._running[key] = _Running(local_run.start(folder, microtask, files), types, job.name)

    def _collect(self) -> None:
        for key, each in list(self._running.items()):
            if not each.run.finished():
                continue
            try:
                loss = metric_means(each.run.update(each.types))["loss"]
            except (local_run.LocalRunFailed, ContractError) as error:
                log.warning("[JOB %s] trying an update from version %d failed: %s", each.name, key[1], error)
                loss = math.inf
            shutil.rmtree(each.run.folder, ignore_errors=True)
            del self._running[key]
            self._losses[key] = loss
            if len(self._losses) > REMEMBERED:
                self._losses.popitem(last=False)


def _applied(base: Mapping[str, Array], update: Mapping[str, Array]) -> dict[str, Array]:
    """The state that a local training ended with: delta = start - end."""
    found: dict[str, Array] = {}
    for name, array in base.items():
        kind, _, rest = name.partition("/")
        delta = update.get(f"delta/{rest}") if kind == "parameter" else None
        found[name] = array - delta if delta is not None else update.get(name, array)
    return found
