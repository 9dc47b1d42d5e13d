# SPDX-License-Identifier: Apache-2.0
"""The backend of vLLM 0.33: what it takes, what a step says of its batch, and the calls of a layer.

A cache comes as [num_blocks, num_heads_kv, block_size, 2 * head_size], keys before values in the
last axis, in any order of memory; its halves are views in the layout "nhd" of cuattn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)

import cuattn

WITHOUT_CACHE = (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


class CuattnBackend(AttentionBackend):
    """What vLLM asks before it takes a backend."""

    supported_dtypes = [torch.float16, torch.bfloat16, torch.float32]  # noqa: RUF012  vLLM's own form
    supported_kv_cache_dtypes = ["auto", "float16", "bfloat16"]  # noqa: RUF012
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """Return the member of AttentionBackendEnum that this is registered as."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[CuattnImpl]:
        """Return what a layer runs."""
        return CuattnImpl

    @staticmethod
    def get_builder_cls() -> type[CuattnMetadataBuilder]:
        """Return what makes the metadata of a step."""
        return CuattnMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the blocks that kernels read in place."""
        return list(range(16, 257, 16))

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Say whether there is a kernel."""
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Say whether the GPU is one that kernels are written for."""
        return capability >= (8, 0)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Say yes to all but the attention of a decoder over an encoder."""
        return attn_type in (AttentionType.DECODER, *WITHOUT_CACHE)

    @classmethod
    def supports_sink(cls) -> bool:
        """Say yes."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Say yes."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Say yes."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Say yes: it is an option."""
        return True


@dataclass
class CuattnMetadata(AttentionMetadata):
    """The batch of one step, the same for all layers of a group."""

    num_actual_tokens: int  # without the padding of a batch
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor  # int32 [batch + 1]
    seq_lens: Tensor  # int32 [batch], the newest tokens included
    block_table: Tensor  # int32 [batch, max_blocks]
    slot_mapping: Tensor  # int64 [tokens], -1 for padding
    causal: bool


class CuattnMetadataBuilder(AttentionMetadataBuilder[CuattnMetadata]):
    """Reads nothing from the device, so that a step does not wait."""

    _cudagraph_support = AttentionCGSupport.NEVER  # none was captured under vLLM
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> CuattnMetadata:
        """Take what vLLM says of the batch."""
        batch = common_attn_metadata
        if common_prefix_len:
            raise NotImplementedError(
                f"CuattnMetadataBuilder: common_prefix_len must be 0, got {common_prefix_len}"
            )
        if not isinstance(batch.causal, bool):
            raise NotImplementedError(
                "CuattnMetadataBuilder: causal must be one bool for the batch, got "
                f"{type(batch.causal).__name__}; use another attention backend"
            )
        return CuattnMetadata(
            num_actual_tokens=batch.num_actual_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            block_table=batch.block_table_tensor,
            slot_mapping=batch.slot_mapping,
            causal=batch.causal,
        )

    def update_block_table(
        self, metadata: CuattnMetadata, blk_table: Tensor, slot_mapping: Tensor
    ) -> CuattnMetadata:
        """Return the metadata of a group whose blocks are others."""
        fields = {**vars(metadata), "block_table": blk_table, "slot_mapping": slot_mapping}
        return CuattnMetadata(**fields)


class CuattnImpl(AttentionImpl[CuattnMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        if not CuattnBackend.supports_attn_type(attn_type):
            raise NotImplementedError(f"CuattnImpl: attn_type {attn_type!r} is not served")
        if not CuattnBackend.supports_kv_cache_dtype(kv_cache_dtype):
            raise NotImplementedError(
                f"CuattnImpl: kv_cache_dtype must be one of "
                f"{CuattnBackend.supported_kv_cache_dtypes}, got {kv_cache_dtype!r}"
            )
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_size, self.scale = head_size, float(scale)
        self.kv_cache_dtype, self.attn_type = kv_cache_dtype, attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.left = -1 if sliding_window is None else sliding_window - 1
        self.softcap = logits_soft_cap or 0.0
        self.alibi_slopes: Tensor | None = None
        if alibi_slopes is not None:  # vLLM's default dtype may be bfloat16
            self.alibi_slopes = torch.tensor(alibi_slopes, dtype=torch.float32)
        self.sinks = sinks
        self.batch_invariant = batch_invariant()

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Bring what is small into float32 once, not in every step."""
        self.sinks = None if self.sinks is None else self.sinks.detach().float()

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CuattnMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Write `output` [num_tokens, num_heads, head_size]; rows of padding stay as they are.

        query [num_tokens, num_heads, head_size]; key, value [num_tokens, num_kv_heads, head_size]
        are read by encoders alone: those of decoders are in the cache.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("CuattnImpl: output_scale: the output is not quantised here")
        if attn_metadata is None:  # vLLM measures its memory
            return output.zero_()
        batch, tokens = attn_metadata, attn_metadata.num_actual_tokens
        options: dict[str, Any] = {
            **self.options(query.device, batch.causal),
            "out": output[:tokens],
        }
        starts, longest = batch.query_start_loc, batch.max_query_len
        if self.attn_type in WITHOUT_CACHE:
            cuattn.attention_varlen(
                *(x[:tokens] for x in (query, key, value)),
                *(starts, starts, longest, longest),
                **options,
            )
            return output
        cuattn.attention_varlen(
            query[:tokens],
            *self.halves(kv_cache),
            *(starts, None, longest, batch.max_seq_len),
            block_tables=batch.block_table,
            seqused_k=batch.seq_lens,
            **options,
        )
        return output

    def options(self, device: torch.device, causal: bool) -> dict[str, Any]:
        """Say the layer in cuattn's words."""
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(device)
        sinks = None if self.sinks is None else self.sinks.to(device, torch.float32)  # no-op later
        causal = causal and self.attn_type not in WITHOUT_CACHE
        return {
            "causal": causal,
            "window": (self.left, -1 if causal else self.left),
            "scale": self.scale,
            "softcap": self.softcap,
            "alibi_slopes": self.alibi_slopes,
            "sinks": sinks,
            "batch_invariant": self.batch_invariant,
        }

    def halves(self, kv_cache: Tensor) -> tuple[Tensor, ...]:
        """Return keys and values, [num_blocks, block_size, num_kv_heads, head_size]."""
        if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * self.head_size:
            raise ValueError(
                "CuattnImpl: kv_cache must be [num_blocks, num_kv_heads, block_size, 2 * head_size]"
                f" with head_size {self.head_size}, got {tuple(kv_cache.shape)}; "
                "use the vLLM release that this package names"
            )
        return kv_cache.transpose(1, 2).split(self.head_size, dim=-1)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of new tokens; key and value may be padded behind them."""
        if self.attn_type in WITHOUT_CACHE:
            return
        tokens = slot_mapping.shape[0]
        cuattn.reshape_and_cache(key[:tokens], value[:tokens], *self.halves(kv_cache), slot_mapping)


def batch_invariant() -> bool:
    """Say whether the user asks for it, by VLLM_BATCH_INVARIANT."""
    from vllm import envs

    return bool(envs.VLLM_BATCH_INVARIANT)
