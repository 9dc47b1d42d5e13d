# SPDX-License-Identifier: Apache-2.0
"""What a user who comes from another library gets wrong, and what the message then says."""

import os
import subprocess
import sys

import numpy as np
import pytest

import cuattn
from cuattn._options import OPS
from cuattn._other_names import OTHER_NAMES, names_of, way_out

F32 = np.float32


def ones(*shape):
    return np.ones(shape, F32)


def refused(call, *arrays, error=ValueError, **options):
    with pytest.raises(error) as caught:
        call(*arrays, **options)
    return str(caught.value)


# Axes.

HINT = "; read as [batch, num_heads, seqlen, head_dim] the shapes agree: pass layout='bhsd'"
BACK = "; read as [batch, seqlen, num_heads, head_dim] the shapes agree: pass layout='bshd'"


@pytest.mark.parametrize(
    ("arrays", "options", "rule"),
    [
        # heads first: 300 queries and 128 keys look like heads that do not divide
        ((ones(2, 8, 300, 16), *[ones(2, 2, 128, 16)] * 2), {}, "a multiple of num_heads_kv"),
        # a bias [heads, queries, keys] gives equal lengths away, and so do sinks and slopes
        ((ones(2, 4, 9, 16),) * 3, {"bias": ones(4, 9, 9)}, "bias must broadcast"),
        ((ones(2, 4, 9, 16),) * 3, {"sinks": ones(4)}, "sinks must have shape"),
        ((ones(2, 4, 9, 16),) * 3, {"alibi_slopes": ones(2, 4)}, "alibi_slopes must have shape"),
    ],
)
def test_heads_first_under_the_default_layout_is_named(arrays, options, rule):
    message = refused(cuattn.attention, *arrays, **options)
    assert rule in message
    assert message.endswith(HINT)
    cuattn.attention(*arrays, **options, layout="bhsd")  # as the message says


def test_heads_last_under_bhsd_is_named():
    arrays = ones(2, 300, 8, 16), *[ones(2, 128, 2, 16)] * 2
    assert refused(cuattn.attention, *arrays, layout="bhsd").endswith(BACK)
    cuattn.attention(*arrays)


@pytest.mark.parametrize(
    ("shapes", "options"),
    [
        (((2, 5, 4, 16), (2, 7, 3, 16), (2, 7, 3, 8)), {}),  # agree in neither layout
        (((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)), {"seqused_k": np.array([1], np.int32)}),
        (((2, 9, 4, 16), (2, 9, 2, 16), (2, 9, 2, 16)), {"num_splits": -1}),  # agree as given
        (((2, 9, 16), (2, 9, 2, 16), (2, 9, 2, 16)), {}),
    ],
)
def test_no_layout_is_named_where_it_would_not_help(shapes, options):
    message = refused(cuattn.attention, *(ones(*shape) for shape in shapes), **options)
    assert "layout=" not in message


def test_explain_and_backward_name_the_layout_too():
    shapes = (2, 8, 300, 16), (2, 2, 128, 16), (2, 2, 128, 16)
    assert refused(cuattn.explain, "attention", *shapes, device="cpu").endswith(HINT)
    q, k, v = (ones(*shape) for shape in shapes)
    message = refused(cuattn.attention_backward, q, q, k, v, q, ones(2, 300, 8))
    assert message.endswith(HINT)


# Names.


def arrays_of(op):
    """Positional arguments of a good call."""
    lengths = np.array([3], np.int32)
    cache, table = ones(2, 8, 2, 16), np.array([[0]], np.int32)
    return {
        "attention": [ones(1, 3, 2, 16)] * 3,
        "attention_varlen": [ones(3, 2, 16)] * 3 + [np.array([0, 3], np.int32)] * 2 + [3, 3],
        "paged_attention": [ones(1, 2, 16), cache, cache, table, lengths],
    }[op]


@pytest.mark.parametrize(
    ("op", "name", "told"),
    [
        ("attention", "is_causal", "here it is called causal (it counts from the last key"),
        ("attention", "attn_mask", "here it is called bias (floats are added to the scores"),
        ("attention", "softmax_scale", "here it is called scale"),
        ("attention", "window_size", "here it is called window (a pair (left, right)"),
        ("attention", "enable_gqa", "leave it out: fewer key heads"),
        ("attention", "deterministic", "leave it out: the same call gives the same bits"),
        ("attention", "cu_seqlens_q", "help(cuattn.attention) lists what there is"),
        ("attention", "causual", "did you mean causal?"),
        ("attention", "zzz", "help(cuattn.attention) lists what there is"),
        ("attention_varlen", "cu_seqlens_kv", "here it is called cu_seqlens_k"),
        ("attention_varlen", "max_seqlen_kv", "here it is called max_seqlen_k"),
        ("attention_varlen", "block_table", "here it is called block_tables"),
        ("paged_attention", "cache_seqlens", "here it is called context_lens"),
        ("paged_attention", "seq_lens", "here it is called context_lens"),
        ("paged_attention", "sm_scale", "here it is called scale"),
    ],
)
def test_a_name_of_another_library_is_refused_with_ours(op, name, told):
    call, arrays = getattr(cuattn, op), arrays_of(op)
    message = refused(call, *arrays, **{name: None}, error=TypeError)
    assert message.startswith(f"{op}: there is no argument {name}; {told}")
    call(*arrays)


def test_names_instead_of_places_are_refused_with_ours():
    q = ones(1, 3, 2, 16)
    message = refused(cuattn.attention, query=q, key=q, value=q, error=TypeError)
    assert message == "attention: there is no argument query; here it is called q"


def test_other_type_errors_keep_their_words():
    q = ones(1, 3, 2, 16)
    assert "missing 1 required" in refused(cuattn.attention, q, q, scale=1.0, error=TypeError)
    message = refused(cuattn.attention, q, q, v=None, error=TypeError)
    assert message.startswith("attention: v must be an array")


def test_no_name_of_the_list_is_ours_in_the_same_op():
    for op in OPS:
        for name, (ours, _) in OTHER_NAMES.items():
            assert name not in ours
            if name not in names_of(op):
                assert way_out(op, name)


def test_explain_names_ours_too():
    q = (1, 3, 2, 16)
    message = refused(cuattn.explain, "attention", q, q, q, is_causal=True, error=TypeError)
    assert message.startswith("explain: attention has no option is_causal: here it is called cau")


# Lengths, head sizes, masks.


@pytest.mark.parametrize("name", ["seqused_k", "seqused_q"])
def test_int64_lengths_are_told_how_to_be_cast(name):
    q = ones(1, 3, 2, 16)
    message = refused(cuattn.attention, q, q, q, **{name: np.array([3])})
    way = "by x.astype('int32') or torch's x.int()"
    assert message == f"attention: {name} must be int32, got int64; cast it, {way}"
    cuattn.attention(q, q, q, **{name: np.array([3]).astype("int32")})


def test_head_dim_above_512_is_not_told_to_be_padded():
    q, wide = ones(1, 3, 2, 16), ones(1, 3, 2, 520)
    message = refused(cuattn.attention, wide, wide, q)
    assert "no kernel holds such rows" in message
    assert "pad" not in message
    assert message.endswith("such as torch's scaled_dot_product_attention or "
                            "jax.nn.dot_product_attention")  # fmt: skip


def test_head_dim_v_above_512_can_be_cut_as_the_message_says():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 3, 2, 16), F32)
    v = rng.standard_normal((1, 3, 2, 1024), F32)
    message = refused(cuattn.attention, q, k, v)
    assert message.endswith("cut v along head_dim_v, call for each part and join the outs")
    parts = [cuattn.attention(q, k, part) for part in np.split(v, 2, axis=-1)]
    scores = np.einsum("bihd,bjhd->bhij", q, k, dtype=np.float64) / 4
    weights = np.exp(scores)
    want = np.einsum("bhij,bjhd->bihd", weights / weights.sum(-1, keepdims=True), v)
    assert np.abs(np.concatenate(parts, axis=-1) - want).max() < 1e-5


ZERO_ONE = """
import ml_dtypes, numpy as np, cuattn
q = np.ones((1, 3, 2, 16), np.float32)
def call(bias, x=q):
    try:
        cuattn.attention(x, x, x, bias=bias)
        print("ran")
    except ValueError as error:
        print(error)
mask = np.tril(np.ones((3, 3)))
call(mask.astype(np.float32))
call(np.broadcast_to(mask.astype(np.float32), (1, 2, 3, 3)))
for dtype in (np.float16, ml_dtypes.bfloat16):
    call(mask.astype(dtype), q.astype(dtype))
call(mask.astype(bool))
call(np.where(mask, 0, -np.inf).astype(np.float32))
call(mask.astype(np.float32) * 0.5)
call(np.ones((3, 3), np.float32))
call(np.zeros((3, 3), np.float32))
"""


@pytest.mark.parametrize("checked", ["1", "0"])
def test_a_float_mask_of_zeros_and_ones_is_refused_under_check(checked):
    environment = {**os.environ, "CUATTN_CHECK": checked}
    command = [sys.executable, "-c", ZERO_ONE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 9
    refusals = lines[:4] if checked == "1" else []
    for line, dtype in zip(refusals, ("float32", "float32", "float16", "bfloat16"), strict=False):
        assert line.startswith(f"attention: bias holds 0 and 1 alone, got {dtype}, which is added")
        assert "pass a mask as bool (True keeps the key)" in line
    assert lines[len(refusals) :] == ["ran"] * (9 - len(refusals))


# Truth values are no numbers.


TRUTHS = {"Python": True, "numpy": np.True_, "array": np.array(True)}
NUMBERS = ["scale", "softcap", "dropout_p", "num_splits", "dropout_seed", "dropout_row", "window"]


@pytest.mark.parametrize("library", [*TRUTHS, "torch"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_truth_value_is_no_number(name, library):
    value = TRUTHS[library] if library in TRUTHS else pytest.importorskip("torch").tensor(True)
    x = np.ones((1, 4, 2, 16), np.float32)
    message = refused(
        cuattn.attention, x, x, x, **{name: (value, 0) if name == "window" else value},
        error=TypeError,
    )  # fmt: skip
    kind = "a number" if name in NUMBERS[:3] else "an integer"
    assert message.startswith(f"attention: {name} must be {kind}, got {value!r}; pass a")


@pytest.mark.parametrize("name", ["scale", "softcap", "num_splits", "window"])
def test_a_truth_value_is_no_number_of_a_traced_op(name):
    torch = pytest.importorskip("torch")
    x = torch.ones(1, 1, 4, 2, 16)
    options = {name: (True, 0) if name == "window" else True}
    attend = torch.func.vmap(lambda q: cuattn.torch.attention(q, q, q, **options))
    kind = "a number" if name in NUMBERS[:3] else "an integer"
    message = refused(attend, x, error=TypeError)
    assert message.startswith(f"attention: {name} must be {kind}, got True; pass a")


def test_a_truth_value_is_no_number_of_faces():
    x = np.ones((1, 4, 2, 16), np.float32)
    message = refused(cuattn.quantize, x, x, x, scale=np.True_, error=TypeError)
    assert message.startswith("quantize: scale must be a number, got np.True_")
    torch, jnp = pytest.importorskip("torch"), pytest.importorskip("jax.numpy")
    from cuattn.compat.flash_attn import flash_attn_func

    q = torch.ones(1, 4, 2, 16)
    for name in ("softmax_scale", "softcap"):
        message = refused(flash_attn_func, q, q, q, **{name: True}, error=TypeError)
        assert message.startswith(f"flash_attn_func: {name} must be a number, got True")
    attend, q = cuattn.jax.dot_product_attention, jnp.ones((1, 4, 2, 16))
    message = refused(attend, q, q, q, scale=True, error=TypeError)
    assert message == "dot_product_attention: scale must be a number, got True; pass a float"


def test_a_truth_value_is_no_scale_of_codes():
    torch = pytest.importorskip("torch")
    codes = torch.ones(1, 4, 2, 16).to(torch.float8_e4m3fn)
    for name in ("q_scale", "k_scale", "v_scale"):
        for attend in (cuattn.attention, cuattn.torch.attention):
            message = refused(attend, codes, codes, codes, **{name: True}, error=TypeError)
            assert message == f"attention: {name} must be a number, got True; pass a float"


# Faces that are not imported.

LAZY = """
import sys, cuattn
assert not {"torch", "jax", "cuattn.torch", "cuattn.jax"} & set(sys.modules)
assert cuattn.FACE.attention is not None
import cuattn.FACE as face
assert face is cuattn.FACE and "FACE" in sys.modules
"""


@pytest.mark.parametrize("face", ["torch", "jax"])
def test_a_face_is_imported_when_it_is_asked_for(face):
    pytest.importorskip(face)
    done = subprocess.run(
        [sys.executable, "-c", LAZY.replace("FACE", face)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


MISSING = """
import importlib.util, cuattn
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "FACE" else find(name, *rest)
assert not hasattr(cuattn, "FACE")
try:
    cuattn.FACE
except AttributeError as error:
    print(error)
"""


@pytest.mark.parametrize("face", ["torch", "jax"])
def test_a_face_whose_library_is_missing_is_no_attribute(face):
    command = [sys.executable, "-c", MISSING.replace("FACE", face)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        f"module 'cuattn' has no attribute '{face}': {face} is not installed; pip install {face}"
    )


def test_other_attributes_are_missing_as_ever():
    with pytest.raises(AttributeError, match=r"'compat'; import a .* cuattn\.compat\.flash_attn$"):
        cuattn.__getattr__("compat")  # other tests may have imported it
    with pytest.raises(AttributeError, match="module 'cuattn' has no attribute 'nosuch'"):
        _ = cuattn.nosuch
