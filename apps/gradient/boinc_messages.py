"""What a BOINC application and the client say to each other: files and messages, no threads, no clock.

init_data.xml (what the task is), link files (where its files are), the eight shared-memory channels, and
the texts that travel in them. Sources in BOINC: api/boinc_api.cpp, lib/app_ipc.{h,cpp}, lib/shmem.cpp,
lib/filesys.cpp.
"""

from __future__ import annotations

import math
import mmap
import os
import re
import sys
from dataclasses import dataclass

INIT_DATA_FILE = "init_data.xml"
MMAP_FILE = "boinc_mmap_file"
LOCK_FILE = "boinc_lockfile"
FINISH_FILE = "boinc_finish_called"
TEMPORARY_EXIT_FILE = "boinc_temporary_exit"

DRIVER_CACHE = "opencl_cache/drivers"  # what OpenCL drivers keep, in the project's folder

CHANNEL_BYTES = 1024  # byte 0 is the "full" flag, then NUL-terminated text
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
SHARED_BYTES = CHANNEL_BYTES * len(CHANNELS)

MAX_INIT_DATA_BYTES = 4 << 20  # the client writes some 10 KB; preferences and proxies cannot make it megabytes
MAX_LINK_CHARACTERS = 511  # lib/filesys.cpp reads no longer a first line

# Free text of others inside init_data.xml. It is cut out before the fields are looked for, so that a tag
# inside a volunteer's preferences is never taken for one of the client's own.
_FOREIGN_BLOCKS = ("project_preferences", "global_preferences", "host_info", "proxy_info")


@dataclass(frozen=True)
class InitData:
    """The fields of init_data.xml that a task may need; missing or unreadable ones keep the default.

    The account's authenticator stands in the file too. It is not a field here, so nothing can log or upload
    it. Times are seconds, sizes bytes, `rsc_fpops_*` floating-point operations. `nvidia_addresses` are the places on
    the PCI bus (domain, bus, device) of the NVIDIA cards that the client uses, in its order; newer clients name them.
    """

    app_name: str = ""
    app_version: int = 0
    release: int = 0
    wu_name: str = ""
    result_name: str = ""
    project_dir: str = ""
    boinc_dir: str = ""
    slot: int = 0
    client_pid: int = 0
    hostid: int = 0
    userid: int = 0
    wu_cpu_time: float = 0.0
    starting_elapsed_time: float = 0.0
    checkpoint_period: float = 300.0
    ncpus: float = 1.0
    gpu_type: str = ""
    gpu_device_num: int = -1
    gpu_opencl_dev_index: int = -1
    rsc_fpops_est: float = 0.0
    rsc_fpops_bound: float = 0.0
    rsc_memory_bound: float = 0.0
    rsc_disk_bound: float = 0.0
    computation_deadline: float = 0.0
    comm_obj_name: str = ""
    nvidia_addresses: tuple[tuple[int, int, int], ...] = ()

    @property
    def threads(self) -> int:
        """Threads the task may use: the client's `ncpus`, rounded down, at least 1."""
        return max(1, int(self.ncpus))


def parse_init_data(text: str) -> InitData:
    """Read init_data.xml as leniently as BOINC's own line parser: `A & B`, unknown tags and lost ends do
    not matter."""
    values: dict[str, object] = {}
    for block in _FOREIGN_BLOCKS:
        if block == "host_info":  # the preferences have been cut out before it
            values["nvidia_addresses"] = _addresses(text)
        text = re.sub(f"<{block}>.*</{block}>", "", text, flags=re.DOTALL)
    for name, kind in InitData.__annotations__.items():
        if kind not in ("str", "int", "float"):
            continue
        match = re.search(f"<{name}>([^<]*)</{name}>", text)
        if match is None:
            continue
        value = _value(match.group(1).strip(), kind)
        if value is not None:
            values[name] = value
    return InitData(**values)  # type: ignore[arg-type]


def read_init_data(folder: str = ".") -> InitData | None:
    """init_data.xml of a slot, or None where there is none (standalone: nobody is listening)."""
    try:
        with open(os.path.join(folder, INIT_DATA_FILE), "rb") as file:
            return parse_init_data(os.fsdecode(file.read(MAX_INIT_DATA_BYTES)))
    except FileNotFoundError:
        return None


def _addresses(text: str) -> tuple[tuple[int, int, int], ...]:
    """PCI addresses of the NVIDIA cards in host_info (lib/coproc.cpp, PCI_INFO::write), () if one is unreadable."""
    found = []
    host = re.search("<host_info>.*</host_info>", text, flags=re.DOTALL)
    cards = re.search("<coproc_cuda>.*?</coproc_cuda>", host[0], flags=re.DOTALL) if host else None
    for block in re.findall("<pci_info>(.*?)</pci_info>", cards[0], flags=re.DOTALL) if cards else ():
        numbers = [
            re.search(rf"<{each}_id>\s*(\d{{1,9}})\s*</{each}_id>", block) for each in ("domain", "bus", "device")
        ]
        if not all(numbers):
            return ()
        found.append(tuple(int(each[1]) for each in numbers if each))
    return tuple(found)  # type: ignore[arg-type]


def _value(text: str, kind: object) -> object | None:
    """One field's text as its declared kind, or None if it is not one."""
    if kind == "str":
        return _unescape(text)
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number):
        return None
    return int(number) if kind == "int" else number


def _unescape(text: str) -> str:
    """XML's five entities, only with their semicolon: a raw `&` in a path stays what it is."""
    for entity, character in (("&lt;", "<"), ("&gt;", ">"), ("&quot;", '"'), ("&apos;", "'"), ("&amp;", "&")):
        text = text.replace(entity, character)
    return text


def resolve(open_name: str, folder: str = ".") -> str:
    """The path to open for `open_name`: the link file's target, or the name itself (boinc_resolve_filename).

    The target need not exist yet: outputs are links too. Always write to the result of this function;
    whoever writes to the link itself leaves the client without the output.
    """
    path = os.path.join(folder, open_name)
    if os.path.islink(path):
        return path
    try:
        with open(path, "rb") as file:
            line = file.read(MAX_LINK_CHARACTERS).split(b"\n", 1)[0]
    except OSError:
        return path
    match = re.match(rb"\s*<soft_link>(.*)</soft_link>", line)
    return os.path.join(folder, os.fsdecode(match.group(1).strip())) if match else path


class SharedMemory:
    """The 8 x 1024 bytes through which client and application talk.

    There is no lock on either side; what keeps a message whole is the order: text first, then the flag.
    """

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer

    def receive(self, channel: str) -> str | None:
        """The waiting message of a channel, taken out; None if there is none."""
        start = CHANNEL_BYTES * CHANNELS.index(channel)
        if self._buffer[start] == 0:
            return None
        text = self._buffer[start + 1 : start + CHANNEL_BYTES].split(b"\0", 1)[0]
        self._buffer[start] = 0
        return text.decode("utf-8", "replace")

    def send(self, channel: str, text: str) -> bool:
        """Put a message into a channel; False if the last one has not been read yet."""
        start = CHANNEL_BYTES * CHANNELS.index(channel)
        if self._buffer[start]:
            return False
        data = text.encode("ascii", "replace")[: CHANNEL_BYTES - 2] + b"\0"
        self._buffer[start + 1 : start + 1 + len(data)] = data
        self._buffer[start] = 1
        return True

    def is_free(self, channel: str) -> bool:
        """Whether the other side has read the last message of this channel."""
        return self._buffer[CHANNEL_BYTES * CHANNELS.index(channel)] == 0


def open_shared_memory(init: InitData, folder: str = ".") -> SharedMemory | None:
    """The client's shared memory, or None where it gave none (an app version without <api_version> >= 6)."""
    if sys.platform == "win32":
        # No file on Windows but a named mapping; services create it in the global name space.
        for prefix in ("Global\\", ""):
            try:
                return SharedMemory(mmap.mmap(-1, SHARED_BYTES, tagname=f"{prefix}shm_{init.comm_obj_name}"))
            except OSError:
                continue
        return None
    try:
        with open(os.path.join(folder, MMAP_FILE), "r+b") as file:
            if os.fstat(file.fileno()).st_size < SHARED_BYTES:
                return None
            return SharedMemory(mmap.mmap(file.fileno(), SHARED_BYTES))
    except OSError:
        return None


def status_message(cpu_time: float, checkpoint_cpu_time: float, fraction_done: float) -> str:
    """The app_status text. Both CPU times stand in every message: the client resets what is missing to
    zero."""
    return (
        f"<current_cpu_time>{cpu_time:e}</current_cpu_time>\n"
        f"<checkpoint_cpu_time>{checkpoint_cpu_time:e}</checkpoint_cpu_time>\n"
        f"<fraction_done>{fraction_done:e}</fraction_done>\n"
    )


def finish_status(folder: str = ".") -> int | None:
    """The status in an existing finish marker, None without one. An unreadable marker counts as status 0's
    absence: 1."""
    try:
        with open(os.path.join(folder, FINISH_FILE), "rb") as file:
            first = file.read(64).split(b"\n", 1)[0].strip()
    except OSError:
        return None
    return int(first) & 0xFF if re.fullmatch(rb"-?\d{1,9}", first) else 1


def write_marker(name: str, lines: list[str], folder: str = ".") -> None:
    """Write a finish or temporary-exit file whole: the client polls for it and must never see it
    half-written."""
    path = os.path.join(folder, name)
    temporary = path + ".tmp"
    with open(temporary, "w", encoding="ascii", errors="backslashreplace") as file:
        file.write("".join(line.replace("\n", " ") + "\n" for line in lines))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
