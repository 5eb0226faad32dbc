"""Places in device memory: nothing that lives at the same time overlaps, no arena is larger than a buffer may be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.gradient.opencl.memory import ALIGNMENT, DoesNotFit, Life, lay_out, liveness_peak, padded

LIVES = st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 30), st.integers(0, 10)), min_size=1, max_size=40).map(
    lambda drawn: [Life(n, size, first, first + length) for n, (size, first, length) in enumerate(drawn)]
)


@given(LIVES, st.integers(5120, 20000))
def test_storages_alive_together_never_share_memory(lives: list[Life], largest: int) -> None:
    layout = lay_out(lives, largest)
    assert set(layout.places) == {life.storage for life in lives}
    assert all(size <= largest for size in layout.arenas)
    for a in lives:
        place = layout.places[a.storage]
        assert place.offset % ALIGNMENT == 0
        assert place.offset + padded(a.nbytes) <= layout.arenas[place.arena]
        for b in lives:
            other = layout.places[b.storage]
            together = a is not b and a.first <= b.last and b.first <= a.last
            if together and place.arena == other.arena:
                assert (
                    place.offset + padded(a.nbytes) <= other.offset or other.offset + padded(b.nbytes) <= place.offset
                )


def test_values_of_a_long_row_of_layers_share_two_places() -> None:
    lives = [Life(n, 1 << 20, n, n + 1) for n in range(100)]
    assert liveness_peak(lives) == 2 << 20
    assert sum(lay_out(lives, 1 << 28).arenas) == 2 << 20


def test_a_storage_larger_than_any_buffer_is_refused_with_both_sizes() -> None:
    with pytest.raises(DoesNotFit, match=r"tensor of 200000000 bytes .* 134217728 bytes"):
        lay_out([Life(0, 200_000_000, 0, 1)], 128 << 20)


def test_more_than_one_buffer_is_used_where_one_is_too_small() -> None:
    lives = [Life(n, 100 << 20, 0, 9) for n in range(5)]
    layout = lay_out(lives, 128 << 20)
    assert sorted(layout.arenas) == [100 << 20] * 5
