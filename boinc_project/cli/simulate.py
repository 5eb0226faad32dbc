"""`simulate`: a job on made-up volunteers in virtual time, before anybody is asked for an hour of theirs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from boinc_project.cli.errors import Mistake
from boinc_project.contract import whole_file

LIES = ("sign_flip", "alie", "ipm", "label_flip", "mimic", "scaled", "free_rider", "drop")


@click.command()
@click.argument("job_toml", type=click.Path(path_type=Path))
@click.option("--hosts", type=click.IntRange(1, 10_000), default=16, show_default=True, help="Number of computers.")
@click.option(
    "--trace", type=click.Path(path_type=Path), default=None,
    help="Availability trace: a FedScale one as JSON, or event_trace.tab of the Failure Trace Archive. Without it"
    " hosts are drawn.",
)  # fmt: skip
@click.option(
    "--gflops", type=click.FloatRange(0.001, 1e6), default=4.0, show_default=True, help="Median host's speed."
)
@click.option(
    "--on-share", type=click.FloatRange(0.01, 1.0), default=1.0, show_default=True,
    help="Share of time for which drawn hosts are on.",
)  # fmt: skip
@click.option("--leave", type=click.FloatRange(0, 1), default=0.0, help="Share of hosts that leaves for good.")
@click.option("--hours", type=click.FloatRange(0.01, 24 * 365), default=24 * 90.0, help="Virtual hours at most.")
@click.option("--lie", type=click.Choice(LIES), default=None, help="What liars do.")
@click.option("--liars", type=click.IntRange(0), default=0, help="Number of liars, who collude.")
@click.option(
    "--noise", type=click.FloatRange(0, 0.1), default=1e-7, show_default=True, help="Rounding noise of copies."
)
@click.option("--seed", default=0, show_default=True, help="The same seed gives the same simulation.")
@click.option("--backend", type=click.Choice(["numpy", "torch"]), default="numpy", show_default=True)
@click.option(
    "--plot", type=click.Path(path_type=Path), default=None, help="PNG to write (default: NAME-simulated.png)."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), default=None, help="File for all figures.")
def simulate(
    job_toml: Path, hosts: int, trace: Path | None, gflops: float, on_share: float, leave: float, hours: float,
    lie: str | None, liars: int, noise: float, seed: int, backend: str, plot: Path | None, json_path: Path | None,
) -> None:  # fmt: skip
    """Train the job that JOB_TOML names on simulated hosts, with the real daemons' decisions and real gradients.

    Nothing is published and nobody is asked for work. `--leave` spreads the departures over `--hours`.
    """
    from boinc_project.simulator.hosts import HostsError, with_departures
    from boinc_project.simulator.lies import BEHAVIOURS
    from boinc_project.simulator.report import DEFINITIONS, draw, report_of
    from boinc_project.simulator.simulation import Settings, simulated
    from boinc_project.simulator.synthetic import synthetic_hosts
    from boinc_project.simulator.traces import read_trace
    from work_generator.export import export_job
    from work_generator.job import Job

    if bool(lie) != bool(liars) or liars > hosts:
        raise Mistake(f"--lie and --liars belong together, with at most {hosts} liars; give both or neither")
    if leave and hours >= 24 * 90:
        raise Mistake("--leave spreads the departures over the simulated time; say how long that is with --hours")
    job = Job.load(job_toml)
    picture = plot or Path(f"{job.config.job.name}-simulated.png")
    for path in (picture, *([json_path] if json_path else [])):
        if not path.absolute().parent.is_dir():
            raise Mistake(f"the folder of {path} does not exist; create it or choose another file")
    try:
        if trace is not None:
            made = read_trace(trace, hosts, seed, flops=1e9 * gflops)
        else:
            made = synthetic_hosts(hosts, seed, on_share=on_share, flops=1e9 * gflops, horizon=3600 * hours)
        made = with_departures(made, leave, 3600 * hours, seed)
    except HostsError as error:
        raise Mistake(str(error)) from error
    behaviours = {host.name: BEHAVIOURS[lie]() for host in made[:liars]} if lie else {}
    settings = Settings(seed=seed, backend=backend, noise=noise, horizon=3600 * hours)
    with simulated(job, export_job(job), made, settings, behaviours) as simulation:
        simulation.run()
        report = report_of(simulation)
    click.echo(report.text())
    click.echo(DEFINITIONS)
    draw({report.job: report}, picture)
    click.echo(f"Wrote {picture}.")
    if json_path is not None:
        whole_file.write_bytes(json_path, json.dumps(report.to_document(), indent=1).encode())
        click.echo(f"Wrote {json_path}.")
