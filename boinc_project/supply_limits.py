"""Limits that the work generator and the assimilator must read alike."""

from __future__ import annotations

MAX_ATTEMPTS = 3
"""Workunits for one slot of a round; when so many have failed, its samples are skipped and reported."""
