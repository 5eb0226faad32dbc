"""Liars do what their papers say."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from boinc_project.contract.update import update_types
from boinc_project.simulator.computing import Computed, Computer, Tensors
from boinc_project.simulator.lies import (
    BEHAVIOURS,
    Alie,
    Apart,
    Drop,
    FreeRider,
    Honest,
    Ipm,
    LabelFlip,
    Mimic,
    Scaled,
    SignFlip,
    Situation,
    alie_z,
)
from tests.tiny_project import exported
from validator.agreement import distance
from work_generator.publish import local_content

ROUND: list[Mapping[str, Any]] = [
    {"gradient/a": np.array(row, np.float32), "metric/loss": np.array([number], np.float32)}
    for number, row in enumerate([[1.0, 2.0], [3.0, 2.0], [5.0, 8.0]])
]


@pytest.fixture(scope="module")
def computer() -> Computer:
    return Computer()


@pytest.fixture(scope="module")
def computed(computer: Computer, tmp_path_factory: pytest.TempPathFactory) -> Computed:
    place: Path = tmp_path_factory.mktemp("microtask")
    job, made = exported()
    microtask, files = local_content(job, made, 0, place)
    (place / "microtask.json").write_bytes(microtask.to_json())
    return computer.honest("tiny", {**files, "microtask.json": place / "microtask.json"})


def of_round(behaviour: Any, computed: Computed, number: int = 1, host: str = "h") -> Tensors:
    """The answer for a microtask whose round is ROUND."""
    made = Computed(computed.microtask, computed.digest, computed.types, ROUND[number], computed.files)
    answer: Tensors | None = behaviour.answer(Situation(host, made, Computer(), lambda: ROUND))
    assert answer is not None
    return answer


def test_honest_hosts_give_what_was_asked_for(computed: Computed) -> None:
    assert of_round(Honest(), computed) is ROUND[1]
    assert not Honest().lies


def test_sign_flip_and_scaling_multiply_the_gradient(computed: Computed) -> None:
    assert of_round(SignFlip(2.0), computed)["gradient/a"].tolist() == [-6, -4]
    assert of_round(Scaled(10.0), computed)["gradient/a"].tolist() == [30, 20]


def test_alie_is_the_mean_less_z_standard_deviations_of_each_coordinate(computed: Computed) -> None:
    deviation = np.array([np.std([1, 3, 5]), np.std([2, 2, 8])])
    lie = of_round(Alie(1.5), computed)["gradient/a"]
    assert lie == pytest.approx(np.array([3.0, 4.0]) - 1.5 * deviation)


def test_alies_z_is_the_papers() -> None:
    # n = 50, f = 24: s = 2 supporters among 26 honest workers; Phi(z) = 24/26 (the paper's own example of a quantile).
    assert alie_z(50, 24) == pytest.approx(1.4261, abs=1e-3)
    with pytest.raises(ValueError, match="majority"):
        alie_z(25, 13)


def test_ipm_is_the_mean_turned_round(computed: Computed) -> None:
    assert of_round(Ipm(0.1), computed)["gradient/a"] == pytest.approx([-0.3, -0.4])


def test_mimic_gives_the_rounds_first_update_whatever_was_asked_for(computed: Computed) -> None:
    assert of_round(Mimic(), computed, number=2)["gradient/a"].tolist() == [1, 2]


@pytest.mark.parametrize("name", sorted(set(BEHAVIOURS) - {"drop", "label_flip"}))
def test_metrics_stay_honest(name: str, computed: Computed) -> None:
    assert of_round(BEHAVIOURS[name](), computed)["metric/loss"].tolist() == [1]


def test_label_flip_is_the_gradient_from_turned_labels(computer: Computer, computed: Computed) -> None:
    situation = Situation("h", computed, computer, lambda: [computed.tensors])
    lie = LabelFlip().answer(situation)
    assert lie is not None
    flipped = computer.changed(computed, lambda name, array: 2 - array if name == "batch/y" else array)
    moving = [name for name in lie if name.startswith("gradient/")]
    assert all(np.array_equal(lie[name], flipped[name]) for name in moving)
    assert any(not np.array_equal(lie[name], computed.tensors[name]) for name in moving)
    assert np.array_equal(lie["metric/loss"], computed.tensors["metric/loss"])


def test_label_flip_needs_labels_that_are_whole_numbers(computer: Computer, computed: Computed) -> None:
    situation = Situation("h", computed, computer, lambda: [computed.tensors])
    with pytest.raises(ValueError, match="whole numbers"):
        LabelFlip("batch/x").answer(situation)


def test_free_riders_answer_without_computing_and_droppers_never(computed: Computed) -> None:
    lie = of_round(FreeRider(), computed)["gradient/a"]
    assert FreeRider().works == 0.0
    assert 0 < np.abs(lie).max() < 0.01
    situation = Situation("h", computed, Computer(), lambda: ROUND)
    assert Drop().answer(situation) is None


def test_colluding_liars_give_one_lie_and_others_do_not_agree(computed: Computed) -> None:
    for behaviour in (SignFlip(), Alie(), Ipm(), Mimic()):
        together = [of_round(behaviour, computed, host=host) for host in ("h", "i")]
        apart = [of_round(Apart(behaviour), computed, host=host) for host in ("h", "i")]
        assert distance(*together) == 0.0
        assert distance(*apart) > 0.05
        assert distance(apart[0], of_round(Apart(behaviour), computed, host="h")) == 0.0


def test_copies_differ_by_rounding_as_much_as_they_are_told_to(computed: Computed) -> None:
    noisy = Computer(noise=1e-7)
    assert noisy.encoded(computed, computed.tensors, "h") == noisy.encoded(computed, computed.tensors, "h")
    assert noisy.encoded(computed, computed.tensors, "h") != noisy.encoded(computed, computed.tensors, "i")
    rounded = noisy._rounded(computed, computed.tensors, "h")
    assert 0 < distance(computed.tensors, rounded) < 1e-6


def test_an_honest_update_is_computed_once(computer: Computer, computed: Computed) -> None:
    before = computer.computed
    assert computer.honest("tiny", computed.files) is computed
    assert computer.computed == before


def test_an_update_has_the_tensors_that_the_contract_lists(computed: Computed) -> None:
    graph = exported()[1].gradient
    assert set(computed.tensors) == set(update_types(graph, "gradient", computed.microtask.steps))
