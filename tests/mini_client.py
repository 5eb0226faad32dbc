"""The client's side of one task, for tests: a slot as the BOINC client makes it, its messages, its way of
looking.

Two uses: `MiniClient` inside a test process, and `python tests/mini_client.py FOLDER COMMAND...`, which is
a client in a process of its own that can be killed (`spawn_client`).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

CHANNELS = (
    "process_control_request",
    "process_control_reply",
    "graphics_request",
    "graphics_reply",
    "heartbeat",
    "app_status",
    "trickle_up",
    "trickle_down",
)
AUTHENTICATOR = "f00dfeedf00dfeedf00dfeedf00dfeed"

INIT_DATA = """<app_init_data>
<major_version>7</major_version>
<minor_version>20</minor_version>
<release>5</release>
<app_version>100</app_version>
<userid>1</userid>
<teamid>0</teamid>
<hostid>7</hostid>
<app_name>gradient</app_name>
<project_preferences>
<apps_selected><ncpus>64</ncpus></apps_selected>
</project_preferences>
<user_name>Ann & Bob</user_name>
<project_dir>{project}</project_dir>
<boinc_dir>{boinc}</boinc_dir>
<authenticator>{authenticator}</authenticator>
<wu_name>{workunit}</wu_name>
<result_name>{workunit}_0</result_name>
<comm_obj_name>boinc_0</comm_obj_name>
<shm_key>-1</shm_key>
<slot>0</slot>
{client_pid}<wu_cpu_time>{cpu_time:f}</wu_cpu_time>
<starting_elapsed_time>0.000000</starting_elapsed_time>
<checkpoint_period>{checkpoint_period:f}</checkpoint_period>
<gpu_type></gpu_type>
<gpu_device_num>-1</gpu_device_num>
<ncpus>{ncpus:f}</ncpus>
<rsc_fpops_est>1000000000.000000</rsc_fpops_est>
<rsc_memory_bound>{memory:f}</rsc_memory_bound>
<rsc_disk_bound>1000000000.000000</rsc_disk_bound>
<host_info>
<p_ncpus>64</p_ncpus>
</host_info>
</app_init_data>
"""


@dataclass
class Status:
    """One app_status message."""

    current_cpu_time: float
    checkpoint_cpu_time: float
    fraction_done: float
    at: float = field(default_factory=time.monotonic)


@dataclass
class MiniClient:
    """A slot, and the messages to and from the task in it.

    `inputs` are contents by open name, placed in the project folder and linked; `outputs` are open names
    that get a link to a file that does not exist yet. `client_pid` 0 leaves the field out, as old clients
    do.
    """

    root: Path
    command: Sequence[str]
    inputs: Mapping[str, bytes] = field(default_factory=dict)
    outputs: Sequence[str] = ("out.bin",)
    workunit: str = "wu_1"
    client_pid: int = field(default_factory=os.getpid)
    checkpoint_period: float = 0.0
    ncpus: float = 1.0
    memory_bound: float = 2e9
    environment: Mapping[str, str] = field(default_factory=dict)
    heartbeat: bool = True

    def __post_init__(self) -> None:
        self.slot = self.root / "slots" / "0"
        self.project = self.root / "projects" / "example.org_train"
        self.statuses: list[Status] = []
        self.cpu_time = 0.0
        self._queue: list[str] = []
        self._lock = threading.Lock()
        self._ending = threading.Event()
        self._pump: threading.Thread | None = None
        self._memory: mmap.mmap | None = None
        self.process: subprocess.Popen[bytes] | None = None
        self.slot.mkdir(parents=True, exist_ok=True)
        self.project.mkdir(parents=True, exist_ok=True)
        for name, data in self.inputs.items():
            (self.project / self.physical(name)).write_bytes(data)
        for name in (*self.inputs, *self.outputs):
            target = f"../../projects/{self.project.name}/{self.physical(name)}"
            (self.slot / name).write_text(f"<soft_link>{target}</soft_link>\n")

    def physical(self, name: str) -> str:
        """The file's name in the project folder."""
        return f"{self.workunit}_{name}"

    def output(self, name: str = "out.bin") -> Path:
        """Where an output must appear."""
        return self.project / self.physical(name)

    def start(self) -> subprocess.Popen[bytes]:
        """Start the task, or start it again after it ended, as the client does."""
        self._stop_pump()
        with contextlib.suppress(FileNotFoundError):
            (self.slot / "boinc_temporary_exit").unlink()
        (self.slot / "init_data.xml").write_text(
            INIT_DATA.format(
                project=self.project,
                boinc=self.root,
                authenticator=AUTHENTICATOR,
                workunit=self.workunit,
                client_pid=f"<client_pid>{self.client_pid}</client_pid>\n" if self.client_pid else "",
                cpu_time=self.cpu_time,
                checkpoint_period=self.checkpoint_period,
                ncpus=self.ncpus,
                memory=self.memory_bound,
            ),
            encoding="utf-8",
        )
        (self.slot / "boinc_mmap_file").write_bytes(bytes(8192))
        with open(self.slot / "boinc_mmap_file", "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 8192)
        with open(self.slot / "stderr.txt", "ab") as stderr:
            self.process = subprocess.Popen(
                list(self.command),
                cwd=self.slot,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,  # no controlling terminal, as under a client started at boot
                env={**os.environ, **self.environment},
            )
        self._queue.clear()
        self._ending = threading.Event()
        self._pump = threading.Thread(target=self._messages, args=(self._memory, self._ending), daemon=True)
        self._pump.start()
        return self.process

    def _messages(self, memory: mmap.mmap, ending: threading.Event) -> None:
        next_beat = 0.0
        while not ending.wait(0.05):
            now = time.monotonic()
            if self.heartbeat and now >= next_beat:
                next_beat = now + 1
                self._put(memory, "heartbeat", "<heartbeat/>\n<wss>1e6</wss>\n<max_wss>1e9</max_wss>\n")
            with self._lock:
                if self._queue and self._put(memory, "process_control_request", self._queue[0]):
                    self._queue.pop(0)
            text = self._take(memory, "app_status")
            if text:
                values = {tag: float(value) for tag, value in re.findall(r"<(\w+)>([^<]*)</", text)}
                status = Status(values["current_cpu_time"], values["checkpoint_cpu_time"], values["fraction_done"])
                if self.statuses and status.checkpoint_cpu_time != self.statuses[-1].checkpoint_cpu_time:
                    self.cpu_time = status.checkpoint_cpu_time
                self.statuses.append(status)

    @staticmethod
    def _put(memory: mmap.mmap, channel: str, text: str) -> bool:
        start = 1024 * CHANNELS.index(channel)
        if memory[start]:
            return False
        data = text.encode() + b"\0"
        memory[start + 1 : start + 1 + len(data)] = data
        memory[start] = 1
        return True

    @staticmethod
    def _take(memory: mmap.mmap, channel: str) -> str | None:
        start = 1024 * CHANNELS.index(channel)
        if not memory[start]:
            return None
        text = memory[start + 1 : start + 1024].split(b"\0")[0].decode()
        memory[start] = 0
        return text

    def send(self, text: str) -> None:
        """Queue a process-control message, e.g. "<suspend/>"."""
        with self._lock:
            self._queue.append(text)

    def suspend(self) -> None:
        self.send("<suspend/>")

    def resume(self) -> None:
        self.send("<resume/>")

    def quit(self) -> None:
        self.send("<quit/>")

    def abort(self) -> None:
        self.send("<abort/>")

    def all_read(self) -> bool:
        """Whether the task has taken every control message."""
        assert self._memory is not None
        with self._lock:
            return not self._queue and not self._memory[0]

    def wait(self, timeout: float = 60) -> int:
        """The task's exit code; its last status is read."""
        assert self.process is not None
        code = self.process.wait(timeout)
        time.sleep(0.1)
        self._stop_pump()
        return code

    def _stop_pump(self) -> None:
        if self._pump is not None:
            self._ending.set()
            self._pump.join()
            self._pump = None

    def processes(self) -> list[psutil.Process]:
        """Every process of the task: all members of the session it was started in, the dead ones left out."""
        assert self.process is not None
        return session_members(self.process.pid)

    def tree_cpu(self) -> float:
        """CPU seconds used so far by the processes of the task that live."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def finish_status(self) -> int | None:
        """The status in the finish marker, None without one."""
        path = self.slot / "boinc_finish_called"
        return int(path.read_text().split("\n")[0]) if path.exists() else None

    def temporary_exit(self) -> tuple[int, str] | None:
        """(delay, reason) of a temporary exit, None without one."""
        path = self.slot / "boinc_temporary_exit"
        if not path.exists():
            return None
        lines = path.read_text().split("\n")
        return int(lines[0]), lines[1]

    def stderr(self) -> str:
        """stderr.txt; fails if it is not valid UTF-8."""
        return (self.slot / "stderr.txt").read_bytes().decode("utf-8")

    def fraction_done(self) -> float:
        return self.statuses[-1].fraction_done if self.statuses else 0.0

    def close(self) -> None:
        """End whatever is left of the task (only what this client started)."""
        self._stop_pump()
        if self.process is not None:
            for process in self.processes():
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self.process.wait(10)


def session_members(session: int) -> list[psutil.Process]:
    """The living processes of a session (zombies are not living)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def wait_for(condition: object, timeout: float, what: str) -> None:
    """Wait until `condition()` is true; fails with `what` after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    assert callable(condition)
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what}"
        time.sleep(0.05)


def spawn_client(root: Path, command: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A client in a process of its own, running `command` in a slot under `root`; returns it and the task's
    pid."""
    client = subprocess.Popen(
        [sys.executable, __file__, str(root), *command], stdout=subprocess.PIPE, start_new_session=True
    )
    assert client.stdout is not None
    with client.stdout:
        task = int(client.stdout.readline())
    return client, task


def main() -> None:
    client = MiniClient(Path(sys.argv[1]), sys.argv[2:])
    print(client.start().pid, flush=True)
    assert client.process is not None
    client.process.wait()


if __name__ == "__main__":
    main()
