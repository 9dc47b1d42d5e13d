# SPDX-License-Identifier: Apache-2.0
"""What a call on CUDA is given: rows and lists on its device, and functions as a functor.

Arrays that were made for a call serve later ones (memo.py), on other streams and in graphs, too.
Next: functors.py (compiled code), emit.py (its source).
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from .. import _core
from .._arrays import Operations, operations, stream_handle
from .._kv_shapes import head_dim_of_values
from .block_mask import BlockMask
from .emit import Kernel, numbers, source
from .emit_backward import backward_source
from .functors import can_compile, functor
from .options import ALIBI, SCALE, SOFTCAP, beside_scale, softcap_of
from .packing import TILE_ROWS, packed_heads, reads_blocks
from .plan import Found
from .trace import dtype_name

NAME = "flex_attention"
TILE_KEYS = 128  # of sm90_functor_tile, where head_dim_v is at most 128
SM90_DIM, SM90_ROWS_DIM = 256, 128  # of functors in sm90, and of row ranges without one
PROGRAMS = ("score_program", "mask_program")  # which the CPU runs
MOST_BACKWARD = 256  # of the head sizes that have gradients
BACKWARD = "flex_attention_backward"
in_graphs: dict[int, Placed] = {}  # graphs read their arrays as long as the process lives


def is_cuda(q: Any) -> bool:
    """Whether an array lies on a CUDA device, of a library other than JAX."""
    if type(q).__module__.startswith(("jax", "numpy")):
        return False
    if hasattr(q, "is_cuda"):  # a tensor of torch, whose DLPack takes longer
        return bool(q.is_cuda)
    return int(getattr(q, "__dlpack_device__", lambda: (1, 0))()[0]) == 2


def place_of(arguments: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return what `Placed` hangs on beside what was found; None on the CPU."""
    q, stream = arguments["q"], arguments.get("stream")
    if not is_cuda(q):
        return None
    if stream is not None:
        stream = stream_handle(NAME, stream)
    elif type(q).__module__.startswith("cupy"):  # its memory is for the stream it is made on
        stream = sys.modules["cupy"].cuda.get_current_stream().ptr
    device = q.device if hasattr(q, "is_cuda") else q.__dlpack_device__()
    shape = (q.dtype, *head_dims_of(arguments))
    options = (is_plain(arguments), free_options(arguments), softcap_of(arguments))
    form = (packed_heads(arguments, {}), reads_blocks(arguments, {}, TILE_KEYS))
    return type(q), device, *shape, stream, *options, *form, arguments.get("backend", "auto")


def head_dims_of(arguments: dict[str, Any]) -> tuple[int, int]:
    """Return head_dim of q and of v."""
    layout = None if arguments.get("block_tables") is None else arguments.get("kv_layout")
    return int(arguments["q"].shape[-1]), int(head_dim_of_values(arguments["v"].shape, layout))


def free_options(arguments: dict[str, Any]) -> frozenset[str]:
    """Name the options that a score function may become, as they are not given.

    A factor joins the scale, where this is a number that it can multiply; a softcap that is given
    lies between the two.
    """
    free = {name for name in (SOFTCAP, ALIBI) if not is_asked(arguments.get(name))}
    scale = arguments.get("scale")
    is_number = isinstance(scale, int | float | np.integer | np.floating)
    if SOFTCAP in free and (scale is None or (is_number and abs(scale) < 2.0**60)):
        free.add(SCALE)
    return frozenset(free)


class Gives(NamedTuple):
    """What a backward call asks of its functions."""

    slots: frozenset[int]  # places of the arrays of the score function that get gradients
    has_dbias: bool


class Placed:
    """What was found for a call, on the device of its arrays."""

    def __init__(self, arguments: dict[str, Any], found: Found, gives: Gives | None = None):
        self.window, self.options = found.window, found.options
        self.arrays: dict[str, Any] = {}
        self.kernel = ""  # that a functor is compiled for
        self.captured: list[tuple[Any, bool]] = []  # arrays, and whether they are the caller's
        self.torch: Any = None
        if not found.arrays and ALIBI not in found.options:
            return
        q = arguments["q"]
        with on_its_stream(arguments) as at:
            if at.namespace.__name__ == "torch":
                self.torch = at.namespace
                self.stream = self.torch.cuda.current_stream(q.device)
            self.place(q, at.namespace, found)
        call = {**arguments, **beside_scale(found.options)}
        if is_compiled(call, found, gives):
            self.arrays["functor"] = functor_of(call, found, gives)
            self.kernel = kernel_of(call)[1].name if gives is None else ""
            self.arrays["numbers"] = numbers(found.functions)

    def place(self, q: Any, namespace: Any, found: Found) -> None:
        """Copy to the device what is not there."""
        where = {"device": q.device} if self.torch is not None else {}

        def copy(x: Any) -> Any:
            if not isinstance(x, np.ndarray):
                return x
            if self.torch is not None and self.torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    f"{NAME}: the first call with these functions, shapes and captured arrays "
                    "copies to the device, which cannot be captured; call it once before the "
                    "capture"
                )
            return namespace.asarray(x, **where)

        skipped = (*PROGRAMS, "arrays")
        self.arrays = {n: copy(x) for n, x in found.arrays.items() if n not in skipped}
        self.options = {n: copy(x) for n, x in found.options.items()}
        originals = [x for f in found.functions.values() for x in f.arrays]
        for x, host in zip(originals, found.arrays.get("arrays", ()), strict=True):
            is_there = lies_with(q, x)
            self.captured.append((x if is_there else copy(host), is_there))

    def given(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arrays for a call."""
        if self.torch is not None:
            with on_its_stream(arguments):
                self.outlive(self.torch.cuda.current_stream(arguments["q"].device))
        captured = [detached(x) if is_there else x for x, is_there in self.captured]
        return {**self.arrays, "arrays": captured} if self.arrays or captured else {}

    def outlive(self, stream: Any) -> None:
        """Keep the arrays until a stream, or a graph that is captured on it, has read them."""
        if self.torch.cuda.is_current_stream_capturing():
            in_graphs[id(self)] = self
        elif stream != self.stream:
            copies = [x for x, is_there in self.captured if not is_there]
            made = (*self.arrays.values(), *self.options.values(), *copies)
            for x in made:
                if isinstance(x, self.torch.Tensor):
                    x.record_stream(stream)


def on_its_stream(arguments: dict[str, Any]) -> contextlib.AbstractContextManager[Operations]:
    """Compute in the library of q, on the stream of the call."""
    why, way_out = "row ranges, lists and captured arrays must be on the device", "numpy arrays"
    return operations(NAME, arguments["q"], arguments.get("stream"), why, way_out)


def lies_with(q: Any, array: Any) -> bool:
    """Whether a kernel can read a captured array where it is."""
    is_same = type(array) is type(q) and array.__dlpack_device__() == q.__dlpack_device__()
    return is_same and dtype_name(array) in ("bool", "int32", "float32")


def detached(x: Any) -> Any:
    """Return an array that autograd does not look on."""
    return x.detach() if hasattr(x, "detach") else x


def functor_of(arguments: dict[str, Any], found: Found, gives: Gives | None = None) -> int:
    """Return the number of the machine code that computes scores and masks in a kernel."""
    has_rows, has_lists = ("row_begin" in found.arrays, "block_starts" in found.arrays)
    form = found.functions, has_rows, has_lists, is_plain(arguments)
    if gives is None:
        arch, kernel, tile = kernel_of(arguments)
        if kernel.name == "sm90":
            packed = packed_heads(arguments, found.arrays)
            in_blocks = reads_blocks(arguments, found.arrays, tile[1])
            kernel = kernel._replace(packed_heads=packed, reads_blocks=in_blocks)
        return functor(source(kernel, *form), arch, kernel.packed_heads, kernel.reads_blocks)
    arch, kernel = backward_kernel_of(arguments)
    return functor(backward_source(kernel, *form, *gives), arch)


def is_compiled(arguments: dict[str, Any], found: Found, gives: Gives | None) -> bool:
    """Whether a call runs by a functor."""
    if found.functions or "block_starts" in found.arrays:
        return True
    if "row_begin" not in found.arrays:
        return False
    dtype, head_dims = dtype_name(arguments["q"]), head_dims_of(arguments)
    if gives is None:
        return compiles_wide_rows(arguments, dtype, head_dims) and runs_in_sm90(arguments)
    return compiles_rows(arguments, dtype, *head_dims)


def compiles_wide_rows(arguments: dict[str, Any], dtype: str, head_dims: tuple[int, ...]) -> bool:
    """Whether row ranges alone are compiled on a Hopper, where NVRTC can be had.

    The library's own kernels for Hoppers have them up to SM90_ROWS_DIM.
    """
    if dtype not in ("float16", "bfloat16") or max(head_dims) <= SM90_ROWS_DIM:
        return False
    return may_take_sm90(arguments, head_dims) and can_compile()


def compiles_rows(arguments: dict[str, Any], dtype: str, head_dim: int, head_dim_v: int) -> bool:
    """Whether gradients of row ranges alone are compiled, where NVRTC can be had.

    Beside options of the score and dropout the library's own kernels of 16-bit types have them in
    `naive` alone.
    """
    if is_plain(arguments) or arguments.get("backend", "auto") not in ("auto", "sm80"):
        return False
    is_wide = max(head_dim, head_dim_v) > MOST_BACKWARD
    return dtype in ("float16", "bfloat16") and not is_wide and can_compile()


def is_plain(arguments: dict[str, Any]) -> bool:
    """Whether the options leave a score its scaled dot product."""
    names = ("softcap", "alibi_slopes", "bias", "dropout_p", "dropout_state")
    scale = arguments.get("scale")
    is_positive = scale is None or (isinstance(scale, Real) and 0 < float(scale) < 1e38)
    return is_positive and not any(is_asked(arguments.get(name)) for name in names)


def is_asked(option: Any) -> bool:
    """Whether an option is given, and no number that switches it off."""
    return option is not None and not (isinstance(option, Real) and option == 0)


def of_tiles(block_mask: BlockMask | None, arguments: dict[str, Any]) -> BlockMask | None:
    """Return a block mask in blocks that the kernel of the call can skip."""
    if block_mask is None or not block_mask.states.size:
        return block_mask
    return block_mask.of_tiles(kernel_of(arguments)[2])


def kernel_of(arguments: dict[str, Any]) -> tuple[str, Kernel, tuple[int, int]]:
    """Return what takes the functors of a call."""
    q, head_dims = arguments["q"], head_dims_of(arguments)
    device = int(q.__dlpack_device__()[1])
    return kernel_for(device, dtype_name(q), *head_dims, may_take_sm90(arguments, head_dims))


def may_take_sm90(arguments: dict[str, Any], head_dims: tuple[int, ...]) -> bool:
    """Whether a Hopper runs the functors of a call of 16-bit types in its own kernel."""
    backend = arguments.get("backend", "auto")
    return backend in ("auto", "sm90") and max(head_dims) <= SM90_DIM and is_plain(arguments)


def sm90_tile(head_dim_v: int) -> tuple[int, int]:
    """Return the queries and keys of a tile with a functor: sm90_functor_tile of tiles.h."""
    return TILE_ROWS, TILE_KEYS if head_dim_v <= 128 else TILE_KEYS // 2


def runs_in_sm90(arguments: dict[str, Any]) -> bool:
    """Whether functors of a call run in the kernel for Hoppers."""
    is_16_bit = dtype_name(arguments["q"]) in ("float16", "bfloat16")
    is_taken = is_16_bit and may_take_sm90(arguments, head_dims_of(arguments))
    return is_taken and kernel_of(arguments)[1].name == "sm90"


def portable(dtype: str) -> str:
    """Name the kernel that takes functors of a dtype on every GPU, and has their gradients."""
    return "simt" if dtype == "float32" else "sm80"


@functools.lru_cache(maxsize=256)
def kernel_for(
    device: int, dtype: str, head_dim: int, head_dim_v: int, takes_sm90: bool
) -> tuple[str, Kernel, tuple[int, int]]:
    """Return the architecture of a device, the kernel that takes functors of a dtype, its tile."""
    from .._explain import explain

    def plan_of(name: str) -> Any:
        shapes = [(1, 8, 1, d) for d in (head_dim, head_dim, head_dim_v)]
        return explain("attention", *shapes, device=device, dtype=dtype, softcap=1.0, backend=name)

    arch = arch_of(device)
    if takes_sm90 and dtype != "float32" and arch == "sm_90":
        with contextlib.suppress(NotImplementedError):  # a build without its machine code
            plan = plan_of("sm90")
            kernel = Kernel("sm90", dtype, plan.head_dim, plan.head_dim_v)
            return f"{arch}a", kernel, sm90_tile(plan.head_dim_v)
    name = portable(dtype)
    plan = plan_of(name)
    tile = (plan.tile_m, plan.tile_n)
    return arch, Kernel(name, dtype, plan.head_dim, plan.head_dim_v), tile


def backward_kernel_of(arguments: dict[str, Any]) -> tuple[str, Kernel]:
    """Return what takes the functors of a backward call.

    Raises
    ------
    NotImplementedError
        If no kernel on CUDA has gradients of functions for its head sizes.
    """
    q, v = arguments["q"], arguments["v"]
    dtype, head_dims = dtype_name(q), (int(q.shape[-1]), int(v.shape[-1]))
    require_backward(*head_dims)
    return backward_kernel_for(int(q.__dlpack_device__()[1]), dtype, *head_dims)


def require_backward(head_dim: int, head_dim_v: int) -> None:
    """Refuse head sizes that have no gradients, before functions are compiled for them."""
    if max(head_dim, head_dim_v) > MOST_BACKWARD:
        raise NotImplementedError(
            f"{BACKWARD}: q and v must have head_dim and head_dim_v up to {MOST_BACKWARD}, "
            f"got {head_dim} and {head_dim_v}; wider heads have no backward pass, call the forward "
            "alone"
        )


@functools.lru_cache(maxsize=256)
def backward_kernel_for(
    device: int, dtype: str, head_dim: int, head_dim_v: int
) -> tuple[str, Kernel]:
    """Return the architecture of a device, and the passes that take functors of a dtype."""
    from .._explain import explain

    rows, values = (1, 8, 1, head_dim), (1, 8, 1, head_dim_v)
    shapes = (values, rows, rows, values, values, (1, 1, 8))
    name = portable(dtype)
    options: dict[str, Any] = {"softcap": 1.0, "backend": name}
    plan = explain("attention_backward", *shapes, device=device, dtype=dtype, **options)
    return arch_of(device), Kernel(name, dtype, plan.head_dim, plan.head_dim_v)


def arch_of(device: int) -> str:
    """Return the architecture of a device, as NVRTC names it."""
    gpus = json.loads(_core.info_json())["cuda"]["devices"]
    return "sm_" + str(gpus[device]["compute_capability"]).replace(".", "")
