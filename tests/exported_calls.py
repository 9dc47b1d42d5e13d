# SPDX-License-Identifier: Apache-2.0
"""jax.export of attention and its gradient, on one and on four CPU devices.

Prints a JSON list a line: the case, the largest difference from the function itself, the devices of
the exported program and whether it gathers. faces/test_jax_export.py reads them.
"""

import importlib.util
import json
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"  # compiles sooner
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import cuattn.jax

SPEC = PartitionSpec("x", None, "y")
CHECKS = [export.DisabledSafetyCheck.custom_call(name) for name in cuattn.jax.export_targets()]


def attend(q, k):
    return cuattn.attention(q, k, k, causal=True)


def both(function):
    return lambda q, k: (function(q, k), jax.grad(lambda q: jnp.sin(function(q, k)).sum())(q))


def again(exported):
    """Write the program down and read it, where flatbuffers is installed."""
    if importlib.util.find_spec("flatbuffers") is None:
        return exported
    return export.deserialize(exported.serialize())


def compare(name, function, arrays, wanted):
    exported = again(export.export(jax.jit(both(function)), disabled_checks=CHECKS)(*arrays))
    program = jax.jit(exported.call).lower(*arrays).compile()
    apart = max(
        float(np.abs(np.asarray(a) - b).max())
        for a, b in zip(program(*arrays), wanted, strict=True)
    )
    gathers = "all-gather" in program.as_text()
    print(json.dumps([name, apart, exported.nr_devices, gathers]), flush=True)


def main():
    rng = np.random.default_rng(3)
    q, k = (rng.standard_normal((4, 8, h, 16), np.float32) for h in (8, 2))
    wanted = [np.asarray(x) for x in jax.jit(both(attend))(q, k)]
    compare("one device", attend, (q, k), wanted)
    for name, kind in (("shard_map", AxisType.Auto), ("explicit axes", AxisType.Explicit)):
        mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind,) * 2)
        spread = jax.shard_map(attend, mesh=mesh, in_specs=SPEC, out_specs=SPEC)
        placed = [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in (q, k)]
        compare(name, attend if kind is AxisType.Explicit else spread, placed, wanted)


if __name__ == "__main__":
    main()
