"""`tune`: how fast this computer's OpenCL device multiplies matrices, tile by tile."""

from __future__ import annotations

import click
from rich.console import Console

from boinc_project.cli.errors import Mistake
from boinc_project.cli.tables import table


@click.command()
@click.option("--device", default=None, help="cpu, gpu or PLATFORM:INDEX (default: a GPU if there is one).")
def tune(device: str | None) -> None:
    """Measure the OpenCL device: its peak of multiply-adds, and the share of it that each tile of a matrix product
    reaches. The app measures the same once and remembers it; this command only shows it."""
    try:
        from apps.gradient.backends.backend import DeviceNotFound
        from apps.gradient.opencl import device as devices
        from apps.gradient.opencl.opencl_backend import OpenclBackend
        from apps.gradient.opencl.programs import BuildFailed
        from apps.gradient.opencl.tune import believed, measure, sensible
    except ImportError as error:
        raise Mistake(f"OpenCL needs a package that is not installed ({error}); pip install pyopencl") from error
    from boinc_project.contract.errors import UnfitHost

    console = Console()
    try:
        found = devices.choose(devices.find_devices(), devices.request_of_text(device))
        backend = OpenclBackend(found.handle, devices.facts(found))
        console.print(f"{found.name} ({found.platform_name}, driver {found.driver})", highlight=False)
        made = measure(backend.facts, backend.pool, backend.programs)
    except (UnfitHost, DeviceNotFound, BuildFailed, ValueError) as error:
        raise Mistake(str(error)) from error
    shown = table("tile", "GFLOPS", "% of the peak")
    for tile, rate, share in zip(made.tiles, made.rates, made.shares, strict=True):
        shown.add_row(f"{tile.rows} x {tile.columns}", f"{rate / 1e9:.1f}", f"{100 * share:.0f}")
    console.print(shown)
    console.print(f"measured peak: {made.peak / 1e9:.1f} GFLOPS in a loop of multiply-adds", highlight=False)
    if not sensible(made.shares):
        console.print("These numbers make no sense (is the device busy?); the app goes by its usual ones.")
        return
    shares = believed(made.tiles, made.shares)
    best = max(range(len(shares)), key=shares.__getitem__)
    tile = made.tiles[best]
    console.print(
        f"large products use tiles of {tile.rows} x {tile.columns}: {100 * made.shares[best]:.0f} % of the peak",
        highlight=False,
    )
