"""Building kernels: failures with the compiler's words, a cache that survives whatever lies in it, eight at once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("pyopencl")

import pyopencl as cl

from apps.gradient.opencl import device as devices
from apps.gradient.opencl import programs
from apps.gradient.opencl.programs import BuildFailed, Cache, Programs, cache_key, keep_drivers_in
from apps.gradient.opencl.values import Source

ROOT = Path(__file__).resolve().parents[2]

TEXT = """
#ifndef FACTOR
#define FACTOR 2
#endif
__kernel void scale(__global float *x, int n)
{
    int i = (int)get_global_id(0);
    if (i < n) x[i] = mad(x[i], FACTOR, 1.0f);
}
"""
SOURCE = Source("scale.cl")
BROKEN = Source("broken.cl")
MANY = "".join(f"__kernel void k{k}(__global float *x) {{ x[0] = undeclared_{k}; }}\n" for k in range(300))
FILES = {
    "scale.cl": TEXT,
    "other.cl": TEXT.replace("scale", "other"),
    "broken.cl": "__kernel void broken(__global float *x) { x[0] = undeclared_name; }",
    "many.cl": MANY,
}


@pytest.fixture(autouse=True)
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of kernels for these tests."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="ascii")
    monkeypatch.setattr(programs, "kernel_folder", lambda: folder)


@pytest.fixture(scope="module")
def opened() -> Any:
    found = devices.choose(devices.find_devices(), devices.request_of_text("cpu"))
    return cl.Context([found.handle]), found.handle, devices.facts(found)


@pytest.fixture
def cached(opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes `Programs` with a cache folder, also on a driver whose builds we do not keep."""
    monkeypatch.setattr(programs, "KEEP_BUILDS_THEMSELVES", ())
    return lambda: Programs(*opened, tmp_path / "cache")


def scaled(opened: Any, made: Programs, factor: int = 3) -> list[float]:
    context, device, _ = opened
    queue = cl.CommandQueue(context, device)
    host = np.arange(4, dtype=np.float32)
    buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=host)
    kernel = made.kernel(SOURCE, "scale", {"FACTOR": factor})
    kernel.set_args(buffer, np.int32(4))
    cl.enqueue_nd_range_kernel(queue, kernel, (4,), None)
    cl.enqueue_copy(queue, host, buffer)
    return [float(each) for each in host]


def test_a_program_is_built_once_for_each_set_of_defines(opened: Any) -> None:
    made = Programs(*opened)
    first, second = (made.kernel(SOURCE, "scale", {"FACTOR": 3}) for _ in range(2))
    assert first != second  # arguments are bound once for each
    assert made.built == 1
    assert made.kernel(SOURCE, "scale", (("FACTOR", 3),)) != first
    assert made.built == 1
    assert scaled(opened, made, 5) == [1.0, 6.0, 11.0, 16.0]
    assert made.built == 2


def test_a_failing_build_gives_the_compilers_words_once(opened: Any) -> None:
    with pytest.raises(BuildFailed) as caught:
        Programs(*opened).kernel(BROKEN, "broken")
    assert "kernels/broken.cl" in str(caught.value)
    assert opened[2].name in str(caught.value)
    assert "undeclared_name" in str(caught.value)


def test_a_long_build_log_is_cut(opened: Any) -> None:
    with pytest.raises(BuildFailed) as caught:
        Programs(*opened).kernel(Source("many.cl"), "k0")
    assert len(str(caught.value)) < programs.LOG_BYTES + 500


def test_a_kernel_that_is_not_there_is_named(opened: Any) -> None:
    with pytest.raises(BuildFailed, match=r"kernels/scale\.cl has no kernel 'shrink'"):
        Programs(*opened).kernel(SOURCE, "shrink")


def test_a_build_that_the_optimiser_breaks_is_tried_without_it(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    joined = programs._joined

    def failing(options: Any) -> bytes:
        tried.append(list(options))
        return joined(options if programs.CAREFUL_OPTION in options else (*options, "-no-such-option"))

    monkeypatch.setattr(programs, "_joined", failing)
    assert scaled(opened, Programs(*opened)) == [1.0, 4.0, 7.0, 10.0]
    assert [programs.CAREFUL_OPTION in each for each in tried] == [False, True]
    assert scaled(opened, Programs(*opened, careful=True)) == [1.0, 4.0, 7.0, 10.0]
    assert len(tried) == 3


def test_options_hold_nothing_that_needs_quoting() -> None:
    assert programs.define_options({"VW": 4, "T": "float4", "A": "1.5f"}) == ["-DA=1.5f", "-DT=float4", "-DVW=4"]
    for bad in ({"A B": 1}, {"A": "1 -I/tmp"}, {"A": ""}, {"A": "é"}):
        with pytest.raises(AssertionError):
            programs.define_options(bad)


def test_a_second_process_takes_the_binary(opened: Any, cached: Any) -> None:
    first, second = cached(), cached()
    assert scaled(opened, first) == scaled(opened, second) == [1.0, 4.0, 7.0, 10.0]
    assert (first.built, second.built) == (1, 0)
    assert scaled(opened, cached(), 7) == [1.0, 8.0, 15.0, 22.0]  # other defines are another binary


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "foreign", "garbage", "head only"])
def test_a_damaged_binary_is_built_again(opened: Any, cached: Any, tmp_path: Path, damage: str) -> None:
    scaled(opened, cached())
    (path,) = (tmp_path / "cache").iterdir()
    content = path.read_bytes()
    flipped = content[:-10] + bytes([content[-10] ^ 1]) + content[-9:]
    key = content.split(b"\n")[1].decode()
    foreign = b"\x7fELF of another driver"
    damaged = {
        "truncate": content[: len(content) // 2],
        "empty": b"",
        "flip": flipped,
        # Whole, and with the right key: only the driver itself can refuse it.
        "foreign": programs._head(key, foreign) + foreign,
        "garbage": os.urandom(1000),
        "head only": content[:100],
    }[damage]
    path.write_bytes(damaged)
    again = cached()
    assert scaled(opened, again) == [1.0, 4.0, 7.0, 10.0]
    assert again.built == 1
    assert path.read_bytes() == content or Cache(path.parent).read(key)
    last = cached()
    assert scaled(opened, last) == [1.0, 4.0, 7.0, 10.0]
    assert last.built == 0


def test_a_binary_without_the_wanted_kernel_is_built_again(opened: Any, cached: Any, tmp_path: Path) -> None:
    scaled(opened, cached())
    (path,) = (tmp_path / "cache").iterdir()
    key = path.read_bytes().split(b"\n")[1].decode()
    cached().kernel(Source("other.cl"), "other", {"FACTOR": 3})
    (second,) = set((tmp_path / "cache").iterdir()) - {path}
    binary = Cache(path.parent).read(second.read_bytes().split(b"\n")[1].decode())
    assert binary is not None
    path.write_bytes(programs._head(key, binary) + binary)
    again = cached()
    assert scaled(opened, again) == [1.0, 4.0, 7.0, 10.0]
    assert again.built == 1


def test_the_key_changes_with_everything_that_decides_a_build() -> None:
    known = cache_key(("Cypress", "AMD", "AMD-APP", "898.1", "OpenCL 1.1", "v"), TEXT, ["-DA=1"])
    assert known == cache_key(("Cypress", "AMD", "AMD-APP", "898.1", "OpenCL 1.1", "v"), TEXT, ["-DA=1"])
    others = {
        cache_key(("Juniper", "AMD", "AMD-APP", "898.1", "OpenCL 1.1", "v"), TEXT, ["-DA=1"]),
        cache_key(("Cypress", "AMD", "AMD-APP", "1800.11", "OpenCL 1.1", "v"), TEXT, ["-DA=1"]),
        cache_key(("Cypress", "AMD", "AMD-APP", "898.1", "OpenCL 1.2", "v"), TEXT, ["-DA=1"]),
        cache_key(("Cypress", "AMD", "AMD-APP", "898.1", "OpenCL 1.1", "v2"), TEXT, ["-DA=1"]),
        cache_key(("Cypress", "AMD", "AMD-APP", "898.1", "OpenCL 1.1", "v"), TEXT + " ", ["-DA=1"]),
        cache_key(("Cypress", "AMD", "AMD-APP", "898.1", "OpenCL 1.1", "v"), TEXT, ["-DA=2"]),
        known,
    }
    assert len(others) == 7


def test_generated_text_follows_the_text_of_its_file(opened: Any) -> None:
    more = "__kernel void twice(__global float *x, int n) { x[0] = 2.0f * FACTOR; }"
    made = Programs(*opened)
    made.kernel(Source("scale.cl", more), "twice")
    made.kernel(Source("scale.cl", more), "scale")
    assert made.built == 1


def test_a_folder_that_cannot_be_written_does_no_harm(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "KEEP_BUILDS_THEMSELVES", ())
    (tmp_path / "file").write_text("in the way")
    assert scaled(opened, Programs(*opened, tmp_path / "file" / "cache")) == [1.0, 4.0, 7.0, 10.0]


def test_a_cache_in_a_folder_with_blanks_and_accents_works(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "KEEP_BUILDS_THEMSELVES", ())
    folder = tmp_path / "Dokumente und Einstellungen é %s"
    assert scaled(opened, Programs(*opened, folder)) == scaled(opened, Programs(*opened, folder))
    assert list(folder.iterdir())


def test_the_cache_keeps_what_was_used_last(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = Cache(folder, limit=1000)
    keys = [hashlib.sha256(bytes([k])).hexdigest() for k in range(8)]
    for age, key in enumerate(keys):
        cache.write(key, b"x" * 100)  # about 250 bytes with its head
        for path in folder.iterdir():  # file systems' clocks are coarse
            facts = path.stat()
            os.utime(path, (facts.st_atime - 10, facts.st_mtime - 10))
        if age:
            assert cache.read(keys[0]) is not None
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1000
    assert cache.read(keys[0]) and cache.read(keys[7])
    assert cache.read(keys[1]) is None
    cache.write(keys[1], b"x" * 900)  # too large a share of the whole
    assert cache.read(keys[1]) is None


def test_forgotten_temporary_files_go_and_fresh_ones_stay(tmp_path: Path) -> None:
    old, fresh = tmp_path / "program-a.tmp", tmp_path / "program-b.tmp"
    for path in (old, fresh):
        path.write_bytes(b"x")
    os.utime(old, (time.time() - 2 * programs.STALE_S,) * 2)
    Cache(tmp_path).write("0" * 64, b"binary")
    assert not old.exists() and fresh.exists()


def test_drivers_are_told_to_keep_their_builds_with_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"CUDA_CACHE_PATH": "the owner's choice"})
    programs.keep_drivers_in(tmp_path / "driver")
    assert (tmp_path / "driver").is_dir()
    assert os.environ["POCL_CACHE_DIR"] == os.environ["MESA_SHADER_CACHE_DIR"] == str(tmp_path / "driver")
    assert os.environ["CUDA_CACHE_PATH"] == "the owner's choice"


CHILD = """
import hashlib, sys
from pathlib import Path
from apps.gradient.opencl import programs
programs.keep_drivers_in(Path(sys.argv[2]) / "driver")
import numpy as np, pyopencl as cl
from apps.gradient.opencl import device as devices
from apps.gradient.opencl.values import Source
programs.kernel_text = lambda file: "".join(
    f"__kernel void k{k}(__global float *x, int n) {{ int i = (int)get_global_id(0);"
    f" if (i < n) {{ float s = 0.0f; for (int j = 0; j < STEPS; j++) s = mad(s, x[i], {k}.5f); x[i] = exp(s); }} }}"
    for k in range(2)
)
found = devices.choose(devices.find_devices(), devices.request_of_text(sys.argv[1]))
context = cl.Context([found.handle])
queue = cl.CommandQueue(context, found.handle)
made = programs.Programs(context, found.handle, devices.facts(found), Path(sys.argv[2]) / "ours")
host = np.linspace(-1, 1, 64, dtype=np.float32)
digest = hashlib.sha256()
for steps in (2, 3):
    for k in range(2):
        buffer = cl.Buffer(context, cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR, hostbuf=host)
        kernel = made.kernel(Source("many.cl"), f"k{k}", {"STEPS": steps})
        kernel.set_args(buffer, np.int32(64))
        cl.enqueue_nd_range_kernel(queue, kernel, (64,), (64,))
        out = np.zeros_like(host)
        cl.enqueue_copy(queue, out, buffer)
        digest.update(out.tobytes())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("device", ["portable:0", "rusticl:0"])
def test_eight_processes_at_once_with_an_empty_cache_agree_to_the_bit(device: str, tmp_path: Path) -> None:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("POCL_CACHE_DIR", "MESA_SHADER_CACHE_DIR", devices.LIMITS_VARIABLE)
    }
    environment["RUSTICL_ENABLE"] = "llvmpipe"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, device, str(tmp_path / "shared cache")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    ends = [(*child.communicate(timeout=300), child.returncode) for child in children]
    if "does not show" in ends[0][1]:
        pytest.skip(f"no device {device} here")
    assert [status for _, _, status in ends] == [0] * 8, ends[0][1]
    assert len({output for output, _, _ in ends}) == 1
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_folder_that_cannot_be_made_leaves_drivers_their_own_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POCL_CACHE_DIR", raising=False)
    (tmp_path / "opencl_cache").write_text("a file where the folder should be")
    keep_drivers_in(tmp_path / "opencl_cache" / "drivers")
    assert "POCL_CACHE_DIR" not in os.environ
