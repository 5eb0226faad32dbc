"""Doctor's checks of files, directories, keys, configuration and processes; they read and change nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from lxml import etree

from boinc_project import signing
from boinc_project.standard import editing, steps
from boinc_project.standard.findings import Finding, Patient, age, error, listed, note, warning
from boinc_project.standard.running import lock_holder, may_be, pid_files

LEAST_FREE_BYTES = 200e6  # below this uploads and versions fail soon
LOW_FREE_BYTES = 2e9
REREAD_PATIENCE_S = 600.0  # the feeder looks for reread_db every few seconds
_BOINC_DAEMONS = {
    "feeder": "no work reaches the scheduler",
    "transitioner": "workunits get no results",
    "file_deleter": "uploads are never removed",
}


def check_triggers(patient: Patient) -> Iterator[Finding]:
    """Trigger files that stop the project."""
    remedy = "bin/start removes it" if patient.standard else "remove it"
    effects = (
        ("stop_daemons", "so no daemon runs"),
        ("stop_sched", "so clients are told that the project is down"),
        ("stop_upload", "so uploads are refused"),
    )
    for name, effect in effects:
        if (patient.folder / name).exists():
            yield error(f"{patient.folder / name} exists, {effect}", remedy if name != "stop_upload" else "remove it")
    reread = patient.folder / "reread_db"
    if patient.standard and reread.exists() and patient.now - reread.stat().st_mtime > REREAD_PATIENCE_S:
        since = age(patient.now - reread.stat().st_mtime)
        yield error(f"reread_db has been there for {since}, so no feeder is running", "run bin/start; see feeder.log")


def check_directories(patient: Patient) -> Iterator[Finding]:
    """Directories that daemons write in or read from, and room in them."""
    config = patient.config
    places = {
        "the project directory": patient.folder,
        "<download_dir>": config.download_dir,
        "<upload_dir>": config.upload_dir,
        "the templates": patient.folder / "templates",
        "the apps": patient.folder / "apps",
    }
    if patient.standard:
        places[f"log_{patient.host}"] = patient.folder / f"log_{patient.host}"
    full: dict[int, tuple[float, list[str]]] = {}
    for what, path in places.items():
        if not path.is_dir():
            if what.startswith("log_"):
                continue  # bin/start makes it
            yield error(f"{what}, {path}, does not exist", "create it, or correct config.xml")
        elif not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            yield error(f"{what}, {path}, cannot be read and written by this user", "correct its owner or mode")
        else:
            free = float(shutil.disk_usage(path).free)
            full.setdefault(path.stat().st_dev, (free, []))[1].append(str(path))
    for free, paths in full.values():
        text = f"{free / 1e6:.0f} MB are free on the disk of {listed(paths, 3)}"
        if free < LEAST_FREE_BYTES:
            yield error(text, "make room: uploads and new versions fail")
        elif free < LOW_FREE_BYTES:
            yield warning(text, "make room, or lower keep_versions in [supply] of the jobs")


def check_keys(patient: Patient) -> Iterator[Finding]:
    """The four key files: there, readable, pairs, and private ones private."""
    folder = patient.config.key_dir
    for name, private_needed in (("code_sign", False), ("upload", True)):
        private, public = folder / f"{name}_private", folder / f"{name}_public"
        if not public.is_file():
            yield error(f"the key {public} is missing", "restore it; a new one is not believed by clients")
            continue
        if not private.is_file():
            if private_needed:
                yield error(f"the key {private} is missing, without which the transitioner ends", "restore it")
            else:
                yield note(f"{private} is not here", "good; sign app versions where you keep it")
            continue
        if private.stat().st_mode & 0o007:
            yield warning(f"everybody on this machine can read {private}", f"chmod o-rwx {private}")
        try:
            if signing.read_private_key(private).public != signing.read_public_key(public):
                yield error(f"{private} and {public} are no pair", "restore the pair")
        except OSError as problem:
            yield error(f"{problem.filename} cannot be read ({problem.strerror})", "correct its owner or mode")
        except ValueError as problem:
            yield error(f"a key of {name} cannot be read ({problem})", f"restore {private} and {public}")


def check_config(patient: Patient) -> Iterator[Finding]:
    """Values of config.xml that stop a standard project's daemons or clients."""
    config = patient.config
    named = config.elements.get("host", "")
    if patient.standard and named and named != patient.host:
        yield warning(
            f"<host> of config.xml is {named}, this machine is {patient.host}",
            f"run doctor on the other machine; if there is none, write {patient.host}: bin/start starts nothing here",
        )
    if config.dont_generate_upload_certificates != config.ignore_upload_certificates:
        yield error(
            "only one of <dont_generate_upload_certificates> and <ignore_upload_certificates> is set",
            "set both or none, or every upload is refused",
        )
    if patient.standard and config.upload_url and "file_upload_handler" not in config.upload_url:
        yield error("<upload_url> does not contain file_upload_handler", "clients find no upload URL then; correct it")
    if 0 < config.daily_result_quota < 20:
        yield warning(
            f"<daily_result_quota> is {config.daily_result_quota}: so few tasks a day and processor",
            "raise it to 500 (what make_project writes) unless tasks last hours",
        )


def check_programs(patient: Patient) -> Iterator[Finding]:
    """BOINC's programs and our links to the installed daemons."""
    for name in ("cgi", "file_upload_handler"):
        if not os.access(patient.folder / "cgi-bin" / name, os.X_OK):
            yield error(f"cgi-bin/{name} is missing or not executable", "run BOINC's tools/upgrade, or restore it")
    for name in steps.DAEMONS:
        path = patient.folder / "bin" / name
        if not path.is_symlink() and not path.exists():
            yield error(f"bin/{name} is missing", f"boinc-train install {patient.folder}")
        elif not os.access(path, os.X_OK):
            yield error(
                f"bin/{name} leads to {os.path.realpath(path)}, which is no program (any more)",
                f"run boinc-train install {patient.folder} from the environment that is to be used",
            )


def check_daemon_entries(patient: Patient) -> Iterator[Finding]:
    """`<daemons>`: BOINC's and ours are there, enabled, and do not share log, pid or lock."""
    entries = [each for each in patient.daemons if each.pid_file]
    for name, effect in _BOINC_DAEMONS.items():
        found = [each for each in entries if each.program == name]
        if not found:
            remedy = f"add <daemon><cmd>{name} -d 3</cmd></daemon> to config.xml"
            yield error(f"{name} is not in <daemons>: {effect}", remedy)
        elif all(each.disabled for each in found):
            yield error(f"{name} is disabled in config.xml: {effect}", "take <disabled> out and run bin/start")
    for app in patient.apps:
        for program in steps.DAEMONS:
            ours = [each for each in entries if each.program == program and each.app == app]
            if not ours:
                yield error(f"{program} for {app} is not in <daemons>", f"boinc-train install {patient.folder}")
            elif all(each.disabled for each in ours):
                yield error(f"{program} for {app} is disabled in config.xml", "take <disabled> out and run bin/start")
    for what in ("output", "pid_file", "lock_file"):
        counts = Counter(str(getattr(each, what)) for each in entries if not each.disabled)
        for value in sorted(value for value, number in counts.items() if number > 1):
            cmds = [each.cmd for each in entries if getattr(each, what) == value]
            yield error(
                f"the daemons {listed(cmds, 3)} share the {what} {value}, so only the first runs",
                "give each an <output>, <pid_file> and <lock_file> of its own",
            )


def check_processes(patient: Patient) -> Iterator[Finding]:
    """Pid and lock files of bin/start: who should run and does not."""
    found = {each.path.name: each for each in pid_files(patient.folder, patient.host)}
    here = [each for each in patient.daemons if each.pid_file and not each.disabled]
    for daemon in here:
        if (daemon.host or patient.config.elements.get("host") or patient.host) != patient.host:
            continue  # bin/start of that machine starts it
        pid_file = found.get(daemon.pid_file)
        lock = patient.folder / f"pid_{patient.host}" / daemon.lock_file
        holder = lock_holder(lock)
        if pid_file is None:
            if daemon.program in (*steps.DAEMONS, *_BOINC_DAEMONS):
                yield error(f"{daemon.cmd} was never started", "run bin/start")
        elif holder is None and not (pid_file.alive and may_be(pid_file.pid, daemon.program)):
            fate = "is another program now" if pid_file.alive else "is gone"
            yield error(
                f"{daemon.cmd} does not run: process {pid_file.pid} of {pid_file.path.name} {fate}",
                f"see the end of log_{patient.host}/{daemon.output}, then run bin/start",
            )
        elif not pid_file.alive:
            yield error(
                f"{lock} is held by process {holder}, but {pid_file.path.name} says {pid_file.pid}:"
                " bin/start thinks that it runs",
                f"end process {holder} and run bin/start",
            )
    known = {each.pid_file for each in patient.daemons}
    for name, each in found.items():
        if each.alive and name not in known:
            yield warning(
                f"process {each.pid} of {name} belongs to no daemon of config.xml", "end it, or remove the file"
            )


def check_cron(patient: Patient) -> Iterator[Finding]:
    """Whether cron restarts daemons that ended."""
    line = f"0,5,10,15,20,25,30,35,40,45,50,55 * * * * cd {patient.folder} ; bin/start --cron"
    texts = [_crontab(), *(_read(path) for path in Path("/etc").glob("cron.d/*")), _read(Path("/etc/crontab"))]
    lines = [each for text in texts for each in text.splitlines() if not each.lstrip().startswith("#")]
    if not any("start" in each and "cron" in each and str(patient.folder) in each for each in lines):
        yield warning("no cron entry of this user restarts daemons that end", f"add with crontab -e: {line}")


def _crontab() -> str:
    try:
        done = subprocess.run(["crontab", "-l"], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def check_boinc_files(patient: Patient) -> Iterator[Finding]:
    """config_aux.xml, which BOINC stops on, and our limit in it; our app in project.xml."""
    path = patient.folder / steps.AUX
    data = path.read_bytes() if path.exists() else b""
    if data.strip():
        try:
            etree.fromstring(data)
        except etree.XMLSyntaxError as problem:
            yield error(
                f"{steps.AUX} is not well-formed ({problem.msg}), and scheduler and daemons stop on it", "mend it"
            )
            return
    text = editing.read(data)
    limits = editing.parse(text).find("config", "max_jobs_in_progress")
    limited = {editing.text_of(text, each.find("app_name")) for each in (limits.all("app") if limits else ())}
    for app in patient.apps:
        if app not in limited:
            yield warning(
                f"{steps.AUX} has no limit for {app}: one host may take all tasks of a version",
                f"boinc-train install {patient.folder}",
            )
