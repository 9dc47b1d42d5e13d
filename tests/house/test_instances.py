# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a planner can choose is compiled: plans held against cuda/instances.cmake.

A build without CUDA plans for made-up GPUs, so this needs none. What a build has compiled is what
cuattn.kernels() lists of the table.
"""

from __future__ import annotations

import functools
import itertools
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
import pytest

import cuattn
from cuattn.flex.device import sm90_tile

ROOT = Path(__file__).resolve().parents[2]
DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "e4m3": "float8_e4m3fn",
          "i8": "int8"}  # fmt: skip
MASKS = {
    "none": {"causal": False},
    "causal": {"causal": True},
    "window": {"causal": False, "window": (9, 0)},
}
DROPPED = {"dropout_p": 0.1, "dropout_seed": 3}
SCORES = {"identity": {}, "scored": {"softcap": 30.0}, "dropped": DROPPED}
FLOAT8_SCORES = {"identity": {}, "fast": {"accumulate": "fast"}}
NATIVE = dict(num_sms=132, native=1)
GPUS = {
    "9.0": dict(NATIVE, major=9, minor=0, smem_per_block_optin=232448),
    "9.0 from PTX": dict(major=9, minor=0, smem_per_block_optin=232448, num_sms=132, native=0),
    "8.0": dict(NATIVE, major=8, minor=0, smem_per_block_optin=166912),
    "8.9": dict(NATIVE, major=8, minor=9, smem_per_block_optin=101376),
    "12.0": dict(major=12, minor=0, smem_per_block_optin=101376, num_sms=170, native=0),
}
RUNGS = ("auto", "naive", "cublas", "tiled", "simt", "sm80", "sm90")
# Around the compiled sizes, which have a neighbour on either side.
DIMS = sorted({8, *(d + e for d in (32, 64, 96, 128, 192, 256) for e in (-8, 0, 8))} - {264})
WIDE = ((264, 264), (512, 8), (8, 512))  # one instance of a dtype serves every mask and score


class Instance(NamedTuple):
    op: str
    kernel: str
    dtype: str
    head_dim: int
    head_dim_v: int
    mask: str
    score: str


class Row(NamedTuple):
    op: str
    name: str
    header: str
    kind: str
    dtypes: str
    head_dims: str
    masks: str
    scores: str

    def instances(self) -> list[Instance]:
        kernel = self.name.split("_")[1]
        axes = (self.dtypes, self.head_dims, self.masks, self.scores)
        found = []
        for dtype, dims, mask, score in itertools.product(*(axis.split(";") for axis in axes)):
            qk, v = map(int, dims.split("x")) if "x" in dims else (int(dims), int(dims))
            words = ["any" if word == "-" else word for word in (mask, score)]
            found.append(Instance(self.op, kernel, DTYPES[dtype], qk, v, *words))
        return found


def table() -> list[Row]:
    text = re.sub(r"#.*", "", (ROOT / "cuda/instances.cmake").read_text())
    return [Row(*shlex.split(call)) for call in re.findall(r"cuattn_kernel\(([^)]*)\)", text)]


ROWS = table()
INSTANCES = [instance for row in ROWS for instance in row.instances()]
COMPILED = {(i.op, i.kernel) for i in INSTANCES}
OF = {  # those of an op, a kernel and a dtype
    key: tuple(these)
    for key, these in itertools.groupby(sorted(INSTANCES), key=lambda i: (i.op, i.kernel, i.dtype))
}


def asked_of(score: str) -> str:
    """What a plan calls the scores of a call, whatever is dropped and however sums are made."""
    return "identity" if score in ("dropped", "fast", "parts") else score


WIDER = {"none": "causal", "causal": "window"}


@functools.cache
def compiled_for(kernel: str, mask: str, score: str, dim: int) -> tuple[str, str]:
    """Mask and scores of the instance that serves a call: some serve more than their own."""
    if dim > 256:
        return ("window", "scored")
    if score == "dropped" and kernel != "sm90":
        score = "scored"
    compiled = {
        i.mask for i in INSTANCES if i.op == "attention" and (i.kernel, i.score) == (kernel, score)
    }
    while mask not in compiled and mask in WIDER:
        mask = WIDER[mask]
    return mask, score


@functools.cache
def smallest(op: str, kernel: str, dtype: str, qk: int, v: int, mask: str, score: str) -> Instance:
    """What the table has for a call: the instance with the fewest columns of q, k and v."""
    return min(
        (
            i
            for i in OF[op, kernel, dtype]
            if (i.head_dim >= qk and i.head_dim_v >= v)
            and (i.mask in ("any", mask) and i.score in ("any", score))
        ),
        key=lambda i: i.head_dim + i.head_dim_v,
    )


def test_the_table_was_read():
    assert len(ROWS) >= 8
    assert len(INSTANCES) >= 218


def test_no_instance_is_compiled_twice():
    assert len(set(INSTANCES)) == len(INSTANCES)


def test_headers_of_the_table_have_its_launchers():
    for row in ROWS:
        text = (ROOT / "cuda" / row.header).read_text()
        assert re.search(rf"\bvoid launch_{row.name}\(", text), f"{row.header}: launch_{row.name}"


@pytest.mark.parametrize("gpu", GPUS)
def test_attention_is_planned_for_the_smallest_instance_that_serves_it(gpu):
    chosen = set()
    pairs = (*itertools.product(DIMS, DIMS), *WIDE)
    for dtype, (qk, v) in itertools.product(("float32", "float16", "bfloat16"), pairs):
        shapes = (2, 100, 8, qk), (2, 100, 8, qk), (2, 100, 8, v)
        for mask, score, backend in itertools.product(MASKS, SCORES, RUNGS):
            options = {**MASKS[mask], **SCORES[score], "backend": backend}
            try:
                plan = cuattn.explain(
                    "attention", *shapes, device=GPUS[gpu], dtype=dtype, **options
                )
            except NotImplementedError:
                assert backend != "auto"
                continue
            if ("attention", plan.kernel) in COMPILED:
                key = ("attention", plan.kernel, dtype)
                assert (plan.mask, plan.score) == (mask, asked_of(score))
                kind = compiled_for(plan.kernel, mask, score, max(qk, v))
                found = Instance(*key, plan.head_dim, plan.head_dim_v, *kind)
                assert found == smallest(*key, qk, v, *kind)
                chosen.add(found)
    # Float8, its values by columns and by rows.
    kinds = itertools.product(range(16, 257, 16), MASKS, FLOAT8_SCORES, (False, True))
    for qk, mask, score, by_rows in kinds:
        columns = np.zeros((1, 2, qk, 16), ml_dtypes.float8_e4m3fn).transpose(0, 3, 1, 2)
        x = np.zeros(columns.shape, columns.dtype)
        v = x if by_rows else columns
        options = {**MASKS[mask], **FLOAT8_SCORES[score]}
        plan = cuattn.explain("attention", x, x, v, device=GPUS[gpu], **options)
        serves = gpu == "9.0"
        assert plan.kernel == ("sm90" if serves else "sm80")
        assert ("codes become numbers of 16 bits first" in plan.ladder) == (not serves)
        if not serves:
            kind = compiled_for(plan.kernel, mask, "identity", qk)
            found = Instance(
                "attention", plan.kernel, "bfloat16", plan.head_dim, plan.head_dim_v, *kind
            )
            assert found == smallest("attention", plan.kernel, "bfloat16", qk, qk, *kind)
        else:
            key = ("attention", "sm90", "float8_e4m3fn")
            assert (plan.mask, plan.score) == (mask, asked_of(score))
            level = "one level" if score == "fast" else "two levels"
            assert f"sums have {level}" in plan.ladder
            turned = "values are turned into columns as they come" in plan.ladder
            assert turned == by_rows
            found = Instance(*key, plan.head_dim, plan.head_dim_v, mask, score)
            assert found == smallest(*key, qk, qk, mask, score)
            chosen.add(found)
    kernels = {"simt", "tiled", "sm80", *(["sm90"] if gpu == "9.0" else [])}
    planned = {
        i for i in INSTANCES if i.op == "attention" and i.kernel in kernels and i.score != "parts"
    }
    assert chosen == {i for i in planned if i.mask != "rows"}  # explain has no row ranges


@pytest.mark.parametrize("gpu", GPUS)
def test_scales_of_128_rows_and_int8_have_kernels_above_64(gpu):
    chosen = set()
    kinds = itertools.product(("int8", "float8_e4m3fn"), range(16, 257, 16), MASKS)
    for dtype, qk, mask in kinds:
        v = np.zeros((1, 2, qk, 144), ml_dtypes.float8_e4m3fn).transpose(0, 3, 1, 2)
        x = np.zeros(v.shape, dtype)
        options = {**MASKS[mask], "k_scale": np.ones((1, 2, 2), np.float32)}
        plan = cuattn.explain("attention", x, x, v, device=GPUS[gpu], **options)
        serves = gpu == "9.0" and qk > 64
        assert ("codes become numbers of 16 bits first" in plan.ladder) == (not serves)
        if serves:
            key = ("attention", "sm90", dtype)
            found = Instance(*key, plan.head_dim, plan.head_dim_v, mask, "parts")
            assert found == smallest(*key, qk, qk, mask, "parts")
            chosen.add(found)
    assert chosen == {i for i in INSTANCES if i.score == "parts" and gpu == "9.0"}


@pytest.mark.parametrize("gpu", GPUS)
def test_paged_attention_is_planned_for_the_smallest_instance_that_serves_it(gpu):
    chosen = set()
    kinds = [("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")]
    kinds += [("float16", "float8_e4m3fn"), ("bfloat16", "float8_e4m3fn")]
    for (dtype, kv_dtype), head_dim in itertools.product(kinds, DIMS):
        if kv_dtype == "float8_e4m3fn" and head_dim % 16 != 0:  # no caches of it
            continue
        cache = (kv_dtype, 9, 16, 2, head_dim)
        arrays = ((3, 8, head_dim), cache, cache, (3, 4), (3,))
        scores = ("identity", "scored")  # it has no dropout
        for mask, score, backend in itertools.product(MASKS, scores, ("auto", *RUNGS[4:])):
            options = {**MASKS[mask], **SCORES[score], "backend": backend}
            try:
                plan = cuattn.explain(
                    "paged_attention", *arrays, device=GPUS[gpu], dtype=dtype, **options
                )
            except NotImplementedError:
                assert backend != "auto"
                continue
            key = ("paged_attention", plan.kernel, kv_dtype)
            found = Instance(*key, plan.head_dim, plan.head_dim_v, "any", "any")
            assert found == smallest(*key, head_dim, head_dim, mask, score)
            chosen.add(found)
    kernels = {"simt", "sm80", *(["sm90"] if gpu == "9.0" else [])}
    assert chosen == {i for i in INSTANCES if i.op == "paged_attention" and i.kernel in kernels}


@pytest.mark.parametrize("gpu", GPUS)
def test_mla_decode_is_planned_for_the_smallest_instance_that_serves_it(gpu):
    chosen = set()
    latents = (16, 496, 512, 528, 1008, 1024)
    for dtype, latent, backend in itertools.product(
        ("float32", "float16", "bfloat16"), latents, ("auto", "simt", "sm80", "sm90")
    ):
        arrays = (3, 8, latent), (3, 8, 64), (9, 16, latent), (9, 16, 64), (3, 4), (3,)
        try:
            plan = cuattn.explain(
                "mla_decode", *arrays, device=GPUS[gpu], dtype=dtype, scale=1.0, backend=backend
            )
        except NotImplementedError:
            assert backend != "auto"
            continue
        key = ("mla_decode", plan.kernel, dtype)
        found = Instance(*key, plan.head_dim, plan.head_dim_v, "any", "any")
        assert found == smallest(*key, latent, latent, "any", "any")
        chosen.add(found)
    kernels = {"simt", "sm80", *(["sm90"] if gpu == "9.0" else [])}
    assert chosen == {i for i in INSTANCES if i.op == "mla_decode" and i.kernel in kernels}


def test_kernels_lists_what_the_build_has_of_the_table():
    if cuattn.info()["cuda"] is None:
        pytest.skip("this build has no CUDA kernels to list")
    listed = {
        Instance(*(row[field] for field in Instance._fields))
        for row in cuattn.kernels()
        if row["arch"][:1].isdigit() and (row["op"], row["kernel"]) in COMPILED
    }
    has_90a = any("90a" in row["arch"] for row in cuattn.kernels())
    kinds = {"portable", "each", *(["sm90"] if has_90a else [])}
    assert listed == {i for row in ROWS if row.kind in kinds for i in row.instances()}


def test_functors_of_sm90_have_the_tiles_that_explain_takes_for_them():
    """flex's explain plans them as dropout, and its lists are made for sm90_tile."""
    for dims in ((64, 64), (128, 128), (192, 128), (192, 192), (256, 256)):
        shapes = [(1, 300, 4, d) for d in (dims[0], *dims)]
        plan = cuattn.explain(
            "attention", *shapes, device="h100", dtype="float16", dropout_p=0.5, dropout_seed=0
        )
        assert (plan.kernel, plan.tile_m, plan.tile_n) == ("sm90", *sm90_tile(dims[1]))
