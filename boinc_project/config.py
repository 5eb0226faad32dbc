"""A BOINC project's `config.xml`, read into one typed record, and where to find it.

Sources: BOINC `sched/sched_config.{h,cpp}` (elements and defaults), `sched/sched_util_basic.cpp` (finding the
project directory). Elements that stock BOINC does not know begin with `gt_`; it skips them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lxml import etree
from sqlalchemy.engine import URL, make_url

from boinc_project.database import mysql_socket


class ConfigError(ValueError):
    """A missing or unusable project directory or config.xml; the message says what to do."""


def find_project_dir(start: Path | None = None, environment: Mapping[str, str] | None = None) -> Path:
    """The project directory by BOINC's rules, as an absolute path.

    `BOINC_PROJECT_DIR` if it is set; otherwise `.` or `..` (of `start`, default the working directory),
    whichever holds both `config.xml` and a `cgi-bin` directory. Raises ConfigError when there is none.
    """
    environment = os.environ if environment is None else environment
    named = environment.get("BOINC_PROJECT_DIR")
    if named:
        path = Path(named)
        if not (path / "config.xml").is_file():
            raise ConfigError(f"BOINC_PROJECT_DIR is {named}, but there is no config.xml in it")
        return path.resolve()
    here = Path.cwd() if start is None else start
    for candidate in (here, here.parent):
        if (candidate / "config.xml").is_file() and (candidate / "cgi-bin").is_dir():
            return candidate.resolve()
    raise ConfigError(
        f"no BOINC project in {here} or its parent (config.xml and cgi-bin); "
        "change to the project directory or set BOINC_PROJECT_DIR"
    )


@dataclass(frozen=True, kw_only=True)
class ProjectConfig:
    """The elements of `<boinc><config>` that this project uses; units in the comments.

    `elements` holds the text of every element by name (the last one where a name repeats), so that a rarely
    used option needs no field here.
    """

    project_dir: Path

    # who and where
    long_name: str = ""
    master_url: str = ""  # with a trailing slash, as clients attach to it
    download_url: str = ""
    download_dir: Path
    upload_url: str = ""
    upload_dir: Path
    cgi_url: str = ""
    key_dir: Path
    uldl_dir_fanout: int = 0  # 0: flat download and upload directories

    # database of a standard server
    db_name: str = ""
    db_user: str = ""
    db_passwd: str = field(default="", repr=False)
    db_host: str = ""
    gt_database_url: str = ""

    # handing out work
    one_result_per_user_per_wu: bool = False
    one_result_per_host_per_wu: bool = False
    max_wus_in_progress: int = 0  # per processor; 0: no limit
    max_wus_in_progress_gpu: int = 0  # per GPU; 0: no limit
    max_wus_to_send: int = 10  # per request, times the number of processors
    gpu_multiplier: float = 1.0
    max_ncpus: int = 64
    credit_by_app: bool = False  # keep credit_user and credit_team
    daily_result_quota: int = 0  # jobs a day per host and app version; 0: no quota
    min_sendwork_interval: float = 0.0  # seconds between requests that get work
    next_rpc_delay: float = 0.0  # seconds; 0: the client decides when to come again
    gt_dry_rpc_delay: float = 10.0  # seconds; embedded server: come again when there was no work
    gt_hold_dry_reply: float = 3.0  # seconds; embedded server: a reply to a report waits so long for work; 0: never
    gt_drift_false_discoveries: float = 0.01  # share of groups that are said to drift and do not
    gt_drift_ratio: float = 2.0  # how many times as far from others' copies a group must be to drift
    resend_lost_results: bool = False
    send_result_abort: bool = False
    report_grace_period: int = 0  # seconds added to the deadline kept in the database
    delete_delay: float = 0.0  # seconds after the last result before files are deleted
    maintenance_delay: float = 3600.0  # seconds; told to clients while the scheduler is stopped
    reliable_priority_on_over: int = 0
    reliable_priority_on_over_except_error: int = 0
    verify_files_on_app_start: bool = False
    min_core_client_version: int = 0  # 100 * 100 * major + 100 * minor + release

    # uploads
    ignore_upload_certificates: bool = False
    dont_generate_upload_certificates: bool = False
    fuh_set_completed_permission: int = 0  # mode of a completed upload; 0: left as created
    gt_upload_min_free_mb: float = 200.0  # less free space than this: uploads are told to wait

    # accounts
    disable_account_creation: bool = False
    min_passwd_length: int = 6

    elements: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def load(cls, project_dir: Path | str) -> ProjectConfig:
        """Read PROJECT/config.xml. Raises ConfigError with one sentence if it is missing or wrong."""
        directory = Path(project_dir).resolve()
        path = directory / "config.xml"
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from error
        return cls.parse(text, directory)

    @classmethod
    def parse(cls, text: bytes, project_dir: Path) -> ProjectConfig:
        """The same from the bytes of a config.xml; `project_dir` resolves what is relative."""
        values = _Elements(_config_element(text, project_dir / "config.xml"), project_dir / "config.xml")
        master_url = values.text("master_url")
        grace_hours = values.number("grace_period_hours", 0.0)
        return cls(
            project_dir=project_dir,
            long_name=values.text("long_name"),
            master_url=master_url,
            download_url=values.text("download_url") or master_url + "download",
            download_dir=values.path("download_dir", project_dir / "download"),
            upload_url=values.text("upload_url"),
            upload_dir=values.path("upload_dir", project_dir / "upload"),
            cgi_url=values.text("cgi_url"),
            key_dir=values.path("key_dir", project_dir / "keys"),
            uldl_dir_fanout=values.integer("uldl_dir_fanout", 0),
            db_name=values.text("db_name"),
            db_user=values.text("db_user"),
            db_passwd=values.text("db_passwd"),
            db_host=values.text("db_host"),
            gt_database_url=values.text("gt_database_url"),
            one_result_per_user_per_wu=values.flag("one_result_per_user_per_wu"),
            one_result_per_host_per_wu=values.flag("one_result_per_host_per_wu"),
            max_wus_in_progress=values.integer("max_wus_in_progress", 0),
            max_wus_in_progress_gpu=values.integer("max_wus_in_progress_gpu", 0),
            max_wus_to_send=values.integer("max_wus_to_send", 10),
            gpu_multiplier=values.number("gpu_multiplier", 1.0),
            max_ncpus=values.integer("max_ncpus", 64),
            credit_by_app=values.flag("credit_by_app"),
            daily_result_quota=values.integer("daily_result_quota", 0),
            min_sendwork_interval=values.number("min_sendwork_interval", 0.0),
            next_rpc_delay=values.number("next_rpc_delay", 0.0),
            gt_dry_rpc_delay=values.number("gt_dry_rpc_delay", 10.0),
            gt_hold_dry_reply=values.number("gt_hold_dry_reply", 3.0),
            gt_drift_false_discoveries=values.number("gt_drift_false_discoveries", 0.01, 0, 1),
            gt_drift_ratio=values.number("gt_drift_ratio", 2.0, 1, 1e6),
            resend_lost_results=values.flag("resend_lost_results"),
            send_result_abort=values.flag("send_result_abort"),
            report_grace_period=values.integer("report_grace_period", int(grace_hours * 3600)),
            delete_delay=values.number("delete_delay_hours", 0.0) * 3600,
            maintenance_delay=values.number("maintenance_delay", 3600.0),
            reliable_priority_on_over=values.integer("reliable_priority_on_over", 0),
            reliable_priority_on_over_except_error=values.integer("reliable_priority_on_over_except_error", 0),
            verify_files_on_app_start=values.flag("verify_files_on_app_start"),
            min_core_client_version=_client_version(values.integer("min_core_client_version", 0)),
            ignore_upload_certificates=values.flag("ignore_upload_certificates"),
            dont_generate_upload_certificates=values.flag("dont_generate_upload_certificates"),
            fuh_set_completed_permission=values.octal("fuh_set_completed_permission"),
            gt_upload_min_free_mb=values.number("gt_upload_min_free_mb", 200.0),
            disable_account_creation=values.flag("disable_account_creation")
            or values.flag("disable_account_creation_rpc"),
            min_passwd_length=values.integer("min_passwd_length", 6),
            elements=values.all(),
        )

    @property
    def scheduler_url(self) -> str:
        """URL of the scheduler; BOINC's make_project puts it beside the upload handler."""
        if self.cgi_url:
            return self.cgi_url.rstrip("/") + "/cgi"
        return self.upload_url.rpartition("/")[0] + "/cgi"

    @property
    def database_url(self) -> URL:
        """Where the database is: `<gt_database_url>` if present, else MySQL/MariaDB from the `db_*` elements.

        A relative SQLite path is relative to the project directory. Raises ConfigError if neither is given.
        """
        if self.gt_database_url:
            url = make_url(self.gt_database_url)
            if url.get_backend_name() == "sqlite" and url.database and not Path(url.database).is_absolute():
                url = url.set(database=str(self.project_dir / url.database))
            return url
        if not self.db_name:
            raise ConfigError(f"{self.project_dir / 'config.xml'} names no database: add <db_name>")
        host, port = _database_host(self.db_host)
        return URL.create(
            "mysql+pymysql",
            username=self.db_user or None,
            password=self.db_passwd or None,
            host=host,
            port=port,
            database=self.db_name,
            query={"charset": "utf8mb4"},
        )


def _database_host(text: str) -> tuple[str, int | None]:
    """Host and port of `<db_host>` as BOINC's programs take it: this machine's own name means localhost, and there
    MariaDB's C library goes to the server's socket whatever the port is."""
    host, _, port = ("localhost" if text in ("", os.uname().nodename) else text).partition(":")
    if host == "localhost" and mysql_socket() is not None:
        port = ""
    return host, int(port) if port.isdigit() else None


def _client_version(number: int) -> int:
    """BOINC accepts major*100+minor (below 10000) and the full form for client versions."""
    return number * 100 if number < 10000 else number


def _config_element(text: bytes, path: Path) -> etree._Element:
    parser = etree.XMLParser(resolve_entities=False, no_network=True, remove_comments=True)
    try:
        root = etree.fromstring(text, parser)
    except etree.XMLSyntaxError as error:
        raise ConfigError(f"{path} is not well-formed XML: {error.msg}") from error
    config = root if root.tag == "config" else root.find("config")
    if root.tag not in ("boinc", "config") or config is None:
        raise ConfigError(f"{path} has no <boinc><config> element")
    return config


class _Elements:
    """Typed access to the children of `<config>`; a value that cannot be read names element and file."""

    def __init__(self, config: etree._Element, path: Path) -> None:
        self._path = path
        self._texts = {str(child.tag): (child.text or "").strip() for child in config}

    def all(self) -> dict[str, str]:
        return dict(self._texts)

    def text(self, name: str) -> str:
        return self._texts.get(name, "")

    def path(self, name: str, default: Path) -> Path:
        text = self.text(name)
        return self._path.parent / text if text else default

    def flag(self, name: str) -> bool:
        """`<x/>` and `<x>1</x>` are true, an absent element and `<x>0</x>` are false."""
        if name not in self._texts:
            return False
        return self._texts[name] == "" or self.number(name, 0.0) != 0

    def number(self, name: str, default: float, least: float = -math.inf, most: float = math.inf) -> float:
        text = self.text(name)
        if not text:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or not least <= value <= most:
            limits = f" from {least:g} to {most:g}" if math.isfinite(least) and math.isfinite(most) else ""
            raise ConfigError(f"{self._path}: <{name}> must be a number{limits}, not {text!r}")
        return value

    def integer(self, name: str, default: int) -> int:
        return int(self.number(name, default))

    def octal(self, name: str) -> int:
        text = self.text(name)
        try:
            return int(text, 8) if text else 0
        except ValueError:
            raise ConfigError(f"{self._path}: <{name}> must be an octal mode, not {text!r}") from None
