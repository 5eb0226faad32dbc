"""A simulated host: the stock client's habits around a machine that computes, sends and is sometimes off.

Followed (BOINC 7.20.5 and later, client/{cs_scheduler,work_fetch,client_state}.cpp):
- it looks every 5 s whether to contact the project, never before the reply's request_delay has passed;
- results of our output template are reported at once (report_immediately);
- it asks while it has less work than its buffer; with a report it asks along;
- asked for and not given: it asks no more for 10 minutes, doubled each time up to a day, times 0.5 to 1.5; a finished
  upload ends that, and so does the moment of the reply's next_rpc_delay, which backs nothing off either;
- sticky input files stay on its disk, others go with the task.
Simplified: one file at a time on a line; files come whole; a client that has as many tasks as the project gives it
does not ask in vain; all runtimes are guessed right; nothing is suspended while the host is on.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from lxml import etree

from boinc_project import templates
from boinc_project.contract.microtask import UPDATE_FILE
from boinc_project.server.messages import HostInfo, ReportedResult, SchedulerReply, SchedulerRequest
from boinc_project.simulator.events import Event, Events
from boinc_project.simulator.hosts import Host, Interval
from boinc_project.simulator.lies import Behaviour
from boinc_project.simulator.station import Piece, Station
from boinc_project.states import ClientState

POLL_S = 5.0
MIN_BACKOFF_S, MAX_BACKOFF_S = 600.0, 86400.0
CLIENT_VERSION = 72005
PLATFORM = "x86_64-pc-linux-gnu"

#: Bytes of a scheduler request and of a reply without work, as the stock client and the embedded server send them.
REQUEST_BYTES, REPLY_BYTES = 8000, 2000


@dataclass(frozen=True)
class InputFile:
    """A file that a task needs, by its physical name."""

    name: str
    size: int
    sticky: bool


@dataclass(frozen=True)
class Work:
    """What a workunit asks of a host. `opened`: open name -> physical name."""

    name: str
    flops: float
    files: tuple[InputFile, ...]
    opened: dict[str, str]


class TaskFailed(Exception):
    """The application ends a task with an error."""

    def __init__(self, exit_status: int, words: str) -> None:
        super().__init__(words)
        self.exit_status = exit_status


@dataclass(eq=False)
class Task:
    """A copy of a workunit on a host."""

    name: str
    work: Work
    output: str  # physical name of the file to upload
    compute_s: float = 0.0
    failure: TaskFailed | None = None
    is_dropped: bool = False
    computing: Piece | None = None


@dataclass
class Traffic:
    """Bytes so far: input files, updates, and the scheduler's messages (by their usual size)."""

    down: int = 0
    up: int = 0
    messages: int = 0


@dataclass(frozen=True)
class Habits:
    """Preferences of the clients and the project's limit: seconds of work that they keep, tasks for each processor."""

    buffer_s: float = 0.6 * 86400
    tasks_per_processor: int = 2


class World(Protocol):
    """What a host meets outside."""

    events: Events

    def ask(self, request: SchedulerRequest) -> SchedulerReply:
        """A scheduler RPC."""

    def answer(self, client: Client, task: Task) -> bytes | None:
        """What the host gives back for a task; None: it is never heard of again. Raises TaskFailed."""

    def upload(self, name: str, data: bytes) -> None:
        """The upload handler gets a file."""


@dataclass(eq=False)
class Client:
    """One host and its client, from the moment `start` is called."""

    world: World
    host: Host
    key: str  # the account's
    behaviour: Behaviour
    habits: Habits
    draws: np.random.Generator
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        events = self.world.events
        self.begin = events.now
        self.processors = Station(events, self.host.processors)
        self._lines = {"down": Station(events, 1), "up": Station(events, 1)}
        self.hostid = 0
        self.tasks: dict[str, Task] = {}
        self.is_on = False
        self._seqno = 0
        self._finished: list[Task] = []
        self._disk: dict[str, InputFile] = {}
        self._intervals = self.host.intervals()
        self._not_before = 0.0  # min_rpc_time
        self._call_at = math.inf  # when the project wants to be called (next_rpc_delay)
        self._backoff, self._backoff_until = 0.0, 0.0
        self._planned: Event | None = None
        self._phase = float(self.draws.uniform(0, POLL_S))

    def start(self) -> None:
        self._await_next_interval()

    # On and off.

    def _await_next_interval(self) -> None:
        interval = next(self._intervals, None)
        if interval is None:
            self._leave()
        else:
            self.world.events.at(self.begin + interval[0], lambda: self._turn_on(interval))

    def _turn_on(self, interval: Interval) -> None:
        self.is_on = True
        for station in (self.processors, *self._lines.values()):
            station.turn_on()
        if interval[1] < math.inf:
            self.world.events.at(self.begin + interval[1], self._turn_off)
        self._plan()

    def _turn_off(self) -> None:
        self.is_on = False
        for station in (self.processors, *self._lines.values()):
            station.turn_off()
        self._plan()
        self._await_next_interval()

    def _leave(self) -> None:
        """Gone for good, with all that it had."""
        for station in (self.processors, *self._lines.values()):
            station.clear()
        self.tasks.clear()

    # Scheduler requests.

    @property
    def _wants_work(self) -> bool:
        """Whether it has less work than it keeps, and fewer tasks than the project lets it have."""
        most = self.habits.tasks_per_processor * self.host.processors
        return len(self.tasks) < most and self._buffered() < self.habits.buffer_s * self.host.processors

    def _buffered(self) -> float:
        """Seconds of work in hand."""
        return sum(task.work.flops / self.host.flops for task in self.tasks.values())

    def _plan(self) -> None:
        """Plan the next contact, if there is a reason for one."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
        if not self.is_on:
            return
        reasons = [self._call_at]
        if self._finished:
            reasons.append(0.0)
        if self._wants_work:
            reasons.append(self._backoff_until)
        if min(reasons) == math.inf:
            return
        now = self.world.events.now
        when = max(min(reasons), self._not_before, now)
        polled = self._phase + POLL_S * math.ceil((when - self._phase) / POLL_S)
        self._planned = self.world.events.at(polled, self._call)

    def _call(self) -> None:
        self._planned = None
        now = self.world.events.now
        is_called = now >= self._call_at
        # A report asks along, unless the client backs off.
        asks = self._wants_work and (is_called or now >= self._backoff_until)
        finished, self._finished = self._finished, []
        self._seqno += 1
        reply = self.world.ask(self._request(finished, asks))
        self.traffic.messages += REQUEST_BYTES + REPLY_BYTES
        if reply.host is not None and reply.host.id is not None:
            self.hostid, self._seqno = reply.host.id, 0
        self._not_before = now + reply.request_delay
        self._call_at = now + reply.next_rpc_delay if reply.next_rpc_delay > 0 else math.inf
        for name in (*reply.aborts, *reply.aborts_if_not_started):
            self._abort(name, even_if_begun=name in reply.aborts)
        works = {work.name: work for work in map(read_workunit, reply.workunits)}
        for text in reply.results:
            self._take(_task(text, works))
        if reply.results:
            self._backoff, self._backoff_until = 0.0, 0.0
        elif asks and not is_called:
            self._backoff = min(max(2 * self._backoff, MIN_BACKOFF_S), MAX_BACKOFF_S)
            self._backoff_until = now + self._backoff * float(self.draws.uniform(0.5, 1.5))
        self._plan()

    def _request(self, finished: Sequence[Task], asks: bool) -> SchedulerRequest:
        missing = self.habits.buffer_s * self.host.processors - self._buffered() if asks else 0.0
        idle = max(0, self.host.processors - len(self.tasks)) if asks else 0
        return SchedulerRequest(
            authenticator=self.key,
            hostid=self.hostid,
            rpc_seqno=self._seqno,
            core_client_version=CLIENT_VERSION,
            remote_address=self.host.address,
            allow_multiple_clients=True,
            work_req_seconds=missing,
            cpu_req_secs=missing,
            cpu_req_instances=float(idle),
            platforms=(PLATFORM,),
            host=HostInfo(
                domain_name=self.host.name,
                host_cpid=hashlib.md5(self.host.name.encode()).hexdigest(),
                p_ncpus=self.host.processors,
                p_vendor="simulated",
                p_fpops=self.host.flops,
                m_nbytes=16e9,
                d_total=1e12,
                d_free=1e11,
                n_bwdown=self.host.down,
                n_bwup=self.host.up,
            ),
            results=tuple(map(_reported, finished)),
            other_results=frozenset(self.tasks),
            other_results_complete=True,
        )  # fmt: skip

    # Tasks.

    def _take(self, task: Task) -> None:
        self.tasks[task.name] = task
        missing = [file for file in task.work.files if file.name not in self._disk]
        self._disk.update({file.name: file for file in missing})  # those that are on their way are not asked for again
        size = sum(file.size for file in missing)
        seconds = len(missing) * self.host.latency + size / self.host.down

        def arrived() -> None:
            self.traffic.down += size
            if not task.is_dropped:
                self._compute(task)

        self._lines["down"].add(seconds, arrived)

    def _compute(self, task: Task) -> None:
        seconds = self.behaviour.works * task.work.flops / self.host.flops
        if self.host.jitter:
            seconds *= math.exp(self.host.jitter * float(self.draws.standard_normal()))
        task.compute_s = seconds
        task.computing = self.processors.add(seconds, lambda: self._computed(task))

    def _computed(self, task: Task) -> None:
        if task.is_dropped:
            return
        try:
            data = self.world.answer(self, task)
        except TaskFailed as failure:
            task.failure = failure
            self._ready(task)
            return
        if data is None:
            self._end(task)
            return
        content = data

        def sent() -> None:
            self.world.upload(task.output, content)
            self.traffic.up += len(content)
            self._ready(task)

        self._lines["up"].add(self.host.latency + len(content) / self.host.up, sent)

    def _ready(self, task: Task) -> None:
        """The task can be reported."""
        self._end(task)
        self._finished.append(task)
        self._backoff, self._backoff_until = 0.0, 0.0
        self._plan()

    def _abort(self, name: str, *, even_if_begun: bool) -> None:
        task = self.tasks.get(name)
        if task is None:
            return
        has_begun = task.computing is not None and not self.processors.remove(task.computing)
        if even_if_begun or not has_begun:
            task.is_dropped = True
            self._end(task)

    def _end(self, task: Task) -> None:
        """The task is no more on the host; neither are the files that only it used."""
        self.tasks.pop(task.name, None)
        used = {file.name for other in self.tasks.values() for file in other.work.files}
        for file in task.work.files:
            if not file.sticky and file.name not in used:
                self._disk.pop(file.name, None)


def _reported(task: Task) -> ReportedResult:
    failure = task.failure
    return ReportedResult(
        name=task.name,
        client_state=int(ClientState.FILES_UPLOADED if failure is None else ClientState.COMPUTE_ERROR),
        exit_status=0 if failure is None else failure.exit_status,
        stderr_out="" if failure is None else str(failure),
        cpu_time=task.compute_s,
        elapsed_time=task.compute_s,
        app_version_num=100,
    )


@functools.lru_cache(maxsize=4096)  # the same for every copy
def read_workunit(text: str) -> Work:
    """A `<workunit>` of a reply, with its `<file_info>` elements."""
    root = etree.fromstring(f"<reply>{text}</reply>")
    files = tuple(
        InputFile(
            name=(info.findtext("name") or "").strip(),
            size=int(float(info.findtext("nbytes") or 0)),
            sticky=info.find("sticky") is not None,
        )
        for info in root.iterfind("file_info")
    )
    (unit,) = root.iterfind("workunit")
    opened = {
        (each.findtext("open_name") or "").strip(): (each.findtext("file_name") or "").strip()
        for each in unit.iterfind("file_ref")
    }
    return Work((unit.findtext("name") or "").strip(), float(unit.findtext("rsc_fpops_est") or 0), files, opened)


def _task(text: str, works: dict[str, Work]) -> Task:
    (result,) = etree.fromstring(f"<reply>{text}</reply>").iterfind("result")
    name, unit = ((result.findtext(tag) or "").strip() for tag in ("name", "wu_name"))
    output = templates.output_name(text, UPDATE_FILE)
    assert output is not None, name
    return Task(name, works[unit], output)
