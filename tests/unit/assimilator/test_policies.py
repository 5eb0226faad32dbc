"""Each policy against its paper's formula in float64, and its degenerate cases."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from assimilator.contributions import Contribution, NothingToFold
from assimilator.optimizers import Sgd
from assimilator.policies.age import age_weight
from assimilator.policies.decoupled_diloco import DecoupledDiLoCo, embeddings_of, learner_weight, merge
from assimilator.policies.delay_compensated import DelayCompensated
from assimilator.policies.delayed_nesterov import DelayedNesterov, Equally
from assimilator.policies.model_mixing import ModelMixing
from assimilator.policies.policy import OuterStep, Policy, Round
from assimilator.rules import CenteredClipping, Median, Rule
from boinc_project.contract.codecs import Codec
from boinc_project.contract.graph import Graph
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import open_update, write_update
from boinc_project.job_config import AggregationSection
from tests.tiny_project import exported

CODEC = Codec(compression="none")
SHAPES = {"w": (3, 4), "b": (5,)}


def contribution(slot: int, base: int, tensors: Mapping[str, Any], samples: int = 4, **named: Any) -> Contribution:
    arrays = {name: np.asarray(array) for name, array in tensors.items()}
    types = {name: TensorType(array.dtype.name, array.shape) for name, array in arrays.items()}
    data = write_update(arrays, types, {"microtask": "m"}, CODEC)
    return Contribution(slot, samples, lambda: open_update(data, types, CODEC, "m"), base, **named)


def some(seed: int, scale: float = 1.0) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    return {name: (scale * generator.standard_normal(shape)).astype(np.float32) for name, shape in SHAPES.items()}


def deltas(seed: int, scale: float = 1.0) -> dict[str, Any]:
    return {
        **{f"delta/{name}": array for name, array in some(seed, scale).items()},
        "buffer/mean": np.float32([seed, 2 * seed]),
        "buffer/n": np.int64(seed),
    }


def some_state(seed: int) -> dict[str, Any]:
    return {
        **{f"parameter/{name}": array for name, array in some(seed).items()},
        "buffer/mean": np.float32([1.0, 2.0]),
        "buffer/n": np.int64(1),
    }


STATES = {version: some_state(100 + version) for version in range(8)}


def round_of(contributions: Sequence[Contribution], version: int = 7, optimizer: Any = None) -> Round:
    def graph() -> Graph:
        raise AssertionError

    return Round(
        version,
        contributions,
        lambda: ({n: np.array(a) for n, a in STATES[version].items()}, dict(optimizer or {})),
        lambda which: STATES[which],
        graph,
    )


def close(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-6, atol=1e-6, err_msg=name)


def constant(rate: float) -> Any:
    return lambda version: rate


SGD = OuterStep(Sgd(), constant(0.5))
POLICIES: dict[str, Policy] = {
    "mean and outer step": SGD,
    "median": OuterStep(Sgd(), constant(0.5), Median()),
    "model mixing": ModelMixing(0.6),
    "delay compensated": DelayCompensated(SGD, 0.3),
    "delayed nesterov": Equally(OuterStep(DelayedNesterov(0.9, 2), constant(0.7))),
    "norm and direction": DecoupledDiLoCo(OuterStep(Sgd(0.9, True), constant(0.7))),
}


def advance(policy: Policy, contributions: Sequence[Contribution], **named: Any) -> Any:
    made = round_of(contributions, **named)
    if isinstance(policy, DecoupledDiLoCo):
        return policy.outer.take(made, merge(made.contributions, frozenset()))
    return policy.advance(made)


@pytest.mark.parametrize("name", POLICIES)
def test_the_next_version_is_the_same_bit_for_bit_in_every_order_of_arrival(name: str) -> None:
    arrived = [contribution(slot, base, deltas(slot), 3 + slot, weight=1 / (slot + 1), age_weight=0.5 + slot / 10)
               for slot, base in ((0, 7), (1, 5), (2, 5), (0, 4))]  # fmt: skip
    results = set()
    for order in itertools.permutations(arrived):
        made = advance(POLICIES[name], order)
        results.add(b"".join(array.tobytes() for _, array in sorted({**made.state, **made.optimizer}.items())))
    assert len(results) == 1


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("factor", [{"weight": 0.0}, {"samples": 0}, {"age_weight": 0.0}], ids=str)
def test_contributions_without_weight_are_nothing_to_fold(name: str, factor: dict[str, Any]) -> None:
    with pytest.raises(NothingToFold):
        advance(POLICIES[name], [contribution(slot, 7, deltas(slot), **factor) for slot in range(3)])
    with pytest.raises(NothingToFold):
        advance(POLICIES[name], [])


@pytest.mark.parametrize("name", POLICIES)
def test_a_contribution_without_weight_changes_nothing(name: str) -> None:
    good = [contribution(slot, 7, deltas(slot), 4) for slot in range(3)]
    bad = contribution(5, 7, deltas(9, 1e6), weight=0.0)
    assert all(
        np.array_equal(array, advance(POLICIES[name], good).state[key])
        for key, array in advance(POLICIES[name], [*good, bad]).state.items()
    )


@pytest.mark.parametrize("name", POLICIES)
def test_a_single_contribution_decides_alone(name: str) -> None:
    made = advance(POLICIES[name], [contribution(0, 7, deltas(1))])
    expected = {
        "mean and outer step": lambda x, d: x - 0.5 * d,
        "median": lambda x, d: x - 0.5 * d,
        "model mixing": lambda x, d: 0.4 * x + 0.6 * (x - d),
        "delay compensated": lambda x, d: x - 0.5 * d,
        "delayed nesterov": lambda x, d: x - 0.7 * (0.5 * d + 0.9 * 0.5 * d),
        "norm and direction": lambda x, d: x - 0.7 * 1.9 * d,
    }[name]
    for key, d in some(1).items():
        np.testing.assert_allclose(
            made.state[f"parameter/{key}"], expected(STATES[7][f"parameter/{key}"], d), rtol=1e-5, atol=1e-6
        )
    assert made.state["buffer/n"] == 1 and made.samples == 4


def test_fedbuff_divides_by_the_number_and_not_by_the_sum_of_weights() -> None:
    ages = [0, 1, 3, 8]
    section = AggregationSection()
    made = SGD.advance(
        round_of([contribution(slot, 7, deltas(slot), age_weight=age_weight(section, age))
                  for slot, age in enumerate(ages)])
    )  # fmt: skip
    for name in SHAPES:
        step = sum(some(slot)[name].astype(float) / np.sqrt(1 + age) for slot, age in enumerate(ages)) / len(ages)
        close(
            {name: made.state[f"parameter/{name}"]}, {name: STATES[7][f"parameter/{name}"].astype(float) - 0.5 * step}
        )


def test_a_host_that_is_trusted_less_counts_less_without_making_the_step_smaller() -> None:
    alike = [contribution(slot, 7, deltas(1), weight=weight) for slot, weight in enumerate((1.0, 0.25))]
    alone = [contribution(0, 7, deltas(1))]
    close(SGD.advance(round_of(alike)).state, SGD.advance(round_of(alone)).state)


def test_fedasync_mixes_each_model_with_the_weight_of_its_age() -> None:
    section = AggregationSection()
    bases = [7, 6, 3]
    arrived = [contribution(slot, base, deltas(slot), age_weight=age_weight(section, 7 - base))
               for slot, base in enumerate(bases)]  # fmt: skip
    made = ModelMixing(0.6).advance(round_of(arrived))
    for name in SHAPES:
        x = STATES[7][f"parameter/{name}"].astype(float)
        for slot, base in sorted(enumerate(bases), key=lambda each: each[1]):
            alpha = 0.6 * (8 - base) ** -0.5
            x = (1 - alpha) * x + alpha * (STATES[base][f"parameter/{name}"] - some(slot)[name].astype(float))
        np.testing.assert_allclose(made.state[f"parameter/{name}"], x, rtol=1e-5, atol=1e-6)
    mean = np.float64([1.0, 2.0])
    for slot, base in ((2, 3), (1, 6), (0, 7)):
        alpha = 0.6 * (8 - base) ** -0.5
        mean = (1 - alpha) * mean + alpha * np.float64([slot, 2 * slot])
    np.testing.assert_allclose(made.state["buffer/mean"], mean, rtol=1e-6)
    assert made.state["buffer/n"] == 2


@pytest.mark.parametrize("strength", [0.0, 0.3, 5.0])
def test_late_contributions_are_corrected_by_curvature_times_movement(strength: float) -> None:
    """Three versions in a row, against the docstring's loop; with strength 5 most of h is at its bound of 1."""
    policy = DelayCompensated(OuterStep(Sgd(0.9, True), constant(0.5)), strength)
    rounds = [[(7, 0), (5, 1), (5, 2), (2, 3)], [(6, 4)], [(1, 5), (7, 6)]]
    v: dict[str, Any] = {}
    m: dict[str, Any] = {}
    optimizer: dict[str, Any] = {}
    for pairs in rounds:
        arrived = [contribution(slot, base, deltas(slot), 3 + slot, age_weight=1 / (8 - base)) for base, slot in pairs]
        made = policy.advance(round_of(arrived, optimizer=optimizer))
        optimizer = made.optimizer
        total = sum(3 + slot for _, slot in pairs)
        shares = [(base, slot, (3 + slot) / (8 - base) / total) for base, slot in pairs]
        delta = {name: sum(w * some(slot)[name].astype(float) for _, slot, w in shares) for name in SHAPES}
        v = {name: 0.97 * v[name] + 0.03 * d**2 if v else d**2 for name, d in delta.items()}
        mean = np.mean(np.concatenate([each.ravel() for each in v.values()]))
        for name in SHAPES:
            key = f"parameter/{name}"
            x = STATES[7][key].astype(float)
            moved = sum(w * (x - STATES[base][key]) for base, _, w in shares)
            g = delta[name] + np.minimum(1, strength * v[name] / mean) * moved
            m[name] = 0.9 * m[name] + g if name in m else g
            np.testing.assert_allclose(made.state[key], x - 0.5 * (g + 0.9 * m[name]), rtol=1e-5, atol=2e-6)


def test_full_compensation_keeps_the_end_point_of_a_late_training_as_fedasync_does() -> None:
    arrived = [contribution(0, 3, deltas(1))]
    compensated = DelayCompensated(SGD, 1e9).advance(round_of(arrived))
    close(
        {name: compensated.state[f"parameter/{name}"] for name in SHAPES},
        {name: ModelMixing(0.5).advance(round_of(arrived)).state[f"parameter/{name}"] for name in SHAPES},
    )


def test_without_movement_or_without_strength_compensation_is_fedbuff() -> None:
    young = [contribution(slot, 7, deltas(slot)) for slot in range(3)]
    late = [contribution(slot, 4 + slot, deltas(slot)) for slot in range(3)]
    for strength, arrived in ((0.3, young), (0.0, late)):
        close(DelayCompensated(SGD, strength).advance(round_of(arrived)).state, SGD.advance(round_of(arrived)).state)


def test_contributions_that_change_nothing_are_compensated_by_nothing() -> None:
    zero = {name: 0 * array for name, array in deltas(1).items()}
    made = DelayCompensated(SGD, 0.3).advance(round_of([contribution(0, 3, zero)]))
    for name in SHAPES:
        assert np.array_equal(made.state[f"parameter/{name}"], STATES[7][f"parameter/{name}"])


def test_vc_asgd_is_the_paper_s_moving_average() -> None:
    made = ModelMixing(0.05).advance(round_of([contribution(0, 7, deltas(1))]))
    for name, delta in some(1).items():
        server = STATES[7][f"parameter/{name}"].astype(float)
        np.testing.assert_allclose(
            made.state[f"parameter/{name}"], 0.95 * server + 0.05 * (server - delta), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_delayed_nesterov_follows_the_paper_s_loop(turns: int) -> None:
    """N = 4 pseudo-gradients to one update of the momentum; a version is made of 4 / turns of them."""
    count, beta, eps = 4, 0.9, 0.7
    pushes = [some(seed) for seed in range(12)]
    theta = {name: array.astype(float) for name, array in some(50).items()}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    gathered = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    found, state = some(50), dict[str, Any]()
    optimizer = DelayedNesterov(beta, turns)
    for t, push in enumerate(pushes):
        for name, g in push.items():
            gathered[name] += g
            theta[name] -= eps * g / count
            if (t + 1) % count == 0:
                m[name] = beta * m[name] + gathered[name] / count
                theta[name] -= eps * beta * m[name]
                gathered[name][:] = 0
    each = count // turns
    for number in range(12 // each):
        mean = {
            name: np.mean([p[name] for p in pushes[number * each : (number + 1) * each]], axis=0, dtype=np.float32)
            for name in SHAPES
        }
        found, state = optimizer.step(found, mean, state, number + 1, eps)
    for name in SHAPES:
        np.testing.assert_allclose(found[name], theta[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_delayed_nesterov_with_dylu_follows_the_paper_s_algorithm_in_float64(turns: int) -> None:
    """Workers of speeds 4, 2 and 1 take 8, 4 and 2 steps of SGD on a quadratic from a version some pushes old; every
    push counts the same. Reference: algorithm 3 with H_w of section 5, all in float64 and push by push."""
    count, beta, eps, inner = 4, 0.9, 0.5, 0.1
    each = count // turns
    scale = {name: 0.5 + np.arange(int(np.prod(shape))).reshape(shape) / 20 for name, shape in SHAPES.items()}

    def delta(theta: Mapping[str, Any], steps: int) -> dict[str, Any]:
        """Start minus end of `steps` steps on sum(scale x^2) / 2."""
        return {name: x - x * (1 - inner * scale[name]) ** steps for name, x in theta.items()}

    start = {name: array.astype(float) for name, array in some(50).items()}
    theta = {name: array.copy() for name, array in start.items()}
    m = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    gathered = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    state = {**{f"parameter/{n}": a.astype(np.float32) for n, a in start.items()},
             "buffer/mean": np.float32([1.0, 2.0]), "buffer/n": np.int64(1)}  # fmt: skip
    policy, optimizer = Equally(OuterStep(DelayedNesterov(beta, turns), constant(eps))), dict[str, Any]()
    theirs, ours = [start], [state]  # by version
    for version in range(6 * turns):
        pushed = []
        for k in range(each):
            t = version * each + k
            steps, base = (8, 4, 2)[t % 3], max(0, version - t % 2)
            for name, g in delta(theirs[base], steps).items():
                gathered[name] += g
                theta[name] = theta[name] - eps * g / count
                if (t + 1) % count == 0:
                    m[name] = beta * m[name] + gathered[name] / count
                    theta[name] = theta[name] - eps * beta * m[name]
                    gathered[name] = np.zeros(SHAPES[name])
            mine = {name: ours[base][f"parameter/{name}"].astype(float) for name in SHAPES}
            tensors = {f"delta/{name}": g.astype(np.float32) for name, g in delta(mine, steps).items()}
            pushed.append(contribution(t, base, tensors, 16 * steps, steps=steps))
        theirs.append({name: array.copy() for name, array in theta.items()})
        kept, now = dict(optimizer), ours[-1]
        made = policy.advance(
            dataclasses.replace(round_of(pushed), version=version, load=lambda: (
                {n: np.array(a) for n, a in now.items()}, dict(kept)))  # noqa: B023
        )  # fmt: skip
        ours.append(made.state)
        optimizer = made.optimizer
    assert np.abs(theta["w"] - start["w"]).min() > 0.01
    for name in SHAPES:
        np.testing.assert_allclose(ours[-1][f"parameter/{name}"], theta[name], rtol=1e-4, atol=1e-5)


def test_an_update_of_fewer_steps_counts_as_the_policy_s_paper_says() -> None:
    long, short = contribution(0, 7, deltas(0), 32, steps=8), contribution(1, 7, deltas(1), 8, steps=2)
    weights = {"mean and outer step": (0.8, 0.2), "delayed nesterov": (0.5, 0.5)}
    for name, (a, b) in weights.items():
        rate = 0.5 if name == "mean and outer step" else 0.7 * 0.5 * 1.9
        made = POLICIES[name].advance(round_of([long, short]))
        for key in SHAPES:
            step = a * some(0)[key].astype(float) + b * some(1)[key].astype(float)
            expected = STATES[7][f"parameter/{key}"].astype(float) - rate * step
            np.testing.assert_allclose(made.state[f"parameter/{key}"], expected, rtol=1e-5, atol=1e-6)
    assert learner_weight(long) == 4 * learner_weight(short), "tokens^2 / steps"


def test_delayed_nesterov_over_whole_buffers_is_diloco_s_outer_step() -> None:
    delayed, plain = DelayedNesterov(0.9, 1), Sgd(0.9, True)
    ours, theirs = (some(5), dict[str, Any]()), (some(5), dict[str, Any]())
    for number in range(1, 4):
        ours = delayed.step(*[ours[0], some(number), ours[1]], number, 0.7)
        theirs = plain.step(*[theirs[0], some(number), theirs[1]], number, 0.7)
        close(ours[0], theirs[0])


def test_norms_and_directions_are_merged_apart() -> None:
    scales = (1.0, 100.0, 0.01)
    arrived = [contribution(slot, 7, deltas(slot, scale), 4 + slot, steps=1 + slot)
               for slot, scale in enumerate(scales)]  # fmt: skip
    made = merge(arrived, frozenset({"b"}))
    weights = np.array([(4 + slot) ** 2 / (1 + slot) for slot in range(3)])
    weights = weights / weights.sum()
    values = [some(slot, scale)["w"].astype(float) for slot, scale in enumerate(scales)]
    lengths = [np.linalg.norm(v) for v in values]
    direction = sum(weight * v / length for weight, v, length in zip(weights, values, lengths, strict=True))
    expected = np.dot(weights, lengths) * direction / np.linalg.norm(direction)
    np.testing.assert_allclose(made.gradient["w"], expected, rtol=1e-5)
    plain = sum(
        weight * some(slot, scale)["b"] for slot, (weight, scale) in enumerate(zip(weights, scales, strict=True))
    )
    np.testing.assert_allclose(made.gradient["b"], plain, rtol=1e-4, atol=1e-4)


def test_learners_that_cancel_out_or_have_not_moved_leave_no_direction() -> None:
    zero = {"delta/w": np.zeros((3, 4), np.float32)}
    one = {"delta/w": np.ones((3, 4), np.float32)}
    assert not merge([contribution(slot, 7, zero) for slot in range(2)], frozenset()).gradient["w"].any()
    opposite = {"delta/w": -one["delta/w"]}
    assert not merge([contribution(0, 7, one), contribution(1, 7, opposite)], frozenset()).gradient["w"].any()
    half = merge([contribution(0, 7, one), contribution(1, 7, zero)], frozenset()).gradient["w"]
    np.testing.assert_allclose(half, 0.5, rtol=1e-6)


def test_embeddings_are_found_in_the_graph() -> None:
    assert embeddings_of(exported()[1].gradient) == frozenset()


@pytest.mark.parametrize(
    ("named", "ages", "weights"),
    [
        ({"age_weight": "constant"}, [0, 5, 50], [1, 1, 1]),
        ({}, [0, 1, 3, 8], [1, 2**-0.5, 0.5, 1 / 3]),
        ({"age_exponent": 1.0}, [0, 1, 3], [1, 0.5, 0.25]),
        ({"age_weight": "hinge"}, [0, 4, 5, 6], [1, 1, 1 / 11, 1 / 21]),
    ],
)
def test_weights_by_age(named: dict[str, Any], ages: list[int], weights: list[float]) -> None:
    section = AggregationSection(**named)
    np.testing.assert_allclose([age_weight(section, age) for age in ages], weights)


def test_centered_clipping_starts_from_the_last_outcome_which_is_kept_with_the_optimizer() -> None:
    policy = OuterStep(Sgd(0.9), constant(0.5), CenteredClipping(0.1, 1))
    first = policy.advance(round_of([contribution(slot, 7, deltas(slot)) for slot in range(3)]))
    kept = {name: array for name, array in first.optimizer.items() if name.startswith("aggregate/")}
    assert set(kept) == {"aggregate/w", "aggregate/b"}
    together = np.concatenate([array.reshape(-1) for array in kept.values()])
    assert np.linalg.norm(together) <= 0.1 + 1e-6, "no round moves it by more than tau"
    second = policy.advance(round_of([contribution(slot, 7, deltas(slot)) for slot in range(3)],
                                     optimizer=first.optimizer))  # fmt: skip
    moved = np.concatenate([second.optimizer[name].reshape(-1) for name in kept])
    assert 0.1 < np.linalg.norm(moved) <= 0.2 + 1e-6


@pytest.mark.parametrize("rule", [None, Median()], ids=str)
def test_batch_statistics_are_merged_and_never_stepped(rule: Rule | None) -> None:
    policy = OuterStep(Sgd(0.9, True), constant(0.7), rule)
    made = policy.advance(round_of([contribution(slot, 7, deltas(slot)) for slot in (1, 2, 6)]))
    np.testing.assert_allclose(made.state["buffer/mean"], [3, 6] if rule is None else [2, 4], rtol=1e-6)
    assert made.state["buffer/n"] == 6
