"""Adaptive replication: whether one copy may stand alone (BOINC's idea, sched/sched_send.cpp, decided after upload).

BOINC decides when it sends: a host is trusted with a chance of 1 - 1/n after n valid results in a row, so that a host
that behaves long enough is hardly ever looked at. Here the workunit goes out as one copy, and the verdict over what
came back decides whether a second one is made:

    not trusted (reliability below 0.95, or a bad result among the last ten)    a second copy
    looks copied, or its norm is far from what the job's updates have          a second copy
    of a group of hosts that drifts (validator/drift.py)                       a second copy
    drawn by the secret with chance max(audit_floor, 1 - reliability)          a second copy: an audit
    else                                                                       it stands alone

A copy that stood alone adds nothing to its host's reliability. The second copy is asked for by raising min_quorum and
target_nresults in the workunit's row, where a restart does not forget it. An app with BOINC's own adaptive replication
(app.target_nresults above 1) has raised both before we look; then the quorum decides as always.
"""

from __future__ import annotations

from validator.lottery import Draws
from validator.voters import Witness

#: A norm so many times larger than the median of the latest ones is looked at twice ...
STRANGE_NORM = 10.0

#: ... and one so many times smaller: gradients of single batches become small near the end of a training, and a small
#: update moves little.
LEAST_NORM = 1e-3


def why_not_alone(
    witness: Witness,
    draws: Draws,
    audit_floor: float,
    workunit_name: str,
    result_id: int,
    suspicion: str,
    drifting: frozenset[str] = frozenset(),
) -> str:
    """Why a copy needs a second one beside it; '' if it may stand alone."""
    if not witness.trusted:
        return f"its host is not trusted (reliability {witness.reliability:.2f})"
    if witness.newcomer:
        return "its user or host is a newcomer"
    if suspicion:
        return suspicion
    if suspect := sorted(witness.groups & drifting):
        return f"{suspect[0]} drifts"
    if draws.drawn(max(audit_floor, 1.0 - witness.reliability), "audit", workunit_name, result_id):
        return "it is drawn for an audit"
    return ""
