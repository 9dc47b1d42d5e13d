# SPDX-License-Identifier: Apache-2.0
"""How a call is spread over a mesh: batch and whole groups of heads stay where they lie.

XLA knows nothing of a foreign function and gathers its operands; `spread` tells it which axes a
call does not mix. Sequences are gathered as before. Next: ops.py.
"""

from __future__ import annotations

import contextlib
import inspect
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
from .call import Static

Arrays = dict[str, jax.Array]
Run = Callable[[Arrays, Static], list[jax.Array]]
Axes = tuple[tuple[str, ...], tuple[str, ...]]  # of the mesh: along batch, along heads

# One letter for each axis: b batch, s queries, t keys, q query heads, h key heads, d and e sizes of
# keys and values, x and y blocks of rows; n, m, p are batch and lengths of a ragged call, c its
# ends.
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
    if heads == "h" and shape[-2 if ragged or options["layout"] == "bshd" else -3] == 1:
        heads = "."  # one head for all queries, which lies everywhere
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
    batch, heads = axes
    along = {"b": batch, "q": heads, "h": heads}
    return PartitionSpec(*(along.get(letter) or None for letter in letters))


def axes_of(q: Any, k: Any, letters: dict[str, str], mesh: Any) -> Axes:
    """Read from q and its sharding along which axes of the mesh a call is spread."""
    spec = tuple(q.sharding.spec) + (None,) * len(q.shape)

    def along(letter: str) -> tuple[str, ...]:
        if letter not in letters["q"]:
            return ()
        entry = spec[letters["q"].index(letter)]
        names = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        parts = 1
        for one in names:
            parts *= mesh.shape[one]
        extent = q.shape[letters["q"].index(letter)]
        if letter == "q" and "h" in letters["k"]:  # whole groups
            extent = k.shape[letters["k"].index("h")]
        return tuple(names) if extent % parts == 0 else ()

    return along("b"), along("q")


def shard_of(run: Run, static: Static, axes: Axes, results: list[str]) -> Callable[..., Any]:
    """Make the call of one device: sum what several devices have a share of."""

    def call(arrays: Arrays) -> list[jax.Array]:
        found = []
        for letters, x in zip(results, run(arrays, static), strict=True):
            missing = () if "b" in letters else axes[0]
            missing += () if set("qh") & set(letters) else axes[1]
            if missing:
                x = jax.lax.psum(x.astype(jnp.float32), missing).astype(x.dtype)
            found.append(x)
        return found

    return call


def rule_of(operands: list[str], results: list[str], group: int) -> SdyShardingRule:
    """Tell XLA's propagation: batch and heads pass through, all else is gathered."""
    count = 0
    used: dict[str, None] = {}  # in the order of their first place, as the rule wants them

    def mapping(letters: str) -> ArrayMapping:
        nonlocal count
        found: list[Any] = []
        for letter in letters:
            if letter == ".":
                count += 1
                found.append(f"one{count}")
                used[found[-1]] = None
            elif letter == "q":
                found.append(CompoundFactor("h", "g") if group > 1 else "h")
                used.update(dict.fromkeys("hg" if group > 1 else "h"))
            else:
                found.append(letter)
                used[letter] = None
        return ArrayMapping(*found)

    sides = tuple(map(mapping, operands)), tuple(map(mapping, results))
    more: dict[str, Any] = {"g": group} if group > 1 else {}
    more["need_replication_factors"] = tuple(factor for factor in used if factor not in "bh")
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


def spread(run: Run, arrays: Arrays, static: Static, results: list[str]) -> list[jax.Array]:
    """Run a call whose results are named, each device its batch entries and heads."""
    options = dict(static)
    whole = options["dropout_p"] or "block_tables" in arrays  # bits by place; pages of anyone
    empty = 0 in arrays["k"].shape or 0 in arrays["q"].shape
    if empty or not several_devices() or (whole and not explicit_mesh(arrays["q"])):
        return run(arrays, static)
    letters = {name: letters_of(name, x.shape, options) for name, x in arrays.items()}
    ends = [letters[SOURCES[n]] if n in SOURCES else letters_of(n, (), options) for n in results]

    @jax.custom_batching.custom_vmap  # type: ignore[untyped-decorator]
    def call(arrays: Arrays) -> list[jax.Array]:
        if mesh := explicit_mesh(arrays["q"]):
            q, k = (jax.typeof(arrays[name]) for name in "qk")
            axes = ((), ()) if whole else axes_of(q, k, letters, mesh)
            return by_type(run, arrays, static, letters, results, ends, mesh, axes)
        return by_rule(run, arrays, static, letters, ends)

    @call.def_vmap  # type: ignore[untyped-decorator]
    def one_after_the_other(_: int, mapped: Any, arrays: Arrays) -> Any:
        (which,) = mapped if isinstance(mapped, (list, tuple)) else (mapped,)
        axes = {name: 0 if is_mapped else None for name, is_mapped in which.items()}
        found = jax.vmap(lambda given: run(given, static), (axes,))(arrays)
        return found, [True] * len(found)

    return list(call(arrays))


def by_type(
    run: Run,
    arrays: Arrays,
    static: Static,
    letters: dict[str, str],
    results: list[str],
    ends: list[str],
    mesh: Any,
    axes: Axes,
) -> list[jax.Array]:
    """Spread a call over a mesh of explicit axes, where q's type says where it lies."""
    specs = {
        name: spec_of(letters[name], axes) if any(axes) else PartitionSpec() for name in arrays
    }
    placed = {
        name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name]))
        for name, x in arrays.items()
    }
    function = jax.shard_map(
        shard_of(run, static, axes, ends),
        mesh=mesh,
        in_specs=(specs,),
        out_specs=[spec_of(end, axes) for end in ends],
        check_vma=False,
    )
    found = list(function(placed))
    for i, name in enumerate(results):  # a gradient lies where its array does
        if name in SOURCES:
            home = jax.typeof(arrays[SOURCES[name]]).sharding.spec
            found[i] = jax.sharding.reshard(found[i], NamedSharding(mesh, home))
    return found


def by_rule(
    run: Run, arrays: Arrays, static: Static, letters: dict[str, str], ends: list[str]
) -> list[jax.Array]:
    """Spread a call over a mesh of automatic axes, where XLA says while it compiles."""
    names = list(arrays)

    def partition(mesh: Any, operands: Any, _: Any) -> Any:
        given = dict(zip(names, operands, strict=True))
        axes = axes_of(given["q"], given["k"], letters, mesh)
        shard = shard_of(run, static, axes, ends)
        placed = [NamedSharding(mesh, spec_of(letters[name], axes)) for name in names]
        found = [NamedSharding(mesh, spec_of(end, axes)) for end in ends]
        return mesh, lambda *x: shard(dict(zip(names, x, strict=True))), found, tuple(placed)

    function = custom_partitioning(lambda *x: run(dict(zip(names, x, strict=True)), static))
    heads_q = arrays["q"].shape[letters["q"].index("q")]
    heads_k = arrays["k"].shape[letters["k"].index("h")] if "h" in letters["k"] else heads_q
    rule = rule_of([letters[name] for name in names], ends, heads_q // heads_k)
    function.def_partition(partition, sharding_rule=rule)
    return list(function(*arrays.values()))
