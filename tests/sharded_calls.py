# SPDX-License-Identifier: Apache-2.0
"""Calls over meshes of four devices, beside the same on one: python sharded_calls.py [cpu | gpu].

Each line is a JSON list: the mesh, the case, whether values and gradients agree, and which
collectives the two compiled programs have. faces/test_jax_sharding.py reads them.
"""

import contextlib
import functools
import json
import os
import re
import sys

if sys.argv[1:] != ["gpu"]:
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=4"
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # compiles sooner
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cuattn.jax

B, S, T, HQ, HK, D = 4, 9, 13, 8, 4, 16
SPECS = {"data": ("data", None), "model": (None, "model"), "both": ("data", "model")}
CASES = {
    "plain": {},
    "mha": {"heads": 8},
    "mqa": {"heads": 1},
    "causal": {"causal": True, "window": (5, 0), "softcap": 2.0},
    "bhsd": {"layout": "bhsd", "causal": True},
    "used": {"seqused_q": [9, 2, 5, 0], "seqused_k": [13, 1, 0, 7], "causal": True},
    "sinks": {"sinks": (HQ,)},
    "slopes": {"alibi_slopes": (HQ,)},
    "slopes_of_batch": {"alibi_slopes": (B, HQ)},
    "bias": {"bias": (B, HQ, S, T)},
    "bias_of_heads": {"bias": (HQ, S, T)},
    "bias_of_batch": {"bias": (B, 1, 1, T)},
    "bias_of_all": {"bias": (S, T), "sinks": (HQ,), "alibi_slopes": (HQ,)},
    "mask": {"mask": (B, 1, S, T)},
    "dropout": {"dropout_p": 0.3, "dropout_seed": 3},
    "jax_nn": {"jax_nn": True, "is_causal": True, "key_value_seq_lengths": [13, 1, 3, 7]},
    "ragged": {"ragged": True, "causal": True},
}
FEW = ("plain", "mqa", "sinks", "bias_of_batch", "jax_nn", "ragged")  # over one axis


def problem(case, rng):
    """Arrays, the call, and by name which axes are batch and heads."""
    options = dict(CASES[case])
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    heads, ragged = options.pop("heads", HK), options.pop("ragged", False)
    jax_nn = options.pop("jax_nn", False)
    shapes = [(S, HQ, D), (T, heads, D), (T, heads, D)]
    if options.get("layout") == "bhsd":
        shapes = [(h, n, d) for n, h, d in shapes]
    arrays = {
        n: draw(*shape) if ragged else draw(B, *shape)
        for n, shape in zip("qkv", shapes, strict=True)
    }
    for name in ("sinks", "alibi_slopes", "bias"):
        if name in options:
            arrays[name] = abs(draw(*options.pop(name)))
    if "mask" in options:
        options["bias"] = jnp.asarray(rng.random(options.pop("mask")) > 0.3)
    for name in ("seqused_q", "seqused_k", "key_value_seq_lengths"):
        if name in options:
            options[name] = jnp.asarray(options[name], jnp.int32)
    ends = [jnp.asarray(x, jnp.int32) for x in ([0, 4, 9], [0, 6, 13])]

    def call(arrays):
        rest = {n: x for n, x in arrays.items() if n not in "qkv"}
        qkv = [arrays[n] for n in "qkv"]
        if jax_nn:
            return cuattn.jax.dot_product_attention(*qkv, **options, **rest)
        if ragged:
            return cuattn.attention_varlen(*qkv, *ends, 5, 7, **options, **rest)
        return cuattn.attention(*qkv, **options, **rest)

    heads_first = options.get("layout") == "bhsd"
    return arrays, call, "h.." if ragged else "bhs." if heads_first else "bsh."


def spec_of(letters, along):
    places = {"b": along[0], "h": along[1]}
    return PartitionSpec(*(places.get(letter) for letter in letters))


def collectives(program):
    names = "all-gather|all-reduce|all-to-all|collective-permute"
    return sorted(set(re.findall(rf" ({names})[-a-z]*\(", program.as_text())))


def agree(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    most = {"float32": 1e-5, "float16": 4e-3}
    wide = [
        (most[str(x.dtype)], np.asarray(x, np.float64), np.asarray(y, np.float64)) for x, y in pairs
    ]
    return all(np.abs(x - y).max() <= rtol * max(1, np.abs(y).max()) for rtol, x, y in wide)


@functools.cache
def on_one_device(case):
    """Return the arrays and calls of a case, and what they give."""
    arrays, call, letters = problem(case, np.random.default_rng(0))
    loss = lambda given: (jnp.sin(call(given)) ** 2).sum()  # noqa: E731
    calls = call, jax.grad(loss)
    return arrays, calls, letters, [jax.jit(each)(arrays) for each in calls]


def compare(case, kind, along):
    """One case on a mesh: values, gradients and what the compiled programs send."""
    arrays, calls, letters, wanted = on_one_device(case)
    letters = "shd" if len(letters) == 3 else letters
    shape = (2, 2) if None not in along else (4,)
    names = tuple(n for n in along if n)
    mesh = jax.make_mesh(shape, names, axis_types=(kind,) * len(names))
    spec = spec_of(letters, along)
    placed = dict(arrays)
    for n in "qkv":
        one_head = arrays[n].shape[letters.index("h")] == 1
        where = spec_of(letters, (along[0], None)) if one_head else spec
        placed[n] = jax.device_put(arrays[n], NamedSharding(mesh, where))
    with jax.set_mesh(mesh) if kind is AxisType.Explicit else contextlib.nullcontext():
        programs = [jax.jit(call).lower(placed).compile() for call in calls]  # once, and read
        found = [program(placed) for program in programs]
    kept = found[0].sharding.is_equivalent_to(NamedSharding(mesh, spec), found[0].ndim)
    return [*map(agree, found, wanted), kept, *map(collectives, programs)]


def others():
    """What is spread in other ways still gives the values of one device."""
    arrays, call, _ = problem("plain", np.random.default_rng(1))
    wanted = jax.jit(call)(arrays)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))  # noqa: E731
    rows = {n: put(x, None, None, None, "x") for n, x in arrays.items()}
    yield "head_dim", agree(jax.jit(call)(rows), wanted)
    mixed = {**arrays, "q": put(arrays["q"], "x"), "k": put(arrays["k"], None, None, "x")}
    yield "mixed", agree(jax.jit(call)(mixed), wanted)
    cut = {n: x[:3] for n, x in arrays.items()}
    yield (
        "three_of_four",
        agree(
            jax.jit(lambda a: call({n: x[:3] for n, x in a.items()}))(
                {n: put(x, "x") for n, x in arrays.items()}
            ),
            jax.jit(call)(cut),
        ),
    )
    many = {n: jnp.stack([x, 2 * x]) for n, x in arrays.items()}
    spread = {n: put(x, None, "x") for n, x in many.items()}
    loss = lambda a: call(a).sum()  # noqa: E731
    each = jax.vmap(jax.value_and_grad(loss))
    yield "vmap", agree(jax.jit(each)(spread), each(many))
    q, ids = np.asarray(arrays["q"]), np.arange(S) // 3
    there = put(jnp.asarray(ids))
    found, dense = (
        cuattn.flex_attention(*[x] * 3, mask_mod=lambda b, h, i, j, ids=ids: ids[i] == ids[j])
        for x, ids in ((arrays["q"], there), (q, ids))
    )
    yield "array that a mask captures", agree(found, dense)
    score = lambda s, b, h, i, j: 2 * s + 0.1 * j  # noqa: E731
    loss_of_flex = lambda x: cuattn.flex_attention(x, x, x, score_mod=score).sum()  # noqa: E731
    flex = jax.jit(jax.grad(loss_of_flex))
    halves = arrays["q"].astype(jnp.float16)  # of float32 a GPU has no gradient of functions
    wanted_of_flex = flex(halves)
    for kind in (AxisType.Auto, AxisType.Explicit):
        axis = jax.make_mesh((4,), ("x",), axis_types=(kind,))
        with jax.set_mesh(axis):
            x = jax.device_put(halves, NamedSharding(axis, PartitionSpec("x")))
            yield f"gradients of flex, {kind.name}", agree(flex(x), wanted_of_flex)
    inside = jax.shard_map(
        call,
        mesh=mesh,
        in_specs=(PartitionSpec("x"),),
        out_specs=PartitionSpec("x"),
        check_vma=False,
    )
    yield "shard_map", agree(jax.jit(inside)(arrays), wanted)
    wanted_both = [wanted, jax.grad(loss)(arrays)]
    for kind in (AxisType.Auto, AxisType.Explicit):  # arrays that lie on one device
        with jax.set_mesh(jax.make_mesh((4,), ("x",), axis_types=(kind,))):
            found = [call(arrays), jax.jit(jax.grad(loss))(arrays)]
        yield f"set_mesh, {kind.name}", all(map(agree, found, wanted_both))
    two = jax.make_mesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    part = jax.shard_map(
        call, mesh=two, in_specs=(PartitionSpec("x"),), out_specs=PartitionSpec("x"),
        axis_names={"x"},
    )  # fmt: skip
    loss_of_part = lambda a: (jnp.sin(part(a)) ** 2).sum()  # noqa: E731
    found = [jax.jit(part)(arrays), jax.jit(jax.grad(loss_of_part))(arrays)]
    square = jax.grad(lambda a: (jnp.sin(call(a)) ** 2).sum())(arrays)
    yield "shard_map of one of two axes", all(map(agree, found, (wanted, square)))
    checked = jax.jit(jax.grad(jax.checkpoint(loss)))
    placed = {n: put(x, "x") for n, x in arrays.items()}
    yield "checkpoint", agree(checked(placed), jax.grad(loss)(arrays))


def main():
    for along in SPECS:
        for case in CASES if along == "both" else FEW:
            for kind in (AxisType.Auto, AxisType.Explicit):
                print(
                    json.dumps([along, case, kind.name, *compare(case, kind, SPECS[along])]),
                    flush=True,
                )
    for name, right in others():
        print(json.dumps(["other", name, right]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
