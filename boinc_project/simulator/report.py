"""What came of a simulation: each version with what had been spent by then, and what was accepted, by the truth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from boinc_project import database
from boinc_project.gt_tables import Disposition, gt_ledger, gt_version
from boinc_project.simulator.simulation import Simulation
from boinc_project.states import ServerState, ValidateState

#: What the figures mean; printed with them.
DEFINITIONS = """\
goodput: unique applied host-seconds / (host-seconds available / replication). Applied are, for each workunit whose
  update is part of a version, the mean compute seconds of its valid copies; available is the time for which each
  processor of a host was on, until the last version; replication is the quorum, so that further copies are waste.
accepted: workunits with a canonical result. accepted bad: those whose canonical result is a liar's, by the truth.
copies per accepted: copies that were sent, of all workunits, for each accepted one.
bytes: input files and updates of all copies, by what each client has on its disk already; the application itself is
  not counted, the scheduler's messages are counted apart, by their usual size."""


@dataclass(frozen=True)
class VersionReport:
    """A version and what all hosts together had spent when it became current; sums from the beginning."""

    version: int
    when_s: float
    loss: float | None  # of the training samples, on the version before
    evaluation: Mapping[str, float]
    contributions: int
    samples: int
    bytes_down: int
    bytes_up: int
    bytes_messages: int
    available_s: float
    used_s: float


@dataclass(frozen=True)
class Report:
    """The figures of a simulation; see DEFINITIONS."""

    job: str
    state: str
    note: str
    hosts: int
    versions: tuple[VersionReport, ...]
    quorum: int
    applied_s: float
    applied_samples: int
    sent: int
    accepted: int
    accepted_bad: int
    digests: tuple[str, ...]  # of the versions' states

    @property
    def last(self) -> VersionReport:
        return self.versions[-1]

    @property
    def goodput(self) -> float:
        available = self.last.available_s / self.quorum
        return self.applied_s / available if available else 0.0

    @property
    def copies_per_accepted(self) -> float:
        return self.sent / self.accepted if self.accepted else 0.0

    @property
    def accepted_bad_rate(self) -> float:
        return self.accepted_bad / self.accepted if self.accepted else 0.0

    def losses(self) -> list[tuple[int, float]]:
        """(version, training loss of its round), for versions that have one."""
        return [(each.version, each.loss) for each in self.versions if each.loss is not None]

    def to_document(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("goodput", "copies_per_accepted", "accepted_bad_rate")}
        return {**asdict(self), **figures}

    def text(self) -> str:
        """Some lines for a terminal."""
        last = self.last
        lines = [
            f"{self.job}: {self.state}{f' ({self.note})' if self.note else ''}, version {last.version} after"
            f" {last.when_s / 3600:.2f} virtual hours on {self.hosts} hosts",
            f"loss {_shown(last.loss)}; held out: {_metrics(self.versions)}",
            f"goodput {self.goodput:.3f}: {self.applied_s:.0f} host-seconds applied once, {last.available_s:.0f}"
            f" available, {last.used_s:.0f} computed, quorum {self.quorum}",
            f"{self.accepted} workunits accepted, {self.copies_per_accepted:.3f} copies sent for each,"
            f" {self.accepted_bad} accepted bad ({100 * self.accepted_bad_rate:.2f} %)",
            f"{last.bytes_down / 1e6:.2f} MB down, {last.bytes_up / 1e6:.2f} MB up,"
            f" {last.bytes_messages / 1e6:.2f} MB of scheduler messages",
        ]
        return "\n".join(lines)


def report_of(simulation: Simulation) -> Report:
    """Read what came of a simulation, while its project is there."""
    project = simulation.project
    job = project.job
    rows = {int(row["version"]): row for row in project.rows(gt_version) if row["job_id"] == project.job_id}
    versions = tuple(_version(simulation, rows[moment.version], number) for number, moment in
                     enumerate(simulation.moments) if moment.version in rows)  # fmt: skip
    units = project.rows(database.workunit, "id", "name", "canonical_resultid")
    results = project.rows(database.result, "id", "name", "workunitid", "server_state", "sent_time", "validate_state")
    accepted = {int(unit["canonical_resultid"]) for unit in units if unit["canonical_resultid"]}
    names = {int(row["id"]): str(row["name"]) for row in results}
    bad = sum(1 for identifier in accepted if simulation.answers[names[identifier]].lied)
    valid: dict[int, list[float]] = {}
    for row in results:
        if row["server_state"] == ServerState.OVER and row["validate_state"] == ValidateState.VALID:
            valid.setdefault(int(row["workunitid"]), []).append(simulation.answers[str(row["name"])].seconds)
    unit_ids = {str(unit["name"]): int(unit["id"]) for unit in units}
    applied = [row for row in project.rows(gt_ledger) if row["disposition"] == Disposition.APPLIED]
    seconds = [valid[unit_ids[str(row["workunit_name"])]] for row in applied]
    return Report(
        job=job.name,
        state=str(job.state),
        note=job.note,
        hosts=len(simulation.clients),
        versions=versions,
        quorum=job.config.workunit.min_quorum,
        applied_s=sum(sum(each) / len(each) for each in seconds),
        applied_samples=sum(int(row["samples"]) for row in applied),
        sent=sum(1 for row in results if row["sent_time"]),
        accepted=len(accepted),
        accepted_bad=bad,
        digests=tuple(str(rows[version]["state_sha256"]) for version in sorted(rows)),
    )


def _version(simulation: Simulation, row: Mapping[str, Any], number: int) -> VersionReport:
    moment = simulation.moments[number]
    return VersionReport(
        version=moment.version,
        when_s=moment.when,
        loss=row["loss"],
        evaluation=json.loads(row["evaluation"]) if row["evaluation"] else {},
        contributions=int(row["contributions"]),
        samples=int(row["samples"]),
        bytes_down=moment.bytes_down,
        bytes_up=moment.bytes_up,
        bytes_messages=moment.bytes_messages,
        available_s=moment.seconds_on,
        used_s=moment.seconds_used,
    )


def _metrics(versions: Sequence[VersionReport]) -> str:
    found = next((each for each in reversed(versions) if each.evaluation), None)
    if found is None:
        return "never evaluated"
    listed = ", ".join(f"{name} {value:.4g}" for name, value in sorted(found.evaluation.items()))
    return f"{listed} (version {found.version})"


def _shown(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.5g}"


def draw(reports: Mapping[str, Report], path: Path) -> None:
    """Loss by virtual time and by bytes, one curve for each named report, as a PNG of 1200 x 500 pixels."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2)
    for label, report in reports.items():
        trained = [each for each in report.versions if each.loss is not None]
        losses = [each.loss for each in trained]
        left.plot([each.when_s / 3600 for each in trained], losses, "o-", markersize=3, label=label)
        moved = [(each.bytes_down + each.bytes_up + each.bytes_messages) / 1e6 for each in trained]
        right.plot(moved, losses, "o-", markersize=3, label=label)
    left.set(xlabel="virtual hours", ylabel="training loss", title="loss by time")
    right.set(xlabel="MB moved, both directions, all copies", ylabel="training loss", title="loss by bytes")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if len(reports) > 1:
            axes.legend()
    figure.savefig(path)
