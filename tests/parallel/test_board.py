# SPDX-License-Identifier: Apache-2.0
"""What ranks of a host give each other through a page that they share."""

import gc
import os
import random
import signal
import subprocess
import sys
import time
from datetime import timedelta
from unittest import mock

import pytest

from frameworks import require

torch = require("torch")

from pool import Pool  # noqa: E402

from cuattn.parallel import board, team  # noqa: E402

WORDS = [bytes([number]) * 32 for number in range(4)]


def boards_of(ranks, seconds=60.0):
    """A team whose board waits so long."""
    found = team.Team(ranks.group)
    with mock.patch.object(team, "timeout_of", return_value=timedelta(seconds=seconds)):
        assert found.gather_words(WORDS[ranks.rank]) == WORDS[: ranks.size]
    return found


def give_much(ranks, seed):
    """Hundreds of messages, of which some come late."""
    found = boards_of(ranks)
    assert found._board is not None
    draw = random.Random(seed)
    with mock.patch.object(found, "gather_on_host", side_effect=AssertionError("by sockets")):
        for number in range(500):
            words = [draw.randbytes(32) for _ in range(ranks.size)]
            if number % 100 == ranks.rank:
                time.sleep(random.random() * 0.004)
            assert found.gather_words(words[ranks.rank]) == words
    return found._board.messages


@pytest.mark.parametrize("size", [2, 4])
def test_every_rank_gets_what_every_rank_gave(size, gloo, seed):
    assert gloo.run(size, give_much, seed) == [501] * size


def give_or_leave(ranks, case):
    """Rank 1 ends, or does something else for a while; the others say what they were told."""
    found = boards_of(ranks, 0.3 if case == "late" else 60.0)
    if ranks.rank == 1:
        if case == "dead":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.0)
        return ""
    started = time.monotonic()
    with pytest.raises(team.NoAnswer) as error:
        found.gather_words(WORDS[0])
    assert time.monotonic() - started < 20
    return str(error.value)


def test_a_rank_that_is_late_is_told_of(gloo):
    found = gloo.run(2, give_or_leave, "late")
    assert found == ["rank 1 did not come within 0.3 s", ""]


def test_a_rank_that_is_killed_is_told_of_at_once():
    pool = Pool(2)
    try:
        pool.send(2, give_or_leave, "dead")
        assert pool.pipes[0].poll(60)
        assert pool.pipes[0].recv() == ("", "rank 1 has ended")
    finally:
        pool.close()


def go_by_sockets(ranks, case):
    """What hinders one rank has all go another way."""
    is_odd = ranks.rank == (0 if case == "makes none" else 1)
    hindered = {
        "another host": ("neighbour_digest", {"return_value": bytes(32)}),
        "makes none": ("make_file", {"side_effect": OSError("no memory")}),
        "opens none": ("open_file", {"side_effect": PermissionError("not yours")}),
    }
    name, how = hindered[case]
    gc.collect()  # the boards of earlier tests
    before = len(os.listdir("/proc/self/fd"))
    found = team.Team(ranks.group)
    with mock.patch.object(team, name, **(how if is_odd else {"new": getattr(board, name)})):
        for _ in range(3):
            assert found.gather_words(WORDS[ranks.rank]) == WORDS[: ranks.size]
    assert found._board is None
    assert len(os.listdir("/proc/self/fd")) == before
    return True


def ask_nobody(ranks):
    """A rank whose question has no answer keeps no file."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    found = team.Team(ranks.group)
    with mock.patch.object(found, "gather_on_host", side_effect=team.NoAnswer("alone")):
        for _ in range(3):
            with pytest.raises(team.NoAnswer):
                found.gather_words(WORDS[0])
    return len(os.listdir("/proc/self/fd")) - before


def test_nothing_is_kept_where_nobody_answers(gloo):
    assert gloo.run(2, ask_nobody) == [0, 0]


@pytest.mark.parametrize("case", ["another host", "makes none", "opens none"])
def test_all_go_by_sockets_where_one_cannot_share(case, gloo):
    assert all(gloo.run(3, go_by_sockets, case))


def board_of_two(written, other=None, seconds=0.05):
    """The board of rank 0, where rank 1 has written into its first place before message 8."""
    made = board.Board(
        board.make_file(2), 0, [os.getpid(), other or os.getpid()], timedelta(seconds=seconds)
    )
    made.messages = 7
    made.page[2 * board.PLACE : 2 * board.PLACE + len(written)] = written
    return made


def test_what_is_not_written_whole_is_not_read():
    whole = board.sealed(8, WORDS[3])
    for part in (whole[:20] + bytes(36), whole[:39] + b"\0" + whole[40:], whole[:-1] + b"?"):
        with pytest.raises(board.Silence, match="rank 1 did not come"):
            board_of_two(part).gather(WORDS[0])
    made = board_of_two(whole)
    assert made.gather(WORDS[0]) == [WORDS[0], WORDS[3]]
    assert made.page[: len(whole)] == board.sealed(8, WORDS[0])


def test_a_board_that_a_rank_gave_up_says_so_at_once():
    made = board_of_two(b"")
    with pytest.raises(board.Silence, match="did not come"):
        made.gather(WORDS[0])
    before = bytes(made.page)
    with pytest.raises(board.Silence, match="an earlier call had no answer"):
        made.gather(WORDS[1])
    assert bytes(made.page) == before


@pytest.fixture
def ended():
    """The number of a process that has ended, and that nobody has taken note of."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    yield process.pid
    process.wait()


def test_what_a_rank_wrote_before_it_ended_is_read(ended):
    whole = board.sealed(8, WORDS[3])
    made = board_of_two(b"", ended, 60.0)
    lives = made.lives

    def ends(rank):
        made.page[2 * board.PLACE : 2 * board.PLACE + len(whole)] = whole
        return lives(rank)

    with mock.patch.object(made, "lives", ends):
        assert made.gather(WORDS[0]) == [WORDS[0], WORDS[3]]
    with pytest.raises(board.Silence, match="rank 1 has ended"):
        board_of_two(b"", ended, 60.0).gather(WORDS[0])


def test_a_rank_that_lost_its_lock_is_not_told_to_have_ended():
    """By closing a copy of the file; here the lock of rank 1 is nobody's."""
    assert board_of_two(b"").lives(1)


def test_the_page_has_no_name_and_is_gone_with_the_board():
    file = board.make_file(2)
    first = board.Board(file, 0, [os.getpid()] * 2, timedelta(seconds=1))
    assert os.readlink(f"/proc/self/fd/{file}").endswith("(deleted)")
    del first
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
