"""Deltas between states: exact in both directions, and refused where they do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from boinc_project.contract import tensorfile
from boinc_project.contract.downlink import DELTA_METADATA, apply_delta, make_delta
from boinc_project.contract.errors import ContractError


def state(seed: int, counter: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "buffer/count": np.array(counter, np.int64),
        "buffer/mean": random.standard_normal(5).astype(np.float32),
        "parameter/b": random.standard_normal(()).astype(np.float32),
        "parameter/w": random.standard_normal((30, 70)).astype(np.float32),
    }


def test_a_delta_brings_parameters_within_half_a_code_and_buffers_exactly() -> None:
    base, wanted = state(0), state(1, counter=9)
    found = apply_delta(base, make_delta(base, wanted))
    for name in ("buffer/count", "buffer/mean"):
        assert found[name].tobytes() == wanted[name].tobytes()
    for name in ("parameter/b", "parameter/w"):
        step = np.abs(wanted[name] - base[name]).max() / 127
        assert np.abs(found[name] - wanted[name]).max() <= 0.5 * step * 1.01 + 1e-6


@settings(max_examples=50, deadline=None)
@given(
    hnp.arrays(np.float32, st.integers(0, 600), elements=st.floats(-(2.0**60), 2.0**60, width=32)), st.integers(0, 9)
)
def test_what_the_server_and_a_volunteer_decode_is_the_defined_arithmetic_bit_for_bit(array: Any, seed: int) -> None:
    base = {"parameter/w": np.random.default_rng(seed).standard_normal(array.size).astype(np.float32)}
    delta = make_delta(base, {"parameter/w": array})
    travelled = tensorfile.from_bytes(tensorfile.to_bytes(delta, DELTA_METADATA)).tensors
    codes, scales = travelled["parameter/w#codes"], travelled["parameter/w#scales"]
    expected = base["parameter/w"] + codes.astype(np.float32) * np.repeat(scales, 256)[: array.size]
    for each in (delta, travelled):
        assert apply_delta(base, each)["parameter/w"].tobytes() == expected.tobytes()


def test_the_base_is_not_changed() -> None:
    base = state(0)
    before = {name: array.tobytes() for name, array in base.items()}
    apply_delta(base, make_delta(base, state(1)))
    assert {name: array.tobytes() for name, array in base.items()} == before


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda delta: delta.pop("parameter/w#codes"), "missing_tensor"),
        (lambda delta: delta.pop("buffer/mean"), "missing_tensor"),
        (lambda delta: delta.update({"parameter/w#codes": np.zeros(5, np.int8)}), "shape"),
        (lambda delta: delta.update({"parameter/w#scales": np.zeros(9, np.int32)}), "shape"),
        (lambda delta: delta.update({"buffer/count": np.zeros(2, np.int64)}), "shape"),
    ],
)
def test_a_delta_that_does_not_fit_is_refused(change: Any, fault: str) -> None:
    base = state(0)
    delta = make_delta(base, state(1))
    change(delta)
    with pytest.raises(ContractError) as caught:
        apply_delta(base, delta)
    assert caught.value.fault == fault
