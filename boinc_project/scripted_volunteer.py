"""A scripted volunteer: speaks the client's side of BOINC's protocol with any server, without a BOINC client.

Used for load, fault and attack tests, for benchmarks, and for the demo where the stock client cannot be
installed. Sources: BOINC `client/{cs_scheduler,file_xfer,app_start}.cpp` (requests, uploads, slots),
`lib/app_ipc.cpp` (init_data.xml, shared memory). It keeps its state in memory only.

In call order: `ScriptedVolunteer.run_once` -> `scheduler_rpc` -> `_fetch` (downloads, checked) -> `_compute`
(a callable, a command in a slot, or the downloaded app itself) -> `upload` -> the report in the next RPC.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import mmap
import os
import re
import shlex
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.sax.saxutils import escape

import requests
from lxml import etree

from boinc_project.server.accounts import password_hash
from boinc_project.signing import PublicKey

log = logging.getLogger(__name__)

#: Files smaller than this are sent without asking how much of them is there (BOINC `client/file_xfer.cpp`).
SIZE_QUERY_BYTES = 8192

#: Uploads are tried this often before the task counts as failed; the pause between tries in seconds.
UPLOAD_TRIES, UPLOAD_PAUSE_S = 8, 0.5

_TIMEOUT_S = 60.0
_PLATFORM = "x86_64-pc-linux-gnu"
_ERR_RESULT_DOWNLOAD, _ERR_RESULT_UPLOAD = -186, -187
_UPLOADED, _DOWNLOADING, _COMPUTE_ERROR, _UPLOAD_FAILED = 5, 1, 3, 7
_MMAP_BYTES, _HEARTBEAT_AT, _STATUS_AT = 8192, 4 * 1024, 5 * 1024


class ProtocolError(RuntimeError):
    """The server answered something that a client could not use."""


@dataclass(frozen=True, kw_only=True)
class FileInfo:
    """A `<file_info>` of a reply."""

    name: str
    urls: tuple[str, ...]
    md5: str = ""
    nbytes: int = -1  # -1: not given
    max_nbytes: float = 0.0
    certificate: str = ""  # xml_signature of an output file, without white space
    signature: str = ""  # file_signature of an application file
    sticky: bool = False
    executable: bool = False


@dataclass(frozen=True, kw_only=True)
class FileRef:
    """A `<file_ref>`: the file's name in the slot."""

    file: FileInfo
    open_name: str
    main_program: bool = False
    copy_file: bool = False
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class VolunteerTask:
    """A result to compute, with everything that the reply said about it."""

    name: str
    workunit: str
    app_name: str
    version_num: int
    plan_class: str
    command_line: str
    deadline: float
    inputs: tuple[FileRef, ...]
    outputs: tuple[FileRef, ...]
    app_files: tuple[FileRef, ...]
    avg_ncpus: float
    flops: float
    rsc_fpops_est: float
    rsc_fpops_bound: float
    rsc_memory_bound: float
    rsc_disk_bound: float
    project_dir: Path

    def input_path(self, open_name: str) -> Path:
        """Where the input file with this open name lies."""
        return self._path(self.inputs, open_name)

    def output_path(self, open_name: str) -> Path:
        """Where the output file with this open name must be written."""
        return self._path(self.outputs, open_name)

    def _path(self, references: Sequence[FileRef], open_name: str) -> Path:
        for reference in references:
            if reference.open_name == open_name:
                return self.project_dir / reference.file.name
        raise KeyError(f"task {self.name} has no file with the open name {open_name!r}")


@dataclass(frozen=True, kw_only=True)
class FinishedTask:
    """A task that was computed (or failed) and is still to be reported."""

    task: VolunteerTask
    state: int
    exit_status: int
    elapsed: float  # seconds
    stderr: str
    files_xml: str


@dataclass(frozen=True, kw_only=True)
class RpcReply:
    """What a scheduler reply said."""

    tasks: tuple[VolunteerTask, ...]
    acks: tuple[str, ...]
    aborts: tuple[str, ...]
    messages: tuple[str, ...]
    request_delay: float
    next_rpc_delay: float
    hostid: int | None
    text: str = field(repr=False)


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """How this volunteer deviates from an honest one; the default does not."""

    change_output: Callable[[VolunteerTask, str, bytes], bytes] | None = None  # (task, open name, content)
    upload: bool = True  # False: reports success without uploading
    report: bool = True  # False: computes and uploads, then is never heard of again
    late_seconds: float = 0.0  # waits so long between computing and uploading
    exit_status: int | None = None  # reports this error instead of computing


#: Computes a task in a slot folder and returns its exit status.
Compute = Callable[[VolunteerTask, Path], int]


def create_account(master_url: str, email: str, password: str, name: str) -> str:
    """Create an account by web RPC; returns its key. ProtocolError with the server's message otherwise."""
    parameters = {"email_addr": email, "passwd_hash": password_hash(password, email), "user_name": name}
    return _account_key(_get(master_url + "create_account.php", parameters))


def lookup_account(master_url: str, email: str, password: str) -> str:
    """The key of an account, by web RPC."""
    parameters = {"email_addr": email, "passwd_hash": password_hash(password, email)}
    return _account_key(_get(master_url + "lookup_account.php", parameters))


class ScriptedVolunteer:
    """One host of one user.

    Exactly one way of computing: `compute` (a Python callable), `command` (run in a slot like an app), or
    neither (the downloaded main program is run in a slot). `data_dir` holds `projects/` and `slots/` as a
    client's data directory does. `coprocs_xml` is put into the request's `<coprocs>` as it is.
    """

    def __init__(
        self,
        master_url: str,
        key: str,
        data_dir: Path | str,
        *,
        name: str = "scripted",
        compute: Compute | None = None,
        command: Sequence[str] | None = None,
        ncpus: int = 1,
        p_fpops: float = 4e9,
        platform: str = _PLATFORM,
        coprocs_xml: str = "",
        behaviour: Behaviour | None = None,
    ) -> None:
        self.master_url, self.key = master_url, key
        self.data_dir = Path(data_dir).resolve()
        self.name, self.ncpus, self.p_fpops, self.platform = name, ncpus, p_fpops, platform
        self.compute, self.command = compute, command
        self.coprocs_xml = coprocs_xml
        self.behaviour = behaviour or Behaviour()
        self.hostid, self.rpc_seqno = 0, 0
        self.scheduler_url = ""
        self.code_sign_key = ""
        self.queue: list[VolunteerTask] = []
        self.finished: list[FinishedTask] = []
        self.reported = 0
        self._session = requests.Session()
        self._session.trust_env = False
        folder = re.sub(r"[^A-Za-z0-9.-]", "_", master_url.partition("://")[2].rstrip("/"))
        self.project_dir = self.data_dir / "projects" / folder
        self.project_dir.mkdir(parents=True, exist_ok=True)

    # The loop of a client.

    def run_once(self, *, seconds: float = 1.0, instances: float | None = None) -> int:
        """Ask for work, do it all, report it; returns the number of tasks reported.

        `instances` defaults to the number of processors: one task for each.
        """
        wanted = float(self.ncpus) if instances is None else instances
        self.queue += self.scheduler_rpc(seconds, wanted).tasks
        while self.queue:
            finished = self.perform(self.queue.pop(0))
            if self.behaviour.report:
                self.finished.append(finished)
        before = self.reported
        if self.finished:
            self.scheduler_rpc()
        return self.reported - before

    def run(self, until: Callable[[], bool], *, pause: float = 1.0) -> int:
        """Repeat until `until()`, waiting `pause` seconds when there was no work; returns tasks reported."""
        total = 0
        while not until():
            done = self.run_once()
            total += done
            if not done:
                time.sleep(pause)
        return total

    # Scheduler.

    def scheduler_rpc(self, seconds: float = 0.0, instances: float = 0.0) -> RpcReply:
        """One RPC: reports what is finished and asks for work if an argument is above 0."""
        if not self.scheduler_url:
            self.scheduler_url = self._find_scheduler()
        self.rpc_seqno += 1
        response = self._session.post(
            self.scheduler_url, data=self.request_body(seconds, instances), timeout=_TIMEOUT_S
        )
        response.raise_for_status()
        reply = self._parse(response.content)
        if reply.hostid is not None:
            self.hostid, self.rpc_seqno = reply.hostid, 0
        acknowledged = set(reply.acks)
        self.reported += sum(1 for each in self.finished if each.task.name in acknowledged)
        self.finished = [each for each in self.finished if each.task.name not in acknowledged]
        dropped = set(reply.aborts)
        self.queue = [task for task in self.queue if task.name not in dropped]
        return reply

    def request_body(self, seconds: float = 0.0, instances: float = 0.0) -> bytes:
        """The request as bytes."""
        held = [*(task.name for task in self.queue)]
        lines = [
            "<scheduler_request>",
            f"    <authenticator>{self.key}</authenticator>",
            f"    <hostid>{self.hostid}</hostid>",
            f"    <rpc_seqno>{self.rpc_seqno}</rpc_seqno>",
            "    <core_client_major_version>7</core_client_major_version>",
            "    <core_client_minor_version>20</core_client_minor_version>",
            "    <core_client_release>5</core_client_release>",
            "    <allow_multiple_clients>1</allow_multiple_clients>",
            f"    <work_req_seconds>{seconds:f}</work_req_seconds>",
            f"    <cpu_req_secs>{seconds:f}</cpu_req_secs>",
            f"    <cpu_req_instances>{instances:f}</cpu_req_instances>",
            f"    <platform_name>{self.platform}</platform_name>",
            *([f"<code_sign_key>\n{self.code_sign_key}\n</code_sign_key>"] if self.code_sign_key else []),
            "<host_info>",
            f"    <domain_name>{escape(self.name)}</domain_name>",
            f"    <host_cpid>{hashlib.md5((self.name + self.key).encode()).hexdigest()}</host_cpid>",
            f"    <p_ncpus>{self.ncpus}</p_ncpus>",
            "    <p_vendor>Scripted</p_vendor>",
            "    <p_model>Scripted volunteer</p_model>",
            f"    <p_fpops>{self.p_fpops:f}</p_fpops>",
            "    <m_nbytes>16000000000.000000</m_nbytes>",
            "    <d_free>100000000000.000000</d_free>",
            "    <os_name>Linux</os_name>",
            "</host_info>",
            f"<coprocs>{self.coprocs_xml}</coprocs>",
            *(_report_xml(each, self.platform) for each in self.finished),
            "<other_results>",
            *(f"<other_result><name>{escape(name)}</name></other_result>" for name in held),
            "</other_results>",
            "</scheduler_request>\n",
        ]
        return "\n".join(lines).encode()

    def _find_scheduler(self) -> str:
        page = _get(self.master_url)
        found = re.search(r"<scheduler>\s*(\S+?)\s*</scheduler>", page) or re.search(
            r'<link rel="boinc_scheduler" href="([^"]+)"', page
        )
        if found is None:
            raise ProtocolError(f"{self.master_url} names no scheduler")
        return found[1]

    def _parse(self, content: bytes) -> RpcReply:
        root = _xml(content)
        if root is None or root.tag != "scheduler_reply":
            raise ProtocolError(f"not a scheduler reply: {content[:200]!r}")
        key = (root.findtext("code_sign_key") or "").strip()
        if key and not self.code_sign_key:
            self.code_sign_key = key  # trusted on first use, as the client does
        hostid = root.findtext("hostid")
        return RpcReply(
            tasks=tuple(_Tasks(root, self.project_dir).all()),
            acks=tuple(_texts(root, "result_ack/name")),
            aborts=(
                *_texts(root, "result_abort/name"),
                *_texts(root, "result_abort_if_not_started/name"),
            ),
            messages=tuple((each.text or "").strip() for each in root.iterfind("message")),
            request_delay=_number(root, "request_delay"),
            next_rpc_delay=_number(root, "next_rpc_delay"),
            hostid=int(hostid) if hostid else None,
            text=content.decode("utf-8", "replace"),
        )

    # One task.

    def perform(self, task: VolunteerTask) -> FinishedTask:
        """Download, compute and upload a task; a failure becomes the report of an error."""
        started = time.monotonic()
        state, exit_status, stderr, files_xml = _UPLOADED, 0, "", ""
        try:
            if self.behaviour.exit_status is not None:
                state, exit_status = _COMPUTE_ERROR, self.behaviour.exit_status
            else:
                self._fetch(task)
                exit_status, stderr = self._compute(task)
                if exit_status:
                    state = _COMPUTE_ERROR
                else:
                    time.sleep(self.behaviour.late_seconds)
                    files_xml = self._send_outputs(task)
        except _DownloadFailed as error:
            state, exit_status, stderr = _DOWNLOADING, _ERR_RESULT_DOWNLOAD, str(error)
        except _UploadFailed as error:
            state, exit_status, stderr = _UPLOAD_FAILED, _ERR_RESULT_UPLOAD, str(error)
        self._tidy(task)
        return FinishedTask(
            task=task,
            state=state,
            exit_status=exit_status,
            elapsed=time.monotonic() - started,
            stderr=stderr,
            files_xml=files_xml,
        )

    def _fetch(self, task: VolunteerTask) -> None:
        for reference in (*task.inputs, *task.app_files):
            self._download(reference.file, is_app_file=reference in task.app_files)

    def _download(self, file: FileInfo, *, is_app_file: bool) -> None:
        path = self.project_dir / file.name
        if not path.exists():
            content = self._content(file)
            self._check(file, content, is_app_file)
            path.write_bytes(content)
        if file.executable:
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def _content(self, file: FileInfo) -> bytes:
        failure = "no URL"
        for url in file.urls:
            try:
                response = self._session.get(url, timeout=_TIMEOUT_S)
            except requests.RequestException as error:
                failure = str(error)
                continue
            if response.status_code == 200:
                return response.content
            failure = f"HTTP status {response.status_code}"
        raise _DownloadFailed(f"{file.name}: {failure}")

    def _check(self, file: FileInfo, content: bytes, is_app_file: bool) -> None:
        if file.nbytes >= 0 and len(content) != file.nbytes:
            raise _DownloadFailed(f"{file.name} has {len(content)} bytes, expected {file.nbytes}")
        if is_app_file:
            key = PublicKey.parse(self.code_sign_key)
            if not key.verify(content, file.signature):
                raise _DownloadFailed(f"signature verification failed for {file.name}")
        elif file.md5 and hashlib.md5(content).hexdigest() != file.md5:
            raise _DownloadFailed(f"MD5 check failed for {file.name}")

    def _compute(self, task: VolunteerTask) -> tuple[int, str]:
        slot = self.data_dir / "slots" / "0"
        shutil.rmtree(slot, ignore_errors=True)
        slot.mkdir(parents=True)
        if self.compute is not None:
            return self.compute(task, slot), ""
        return _SlotRun(self, task, slot).run()

    def _send_outputs(self, task: VolunteerTask) -> str:
        """Upload the outputs; returns the `<file_info>` elements for the report."""
        described = []
        for reference in task.outputs:
            path = self.project_dir / reference.file.name
            if not path.exists():
                if reference.optional:
                    continue
                raise _UploadFailed(f"output file {reference.file.name} absent")
            content = path.read_bytes()
            if self.behaviour.change_output is not None:
                content = self.behaviour.change_output(task, reference.open_name, content)
            if self.behaviour.upload:
                self.upload(reference.file, content)
            described.append(_output_xml(reference.file, content))
        return "".join(described)

    def _tidy(self, task: VolunteerTask) -> None:
        """As the client: outputs and inputs that are not sticky go when the task ends."""
        for reference in (*task.inputs, *task.outputs):
            if not reference.file.sticky:
                (self.project_dir / reference.file.name).unlink(missing_ok=True)

    # Uploads.

    def upload(self, file: FileInfo, content: bytes) -> None:
        """Upload one output, resuming where the server says; raises if the server gives up on it."""
        message = "no URL"
        for attempt in range(UPLOAD_TRIES):
            if attempt:
                time.sleep(UPLOAD_PAUSE_S)
            try:
                offset = self._uploaded_size(file) if len(content) >= SIZE_QUERY_BYTES or attempt else 0
                if offset >= len(content) and content:
                    return
                status, message = self.upload_request(file, content, offset)
            except (requests.RequestException, ProtocolError) as error:
                status, message = 1, str(error)
            if status == 0:
                return
            if status < 0:
                break
        raise _UploadFailed(f"upload of {file.name} failed: {message}")

    def upload_request(self, file: FileInfo, content: bytes, offset: int = 0) -> tuple[int, str]:
        """One upload POST; returns (status, message) of the reply."""
        body = upload_body(file, content, offset)
        status, message, _ = _upload_reply(self._post_upload(file, body))
        return status, message

    def _uploaded_size(self, file: FileInfo) -> int:
        query = (
            "<data_server_request>\n    <core_client_major_version>7</core_client_major_version>\n"
            f"    <get_file_size>{file.name}</get_file_size>\n</data_server_request>\n"
        )
        status, message, size = _upload_reply(self._post_upload(file, query.encode()))
        if status != 0 or size is None:
            raise ProtocolError(message or "no file size in the reply")
        return size

    def _post_upload(self, file: FileInfo, body: bytes) -> bytes:
        response = self._session.post(file.urls[0], data=body, timeout=_TIMEOUT_S)
        response.raise_for_status()
        return response.content


class _DownloadFailed(Exception):
    pass


class _UploadFailed(Exception):
    pass


def upload_body(file: FileInfo, content: bytes, offset: int = 0) -> bytes:
    """The body of an upload request, as the stock client writes it."""
    header = (
        "<data_server_request>\n"
        "    <core_client_major_version>7</core_client_major_version>\n"
        "    <core_client_minor_version>20</core_client_minor_version>\n"
        "    <core_client_release>5</core_client_release>\n"
        f"<file_upload>\n<file_info>\n<name>{file.name}</name>\n"
        f"<xml_signature>\n{file.certificate}</xml_signature>\n"
        f"<max_nbytes>{file.max_nbytes:.0f}</max_nbytes>\n</file_info>\n"
        f"<nbytes>{len(content)}</nbytes>\n<md5_cksum>{hashlib.md5(content).hexdigest()}</md5_cksum>\n"
        f"<offset>{offset}</offset>\n<data>\n"
    )
    return header.encode() + content[offset:]


class _SlotRun:
    """Runs the app in a slot as the client does: link files, init_data.xml, shared memory with heartbeats."""

    def __init__(self, volunteer: ScriptedVolunteer, task: VolunteerTask, slot: Path) -> None:
        self.volunteer, self.task, self.slot = volunteer, task, slot
        self.relative = f"../../projects/{task.project_dir.name}"

    def run(self) -> tuple[int, str]:
        """(exit status, end of stderr) of the task; temporary exits are waited out."""
        self._prepare()
        while True:
            returncode = self._run_process()
            stderr = (self.slot / "stderr.txt").read_bytes()[-63000:].decode("utf-8", "replace")
            finish, pause = self.slot / "boinc_finish_called", self.slot / "boinc_temporary_exit"
            if finish.exists():
                return int(finish.read_text().split("\n")[0] or 0), stderr
            if pause.exists() and returncode == 0:
                seconds = int(pause.read_text().split("\n")[0] or 1)
                pause.unlink()
                time.sleep(min(seconds, 60))
                continue
            return returncode or 1, stderr

    def _command(self) -> list[str]:
        if self.volunteer.command is not None:
            return [*self.volunteer.command, *shlex.split(self.task.command_line)]
        main = next(each for each in self.task.app_files if each.main_program)
        return [f"{self.relative}/{main.file.name}", *shlex.split(self.task.command_line)]

    def _prepare(self) -> None:
        for reference in (*self.task.inputs, *self.task.outputs, *self.task.app_files):
            if reference.open_name and not reference.copy_file:
                link = f"<soft_link>{self.relative}/{reference.file.name}</soft_link>\n"
                (self.slot / reference.open_name).write_text(link)
            elif reference.copy_file and reference in self.task.inputs:
                shutil.copy(self.task.project_dir / reference.file.name, self.slot / reference.open_name)
        (self.slot / "init_data.xml").write_text(self._init_data())
        (self.slot / "boinc_mmap_file").write_bytes(bytes(_MMAP_BYTES))

    def _run_process(self) -> int:
        ended = threading.Event()
        with (
            (self.slot / "boinc_mmap_file").open("r+b") as file,
            mmap.mmap(file.fileno(), _MMAP_BYTES) as memory,
            (self.slot / "stderr.txt").open("ab") as stderr,
        ):
            process = subprocess.Popen(
                self._command(),
                cwd=self.slot,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                env={**os.environ, "LD_LIBRARY_PATH": f"{self.relative}:.:../.."},
            )
            beat = threading.Thread(target=_heartbeats, args=(memory, ended), daemon=True)
            beat.start()
            try:
                returncode = process.wait()
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
                ended.set()
                beat.join()
        self._move_copied_outputs()
        return returncode

    def _move_copied_outputs(self) -> None:
        for reference in self.task.outputs:
            produced = self.slot / reference.open_name
            if reference.copy_file and produced.exists():
                shutil.move(produced, self.task.project_dir / reference.file.name)

    def _init_data(self) -> str:
        task, volunteer = self.task, self.volunteer
        fields: dict[str, object] = {
            "major_version": 7,
            "minor_version": 20,
            "release": 5,
            "app_version": task.version_num,
            "hostid": volunteer.hostid,
            "app_name": task.app_name,
            "project_dir": escape(str(task.project_dir)),
            "boinc_dir": escape(str(volunteer.data_dir)),
            "authenticator": volunteer.key,
            "wu_name": task.workunit,
            "result_name": task.name,
            "shm_key": -1,
            "slot": 0,
            "client_pid": os.getpid(),
            "wu_cpu_time": 0.0,
            "starting_elapsed_time": 0.0,
            "checkpoint_period": 60.0,
            "fraction_done_start": 0.0,
            "fraction_done_end": 1.0,
            "gpu_type": "",
            "gpu_device_num": -1,
            "gpu_opencl_dev_index": -1,
            "gpu_usage": 0.0,
            "ncpus": task.avg_ncpus,
            "rsc_fpops_est": task.rsc_fpops_est,
            "rsc_fpops_bound": task.rsc_fpops_bound,
            "rsc_memory_bound": task.rsc_memory_bound,
            "rsc_disk_bound": task.rsc_disk_bound,
            "computation_deadline": task.deadline,
        }
        lines = "".join(f"<{name}>{value}</{name}>\n" for name, value in fields.items())
        host = f"<host_info>\n<p_ncpus>{volunteer.ncpus}</p_ncpus>\n</host_info>\n"
        return f"<app_init_data>\n{lines}{host}</app_init_data>\n"


def _heartbeats(memory: mmap.mmap, ended: threading.Event) -> None:
    """Beat once a second and take the app's status messages, as a client does."""
    text = b"<heartbeat/>\0"
    while True:
        if not memory[_HEARTBEAT_AT]:
            memory[_HEARTBEAT_AT + 1 : _HEARTBEAT_AT + 1 + len(text)] = text
            memory[_HEARTBEAT_AT] = 1
        memory[_STATUS_AT] = 0
        if ended.wait(1.0):
            return


class _Tasks:
    """The tasks of a reply: results with their workunit, app version and files put together."""

    def __init__(self, root: etree._Element, project_dir: Path) -> None:
        self.root, self.project_dir = root, project_dir
        self.files = {info.name: info for info in map(_file_info, root.iterfind("file_info"))}
        self.workunits = {_text(each, "name"): each for each in root.iterfind("workunit")}
        self.versions = {_version_key(each): each for each in root.iterfind("app_version")}

    def all(self) -> list[VolunteerTask]:
        return [self._task(result) for result in self.root.iterfind("result")]

    def _task(self, result: etree._Element) -> VolunteerTask:
        workunit = self.workunits.get(_text(result, "wu_name"))
        if workunit is None:
            raise ProtocolError(f"result {_text(result, 'name')} has no workunit in the reply")
        app_name = _text(workunit, "app_name")
        version = self.versions.get(
            (app_name, _text(result, "platform"), _text(result, "version_num"), _text(result, "plan_class"))
        )
        if version is None:
            raise ProtocolError(f"result {_text(result, 'name')} has no app version in the reply")
        return VolunteerTask(
            name=_text(result, "name"),
            workunit=_text(workunit, "name"),
            app_name=app_name,
            version_num=int(_number(result, "version_num")),
            plan_class=_text(result, "plan_class"),
            command_line=" ".join(_texts(workunit, "command_line")),
            deadline=_number(result, "report_deadline"),
            inputs=self._references(workunit),
            outputs=self._references(result),
            app_files=self._references(version),
            avg_ncpus=_number(version, "avg_ncpus"),
            flops=_number(version, "flops"),
            rsc_fpops_est=_number(workunit, "rsc_fpops_est"),
            rsc_fpops_bound=_number(workunit, "rsc_fpops_bound"),
            rsc_memory_bound=_number(workunit, "rsc_memory_bound"),
            rsc_disk_bound=_number(workunit, "rsc_disk_bound"),
            project_dir=self.project_dir,
        )

    def _references(self, element: etree._Element) -> tuple[FileRef, ...]:
        return tuple(
            FileRef(
                file=self.files[_text(each, "file_name")],
                open_name=_text(each, "open_name"),
                main_program=each.find("main_program") is not None,
                copy_file=each.find("copy_file") is not None,
                optional=each.find("optional") is not None,
            )
            for each in element.iterfind("file_ref")
        )


def _version_key(element: etree._Element) -> tuple[str, str, str, str]:
    names = ("app_name", "platform", "version_num", "plan_class")
    app_name, platform, version_num, plan_class = (_text(element, name) for name in names)
    return app_name, platform, version_num, plan_class


def _file_info(element: etree._Element) -> FileInfo:
    urls = [*_texts(element, "url"), *_texts(element, "download_url"), *_texts(element, "upload_url")]
    nbytes = element.findtext("nbytes")
    return FileInfo(
        name=_checked_name(_text(element, "name")),
        urls=tuple(urls),
        md5=_text(element, "md5_cksum"),
        nbytes=int(float(nbytes)) if nbytes else -1,
        max_nbytes=_number(element, "max_nbytes"),
        certificate=_text(element, "xml_signature"),
        signature=_text(element, "file_signature"),
        sticky=element.find("sticky") is not None,
        executable=element.find("executable") is not None,
    )


def _checked_name(name: str) -> str:
    if not name or "/" in name or ".." in name or "%" in name:
        raise ProtocolError(f"bad file name {name!r} in a reply")
    return name


def _report_xml(finished: FinishedTask, platform: str) -> str:
    task = finished.task
    stderr = finished.stderr.replace("]]>", "]] >")
    return (
        f"<result>\n    <name>{escape(task.name)}</name>\n"
        f"    <final_cpu_time>{finished.elapsed:f}</final_cpu_time>\n"
        f"    <final_elapsed_time>{finished.elapsed:f}</final_elapsed_time>\n"
        f"    <exit_status>{finished.exit_status}</exit_status>\n    <state>{finished.state}</state>\n"
        f"    <platform>{platform}</platform>\n    <version_num>{task.version_num}</version_num>\n"
        f"    <plan_class>{escape(task.plan_class)}</plan_class>\n"
        f"    <app_version_num>{task.version_num}</app_version_num>\n"
        "<stderr_out>\n<core_client_version>7.20.5</core_client_version>\n"
        f"<![CDATA[\n<stderr_txt>\n{stderr}\n</stderr_txt>\n]]>\n</stderr_out>\n"
        f"{finished.files_xml}</result>"
    )


def _output_xml(file: FileInfo, content: bytes) -> str:
    return (
        f"<file_info>\n    <name>{file.name}</name>\n    <nbytes>{len(content)}.000000</nbytes>\n"
        f"    <max_nbytes>{file.max_nbytes:f}</max_nbytes>\n"
        f"    <md5_cksum>{hashlib.md5(content).hexdigest()}</md5_cksum>\n"
        + "".join(f"    <upload_url>{escape(url)}</upload_url>\n" for url in file.urls)
        + "</file_info>\n"
    )


def _upload_reply(content: bytes) -> tuple[int, str, int | None]:
    """(status, message, file size) of an upload handler's reply; no status counts as transient."""
    root = _xml(content)
    if root is None or root.find("status") is None:
        return 1, "no status in the reply", None
    size = root.findtext("file_size")
    return int(_number(root, "status")), _text(root, "message"), int(float(size)) if size else None


def _get(url: str, parameters: dict[str, str] | None = None) -> str:
    with requests.Session() as session:
        session.trust_env = False
        response = session.get(url, params=parameters, timeout=_TIMEOUT_S)
    response.raise_for_status()
    return response.text


def _account_key(text: str) -> str:
    root = _xml(text.encode())
    key = "" if root is None else _text(root, "authenticator")
    if not key:
        message = "" if root is None else _text(root, "error_msg")
        raise ProtocolError(f"no account: {message or text[:200]}")
    return key


def _xml(content: bytes) -> etree._Element | None:
    """Replies of stock servers are not always well-formed (a bare `&`), so the parser recovers."""
    text = re.sub(r"^\s*<\?xml[^>]*\?>", "", content.decode("utf-8", "replace"), count=1)
    parser = etree.XMLParser(resolve_entities=False, no_network=True, recover=True, remove_comments=True)
    with contextlib.suppress(etree.XMLSyntaxError):
        root: etree._Element | None = etree.fromstring(text.strip().encode(), parser)
        return root
    return None


def _text(element: etree._Element, name: str) -> str:
    return (element.findtext(name) or "").strip()


def _texts(element: etree._Element, path: str) -> list[str]:
    return [text for each in element.iterfind(path) if (text := (each.text or "").strip())]


def _number(element: etree._Element, name: str) -> float:
    try:
        return float(element.findtext(name) or 0)
    except ValueError:
        return 0.0
