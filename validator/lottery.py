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

from boinc_project.project_tree import ProjectTree

_BITS = 53


@dataclass(frozen=True)
class Lottery:
    """Draws with one secret."""

    secret: bytes

    def drawn(self, rate: float, purpose: str, workunit_name: str, result_id: int = 0) -> bool:
        """Whether this one is drawn; happens for a share `rate` of all names."""
        message = f"{purpose}/{workunit_name}/{result_id}".encode()
        digest = hmac.new(self.secret, message, hashlib.sha256).digest()
        return (int.from_bytes(digest[:8], "big") >> (64 - _BITS)) / (1 << _BITS) < rate


def project_lottery(tree: ProjectTree) -> Lottery:
    """The project's draws. OSError or KeyFormatError if its upload key cannot be read."""
    key = tree.upload_private()
    return Lottery(hashlib.sha256(b"boinc-train lottery/" + key.text().encode()).digest())
