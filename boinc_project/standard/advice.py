"""Settings of the whole project that our training wants, recommended with the line to add and never changed by us."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from boinc_project.config import ProjectConfig
from boinc_project.standard.steps import Daemon

READ_ONLY = 0o444
NEXT_RPC_DELAY_S = 300


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A setting: `line` is to be put into config.xml, `why` is what it is good for."""

    line: str
    why: str
    overwritable: bool = False


def advice(config: ProjectConfig, daemons: Sequence[Daemon], active_apps: int) -> list[Advice]:
    """What this project lacks, the most important first."""
    found = []
    if not config.one_result_per_user_per_wu:
        found.append(
            Advice(
                line="<one_result_per_user_per_wu>1</one_result_per_user_per_wu>",
                why="nobody is sent both copies of a task; copies of one user never count as two votes of ours",
            )
        )
    if not config.one_result_per_host_per_wu:
        found.append(
            Advice(
                line="<one_result_per_host_per_wu>1</one_result_per_host_per_wu>",
                why="no computer is sent both copies of a task",
            )
        )
    if not config.fuh_set_completed_permission or config.fuh_set_completed_permission & 0o222:
        found.append(
            Advice(
                line="<fuh_set_completed_permission>0444</fuh_set_completed_permission>",
                why="the upload handler cannot write into a completed file again, after it was validated, say",
                overwritable=True,
            )
        )
    if not config.next_rpc_delay:
        found.append(
            Advice(
                line=f"<next_rpc_delay>{NEXT_RPC_DELAY_S}</next_rpc_delay>",
                why="clients that got no work ask again soon, instead of after up to hours; costs every app's requests",
            )
        )
    feeders = [each for each in daemons if each.program == "feeder"]
    if active_apps > 1 and not any(re.search(r"(?:^|\s)--?allapps(?:\s|$)", each.cmd) for each in feeders):
        cmd = feeders[0].cmd if feeders else "feeder -d 3"
        found.append(
            Advice(
                line=f"<cmd>{cmd} -allapps</cmd>",
                why="an app with many tasks does not keep the others' out of the feeder's slots",
            )
        )
    return found
