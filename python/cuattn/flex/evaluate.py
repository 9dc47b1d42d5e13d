# SPDX-License-Identifier: Apache-2.0
"""Values of an expression, by numpy: on grids of indices, and as bounds over boxes of them.

An index beyond the end of a captured array reads its nearest element: kernels compute scores of
padding, too. Bounds are sound: what they call impossible is so, in float32 as well as exactly, and
whole numbers that leave int32 on the way are refused. Where a float may be NaN, both bounds are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .expression import BOOL, COMPARISONS, FLOAT, INT, INT32_MAX, Expr, describe, ordered
from .trace import Traced, dtype_name
from .tracers import Unknown, is_jax_tracer

Values = dict[str, Any]  # of the indices, by name
Bounds = tuple[Any, Any]  # least and greatest; of a condition: surely, possibly

NUMPY: dict[str, Callable[..., Any]] = {
    **{"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.true_divide},
    **{"floordiv": np.floor_divide, "mod": np.remainder, "min": np.minimum, "max": np.maximum},
    **{"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal},
    **{"eq": np.equal, "ne": np.not_equal, "and": np.logical_and, "or": np.logical_or},
    **{"xor": np.logical_xor, "not": np.logical_not, "neg": np.negative, "abs": np.abs},
    **{"exp": np.exp, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt, "where": np.where},
}


def as_numpy(array: Any) -> np.ndarray[Any, Any]:
    """Return an array as numpy's; one of a device is copied.

    Raises
    ------
    ValueError
        If it lies on a device and cannot be copied, or is traced by JAX.
    """
    name = dtype_name(array)
    if is_jax_tracer(array):
        raise ValueError(
            f"flex: an array of {name} of shape {tuple(array.shape)} is traced by JAX, and the "
            "host reads its numbers; make it outside of jit, grad and vmap, or let a mask or score "
            "function capture it"
        )
    if type(array).__module__.startswith("jax"):  # on any devices, also spread over a mesh
        array = np.asarray(array)
    if not isinstance(array, np.ndarray):
        device = getattr(array, "__dlpack_device__", lambda: (1, 0))()
        copy = next((getattr(array, n) for n in ("cpu", "get") if hasattr(array, n)), None)
        if device[0] not in (1, 3):
            if copy is None:
                raise ValueError(
                    f"flex: a captured array of shape {tuple(array.shape)} must lie on the CPU, "
                    f"where masks are worked out, got device type {int(device[0])}; move it"
                )
            array = copy()
        array = array.detach() if hasattr(array, "detach") else array
        if name == "bfloat16" and hasattr(array, "float"):
            array = array.float()
        array = np.asarray(array) if hasattr(array, "__array__") else np.from_dlpack(array)
    return array


def on_host(array: Any) -> np.ndarray[Any, Any]:
    """Return a captured array as numpy's, of int32, float32 or bool; one of a device is copied.

    Raises
    ------
    ValueError
        If it holds whole numbers beyond int32, or as `as_numpy` does.
    """
    name = dtype_name(array)
    array = as_numpy(array)
    if name == "bool" or array.dtype == np.bool_:
        return array
    if array.dtype.kind not in "iu":
        return array.astype(np.float32, copy=False)
    if array.dtype.itemsize > 4 and array.size:
        low, high = int(array.min()), int(array.max())
        if low < -INT32_MAX or high > INT32_MAX:
            raise ValueError(
                f"flex: a captured array of {name} must hold numbers within int32, got {low} to "
                f"{high}; number them anew, as np.unique(x, return_inverse=True) does"
            )
    return array.astype(np.int32, copy=False)


def bounds_of_unknown(array: Unknown) -> Bounds:
    """Return the bounds of any element; of floats, which may be NaN, there are none."""
    kind = np.dtype(dtype_name(array)) if array.dtype.kind in "iu" else None
    if kind is None:
        return (0, 1) if array.dtype.kind == "b" else (np.nan, np.nan)
    limits = np.iinfo(kind)
    return np.int64(max(limits.min, -INT32_MAX)), np.int64(min(limits.max, INT32_MAX))


class Host:
    """The captured arrays and numbers of a traced function, read once for a call."""

    def __init__(self, traced: Traced):
        self.scalars = traced.scalars
        self.arrays: list[Any]
        self.arrays = [x if isinstance(x, Unknown) else on_host(x) for x in traced.arrays]

    def reads_unknown(self, expr: Expr) -> bool:
        """Whether an expression reads an array that the host does not know."""
        return any(
            node.op == "load" and isinstance(self.arrays[node.args[0]], Unknown)
            for node in ordered(expr)
        )


def evaluate(host: Host, expr: Expr, values: Values, dtype: Any = np.float32) -> Any:
    """Return an expression for indices (and a score) that broadcast; floats are of `dtype`."""
    found: dict[int, Any] = {}  # by id of the node
    for node in ordered(expr):
        args = [found[id(a)] if isinstance(a, Expr) else a for a in node.args]
        if node.op == "index":
            found[id(node)] = values[args[0]]
        elif node.op in ("const", "scalar"):
            x = args[0] if node.op == "const" else host.scalars[args[0]]
            found[id(node)] = dtype(x) if node.type == FLOAT else x
        elif node.op == "load":
            array = host.arrays[args[0]]
            array = on_host(array) if isinstance(array, Unknown) else array  # which refuses
            at = tuple(np.clip(i, 0, n - 1) for i, n in zip(args[2:], array.shape, strict=True))
            x = array[at]
            found[id(node)] = x.astype(dtype) if node.type == FLOAT else widened(x, node.type)
        elif node.op == "float":
            found[id(node)] = np.asarray(args[0]).astype(dtype)
        else:
            with np.errstate(all="ignore"):
                found[id(node)] = NUMPY[node.op](*args)
    return found[id(expr)]


def widened(x: Any, kind: str) -> Any:
    """Return whole numbers as int64, in which bounds and grids do not overflow."""
    return x.astype(np.int64) if kind == INT else x


# Bounds


class Tables:
    """Least and greatest element of any range of a one-dimensional array, by doubling."""

    def __init__(self, array: np.ndarray[Any, Any]):
        array = widened(array, INT) if array.dtype.kind in "iu" else array
        self.levels = [(array, array)]

    def level(self, n: int) -> Bounds:
        """Return the bounds of every 2^n neighbours."""
        while len(self.levels) <= n:
            step = 1 << (len(self.levels) - 1)
            low, high = self.levels[-1]
            joined = np.minimum(low[:-step], low[step:]), np.maximum(high[:-step], high[step:])
            self.levels.append(joined)
        return self.levels[n]

    def bounds(self, low: Any, high: Any) -> Bounds:
        """Return those of the elements low to high, both included."""
        last = len(self.levels[0][0]) - 1
        low, high = np.broadcast_arrays(np.clip(low, 0, last), np.clip(high, 0, last))
        level = np.frexp((high - low + 1).astype(np.float64))[1] - 1
        kind = self.levels[0][0].dtype
        least, most = np.empty(low.shape, kind), np.empty(low.shape, kind)
        for n in np.unique(level):
            lows, highs = self.level(int(n))
            at = level == n
            first, second = low[at], high[at] + 1 - (1 << int(n))
            least[at] = np.minimum(lows[first], lows[second])
            most[at] = np.maximum(highs[first], highs[second])
        return least, most


def load_bounds(array: Any, indices: list[Bounds]) -> Bounds:
    """Return the bounds of a captured array's elements over boxes of indices."""
    if isinstance(array, Unknown):
        return bounds_of_unknown(array)
    array = array.astype(np.int8) if array.dtype == np.bool_ else array
    if array.ndim == 0:
        return array[()], array[()]
    if array.ndim == 2:  # one row where that is known, else all of them together
        low, high = (np.unique(np.clip(i, 0, len(array) - 1)) for i in indices[0])
        if len(low) == len(high) == 1 and low[0] == high[0]:
            return Tables(array[low[0]]).bounds(*indices[1])
        least, most = array.min(axis=0), array.max(axis=0)
        return Tables(least).bounds(*indices[1])[0], Tables(most).bounds(*indices[1])[1]
    return Tables(array).bounds(*indices[0])


def float_error(bounds: Bounds) -> Bounds:
    """Widen by more than the rounding of a float32 operation, or of another exp."""
    low, high = (np.asarray(x, np.float64) for x in bounds)
    with np.errstate(all="ignore"):
        least, most = low - np.abs(low) * 1e-6 - 1e-37, high + np.abs(high) * 1e-6 + 1e-37
    least, most = (
        np.where(low >= 0, np.maximum(least, 0), least),
        np.where(  # signs stay
            high <= 0, np.minimum(most, 0), most
        ),
    )
    is_nan = np.isnan(low) | np.isnan(high)
    return np.where(is_nan, np.nan, least), np.where(is_nan, np.nan, most)


def is_infinite(a: Bounds) -> Any:
    """Whether a number may be infinite."""
    return np.isinf(a[0]) | np.isinf(a[1])


def has_zero(a: Bounds) -> Any:
    """Whether a number may be 0."""
    return (np.asarray(a[0]) <= 0) & (np.asarray(a[1]) >= 0)


def nan_where(condition: Any, a: Bounds) -> Bounds:
    """Return bounds, NaN where a condition says that a number may be that."""
    return np.where(condition, np.nan, a[0]), np.where(condition, np.nan, a[1])


def product(a: Bounds, b: Bounds, op: Callable[[Any, Any], Any]) -> Bounds:
    """Return the bounds of a product or quotient, from its corners."""
    with np.errstate(all="ignore"):
        corners = [op(x, y) for x in a for y in b]
    low, high = corners[0], corners[0]
    for x in corners[1:]:
        low, high = np.minimum(low, x), np.maximum(high, x)  # NaN stays
    return low, high


def multiplied(a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of a product of floats."""
    is_nan = (is_infinite(a) & has_zero(b)) | (is_infinite(b) & has_zero(a))
    return nan_where(is_nan, product(a, b, np.multiply))


def divided(a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of a quotient."""
    low, high = product(a, b, np.true_divide)
    any_size = has_zero(b)
    is_nan = (any_size & has_zero(a)) | (is_infinite(a) & is_infinite(b)) | np.isnan(a[0])
    low, high = np.where(any_size, -np.inf, low), np.where(any_size, np.inf, high)
    return nan_where(is_nan, (low, high))


def remainder(a: Bounds, divisor: Any) -> Bounds:
    """Return the bounds of a remainder by a positive number."""
    is_one_period = np.floor_divide(a[0], divisor) == np.floor_divide(a[1], divisor)
    low = np.where(is_one_period, np.remainder(a[0], divisor), 0)
    return low, np.where(is_one_period, np.remainder(a[1], divisor), divisor - 1)


def magnitude(a: Bounds) -> Bounds:
    """Return the bounds of the size of a number."""
    low, high = np.abs(a[0]), np.abs(a[1])
    return np.where(has_zero(a), 0, np.minimum(low, high)), np.maximum(low, high)


def monotone(op: str, a: Bounds) -> Bounds:
    """Return the bounds of a function that never falls."""
    with np.errstate(all="ignore"):
        low, high = NUMPY[op](np.float64(a[0])), NUMPY[op](np.float64(a[1]))
    return nan_where(np.isnan(low), (low, high))  # also the greatest of log(-1 to 1)


def compared(op: str, a: Bounds, b: Bounds) -> Bounds:
    """Return whether a comparison surely, and whether it possibly holds."""
    surely, possibly = compared_numbers(op, a, b)
    is_nan = np.isnan(a[0]) | np.isnan(b[0])
    return surely & np.logical_not(is_nan), possibly | is_nan


def compared_numbers(op: str, a: Bounds, b: Bounds) -> Bounds:
    """Return the same, of what is not NaN."""
    (low, high), (least, most) = a, b
    if op in ("gt", "ge"):
        return compared_numbers("lt" if op == "gt" else "le", b, a)
    if op in ("lt", "le"):
        return NUMPY[op](high, least), NUMPY[op](low, most)
    one = (low == high) & (least == most) & (low == least)
    meet = (low <= most) & (least <= high)
    return (one, meet) if op == "eq" else (np.logical_not(meet), np.logical_not(one))


def joined(op: str, a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of two conditions joined."""
    if op != "xor":
        return NUMPY[op](a[0], b[0]), NUMPY[op](a[1], b[1])
    false_a, false_b = np.logical_not(a[1]), np.logical_not(b[1])
    surely = np.logical_or(np.logical_and(a[0], false_b), np.logical_and(b[0], false_a))
    equal = np.logical_or(np.logical_and(a[0], b[0]), np.logical_and(false_a, false_b))
    return surely, np.logical_not(equal)


def chosen(kind: str, c: Bounds, x: Bounds, y: Bounds) -> Bounds:
    """Return the bounds of one of two values."""
    surely, never = c[0], np.logical_not(c[1])
    if kind == BOOL:
        both = joined("and", x, y)[0], joined("or", x, y)[1]
    else:
        both = np.minimum(x[0], y[0]), np.maximum(x[1], y[1])
    low = np.where(surely, x[0], np.where(never, y[0], both[0]))
    return low, np.where(surely, x[1], np.where(never, y[1], both[1]))


def bounds_of_sum(node: Expr, a: Bounds, b: Bounds) -> Bounds:
    """Return the bounds of a sum; two infinities may be NaN together."""
    total = a[0] + b[0], a[1] + b[1]
    return total if node.type == INT else nan_where(is_infinite(a) & is_infinite(b), total)


def bounds_of(node: Expr, args: list[Any]) -> Bounds:
    """Return the bounds of an operation from those of its arguments."""
    op = node.op
    if op in COMPARISONS:
        return compared(op, *args)
    if op in ("and", "or", "xor"):
        return joined(op, *args)
    if op == "not":
        return np.logical_not(args[0][1]), np.logical_not(args[0][0])
    if op == "where":
        return chosen(node.type, *args)
    if op in ("mul", "div"):
        if op == "mul" and node.type == INT:
            return product(args[0], args[1], np.multiply)
        return multiplied(*args) if op == "mul" else divided(*args)
    if op == "mod":
        return remainder(args[0], args[1][0])
    if op == "floordiv":
        return args[0][0] // args[1][0], args[0][1] // args[1][0]
    if op == "sub":
        return bounds_of_sum(node, args[0], (-args[1][1], -args[1][0]))
    if op == "add":
        return bounds_of_sum(node, *args)
    if op in ("min", "max"):
        return NUMPY[op](args[0][0], args[1][0]), NUMPY[op](args[0][1], args[1][1])
    if op == "neg":
        return -args[0][1], -args[0][0]
    if op == "abs":
        return magnitude(args[0])
    return args[0] if op == "float" else monotone(op, args[0])


def bounds(host: Host, expr: Expr, boxes: dict[str, Bounds], reads_floats: bool = True) -> Bounds:
    """Return the bounds of an expression over boxes of indices, which broadcast.

    Without `reads_floats` captured floats may be any.

    Raises
    ------
    ValueError
        If a whole number on the way may lie beyond int32.
    """
    found: dict[int, Bounds] = {}  # by id of the node
    for node in ordered(expr):
        args: list[Any] = [found[id(a)] if isinstance(a, Expr) else a for a in node.args]
        if node.op == "index":
            r = boxes[args[0]]
        elif node.op in ("const", "scalar"):
            x = args[0] if node.op == "const" else host.scalars[args[0]]
            r = (np.int64(x), np.int64(x)) if node.type == INT else (x, x)
        elif node.op == "load" and node.type == FLOAT and not reads_floats:
            r = (-np.inf, np.inf)
        elif node.op == "load":
            r = load_bounds(host.arrays[args[0]], args[2:])
            r = (r[0] != 0, r[1] != 0) if node.type == BOOL else r
        else:
            with np.errstate(all="ignore"):
                r = bounds_of(node, args)
        if node.type == FLOAT and node.op not in ("load", "index", "neg", "abs", "min", "max"):
            r = float_error(r)
        elif node.type == INT and (np.min(r[0]) < -INT32_MAX or np.max(r[1]) > INT32_MAX):
            raise ValueError(
                f"flex: {describe(node)} may reach {int(np.min(r[0]))} to {int(np.max(r[1]))}, "
                "beyond int32, which indices are computed in; write it in floats"
            )
        found[id(node)] = r
    return found[id(expr)]
