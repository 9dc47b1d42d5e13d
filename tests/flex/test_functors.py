# SPDX-License-Identifier: Apache-2.0
"""Sources of functors: their text, what NVRTC says of them where it is installed, their cache."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys

import numpy as np
import pytest

from cuattn.flex import functors, nvrtc
from cuattn.flex.emit import Function, Kernel, numbers, source
from cuattn.flex.emit_backward import backward_source
from cuattn.flex.trace import trace

CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
SM80 = Kernel("sm80", "bfloat16", 128, 128)
SIMT = Kernel("simt", "float32", 64, 64)
KERNELS = (SM80, Kernel("sm80", "float16", 64, 64), SIMT)


def functions(score=None, mask=None):
    """What a plan makes of functions."""
    given, first = {}, 0
    for name, function in (("score", score), ("mask", mask)):
        if function is not None:
            traced = trace(function, is_score=name == "score")
            given[name] = Function(traced.expr, traced.scalars, first, traced.arrays)
            first += len(traced.arrays)
    return given


def of_everything():
    """Functions that use every operation."""
    ids, table, rows = np.arange(9), np.ones((3, 5), np.float32), np.ones(9, bool)
    slope, window, flag = 0.5, 7, True

    def score(s, b, h, q, k, q_len, kv_len):
        far = abs(q - k) * slope + np.minimum(1.0 * q, k) - np.maximum(q, 3)
        near = np.exp(-far) + np.log(far + 1.5) + np.sqrt(abs(s)) / 2.0 - np.tanh(s)
        return np.where((q < k) ^ rows[q], near, -s + table[h, k % 5] * (kv_len - q_len))

    def mask(b, h, q, k):
        left = (q - k <= window) & (q // 3 >= k // 3) & (flag != 2)
        return left | (ids[q] == ids[k]) & ~(k > q) | (-q > k + 1) | (q != k)

    return functions(score, mask)


def test_a_source_holds_neither_numbers_of_closures_nor_lengths():
    def texts(window, n):
        ids = np.zeros(n, np.int32)
        found = functions(mask=lambda b, h, q, k: (q - k < window) | (ids[q] == ids[k]))
        return source(SM80, found, False, True), numbers(found).tolist()

    first, second = texts(5, 10), texts(90, 4000)
    assert first[0] == second[0]
    assert (first[1], second[1]) == ([5], [90])
    assert "p.numbers[0]" in re.findall(r"= (.*);\n", first[0].split("sees(")[1])
    floats = functions(score=lambda s, b, h, q, k, c=0.1: s * c)
    assert numbers(floats).view(np.float32).tolist() == [np.float32(0.1)]


def test_functions_that_differ_have_other_sources():
    masks = [
        lambda b, h, q, k: q // 3 == k // 3,
        lambda b, h, q, k: k // 3 == q // 3,
        lambda b, h, q, k: q % 3 == k % 3,
        lambda b, h, q, k: q // 3 == k // 2,
    ]
    forms = [(False, False), (True, False), (False, True)]
    texts = {
        source(kernel, functions(mask=m), *f) for m in masks for f in forms for kernel in KERNELS
    }
    assert len(texts) == len(masks) * len(forms) * len(KERNELS)


def test_more_numbers_than_a_kernel_takes_are_refused():
    many = Function(trace(lambda b, h, q, k: q == k).expr, [0.5] * 33, 0, [])
    with pytest.raises(NotImplementedError, match="may read 32 numbers together, got 33"):
        numbers({"score": many})


@pytest.fixture
def compiler():
    try:
        return nvrtc.nvrtc()
    except nvrtc.CompileError as why:
        if "was not found" not in str(why):
            raise
        return pytest.skip(str(why))


@pytest.mark.skipif(CXX is None, reason="needs g++ or c++")
@pytest.mark.parametrize("name", ["sm90", "sm80", "simt", "backward sm80", "backward simt"])
def test_a_source_needs_no_header_of_the_host(name, tmp_path):
    """NVRTC 13.0 has no standard library; later ones would hide what it lacks."""
    if name.startswith("backward"):
        kernel = SM80 if name.endswith("sm80") else SIMT
        text = backward_source(kernel, of_everything(), False, True, True, frozenset(), True)
    else:
        text = source(SM80._replace(name=name), of_everything(), False, True)
    (tmp_path / "functor.cpp").write_text(text)
    flags = ["-nostdinc", *(f"-D{x}" for x in ("__CUDACC_RTC__", "__CUDACC__"))]
    flags += [f"-I{folder}" for folder in functors.folders()]
    command = [CXX, "-E", "-std=c++20", *flags, str(tmp_path / "functor.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_nvrtc_says_what_ptxas_says_each_time(compiler):
    """What its own cache gives comes without a word, and would hide a spill."""
    text = source(SM80, functions(mask=lambda b, h, q, k: q + k != 5), False, False)
    for _ in range(2):
        _, log = compiler.compile(text, "sm_90", functors.folders())
        assert "bytes spill stores" in log


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_nvrtc_takes_every_operation_without_spilling(arch, compiler):
    for kernel in KERNELS if arch == "sm_80" else KERNELS[:1]:
        text = source(kernel, of_everything(), False, True)
        code, log = compiler.compile(text, arch, functors.folders())
        assert code[:4] == b"\x7fELF"
        spilled = re.findall(r"(\d+) bytes spill stores", log)
        assert spilled == ["0"], f"{kernel}: {log}"


def test_nvrtc_takes_the_kernel_for_hoppers(compiler):
    ids, table = np.arange(9), np.ones((3, 5), np.float32)
    mask, score = lambda b, h, q, k: ids[q] == ids[k], lambda s, b, h, q, k: s + table[h, q - k]
    found = functions(score, mask)
    text = source(Kernel("sm90", "bfloat16", 128, 128), found, False, True)
    code, log = compiler.compile(text, "sm_90a", functors.folders())
    assert code[:4] == b"\x7fELF"
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log
    assert "C75" not in log  # no register taken away, no wgmma serialised


def test_nvrtc_takes_the_kernel_for_hoppers_of_wide_heads(compiler):
    """What a mask adds to O of 256 columns may spill a little (docs/notes), but no score does."""
    blocks = np.ones((3, 5), bool)
    for found, rows, dims in (
        (functions(lambda s, b, h, q, k: s - 0.5 * abs(q - k)), False, (256, 256)),
        (functions(mask=lambda b, h, q, k: blocks[q // 128, k // 128]), False, (192, 128)),
        ({}, True, (256, 256)),  # documents
    ):
        text = source(Kernel("sm90", "bfloat16", *dims), found, rows, not rows, True)
        _, log = compiler.compile(text, "sm_90a", functors.folders())
        assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log
        assert "C75" not in log


@pytest.mark.parametrize("rows", [False, True])
def test_masks_for_hoppers_spill_nothing(rows, compiler):
    ids, blocks = np.arange(9), np.ones((3, 5), bool)
    masks = (
        lambda b, h, q, k: ids[q] == ids[k],
        lambda b, h, q, k: blocks[q // 128, k // 128],
    )
    for mask in masks:
        text = source(Kernel("sm90", "bfloat16", 128, 128), functions(mask=mask), rows, True, True)
        _, log = compiler.compile(text, "sm_90a", functors.folders())
        assert re.findall(r"(\d+) bytes spill stores", log) == ["0"], log
        assert "C75" not in log


def test_distances_become_floats_without_a_conversion_each():
    found = functions(lambda s, b, h, q, k: s - 0.5 * abs(q - k) + (k - q) / 8.0)
    text = source(SM80, found, False, False)
    assert "= fabsf(at.ahead);" in text
    assert "= -at.ahead;" in text
    assert "static_cast<float>" not in text


def test_scores_of_16_bits_have_no_branches_but_what_comparisons_hang_on_is_exact():
    score = lambda s, b, h, q, k, cap=3.0: (  # noqa: E731
        cap * np.tanh(s / cap)
        + np.sqrt(abs(s)) / (1.0 + abs(s))
        + np.where(q / 49 == 1.0, s / 7, s)
    )
    found = functions(score, lambda b, h, q, k: np.sqrt(k / 49) < q)
    for kernel in KERNELS:
        scored, asked = source(kernel, found, False, False).split(" sees(")
        is_quick = kernel.dtype != "float32"
        assert ("tanhf(" not in scored, "sqrtf(" not in scored) == (is_quick, is_quick)
        assert len(re.findall(r"= t\d+ \* \(1.0f / t\d+\);", scored)) == 2 * is_quick
        assert len(re.findall(r"= device::score_quotient\(t\d+, t\d+\);", scored)) == is_quick
        assert len(re.findall(r"= t\d+ / t\d+;", scored)) == (1 if is_quick else 4)
        assert "sqrtf(" in asked
        assert " / t" in asked
    for kernel in KERNELS:
        gradient = backward_source(kernel, found, False, True, True, frozenset(), False)
        assert ("tanhf(" in gradient) == (kernel.dtype == "float32")


def test_nvrtc_takes_the_passes_of_gradients_without_spilling(compiler):
    mask = functions(mask=lambda b, h, q, k: q != k)
    for kernel, found, slots in ((SM80, of_everything(), {0, 1}), (KERNELS[1], mask, set())):
        given = found, False, True, True, frozenset(slots), bool(slots)
        code, log = compiler.compile(backward_source(kernel, *given), "sm_90", functors.folders())
        assert code[:4] == b"\x7fELF"
        spilled = re.findall(r"(\d+) bytes spill stores", log)
        assert spilled == ["0"] * (3 if slots else 2), f"{kernel}: {log}"


def test_nvrtc_takes_the_passes_of_float32_without_spilling(compiler):
    """Of head_dim 256, where a pass makes dk or dv."""
    ids, table = np.arange(9), np.ones((3, 5), np.float32)
    mask, score = lambda b, h, q, k: ids[q] == ids[k], lambda s, b, h, q, k: s + table[h, q - k]
    given = functions(score, mask), False, True, True, frozenset({0}), True
    text = backward_source(SIMT._replace(head_dim=256, head_dim_v=256), *given)
    _, log = compiler.compile(text, "sm_90", functors.folders())
    assert re.findall(r"(\d+) bytes spill stores", log) == ["0"] * 4, log


def test_gradients_refuse_lists_without_a_mask_function(compiler):
    """dbias would hold what lies in blocks that no list names."""
    found = functions(lambda s, b, h, q, k: s * 2.0)
    text = backward_source(SM80, found, False, True, False, frozenset(), True)
    with pytest.raises(nvrtc.CompileError, match="lists of blocks need a mask function"):
        compiler.compile(text, "sm_80", functors.folders())


def test_nvrtc_says_what_it_refuses(compiler):
    with pytest.raises(nvrtc.CompileError, match=r"NVRTC \(13, \d+\) says NVRTC_ERROR_COMPILATION"):
        compiler.compile("nonsense", "sm_80", [])


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A cache of its own, and a compiler that takes no time and counts."""
    path = tmp_path / "cache"
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(path))
    compiled.clear()

    def compile_now(text, arch):
        compiled.append((text, arch))
        return b"code " + text.encode()

    monkeypatch.setattr(functors, "compile_now", compile_now)
    return path


compiled: list[tuple[str, str]] = []


def test_machine_code_is_kept_on_the_disk(folder):
    for _ in range(2):
        assert functors.machine_code("a", "sm_90") == b"code a"
    functors.machine_code("a", "sm_80")
    functors.machine_code("b", "sm_90")
    assert len(compiled) == 3
    assert len(list(folder.iterdir())) == 3
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


DAMAGE = (lambda x: x[:-1], lambda x: b"", lambda x: x[:-1] + b"?", lambda x: b"X" + x)


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_compiled_again(folder, damage):
    functors.machine_code("a", "sm_90")
    (path,) = folder.iterdir()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.warns(RuntimeWarning, match="is damaged, so the mask is compiled again"):
        assert functors.machine_code("a", "sm_90") == b"code a"
    assert functors.machine_code("a", "sm_90") == b"code a"
    assert len(compiled) == 2


def test_a_folder_that_others_may_write_is_not_used(folder):
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="may be written by others"):
        assert functors.machine_code("a", "sm_90") == b"code a"
    assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_done_without(folder, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUATTN_CACHE_DIR", str(tmp_path / "file" / "below"))
    with pytest.warns(RuntimeWarning, match="compiled masks are not kept"):
        assert functors.machine_code("a", "sm_90") == b"code a"


def test_the_folder_keeps_within_its_size(folder, monkeypatch):
    monkeypatch.setattr(functors, "MOST_BYTES", 200)
    for name in "abcdef":
        functors.machine_code(name, "sm_90")
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert sizes
    assert sum(sizes) <= 200


def test_processes_share_a_cache(folder):
    script = (
        "from cuattn.flex import functors as f\n"
        "f.compile_now = lambda s, a: b'x' * 1000 + s.encode()\n"
        "for i in [*range(10)] * 4:\n"
        "    assert f.machine_code(str(i), 'sm_90')[1000:] == str(i).encode()\n"
    )
    runs = [subprocess.Popen([sys.executable, "-W", "error", "-c", script]) for _ in range(4)]
    assert [run.wait() for run in runs] == [0] * 4
    assert len(list(folder.glob("*.functor"))) == 10
    assert not list(folder.glob("*.part"))


def test_without_nvrtc_the_way_out_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("CUATTN_NVRTC_PATH", str(tmp_path))
    nvrtc.nvrtc.cache_clear()
    try:
        with pytest.raises(nvrtc.CompileError, match=r"was not found: .*; pip install nvidia-cuda"):
            nvrtc.nvrtc()
    finally:
        nvrtc.nvrtc.cache_clear()


def test_jit_can_be_switched_off(folder, monkeypatch):
    monkeypatch.setenv("CUATTN_DISABLE_JIT", "1")
    with pytest.raises(functors.CompileError, match="CUATTN_DISABLE_JIT is set"):
        functors.machine_code("a", "sm_90")
