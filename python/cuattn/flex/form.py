# SPDX-License-Identifier: Apache-2.0
"""The form of a call on a GPU: what of its score is an option, and what is compiled.

sm90, the kernel for Hoppers, has no option but scale beside functions and row ranges. A softcap or
a score that is ALiBi is compiled with them there; other kernels have it as an option. Next:
attention.py, which asks; options.py, which finds options in a score function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from .emit import numbers
from .expression import FLOAT, SCORE, Expr, ordered, tanh
from .functors import can_compile
from .options import SCALE, SOFTCAP, softcap_of
from .plan import Found
from .trace import Traced


class Form(NamedTuple):
    """A score function, the options that it may become, and the arguments beside it."""

    score: Traced | None
    takes: frozenset[str]
    arguments: dict[str, Any]

    def compiled(self, cap: float) -> Form:
        """Return the same call without options but scale: its softcap is part of the score."""
        takes = self.takes & {SCALE}
        if cap == 0:
            return self._replace(takes=takes)
        return Form(capped(self.score, cap), takes, {**self.arguments, SOFTCAP: 0.0})


def best_form(
    form: Form, make: Callable[[Form], Found], on_hopper: Callable[[dict[str, Any]], bool]
) -> tuple[Form, Found]:
    """Return the form that a call takes, and what its functions become.

    `make` finds that out. `on_hopper` says whether functors beside some arguments run in sm90.
    """
    found, cap = make(form), softcap_of(form.arguments)
    has_options = cap > 0 or not {SCALE}.issuperset(found.options)
    if not has_options or not (found.functions or "row_begin" in found.arrays):
        return form, found
    other = form.compiled(cap)
    if not on_hopper(other.arguments) or not (found.functions or can_compile()):
        return form, found
    with contextlib.suppress(NotImplementedError):  # more numbers or values than a functor holds
        compiled = make(other)
        numbers(compiled.functions)
        off = {SOFTCAP: 0.0} if cap > 0 else {}
        return other, compiled._replace(options={**compiled.options, **off})
    return form, found


def capped(score: Traced | None, cap: float) -> Traced:
    """Return a score function of what a softcap leaves."""
    joined = Traced("softcap", is_score=True) if score is None else score.reading(score.arrays)
    number = Expr("scalar", (len(joined.scalars),), FLOAT)
    joined.scalars = [*joined.scalars, cap]
    root = SCORE if score is None else score.expr
    made = {id(SCORE): number * tanh(SCORE / number)}
    for node in ordered(root):
        if "score" in node.free and node is not SCORE:
            args = tuple(made.get(id(x), x) for x in node.args)
            made[id(node)] = Expr(node.op, args, node.type)
    joined.expr = made.get(id(root), root)
    return joined
