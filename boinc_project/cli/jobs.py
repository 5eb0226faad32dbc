"""`job ...` and `weights`: making, steering and harvesting jobs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import sqlalchemy as sa
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from boinc_project import store
from boinc_project.calibration import record
from boinc_project.cli.errors import Mistake
from boinc_project.cli.project import APP_NAME, app_of, app_option, open_project, project_option
from boinc_project.cli.status import metrics_text
from boinc_project.cli.tables import table
from boinc_project.contract import tensorfile, whole_file
from boinc_project.database import Database
from boinc_project.gt_tables import (
    Disposition,
    JobState,
    MicrotaskState,
    gt_job,
    gt_ledger,
    gt_microtask,
    gt_round,
    gt_version,
)
from boinc_project.job_config import TrustSection
from boinc_project.project_tree import ProjectTree
from boinc_project.store import JobRow
from boinc_project.supply_limits import download_advice

if TYPE_CHECKING:
    from work_generator.job import Job


@click.group()
def job() -> None:
    """Create, show and steer training jobs."""


@job.command("create")
@click.argument("job_toml", type=click.Path(path_type=Path))
@project_option
@app_option
def create(job_toml: Path, project_dir: Path | None, app_name: str | None) -> None:
    """Trace the model that JOB_TOML names, publish it and its data, and start training."""
    tree = open_project(project_dir)
    console = Console(stderr=True)
    create_job(tree, load_job(job_toml, console), console, app_of(tree, app_name))


@contextmanager
def doing(console: Console, what: str) -> Iterator[Callable[[str], None]]:
    """A line that shows what is being done, and for how long; the block may tell what it goes on to."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task(what, total=None)
        yield lambda text: bars.update(task, description=text)


def load_job(job_toml: Path, console: Console) -> Job:
    """Load a job's model and data with a progress line."""
    from work_generator.job import Job

    with doing(console, "loading the model and data"):
        return Job.load(job_toml)


def create_job(tree: ProjectTree, loaded: Job, console: Console, app_name: str = APP_NAME) -> int:
    """Export and publish a job with a progress line; returns its id."""
    from work_generator.export import export_job
    from work_generator.publish import publish_job

    with doing(console, "tracing the model") as tell:
        exported = export_job(loaded)
        bound_to = record.binding(loaded.config, exported.gradient, exported.optimizer)
        calibrated = record.check(loaded.config, bound_to, record.find(loaded.folder))
        with tree.database() as database:
            store.create_own_tables(database)
            job_id = publish_job(tree, database, loaded, exported, app_name, tell)
    for note in (*loaded.notes, *exported.notes, *calibrated):
        console.print(f"note: {note}")
    size = sum(array.nbytes for array in exported.state.values())
    console.print(download_advice(loaded.config, size), highlight=False, soft_wrap=True)
    parameters = sum(a.size for name, a in exported.state.items() if name.startswith("parameter/"))
    console.print(
        f"Job {loaded.config.job.name!r} is running: {parameters:,} parameters, {len(exported.gradient.nodes)} nodes."
    )
    return job_id


@job.command("replay")
@click.argument("name")
@project_option
def replay(name: str, project_dir: Path | None) -> None:
    """Compute every kept version anew from the ledger and compare it, byte for byte, with what was published."""
    from assimilator.replay import replay as replay_ledger

    tree = open_project(project_dir)
    with tree.database() as database:
        with database.read() as connection:
            found = named_job(connection, name)
            recorded = {int(r["version"]): str(r["state_sha256"]) for r in store.versions(connection, found.id)}
        try:
            made = replay_ledger(database, found)
        except FileNotFoundError as error:
            raise Mistake(f"{error.filename} is missing, so job {name!r} cannot be replayed; restore it") from error
    for version, digest in made.items():
        if recorded[version] != digest:
            raise Mistake(f"version {version} of job {name!r} is not what its ledger makes: {digest} is computed")
        read_state(found, version, digest)  # the file on disk must be those very bytes
    click.echo(f"Versions {min(made)} to {max(made)} of job {name!r} are exactly what the ledger makes.")


@job.command("list")
@project_option
def list_jobs(project_dir: Path | None) -> None:
    """List the project's jobs."""
    tree = open_project(project_dir)
    with tree.database() as database, database.read() as connection:
        rows = store.jobs(connection)
    found = table("job", "state", "policy", "version", "of", "note")
    for row in rows:
        train = row.config.train
        version, last = str(row.current_version), str(train.max_versions)
        found.add_row(row.name, row.state, train.policy, version, last, escape(row.note))
    Console().print(found)


@job.command("show")
@click.argument("name")
@project_option
def show(name: str, project_dir: Path | None) -> None:
    """Show a job: settings, versions, losses, the open round."""
    tree = open_project(project_dir)
    console = Console()
    with tree.database() as database, database.read() as connection:
        found = named_job(connection, name)
        versions = store.versions(connection, found.id)
        tasks = store.microtasks(connection, found.id, found.current_version)
    console.print(f"{found.name}: {found.state} at version {found.current_version}. {escape(found.note)}")
    console.print(f"{found.config.job.description} Data: {found.config.data.license}.", highlight=False)
    console.print(
        f"policy {found.config.train.policy}, {found.config.train.microtasks_per_version} microtasks per version,"
        f" quorum {found.config.workunit.min_quorum}, {found.facts.step_flops / 1e9:.3g} GFLOP per step,"
        f" {found.facts.memory_bytes / 1e6:.0f} MB of memory, results up to {found.facts.max_update_bytes / 1e6:.2f} MB"
    )
    if trusts := trust_text(found.config.trust):
        console.print(f"trust: {trusts}", highlight=False)
    if steps := found.config.class_steps:
        listed = ", ".join(map(str, steps))
        console.print(f"batches of a microtask by speed class, slowest hosts first: {listed}", highlight=False)
    newest = table("version", "loss", "held-out", "contributions", "samples", "made")
    for row in versions[-20:]:
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["create_time"]))
        loss = "" if row["loss"] is None else f"{row['loss']:.4g}"
        held_out = metrics_text(row["evaluation"]) if row["evaluation"] else ""
        values = (str(row["version"]), loss, held_out, str(row["contributions"]), str(row["samples"]), made)
        newest.add_row(*values)
    console.print(newest)
    for task in tasks:
        note, number = escape(task["note"]), int(task["size_class"])
        place = f" (class {number}, {task['steps']} steps)" if number >= 0 else ""
        console.print(f"  slot {task['slot']}{place}: {task['state']} {task['workunit_name']} {note}", highlight=False)


@job.command("pause")
@click.argument("name")
@project_option
def pause(name: str, project_dir: Path | None) -> None:
    """Issue no more microtasks; what is out is still credited and applied."""
    change_state(project_dir, name, {JobState.RUNNING}, JobState.PAUSED)


@job.command("resume")
@click.argument("name")
@project_option
def resume(name: str, project_dir: Path | None) -> None:
    """Go on with a paused or failed job; microtasks that failed are issued afresh."""
    change_state(project_dir, name, {JobState.PAUSED, JobState.FAILED}, JobState.RUNNING)


@job.command("rollback")
@click.argument("name")
@click.argument("version", type=int)
@project_option
def rollback(name: str, version: int, project_dir: Path | None) -> None:
    """Make VERSION the current one again; later versions and what was computed from them are dropped."""
    tree = open_project(project_dir)
    with tree.database() as database:
        roll_back(tree, database, name, version)
    click.echo(f"Job {name!r} is paused at version {version}; resume it with boinc-train job resume {name}.")


def roll_back(tree: ProjectTree, database: Database, name: str, version: int) -> None:
    """Take a job back to a version. Credit stays granted; contributions stay in the ledger as dropped."""
    with database.read() as connection:
        found = named_job(connection, name)
        target = store.version_row(connection, found.id, version)
    if target is None or version > found.current_version:
        raise Mistake(f"job {name!r} has no version {version}; it has versions 0 to {found.current_version}")
    read_state(found, version, str(target["state_sha256"]))
    data = found.folder.state_path(version, str(target["state_sha256"])).read_bytes()
    from work_generator.publish import Publisher

    def go_back(connection: sa.Connection) -> None:
        locked = store.lock_job(connection, found.id)
        if locked is None or locked["current_version"] != found.current_version:
            raise Mistake(f"job {name!r} went on meanwhile; pause it first, then roll it back")
        # The state must be published again before workunits name it. Under the lock, or the generator could
        # retire the file between its publication and its row.
        published = Publisher(tree, found.name).state(version, data)
        store.record_file(connection, found.id, "state", published, version=version)
        connection.execute(sa.delete(gt_version).where(gt_version.c.job_id == found.id, gt_version.c.version > version))
        connection.execute(sa.delete(gt_round).where(gt_round.c.job_id == found.id, gt_round.c.version > version))
        # Late contributions of older versions are dropped too, and their samples are dealt out again.
        dropped = sa.and_(
            gt_ledger.c.job_id == found.id,
            (gt_ledger.c.base_version >= version)
            | (gt_ledger.c.applied_version > version)
            | (gt_ledger.c.disposition == str(Disposition.COMMITTED)),
        )
        names = sa.select(gt_ledger.c.workunit_name).where(dropped)
        connection.execute(
            sa.update(gt_microtask)
            .where(
                gt_microtask.c.job_id == found.id,
                (gt_microtask.c.version >= version) | gt_microtask.c.workunit_name.in_(names),
            )
            .values(state=str(MicrotaskState.CANCELLED), note=f"rolled back to version {version}")
        )
        connection.execute(
            sa.update(gt_ledger).where(dropped).values(disposition=str(Disposition.DROPPED), applied_version=None)
        )
        connection.execute(
            sa.update(gt_job)
            .where(gt_job.c.id == found.id)
            .values(current_version=version, state=str(JobState.PAUSED), note=f"rolled back to version {version}")
        )

    database.repeated(go_back)
    for base_version, path in found.folder.payload_files():
        if base_version >= version:
            path.unlink(missing_ok=True)
    for later, path in [*found.folder.version_files(), *found.folder.anchor_files()]:
        if later > version:
            path.unlink(missing_ok=True)


def change_state(project_dir: Path | None, name: str, allowed: set[JobState], new: JobState) -> None:
    """Move a job from one of the allowed states to a new one."""

    def change(connection: sa.Connection) -> None:
        named = named_job(connection, name)
        if new == JobState.RUNNING:
            store.release(connection, named)
        locked = store.lock_job(connection, named.id)
        assert locked is not None, name  # jobs are never deleted
        found = store.job_row(locked)
        if found.state not in allowed:
            wanted = " or ".join(sorted(allowed))
            raise Mistake(f"job {name!r} is {found.state}; only a {wanted} job can become {new}")
        if new == JobState.RUNNING:  # with it, or the generator could see the old failures first and stop the job again
            store.begin_afresh(connection, found)
        store.set_job_state(connection, found.id, new)

    tree = open_project(project_dir)
    with tree.database() as database:
        database.repeated(change)
    click.echo(f"Job {name!r} is {new}.")


def named_job(connection: sa.Connection, name: str) -> JobRow:
    """The job of that name, or a Mistake that lists those there are."""
    if not sa.inspect(connection).has_table(gt_job.name):
        raise Mistake("the project has no jobs yet; make one with boinc-train job create")
    found = store.job_named(connection, name)
    if found is None:
        names = ", ".join(each.name for each in store.jobs(connection)) or "none"
        raise Mistake(f"the project has no job {name!r} (it has: {names})")
    return found


@click.command()
@click.argument("name")
@click.option("--version", type=int, default=None, help="Model version (default: the newest).")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="File to write (default: NAME-vVERSION.safetensors).",
)
@project_option
def weights(name: str, version: int | None, output: Path | None, project_dir: Path | None) -> None:
    """Write a version's weights as a plain state_dict in safetensors."""
    tree = open_project(project_dir)
    with tree.database() as database, database.read() as connection:
        found = named_job(connection, name)
        number = found.current_version if version is None else version
        row = store.version_row(connection, found.id, number)
    if row is None:
        raise Mistake(f"job {name!r} has no version {number}; it has versions 0 to {found.current_version}")
    path = output or Path(f"{name}-v{number}.safetensors")
    if not path.parent.is_dir():
        raise Mistake(f"the folder {path.parent} does not exist; create it or choose another --output")
    write_weights(found, row, path)
    click.echo(f"Wrote version {number} of {name!r} to {path}.")


def write_weights(found: JobRow, row: Mapping[str, Any], path: Path) -> None:
    """A version's state_dict: every name of the model's own state_dict, loadable with load_state_dict."""
    from safetensors.numpy import save

    tensors = read_state(found, int(row["version"]), str(row["state_sha256"]))
    if found.facts.constants is not None:
        tensors.update(tensorfile.read(found.folder.constants_path).tensors)
    state_dict = {name: tensors[inner].copy() for name, inner in sorted(found.facts.state_dict.items())}
    metadata = {"job": found.name, "version": str(row["version"])}
    try:
        whole_file.write_bytes(path, save(state_dict, metadata))
    except OSError as error:
        raise Mistake(f"{path} cannot be written ({error.strerror}); choose another --output") from error


def trust_text(section: TrustSection) -> str:
    """What [trust] asks for beyond agreement, on one line; '' where it asks for nothing."""
    given = [
        f"{each.name} = {str(value).lower()}"
        for each in fields(section)
        if (value := getattr(section, each.name)) != each.default
    ]
    return ", ".join(given)


def read_state(found: JobRow, version: int, digest: str) -> dict[str, Any]:
    """The state of a version from disk; a Mistake if it is not there any more, ContractError if it is damaged."""
    try:
        return found.folder.read_state(version, digest)
    except FileNotFoundError as error:
        raise Mistake(not_kept(found, version)) from error


def not_kept(found: JobRow, version: int) -> str:
    """The sentence for a version whose files are not on disk."""
    keep = found.config.supply.keep_versions
    if keep and version <= found.current_version - keep:
        return (
            f"version {version} of job {found.name!r} is no longer on disk: keep_versions in [supply] is {keep};"
            " choose a newer one"
        )
    return f"the file of version {version} of job {found.name!r} is missing in {found.folder.path}; restore it"
