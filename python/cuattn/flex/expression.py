# SPDX-License-Identifier: Apache-2.0
"""Expressions over the indices of a score: what a mask or score function becomes.

An `Expr` is a node of a graph, made once for equal content, so that `is` compares and common parts
are shared. Operators, `abs`, numpy's and torch's functions on a node give nodes; a function that is
run once on symbols is thereby written down. Next: trace.py, which runs it.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np

from .tracers import number_of

FLOAT, INT, BOOL = "float", "int", "bool"
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"and": "&", "or": "|", "xor": "^"}
ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%"}
UNARY = ("neg", "not", "abs", "exp", "log", "tanh", "sqrt", "float")
NAMES = {"score": "score", "b": "b", "h": "h", "q": "q_idx", "k": "kv_idx"}
INT32_MAX = 2**31 - 1

# What numpy and torch call our operations, where it is another name.
OTHER_NAMES = {
    **{"subtract": "sub", "multiply": "mul", "true_divide": "div", "divide": "div"},
    **{"truediv": "div", "floor_divide": "floordiv", "remainder": "mod"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
    **{"equal": "eq", "not_equal": "ne", "bitwise_and": "and", "logical_and": "and"},
    **{"bitwise_or": "or", "logical_or": "or", "bitwise_xor": "xor", "logical_xor": "xor"},
    **{"logical_not": "not", "invert": "not", "bitwise_not": "not", "negative": "neg"},
    **{"absolute": "abs", "minimum": "min", "maximum": "max", "fmin": "min", "fmax": "max"},
    **{"clip": "clamp", "power": "pow", "float_power": "pow"},
}


class TraceError(TypeError):
    """A mask or score function does what cannot be written down as an expression."""


def binary(op: str) -> Callable[[Any, Any], Any]:
    """Return the method of an operator."""
    return lambda self, other: apply(op, self, other)


def reflected(op: str) -> Callable[[Any, Any], Any]:
    """Return the method of an operator whose right side is ours."""
    return lambda self, other: apply(op, other, self)


class Operand:
    """What Python's operators, numpy's and torch's functions work on: nodes, captured arrays."""

    __slots__ = ()
    __array_priority__ = 1000
    __add__, __radd__ = binary("add"), reflected("add")
    __sub__, __rsub__ = binary("sub"), reflected("sub")
    __mul__, __rmul__ = binary("mul"), reflected("mul")
    __truediv__, __rtruediv__ = binary("div"), reflected("div")
    __floordiv__, __rfloordiv__ = binary("floordiv"), reflected("floordiv")
    __mod__, __rmod__ = binary("mod"), reflected("mod")
    __pow__, __rpow__ = binary("pow"), reflected("pow")
    __and__, __rand__ = binary("and"), reflected("and")
    __or__, __ror__ = binary("or"), reflected("or")
    __xor__, __rxor__ = binary("xor"), reflected("xor")
    __lt__, __le__ = binary("lt"), binary("le")
    __gt__, __ge__ = binary("gt"), binary("ge")
    __eq__: Any = binary("eq")
    __ne__: Any = binary("ne")

    def value(self) -> Expr:
        """Return the node that is meant."""
        raise NotImplementedError

    def __neg__(self) -> Any:
        return apply("neg", self)

    def __pos__(self) -> Any:
        return read(self)

    def __invert__(self) -> Any:
        return apply("not", self)

    def __abs__(self) -> Any:
        return apply("abs", self)

    def __hash__(self) -> int:
        raise TraceError(
            f"{describe(self)} is a symbol, not a number, so it lies in no set and is no key of a "
            "dict; compare with == and join by |, or capture an array and index it"
        )

    def __bool__(self) -> bool:
        raise TraceError(
            "a mask or score function runs once, on symbols, so `if`, `and`, `or`, `not`, `min`, "
            f"`max` and a < b < c cannot look at {describe(self)}; write where(condition, x, y), "
            "&, |, ~, minimum, maximum and (a < b) & (b < c)"
        )

    def __index__(self) -> int:
        raise TraceError(
            f"{describe(self)} is a symbol, not a number, so it cannot end a range or index an "
            "array that the function does not own; write where(condition, x, y), and assign an "
            "array that is reached through an attribute or a call to a local before the function "
            "is defined"
        )

    __int__ = __float__ = __complex__ = __index__

    def __iter__(self) -> Iterator[Any]:
        raise TraceError(f"{describe(self)} is one number and cannot be iterated over")

    def __contains__(self, _: Any) -> bool:
        raise TraceError(f"`in` cannot look at {describe(self)}; compare with == and join by |")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **given: Any) -> Any:
        if method != "__call__" or given:
            raise TraceError(f"numpy.{ufunc.__name__} takes symbols only as a plain call")
        return apply(ufunc.__name__, *inputs)

    def __array_function__(self, function: Any, _: Any, args: Any, given: Any) -> Any:
        return call(function.__name__, args, given)

    @classmethod
    def __torch_function__(cls, function: Any, _: Any, args: Any = (), given: Any = None) -> Any:
        if function.__name__ in ("__getitem__", "__setitem__"):  # of a tensor not captured
            Operand.__index__(args[1])
        return call(function.__name__.strip("_"), args, given or {})

    def __getattr__(self, name: str) -> Any:
        """Return what arrays have as a method: x.tanh(), x.eq(y), x.clamp(0, 1), x.long()."""
        if name in CASTS:
            return lambda: CASTS[name](read(self))
        op = OTHER_NAMES.get(name, name)
        if op in UNARY or op in BINARY or (op in COMPOSED and op != "where"):
            return lambda *args, **given: call(name, (self, *args), given)
        raise AttributeError(f"a symbol of a mask or score function has no attribute {name!r}")

    def to(self, dtype: Any = None, *_: Any, **given: Any) -> Any:
        """Return it as another kind of number; a device is passed over."""
        name = re.findall(r"\w+", str(given.get("dtype", dtype)))[-1]
        if name in CASTS:
            return CASTS[name](read(self))
        if name.isdigit() or name in ("None", "cpu", "cuda"):
            return read(self)
        raise TraceError(f"{describe(self)} becomes a float, an int32 or a bool, got {name}")

    astype = to

    device = None  # of an index, as torch's masks hand it on

    def new_ones(self, *_: Any, dtype: Any = None, **__: Any) -> Any:
        """Return the condition that holds, or 1: torch's masks begin with it."""
        return read(str(dtype).endswith("bool") or 1)

    def new_zeros(self, *_: Any, dtype: Any = None, **__: Any) -> Any:
        """Return the condition that never holds, or 0."""
        return read(False) if str(dtype).endswith("bool") else read(0)


def describe(x: Any) -> str:
    """Return an operand as messages name it."""
    return f"`{x}`" if len(str(x)) <= 60 else f"`{str(x)[:57]}...`"


class Expr(Operand):
    """A node: an operation, its arguments (nodes, numbers, names), its type and its indices.

    As it has no hash, what is known of nodes is kept by their ids.
    """

    __slots__ = ("__weakref__", "args", "free", "op", "type")
    op: str
    args: tuple[Any, ...]
    type: str
    free: frozenset[str]  # names of the indices it depends on

    _made: ClassVar[weakref.WeakValueDictionary[Any, Expr]] = weakref.WeakValueDictionary()

    def __new__(cls, op: str, args: tuple[Any, ...], kind: str) -> Expr:
        """Return the node of this content, the one there is or a new one."""
        # A node keeps its arguments alive, so no other has their ids while it lives.
        parts = (("n", id(a)) if isinstance(a, Expr) else (type(a).__name__, repr(a)) for a in args)
        key = (op, kind, *parts)
        node = cls._made.get(key)
        if node is None:
            node = object.__new__(cls)
            node.op, node.args, node.type = op, args, kind
            own = frozenset(args if op == "index" else ())
            node.free = own.union(*(a.free for a in node.nodes()))
            cls._made[key] = node
        return node

    def nodes(self) -> Iterator[Expr]:
        """List the arguments that are nodes."""
        return (a for a in self.args if isinstance(a, Expr))

    def __str__(self) -> str:
        from .text import show

        return show(self)

    __repr__ = __str__


def read(x: Any) -> Expr:
    """Return the node of a node, a number, or a captured array without axes."""
    if isinstance(x, Expr):
        return x
    if isinstance(x, Operand):
        return x.value()
    x = number_of(x)
    if isinstance(x, bool):
        return Expr("const", (x,), BOOL)
    if isinstance(x, int):
        return Expr("const", (in_int32(x, "a number"),), INT)
    if isinstance(x, float):
        return Expr("const", (x,), FLOAT)
    if x is None:
        raise TraceError("a mask or score function computes with None; is a return missing?")
    raise TraceError(
        "a mask or score function computes with numbers, its indices and captured arrays, got "
        f"{type(x).__name__}; make arrays before the function is defined, so that it captures them"
    )


def in_int32(x: int, what: str) -> int:
    """Return a whole number that indices are computed with."""
    if not -INT32_MAX <= x <= INT32_MAX:
        raise TraceError(f"{what} must lie within int32, got {x}; indices are int32 above -2^31")
    return x


def index(name: str) -> Expr:
    """Return the symbol of an index, or of the score."""
    return Expr("index", (name,), FLOAT if name == "score" else INT)


B, H, Q, K, SCORE = (index(name) for name in ("b", "h", "q", "k", "score"))
Q_LEN, KV_LEN = index("q_len"), index("kv_len")


def to_float(x: Expr) -> Expr:
    """Return x as a float."""
    if x.type == FLOAT:
        return x
    x = to_int(x)
    return read(float(x.args[0])) if x.op == "const" else Expr("float", (x,), FLOAT)


def to_int(x: Expr) -> Expr:
    """Return an index or a condition (1 or 0) as a whole number."""
    if x.type == FLOAT:
        raise TraceError(f"{describe(x)} is a float, which is not rounded to a whole number here")
    return where(x, 1, 0) if x.type == BOOL else x


FOLD: dict[str, Callable[..., Any]] = {
    **{"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b},
    **{"div": lambda a, b: a / b, "floordiv": lambda a, b: a // b, "mod": lambda a, b: a % b},
    **{"min": min, "max": max, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b},
    **{"gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "eq": lambda a, b: a == b},
    **{"ne": lambda a, b: a != b, "xor": lambda a, b: a ^ b, "neg": lambda a: -a, "abs": abs},
    **{"exp": np.exp, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt},
}


def folded(op: str, *args: Expr) -> Expr:
    """Return the value of an operation on constants."""
    with np.errstate(all="ignore"):
        x = FOLD[op](*(np.float64(a.args[0]) if a.type == FLOAT else a.args[0] for a in args))
    return read(x if isinstance(x, (bool, int)) else x.item())


def is_const(x: Expr, value: Any = None) -> bool:
    """Whether a node is a constant, or this one."""
    return x.op == "const" and (value is None or x.args[0] == value)


def apply(op: str, *args: Any) -> Expr:
    """Return the node of an operation, under our name, numpy's or torch's."""
    op = OTHER_NAMES.get(op, op)
    if op in COMPOSED:
        return COMPOSED[op](*args)
    known = (op in UNARY and len(args) == 1) or (op in BINARY and len(args) == 2)
    if not known:
        raise TraceError(
            f"'{op}' of {len(args)} is not among the operations of a mask or score function: "
            + ", ".join(sorted({*BINARY, *UNARY, *COMPOSED}))
        )
    return BINARY[op](op, *map(read, args)) if op in BINARY else unary(op, read(args[0]))


def call(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """Return what a function of numpy or torch that takes names gives for nodes."""
    name = OTHER_NAMES.get(name, name)
    if name == "clamp":
        low, high = (given.get(n, given.get(f"a_{n}")) for n in ("min", "max"))
        rest = (*args[1:], low, high) if len(args) == 1 else (*args[1:], high)
        return clamp(args[0], *rest[:2])
    if (given and set(given) - {"alpha", "dtype", "out"}) or given.get("alpha", 1) != 1:
        raise TraceError(f"{name} takes symbols without {', '.join(given)}")
    return apply(name, *args)


def unary(op: str, x: Expr) -> Expr:
    """Return the node of an operation on one value."""
    if op == "not":
        if x.type != BOOL:
            raise TraceError(f"~ takes a condition, got the number {describe(x)}")
        return x.args[0] if x.op == "not" else read(not x.args[0]) if is_const(x) else logical(x)
    x = (to_int(x) if x.type == BOOL else x) if op in ("neg", "abs") else to_float(x)
    if op == "float":
        return x
    if is_const(x):
        return folded(op, x)
    if op == "neg" and x.op == "neg":
        return x.args[0]
    return Expr(op, (x,), x.type)


def logical(x: Expr) -> Expr:
    """Return the opposite of a condition."""
    return Expr("not", (x,), BOOL)


def join(op: str, a: Expr, b: Expr) -> Expr:
    """Return a & b, a | b or a ^ b of conditions."""
    if a.type != BOOL or b.type != BOOL:
        wrong = a if a.type != BOOL else b
        raise TraceError(
            f"{LOGIC[op]} joins two conditions, got the number {describe(wrong)}; put each "
            "comparison in brackets, as in (a < b) & (c < d)"
        )
    for x, y in ((a, b), (b, a)):
        if is_const(x) and op == "xor":
            return unary("not", y) if x.args[0] else y
        if is_const(x):
            return (y if x.args[0] else x) if op == "and" else (x if x.args[0] else y)
    return a if a is b and op != "xor" else Expr(op, (a, b), BOOL)


def compute(op: str, a: Expr, b: Expr) -> Expr:
    """Return the node of an operation on two numbers."""
    if op in ARITHMETIC and a.type == b.type == BOOL:
        if op == "mul":
            return join("and", a, b)
        raise TraceError(
            f"{ARITHMETIC[op]} of conditions is a number in Python and none in numpy, got "
            f"{describe(a)} {ARITHMETIC[op]} {describe(b)}; write &, |, ^ or where(condition, 1, 0)"
        )
    a, b = (to_int(x) if x.type == BOOL else x for x in (a, b))
    if op == "div" or FLOAT in (a.type, b.type):
        a, b = to_float(a), to_float(b)
    if op in ("floordiv", "mod"):
        require_divisor(op, a, b)
    if is_const(a) and is_const(b):
        return folded(op, a, b)
    if op in ("add", "sub") and is_const(b, 0):
        return a
    if op == "add" and is_const(a, 0):
        return b
    if op in ("mul", "div", "floordiv") and is_const(b, 1):
        return a
    if op == "mul" and is_const(a, 1):
        return b
    return Expr(op, (a, b), BOOL if op in COMPARISONS else a.type)


def require_divisor(op: str, a: Expr, b: Expr) -> None:
    """Refuse what a whole number is not divided by."""
    sign = ARITHMETIC[op]
    if FLOAT in (a.type, b.type):
        raise TraceError(f"{sign} takes whole numbers, got the float {describe(a)} {sign} {b}")
    if b.op not in ("const", "scalar"):
        raise TraceError(
            f"{sign} takes a number on its right, got {describe(b)}; an array of quotients or "
            "remainders that is made before can be captured"
        )
    if is_const(b) and b.args[0] <= 0:
        raise TraceError(f"{sign} takes a positive number on its right, got {b.args[0]}")


def where(condition: Any, x: Any, y: Any) -> Expr:
    """Return x where the condition holds, else y."""
    c, x, y = read(condition), read(x), read(y)
    if c.type != BOOL:
        raise TraceError(f"where takes a condition first, got the number {describe(c)}")
    if FLOAT in (x.type, y.type):
        x, y = to_float(x), to_float(y)
    elif x.type != y.type:
        x, y = to_int(x), to_int(y)
    if is_const(c) or x is y:
        return x if x is y or c.args[0] else y
    return Expr("where", (c, x, y), x.type)


def minimum(x: Any, y: Any) -> Expr:
    """Return the smaller of two numbers."""
    return apply("min", x, y)


def maximum(x: Any, y: Any) -> Expr:
    """Return the larger of two numbers."""
    return apply("max", x, y)


def clamp(x: Any, low: Any = None, high: Any = None) -> Expr:
    """Return x, but at least `low` and at most `high`."""
    x = read(x)
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


def abs(x: Any) -> Expr:
    """Return x without its sign."""
    return apply("abs", x)


def exp(x: Any) -> Expr:
    """Return e to the power of x."""
    return apply("exp", x)


def log(x: Any) -> Expr:
    """Return the natural logarithm of x."""
    return apply("log", x)


def tanh(x: Any) -> Expr:
    """Return the hyperbolic tangent of x."""
    return apply("tanh", x)


def sqrt(x: Any) -> Expr:
    """Return the square root of x."""
    return apply("sqrt", x)


def power(x: Any, y: Any) -> Expr:
    """Return x to the power of y: of a positive number, or by a small whole number or a half."""
    x, y = read(x), read(y)
    if is_const(y) and y.args[0] in (1, 2, 3, 4):
        out = x
        for _ in range(int(y.args[0]) - 1):
            out = out * x
        return out
    if is_const(y, 0.5):
        return sqrt(x)
    if is_const(x) and x.args[0] > 0:
        return exp(to_float(y) * math.log(x.args[0]))
    raise TraceError(
        f"** takes a positive number to any power, and a symbol to the power of 0.5, 1, 2, 3 or 4; "
        f"got {describe(x)} ** {describe(y)}; write exp(y * log(x)) where x is positive"
    )


def sigmoid(x: Any) -> Expr:
    """Return 1 / (1 + exp(-x))."""
    return 1.0 / (1.0 + exp(-read(x)))


COMPOSED: dict[str, Callable[..., Expr]] = {
    **{"where": where, "clamp": clamp, "pow": power, "sigmoid": sigmoid},
    "fmod": lambda x, y: where(read(x) < 0, -(-read(x) % y), read(x) % y),  # of the sign of x
    "exp2": lambda x: exp(read(x) * math.log(2.0)),
    "log2": lambda x: log(x) * (1.0 / math.log(2.0)),
    "rsqrt": lambda x: 1.0 / sqrt(x),
    **{"square": lambda x: power(x, 2), "pos": read},
}
CASTS: dict[str, Callable[[Expr], Expr]] = {
    **dict.fromkeys(("float", "float32", "double", "float64"), to_float),
    **dict.fromkeys(("int", "int32", "long", "int64"), to_int),
    "bool": lambda x: x if x.type == BOOL else x != 0,
}
BINARY: dict[str, Callable[[str, Expr, Expr], Expr]] = {
    **dict.fromkeys((*ARITHMETIC, *COMPARISONS, "min", "max"), compute),
    **dict.fromkeys(LOGIC, join),
}


def ordered(*roots: Expr) -> list[Expr]:
    """List every node below some, arguments first."""
    order: list[Expr] = []
    done: set[int] = set()  # their ids
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, is_ready = stack.pop()
        if is_ready:
            order.append(node)
        elif id(node) not in done:
            done.add(id(node))
            stack.append((node, True))
            stack.extend((a, False) for a in reversed(list(node.nodes())) if id(a) not in done)
    return order
