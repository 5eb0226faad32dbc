"""Processes of an embedded project: what their logs say."""

from __future__ import annotations

from pathlib import Path

from boinc_project.processes import LOG_DIRECTORY, gravest_words

LOG = """2026-11-30 05:32:39.5498 UTC [PID=41] Starting; project /x
2026-11-30 05:32:40.0000 UTC [PID=41] [warning] the database does not answer; trying again in 2 s
{critical}
Traceback (most recent call last):
2026-11-30 05:40:00.0000 UTC [PID=41] [warning] something newer and milder
"""
CRITICAL = "2026-11-30 05:32:41.0000 UTC [PID=41] [CRITICAL] the disk is almost full"


def write(folder: Path, name: str, text: str) -> None:
    (folder / LOG_DIRECTORY).mkdir(exist_ok=True)
    (folder / LOG_DIRECTORY / f"{name}.log").write_text(text)


def test_the_newest_critical_line_of_any_daemon_is_told_before_newer_warnings(tmp_path: Path) -> None:
    write(tmp_path, "validator", LOG.format(critical=""))
    assert gravest_words(tmp_path) == "validator: something newer and milder"
    write(tmp_path, "work_generator", LOG.format(critical=CRITICAL))
    assert gravest_words(tmp_path) == "work_generator: the disk is almost full"


def test_quiet_logs_or_none_say_nothing(tmp_path: Path) -> None:
    assert gravest_words(tmp_path) == ""
    write(tmp_path, "server", "no log line of a daemon\n" + "2026-11-30 05:32:39.5498 UTC [PID=41] all is well\n")
    assert gravest_words(tmp_path) == ""
