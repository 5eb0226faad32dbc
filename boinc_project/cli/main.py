"""The command group, and how a user's mistakes are told from our own."""

from __future__ import annotations

import errno
import sys
from typing import Any

import click
from sqlalchemy.exc import DBAPIError

from boinc_project import __version__
from boinc_project.cli.calibrate import calibrate
from boinc_project.cli.demo import demo
from boinc_project.cli.errors import user_mistakes
from boinc_project.cli.jobs import job, weights
from boinc_project.cli.local import export, run
from boinc_project.cli.project import build_app, serve
from boinc_project.cli.simulate import simulate
from boinc_project.cli.standard import doctor, install, uninstall
from boinc_project.cli.status import status
from boinc_project.cli.trust import trust
from boinc_project.cli.tune import tune

# With a file name in them these are about a path that the user gave or a folder the user changed.
PATH_ERRORS = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)

#: What a disk answers that is full, or that may not be written to.
STORAGE_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class Group(click.Group):
    """Turns exceptions that mean "the user must change something" into one sentence and exit status 2; a disk or
    database that fails gives one sentence and status 1."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except user_mistakes() as error:
            text = " ".join(str(error).split())
            print(f"boinc-train: {text}", file=sys.stderr)
            ctx.exit(2)
        except PATH_ERRORS as error:
            if error.filename is None:
                raise
            print(f"boinc-train: {error.filename}: {error.strerror}; check the path", file=sys.stderr)
            ctx.exit(2)
        except OSError as error:
            if error.errno not in STORAGE_FAULTS:
                raise
            place = error.filename2 or error.filename or "the disk"
            print(f"boinc-train: {place}: {error.strerror}; make room there and try again", file=sys.stderr)
            ctx.exit(1)
        except DBAPIError as error:
            text = " ".join(str(error.orig).split())
            print(f"boinc-train: the database cannot be used ({text}); see that it runs and has room", file=sys.stderr)
            ctx.exit(1)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="boinc-train")
def main() -> None:
    """Train PyTorch models on volunteers' computers through a BOINC project."""


for command in (
    demo, serve, install, uninstall, doctor, build_app, job, status, trust, weights, export, run, calibrate, simulate,
    tune,
):  # fmt: skip
    main.add_command(command)
