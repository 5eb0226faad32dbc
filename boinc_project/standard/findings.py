"""What doctor says: findings with a severity, a sentence and a remedy; and what its checks look at."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from boinc_project.config import ProjectConfig
from boinc_project.project_tree import ProjectTree
from boinc_project.standard.steps import Daemon


class Severity(IntEnum):
    """How bad a finding is."""

    ERROR = 1  # work stops, or credit or results are at risk
    WARNING = 2  # work goes on, worse than it could
    NOTE = 3  # for you to decide


@dataclass(frozen=True)
class Finding:
    """One line of doctor's report."""

    severity: Severity
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.severity.name.lower()}: {self.what}: {self.remedy}"


def error(what: str, remedy: str) -> Finding:
    return Finding(Severity.ERROR, what, remedy)


def warning(what: str, remedy: str) -> Finding:
    return Finding(Severity.WARNING, what, remedy)


def note(what: str, remedy: str) -> Finding:
    return Finding(Severity.NOTE, what, remedy)


@dataclass(frozen=True, kw_only=True)
class Patient:
    """The project that is examined. `apps`: the names of our apps in it; `host`: this machine as bin/start calls it."""

    tree: ProjectTree
    standard: bool
    apps: Sequence[str]
    daemons: Sequence[Daemon]
    host: str = field(default_factory=lambda: os.uname().nodename.partition(".")[0])
    now: float = field(default_factory=time.time)

    @property
    def config(self) -> ProjectConfig:
        return self.tree.config

    @property
    def folder(self) -> Path:
        return self.tree.project_dir


def listed(names: Sequence[str], limit: int = 6) -> str:
    """`a, b and 3 more`."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"


def counted(number: int, what: str) -> str:
    """`1 user`, `2 users`."""
    return f"{number} {what}{'' if number == 1 else 's'}"


def age(seconds: float) -> str:
    """A time that has passed, in words."""
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{max(0.0, seconds) / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"
