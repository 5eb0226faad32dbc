"""`calibrate`: how far apart honest copies of a job's results are, and what can be told from them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.markup import escape

from boinc_project.calibration import record
from boinc_project.calibration.record import Calibration
from boinc_project.calibration.spread import LIMIT, Band
from boinc_project.cli.errors import Mistake
from boinc_project.cli.jobs import doing, load_job
from boinc_project.cli.tables import table

if TYPE_CHECKING:
    from boinc_project.job_config import JobConfig


@click.command()
@click.argument("job_toml", type=click.Path(path_type=Path))
@click.option(
    "--microtasks", type=click.IntRange(1, 100), default=3, show_default=True, help="Microtasks of each version."
)
@click.option(
    "--warm-up", type=click.IntRange(0, 100_000), default=100, show_default=True, help="Steps to the trained version."
)
@click.option(
    "--max-steps", type=click.IntRange(1, 500), default=500, show_default=True, help="Most local steps that are tried."
)
@click.option("--json", "as_json", is_flag=True, help="Print the calibration as JSON and no table.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=None, help="File to write (default: beside JOB_TOML)."
)
def calibrate(
    job_toml: Path, microtasks: int, warm_up: int, max_steps: int, as_json: bool, output: Path | None
) -> None:
    """Compute some of the job's own microtasks in every way this machine knows, and say which tolerance tells honest
    copies from lies, and how many local steps honest copies bear. `job create` reads what it writes."""
    # Threads that wait for one another by spinning take a busy machine's processors from those that compute; OpenMP
    # reads this when PyTorch is loaded, which is below.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    console = Console(stderr=True)
    job = load_job(job_toml, console)
    path = output or job.folder / record.FILE
    if not path.parent.is_dir():
        raise Mistake(f"the folder {path.parent} does not exist; create it or choose another --output")
    from boinc_project.calibration.measure import Effort, measure
    from work_generator.export import export_job

    with doing(console, "tracing the model") as tell:
        exported = export_job(job)
        made = measure(job, exported, Effort(microtasks, warm_up, max_steps), tell)
    try:
        record.write(made, path)
    except OSError as error:
        raise Mistake(f"{path} cannot be written ({error.strerror}); choose another --output") from error
    if as_json:
        click.echo(made.to_json(), nl=False)
    else:
        show(made, job.config, Console())
        Console().print(f"Wrote {path}.", highlight=False, soft_wrap=True)


def show(made: Calibration, config: JobConfig, console: Console) -> None:
    """The calibration as a table and sentences."""
    bands: list[tuple[str, Band]] = [(f"gradient of {_count(made.gradient.steps, 'batch', 'batches')}", made.gradient)]
    if made.delta is not None:
        bands.append((f"{_count(made.delta.steps, 'local step', 'local steps')}", made.delta))
    found = table("relative distance", *(name for name, _ in bands), title=f"Copies of {made.job}")
    for label, row in (
        ("honest, median", [f"{band.p50:.1e}" for _, band in bands]),
        ("honest, 99 %", [f"{band.p99:.1e}" for _, band in bands]),
        ("honest, largest", [f"{band.largest:.1e}" for _, band in bands]),
        ("  of so many pairs", [str(band.pairs) for _, band in bands]),
        ("  in the tensor", [escape(band.worst) for _, band in bands]),
    ):
        found.add_row(label, *row)
    names = sorted({name for _, band in bands for name in band.apart}, key=lambda n: -bands[0][1].apart.get(n, 0.0))
    for name in reversed(names):
        found.add_row(f"{name}", *(f"{band.apart[name]:.1e}" if name in band.apart else "" for _, band in bands))
    found.add_section()
    found.add_row("tolerance proposed", *(f"{band.tolerance:g}" for _, band in bands))
    above = [f"{band.tolerance / max(band.largest, 1e-12):.1f} times" for _, band in bands]
    found.add_row("  above the largest honest one", *above)
    found.add_row(
        "  below the nearest lie", *(f"{band.apart[band.nearest] / band.tolerance:.1f} times" for _, band in bands)
    )
    console.print(found)
    console.print(f"Honest: {', '.join(made.replicas)}; from {' and '.join(made.versions)}.", highlight=False)
    for name, reason in made.absent.items():
        console.print(f"Without {name}: {escape(reason)}.", highlight=False)
    for sentence in verdicts(made, config):
        console.print(escape(sentence), highlight=False)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def verdicts(made: Calibration, config: JobConfig) -> list[str]:
    """What the admin should know or do, one sentence each."""
    band, found = made.judged, []
    if made.noise:
        listed = ", ".join(str(each) for each in made.noise[:8])
        more = f" and {len(made.noise) - 8} more" if len(made.noise) > 8 else ""
        found.append(f"Noise, whose true gradient is zero: {listed}{more}.")
    else:
        found.append("No tensor holds noise only.")
    if made.local_steps is not None:
        found.append(_of_local_steps(made, config))
    if band.separable:
        found.append(f"Write tolerance = {band.tolerance:g} into [workunit] (it is {config.workunit.tolerance:g} now).")
    elif band.largest > LIMIT:
        found.append(
            f"Honest copies are up to {band.largest:.1e} apart: too far for agreement. Use a codec that rounds less,"
            " lower local_steps, or set eps = 1e-6 and max_norm = 1.0 in [inner_optimizer]."
        )
    else:
        found.append(
            f"{band.nearest} is only {band.margin:.1f} times as far as honest copies: no tolerance tells them apart"
            " well. Lower local_steps or use another codec."
        )
    return found


def _of_local_steps(made: Calibration, config: JobConfig) -> str:
    assert made.local_steps is not None
    steps = made.local_steps
    reach = f"up to {steps.largest} local steps" if steps.largest else "for no number of local steps"
    if steps.largest == steps.searched_to:
        reach += " (more were not tried)"
    sentence = f"Honest copies stay within {LIMIT:g} {reach}; the job takes {config.train.local_steps}."
    if steps.float32 != steps.largest:
        sentence += f" Without the codec {config.codec.kind}: {steps.float32}."
    return sentence
