# SPDX-License-Identifier: Apache-2.0
"""flex_attention of JAX arrays on a GPU: the plan while JAX traces, the call by XLA's FFI.

What functions become is found on the host, as for arrays of other libraries: from shapes, and from
captured arrays that are no tracers. Row ranges, lists and captured arrays are operands then, the
machine code an attribute: a name, by which bindings/xla/flex.cpp finds it. Next: flex.py.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _core
from .._gradients import GRADIENT_OF, GRADIENTS, SOURCES
from ..flex.attention import Functions, find_for, problem_of, traced
from ..flex.backward import slots_of
from ..flex.block_mask import BlockMask
from ..flex.device import Gives
from ..flex.expression import SCORE
from ..flex.functors import name_of
from ..flex.program import gradient_program
from ..flex.trace import KINDS, Traced, dtype_name, refuse_int64
from ..flex.tracers import Unknown, is_jax_tracer, original
from .call import (
    Static,
    attributes,
    check_arrays,
    compiled,
    is_array,
    plain_window,
    present,
    register,
    shape_of,
    static_of,
    structs_of,
)
from .ops import ARRAYS, NUMBERS, SCALES, optional_operands, result_shapes, shapes_of

NAME = "flex_attention"
FOUND = ("row_begin", "row_end", "block_starts", "block_entries")  # arrays, where they are found
LISTS = FOUND[2:]
OF_HOST = ("score_program", "mask_program", "score_gradient", "numbers")  # which the host reads
INPUTS = ("dout", "q", "k", "v", "out", "lse")  # of a backward call
CAST = {"int": jnp.int32, "float": jnp.float32, "bool": jnp.bool_}  # what kernels read, by kind


class OnHost:
    """The namespace of `Stand`: what is kept for later calls stays with the host.

    An array of JAX would lie on the mesh of the call that made it, or be a tracer of its shard_map.
    """

    @staticmethod
    def asarray(x: Any) -> np.ndarray[Any, Any]:
        """Return a copy, as the caller may write into what was captured before XLA reads it."""
        return np.array(x)


class Stand:
    """Stands for q in a plan: a tracer does not say where it will lie."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: int):
        self.shape, self.dtype, self.device = shape, dtype, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0) if self.device < 0 else (2, self.device)

    def __array_namespace__(self) -> type[OnHost]:
        return OnHost


def cast(x: Any) -> jax.Array:
    """Return a captured array that JAX traces in a dtype that kernels read."""
    refuse_int64(x)
    return jnp.asarray(x).astype(CAST[KINDS[dtype_name(x)]])


def with_mask(blocks: BlockMask, mask_mod: Any) -> BlockMask:
    """Return the same blocks of the same mask, traced or reading other arrays."""
    made = BlockMask(mask_mod, blocks.shape, blocks.block_size, blocks.states)
    made._free = blocks._free
    return made


class DeviceCall:
    """A call of which no array need be known yet: what is fixed, and the operands.

    `operands` are q, k, v, the optional arrays, and the captured arrays that JAX traces. It has
    them until it is run (attend_by in flex.py), and no other tracers.
    """

    def __init__(
        self, arguments: dict[str, Any], score: Any, mask: Any, block_mask: Any, device: int
    ):
        plain = {name for name in SCALES if not is_array(arguments.get(name))}
        optional = {name: arguments.get(name) for name in ARRAYS if name not in plain}
        given = check_arrays(NAME, {name: arguments[name] for name in "qkv"}, **optional)
        self.names, self.device = tuple(given), device
        q = given["q"]
        stands = {n: Stand(x.shape, x.dtype, device) for n, x in given.items() if is_jax_tracer(x)}
        self.arguments = {**arguments, **stands, "q": Stand(q.shape, q.dtype, device)}
        options = {name: x for name, x in arguments.items() if name not in "qkv"}
        problem = problem_of(self.arguments["q"], given["k"], options)
        if problem is None:
            raise self.refusal(given)
        self.problem = problem
        functions = traced(problem, score, mask, block_mask)
        self.score = functions.score or Traced("no function", is_score=True)
        self.functions = without_tracers(functions, mask, block_mask)
        captured = [x for f in functions[:2] if f is not None for x in f.arrays]
        unknown = [x for x in captured if is_jax_tracer(x)]  # they live as long as the functions
        tracers = {id(original(x)): original(x) for x in unknown}
        order = list(tracers)
        self.places = {id(x): len(given) + order.index(id(original(x))) for x in unknown}
        self.operands = (*map(jnp.asarray, given.values()), *map(cast, tracers.values()))
        self.shapes = structs_of(self.operands)

    def refusal(self, given: dict[str, Any]) -> ValueError:
        """Raise what is wrong with shapes that do not fit together, or return it of lengths."""
        static = self.static(self.arguments, {})
        _core.flex_workspace(shapes_in(given, dict(static)), {}, self.device)
        lengths = {n: x for n, x in given.items() if n.startswith(("seqused", "cu_seqlens"))}
        text = ", ".join(f"{n} {np.asarray(x).tolist()}" for n, x in lengths.items())
        return ValueError(
            f"{NAME}: lengths must be of one batch and lie within the rows that there are, and "
            f"cu_seqlens_* must rise from 0, got {text}; correct them"
        )

    def plan(self, gives: Gives | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the arguments of the call, options of its functions among them, and the rest."""
        arguments = dict(self.arguments)
        found = find_for(arguments, self.problem, *self.functions, gives)
        arguments["backend"] = found.pop("kernel", arguments.get("backend", "auto"))
        return arguments, found

    def static(self, arguments: dict[str, Any], found: dict[str, Any], **more: Any) -> Static:
        """Return what a call is compiled for: numbers, and what functions became but arrays."""
        options = {o.name: arguments.get(o.name, o.default) for o in NUMBERS}
        options |= {"return_lse": True, "window": plain_window(options["window"])}
        options |= {name: numbers_in(found.get(name)) for name in OF_HOST}
        for name in ("functor", "query_block", "key_block"):
            options[name] = int(found.get(name, 0))
        return static_of(
            NAME,
            **options,
            found=tuple(name for name in FOUND if name in found),
            num_arrays=len(found.get("arrays", ())),
            device=self.device,
            **more,
        )

    def arrays(
        self, operands: Any, arguments: dict[str, Any], found: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arrays of a call by name, of operands and of what functions became."""
        arrays = dict(zip(self.names, operands, strict=False))
        for name in ARRAYS:  # that a score function became
            if name not in arrays and is_array(arguments.get(name)):
                arrays[name] = arguments[name]
        arrays |= {name: found[name] for name in FOUND if name in found}
        for i, x in enumerate(found.get("arrays", ())):
            is_operand = isinstance(x, Unknown)
            arrays[f"array{i}"] = operands[self.places[id(x)]] if is_operand else x
        return arrays

    def run(self, operands: Any) -> Any:
        """Return out and lse."""
        arguments, found = self.plan()
        register()
        static = self.static(arguments, found)
        return tuple(attend(self.arrays(operands, arguments, found), static))

    def differentiable(self) -> list[int]:
        """List the operands that have a gradient: floats, apart from arrays of the mask alone."""
        has_one = {i for i, name in enumerate(self.names) if name in GRADIENT_OF}
        has_one |= self.of_score().keys()
        return [
            i
            for i, x in enumerate(self.shapes)
            if i in has_one and jnp.issubdtype(x.dtype, jnp.floating)
        ]

    def of_score(self) -> dict[int, Any]:
        """Return what stands for the traced arrays that the score reads, by operand."""
        return {self.places[id(x)]: x for x in self.score.arrays if id(x) in self.places}

    def differentiate(self, kept: Any, gradients: Any) -> tuple[Any, ...]:
        """Return the gradients of the differentiable operands.

        That of a bias is a call of its own, which XLA leaves out where nobody reads it.
        """
        operands, out, lse = kept
        places = self.differentiable()
        need = [GRADIENT_OF[self.names[i]] for i in places if i < len(self.names)]
        arrays = [self.of_score()[i] for i in places if i >= len(self.names)]
        slots = slots_of(self.score, arrays, self.arguments, self.device >= 0)
        rest = tuple(name for name in need if name != "dbias")
        given = {"dout": gradients[0], "out": out, "lse": lse, "dlse": gradients[1]}
        found, sums = self.go_back(operands, given, rest, tuple(slots))
        by_name = dict(zip(rest, found, strict=True))
        if "dbias" in need:
            by_name["dbias"] = self.go_back(operands, given, ("dbias",), ())[0][0]
        named = [by_name[name] for name in need]
        return (*named, *sums)

    def go_back(
        self,
        operands: Any,
        given: dict[str, Any],
        need: tuple[str, ...],
        slots: tuple[int, ...],
        deterministic: bool | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """Return the gradients that `need` names, and in float32 those of captured arrays."""
        # A score that is left as it is loads its arrays in vain.
        live = () if self.score.expr is SCORE else slots
        arguments, found = self.plan(Gives(frozenset(live), "dbias" in need))
        arguments["num_splits"] = 0
        if "score_program" in found:
            found["score_gradient"] = gradient_program(self.score, set(live))
        if "score_program" not in found and "functor" not in found:
            live = ()
        register()
        in_order = tuple(name for name in GRADIENTS if name in need)  # as the handler gives them
        more = {"need": in_order, "slots": tuple(sorted(live)), "deterministic": deterministic}
        static = self.static(arguments, found, **more)
        arrays = self.arrays(operands, arguments, found)
        results = differentiate(arrays | {n: x for n, x in given.items() if x is not None}, static)
        by_name = dict(zip(in_order, results, strict=False))
        sums = dict(zip(sorted(live), results[len(need) :], strict=True))
        shapes = [tuple(self.score.arrays[slot].shape) for slot in slots]
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        return [by_name[name] for name in need], [
            sums[slot] if slot in sums else zeros(shape)
            for slot, shape in zip(slots, shapes, strict=True)
        ]


def without_tracers(functions: Functions, mask_mod: Any, block_mask: Any) -> tuple[Any, Any, Any]:
    """Return the functions of a call to be planned with: what was traced, where it holds tracers.

    The others stay as they are: by these, plans of other calls are found.
    """
    score, mask, blocks = functions
    if blocks is None:
        return score, mask, None
    if mask is not None and any(map(is_jax_tracer, mask.arrays)):
        return score, None, with_mask(blocks, mask)
    return score, mask_mod, block_mask


def numbers_in(x: Any) -> tuple[int, ...]:
    """Return the numbers of an array that the host reads."""
    return () if x is None else tuple(np.asarray(x).ravel().tolist())


def shapes_in(arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return arrays as dtypes and shapes, and options, as flex_workspace takes them."""
    given = {option.name: options[option.name] for option in NUMBERS}
    given |= {"need": options.get("need", ()), "deterministic": options.get("deterministic")}
    named = {name: x for name, x in arrays.items() if name in (*ARRAYS, *INPUTS, "dlse")}
    return given | shapes_of(named)


def workspace_of(arrays: dict[str, Any], options: dict[str, Any]) -> int:
    """Validate by the library's own rules, from shapes alone; return the bytes of workspace."""
    # The CPU, which serves tests, looks into lists.
    names = [n for n in options["found"] if options["device"] >= 0 or n not in LISTS]
    found: dict[str, Any] = {name: shape_of(arrays[name]) for name in names}
    captured = [arrays[f"array{i}"] for i in range(options["num_arrays"])]
    found["arrays"] = list(map(shape_of, captured))
    for name in OF_HOST:
        if options[name]:
            numbers = np.array(options[name], np.int32)
            found[name] = numbers if name == "numbers" else numbers.reshape(-1, 6)
    for name in ("functor", "query_block", "key_block"):
        found[name] = options[name]
    if slots := options.get("slots"):
        shapes = [shape_of(x) for x in captured]
        found["array_gradients"] = [x if i in slots else None for i, x in enumerate(shapes)]
    return _core.flex_workspace(shapes_in(arrays, options), found, options["device"])


def call_of(
    target: str, results: list[Any], inputs: list[Any], arrays: dict[str, Any], static: Static
) -> list[Any]:
    """Call a handler; `inputs` stand before the arrays of functions."""
    options = dict(static)
    size = workspace_of(arrays, options)
    if size:
        results = [*results, jax.ShapeDtypeStruct((size,), jnp.uint8)]
    functor = options["functor"]
    words = {name: ",".join(map(str, options[name])) for name in OF_HOST}
    function = jax.ffi.ffi_call(target, results, vmap_method="sequential")
    return function(
        *inputs,
        *(arrays[name] for name in options["found"]),
        *(arrays[f"array{i}"] for i in range(options["num_arrays"])),
        present=present(ARRAYS, arrays),
        flex_present=present(FOUND, dict.fromkeys(options["found"])),
        num_arrays=np.int64(options["num_arrays"]),
        query_block=np.int64(options["query_block"]),
        key_block=np.int64(options["key_block"]),
        functor=name_of(functor) if functor else "",
        on_cuda=np.int64(options["device"] >= 0),
        **words,
        **attributes(NUMBERS, options),
        **({} if "need" not in options else attributes_of_need(arrays, options)),
    )


def attributes_of_need(arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Return what a backward call is told beside the options of the forward call."""
    deterministic = options["deterministic"]
    return {
        "has_dlse": np.int64("dlse" in arrays),
        "need": np.int64(sum(1 << GRADIENTS.index(name) for name in options["need"])),
        "deterministic": np.int64(-1 if deterministic is None else deterministic),
        "slots": ",".join(map(str, options["slots"])),
    }


@functools.partial(compiled, what="gradient of a gradient")
def attend(arrays: dict[str, Any], static: Static) -> list[Any]:
    """One call of the handler; results out and lse."""
    options = dict(static)
    kv_layout = options["kv_layout"] if "block_tables" in arrays else None
    results = result_shapes(arrays["q"], arrays["v"], options["layout"], kv_layout)
    inputs = [*(arrays[name] for name in "qkv"), *optional_operands(arrays)]
    return list(call_of("cuattn_flex", list(results), inputs, arrays, static))[:2]


@functools.partial(compiled, what="gradient of a gradient")
def differentiate(arrays: dict[str, Any], static: Static) -> list[Any]:
    """One call of the backward handler; results what `need` names, then those of `slots`."""
    options = dict(static)
    wanted = [arrays[SOURCES[name]] for name in options["need"]]
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in wanted]
    sums = [arrays[f"array{slot}"].shape for slot in options["slots"]]
    results += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sums]
    inputs = [*(arrays[name] for name in INPUTS), *optional_operands(arrays)]
    inputs += [arrays["dlse"]] if "dlse" in arrays else []
    found = call_of("cuattn_flex_backward", results, inputs, arrays, static)
    return list(found)[: len(results)]
