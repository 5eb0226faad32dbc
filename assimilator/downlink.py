"""Versions that volunteers get as deltas ([supply] keyframe_every): what is published, and what the server keeps.

The published version is what its keyframe and deltas decode to, and gradients are of that. The server's optimizer goes
on from weights of its own, in full precision, which are kept with the optimizer's state: each delta is taken from them,
so what one delta could not say is part of the next one, and rounding never adds up (error feedback, Seide et al. 2014,
https://www.microsoft.com/en-us/research/publication/1-bit-stochastic-gradient-descent/; in this direction
Gruntkowska et al. 2023, https://arxiv.org/abs/2209.15218). At a keyframe both are the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy.typing as npt

from assimilator.policies import NewVersion, Round
from boinc_project.contract.downlink import apply_delta, is_coded, make_delta
from boinc_project.job_config import JobConfig

Array = npt.NDArray[Any]

#: The server's own weights, where they are not the published ones, are kept with the optimizer's state.
OWN = "own/"


def with_own_weights(config: JobConfig, round: Round) -> Round:
    """The round over the server's own weights instead of the published ones."""
    if config.supply.keyframe_every == 1:
        return round

    def load() -> tuple[dict[str, Array], dict[str, Array]]:
        published, kept = round.load()
        own = {name[len(OWN) :]: array for name, array in kept.items() if name.startswith(OWN)}
        # What is loaded is written over, and the next delta is taken from what is published.
        state = {name: own[name] if name in own else array.copy() for name, array in published.items()}
        return state, {name: array for name, array in kept.items() if not name.startswith(OWN)}

    return dataclasses.replace(round, load=load)


def as_published(config: JobConfig, round: Round, made: NewVersion) -> NewVersion:
    """The new version as volunteers will have it; the exact one is kept beside it unless it is a keyframe."""
    if config.supply.is_keyframe(round.version + 1):
        return made
    base, _ = round.load()
    delta = make_delta(base, made.state)
    state = apply_delta(base, delta)
    own = {OWN + name: array for name, array in made.state.items() if is_coded(name, array.dtype.name)}
    return NewVersion(state, {**made.optimizer, **own}, made.samples, delta)
