"""The server's own computation of microtasks, one at a time (boinc_project/background_runs.py): spot checks, disputes.

    want -> poll (starts it) -> poll (collects it) -> of(workunit name)

A workunit that waits for it is left alone meanwhile. Nothing is recorded: after a crash the same draw, or the same
dispute, asks for the same computation again.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from boinc_project import local_run
from boinc_project.background_runs import ONE_THREAD, BackgroundRuns, Start
from boinc_project.contract.codecs import Array
from boinc_project.contract.errors import ContractError
from boinc_project.contract.microtask import (
    CONSTANTS_FILE,
    GRAPH_FILE,
    OPTIMIZER_FILE,
    STATE_FILE,
    FileRef,
    Microtask,
    delta_file,
    shard_file,
    smaller_graph_file,
)
from boinc_project.store import JobRow
from validator.case import Case

LONGEST_S = 6 * 3600.0  # a computation that takes longer is given up
_KEPT = 8  # finished ones that nobody has asked for yet
_MANY = 20

log = logging.getLogger("validator")


class CannotReplay(Exception):
    """Something that the microtask needs is not on the server any more."""


@dataclass
class Replays:
    """The computation under way, those that wait, and what came out.

    state_of   the file of a version's state; None if the job has no such version
    start      what starts a computation
    """

    state_of: Callable[[JobRow, int], FileRef | None] = field(default=lambda job, version: None)
    start: Start = local_run.start
    waiting: OrderedDict[int, Case] = field(default_factory=OrderedDict)  # by workunit id
    finished: OrderedDict[str, Mapping[str, Array] | None] = field(default_factory=OrderedDict)
    running: Case | None = None

    def __post_init__(self) -> None:
        self._runs: BackgroundRuns[int] = BackgroundRuns("replay", longest_s=LONGEST_S, start=self.start)

    @property
    def busy(self) -> bool:
        return self.running is not None or bool(self.waiting)

    def want(self, case: Case, reason: str) -> None:
        """Compute this workunit's microtask."""
        self.waiting[case.id] = case
        log.info("%s is computed by the server: %s", case, reason)
        if len(self.waiting) % _MANY == 0:
            log.warning("%d workunits wait for the server's own computation; lower spot_check_share", len(self.waiting))

    def waits(self, identifier: int) -> bool:
        return identifier in self.waiting or (self.running is not None and self.running.id == identifier)

    def of(self, workunit_name: str) -> tuple[bool, Mapping[str, Array] | None]:
        """Whether it is done, and what came out; None if it could not be computed."""
        return workunit_name in self.finished, self.finished.get(workunit_name)

    def poll(self) -> bool:
        """Collect a finished computation and start the next; returns whether anything happened."""
        happened = False
        for each in self._runs.ended():
            assert self.running is not None
            self._finish(self.running, None if each.update is None else each.update.tensors, each.why)
            self.running, happened = None, True
        while self.running is None and self.waiting:
            _, case = self.waiting.popitem(last=False)
            happened = True
            try:
                self._start(case)
                self.running = case
            except (CannotReplay, ContractError, OSError) as error:
                self._finish(case, None, str(error))
        return happened

    def stop(self) -> None:
        """End the computation under way; it will be asked for again."""
        self._runs.stop()
        self.running = None

    def _start(self, case: Case) -> None:
        microtask = Microtask.from_json(str(case.task["document"]).encode())
        microtask = with_whole_state(microtask, self.state_of(case.job, microtask.base_version))
        files = inputs(case.job, microtask)
        types = case.job.folder.update_types(microtask.mode, microtask.steps, microtask.ships_state)
        place = self._runs.folder(case.job.folder.path, str(case.id))
        arguments = (*ONE_THREAD, "--backend", case.job.config.trust.replay_backend)
        self._runs.begin(case.id, place, microtask, files, types, arguments)

    def _finish(self, case: Case, tensors: Mapping[str, Array] | None, why: str) -> None:
        if tensors is None:
            log.critical("%s cannot be computed by the server: %s", case, why)
        self.finished[case.name] = tensors
        if len(self.finished) > _KEPT:
            self.finished.popitem(last=False)


def with_whole_state(microtask: Microtask, state: FileRef | None) -> Microtask:
    """The same work from the version's own state, where volunteers are sent a keyframe and deltas. CannotReplay if the
    version is no more."""
    if delta_file(0) not in microtask.files:
        return microtask
    if state is None:
        raise CannotReplay(f"version {microtask.base_version} of the job is not there any more")
    deltas = {delta_file(number) for number in range(len(microtask.files))}
    files = {name: ref for name, ref in microtask.files.items() if name not in deltas}
    return replace(microtask, files={**files, STATE_FILE: state})


def inputs(job: JobRow, microtask: Microtask) -> dict[str, Path]:
    """Where the files of a microtask lie on the server. CannotReplay if one is gone."""
    folder, facts = job.folder, job.facts
    shards = {shard.file.sha256: folder.shard_path("train", number) for number, shard in enumerate(facts.train)}
    found = {
        GRAPH_FILE: folder.gradient_graph_path,
        OPTIMIZER_FILE: folder.optimizer_graph_path,
        CONSTANTS_FILE: folder.constants_path,
        **{smaller_graph_file(size): folder.smaller_graph_path(size) for size in facts.smaller},
    }
    for number in range(microtask.shard_count):
        name = shard_file(number)
        if microtask.files[name].sha256 in shards:
            found[name] = shards[microtask.files[name].sha256]
    found[STATE_FILE] = folder.state_path(microtask.base_version, microtask.files[STATE_FILE].sha256)
    for name in microtask.files:
        if name not in found or not found[name].exists():
            raise CannotReplay(f"its file {name} is not in {folder.path} any more")
    return {name: found[name] for name in microtask.files}
