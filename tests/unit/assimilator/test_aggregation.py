"""Folding contributions: the same bytes in any order of arrival, and defined outcomes for degenerate rounds."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from assimilator.aggregation import fold
from assimilator.apply import round_loss, round_to_commit
from assimilator.contributions import Contribution, NothingToFold
from assimilator.rules import Median, NormBound, Rule
from boinc_project.contract.codecs import Codec
from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import TensorType
from boinc_project.contract.update import OpenUpdate, open_update, read_update, write_update
from boinc_project.gt_tables import Disposition, MicrotaskState


def update_of(tensors: dict[str, Any], codec: Codec | None = None) -> OpenUpdate:
    """An update of these tensors, as it is read from its file."""
    codec = codec or Codec(compression="none")
    types = {name: TensorType(array.dtype.name, array.shape) for name, array in tensors.items()}
    return open_update(write_update(tensors, types, {"microtask": "m"}, codec), types, codec, "m")


def contribution(slot: int, samples: int, **tensors: Any) -> Contribution:
    update = update_of({name.replace("_", "/", 1): np.asarray(array) for name, array in tensors.items()})
    return Contribution(slot, samples, lambda: update)


def some_round(prefix: str) -> list[Contribution]:
    generator = np.random.default_rng(4)
    made = []
    for slot in range(5):
        values = generator.standard_normal(1000).astype(np.float32) * np.float32(10.0 ** (3 * (slot - 2)))
        mean = generator.standard_normal(7).astype(np.float32)
        made.append(contribution(slot, 10 + slot, **{f"{prefix}_w": values, "buffer_mean": mean,
                                                     "buffer_n": np.array(slot, np.int64)}))  # fmt: skip
    return made


@pytest.mark.parametrize("rule", [None, Median(), NormBound()], ids=str)
@pytest.mark.parametrize("prefix", ["gradient", "delta"])
def test_the_result_is_the_same_bit_for_bit_in_every_order_of_arrival(prefix: str, rule: Rule | None) -> None:
    contributions = some_round(prefix)
    first = fold(contributions, rule)
    for order in itertools.permutations(contributions):
        again = fold(order, rule)
        assert again.samples == first.samples
        for found, expected in ((again.gradient, first.gradient), (again.buffers, first.buffers)):
            assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in expected.items()}


def test_sync_is_the_mean_over_all_samples_of_the_round() -> None:
    folded = fold(
        [contribution(0, 2, gradient_w=np.float32([6, 0])), contribution(1, 4, gradient_w=np.float32([0, 3]))]
    )
    assert folded.samples == 6
    np.testing.assert_array_equal(folded.gradient["w"], np.float32([1.0, 0.5]))
    assert folded.gradient["w"].dtype == np.float32


def test_diloco_weighs_each_delta_by_its_samples() -> None:
    gradient = fold(
        [contribution(0, 1, delta_w=np.float32([4.0])), contribution(1, 3, delta_w=np.float32([8.0]))]
    ).gradient
    np.testing.assert_array_equal(gradient["w"], np.float32([7.0]))


def test_running_statistics_are_averaged_by_samples_and_counters_take_the_largest() -> None:
    buffers = fold(
        [
            contribution(0, 1, buffer_mean=np.float32([4.0]), buffer_n=np.array(5)),
            contribution(1, 3, buffer_mean=np.float32([8.0]), buffer_n=np.array(2)),
        ]
    ).buffers
    np.testing.assert_array_equal(buffers["buffer/mean"], np.float32([7.0]))
    assert buffers["buffer/mean"].dtype == np.float32
    assert buffers["buffer/n"] == 5 and buffers["buffer/n"].shape == ()


def test_a_single_contribution_is_neither_zero_nor_doubled() -> None:
    gradient = fold([contribution(3, 4, gradient_w=np.float32([8.0]))]).gradient
    np.testing.assert_array_equal(gradient["w"], np.float32([2.0]))
    delta = fold([contribution(3, 4, delta_w=np.float32([8.0]))]).gradient
    np.testing.assert_array_equal(delta["w"], np.float32([8.0]))


@pytest.mark.parametrize("contributions", [[], [contribution(0, 0, gradient_w=np.float32([1.0]))]])
def test_a_round_without_weight_folds_nothing(contributions: list[Contribution]) -> None:
    with pytest.raises(NothingToFold):
        fold(contributions)


def test_large_gradients_do_not_overflow_while_they_are_summed() -> None:
    big = np.float32([9e17])
    gradient = fold([contribution(slot, 1, gradient_w=big) for slot in range(1000)]).gradient
    np.testing.assert_allclose(gradient["w"], big, rtol=1e-6)


def test_the_arrays_of_the_contributions_are_not_changed() -> None:
    array = np.float32([1.0, 2.0])
    contributions = [contribution(slot, 1, gradient_w=array, buffer_m=array) for slot in range(3)]
    fold(contributions)
    np.testing.assert_array_equal(array, np.float32([1.0, 2.0]))


def test_contributions_are_read_one_after_the_other_in_slot_order() -> None:
    alive: list[int] = []

    def load(slot: int) -> OpenUpdate:
        alive.append(slot)
        return update_of({"gradient/w": np.zeros(3, np.float32)})

    fold([Contribution(s, 1, lambda s=s: load(s)) for s in (2, 0, 1)])
    assert alive == [0, 1, 2]


@pytest.mark.parametrize("prefix", ["gradient/", "delta/"])
@pytest.mark.parametrize(
    "codec", [Codec("dense"), Codec("int8", 256), Codec("int8", 7), Codec("int8", 1 << 20)], ids=str
)
def test_folding_in_pieces_gives_the_bits_of_folding_whole_decoded_tensors(prefix: str, codec: Codec) -> None:
    generator = np.random.default_rng(8)
    shapes = {"a": (70_001,), "b": (300, 500), "c": (), "d": (0, 4)}
    rounds, whole = [], {name: np.zeros(shape, np.float64) for name, shape in shapes.items()}
    samples = [3, 5, 7]
    for slot, count in enumerate(samples):
        tensors = {prefix + n: np.asarray(generator.standard_normal(s), np.float32) for n, s in shapes.items()}
        types = {name: TensorType("float32", array.shape) for name, array in tensors.items()}
        data = write_update(tensors, types, {"microtask": "m"}, codec)
        rounds.append(Contribution(slot, count, lambda d=data, t=types: open_update(d, t, codec, "m")))  # type: ignore[misc]
        decoded = read_update(data, types, codec, "m").tensors
        weight = 1.0 / sum(samples) if prefix == "gradient/" else count / sum(samples)
        for name in shapes:
            term = decoded[prefix + name].astype(np.float64) * weight
            whole[name] = term if slot == 0 else whole[name] + term
    gradient = fold(rounds).gradient
    assert {n: a.tobytes() for n, a in gradient.items()} == {
        n: a.astype(np.float32).tobytes() for n, a in whole.items()
    }
    assert {n: a.shape for n, a in gradient.items()} == shapes


def test_a_contribution_that_cannot_be_read_ends_the_folding_with_its_reason() -> None:
    def damaged() -> OpenUpdate:
        raise ContractError("damaged", fault="digest")

    with pytest.raises(ContractError, match="damaged"):
        fold([contribution(0, 1, gradient_w=np.float32([1.0])), Contribution(1, 1, damaged)])


def entry(slot: int, disposition: Disposition = Disposition.PENDING) -> dict[str, Any]:
    return {"slot": slot, "disposition": str(disposition), "workunit_name": f"w{slot}"}


def task(slot: int, state: MicrotaskState) -> dict[str, Any]:
    return {"slot": slot, "state": str(state)}


FAILED3 = [task(1, MicrotaskState.FAILED)] * 3


@pytest.mark.parametrize(
    ("tasks", "entries", "slots"),
    [
        ([], [entry(0)], None),
        ([], [entry(1), entry(0)], [0, 1]),
        ([], [entry(0), entry(1, Disposition.DROPPED)], None),
        ([], [entry(0), entry(1, Disposition.DUPLICATE)], None),
        (FAILED3[:2], [entry(0)], None),
        (FAILED3, [entry(0)], [0]),
        (FAILED3, [entry(0), entry(1)], [0, 1]),
        ([*FAILED3, *[task(0, MicrotaskState.FAILED)] * 3], [], None),
    ],
)
def test_a_round_is_closed_when_every_slot_has_a_gradient_or_failed_too_often(
    tasks: list[Any], entries: list[Any], slots: list[int] | None
) -> None:
    found = round_to_commit(tasks, entries, 2)
    assert (None if found is None else [row["slot"] for row in found]) == slots


def test_the_loss_of_a_round_is_weighed_by_samples_and_leaves_out_what_is_unknown() -> None:
    assert round_loss([{"loss": 1.0, "samples": 1}, {"loss": 3.0, "samples": 3}]) == 2.5
    assert round_loss([{"loss": None, "samples": 1}, {"loss": 3.0, "samples": 3}]) == 3.0
    assert round_loss([{"loss": float("nan"), "samples": 1}]) is None
