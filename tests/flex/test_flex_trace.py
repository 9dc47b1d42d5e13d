# SPDX-License-Identifier: Apache-2.0
"""What a function becomes: expressions, their keys and derivatives, and what is refused."""

from __future__ import annotations

import contextvars
import functools
import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import flex_cases
from cuattn import flex
from cuattn.flex.derivative import derivative, loads
from cuattn.flex.evaluate import Host, evaluate
from cuattn.flex.expression import SCORE
from cuattn.flex.program import CODES, MAX_REGISTERS, program

ROOT = Path(__file__).parents[2]
IDS = np.zeros(9, np.int64)


class Model:
    ids = IDS

    def mask(self, b, h, q, k):
        return self.ids[q] == k


def within(w):
    return lambda b, h, q, k: (q - k <= w) & (k <= q)


def test_expressions_read_as_they_were_written():
    texts = {
        "((kv_idx <= q_idx) & ~(array0[b, kv_idx] == 3))": lambda b, h, q, k: (
            (k <= q) & ~(np.zeros((2, 2), int)[0] == 3) if False else (k <= q) & ~(PAIRS[b][k] == 3)
        ),
        "(((q_idx - kv_idx) <= number0) & (kv_idx <= q_idx))": within(4),
        "((q_idx // 2) != -kv_idx)": lambda b, h, q, k: q // 2 != -k,
    }
    for text, mask in texts.items():
        assert str(flex.trace(mask)) == text
    mod = lambda s, b, h, q, k: np.where(q > k, 2 * s, s) ** 2 + flex.sigmoid(h)  # noqa: E731
    assert str(flex.trace(mod, True)) == (
        "((where((q_idx > kv_idx), (2.0 * score), score) * where((q_idx > kv_idx), (2.0 * score), "
        "score)) + (1.0 / (exp(float(-h)) + 1.0)))"
    ).replace("(exp(float(-h)) + 1.0)", "(1.0 + exp(float(-h)))")


PAIRS = np.ones((2, 5), np.int16)


def test_another_number_array_or_name_is_no_other_key_but_another_branch_is():
    assert flex.trace(within(4)).key() == flex.trace(within(5)).key()
    assert flex.trace(within(5)).scalars == [5]

    def of(array):
        return lambda batch, head, row, key: array[row] == array[key]

    keys = {flex.trace(of(np.zeros(n, np.int32))).key() for n in (3, 300)}
    assert keys == {flex.trace(lambda b, h, q, k: IDS[q] == IDS[k]).key()}

    def branching(n):
        return lambda b, h, q, k: (k <= q) if n > 3 else (k < q)

    assert flex.trace(branching(5)).key() == flex.trace(branching(4)).key()
    assert flex.trace(branching(5)).key() != flex.trace(branching(2)).key()
    unrolled = lambda n: lambda b, h, q, k: sum((k == q - i) * 1 for i in range(n)) > 0  # noqa: E731
    assert flex.trace(unrolled(2)).key() != flex.trace(unrolled(3)).key()


def test_a_key_is_the_same_in_another_process():
    text = (
        "from cuattn import flex\nimport numpy as np\nids = np.zeros(9, np.int64)\n"
        "print(flex.trace(lambda b, h, q, k: ids[q] == ids[k]).key())"
    )
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == flex.trace(lambda b, h, q, k: IDS[q] == IDS[k]).key()


def test_a_function_is_traced_again_only_when_what_it_reaches_changes():
    window, left, right, third = 3, IDS, PAIRS[0], IDS
    mask = lambda b, h, q, k: (k <= q + window) | (left[q] == right[k]) | (third[q] == 1)  # noqa: E731
    first = flex.trace(mask)
    assert flex.trace(mask) is first
    window = 4
    second = flex.trace(mask)
    assert second.scalars == [4]
    third = right  # what was met before, in another place
    assert [id(x) for x in flex.trace(mask).arrays] == [id(left), id(right)]
    assert flex.trace(mask) is not second
    left = np.zeros((3, 3), np.int32)
    with pytest.raises(flex.TraceError, match="1 of 2 indices are missing"):
        flex.trace(mask)


class Near:
    window = 5

    def __call__(self, b, h, q, k):
        return q - k <= self.window


def test_what_changes_inside_an_object_a_class_or_a_tensor_is_no_stale_trace():
    near, space = Near(), types.SimpleNamespace(window=5)
    bound = functools.partial(lambda b, h, q, k, w: q - k <= w(), w=lambda: space.window)
    for mask in (
        near,
        lambda b, h, q, k: q - k <= space.window,
        lambda b, h, q, k: q - k <= Near.window,
        flex.masks.and_masks(bound, functools.partial(bound)),
    ):
        Near.window = space.window = 5
        assert "<= 5)" in str(flex.trace(mask))
        Near.window = space.window = 6
        assert "<= 6)" in str(flex.trace(mask))
    array = np.zeros(12, np.int32)
    mask = lambda b, h, q, k: array[q] == 1  # noqa: E731
    flex.trace(mask)
    array.shape = (3, 4)
    with pytest.raises(flex.TraceError, match="1 of 2 indices are missing"):
        flex.trace(mask)


def stale_ways():
    """Masks that read a window where neither a closure nor a global holds the number itself."""

    def own(b, h, q, k):
        return q - k <= own.window

    def helper():
        return helper.window

    @functools.wraps(np.sin)  # whose module is NumPy's, as far as its name says
    def wrapped(b, h, q, k):
        return q - k <= window

    window, table, array = 5, {"window": 5}, np.array([5])
    record, variable = np.array([(5,)], [("window", int)])[0], contextvars.ContextVar("window")
    get, item, value = table.get, array.item, variable.get

    def write(number):
        nonlocal window
        own.window = helper.window = window = number
        table["window"] = array[0] = record["window"] = number
        variable.set(number)

    return write, {
        "attribute": own,
        "attribute of a helper": lambda b, h, q, k: q - k <= helper(),
        "wrapped": wrapped,
        "method of a dict": lambda b, h, q, k: q - k <= get("window"),
        "method of an array": lambda b, h, q, k: q - k <= item(),
        "record": lambda b, h, q, k: q - k <= int(record["window"]),
        "context": lambda b, h, q, k: q - k <= value(),
    }


@pytest.mark.parametrize("way", stale_ways()[1])
def test_what_changes_behind_a_function_is_no_stale_trace(way):
    write, masks = stale_ways()
    for number in (5, 6):
        write(number)
        traced = flex.trace(masks[way])
        assert traced.scalars == [number] or f"<= {number})" in str(traced)


NUMBER = 5
LOOK = eval


def importing(b, h, q, k):
    from flex_settings import window

    return q - k <= window


def importing_within(b, h, q, k):
    def distance():
        import flex_settings

        return flex_settings.window

    return q - k <= distance()


def test_what_a_function_imports_or_looks_up_is_no_stale_trace(monkeypatch):
    """Nothing tells whether it is the same, so that nothing is kept."""
    settings = types.ModuleType("flex_settings")
    monkeypatch.setitem(sys.modules, "flex_settings", settings)
    masks = (
        importing,
        importing_within,
        flex.masks.and_masks(importing, lambda b, h, q, k: k <= 9),
        lambda b, h, q, k: q - k <= __import__("flex_settings").window,
        lambda b, h, q, k: q - k <= importlib.import_module("flex_settings").window,
        lambda b, h, q, k: q - k <= globals()["NUMBER"],
        lambda b, h, q, k: q - k <= eval("NUMBER"),
        lambda b, h, q, k: q - k <= LOOK("NUMBER"),
        lambda b, h, q, k, look=eval: q - k <= (lambda: look("NUMBER"))(),
    )
    for mask in masks:
        for number in (5, 6):
            settings.window = number
            monkeypatch.setitem(globals(), "NUMBER", number)
            assert f"<= {number})" in str(flex.trace(mask))
    for kept in (
        flex.masks.and_masks(within(4), flex.masks.causal()),
        lambda b, h, q, k: k < max(3, 4),
    ):
        assert flex.trace(kept) is flex.trace(kept)


def test_windows_of_ready_masks_do_not_count_the_own_key():
    i, j = np.arange(30)[:, None] + 20, np.arange(50)
    near, every = (i - j >= 0) & (i - j <= 8), (i - j) % 3 == 0
    for mask, want in (
        (flex.masks.sliding_window(8), near),
        (flex.masks.streaming(8, 2), near | (j < 2)),
        (flex.masks.dilated(3, 8), near & every),
        (flex.masks.dilated(3), (i >= j) & every),
    ):
        traced = flex.trace(mask)
        values = {"b": 0, "h": 0, "q": i - 20, "k": j, "q_len": 30, "kv_len": 50}
        np.testing.assert_array_equal(evaluate(Host(traced), traced.expr, values), want)
    assert near.sum(1).tolist() == [9] * 30
    assert (near & every).sum(1).tolist() == [8 // 3 + 1] * 30


def test_a_number_means_what_it_means_in_python():
    last, wide = -1, 10**12
    for mask, text in (
        (lambda b, h, q, k: IDS[k] == IDS[last], "(array0[kv_idx] == array0[8])"),
        (lambda b, h, q, k: k < wide // 10**10, "(kv_idx < 100)"),
        (functools.partial(lambda b, h, q, k, q_len: k < q_len, q_len=7), "(kv_idx < number0)"),
    ):
        assert str(flex.trace(mask)) == text
    functions = [np.fmod]
    if importlib.util.find_spec("torch"):
        functions.append(pytest.importorskip("torch").fmod)
    for function in functions:
        traced = flex.trace(lambda b, h, q, k, f=function: f(q - k, 3) == 1)
        values = {"q": np.arange(9)[:, None], "k": np.arange(9)}
        want = np.fmod(values["q"] - values["k"], 3) == 1
        assert np.array_equal(evaluate(Host(traced), traced.expr, values), want)


def test_what_stands_for_a_number_is_taken_for_it():
    """What looks at it decides as with the number; another number is another trace."""

    def masks(n, w):
        limit = lambda x: 2 * x if type(x) is int else x  # noqa: E731
        return {
            "(kv_idx < number0)": lambda b, h, q, k: k < n if isinstance(n, int) else k > n,
            f"(kv_idx < {2 * n})": lambda b, h, q, k: k < limit(n),
            f"(kv_idx < {len(str(n))})": lambda b, h, q, k: k < len(f"{n}"),
            f"(kv_idx < {WINDOWS.get(n, 7)})": lambda b, h, q, k: k < WINDOWS.get(n, 7),
            f"(kv_idx {'<' if n in WINDOWS else '>'} 2)": lambda b, h, q, k: (
                k < 2 if n in WINDOWS else k > 2
            ),
            "(float(kv_idx) < number0)": lambda b, h, q, k: (
                k < w if isinstance(w, float) else k > w
            ),
        }

    for n in (0, 3, 4, 1000):
        for text, mask in masks(n, n / 2).items():
            assert str(flex.trace(mask)) == text
    calls = cached.cache_info().currsize
    assert str(flex.trace(lambda b, h, q, k, n=5: k < cached(n))) == "(kv_idx < 6)"
    assert cached(5) == 6
    assert cached.cache_info().currsize == calls + 1


def test_a_product_of_conditions_is_both():
    """1 in Python where numpy and torch have True."""
    both = flex.trace(lambda b, h, q, k: (k < q) * (k < 3))
    assert str(both) == "((kv_idx < q_idx) & (kv_idx < 3))"
    score = flex.trace(lambda s, b, h, q, k: s * ((k < q) * (k < 3)), is_score=True)
    assert str(score) == f"(score * float(where({both}, 1, 0)))"


def test_an_index_that_is_made_of_numbers_counts_from_the_end_below_0():
    one, zero = 1, 0
    for mask, last in (
        (lambda b, h, q, k: IDS[-one] == k, 8),
        (lambda b, h, q, k: IDS[zero - one] == k, 8),
        (lambda b, h, q, k: PAIRS[-one - one, k] == 1, 0),
    ):
        assert f"array0[{last}" in str(flex.trace(mask))
    assert "array0[(number0 + number1)]" in str(flex.trace(lambda b, h, q, k: IDS[one + zero] == k))


def test_derivatives_equal_differences(rng):
    make = flex_cases.Generator(rng, 2, 3, 40, 50)
    q, k = np.arange(40)[:, None], np.arange(50)[None, :]
    for _ in range(60):
        inner, outer = make.score(), make.score()
        for mod in (
            inner,
            lambda s, b, h, i, j, q_len, kv_len, f=inner, g=outer: g(
                f(s, b, h, i, j, **flex_cases.lengths_asked_by(f, q_len, kv_len)),
                *(b, h, i, j),
                **flex_cases.lengths_asked_by(g, q_len, kv_len),
            ),
        ):
            traced = flex.trace(mod, True)
            host = Host(traced)
            values = {"b": 1, "h": 2, "q": q, "k": k, "q_len": 40, "kv_len": 50}
            scores, step = rng.standard_normal((40, 50)), 1e-6

            def at(s, e=traced.expr, host=host, values=values):
                return evaluate(host, e, {**values, "score": s}, np.float64)

            got = at(scores, derivative(traced.expr, SCORE))
            with np.errstate(invalid="ignore"):
                want = (at(scores + step) - at(scores - step)) / (2 * step)
            near = (np.abs(got - want) <= 1e-5 * (1 + np.abs(want))) | np.isnan(want)
            assert near.mean() > 0.995, str(traced)  # all but what lies at a corner
    table = np.ones((2, 3), np.float32)
    traced = flex.trace(lambda s, b, h, q, k: s * 2.0 + 3.0 * table[h, k], True)
    assert str(derivative(traced.expr, loads(traced.expr)[0])) == "3.0"


OUTSIDE = np.ones((2, 3))
REFUSED = {
    "if": (lambda b, h, q, k: k if q > 3 else q, r"`if`.*`\(q_idx > 3\)`; write where"),
    "and": (lambda b, h, q, k: (k <= q) and (q < 5), r"&, \|, ~"),
    "not": (lambda b, h, q, k: not (k <= q), r"&, \|, ~"),
    "chain": (lambda b, h, q, k: 0 <= k < q, r"\(a < b\) & \(b < c\)"),
    "max": (lambda b, h, q, k: max(q, k) > 2, "minimum, maximum"),
    "range": (lambda b, h, q, k: any(q == i for i in range(k)), "cannot end a range"),
    "loop": (lambda b, h, q, k: [x for x in q] == k, "cannot be iterated"),
    "in": (lambda b, h, q, k: 3 in q, "`in` cannot look"),
    "brackets": (lambda b, h, q, k: q > k & k > 3, "put each comparison in brackets"),
    "number": (lambda b, h, q, k: q + k, "returns a condition.*compare it"),
    "float index": (lambda b, h, q, k: IDS[q * 0.5] == 1, "whole numbers.*got the float"),
    "slice": (lambda b, h, q, k: IDS[q:] == 1, "whole numbers.*got slice"),
    "none": (lambda b, h, q, k: IDS[None] == 0, "whole numbers.*got NoneType"),
    "too many": (lambda b, h, q, k: IDS[q, k] == 0, r"shape \(9,\) takes 1 indices, got 2"),
    "too few": (lambda b, h, q, k: IDS == 3, "1 of 1 indices are missing"),
    "axes": (lambda b, h, q, k: np.ones((1, 1, 1))[0] == CUBE[b][h][q], "0 to 2 axes"),
    "dtype": (lambda b, h, q, k: COMPLEX[q] == 0, "must hold int8.*got complex64"),
    "attribute": (Model().mask, "assign it to a local"),
    "made inside": (lambda b, h, q, k: np.arange(3)[q] > k, "made inside is not seen"),
    "function": (lambda b, h, q, k: np.sin(q) > 0, "'sin' of 1 is not among"),
    "divisor": (lambda b, h, q, k: q % k == 0, "takes a number on its right"),
    "negative": (lambda b, h, q, k: q // -2 == 0, "takes a positive number.*-2"),
    "zero": (lambda b, h, q, k: q % 0 == 0, "takes a positive number.*0"),
    "floats": (lambda b, h, q, k: (q * 0.5) % 2 == 0, "% takes whole numbers"),
    "power": (lambda b, h, q, k: q**k > 3, r"\*\* takes a positive number"),
    "huge": (lambda b, h, q, k: q > 2**40, "within int32, got 1099511627776"),
    "arguments": (lambda b, h, q: q > 3, "takes 3 positional arguments"),
    "tilde": (lambda b, h, q, k: ~q, "~ takes a condition"),
    "text": (lambda b, h, q, k: q == "a", "computes with numbers.*got str"),
    "scalar zero": (lambda b, h, q, k, n=0: q // n == k // n, "takes a positive number.*got 0"),
    "scalar below": (lambda b, h, q, k, n=-4: (q - k) % n > 0, "takes a positive number.*got -4"),
    "set": (lambda b, h, q, k: (k <= q) if h in {0, 3} else (k < 9), "`h` .*lies in no set"),
    "dict": (lambda b, h, q, k: q - k < WINDOWS.get(h, 9), "`h` .*is no key of a dict"),
    "cache": (lambda b, h, q, k: cached(q) > k, "`q_idx` .*is no key of a dict"),
    "sum of conditions": (lambda b, h, q, k: (k < q) + (k < 3) == 1, r"\+ of conditions.*write &"),
    "no function": (5, r"must be a function \(b, h, q_idx, kv_idx\), got int"),
}
CUBE, COMPLEX = np.ones((2, 2, 2)), np.ones(4, np.complex64)
WINDOWS = {0: 3, 3: 90}
cached = functools.lru_cache(lambda x: x + 1)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_down_is_refused_with_the_way_out(name):
    function, words = REFUSED[name]
    with pytest.raises(flex.TraceError, match=words):
        flex.trace(function)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_an_array_behind_an_attribute_is_refused_with_the_way_out(library):
    zeros = pytest.importorskip(library).zeros
    model = types.SimpleNamespace(ids=zeros(9), bias=zeros((2, 9)))
    for mask in (
        lambda b, h, q, k: model.ids[q] == model.ids[k],
        lambda b, h, q, k: model.bias[h, k] > 0,
        lambda b, h, q, k: model.bias[1, k] > 0,
    ):
        message = r"mask_mod .*an attribute.* to a local before the function is defined"
        with pytest.raises(flex.TraceError, match=message):
            flex.trace(mask)


def test_an_attribute_is_no_global_of_its_name():
    """CUBE has too many axes and COMPLEX no dtype to capture; nobody reads them here."""
    model = types.SimpleNamespace(CUBE=2.0, COMPLEX=1)
    traced = flex.trace(lambda s, b, h, q, k: s * model.CUBE - model.COMPLEX, True)
    assert traced.arrays == []
    inside = flex.trace(lambda b, h, q, k: (lambda i: IDS[i] == 1)(q))
    assert inside.arrays[0] is IDS


def test_a_score_function_returns_a_score():
    with pytest.raises(TypeError, match=r"score_mod .*returns a score, got the condition"):
        flex.trace(lambda s, b, h, q, k: s > 0, True)


def test_codes_are_those_of_the_header():
    text = (ROOT / "include/cuattn/params/flex.h").read_text()
    names = re.findall(r"^  (\w+),$", text.split("enum class FlexCode")[1], re.MULTILINE)
    assert [name.rstrip("_") for name in names] == list(CODES)
    assert f"kMaxFlexRegisters = {MAX_REGISTERS}" in text


def test_a_program_keeps_what_rows_alone_decide_in_front():
    slopes = np.ones(4, np.float32)
    traced = flex.trace(lambda s, b, h, q, k: s - slopes[h] * abs(q - k) * (q + 1), True)
    ops = program(traced.expr, traced.scalars)
    names = [CODES[code] for code in ops[:, 0]]
    front = names.index("score") if names.index("score") < names.index("k") else names.index("k")
    assert {"load", "number"} <= set(names[:front])
    assert not {"k", "score"} & set(names[:front])
    assert not set(ops[:front, 1]) & set(ops[front:, 1])


def test_a_function_of_too_many_values_is_refused():
    def mod(s, b, h, q, k):
        parts = [np.exp(s * (i + q)) for i in range(40)]
        out = s
        for part in parts:
            out = out * part
        for part in reversed(parts):
            out = out + part
        return out

    traced = flex.trace(mod, True)
    with pytest.raises(NotImplementedError, match=r"may keep 24 values at once, got \d+"):
        program(traced.expr, traced.scalars)


def test_arrays_methods_are_there_as_torch_masks_call_them():
    def other(q):
        return holder.array[q] + holder.number

    holder = lambda: None  # noqa: E731
    holder.array, holder.number = IDS, 3
    pairs = {
        "min(max(tanh(score), 0.0), 1.0)": lambda s, b, h, q, k: s.tanh().clamp(0, 1),
        "(float(q_idx) + score)": lambda s, b, h, q, k: q.astype(float) + s.to("cuda:0"),
        "float(where((q_idx == kv_idx), 1, 0))": lambda s, b, h, q, k: q.eq(k).bool().long(),
        "(score + float((array0[q_idx] + number0)))": lambda s, b, h, q, k: s + other(q),
    }
    got = [str(flex.trace(f, True)) for f in pairs.values()]
    assert got == list(pairs)
    with pytest.raises(flex.TraceError, match="becomes a float, an int32 or a bool, got int8"):
        flex.trace(lambda b, h, q, k: q.to("int8") > k)
    with pytest.raises(flex.TraceError, match="has no attribute 'cumsum'"):
        flex.trace(lambda b, h, q, k: q.cumsum() > k)
