"""How far a host's results of one kind of work can be relied on: a number from 0 to 1 from its rows in gt_trust.

    reliability = lower end of the one-sided 95 % interval of its share of good results
                = (p + z^2/2n - z sqrt(p (1 - p) / n + z^2/4n^2)) / (1 + z^2/n),    p = good / n,  n = good + bad

(Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953, z = 1.645.) It stands for the lower quantile of the Beta
posterior, which has no closed form, and is near it: without a bad result it is n / (n + 2.7). Only evidence counts: a
result is good that was valid beside a copy of somebody else or beside the server's own; what was accepted alone adds
nothing, so that trust cannot grow by itself. Evidence fades: every count halves in 30 days.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Z = 1.645
HALF_LIFE_S = 30 * 86400.0

#: The columns of gt_trust that fade.
EVIDENCE = ("good", "bad", "unlike")

#: A host may be believed alone from this reliability on (52 good results, none bad). With less evidence audits would be
#: due more often than one time in twenty, and one copy would save little.
TRUSTED = 0.95
#: ... and after so many good ones in a row, twice as many for each bad result, and for each that differed a little from
#: the others, as far as these have not faded. Hardware differs, and that costs nobody a vote; but a host that lies
#: until it is audited, behaves for as long as it must and lies again would else be believed most of the time.
TRUSTED_AFTER = 10

#: From so many bad results on a host may have no vote.
DISTRUSTED_AFTER = 3


def kind_of(mode: str, graph_sha256: str) -> str:
    """gt_trust.kind of a microtask: what was computed."""
    return f"{mode}:{graph_sha256[:16]}"


def faded(count: float, since: float, now: float) -> float:
    """What is left of a count after that time; a clock that was set back changes nothing."""
    return count * math.exp2(-max(0.0, now - since) / HALF_LIFE_S)


def lower_bound(good: float, bad: float) -> float:
    """The lower end of Wilson's interval; 0 without evidence."""
    n = good + bad
    if n <= 0:
        return 0.0
    share = good / n
    spread = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n))
    return min(1.0, max(0.0, (share + Z * Z / (2 * n) - spread) / (1 + Z * Z / n)))


def reliability(row: Mapping[str, Any] | None, now: float) -> float:
    """Of a row of gt_trust; 0 for a host that has none."""
    if row is None:
        return 0.0
    since = float(row["judge_time"])
    return lower_bound(faded(float(row["good"]), since, now), faded(float(row["bad"]), since, now))


def is_trusted(row: Mapping[str, Any] | None, now: float) -> bool:
    """Whether one copy of this host may be enough. A bad or differing result ends it for more good ones each time."""
    if row is None:
        return False
    against = faded(float(row["bad"]) + float(row["unlike"]), float(row["judge_time"]), now)
    streak = TRUSTED_AFTER * math.exp2(min(against, 64.0))
    return int(row["consecutive_valid"]) >= streak and reliability(row, now) >= TRUSTED


def is_distrusted(row: Mapping[str, Any] | None, now: float) -> bool:
    """Whether this host's copies confirm nobody: more bad results than good ones, and at least DISTRUSTED_AFTER bad;
    or the server itself has refuted one, and it has not had TRUSTED_AFTER good ones in a row since. Good results give
    it its vote back."""
    if row is None:
        return False
    if row["failed_check"] and int(row["consecutive_valid"]) < TRUSTED_AFTER:
        return True
    bad = faded(float(row["bad"]), float(row["judge_time"]), now)
    return bad >= DISTRUSTED_AFTER and bad > faded(float(row["good"]), float(row["judge_time"]), now)


def member_weight(row: Mapping[str, Any] | None, now: float) -> float:
    """Weight of a validated contribution by its host: half for one nobody knows, up to 1 for a proven one."""
    return (1.0 + reliability(row, now)) / 2.0
