"""What the measurements on simulated volunteers share: example jobs with other settings, and where plots go."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from boinc_project.simulator.computing import Computer
from boinc_project.simulator.hosts import Host
from boinc_project.simulator.lies import Behaviour
from boinc_project.simulator.report import Report, report_of
from boinc_project.simulator.simulation import Settings, simulated
from scripts.benchmarks.common import REPOSITORY
from work_generator.export import ExportedJob, export_job
from work_generator.job import Job

Sections = Mapping[str, Mapping[str, Any]]

#: For tasks of minutes: a host without work comes again after one, not after ten seconds.
LONG_TASKS: Mapping[str, Any] = {"gt_dry_rpc_delay": 60}

#: And the daemons look for work once a minute, not every few seconds: fewer passes, each with more to do.
LONG_INTERVALS: Mapping[str, float] = {"generator": 60.0, "validator": 60.0, "assimilator": 60.0}


@cache
def _traced(toml: Path, batch_size: int) -> tuple[Job, ExportedJob]:
    job = _with(Job.load(toml), {"data": {"batch_size": batch_size}})
    return job, export_job(job)


def example(name: str, batch_size: int, sections: Sections) -> tuple[Job, ExportedJob]:
    """A job of examples/ with this batch size and other values in its sections."""
    job, exported = _traced(REPOSITORY / "examples" / name / "job.toml", batch_size)
    return _with(job, sections), exported


def _with(job: Job, sections: Sections) -> Job:
    changes = {name: dataclasses.replace(getattr(job.config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(job, config=dataclasses.replace(job.config, **changes))


def run(
    job: tuple[Job, ExportedJob],
    hosts: list[Host],
    settings: Settings,
    behaviours: Mapping[str, Behaviour] | None = None,
    computer: Computer | None = None,
) -> Report:
    """Simulate a job to its end. `computer`: one that may have computed its microtasks before."""
    with simulated(*job, hosts, settings, behaviours, computer) as simulation:
        simulation.run()
        return report_of(simulation)


def plot_path(name: str) -> Path:
    """Where a measurement's plot goes."""
    folder = REPOSITORY / ".cache" / "bench"
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name}.png"
