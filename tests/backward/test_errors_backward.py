# SPDX-License-Identifier: Apache-2.0
"""Every refusal of the backward pass, word for word: function, argument, rule, value, way out.
Nothing is written then, and the next call is right.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import cuattn
from harness import Arena, Cpu, bits
from made_up_gpus import GPUS

F32, I32 = np.float32, np.int32
DENSE, RAGGED = "attention_backward", "attention_varlen_backward"


def arrays_of(op):
    """Positional arguments of a good call, by name."""
    rng = np.random.default_rng(3)
    shapes = {"dout": (2, 5, 4, 8), "q": (2, 5, 4, 16), "k": (2, 7, 2, 16), "v": (2, 7, 2, 8)}
    shapes |= {"out": shapes["dout"], "lse": (2, 4, 5)}
    lengths = {}
    if op == RAGGED:
        shapes = {name: (shape[1], *shape[2:]) for name, shape in shapes.items()} | {"lse": (4, 5)}
        lengths = {
            "cu_seqlens_q": np.array([0, 2, 5], I32),
            "cu_seqlens_k": np.array([0, 3, 7], I32),
            "max_seqlen_q": 3,
            "max_seqlen_k": 4,
        }
    return {name: rng.standard_normal(shape, F32) for name, shape in shapes.items()} | lengths


def ones(*shape, dtype=F32):
    return np.ones(shape, dtype)


E4M3 = ml_dtypes.float8_e4m3fn
FAR = 2**32 + 8  # as an int32 it would be 8
NAMES = "dq, dk, dv, dbias, dsinks, dslopes"

# Name: (function, changed arguments, exception, message behind "function: ").
# fmt: off
REFUSALS = {
    "dout_shape": (DENSE, {"dout": ones(2, 5, 4, 16)}, ValueError,
        "dout must have the shape of out (2, 5, 4, 8), got (2, 5, 4, 16); make them equal"),
    "dout_axes": (DENSE, {"dout": ones(5, 4, 8)}, ValueError,
        "dout must have the shape of out (2, 5, 4, 8), got (5, 4, 8); make them equal"),
    "dout_dtype": (DENSE, {"dout": ones(2, 5, 4, 8, dtype=np.float16)}, ValueError,
        "dout must be float32 like q, got float16; cast it"),
    "out_shape": (DENSE, {"out": ones(2, 4, 5, 8)}, ValueError,
        "out must have the shape of the forward call's out (2, 5, 4, 8), got (2, 4, 5, 8); make "
        "them equal"),
    "lse_shape": (DENSE, {"lse": ones(2, 5, 4)}, ValueError,
        "lse must have the shape of the forward call's lse (2, 4, 5), got (2, 5, 4); make them "
        "equal"),
    "lse_shape_ragged": (RAGGED, {"lse": ones(5, 4)}, ValueError,
        "lse must have the shape of the forward call's lse (4, 5), got (5, 4); make them equal"),
    "lse_dtype": (DENSE, {"lse": ones(2, 4, 5, dtype=np.float16)}, ValueError,
        "lse must be float32, got float16; cast it"),
    "dlse_shape": (DENSE, {"dlse": ones(2, 4, 6)}, ValueError,
        "dlse must have the shape of the forward call's lse (2, 4, 5), got (2, 4, 6); make them "
        "equal"),
    "dlse_dtype": (DENSE, {"dlse": ones(2, 4, 5, dtype=np.float64)}, ValueError,
        "dlse must be float32, got float64; cast it"),
    "dout_is_a_list": (DENSE, {"dout": [1.0]}, TypeError,
        "dout must be an array (numpy, torch, CuPy, JAX or any object with __dlpack__), got list; "
        "convert it first"),
    "lse_is_none": (DENSE, {"lse": None}, TypeError,
        "lse must be an array (numpy, torch, CuPy, JAX or any object with __dlpack__), got "
        "NoneType; convert it first"),
    "bias_beyond_int32": (RAGGED, {"max_seqlen_k": FAR, "need": ("dbias",),
                                   "bias": np.broadcast_to(F32(0), (1, 1, 1, FAR))}, ValueError,
        "bias must have seqlen_kv from 0 to 2147482624 (2^31 - 1024, so that the end of the last "
        f"tile is an int32), got {FAR}; split the call, for keys with merge_states"),
    "need_unknown": (DENSE, {"need": ("dq", "dw")}, ValueError,
        f"need must name one or more of {NAMES}, each once, got ('dq', 'dw'); pass a tuple of "
        "names"),
    "need_nothing": (DENSE, {"need": ()}, ValueError,
        f"need must name one or more of {NAMES}, each once, got (); pass a tuple of names"),
    "need_twice": (RAGGED, {"need": ["dq", "dq"]}, ValueError,
        f"need must name one or more of {NAMES}, each once, got ['dq', 'dq']; pass a tuple of "
        "names"),
    "need_without_a_given_result": (DENSE, {"need": "dq", "dk": ones(2, 7, 2, 16)}, ValueError,
        "dk must be named by need to be written, got need=('dq',); add it there, or leave dk out"),
    "need_dbias": (DENSE, {"need": ("dbias",)}, ValueError,
        "need must not name dbias where no bias is given; pass bias=, or leave it out"),
    "need_dsinks": (DENSE, {"need": ("dq", "dsinks")}, ValueError,
        "need must not name dsinks where no sinks is given; pass sinks=, or leave it out"),
    "need_dslopes": (RAGGED, {"need": ("dslopes",)}, ValueError,
        "need must not name dslopes where no alibi_slopes is given; pass alibi_slopes=, or leave "
        "it out"),
    "need_dbias_of_bool": (DENSE, {"need": ("dbias",), "bias": ones(5, 7, dtype=bool)}, ValueError,
        "need must not name dbias where bias is bool, which has no gradient; leave it out"),
    "deterministic_of_2": (DENSE, {"deterministic": 2}, TypeError,
        "deterministic must be True or False, got 2; pass a bool"),
    "dropout_of_1": (DENSE, {"dropout_p": 1.0, "dropout_seed": 1}, ValueError,
        "dropout_p must lie in [0, 1), got 1; it is the share of probabilities that are dropped"),
    "dropout_below_0": (RAGGED, {"dropout_p": -0.1, "dropout_seed": 1}, ValueError,
        "dropout_p must lie in [0, 1), got -0.1; it is the share of probabilities that are "
        "dropped"),
    "dropout_nan": (DENSE, {"dropout_p": float("nan"), "dropout_seed": 1}, ValueError,
        "dropout_p must lie in [0, 1), got nan; it is the share of probabilities that are dropped"),
    "dropout_without_a_seed": (DENSE, {"dropout_p": 0.5}, ValueError,
        "dropout_seed or dropout_state must be given with dropout_p > 0, got none; pass an "
        "integer, or int64 [2] that holds seed and offset"),
    "dropout_with_both": (DENSE,
        {"dropout_p": 0.5, "dropout_seed": 1, "dropout_state": np.array([1, 2])}, ValueError,
        "dropout_seed or dropout_state must be given with dropout_p > 0, got both; pass an "
        "integer, or int64 [2] that holds seed and offset"),
    "dropout_seed_below_0": (DENSE, {"dropout_p": 0.5, "dropout_seed": -2}, ValueError,
        "dropout_seed must lie in [0, 2^63), got -2; pass another"),
    "dropout_seed_of_minus_1": (DENSE, {"dropout_p": 0.5, "dropout_seed": -1}, ValueError,
        "dropout_seed must lie in [0, 2^63), got -1; pass another"),
    "dropout_seed_of_minus_1_beside_a_state": (DENSE,
        {"dropout_p": 0.5, "dropout_seed": -1, "dropout_state": np.array([1, 2])}, ValueError,
        "dropout_seed must lie in [0, 2^63), got -1; pass another"),
    "dropout_seed_of_text": (DENSE, {"dropout_p": 0.5, "dropout_seed": "7"}, TypeError,
        "dropout_seed must be an integer, got '7'; pass an int"),
    "dropout_offset_overflow": (DENSE,
        {"dropout_p": 0.5, "dropout_seed": 1, "dropout_offset": 2**32}, ValueError,
        "dropout_offset must lie in [0, 2^32), got 4294967296; count calls, and change the seed "
        "when they are used up"),
    "dropout_state_overflow": (DENSE,
        {"dropout_p": 0.5, "dropout_state": np.array([1, -1])}, ValueError,
        "dropout_state must hold an offset in [0, 2^32), got -1; count calls, and change the seed "
        "when they are used up"),
    "dropout_state_shape": (DENSE,
        {"dropout_p": 0.5, "dropout_state": np.array([1, 2, 3])}, ValueError,
        "dropout_state must have shape (seed and offset,) = (2,), got (3,); give one entry for "
        "each"),
    "dropout_state_dtype": (DENSE,
        {"dropout_p": 0.5, "dropout_state": np.array([1, 2], I32)}, ValueError,
        "dropout_state must be int64, got int32; cast it"),
    "float8": (DENSE, {"q": ones(2, 5, 4, 16, dtype=E4M3)}, NotImplementedError,
        "q is float8_e4m3fn, for which no kernel is built yet; cast to bfloat16"),
    "head_dim": (DENSE, {"q": ones(2, 5, 4, 264), "k": ones(2, 7, 2, 264)}, NotImplementedError,
        "q and v must have head_dim and head_dim_v up to 256, got 264 and 8; wider heads have no "
        "backward pass, call the forward alone"),
    "k_of_other_heads": (DENSE, {"k": ones(2, 7, 3, 16), "v": ones(2, 7, 3, 8)}, ValueError,
        "q must have num_heads_q a multiple of num_heads_kv, got 4 and 3; repeat or drop heads"),
    "bias_shape": (DENSE, {"bias": ones(5, 8)}, ValueError,
        "bias must broadcast to [batch, num_heads_q, seqlen_q, seqlen_kv] = (2, 4, 5, 7), got (5, "
        "8); add axes of extent 1 where it is shared"),
    "cu_seqlens": (RAGGED, {"cu_seqlens_q": np.array([0, 3, 2], I32)}, ValueError,
        "cu_seqlens_q must not decrease, got 2 after 3 at index 2; pass the running sum of the "
        "sequence lengths"),
    "seqused": (DENSE, {"seqused_k": np.array([8, 0], I32)}, ValueError,
        "seqused_k must lie within [0, 7], got 8 at index 0; it counts the rows in use of each "
        "sequence"),
    "cu_seqlens_none": (RAGGED, {"cu_seqlens_k": None}, TypeError,
        "cu_seqlens_k must be given, got None; pass what the forward call got"),
    "dq_shape": (DENSE, {"dq": ones(2, 5, 4, 8)}, ValueError,
        "dq must have shape (2, 5, 4, 16), got (2, 5, 4, 8); allocate it with that shape"),
    "dv_dtype": (DENSE, {"dv": ones(2, 7, 2, 8, dtype=np.float16)}, ValueError,
        "dv must be float32, got float16; cast it"),
    "dbias_shape": (DENSE, {"bias": ones(1, 7), "need": ("dbias",), "dbias": ones(5, 7)},
        ValueError, "dbias must have shape (1, 7), got (5, 7); allocate it with that shape"),
    "dsinks_dtype": (DENSE,
        {"sinks": ones(4), "need": ("dsinks",), "dsinks": ones(4, dtype=np.float16)}, ValueError,
        "dsinks must be float32, got float16; cast it"),
    "backend_unknown": (DENSE, {"backend": "fast"}, ValueError,
        "backend must be 'auto', 'naive', 'simt', 'sm80', 'sm90' or 'cpu', got 'fast'; use 'auto' "
        "for the fastest that serves the call"),
    "backend_of_cuda": (DENSE, {"backend": "sm80"}, NotImplementedError,
        "backend 'sm80' cannot run this call: it runs on CUDA arrays, these are on the CPU; use "
        "backend='cpu' or 'auto'"),
    "workspace_too_small": (DENSE, {"workspace": ones(3)}, MemoryError,
        "workspace must hold 192 bytes for backend 'cpu', got 12; allocate as explain() says, or "
        "use backend='auto'"),
}
# fmt: on


def call(op, changed):
    given = {**arrays_of(op), **changed}
    positional = [given.pop(name) for name in arrays_of(op)]
    return getattr(cuattn, op)(*positional, **given)


@pytest.mark.parametrize("name", REFUSALS)
def test_refusal(name):
    op, changed, exception, message = REFUSALS[name]
    arena = Arena(Cpu())
    results = {}
    if not {"dq", "dk", "dv", "need"} & set(changed):
        given = arrays_of(op)
        for gradient in ("dq", "dk", "dv"):
            like = given[gradient[1:]]
            results[gradient] = arena.output(like.shape, like.dtype, name=gradient)
    with pytest.raises(exception) as raised:
        call(op, {**results, **changed})
    assert str(raised.value) == f"{op}: {message}"
    for x in results.values():
        assert (bits(x) == 0xFF).all(), "a refused call wrote something"
    assert len(call(op, {})) == 3


@pytest.mark.parametrize("written", ["dq", "dk", "dv", "dbias", "dsinks", "dslopes", "workspace"])
def test_results_share_no_memory(written):
    shapes = {"dq": (2, 5, 4, 16), "dk": (2, 7, 2, 16), "dv": (2, 7, 2, 8), "dbias": (5, 7)}
    shapes |= {"dsinks": (4,), "dslopes": (4,), "workspace": (4096,)}
    options = {"bias": ones(5, 7), "sinks": ones(4), "alibi_slopes": ones(4)}
    need = ("dq", "dk", "dv", "dbias", "dsinks", "dslopes")
    arrays = arrays_of(DENSE)
    memory = np.ones(1 << 14, F32)
    for other in ("dout", "q", "k", "v", "out", "lse", *options):
        source = arrays.get(other, options.get(other))
        shared = memory[: source.size].reshape(source.shape)
        result = memory[: np.prod(shapes[written])].reshape(shapes[written])
        with pytest.raises(ValueError, match="must not share memory"):
            call(DENSE, {**options, other: shared, written: result, "need": need})


def test_no_gradient_goes_through_pages():
    """The C ABI takes block_tables; the Python function has no such argument."""
    with pytest.raises(TypeError, match="block_tables"):
        call(RAGGED, {"block_tables": ones(1, 1, dtype=I32)})


def explain_on(device, op, **options):
    shapes = [x if np.isscalar(x) else x.shape for x in arrays_of(op).values()]
    return cuattn.explain(op, *shapes, device=device, **options)


@pytest.mark.parametrize("op", [DENSE, RAGGED])
@pytest.mark.parametrize(("device", "best"), [("a100", "sm80"), ("h100", "sm90")])
@pytest.mark.parametrize("backend", ["auto", "sm80", "naive"])
def test_cuda_goes_by_tensor_cores(op, device, best, backend):
    plan = explain_on(device, op, backend=backend, dtype="bfloat16")
    assert plan.kernel == (best if backend == "auto" else backend)
    lines = plan.ladder.splitlines()
    assert [line[2:].split(":")[0] for line in lines] == ["sm90", "sm80", "simt", "naive"]
    assert sum(line.startswith("* ") for line in lines) == 1
    assert "simt: cannot: it takes float32 only" in lines[2]
    if device == "a100":
        assert "sm90: cannot: it is for compute capability 9.0 alone" in lines[0]


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("dtype", "tiled"), [("float32", "simt"), ("bfloat16", "sm80")])
def test_gradients_without_query_heads_are_planned_as_they_run(gpu, dtype, tiled):
    row, key, lse = (2, 5, 0, 16), (2, 7, 2, 16), (2, 0, 5)
    for backend in ("auto", "naive", tiled):
        plan = cuattn.explain(
            DENSE, row, row, key, key, row, lse, device=GPUS[gpu], dtype=dtype, backend=backend
        )
        assert (plan.kernel, plan.workspace_bytes, plan.tile_m) == ("naive", 0, 0)
        assert plan.reason.startswith("no query head, plain kernels write zeros")
        assert "* naive: runs: no query head" in plan.ladder
        assert plan.ladder.count("runs: ") == 1


REFUSED_BY_SM90 = {  # and what serves it
    "it takes float16 and bfloat16, not float32": ("simt", {"dtype": "float32"}),
    "it has no dropout beside softcap, ALiBi, a bias or a scale up to 0, which sm80 has": (
        "sm80",
        {"dropout_p": 0.1, "dropout_seed": 3, "softcap": 5.0},
    ),
    "it has no dslopes beside a softcap, a bias or such a scale, which sm80 has": (
        "sm80",
        {"alibi_slopes": (4,), "softcap": 5.0, "need": ("dq", "dslopes")},
    ),
    "it has no dbias of such a bias, head_dim or beside such options, which sm80 has": (
        "sm80",
        {"bias": (5, 7), "need": ("dq", "dbias")},
    ),
}


@pytest.mark.parametrize("why", REFUSED_BY_SM90)
@pytest.mark.parametrize("backend", ["sm80", "sm90"])
def test_what_sm90_refuses_goes_by_tiles(why, backend):
    kernel, given = REFUSED_BY_SM90[why]
    options = {"dtype": "bfloat16", **given}
    plan = explain_on("h100", DENSE, **options)
    assert plan.kernel == kernel
    assert f"sm90: cannot: {why}" in plan.ladder
    if backend == kernel:
        assert explain_on("h100", DENSE, **options, backend=backend).kernel == kernel
        return
    with pytest.raises(NotImplementedError) as raised:
        explain_on("h100", DENSE, **options, backend=backend)
    assert str(raised.value) == (
        f"{DENSE}: backend '{backend}' cannot run this call: {why}; use backend='{kernel}' or "
        "'auto'"
    )


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("device", ["a100", "h100"])
def test_nothing_goes_by_naive_unless_it_is_named(device, dtype):
    given = {"bias": (5, 7), "sinks": (4,), "alibi_slopes": (4,), "softcap": 3.0}
    for options in ({}, {"dropout_p": 0.5, "dropout_seed": 1}, {"need": ("dbias", "dslopes")}):
        plan = explain_on(device, DENSE, dtype=dtype, **given, **options)
        assert plan.kernel in ("simt", "sm80", "sm90")


def test_what_cannot_run_refuses_by_name():
    with pytest.raises(NotImplementedError) as raised:
        explain_on("h100", DENSE, backend="simt", dtype="bfloat16")
    assert str(raised.value) == (
        f"{DENSE}: backend 'simt' cannot run this call: it takes float32 only; "
        "use backend='sm90' or 'auto'"
    )
    with pytest.raises(NotImplementedError, match="it runs on CPU arrays, these are on a CUDA"):
        explain_on("h100", DENSE, backend="cpu")


def test_the_workspace_of_tensor_cores():
    """Two numbers a row; on Hopper each sequence begins at a multiple of 128 rows."""
    b, rows, heads = 2, 5, 4  # of arrays_of
    plan = explain_on("a100", DENSE, dtype="float16")
    assert (plan.kernel, plan.workspace_bytes) == ("sm80", 8 * b * rows * heads)
    plan = explain_on("h100", DENSE, dtype="float16")
    assert (plan.kernel, plan.workspace_bytes) == ("sm90", 8 * 128 * (b + 3) * heads)
    plan = explain_on("h100", DENSE, dtype="float16", sinks=(heads,), need=("dq", "dsinks"))
    assert (plan.kernel, plan.workspace_bytes) == ("sm90", (8 * 128 * (b + 3) + 4 * b) * heads)


@pytest.mark.parametrize(("dtype", "kernel"), [("float16", "sm80"), ("float32", "simt")])
def test_the_workspace_of_option_gradients(dtype, kernel):
    """A third number a row for dslopes; of dbias the parts, where few blocks would make it."""
    rows = 2 * 1000 * 4
    for bias, parts in (((2, 4, 1000, 1500), 0), ((4, 1000, 1500), 0), ((1500,), 22)):
        for need in (("dq", "dbias"), ("dslopes", "dbias")):
            floats = (3 if "dslopes" in need else 2) * rows + parts * int(np.prod(bias))
            q, k, lse = (2, 1000, 4, 64), (2, 1500, 4, 64), (2, 4, 1000)
            options = {"bias": bias, "alibi_slopes": (4,), "need": need, "dtype": dtype}
            plan = cuattn.explain(DENSE, q, q, k, k, q, lse, device="a100", **options)
            assert (plan.kernel, plan.workspace_bytes) == (kernel, 4 * floats)


def test_the_workspace_of_naive_on_cuda():
    """Two planes of pairs, a third where ds and dx differ and both are kept, a number a row each
    for dsinks and dslopes.
    """
    b, rows, heads, keys = 2, 5, 4, 7  # of arrays_of
    given = {"bias": (rows, keys), "sinks": (heads,), "alibi_slopes": (heads,)}
    plane, row = 4 * b * heads * rows * keys, 4 * b * heads * rows
    for need, softcap, want in (
        (("dq", "dk", "dv"), 0.0, 2 * plane),
        (("dq", "dbias"), 0.0, 2 * plane),
        (("dq", "dbias"), 3.0, 3 * plane),
        (("dq", "dsinks", "dslopes"), 3.0, 2 * plane + 2 * row),
    ):
        plan = explain_on("h100", DENSE, need=need, softcap=softcap, backend="naive", **given)
        assert plan.workspace_bytes == want


def test_the_options_are_those_of_the_forward_call():
    from cuattn._gradients import GRADIENTS, forward_options

    own = {"dlse", "deterministic", "need", *GRADIENTS, "workspace", "stream"}
    for op in (DENSE, RAGGED):
        function = getattr(cuattn, op)
        defaults = dict(function.__kwdefaults__)
        assert set(defaults) - own == {option.name for option in forward_options(op)}
        for option in forward_options(op):
            assert defaults[option.name] == option.default, option.name


def test_explain_says_what_runs():
    shapes = [x.shape for x in arrays_of(DENSE).values()]
    plan = cuattn.explain(DENSE, *shapes, device="cpu", dtype="float32")
    assert (plan.kernel, plan.workspace_bytes) == ("cpu", 192)
    assert plan.ladder.startswith("* cpu: runs: five products of tiles")
    naive = cuattn.explain(
        DENSE, *shapes, device="cpu", dtype="float32", backend="naive", causal=True
    )
    assert (naive.kernel, naive.mask) == ("naive", "causal")
    assert naive.workspace_bytes == 3 * 4 * 2 * 4 * 5 * 7
    arrays = arrays_of(DENSE)
    bias, sinks, slopes = ones(1, 4, 1, 7), ones(4), ones(2, 4)
    plan = cuattn.explain(
        DENSE,
        *arrays.values(),
        bias=bias,
        sinks=sinks,
        alibi_slopes=slopes,
        need=("dbias", "dsinks", "dslopes"),
    )
    need = {"need": ("dbias", "dsinks", "dslopes"), "bias": bias, "sinks": sinks}
    memory = np.empty(plan.workspace_bytes // 4, F32)
    assert call(DENSE, {**need, "alibi_slopes": slopes, "workspace": memory}).dbias.shape == (
        1,
        4,
        1,
        7,
    )
    with pytest.raises(TypeError, match="attention_backward has no option num_splits"):
        cuattn.explain(DENSE, *shapes, num_splits=2)
    with pytest.raises(TypeError, match="attention_backward takes dout, q, k, v, out, lse, got 2"):
        cuattn.explain(DENSE, *shapes[:2])
