"""What every daemon of a BOINC project does: options, log lines, stopping, sleeping between passes.

Follows sched/sched_util.cpp, lib/msg_log.cpp and the option loops of sched/validator.cpp and
sched/assimilator.cpp: options with one or two dashes, UTC log lines on stderr with a level, the trigger
file `stop_daemons` and SIGHUP (SIGTERM and SIGINT alike) as the ways to stop, exit 0 when stopped and 1
when the configuration is wrong. Descriptors inherited from bin/start (its lock) are left alone.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

from boinc_project import __version__
from boinc_project.clock import now

PARENT_VARIABLE = "BOINC_TRAIN_PARENT"
EXIT_CONFIGURATION = 1  # BOINC's daemons use 1 for bad options, configuration and database
DEFAULT_DEBUG_LEVEL = 3
FIRST_RETRY_S = 2.0
LAST_RETRY_S = 300.0
WORKUNIT_RETRY_S = 60.0
PARK_AFTER = 3  # unexpected exceptions for one workunit; then it is left alone until the daemon restarts

# BOINC's levels: messages at or below the debug level are written.
_LEVELS = {1: logging.CRITICAL, 2: logging.WARNING, 3: logging.INFO, 4: logging.DEBUG}
_KINDS = {
    logging.CRITICAL: "[CRITICAL]",
    logging.ERROR: "[CRITICAL]",
    logging.WARNING: "[warning]",
    logging.INFO: "",
    logging.DEBUG: "[debug]",
}


class UsageError(Exception):
    """The command line or the project's configuration is wrong; the message says what to do."""


class StopRequested(Exception):
    """Someone asked the daemon to stop (signal or the file stop_daemons)."""


class RetryLater(Exception):
    """Something is away (database, storage); the pass is repeated after a growing pause."""


@dataclass(frozen=True)
class Options:
    """The command line of a daemon.

    mod        (n, r): handle only ids with id % n == r
    wu_id      handle only this workunit; min_wu_id and max_wu_id bound the ids likewise
    limit      end after so many workunits (`--one_pass_N_WU`)
    sleep_interval   seconds between passes that found nothing to do
    own        values of the program's own options by name; a flag that was given has the value "1"
    """

    app: str = "gradient"
    debug_level: int = DEFAULT_DEBUG_LEVEL
    one_pass: bool = False
    dry_run: bool = False
    mod: tuple[int, int] | None = None
    sleep_interval: float = 5.0
    wu_id: int | None = None
    min_wu_id: int = 0
    max_wu_id: int | None = None
    limit: int | None = None
    own: Mapping[str, str] = field(default_factory=dict)

    def takes(self, identifier: int) -> bool:
        """Whether this instance handles the row with this id."""
        if self.wu_id is not None and identifier != self.wu_id:
            return False
        if identifier < self.min_wu_id or (self.max_wu_id is not None and identifier > self.max_wu_id):
            return False
        return self.takes_job(identifier)

    def takes_job(self, identifier: int) -> bool:
        """Whether this instance handles the job with this id (`--wu_id` is no matter here)."""
        return self.mod is None or identifier % self.mod[0] == self.mod[1]


def parse_options(
    arguments: Sequence[str],
    *,
    program: str,
    about: str,
    default_sleep: float,
    own: Mapping[str, str] | None = None,
    flags: Mapping[str, str] | None = None,
) -> Options:
    """Read BOINC-style options. `own` maps the program's further value options to their help text, `flags`
    those without a value.

    Prints usage and exits 0 for -h/--help, the version for -v/--version; raises UsageError otherwise.
    """
    values: dict[str, str] = {}
    found = Options(sleep_interval=default_sleep)
    changes: dict[str, object] = {}
    rest = list(arguments)

    def take(option: str, what: str) -> str:
        if not rest:
            raise UsageError(f"{program}: option {option} needs {what}")
        return rest.pop(0)

    while rest:
        option = rest.pop(0)
        name = option.lstrip("-") if option.startswith("-") else ""
        if name in ("h", "help"):
            print(usage(program, about, default_sleep, own or {}, flags or {}))
            raise SystemExit(0)
        if name in ("v", "version"):
            print(f"{program} (boinc-train) {__version__}")
            raise SystemExit(0)
        if name in ("d", "debug_level"):
            changes["debug_level"] = _whole(take(option, "a level from 1 to 4"), option, program, 0)
        elif name == "app":
            changes["app"] = take(option, "an application name")
        elif name == "one_pass":
            changes["one_pass"] = True
        elif name in ("dry_run", "dont_update_db"):  # the second is what BOINC's assimilator calls it
            changes["dry_run"] = True
        elif name == "one_pass_N_WU":
            changes["one_pass"], changes["limit"] = True, _whole(take(option, "a number"), option, program, 1)
        elif name == "sleep_interval":
            changes["sleep_interval"] = _seconds(take(option, "seconds"), option, program)
        elif name == "wu_id":
            changes["wu_id"] = _whole(take(option, "a workunit id"), option, program, 1)
        elif name in ("min_wu_id", "max_wu_id"):
            changes[name] = _whole(take(option, "a workunit id"), option, program, 1)
        elif name == "mod":
            divisor = _whole(take(option, "two numbers"), option, program, 1)
            remainder = _whole(take(option, "two numbers"), option, program, 0)
            if remainder >= divisor:
                raise UsageError(f"{program}: --mod {divisor} {remainder}: the remainder must be below {divisor}")
            changes["mod"] = (divisor, remainder)
        elif own and name in own:
            values[name] = take(option, "a value")
        elif flags and name in flags:
            values[name] = "1"
        else:
            raise UsageError(f"{program}: unknown option {option}; see {program} --help")
    return replace(found, own=values, **changes)  # type: ignore[arg-type]


def usage(program: str, about: str, default_sleep: float, own: Mapping[str, str], flags: Mapping[str, str]) -> str:
    """The text of --help."""
    lines = [
        f"Usage: {program} [options]",
        "",
        about,
        "",
        "Options (one or two dashes):",
        "  --app NAME            application to handle (default: gradient)",
        "  -d N, --debug_level N log level: 1 critical, 2 warnings, 3 normal (default), 4 debug",
        "  --one_pass            handle what is there, then exit",
        "  --mod N R             handle only rows whose id modulo N is R",
        f"  --sleep_interval S    seconds between passes (default: {default_sleep:g})",
        "  --wu_id ID            handle only this workunit",
        "  --min_wu_id ID        handle no workunit below this id; --max_wu_id ID: none above",
        "  --one_pass_N_WU N     handle N workunits at most, then exit",
        "  --dry_run             say what would be done, change nothing (also --dont_update_db)",
    ]
    lines += [f"  --{name} VALUE".ljust(24) + text for name, text in own.items()]
    lines += [f"  --{name}".ljust(24) + text for name, text in flags.items()]
    return "\n".join([*lines, "  -h, --help            this text", "  -v, --version         version"])


def _whole(text: str, option: str, program: str, low: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = low - 1
    if number < low:
        raise UsageError(f"{program}: option {option} needs a whole number of at least {low}, not {text!r}")
    return number


def _seconds(text: str, option: str, program: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 < number < 1e6:
        raise UsageError(f"{program}: option {option} needs a positive number of seconds, not {text!r}")
    return number


class _BoincFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.1234 UTC [PID=77] [CRITICAL] text`, as lib/msg_log.cpp writes it."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(record.created))
        kind = _KINDS.get(record.levelno, "")
        text = record.getMessage()
        if record.exc_info:
            text += "\n" + self.formatException(record.exc_info)
        parts = [f"{stamp}.{int(record.created % 1 * 10_000):04d} UTC", f"[PID={record.process}]", kind, text]
        return " ".join(part for part in parts if part)


def set_up_log(debug_level: int) -> None:
    """Send the log to stderr in BOINC's form."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_BoincFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS.get(max(1, min(debug_level, 4)), logging.INFO))
    if debug_level < 4:
        logging.getLogger("sqlalchemy").setLevel(logging.WARNING)
        # It cannot roll back on a connection that was lost, and says so at length; that it was lost we say ourselves.
        logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)


def orphaned() -> bool:
    """Whether the starter that wrote its process id into our environment is gone.

    `boinc-train serve` does that, so that its children do not outlive it, however it ends. Under BOINC's own
    bin/start the variable is not set and daemons belong to nobody.
    """
    parent = os.environ.get(PARENT_VARIABLE, "")
    return parent.isdigit() and int(parent) != os.getppid()


class Stopper:
    """Knows whether the daemon should stop: a signal came, PROJECT/stop_daemons exists, or its starter is gone."""

    def __init__(self, project_dir: Path) -> None:
        self._file = project_dir / "stop_daemons"
        self._signalled = False

    def install(self) -> None:
        """Catch SIGHUP, SIGTERM and SIGINT (bin/start turns signals into SIGTERM when a shell stands between)."""
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def check(self) -> None:
        """Raise StopRequested if it is time to stop; call it between workunits."""
        if self._signalled or self._file.exists() or orphaned():
            raise StopRequested

    def sleep(self, seconds: float) -> None:
        """Sleep in pieces of at most a second, checking between them (daemon_sleep of sched_util.cpp)."""
        end = time.monotonic() + seconds
        self.check()
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
            self.check()


class Patience:
    """Which workunits a daemon leaves alone: for a while, or until it is started again."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self._clock = clock
        self.not_before: dict[int, float] = {}  # by workunit id
        self.failures: dict[int, int] = {}  # unexpected exceptions by workunit id

    def allows(self, identifier: int) -> bool:
        return self.not_before.get(identifier, 0.0) <= self._clock()

    def later(self, identifier: int) -> None:
        self.not_before[identifier] = self._clock() + WORKUNIT_RETRY_S

    def leave(self, identifier: int) -> None:
        self.not_before[identifier] = float("inf")

    def failed(self, identifier: int, what: str, *arguments: object) -> None:
        """Log an unexpected fault, from within its handler; the workunit is tried a few times and then left alone."""
        count = self.failures[identifier] = self.failures.get(identifier, 0) + 1
        if count < PARK_AFTER:
            self.later(identifier)
        else:
            self.leave(identifier)
            what += "; it is parked"
        logging.getLogger("daemon").critical(what, *arguments, exc_info=True)


def run_passes(options: Options, stopper: Stopper, one_pass: Callable[[], bool]) -> int:
    """Call `one_pass` until asked to stop; it returns whether it found work. Returns the exit status.

    RetryLater leads to the next pass after a pause that doubles from 2 s to 5 min.
    """
    log = logging.getLogger("daemon")
    pause = FIRST_RETRY_S
    try:
        while True:
            stopper.check()
            try:
                worked = one_pass()
                pause = FIRST_RETRY_S
            except RetryLater as error:
                if options.one_pass:
                    log.critical("%s", error)
                    return EXIT_CONFIGURATION
                log.warning("%s; trying again in %.0f s", error, pause)
                stopper.sleep(pause)
                pause = min(2 * pause, LAST_RETRY_S)
                continue
            if options.one_pass:
                return 0
            if not worked:
                stopper.sleep(options.sleep_interval)
    except StopRequested:
        log.info("Stopping as asked")
        return 0
