"""What an entry of the translation tables writes with, and the words of a refusal.

What it is: `Context` (the draft, the result's type, the model's line) and helpers shared by the tables
aten_*.py. An entry receives a Context and the ATen arguments, tensors as `Value`s, and returns the
value or values that ATen would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from boinc_project.contract.opset import TensorType
from work_generator.export.draft import Draft, Scalar, Value
from work_generator.export.errors import ExportError

DTYPES: Mapping[torch.dtype, str] = {
    torch.float32: "float32",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
    torch.bool: "bool",
}
TORCH_DTYPES: Mapping[str, torch.dtype] = {name: dtype for dtype, name in DTYPES.items()}


@dataclass
class Context:
    """What an entry of the table writes with: the draft, the result's type and the model's line."""

    draft: Draft
    target: str
    out: Sequence[TensorType | None]
    where: str
    random: tuple[Value, Value] | None  # seed and step; None where nothing may be random
    contiguous: bool = True  # whether ATen has the first operand in the order of its elements

    def one(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> Value:
        return self.draft.one(op, inputs, attrs, self.where)

    def many(self, op: str, inputs: Sequence[Value | None], **attrs: Any) -> tuple[Value, ...]:
        return self.draft.node(op, inputs, attrs, self.where)

    def scalar(self, value: Scalar, dtype: str) -> Value:
        return self.draft.scalar(value, dtype, self.where)

    def full(self, shape: Sequence[int], value: Scalar, dtype: str) -> Value:
        return self.draft.full(shape, value, dtype, self.where)

    def cast(self, x: Value, dtype: str) -> Value:
        return self.one("cast", [x], dtype=dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        return self.one("reshape", [x], shape=list(shape))

    @property
    def type(self) -> TensorType:
        """Type of the (first) result."""
        first = self.out[0]
        assert first is not None, self.target
        return first

    def operand(self, x: Value | Scalar, dtype: str) -> Value:
        """A tensor or Python number as a value of this dtype."""
        return self.cast(x, dtype) if isinstance(x, Value) else self.scalar(x, dtype)

    def refuse(self, problem: str, remedy: str) -> ExportError:
        return refusal(self.target, problem, self.where, remedy)


Entry = Callable[..., Value | tuple[Value | None, ...]]


def refusal(target: str, problem: str, where: str, remedy: str) -> ExportError:
    """The one sentence of a refusal."""
    return ExportError(f"{target} {problem} (at {where or 'a line outside the model'}): {remedy}")


def promoted(*operands: Value | Scalar) -> str:
    """The dtype in which ATen computes with these operands."""
    result: Any = None
    for x in operands:
        # result_type weighs tensors with dimensions over 0-d ones over Python numbers.
        sample: Any = (
            torch.empty([1] * min(len(x.shape), 1), dtype=TORCH_DTYPES[x.dtype]) if isinstance(x, Value) else x
        )
        result = sample if result is None else _wider(result, sample)
    dtype = result.dtype if isinstance(result, Tensor) else torch.result_type(torch.empty(()), result)
    return DTYPES.get(dtype, "float32")


def _wider(a: Any, b: Any) -> Tensor:
    dims = max((x.dim() for x in (a, b) if isinstance(x, Tensor)), default=0)
    return torch.empty([1] * dims, dtype=torch.result_type(a, b))


REMEDIES: Mapping[str, str] = {
    "aten.nonzero": "its result's size depends on the data: use torch.where(mask, a, b) or multiply by the mask",
    "aten.masked_select": "its result's size depends on the data: use torch.where(mask, a, b) or multiply by the mask",
    "aten._unique2": "its result's size depends on the data: count with one_hot and sum instead",
    "aten.unique": "its result's size depends on the data: count with one_hot and sum instead",
    "aten._fft": "complex numbers are not in the opset: use real arithmetic, for example a convolution",
    "aten.complex": "complex numbers are not in the opset: keep real and imaginary parts as two tensors",
    "aten.view_as_complex": "complex numbers are not in the opset: write the rotation with sin and cos",
    "aten.as_strided": "use reshape, permute, slices or index instead",
    "aten.upsample": 'use F.interpolate(mode="nearest") or a transposed convolution',
    "aten.cumprod": "use exp of a cumsum of logarithms",
}
DEFAULT_REMEDY = "write that line with operators of the opset (docs/own_model.md lists them)"


def without_remedy_of(target: str) -> str:
    """The remedy for an operator that the table does not have."""
    for prefix, remedy in REMEDIES.items():
        if target.startswith(prefix):
            return remedy
    return DEFAULT_REMEDY


def dim_of(dim: int, rank: int) -> int:
    """ATen's dimension, which may count from the end, as the opset's."""
    return dim % rank if rank else 0


def dims_of(dims: Any, rank: int) -> list[int]:
    """ATen's dims (None, an int, or a list, [] meaning all) as the opset's."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(rank))
    return [dim_of(d, rank) for d in ([dims] if isinstance(dims, int) else dims)] if rank else []


def truth(c: Context, x: Value | Scalar) -> Value:
    """A tensor or number as bool: whether it is not zero."""
    if not isinstance(x, Value):
        return c.scalar(bool(x), "bool")
    return x if x.dtype == "bool" else c.one("ne", [x, c.scalar(0, x.dtype)])
