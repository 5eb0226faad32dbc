"""Choosing tiles, packing and parts of K: what must hold for any shape, and a few shapes where the answer is known."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.gradient.opencl.facts import DeviceFacts
from apps.gradient.opencl.tiles import Product, Recipe, Side, Tile, choose, parts_of_row, tiles_of

CPU = DeviceFacts(
    name="a CPU with AVX2",
    vendor="",
    platform="",
    driver="",
    version=(1, 2),
    kind="cpu",
    group_form=False,
    vector_width=8,
    wavefront=64,
    max_work_group=4096,
    local_memory=1 << 20,
    compute_units=2,
    clock_mhz=3000,
    max_allocation=1 << 30,
    global_memory=1 << 32,
)
CYPRESS = dataclasses.replace(
    CPU,
    name="Cypress",
    kind="gpu",
    group_form=True,
    vector_width=4,
    max_work_group=256,
    compute_units=20,
    clock_mhz=850,
)
WIDE = dataclasses.replace(CPU, vector_width=16)
DEVICES = (CPU, WIDE, CYPRESS)


def product(m: int, n: int, k: int, turned: str = "", batch: int = 1) -> Product:
    """[m, k] [k, n] on dense operands; those in `turned` lie in memory transposed."""
    left = Side(m, batch, *((1, m) if "a" in turned else (k, 1)))
    right = Side(n, batch, *((k, 1) if "b" in turned else (1, n)))
    return Product(batch, k, left, right)


def sides(wanted: Product, recipe: Recipe) -> Iterator[tuple[Side, bool, int]]:
    """Each operand as the kernel sees it, whether it is packed, and the height of its panels."""
    seen = wanted.turned() if recipe.turned else wanted
    yield seen.left, recipe.pack_a, recipe.tile.rows
    yield seen.right, recipe.pack_b, recipe.tile.columns


_SIZES = st.one_of(st.integers(1, 70), st.integers(1, 5000))


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(DEVICES),
    _SIZES,
    _SIZES,
    st.one_of(_SIZES, st.integers(1, 1 << 20)),
    st.sampled_from(("", "a", "b", "ab")),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_recipe_reads_in_place_only_what_the_kernel_can(
    device: DeviceFacts, m: int, n: int, k: int, turned: str, batch: int, aligned: bool
) -> None:
    wanted = product(m, n, k, turned, batch)
    wanted = dataclasses.replace(wanted, right=dataclasses.replace(wanted.right, vectors=aligned))
    recipe = choose(device, wanted)
    assert recipe.tile in tiles_of(device)
    assert recipe.parts == 1 or k // recipe.parts >= 64
    (left, packs_left, rows), (right, packs_right, columns) = sides(wanted, recipe)
    if not packs_right:
        assert right.row == 1 and right.rows >= columns
        assert not device.group_form or (right.vectors and right.rows % 4 == 0)
    if not packs_left:
        assert not device.group_form or left.rows <= rows


@pytest.mark.parametrize("device", DEVICES, ids=lambda each: each.name)
def test_windows_that_are_panels_anyway_are_not_packed_again(device: DeviceFacts) -> None:
    wanted = Product(8, 576, Side(64, 1, 576, 1), Side(3136, 8, 0, 0, ready=True))
    recipe = choose(device, wanted)
    ready = next(packs for side, packs, _ in sides(wanted, recipe) if side.ready)
    assert ready, "the recipe must say that they are packed"


def test_large_products_take_the_largest_tile_and_pack_what_is_read_over_and_over() -> None:
    for device in DEVICES:
        recipe = choose(device, product(1024, 1024, 1024))
        assert recipe.tile == tiles_of(device)[0] and recipe.pack_b and recipe.parts == 1 and not recipe.turned


def test_packing_does_not_dominate_a_product_with_few_rows() -> None:
    for turned in ("", "b"):
        wanted = product(8, 2048, 512, turned)
        for side, packs, _ in sides(wanted, choose(CPU, wanted)):
            assert not (packs and side.rows == 2048), f"the large operand is packed ({turned or 'plain'})"


def test_a_small_k_leaves_the_long_operand_where_it_is() -> None:
    for wanted in (product(4096, 64, 64), product(4096, 64, 64, "b")):
        assert not any(packs for side, packs, _ in sides(wanted, choose(CPU, wanted)) if side.rows == 4096)


def test_a_gpu_gets_enough_wavefronts() -> None:
    for m, n, k in ((256, 512, 2048), (512, 512, 8192), (64, 64, 65536), (256, 256, 4096)):
        recipe = choose(CYPRESS, product(m, n, k))
        tiles = -(-m // recipe.tile.rows) * -(-n // recipe.tile.columns)
        waves = tiles * recipe.parts / CYPRESS.wavefront
        assert waves >= 80 or recipe.parts * 160 > k, f"{m} x {n} x {k}: {waves:.0f} wavefronts"


def test_a_long_row_product_is_cut_into_parts_only_if_rows_are_few() -> None:
    for device in DEVICES:
        assert parts_of_row(device, 1, 1 << 20) > 1
        assert parts_of_row(device, 4096, 1 << 20) == 1
        assert parts_of_row(device, 1, 512) == 1


def test_tiles_of_gpus_have_whole_vectors_of_rows() -> None:
    for tile in tiles_of(CYPRESS):
        assert tile.vector == 4 and (tile.rows % 4 == 0 or tile.rows == 1)
    assert all(
        isinstance(tile, Tile) and 4 <= len(tiles_of(device)) <= 6 for device in DEVICES for tile in tiles_of(device)
    )
