"""What all daemons share: BOINC's options, log lines, stopping, retries."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from boinc_project import daemon
from boinc_project.daemon import Options, RetryLater, Stopper, StopRequested, UsageError, parse_options, run_passes
from boinc_project.daemon_start import heartbeat_name
from tests.tiny_project import TinyProject, tiny_project, volunteer_environment


def parse(*arguments: str) -> Options:
    return parse_options(arguments, program="gt_test", about="Tests.", default_sleep=5, own={"votes": "who votes"})


@pytest.mark.parametrize("dashes", ["-", "--"])
def test_options_take_one_or_two_dashes(dashes: str) -> None:
    given = ["app", "x", "d", "4", "one_pass", "dry_run", "mod", "3", "2", "sleep_interval", "0.5", "wu_id", "7"]
    words = {"app", "d", "one_pass", "dry_run", "mod", "sleep_interval", "wu_id"}
    found = parse(*(dashes + word if word in words else word for word in given), f"{dashes}votes", "host")
    assert found == Options(
        app="x", debug_level=4, one_pass=True, dry_run=True, mod=(3, 2), sleep_interval=0.5, wu_id=7,
        own={"votes": "host"},
    )  # fmt: skip
    assert parse(f"{dashes}debug_level", "2").debug_level == 2


@pytest.mark.parametrize("dashes", ["-", "--"])
def test_boincs_own_names_for_bounds_and_dry_runs_are_taken(dashes: str) -> None:
    found = parse(f"{dashes}one_pass_N_WU", "10", f"{dashes}min_wu_id", "3", f"{dashes}max_wu_id", "5")
    assert (found.one_pass, found.limit, found.min_wu_id, found.max_wu_id) == (True, 10, 3, 5)
    assert [identifier for identifier in range(1, 9) if found.takes(identifier)] == [3, 4, 5]
    assert parse(f"{dashes}dont_update_db").dry_run
    assert parse_options(
        [f"{dashes}fast"], program="gt_test", about="Tests.", default_sleep=5, flags={"fast": "no value"}
    ).own == {"fast": "1"}


@pytest.mark.parametrize(
    "options, name",
    [
        (Options(), "validator"),
        (Options(mod=(2, 1)), "validator gradient 1/2"),
        (Options(app="other"), "validator other"),
        (Options(app="other", mod=(3, 0)), "validator other 0/3"),
    ],
)
def test_instances_of_a_daemon_have_heartbeats_of_their_own(options: Options, name: str) -> None:
    assert heartbeat_name("validator", options) == name


def test_defaults_are_those_of_boinc() -> None:
    assert parse() == Options(app="gradient", debug_level=3, one_pass=False, mod=None, sleep_interval=5, own={})


@pytest.mark.parametrize(
    "arguments",
    [
        ["--mod", "0", "0"],
        ["--mod", "2", "2"],
        ["--mod", "2", "-1"],
        ["--mod", "2"],
        ["--mod", "two", "0"],
        ["--nonsense"],
        ["nonsense"],
        ["-"],
        ["--d"],
        ["--d", "high"],
        ["--sleep_interval", "0"],
        ["--sleep_interval", "nan"],
        ["--wu_id", "0"],
        ["--votes"],
    ],
)
def test_wrong_options_are_usage_errors_that_name_the_option(arguments: list[str]) -> None:
    with pytest.raises(UsageError, match=re.escape(arguments[0])):
        parse(*arguments)


@pytest.mark.parametrize("option", ["-h", "--help", "-v", "--version"])
def test_help_and_version_end_with_status_0(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(option)
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "gt_test" in shown and ("version" in option or option == "-v" or "--votes" in shown)


def test_the_remainder_0_is_a_remainder_like_any_other() -> None:
    zero, one = Options(mod=(2, 0)), Options(mod=(2, 1))
    assert [i for i in range(1, 101) if zero.takes(i)] == list(range(2, 101, 2))
    assert [i for i in range(1, 101) if one.takes(i)] == list(range(1, 101, 2))
    assert Options(mod=(2, 0), wu_id=4).takes(4) and not Options(mod=(2, 0), wu_id=4).takes(6)
    assert Options(wu_id=4).takes_job(6)


def test_log_lines_have_boinc_s_form(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        daemon.set_up_log(3)
        log = logging.getLogger("test")
        log.debug("unseen")
        log.info("normal")
        log.warning("odd")
        log.critical("bad")
        # What its pool says of a connection that was lost needs nobody: [CRITICAL] lines do.
        logging.getLogger("sqlalchemy.pool.impl.QueuePool").error("Exception during reset or similar")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    lines = capsys.readouterr().err.splitlines()
    stamp = rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{4}} UTC \[PID={os.getpid()}\] "
    expected = ["normal", r"\[warning\] odd", r"\[CRITICAL\] bad"]
    assert len(lines) == 3
    for line, text in zip(lines, expected, strict=True):
        assert re.fullmatch(stamp + text, line), line


def test_the_stop_file_ends_the_loop_with_status_0(tmp_path: Path) -> None:
    passes = []

    def one_pass() -> bool:
        passes.append(1)
        if len(passes) == 3:
            (tmp_path / "stop_daemons").touch()
        return True

    assert run_passes(Options(), Stopper(tmp_path), one_pass) == 0
    assert len(passes) == 3


def test_a_sleeping_daemon_sees_the_stop_file_within_about_a_second(tmp_path: Path) -> None:
    threading.Timer(0.2, (tmp_path / "stop_daemons").touch).start()
    with pytest.raises(StopRequested):
        Stopper(tmp_path).sleep(3600)


def test_one_pass_is_one_pass_and_a_retry_in_it_is_status_1(tmp_path: Path) -> None:
    passes = []
    assert run_passes(Options(one_pass=True), Stopper(tmp_path), lambda: bool(passes.append(1)) or True) == 0
    assert len(passes) == 1

    def away() -> bool:
        raise RetryLater("the database is away")

    assert run_passes(Options(one_pass=True), Stopper(tmp_path), away) == 1


def test_retries_wait_twice_as_long_each_time_up_to_five_minutes_and_start_afresh_after_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    outcomes = ["away"] * 9 + ["fine", "away", "stop"]

    def one_pass() -> bool:
        outcome = outcomes.pop(0)
        if outcome == "away":
            raise RetryLater("the database is away")
        if outcome == "stop":
            raise StopRequested
        return True

    monkeypatch.setattr(Stopper, "sleep", lambda self, seconds: pauses.append(seconds))
    assert run_passes(Options(), Stopper(tmp_path), one_pass) == 0
    assert pauses == [2, 4, 8, 16, 32, 64, 128, 256, 300, 2]


@pytest.fixture
def project() -> Iterator[TinyProject]:
    with tiny_project() as made:
        yield made


def start(project: TinyProject, module: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=project.tree.project_dir,
        env=volunteer_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_a_daemon_with_status_0(project: TinyProject, number: int) -> None:
    process = start(project, "validator", "-sleep_interval", "100")
    assert process.stderr is not None
    assert "Starting" in process.stderr.readline()
    time.sleep(0.3)
    process.send_signal(number)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "Stopping as asked" in text


@pytest.mark.parametrize("module", ["validator", "assimilator", "work_generator"])
def test_each_daemon_does_one_pass_and_refuses_wrong_options_with_status_1(project: TinyProject, module: str) -> None:
    once, wrong = start(project, module, "--one_pass"), start(project, module, "--mod", "2", "2")
    if module == "work_generator":  # it waits until the transitioner has made the results
        while once.poll() is None:
            project.transitioner.run_once()
            time.sleep(0.1)
    assert once.communicate(timeout=60)[1].count("Starting") == 1
    assert once.returncode == 0
    text = wrong.communicate(timeout=60)[1]
    assert (wrong.returncode, text.count("\n")) == (1, 1)
    assert "the remainder must be below 2" in text


def test_outside_of_a_project_a_daemon_says_what_to_do(tmp_path: Path) -> None:
    environment: dict[str, Any] = {k: v for k, v in volunteer_environment().items() if k != "BOINC_PROJECT_DIR"}
    done = subprocess.run(
        [sys.executable, "-m", "validator", "--one_pass"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1 and "set BOINC_PROJECT_DIR" in done.stderr
