"""Which tile a matrix product uses, and what is packed before it: decided from sizes, strides and the device.

Pure. The costs below are those of one processing element in units of one multiply-add at full speed; they need to
be right only as far as the choices follow from them. They were fitted on a CPU with AVX2 and from what LLVM makes of
the kernels for a Radeon HD 5870 (multiply-adds per VLIW bundle).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from apps.gradient.opencl.facts import DeviceFacts

GROUPS_PER_UNIT = 4  # work-groups that a unit of a CPU should have at least, so that all end together
WAVES_PER_UNIT = 5  # wavefronts that a unit of a GPU should have at least, to hide its waiting
SHORTEST_PART = 128  # steps of k that a part of a cut K has at least
MOST_PARTS = 64
FAR_ROWS = 2048


@dataclass(frozen=True)
class Tile:
    """One item's part of the result: `rows` x (`across` * `vector`) elements; gemm.cl's TM, NV and VW.

    efficiency   share of the device's full speed that the tile reaches on packed operands
    """

    rows: int
    across: int
    vector: int
    efficiency: float = 1.0

    @property
    def columns(self) -> int:
        return self.across * self.vector


_GPU_TILES = (
    Tile(8, 2, 4, 0.61),
    Tile(4, 2, 4, 0.49),
    Tile(8, 1, 4, 0.49),
    Tile(4, 1, 4, 0.40),
    Tile(1, 1, 4, 0.20),
)


def tiles_of(device: DeviceFacts) -> tuple[Tile, ...]:
    """The tiles that products on this device choose from, with what they were measured to reach if they were."""
    tiles = default_tiles(device)
    if len(device.tuned) != len(tiles):
        return tiles
    return tuple(replace(tile, efficiency=share) for tile, share in zip(tiles, device.tuned))


def default_tiles(device: DeviceFacts) -> tuple[Tile, ...]:
    """The tiles with usual efficiencies; all compile within Cypress's limits for GPUs (62 vector registers)."""
    if device.group_form:
        return _GPU_TILES
    vector = device.vector_width
    if vector == 16:
        return (
            Tile(12, 1, 16, 0.95),
            Tile(8, 1, 16, 0.85),
            Tile(4, 2, 16, 0.85),
            Tile(4, 1, 16, 0.6),
            Tile(1, 4, 16, 0.3),
        )
    return (
        Tile(6, 2, vector, 0.92),
        Tile(4, 2, vector, 0.88),
        Tile(8, 1, vector, 0.75),
        Tile(2, 4, vector, 0.7),
        Tile(1, 8, vector, 0.4),
    )


@dataclass(frozen=True)
class Side:
    """An operand as the choice sees it. Its rows are the rows of the left operand, or the columns of the right one.

    batches     matrices that it has; a batch uses fewer than its own over and over
    row, k      strides
    vectors     whether vectors may be loaded along the axis of stride 1
    in_place    whether it may be read without packing at all
    ready       it is made as panels anyway (a convolution's windows)
    """

    rows: int
    batches: int
    row: int
    k: int
    vectors: bool = True
    in_place: bool = True
    ready: bool = False


@dataclass(frozen=True)
class Product:
    """left [batch, M, K] times right [batch, K, N]."""

    batch: int
    k: int
    left: Side
    right: Side

    def turned(self) -> Product:
        """The same product as c^T = b^T a^T."""
        return Product(self.batch, self.k, self.right, self.left)


@dataclass(frozen=True)
class Recipe:
    """How a product is computed: turned or not, on which tile, what is packed, in how many parts of K."""

    turned: bool
    tile: Tile
    pack_a: bool
    pack_b: bool
    parts: int


def choose(device: DeviceFacts, wanted: Product, tiles: Sequence[Tile] = ()) -> Recipe:
    """The cheapest recipe by the costs below."""
    return min(recipes(device, wanted, tiles), key=lambda pair: pair[0])[1]


def recipes(device: DeviceFacts, wanted: Product, tiles: Sequence[Tile] = ()) -> Iterator[tuple[float, Recipe]]:
    """All that could be done, with what it costs."""
    for turned in (False, True):
        product = wanted.turned() if turned else wanted
        for tile in tiles or tiles_of(device):
            for pack_a in (True, False) if _reads_left(device, product.left, tile) else (True,):
                for pack_b in (True, False) if _reads_right(device, product.right, tile) else (True,):
                    for parts in sorted({1, _parts(device, product, tile)}):
                        recipe = Recipe(turned, tile, pack_a, pack_b, parts)
                        yield cost(device, product, recipe), recipe


def _reads_left(device: DeviceFacts, side: Side, tile: Tile) -> bool:
    """Whether the left operand may be read in place. On a GPU only where all items read the same rows."""
    return side.in_place and not side.ready and (not device.group_form or side.rows <= tile.rows)


def _reads_right(device: DeviceFacts, side: Side, tile: Tile) -> bool:
    """Whether the right operand may be read in place: see B_PACKED in gemm.cl."""
    inside = side.in_place and not side.ready and side.row == 1 and side.rows >= tile.columns
    return inside and (not device.group_form or (side.vectors and side.rows % tile.vector == 0))


def _units(device: DeviceFacts) -> int:
    """Items that should be at work at once."""
    if device.group_form:
        return device.compute_units * WAVES_PER_UNIT * device.wavefront
    return device.compute_units * GROUPS_PER_UNIT


def _items(product: Product, tile: Tile) -> int:
    return product.batch * _count(product.left.rows, tile.rows) * _count(product.right.rows, tile.columns)


def _parts(device: DeviceFacts, product: Product, tile: Tile) -> int:
    """Parts of K that give every unit of the device something to do."""
    items = max(1, _items(product, tile))
    return max(1, min(_units(device) // items, product.k // SHORTEST_PART, MOST_PARTS))


def cost(device: DeviceFacts, product: Product, recipe: Recipe) -> float:
    """Time in multiply-adds of the whole device at full speed. `product` is already turned."""
    tile, costs = recipe.tile, _GPU if device.group_form else _CPU
    items = _items(product, tile) * recipe.parts
    steps = items * (_count(product.k, recipe.parts) * tile.rows * tile.columns * _slowness(costs, product, recipe))
    busy = min(1.0, items / _units(device))
    total = (steps / tile.efficiency + items * costs.start) / max(busy, 1e-9)
    results = product.batch * product.left.rows * product.right.rows
    if recipe.turned:
        total += results * min(costs.scattered, 2.0 * product.right.rows)
    if recipe.parts > 1:
        total += _moving(costs, results * recipe.parts) + costs.launch * device.compute_units
    for side, packs in ((product.left, recipe.pack_a), (product.right, recipe.pack_b)):
        if packs and not side.ready:
            total += _moving(costs, side.batches * side.rows * product.k) + costs.launch * device.compute_units
    return total


@dataclass(frozen=True)
class _Costs:
    """In multiply-adds of the whole device, unless noted.

    near, far   moving one element (packing it, or into and out of a sum of parts), where a cache holds them or not
    held        elements that a cache holds
    launch      one more launch, of one unit of the device
    start       an item's work outside of its loop
    scattered   writing one element of a turned result, at most: a result of few rows stays in the cache meanwhile
    left        factor for a left operand that is read in place
    far_apart   the same if its rows are FAR_ROWS or more elements apart
    apart       what an operand that is read in place with its elements not along k adds to 1, for 32 of them at once:
                fewer use less of each line that they read
    cached      floats of an operand for which that does not matter
    """

    near: float
    far: float
    held: int
    launch: float
    start: float
    scattered: float
    left: float
    far_apart: float
    apart: float
    cached: int


_CPU = _Costs(16, 50, 300_000, 2e5, 1500, 300, 1.2, 1.3, 0.5, 8 << 10)
_GPU = _Costs(80, 80, 0, 1e6, 500, 100, 1.3, 1.3, 0.2, 0)


def _moving(costs: _Costs, elements: float) -> float:
    return elements * (costs.near if elements <= costs.held else costs.far)


def _slowness(costs: _Costs, product: Product, recipe: Recipe) -> float:
    """How much longer the loop takes on operands that are not packed."""
    slowness = 1.0
    if not recipe.pack_a:
        slowness *= costs.far_apart if abs(product.left.row) >= FAR_ROWS else costs.left
        if product.left.k != 1 and product.left.rows * product.k > costs.cached:
            slowness *= 1.0 + costs.apart * 32 / recipe.tile.rows
    if not recipe.pack_b and product.right.rows * product.k > costs.cached:
        slowness *= 1.0 + costs.apart * 32 / recipe.tile.columns
    return slowness


def _count(size: int, step: int) -> int:
    return -(-size // step)


def parts_of_row(device: DeviceFacts, rows: int, k: int) -> int:
    """Parts of K where a vector is multiplied: each row of the matrix is one item, or one group on a GPU."""
    units = device.compute_units * (WAVES_PER_UNIT if device.group_form else GROUPS_PER_UNIT)
    shortest = 1024 if device.group_form else 2048
    return max(1, min(units // max(rows, 1), k // shortest, MOST_PARTS))


def _variants() -> Iterator[tuple[str, dict[str, int | str]]]:
    """Programs of gemm.cl for GPUs: each tile at its plainest, at its largest, and in parts."""
    for tile in _GPU_TILES:
        plain: dict[str, int | str] = {"TM": tile.rows, "NV": tile.across, "VW": tile.vector}
        for packed in (1, 0):
            vectors = int(packed and tile.rows % 4 == 0)
            operands = {**plain, "A_PACKED": packed, "A_VECTORS": vectors}
            for right in (1, 0):
                yield "gemm.cl", {**operands, "B_PACKED": right, "EDGE": 1, "BIAS": 3}
            yield "gemm.cl", {**operands, "EDGE": 0, "BIAS": 0}
        yield "gemm.cl", {**plain, "A_VECTORS": int(tile.rows % 4 == 0), "SPLIT": 1, "STORE_VECTORS": 0, "REPEATS": 1}


#: What may be built for a GPU, whatever its tuning says: file and defines.
VARIANTS = tuple(_variants())
