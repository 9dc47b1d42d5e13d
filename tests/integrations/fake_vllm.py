# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the classes of vLLM 0.33 that a backend meets, and for its model runner.

Written after the interface of vllm/v1/attention/backend.py, backends/registry.py and the attention
layer of that release: the same names, arguments, defaults and abstract methods, nothing else.
"""

from __future__ import annotations

import dataclasses
import enum
import sys
import types
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import numpy as np
import torch

T = TypeVar("T")


class AttentionType(str, enum.Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    pass


@dataclasses.dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool | torch.Tensor = True


class AttentionBackend(ABC):
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes


class AttentionMetadataBuilder(ABC, Generic[T]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False

    @abstractmethod
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names = kv_cache_spec, layer_names
        self.vllm_config, self.device = vllm_config, device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class AttentionImpl(ABC, Generic[T]):
    @abstractmethod
    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ): ...

    @abstractmethod
    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ): ...

    def process_weights_after_loading(self, act_dtype):
        pass


class AttentionBackendEnum(enum.Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
    CUSTOM = None


def modules(version="0.33.0"):
    """The modules of this vLLM by name, for sys.modules, and the registered paths."""
    registered = {}

    def register_backend(backend, class_path=None, is_mamba=False):
        registered[backend] = class_path

    def module(name, **content):
        made = types.ModuleType(name)
        vars(made).update(content)
        return made

    here = vars(sys.modules[__name__])
    interface = ("AttentionBackend", "AttentionCGSupport", "AttentionImpl", "AttentionMetadata",
                 "AttentionMetadataBuilder", "AttentionType",
                 "CommonAttentionMetadata")  # fmt: skip
    envs = module("vllm.envs", VLLM_BATCH_INVARIANT=False)
    root = module("vllm", __version__=version, envs=envs)
    registry = "vllm.v1.attention.backends.registry"
    found = {
        "vllm": root,
        "vllm.envs": envs,
        "vllm.v1.attention.backend": module(
            "vllm.v1.attention.backend", **{name: here[name] for name in interface}
        ),
        registry: module(
            registry, AttentionBackendEnum=AttentionBackendEnum, register_backend=register_backend
        ),
    }
    for name in ("vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"):
        found[name] = module(name, __path__=[])
    root.__path__ = []
    return found, registered


LAYOUTS = {  # order of [layers, blocks, heads, tokens, content] in memory
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}


class Request:
    """A sequence: its keys and values so far, and its blocks."""

    def __init__(self):
        self.keys, self.values, self.blocks = [], [], []

    @property
    def length(self):
        return sum(len(x) for x in self.keys)


class Runner:
    """Schedules tokens of requests over one layer as vLLM does, by the calls that vLLM makes."""

    def __init__(
        self, backend, rng, layout, heads, head_size, dtype, block_size, blocks=40, **layer
    ):
        num_heads, num_kv_heads = heads
        self.rng, self.block_size, self.dtype = rng, block_size, dtype
        self.heads, self.head_size, self.backend = heads, head_size, backend
        shape = (2, blocks, num_kv_heads, block_size, 2 * head_size)
        order = LAYOUTS[layout]
        memory = torch.full([shape[axis] for axis in order], torch.nan, dtype=dtype)
        both = memory.permute([order.index(axis) for axis in range(5)])
        self.cache, self.other_layer = both[1], both[0]
        self.free = list(rng.permutation(blocks))
        self.impl = backend.get_impl_cls()(
            num_heads, head_size, head_size**-0.5, num_kv_heads, **layer
        )
        self.impl.process_weights_after_loading(dtype)
        self.builder = backend.get_builder_cls()(None, ["layer"], None, torch.device("cpu"))

    def draw(self, tokens, heads):
        x = self.rng.standard_normal((tokens, heads, self.head_size), np.float32)
        return torch.from_numpy(x).to(self.dtype)

    def step(self, requests, counts, padding=0, causal=True):
        """Give `counts[i]` new tokens to request i; returns queries and outputs of each."""
        tokens = sum(counts)
        query, key, value = (
            self.draw(tokens + padding, n) for n in (self.heads[0], *[self.heads[1]] * 2)
        )
        starts = np.concatenate([[0], np.cumsum(counts)])
        slots = []
        for i, (request, count) in enumerate(zip(requests, counts, strict=True)):
            rows = slice(starts[i], starts[i + 1])
            first = request.length
            request.keys.append(key[rows])
            request.values.append(value[rows])
            while len(request.blocks) * self.block_size < request.length:
                request.blocks.append(int(self.free.pop()))
            slots += [
                request.blocks[at // self.block_size] * self.block_size + at % self.block_size
                for at in range(first, first + count)
            ]
        widest = max((len(r.blocks) for r in requests), default=0) + 2
        table = torch.full((len(requests), widest), 10**6, dtype=torch.int32)  # never read
        for row, request in zip(table, requests, strict=True):
            row[: len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
        lengths = [r.length for r in requests]
        batch = CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            num_reqs=len(requests),
            num_actual_tokens=tokens,
            max_query_len=max(counts),
            max_seq_len=max(lengths) + int(self.rng.integers(0, 9)),  # an upper bound
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            causal=causal,
        )
        metadata = self.builder.build(0, batch)
        self.impl.do_kv_cache_update(None, key, value, self.cache, metadata.slot_mapping)
        output = torch.full_like(query, torch.nan)
        found = self.impl.forward(None, query, key, value, self.cache, metadata, output=output)
        assert found is output
        assert torch.isnan(output[tokens:]).all()  # padding is not written
        assert torch.isnan(self.other_layer).all()
        parts = [slice(starts[i], starts[i + 1]) for i in range(len(requests))]
        return [(query[rows], output[rows]) for rows in parts]
