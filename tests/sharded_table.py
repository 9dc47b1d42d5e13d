# SPDX-License-Identifier: Apache-2.0
"""Heads and sequences spread in every way over a mesh of 4 or 8 CPU devices, beside one device.

python sharded_table.py DEVICES prints a JSON list a line: the case, the largest difference from one
device, whether out and lse lie as q does, and the collectives of the compiled program.
faces/test_jax_sharding.py reads them.
"""

import json
import os
import re
import sys

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={sys.argv[1]}"
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # compiles sooner
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import cuattn.jax

DEVICES = int(sys.argv[1])
BOTH = ("x", "y")
HEADS = {  # (heads of q, heads of k), where q lies, where k and v lie
    4: {
        "two axes": ((8, 4), P(None, None, BOTH), P(None, None, BOTH)),
        "sequence": ((8, 4), P(None, "x"), P(None, "x")),
        "sequence of keys": ((8, 4), P("x"), P(None, BOTH)),
        "8/2 over 2x2": ((8, 2), P(None, None, BOTH), P(None, None, "x")),
        "8/2 over 4": ((8, 2), P(None, None, "z"), P()),
        "8/1 over 4": ((8, 1), P(None, None, "z"), P()),
        "12/4 over 4": ((12, 4), P(None, None, "z"), P(None, None, "z")),
        "12/6 over 2x2": ((12, 6), P(None, None, BOTH), P(None, None, "x")),
        "12/6 over 4": ((12, 6), P(None, None, "z"), P()),
        "6/3 over 2": ((6, 3), P("y", None, "x"), P("y")),
    },
    8: {
        "8/4 over 2x4": ((8, 4), P(None, None, BOTH), P(None, None, "x")),
        "8/4 over 4x2": ((8, 4), P(None, None, ("y", "x")), P(None, None, "y")),
        "8/4 over 8": ((8, 4), P(None, None, "z"), P()),
        "8/2, batch": ((8, 2), P("x", None, "y"), P("x")),
        "24/6 over 8": ((24, 6), P(None, None, "z"), P()),
    },
}
RNG = np.random.default_rng(5)


def draw(*shape):
    return RNG.standard_normal(shape, np.float32)


def mesh_of(spec):
    """One axis z over all devices where a case asks for it, else x and y."""
    names = ("z",) if "z" in str(spec) else BOTH
    shape = (DEVICES,) if len(names) == 1 else (2, DEVICES // 2)
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names))


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def collectives(text):
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return sorted(set(re.findall(rf" ({names})(?:-start)?\(", text)))


def compare(name, function, arrays, placed):
    """Compile once; compare all results, and where the first ones lie with where q does."""
    wanted = jax.jit(function)(*arrays)
    program = jax.jit(function).lower(*placed).compile()
    found = program(*placed)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    apart = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    home, kept = placed[0].sharding, []
    for x in jax.tree.leaves(found)[:2]:
        if x.shape == placed[0].shape:  # out, or dq
            kept.append(x.sharding.is_equivalent_to(home, x.ndim))
        elif x.ndim == 3 and placed[0].ndim == 4:  # lse
            batch, _, heads, _ = (*home.spec, None, None, None)[:4]
            want = NamedSharding(home.mesh, P(batch, heads))
            kept.append(x.sharding.is_equivalent_to(want, 3))
    print(json.dumps([name, apart, kept, collectives(program.as_text())]), flush=True)


def both_ways(q, k, v):
    """Return out, lse and the gradients of a loss that needs both."""

    def loss(q, k, v):
        out, lse = cuattn.attention(q, k, v, causal=True, return_lse=True)
        return (jnp.sin(out) ** 2).sum() + jnp.cos(lse).sum(), (out, lse)

    (_, results), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return results, gradients


def dense(rows=8):
    for name, ((heads_q, heads_k), spec_q, spec_k) in HEADS[DEVICES].items():
        arrays = [draw(4, rows, h, 16) for h in (heads_q, heads_k, heads_k)]
        mesh = mesh_of(spec_q)
        placed = [put(mesh, x, s) for x, s in zip(arrays, (spec_q, spec_k, spec_k), strict=True)]
        compare(name, both_ways, arrays, placed)


def layer(x, wq, wk, wv, wo):
    """Make tensor-parallel projections and attention; the last product is summed over devices."""
    q, k, v = (jnp.einsum("bse,ehd->bshd", x, w) for w in (wq, wk, wv))
    return jnp.einsum("bshd,hde->bse", cuattn.attention(q, k, v, causal=True), wo)


def in_programs():
    """Attention as a part of what people compile."""
    mesh, spec = mesh_of("x"), P("x", None, "y")
    arrays = [draw(4, 8, h, 16) for h in (8, 4, 4)]
    placed = [put(mesh, x, spec) for x in arrays]

    def scan(q, k, v):
        step = lambda c, _: (cuattn.attention(c, k, v), None)  # noqa: E731
        return jax.lax.scan(step, q, None, length=3)[0]

    compare("scan", jax.grad(lambda *x: scan(*x).sum()), arrays, placed)
    many = [np.stack([x, x / 2]) for x in arrays]
    spread = [put(mesh, x, P(None, *spec)) for x in many]
    compare("vmap", jax.vmap(both_ways), many, spread)
    along = [put(mesh, x, P("x", None, None, "y")) for x in many]
    shared = lambda q, k, v: jax.vmap(both_ways, (0, None, 0))(q, k[1], v)  # noqa: E731
    compare("vmap of shared keys", shared, many, along)
    weights = [0.1 * draw(24, h, 16) for h in (8, 4, 4)] + [draw(8, 16, 24)]
    places = [P(None, "y")] * 3 + [P("y")]
    x = draw(4, 8, 24)
    cut = [put(mesh, x, P("x")), *(put(mesh, w, s) for w, s in zip(weights, places, strict=True))]
    compare("tensor-parallel layer", layer, [x, *weights], cut)


def ragged_and_paged():
    """Packed sequences with heads that do not divide, and pages."""
    mesh = mesh_of("z")
    arrays = [draw(9, 8, 16), draw(13, 2, 16), draw(13, 2, 16)]
    ends = [jnp.asarray(x, jnp.int32) for x in ([0, 4, 9], [0, 6, 13])]

    def ragged(q, k, v):
        call = lambda *x: cuattn.attention_varlen(*x, *ends, 5, 7, causal=True)  # noqa: E731
        return call(q, k, v), jax.grad(lambda *x: jnp.sin(call(*x)).sum(), (0, 1, 2))(q, k, v)

    compare("ragged", ragged, arrays, [put(mesh, arrays[0], P(None, "z")), *arrays[1:]])
    cut = [put(mesh, arrays[0][:8], P("z")), *arrays[1:]]
    fewer = lambda q, k, v: ragged(jnp.pad(q, ((0, 1), (0, 0), (0, 0))), k, v)  # noqa: E731
    compare("ragged, cut rows", fewer, [arrays[0][:8], *arrays[1:]], cut)
    q, caches = draw(4, 8, 16), [draw(6, 16, 4, 16) for _ in "kv"]
    tables, lengths = jnp.asarray([[0, 3], [1, 2], [4, 0], [5, 1]]), jnp.asarray([20, 32, 3, 0])
    paged = lambda q, k, v: cuattn.paged_attention(q, k, v, tables, lengths)  # noqa: E731
    for name, spec_q, spec_k in (
        ("pages, heads", P(None, "z"), P(None, None, "z")),
        ("pages, batch", P("z"), P(None, "z")),
    ):
        placed = [put(mesh, q, spec_q), *(put(mesh, x, spec_k) for x in caches)]
        compare(name, paged, [q, *caches], placed)


if __name__ == "__main__":
    dense()
    if DEVICES == 4:
        in_programs()
        ragged_and_paged()
