"""A private stock BOINC client, started, watched and stopped by a program: for the demo and the tests.

Sources: BOINC `client/cs_cmdline.cpp`, `lib/cc_config.{h,cpp}`, `lib/prefs.cpp`, `client/boinc_cmd.cpp`. The
client is the unmodified `boinc` of the distribution, in a data directory of its own; it is spoken to with the
distribution's `boinccmd`, over loopback.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Seconds that a client may take until it answers, and until it has quit.
START_TIMEOUT_S = 30.0
QUIT_TIMEOUT_S = 30.0

_COMMAND_TIMEOUT_S = 60.0
_LOG_NAME = "client.log"


class StockClientError(RuntimeError):
    """The client did not do what was asked; the message says where its log is."""


def stock_client_available() -> bool:
    """Whether `boinc` and `boinccmd` are installed."""
    return shutil.which("boinc") is not None and shutil.which("boinccmd") is not None


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task as the client shows it."""

    name: str
    workunit: str
    state: str  # the client's words, such as `uploaded` or `downloaded`
    active_state: str  # such as EXECUTING, SUSPENDED, UNINITIALIZED
    exit_status: int
    fraction_done: float
    pid: int  # 0 if none runs
    ready_to_report: bool


@dataclass(frozen=True)
class ClientMessage:
    """A line of the client's event log."""

    number: int
    text: str


class StockClient:
    """One client process with its data directory.

    `ncpus` is the number of processors it believes to have; `options` are further `<options>` of
    cc_config.xml (they replace those chosen here). Nothing outside `data_dir` is written, and only this
    client's own process is ever stopped.
    """

    def __init__(
        self, data_dir: Path | str, *, ncpus: int = 1, options: Mapping[str, str | int | float] | None = None
    ) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.ncpus = ncpus
        self.options = dict(options or {})
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log_path(self) -> Path:
        """The client's log (its standard output)."""
        return self.data_dir / _LOG_NAME

    @property
    def pid(self) -> int:
        """The client's process id, 0 if it does not run."""
        return self.process.pid if self.is_running and self.process is not None else 0

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    # Starting and stopping.

    def start(self) -> None:
        """Start the client and wait until it answers. Raises StockClientError."""
        if self.is_running:
            return
        if not stock_client_available():
            raise StockClientError("the stock BOINC client is not installed; apt-get install boinc-client")
        self.data_dir.mkdir(parents=True, exist_ok=True)
        (self.data_dir / "cc_config.xml").write_text(self._cc_config())
        (self.data_dir / "global_prefs_override.xml").write_text(_PREFERENCES)
        self.port = _free_port()
        command = ["boinc", "--dir", str(self.data_dir), "--gui_rpc_port", str(self.port), "--no_gpus"]
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=self.data_dir,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if not self.is_running:
                raise StockClientError(f"the BOINC client stopped at once; see {self.log_path}")
            with contextlib.suppress(StockClientError):
                self.command("--get_host_info")
                return
            time.sleep(0.2)
        self.kill()
        raise StockClientError(f"the BOINC client did not answer within {START_TIMEOUT_S:.0f} s; see {self.log_path}")

    def quit(self, timeout: float = QUIT_TIMEOUT_S) -> None:
        """Ask the client to quit, its tasks too; kill it if it does not."""
        if self.process is None:
            return
        if self.is_running:
            with contextlib.suppress(StockClientError):
                self.command("--quit")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the client process alone: its tasks have to notice by themselves."""
        if self.process is not None:
            if self.is_running:
                os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def __enter__(self) -> StockClient:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.quit()

    # Asking and telling.

    def command(self, *arguments: str) -> str:
        """Run `boinccmd ARGUMENTS` on this client; returns what it prints. Raises StockClientError."""
        try:
            password = (self.data_dir / "gui_rpc_auth.cfg").read_text().strip()
        except OSError:
            raise StockClientError("the BOINC client is not up yet") from None
        full = ["boinccmd", "--host", f"127.0.0.1:{self.port}", "--passwd", password, *arguments]
        try:
            done = subprocess.run(
                full,
                capture_output=True,
                env=_environment(),
                timeout=_COMMAND_TIMEOUT_S,
                cwd=self.data_dir,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            raise StockClientError(f"boinccmd {arguments[0]} did not answer; see {self.log_path}") from None
        output = (done.stdout + done.stderr).decode("utf-8", "replace")
        if done.returncode != 0:
            raise StockClientError(f"boinccmd {arguments[0]} failed: {output.strip()[:200]}")
        return output

    def attach(self, url: str, key: str) -> None:
        """Attach to a project by master URL and account key; whether it worked shows later in `messages`."""
        self.command("--project_attach", url, key)

    def lookup_account(self, url: str, email: str, password: str) -> str:
        """The account key of an account, found by the client itself. Raises StockClientError."""
        return _account_key(self.command("--lookup_account", url, email, password))

    def create_account(self, url: str, email: str, password: str, name: str) -> str:
        """Create an account through the client; returns its key. Raises StockClientError."""
        return _account_key(self.command("--create_account", url, email, password, name))

    def project(self, url: str, operation: str) -> None:
        """`boinccmd --project URL OPERATION`: update, suspend, resume, reset, detach, nomorework, ..."""
        self.command("--project", url, operation)

    def task(self, url: str, name: str, operation: str) -> None:
        """`boinccmd --task URL NAME OPERATION`: suspend, resume or abort."""
        self.command("--task", url, name, operation)

    def suspend(self) -> None:
        """Suspend all computing."""
        self.command("--set_run_mode", "never")

    def resume(self) -> None:
        """Compute again."""
        self.command("--set_run_mode", "always")

    def tasks(self) -> list[Task]:
        """The tasks on the client."""
        blocks = re.split(r"^\d+\) -+$", self.command("--get_tasks"), flags=re.MULTILINE)[1:]
        return [_task(_fields(block)) for block in blocks]

    def messages(self, after: int = 0) -> list[ClientMessage]:
        """The event log, from message number `after` + 1 on."""
        found = []
        for line in self.command("--get_messages", str(after)).splitlines():
            head, separator, text = line.partition(": ")
            if separator and head.isdigit():
                found.append(ClientMessage(int(head), text))
        return found

    def project_dir(self, master_url: str) -> Path:
        """The client's folder for a project."""
        name = re.sub(r"[^A-Za-z0-9.-]", "_", master_url.partition("://")[2].rstrip("/"))
        return self.data_dir / "projects" / name

    def _cc_config(self) -> str:
        options: dict[str, str | int | float] = {
            "report_results_immediately": 1,
            "dont_contact_ref_site": 1,
            "no_info_fetch": 1,
            "skip_cpu_benchmarks": 1,
            "allow_multiple_clients": 1,
            "no_gpus": 1,
            "ncpus": self.ncpus,
            "max_file_xfers_per_project": 4,
            "fetch_minimal_work": 0,
            **self.options,
        }
        flags = "".join(f"<{name}>1</{name}>" for name in ("task", "file_xfer", "sched_ops", "task_debug"))
        lines = "\n".join(f"    <{name}>{value}</{name}>" for name, value in options.items())
        body = f"  <log_flags>{flags}</log_flags>\n  <options>\n{lines}\n  </options>"
        return f"<cc_config>\n{body}\n</cc_config>\n"


#: Work on a busy test machine too, keep a small queue, notice checkpoints every 10 s.
_PREFERENCES = """<global_preferences>
    <run_if_user_active>1</run_if_user_active>
    <run_on_batteries>1</run_on_batteries>
    <suspend_cpu_usage>0</suspend_cpu_usage>
    <work_buf_min_days>0.0001</work_buf_min_days>
    <work_buf_additional_days>0</work_buf_additional_days>
    <disk_interval>10</disk_interval>
    <leave_apps_in_memory>1</leave_apps_in_memory>
    <ram_max_used_busy_pct>90</ram_max_used_busy_pct>
    <ram_max_used_idle_pct>90</ram_max_used_idle_pct>
    <disk_min_free_gb>0</disk_min_free_gb>
    <disk_max_used_pct>100</disk_max_used_pct>
    <max_ncpus_pct>100</max_ncpus_pct>
    <cpu_usage_limit>100</cpu_usage_limit>
</global_preferences>
"""


def _environment() -> dict[str, str]:
    """The client honours proxies even for loopback, so they must go."""
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _account_key(output: str) -> str:
    found = re.search(r"account key: *(\S+)", output)
    if found is None:
        raise StockClientError(f"no account: {' '.join(output.split())[:200]}")
    return found[1]


def _fields(block: str) -> dict[str, str]:
    lines = (line.strip().partition(": ") for line in block.splitlines())
    return {name: value for name, separator, value in lines if separator}


def _task(fields: Mapping[str, str]) -> Task:
    return Task(
        name=fields.get("name", ""),
        workunit=fields.get("WU name", ""),
        state=fields.get("state", ""),
        active_state=fields.get("active_task_state", ""),
        exit_status=int(float(fields.get("exit status", "0") or 0)),
        fraction_done=float(fields.get("fraction done", "0") or 0),
        pid=int(fields.get("PID", "0") or 0),
        ready_to_report=fields.get("ready to report", "no") == "yes",
    )
