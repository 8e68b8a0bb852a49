"""Rows of all ranks by the kernel for many rows: gathered, and summed for their owners."""

from __future__ import annotations

import functools
import random
import time
from pathlib import Path

import pytest
import torch

from eyas.engine.parallel.one_shot import INBOXES, OneShot
from eyas.engine.parallel.ranks import RankCall, RankChannel, RankFollowers, RankInfo
from eyas.engine.parallel.row_exchange import ExchangeSizes, RowExchange

RANKS = 2
SMALL = ExchangeSizes(programs=4, block=64)
"""A program has several turns in each call but the smallest."""

SHAPES = [(1, 64), (3, 1024), (7, 512), (2, 96), (40, 256)] * 3


def matrix(shape: tuple[int, int], seed: int, rank: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(8 * seed + rank)).half()


def summed(parts: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(torch.add, [part.float() for part in parts]).half()


def exchange_of(rank_info: RankInfo) -> tuple[RowExchange, list[torch.Tensor]]:
    """Every rank's inboxes are files in the folder where the ranks meet; they must stay mapped."""
    words = SMALL.buffer_bytes(RANKS) // 4
    paths = [str(Path(rank_info.meeting).with_name(f"rows{rank}")) for rank in range(RANKS)]
    buffers = [torch.from_file(path, shared=True, size=words, dtype=torch.int32) for path in paths]
    addresses = torch.tensor([buffer.data_ptr() for buffer in buffers])
    return RowExchange(rank_info.rank, addresses, SMALL), buffers


def wrong(rank_info: RankInfo) -> int:
    """Calls of SHAPES that gave something else; the ranks reach them at different times."""
    exchange, _buffers = exchange_of(rank_info)
    rank, chance, found = rank_info.rank, random.Random(rank_info.rank), 0
    for seed, shape in enumerate(SHAPES):
        every = [matrix(shape, seed, each) for each in range(RANKS)]
        time.sleep(chance.choice([0.0, 0.0, 0.01]))
        gathered, own = torch.empty(RANKS, *shape, dtype=torch.float16), torch.empty_like(every[rank])
        exchange.gather(every[rank], gathered)
        found += not torch.equal(gathered, torch.stack(every))
        parts = [matrix((RANKS * shape[0], shape[1]), 50 + seed, each) for each in range(RANKS)]
        exchange.sum_for_owners(parts[rank], own)
        found += not torch.equal(own, summed(parts).view(RANKS, *shape)[rank])
    return found


def _follower(rank_info: RankInfo, channel: RankChannel) -> None:
    torch.set_num_threads(1)
    channel.ready()
    for call in channel:
        channel.answer(call.numbers[0], bytes([wrong(rank_info)]))


@pytest.mark.slow
def test_two_ranks_have_all_rows_and_their_own_sums(tmp_path: Path) -> None:
    with RankFollowers(_follower, RANKS, tmp_path / "meeting") as followers:
        followers.wait_ready(60)
        number = followers.ask(RankCall("go"))
        assert wrong(followers.rank_info) == 0
        assert followers.answers(number, 60) == [b"\0"]


def played() -> tuple[RowExchange, torch.Tensor, torch.Tensor]:
    """Rank 0, and both ranks' inboxes [whose, turn & 1, from, word] and flags [whose, turn & 1, from,
    program], to be filled by hand.
    """
    buffers = torch.zeros(RANKS, SMALL.buffer_bytes(RANKS) // 4, dtype=torch.int32)
    words = INBOXES * RANKS * SMALL.words
    inboxes = buffers[:, :words].view(RANKS, INBOXES, RANKS, SMALL.words)
    flags = buffers[:, words:].view(RANKS, INBOXES, RANKS, SMALL.programs)
    exchange = RowExchange(0, torch.tensor([buffer.data_ptr() for buffer in buffers]), SMALL)
    return exchange, inboxes, flags


def test_a_rank_reads_and_writes_its_places() -> None:
    """The other rank is a turn ahead: what it sends at turn t + 1 is there before turn t is read."""
    exchange, inboxes, flags = played()
    own, theirs = ([matrix((1, 512), turn, rank) for turn in range(5)] for rank in range(RANKS))
    for turn in range(1, 4):
        for sent in (turn, turn + 1):
            inboxes[0, sent & 1, 1] = theirs[sent].view(torch.int32)[0]
            flags[0, sent & 1, 1] = sent
        out = torch.empty(RANKS, 1, 512, dtype=torch.float16)
        exchange.gather(own[turn], out)
        assert torch.equal(out, torch.stack([own[turn], theirs[turn]]))
        assert torch.equal(inboxes[1, turn & 1, 0], own[turn].view(torch.int32)[0])
        assert flags[1, turn & 1, 0].tolist() == [turn] * SMALL.programs


def test_a_sum_has_the_bits_of_the_kernel_for_few_rows() -> None:
    exchange, inboxes, flags = played()
    tensor, theirs = matrix((2, 512), 1, 0), matrix((1, 512), 2, 1)
    inboxes[0, 1, 1], flags[0, 1, 1] = theirs.view(torch.int32)[0], 1
    found = torch.empty(1, 512, dtype=torch.float16)
    exchange.sum_for_owners(tensor, found)
    words = torch.zeros(RANKS, OneShot.buffer_bytes(RANKS) // 8, dtype=torch.int64)
    few = OneShot(0, torch.tensor([each.data_ptr() for each in words]))
    sent = words[0].view(INBOXES, RANKS, -1)[1, 1, :256]
    sent.copy_((1 << 32) | (theirs.view(torch.int32)[0].to(torch.int64) & 0xFFFFFFFF))
    other = torch.empty_like(found)
    few.sum_for_owners(tensor, other)
    assert torch.equal(found, other) and torch.equal(found, summed([tensor[:1], theirs]))


def test_it_takes_16_bit_floats_in_whole_blocks() -> None:
    assert RowExchange.takes(torch.empty(1024, 7168, dtype=torch.bfloat16))
    assert not RowExchange.takes(torch.empty(1024, 7168))
    assert not RowExchange.takes(torch.empty(1, 48, dtype=torch.float16))
