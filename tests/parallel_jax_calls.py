# SPDX-License-Identifier: Apache-2.0
"""cuattn.jax.parallel_attention over four CPU devices, or all GPUs, beside one device.

    parallel_jax_calls.py [cpu | gpu] [seed]

Prints a JSON list a line: the case, the largest difference of out, lse and gradients from one
device, relative to their size, and the collectives of the compiled program; then, of the CPU, the
refusals. faces/test_jax_parallel.py reads them.
"""

import functools
import json
import os
import re
import sys

if sys.argv[1:2] != ["gpu"]:
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # compiles sooner
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import cuattn.jax

ROWS = 8  # of a device
MORE = {"sinks", "alibi_slopes"}  # arrays, drawn here
ALL = {"sinks": True, "alibi_slopes": True}
EACH = {"sinks": True, "alibi_slopes": "of each sequence"}
CASES = {  # scheme, layout, heads of q and k, the rest; those with gradients first
    "gather": (
        "gather",
        "contiguous",
        (6, 3),
        {"causal": True, "head_groups": 3, "softcap": 3.0, "alibi_slopes": True},
    ),
    "heads zigzag": ("heads", "zigzag", (8, 2), {"causal": True, **ALL}),
    "ring window": ("ring", "contiguous", (2, 1), {"causal": True, "window": (11, 5)}),
    "ring zigzag": ("ring", "zigzag", (4, 2), {"causal": True, "sinks": True, "scale": 0.4}),
    "gather full": ("gather", "contiguous", (8, 4), {}),
    "gather zigzag": ("gather", "zigzag", (8, 4), {"window": (20, 0), "head_groups": 2, **EACH}),
    "heads": ("heads", "contiguous", (8, 4), {"window": (3, 9), **EACH}),
    "heads of one": ("auto", "zigzag", (4, 1), {"window": (-1, 6)}),
    "ring": ("ring", "zigzag", (6, 3), {"softcap": 3.0, "sinks": True}),
    "ring causal": ("ring", "contiguous", (2, 2), {"causal": True}),
    "ring narrow": ("ring", "contiguous", (2, 1), {"window": (0, 0)}),
    "ring two sides": ("auto", "contiguous", (2, 1), {"window": (2, 9)}),
    "ring left": ("ring", "contiguous", (2, 1), {"window": (13, -1)}),
    "ring right": ("ring", "contiguous", (2, 1), {"window": (-1, 17)}),
}
GRADIENTS = 4  # of the first cases
REFUSED = {
    "axis": ("auto", "contiguous", (4, 4), {"axis": "nowhere"}),
    "axes": ("auto", "contiguous", (4, 4), {"axis": ("x", "y")}),
    "scheme": ("rings", "contiguous", (4, 4), {}),
    "layout": ("ring", "bshd", (4, 4), {}),
    "heads": ("heads", "contiguous", (6, 3), {}),
    "gather": ("gather", "contiguous", (4, 4), {"window": (2, 2)}),
    "slopes": ("gather", "zigzag", (4, 4), {"alibi_slopes": True}),
    "ring": ("ring", "contiguous", (4, 4), {"alibi_slopes": True}),
    "zigzag": ("ring", "zigzag", (4, 4), {"window": (2, 0)}),
    "none": ("auto", "zigzag", (6, 3), {"window": (2, 2)}),
    "groups": ("gather", "contiguous", (4, 4), {"head_groups": 3}),
    "odd": ("ring", "zigzag", (4, 4), {"rows": 7}),
    "unequal": ("ring", "contiguous", (4, 4), {"causal": True, "keys": 4}),
}


def collectives(text):
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return sorted(set(re.findall(rf" ({names})(?:-start)?\(", text)))


def draw(rng, heads, rows, keys, given):
    arrays = [
        rng.standard_normal((2, n, h, 16), np.float32)
        for n, h in zip((rows, keys, keys), (heads[0], heads[1], heads[1]), strict=True)
    ]
    names = sorted(MORE & set(given))
    shapes = {n: (2, heads[0]) if given[n] == "of each sequence" else heads[0] for n in names}
    return arrays, {n: rng.random(shape, np.float32) for n, shape in shapes.items()}


def with_gradients(call):
    """Return out and lse, the gradients of q, k and v, and those of the other arrays."""

    def loss(qkv, more):
        out, lse = call(*qkv, **more)
        return (jnp.sin(out) ** 2).sum() + jnp.cos(lse).sum(), (out, lse)

    def run(qkv, more):
        (_, (out, lse)), (dqkv, rest) = jax.value_and_grad(loss, (0, 1), has_aux=True)(qkv, more)
        return out, lse, dqkv, rest

    return run


def forward(call):
    return lambda qkv, more: (*call(*qkv, **more), [], {})


def spread(case, mesh, axis="x", **more):
    """Make the call over the mesh, on arrays in the order in which the tokens lie."""
    scheme, layout, _, options = case
    options = {n: x for n, x in options.items() if n not in {*MORE, "rows", "keys"}}
    options = {"axis": axis, "scheme": scheme, "layout": layout, **options}

    def call(q, k, v, **arrays):
        inside = functools.partial(cuattn.jax.parallel_attention, return_lse=True, **options)
        part, batch = P(*more.get("batch", (None,)), axis), more.get("batch", (None,))
        return jax.shard_map(
            lambda q, k, v, arrays: inside(q, k, v, **arrays),
            mesh=mesh,
            in_specs=(part, part, part, P()),
            out_specs=(part, P(*batch, None, axis)),
            check_vma="batch" not in more,
        )(q, k, v, arrays)

    return call


def apart(found, wanted):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    return max(
        float(np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64)).max())
        / max(1.0, float(np.abs(np.asarray(b, np.float64)).max()))
        for a, b in pairs
    )


def compare(name, case, mesh, seed, dtype="float32", **more):
    _, layout, heads, options = case
    size = mesh.shape["x"]
    qkv, arrays = draw(np.random.default_rng(seed), heads, ROWS * size, ROWS * size, options)
    qkv = [x.astype(jnp.dtype(dtype)) for x in qkv]
    order = cuattn.jax.token_order(ROWS * size, size, layout)
    kept = ("causal", "window", "scale", "softcap")
    given = {n: x for n, x in options.items() if n in kept}
    run = with_gradients if name in [*CASES][:GRADIENTS] else forward
    one = functools.partial(cuattn.attention, return_lse=True, **given)
    out, lse, dqkv, rest = jax.tree.map(np.asarray, jax.jit(run(one))(qkv, arrays))
    wanted = [out[:, order], lse[..., order], [x[:, order] for x in dqkv], rest]
    placed = [x[:, order] for x in qkv]
    program = jax.jit(run(spread(case, mesh, **more))).lower(placed, arrays).compile()
    found = program(placed, arrays)
    sent = collectives(program.as_text())
    print(json.dumps([name, apart(found, wanted), sent, dtype]), flush=True)


def refuse(name, case, mesh):
    options = dict(case[3])
    rows = options.get("rows", ROWS)
    lengths = 4 * rows, 4 * options.get("keys", rows)
    qkv, arrays = draw(np.random.default_rng(0), case[2], *lengths, options)
    try:
        spread((*case[:3], options), mesh)(*qkv, **arrays)
        text = "nothing"
    except (ValueError, TypeError) as error:
        text = f"{type(error).__name__}: {error}"
    print(json.dumps(["refused", name, text]), flush=True)


def main(where, seed):
    auto = jax.sharding.AxisType.Auto
    mesh = jax.make_mesh((4,), ("x",), axis_types=(auto,))
    if where == "gpu":
        for dtype in ("float32", "float16"):
            for name, case in CASES.items():
                compare(name, case, mesh, seed, dtype)
        return
    for name, case in CASES.items():
        compare(name, case, mesh, seed)
    compare("bfloat16", CASES["ring zigzag"], mesh, seed, "bfloat16")
    two = jax.make_mesh((2, 2), ("y", "x"), axis_types=(auto,) * 2)
    compare("batch too", CASES["heads zigzag"], two, seed, batch=("y",))
    for name, case in REFUSED.items():
        refuse(name, case, mesh)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu", int(sys.argv[2]) if len(sys.argv) > 2 else 7)
