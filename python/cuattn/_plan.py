# SPDX-License-Identifier: Apache-2.0
"""Which kernel a call runs and why, what is compiled, and where this package is."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

from . import _arrays, _core
from .backward import GRADIENTS, check_need
from .cascade import bias_shape, check_shapes, keys_in_window, shape_of

# Real GPUs that explain() may ask about by name:
# compute capability, multiprocessors, bytes of shared memory that a block can opt in to.
DEVICES: dict[str, tuple[int, int, int, int]] = {
    "a100": (8, 0, 108, 166912),
    "a10": (8, 6, 72, 101376),
    "rtx3090": (8, 6, 82, 101376),
    "l4": (8, 9, 58, 101376),
    "l40s": (8, 9, 142, 101376),
    "rtx4090": (8, 9, 128, 101376),
    "h100": (9, 0, 132, 232448),
    "h200": (9, 0, 132, 232448),
    "b200": (10, 0, 148, 232448),
    "rtx5090": (12, 0, 170, 101376),
}

CPU: dict[str, Any] = {
    "is_cuda": False,
    "major": 0,
    "minor": 0,
    "num_sms": 0,
    "smem_per_block_optin": 0,
    "native": 1,
    "has_cublas": False,
    "name": "cpu",
}

CUDA_DEVICE_TYPES = (2, 13)  # of DLPack: kDLCUDA, kDLCUDAManaged
VARLEN_POSITIONAL = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
OPTIONS: dict[str, Any] = {
    "layout": "bshd",
    "causal": False,
    "window": (-1, -1),
    "scale": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "bias": None,
    "seqused_q": None,
    "seqused_k": None,
    "cu_seqlens_q": None,
    "cu_seqlens_k": None,
    "max_seqlen_q": None,
    "max_seqlen_k": None,
    "block_tables": None,
    "kv_layout": "nhd",
    "num_splits": 0,
    "batch_invariant": False,
    "return_lse": False,
    "backend": "auto",
}
BACKWARD_POSITIONAL = ("dout", "q", "k", "v", "out", "lse")
BACKWARD_OPTIONS: dict[str, Any] = {
    name: value
    for name, value in OPTIONS.items()
    if name not in ("block_tables", "kv_layout", "num_splits", "return_lse")
} | {
    "dropout_p": 0.0,
    "dropout_seed": None,
    "dropout_offset": 0,
    "dlse": None,
    "deterministic": None,
    "need": ("dq", "dk", "dv"),
}
PAGED_POSITIONAL = ("q", "k_cache", "v_cache", "block_tables", "context_lens")
PAGED_OPTIONS: dict[str, Any] = {
    "kv_layout": "nhd",
    "scale": None,
    "causal": True,
    "window": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
    "k_scale": None,
    "v_scale": None,
    "kv_dtype": None,
    "plan": None,
    "num_splits": 0,
    "batch_invariant": False,
    "partition_size": 512,
    "max_context_len": None,
    "backend": "auto",
}
CASCADE_POSITIONAL = ("q", "shared_k", "shared_v", *PAGED_POSITIONAL[1:])
PAGED_VERSIONS = {"paged_attention": 0, "paged_attention_v1": 1, "paged_attention_v2": 2}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call would run; ``print(plan)`` shows every rung of the ladder with its verdict.

    num_splits is the number of parts that keys are cut into and that are merged through memory;
    0: by a plan made on the device. cluster thread blocks share the keys of a part and merge what
    they find on the chip; 1: none do. packed_heads query heads of a group share a tile; schedule
    says which CTA computes which tile. Of cascade_attention, kernel names those of the prefix and
    of the pages, and tile, splits and schedule are the pages'; the ladder has both.
    """

    kernel: str
    mask: str
    score: str
    tile_m: int
    tile_n: int
    stages: int
    warps: int
    head_dim: int
    head_dim_v: int
    num_splits: int
    cluster: int
    packed_heads: int
    schedule: str
    workspace_bytes: int
    reason: str
    ladder: str

    def __str__(self) -> str:
        return self.ladder


def describe_device(device: str | dict[str, Any]) -> dict[str, Any]:
    """Fields of the C struct cuattn_device for a GPU named in DEVICES, or completed from a dict."""
    if isinstance(device, dict):
        known = {"is_cuda": True, "native": 1, "has_cublas": True, "name": "made up"}
        missing = {"major", "minor", "num_sms", "smem_per_block_optin"} - set(device)
        unknown = set(device) - {"major", "minor", "num_sms", "smem_per_block_optin", *known}
        if missing or unknown:
            raise ValueError(
                "explain: device must have major, minor, num_sms and smem_per_block_optin, "
                f"missing {sorted(missing)}, unknown {sorted(unknown)}; complete the dict"
            )
        return {**known, **device}
    word = device.lower().replace(" ", "")
    if word not in DEVICES:
        raise ValueError(
            f"explain: device must be None, 'cpu', a CUDA device number, a GPU's name or a dict, "
            f"got {device!r}; known names are {', '.join(DEVICES)}"
        )
    major, minor, num_sms, smem = DEVICES[word]
    return {
        "is_cuda": True,
        "major": major,
        "minor": minor,
        "num_sms": num_sms,
        "smem_per_block_optin": smem,
        "native": 1,
        "has_cublas": True,
        "name": word.upper(),
    }


def without_memory(array: Any) -> Any:
    """Reduce a JAX array, whose memory is XLA's, to dtype and shape; keep anything else."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(array, jax.Array):
        return array
    return (str(array.dtype), *array.shape)


def place(device: int | str | dict[str, Any] | None, q: Any) -> tuple[int, dict[str, Any] | None]:
    """Where shapes lie (a CUDA device number, or -1 for the CPU), and the device to ask about."""
    if device is None:
        if "jax" in sys.modules and without_memory(q) is not q:
            return (-1 if next(iter(q.devices())).platform == "cpu" else 0), None
        if hasattr(q, "__dlpack_device__"):
            kind, number = q.__dlpack_device__()
            return (number if kind in CUDA_DEVICE_TYPES else -1), None
        return (0 if (info()["cuda"] or {}).get("devices") else -1), None
    if device == "cpu":
        return -1, CPU
    if isinstance(device, int):
        if not isinstance(q, tuple):
            raise ValueError(
                "explain: device must be None, 'cpu', a GPU's name or a dict where q is an array, "
                f"got {device}; pass shapes to ask about another device of this machine"
            )
        return device, None
    return 0, describe_device(device)


def explain(
    op: str,
    *arrays_or_shapes: Any,
    device: int | str | dict[str, Any] | None = None,
    dtype: str = "float16",
    **options: Any,
) -> Plan:
    """Say which kernel a call would run, on this or on another GPU, and why. Nothing is computed.

    Parameters
    ----------
    op : {"attention", "attention_varlen", "attention_backward", "attention_varlen_backward", \
"paged_attention", "paged_attention_v1", "paged_attention_v2", "cascade_attention"}
        The function that would be called.
    *arrays_or_shapes
        Its positional arguments; of V1 and V2 q, the caches, block_tables and context_lens. Any
        array may be a tuple of extents instead, which stands for a contiguous array of `dtype`;
        optional arrays in `options` too.
    device : optional
        None for the device of the arrays (of shapes: the first GPU, else the CPU), "cpu", a CUDA
        device number, the name of a GPU ("a100", "l4", "h100", ...) or a dict with major, minor,
        num_sms, smem_per_block_optin.
    dtype : str
        The dtype of arrays given as shapes.
    **options
        The options of the call. exp_sums, max_logits and tmp_out of paged_attention_v2 are not
        looked at: with them, workspace_bytes is an upper bound.

    Returns
    -------
    Plan
        Kernel, tile, splits, workspace bytes, the reason, and the ladder of rungs that led there.

    Raises
    ------
    ValueError, NotImplementedError
        As the call itself would.
    """
    if op in PAGED_VERSIONS:
        return explain_paged(op, arrays_or_shapes, device, dtype, options)
    if op == "cascade_attention":
        return explain_cascade(arrays_or_shapes, device, dtype, options)
    if op in ("attention_backward", "attention_varlen_backward"):
        return explain_backward(op, arrays_or_shapes, device, dtype, options)
    if op not in ("attention", "attention_varlen"):
        known = ("attention", "attention_varlen", "attention_backward", "attention_varlen_backward")
        known += (*PAGED_VERSIONS, "cascade_attention")
        names = ", ".join(map(repr, known))
        raise ValueError(f"explain: op must be one of {names}, got {op!r}")
    names = ("q", "k", "v") + (VARLEN_POSITIONAL if op == "attention_varlen" else ())
    if len(arrays_or_shapes) != len(names):
        raise TypeError(
            f"explain: {op} takes {', '.join(names)}, got {len(arrays_or_shapes)} arguments"
        )
    for name in ("out", "lse_out", "workspace", "stream"):
        options.pop(name, None)  # they do not enter the choice
    unknown = set(options) - set(OPTIONS)
    if unknown:
        raise TypeError(f"explain: {op} has no option {', '.join(sorted(unknown))}")
    given = {**dict(zip(names[3:], arrays_or_shapes[3:], strict=True)), **options}
    return explain_rows(arrays_or_shapes[:3], given, dtype, place(device, arrays_or_shapes[0]))


def explain_rows(
    qkv: tuple[Any, ...],
    options: dict[str, Any],
    dtype: str,
    where: tuple[int, dict[str, Any] | None],
) -> Plan:
    """Say it for attention and attention_varlen, with what `place` said of the device."""
    given = {name: without_memory(value) for name, value in {**OPTIONS, **options}.items()}
    _arrays.find_cublas()
    return Plan(**_core.explain(*map(without_memory, qkv), given, dtype, *where))


def explain_backward(
    op: str,
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say the same for the backward pass."""
    names = BACKWARD_POSITIONAL
    if op == "attention_varlen_backward":
        names += VARLEN_POSITIONAL
    if len(arrays_or_shapes) != len(names):
        raise TypeError(
            f"explain: {op} takes {', '.join(names)}, got {len(arrays_or_shapes)} arguments"
        )
    ignored = (*GRADIENTS, "workspace", "stream")  # they do not enter the choice
    given = {name: value for name, value in options.items() if name not in ignored}
    unknown = set(given) - set(BACKWARD_OPTIONS)
    if unknown:
        raise TypeError(f"explain: {op} has no option {', '.join(sorted(unknown))}")
    positional = dict(zip(names, arrays_or_shapes, strict=True))
    where = place(device, positional["q"])
    merged = {**BACKWARD_OPTIONS, **given, **positional}
    if op == "attention_backward":
        for name in VARLEN_POSITIONAL:
            del merged[name]
    merged["need"] = check_need(op, merged["need"])
    merged = {name: without_memory(value) for name, value in merged.items()}
    return Plan(**_core.explain_backward(merged, dtype, *where))


def explain_paged(
    op: str,
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say the same for paged attention."""
    if len(arrays_or_shapes) != len(PAGED_POSITIONAL):
        raise TypeError(
            f"explain: {op} takes {', '.join(PAGED_POSITIONAL)}, got "
            f"{len(arrays_or_shapes)} arguments"
        )
    # These do not enter the choice; the V2 buffers not given would be workspace.
    ignored: tuple[str, ...] = ("out", "lse_out", "workspace", "stream", "return_lse")
    if op == "paged_attention_v2":
        ignored += ("exp_sums", "max_logits", "tmp_out")
    given = {name: value for name, value in options.items() if name not in ignored}
    unknown = set(given) - set(PAGED_OPTIONS)
    if op != "paged_attention":
        unknown |= {"plan"} & set(given)
    if unknown:
        raise TypeError(f"explain: {op} has no option {', '.join(sorted(unknown))}")
    layout = {} if op == "paged_attention" else {"kv_layout": "vllm"}
    shapes_on, asked = place(device, arrays_or_shapes[0])
    merged = {**PAGED_OPTIONS, **layout, **given}
    merged = {name: without_memory(value) for name, value in merged.items()}
    arrays = tuple(without_memory(array) for array in arrays_or_shapes)
    version = PAGED_VERSIONS[op]
    return Plan(**_core.explain_paged(version, arrays, merged, dtype, shapes_on, asked))


def explain_cascade(
    arrays_or_shapes: tuple[Any, ...],
    device: int | str | dict[str, Any] | None,
    dtype: str,
    options: dict[str, Any],
) -> Plan:
    """Say the same for both parts of cascade attention, which use one workspace in turn."""
    if len(arrays_or_shapes) != len(CASCADE_POSITIONAL):
        raise TypeError(
            f"explain: cascade_attention takes {', '.join(CASCADE_POSITIONAL)}, got "
            f"{len(arrays_or_shapes)} arguments"
        )
    unknown = {"partition_size", "max_context_len"} & set(options)
    if unknown:
        raise TypeError(f"explain: cascade_attention has no option {', '.join(sorted(unknown))}")
    where = place(device, arrays_or_shapes[0])
    q, shared_k, shared_v = map(without_memory, arrays_or_shapes[:3])
    shape = shape_of(q)
    check_shapes("explain", shape, shape_of(shared_k), shape_of(shared_v))
    paged = (arrays_or_shapes[0], *arrays_or_shapes[3:])
    pages = explain_paged("paged_attention", paged, device, dtype, options)
    num_seqs, *queries, heads, head_dim = shape
    q_len = queries[0] if queries else 1
    window, slopes = (options.get(name) for name in ("window", "alibi_slopes"))
    window = window or PAGED_OPTIONS["window"]
    keys = keys_in_window(shape_of(shared_k)[0], window)
    bias = None
    if window[0] >= 0 or slopes is not None:
        axes = len(shape_of(without_memory(slopes))) if slopes is not None else 0
        bias = bias_shape(num_seqs, q_len, heads, keys, window[0] >= 0, axes)
    qkv = [reshaped(q, (1, num_seqs * q_len, heads, head_dim))]
    for array in (shared_k, shared_v):
        qkv.append(reshaped(array, (1, *shape_of(array)), keys))
    given: dict[str, Any] = {
        name: options[name] for name in ("scale", "softcap", "batch_invariant") if name in options
    }
    prefix = explain_rows(tuple(qkv), {**given, "bias": bias, "return_lse": True}, dtype, where)
    words = f"prefix, {keys} keys: {prefix.reason}"
    if bias is not None:
        words += (
            f"; its window and ALiBi are a {bias[0]} bias {list(bias[1:])} that q's library makes"
        )
    return dataclasses.replace(
        pages,
        kernel=f"{prefix.kernel} + {pages.kernel}",
        workspace_bytes=max(prefix.workspace_bytes, pages.workspace_bytes),
        reason=f"{words}; pages: {pages.reason}",
        ladder=f"prefix, {keys} keys\n{prefix.ladder}\npages\n{pages.ladder}",
    )


def reshaped(array: Any, shape: tuple[int, ...], rows: int | None = None) -> Any:
    """Give an array, or what stands for one, another shape; and keep its last rows of axis 1."""
    if not isinstance(array, tuple):
        array = array.reshape(*shape)
        return array if rows is None else array[:, shape[1] - rows :]
    if rows is not None:
        shape = (shape[0], rows, *shape[2:])
    return (*array[: len(array) - len(shape_of(array))], *shape)


def kernels() -> list[dict[str, Any]]:
    """List every compiled kernel instance.

    Returns
    -------
    list of dict
        With the keys op, kernel, arch, dtype, head_dim, head_dim_v (the largest the instance
        takes), mask and score; "any" means that the axis is decided at run time.
    """
    return _core.kernels()


def info() -> dict[str, Any]:
    """Describe this build and where it runs.

    Returns
    -------
    dict
        version, source_hash, compiler, cuda_archs, num_kernels, cpu (instruction set, threads) and
        cuda (runtime, driver, devices and how the build serves each), which is None in a build
        without CUDA.
    """
    return json.loads(_core.info_json())


def cmake_dir() -> str:
    """Return the folder of cuattnConfig.cmake, for ``cmake -Dcuattn_DIR=...`` of a C++ project."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "lib", "cmake", "cuattn")
