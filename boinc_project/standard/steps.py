"""What installing changes: from what is there to what should be there, as a list of small steps.

Pure: `plan` looks at a Snapshot and returns Steps; nothing is read or written here. A step whose result is
there already is not planned, so that installing twice changes nothing and an interrupted one is finished by
the next. The daemons come last: everything that they need is there when bin/start sees them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from boinc_project import templates
from boinc_project.contract.microtask import GRAPH_FILE, MICROTASK_FILE, STATE_FILE, UPDATE_FILE, shard_file
from boinc_project.standard import editing, plan_classes
from boinc_project.standard.editing import Element
from boinc_project.standard.record import Change, InstallError

DAEMONS = ("gt_work_generator", "gt_validator", "gt_assimilator")
DEFAULT_APP = "gradient"
JOBS_IN_PROGRESS = 2  # per processor: one that runs and one that waits
OUTPUT_LIMIT_BYTES = 1 << 30

CONFIG, AUX, PROJECT, SPEC = "config.xml", "config_aux.xml", "project.xml", "plan_class_spec.xml"
_SKELETONS = {AUX: "<config>\n</config>\n", PROJECT: "<boinc>\n</boinc>\n", SPEC: "<plan_classes>\n</plan_classes>\n"}
_ROOTS = {CONFIG: "boinc", AUX: "config", PROJECT: "boinc", SPEC: "plan_classes"}


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What to install. `programs` maps each daemon to the program that the link in bin/ points to; `size_classes` of
    the app are for jobs with speed_classes (size_steps.py), 0: as they are."""

    app: str
    title: str
    programs: Mapping[str, Path]
    size_classes: int = 0


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """What is there. Files by path relative to the project, None for an absent one."""

    files: Mapping[str, bytes | None]
    links: Mapping[str, str | None]  # name in bin/ -> target; None: absent
    app_row: Mapping[str, Any] | None
    tables_missing: Sequence[str]
    columns_missing: Sequence[str] = ()  # `table.column` of our tables that are there


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing to do: `title` for people, the lines that come in, and how it is undone.

    A step about a file says what the file is to hold afterwards (`after`).
    """

    title: str
    changes: tuple[Change, ...]
    lines: tuple[str, ...] = ()
    after: bytes | None = None


@dataclass(frozen=True)
class Daemon:
    """One `<daemon>` or `<task>` of config.xml, with the names that bin/start uses for it."""

    element: Element
    cmd: str
    program: str
    app: str
    votes: str  # `--votes` of the validator, '' if it is not given
    mod: tuple[int, int] | None  # `--mod`
    output: str
    pid_file: str
    lock_file: str
    host: str
    disabled: bool


def title_in_database(title: str) -> str:
    """The title as the `app` row holds it: BOINC's scheduler and web pages send it as it is, so it is escaped there."""
    return escape(title, {"'": "&apos;"})


def template_paths(app: str) -> tuple[str, str]:
    """Our input and output template, relative to the project."""
    return f"templates/{app}_in", f"templates/{app}_out"


def files_looked_at(app: str) -> tuple[str, ...]:
    """Every file whose contents a plan depends on."""
    return (CONFIG, AUX, PROJECT, SPEC, *template_paths(app), f"size_census_{app}")


def plan(there: Snapshot, wanted: Wanted) -> list[Step]:
    """The steps that are still to be done, in order. Raises InstallError where something is in the way."""
    return [
        *_tables(there),
        *_app_row(there, wanted),
        *_templates(there, wanted),
        *_plan_classes(there),
        *_job_limit(there, wanted),
        *_project_xml(there, wanted),
        *_links(there, wanted),
        *_daemons(there, wanted),
    ]


def _tables(there: Snapshot) -> Iterator[Step]:
    if there.tables_missing:
        names = ", ".join(there.tables_missing)
        yield Step(
            title=f"database: create the tables {names}",
            changes=tuple(Change(kind="tables", path=name) for name in there.tables_missing),
        )
    if there.columns_missing:
        tables = dict.fromkeys(name.partition(".")[0] for name in there.columns_missing)
        yield Step(
            title=f"database: add the columns {', '.join(there.columns_missing)}",
            changes=tuple(Change(kind="tables", path=name) for name in tables),
        )


def _app_row(there: Snapshot, wanted: Wanted) -> Iterator[Step]:
    row = there.app_row
    if row is None:
        change = Change(kind="app", path=wanted.app, app=wanted.app)
        yield Step(title=f"database: add the app {wanted.app}, {wanted.title!r}", changes=(change,))
    elif row["deprecated"]:
        change = Change(kind="app", path=wanted.app, app=wanted.app, before=str(row["deprecated"]))
        yield Step(title=f"database: make the app {wanted.app} active again (deprecated = 0)", changes=(change,))


def _templates(there: Snapshot, wanted: Wanted) -> Iterator[Step]:
    inputs = [
        templates.InputReference(open_name=MICROTASK_FILE, no_delete=True),
        *(
            templates.InputReference(open_name=name, sticky=name != STATE_FILE, no_delete=True)
            for name in (GRAPH_FILE, STATE_FILE, shard_file(0))
        ),
    ]
    outputs = [templates.OutputReference(open_name=UPDATE_FILE, max_nbytes=OUTPUT_LIMIT_BYTES)]
    contents = (templates.input_template(inputs), templates.output_template(outputs))
    for path, content in zip(template_paths(wanted.app), contents, strict=True):
        if there.files[path] is None:
            change = Change(kind="create", path=path, app=wanted.app, content=content)
            yield Step(title=f"{path}: create", changes=(change,), after=content.encode())


def _plan_classes(there: Snapshot) -> Iterator[Step]:
    data = there.files[SPEC]
    for plan_class in plan_classes.CLASSES:
        text = editing.read(data or b"")
        root = editing.parse(text).find("plan_classes")
        known = {editing.text_of(text, each.find("name")) for each in (root.all("plan_class") if root else ())}
        if plan_class.name not in known:
            title = f"the plan class {plan_class.name}, {plan_class.about}"
            step = insertion(SPEC, data, ("plan_classes",), plan_class.lines(), title)
            data = step.after
            yield step


def _job_limit(there: Snapshot, wanted: Wanted) -> Iterator[Step]:
    data = there.files[AUX]
    text = editing.read(data or b"")
    limits = editing.parse(text).find("config", "max_jobs_in_progress")
    if limits and wanted.app in {editing.text_of(text, each.find("app_name")) for each in limits.all("app")}:
        return
    jobs = [f"        <jobs>{JOBS_IN_PROGRESS}</jobs>", "        <per_proc/>"]
    lines = [
        "<app>",
        f"    <app_name>{wanted.app}</app_name>",
        *("    <cpu_limit>", *jobs, "    </cpu_limit>"),
        *("    <gpu_limit>", *jobs, "    </gpu_limit>"),
        "</app>",
    ]
    title = f"at most {JOBS_IN_PROGRESS} tasks of {wanted.app} in progress for each processor and GPU"
    yield insertion(AUX, data, ("config", "max_jobs_in_progress"), lines, title, app=wanted.app)


def _project_xml(there: Snapshot, wanted: Wanted) -> Iterator[Step]:
    data = there.files[PROJECT]
    text = editing.read(data or b"")
    root = editing.parse(text).find("boinc")
    if root and wanted.app in {editing.text_of(text, each.find("name")) for each in root.all("app")}:
        return
    row = there.app_row
    # What bin/xadd compares with: the row's own title where there is one.
    title = title_in_database(wanted.title) if row is None else str(row["user_friendly_name"])
    lines = [
        "<app>",
        f"    <name>{wanted.app}</name>",
        f"    <user_friendly_name>{editing.quoted(title)}</user_friendly_name>",
        "</app>",
    ]
    yield insertion(PROJECT, data, ("boinc",), lines, f"the app {wanted.app}, as bin/xadd reads it", app=wanted.app)


def _links(there: Snapshot, wanted: Wanted) -> Iterator[Step]:
    for name, program in wanted.programs.items():
        target = there.links[name]
        if target != str(program):
            instead = f" instead of {target}" if target else ""
            change = Change(kind="link", path=f"bin/{name}", content=str(program), before=target or "")
            yield Step(title=f"bin/{name}: link to {program}{instead}", changes=(change,))


def _daemons(there: Snapshot, wanted: Wanted) -> Iterator[Step]:
    data = there.files[CONFIG]
    assert data is not None
    for program in DAEMONS:
        text = editing.read(data)
        found = daemons(text)
        if any(each.program == program and each.app == wanted.app for each in found):
            continue
        base = f"{program}_{wanted.app}"
        names = {f"{base}.log", f"{base}.pid", f"{base}.lock"}
        for each in found:
            taken = names & {each.output, each.pid_file, each.lock_file}
            if taken:
                raise InstallError(
                    f"{CONFIG}: the daemon {each.cmd!r} already uses the name {min(taken)}; give it another one"
                )
        lines = [
            "<daemon>",
            f"    <cmd>{program} -d 3 --app {wanted.app}</cmd>",
            f"    <output>{base}.log</output>",
            f"    <pid_file>{base}.pid</pid_file>",
            f"    <lock_file>{base}.lock</lock_file>",
            "</daemon>",
        ]
        step = insertion(CONFIG, data, ("boinc", "daemons"), lines, f"the daemon {program}", app=wanted.app)
        assert step.after is not None
        data = step.after
        yield step


def insertion(path: str, data: bytes | None, place: Sequence[str], lines: list[str], what: str, app: str = "") -> Step:
    """The step that adds an element inside `place` (created where it is missing) of a file (created likewise)."""
    changes: list[Change] = []
    if data is None or not data.strip():
        skeleton = _SKELETONS[path]
        changes.append(Change(kind="create", path=path, content=skeleton))
        text = skeleton
    else:
        text = editing.read(data)
    if editing.parse(text).find(place[0]) is None:
        raise InstallError(f"{path} has no <{place[0]}> element; mend it first (BOINC cannot read it either)")
    for depth in range(1, len(place)):
        root = editing.parse(text)
        if root.find(*place[: depth + 1]) is None:
            parent = root.find(*place[:depth])
            assert parent is not None
            name = place[depth]
            text, pieces = editing.insert_child(text, parent, [f"<{name}>", f"</{name}>"])
            changes += [Change(kind="edit", path=path, piece=replace(piece, wraps=True)) for piece in pieces]
    parent = editing.parse(text).find(*place)
    assert parent is not None
    text, pieces = editing.insert_child(text, parent, lines)
    changes += [Change(kind="edit", path=path, app="" if piece.wraps else app, piece=piece) for piece in pieces]
    return Step(title=f"{path}: add {what}", changes=tuple(changes), lines=tuple(lines), after=editing.as_bytes(text))


# What config.xml says about daemons; also for doctor.


def daemons(text: str) -> list[Daemon]:
    """Every `<daemon>` and `<task>` of a config.xml."""
    root = editing.parse(text).find("boinc")
    found: list[Daemon] = []
    for group, tag in (("daemons", "daemon"), ("tasks", "task")):
        for holder in root.all(group) if root else ():
            found += [_daemon(text, each, tag == "task") for each in holder.all(tag)]
    return found


def _daemon(text: str, element: Element, is_task: bool) -> Daemon:
    """Names follow `sched/start`: from the first word of the command, the second for `run_in_ops`."""
    cmd = editing.text_of(text, element.find("cmd"))
    try:
        words = shlex.split(cmd)
    except ValueError:
        words = cmd.split()
    if words[:1] == ["run_in_ops"]:
        words = words[1:]
    base = words[0].rpartition("/")[2] if words else ""

    def value(name: str) -> str:
        return editing.text_of(text, element.find(name))

    given = value("output")
    disabled = element.find("disabled")
    return Daemon(
        element=element,
        cmd=cmd,
        program=base,
        app=app_named(words),
        votes=next(iter(option_of(words, "votes")), ""),
        mod=_share(option_of(words, "mod", 2)),
        output=given or f"{base}.{'out' if is_task else 'log'}",
        pid_file="" if is_task else value("pid_file") or f"{base}.pid",
        lock_file=value("lock_file")
        or (f"{given}.lock" if given and not given.startswith("/dev/") else f"{base}.lock"),
        host=value("host"),
        # As bin/start has it: <disabled/> has no text and counts for nothing there.
        disabled=disabled is not None and value("disabled") not in ("", "0"),
    )


def identity(text: str, element: Element) -> tuple[str, ...]:
    """What makes an entry of ours the same one after an admin has tuned it: program and app, or its name."""
    if element.name in ("daemon", "task"):
        daemon = _daemon(text, element, element.name == "task")
        return (element.name, daemon.program, daemon.app)
    names = (editing.text_of(text, element.find(name)) for name in ("name", "app_name"))
    return (element.name, next((name for name in names if name), ""))


def _share(values: Sequence[str]) -> tuple[int, int] | None:
    """The two numbers of `--mod`; None without them, or where the daemon would refuse them."""
    if len(values) == 2 and all(value.isdecimal() for value in values):
        return int(values[0]), int(values[1])
    return None


def app_named(words: Sequence[str]) -> str:
    """The app that a command line of one of our daemons, or of BOINC's size_regulator, is for."""
    return next(iter(option_of(words, "app") or option_of(words, "app_name")), DEFAULT_APP)


def option_of(words: Sequence[str], name: str, values: int = 1) -> Sequence[str]:
    """The values of an option, written with one or two dashes; the last counts, as in the daemons."""
    places = [place for place, word in enumerate(words) if re.fullmatch(rf"--?{name}", word)]
    return words[places[-1] + 1 : places[-1] + 1 + values] if places else ()
