# SPDX-License-Identifier: Apache-2.0
"""A layer of latent attention in DeepSeek's shape, decoded in both forms: over the latents as they
are cached, and over the keys and values that they stand for. Same results, far fewer bytes.
"""

import numpy as np

import cuattn

HEADS, NOPE, ROPE, LATENT, VALUE, BLOCK = 16, 128, 64, 512, 128, 64
SCALE = (NOPE + ROPE) ** -0.5  # of a head before it is projected: not of the 576 columns


def main() -> None:
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    k_proj = draw(HEADS, LATENT, NOPE) * LATENT**-0.5
    v_proj = draw(HEADS, LATENT, VALUE) * LATENT**-0.5
    lens = np.array([500, 77], np.int32)
    tables = np.array([[3, 0, 9, 7, 1, 4, 8, 2], [6, 5, *[0] * 6]], np.int32)

    # The prompt goes into one joined cache; the rope columns are rotated on the way.
    cache = np.zeros((10, BLOCK, LATENT + ROPE), np.float32)
    ckv_cache, kpe_cache = cache[..., :LATENT], cache[..., LATENT:]
    latents = [(draw(n, LATENT), draw(n, ROPE)) for n in lens]
    angles = np.arange(512)[:, None] * 10000.0 ** (-np.arange(0, ROPE, 2) / ROPE)
    turns = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    for table, (ckv, kpe) in zip(tables, latents, strict=True):
        places = np.arange(len(ckv))
        slots = table[places // BLOCK] * np.int64(BLOCK) + places % BLOCK
        cuattn.mla_write(ckv, kpe, ckv_cache, kpe_cache, slots, positions=places, **turns)

    # Absorbed: the query goes times the key projection, the result times the value projection.
    q_nope, q_pe = draw(2, HEADS, NOPE), draw(2, HEADS, ROPE)
    q_latent = cuattn.mla_project(q_nope, k_proj, transpose=True)
    y = cuattn.mla_decode(q_latent, q_pe, ckv_cache, kpe_cache, tables, lens, scale=SCALE)
    absorbed = cuattn.mla_project(y, v_proj)

    # Explicit: keys and values of all heads, made of the same cached rows.
    for b, length in enumerate(lens):
        rows = cache[tables[b]].reshape(1, -1, LATENT + ROPE)[:, :length]
        ckv, kpe = rows[..., :LATENT], rows[..., LATENT:]
        explicit = cuattn.mla_attention(
            q_nope[b : b + 1, :, None], ckv, ckv, k_proj, v_proj,
            q_rope=q_pe[b : b + 1, :, None], k_rope=kpe, form="explicit",
        )  # fmt: skip
        error = float(abs(explicit[0, :, 0] - absorbed[b]).max())
        assert error < 1e-4, error
        print(f"sequence {b}, {length} tokens: the forms differ by {error:.1e}")

    mha = HEADS * (NOPE + ROPE + VALUE) * 2
    mla = (LATENT + ROPE) * 2
    print(f"cache of a token and layer in bfloat16: {mla} bytes, {mha} for {HEADS} heads of MHA, ")
    print(f"{mha / mla:.1f} times as many; with DeepSeek's 128 heads {8 * mha / mla:.0f} times")


if __name__ == "__main__":
    main()
