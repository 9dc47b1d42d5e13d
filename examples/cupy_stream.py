# SPDX-License-Identifier: Apache-2.0
"""CuPy: attention on a stream of its own, captured in a CUDA graph and replayed on new data."""

import sys

import numpy as np

import cuattn

try:
    import cupy
except ImportError:
    print("skipped: this example needs CuPy (pip install cupy-cuda13x)")
    sys.exit()


def has_gpu() -> bool:
    try:
        return cupy.cuda.runtime.getDeviceCount() > 0 and cuattn.info()["cuda"] is not None
    except cupy.cuda.runtime.CUDARuntimeError:
        return False


def plain(q, k, v):
    """The formula in float64 on the GPU, for one [seqlen, dim] head."""
    q, k, v = (x.astype(cupy.float64) for x in (q, k, v))
    p = cupy.exp(q @ k.T / np.sqrt(q.shape[-1]))
    return (p / p.sum(-1, keepdims=True)) @ v


def main() -> None:
    if not has_gpu():
        print("skipped: this example needs an NVIDIA GPU and a build with CUDA")
        sys.exit()
    rng = cupy.random.default_rng(0)
    shape = (2, 512, 8, 64)
    q, k, v = (rng.standard_normal(shape, cupy.float32).astype(cupy.float16) for _ in "qkv")
    out = cupy.empty_like(q)
    stream = cupy.cuda.Stream(non_blocking=True)
    stream.wait_event(cupy.cuda.get_current_stream().record())
    with stream:  # cuattn takes CuPy's current stream
        cuattn.attention(q, k, v, out=out)
        stream.begin_capture()
        cuattn.attention(
            q, k, v, out=out
        )  # nothing is allocated and nobody waits: the call can be captured
        graph = stream.end_capture()
        q *= cupy.float16(0.5)  # new data in the same place
        graph.launch(stream)
    stream.synchronize()
    error = float(cupy.abs(out[1, :, 3] - plain(q[1, :, 3], k[1, :, 3], v[1, :, 3])).max())
    assert error < 2e-3, error
    print(
        f"graph replayed on {cupy.cuda.Device().pci_bus_id}: max error {error:.1e} against float64"
    )


if __name__ == "__main__":
    main()
