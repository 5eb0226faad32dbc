"""ATen's reductions and matrix products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from work_generator.export.context import Context, Entry, dim_of, dims_of, truth
from work_generator.export.draft import Scalar, Value


def _sum(c: Context, x: Value, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
    if c.type.dtype == "float32":
        x = c.cast(x, "float32")
    return c.one("sum", [x], dims=dims_of(dims, len(x.shape)), keepdim=keepdim)


def _reduction(op: str) -> Entry:
    def entry(c: Context, x: Value, dims: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Value:
        if c.type.dtype == "float32":
            x = c.cast(x, "float32")
        if op in ("amax", "amin") and x.dtype == "bool":
            return c.one("any" if op == "amax" else "all", [x], dims=dims_of(dims, len(x.shape)), keepdim=keepdim)
        if op in ("any", "all"):
            x = truth(c, x)
        return c.one(op, [x], dims=dims_of(dims, len(x.shape)), keepdim=keepdim)

    return entry


def _extreme(op: str, where: str) -> Entry:
    """max.dim and min.dim: values and where they are."""

    def entry(c: Context, x: Value, dim: int, keepdim: bool = False) -> tuple[Value, Value]:
        if not x.shape:
            return x, c.scalar(0, "int64")
        dim = dim_of(dim, len(x.shape))
        return c.one(op, [x], dims=[dim], keepdim=keepdim), c.one(where, [x], dim=dim, keepdim=keepdim)

    return entry


def _argument(op: str) -> Entry:
    def entry(c: Context, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        if not x.shape:
            return c.scalar(0, "int64")
        return c.one(op, [x], dim=None if dim is None else dim_of(dim, len(x.shape)), keepdim=keepdim)

    return entry


def _variance(
    c: Context, x: Value, dims: Any = None, unbiased: Any = True, keepdim: bool = False, **named: Any
) -> Value:
    correction = named.get("correction", 1 if unbiased else 0)
    return _variance_about(c, x, dims, 1 if correction is None else correction, named.get("keepdim", keepdim))[0]


def _variance_about(c: Context, x: Value, dims: Any, correction: Scalar, keepdim: bool) -> tuple[Value, Value]:
    reduced = dims_of(dims, len(x.shape))
    count = 1
    for d in reduced:
        count *= x.shape[d]
    mean = c.one("mean", [x], dims=reduced, keepdim=True)
    away = c.one("sub", [x, mean])
    total = c.one("sum", [c.one("mul", [away, away])], dims=reduced, keepdim=keepdim)
    kept = mean if keepdim else c.reshape(mean, [s for d, s in enumerate(x.shape) if d not in reduced])
    return c.one("div", [total, c.scalar(max(count - correction, 0), "float32")]), kept


def _var_mean(
    c: Context, x: Value, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> tuple[Value, Value]:
    return _variance_about(c, x, dims, 1 if correction is None else correction, keepdim)


def _vector_norm(
    c: Context, x: Value, order: Scalar = 2, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Value:
    x, reduced = c.cast(x, "float32"), dims_of(dims, len(x.shape))
    if order in (float("inf"), float("-inf")):
        return c.one("amax" if order > 0 else "amin", [c.one("abs", [x])], dims=reduced, keepdim=keepdim)
    if order == 2:
        total = c.one("sum", [c.one("mul", [x, x])], dims=reduced, keepdim=keepdim)
        return c.one("sqrt", [total])
    powers = c.one("abs", [x])
    if order == 0:
        powers = c.cast(truth(c, x), "float32")
    elif order != 1:
        powers = c.one("pow", [powers, c.scalar(order, "float32")])
    total = c.one("sum", [powers], dims=reduced, keepdim=keepdim)
    return total if order in (0, 1) else c.one("pow", [total, c.scalar(1 / order, "float32")])


def _cumsum(c: Context, x: Value, dim: int, *, dtype: Any = None) -> Value:
    if not x.shape:
        return c.cast(x, c.type.dtype)
    if c.type.dtype == "float32":
        x = c.cast(x, "float32")
    return c.one("cumsum", [x], dim=dim_of(dim, len(x.shape)))


# --- matrices ---


def _mm(c: Context, a: Value, b: Value) -> Value:
    return c.one("mm", [a, b])


def _bmm(c: Context, a: Value, b: Value) -> Value:
    return c.one("bmm", [a, b])


def _times(c: Context, x: Value, factor: Scalar) -> Value:
    return c.one("mul", [x, c.scalar(factor, x.dtype)])


def _addmm(c: Context, bias: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    if alpha == 1 and beta == 1:
        return c.one("addmm", [bias, a, b])
    product = _times(c, c.one("mm", [a, b]), alpha)
    return product if beta == 0 else c.one("add", [_times(c, bias, beta), product])


def _baddbmm(c: Context, bias: Value, a: Value, b: Value, *, beta: Scalar = 1, alpha: Scalar = 1) -> Value:
    product = _times(c, c.one("bmm", [a, b]), alpha)
    return product if beta == 0 else c.one("add", [_times(c, bias, beta), product])


def _mv(c: Context, a: Value, x: Value) -> Value:
    return c.reshape(c.one("mm", [a, c.reshape(x, (x.shape[0], 1))]), c.type.shape)


def _dot(c: Context, a: Value, b: Value) -> Value:
    return c.one("sum", [c.one("mul", [a, b])], dims=[0], keepdim=False)


ENTRIES: Mapping[str, Entry] = {
    # reductions
    "aten.sum.dim_IntList": _sum,
    "aten.sum.default": _sum,
    "aten.mean.dim": _reduction("mean"),
    "aten.mean.default": _reduction("mean"),
    "aten.amax.default": _reduction("amax"),
    "aten.amin.default": _reduction("amin"),
    "aten.max.default": _reduction("amax"),
    "aten.min.default": _reduction("amin"),
    "aten.max.dim": _extreme("amax", "argmax"),
    "aten.min.dim": _extreme("amin", "argmin"),
    "aten.prod.default": _reduction("prod"),
    "aten.prod.dim_int": _reduction("prod"),
    "aten.any.default": _reduction("any"),
    "aten.any.dim": _reduction("any"),
    "aten.any.dims": _reduction("any"),
    "aten.all.default": _reduction("all"),
    "aten.all.dim": _reduction("all"),
    "aten.all.dims": _reduction("all"),
    "aten.argmax.default": _argument("argmax"),
    "aten.argmin.default": _argument("argmin"),
    "aten.var.correction": _variance,
    "aten.var.dim": _variance,
    "aten.var_mean.correction": _var_mean,
    "aten.cumsum.default": _cumsum,
    "aten.linalg_vector_norm.default": _vector_norm,
    # matrices
    "aten.mm.default": _mm,
    "aten.bmm.default": _bmm,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _baddbmm,
    "aten.mv.default": _mv,
    "aten.dot.default": _dot,
}
