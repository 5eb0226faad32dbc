"""The project's own tables, beside BOINC's in the same database (prefix `gt_`).

BOINC's tables are never altered. Everything is keyed by workunit *name*: ids can recur after a purge.
States are short words, so that an admin can read them in the database.

    gt_job         one row per training job
    gt_version     one row per published model version
    gt_microtask   one row per issued microtask (job, version, slot, attempt) and its workunit
    gt_ledger      one row per gradient taken in: what was folded into which version, and with what weight
    gt_file        one row per published file and its life
    gt_trust       one row per host and kind of work: how its results were judged
    gt_fingerprint one row per judged result: what stays of it when its file is gone
    gt_accepted    one row per canonical update of a job that bounds norms or probes losses: what was measured of it
    gt_recheck     one row per result that was accepted alone and is looked at again: its host has failed a check since
    gt_blocked     one row per group of hosts whose results count as no vote
    gt_heartbeat   one row per running daemon
"""

from __future__ import annotations

from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.dialects import mysql

from boinc_project.database import FiniteDouble, Varchar

gt_metadata = sa.MetaData()

_Long = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_Document = sa.Text().with_variant(mysql.MEDIUMTEXT(), "mysql", "mariadb")
_Double = FiniteDouble()
_Bytes = sa.LargeBinary().with_variant(mysql.MEDIUMBLOB(), "mysql", "mariadb")


class JobState(StrEnum):
    """gt_job.state."""

    RUNNING = "running"  # microtasks are issued
    PAUSED = "paused"  # nothing new is issued; what comes back is still folded
    FINISHED = "finished"  # the stop condition holds
    FAILED = "failed"  # something only the admin can mend; `note` says what


class MicrotaskState(StrEnum):
    """gt_microtask.state."""

    ISSUED = "issued"  # its workunit exists and is not assimilated
    FOLDED = "folded"  # its gradient is in the ledger
    FAILED = "failed"  # its workunit errored; the slot is issued again
    CANCELLED = "cancelled"  # withdrawn before it was sent


class Disposition(StrEnum):
    """gt_ledger.disposition: what became of a gradient."""

    PENDING = "pending"  # taken in, waits for its round
    COMMITTED = "committed"  # member of a round that is being applied
    APPLIED = "applied"  # part of `applied_version`
    TOO_OLD = "too_old"  # credited, not applied
    DUPLICATE = "duplicate"  # the slot was already filled
    DROPPED = "dropped"  # its model version was rolled back


class FileState(StrEnum):
    """gt_file.state."""

    PUBLISHED = "published"
    RETIRING = "retiring"  # nobody needs it; it is being deleted
    DELETED = "deleted"


class Judgement(StrEnum):
    """gt_fingerprint.verdict."""

    CANONICAL = "canonical"
    ALONE = "alone"  # canonical without a second copy: its host was trusted
    VALID = "valid"
    DIFFERS = "differs"  # invalid, but as close as unlike hardware comes
    FAULTY = "faulty"  # invalid
    TOO_LATE = "too_late"


class RecheckState(StrEnum):
    """gt_recheck.state: what the server's own computation says of a result."""

    WAITING = "waiting"
    RIGHT = "right"
    NEAR = "near"  # not within the tolerance, but as close as unlike hardware comes
    WRONG = "wrong"
    LOST = "lost"  # it cannot be computed any more


gt_job = sa.Table(
    "gt_job",
    gt_metadata,
    sa.Column("id", _Long, primary_key=True, autoincrement=True),
    sa.Column("name", Varchar(64), nullable=False, unique=True),
    sa.Column("appid", _Long, nullable=False),
    sa.Column("create_time", _Long, nullable=False),
    sa.Column("state", Varchar(16), nullable=False),
    sa.Column("note", sa.Text, nullable=False, default=""),
    sa.Column("config", _Document, nullable=False),  # canonical JSON of JobConfig
    sa.Column("folder", sa.Text, nullable=False),  # absolute; graphs, shards, versions, payloads
    sa.Column("facts", _Document, nullable=False),  # canonical JSON of JobFacts (store.py)
    sa.Column("current_version", _Long, nullable=False, default=0),
    mysql_engine="InnoDB",
)

gt_version = sa.Table(
    "gt_version",
    gt_metadata,
    sa.Column("job_id", _Long, primary_key=True, autoincrement=False),
    sa.Column("version", _Long, primary_key=True, autoincrement=False),
    sa.Column("create_time", _Double, nullable=False),
    sa.Column("state_sha256", Varchar(64), nullable=False),
    sa.Column("state_bytes", _Long, nullable=False),
    sa.Column("optimizer_sha256", Varchar(64), nullable=False, default=""),
    sa.Column("contributions", sa.Integer, nullable=False, default=0),
    sa.Column("samples", _Long, nullable=False, default=0),
    sa.Column("loss", _Double, nullable=True),  # mean training loss of its contributions
    sa.Column("evaluation", sa.Text, nullable=False, default=""),  # JSON {metric: value} once evaluated
    # Of the server's own gradient at this version, once it is there (policy anchored).
    sa.Column("anchor_sha256", Varchar(64), nullable=False, default="", server_default=""),
    mysql_engine="InnoDB",
)

gt_round = sa.Table(
    "gt_round",
    gt_metadata,
    sa.Column("job_id", _Long, primary_key=True, autoincrement=False),
    sa.Column("version", _Long, primary_key=True, autoincrement=False),  # the version it makes
    sa.Column("commit_time", _Double, nullable=False),
    # JSON [[workunit name, weight, weight by age], ...] in folding order
    sa.Column("members", _Document, nullable=False),
    # The version whose anchor corrects it; -1: none.
    sa.Column("anchor_version", _Long, nullable=False, default=-1, server_default=sa.text("-1")),
    mysql_engine="InnoDB",
)

gt_microtask = sa.Table(
    "gt_microtask",
    gt_metadata,
    sa.Column("id", _Long, primary_key=True, autoincrement=True),
    sa.Column("job_id", _Long, nullable=False),
    sa.Column("version", _Long, nullable=False),
    sa.Column("slot", sa.Integer, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("workunit_name", Varchar(191), nullable=False, unique=True),
    sa.Column("digest", Varchar(64), nullable=False),
    sa.Column("document", _Document, nullable=False),  # canonical JSON of the microtask
    sa.Column("samples", _Long, nullable=False),
    sa.Column("flops", _Double, nullable=False),
    # Its batches, and BOINC's size class of its hosts; server defaults, because older projects lack these.
    sa.Column("first_batch", _Long, nullable=False, default=0, server_default=sa.text("0")),
    sa.Column("steps", sa.Integer, nullable=False, default=0, server_default=sa.text("0")),
    sa.Column("size_class", sa.Integer, nullable=False, default=-1, server_default=sa.text("-1")),
    sa.Column("state", Varchar(16), nullable=False),
    sa.Column("create_time", _Long, nullable=False),
    sa.Column("canonical_sha256", Varchar(64), nullable=False, default=""),  # of the payload the validator judged
    sa.Column("note", sa.Text, nullable=False, default=""),
    sa.UniqueConstraint("job_id", "version", "slot", "attempt"),
    sa.Index("gt_microtask_state", "job_id", "state"),
    sa.Index("gt_microtask_slot", "job_id", "slot"),
    mysql_engine="InnoDB",
)

gt_ledger = sa.Table(
    "gt_ledger",
    gt_metadata,
    sa.Column("workunit_name", Varchar(191), primary_key=True),
    sa.Column("job_id", _Long, nullable=False),
    sa.Column("base_version", _Long, nullable=False),
    sa.Column("slot", sa.Integer, nullable=False),
    sa.Column("payload_sha256", Varchar(64), nullable=False),
    sa.Column("payload_file", Varchar(254), nullable=False),  # relative to the job's folder
    sa.Column("samples", _Long, nullable=False),
    sa.Column("loss", _Double, nullable=True),
    sa.Column("hostid", _Long, nullable=False),
    sa.Column("intake_time", _Double, nullable=False),
    sa.Column("disposition", Varchar(16), nullable=False),
    sa.Column("applied_version", _Long, nullable=True),
    sa.Column("weight", _Double, nullable=True),
    sa.Index("gt_ledger_round", "job_id", "base_version"),
    sa.Index("gt_ledger_waiting", "job_id", "disposition"),
    mysql_engine="InnoDB",
)

gt_file = sa.Table(
    "gt_file",
    gt_metadata,
    sa.Column("name", Varchar(191), primary_key=True),
    sa.Column("job_id", _Long, nullable=False),
    # kind: graph, optimizer, evaluation, constants, shard, state, delta, microtask
    sa.Column("kind", Varchar(16), nullable=False),
    sa.Column("version", _Long, nullable=True),  # of the model, for state, delta and microtask files
    sa.Column("sha256", Varchar(64), nullable=False),
    sa.Column("md5", Varchar(32), nullable=False),
    sa.Column("bytes", _Long, nullable=False),
    sa.Column("create_time", _Long, nullable=False),
    sa.Column("state", Varchar(16), nullable=False),
    sa.Index("gt_file_job", "job_id", "state", "kind"),
    mysql_engine="InnoDB",
)

gt_trust = sa.Table(
    "gt_trust",
    gt_metadata,
    sa.Column("host_id", _Long, primary_key=True, autoincrement=False),
    sa.Column("kind", Varchar(32), primary_key=True),  # mode and graph: what was computed (validator/books.py)
    sa.Column("valid", sa.Integer, nullable=False, default=0),
    sa.Column("faulty", sa.Integer, nullable=False, default=0),  # unreadable, or nothing like the others
    sa.Column("differing", sa.Integer, nullable=False, default=0),  # close to the others, but not within tolerance
    sa.Column("consecutive_valid", sa.Integer, nullable=False, default=0),  # since the last faulty one
    sa.Column("judge_time", _Double, nullable=False, default=0.0),  # of the newest verdict
    # Evidence that fades with time (boinc_project/reliability.py); server defaults, because older projects lack these.
    sa.Column("good", _Double, nullable=False, default=0.0, server_default=sa.text("0")),  # valid beside another's copy
    sa.Column("bad", _Double, nullable=False, default=0.0, server_default=sa.text("0")),  # faulty
    sa.Column("unlike", _Double, nullable=False, default=0.0, server_default=sa.text("0")),  # differing
    sa.Column("alone", sa.Integer, nullable=False, default=0, server_default=sa.text("0")),  # unchecked since then
    sa.Column("failed_check", _Double, nullable=False, default=0.0, server_default=sa.text("0")),  # when; 0: never
    mysql_engine="InnoDB",
)

gt_fingerprint = sa.Table(
    "gt_fingerprint",
    gt_metadata,
    sa.Column("workunit_name", Varchar(191), primary_key=True),
    sa.Column("result_id", _Long, primary_key=True, autoincrement=False),
    sa.Column("host_id", _Long, nullable=False),
    sa.Column("user_id", _Long, nullable=False),
    sa.Column("app_version_id", _Long, nullable=False),
    sa.Column("kind", Varchar(32), nullable=False),  # as in gt_trust
    sa.Column("verdict", Varchar(16), nullable=False),
    sa.Column("distance", _Double, nullable=True),  # to the canonical result; none for itself
    sa.Column("judge_time", _Double, nullable=False),
    sa.Column("marks", _Bytes, nullable=False),  # validator/fingerprint.py
    sa.Index("gt_fingerprint_host", "host_id", "judge_time"),
    sa.Index("gt_fingerprint_time", "judge_time"),
    mysql_engine="InnoDB",
)

gt_accepted = sa.Table(
    "gt_accepted",
    gt_metadata,
    sa.Column("workunit_name", Varchar(191), primary_key=True),
    sa.Column("job_id", _Long, nullable=False),
    sa.Column("version", _Long, nullable=False),  # that it was computed from
    sa.Column("norm", _Double, nullable=False),
    sa.Column("gain", _Double, nullable=True),  # of held-out loss; none if it was not tried
    sa.Column("judge_time", _Double, nullable=False),
    sa.Index("gt_accepted_time", "job_id", "judge_time"),
    mysql_engine="InnoDB",
)

gt_recheck = sa.Table(
    "gt_recheck",
    gt_metadata,
    sa.Column("workunit_name", Varchar(191), primary_key=True),
    sa.Column("host_id", _Long, nullable=False),
    sa.Column("kind", Varchar(32), nullable=False),  # as in gt_trust
    sa.Column("create_time", _Double, nullable=False),
    sa.Column("state", Varchar(16), nullable=False),
    sa.Column("distance", _Double, nullable=True),  # to the server's own computation, as the fingerprints tell it
    sa.Column("judge_time", _Double, nullable=False, default=0.0),
    sa.Index("gt_recheck_state", "state", "create_time"),
    sa.Index("gt_recheck_host", "host_id", "kind"),
    mysql_engine="InnoDB",
)

gt_blocked = sa.Table(
    "gt_blocked",
    gt_metadata,
    sa.Column("name", Varchar(191), primary_key=True),  # a group's name (voters.groups_of)
    sa.Column("create_time", _Double, nullable=False),
    sa.Column("note", sa.Text, nullable=False, default=""),
    mysql_engine="InnoDB",
)

#: Groups that drifted when the validator last looked.
gt_drift = sa.Table(
    "gt_drift",
    gt_metadata,
    sa.Column("name", Varchar(191), primary_key=True),
    sa.Column("pairs", sa.Integer, nullable=False),
    sa.Column("median", _Double, nullable=False),  # distance of its pairs
    sa.Column("ratio", _Double, nullable=False),  # by that of the others
    sa.Column("test_time", _Double, nullable=False),
    mysql_engine="InnoDB",
)

gt_heartbeat = sa.Table(
    "gt_heartbeat",
    gt_metadata,
    sa.Column("daemon", Varchar(64), primary_key=True),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("time", _Double, nullable=False),
    sa.Column("note", sa.Text, nullable=False, default=""),
    mysql_engine="InnoDB",
)
