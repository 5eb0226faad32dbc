"""What LLVM makes of a kernel for a Radeon HD 5870 and its relatives: registers, local memory, VLIW bundles.

There is no such card in a test machine, but clang with libclc compiles for it. A static result is no run, and the
card's own driver packs differently; it is a bound and an alarm. Facts that are read from the assembly:

    .AMDGPU.config   pairs of (register address, value) before each kernel
        SQ_PGM_RESOURCES_LS   bits 0-7: vec4 registers of a lane (there is no spilling: what does not fit, fails)
        SQ_LDS_ALLOC          local memory in dwords
        COMPUTE_PGM_RSRC1/2   the same for GCN: registers in fours, local memory in 256 bytes
    control flow     LOOP_START/END_LOOP, and lines that start a clause (`ALU n, @address`, `TEX n @address`)
    clauses          one operation a line; `*` after its name ends a VLIW bundle. MOVA writes the address register:
                     a private array that is indexed at run time, which these chips are slow at
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

LIBCLC = Path("/usr/lib/clc")
KEPT = Path(__file__).resolve().parents[2] / ".cache" / "r600"

#: Chip -> LLVM's target and its libclc.
CHIPS: Mapping[str, tuple[str, str]] = {
    "cypress": ("r600", "cypress-r600--.bc"),
    "barts": ("r600", "barts-r600--.bc"),
    "cayman": ("r600", "cayman-r600--.bc"),
    "tahiti": ("amdgcn", "tahiti-amdgcn--.bc"),
}

SQ_PGM_RESOURCES_LS = 0x288D4
SQ_LDS_ALLOC = 0x288E8
COMPUTE_PGM_RSRC1 = 0xB848
COMPUTE_PGM_RSRC2 = 0xB84C
COMPUTE_TMPRING_SIZE = 0xB860


class DoesNotCompile(Exception):
    """The compiler refuses the text for a chip; the message holds its first words."""


@dataclass
class Work:
    """Operations in bundles, and how many of them are multiply-adds."""

    bundles: int = 0
    operations: int = 0
    multiply_adds: int = 0


@dataclass
class Resources:
    """One kernel. `registers` are vec4 registers of a lane on VLIW chips, scalar ones on GCN.

    indirect  writes of the address register (VLIW), bytes of scratch (GCN): 0 is wanted
    hottest   what stands in the innermost loops
    """

    kernel: str
    registers: int = 0
    local_memory: int = 0
    indirect: int = 0
    total: Work = field(default_factory=Work)
    hottest: Work = field(default_factory=Work)

    @property
    def multiply_adds_per_bundle(self) -> float:
        return self.hottest.multiply_adds / max(1, self.hottest.bundles)


@functools.cache
def compiler() -> str | None:
    """The newest clang that libclc's files are for; None if there is none."""
    if not (LIBCLC / CHIPS["cypress"][1]).is_file():
        return None
    return next((found for name in ("clang-15", "clang-14") if (found := shutil.which(name))), None)


@functools.cache
def _versions() -> str:
    """Of the compiler and of this file, which decide what is found."""
    clang = compiler()
    assert clang is not None
    words = subprocess.run([clang, "--version"], capture_output=True, text=True, check=True).stdout
    return words + hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def compile_kernels(text: str, defines: Iterable[str], chip: str) -> dict[str, Resources]:
    """Compile OpenCL C for a chip; what each kernel takes, by name. Raises DoesNotCompile.

    What was found is kept in the repository's .cache for the next run.
    """
    options = list(defines)
    key = hashlib.sha256(json.dumps([_versions(), text, options, chip]).encode()).hexdigest()[:40]
    kept = KEPT / f"{key}.json"
    if not kept.is_file():
        found = _compile(text, options, chip)
        KEPT.mkdir(parents=True, exist_ok=True)
        temporary = kept.with_suffix(f".{os.getpid()}.{threading.get_ident()}.tmp")
        temporary.write_text(json.dumps([asdict(each) for each in found]), encoding="ascii")
        os.replace(temporary, kept)
    rows = json.loads(kept.read_text(encoding="ascii"))
    return {row["kernel"]: Resources(**{**row, **{n: Work(**row[n]) for n in ("total", "hottest")}}) for row in rows}


def _compile(text: str, defines: list[str], chip: str) -> list[Resources]:
    clang = compiler()
    assert clang is not None
    target, library = CHIPS[chip]
    with tempfile.TemporaryDirectory() as folder:
        source, assembly = Path(folder) / "kernels.cl", Path(folder) / "kernels.s"
        source.write_text(text, encoding="ascii")
        command = [clang, "-S", "-x", "cl", "-O3", "-w", "-target", target, f"-mcpu={chip}", "-nogpulib"]
        command += ["-cl-mad-enable", "-cl-single-precision-constant", *defines]
        command += ["-Xclang", "-finclude-default-header"]
        command += ["-Xclang", "-mlink-builtin-bitcode", "-Xclang", str(LIBCLC / library)]
        command += ["-o", str(assembly), str(source)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=600)
        if done.returncode:
            raise DoesNotCompile(f"{chip}: {_reason(done.stderr)}")
        return (read_gcn if target == "amdgcn" else read_r600)(assembly.read_text(encoding="utf-8"))


def complaints(text: str, defines: Iterable[str], standard: str) -> str:
    """The front end's errors in OpenCL C text of a standard, with no extension at all."""
    clang = compiler()
    assert clang is not None
    command = [clang, "-fsyntax-only", "-x", "cl", "-target", "spir", f"-cl-std={standard}", "-Xclang", "-cl-ext=-all"]
    command += ["-w", *defines, "-"]
    done = subprocess.run(command, input=text, capture_output=True, text=True, errors="replace", timeout=600)
    return "; ".join([line for line in done.stderr.splitlines() if "error:" in line][:3])


def _reason(words: str) -> str:
    """The first error, and the function that the compiler was at when it gave up."""
    lines = [line for line in words.splitlines() if re.search(r"error:|Assertion|ran out", line)]
    at = re.search(r"[Ii]n function:? '?@?(\w+)|on function '@(\w+)'", words)
    where = "" if at is None else f" (in {at[1] or at[2]})"
    return (lines or words.splitlines() or ["no words"])[0][:300] + where


def _parts(assembly: str) -> Iterator[tuple[str, dict[int, int], list[str]]]:
    """Name, configuration and lines of each kernel."""
    for part in assembly.split(".section\t.AMDGPU.config")[1:]:
        head, _, body = part.partition(".text")
        numbers = [int(each) for each in re.findall(r"\.long\s+(\d+)", head)]
        name = re.search(r"\.globl\s+(\w+)", body)
        assert name is not None, body[:200]
        yield name[1], dict(zip(numbers[::2], numbers[1::2], strict=True)), body.splitlines()


def read_r600(assembly: str) -> list[Resources]:
    """Kernels of VLIW assembly."""
    return [_r600_kernel(*part) for part in _parts(assembly)]


def _r600_kernel(name: str, config: Mapping[int, int], lines: list[str]) -> Resources:
    found = Resources(name, config[SQ_PGM_RESOURCES_LS] & 0xFF, 4 * config.get(SQ_LDS_ALLOC, 0))
    depth, depth_of_clause, here = 0, {}, None  # of loops
    by_depth: dict[int, Work] = {}
    for line in lines:
        if (start := re.match(r"\t(?:ALU|Fetch) clause starting at (\d+):", line)) is not None:
            here = depth_of_clause.get(int(start[1]), 0)
        elif re.match(r"\tLOOP_START", line):
            depth += 1
        elif re.match(r"\tEND_LOOP", line):
            depth -= 1
        elif here is None and (called := re.match(r"\t(?:ALU\w*|TEX|VTX)\s+\d+,? @(\d+)", line)) is not None:
            depth_of_clause[int(called[1])] = depth
        elif here is not None and (operation := re.match(r"\t  ([A-Z][A-Z0-9_]*)( \*|  )", line)) is not None:
            if operation[1].startswith("VTX_") or operation[1].startswith("TEX_"):
                continue
            for work in (found.total, by_depth.setdefault(here, Work())):
                work.operations += 1
                work.bundles += operation[2] == " *"
                work.multiply_adds += operation[1].startswith(("MULADD", "MAD", "FMA"))
            found.indirect += operation[1].startswith("MOVA")
    found.hottest = by_depth[max(by_depth)] if by_depth else Work()
    return found


def read_gcn(assembly: str) -> list[Resources]:
    """Kernels of GCN assembly: registers and memory only."""
    return [
        Resources(
            name,
            registers=4 * ((config[COMPUTE_PGM_RSRC1] & 0x3F) + 1),
            local_memory=256 * (config[COMPUTE_PGM_RSRC2] >> 15 & 0x1FF),
            indirect=config.get(COMPUTE_TMPRING_SIZE, 0) >> 12 & 0x1FFF,
        )
        for name, config, _ in _parts(assembly)
    ]
