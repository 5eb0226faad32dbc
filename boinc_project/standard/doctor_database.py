"""Doctor's checks of the database: schema, clock, apps, versions, jobs, hosts, queue, daemons; they only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import sqlalchemy as sa
from lxml import etree
from sqlalchemy.engine import Connection

from boinc_project import signing, store
from boinc_project.database import app, host, platform, result, workunit
from boinc_project.gt_tables import JobState, gt_metadata
from boinc_project.standard import editing, plan_classes, schema, steps
from boinc_project.standard.findings import Finding, Patient, age, counted, error, listed, note, warning
from boinc_project.states import Outcome, ServerState, ValidateState
from boinc_project.store import JobRow

CLOCK_WARNING_S = 5.0
CLOCK_ERROR_S = 60.0
BACKLOG_S = 600.0
ACTIVE_HOST_S = 7 * 86400.0
RECENT_RESULTS = 200
MANY_FAILURES = 0.3
FEEDER_SLOTS = 100  # BOINC's MAX_WU_RESULTS, where <shmem_work_items> says nothing else
INT_LIMIT = 2**31 - 1
NEARLY_FULL = 0.9
FILES_LOOKED_AT = 200


def check_schema(patient: Patient, connection: Connection) -> Iterator[Finding]:
    """BOINC's tables and ours, as our code expects them."""
    if lacking := schema.missing(connection):
        yield error(
            f"the database lacks {listed(lacking)}", "run html/ops/upgrade_db.php of the BOINC that is installed"
        )
    if strange := schema.unknown_without_default(connection):
        yield error(
            f"columns that this boinc-train does not know have no default: {listed(strange)}",
            "use a newer boinc-train; workunits cannot be inserted",
        )
    if plain := schema.not_transactional(connection):
        yield error(f"{listed(plain)} have no transactions", "ALTER TABLE ... ENGINE=InnoDB, or a crash costs credit")
    there, absent = schema.own_tables(connection)
    if absent and (there or patient.standard):
        yield error(f"our tables {listed(absent)} are missing", f"boinc-train install {patient.folder}")
    addable = schema.addable(connection)
    if addable:
        remedy = f"boinc-train install {patient.folder}" if patient.standard else "start boinc-train serve again"
        yield error(f"our tables are of an earlier boinc-train and lack {listed(addable)}", remedy)
    others = [
        name for name in schema.missing(connection, [gt_metadata.tables[name] for name in there]) if name not in addable
    ]
    if others:
        yield error(
            f"our tables lack {listed(others)}", "they are of another version of boinc-train; see its CHANGELOG"
        )
    yield from _nearly_full(connection)


def _nearly_full(connection: Connection) -> Iterator[Finding]:
    """Ids close to what a 32-bit column holds."""
    if connection.dialect.name == "sqlite":
        return
    query = sa.text(
        "SELECT t.table_name, t.auto_increment FROM information_schema.tables t"
        " JOIN information_schema.columns c ON c.table_schema = t.table_schema AND c.table_name = t.table_name"
        " WHERE t.table_schema = DATABASE() AND c.column_name = 'id' AND c.data_type = 'int'"
        " AND t.auto_increment IS NOT NULL"
    )
    for name, following in connection.execute(query):
        if int(following) > NEARLY_FULL * INT_LIMIT:
            yield warning(
                f"the ids of {name} are at {following} of {INT_LIMIT}",
                f"make {name}.id and what refers to it bigint (BOINC's upgrade_db.php) before inserts stop",
            )


def check_clock(patient: Patient, connection: Connection) -> Iterator[Finding]:
    """The database server's clock against this machine's."""
    if connection.dialect.name == "sqlite":
        return
    skew = abs(float(connection.execute(sa.text("SELECT UNIX_TIMESTAMP(NOW(6))")).scalar_one()) - patient.now)
    text = f"the clocks of this machine and of the database server differ by {skew:.0f} s"
    remedy = "run a time service (systemd-timesyncd, chrony) on both"
    if skew > CLOCK_ERROR_S:
        yield error(text, remedy)
    elif skew > CLOCK_WARNING_S:
        yield warning(text, remedy)


def check_apps(patient: Patient, connection: Connection) -> Iterator[Finding]:
    """Our app's row: settings that keep its work from being sent or judged."""
    for name in patient.apps:
        row = connection.execute(sa.select(app).where(app.c.name == name)).mappings().first()
        if row is None:
            yield error(f"the database has no app {name}", f"boinc-train install {patient.folder}")
            continue
        yield from _app_settings(name, dict(row))
        yield from _versions(patient, connection, name, int(row["id"]))


def _app_settings(name: str, row: Mapping[str, Any]) -> Iterator[Finding]:
    where = f"in the row of app {name}"
    if row["deprecated"]:
        yield error(f"the app {name} is deprecated, so nothing of it is sent", f"set deprecated to 0 {where}")
    if row["weight"] <= 0:
        yield error(
            f"the weight of the app {name} is {row['weight']:g}", f"set weight to 1 {where}: the feeder skips it"
        )
    if row["target_nresults"] > 1:
        yield warning(
            f"target_nresults of {name} is {row['target_nresults']}: BOINC's adaptive replication",
            f"set it to 0 {where}; min_quorum in job.toml says how often a task is computed",
        )
    if row["homogeneous_redundancy"] or row["homogeneous_app_version"]:
        yield warning(
            f"{name} has homogeneous redundancy or versions: copies wait for hosts of one kind",
            f"set both to 0 {where}; our validator compares results of different computers",
        )
    if row["non_cpu_intensive"]:
        yield error(f"{name} is marked non_cpu_intensive", f"set it to 0 {where}: it does compute")
    if row["min_version"] > 0:
        yield note(f"versions of {name} below {row['min_version']} are not sent", f"min_version {where}")


def _versions(patient: Patient, connection: Connection, name: str, appid: int) -> Iterator[Finding]:
    versions = store.deployed_versions(connection, appid)
    publish = f"boinc-train build-app --project {patient.folder}" + (
        ", then bin/update_versions" if patient.standard else ""
    )
    if not versions:
        yield error(f"{name} has no app version that volunteers could run", publish)
    platforms = {int(i) for i in connection.execute(sa.select(platform.c.id)).scalars()}
    for version in versions:
        label = f"version {int(version['version_num']) / 100:.2f} of {name} {version['plan_class']}".rstrip()
        if int(version["platformid"]) not in platforms:
            yield error(f"{label} is for a platform that the database does not have", "run bin/xadd")
        yield from _version_files(patient, label, str(version["xml_doc"] or ""), publish)
        if version["plan_class"] and patient.standard:
            yield from _plan_class(patient, label, str(version["plan_class"]))


def _version_files(patient: Patient, label: str, document: str, publish: str) -> Iterator[Finding]:
    try:
        root = etree.fromstring(f"<x>{document}</x>".encode())
    except etree.XMLSyntaxError as problem:
        yield error(
            f"the XML of {label} cannot be parsed ({problem.msg})", f"deprecate it and publish a new one: {publish}"
        )
        return
    if root.find("app_version/api_version") is None:
        yield warning(f"{label} declares no api_version", f"clients use an old protocol with it; {publish}")
    for info in root.iterfind("file_info"):
        name = (info.findtext("name") or "").strip()
        path = patient.config.download_dir / name
        if not path.is_file():
            yield error(f"{path} of {label} is missing, so every download fails", f"restore it, or {publish}")
        elif str(path.stat().st_size) != (info.findtext("nbytes") or "").strip():
            yield error(f"{path} of {label} has another size than was published", f"restore it, or {publish}")
        else:
            yield from _signature(patient, label, info, name)


def _signature(patient: Patient, label: str, info: etree._Element, name: str) -> Iterator[Finding]:
    path = patient.config.download_dir / name
    try:
        key = signing.read_public_key(patient.config.key_dir / "code_sign_public")
        right = key.verify_digest(signing.file_md5(path), info.findtext("file_signature") or "")
    except (OSError, ValueError):
        return  # check_keys and check_directories say so
    if not right:
        yield error(
            f"the signature of {name}, {label}, is not of this file and keys/code_sign_public",
            "volunteers refuse it; restore the file, or publish a new version signed with the project's key",
        )


def _plan_class(patient: Patient, label: str, plan_class: str) -> Iterator[Finding]:
    path = patient.folder / steps.SPEC
    text = editing.read(path.read_bytes() if path.exists() else b"")
    root = editing.parse(text).find("plan_classes")
    known = {editing.text_of(text, each.find("name")) for each in (root.all("plan_class") if root else ())}
    ours = {each.name: each for each in plan_classes.CLASSES}
    if plan_class not in known:
        yield warning(
            f"{label} has the plan class {plan_class}, which {steps.SPEC} lacks",
            "add it, or the version is sent to nobody",
        )
    expected = ours[plan_class].processor if plan_class in ours else None
    taken = plan_classes.processor_of(plan_class)
    if (
        expected is None
        and taken != "cpu"
        and not plan_class.startswith(("cuda", "opencl_", "ati", "nvidia", "intel_gpu"))
    ):
        yield warning(f"BOINC takes {plan_class} of {label} for a class of {taken} because of its name", "rename it")


def check_jobs(patient: Patient, connection: Connection) -> Iterator[Finding]:
    """Jobs that stopped; whether there are hosts enough for those that run; their share of the feeder."""
    if schema.own_tables(connection)[1]:
        return
    jobs = store.jobs(connection)
    for job in jobs:
        if job.state == JobState.FAILED:
            yield error(f"the job {job.name} stopped: {job.note}", f"mend that, then boinc-train job resume {job.name}")
    running = [job for job in jobs if job.state == JobState.RUNNING]
    if running:
        users, hosts = _active(patient, connection)
        slots = _slots(patient, connection, running)
        for job in running:
            yield from _hosts_enough(patient, job, users, hosts)
            yield from _supply(patient, job, slots)


def _active(patient: Patient, connection: Connection) -> tuple[int, int]:
    since = patient.now - ACTIVE_HOST_S
    query = sa.select(sa.func.count(sa.distinct(host.c.userid)), sa.func.count()).where(
        host.c.userid != 0, host.c.rpc_time > since
    )
    users, hosts = connection.execute(query).one()
    return int(users), int(hosts)


def _hosts_enough(patient: Patient, job: JobRow, users: int, hosts: int) -> Iterator[Finding]:
    quorum, config = job.config.workunit.min_quorum, patient.config
    seen = f"{counted(hosts, 'computer')} of {counted(users, 'user')} asked for work in the last 7 days"
    there = {"user": users, "computer": hosts}
    # A second copy of a task is refused to them, even if their first one failed.
    once = {"user": config.one_result_per_user_per_wu, "computer": config.one_result_per_host_per_wu}
    voter = "computer" if _hosts_vote(patient) else "user"
    needed = [kind for kind in there if once[kind] or kind == voter]
    if hosts == 0:
        yield warning(f"{job.name} runs, but no volunteer has asked for work in the last 7 days", "attach clients")
        return
    for kind in needed:
        if there[kind] < quorum:
            lab = ", or let hosts count (gt_validator --votes host) if all computers are yours"
            yield error(
                f"{job.name} needs {quorum} {kind}s for one task (min_quorum), but {seen}",
                f"attach a further {kind}{lab if kind == voter == 'user' else ''}",
            )
            return
    for kind in needed:
        if once[kind] and there[kind] == quorum:
            element = f"<one_result_per_{kind.replace('computer', 'host')}_per_wu>"
            yield warning(
                f"{job.name} needs {quorum} {kind}s for one task (min_quorum), and {seen}: none is sent a second copy"
                f" ({element}), so one that fails can never be replaced",
                f"attach at least one {kind} more than min_quorum",
            )
            return


def _hosts_vote(patient: Patient) -> bool:
    """Whether the validator counts computers instead of users (`--votes host`)."""
    if patient.standard:
        return any(each.votes == "host" for each in patient.daemons if each.program == "gt_validator")
    return not patient.config.one_result_per_user_per_wu  # as `serve --votes host` makes its project


def _slots(patient: Patient, connection: Connection, running: list[JobRow]) -> float:
    """Our apps' share of the feeder's slots."""
    text = patient.config.elements.get("shmem_work_items", "")
    slots = int(text) if text.isdigit() and int(text) else FEEDER_SLOTS
    weights = connection.execute(sa.select(app.c.id, app.c.weight).where(app.c.deprecated == 0)).all()
    ours = {job.appid for job in running}
    total = sum(float(weight) for _, weight in weights)
    return slots * sum(float(weight) for i, weight in weights if int(i) in ours) / total if total > 0 else 0.0


def _supply(patient: Patient, job: JobRow, slots: float) -> Iterator[Finding]:
    tasks = job.config.train.microtasks_per_version * job.config.workunit.target_nresults
    if patient.standard and tasks > slots:
        yield warning(
            f"a version of {job.name} has {tasks} tasks, but our share of the feeder is {slots:.0f} slots",
            f"<shmem_work_items>{2 * tasks}</shmem_work_items> in config.xml (restart the feeder), feeder -allapps",
        )


def check_queue(patient: Patient, connection: Connection) -> Iterator[Finding]:
    """Work that waits for a daemon of BOINC's or ours, templates that are gone, tasks that fail."""
    for name in patient.apps:
        appid = connection.execute(sa.select(app.c.id).where(app.c.name == name)).scalar()
        if appid is None:
            continue
        oldest = connection.execute(
            sa.select(sa.func.min(workunit.c.transition_time)).where(workunit.c.appid == appid)
        ).scalar()
        if oldest is not None and patient.now - int(oldest) > BACKLOG_S:
            yield error(
                f"workunits of {name} have waited for the transitioner for {age(patient.now - int(oldest))}",
                "see transitioner.log, then run bin/start" if patient.standard else "see the server's log",
            )
        yield from _templates(patient, connection, int(appid))
        yield from _failures(connection, name, int(appid))


def _templates(patient: Patient, connection: Connection, appid: int) -> Iterator[Finding]:
    query = (
        sa.select(workunit.c.result_template_file)
        .where(workunit.c.appid == appid, workunit.c.assimilate_state == 0)
        .distinct()
    )
    for path in connection.execute(query).scalars():
        if not (patient.folder / str(path)).is_file():
            yield error(
                f"{path} is missing and workunits need it, so BOINC's transitioner ends for the whole project",
                "restore the file",
            )


def _failures(connection: Connection, name: str, appid: int) -> Iterator[Finding]:
    """How the newest finished results ended."""
    query = (
        sa.select(result.c.outcome, result.c.validate_state, result.c.exit_status)
        .where(result.c.appid == appid, result.c.server_state == int(ServerState.OVER))
        .order_by(result.c.id.desc())
        .limit(RECENT_RESULTS)
    )
    ended = [(int(o), int(v), int(e)) for o, v, e in connection.execute(query) if int(o) != int(Outcome.DIDNT_NEED)]
    failed = [exit_status for outcome, _, exit_status in ended if outcome == int(Outcome.CLIENT_ERROR)]
    invalid = sum(
        1
        for outcome, state, _ in ended
        if outcome == int(Outcome.VALIDATE_ERROR)
        or (outcome, state) == (int(Outcome.SUCCESS), int(ValidateState.INVALID))
    )
    if len(failed) > MANY_FAILURES * len(ended):
        status, number = Counter(failed).most_common(1)[0]
        yield warning(
            f"{len(failed)} of the last {len(ended)} tasks of {name} failed, {number} with exit status {status}",
            "boinc-train status shows what they wrote; docs/volunteer.md lists the codes",
        )
    if invalid > MANY_FAILURES * len(ended):
        yield warning(
            f"{invalid} of the last {len(ended)} tasks of {name} were invalid",
            "look for a broken host in boinc-train status; the validator's log says how they differ",
        )
