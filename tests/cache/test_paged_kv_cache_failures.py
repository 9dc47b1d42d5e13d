# SPDX-License-Identifier: Apache-2.0
"""PagedKVCache when a step of it fails: nothing has changed, nothing is left, nothing leaks.

Each case is run again and again, with a failure one step later each time, until nothing fails.
"""

from __future__ import annotations

import dis
import errno
import os
import resource
import sys
from pathlib import Path

import numpy as np
import pytest

import cuattn
from frameworks import Cupy, Numpy, Torch
from paged_engine import Faults, make, what_counts

PACKAGE = str(Path(cuattn.__file__).parent)
LIBRARIES = {"numpy": Numpy, "torch": Torch, "torch-cuda": lambda: Torch("cuda"), "cupy": Cupy}
PROMPT = list(range(11))


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]()


class Scene:
    """A cache with sequences in every state, whose contents are known."""

    def __init__(self, library, folder, call):
        self.library, self.folder, self.call = library, folder, call
        self.cache = make(library, num_layers=2, num_blocks=40, max_seqs=12)
        for layer in range(2):
            self.cache.k_cache(layer)[:] = self.cache.v_cache(layer)[:] = float("nan")
        self.content = {}  # of each sequence: what its slots hold
        self.prompt = self.add(PROMPT, commit=True)
        self.plain, self.ready = self.add(None), self.add(range(80, 91))
        self.shared = self.fork(self.plain)  # its last block is shared, and half full
        self.cut = self.add(range(20, 31), commit=True)  # its last block can be found
        self.cache.truncate(self.cut, 6)
        del self.content[self.cut][6:]
        self.host, self.file = self.add(range(40, 51), commit=True), self.add(range(60, 71))
        self.cache.swap_out(self.host)
        self.cache.swap_out(self.file, folder / "out.kv")
        self.rows = [self.prompt, None, self.plain, self.shared, self.cut]
        self.cache.block_tables(self.rows)

    def add(self, tokens, commit=False):
        seq = self.cache.add(tokens)
        self.content[seq] = []
        self.write(seq, self.cache.append(seq, 11))
        if commit:
            self.cache.commit(seq)
        return seq

    def fork(self, seq):
        child = self.cache.fork(seq)
        self.content[child] = list(self.content[seq])
        return child

    def write(self, seq, slots):
        for slot in slots.tolist():
            number = 100 * seq + len(self.content[seq])
            for layer in range(2):
                self.cache.k_cache(layer)[slot // 4, slot % 4] = number
                self.cache.v_cache(layer)[slot // 4, slot % 4] = -number - layer
            self.content[seq].append(number)

    def state(self):
        """All that can be seen: counts, references, tables, and what is read through them."""
        seen = [what_counts(self.cache), len(descriptors(self.folder))]
        if self.call != "append to a block that is found":  # that one may be forgotten first
            seen.append(self.cache.stats()["cached_blocks"])
        seen.append(sorted(path.name for path in self.folder.iterdir()))
        resident = [q for q in self.content if self.is_resident(q)]
        for order in (self.rows, resident):  # rows as they were, and others
            rows = [q if q in resident else None for q in order]
            tables = self.library.get(self.cache.block_tables(rows))
            lengths = self.library.get(self.cache.context_lens(rows))
            for row, seq in enumerate(rows):
                for i in range(lengths[row]):
                    block, place = int(tables[row, i // 4]), i % 4
                    read = [
                        float(self.library.get(self.cache.k_cache(0))[block, place, 0, 0]),
                        float(self.library.get(self.cache.v_cache(1))[block, place, 0, 7]),
                    ]
                    # Slots that an append has just made hold anything.
                    seen.append((seq, read) if i < len(self.content[seq]) else (seq, "new"))
                    if i < len(self.content[seq]):
                        number = self.content[seq][i]
                        assert read == [number, -number - 1], (seq, i)
        return seen

    def is_resident(self, seq):
        return seq in self.cache._sequences and self.cache._sequences[seq].state.swapped is None

    def close(self):
        """Swapped sequences come back as they were; then all is freed, and nothing is left."""
        for seq in list(self.cache._sequences):
            if not self.is_resident(seq):
                self.cache.swap_in(seq)
        self.state()
        for seq in list(self.cache._sequences):
            self.cache.free(seq)
        assert self.cache.stats()["free_blocks"] == 40
        assert not list(self.folder.iterdir())
        assert not descriptors(self.folder)


def descriptors(folder):
    """The open files that were made in a folder, whether they still have a name or not."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [link for link in links if os.path.realpath(link).startswith(f"{folder}/")]


CALLS = {
    "add": lambda s: s.cache.add(PROMPT),
    "append within a block": lambda s: s.cache.append(s.prompt, 1),
    "append with tokens": lambda s: s.cache.append(s.prompt, 7, tokens=range(7)),
    "append to a shared block": lambda s: s.cache.append(s.shared, 7),
    "append to a block that is found": lambda s: s.cache.append(s.cut, 7),
    "commit": lambda s: s.cache.commit(s.ready),
    "truncate": lambda s: s.cache.truncate(s.plain, 2),
    "fork": lambda s: s.cache.fork(s.plain),
    "free": lambda s: s.cache.free(s.plain),
    "free what is in host memory": lambda s: s.cache.free(s.host),
    "free what is in a file": lambda s: s.cache.free(s.file),
    "swap out to host memory": lambda s: s.cache.swap_out(s.shared),
    "swap out to a file": lambda s: s.cache.swap_out(s.shared, s.folder / "more.kv"),
    "swap in from host memory": lambda s: s.cache.swap_in(s.host),
    "swap in from a file": lambda s: s.cache.swap_in(s.file),
    "tables": lambda s: s.cache.block_tables([s.plain, s.prompt, None, s.cut]),
}


ERRORS = {
    "memory": lambda: MemoryError("test"),
    "cuda": lambda: cuattn.CudaError("test"),
    "disk": lambda: OSError(errno.EIO, "test"),
    "interrupt": KeyboardInterrupt,
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("call", [c for c in CALLS if c.split()[0] not in ("fork", "free")])
def test_a_failure_in_any_step_changes_nothing(library, call, error, tmp_path):
    """Of memory, files and pool each call in turn raises; one that is interrupted has been done."""
    at = 0
    while True:
        at += 1
        scene = Scene(library, tmp_path, call)
        before = scene.state()
        faults = Faults(scene.cache, at, ERRORS[error](), after=error == "interrupt")
        with faults:
            try:
                CALLS[call](scene)
            except (MemoryError, cuattn.CudaError, OSError, KeyboardInterrupt) as caught:
                kept = caught  # with its frames, as a log would keep it
        if not faults.fired:
            break
        # The pool has by then what an interrupted commit said; once more is no mistake.
        done = call == "commit" and error == "interrupt"
        assert done or scene.state() == before, (at, kept)
        CALLS[call](scene)  # and now it works
        scene.state()
        scene.close()
    assert at > 1


class Interrupter:
    """Raises KeyboardInterrupt at the nth place where Python looks for signals in this package.

    These are the begin of a function, the end of a call and the jump back of a loop.
    """

    def __init__(self, at):
        self.at, self.places, self.last = at, 0, {}

    def trace(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        last = self.last.get(id(frame), "RESUME")
        if event == "opcode":
            code = frame.f_code.co_code[frame.f_lasti]
            self.last[id(frame)] = dis.opname[code]
            if last.startswith(("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")):
                self.places += 1
                if self.places == self.at:
                    raise KeyboardInterrupt
        elif event in ("return", "call"):
            self.last.pop(id(frame), None)
        return self.trace

    def run(self, call, *arguments):
        before = sys.gettrace()
        sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for some such frame beforehand
        sys.settrace(self.trace)
        try:
            call(*arguments)
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


@pytest.mark.parametrize("call", CALLS)
def test_an_interrupt_comes_before_or_after_a_change(call, tmp_path):
    at, seen, before, after = 0, [], None, None
    while after is None:
        at += 1
        scene = Scene(Numpy(), tmp_path, call)
        before = scene.state()
        interrupted = Interrupter(at).run(CALLS[call], scene)
        if interrupted:
            seen.append((scene.state(), before))
        else:
            after = scene.state()
        scene.close()
    assert len(seen) > 5
    changed = False
    for at, (state, before) in enumerate(seen, 1):
        changed = changed or state != before  # from here on it is done
        assert state == (after if changed else before), at


def swapped(tier, library=None, tokens=9):
    """A cache of one sequence that is swapped out, and its K and V as they were written."""
    cache = make(library)
    seq = cache.add()
    slots = cache.append(seq, tokens)
    rows = np.arange(tokens * 8, dtype=np.float32).reshape(tokens, 1, 8) + 1
    for row, slot in zip(rows, slots.tolist(), strict=True):
        cache.k_cache(0)[slot // 4, slot % 4] = (library or Numpy()).put(row)
        cache.v_cache(0)[slot // 4, slot % 4] = (library or Numpy()).put(-row)
    cache.swap_out(seq, tier)
    cache.k_cache(0)[:] = cache.v_cache(0)[:] = 99
    return cache, seq, rows


def check_content(cache, seq, rows, library=None):
    get = (library or Numpy()).get
    blocks = get(cache.block_tables([seq]))[0, : -(-len(rows) // 4)]
    for array, want in ((cache.k_cache(0), rows), (cache.v_cache(0), -rows)):
        assert np.array_equal(get(array)[blocks].reshape(-1, 1, 8)[: len(rows)], want)


def test_no_name_can_reach_a_swap_file(tmp_path, monkeypatch):
    """Not from another folder; and a file of its name is neither read nor removed."""
    monkeypatch.chdir(tmp_path)
    cache, seq, rows = swapped("kv")
    assert not list(tmp_path.iterdir())
    (tmp_path / "kv").write_text("mine")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "kv").write_text("mine too")
    monkeypatch.chdir(tmp_path / "other")
    cache.swap_in(seq)
    check_content(cache, seq, rows)
    cache.swap_out(seq, b"bytes")
    cache.free(seq)
    assert (tmp_path / "kv").read_text() == "mine"
    assert (tmp_path / "other" / "kv").read_text() == "mine too"
    assert not descriptors(tmp_path)


def test_a_swap_file_is_its_users_alone(tmp_path):
    cache = swapped(tmp_path / "kv")[0]
    (link,) = descriptors(tmp_path)
    assert cache.stats()["swapped_sequences"] == 1
    assert os.stat(link).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(int(Path(link).name))
    assert os.stat(link).st_nlink == 0


@pytest.mark.parametrize("keep", [0, 1, 100, 2 * 3 * 4 * 8 * 4 - 1])
def test_a_truncated_swap_file_is_an_error_and_no_signal(library, keep, tmp_path):
    cache, seq, rows = swapped(tmp_path / "kv", library)
    (link,) = descriptors(tmp_path)
    whole = Path(link).read_bytes()
    assert len(whole) == 2 * 3 * 4 * 8 * 4  # K and V of three blocks
    os.truncate(link, keep)
    for _ in range(2):
        with pytest.raises(
            OSError, match=f"the file of sequence {seq} must be read .* bytes early"
        ):
            cache.swap_in(seq)
        assert cache.stats()["swapped_sequences"] == 1
        assert cache.stats()["free_blocks"] == 8
    Path(link).write_bytes(whole)
    cache.swap_in(seq)
    check_content(cache, seq, rows, library)


@pytest.mark.parametrize("change", ["a bit", "two top bits", "blocks swapped", "zeros"])
def test_an_altered_swap_file_is_an_error(change, tmp_path, rng):
    cache, seq, _ = swapped(tmp_path / "kv")
    (link,) = descriptors(tmp_path)
    whole = Path(link).read_bytes()
    block = 4 * 8 * 4
    for _ in range(50):
        altered = bytearray(whole)
        if change == "a bit":
            altered[int(rng.integers(len(whole)))] ^= 1 << int(rng.integers(8))
        elif change == "two top bits":
            for word in rng.choice(block // 8, 2, replace=False):
                altered[8 * int(word) + 7] ^= 128
        elif change == "blocks swapped":
            altered[:block], altered[block : 2 * block] = whole[block : 2 * block], whole[:block]
        else:
            begin = int(rng.integers(2 * block - 16))  # of blocks that were written throughout
            altered[begin : begin + 16] = bytes(16)
        Path(link).write_bytes(altered)
        with pytest.raises(OSError, match="must be read as it was written, got: holds other") as e:
            cache.swap_in(seq)
        assert e.value.errno == errno.EIO
        assert cache.stats()["free_blocks"] == 8
    with pytest.raises(ValueError, match="it is swapped out"):
        cache.append(seq, 1)
    cache.free(seq)
    assert cache.stats()["sequences"] == 0
    assert not descriptors(tmp_path)


def test_a_full_disk_changes_nothing(tmp_path):
    """The limit of file sizes stands in for it: a write that is cut short, then one that fails."""
    cache, seq, rows = swapped("host")
    cache.swap_in(seq)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 + 3 * 4 * 8 * 4, hard))
    try:
        with pytest.raises(OSError, match="kv") as caught:
            cache.swap_out(seq, tmp_path / "kv")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert not list(tmp_path.iterdir())
    assert not descriptors(tmp_path)
    check_content(cache, seq, rows)
    assert cache.append(seq, 1).tolist() == [9]


@pytest.mark.parametrize("most", [1, 7, 1000])
def test_reads_and_writes_may_be_cut_short(most, tmp_path, monkeypatch):
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: write(fd, data[:most], at))
    monkeypatch.setattr(os, "preadv", lambda fd, data, at: read(fd, [data[0][:most]], at))
    cache, seq, rows = swapped(tmp_path / "kv")
    cache.swap_in(seq)
    check_content(cache, seq, rows)


def test_a_cache_that_dies_leaves_no_file(tmp_path):
    cache, *_ = swapped(tmp_path / "kv")
    assert len(descriptors(tmp_path)) == 1
    del cache
    assert not descriptors(tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_exception_that_is_kept_holds_no_blocks(tmp_path):
    """Its frames know of the sequence that is freed and of what the call had taken."""
    cache, seq, _ = swapped(tmp_path / "kv")
    (link,) = descriptors(tmp_path)
    os.truncate(link, 0)
    kept = []
    with pytest.raises(OSError, match="bytes early") as caught:
        cache.swap_in(seq)
    kept.append(caught)
    assert cache.stats()["free_blocks"] == 8
    cache.free(seq)
    assert not descriptors(tmp_path)
    a, b = cache.add(), cache.add()
    cache.append(a, 8)
    cache.append(b, 16)
    with pytest.raises(cuattn.OutOfBlocksError) as caught:
        cache.append(a, 24)
    kept.append(caught)
    cache.free(a)
    cache.free(b)
    assert cache.stats()["free_blocks"] == 8
