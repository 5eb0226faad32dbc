"""Installing into a project of a standard BOINC server, and taking it out again.

    open_project   look the project over; InstallError with one sentence where something must be mended first
    snapshot -> steps.plan -> apply      what is there, what is to be done, doing it
    uninstall      undo what the record says, and say what stays

Everything is planned before anything is changed; every file is kept as it was; whoever is interrupted starts again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pwd
import re
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa
from lxml import etree
from sqlalchemy.engine import Connection
from sqlalchemy.exc import DBAPIError

from boinc_project import app_versions, store
from boinc_project.config import ProjectConfig
from boinc_project.database import Database, app, app_version, result, workunit
from boinc_project.gt_tables import gt_job, gt_metadata
from boinc_project.project_tree import ProjectTree
from boinc_project.standard import editing, schema, steps
from boinc_project.standard.findings import listed
from boinc_project.standard.record import Change, InstallError, Record, remove_half_made, replace_file, temporary_of
from boinc_project.standard.steps import Snapshot, Step, Wanted
from boinc_project.states import ServerState

_APP_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
TITLE_LIMIT = 254  # bytes of app.user_friendly_name


@dataclass(frozen=True, kw_only=True)
class Standard:
    """A standard project that can be worked on."""

    tree: ProjectTree
    database: Database
    record: Record

    @property
    def project_dir(self) -> Path:
        return self.tree.project_dir


def check_names(app_name: str, title: str) -> None:
    """Refuse an app name or title that BOINC's files or tools would mistreat."""
    if not _APP_NAME.fullmatch(app_name):
        raise InstallError(
            f"{app_name!r} cannot be the app's name: use up to 31 small letters, digits and _, a letter first"
        )
    if not title.strip() or _CONTROL.search(title):
        raise InstallError("the app's title must be a line of text without control characters")
    if len(steps.title_in_database(title).encode()) > TITLE_LIMIT:
        raise InstallError(f"the app's title is too long: BOINC's database holds {TITLE_LIMIT} bytes of it")


def is_standard(config: ProjectConfig) -> bool:
    """Whether a project belongs to a standard server, not to `boinc-train serve`."""
    return not config.gt_database_url or bool(config.db_name)


@contextlib.contextmanager
def open_project(project_dir: Path) -> Iterator[Standard]:
    """The project, looked over and locked against a second installer. Raises InstallError or ConfigError."""
    if not project_dir.is_dir():
        raise InstallError(f"there is no folder {project_dir}; give the project's directory, where config.xml is")
    if not (project_dir / "config.xml").is_file():
        raise InstallError(
            f"{project_dir} is no BOINC project (no config.xml); give the directory that make_project made"
        )
    config = ProjectConfig.load(project_dir)
    if not is_standard(config):
        raise InstallError(
            f"the project in {project_dir} was made by boinc-train serve, which needs no installing;"
            " give a project of a standard BOINC server"
        )
    check_tree(config)
    with Database(config.database_url) as database, _only_one(config.project_dir):
        check_database(config, database)
        yield Standard(tree=ProjectTree(project_dir, config), database=database, record=Record.load(config.project_dir))


@contextlib.contextmanager
def _only_one(project_dir: Path) -> Iterator[None]:
    descriptor = os.open(project_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise InstallError(f"another boinc-train is changing {project_dir}; wait for it to end") from error
        yield
    finally:
        os.close(descriptor)


def check_tree(config: ProjectConfig) -> None:
    """Directories, keys and permissions that every installation needs."""
    project = config.project_dir
    text = (project / "config.xml").read_bytes()
    if editing.parse(editing.read(text)).find("boinc", "config") is None:
        raise InstallError(f"{project / 'config.xml'} has no <boinc><config>; this is no config.xml of make_project")
    for name in ("cgi-bin", "bin"):
        if not (project / name).is_dir():
            raise InstallError(f"{project} has no {name} directory; give a complete project, as make_project makes it")
    owner = (project / "config.xml").stat().st_uid
    if owner != os.geteuid():
        raise InstallError(
            f"{project} belongs to the user {_user(owner)}; run this command as {_user(owner)},"
            " so that the daemons can read and write what it makes"
        )
    if not config.db_name:
        raise InstallError(f"{project / 'config.xml'} names no database; add <db_name>, <db_user> and <db_passwd>")
    for element, path in (("download_dir", config.download_dir), ("upload_dir", config.upload_dir)):
        if not path.is_dir():
            raise InstallError(
                f"<{element}> of config.xml is {path}, which does not exist; create it or correct config.xml"
            )
    for key in ("upload_private", "code_sign_public"):
        if not (config.key_dir / key).is_file():
            raise InstallError(f"the key {config.key_dir / key} is missing; make it with bin/crypt_prog -genkey")
    writable = [project, project / "bin", project / "config.xml", config.download_dir]
    writable += [
        path for name in (steps.AUX, steps.PROJECT, steps.SPEC, "templates") if (path := project / name).exists()
    ]
    for path in writable:
        if not os.access(path, os.W_OK):
            raise InstallError(f"{path} cannot be written by {_user(os.geteuid())}; correct its owner or mode")
    aux = project / steps.AUX
    if aux.exists() and aux.read_bytes().strip():
        try:
            etree.fromstring(aux.read_bytes())
        except etree.XMLSyntaxError as error:
            raise InstallError(
                f"{aux} is not well-formed ({error.msg}), and BOINC stops on it; mend it first"
            ) from error


def check_database(config: ProjectConfig, database: Database) -> None:
    """Reachable with the project's own account, and BOINC's schema in it."""
    where = f"the database {config.db_name} on {config.db_host or 'localhost'}"
    try:
        with database.read() as connection:
            lacking = schema.missing(connection)
            strange = schema.unknown_without_default(connection)
            plain = schema.not_transactional(connection)
    except DBAPIError as error:
        raise InstallError(
            f"{where} does not answer to <db_user> {config.db_user!r} of config.xml ({reason(error)});"
            " start it or correct the <db_...> elements"
        ) from error
    if lacking:
        raise InstallError(
            f"{where} lacks {listed(lacking)}; make BOINC's tables, or bring them up to date with"
            " html/ops/upgrade_db.php"
        )
    if strange:
        raise InstallError(
            f"{where} has columns that this boinc-train does not know and that have no default:"
            f" {listed(strange)}; use a newer boinc-train"
        )
    if plain:
        raise InstallError(f"{where}: {listed(plain)} must be InnoDB tables (ALTER TABLE ... ENGINE=InnoDB)")


def reason(error: DBAPIError) -> str:
    """The server's own words."""
    arguments = getattr(error.orig, "args", ())
    return str(arguments[-1] if arguments else error.orig)


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def find_programs() -> dict[str, Path]:
    """Our daemons as this environment has them installed. Raises InstallError."""
    folders = [Path(sys.executable).parent, Path(sysconfig.get_path("scripts"))]
    if scheme := sysconfig.get_preferred_scheme("user"):
        folders.append(Path(sysconfig.get_path("scripts", scheme)))
    found: dict[str, Path] = {}
    for name in steps.DAEMONS:
        path = next((folder / name for folder in folders if os.access(folder / name, os.X_OK)), None)
        if path is None:
            raise InstallError(
                f"the program {name} is not in {folders[0]}; install boinc-train with pip into the environment"
                " that the daemons are to use, and run that environment's boinc-train"
            )
        found[name] = path
    return found


def snapshot(project: Standard, app_name: str) -> Snapshot:
    """What is there now."""
    directory = project.project_dir
    files = {
        name: (directory / name).read_bytes() if (directory / name).exists() else None
        for name in steps.files_looked_at(app_name)
    }
    links: dict[str, str | None] = {}
    for name in steps.DAEMONS:
        path = directory / "bin" / name
        if path.exists() and not path.is_symlink():
            raise InstallError(f"{path} is a file of somebody else's; move it away, our daemon has that name")
        links[name] = os.readlink(path) if path.is_symlink() else None
    with project.database.read() as connection:
        row = connection.execute(sa.select(app).where(app.c.name == app_name)).mappings().first()
        lacking = schema.own_tables(connection)[1]
        columns = schema.addable(connection)
        if row is not None and app_name not in project.record.apps:
            _refuse_somebody_else_s_app(connection, int(row["id"]), app_name)
    return Snapshot(
        files=files,
        links=links,
        app_row=None if row is None else dict(row),
        tables_missing=lacking,
        columns_missing=columns,
    )


def _refuse_somebody_else_s_app(connection: Connection, appid: int, name: str) -> None:
    query = sa.select(workunit.c.name).where(
        workunit.c.appid == appid, ~workunit.c.name.startswith("gt_", autoescape=True)
    )
    found = connection.execute(query.limit(1)).scalar()
    if found is not None:
        raise InstallError(
            f"the project has an app {name!r} with work of its own ({found}); choose another name with --app"
        )


def backup_moment() -> str:
    """The name of a folder of backups."""
    return time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime())


def install(project: Standard, wanted: Wanted, todo: Sequence[Step]) -> None:
    """Do the steps, each recorded before it is made."""
    _tidy(project)
    if not todo and wanted.app in project.record.apps:
        return
    moment = backup_moment()
    project.record.apps.setdefault(wanted.app, wanted.title)
    project.record.save()
    for step in todo:
        for change in step.changes:
            project.record.add(change)
        _apply(project, step, wanted, moment)


def _tidy(project: Standard) -> None:
    directory = project.project_dir
    behind_links = {
        (directory / name).resolve().parent for name in (steps.CONFIG, steps.AUX, steps.PROJECT, steps.SPEC)
    }
    remove_half_made({directory, directory / "bin", directory / "templates", project.record.folder, *behind_links})


def _apply(project: Standard, step: Step, wanted: Wanted, moment: str) -> None:
    first = step.changes[0]
    path = project.project_dir / first.path
    if first.kind == "tables":
        try:
            store.create_own_tables(project.database)
        except DBAPIError as error:
            raise InstallError(
                f"our tables cannot be created or changed ({reason(error)});"
                " give <db_user> the rights CREATE and ALTER on the database"
            ) from error
    elif first.kind == "app":
        _activate_app(project.database, wanted)
    elif first.kind == "classes":
        _set_classes(project.database, first.path, int(first.content))
    elif first.kind == "link":
        _link(path, first.content)
    else:
        assert step.after is not None, step.title
        path.parent.mkdir(exist_ok=True)
        if path.exists():
            project.record.back_up(path, moment)
        replace_file(path, step.after)


def _activate_app(database: Database, wanted: Wanted) -> None:
    app_versions.add_app(database, wanted.app, steps.title_in_database(wanted.title))
    with database.transaction() as connection:
        connection.execute(sa.update(app).where(app.c.name == wanted.app).values(deprecated=0))


def _set_classes(database: Database, name: str, classes: int) -> None:
    with database.transaction() as connection:
        connection.execute(sa.update(app).where(app.c.name == name).values(n_size_classes=classes))


def _waiting_for_class(database: Database, name: str) -> int:
    """Results of an app that only a size_regulator makes ready to be sent."""
    query = sa.select(sa.func.count()).select_from(result.join(app, app.c.id == result.c.appid))
    with database.read() as connection:
        state = result.c.server_state == int(ServerState.INACTIVE)
        return int(connection.scalar(query.where(app.c.name == name, state)) or 0)


def _link(path: Path, target: str) -> None:
    temporary = temporary_of(path)
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, path)


# Taking it out again.


@dataclass(frozen=True, kw_only=True)
class Removal:
    """What uninstalling does: changes to undo, newest first, and what stays with the reason."""

    undo: tuple[Change, ...]
    apps: tuple[str, ...]
    stays: tuple[str, ...]


def plan_removal(project: Standard, app_name: str | None, drop_tables: bool) -> Removal:
    """What is to be undone for one app, or for all of them. Raises InstallError where daemons still run."""
    record = project.record
    if not record.apps and not record.changes:
        raise InstallError(f"nothing of boinc-train is installed in {project.project_dir}")
    if app_name is not None and app_name not in record.apps:
        raise InstallError(f"the app {app_name!r} is not installed; installed: {', '.join(record.apps)}")
    apps = tuple(record.apps) if app_name is None else (app_name,)
    last = set(apps) == set(record.apps)
    chosen = [each for each in record.changes if each.app in apps or (last and not each.app)]
    stays: list[str] = []
    # All that are there: a daemon of a newer boinc-train adds its own when it starts.
    chosen = [each for each in chosen if each.kind != "tables"]
    with project.database.read() as connection:
        tables = schema.own_tables(connection)[0]
    if last and drop_tables:
        chosen = [*(Change(kind="tables", path=name) for name in tables), *chosen]
    elif last and tables:
        stays.append(
            f"the tables {', '.join(tables)}: jobs, versions and the ledger are in them (--drop-tables removes them)"
        )
    if not last:
        others = ", ".join(name for name in record.apps if name not in apps)
        stays.append(f"links, plan classes and tables: {others} still uses them")
    jobs = project.project_dir / "gt_jobs"
    if last and jobs.exists():
        stays.append(f"{jobs}: models and gradients; remove the folder when you do not need them")
    for each in chosen:
        if each.kind == "classes" and (waiting := _waiting_for_class(project.database, each.path)):
            stays.append(
                f"{waiting} unsent results of {each.path} wait for size_regulator, which goes: BOINC sends them to"
                " nobody; bin/cancel_jobs of BOINC withdraws them"
            )
    if last:
        stays.append(f"{record.folder / 'backups'}: the files as they were before")
    return Removal(undo=tuple(reversed(chosen)), apps=apps, stays=tuple(stays))


def describe(change: Change) -> str:
    """A line about undoing a change; '' for what goes with another one."""
    if change.kind == "edit" and change.piece is not None:
        return "" if change.piece.wraps else f"{change.path}: take out {_about(change.piece)}"
    return {
        "create": f"{change.path}: remove, if nobody else has written in it",
        "census": f"{change.path}: remove",
        "link": f"{change.path}: " + (f"link to {change.before} again" if change.before else "remove the link"),
        "app": f"database: remove the app {change.path}, or deprecate it where there is work of it",
        "classes": f"database: n_size_classes of the app {change.path} is {change.before or 0} again",
        "tables": f"database: drop the table {change.path} and all that is in it",
    }[change.kind]


def _about(piece: editing.Piece) -> str:
    element = editing.parse(piece.new).children[0]
    names = ("cmd", "name", "app_name")
    label = next((text for name in names if (text := editing.text_of(piece.new, element.find(name)))), "")
    return f"<{element.name}> {label}"


def uninstall(project: Standard, removal: Removal) -> list[str]:
    """Undo the changes; returns what could not be undone, a sentence each."""
    _tidy(project)
    moment = backup_moment()
    left: list[str] = []
    for change in removal.undo:
        problem = _undo(project, change, moment)
        if problem:
            left.append(problem)
        project.record.remove(change)
    for name in removal.apps:
        project.record.apps.pop(name, None)
    if not project.record.apps:
        # What stays on purpose (tables) is not ours to remember any more: a new installation finds it there.
        project.record.changes.clear()
    project.record.save()
    with contextlib.suppress(OSError):
        project.record.folder.rmdir()
    return left


def _undo(project: Standard, change: Change, moment: str) -> str:
    path = project.project_dir / change.path
    if change.kind == "edit":
        return _undo_edit(project, change, path, moment)
    if change.kind == "create":
        if _workunits_with(project.database, change.path):
            return f"{path}: workunits name it, and BOINC's transitioner ends for the whole project without it"
        if path.exists() and path.read_bytes() == change.content.encode():
            project.record.back_up(path, moment)
            path.unlink()
        elif path.exists():
            return f"{path}: it was changed since"
    elif change.kind == "census":  # by now size_census.php has written it anew
        path.unlink(missing_ok=True)
    elif change.kind == "link":
        if path.is_symlink() and os.readlink(path) == change.content:
            if change.before:
                _link(path, change.before)
            else:
                path.unlink()
    elif change.kind == "app":
        return _undo_app(project.database, change)
    elif change.kind == "classes":
        _set_classes(project.database, change.path, int(change.before or 0))
    elif change.kind == "tables":
        with project.database.transaction() as connection:
            gt_metadata.tables[change.path].drop(connection, checkfirst=True)
    return ""


def _workunits_with(database: Database, template: str) -> bool:
    """Whether a workunit's results are made from this output template."""
    if not template.endswith("_out"):
        return False
    with database.read() as connection:
        query = sa.select(workunit.c.id).where(workunit.c.result_template_file == template).limit(1)
        return connection.execute(query).scalar() is not None


def _undo_edit(project: Standard, change: Change, path: Path, moment: str) -> str:
    assert change.piece is not None
    if not path.exists():
        return ""
    before = editing.read(path.read_bytes())
    text = editing.undo(before, change.piece)
    if not change.piece.wraps:
        # Somebody has tuned or copied our entry since: it is ours all the same.
        found = _like(before if text is None else text, change.piece)
        if editing.parse(change.piece.new).children[0].name == "daemon":  # nobody else's daemon has our program's name
            while found:
                text = editing.without(before if text is None else text, found[0])
                found = _like(text, change.piece)
        elif text is None and len(found) > 1:
            return f"{path}: {len(found)} entries are like {_about(change.piece)}; take out by hand what is not yours"
        elif text is None and found:
            text = editing.without(before, found[0])
    if text is not None:
        project.record.back_up(path, moment)
        replace_file(path, editing.as_bytes(text))
    return ""


def _like(text: str, piece: editing.Piece) -> list[editing.Element]:
    """The entries that are what this piece of ours is: the same daemon, or of the same name."""
    ours = editing.parse(piece.new).children[0]
    who = steps.identity(piece.new, ours)
    return [each for each in editing.named(text, ours.name) if steps.identity(text, each) == who]


def _undo_app(database: Database, change: Change) -> str:
    with database.transaction() as connection:
        row = connection.execute(sa.select(app).where(app.c.name == change.path).with_for_update()).mappings().first()
        if row is None:
            return ""
        if change.before:
            connection.execute(sa.update(app).where(app.c.id == row["id"]).values(deprecated=int(change.before)))
            return ""
        tables = (("result", result), ("workunit", workunit), ("app_version", app_version))
        for name, table in tables:
            number = connection.execute(
                sa.select(sa.func.count()).select_from(table).where(table.c.appid == row["id"])
            ).scalar_one()
            if number:
                connection.execute(sa.update(app).where(app.c.id == row["id"]).values(deprecated=1))
                return (
                    f"the row of the app {change.path}, deprecated: {number} rows of {name} refer to it,"
                    " and BOINC's programs stop on work without an app; no new work of it is sent"
                )
        connection.execute(sa.delete(app).where(app.c.id == row["id"]))
    return ""


def jobs_of_apps(project: Standard, names: Sequence[str]) -> int:
    """How many of our jobs belong to these apps."""
    with project.database.read() as connection:
        if not sa.inspect(connection).has_table(gt_job.name):
            return 0
        query = sa.select(sa.func.count()).select_from(gt_job).join(app, app.c.id == gt_job.c.appid)
        return int(connection.execute(query.where(app.c.name.in_(names))).scalar_one())
