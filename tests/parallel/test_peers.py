# SPDX-License-Identifier: Apache-2.0
"""The buffers that ranks of a host read, of the CPU's memory in place of torch's symmetric one."""

import types
from unittest import mock

import numpy as np
import pytest

from frameworks import require

torch = require("torch")

from cuattn.parallel import peers  # noqa: E402
from cuattn.parallel.team import Team  # noqa: E402


class Memory:
    """What rendezvous gives: views of bytes that torch does not own."""

    def __init__(self, buffer, name):
        self.bytes, self.name, self.barriers = np.zeros(buffer.numel(), np.uint8), name, 0

    def get_buffer(self, rank, shape, dtype, place):
        del rank
        count = int(np.prod(shape))
        return torch.frombuffer(
            self.bytes, dtype=dtype, count=count, offset=place * dtype.itemsize
        ).view(shape)

    def barrier(self, channel, milliseconds):
        assert (channel, milliseconds) == (0, 1000)
        self.barriers += 1


@pytest.fixture
def device(monkeypatch):
    """A device without a GPU: whether a graph is captured, how often the cache was given back."""
    state = types.SimpleNamespace(capturing=False, emptied=0, fails=0, stream=mock.MagicMock())

    def empty(size, dtype, device):
        if state.fails > 0:
            state.fails -= 1
            raise RuntimeError("out of memory")
        return torch.empty(size, dtype=dtype, device=device)

    def empty_cache():
        state.emptied += 1

    symmetric = types.SimpleNamespace(empty=empty, rendezvous=Memory)
    monkeypatch.setattr(torch.distributed, "_symmetric_memory", symmetric, raising=False)
    monkeypatch.setitem(__import__("sys").modules, "torch.distributed._symmetric_memory", symmetric)
    monkeypatch.setattr(torch.cuda, "Stream", mock.MagicMock())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: state.stream)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    return state


def made():
    group = types.SimpleNamespace(group_name="a group")
    found = peers.Peers(group, torch.device("cpu"), 1000)
    found.share(found.allocate(1 << 16))
    return found


def send(found, keys):
    message = peers.Message(found, 0, [(keys, 2 * keys)], len(keys))
    rows = message.of(0, 0, (0, len(keys))).clone()
    message.close()
    return rows


def test_a_call_of_inference_mode_leaves_buffers_that_training_writes(device):
    found = made()
    keys = torch.randn(5, 2, 8)
    with torch.inference_mode():
        send(found, keys)
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode:
            assert torch.equal(send(found, keys), torch.cat([keys, 2 * keys], -1))
    assert found._memory.barriers == 6


def test_a_buffer_that_a_graph_has_seen_is_kept(device):
    found = made()
    first = found._memory
    found.share(found.allocate(1 << 22))
    assert found._kept == []
    assert found._memory is not first
    device.capturing = True
    send(found, torch.randn(3, 1, 4))
    device.capturing = False
    captured = found._memory
    found.share(found.allocate(1 << 23))
    assert [memory for _, memory in found._kept] == [captured]
    found.share(found.allocate(1 << 24))
    assert len(found._kept) == 1


def test_a_buffer_comes_when_torch_has_given_back_what_it_keeps(device):
    found = made()
    device.fails = 1
    buffer = found.allocate((1 << 24) + 1)
    assert device.emptied == 1
    assert 1 << 24 < buffer.numel() <= (1 << 24) + (1 << 22)  # and somewhat more
    device.fails = 2
    with pytest.raises(RuntimeError, match="out of memory"):
        found.allocate(1 << 25)
    assert send(found, torch.ones(2, 1, 4)).sum() == 2 * (4 + 8)  # what was there serves on


def test_a_call_on_another_stream_waits_for_the_last(device):
    found = made()
    first = device.stream
    send(found, torch.ones(2, 1, 4))
    device.stream = mock.MagicMock()
    send(found, torch.ones(2, 1, 4))
    device.stream.wait_event.assert_called_once_with(first.record_event.return_value)
    again = device.stream
    again.wait_event.reset_mock()
    send(found, torch.ones(2, 1, 4))
    again.wait_event.assert_not_called()


def test_the_end_of_a_message_waits_for_copies_that_nobody_waited_for(device):
    """Of a call that failed: its arrays are freed behind it."""
    found = made()
    message = peers.Message(found, 0, [(torch.ones(2, 1, 4), torch.ones(2, 1, 4))], 2)
    message.fetch([(message.empty(0, 2), 1, 0, (0, 2))])
    order = []
    device.stream.wait_stream.side_effect = lambda stream: order.append(stream)
    found.meet = mock.Mock(side_effect=lambda: order.append("meet"))
    message.close()
    assert order == [found.stream, "meet"]


def run_out_of_memory(ranks):
    """One rank has no memory for its buffer: all go on without, and say why."""
    team = Team(ranks.group)

    def allocate(num_bytes):
        if ranks.rank == 1:
            raise RuntimeError("out of memory\nin detail")
        return num_bytes

    team.peers = types.SimpleNamespace(bytes=100, allocate=allocate, share=lambda buffer: None)
    assert team.peers_with(100) is team.peers
    return team.peers_with(101), team.peers, team.transport


def test_all_ranks_go_on_by_nccl_where_one_has_no_memory(gloo):
    found = gloo.run(2, run_out_of_memory)
    assert [x[:2] for x in found] == [(None, None)] * 2
    assert all(
        x[2].startswith("NCCL: a rank had no memory for a buffer of 101 bytes") for x in found
    )
    assert "(out of memory)" in found[1][2]


def calibrate_beside_buffers_of_gpus(ranks):
    """Arrays of the CPU go by the group, whatever GPUs of these ranks could read."""
    from cuattn.parallel import calibrate
    from cuattn.parallel.team import team_of

    team = team_of("calibrate", ranks.group)
    team.peers = types.SimpleNamespace(device=torch.device("cuda", 0), bytes=0)
    try:
        found = calibrate(
            ranks.group, num_heads=1, head_dim=32, seqlen=64, num_bytes=200, device="cpu"
        )
    finally:
        team.peers = team.speeds = None
    return found


def test_the_cpu_is_calibrated_beside_buffers_of_gpus(gloo):
    for found in gloo.run(2, calibrate_beside_buffers_of_gpus):
        assert found["reads"] == found["bytes"] > 0


def decode_codes(ranks):
    """Float8 queries are refused before anything is sent."""
    from cuattn.parallel import paged_attention

    cache = torch.zeros(2, 8, 2, 32).to(torch.float8_e4m3fn)
    table, lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    q = torch.zeros(1, 4, 32).to(torch.float8_e4m3fn)
    try:
        paged_attention(q, cache, cache, table, lens, group=ranks.group)
    except ValueError as error:
        return str(error)
    return ""


def test_decode_over_ranks_refuses_codes(gloo):
    for said in gloo.run(2, decode_codes):
        assert "q must be float32, float16 or bfloat16, got torch.float8_e4m3fn; cast it" in said
