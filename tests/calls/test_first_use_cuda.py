# SPDX-License-Identifier: Apache-2.0
"""The first calls of a process, made by many threads at once, on each of two GPUs where there are
two: what the library finds out once (devices, attributes of kernels, the driver's entry points,
cuBLAS) is found out by all of them together.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

import harness

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(harness.why_no_cuda() is not None, reason=f"CUDA: {harness.why_no_cuda()}"),
]

PROGRAM = """
import sys, threading
import torch
import cuattn

THREADS, name = 8, sys.argv[1]
devices = [f"cuda:{i}" for i in range(min(torch.cuda.device_count(), 2))]


def inputs(device):
    g = torch.Generator("cpu").manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=g).to(device, torch.bfloat16)
    d = dict(q=make(2, 300, 8, 128), k=make(2, 300, 2, 128), v=make(2, 300, 2, 128))
    d["wide"] = [make(1, 150, 4, 256) for _ in range(3)]
    d["step"], d["caches"] = make(2, 8, 128), [make(40, 16, 2, 128) for _ in range(2)]
    d["table"] = torch.arange(40, dtype=torch.int32).view(2, 20).to(device)
    d["lens"] = torch.tensor([320, 77], dtype=torch.int32).to(device)
    d["slots"] = torch.arange(60, dtype=torch.int64).to(device)
    d["rows"] = make(60, 2, 128)
    return d


def attention(d):
    out = cuattn.attention(d["q"], d["k"], d["v"], causal=True)
    return out, cuattn.attention(*d["wide"], softcap=20.0)


def rungs(d):
    parts = [d["q"][..., :64], d["k"][..., :64], d["v"][..., :64]]
    return [cuattn.attention(*parts, backend=b) for b in ("sm80", "tiled", "naive")]


def cublas(d):
    return [cuattn.attention(d["q"], d["k"], d["v"], backend="cublas")]


def paged(d):
    call = (d["step"], *d["caches"], d["table"], d["lens"])
    return [
        cuattn.paged_attention(*call, **options)
        for options in ({}, {"num_splits": 3}, {"batch_invariant": True}, {"backend": "sm80"})
    ]


def cache(d):
    caches = [torch.zeros_like(x) for x in d["caches"]]
    cuattn.reshape_and_cache(d["rows"], d["rows"], *caches, d["slots"])
    return caches


def merge(d):
    lse = d["q"][..., 0].float().transpose(1, 2).contiguous()
    return cuattn.merge_states(d["q"], lse, d["q"], lse)


work = {f.__name__: f for f in (attention, rungs, cublas, paged, cache, merge)}
jobs = list(work.values()) if name == "all" else [work[name]]
given = {device: inputs(device) for device in devices}
torch.cuda.synchronize()
start = threading.Barrier(THREADS * len(devices))
results, errors = {}, []


def first_call(device, number):
    try:
        torch.cuda.set_device(device)
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            for job in jobs[number % len(jobs):] + jobs[: number % len(jobs)]:
                results[device, number, job] = list(job(given[device]))
            torch.cuda.current_stream().synchronize()
    except BaseException as error:
        errors.append(f"{device}: {error!r}")


threads = [
    threading.Thread(target=first_call, args=(device, number))
    for device in devices
    for number in range(THREADS)
]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for index in range(len(devices)):
    torch.cuda.synchronize(index)
assert not errors, errors
assert len(results) == len(devices) * THREADS * len(jobs)
for (device, number, job), got in results.items():
    with torch.cuda.device(device):
        want = list(job(given[device]))
        for a, b in zip(got, want, strict=True):
            assert a.device == b.device == torch.device(device)
            assert torch.equal(a, b), (device, number, job.__name__)
print("same bits")
"""


@pytest.mark.parametrize("name", ["attention", "rungs", "cublas", "paged", "cache", "merge", "all"])
def test_many_threads_make_the_first_call_at_once(name):
    if name in ("cublas", "all") and not has_cublas():
        pytest.skip("no cuBLAS")
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same bits"


def has_cublas():
    import cuattn

    return bool(cuattn.info()["cuda"]["cublas"])
