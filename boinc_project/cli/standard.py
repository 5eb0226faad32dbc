"""`install`, `uninstall` and `doctor`: our part in a project of a standard BOINC server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import sqlalchemy as sa

from boinc_project.cli.errors import Mistake
from boinc_project.cli.project import APP_NAME, APP_TITLE
from boinc_project.config import find_project_dir
from boinc_project.database import app, platform
from boinc_project.job_config import MAX_SIZE_CLASSES
from boinc_project.standard import install as standard
from boinc_project.standard import size_steps, steps
from boinc_project.standard.advice import advice
from boinc_project.standard.doctor import examine
from boinc_project.standard.doctor_tree import check_cron
from boinc_project.standard.findings import Patient, Severity, counted
from boinc_project.standard.install import Standard
from boinc_project.standard.running import our_processes
from boinc_project.standard.steps import Step, Wanted

PLATFORM = "x86_64-pc-linux-gnu"  # of the app version that build-app makes


@click.command()
@click.argument("project_dir", type=click.Path(path_type=Path))
@click.option("--app", "app_name", default=APP_NAME, show_default=True, help="BOINC's name of our app.")
@click.option("--title", default=APP_TITLE, show_default=True, help="The app's name as volunteers see it.")
@click.option(
    "--size-classes",
    type=click.IntRange(2, MAX_SIZE_CLASSES),
    default=None,
    help="BOINC's size classes of the app, for jobs with speed_classes (default: as they are).",
)
@click.option("--dry-run", is_flag=True, help="Show what would be changed, and change nothing.")
def install(project_dir: Path, app_name: str, title: str, size_classes: int | None, dry_run: bool) -> None:
    """Add gradient training to the standard BOINC project in PROJECT_DIR.

    Checks the project, shows every change, keeps a copy of each file that it changes, and makes only those changes
    that are not there already.
    """
    standard.check_names(app_name, title)
    programs = standard.find_programs()
    with standard.open_project(project_dir) as project:
        wanted = Wanted(app=app_name, title=title, programs=programs, size_classes=size_classes or 0)
        there = standard.snapshot(project, app_name)
        todo = steps.plan(there, wanted)
        todo += size_steps.plan(there, wanted, todo)
        show_steps(todo, dry_run)
        if not dry_run:
            standard.install(project, wanted, todo)
        show_advice(project)
        show_what_next(project, app_name, bool(todo), dry_run)
        if size_classes and todo and not dry_run:
            click.echo(f"  touch {project.project_dir}/reread_db    (the feeder then reads the size classes)")


def show_steps(todo: Sequence[Step], dry_run: bool) -> None:
    """Each step, with the lines that it adds."""
    if not todo:
        click.echo("Everything is installed already; nothing is changed.")
        return
    click.echo("Would change:" if dry_run else "Changes:")
    for step in todo:
        click.echo(f"  {step.title}")
        for line in step.lines:
            click.echo(f"    + {line}")


def show_advice(project: Standard) -> None:
    """Project-wide settings, which we do not touch."""
    text = (project.project_dir / "config.xml").read_bytes().decode("utf-8", "replace")
    with project.database.read() as connection:
        active = int(
            connection.execute(sa.select(sa.func.count()).select_from(app).where(app.c.deprecated == 0)).scalar_one()
        )
        platforms = set(connection.execute(sa.select(platform.c.name)).scalars())
    if PLATFORM not in platforms:
        click.echo(f"The database does not know the platform {PLATFORM} yet: run bin/xadd in {project.project_dir}.")
    for finding in check_cron(Patient(tree=project.tree, standard=True, apps=(), daemons=())):
        click.echo(" ".join(str(finding).split()))
    found = advice(project.tree.config, steps.daemons(text), active)
    if found:
        click.echo("Recommended for the whole project, and for you to decide (in config.xml):")
        for each in found:
            click.echo(f"  {each.line}\n      {each.why}")


def show_what_next(project: Standard, app_name: str, changed: bool, dry_run: bool) -> None:
    """The commands that follow."""
    if dry_run:
        click.echo("Nothing was changed (--dry-run).")
        return
    if changed:
        click.echo(f"Copies of the files as they were: {project.record.folder / 'backups'}")
    directory = project.project_dir
    with_app = "" if app_name == APP_NAME else f" --app {app_name}"
    click.echo(
        "Next:\n"
        f"  boinc-train build-app --project {directory}{with_app}\n"
        f"  cd {directory} && bin/update_versions && bin/start\n"
        f"  boinc-train doctor {directory}"
    )


@click.command()
@click.argument("project_dir", type=click.Path(path_type=Path))
@click.option("--app", "app_name", default=None, help="Only this app (default: all that were installed).")
@click.option("--drop-tables", is_flag=True, help="Also drop our gt_ tables, after a question.")
@click.option("--yes", is_flag=True, help="Drop the tables without the question.")
@click.option("--dry-run", is_flag=True, help="Show what would be undone, and change nothing.")
def uninstall(project_dir: Path, app_name: str | None, drop_tables: bool, yes: bool, dry_run: bool) -> None:
    """Take out of the project in PROJECT_DIR what install has put in, and nothing else."""
    with standard.open_project(project_dir) as project:
        removal = standard.plan_removal(project, app_name, drop_tables)
        if not dry_run:
            refuse_running(project, removal.apps)
        click.echo("Would undo:" if dry_run else "Undoing:")
        for change in removal.undo:
            if line := standard.describe(change):
                click.echo(f"  {line}")
        left: list[str] = []
        if not dry_run:
            jobs = standard.jobs_of_apps(project, removal.apps)
            if drop_tables and not yes and not click.confirm(f"Drop our tables with {jobs} jobs in them?", err=True):
                raise Mistake("nothing was changed; leave out --drop-tables to keep the tables")
            left = standard.uninstall(project, removal)
        for line in (*removal.stays, *left):
            click.echo(f"Stays: {line}")


def refuse_running(project: Standard, apps: Sequence[str]) -> None:
    """Our daemons must not run while what they need goes away."""
    running = list(our_processes(project.project_dir, list(apps)))
    if running:
        names = ", ".join(f"{each.path.stem} (process {each.pid})" for each in running)
        raise Mistake(f"still running: {names}; stop the daemons first with {project.project_dir}/bin/stop")


@click.command()
@click.argument("project_dir", type=click.Path(path_type=Path), required=False)
def doctor(project_dir: Path | None) -> None:
    """Look a project over: one line for each thing that is wrong, with what to do; errors first.

    Ends with 0 if there is no error, with 1 if something stops work.
    """
    directory = find_project_dir() if project_dir is None else project_dir
    if not (directory / "config.xml").is_file():
        raise Mistake(f"there is no BOINC project in {directory} (no config.xml)")
    found = examine(directory)
    for finding in found:
        click.echo(" ".join(str(finding).split()))
    errors = sum(finding.severity == Severity.ERROR for finding in found)
    warnings = sum(finding.severity == Severity.WARNING for finding in found)
    notes = len(found) - errors - warnings
    counts = ((errors, "error"), (warnings, "warning"), (notes, "note"))
    click.echo(f"{directory}: " + ", ".join(counted(count, word) for count, word in counts))
    if errors:
        raise SystemExit(1)
