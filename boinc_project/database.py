"""BOINC's database: its real tables (SQLAlchemy Core) and the connection to them.

The table and column names, types, defaults and indexes are those of BOINC's `db/schema.sql` and
`db/constraints.sql`, for the tables that daemons use. They are never altered; the project's own tables
live beside them, in another module. The same code works on SQLite (embedded server) and on MariaDB/MySQL
(standard server).

Not here: queries (`store.py`) and decisions (`server/`).
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects import mysql
from sqlalchemy.engine import Connection, Dialect, Engine, make_url
from sqlalchemy.exc import DBAPIError, IntegrityError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.schema import CreateColumn
from sqlalchemy.sql.expression import ColumnElement

#: Bytes that a `blob` column of BOINC's schema holds (MySQL BLOB).
BLOB_LIMIT = 65535

#: Bytes that BOINC's code accepts in `app_version.xml_doc` (a mediumblob).
APP_VERSION_XML_LIMIT = 262144

#: Seconds that a writer waits for another one on SQLite before it gives up.
SQLITE_BUSY_TIMEOUT_S = 30

#: Seconds after which a MariaDB server that does not accept a connection, or does not answer a statement, counts
#: as lost. The latter is longer than the server lets a statement wait for a lock (50).
MYSQL_CONNECT_TIMEOUT_S, MYSQL_ANSWER_TIMEOUT_S = 10, 120

#: Where MariaDB's or MySQL's socket usually is: Debian, Red Hat, SUSE, built from source.
MYSQL_SOCKETS = (
    "/run/mysqld/mysqld.sock",
    "/var/run/mysqld/mysqld.sock",
    "/var/lib/mysql/mysql.sock",
    "/run/mysql/mysql.sock",
    "/tmp/mysql.sock",
)

#: How often a transaction that gave way to others is done again, and the longest pause before that (seconds).
CONFLICT_TRIES, CONFLICT_PAUSE_S = 20, 0.2

#: Another transaction was in the way: record changed since it was read (snapshot isolation), lock wait timeout,
#: deadlock (MariaDB's error numbers).
_CONFLICTS = frozenset({1020, 1205, 1213})

_TABLE_EXISTS, _COLUMN_EXISTS = 1050, 1060

#: The server or the connection to it is away, or has no room now: too many connections (in all, of one account),
#: shutdown, disk full, connection aborted, network errors, statement or connection killed, restart, cannot reach
#: the server, connection lost, idle for too long.
_LOSSES = frozenset(
    {1021, 1040, 1041, 1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1226, 1317, 1927}
    | {2002, 2003, 2005, 2006, 2012, 2013, 2026, 2055, 4031}
)  # fmt: skip

#: The same of SQLite: its file cannot be opened, read or written, or the disk is full.
_SQLITE_LOSSES = frozenset({sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL})

_Made = TypeVar("_Made")

metadata = sa.MetaData()


def is_conflict(error: DBAPIError) -> bool:
    """Whether the transaction gave way to another one: it was rolled back, do the unit of work again."""
    number = _sqlite_error(error)
    if number is not None:
        return number in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
    return _mysql_error(error) in _CONFLICTS


def is_lost(error: DBAPIError) -> bool:
    """Whether the database is away (connection lost, refused or killed): wait and try the pass again.

    If it happened at a COMMIT, nobody knows whether that was done: look before doing anything again.
    """
    number = _sqlite_error(error)
    if number is not None:
        return number in _SQLITE_LOSSES
    return error.connection_invalidated or _mysql_error(error) in _LOSSES


def _sqlite_error(error: DBAPIError) -> int | None:
    """SQLite's primary result code; None for an error of another database."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    return None if code is None else int(code) & 0xFF


def _mysql_error(error: DBAPIError) -> int:
    """The error number of server or driver. PyMySQL says 0 when it finds its own connection closed."""
    arguments = getattr(error.orig, "args", ())
    if not arguments or not isinstance(arguments[0], int):
        return 0
    if arguments[0] == 0 and type(error.orig).__name__ == "InterfaceError":
        return 2006
    return arguments[0]


class BlobText(sa.types.TypeDecorator[str]):
    """Text in a binary column, as BOINC stores XML: UTF-8 out of the database, `str` in Python.

    Bytes that are not UTF-8 (a client's stderr) are read with replacement characters. A value longer than
    the column raises ValueError before the database is asked: MySQL without strict mode would cut it.
    """

    impl = sa.LargeBinary
    cache_ok = True

    def __init__(self, limit: int = BLOB_LIMIT) -> None:
        super().__init__(limit)
        self.limit = limit

    def load_dialect_impl(self, dialect: Dialect) -> sa.types.TypeEngine[Any]:
        if dialect.name in ("mysql", "mariadb"):
            return dialect.type_descriptor(mysql.BLOB() if self.limit <= BLOB_LIMIT else mysql.MEDIUMBLOB())
        return dialect.type_descriptor(sa.LargeBinary())

    def process_bind_param(self, value: str | bytes | None, dialect: Dialect) -> Any:
        if value is None:
            return None
        data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value)
        if len(data) > self.limit:
            raise ValueError(f"a value of {len(data)} bytes does not fit in a column of {self.limit} bytes")
        return data

    def process_result_value(self, value: Any, dialect: Dialect) -> str | None:
        if value is None or isinstance(value, str):
            return value
        return bytes(value).decode("utf-8", "replace")


class Varchar(sa.types.TypeDecorator[str]):
    """Text of at most `length` characters. Longer text to be stored raises ValueError before the database is
    asked: MySQL without strict mode would cut it, SQLite would keep all of it."""

    impl = sa.String
    cache_ok = True

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.length = length

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else self.checked(value)

    def checked(self, value: str) -> str:
        if len(value) > self.length:
            raise ValueError(f"a text of {len(value)} characters does not fit in a column of {self.length}")
        return value

    def coerce_compared_value(self, op: Any, value: Any) -> sa.types.TypeEngine[Any]:
        """Any text can be looked for."""
        return sa.String()


class FiniteDouble(sa.types.TypeDecorator[float]):
    """A double that is a number: MariaDB has no NaN or infinity, SQLite would store NULL or infinity for them.
    Storing one raises ValueError."""

    impl = sa.Double
    cache_ok = True

    def process_bind_param(self, value: float | None, dialect: Dialect) -> float | None:
        return None if value is None else finite(value)


def finite(value: float) -> float:
    """The value. Raises ValueError for NaN and infinities."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is not a number that a database can hold")
    return value


class _Now(ColumnElement[datetime]):
    """The default of a `mod_time` column: set at INSERT, and by MariaDB itself at every UPDATE of the row, whoever
    makes it (db_purge finds rows by their age)."""

    inherit_cache = True
    type = sa.TIMESTAMP()


@compiles(_Now)
def _now(element: _Now, compiler: Any, **kw: Any) -> str:
    return "CURRENT_TIMESTAMP"


@compiles(_Now, "mysql")
@compiles(_Now, "mariadb")
def _now_and_at_updates(element: _Now, compiler: Any, **kw: Any) -> str:
    return "CURRENT_TIMESTAMP ON UPDATE CURRENT_TIMESTAMP"


_TINYINT = sa.SmallInteger().with_variant(mysql.TINYINT(), "mysql", "mariadb")
_MEDIUMTEXT = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
_UNSIGNED = sa.Integer().with_variant(mysql.INTEGER(unsigned=True), "mysql", "mariadb")
_SERIAL = sa.Integer().with_variant(mysql.BIGINT(unsigned=True), "mysql", "mariadb")


def _id() -> sa.Column[int]:
    return sa.Column("id", sa.Integer, primary_key=True, autoincrement=True)


def _column(name: str, type_: Any, default: int | float | str | None) -> sa.Column[Any]:
    """A NOT NULL column; `default` None means that every INSERT must give it, as in BOINC's schema."""
    server_default = None if default is None else sa.text(repr(default))
    return sa.Column(name, type_, nullable=False, server_default=server_default)


def _int(name: str, default: int | None = None) -> sa.Column[Any]:
    return _column(name, sa.Integer, default)


def _small(name: str, default: int | None = None) -> sa.Column[Any]:
    return _column(name, sa.SmallInteger, default)


def _tiny(name: str, default: int | None = None) -> sa.Column[Any]:
    return _column(name, _TINYINT, default)


def _double(name: str, default: int | None = None) -> sa.Column[Any]:
    return _column(name, FiniteDouble(), default)


def _text(name: str, length: int = 254, default: str | None = None) -> sa.Column[Any]:
    return _column(name, Varchar(length), default)


def _null_text(name: str, length: int = 254) -> sa.Column[Any]:
    return sa.Column(name, Varchar(length), nullable=True)


def _blob(name: str, limit: int = BLOB_LIMIT) -> sa.Column[Any]:
    return sa.Column(name, BlobText(limit), nullable=True)


def _mod_time() -> sa.Column[datetime]:
    return sa.Column(
        "mod_time", sa.TIMESTAMP, nullable=False, server_default=_Now(), onupdate=sa.func.current_timestamp()
    )


def _unique_name(name: str = "name") -> sa.Column[Any]:
    return sa.Column(name, Varchar(191), nullable=False, unique=True)


def _index_on_mysql(name: str, *columns: Any) -> sa.Index:
    """An index that only BOINC's web pages need: on SQLite nobody would use it."""
    return sa.Index(name, *columns).ddl_if(callable_=_is_mysql)


def _is_mysql(*_: Any, dialect: Dialect, **__: Any) -> bool:
    return dialect.name in ("mysql", "mariadb")


platform = sa.Table(
    "platform",
    metadata,
    _id(),
    _int("create_time"),
    _unique_name(),
    _text("user_friendly_name"),
    _tiny("deprecated", 0),
)

app = sa.Table(
    "app",
    metadata,
    _id(),
    _int("create_time"),
    _unique_name(),
    _int("min_version", 0),
    _small("deprecated", 0),
    _text("user_friendly_name"),
    _small("homogeneous_redundancy", 0),
    _double("weight", 1),
    _small("beta", 0),
    _small("target_nresults", 0),  # adaptive replication when > 1 and the workunit asks for 1
    _double("min_avg_pfc", 1),
    _tiny("host_scale_check", 0),
    _tiny("homogeneous_app_version", 0),
    _tiny("non_cpu_intensive", 0),
    _int("locality_scheduling", 0),
    _small("n_size_classes", 0),
    _tiny("fraction_done_exact", 0),
)

app_version = sa.Table(
    "app_version",
    metadata,
    _id(),
    _int("create_time"),
    _int("appid"),
    _int("version_num"),  # 100 * major + minor
    _int("platformid"),
    _blob("xml_doc", APP_VERSION_XML_LIMIT),
    _int("min_core_version", 0),
    _int("max_core_version", 0),
    _tiny("deprecated", 0),
    _text("plan_class", 128, ""),
    _double("pfc_n", 0),
    _double("pfc_avg", 0),
    _double("pfc_scale", 0),
    _double("expavg_credit", 0),
    _double("expavg_time", 0),
    _tiny("beta", 0),
    sa.UniqueConstraint("appid", "platformid", "version_num", "plan_class", name="apvp"),
)

user = sa.Table(
    "user",
    metadata,
    _id(),
    _int("create_time"),
    sa.Column("email_addr", Varchar(191), nullable=False, unique=True),
    sa.Column("name", Varchar(191), nullable=True, unique=True),
    sa.Column("authenticator", Varchar(191), nullable=True, unique=True),
    _null_text("country"),
    _null_text("postal_code"),
    _double("total_credit"),
    _double("expavg_credit"),
    _double("expavg_time"),
    _blob("global_prefs"),
    _blob("project_prefs"),
    _int("teamid"),
    _text("venue"),
    _null_text("url"),
    _small("send_email"),
    _small("show_hosts"),
    _small("posts"),
    _int("seti_id"),
    _int("seti_nresults"),
    _int("seti_last_result_time"),
    _double("seti_total_cpu"),
    _null_text("signature"),
    _small("has_profile"),
    _text("cross_project_id"),
    _text("passwd_hash"),
    _small("email_validated"),
    _small("donated"),
    sa.Column("login_token", sa.CHAR(32), nullable=False, server_default=""),
    _double("login_token_time", 0),
    _text("previous_email_addr", 254, ""),
    _double("email_addr_change_time", 0),
    sa.Index("user_tid", "teamid"),
    _index_on_mysql("user_tot", sa.text("total_credit DESC")),
    _index_on_mysql("user_avg", sa.text("expavg_credit DESC")),
    _index_on_mysql("user_email_time", "email_addr_change_time"),
)

team = sa.Table(
    "team",
    metadata,
    _id(),
    _int("create_time"),
    _int("userid"),  # the founder
    _unique_name(),
    _null_text("name_lc"),
    _null_text("url"),
    _int("type"),
    _null_text("name_html"),
    sa.Column("description", sa.Text, nullable=True),
    _int("nusers"),
    _null_text("country"),
    _double("total_credit", 0),
    _double("expavg_credit", 0),
    _double("expavg_time"),
    _int("seti_id", 0),
    _int("ping_user", 0),
    _column("ping_time", _UNSIGNED, 0),
    _tiny("joinable", 1),
    _mod_time(),
)

host = sa.Table(
    "host",
    metadata,
    _id(),
    _int("create_time"),
    _int("userid"),  # 0: replaced by the host whose id stands in rpc_seqno
    _int("rpc_seqno"),
    _int("rpc_time"),
    _double("total_credit"),
    _double("expavg_credit"),
    _double("expavg_time"),
    _int("timezone"),
    _null_text("domain_name"),
    _null_text("serialnum"),
    _null_text("last_ip_addr"),
    _int("nsame_ip_addr"),
    _double("on_frac"),
    _double("connected_frac"),
    _double("active_frac"),
    _double("cpu_efficiency"),
    _double("duration_correction_factor"),
    _int("p_ncpus"),
    _null_text("p_vendor"),
    _null_text("p_model"),
    _double("p_fpops"),  # FLOP/s of one processor; 1e9 means "not measured"
    _double("p_iops"),
    _double("p_membw"),
    _null_text("os_name"),
    _null_text("os_version"),
    _double("m_nbytes"),
    _double("m_cache"),
    _double("m_swap"),
    _double("d_total"),
    _double("d_free"),
    _double("d_boinc_used_total"),
    _double("d_boinc_used_project"),
    _double("d_boinc_max"),
    _double("n_bwup"),
    _double("n_bwdown"),
    _double("credit_per_cpu_sec"),
    _text("venue"),
    _int("nresults_today"),
    _double("avg_turnaround"),
    _null_text("host_cpid"),
    _null_text("external_ip_addr"),
    _int("max_results_day"),  # -1: the host is blacklisted
    _double("error_rate", 0),
    _text("product_name"),
    _double("gpu_active_frac"),
    _int("p_ngpus"),
    _double("p_gpu_fpops"),
    sa.Column("misc", sa.Text, nullable=False, server_default=sa.text("('')")),
    sa.Index("host_userid_cpid", "userid", "host_cpid"),
    sa.Index("host_domain_name", "domain_name"),
    _index_on_mysql("host_avg", sa.text("expavg_credit DESC")),
    _index_on_mysql("host_tot", sa.text("total_credit DESC")),
)

host_app_version = sa.Table(
    "host_app_version",
    metadata,
    _int("host_id"),
    _int("app_version_id"),
    _double("pfc_n"),
    _double("pfc_avg"),
    _double("et_n"),
    _double("et_avg"),
    _double("et_var"),
    _double("et_q"),
    _int("max_jobs_per_day"),
    _int("n_jobs_today"),
    _double("turnaround_n"),
    _double("turnaround_avg"),
    _double("turnaround_var"),
    _double("turnaround_q"),
    _int("consecutive_valid"),
    sa.UniqueConstraint("host_id", "app_version_id", name="hap"),
)

workunit = sa.Table(
    "workunit",
    metadata,
    _id(),
    _int("create_time"),
    _int("appid"),
    _unique_name(),
    _blob("xml_doc"),
    _int("batch"),
    _double("rsc_fpops_est"),
    _double("rsc_fpops_bound"),
    _double("rsc_memory_bound"),  # bytes
    _double("rsc_disk_bound"),  # bytes
    _small("need_validate"),
    _int("canonical_resultid"),
    _double("canonical_credit"),
    _int("transition_time"),
    _int("delay_bound"),  # seconds
    _int("error_mask"),
    _int("file_delete_state"),
    _int("assimilate_state"),
    _int("hr_class"),
    _double("opaque"),
    _int("min_quorum"),
    _int("target_nresults"),
    _int("max_error_results"),
    _int("max_total_results"),
    _int("max_success_results"),
    _text("result_template_file", 63),
    _int("priority"),
    _mod_time(),
    _double("rsc_bandwidth_bound"),
    _int("fileset_id"),
    _int("app_version_id"),
    _tiny("transitioner_flags"),
    _small("size_class", -1),
    _text("keywords"),
    _int("app_version_num"),
    sa.Index("wu_val", "appid", "need_validate"),
    sa.Index("wu_timeout", "transition_time"),
    sa.Index("wu_filedel", "file_delete_state"),
    sa.Index("wu_assim", "appid", "assimilate_state"),
    sa.Index("wu_batch", "batch"),
)

result = sa.Table(
    "result",
    metadata,
    _id(),
    _int("create_time"),
    _int("workunitid"),
    _int("server_state"),
    _int("outcome"),
    _int("client_state"),
    _int("hostid"),
    _int("userid"),
    _int("report_deadline"),
    _int("sent_time"),
    _int("received_time"),
    _unique_name(),
    _double("cpu_time"),
    _blob("xml_doc_in"),
    _blob("xml_doc_out"),
    _blob("stderr_out"),
    _int("batch"),
    _int("file_delete_state"),
    _int("validate_state"),
    _double("claimed_credit"),
    _double("granted_credit"),
    _double("opaque"),
    _int("random"),
    _int("app_version_num"),
    _int("appid"),
    _int("exit_status"),
    _int("teamid"),
    _int("priority"),
    _mod_time(),
    _double("elapsed_time"),
    _double("flops_estimate"),
    _int("app_version_id"),
    _tiny("runtime_outlier"),
    _small("size_class", -1),
    _double("peak_working_set_size"),
    _double("peak_swap_size"),
    _double("peak_disk_usage"),
    sa.Index("res_wuid", "workunitid"),
    sa.Index("ind_res_st", "server_state", "priority"),
    sa.Index("res_app_state", "appid", "server_state"),
    sa.Index("res_filedel", "file_delete_state"),
    sa.Index("res_userid_id", "userid", sa.text("id DESC")),
    sa.Index("res_userid_val", "userid", "validate_state"),
    sa.Index("res_hostid_id", "hostid", sa.text("id DESC")),
    sa.Index("res_batch", "batch"),
)

batch = sa.Table(
    "batch",
    metadata,
    sa.Column("id", _SERIAL, primary_key=True, autoincrement=True),
    _int("user_id"),
    _int("create_time"),
    _double("logical_start_time"),
    _double("logical_end_time"),
    _double("est_completion_time"),
    _int("njobs"),
    _double("fraction_done"),
    _int("nerror_jobs"),
    _int("state"),
    _double("completion_time"),
    _double("credit_estimate"),
    _double("credit_canonical"),
    _double("credit_total"),
    _text("name", 255),
    _int("app_id"),
    _int("project_state"),
    _text("description", 255),
    _double("expire_time"),
)

msg_from_host = sa.Table(
    "msg_from_host",
    metadata,
    _id(),
    _int("create_time"),
    _int("hostid"),
    _text("variety"),
    _small("handled"),
    sa.Column("xml", _MEDIUMTEXT, nullable=True),
    sa.Index("message_handled", "handled"),
    sa.Index("message_hostid", "hostid"),
)

msg_to_host = sa.Table(
    "msg_to_host",
    metadata,
    _id(),
    _int("create_time"),
    _int("hostid"),
    _text("variety"),
    _small("handled"),
    sa.Column("xml", _MEDIUMTEXT, nullable=True),
    sa.Index("msg_to_host_host", "hostid", "handled"),
)

assignment = sa.Table(
    "assignment",
    metadata,
    _id(),
    _int("create_time"),
    _int("target_id"),
    _int("target_type"),  # 0 none, 1 host, 2 user, 3 team
    _tiny("multi"),
    _int("workunitid"),
    _int("resultid"),
    sa.Index("asgn_target", "target_type", "target_id"),
)

credited_job = sa.Table(
    "credited_job",
    metadata,
    _int("userid"),
    sa.Column("workunitid", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("userid", "workunitid", name="credited_job_user_wu"),
    sa.Index("credited_job_user", "userid"),
    sa.Index("credited_job_wu", "workunitid"),
)


def _credit_table(name: str, owner: str) -> sa.Table:
    return sa.Table(
        name,
        metadata,
        sa.Column(owner, sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("appid", sa.Integer, primary_key=True, autoincrement=False),
        _int("njobs"),
        _double("total"),
        _double("expavg"),
        _double("expavg_time"),
        sa.Column("credit_type", sa.Integer, primary_key=True, autoincrement=False),
    )


credit_user = _credit_table("credit_user", "userid")
credit_team = _credit_table("credit_team", "teamid")


def new_row(table: sa.Table, **values: Any) -> dict[str, Any]:
    """A complete row for an INSERT: `values`, and each other NOT NULL column at its default, 0 or ''.

    BOINC's schema has hardly any defaults and MySQL's strict mode refuses an INSERT that leaves such a column
    out. Automatic columns (`id`, `mod_time`) and nullable ones are left out unless given. An unknown column
    name raises TypeError.
    """
    unknown = sorted(set(values) - set(table.c.keys()))
    if unknown:
        raise TypeError(f"table {table.name} has no column {', '.join(unknown)}")
    row = dict(_blank_row(table))
    row.update(values)
    return row


_blank_rows: dict[str, dict[str, Any]] = {}


def _blank_row(table: sa.Table) -> dict[str, Any]:
    blank = _blank_rows.get(table.name)
    if blank is None:
        blank = {
            column.name: _blank_value(column)
            for column in table.columns
            if not column.nullable and column.name != "mod_time" and not _is_automatic(column)
        }
        _blank_rows[table.name] = blank
    return blank


def _is_automatic(column: sa.Column[Any]) -> bool:
    return bool(column.primary_key and column.table.autoincrement_column is column)


def _blank_value(column: sa.Column[Any]) -> int | float | str:
    if isinstance(column.type, (sa.String, Varchar)):
        return ""
    default = column.server_default
    if isinstance(default, sa.DefaultClause):
        return float(str(default.arg)) if isinstance(column.type, FiniteDouble) else int(str(default.arg))
    return 0.0 if isinstance(column.type, FiniteDouble) else 0


class Database:
    """Connections to one BOINC database.

    `url` is an SQLAlchemy URL: `sqlite:////absolute/path.sqlite` or `mysql+pymysql://user:pw@host/name`.

    SQLite: a write transaction takes the write lock at its start (BEGIN IMMEDIATE), so what it read is still
    true when it writes; commits are durable (WAL, synchronous=FULL).

    MariaDB/MySQL: the affected-row count is the number of matched rows, as BOINC's own daemons have it
    (CLIENT_FOUND_ROWS). REPEATABLE READ, as they have it too: what a plain SELECT read may be old by the time of
    a write; only SELECT ... FOR UPDATE and the conditions of an UPDATE see the newest rows. Host `localhost`
    without a port means the server's socket, as in BOINC's own programs, or 127.0.0.1 where there is none. The
    URL's query may set what PyMySQL knows, such as `unix_socket`, `connect_timeout` or `read_timeout`.
    """

    def __init__(self, url: str | sa.URL) -> None:
        self.url = make_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self.engine = _sqlite_engine(self.url) if self.is_sqlite else _mysql_engine(self.url)
        # SQLite has one writer at a time. Threads of this process take turns here instead of polling there.
        self._turn = threading.Lock() if self.is_sqlite else None

    @contextmanager
    def transaction(self, *, synced: bool = True, serializable: bool = False) -> Iterator[Connection]:
        """A write transaction: committed at the end of the block, rolled back by an exception.

        Not `synced` (SQLite only): the commit is whole and seen by everybody, but a loss of power may undo it
        until `sync` is called or a later commit is durable.

        `serializable` (always on SQLite): what it reads stays true until it ends, or it fails with a conflict.
        """
        with self._writers_turn(), self.engine.connect() as connection:
            connection = connection.execution_options(synced=synced, serializable=serializable)
            with connection.begin():
                yield connection

    def serialized(self, work: Callable[[Connection], _Made], *, synced: bool = True) -> _Made:
        """`work` in a serializable transaction, done again when that gave way to another one; returns its result.

        `work` must have no effect but through the connection.
        """
        return self._repeated(work, is_conflict, synced=synced, serializable=True)

    def repeated(self, work: Callable[[Connection], _Made]) -> _Made:
        """`work` in a transaction, done again when it gave way to another one, or when both inserted the same row.

        `work` locks what it relies on, and has no effect but through the connection.
        """
        return self._repeated(work, lambda error: is_conflict(error) or isinstance(error, IntegrityError))

    def _repeated(
        self, work: Callable[[Connection], _Made], is_passing: Callable[[DBAPIError], bool], **options: bool
    ) -> _Made:
        for attempt in range(1, CONFLICT_TRIES + 1):
            try:
                with self.transaction(**options) as connection:
                    return work(connection)
            except DBAPIError as error:
                if not is_passing(error) or attempt == CONFLICT_TRIES:
                    raise
                # Of several that were in each other's way, one must come first.
                time.sleep(random.uniform(0, min(0.001 * 2**attempt, CONFLICT_PAUSE_S)))
        raise AssertionError("unreachable")

    def sync(self) -> None:
        """Make every commit so far durable: what SQLite does itself at the end of a synced one."""
        if self.is_sqlite:
            with contextlib.suppress(FileNotFoundError):  # then all of it is in the database, and durable
                descriptor = os.open(f"{self.url.database}-wal", os.O_RDONLY)
                try:
                    os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)

    @contextmanager
    def _writers_turn(self) -> Iterator[None]:
        if self._turn is None:
            yield
            return
        if not self._turn.acquire(timeout=SQLITE_BUSY_TIMEOUT_S):
            raise TimeoutError(f"another transaction of this process took over {SQLITE_BUSY_TIMEOUT_S} s")
        try:
            yield
        finally:
            self._turn.release()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read-only view of one moment; never waits for writers on SQLite. Do not write through it."""
        with self.engine.connect() as connection:
            connection = connection.execution_options(read_only=True)
            with connection.begin():
                yield connection

    def create_tables(self, tables: sa.MetaData) -> None:
        """Create the tables of `tables` that do not exist yet, and in those that do the columns with a server
        default that came later."""
        for attempt in range(1, CONFLICT_TRIES + 1):
            try:
                with self.transaction() as connection:
                    tables.create_all(connection)
                    _add_columns(connection, tables)
                return
            except DBAPIError as error:  # on MariaDB another process may create the same ones at this moment
                if _mysql_error(error) not in (_TABLE_EXISTS, _COLUMN_EXISTS) or attempt == CONFLICT_TRIES:
                    raise
                time.sleep(0.05)

    def close(self) -> None:
        """Close every pooled connection; the object can be used again afterwards."""
        self.engine.dispose()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _add_columns(connection: Connection, tables: sa.MetaData) -> None:
    schema, preparer = sa.inspect(connection), connection.dialect.identifier_preparer
    for table in tables.sorted_tables:
        if not any(column.server_default is not None for column in table.columns):
            continue
        there = {column["name"] for column in schema.get_columns(table.name)}
        for column in (each for each in table.columns if each.name not in there and each.server_default is not None):
            definition = CreateColumn(column).compile(dialect=connection.dialect)
            connection.exec_driver_sql(f"ALTER TABLE {preparer.format_table(table)} ADD COLUMN {definition}")


def _sqlite_engine(url: sa.URL) -> Engine:
    if url.database in (None, "", ":memory:"):
        raise ValueError("the project's SQLite database needs a file; an in-memory one has no other readers")
    engine = sa.create_engine(
        url,
        pool_size=32,
        max_overflow=32,
        connect_args={"timeout": SQLITE_BUSY_TIMEOUT_S, "check_same_thread": False},
    )

    @sa.event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves; the driver would say it too late
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {SQLITE_BUSY_TIMEOUT_S * 1000}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        options = connection.get_execution_options()
        read_only, synced = options.get("read_only", False), options.get("synced", True)
        if not read_only and connection.info.get("synced", True) != synced:
            connection.exec_driver_sql(f"PRAGMA synchronous = {'FULL' if synced else 'NORMAL'}")
            connection.info["synced"] = synced
        connection.exec_driver_sql("BEGIN" if read_only else "BEGIN IMMEDIATE")

    return engine


def _mysql_engine(url: sa.URL) -> Engine:
    engine = sa.create_engine(
        _mysql_address(url),
        pool_size=10,
        max_overflow=20,
        pool_pre_ping=True,  # what was lost while idle (wait_timeout, a restart) is replaced before it is used
        pool_recycle=3600,
        isolation_level="REPEATABLE READ",
    )

    @sa.event.listens_for(engine, "begin")
    def _on_begin(connection: Connection) -> None:
        if connection.get_execution_options().get("serializable", False):
            connection.exec_driver_sql("SET TRANSACTION ISOLATION LEVEL SERIALIZABLE")

    return engine


def _mysql_address(url: sa.URL) -> sa.URL:
    """The URL with what PyMySQL would not do by itself: the socket, timeouts, characters beyond Latin."""
    wanted: dict[str, str] = {"charset": "utf8mb4"}
    if url.get_driver_name() == "pymysql":
        wanted["connect_timeout"] = str(MYSQL_CONNECT_TIMEOUT_S)
        wanted["read_timeout"] = wanted["write_timeout"] = str(MYSQL_ANSWER_TIMEOUT_S)
        if (url.host or "localhost") == "localhost" and "unix_socket" not in url.query:
            socket = None if url.port else mysql_socket()
            if socket is not None:
                wanted["unix_socket"] = socket
            url = url.set(host="localhost" if socket else "127.0.0.1")
    return url.update_query_dict({name: value for name, value in wanted.items() if name not in url.query})


def mysql_socket() -> str | None:
    """The socket that MariaDB's C library would take for `localhost`: MYSQL_UNIX_PORT, or a usual place."""
    for path in (os.environ.get("MYSQL_UNIX_PORT", ""), *MYSQL_SOCKETS):
        with contextlib.suppress(OSError):
            if path and stat.S_ISSOCK(os.stat(path).st_mode):
                return path
    return None
