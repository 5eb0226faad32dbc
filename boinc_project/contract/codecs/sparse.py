"""What codecs that send a share of the values have in common: which share, and how the chosen values are coded."""

from __future__ import annotations

from dataclasses import dataclass, field

from boinc_project.contract.codecs.dense import Dense
from boinc_project.contract.codecs.method import Method, in_range


@dataclass(frozen=True)
class Sparse(Method):
    """share   of a tensor's values (its chunks', its tiles') that travel, at least one
    values  the codec of those"""

    share: float = 1 / 64
    values: Method = field(default_factory=Dense)

    def __post_init__(self) -> None:
        in_range(self.kind, "share", self.share, 1e-6, 1.0)
