"""All of it together: hosts in virtual time around a private project, and when its daemons make their passes.

A daemon makes a pass at the next multiple of its interval after something happened that it may have to do with, and
otherwise every ten minutes: a pass that finds nothing changes nothing, so that those in between need not be made. The
generator, which looks for stragglers, makes one at least every fourth of the time after which a copy is one. The
transitioner handles reports at once, as the embedded server has it, what a daemon wrote right after its pass, and
missed deadlines within a minute.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apps.gradient.__main__ import EXIT_NOT_FINITE
from boinc_project import clock
from boinc_project.contract.errors import ContractError
from boinc_project.gt_tables import JobState
from boinc_project.server.messages import SchedulerReply, SchedulerRequest
from boinc_project.simulator.client import Client, Habits, Task, TaskFailed
from boinc_project.simulator.computing import Computed, Computer, Tensors, seeded
from boinc_project.simulator.events import Event, Events
from boinc_project.simulator.hosts import Host
from boinc_project.simulator.lies import Behaviour, Honest, Situation
from boinc_project.simulator.project import PrivateProject, key_of, private_folder
from work_generator.export import ExportedJob
from work_generator.job import Job

#: When a simulation begins: 1 January 2026. BOINC's rows hold Unix seconds, and 0 means "never" in many of them.
EPOCH = 1_767_225_600.0

IDLE_S = 60.0
LONG_IDLE_S = 600.0
FILE_DELETE_S = 600.0


@dataclass(frozen=True)
class Settings:
    """How a simulation goes.

    seed         of everything that is drawn: the clients' habits, rounding noise, lies
    backend      of the application's runner: numpy or torch
    noise        relative rounding noise of copies; 0: copies of honest hosts are bit-equal
    habits       of the clients
    intervals    seconds between passes of the daemons
    options      further elements of the project's config.xml
    horizon      virtual seconds after which it ends in any case
    """

    seed: int = 0
    backend: str = "numpy"
    noise: float = 0.0
    habits: Habits = field(default_factory=Habits)
    intervals: Mapping[str, float] = field(
        default_factory=lambda: {"generator": 5.0, "validator": 5.0, "assimilator": 5.0}
    )
    options: Mapping[str, Any] = field(default_factory=dict)
    horizon: float = 90 * 86400.0


@dataclass
class Answer:
    """The truth about an answer, for the report: who gave it, after how much computing, whether it is a lie."""

    host: str
    seconds: float
    lied: bool
    size: int


@dataclass
class VersionMoment:
    """What had been spent when a version became current."""

    version: int
    when: float  # virtual seconds from the beginning
    bytes_down: int
    bytes_up: int
    bytes_messages: int
    seconds_on: float
    seconds_used: float
    answers: int


class Simulation:
    """One job, its hosts and how they behave (by name; the others are honest). Use it in `simulated`."""

    def __init__(
        self, folder: Path, job: Job, exported: ExportedJob, hosts: Sequence[Host], settings: Settings,
        behaviours: Mapping[str, Behaviour], computer: Computer | None = None,
    ) -> None:  # fmt: skip
        unknown = sorted(set(behaviours) - {host.name for host in hosts})
        if unknown or len({host.name for host in hosts}) != len(hosts):
            raise ValueError(f"behaviours of unknown hosts: {unknown}" if unknown else "two hosts have one name")
        self.settings = settings
        self.events = Events(EPOCH)
        self.computer = computer or Computer(settings.backend, settings.noise)
        self.answers: dict[str, Answer] = {}  # by result name
        self.moments: list[VersionMoment] = []
        self._rounds: dict[int, Sequence[Tensors]] = {}
        self._ticks: dict[str, Event] = {}
        self._last_pass: dict[str, float] = {}
        self._folder, self._job, self._exported = folder, job, exported
        self._hosts, self._behaviours = hosts, behaviours
        self._is_over = False

    @contextmanager
    def prepared(self) -> Iterator[Simulation]:
        """The project made, the hosts about to come; the clock is virtual meanwhile."""
        with clock.virtual(self.events.read):
            self.project = PrivateProject(
                self._folder, self._job, self._exported, self.settings.options, self.settings.seed
            )
            try:
                self.clients = [self._client(host) for host in self._hosts]
                for client in self.clients:
                    client.start()
                self._passes: dict[str, Callable[[], bool]] = {
                    "generator": self.project.generator.one_pass,
                    "validator": self.project.validator.one_pass,
                    "assimilator": self.project.assimilator.one_pass,
                }
                self._note_version(0)
                self._tick("generator")
                self.events.after(IDLE_S, self._idle)
                self.events.after(FILE_DELETE_S, self._delete_files)
                yield self
            finally:
                self.project.close()

    def _client(self, host: Host) -> Client:
        key = self.project.add_account(host.name)
        behaviour = self._behaviours.get(host.name, Honest())
        return Client(self, host, key, behaviour, self.settings.habits, seeded("client", self.settings.seed, host.name))

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Let it happen until the job has ended, `until()` holds, or the horizon is reached."""
        self.events.run(lambda: self._is_over or until(), EPOCH + self.settings.horizon)
        while self._is_over and self.project.assimilator.one_pass():  # evaluations of the last versions
            pass

    @property
    def elapsed(self) -> float:
        """Virtual seconds from the beginning."""
        return self.events.now - EPOCH

    # The world of a client.

    def ask(self, request: SchedulerRequest) -> SchedulerReply:
        reply = self.project.ask(request)
        if request.results:
            self._tick("validator")
        return reply

    def upload(self, name: str, data: bytes) -> None:
        self.project.upload(name, data)

    def answer(self, client: Client, task: Task) -> bytes | None:
        opened, behaviour = task.work.opened, client.behaviour
        try:
            computed = self.computer.honest(key_of(opened), self.project.places(opened))
            situation = Situation(client.host.name, computed, self.computer, lambda: self._round(computed))
            tensors = behaviour.answer(situation)
            if tensors is None:
                return None
            data = self.computer.encoded(computed, tensors, client.host.name)
        except ContractError as error:
            if error.fault != "not_finite":
                raise
            raise TaskFailed(EXIT_NOT_FINITE, f"the loss is not a number: {error}") from error
        self.answers[task.name] = Answer(client.host.name, task.compute_s, behaviour.lies, len(data))
        return data

    def _round(self, computed: Computed) -> Sequence[Tensors]:
        """Honest updates of all microtasks over the version that this one is over."""
        version = computed.microtask.base_version
        if version not in self._rounds:
            found = []
            for opened in self.project.round(version):
                try:
                    found.append(self.computer.honest(key_of(opened), self.project.places(opened)).tensors)
                except (ContractError, FileNotFoundError):
                    continue  # it was over before any liar asked
            self._rounds = {version: found or [computed.tensors]}
        return self._rounds[version]

    # The daemons.

    def _tick(self, name: str) -> None:
        """Have a daemon make a pass at the next multiple of its interval, unless one is coming anyway."""
        if name in self._ticks:
            return
        interval = self.settings.intervals[name]
        when = interval * math.floor(self.events.now / interval + 1)
        self._ticks[name] = self.events.at(when, lambda: self._pass(name))

    def _pass(self, name: str) -> None:
        self._ticks.pop(name, None)
        self._last_pass[name] = self.events.now
        worked = self._passes[name]()
        self.project.transition()
        if not worked:
            return
        if name == "assimilator":
            self._look_at_the_job()
            self._tick("generator")
        if name == "validator":
            self._tick("assimilator")
        self._tick(name)

    def _look_at_the_job(self) -> None:
        job = self.project.job
        for version in range(len(self.moments), job.current_version + 1):
            self._note_version(version)
        if job.state != JobState.RUNNING:
            self._is_over = True

    def _idle(self) -> None:
        """What only time brings about: deadlines, stragglers, storage that is back."""
        self.project.transition()
        self._look_at_the_job()
        for name in self._passes:
            after = LONG_IDLE_S
            if name == "generator":
                after = min(after, self._job.config.supply.straggler_after_s / 4)
            if self.events.now - self._last_pass.get(name, -math.inf) >= after:
                self._tick(name)
        self.events.after(IDLE_S, self._idle)

    def _delete_files(self) -> None:
        self.project.file_deleter.run_once()
        self.events.after(FILE_DELETE_S, self._delete_files)

    # What it costs.

    def _note_version(self, version: int) -> None:
        elapsed = self.elapsed
        self.moments.append(
            VersionMoment(
                version=version,
                when=elapsed,
                bytes_down=sum(client.traffic.down for client in self.clients),
                bytes_up=sum(client.traffic.up for client in self.clients),
                bytes_messages=sum(client.traffic.messages for client in self.clients),
                seconds_on=sum(each.host.processors * each.host.seconds_on(elapsed) for each in self.clients),
                seconds_used=sum(client.processors.used for client in self.clients),
                answers=len(self.answers),
            )
        )


@contextmanager
def simulated(
    job: Job, exported: ExportedJob, hosts: Sequence[Host], settings: Settings | None = None,
    behaviours: Mapping[str, Behaviour] | None = None, computer: Computer | None = None,
) -> Iterator[Simulation]:  # fmt: skip
    """A simulation ready to `run`, in a folder of its own; what came of it can be read until the block ends.

    `computer`: one that has computed the same job before, and remembers.
    """
    gc.freeze()  # what PyTorch and others have made at their import would be looked through again and again
    try:
        with private_folder() as folder:
            made = Simulation(folder, job, exported, hosts, settings or Settings(), behaviours or {}, computer)
            with made.prepared() as simulation:
                yield simulation
    finally:
        gc.unfreeze()
