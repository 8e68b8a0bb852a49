"""Followers: they do what they are told in order, their ends are noticed, and none outlives rank 0."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from eyas.common.errors import EngineError
from eyas.engine.parallel import ranks
from eyas.engine.parallel.ranks import RankCall, RankChannel, RankFollowers, RankInfo, follow
from kv_transfer.host_files import new_path, sweep

READY_S = 30.0


def _write_down(folder: Path, rank_info: RankInfo, channel: RankChannel) -> None:
    """Follows; a file a rank keeps what was said."""
    path = folder / str(rank_info.rank)

    def note(call: RankCall) -> None:
        with path.open("ab") as file:
            file.write(f"{call.numbers} ".encode() + call.data[:3] + b"\n")

    def stumble(call: RankCall) -> None:
        if rank_info.rank == call.numbers[0]:
            raise ValueError("no such page")

    def reply(call: RankCall) -> None:
        number, *others = call.numbers
        channel.answer(number, call.data + str(others[0] * rank_info.rank).encode())

    channel.ready()
    calls = {"note": note, "stumble": stumble, "reply": reply, "hang": lambda _: time.sleep(600)}
    follow(channel, calls)
    with path.open("ab") as file:
        file.write(b"left")


def _cannot_load(rank_info: RankInfo, channel: RankChannel) -> None:
    raise ValueError("the folder is empty")


def _never_ready(rank_info: RankInfo, channel: RankChannel) -> None:
    time.sleep(600)


def _killed(rank_info: RankInfo, channel: RankChannel) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _only_the_second_ends(rank_info: RankInfo, channel: RankChannel) -> None:
    if rank_info.rank == 2:
        raise ValueError("the folder is empty")
    time.sleep(600)


@pytest.fixture
def trio(tmp_path: Path) -> Iterator[RankFollowers]:
    with RankFollowers(functools.partial(_write_down, tmp_path), 3, tmp_path / "meeting") as followers:
        followers.wait_ready(READY_S)
        yield followers


def _wait_for_the_end(followers: RankFollowers) -> EngineError:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            followers.check()
        except EngineError as error:
            return error
        time.sleep(0.01)
    raise AssertionError("nothing was noticed")


def test_all_followers_do_everything_in_order(trio: RankFollowers, tmp_path: Path) -> None:
    for i in range(200):
        trio.broadcast(RankCall("note", (i, -i), b"abc" if i % 2 else b""))
    trio.broadcast(RankCall("note", (200,), b"xyz" * 1_000_000))  # more than any pipe holds
    trio.close()
    said = [f"({i}, {-i}) {'abc' if i % 2 else ''}" for i in range(200)] + ["(200,) xyz", "left"]
    assert [(tmp_path / rank).read_text().split("\n") for rank in "12"] == [said, said]


def test_a_follower_that_fails_says_why(trio: RankFollowers) -> None:
    trio.broadcast(RankCall("stumble", (2,)))
    assert "rank 2 of 3 has ended: ValueError: no such page" in str(_wait_for_the_end(trio))
    with pytest.raises(EngineError):
        trio.broadcast(RankCall("note", (0,)))


def test_a_follower_that_is_killed_is_noticed_at_the_next_call(trio: RankFollowers) -> None:
    victim = trio._followers[0]._process
    victim.kill()
    victim.join(10)
    with pytest.raises(EngineError, match="rank 1 of 3 has ended: killed by SIGKILL"):
        trio.broadcast(RankCall("note", (0,)))


def test_answers_are_those_of_their_call(trio: RankFollowers) -> None:
    """Whoever waits first: threads ask for themselves, while another has steps computed."""
    first, second = (trio.ask(RankCall("reply", (number,), b"x" * 100_000)) for number in (10, 20))
    trio.broadcast(RankCall("note", (0,)))
    for number, wanted in ((second, ("20", "40")), (first, ("10", "20"))):
        assert trio.answers(number, 10.0) == [b"x" * 100_000 + each.encode() for each in wanted]


def test_an_answer_of_a_follower_that_ends_is_not_waited_for(trio: RankFollowers) -> None:
    number = trio.ask(RankCall("reply", (1,)))
    assert len(trio.answers(number, 10.0)) == 2
    trio.broadcast(RankCall("stumble", (2,)))
    with pytest.raises(EngineError, match="rank 2 of 3 has ended: ValueError: no such page"):
        trio.answers(99, 10.0)
    with pytest.raises(EngineError, match="rank 2 of 3 has ended: ValueError: no such page"):
        trio.check()


def test_an_answer_that_does_not_come_is_an_error(trio: RankFollowers) -> None:
    beats: list[None] = []
    with pytest.raises(EngineError, match="rank 1 of 3 has not answered in time"):
        trio.answers(99, 0.3, lambda: beats.append(None))
    assert len(beats) > 1


def test_a_follower_that_takes_nothing_is_an_error(
    trio: RankFollowers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "LEAVE_S", 0.2)
    for follower in trio._followers:
        follower.pipe.settimeout(0.5)
    trio.broadcast(RankCall("hang"))
    began = time.monotonic()
    with pytest.raises(EngineError, match="rank 1 of 3 has taken no message"):
        trio.broadcast(RankCall("note", data=bytes(10_000_000)))
    assert time.monotonic() - began < 5


def test_close_ends_even_a_follower_that_hangs(trio: RankFollowers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "LEAVE_S", 0.2)
    trio.broadcast(RankCall("hang"))
    began = time.monotonic()
    trio.close()
    trio.close()
    assert time.monotonic() - began < 5
    assert not any(follower._process.is_alive() for follower in trio._followers)
    assert not Path(trio.rank_info.meeting).exists()


@pytest.mark.parametrize(
    ("main", "words"),
    [(_cannot_load, "ValueError: the folder is empty"), (_killed, "killed by SIGKILL")],
)
def test_a_follower_that_cannot_start_says_why(main: ranks.FollowerMain, words: str, tmp_path: Path) -> None:
    with RankFollowers(main, 2, tmp_path / "meeting") as followers, pytest.raises(EngineError, match=words):
        followers.wait_ready(READY_S)


def test_one_that_cannot_start_is_told_while_another_loads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ranks, "LEAVE_S", 0.2)
    with (
        RankFollowers(_only_the_second_ends, 3, tmp_path / "meeting") as followers,
        pytest.raises(EngineError, match="rank 2 of 3 could not start: ValueError: the folder is empty"),
    ):
        followers.wait_ready(READY_S)


def test_a_follower_that_is_late_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ranks, "LEAVE_S", 0.2)
    with (
        RankFollowers(_never_ready, 2, tmp_path / "meeting") as followers,
        pytest.raises(EngineError, match="rank 1 of 2 was not ready in time"),
    ):
        followers.wait_ready(0.0)


def _rank_zero(report: Connection, folder: Path) -> None:
    """A rank 0 that tells who its follower is and then does nothing."""
    followers = RankFollowers(_hang_on_the_device, 2, new_path("meeting", folder))
    followers.wait_ready(READY_S)
    report.send(followers._followers[0]._process.pid)
    time.sleep(600)


def _hang_on_the_device(rank_info: RankInfo, channel: RankChannel) -> None:
    channel.ready()
    time.sleep(600)  # never looks at its channel again


def test_neither_follower_nor_file_outlives_rank_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the killed process could not remove, its owner does; nothing lies where that does not look."""
    pools, temporary = tmp_path / "pools", tmp_path / "tmp"
    pools.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    rank_zero = context.Process(target=_rank_zero, args=(theirs, pools))
    rank_zero.start()
    assert ours.poll(READY_S)
    follower = ours.recv()
    os.kill(follower, 0)  # it is there
    rank_zero.kill()
    rank_zero.join(10)
    deadline = time.monotonic() + 5
    while _running(follower) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _running(follower)
    assert len(list(pools.iterdir())) == 2 and list(temporary.iterdir()) == []
    sweep(pools)
    assert list(pools.iterdir()) == []


def _rank_zero_fails(report: Connection, folder: Path) -> None:
    """A rank 0 that ends by an error, whose traceback holds on to its followers."""
    followers = RankFollowers(functools.partial(_write_down, folder), 2, folder / "meeting")
    followers.wait_ready(READY_S)
    report.send(followers._followers[0]._process.pid)
    raise SystemExit(3)


def test_a_rank_zero_that_fails_before_it_closes_ends_and_so_do_the_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    rank_zero = context.Process(target=_rank_zero_fails, args=(theirs, tmp_path))
    rank_zero.start()
    try:
        assert ours.poll(READY_S)
        follower = ours.recv()
        rank_zero.join(ranks.LEAVE_S + 5)
        assert rank_zero.exitcode == 3
    finally:
        rank_zero.kill()
    assert not _running(follower) and not (tmp_path / "meeting").exists()
    assert (tmp_path / "1").read_bytes() == b"left"


def _running(pid: int) -> bool:
    """Whether the process runs: it is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
