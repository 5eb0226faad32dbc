"""The files of a BOINC project: where they lie, how they are published, how a project is made.

Sources: BOINC `sched/sched_util_basic.cpp`, `html/inc/dir_hier.inc` (fan-out directories), `tools/stage_file`
(publishing), `py/Boinc/setup_project.py` (a new project's tree).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit
from xml.sax.saxutils import escape

from boinc_project import database, signing
from boinc_project.config import ConfigError, ProjectConfig
from boinc_project.contract.whole_file import sync_folder, temporary_name, write_bytes, write_through
from boinc_project.durable import PUBLIC_FILE, FileBatch, make_public_folder

#: Longest physical file name: BOINC's name columns hold 191 characters, and a `.md5` or temporary
#: companion must still fit in the 255 bytes of a file system's name.
MAX_NAME_LENGTH = 191

_SAFE_NAME = re.compile(r"[A-Za-z0-9._+=@~-]+")
_COPY_BYTES = 1 << 20
_WRITERS = 2  # threads that write small files: most of that time is the kernel's

#: Platforms that a new project knows, with the names that BOINC shows for them.
PLATFORMS: Mapping[str, str] = {
    "x86_64-pc-linux-gnu": "Linux running on an AMD x86_64 or Intel EM64T CPU",
    "i686-pc-linux-gnu": "Linux running on an Intel x86-compatible CPU",
    "aarch64-unknown-linux-gnu": "Linux running on aarch64",
    "windows_x86_64": "Microsoft Windows running on an AMD x86_64 or Intel EM64T CPU",
    "windows_intelx86": "Microsoft Windows (98 or later) running on an Intel x86-compatible CPU",
    "x86_64-apple-darwin": "Intel 64-bit Mac OS 10.5 or later",
    "arm64-apple-darwin": "Mac OS running on Apple silicon",
}


class ImmutableNameError(ValueError):
    """A file of this name with other contents is already published; BOINC names are for ever."""


@dataclass(frozen=True, kw_only=True)
class PublishedFile:
    """A file that clients can download."""

    name: str  # physical name
    url: str
    md5: str  # 32 lower-case hex digits
    nbytes: int
    path: Path


def check_file_name(name: str) -> None:
    """Refuse a physical name that BOINC's server or client would refuse; ValueError says which character.

    The client wants neither `..` nor `%` in it, the upload handler no control character and no leading `/`.
    Only a safe alphabet is allowed, so that the name needs no escaping in XML, URLs or shells.
    """
    if not name or len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"a file name needs 1 to {MAX_NAME_LENGTH} characters, this has {len(name)}")
    if ".." in name or name.startswith("."):
        raise ValueError(f"file name {name!r} must not begin with '.' or contain '..'")
    if not _SAFE_NAME.fullmatch(name):
        bad = sorted({character for character in name if not _SAFE_NAME.fullmatch(character)})
        listed = " ".join(repr(character) for character in bad)
        raise ValueError(f"file name {name[:80]!r} contains {listed}; use letters, digits and . _ + = @ ~ -")


def fan_out(name: str, fanout: int) -> str:
    """The fan-out directory of a file name, '' for a flat tree (BOINC `dir_hier`).

    Seven hex digits of the MD5 of the name, the first digit skipped, modulo the fan-out.
    """
    if fanout <= 0:
        return ""
    digits = hashlib.md5(name.encode()).hexdigest()[1:8]
    return format(int(digits, 16) % fanout, "x")


class ProjectTree:
    """The files of one project; paths and URLs follow its `config.xml`."""

    def __init__(self, project_dir: Path | str, config: ProjectConfig | None = None) -> None:
        self.project_dir = Path(project_dir).resolve()
        self.config = ProjectConfig.load(self.project_dir) if config is None else config

    # Where things are.

    def download_path(self, name: str) -> Path:
        """Path of a staged input file (its fan-out directory may not exist yet)."""
        return self._hierarchy(self.config.download_dir, name)

    def download_url(self, name: str) -> str:
        """URL of a staged input file."""
        return _join_url(self.config.download_url, fan_out(name, self.config.uldl_dir_fanout), name)

    def upload_path(self, name: str) -> Path:
        """Path of an uploaded output file (its fan-out directory may not exist yet)."""
        return self._hierarchy(self.config.upload_dir, name)

    def has_uploads(self) -> bool:
        """Whether the upload directory can be read and holds anything (an empty one is a mount point without mount)."""
        try:
            return any(self.config.upload_dir.iterdir())
        except OSError:
            return False

    def published_folders(self) -> Iterator[Path]:
        """Every folder in which files are published, also those that do not exist yet."""
        yield self.config.download_dir
        for number in range(self.config.uldl_dir_fanout):
            yield self.config.download_dir / format(number, "x")

    def app_file_path(self, name: str) -> Path:
        """Path of an application file: flat in the download directory."""
        check_file_name(name)
        return self.config.download_dir / name

    def app_file_url(self, name: str) -> str:
        return _join_url(self.config.download_url, "", name)

    def is_triggered(self, name: str) -> bool:
        """Whether a trigger file (`stop_sched`, `stop_upload`, `stop_daemons`, ...) lies in the project."""
        return (self.project_dir / name).exists()

    def _hierarchy(self, root: Path, name: str) -> Path:
        check_file_name(name)
        return Path(os.path.join(root, fan_out(name, self.config.uldl_dir_fanout), name))

    # Keys.

    def code_sign_private(self) -> signing.PrivateKey:
        return signing.read_private_key(self.config.key_dir / "code_sign_private")

    def code_sign_public(self) -> signing.PublicKey:
        return signing.read_public_key(self.config.key_dir / "code_sign_public")

    def upload_private(self) -> signing.PrivateKey:
        return signing.read_private_key(self.config.key_dir / "upload_private")

    def upload_public(self) -> signing.PublicKey:
        return signing.read_public_key(self.config.key_dir / "upload_public")

    # Publishing.

    def stage_file(self, source: bytes | Path, physical_name: str) -> PublishedFile:
        """Publish `source` for download under `physical_name`, with BOINC's `.md5` companion.

        Whole or absent: written beside its place, flushed to disk, renamed. A file of that name with the same
        contents is left as it is; with other contents ImmutableNameError is raised. ValueError for a name
        that BOINC refuses.
        """
        return publish(source, self.download_path(physical_name), self.download_url(physical_name))

    def described(self, physical_name: str, data: bytes) -> PublishedFile:
        """What `stage_file` would return for this file, without publishing it."""
        md5 = hashlib.md5(data).hexdigest()
        path, url = self.download_path(physical_name), self.download_url(physical_name)
        return PublishedFile(name=physical_name, url=url, md5=md5, nbytes=len(data), path=path)

    def stage_files(self, contents: Mapping[str, bytes]) -> dict[str, PublishedFile]:
        """Publish many small files by their physical names, as `stage_file` does each, in two waits for the disk."""
        with FileBatch(2 * len(contents), public=True) as files, ThreadPoolExecutor(_WRITERS) as writers:
            names = list(contents)
            shares = [names[first::_WRITERS] for first in range(_WRITERS)]
            staged = writers.map(lambda share: [self._stage_in(files, name, contents[name]) for name in share], shares)
            found = {file.name: file for part in staged for file in part}
            files.commit()
        return found

    def _stage_in(self, files: FileBatch, name: str, data: bytes) -> PublishedFile:
        path = self.download_path(name)
        md5 = hashlib.md5(data).hexdigest()
        there = _content(path)
        if there is not None and there != data:
            raise _already_published(path)
        for each, known, content in (
            (path, there, data),
            (path.with_name(f"{name}.md5"), None, f"{md5} {len(data)}\n".encode()),
        ):
            if known is None:
                files.add(each, content)
            else:
                files.keep(each)
        return PublishedFile(name=name, url=self.download_url(name), md5=md5, nbytes=len(data), path=path)

    def stage_app_file(self, source: bytes | Path, physical_name: str) -> PublishedFile:
        """The same for an application file, which lies flat in the download directory."""
        path, url = self.app_file_path(physical_name), self.app_file_url(physical_name)
        return publish(source, path, url, md5_file=False)

    def delete_published(self, physical_name: str) -> bool:
        """Remove a staged file and its companions; False if there was none. Safe to repeat after a crash."""
        path = self.download_path(physical_name)
        found = path.exists()
        # The file goes first: a `.md5` without its file is harmless, a file without `.md5` is not.
        for victim in (path, path.with_name(path.name + ".gz"), path.with_name(path.name + ".md5")):
            with contextlib.suppress(FileNotFoundError):
                victim.unlink()
        return found

    def database(self) -> database.Database:
        """A new connection pool for the project's database."""
        return database.Database(self.config.database_url)


def publish(source: bytes | Path, path: Path, url: str, *, md5_file: bool = True) -> PublishedFile:
    """Put `source` at `path`, whole or absent; see `ProjectTree.stage_file`."""
    make_public_folder(path.parent)
    temporary = path.with_name(temporary_name(path.name))
    try:
        md5, nbytes = _copy_durably(source, temporary)
        if path.exists():
            if path.stat().st_size != nbytes or signing.file_md5(path) != md5:
                raise _already_published(path)
        else:
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if md5_file:
        write_bytes(path.with_name(path.name + ".md5"), f"{md5} {nbytes}\n".encode(), PUBLIC_FILE)
    else:
        sync_folder(path.parent)
    return PublishedFile(name=path.name, url=url, md5=md5, nbytes=nbytes, path=path)


def _already_published(path: Path) -> ImmutableNameError:
    return ImmutableNameError(
        f"{path.name} is already published with other contents; a BOINC file name is for ever, publish under a new name"
    )


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _copy_durably(source: bytes | Path, target: Path) -> tuple[str, int]:
    digest, nbytes = hashlib.md5(), 0

    def measured() -> Iterator[bytes]:
        nonlocal nbytes
        for chunk in _chunks(source):
            digest.update(chunk)
            nbytes += len(chunk)
            yield chunk

    write_through(target, measured(), PUBLIC_FILE)
    return digest.hexdigest(), nbytes


def _chunks(source: bytes | Path) -> Iterator[bytes]:
    if isinstance(source, Path):
        with source.open("rb") as stream:
            while chunk := stream.read(_COPY_BYTES):
                yield chunk
    else:
        yield source


def _join_url(base: str, directory: str, name: str) -> str:
    return "/".join(part for part in (base.rstrip("/"), directory, name) if part)


# Making a project.


def create_project(
    project_dir: Path | str,
    *,
    master_url: str,
    long_name: str,
    options: Mapping[str, str | int | float] | None = None,
) -> ProjectTree:
    """Make a complete project for the embedded server: tree, config.xml, keys, SQLite database with tables.

    `master_url` is what clients attach to, such as `http://127.0.0.1:8080/digits/`; it must end in a slash
    and its host must contain a dot (the stock client refuses `localhost`). `options` are further elements of
    `<config>`, or other values for those written here. Raises ConfigError, also if the folder already holds
    a project.
    """
    directory = Path(project_dir).resolve()
    _check_master_url(master_url)
    if (directory / "config.xml").exists():
        raise ConfigError(f"{directory} already holds a project (config.xml); choose another folder")
    for name in ("apps", "cgi-bin", "download", "keys", "templates", "upload"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    elements = _embedded_elements(directory, master_url, long_name)
    elements.update({name: str(value) for name, value in (options or {}).items()})
    for key in ("code_sign", "upload"):
        signing.write_key_pair(directory / "keys", key)
    # config.xml makes the folder a project, so it comes last: an interrupted attempt can be repeated.
    config = ProjectConfig.parse(_config_xml(elements), directory)
    tree = ProjectTree(directory, config)
    with tree.database() as db:
        db.create_tables(database.metadata)
        _insert_platforms(db)
    write_bytes(directory / "config.xml", _config_xml(elements))
    return tree


def _check_master_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.endswith("/"):
        raise ConfigError(f"master URL {url!r} must look like http://127.0.0.1:8080/project/")
    if "." not in parts.hostname:
        raise ConfigError(f"master URL {url!r}: BOINC clients need a dot in the host, such as 127.0.0.1")


def _embedded_elements(directory: Path, master_url: str, long_name: str) -> dict[str, str]:
    parts = urlsplit(master_url)
    path = parts.path.rstrip("/")
    cgi_url = f"{parts.scheme}://{parts.netloc}{path or '/boinc'}_cgi/"
    return {
        "long_name": long_name,
        "master_url": master_url,
        "download_url": master_url + "download",
        "download_dir": str(directory / "download"),
        "cgi_url": cgi_url,
        "upload_url": cgi_url + "file_upload_handler",
        "upload_dir": str(directory / "upload"),
        "key_dir": str(directory / "keys"),
        "uldl_dir_fanout": "1024",
        "gt_database_url": "sqlite:///project.sqlite",
        "one_result_per_user_per_wu": "1",
        "one_result_per_host_per_wu": "1",
        "max_wus_in_progress": "2",
        "max_wus_in_progress_gpu": "2",
        "max_wus_to_send": "50",
        "daily_result_quota": "10000",
        "min_sendwork_interval": "1",
        "gt_dry_rpc_delay": "10",
        "gt_hold_dry_reply": "3",
        "resend_lost_results": "1",
        "send_result_abort": "1",
        "cache_md5_info": "1",
    }


def _config_xml(elements: Mapping[str, str]) -> bytes:
    lines = [f"        <{name}>{escape(value)}</{name}>" for name, value in elements.items()]
    body = "\n".join(lines)
    empty = "    <daemons>\n    </daemons>\n    <tasks>\n    </tasks>"
    return f"<boinc>\n    <config>\n{body}\n    </config>\n{empty}\n</boinc>\n".encode()


def _insert_platforms(db: database.Database) -> None:
    table = database.platform
    with db.transaction() as connection:
        known = set(connection.scalars(table.select().with_only_columns(table.c.name)))
        rows = [
            database.new_row(table, name=name, user_friendly_name=friendly)
            for name, friendly in PLATFORMS.items()
            if name not in known
        ]
        if rows:
            connection.execute(table.insert(), rows)
