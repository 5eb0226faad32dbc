"""A kernel from a file and its defines: built once in a process, and once for all on a computer.

    Programs.kernel -> (programs of this process | binary in the cache folder | build from text)

A build goes by the device's own compiler, which may be old, broken, or changed since yesterday. So nothing of it is
trusted: a cached binary is used only if it is whole and was made by this very driver from this very text, and what a
driver refuses is built again; a failing build is tried once more without the optimiser; what then fails is reported
with the compiler's own words.

No build depends on a path: the text and a few options of letters and digits are all that a compiler sees.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Union

import pyopencl as cl
from pyopencl import _cl

from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.values import Define, Source
from boinc_project.contract.errors import UnfitHost

Defines = Union[Mapping[str, Define], Iterable["tuple[str, Define]"]]

# Not -cl-finite-math-only (masked softmax needs infinity) and not -cl-no-signed-zeros. No -cl-std: 1.1 drivers do
# not know it, later ones take 1.2 and accept our subset of 1.1.
OPTIONS = ("-cl-mad-enable", "-cl-single-precision-constant")
CAREFUL_OPTION = "-cl-opt-disable"

# OpenCL C 1.1 has no `static` for functions (6.8.g of its specification), and `inline` alone defines none.
DIALECT_OF_1_1 = ("-Dstatic=", "-Dinline=")

LOG_BYTES = 4096  # of a compiler's words, in error messages
CACHE_BYTES = 64 << 20  # of our binaries; the oldest go first
DRIVER_CACHE_BYTES = 256 << 20  # of what drivers keep beside them
STALE_S = 3600  # a temporary file of this age belongs to nobody any more

#: Platforms whose driver keeps its builds by itself. Asking PoCL for a binary makes it compile every kernel of the
#: program once more, in a general form, and saves nothing afterwards.
KEEP_BUILDS_THEMSELVES = ("Portable Computing Language",)

_MAGIC = b"boinc-train program 1\n"
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_VALUE = re.compile(r"[A-Za-z0-9_.+-]+")


class BuildFailed(UnfitHost):
    """The device's compiler refuses a kernel; the message ends with its first words."""


class Programs:
    """Kernels for one device of a context.

    With a `cache_folder` binaries are kept there for other processes; it is made if need be, and a folder that cannot
    be written does no harm. `careful` switches the compiler's optimiser off from the start.
    """

    def __init__(
        self,
        context: Any,
        device: Any,
        facts: DeviceFacts,
        cache_folder: Path | None = None,
        careful: bool = False,
    ) -> None:
        self.facts = facts
        self.built = 0  # programs compiled from text by this process
        self._context = context
        self._device = device
        self._careful = careful
        self._options = OPTIONS + (DIALECT_OF_1_1 if _language(device, facts) < (1, 2) else ())
        self._programs: dict[tuple[Source, tuple[str, ...]], Any] = {}
        keeps = facts.platform in KEEP_BUILDS_THEMSELVES
        self._cache = None if cache_folder is None or keeps else Cache(cache_folder)
        careful_word = (CAREFUL_OPTION,) if careful else ()
        #: Device, driver and way of building: what a result that is remembered holds for.
        self.identity = (facts.name, facts.vendor, facts.platform, facts.driver, *_versions(device), *careful_word)

    def kernel(self, source: Source, name: str, defines: Defines = ()) -> Any:
        """A new kernel object, whose arguments nobody else sets. Raises BuildFailed."""
        options = tuple(define_options(defines))
        key = (source, options)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._load(source, options, name)
        try:
            return cl.Kernel(program, name)
        except cl.Error as error:
            raise BuildFailed(f"kernels/{source.file} has no kernel {name!r} on {self.facts.name}: {error}") from error

    def _load(self, source: Source, options: tuple[str, ...], name: str) -> Any:
        """The program: from the cache if what lies there has the kernel that is asked for, else built."""
        text = f"{kernel_text(source.file)}\n{source.text}" if source.text else kernel_text(source.file)
        if self._cache is None:
            return self._build(source, text, options)
        key = cache_key(self.identity, text, (*self._options, *options))
        binary = self._cache.read(key)
        if binary is not None:
            with contextlib.suppress(cl.Error):
                program = self._from_binary(binary, options)
                cl.Kernel(program, name)
                return program
        program = self._build(source, text, options)
        with contextlib.suppress(cl.Error):
            self._cache.write(key, program.get_info(cl.program_info.BINARIES)[0])
        return program

    def _from_binary(self, binary: bytes, options: tuple[str, ...]) -> Any:
        program = _cl._Program(self._context, [self._device], [binary])
        program._build(_joined((*self._options, *options)), [self._device])
        return cl.Program(program)

    def _build(self, source: Source, text: str, options: tuple[str, ...]) -> Any:
        attempts = [(*self._options, *options), (*self._options, CAREFUL_OPTION, *options)]
        log = ""
        for attempt in attempts[1:] if self._careful else attempts:
            # Not Program.build: PyOpenCL adds an include path, and a cache of its own in the home folder.
            program = _cl._Program(self._context, text)
            try:
                program._build(_joined(attempt), [self._device])
            except cl.Error as error:
                log = log or self._log(program) or str(error)
                continue
            self.built += 1
            return cl.Program(program)
        shown = " ".join(options)
        raise BuildFailed(
            f"kernels/{source.file} ({shown}) does not build on {self.facts.name} with driver {self.facts.driver} of"
            f" {self.facts.platform}: {log}"
        )

    def _log(self, program: Any) -> str:
        try:
            log = program.get_build_info(self._device, cl.program_build_info.LOG)
        except (cl.Error, UnicodeDecodeError):
            return ""
        return str(log).strip().encode("utf-8")[:LOG_BYTES].decode("utf-8", "ignore")


def define_options(defines: Defines) -> list[str]:
    """`-DNAME=VALUE` in a fixed order. Names are identifiers; a value has no blank and needs no quoting."""
    pairs = sorted(dict(defines).items())
    for name, value in pairs:
        assert _IDENTIFIER.fullmatch(name) and _VALUE.fullmatch(str(value)), (name, value)
    return [f"-D{name}={value}" for name, value in pairs]


def _joined(options: Iterable[str]) -> bytes:
    return " ".join(options).encode("ascii")


def _language(device: Any, facts: DeviceFacts) -> tuple[int, int]:
    """Version of OpenCL C that the device's compiler takes."""
    try:
        match = re.match(r"OpenCL C (\d+)\.(\d+)", str(device.get_info(cl.device_info.OPENCL_C_VERSION)))
    except (cl.Error, UnicodeDecodeError):
        match = None
    return (int(match[1]), int(match[2])) if match else facts.version


def _versions(device: Any) -> tuple[str, str]:
    """Versions of the device and its platform, which change when a driver is replaced."""
    found = []
    for owner, key in ((device, cl.device_info.VERSION), (None, cl.platform_info.VERSION)):
        try:
            found.append(str((owner or device.platform).get_info(key)))
        except (cl.Error, UnicodeDecodeError):
            found.append("")
    return found[0], found[1]


# Kernel text.


def kernel_folder() -> Path:
    """Where the .cl files lie: in the package as it is installed or packed, or in the repository."""
    here = Path(__file__).resolve()
    installed = here.parents[1] / "kernels"
    return installed if installed.is_dir() else here.parents[3] / "kernels"


def kernel_text(file: str) -> str:
    """The text of a file of kernels/."""
    assert re.fullmatch(r"[a-z0-9_]+\.cl", file), file
    return (kernel_folder() / file).read_text(encoding="ascii")


# The cache.


def cache_key(identity: Iterable[str], text: str, options: Iterable[str]) -> str:
    """Names a build: device, driver, text and options (hex SHA-256)."""
    parts = json.dumps([list(identity), hashlib.sha256(text.encode("utf-8")).hexdigest(), list(options)])
    return hashlib.sha256(parts.encode("utf-8")).hexdigest()


class Cache:
    """Binaries in a folder, shared by any number of processes. Nothing it does can fail a task.

    A file is written whole under a temporary name and then renamed, so a reader sees all of it or none. It holds its
    own key and digest: one that is cut, damaged or renamed counts as absent.
    """

    def __init__(self, folder: Path, limit: int = CACHE_BYTES) -> None:
        self.folder = folder
        self.limit = limit

    def read(self, key: str) -> bytes | None:
        """The binary of this key if it is there and whole."""
        path = self._path(key)
        try:
            content = path.read_bytes()
            os.utime(path)  # used lately: others go first
        except OSError:
            return None
        head = _head(key, b"")
        length = len(head)
        binary = content[length:]
        return binary if binary and content[:length] == _head(key, binary) else None

    def write(self, key: str, binary: bytes) -> None:
        """Keep a binary, and drop the oldest ones beyond the limit."""
        if not binary or len(binary) > self.limit // 4:
            return
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(".tmp", "program-", self.folder)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_head(key, binary) + binary)
                os.replace(temporary, self._path(key))
            except OSError:
                os.unlink(temporary)
                raise
            prune(self.folder, self.limit)

    def _path(self, key: str) -> Path:
        return self.folder / f"program-{key[:40]}.bin"


def _head(key: str, binary: bytes) -> bytes:
    return _MAGIC + f"{key}\n{hashlib.sha256(binary).hexdigest()}\n".encode("ascii")


def prune(folder: Path, limit: int, deep: bool = False) -> None:
    """Delete the oldest files of a folder until they take at most `limit` bytes, and forgotten temporary ones.

    With `deep`, those of the folders below it too.
    """
    now = time.time()
    found: list[tuple[float, int, str]] = []
    for path in folder.rglob("*") if deep else folder.glob("*"):
        with contextlib.suppress(OSError):
            facts = path.stat()
            if not path.is_file():
                continue
            if path.suffix == ".tmp" and now - facts.st_mtime > STALE_S:
                path.unlink()
            else:
                found.append((facts.st_mtime, facts.st_size, str(path)))
    total = sum(size for _, size, _ in found)
    for _, size, name in sorted(found):
        if total <= limit:
            return
        with contextlib.suppress(OSError):
            os.unlink(name)
        total -= size


def keep_drivers_in(folder: Path) -> None:
    """Let drivers that keep builds themselves do so in this folder and not in the home folder.

    To be called before the first look at devices; what the owner of the computer has set stays.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        prune(folder, DRIVER_CACHE_BYTES, deep=True)
    if not folder.is_dir():
        return  # drivers find their own place, or do without
    for variable in ("POCL_CACHE_DIR", "MESA_SHADER_CACHE_DIR", "CUDA_CACHE_PATH", "cl_cache_dir", "NEO_CACHE_DIR"):
        os.environ.setdefault(variable, str(folder))
    os.environ.setdefault("MESA_SHADER_CACHE_MAX_SIZE", "64M")
    os.environ.setdefault("CUDA_CACHE_MAXSIZE", str(64 << 20))
