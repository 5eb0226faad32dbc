"""Builds the `gradient` app version: one self-contained file, so that volunteers need no Python.

    build_app -> check_numpy -> sources_digest -> (PyInstaller | cache) -> try_start -> write_folder

The result is BOINC's layout for `update_versions`:

    OUTPUT/apps/gradient/VERSION/x86_64-pc-linux-gnu/gradient_VERSION_x86_64-pc-linux-gnu   the program
                                                     version.xml       what BOINC must know of it
                                                     .operators.json   the operators and codecs it knows

A version for a plan class lies in PLATFORM__PLANCLASS. `update_versions` publishes every file of the folder whose
name does not begin with a dot, named in version.xml or not, under its own name and for ever.

The program unpacks itself inside the slot only (`--runtime-tmpdir .`): BOINC owns that folder and empties
it. It holds numpy, safetensors and zstandard, and PyTorch only where that is the backend. It needs at least
the glibc of the machine it was built on: build on the oldest distribution that volunteers should be able to
use. This file runs on the project's side, not on theirs.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable

from boinc_project.contract.codecs import KINDS as CODECS
from boinc_project.contract.codecs import PART_KINDS
from boinc_project.contract.opset import OPSET

APP_NAME = "gradient"
PLATFORM = "x86_64-pc-linux-gnu"
DEFAULT_VERSION = "1.00"
API_VERSION = "7.20.5"  # from 6.0 the client gives boinc_mmap_file, from 7.5 no `--device` (client/app_start.cpp)

OPERATORS_FILE = ".operators.json"  # beside the program; the dot keeps update_versions from publishing it

REPOSITORY = Path(__file__).resolve().parents[2]


def cache_folder(root: Path) -> Path:
    """Where builds of the sources under `root` are kept: in a copy of the repository, beside them; of an installed
    package, in the user's own cache, since the environment may belong to somebody else."""
    if (root / "pyproject.toml").is_file():
        return root / ".cache" / "app-builds"
    own = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(own) / "boinc-train" / "app-builds"


CACHE = cache_folder(REPOSITORY)
ENTRY = REPOSITORY / "apps" / "gradient" / "__main__.py"
# With the application in an installed package, beside it in the repository.
KERNELS = ENTRY.parent / "kernels" if (ENTRY.parent / "kernels").is_dir() else REPOSITORY / "kernels"
SOURCES = ("apps/__init__.py", "apps/gradient", "boinc_project/__init__.py", "boinc_project/contract")
PACKAGES = ("numpy", "safetensors", "zstandard", "pyinstaller")

# Volunteers' processors go back to 2006; a numpy whose baseline is higher dies there of an illegal
# instruction.
ALLOWED_BASELINE = frozenset({"SSE", "SSE2", "SSE3"})

# Loaded by name at run time, so PyInstaller cannot see them.
HIDDEN_IMPORTS = ("apps.gradient.backends.numpy_backend", "zstandard.backend_c", "safetensors.numpy")

# What hooks and optional imports would drag in. PyTorch first: it is 2 GB.
EXCLUDED = (
    *("torch", "tensorflow", "jax", "jaxlib", "mlx", "paddle", "scipy", "pandas", "matplotlib", "sklearn", "PIL"),
    *("transformers", "sqlalchemy", "aiohttp", "requests", "cryptography", "lxml", "click", "rich", "psutil"),
    *("pytest", "hypothesis", "setuptools", "pip", "pkg_resources", "yaml", "charset_normalizer", "IPython", "mako"),
    *("numpy.f2py", "numpy.distutils", "zstandard.backend_cffi", "zstandard._cffi", "cffi", "pycparser"),
    *("tkinter", "curses", "readline", "asyncio", "ssl", "_ssl", "lib2to3", "ensurepip", "idlelib"),
    *("distutils", "pydoc_data", "xmlrpc", "test"),
)


@dataclass(frozen=True)
class Kind:
    """One of the programs that can be built: what is packed, beside what all have.

    data           files -> places in the program
    kept           what it needs of the modules that the others leave out
    probe          options with which it is started once, besides without any
    of_the_system  libraries that are left out
    tests          files that are left out: a regular expression of what their places begin with
    """

    backend: str
    entry: Path
    packages: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    data: tuple[tuple[str, str], ...] = ()
    probe: tuple[str, ...] = ()
    of_the_system: tuple[str, ...] = ()
    tests: str = ""
    kept: tuple[str, ...] = ()


NUMPY = Kind("numpy", ENTRY, excluded=("pyopencl", "apps.gradient.opencl", "sqlite3"))
OPENCL = Kind(
    "opencl",
    ENTRY.with_name("opencl_main.py"),
    packages=("pyopencl", "pytools", "platformdirs", "siphash24"),
    hidden=("apps.gradient.opencl.opencl_backend", "apps.gradient.opencl.selftest"),
    data=((f"{KERNELS}/*.cl", "apps/gradient/kernels"),),
    probe=("--devices",),  # imports PyOpenCL
    of_the_system=("libstdc++.so.6", "libgcc_s.so.1", "libz.so.1"),
)
# PyInstaller's own hook collects PyTorch's libraries, whichever build of it is installed, and every module of it; those
# that compile or distribute are never reached from here.
TORCH = Kind(
    "torch",
    ENTRY.with_name("torch_main.py"),
    packages=("torch",),
    hidden=("apps.gradient.backends.torch_backend", "apps.gradient.backends.torch_device"),
    probe=("--devices",),  # imports PyTorch
    tests="torch/(?:test/|bin/(?!torch_shm_manager))",  # 140 MB of programs that test PyTorch
    excluded=("pyopencl", "apps.gradient.opencl", "sqlite3", "torch.utils.tensorboard"),
    kept=("torch", "asyncio", "ssl", "_ssl"),
)
KINDS = {kind.backend: kind for kind in (NUMPY, OPENCL, TORCH)}

# Build logs begin a stage with such a line; the share of the whole is what builds took here.
_STAGES = (
    ("Initializing module dependency graph", 0.05, "reading modules"),
    ("Looking for dynamic libraries", 0.45, "collecting libraries"),
    ("Building PYZ", 0.60, "packing modules"),
    ("Building PKG", 0.65, "compressing"),
    ("Building EXE", 0.92, "writing the program"),
)

CACHED_BUILDS = 4  # of about 40 MB each, with PyTorch some hundreds; older ones are deleted

Progress = Callable[[str, float], None]


class BuildError(ValueError):
    """The app version cannot be built; the message says what to do."""


@dataclass(frozen=True)
class Facts:
    """What is kept of a build beside the program."""

    sha256: str
    build_seconds: float
    start_seconds: float
    glibc: str


@dataclass(frozen=True)
class BuiltApp:
    """What `build_app` made. Sizes in bytes, times in seconds; `glibc` is the oldest C library that it runs
    with."""

    folder: Path
    program: Path
    version: str
    size: int
    build_seconds: float
    start_seconds: float
    reused: bool
    digest: str
    glibc: str


def build_app(
    output_dir: Path,
    version: str = DEFAULT_VERSION,
    cache_dir: Path | None = None,
    progress: Progress | None = None,
    app: str = APP_NAME,
    kind: Kind = NUMPY,
    plan_class: str = "",
    processor: str = "cpu",
) -> BuiltApp:
    """Build the app version into `output_dir`/apps/APP/VERSION/PLATFORM (a BOINC project's root).

    `app` is the project's name for the app, `plan_class` says for which hosts the version is, and `processor` what
    BOINC takes that class to be for (cpu, nvidia, amd, intel_gpu). With `cache_dir` a build of the same sources,
    packages and Python is taken from there. `progress` is called with a stage's name and
    the share done, 0 to 1. Raises BuildError with one sentence for the admin.
    """
    report = progress or (lambda stage, share: None)
    if not re.fullmatch(r"\d{1,3}\.\d{1,2}", version):
        raise BuildError(f"the version must look like 1.00 (BOINC's MAJOR.MINOR), not {version!r}")
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        raise BuildError(f"this builds for {PLATFORM} only, and must run there; here is {platform.platform()}")
    cache_dir = None if cache_dir is None else cache_dir.resolve()  # PyInstaller runs in another folder
    check_tools(kind)
    if kind.backend == "torch":
        check_torch(processor, *installed_torch())
    check_numpy(numpy_baseline())
    report("checking", 0.0)
    digest = sources_digest(kind)
    cached = (cache_dir or Path(tempfile.gettempdir())) / f"{APP_NAME}-{digest[:32]}"
    found = read_cache(cached) if cache_dir is not None else None
    began = time.monotonic()
    if found is not None:
        program, facts = found
        report("taken from the cache", 1.0)
        return write_folder(output_dir, version, program, digest, facts, True, app, plan_class)
    with tempfile.TemporaryDirectory(prefix="boinc-train-build-", dir=_made(cache_dir)) as folder:
        work = Path(folder)
        program = run_pyinstaller(kind, work, report)
        build_seconds = time.monotonic() - began
        report("starting it once", 0.97)
        facts = Facts(
            hashlib.sha256(program.read_bytes()).hexdigest(),
            round(build_seconds, 2),
            round(try_start(program, work, kind.probe), 3),
            needed_glibc(work),
        )
        if cache_dir is not None:
            write_cache(cached, program, facts)
        built = write_folder(output_dir, version, program, digest, facts, False, app, plan_class)
    report("done", 1.0)
    return built


def _made(folder: Path | None) -> Path | None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def check_tools(kind: Kind = NUMPY) -> None:
    """PyInstaller and a Python with a shared library are needed; raises BuildError."""
    import sysconfig

    for package in (*PACKAGES, *kind.packages):
        try:
            importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            extras = f"package,{kind.backend}" if package in kind.packages else "package"
            raise BuildError(f"{package} is not installed: pip install 'boinc-train[{extras}]'") from None
    if (
        not sysconfig.get_config_var("Py_ENABLE_SHARED")
        and not Path("/usr/lib/x86_64-linux-gnu")
        .joinpath(f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0")
        .exists()
    ):
        raise BuildError(
            f"{sys.executable} has no shared libpython: install Debian's libpython3-dev, or build Python with"
            " --enable-shared"
        )


def installed_torch() -> tuple[str, str, str]:
    """PyTorch's version, and those of CUDA and HIP that it is built for ('' if it is not)."""
    import torch

    return torch.__version__, torch.version.cuda or "", torch.version.hip or ""


def check_torch(processor: str, version: str, cuda: str, hip: str) -> None:
    """Refuse a PyTorch that does not drive the cards which a plan class is for; raises BuildError."""
    wanted = {"cpu": ("", ""), "nvidia": ("CUDA", cuda), "amd": ("ROCm", hip)}.get(processor)
    if wanted is None:
        raise BuildError(f"PyTorch has nothing for plan classes of {processor}: take --backend opencl")
    library, built_for = wanted
    if library and not built_for:
        raise BuildError(
            f"the PyTorch installed here ({version}) is not built for {library}: install one that is (pytorch.org says"
            " how), or take --backend opencl"
        )


def unpacked_bytes(program: Path) -> int:
    """How much room a program needs in a task's slot, bytes."""
    from PyInstaller.archive.readers import CArchiveReader

    extracted = ("b", "x", "Z")  # typecodes of libraries, data and zip files; modules are read from the program itself
    return sum(entry[2] for entry in CArchiveReader(str(program)).toc.values() if entry[4] in extracted)


def numpy_baseline() -> tuple[str, ...]:
    """Processor features that the installed numpy needs in any case."""
    import numpy

    package = "numpy._core" if int(numpy.__version__.split(".")[0]) >= 2 else "numpy.core"
    return tuple(importlib.import_module(f"{package}._multiarray_umath").__cpu_baseline__)


def check_numpy(baseline: Iterable[str]) -> None:
    """Refuse a numpy that old processors cannot run; raises BuildError."""
    beyond = sorted(set(baseline) - ALLOWED_BASELINE)
    if beyond:
        raise BuildError(
            f"the installed numpy needs {', '.join(beyond)}, which volunteers' old processors lack:"
            " pip install 'numpy<2.4'"
        )


def sources_digest(kind: Kind = NUMPY) -> str:
    """What decides a build: our sources, this file, the packages, Python and the C library (hex SHA-256)."""
    digest = hashlib.sha256()
    packages = (*PACKAGES, *kind.packages)
    facts = [sys.version, platform.libc_ver()[1], *(f"{p} {importlib.metadata.version(p)}" for p in packages)]
    digest.update(json.dumps([kind.backend, facts]).encode("utf-8"))
    files = [kind.entry, Path(__file__)]
    for name in (*SOURCES, str(KERNELS)):
        path = REPOSITORY / name
        files += [path] if path.is_file() else [each for each in path.rglob("*") if each.suffix in (".py", ".cl")]
    for path in sorted(set(files)):
        name = path.relative_to(REPOSITORY).as_posix() if path.is_relative_to(REPOSITORY) else path.name
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


def specification_command(kind: Kind, work: Path) -> Sequence[str]:
    """The command that writes `work`/gradient.spec, PyInstaller's description of the program."""
    command = [sys.executable, "-m", "PyInstaller.utils.cliutils.makespec", "--onefile", "--name", APP_NAME]
    command += ["--runtime-tmpdir", ".", "--noupx", "--paths", str(REPOSITORY), "--specpath", str(work)]
    for name in (*HIDDEN_IMPORTS, *kind.hidden):
        command += ["--hidden-import", name]
    for name in (*(each for each in EXCLUDED if each not in kind.kept), *kind.excluded):
        command += ["--exclude-module", name]
    for source, place in kind.data:
        command += ["--add-data", f"{source}{os.pathsep}{place}"]
    return [*command, str(kind.entry)]


def leave_out(kind: Kind, work: Path) -> None:
    """Strike from the specification the libraries that are taken from the volunteer's system, and a package's tests.

    A packed C++ library would be used by OpenCL drivers too, which may need a newer one and then are not found.
    """
    path, mark = work / f"{APP_NAME}.spec", "pyz = PYZ("
    text = path.read_text(encoding="utf-8")
    assert mark in text, text
    names, tests = sorted(kind.of_the_system), kind.tests or "(?!)"  # a pattern that nothing matches
    lines = (
        "import re\n"
        f"a.binaries = [e for e in a.binaries if e[0] not in {names!r} and not re.match({tests!r}, e[0])]\n"
        f"a.datas = [e for e in a.datas if not re.match({tests!r}, e[0])]\n"
    )
    path.write_text(text.replace(mark, lines + mark, 1), encoding="utf-8")


def run_pyinstaller(kind: Kind, work: Path, report: Progress) -> Path:
    """Run PyInstaller in `work`; returns the program. Raises BuildError with the log's last lines."""
    # Fixed hash seed and time: the same sources give the same file, as BOINC's immutable file names want.
    environment = {**os.environ, "PYTHONHASHSEED": "1", "SOURCE_DATE_EPOCH": "1700000000"}
    environment["PYINSTALLER_CONFIG_DIR"] = str(work / "config")  # nothing in the home folder
    made = subprocess.run(
        specification_command(kind, work), cwd=work, env=environment, capture_output=True, text=True, errors="replace"
    )
    if made.returncode:
        raise BuildError("PyInstaller failed; its last lines were:\n" + made.stderr[-2000:])
    leave_out(kind, work)
    log: list[str] = []
    command = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--distpath", str(work / "dist")]
    with subprocess.Popen(
        [*command, "--workpath", str(work / "build"), str(work / f"{APP_NAME}.spec")],
        cwd=work,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            log = [*log[-30:], line.rstrip()]
            for text, share, stage in _STAGES:
                if text in line:
                    report(stage, share)
    program = work / "dist" / APP_NAME
    if process.returncode or not program.is_file():
        raise BuildError("PyInstaller failed; its last lines were:\n" + "\n".join(log[-12:]))
    return program


_DOES_NOT_START = r"ImportError|ModuleNotFoundError|No module named|cannot import|\[PYI-\d+:ERROR\]|Failed to"


def try_start(program: Path, work: Path, probe: Sequence[str] = ()) -> float:
    """Start the program in an empty folder, with the options of `probe` too; returns the seconds it took without
    them. Raises BuildError if it cannot run.

    Without a task it ends with its own exit code for missing input; what counts is that Python and its
    modules came up.
    """
    folder = work / "start"
    folder.mkdir()
    began = time.monotonic()
    seconds = 0.0
    for options in ((), probe) if probe else ((),):
        done = subprocess.run(
            [program, *options], cwd=folder, capture_output=True, text=True, errors="replace", timeout=300
        )
        seconds = seconds or time.monotonic() - began
        words = done.stderr + done.stdout
        if done.returncode < 0 or re.search(_DOES_NOT_START, words):
            raise BuildError("the built program does not start:\n" + words[-2000:])
    return seconds


def needed_glibc(work: Path) -> str:
    """The newest C library version that any packed library asks for, from PyInstaller's list of them."""
    listed = (work / "build" / APP_NAME / "Analysis-00.toc").read_text(encoding="utf-8", errors="replace")
    minor = 0
    for name in set(re.findall(r"'(/[^']*\.so[^']*)'", listed)):
        asked = re.findall(rb"GLIBC_2\.(\d{1,3})\b", Path(name).read_bytes())
        minor = max([minor, *map(int, asked)])
    return f"2.{minor}"


def read_cache(folder: Path) -> tuple[Path, Facts] | None:
    """The program of a cached build and its facts, None if there is no whole one."""
    try:
        facts = Facts(**json.loads((folder / "facts.json").read_text(encoding="ascii")))
        program = folder / APP_NAME
        if hashlib.sha256(program.read_bytes()).hexdigest() != facts.sha256:
            return None
        return program, facts
    except (OSError, ValueError, TypeError):
        return None


def write_cache(folder: Path, program: Path, facts: Facts) -> None:
    """Keep a build for the next time; the facts come last, so a half-written one is not taken for whole."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{APP_NAME}.{os.getpid()}.tmp"
    shutil.copy2(program, temporary)
    os.replace(temporary, folder / APP_NAME)
    temporary.write_text(json.dumps(asdict(facts)), encoding="ascii")
    os.replace(temporary, folder / "facts.json")
    older = sorted(folder.parent.glob(f"{APP_NAME}-*"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in older[CACHED_BUILDS:]:
        shutil.rmtree(path, ignore_errors=True)


def program_name(version: str, app: str = APP_NAME, plan_class: str = "") -> str:
    """The program's physical name, as BOINC's own tools name app versions."""
    return f"{app}_{version}_{leaf_name(plan_class)}"


def leaf_name(plan_class: str = "") -> str:
    """The folder of a version below apps/APP/VERSION."""
    return f"{PLATFORM}__{plan_class}" if plan_class else PLATFORM


def version_xml(program: str) -> str:
    """What `update_versions` reads. `<dont_throttle/>` is absent: the volunteer's CPU limit must work."""
    return (
        "<version>\n"
        "    <file>\n"
        f"        <physical_name>{program}</physical_name>\n"
        "        <main_program/>\n"
        "    </file>\n"
        f"    <api_version>{API_VERSION}</api_version>\n"
        "</version>\n"
    )


def write_folder(
    output_dir: Path,
    version: str,
    program: Path,
    digest: str,
    facts: Facts,
    reused: bool,
    app: str = APP_NAME,
    plan_class: str = "",
) -> BuiltApp:
    """Lay the app version out. An existing program of this version may only be replaced by the same bytes."""
    folder = output_dir / "apps" / app / version / leaf_name(plan_class)
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / program_name(version, app, plan_class)
    if target.exists() and target.read_bytes() != program.read_bytes():
        raise BuildError(f"{target} exists and differs: a published file never changes, so give a higher version")
    temporary = folder / f".{target.name}.{os.getpid()}.tmp"
    shutil.copyfile(program, temporary)
    temporary.chmod(0o755)
    os.replace(temporary, target)
    (folder / "version.xml").write_text(version_xml(target.name), encoding="ascii")
    # For the project's side: a job that needs another operator is refused before any workunit exists.
    (folder / OPERATORS_FILE.removeprefix(".")).unlink(missing_ok=True)  # an earlier release wrote it there
    known = {
        "operators": sorted(OPSET), "codecs": sorted(CODECS), "parts": sorted(PART_KINDS), "deltas": True,
        "inner_state": True,
    }  # fmt: skip
    (folder / OPERATORS_FILE).write_text(json.dumps(known, indent=1) + "\n", encoding="ascii")
    return BuiltApp(
        folder=folder,
        program=target,
        version=version,
        size=target.stat().st_size,
        build_seconds=facts.build_seconds,
        start_seconds=facts.start_seconds,
        reused=reused,
        digest=digest,
        glibc=facts.glibc,
    )


def main() -> None:
    """`python -m apps.packaging.build OUTPUT [VERSION [BACKEND]]`: build and print the facts as JSON."""
    arguments = sys.argv[1:]
    if not 1 <= len(arguments) <= 3 or arguments[2:] not in ([], *([name] for name in KINDS)):
        sys.exit(f"usage: python -m apps.packaging.build OUTPUT [VERSION [{'|'.join(KINDS)}]]")
    try:
        built = build_app(
            Path(arguments[0]),
            version=arguments[1] if len(arguments) > 1 else DEFAULT_VERSION,
            cache_dir=CACHE,
            kind=KINDS[arguments[2]] if len(arguments) > 2 else NUMPY,
            progress=lambda stage, share: print(f"{share:4.0%} {stage}", file=sys.stderr, flush=True),
        )
    except BuildError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    print(json.dumps({**asdict(built), "folder": str(built.folder), "program": str(built.program)}, indent=1))


if __name__ == "__main__":
    main()
