"""Weight of a contribution by its age s: the versions that were made since the one it was computed from.

    constant     1
    polynomial   (1 + s)^-a                                  a = 0.5 is the weight of FedBuff
    hinge        1 for s <= b, else 1 / (1 + c (s - b))
Xie et al. 2019, FedAsync, https://arxiv.org/abs/1903.03934, section 5.2 (its hinge: a = 10, b = 4);
Nguyen et al. 2022, FedBuff, https://arxiv.org/abs/2106.06639, section 5: 1 / sqrt(1 + s).
"""

from __future__ import annotations

from boinc_project.job_config import AggregationSection


def age_weight(section: AggregationSection, age: int) -> float:
    """The factor for an age of 0 or more versions; 1 for age 0."""
    if section.age_weight == "constant":
        return 1.0
    if section.age_weight == "polynomial":
        return float((1.0 + age) ** -section.age_exponent)
    return 1.0 / (1.0 + section.age_slope * max(0, age - section.age_hinge))
