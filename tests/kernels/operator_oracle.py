"""What eager PyTorch makes of the operator cases, and how close a backend must come to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from op_cases import OpCase
from pytorch_reference import REFERENCE

# A float32 result may be as wrong as three times the worst error of PyTorch's own float32 result, plus a few
# roundings of the value itself (PyTorch is sometimes exact by luck) and of the largest value where sums cancel.
EAGER_FACTOR = 3.0
ULPS_OF_VALUE = 4 * 2.0**-23
ULPS_OF_LARGEST = 2.0**-23
# Sums may cancel to almost nothing; their error is measured by the sum of the terms' absolute values.
SUMS = ("sum", "mean", "cumsum", "mm", "bmm", "addmm", "convolution", "convolution_backward", "avg_pool2d")
ULPS_OF_TERMS = 2.0**-23

_computed: dict[tuple[str, torch.dtype, bool], list[np.ndarray[Any, Any]]] = {}


def reference(case: OpCase, real: torch.dtype, absolute: bool = False) -> list[np.ndarray[Any, Any]]:
    """What eager PyTorch makes of the case; computed once for all backends."""
    key = (case.id, real, absolute)
    if key not in _computed:
        _computed[key] = compute_reference(case, real, absolute)
    return _computed[key]


def compute_reference(case: OpCase, real: torch.dtype, absolute: bool) -> list[np.ndarray[Any, Any]]:
    tensors = [None if a is None else torch.from_numpy(np.asarray(np.abs(a)) if absolute else a) for a in case.arrays()]
    wide = [t.to(real) if t is not None and t.is_floating_point() else t for t in tensors]
    with torch.no_grad():
        return [each.detach().numpy() for each in REFERENCE[case.op](wide, case.attrs, real)]


def assert_as_exact_as_eager(case: OpCase, ours: list[Any]) -> None:
    """Each output is right to a small multiple of eager PyTorch's own error."""
    eager, exact = reference(case, torch.float32), reference(case, torch.float64)
    assert len(ours) == len(eager)
    terms = reference(case, torch.float64, absolute=True) if case.op in SUMS else [np.zeros(()) for _ in exact]
    for mine, theirs, true, size in zip(ours, eager, exact, terms, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype or mine.dtype.kind in "iu"
        if mine.dtype != np.float32 or case.op.startswith("random"):
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert_close(mine, theirs, true, ULPS_OF_TERMS * np.broadcast_to(size, true.shape))


def assert_close(mine: Any, theirs: Any, true: Any, allowance: Any) -> None:
    """Infinities and NaN are where eager float32 has them; all else within the tolerance above."""
    finite = np.isfinite(theirs)
    np.testing.assert_array_equal(mine[~finite], theirs[~finite])
    mine, theirs, true, allowance = (a[finite].astype(np.float64) for a in (mine, theirs, true, allowance))
    if mine.size == 0:
        return
    tolerance = EAGER_FACTOR * np.abs(theirs - true).max() + ULPS_OF_VALUE * np.abs(true)
    tolerance += ULPS_OF_LARGEST * np.abs(true).max() + allowance + 2.0**-149
    error = np.abs(mine - true)
    assert (error <= tolerance).all(), f"error {error.max()} at tolerance {tolerance[error.argmax()]}"
