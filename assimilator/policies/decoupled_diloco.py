"""Decoupled DiLoCo: at least K learners, a grace window for more, and their norms and directions merged apart.

https://arxiv.org/abs/2604.21428. A version is made as soon as K contributions are there and grace_s seconds have passed
since the K-th; all that are there by then take part. With w_i = tokens_i (tokens_i / steps_i), and for every tensor t
    norm_t = sum_i w_i |delta_i,t| / sum_i w_i
    u_t    = sum_i w_i delta_i,t / |delta_i,t|
    delta_t = norm_t u_t / |u_t|                    (embeddings: the plain mean by w_i)
then DiLoCo's outer Nesterov step. A learner whose updates are large in the whole has no more say in the direction.
Learners whose tensor is zero count in the norm and have no direction; if no direction is left delta_t is zero.
Adapted: learners are stateless volunteers; fragments are not synchronised apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from assimilator.aggregation import Folded, MeanBuffers
from assimilator.contributions import (
    Contribution,
    NothingToFold,
    WeightedSum,
    in_order,
    loaded,
    parameters_in,
)
from assimilator.policies.policy import NewVersion, OuterStep, Policy, Round, outer_step
from boinc_project.contract.graph import Graph
from boinc_project.contract.update import OpenUpdate
from boinc_project.job_config import JobConfig


@dataclass(frozen=True)
class DecoupledDiLoCo:
    """The merge of norms and directions before an outer step."""

    outer: OuterStep

    def advance(self, round: Round) -> NewVersion:
        return self.outer.take(round, merge(round.contributions, embeddings_of(round.graph())))


def learner_weight(contribution: Contribution) -> float:
    """tokens (tokens / steps), by the reliability of its host; samples stand for tokens."""
    return contribution.share * contribution.age_weight * contribution.samples / max(contribution.steps, 1)


def merge(contributions: Sequence[Contribution], embeddings: frozenset[str]) -> Folded:
    """The merged pseudo-gradient of a version. Raises NothingToFold."""
    used = [each for each in in_order(contributions) if learner_weight(each) > 0]
    if not used:
        raise NothingToFold(f"{len(contributions)} contributions without weight")
    total = sum(learner_weight(each) for each in used)
    norms: dict[str, float] = {}
    directions, buffers = WeightedSum(), MeanBuffers()
    for contribution, update in loaded(used):
        weight = learner_weight(contribution) / total
        for parameter, name in parameters_in(update).items():
            length = 1.0 if parameter in embeddings else norm(update, name)
            norms[parameter] = norms.get(parameter, 0.0) + weight * length
            directions.add(parameter, update, name, weight / length if length > 0 else 0.0)
        buffers.add(update, weight)
    gradient = {}
    for parameter, direction in directions.take_exact():
        length = math.sqrt(float(np.sum(np.square(direction))))
        factor = 1.0 if parameter in embeddings else norms[parameter] / length if length > 0 else 0.0
        gradient[parameter] = (direction * factor).astype(np.float32)
    return Folded(gradient, buffers.take(), sum(each.samples for each in used))


def norm(update: OpenUpdate, name: str) -> float:
    """Euclidean norm of a tensor, in float64."""
    return math.sqrt(sum(float(np.sum(np.square(v, dtype=np.float64))) for _, v in update.pieces(name)))


def embeddings_of(graph: Graph) -> frozenset[str]:
    """Parameters from which the graph takes rows by index."""
    names = {number: each.name for number, each in enumerate(graph.inputs)}
    first = {node.inputs[0] for node in graph.nodes if node.op == "embedding"}
    return frozenset(names[v].partition("/")[2] for v in first if v in names and names[v].startswith("parameter/"))


def decoupled_diloco(config: JobConfig) -> Policy:
    """The policy for a job."""
    return DecoupledDiLoCo(outer_step(config))
