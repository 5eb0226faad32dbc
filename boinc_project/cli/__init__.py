"""The `boinc-train` command: the composition root, the one place that may import every other folder.

Each module here holds some of the commands. A user's mistake (a wrong file, option or state) is one sentence
on stderr and exit status 2; anything else is our bug and shows a traceback.
"""

from boinc_project.cli.main import main

__all__ = ["main"]
