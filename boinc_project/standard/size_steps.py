"""What BOINC needs for jobs with speed_classes: the app's size classes, their census, and who releases their results.

Pure, like steps.py: `plan` gives the steps. The order matters: BOINC's feeder ends for the whole project if an app has
size classes and no census of as many lines (sched/sched_shmem.cpp). The scheduler looks at them only with
<size_classes> in config.xml, and never together with <batch_accel> (sched/sched_config.cpp).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from boinc_project.standard import editing
from boinc_project.standard.record import Change, InstallError
from boinc_project.standard.steps import CONFIG, Daemon, Snapshot, Step, Wanted, daemons, insertion, option_of

#: Results of each class that size_regulator keeps UNSENT: it makes them up to HIGH when there are fewer than LOW.
LOW, HIGH = 15, 30
CENSUS = "run_in_ops ./size_census.php"


def plan(there: Snapshot, wanted: Wanted, before: Sequence[Step]) -> list[Step]:
    """The steps that are to be done after those of steps.plan. Raises InstallError where something is in the way."""
    if not wanted.size_classes:
        return []
    config = [step.after for step in before if step.after is not None and step.changes[0].path == CONFIG]
    return [*_census_and_row(there, wanted), *_config(config[-1] if config else there.files[CONFIG], wanted.app)]


def _census_and_row(there: Snapshot, wanted: Wanted) -> Iterator[Step]:
    census = f"size_census_{wanted.app}"
    if len((there.files[census] or b"").split()) < wanted.size_classes - 1:
        content = f"{0:e}\n" * (wanted.size_classes - 1)
        change = Change(kind="create", path=census, app=wanted.app, content=content)
        title = f"{census}: create, with all hosts in the fastest class until size_census.php has counted them"
        yield Step(title=title, changes=(change,), after=content.encode())
    row = there.app_row
    had = 0 if row is None else int(row["n_size_classes"])
    if had != wanted.size_classes:
        change = Change(
            kind="classes", path=wanted.app, app=wanted.app, content=str(wanted.size_classes), before=str(had)
        )
        title = f"database: give the app {wanted.app} {wanted.size_classes} size classes (n_size_classes)"
        yield Step(title=title, changes=(change,))


def _config(data: bytes | None, app: str) -> Iterator[Step]:
    """The steps about a config.xml that holds `data` by then."""
    text = editing.read(data or b"")
    config = editing.parse(text).find("boinc", "config")
    accelerated = None if config is None else config.find("batch_accel")
    if accelerated is not None and editing.text_of(text, accelerated) != "0":
        raise InstallError(f"{CONFIG} has <batch_accel>, which BOINC does not allow beside <size_classes>; take it out")
    if config is not None and config.find("size_classes") is None:
        line = ["<size_classes>1</size_classes>"]
        step = insertion(CONFIG, data, ("boinc", "config"), line, "the scheduler's size classes", app=app)
        data = step.after
        yield step
    found = daemons(editing.read(data or b""))
    if regulator(found, app) is None:
        base = f"size_regulator_{app}"
        options = f"--lo {LOW} --hi {HIGH} --sleep_time 5 --priority_order_create_time"
        lines = [
            "<daemon>",
            f"    <cmd>size_regulator --app_name {app} {options}</cmd>",
            f"    <output>{base}.log</output>",
            f"    <pid_file>{base}.pid</pid_file>",
            f"    <lock_file>{base}.lock</lock_file>",
            "</daemon>",
        ]
        step = insertion(CONFIG, data, ("boinc", "daemons"), lines, "BOINC's size_regulator", app=app)
        data = step.after
        yield step
    if census_task(found) is None:
        lines = [
            "<task>",
            f"    <cmd>{CENSUS}</cmd>",
            "    <period>1 hour</period>",
            "    <output>size_census.out</output>",
            "</task>",
        ]
        yield insertion(CONFIG, data, ("boinc", "tasks"), lines, "BOINC's size_census.php", app=app)


def regulator(found: Sequence[Daemon], app: str) -> Daemon | None:
    """The size_regulator of an app."""
    for each in found:
        if each.program == "size_regulator" and list(option_of(each.cmd.split(), "app_name")) == [app]:
            return each
    return None


def census_task(found: Sequence[Daemon]) -> Daemon | None:
    """The task that counts the hosts."""
    return next((each for each in found if re.search(r"\bsize_census\.php\b", each.cmd)), None)
