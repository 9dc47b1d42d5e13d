# SPDX-License-Identifier: Apache-2.0
"""Runs a mask or score function once, on symbols, and keeps the expression that it returns.

The function is rebuilt first: arrays in its closure, defaults and globals are replaced by
`Captured` ones, because `array[q_idx]` calls the array's own `__getitem__`, which knows nothing of
symbols. Numbers of the closure and the defaults become scalars that are read at each call, so that
another window is no other expression; where a function branches on one, it is traced again with all
of them as constants. Functions inside are rebuilt too, so `and_masks(*masks)` works.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import hashlib
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .expression import (
    BOOL,
    FLOAT,
    FOLD,
    INT,
    KV_LEN,
    Q_LEN,
    SCORE,
    B,
    Expr,
    H,
    K,
    Operand,
    Q,
    TraceError,
    describe,
    in_int32,
    is_const,
    ordered,
    read,
    to_float,
)
from .lengths import parameters
from .text import listing
from .tracers import Unknown, is_jax_tracer, original, refuse_batched, running

MAX_AXES = 2
GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # the latter of class bodies
FOREIGN = ("numpy", "torch", "jax", "cupy", "math", "cuattn")  # whose functions run as they are
KINDS = {
    **dict.fromkeys(("int8", "int16", "int32", "int64", "uint8", "uint16"), INT),
    **dict.fromkeys(("float16", "bfloat16", "float32", "float64"), FLOAT),
    "bool": BOOL,
}


def dtype_name(array: Any) -> str:
    """Return the name of an array's dtype in any library."""
    return str(array.dtype).rsplit(".", maxsplit=1)[-1]


class Captured(Operand):
    """Stands for an array while a function is traced; indexed all at once or axis by axis."""

    __slots__ = ("indices", "kind", "ndim", "shape", "slot")

    def __init__(self, shape: tuple[int, ...], kind: str, slot: int, indices: tuple[Expr, ...]):
        self.shape, self.kind, self.slot, self.indices = shape, kind, slot, indices
        self.ndim = len(shape)

    def __getitem__(self, where: Any) -> Any:
        indices = (*self.indices, *(where if isinstance(where, tuple) else (where,)))
        if len(indices) > self.ndim:
            raise TraceError(
                f"a captured array of shape {self.shape} takes {self.ndim} indices, got "
                f"{len(indices)}"
            )
        read_indices = tuple(map(self.index, indices, self.shape))
        if len(indices) < self.ndim:
            return Captured(self.shape, self.kind, self.slot, read_indices)
        return Expr("load", (self.slot, KINDS[self.kind], *read_indices), KINDS[self.kind])

    def index(self, i: Any, extent: int) -> Expr:
        """Return an index of an axis as a node; -1 is the last, where it is written as a number."""
        try:
            node = read(i)
        except TraceError:
            node = None
        if node is None or node.type != INT:
            got = type(i).__name__ if node is None else f"the {node.type} {describe(node)}"
            raise TraceError(
                f"a captured array of shape {self.shape} is indexed by whole numbers made of b, h, "
                f"q_idx and kv_idx, got {got}"
            )
        if is_const(node) and -extent <= node.args[0] < 0:
            return read(node.args[0] + extent)
        return node

    def value(self) -> Expr:
        """Return the element, where there are no axes left to index."""
        if self.ndim > len(self.indices):
            raise TraceError(
                f"{self} is indexed by b, h, q_idx or kv_idx before it is computed with; "
                f"{self.ndim - len(self.indices)} of {self.ndim} indices are missing"
            )
        return self[()]

    def __len__(self) -> int:
        return self.shape[len(self.indices)]

    def __str__(self) -> str:
        return f"a captured array of shape {self.shape}"


class Number(Operand):
    """Stands for a number of the closure while a function is traced: it is read at each call.

    A function that looks at its class or writes it into a text finds the number itself: what was
    traced is kept only as long as all numbers stay (`same`).
    """

    __slots__ = ("node", "number")

    def __init__(self, node: Expr, number: Any):
        self.node, self.number = node, number

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self.number)

    def value(self) -> Expr:
        """Return the node that reads it."""
        return self.node

    def __str__(self) -> str:
        return str(self.number)

    def __format__(self, form: str) -> str:
        return format(self.number, form)


class Traced:
    """A function as an expression, with the arrays and numbers that it reads."""

    def __init__(self, name: str, is_score: bool):
        self.name, self.is_score = name, is_score
        self.arrays: list[Any] = []  # an Unknown for one that JAX traces
        self.scalars: list[Any] = []
        self.expr: Expr = read(True)
        self.kept: dict[Any, Any] = {}  # what calls found out with it (memo.py)

    def __str__(self) -> str:
        return str(self.expr)

    def reading(self, arrays: list[Any]) -> Traced:
        """Return the same expression of other arrays, in the order of its own."""
        other = Traced(self.name, self.is_score)
        other.arrays, other.scalars, other.expr = arrays, self.scalars, self.expr
        return other

    def key(self) -> str:
        """Return a hash of the expression: no number, length, shape, address or name is in it."""
        return hashlib.sha256(listing(self.expr).encode()).hexdigest()[:32]


def is_array(x: Any) -> bool:
    """Whether something is an array to capture."""
    if isinstance(x, np.generic) or not hasattr(x, "shape"):
        return False
    return hasattr(x, "__dlpack__") or is_jax_tracer(x)


def refuse_int64(x: Any) -> None:
    """Refuse an array that JAX traces if it is of int64, which may be cut off unseen."""
    if dtype_name(x) == "int64":
        raise ValueError(
            f"flex_attention: a captured array of int64 of shape {tuple(x.shape)} is traced by "
            "JAX, so that nobody sees whether it fits int32; capture x.astype(jax.numpy.int32)"
        )


def is_number(x: Any) -> bool:
    """Whether something is a number that may change between calls."""
    return isinstance(x, (int, float, np.integer, np.floating)) and not isinstance(x, bool)


def is_own(function: Any) -> bool:
    """Whether a function is the user's, and to be rebuilt."""
    names = (getattr(function, "__module__", None), function.__globals__.get("__name__"))  # wraps
    return any(str(n or "").split(".")[0] not in FOREIGN or n in MODS for n in names)


READY = ("cuattn.flex.masks", "cuattn.flex.scores")  # whose functions make masks and scores
# Modules that hold functions of functions: those are rebuilt, too.
MODS = (*READY, "cuattn.flex.block_mask", "torch.nn.attention.flex_attention")


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """List the code of a function and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


@functools.lru_cache(maxsize=1024)
def names_of(code: types.CodeType) -> tuple[str, ...]:
    """List the globals, not the attributes, that a function and the functions inside it read."""
    steps = (step for inner in codes_of(code) for step in dis.get_instructions(inner))
    return tuple(dict.fromkeys(x.argval for x in steps if x.opname in GLOBALS))


class Rebuilder:
    """Replaces what a function reaches: arrays by captured ones, numbers by scalars."""

    def __init__(self, traced: Traced, keeps_scalars: bool):
        self.traced, self.keeps_scalars = traced, keeps_scalars
        self.seen: dict[int, tuple[Any, Any]] = {}  # by id: what, and by what it is replaced
        self.asks_types = False  # by type(), which sees through what stands for a number

    def capture(self, array: Any) -> Captured:
        """Return what stands for an array."""
        refuse_batched(array)
        kind, shape = dtype_name(array), tuple(array.shape)
        if kind not in KINDS:
            raise TraceError(
                f"a captured array must hold {', '.join(KINDS)}, got {kind} of shape {shape}; "
                "cast it"
            )
        if len(shape) > MAX_AXES or 0 in shape or any(n > 2**31 - 1 for n in shape):
            raise TraceError(
                f"a captured array has 0 to {MAX_AXES} axes of 1 to 2^31 - 1 elements, got shape "
                f"{shape}; reshape it, and compute an index of two as one"
            )
        self.traced.arrays.append(Unknown(array) if is_jax_tracer(array) else array)
        return Captured(shape, kind, len(self.traced.arrays) - 1, ())

    def scalar(self, x: Any) -> Number:
        """Return what stands for a number that is read at each call."""
        kind = FLOAT if isinstance(x, (float, np.floating)) else INT
        self.traced.scalars.append(float(x) if kind == FLOAT else int(x))
        if kind == INT:
            in_int32(int(x), "a number of the closure")
        return Number(Expr("scalar", (len(self.traced.scalars) - 1,), kind), x)

    def replace(self, x: Any, is_inside: bool) -> Any:
        """Return what stands for something that a function reaches."""
        if is_inside and self.keeps_scalars and is_number(x):
            return self.scalar(x)  # each its own: two names of one number may part later
        if id(x) not in self.seen:
            self.seen[id(x)] = (x, x)  # of a function that reaches itself
            self.seen[id(x)] = (x, self.replaced(x, is_inside))
        return self.seen[id(x)][1]

    def replaced(self, x: Any, is_inside: bool) -> Any:
        """Return the same, of what was not met yet."""
        if is_array(x):
            return self.capture(x)
        if type(x) in (tuple, list):
            parts = [self.replace(y, is_inside) for y in x]
            return x if all(y is z for y, z in zip(x, parts, strict=True)) else type(x)(parts)
        if type(x) is dict:
            return {name: self.replace(y, is_inside) for name, y in x.items()}
        if isinstance(x, functools.partial):
            given = {name: self.replace(y, True) for name, y in x.keywords.items()}
            args = (self.replace(y, True) for y in x.args)
            return functools.partial(self.replace(x.func, is_inside), *args, **given)
        if isinstance(x, types.MethodType):
            return types.MethodType(self.replace(x.__func__, is_inside), x.__self__)
        return self.rebuilt(x) if isinstance(x, types.FunctionType) and is_own(x) else x

    def rebuilt(self, f: types.FunctionType) -> types.FunctionType:
        """Return a function with all that it reaches replaced."""
        self.asks_types |= "type" in names_of(f.__code__)
        cells = tuple(self.cell(cell) for cell in f.__closure__ or ())
        known = f.__globals__
        names = {name: known[name] for name in names_of(f.__code__) if name in known}
        changed = {name: self.replace(x, False) for name, x in names.items()}
        is_same = all(changed[name] is x for name, x in names.items())
        scope = known if is_same else {**known, **changed}
        defaults = tuple(self.replace(x, True) for x in f.__defaults__ or ())
        g = types.FunctionType(f.__code__, scope, f.__name__, defaults, cells)
        g.__kwdefaults__ = {n: self.replace(x, True) for n, x in (f.__kwdefaults__ or {}).items()}
        g.__dict__.update((n, self.replace(x, True)) for n, x in f.__dict__.items() if n[0] != "_")
        return g

    def cell(self, cell: Any) -> Any:
        """Return a cell of a closure with what it holds replaced."""
        try:
            return types.CellType(self.replace(cell.cell_contents, True))
        except ValueError:  # nothing in it yet
            return cell


def run(function: Any, traced: Traced, keeps_scalars: bool) -> Expr:
    """Return what the rebuilt function gives for symbols."""
    if not isinstance(function, (types.FunctionType, types.MethodType, functools.partial)):
        function = function.__call__
    rebuilder = Rebuilder(traced, keeps_scalars)
    rebuilt = rebuilder.replace(function, True)
    if rebuilder.asks_types and traced.scalars:
        raise TraceError("a function that calls type() is traced with its numbers as constants")
    asked = {n: {"q_len": Q_LEN, "kv_len": KV_LEN}[n] for n in parameters(function)}
    symbols = (SCORE, B, H, Q, K) if traced.is_score else (B, H, Q, K)
    with running(traced.is_score):
        return checked(read(rebuilt(*symbols, **asked)), traced.scalars)


def checked(expr: Expr, scalars: list[Any]) -> Expr:
    """Refuse numbers that mean something else as constants, which they become then."""
    numbers: dict[int, int] = {}  # whole ones, of scalars and constants alone, by id of the node
    for node in ordered(expr):
        args = [numbers.get(id(x)) for x in node.nodes()]
        for x, number in zip(node.nodes(), args, strict=True):
            if number is None or x.op == "const":
                continue
            is_divisor = node.op in ("floordiv", "mod") and x is node.args[1]
            if number < is_divisor and (is_divisor or node.op == "load"):
                raise TraceError(f"{describe(node)} takes no {number} for {describe(x)}")
        if node.type != INT:
            continue
        if node.op in ("const", "scalar"):
            numbers[id(node)] = node.args[0] if node.op == "const" else scalars[node.args[0]]
        elif node.op in FOLD and None not in args:
            numbers[id(node)] = FOLD[node.op](*args)
    return expr


def trace(function: Callable[..., Any], is_score: bool = False) -> Traced:
    """Trace a mask function, or a score function; the result is kept with the function.

    Raises
    ------
    TraceError
        If the function does what cannot be written down: a TypeError that says the way out.
    """
    if isinstance(function, Traced):
        return function
    what = "score_mod" if is_score else "mask_mod"
    if not callable(function):
        takes = "(score, b, h, q_idx, kv_idx)" if is_score else "(b, h, q_idx, kv_idx)"
        raise TraceError(f"{what} must be a function {takes}, got {type(function).__name__}")
    reached = list(reach(function))
    is_kept = all(map(is_settled, reached))
    known = remembered(function, is_score) if is_kept else None
    if known is not None and same(known[0], reached):
        return known[1]
    name = getattr(function, "__qualname__", type(function).__name__)
    traced = trace_anew(function, is_score, what, name)
    if is_kept:
        remember(function, is_score, reached, traced)
    return traced


def trace_anew(function: Any, is_score: bool, what: str, name: str) -> Traced:
    """Trace a function: with its numbers as scalars, else as constants."""
    if getattr(function, "__module__", None) in READY and function.__qualname__.isidentifier():
        room = function.__module__.removeprefix("cuattn.")
        raise TraceError(f"{what} {name}: makes such a function and is none; pass {room}.{name}()")
    refusal: Exception | None = None
    for keeps_scalars in (True, False):
        traced = Traced(name, is_score)
        try:
            traced.expr = run(function, traced, keeps_scalars)
            break
        except TraceError as error:
            refusal = TraceError(f"{what} {name}: {error}")
            refusal.__cause__ = error
        except (TypeError, LookupError, ValueError, AttributeError) as error:
            refusal = TraceError(
                f"{what} {name}: raised {type(error).__name__} while it ran on symbols: {error}; "
                "it takes b, h, q_idx, kv_idx (a score function: score before them, and both q_len "
                "and kv_len if it names them); an array that is reached through an attribute "
                "(self.ids) or made inside is not seen, so assign it to a local before the "
                "function is defined"
            )
            refusal.__cause__ = error
        if not traced.scalars:
            raise refusal
    else:
        assert refusal is not None
        raise refusal
    if is_score:
        if traced.expr.type == BOOL:
            raise TraceError(f"{what} {name}: returns a score, got the condition {traced.expr}")
        traced.expr = to_float(traced.expr)
    elif traced.expr.type != BOOL:
        raise TraceError(
            f"{what} {name}: returns a condition, got the {traced.expr.type} "
            f"{describe(traced.expr)}; compare it"
        )
    return traced


# What was traced is kept with the function, and found again if all it reaches is the same. Nothing
# is kept where it reaches what may change inside: objects with attributes, classes, modules.

# Builtins that read what neither a closure nor the names of a function tell.
LOOKUPS = frozenset(("__import__", "eval", "exec", "globals", "locals", "open", "vars"))
HIDDEN = object()  # stands for what they read, and what an import inside a function does
SETTLED = (str, bytes, bool, type(None), type(...), types.CodeType, np.generic, np.dtype, np.ufunc)
memory: weakref.WeakKeyDictionary[Any, dict[bool, Any]] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=1024)
def lookups_of(code: types.CodeType) -> tuple[str, ...] | None:
    """List the LOOKUPS that a function and those inside it name; None if one imports."""
    if any(dis.opmap["IMPORT_NAME"] in inner.co_code[::2] for inner in codes_of(code)):
        return None
    return tuple(name for name in names_of(code) if name in LOOKUPS)


def looks_elsewhere(f: types.FunctionType) -> bool:
    """Whether a function imports, or names a builtin that reads what `reach` does not list."""
    found = lookups_of(f.__code__)  # a name may be another function's
    return found is None or (found != () and any(n not in f.__globals__ for n in found))


def reach(x: Any, seen: dict[int, int] | None = None) -> Iterator[Any]:
    """List what a function reaches through its closure, defaults and globals."""
    seen = {} if seen is None else seen
    if id(x) in seen and not is_number(x):
        yield seen[id(x)]  # met before, as what
        return
    seen[id(x)] = len(seen)
    if isinstance(x, types.FunctionType) and is_own(x):
        yield x.__code__
        if looks_elsewhere(x) or x.__dict__.keys() - {"__wrapped__"}:
            yield HIDDEN
        for cell in x.__closure__ or ():
            try:
                yield from reach(cell.cell_contents, seen)
            except ValueError:
                continue
        for default in (*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()):
            yield from reach(default, seen)
        for name in names_of(x.__code__):
            if name in x.__globals__:
                yield from reach(x.__globals__[name], seen)
    elif is_array(x):
        yield from (x, *x.shape, dtype_name(x))  # a tensor may get other ones
    else:
        parts = parts_of(x)  # of objects that live on: an id is met once
        for y in parts or ():
            yield from reach(y, seen)
        yield x if parts is None else len(parts)


def parts_of(x: Any) -> tuple[Any, ...] | None:
    """Return what a container or a bound function holds; None for all else."""
    if type(x) in (tuple, list):
        return tuple(x)
    if type(x) is dict:
        return (*x.keys(), *x.values())
    if isinstance(x, functools.partial):
        return x.func, *x.args, *x.keywords.keys(), *x.keywords.values()
    return (x.__func__, x.__self__) if isinstance(x, types.MethodType) else None


def is_settled(x: Any) -> bool:
    """Whether something that a function reaches stays as it is, or is looked at in each call."""
    if isinstance(x, types.BuiltinFunctionType):
        looks = any(x is getattr(builtins, name) for name in LOOKUPS)
        return not looks and isinstance(x.__self__, (types.ModuleType, type, type(None)))
    if is_array(x) or is_number(x) or isinstance(x, SETTLED):
        return not isinstance(x, np.void)  # a view of fields
    name = x.__name__ if isinstance(x, types.ModuleType) else getattr(x, "__module__", None)
    is_named = isinstance(x, (types.ModuleType, types.FunctionType, type))
    return is_named and str(name).split(".")[0] in FOREIGN


def same(a: list[Any], b: list[Any]) -> bool:
    """Whether two reaches are of the same objects, numbers (-0.0 is not 0.0) and names.

    The first is one that was kept, with Unknowns for tracers.
    """
    return len(a) == len(b) and all(
        original(x) is y
        or ((is_number(x) or isinstance(x, str)) and type(x) is type(y) and repr(x) == repr(y))
        for x, y in zip(a, b, strict=True)
    )


def remembered(function: Any, is_score: bool) -> Any:
    """Return what was kept with a function; None where nothing was."""
    try:
        return memory.get(function, {}).get(is_score)
    except TypeError:  # it has no hash or no weak references
        return None


def remember(function: Any, is_score: bool, reached: list[Any], traced: Traced) -> None:
    """Keep what was traced with the function, as long as that lives."""
    reached = [Unknown(x) if is_jax_tracer(x) else x for x in reached]
    with contextlib.suppress(TypeError):
        memory.setdefault(function, {})[is_score] = (reached, traced)
