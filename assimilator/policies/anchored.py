"""Anchored, adapted: FedBuff's step without the directions that a clean gradient of the server's own does not know.

After Anchored async (Pluralis, 2025), whose formula is not published: there a replica beside the fast loop gives clean
gradients that lag some steps behind, and directions of the noisy gradient that they support weakly are attenuated.
Here the server computes one now and then (assimilator/anchors.py), and the newest one that is finished corrects each
version. For every matrix G of the aggregate, with the anchor's A = U S V^T (thin: r = min(m, n) singular values s_i):

    C = U^T G V,    g_i = s_i^2 / (s_i^2 + lambda),    lambda = floor mean(s_i^2)
    G <- (1 - mu) G + mu U (sqrt(g_i g_j) C_ij) V^T

C_ij is what G does from direction v_j to u_i. It counts by the support of both, g_i for i = j, so that a matrix and
its transpose are treated alike; what lies outside the anchor's directions has the support of s = 0. The anchor's scale
does not matter. mu = 0 changes nothing, mu = 1 takes out all that has no support.
Tensors of more than two dimensions are matrices by their first one. Left as they are: vectors and matrices with one row
or column (a single direction would be all that is left), embeddings (a token that the anchor did not meet is no
lie), a matrix whose anchor is zero, everything while there is no anchor or only one that is too old.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np

from assimilator.aggregation import Folded
from assimilator.exact import product
from assimilator.policies.decoupled_diloco import embeddings_of
from assimilator.policies.policy import Array, NewVersion, OuterStep, Policy, Round, Tensors, outer_step
from boinc_project.contract.codecs.method import matrix_shape
from boinc_project.contract.graph import Graph
from boinc_project.job_config import JobConfig


@dataclass(frozen=True)
class Anchored:
    """An outer step after the attenuation; strength: mu, floor: lambda as a multiple of the mean s_i^2."""

    outer: OuterStep
    strength: float
    floor: float

    def advance(self, round: Round) -> NewVersion:
        if round.anchor is None or not self.strength:
            return self.outer.advance(round)
        anchor = round.anchor.load()

        def change(folded: Folded) -> Folded:
            corrected = {name: self.corrected(g, name, anchor) for name, g in folded.gradient.items()}
            return replace(folded, gradient=corrected)

        return self.outer.advance(round, change)

    def corrected(self, gradient: Array, name: str, anchor: Tensors) -> Array:
        """A parameter's gradient (float32) after the attenuation by an anchor that `factors` has made."""
        if f"values/{name}" not in anchor:
            return gradient
        left, values, right = (anchor[f"{part}/{name}"] for part in FACTORS)
        return attenuated(gradient, left, values, right, self.strength, self.floor)


FACTORS = ("left", "values", "right")


def attenuated(gradient: Array, left: Array, values: Array, right: Array, strength: float, floor: float) -> Array:
    """G as float32 of its shape; left U [m, r], values s [r], right V [n, r]."""
    g = gradient.reshape(matrix_shape(gradient.shape)).astype(np.float64)
    squares = values.astype(np.float64) ** 2
    root = np.sqrt(squares / (squares + floor * np.mean(squares)))
    inside = product(product(left.T, g), right) * np.outer(root, root)
    supported = product(product(left, inside), right.T)
    return ((1.0 - strength) * g + strength * supported).astype(np.float32).reshape(gradient.shape)


def factors(gradient: Mapping[str, Array], graph: Graph) -> dict[str, Array]:
    """What is kept of a gradient by parameter name: left/, values/, right/NAME (float32) of its matrices.

    The decomposition is kept and not the gradient, so that a replay on another computer, whose library may find other
    last bits, uses the very same one.
    """
    return _factors(gradient, embeddings_of(graph))


def _factors(gradient: Mapping[str, Array], embeddings: Collection[str]) -> dict[str, Array]:
    found: dict[str, Array] = {}
    for name, array in sorted(gradient.items()):
        if array.ndim < 2 or min(matrix_shape(array.shape)) < 2 or name in embeddings or not array.any():
            continue
        matrix = array.reshape(matrix_shape(array.shape)).astype(np.float64)
        u, s, vt = np.linalg.svd(matrix / np.abs(matrix).max(), full_matrices=False)
        for part, values in zip(FACTORS, (u, s, vt.T), strict=True):
            found[f"{part}/{name}"] = np.ascontiguousarray(values, np.float32)
    return found


def anchored(config: JobConfig) -> Policy:
    """The policy for a job."""
    section = config.aggregation
    return Anchored(outer_step(config), section.anchor_strength, section.anchor_floor)
