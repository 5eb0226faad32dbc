"""The `boinc-train` command: the composition root, the one place that may import every other folder.

Each module here holds some of the commands. A user's mistake (a wrong file, option or state) is one sentence
on stderr and exit status 2; anything else is our bug and shows a traceback.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Entry of the command. Ctrl-C while modules are still being imported ends it as quietly as later."""
    try:
        from boinc_project.cli.main import main as commands

        commands(prog_name="boinc-train")
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr)
        sys.exit(1)
