"""Philox4x32-10 against the published known answers, and the layout of our random tensors."""

from __future__ import annotations

import numpy as np
import pytest

from boinc_project.contract import philox

PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)  # digits of pi, as in Random123


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # kat_vectors of Random123: philox4x32 10
        ((0,) * 4, (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI[:4], PI[4:], (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]) -> None:
    words = philox.philox4x32_10(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in words) == answer


def test_an_element_does_not_depend_on_how_many_there_are() -> None:
    many = philox.uniform(-5, 3, 1, 300_001)
    for count in (0, 1, 2, 3, 4, 5, 65_536, 65_537):
        np.testing.assert_array_equal(philox.uniform(-5, 3, 1, count), many[:count])


def test_seed_step_and_stream_all_matter_and_values_lie_in_the_unit_interval() -> None:
    first = philox.uniform(1, 2, 3, 4096)
    assert first.dtype == np.float32
    assert first.min() >= 0
    assert first.max() < 1
    assert abs(first.mean() - 0.5) < 0.02
    for other in (philox.uniform(2, 2, 3, 4096), philox.uniform(1, 3, 3, 4096), philox.uniform(1, 2, 4, 4096)):
        assert (first != other).mean() > 0.99
    assert (first != philox.uniform(1 + 2**32, 2, 3, 4096)).mean() > 0.99


def test_bernoulli_is_one_with_the_probability_asked_for() -> None:
    assert abs(philox.bernoulli(9, 0, 0, 100_000, 0.9).mean() - 0.9) < 0.005
    assert philox.bernoulli(9, 0, 0, 1000, 0.0).max() == 0
    assert philox.bernoulli(9, 0, 0, 1000, 1.0).min() == 1
