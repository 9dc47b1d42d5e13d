# SPDX-License-Identifier: Apache-2.0
"""Serve many requests from one paged KV cache, and check every output against dense attention.

A small model of attention layers writes token ids. Requests share the begin of their prompts, some
ask for several samples, and the cache is too small for all of them: sequences join, fork, finish,
and are swapped out and in. On a GPU (PyTorch) a decode step is one CUDA graph, captured once and
replayed while sequences come and go and grow; without one, numpy arrays are served on the CPU.
"""

import collections
import pathlib
import tempfile

import numpy as np

import cuattn

NUM_LAYERS, HEADS_Q, HEADS_KV, HEAD_DIM, VOCABULARY = 2, 8, 2, 64, 50
HIDDEN = HEADS_Q * HEAD_DIM
ROWS = 8  # sequences in a decode step
BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 16, 20, 128


class Model:
    """x = embedding + position; in each layer x += attention(x Wq, x Wk, x Wv) Wo."""

    def __init__(self, put):
        rng = np.random.default_rng(0)
        widths = (HIDDEN, HEADS_KV * HEAD_DIM, HEADS_KV * HEAD_DIM, HIDDEN)
        self.embedding = put(rng.standard_normal((VOCABULARY, HIDDEN)))
        self.position = put(rng.standard_normal((MAX_TOKENS, HIDDEN)))
        self.layers = [
            [put(rng.standard_normal((HIDDEN, width)) / HIDDEN**0.5) for width in widths]
            for _ in range(NUM_LAYERS)
        ]

    def __call__(self, tokens, positions, attend):
        """Hidden states [n, HIDDEN] of n tokens; attend(layer, q, k, v) sees [n, heads, dim]."""
        x = self.embedding[tokens] + self.position[positions]
        for layer, (wq, wk, wv, wo) in enumerate(self.layers):
            q, k, v = ((x @ w).reshape(len(x), -1, HEAD_DIM) for w in (wq, wk, wv))
            x = x + attend(layer, q, k, v).reshape(len(x), HIDDEN) @ wo
        return x


def dense(layer, q, k, v):
    """softmax(q k^T / sqrt(d)) v, causal, by the formula: what every output is held against."""
    k, v = (np.repeat(x, HEADS_Q // HEADS_KV, axis=1) for x in (k, v))
    scores = np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v)


class Numpy:
    """Arrays of numpy; a step computes at once."""

    name, dtype, tolerance = "numpy", "float32", 1e-4

    def put(self, values):
        return np.asarray(values, np.int64 if values.dtype.kind == "i" else self.dtype)

    def get(self, array):
        return array.astype(np.float64)

    def compile(self, step, tokens):
        """A function of the tokens of a step; all else that it reads stays where it is."""
        return step


class Torch(Numpy):
    """Tensors on the GPU; a step is captured in a CUDA graph."""

    name, dtype, tolerance = "torch on cuda", "float16", 2e-2

    def __init__(self, torch):
        self.torch = torch

    def put(self, values):
        return self.torch.from_numpy(super().put(values)).cuda()

    def get(self, array):
        return array.double().cpu().numpy()

    def compile(self, step, tokens):
        given, stream = tokens.clone(), self.torch.cuda.Stream()
        stream.wait_stream(self.torch.cuda.current_stream())
        with self.torch.cuda.stream(stream):
            step(given)  # kernels and libraries are loaded on first use, not during the capture
        self.torch.cuda.current_stream().wait_stream(stream)
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph):
            result = step(given)

        def replay(tokens):
            given.copy_(tokens)
            graph.replay()
            return result

        return replay


class Text:
    """The tokens of one sequence, and the hidden state at each position computed for it."""

    def __init__(self, tokens, end):
        self.tokens, self.end, self.outputs = list(tokens), end, {}


class Server:
    """Keeps up to ROWS sequences decoding as long as there are requests (prompt, samples, end)."""

    def __init__(self, library, folder):
        self.library, self.folder, self.model = library, folder, Model(library.put)
        self.cache = cuattn.PagedKVCache(
            *(NUM_LAYERS, NUM_BLOCKS, BLOCK_SIZE, HEADS_KV, HEAD_DIM, library.dtype),
            like=library.put(np.zeros(1)),
            max_seqs=ROWS,
            max_blocks_per_seq=MAX_TOKENS // BLOCK_SIZE,
        )
        self.running, self.swapped, self.done = {}, collections.deque(), []
        self.decode, self.rng, self.counts = None, np.random.default_rng(1), collections.Counter()

    def serve(self, requests):
        while requests or self.running or self.swapped:
            self.admit(requests)
            self.step()
        return self.done

    def attend(self, seqs):
        """Write K and V of the last append and attend, in any layer, for `seqs`."""
        tables, lengths = self.cache.block_tables(seqs), self.cache.context_lens(seqs)
        slots, plan = self.cache.slot_mapping(seqs), None
        sizes = {"num_heads_q": HEADS_Q, "num_heads_kv": HEADS_KV, "head_dim": HEAD_DIM}
        sizes |= {"block_size": BLOCK_SIZE, "dtype": self.library.dtype}

        def attend(layer, q, k, v):
            nonlocal plan
            caches = self.cache.k_cache(layer), self.cache.v_cache(layer)
            cuattn.reshape_and_cache(k, v, *caches, slots)
            q = q.reshape(len(seqs), -1, HEADS_Q, HEAD_DIM)
            if layer == 0:  # how the keys are shared out, for all layers of the step
                plan = cuattn.paged_plan(tables, lengths, q_len=q.shape[1], **sizes)
            return cuattn.paged_attention(q, *caches, tables, lengths, plan=plan)

        return attend, lengths

    def admit(self, requests):
        """Bring back what was swapped out, then begin new requests, as far as there is room."""
        try:
            while self.swapped and len(self.running) < ROWS:
                seq, text = self.swapped[0]
                self.cache.swap_in(seq)
                self.running[seq] = text
                self.swapped.popleft()
            while requests and len(self.running) + requests[0][1] <= ROWS and not self.swapped:
                self.prefill(*requests[0])
                requests.popleft()
        except cuattn.OutOfBlocksError:
            self.counts["waits"] += 1  # until others have finished

    def prefill(self, prompt, samples, end):
        """Compute what is not cached of a prompt, and begin its samples."""
        seq = self.cache.add(prompt)
        first = self.cache.context_len(seq)
        try:
            self.cache.append(seq, len(prompt) - first)
        except cuattn.OutOfBlocksError:
            self.cache.free(seq)
            raise
        positions = np.arange(first, len(prompt))
        tokens = self.library.put(prompt[positions])
        x = self.model(tokens, self.library.put(positions), self.attend([seq])[0])
        self.cache.commit(seq)  # what is in the cache may be found from now on
        x = self.library.get(x)
        self.counts.update(prefilled=len(x), found=first, forks=samples - 1)
        for sequence in [seq] + [self.cache.fork(seq) for _ in range(samples - 1)]:
            text = self.running[sequence] = Text(prompt, end)
            text.outputs.update(zip(positions, x, strict=True))
            self.draw(text, x[-1])

    def step(self):
        """One more token for each running sequence; the newest make room for the others."""
        for seq in list(self.running):
            while seq in self.running:
                try:
                    self.cache.append(seq, 1, tokens=self.running[seq].tokens[-1:])
                    break
                except cuattn.OutOfBlocksError:
                    self.swap_out(list(self.running)[-1])
        rows = [*self.running, *[None] * (ROWS - len(self.running))]
        attend, lengths = self.attend(rows)
        tokens = [0 if seq is None else self.running[seq].tokens[-1] for seq in rows]
        tokens = self.library.put(np.array(tokens))
        if self.decode is None:
            self.decode = self.library.compile(
                lambda tokens: self.model(tokens, (lengths - 1).clip(0), attend), tokens
            )
        x = self.library.get(self.decode(tokens))
        self.counts.update(steps=1, decoded=len(self.running))
        for seq, hidden in zip(list(self.running), x, strict=False):
            self.cache.commit(seq)
            text = self.running[seq]
            text.outputs[len(text.tokens) - 1] = hidden
            self.draw(text, hidden)
            if len(text.tokens) > text.end:
                self.cache.free(seq)
                self.done.append(self.running.pop(seq))

    def swap_out(self, seq):
        in_file = self.counts["swaps"] % 2 == 1
        self.cache.swap_out(seq, self.folder / f"{seq}.kv" if in_file else "host")
        self.swapped.append((seq, self.running.pop(seq)))
        self.counts["swaps"] += 1

    def draw(self, text, hidden):
        """The next token, at random, so that samples of one prompt part."""
        text.tokens.append(int(np.argmax(hidden[:VOCABULARY] + self.rng.gumbel(size=VOCABULARY))))


def make_requests(count):
    rng = np.random.default_rng(2)
    begins = rng.integers(0, VOCABULARY, (2, 40))  # of the prompts
    for i in range(count):
        tail = rng.integers(0, VOCABULARY, rng.integers(0, 30))
        prompt = np.concatenate([begins[i % 2], tail])
        yield prompt, 3 if i % 4 == 0 else 1, len(prompt) + rng.integers(5, 45)


def main() -> None:
    library, count = Numpy(), 12
    try:
        import torch

        if torch.cuda.is_available() and cuattn.info()["cuda"]:
            library, count = Torch(torch), 60
    except ImportError:
        pass
    with tempfile.TemporaryDirectory() as folder:
        server = Server(library, pathlib.Path(folder))
        texts = server.serve(collections.deque(make_requests(count)))

    exact = Model(lambda values: values.astype(library.dtype).astype(np.float64))
    error = outputs = 0
    for text in texts:
        expected = exact(np.array(text.tokens), np.arange(len(text.tokens)), dense)
        for position, hidden in text.outputs.items():
            error = max(error, np.abs(hidden - expected[position]).max())
        outputs += len(text.outputs)
    assert error < library.tolerance, error
    counts = server.counts
    assert min(counts["found"], counts["forks"], counts["swaps"], counts["waits"]) > 0, counts
    assert server.cache.stats()["used_blocks"] == 0
    print(
        f"{library.name}: {len(texts)} sequences ({counts['forks']} forked) in {counts['steps']} "
        f"steps of up to {ROWS}; {counts['prefilled']} prompt tokens computed, {counts['found']} "
        f"found in the cache, {counts['decoded']} decoded, {counts['swaps']} swaps\n"
        f"all {outputs} outputs as dense attention gives them, max error {error:.1e}"
    )


if __name__ == "__main__":
    main()
