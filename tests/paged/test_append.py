# SPDX-License-Identifier: Apache-2.0
"""append_attention: the bits of a write into slots counted by hand, and of paged_attention behind.

The tests of these two hold their numbers; here it is which tokens go where, and turned by what.
"""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

import cuattn
import frameworks
import paged_cases
from paged_cases import PagedCase

LIBRARIES = {name: frameworks.CPU[name] for name in ("numpy", "torch")}
CASES = [
    PagedCase(),
    PagedCase(dtype="float32", lens=(5, 100, 33), softcap=4.0, sinks=True),
    PagedCase(dtype="bfloat16", q_len=3, lens=(40, 3, 9, 18), window=(20, -1)),
    PagedCase(q_len=4, lens=(0, 1, 2, 3, 4, 60), alibi="batch"),  # fewer tokens than queries
    PagedCase(kv_layout="vllm", head_dim=128, lens=(70, 1), alibi="head"),
    PagedCase(kv_layout="hnd", q_len=2, causal=False, block_size=5, lens=(16, 5, 6)),
    PagedCase(fp8=True, scales="head", lens=(16, 1, 0, 65), num_heads_q=4),
    PagedCase(fp8=True, scales="float", q_len=2, kv_layout="vllm", lens=(16, 2)),
    PagedCase(block_size=1, head_dim=32, lens=(7, 1), options=(("num_splits", 2),)),
    PagedCase(block_size=256, q_len=70, head_dim=32, lens=(300, 256)),
    PagedCase(lens=()),
]
ROPES = [None, (64, False), (32, True), (16, False)]
POSITIONAL = ("q", "k", "v", "k_cache", "v_cache", "block_tables", "context_lens")


@pytest.fixture(
    params=[
        *LIBRARIES,
        *(pytest.param(name, marks=pytest.mark.gpu) for name in frameworks.CUDA),
    ]
)
def library(request):
    return {**LIBRARIES, **frameworks.CUDA}[request.param]()


@pytest.fixture
def rng(request):
    return np.random.default_rng(7)


def make(case, rope, rng, given=False):
    """Arrays and options of a call by name; `given`: places of the rotation that are random."""
    problem = paged_cases.make(case, rng)
    arrays, q = dict(problem.arrays), problem.arrays["q"]
    shape = (*q.shape[:-2], case.num_heads_kv, case.head_dim)
    arrays["k"], arrays["v"] = rng.standard_normal((2, *shape), np.float32).astype(q.dtype)
    options = dict(problem.options)
    if rope is not None and rope[0] <= case.head_dim:
        angle = rng.uniform(0, 6, (400, rope[0] // 2))
        arrays["cos"], arrays["sin"] = np.cos(angle).astype("f"), np.sin(angle).astype("f")
        options["rope_interleaved"] = rope[1]
        if given:
            arrays["rope_positions"] = rng.integers(0, 400, (q.shape[0], case.q_len or 1))
    return arrays, options


def bytes_of(values):
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def append(placed, options):
    arrays = dict(placed)
    positional = [arrays.pop(name) for name in POSITIONAL]
    if "cos" in arrays:
        arrays["rope"] = arrays.pop("cos"), arrays.pop("sin")
    return cuattn.append_attention(*positional, **arrays, **options, return_lse=True)


def by_hand(arrays, options, case, library):
    """The two calls, slot by slot; q is rotated by writing it into a cache of its own."""
    arrays, options, more = dict(arrays), dict(options), {}
    q_len, size = case.q_len or 1, case.block_size
    places = np.array(case.lens, np.int64)[:, None] + np.arange(-q_len, 0)
    slots = np.full(places.shape, -1)
    for b, i in np.argwhere(places >= 0):
        block, token = divmod(int(places[b, i]), size)
        slots[b, i] = int(arrays["block_tables"][b, block]) * size + token
    positions = arrays.pop("rope_positions", places.clip(0)).flatten()
    turn = {"rope_interleaved": options.pop("rope_interleaved", False)}
    if "cos" in arrays:
        turn |= {"cos": library.put(arrays.pop("cos")), "sin": library.put(arrays.pop("sin"))}
        turn["positions"] = library.put(positions)
        q = arrays["q"].reshape(-1, *arrays["q"].shape[-2:])
        cache = library.put(np.zeros((len(q), 1, *q.shape[1:]), q.dtype))
        cuattn.reshape_and_cache(
            *(library.put(q) for _ in "kv"),
            cache,
            library.put(np.zeros((len(q), 1, *q.shape[1:]), q.dtype)),
            library.put(np.arange(len(q))),
            **turn,
        )
        arrays["q"] = library.get(cache).reshape(arrays["q"].shape)
    placed = {name: library.put(x) for name, x in arrays.items()}
    rows = [library.put(arrays[n].reshape(-1, *arrays[n].shape[-2:])) for n in "kv"]
    more = {n: placed.get(n, options.get(n)) for n in ("k_scale", "v_scale")}
    cuattn.reshape_and_cache(
        *rows,
        placed["k_cache"],
        placed["v_cache"],
        library.put(slots.flatten()),
        kv_layout=case.kv_layout,
        **more,
        **turn,
    )
    positional = [placed.pop(name) for name in ("q", *POSITIONAL[3:])]
    placed.pop("k"), placed.pop("v")
    result = cuattn.paged_attention(*positional, **placed, **options, return_lse=True)
    return (*result, *positional[1:3])


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_has_the_bits_of_a_write_and_attention(library, case, rope, given, rng):
    arrays, options = make(case, rope, rng, given)
    if arrays["q"].dtype.type not in library.dtypes:
        pytest.skip("the library has no such dtype")
    placed = {name: library.put(x) for name, x in arrays.items()}
    found = (*append(placed, options), placed["k_cache"], placed["v_cache"])
    assert library.owns(found[0])
    wanted = by_hand(arrays, options, case, library)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(bytes_of(library.get(a)), bytes_of(library.get(b)))
    written = bytes_of(library.get(found[2])) != bytes_of(arrays["k_cache"])
    assert written.any() == bool(case.lens)


@pytest.mark.parametrize("q_len", [None, 3])
def test_places_of_the_rotation_may_lie_apart(library, q_len, rng):
    """A column of an array of all steps; what has one stride had been refused, the rest copied."""
    case = PagedCase(dtype="float32", q_len=q_len)
    arrays, options = make(case, (64, False), rng, given=True)
    steps = np.full((*arrays["rope_positions"].shape, 4), 399)
    steps[..., 1] = arrays["rope_positions"]
    results = []
    for positions in (library.put(arrays["rope_positions"]), library.put(steps)[..., 1]):
        placed = {name: library.put(x) for name, x in arrays.items()}
        placed["rope_positions"] = positions
        results.append((*append(placed, options), placed["k_cache"]))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(library.get(a), library.get(b))


def test_steps_build_the_cache_of_a_prompt(library, rng):
    """A prompt at once, in chunks, and token by token give the same caches and the same result."""
    q, k, v = rng.standard_normal((3, 2, 21, 4, 32), np.float32)
    angle = rng.uniform(0, 6, (64, 16))
    rope = tuple(library.put(f(angle).astype("f")) for f in (np.cos, np.sin))
    tables = library.put(np.array([[3, 0, 5], [1, 4, 2]], np.int32))
    results = []
    for cuts in ([0, 21], [0, 8, 9, 16, 21], list(range(22))):
        caches = [library.put(np.full((6, 8, 4, 32), np.nan, np.float32)) for _ in "kv"]
        parts = []
        for begin, end in itertools.pairwise(cuts):
            new = (library.put(np.ascontiguousarray(x[:, begin:end])) for x in (q, k, v))
            lens = library.put(np.full(2, end, np.int32))
            parts.append(
                library.get(cuattn.append_attention(*new, *caches, tables, lens, rope=rope))
            )
        results.append((np.concatenate(parts, axis=1), *map(library.get, caches)))
    for found in results[1:]:
        np.testing.assert_allclose(found[0], results[0][0], atol=1e-5)
        for a, b in zip(found[1:], results[0][1:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_out_is_written_and_returned(library, rng):
    case = PagedCase(dtype="float32")
    arrays, options = make(case, None, rng)
    placed = {name: library.put(x) for name, x in arrays.items()}
    out = library.put(np.full(arrays["q"].shape, np.nan, np.float32))
    found, _ = append(placed, {**options, "out": out})
    assert found is out
    assert np.isfinite(library.get(out)).all()


def call(**changes):
    """A right call on numpy arrays, but for what is changed."""
    arrays = {
        "q": np.zeros((2, 4, 16), np.float32),
        "k": np.ones((2, 2, 16), np.float32),
        "v": np.ones((2, 2, 16), np.float32),
        "k_cache": np.zeros((4, 8, 2, 16), np.float32),
        "v_cache": np.zeros((4, 8, 2, 16), np.float32),
        "block_tables": np.array([[0], [1]], np.int32),
        "context_lens": np.array([3, 8], np.int32),
        **changes,
    }
    positional = [arrays.pop(name) for name in POSITIONAL]
    return positional, arrays


COS = np.zeros((9, 8), np.float32)
REFUSED = [
    ({"q": [1.0]}, TypeError, "q must be an array that can be reshaped, got list"),
    ({"q": np.zeros((2, 16), np.float32)}, ValueError, "q must have axes"),
    ({"k": np.ones((3, 2, 16), np.float32)}, ValueError, r"k must have the tokens of q, \[2\]"),
    ({"v": np.ones((2, 1, 2, 16), np.float32)}, ValueError, "v must have the tokens of q"),
    ({"k": np.ones((2, 2, 8), np.float32)}, ValueError, "head_dim"),
    ({"k_cache": np.zeros((4, 8, 32), np.float32)}, ValueError, "k_cache must be a cache of kv_l"),
    ({"kv_layout": "dhn"}, ValueError, "kv_layout must be 'nhd', 'hnd' or 'vllm', got 'dhn'"),
    ({"block_tables": np.zeros((3, 1), np.int32)}, ValueError, "block_tables must have a row for"),
    (
        {"block_tables": np.full((2, 1), 9, np.int32)},
        ValueError,
        "block_tables must hold block ids",
    ),
    ({"context_lens": np.array([3], np.int32)}, ValueError, "context_lens must have a row for eac"),
    ({"context_lens": np.array([3, 9], np.int32)}, ValueError, r"from 0 to 8, .*got \[3, 9\]"),
    ({"context_lens": np.array([-1, 3], np.int32)}, ValueError, "context_lens must be from 0"),
    ({"stream": 0}, ValueError, "stream must be None for arrays on the CPU"),
    ({"rope": COS}, TypeError, r"rope must be two arrays \(cos, sin\), got ndarray"),
    ({"rope": (COS, None)}, TypeError, r"rope must be two arrays .*, got NoneType among them"),
    ({"rope": (COS, COS[:, :4])}, ValueError, "rope must be cos and sin of one shape"),
    ({"rope": (np.zeros((9, 9), np.float32),) * 2}, ValueError, "rotary_dim at most 16"),
    (
        {"rope": (COS, COS), "rope_positions": np.zeros(2, np.int64)},
        ValueError,
        r"rope_positions must be int64 \[2, 1\]",
    ),
    ({"rope": (COS[:7], COS[:7])}, ValueError, "positions"),
    (
        {"rope": (COS, COS), "rope_positions": np.full((2, 1), 9)},
        ValueError,
        "positions",
    ),
    (
        {"rope_positions": np.zeros((2, 1), np.int64)},
        ValueError,
        "rope_positions must be None with",
    ),
    ({"rope_interleaved": True}, ValueError, "rope_interleaved must be False without rope"),
]


@pytest.mark.parametrize(("changes", "error", "message"), REFUSED)
def test_what_cannot_be_is_refused_and_nothing_written(changes, error, message):
    positional, options = call(**changes)
    before = [np.array(x) for x in positional[3:5]]
    with pytest.raises(error, match=message) as refused:
        cuattn.append_attention(*positional, **options)
    assert "\n" not in str(refused.value)
    for a, b in zip(before, positional[3:5], strict=True):
        np.testing.assert_array_equal(a, b)


# What the attention alone would refuse, of a call of 2 sequences, 4 heads over 2, head_dim 16: how
# to make the option, given what puts an array on the device, and a part of the message.
ATTENDED = {
    "scale": (lambda put: float("nan"), "scale must be a finite"),
    "causal": (lambda put: "yes", "causal must be"),
    "window": (lambda put: (-2, 0), "window"),
    "softcap": (lambda put: -1.0, "softcap must be"),
    "alibi_slopes": (lambda put: put(np.zeros(3, np.float32)), "alibi_slopes must have shape"),
    "sinks": (lambda put: put(np.zeros((2, 4), np.float32)), "sinks must have"),
    "k_scale": (lambda put: put(np.zeros((3, 2), np.float32)), "k_scale belongs to float8"),
    "v_scale": (lambda put: float("inf"), "v_scale"),
    "kv_dtype": (lambda put: "int4", "kv_dtype must be"),
    "plan": (lambda put: put(np.zeros(3, np.int32)), "plan must"),
    "num_splits": (lambda put: -1, "num_splits must be"),
    "batch_invariant": (lambda put: "no", "batch_invariant must be"),
    "return_lse": (lambda put: 2.5, "return_lse must be"),
    "out": (lambda put: put(np.zeros((2, 4, 8), np.float32)), "out must have shape"),
    "lse_out": (lambda put: put(np.zeros((4, 2), np.float32)), "lse_out must have shape"),
    "workspace": (lambda put: put(np.zeros((2, 8), np.float32))[:, ::2], "workspace must"),
    "backend": (lambda put: "warp", "backend must be"),
    "stream": (lambda put: "first", "append_attention: stream must be None, an integer or"),
    "q": (lambda put: put(np.zeros((2, 3, 16), np.float32)), "multiple of num_heads_kv"),
    "context_lens": (lambda put: put(np.array([3, 8], np.int64)), "context_lens must be int32"),
    "v_cache": (lambda put: put(np.zeros((4, 8, 2, 8), np.float32)), "v_cache must"),
}


@pytest.mark.parametrize("name", ATTENDED)
def test_what_the_attention_refuses_is_refused_before_the_write(library, name):
    make_option, message = ATTENDED[name]
    positional, options = call()
    placed = {n: library.put(x) for n, x in zip(POSITIONAL, positional, strict=True)}
    caches = placed["k_cache"], placed["v_cache"]
    placed[name] = make_option(library.put)
    positional = [placed.pop(n) for n in POSITIONAL]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=message):
        cuattn.append_attention(*positional, **placed, **options)
    for cache in caches:
        np.testing.assert_array_equal(library.get(cache), 0)
    positional = [library.put(x) for x in call()[0]]
    cuattn.append_attention(*positional)  # as it stands it is right, and writes
    assert (library.get(positional[3])[1, 7] == 1).all()


@pytest.mark.parametrize("rope", [None, (COS, COS)])
def test_lengths_that_lie_apart_are_refused_in_its_own_name(library, rope):
    positional = [library.put(x) for x in call()[0]]
    positional[6] = library.put(np.array([3, 0, 8, 0], np.int32))[::2]
    turn = {} if rope is None else {"rope": tuple(map(library.put, rope))}
    message = r"^append_attention: context_lens must be contiguous, got strides \(2,\); make"
    with pytest.raises(ValueError, match=message):
        cuattn.append_attention(*positional, **turn)
    np.testing.assert_array_equal(library.get(positional[3]), 0)
    one = [x[:1] for x in (*positional[:3], *positional[5:])]  # of which none lies apart
    cuattn.append_attention(*one[:3], *positional[3:5], *one[3:], **turn)


@pytest.mark.parametrize("name", ["out", "lse_out", "workspace"])
def test_results_over_the_cache_are_refused_before_the_write(library, name):
    positional = [library.put(x) for x in call()[0]]
    over = positional[3].reshape(-1)
    given = {"out": over[-128:].reshape(2, 4, 16), "lse_out": over[:8].reshape(2, 4)}
    options = {name: given[name]} if name in given else {"workspace": over, "num_splits": 2}
    arguments = positional[0], *positional[3:]
    needs = cuattn.explain("paged_attention", *arguments, num_splits=2).workspace_bytes
    if name == "workspace" and needs == 0:
        pytest.skip("no workspace is needed, which then is not looked at")
    with pytest.raises(ValueError, match=f"{name} .*k_cache|k_cache .*{name}|workspace must"):
        cuattn.append_attention(*positional, **options)
    for cache in positional[3:5]:
        np.testing.assert_array_equal(library.get(cache), 0)


def test_gradients_and_jax_arrays_are_refused_by_name():
    torch = frameworks.require("torch")
    positional = [torch.from_numpy(x) for x in call()[0]]
    positional[0].requires_grad_()
    with pytest.raises(NotImplementedError, match="append_attention: q requires grad"):
        cuattn.append_attention(*positional)
    assert (positional[3] == 0).all()
    with torch.no_grad():
        cuattn.append_attention(*positional)
    assert (positional[3][1, 7] == 1).all()
    jax = frameworks.require("jax")
    with pytest.raises(NotImplementedError, match="q must not be a JAX array"):
        cuattn.append_attention(*(jax.numpy.asarray(x) for x in call()[0]))


def test_numpy_alone_is_enough():
    code = "import sys, cuattn, numpy as np\n" + (
        "z = np.zeros\n"
        "args = z((1, 2, 8), 'f'), z((1, 2, 8), 'f'), z((1, 2, 8), 'f')\n"
        "caches = z((2, 4, 2, 8), 'f'), z((2, 4, 2, 8), 'f')\n"
        "cuattn.append_attention(*args, *caches, z((1, 1), 'i'), np.ones(1, 'i'))\n"
        "assert not {'torch', 'jax', 'cupy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
