"""Draws that nobody can foresee and that come out the same each time: which copies get an audit, a replay.

    u = first 53 bits of HMAC-SHA256(secret, purpose / workunit name / result id), as a number in [0, 1)

The secret is derived from the project's upload key, which stays on the server. The draw is looked at after the upload;
a volunteer who knew it could lie where nobody looks. The same draw after a crash keeps a verdict from being
thrown again until it fits.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Protocol

from boinc_project.project_tree import ProjectTree

_BITS = 53


class NoSecret(Exception):
    """The project's upload key cannot be read; the message is one sentence that says what to do."""


@dataclass(frozen=True)
class Lottery:
    """Draws with one secret."""

    secret: bytes

    def drawn(self, rate: float, purpose: str, workunit_name: str, result_id: int = 0) -> bool:
        """Whether this one is drawn; happens for a share `rate` of all names."""
        message = f"{purpose}/{workunit_name}/{result_id}".encode()
        digest = hmac.new(self.secret, message, hashlib.sha256).digest()
        return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / (1 << _BITS) < rate


class Draws(Protocol):
    """Where draws come from."""

    def drawn(self, rate: float, purpose: str, workunit_name: str, result_id: int = 0) -> bool:
        """As Lottery.drawn. Raises NoSecret."""


@dataclass
class ProjectDraws:
    """The project's draws, whose secret is read with the first of them: whoever needs none does without it."""

    tree: ProjectTree
    lottery: Lottery | None = None

    def drawn(self, rate: float, purpose: str, workunit_name: str, result_id: int = 0) -> bool:
        if self.lottery is None:
            self.lottery = project_lottery(self.tree)
        return self.lottery.drawn(rate, purpose, workunit_name, result_id)


def project_lottery(tree: ProjectTree) -> Lottery:
    """The project's draws. Raises NoSecret."""
    path = tree.config.key_dir / "upload_private"
    try:
        key = tree.upload_private()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).removeprefix(f"{path}: ")
        raise NoSecret(
            f"the secret of audits and spot checks comes from {path}, which the"
            f" validator cannot read ({why}); workunits that need a draw wait, all others are judged: put the key"
            " back, or let the user that runs the daemons read it"
        ) from error
    return Lottery(hashlib.sha256(b"boinc-train lottery/" + key.text().encode()).digest())
