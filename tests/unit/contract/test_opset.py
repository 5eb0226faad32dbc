"""The opset's rules: types out, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from boinc_project.contract.errors import ContractError
from boinc_project.contract.opset import (
    _ATTRIBUTE_KINDS,
    MAX_DIMENSION,
    OPSET,
    OpsetError,
    TensorType,
    attribute_number,
    broadcast,
    flops,
    infer,
    number,
)

CONVOLUTION: dict[str, Any] = {
    "stride": [2, 1],
    "padding": [1, 0],
    "dilation": [1, 2],
    "transposed": False,
    "output_padding": [0, 0],
    "groups": 1,
}


def f32(*shape: int) -> TensorType:
    return TensorType("float32", shape)


def i64(*shape: int) -> TensorType:
    return TensorType("int64", shape)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "outputs"),
    [
        ("add", [f32(3, 1), f32(4)], {}, [f32(3, 4)]),
        ("eq", [i64(3), i64()], {}, [TensorType("bool", (3,))]),
        ("sum", [TensorType("bool", (3, 4))], {"dims": [1], "keepdim": True}, [i64(3, 1)]),
        ("sum", [f32(3, 4)], {"dims": [], "keepdim": False}, [f32(3, 4)]),
        ("argmax", [f32(3, 4)], {"dim": None, "keepdim": False}, [i64()]),
        ("cat", [f32(2, 3), f32(0, 3), f32(5, 3)], {"dim": 0}, [f32(7, 3)]),
        ("slice", [f32(10)], {"dim": 0, "start": 1, "stop": 8, "step": 3}, [f32(3)]),
        ("constant_pad_nd", [f32(3, 4)], {"pad": [-1, 2, 0, 3], "value": 0}, [f32(6, 5)]),
        ("index", [f32(2, 3, 4, 5), i64(7, 1), i64(6)], {"dim": 1}, [f32(2, 7, 6, 5)]),
        ("embedding", [f32(9, 4), i64(2, 3)], {}, [f32(2, 3, 4)]),
        ("topk", [f32(3, 9)], {"k": 2, "dim": 1, "largest": True}, [f32(3, 2), i64(3, 2)]),
        ("addmm", [f32(5), f32(3, 4), f32(4, 5)], {}, [f32(3, 5)]),
        ("convolution", [f32(2, 3, 9, 9), f32(4, 3, 3, 3), None], CONVOLUTION, [f32(2, 4, 5, 5)]),
        (
            "convolution_backward",
            [f32(2, 4, 5, 5), f32(2, 3, 9, 9), f32(4, 3, 3, 3)],
            {**CONVOLUTION, "output_mask": [False, True, True]},
            [f32(4, 3, 3, 3), f32(4)],
        ),
        (
            "native_layer_norm",
            [f32(2, 3, 4), f32(4), None],
            {"normalized_shape": [4], "eps": 1e-5},
            [f32(2, 3, 4), f32(2, 3, 1), f32(2, 3, 1)],
        ),
        ("nll_loss_forward", [f32(8, 3), i64(8), None], {"reduction": "none", "ignore_index": -100}, [f32(8), f32()]),
        ("random_uniform", [i64(), i64()], {"shape": [3], "stream": 0}, [f32(3)]),
    ],
)
def test_types_of_outputs(op: str, inputs: list[Any], attrs: dict[str, Any], outputs: list[TensorType]) -> None:
    assert infer(op, inputs, attrs) == tuple(outputs)


@pytest.mark.parametrize(
    ("op", "inputs", "attrs", "says"),
    [
        ("launch_missiles", [], {}, "not in opset"),
        (["add"], [], {}, "not in opset"),
        ("add", [f32(3), i64(3)], {}, "one dtype"),
        ("add", [f32(3), f32(4)], {}, "do not broadcast"),
        ("add", [f32(3)], {}, "1 inputs given"),
        ("add", [f32(3), None], {}, r"input 1 \(b\) is missing"),
        ("add", [f32(3), f32(3)], {"alpha": 2}, "unknown attribute 'alpha'"),
        ("div", [i64(3), i64(3)], {}, "must be float32"),
        ("logical_and", [f32(3), f32(3)], {}, "must be bool"),
        ("sum", [f32(3)], {"dims": [0]}, "keepdim is missing"),
        ("sum", [f32(3)], {"dims": [-1], "keepdim": False}, "dims is"),
        ("sum", [f32(3)], {"dims": [True], "keepdim": False}, "dims is"),
        ("sum", [f32(3, 3)], {"dims": [1, 1], "keepdim": False}, "twice"),
        ("sum", [f32(3)], {"dims": [1], "keepdim": False}, "has 1 dimensions"),
        ("mean", [f32(0)], {"dims": [0], "keepdim": False}, "empty"),
        ("reshape", [f32(6)], {"shape": [5]}, "6"),
        ("reshape", [f32(6)], {"shape": [-1]}, "shape is"),
        ("reshape", [f32(6)], {"shape": [1] * 9}, "at most 8"),
        ("permute", [f32(2, 3)], {"dims": [0, 0]}, "no permutation"),
        ("expand", [f32(2)], {"shape": [3]}, "do not broadcast"),
        ("slice", [f32(5)], {"dim": 0, "start": 0, "stop": 6, "step": 1}, "within size 5"),
        ("slice", [f32(5)], {"dim": 0, "start": 0, "stop": 5, "step": 0}, "positive"),
        ("constant_pad_nd", [f32(3)], {"pad": [-2, -2], "value": 0}, "crops"),
        ("full", [], {"shape": [2**41], "value": 0, "dtype": "float32"}, "shape is"),
        ("full", [], {"shape": [], "value": math.inf, "dtype": "float32"}, "value is inf"),
        ("full", [], {"shape": [], "value": 1e39, "dtype": "float32"}, "beyond float32"),
        ("full", [], {"shape": [], "value": 256, "dtype": "uint8"}, "no uint8"),
        ("full", [], {"shape": [], "value": 1, "dtype": "bool"}, "must be a bool"),
        ("full", [], {"shape": [], "value": 1, "dtype": "complex64"}, "dtype is"),
        ("arange", [], {"start": 2**62, "step": 2**62, "length": 9, "dtype": "int64"}, "int64"),
        ("gather", [f32(3, 4), i64(4, 4)], {"dim": 1}, "larger"),
        ("gather", [f32(3), TensorType("int32", (3,))], {"dim": 0}, "int64"),
        ("mm", [f32(3, 4), f32(3, 4)], {}, "inner"),
        ("convolution", [f32(2, 3, 9, 9), f32(4, 2, 3, 3), None], CONVOLUTION, "channels"),
        ("convolution", [f32(2, 3, 1, 1), f32(4, 3, 5, 5), None], CONVOLUTION, "too small"),
        ("convolution", [f32(2, 3, 9, 9), f32(4, 3, 3, 3), f32(5)], CONVOLUTION, "b must be"),
        ("convolution", [f32(2, 3, 9, 9), f32(4, 3, 3, 3), None], {**CONVOLUTION, "stride": [0, 1]}, "positive"),
        (
            "native_batch_norm",
            [f32(1, 3), None, None, f32(3), f32(3)],
            {"training": True, "momentum": 0.1, "eps": 0},
            "more",
        ),
        ("gelu", [f32(3)], {"approximate": "maybe"}, "approximate is"),
        ("softmax", [f32()], {"dim": 0}, "0 dimensions"),
        ("random_uniform", [i64(), i64()], {"shape": [3], "stream": 2**32}, "stream is"),
        ("random_uniform", [i64(1), i64()], {"shape": [3], "stream": 0}, "seed must be"),
    ],
)
def test_what_is_refused_names_the_operator_and_the_reason(op: Any, inputs: Any, attrs: Any, says: str) -> None:
    with pytest.raises(OpsetError, match=says) as refusal:
        infer(op, inputs, attrs)
    assert isinstance(refusal.value, ContractError)
    assert str(op) in str(refusal.value)


def test_types_refuse_unknown_dtypes_and_sizes_out_of_bounds() -> None:
    for dtype, shape in (
        ("float64", ()),
        ("float32", (-1,)),
        ("float32", (2**41,)),
        ("int64", (True,)),
        ("int64", [1]),
    ):
        with pytest.raises(OpsetError):
            TensorType(dtype, shape)  # type: ignore[arg-type]


def test_products_of_huge_sizes_stay_exact() -> None:
    huge = f32(*(MAX_DIMENSION,) * 8)
    assert huge.numel == MAX_DIMENSION**8
    assert infer("add", [huge, huge], {}) == (huge,)
    assert flops("add", [huge, huge], {}, (huge,)) == MAX_DIMENSION**8


def test_multiply_adds_count_two() -> None:
    assert flops("mm", [f32(3, 4), f32(4, 5)], {}, (f32(3, 5),)) == 2 * 3 * 4 * 5
    x, w = f32(2, 3, 9, 9), f32(4, 3, 3, 3)
    (out,) = infer("convolution", [x, w, None], CONVOLUTION)
    products = 2 * out.numel * 3 * 3 * 3
    assert flops("convolution", [x, w, None], CONVOLUTION, (out,)) == products + out.numel
    both = {**CONVOLUTION, "output_mask": [True, True, False]}
    assert flops("convolution_backward", [out, x, w], both, (x, w)) == 2 * products


def test_numbers_that_json_cannot_hold_are_written_as_words() -> None:
    for value in (math.inf, -math.inf, 1.5, 3):
        assert number(attribute_number(value)) == value
    assert math.isnan(number(attribute_number(math.nan)))


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=3))
def test_broadcasting_is_numpys(shapes: list[list[int]]) -> None:
    try:
        expected = np.broadcast_shapes(*map(tuple, shapes))
    except ValueError:
        with pytest.raises(OpsetError):
            broadcast(*shapes)
    else:
        assert broadcast(*shapes) == expected


_TYPES = st.builds(
    TensorType,
    st.sampled_from(["float32", "int64", "int32", "uint8", "bool"]),
    st.lists(st.one_of(st.integers(0, 5), st.just(MAX_DIMENSION)), max_size=5).map(tuple),
)
_ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 9),
    st.sampled_from([2**40, -(2**63), 2**200, 10**5000, math.nan, math.inf, 1e300, 0.5]),
    st.sampled_from(["none", "mean", "inf", "float32", ""]),
    st.lists(st.one_of(st.integers(-2, 4), st.booleans(), st.just(2**40)), max_size=6),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=1),
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_hostile_nodes_are_refused_or_typed_but_never_crash(data: st.DataObject) -> None:
    """Whatever a stranger writes into a node, the answer is types within bounds or an OpsetError."""
    spec = OPSET[data.draw(st.sampled_from(sorted(OPSET)))]
    count = len(spec.inputs)
    inputs = data.draw(st.lists(st.one_of(_TYPES, st.none()), min_size=count, max_size=count + 1))
    attrs = {name: data.draw(_ANYTHING) for name in spec.attributes}
    try:
        outputs = infer(spec.name, inputs, attrs)
    except OpsetError as error:
        assert len(str(error)) < 1000
    else:
        assert all(isinstance(each, TensorType) for each in outputs)
        assert flops(spec.name, inputs, attrs, outputs) >= 0


def test_every_attribute_kind_is_used_and_every_attribute_has_one() -> None:
    assert set().union(*(spec.attributes for spec in OPSET.values())) == set(_ATTRIBUTE_KINDS)
