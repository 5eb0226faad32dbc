"""`export` and `run`: what a job is made of, and one microtask of it on this machine, without BOINC."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import click
from rich.console import Console

from boinc_project import local_run
from boinc_project.cli.errors import Mistake
from boinc_project.cli.tables import table
from boinc_project.contract import tensorfile, whole_file
from boinc_project.contract.estimates import memory_bytes, step_flops
from boinc_project.contract.microtask import CONSTANTS_FILE, STATE_FILE
from boinc_project.contract.update import update_types


@click.command()
@click.argument("job_toml", type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), default=None, help="Folder for the graphs (default: none).")
def export(job_toml: Path, output: Path | None) -> None:
    """Trace the model that JOB_TOML names and say what its graphs need; nothing is published."""
    from work_generator.export import export_job
    from work_generator.job import Job

    job = Job.load(job_toml)
    made = export_job(job)
    console = Console()
    costs = table("graph", "nodes", "operators", "GFLOP per run", "MB at its peak")
    graphs = {
        "gradient": made.gradient,
        **{f"gradient_{size}": graph for size, graph in made.smaller.items()},  # for parts of a batch
        **({"optimizer": made.optimizer} if made.optimizer is not None else {}),
        "evaluation": made.evaluation,
    }
    for name, graph in graphs.items():
        operators = len(graph.operators())
        flops, peak = graph.flops() / 1e9, graph.peak_bytes() / 1e6
        costs.add_row(name, str(len(graph.nodes)), str(operators), f"{flops:.3f}", f"{peak:.1f}")
    console.print(costs)
    for note in (*job.notes, *made.notes):
        console.print(f"note: {note}")
    if output is None:
        return
    if not output.parent.is_dir():
        raise Mistake(f"the folder {output.parent} does not exist; create it or choose another --output")
    output.mkdir(exist_ok=True)
    for name, graph in graphs.items():
        whole_file.write_bytes(output / f"{name}.json.zst", graph.to_bytes())
    tensorfile.write(output / STATE_FILE, made.state, {"format": "boinc-train-state"})
    if made.constants:
        tensorfile.write(output / CONSTANTS_FILE, made.constants)
    console.print(f"Wrote the graphs and version 0 to {output}.")


@click.command()
@click.argument("job_toml", type=click.Path(path_type=Path))
@click.option("--backend", type=click.Choice(["numpy", "torch", "opencl"]), default="numpy", show_default=True)
@click.option("--nthreads", type=click.IntRange(1, 1024), default=1, show_default=True, help="Threads that compute.")
@click.option("--slot", default=0, show_default=True, help="Which microtask of version 0.")
@click.option("--keep", type=click.Path(path_type=Path), default=None, help="Folder in which the files stay.")
def run(job_toml: Path, backend: str, nthreads: int, slot: int, keep: Path | None) -> None:
    """Run one microtask of the job here, as a volunteer's computer would, and show its loss and timings."""
    folder = Path(tempfile.mkdtemp(prefix="boinc-train-run-")) if keep is None else keep
    if keep is not None and not keep.parent.is_dir():
        raise Mistake(f"the folder {keep.parent} does not exist; create it or choose another --keep")
    try:
        _run(job_toml, backend, nthreads, slot, folder)
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def _run(job_toml: Path, backend: str, nthreads: int, slot: int, folder: Path) -> None:
    from work_generator.export import export_job
    from work_generator.job import Job
    from work_generator.publish import local_content

    job = Job.load(job_toml)
    if not 0 <= slot < job.config.train.microtasks_per_version:
        raise Mistake(f"slot {slot} does not exist; choose 0 to {job.config.train.microtasks_per_version - 1}")
    made = export_job(job)
    folder.mkdir(parents=True, exist_ok=True)
    microtask, files = local_content(job, made, slot, folder / "published")
    start = time.monotonic()
    arguments = ("--backend", backend, "--nthreads", str(nthreads))
    types = update_types(
        made.gradient, microtask.mode, microtask.steps, made.optimizer if microtask.ships_state else None
    )
    update = local_run.start(folder / "slot", microtask, files, arguments).update(types)
    seconds = time.monotonic() - start
    losses = update.metadata["losses"]
    console = Console()
    console.print(f"{microtask.mode}: {microtask.steps} steps, {microtask.samples} samples, backend {backend}")
    console.print(f"loss of the first step {losses[0]:.4f}, of the last {losses[-1]:.4f}")
    flops = step_flops(made.gradient, made.optimizer) * microtask.steps
    compute = float(update.metadata["seconds"]["compute"])
    console.print(
        f"{seconds:.2f} s with start-up, {compute:.2f} s of computing, {flops / max(compute, 1e-9) / 1e9:.1f} GFLOPS"
    )
    estimate = memory_bytes(made.gradient, made.optimizer, types, 0)
    peak = int(update.metadata["peak_memory"])
    console.print(f"peak memory {peak / 1e6:.0f} MB (estimate without the program: {estimate / 1e6:.0f} MB)")
