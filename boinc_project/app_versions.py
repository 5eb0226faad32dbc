"""Publishing application versions: what BOINC's `bin/update_versions` does, for the embedded server.

Source: BOINC `tools/update_versions`. The tree is `apps/APP/VERSION/PLATFORM[__PLANCLASS]/` with a
`version.xml` in each leaf; the files go flat into the download directory, each signed with the
code-signing key.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

import sqlalchemy as sa
from lxml import etree
from sqlalchemy.engine import Connection

from boinc_project import database
from boinc_project.database import Database
from boinc_project.project_tree import ImmutableNameError, ProjectTree
from boinc_project.signing import PrivateKey

_VERSION = re.compile(r"(\d+)\.(\d+)")
_API_VERSION = re.compile(rb"API_VERSION_(\d+\.\d+\.\d+)")
_API_VERSION_TEXT = re.compile(r"\d+\.\d+(\.\d+)?")
_COPIED_FLAGS = ("dont_throttle", "needs_network", "is_wrapper")


class AppVersionError(ValueError):
    """An application version that cannot be published; the message names the folder and what to change."""


@dataclass(frozen=True, kw_only=True)
class VersionFile:
    """A `<file>` of version.xml."""

    path: Path
    physical_name: str
    logical_name: str
    main_program: bool
    copy_file: bool


@dataclass(frozen=True, kw_only=True)
class AppVersionFolder:
    """One leaf of the apps tree, read and checked."""

    folder: Path
    app_name: str
    version_num: int  # 100 * major + minor
    platform: str
    plan_class: str
    api_version: str
    file_prefix: str
    beta: bool
    flags: tuple[str, ...]
    files: tuple[VersionFile, ...]


def add_app(db: Database, name: str, friendly_name: str, *, now: int | None = None) -> int:
    """Insert the app if it is not there (what `bin/xadd` does); returns its id."""
    with db.transaction() as connection:
        known = connection.scalar(sa.select(database.app.c.id).where(database.app.c.name == name))
        if known is not None:
            return int(known)
        row = database.new_row(
            database.app,
            name=name,
            user_friendly_name=friendly_name,
            create_time=int(time.time() if now is None else now),
        )
        return _inserted_id(connection.execute(database.app.insert(), row))


def update_versions(tree: ProjectTree, db: Database, *, now: int | None = None) -> list[AppVersionFolder]:
    """Publish every application version that the database does not know yet; returns those.

    All folders are read and checked before anything is published. Raises AppVersionError.
    """
    now = int(time.time() if now is None else now)
    folders = find_versions(tree.project_dir / "apps")
    with db.read() as connection:
        missing = [folder for folder in folders if not _is_known(connection, folder)]
    key = tree.code_sign_private()
    for folder in missing:
        document = _publish(tree, folder, key)
        with db.transaction() as connection:
            _insert(connection, folder, document, now)
    if missing:
        (tree.project_dir / "reread_db").touch()
    return missing


def find_versions(apps_dir: Path) -> list[AppVersionFolder]:
    """Read every version folder under `apps_dir`, in a stable order. Raises AppVersionError."""
    leaves = sorted(path for path in apps_dir.glob("*/*/*") if path.is_dir() and _VERSION.fullmatch(path.parent.name))
    return [read_version(leaf) for leaf in leaves]


def read_version(folder: Path) -> AppVersionFolder:
    """Read and check one `apps/APP/VERSION/PLATFORM[__PLANCLASS]` folder. Raises AppVersionError."""
    version = _VERSION.fullmatch(folder.parent.name)
    if version is None:
        raise AppVersionError(f"{folder}: the version folder must be named like 1.23")
    root = _parse_version_xml(folder / "version.xml")
    files = tuple(_read_file(folder, element) for element in root.iterfind("file"))
    mains = [file for file in files if file.main_program]
    if len(mains) != 1:
        raise AppVersionError(f"{folder}/version.xml: exactly one file must have <main_program/>, found {len(mains)}")
    if mains[0].physical_name.lower().endswith((".jpg", ".jpeg", ".png")):
        raise AppVersionError(f"{folder}: the main program must not be named like a picture; clients refuse it")
    platform, _, plan_class = folder.name.partition("__")
    return AppVersionFolder(
        folder=folder,
        app_name=folder.parent.parent.name,
        version_num=100 * int(version[1]) + int(version[2]),
        platform=platform,
        plan_class=plan_class,
        api_version=_api_version(root, mains[0].path, folder),
        file_prefix=(root.findtext("file_prefix") or "").strip(),
        beta=root.find("beta") is not None,
        flags=tuple(flag for flag in _COPIED_FLAGS if root.find(flag) is not None),
        files=files,
    )


def _parse_version_xml(path: Path) -> etree._Element:
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True)
    try:
        root = etree.fromstring(path.read_bytes(), parser)
    except OSError as error:
        raise AppVersionError(f"cannot read {path}: {error.strerror}") from error
    except etree.XMLSyntaxError as error:
        raise AppVersionError(f"{path} is not well-formed XML: {error.msg}") from error
    if root.tag != "version":
        raise AppVersionError(f"{path} must have the root element <version>, not <{root.tag}>")
    return root


def _read_file(folder: Path, element: etree._Element) -> VersionFile:
    physical = (element.findtext("physical_name") or "").strip()
    if not physical:
        raise AppVersionError(f"{folder}/version.xml: a <file> has no <physical_name>")
    path = folder / physical
    if Path(physical).name != physical or not path.is_file():
        raise AppVersionError(f"{folder}/version.xml names {physical}, which is not a file in that folder")
    return VersionFile(
        path=path,
        physical_name=physical,
        logical_name=(element.findtext("logical_name") or "").strip(),
        main_program=element.find("main_program") is not None,
        copy_file=element.find("copy_file") is not None,
    )


def _api_version(root: etree._Element, main_program: Path, folder: Path) -> str:
    declared = (root.findtext("api_version") or "").strip()
    if not declared:
        found = _API_VERSION.search(main_program.read_bytes())
        declared = found[1].decode() if found else ""
    if not _API_VERSION_TEXT.fullmatch(declared):
        raise AppVersionError(
            f"{folder}/version.xml needs <api_version>, such as 7.20.5: without it clients use an old protocol"
        )
    return declared


def _is_known(connection: Connection, folder: AppVersionFolder) -> bool:
    version, app, platform = database.app_version, database.app, database.platform
    query = (
        sa.select(version.c.id)
        .join(app, app.c.id == version.c.appid)
        .join(platform, platform.c.id == version.c.platformid)
        .where(
            app.c.name == folder.app_name,
            platform.c.name == folder.platform,
            version.c.version_num == folder.version_num,
            version.c.plan_class == folder.plan_class,
        )
    )
    return connection.scalar(query) is not None


def _publish(tree: ProjectTree, folder: AppVersionFolder, key: PrivateKey) -> str:
    """Copy the files into the download directory and build app_version.xml_doc."""
    infos, references = [], []
    for file in folder.files:
        try:
            published = tree.stage_app_file(file.path, file.physical_name)
        except (ImmutableNameError, ValueError) as error:
            raise AppVersionError(f"{folder.folder}: {error}") from error
        executable = "    <executable/>\n" if file.main_program else ""
        infos.append(
            f"<file_info>\n    <name>{published.name}</name>\n"
            f"    <url>{escape(published.url)}</url>\n{executable}"
            f"    <file_signature>\n{key.sign_digest(published.md5)}    </file_signature>\n"
            f"    <nbytes>{published.nbytes}</nbytes>\n</file_info>\n"
        )
        references.append(_file_ref(file))
    header = (
        f"<app_version>\n    <app_name>{escape(folder.app_name)}</app_name>\n"
        f"    <version_num>{folder.version_num}</version_num>\n"
        f"    <api_version>{folder.api_version}</api_version>\n"
    )
    if folder.file_prefix:
        header += f"    <file_prefix>{escape(folder.file_prefix)}</file_prefix>\n"
    header += "".join(f"    <{flag}/>\n" for flag in folder.flags)
    document = "".join(infos) + header + "".join(references) + "</app_version>\n"
    if len(document.encode()) > database.APP_VERSION_XML_LIMIT:
        raise AppVersionError(f"{folder.folder}: too many files; its XML exceeds {database.APP_VERSION_XML_LIMIT}")
    return document


def _file_ref(file: VersionFile) -> str:
    lines = ["<file_ref>\n", f"    <file_name>{file.physical_name}</file_name>\n"]
    if file.logical_name:
        lines.append(f"    <open_name>{escape(file.logical_name)}</open_name>\n")
    if file.copy_file:
        lines.append("    <copy_file/>\n")
    if file.main_program:
        lines.append("    <main_program/>\n")
    return "".join([*lines, "</file_ref>\n"])


def _insert(connection: Connection, folder: AppVersionFolder, document: str, now: int) -> None:
    app, platform = database.app, database.platform
    appid = connection.scalar(sa.select(app.c.id).where(app.c.name == folder.app_name))
    if appid is None:
        raise AppVersionError(f"{folder.folder}: the project has no app named {folder.app_name}; add it first")
    platformid = connection.scalar(sa.select(platform.c.id).where(platform.c.name == folder.platform))
    if platformid is None:
        row = database.new_row(platform, name=folder.platform, user_friendly_name=folder.platform, create_time=now)
        platformid = _inserted_id(connection.execute(platform.insert(), row))
    values = {
        "appid": appid,
        "platformid": platformid,
        "version_num": folder.version_num,
        "plan_class": folder.plan_class,
        "xml_doc": document,
        "create_time": now,
        "beta": int(folder.beta),
    }
    connection.execute(database.app_version.insert(), database.new_row(database.app_version, **values))


def _inserted_id(outcome: sa.CursorResult[tuple[object, ...]]) -> int:
    key = outcome.inserted_primary_key
    if key is None:
        raise RuntimeError("the database gave no id for an inserted row")
    return int(key[0])
