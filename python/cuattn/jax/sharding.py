# SPDX-License-Identifier: Apache-2.0
"""How a call is spread over a mesh: batch and whole groups of heads stay where they lie.

XLA knows nothing of a foreign function and gathers its operands; `spread` tells it which axes a
call does not mix. Sequences are gathered as before. Next: ops.py.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import NamedSharding, PartitionSpec

from .._gradients import SOURCES
from .call import Static, as_varying

Arrays = dict[str, jax.Array]
Run = Callable[[Arrays, Static], list[jax.Array]]
Axes = dict[str, tuple[str, ...]]  # by letter: the axes of the mesh that cut it

# One letter for each axis: b batch, s queries, t keys, q query heads, h key heads, d and e sizes of
# keys and values, x and y blocks of rows; n, m, p are batch and lengths of a ragged call, c its
# ends; digits jax.vmap's.
FIXED = {"sinks": "q", "cu_seqlens_q": "c", "cu_seqlens_k": "c"}
# Not so in JAX before 0.7, where calls are gathered.
SPREADS = "need_replication_factors" in inspect.signature(SdyShardingRule.__init__).parameters


def letters_of(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> str:
    """Say what each axis of an array is; a dot where it has length 1 and is spread over nothing."""
    ragged = options["op"].startswith("attention_varlen")
    batch = "n" if ragged else "b"
    if name in FIXED:
        return FIXED[name]
    if name in ("seqused_q", "seqused_k", "kv_start"):
        return batch
    if name == "alibi_slopes":
        return f"{batch}q"[-len(shape) :]
    if name == "bias":
        full = "nqmp" if ragged else "bqst"
        aligned = zip(full[len(full) - len(shape) :], shape, strict=True)
        return "".join("." if extent == 1 else letter for letter, extent in aligned)
    if name.endswith("_scale"):
        return letters_of_scale(name, shape, batch)
    if name in ("lse", "dlse"):
        return "qs" if ragged else "bqs"
    length, heads = ("t", "h") if name in ("k", "v") else ("s", "q")
    size = "e" if name in ("v", "out", "dout") else "d"
    if ragged:
        return length + heads + size
    middle = length + heads if options["layout"] == "bshd" else heads + length
    return f"b{middle}{size}"


def letters_of_scale(name: str, shape: tuple[int, ...], batch: str) -> str:
    """Say it of the scale of a float8 array: [1], [heads], [batch, heads] or with one axis more."""
    heads = "q" if name == "q_scale" and len(shape) == 3 else "h"
    last = {"q_scale": "x", "k_scale": "y", "v_scale": "e"}[name]
    if len(shape) < 2:
        heads = "." if 1 in shape else heads
        return heads[: len(shape)]
    heads = "." if shape[1] == 1 else heads
    return f"{batch}{heads}{last}"[: len(shape)]


def spec_of(letters: str, axes: Axes) -> PartitionSpec:
    """Where an array lies."""
    return PartitionSpec(*(axes.get(letter) or None for letter in letters))


def parts_of(names: tuple[str, ...], mesh: Any) -> int:
    """Count the devices along axes of a mesh."""
    return math.prod(mesh.shape[one] for one in names)


def heads_of(arrays: Any, letters: dict[str, str]) -> tuple[int, int]:
    """Return the numbers of query heads and of key heads."""
    q, k = (arrays[name].shape for name in "qk")
    return q[letters["q"].index("q")], k[letters["k"].index("h")]


def head_axes(names: tuple[str, ...], heads_q: int, heads_k: int, mesh: Any) -> Axes:
    """Say which axes cut key heads: the first ones that divide them.

    More axes may cut the query heads of each key head, if no device needs two key heads then.
    """
    cut = names
    while heads_k % parts_of(cut, mesh):
        cut = cut[:-1]
    mine, odd = divmod(heads_q, parts_of(names, mesh))
    whole = cut == names or not (odd or heads_q // heads_k % mine)
    return {"q": names if whole else cut, "h": cut}


def axes_of(given: Any, letters: dict[str, str], mesh: Any) -> Axes:
    """Read from q and its sharding along which axes of the mesh a call is spread."""
    q = given["q"]
    if not hasattr(q.sharding, "spec"):  # on one device, or in a shard_map of a part of them
        return {}
    spec = tuple(q.sharding.spec) + (None,) * len(q.shape)
    axes: Axes = {}
    for letter, entry, extent in zip(letters["q"], spec, q.shape, strict=False):
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        if letter == "q":
            axes |= head_axes(names, *heads_of(given, letters), mesh)
        elif (letter == "b" or letter.isdigit()) and extent % parts_of(names, mesh) == 0:
            axes[letter] = names
    return axes


def own_head(arrays: Arrays, letters: dict[str, str], axes: Axes) -> tuple[int, Any]:
    """Return how many key heads lie here and, if query heads are cut further, which one is used."""
    heads_q, heads_k = heads_of(arrays, letters)
    further = axes.get("q", ())[len(axes.get("h", ())) :]
    if not further or heads_k == 1:
        return heads_k, None
    group = heads_q * jax.lax.axis_size(further) // heads_k
    return heads_k, jax.lax.axis_index(further) * heads_q // group


def shard_of(
    run: Run, static: Static, axes: Axes, letters: dict[str, str], ends: list[str]
) -> Callable[..., Any]:
    """Make the call of one device: sum what several devices have a share of."""
    cut = [name for letter, names in axes.items() if letter != "h" for name in names]

    def call(arrays: Arrays) -> list[jax.Array]:
        heads, head = own_head(arrays, letters, axes)
        if head is not None:
            arrays = dict(arrays)
            for name in [name for name in arrays if "h" in letters[name]]:
                place = letters[name].index("h")
                arrays[name] = jax.lax.dynamic_slice_in_dim(arrays[name], head, 1, place)
        found = []
        for end, x in zip(ends, run(arrays, static), strict=True):
            if head is not None and "h" in end:
                x = at_head(x, heads, head, end.index("h"))
            known = {name for letter in end for name in axes.get(letter, ())}
            if missing := tuple(name for name in cut if name not in known):
                x = jax.lax.psum(x.astype(jnp.float32), missing).astype(x.dtype)
            found.append(x)
        return found

    return call


def at_head(x: jax.Array, heads: int, head: Any, place: int) -> jax.Array:
    """Put the gradient of one key head among those of all, which are 0."""
    shape = (*x.shape[:place], heads, *x.shape[place + 1 :])
    return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, head, place)


def rule_of(operands: list[str], results: list[str], group: int) -> SdyShardingRule:
    """Tell XLA's propagation: batch and heads pass through, all else is gathered.

    A group of 0 keeps query heads and key heads apart.
    """
    count = 0
    used: dict[str, None] = {}  # in the order of their first place, as the rule wants them
    queries = {0: ["q"], 1: ["h"]}.get(group, ["h", "g"])

    def mapping(letters: str) -> ArrayMapping:
        nonlocal count
        found: list[Any] = []
        for letter in letters:
            factors = queries if letter == "q" else [f"v{letter}" if letter.isdigit() else letter]
            if letter == ".":
                count += 1
                factors = [f"one{count}"]
            found.append(factors[0] if len(factors) == 1 else CompoundFactor(*factors))
            used.update(dict.fromkeys(factors))
        return ArrayMapping(*found)

    sides = tuple(map(mapping, operands)), tuple(map(mapping, results))
    more: dict[str, Any] = {"g": group} if group > 1 else {}
    spread = {factor for factor in used if factor in "bhq" or factor[0] == "v"}
    more["need_replication_factors"] = tuple(factor for factor in used if factor not in spread)
    return SdyShardingRule(*sides, **more)


def several_devices() -> bool:
    """Tell whether a call can be spread at all: by Shardy, over devices of one kind."""
    if not SPREADS or not getattr(jax.config, "jax_use_shardy_partitioner", True):
        return False
    if jax.device_count() > 1:
        return True
    with contextlib.suppress(RuntimeError):
        return len(jax.devices("cpu")) > 1
    return False


def explicit_mesh(q: jax.Array) -> Any:
    """Return the mesh whose axes are part of q's type, or None."""
    sharding = jax.typeof(q).sharding
    mesh = sharding.mesh
    explicit = set(getattr(mesh, "explicit_axes", ()))
    return mesh if explicit and not mesh.empty else None


def nothing_to_spread() -> bool:
    """Tell whether the call is inside a shard_map over the whole mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names)


def spread(run: Run, arrays: Arrays, static: Static, results: list[str]) -> list[jax.Array]:
    """Run a call whose results are named, each device its batch entries and heads."""
    options = dict(static)
    whole = options["dropout_p"] or "block_tables" in arrays  # bits by place; pages of anyone
    empty = 0 in arrays["k"].shape or 0 in arrays["q"].shape
    alone = empty or not several_devices() or nothing_to_spread()
    if alone or (whole and not explicit_mesh(arrays["q"])):
        return as_varying(run(arrays, static), arrays)
    letters = {name: letters_of(name, x.shape, options) for name, x in arrays.items()}
    ends = {n: letters.get(SOURCES.get(n, "")) or letters_of(n, (), options) for n in results}
    return as_varying(spread_by(run, arrays, static, letters, ends, bool(whole)), arrays)


def spread_by(
    run: Run,
    arrays: Arrays,
    static: Static,
    letters: dict[str, str],
    ends: dict[str, str],
    whole: bool,
    depth: int = 0,
) -> list[jax.Array]:
    """Run a call whose axes are known; each jax.vmap around it puts one more in front."""

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def call(arrays: Arrays) -> list[jax.Array]:
        if mesh := explicit_mesh(arrays["q"]):
            given = {name: jax.typeof(arrays[name]) for name in "qk"}
            axes = {} if whole else axes_of(given, letters, mesh)
            return by_type(run, arrays, static, letters, ends, mesh, axes)
        return by_rule(run, arrays, static, letters, list(ends.values()))

    @call.def_vmap  # type: ignore[untyped-decorator]
    def many(_: int, mapped: Any, arrays: Arrays) -> Any:
        (which,) = mapped if isinstance(mapped, (list, tuple)) else (mapped,)
        axes = {name: 0 if is_mapped else None for name, is_mapped in which.items()}

        def run_many(given: Arrays, static: Static) -> list[jax.Array]:
            return jax.vmap(lambda one: run(one, static), (axes,))(given)

        longer = {n: f"{depth}{text}" if which[n] else text for n, text in letters.items()}
        longer_ends = {n: f"{depth}{text}" for n, text in ends.items()}
        found = spread_by(run_many, arrays, static, longer, longer_ends, whole, depth + 1)
        return found, [True] * len(found)

    return list(call(arrays))


def by_type(
    run: Run,
    arrays: Arrays,
    static: Static,
    letters: dict[str, str],
    ends: dict[str, str],
    mesh: Any,
    axes: Axes,
) -> list[jax.Array]:
    """Spread a call over a mesh of explicit axes, where q's type says where it lies."""
    specs = {name: spec_of(letters[name], axes) for name in arrays}
    placed = {
        name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name]))
        for name, x in arrays.items()
    }
    function = jax.shard_map(
        shard_of(run, static, axes, letters, list(ends.values())),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=[spec_of(end, axes) for end in ends.values()],
        check_vma=False,
    )
    found = list(function(placed))
    for i, name in enumerate(ends):  # a gradient lies where its array does
        if name in SOURCES:
            home = jax.typeof(arrays[SOURCES[name]]).sharding.spec
            spec = PartitionSpec(*(None,) * (found[i].ndim - len(home)), *home)
            found[i] = jax.sharding.reshard(found[i], NamedSharding(mesh, spec))
    return found


def by_rule(
    run: Run, arrays: Arrays, static: Static, letters: dict[str, str], ends: list[str]
) -> list[jax.Array]:
    """Spread a call over a mesh of automatic axes, where XLA says while it compiles."""
    names = list(arrays)

    def partition(mesh: Any, operands: Any, _: Any) -> Any:
        axes = axes_of(dict(zip(names, operands, strict=True)), letters, mesh)
        shard = shard_of(run, static, axes, letters, ends)
        placed = [NamedSharding(mesh, spec_of(letters[name], axes)) for name in names]
        found = [NamedSharding(mesh, spec_of(end, axes)) for end in ends]
        return mesh, lambda *x: shard(dict(zip(names, x, strict=True))), found, tuple(placed)

    def rule(mesh: Any, *_: Any) -> SdyShardingRule:
        heads_q, heads_k = heads_of(arrays, letters)
        fits = heads_k % parts_of(tuple(mesh.shape), mesh) == 0  # JAX fails on parts of an axis
        group = heads_q // heads_k if fits or heads_q == heads_k else 0
        return rule_of([letters[name] for name in names], ends, group)

    function = custom_partitioning(lambda *x: run(dict(zip(names, x, strict=True)), static))
    function.def_partition(partition, sharding_rule=rule)
    return list(function(*arrays.values()))
