"""Every kernel variant that can be launched on a Radeon HD 5870 compiles for it, within its limits.

Static: by LLVM's r600 backend and libclc (see r600.py), for the VLIW chips and for the first GCN one.
"""

from __future__ import annotations

import dataclasses
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import cypress_variants
import pytest
import r600
from cypress_variants import Variant
from r600 import DoesNotCompile, Resources

pytest.importorskip("pyopencl")

from apps.gradient.opencl.programs import DIALECT_OF_1_1, kernel_folder, kernel_text

pytestmark = pytest.mark.skipif(
    r600.compiler() is None, reason="clang-15 with libclc-15 is needed (Debian: clang-15 libclc-15-dev)"
)

MOST_REGISTERS = 62  # a work-group of 256 is four wavefronts, which share 248 registers
MOST_LOCAL_MEMORY = 32 << 10
LARGEST_WORK_GROUP = 256
NOT_OF_OPERATORS = {"peak.cl"}  # measures the device
TUNED_TILE = {"TM": 8, "NV": 2, "VW": 4}
LEAST_MULTIPLY_ADDS = 3.0  # in a bundle of five slots, one of which a multiply-add cannot always use


@cache
def all_variants() -> list[Variant]:
    return cypress_variants.variants()


def compiled(variant: Variant, chip: str) -> dict[str, Resources] | str:
    """What the variant's kernels take; the compiler's words if it refuses them."""
    text = kernel_text(variant.file) + (f"\n{variant.more}" if variant.more else "")
    try:
        return r600.compile_kernels(text, variant.defines, chip)
    except DoesNotCompile as error:
        return str(error)


@pytest.mark.parametrize(
    "chip", [pytest.param(chip, marks=[] if chip == "cypress" else pytest.mark.long) for chip in r600.CHIPS]
)
def test_every_variant_compiles_within_the_limits_of_the_chip(chip: str) -> None:
    variants = all_variants()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(lambda variant: compiled(variant, chip), variants))
    wrong, most = [], Resources("none")
    for variant, found in zip(variants, made, strict=True):
        if isinstance(found, str):
            wrong.append(f"{variant.id}: {found}")
            continue
        for name in variant.launched or found:
            kernel = found[name]
            most = max(most, kernel, key=lambda each: each.registers)
            if kernel.indirect or kernel.local_memory > MOST_LOCAL_MEMORY:
                wrong.append(f"{variant.id}: {kernel}")
            elif chip != "tahiti" and kernel.registers > MOST_REGISTERS:
                wrong.append(f"{variant.id}: {name} takes {kernel.registers} registers")
    print(f"{chip}: {len(variants)} variants, at most {most.registers} registers ({most.kernel})")
    assert not wrong, f"{len(wrong)} of {len(variants)} on {chip}:\n" + "\n".join(wrong)


def test_no_work_group_is_larger_than_the_card_allows() -> None:
    sizes = {f"{each.id} {name}": size for each in all_variants() for name, size in each.launched.items()}
    assert sizes
    assert {name: size for name, size in sizes.items() if size > LARGEST_WORK_GROUP} == {}


def test_every_file_of_kernels_is_among_the_variants() -> None:
    used = {each.file for each in all_variants() if each.launched}
    idle = {each.file for each in all_variants()} - used - NOT_OF_OPERATORS
    assert not idle, f"nothing that a Cypress runs launches {idle}"


def test_the_tuned_tile_of_the_packed_product_fills_the_bundles() -> None:
    defines = [f"-D{name}={value}" for name, value in TUNED_TILE.items()]
    for chip in ("cypress", "barts"):
        found = r600.compile_kernels(kernel_text("gemm.cl"), defines, chip)["gemm"]
        print(f"{chip}: {found.multiply_adds_per_bundle:.2f} multiply-adds a bundle, {found.registers} registers")
        assert found.multiply_adds_per_bundle >= LEAST_MULTIPLY_ADDS


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        (
            "float t[16]; for (int k = 0; k < 16; k++) t[k] = x[k]; t[n & 15] = 1.0f; x[n] = t[(n >> 4) & 15];",
            "indirect",
        ),
        ("__local float t[10000]; t[n] = x[n]; barrier(CLK_LOCAL_MEM_FENCE); x[n] = t[n ^ 1];", "local_memory"),
        ("double t = x[n]; x[n] = (float)(t * t);", "refused"),
        ("x[n] = (float)atomic_cmpxchg((volatile __global int *)x, 0, n);", "refused"),
    ],
)
def test_the_checker_sees_what_is_wrong(statement: str, fault: str) -> None:
    text = f"__kernel void wrong(__global float *x, int n) {{ {statement} }}"
    if fault == "refused":
        with pytest.raises(DoesNotCompile):
            r600.compile_kernels(text, [], "cypress")
        return
    found = r600.compile_kernels(text, [], "cypress")["wrong"]
    assert getattr(found, fault) > {"indirect": 0, "local_memory": MOST_LOCAL_MEMORY}[fault]


# What old compilers do not know, or do badly: bytes and shorts cannot be stored on some, 64-bit floats are not there on
# others, and these atomics and copies are where libraries differ.
FORBIDDEN = re.compile(
    r"\b(?:double\d*|half\d*|u?char\d*|u?short\d*|printf|image[123]d\w*|sampler_t|atom_\w+|atomic_\w+|fma|mem_fence"
    r"|async_work_group\w*|goto|switch|native_\w+|half_(?:cos|exp|log|pow|recip|rsqrt|sin|sqrt)\w*|vload_half\w*)\b"
)


def test_kernel_text_keeps_to_what_every_compiler_knows() -> None:
    found = {}
    for path in sorted(kernel_folder().glob("*.cl")):
        text = re.sub(r"/\*.*?\*/|//[^\n]*", "", path.read_text(encoding="ascii"), flags=re.DOTALL)
        words = sorted(set(FORBIDDEN.findall(text)))
        if words or "#include" in text:
            found[path.name] = words
    assert found == {}


@pytest.mark.parametrize("standard", ["CL1.1", pytest.param("CL1.2", marks=pytest.mark.long)])
def test_every_variant_is_plain_opencl_c_without_extensions(standard: str) -> None:
    def words(variant: Variant) -> str:
        text = kernel_text(variant.file) + (f"\n{variant.more}" if variant.more else "")
        dialect = DIALECT_OF_1_1 if standard == "CL1.1" else ()
        return r600.complaints(text, (*dialect, *variant.defines), standard)

    variants = all_variants()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = list(pool.map(words, variants))
    wrong = [f"{variant.id}: {found}" for variant, found in zip(variants, made, strict=True) if found]
    assert not wrong, f"{len(wrong)} of {len(variants)} as {standard}:\n" + "\n".join(wrong[:10])


@pytest.mark.parametrize("largest", [64, 128])
def test_smaller_work_groups_are_enough(largest: int) -> None:
    small = dataclasses.replace(cypress_variants.CYPRESS, max_work_group=largest)
    sizes = {size for each in cypress_variants.variants(small, examples=False) for size in each.launched.values()}
    assert sizes and max(sizes) <= largest


def test_helpers_are_compiled_into_their_kernels_as_opencl_c_1_1_too() -> None:
    """Without `static inline` they are functions like others, and the r600 has no calls."""
    for path in sorted(kernel_folder().glob("*.cl")):
        found = r600.compile_kernels(kernel_text(path.name), ["-cl-std=CL1.1", *DIALECT_OF_1_1], "cypress")
        kernels = {name: each for name, each in found.items() if f" {name}(" in kernel_text(path.name)}
        assert all(each.registers <= MOST_REGISTERS for each in kernels.values()), path.name
