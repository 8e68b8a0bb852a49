"""A group of two ranks: sums and joins against plain torch, the one-shot kernel, a divided decoder layer."""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from eyas.common.errors import ConfigError, EngineError
from eyas.engine.checkpoint.config import ModelConfig
from eyas.engine.checkpoint.weights import DummyWeights, WeightPlacement
from eyas.engine.models.table import read_model
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.one_shot import SUMS_ROWS, OneShot
from eyas.engine.parallel.ranks import RankCall, RankChannel, RankFollowers, RankInfo, follow
from eyas.engine.parallel.shards import config_of_rank
from tests.unit.tiny import write_tiny_llama

pytestmark = pytest.mark.slow

RANKS = 2
LAST_TURN = 2**31 - 1
SHAPES = [(1, 512), (1, 64), (3, 1024), (2, 96), (7, 512), (1, 512)] * 4


class Member:
    """What both ranks do alike: every test is one of these calls, made on both."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.group = ProcessGroup(rank_info, "cpu", timeout_s=60)
        self.one_shot = OneShot(rank_info.rank, self._addresses(rank_info))
        self.random = random.Random(rank_info.rank)

    def _addresses(self, rank_info: RankInfo) -> torch.Tensor:
        """Every rank's inboxes, mapped here: files in the folder where the ranks meet."""
        words = OneShot.buffer_bytes(RANKS) // 8
        paths = [str(Path(rank_info.meeting).with_name(f"inbox{rank}")) for rank in range(RANKS)]
        self._inboxes = [torch.from_file(p, shared=True, size=words, dtype=torch.int64) for p in paths]
        return torch.tensor([inbox.data_ptr() for inbox in self._inboxes])

    def sum(self, call: RankCall) -> torch.Tensor:
        rows, columns, seed = call.numbers
        own = matrix(rows, columns, seed, self.group.rank)
        self.group.all_reduce(own)
        return self.group.all_gather_columns(own)

    def rows(self, call: RankCall) -> torch.Tensor:
        """Rank 0's share of some rows, then rank 1's."""
        rows, columns, seed, *ids = call.numbers
        own = self.group.share_of_rows(matrix(rows, columns, seed, self.group.rank), ids)
        return self.group.all_gather_columns(own)

    def sum_add(self, call: RankCall) -> torch.Tensor:
        """The sum with a residual, and its sums of squares [parts, 64] below it."""
        rows, columns, seed = call.numbers
        own = matrix(rows, columns, seed, self.group.rank)
        sums = torch.full((ProcessGroup.sum_parts(columns), SUMS_ROWS), 7.0)
        self.group.all_reduce_add(own, matrix(rows, columns, seed, RANKS), sums)
        return self.group.all_gather_columns(torch.cat([own.flatten(), sums.flatten()])[:, None])

    def burst(self, call: RankCall) -> torch.Tensor:
        """Kernel calls of all SHAPES, which the ranks reach at different times; results rank by rank."""
        results = []
        for seed, shape in enumerate(SHAPES):
            own = matrix(*shape, seed, self.group.rank).half()
            time.sleep(self.random.choice([0.0, 0.0, 0.01]))
            self.one_shot(own)
            results.append(own.float().flatten())
        return self.group.all_gather_columns(torch.cat(results)[:, None])

    def one_add(self, call: RankCall) -> torch.Tensor:
        rows, columns, seed = call.numbers
        own = matrix(rows, columns, seed, self.group.rank).half()
        sums = torch.full((OneShot.parts(columns), SUMS_ROWS), 7.0)
        self.one_shot(own, matrix(rows, columns, seed, RANKS).half(), sums)
        return self.group.all_gather_columns(torch.cat([own.float().flatten(), sums.flatten()])[:, None])

    def owners(self, call: RankCall) -> torch.Tensor:
        """What each rank gets of a sum of rows of all ranks: by the group, then by the kernel."""
        rows, columns, seed = call.numbers
        own = matrix(RANKS * rows, columns, seed, self.group.rank)
        plain, half = self.group.sum_for_owners(own, own[:rows].clone()), own[:rows].half()
        self.one_shot.sum_for_owners(own.half(), half)
        return self.group.all_gather_columns(torch.cat([plain, half.float()]))

    def join(self, call: RankCall) -> torch.Tensor:
        """Every rank's words in the order of the ranks, by the group and by the kernel: of two types."""
        rows, columns, seed = call.numbers
        own = matrix(rows, columns, seed, self.group.rank)
        found = [self.group.gather(own)]
        for each in (own, own.half()):
            found.append(each.new_empty(RANKS, rows, columns))
            self.one_shot.join(each, found[-1])
        return self.group.all_gather_columns(torch.cat([each.float().view(-1, columns) for each in found]))

    def jump(self, call: RankCall) -> None:
        """To the last turns that an int32 counts."""
        self.one_shot._turns.fill_(LAST_TURN - 1)

    def layer(self, call: RankCall) -> torch.Tensor:
        folder = Path(call.data.decode())
        return _logits(read_model(folder, "dummy"), self.group)

    def meet(self, call: RankCall) -> None:
        time.sleep(call.numbers[self.group.rank] / 1000)
        self.group.barrier()

    def fewest(self, call: RankCall) -> torch.Tensor:
        return self.group.all_gather_columns(
            torch.tensor([[self.group.least(call.numbers[self.group.rank])]])
        )

    def greet(self, _: RankCall) -> None:
        self.group.greet()
        self.group.barrier()

    def calls(self) -> dict:
        names = ("sum", "rows", "sum_add", "burst", "one_add", "jump", "layer", "meet", "fewest")
        names += ("owners", "join", "greet")
        return {name: getattr(self, name) for name in names}


def matrix(rows: int, columns: int, seed: int, rank: int) -> torch.Tensor:
    """float32 numbers that float16 holds; rank RANKS stands for the residual."""
    generator = torch.Generator().manual_seed(seed * 8 + rank)
    return torch.randn(rows, columns, generator=generator).half().float()


def summed(shape: tuple[int, int], seed: int, with_residual: bool = False) -> torch.Tensor:
    """float32; the residual is added first, then rank after rank."""
    order = [RANKS] * with_residual + list(range(RANKS))
    return sum(matrix(*shape, seed, rank) for rank in order)


def _follower(rank_info: RankInfo, channel: RankChannel) -> None:
    torch.set_num_threads(1)
    channel.ready()
    member = Member(rank_info)
    follow(channel, member.calls())
    member.group.close()


@dataclasses.dataclass
class Pair:
    followers: RankFollowers
    zero: Member

    def both(self, kind: str, *numbers: int, data: bytes = b"") -> torch.Tensor:
        call = RankCall(kind, numbers, data)
        self.followers.broadcast(call)
        return self.zero.calls()[kind](call)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with RankFollowers(_follower, RANKS, tmp_path_factory.mktemp("ranks") / "meeting") as followers:
        followers.wait_ready(60)
        member = Member(followers.rank_info)
        yield Pair(followers, member)
        followers.broadcast(RankCall("meet", (0, 0)))
        member.group.barrier()
        followers.dismiss()
        member.group.close()


@pytest.mark.parametrize("shape", [(1, 8), (5, 30), (64, 512)])
def test_sums_and_joins(pair: Pair, shape: tuple[int, int]) -> None:
    wanted = summed(shape, 1)
    assert torch.equal(pair.both("sum", *shape, 1), torch.cat([wanted] * RANKS, dim=1))


def test_rows_of_all_ranks_are_divided_again(pair: Pair) -> None:
    ids = (9, 0, 3, 5, 4, 8)  # four of them rank 1's
    whole = torch.cat([matrix(5, 3, 2, rank) for rank in range(RANKS)])
    found = pair.both("rows", 5, 3, 2, *ids)
    assert torch.equal(found, torch.cat([whole[list(ids[:3])], whole[list(ids[3:])]], dim=1))


def test_joined_columns_stand_in_the_order_of_the_ranks(pair: Pair) -> None:
    own = torch.arange(6.0).view(3, 2)
    pair.followers.broadcast(RankCall("sum", (3, 2, 5)))
    pair.zero.group.all_reduce(torch.zeros(3, 2))
    theirs = matrix(3, 2, 5, 1)
    assert torch.equal(pair.zero.group.all_gather_columns(own), torch.cat([own, theirs], dim=1))


@pytest.mark.parametrize("shape", [(1, 96), (5, 1024)])
def test_sum_with_residual_and_squares(pair: Pair, shape: tuple[int, int]) -> None:
    both = pair.both("sum_add", *shape, 2)
    _check_result_and_sums(both, summed(shape, 2, with_residual=True))


def _check_result_and_sums(both: torch.Tensor, wanted: torch.Tensor) -> None:
    rows, columns = wanted.shape
    for mine in both.unbind(dim=1):
        torch.testing.assert_close(mine[: rows * columns].view(rows, columns), wanted)
        sums = mine[rows * columns :].view(-1, SUMS_ROWS)[:, :rows]
        torch.testing.assert_close(sums.sum(dim=0), wanted.square().sum(dim=1))


@pytest.mark.parametrize("shape", [(1, 64), (3, 512), (2, 96)])
def test_rows_come_together_and_their_sums_go_back_to_their_owners(
    pair: Pair, shape: tuple[int, int]
) -> None:
    """One after the other, and between other sums: they share inboxes and turns."""
    (rows, columns), sums = shape, sum(matrix(RANKS * shape[0], shape[1], 6, rank) for rank in range(RANKS))
    for rank, mine in enumerate(pair.both("owners", *shape, 6).split(columns, 1)):
        wanted = sums[rank * rows : (rank + 1) * rows]
        assert torch.equal(mine[:rows], wanted) and torch.equal(mine[rows:], wanted.half().float())
    whole = torch.cat([matrix(*shape, 7, rank) for rank in range(RANKS)])
    for mine in pair.both("join", *shape, 7).split(columns, 1):
        assert torch.equal(mine, torch.cat([whole] * 3))
    test_one_shot_is_right_at_every_call(pair)


def test_one_shot_is_right_at_every_call(pair: Pair) -> None:
    """Shapes change from call to call, and neither rank waits for the other between them."""
    wanted = torch.cat([summed(shape, seed).half().flatten() for seed, shape in enumerate(SHAPES)])
    for mine in pair.both("burst").unbind(dim=1):
        assert torch.equal(mine, wanted.float())


def test_one_shot_when_the_other_rank_is_a_turn_ahead() -> None:
    """What rank 1 sends at turn t + 1 may be here before turn t is read."""
    # [whose, turn & 1, from, word]
    inboxes = torch.zeros(RANKS, 2, RANKS, OneShot.capacity(RANKS), dtype=torch.int64)
    one_shot = OneShot(0, torch.tensor([inbox.data_ptr() for inbox in inboxes]))
    own, theirs = ([matrix(1, 512, turn, rank).half() for turn in range(5)] for rank in range(RANKS))
    ahead = 1
    for turn in range(1, 4):
        while ahead <= turn + 1:
            inboxes[0, ahead & 1, 1, :256] = _slots(theirs[ahead], ahead)
            ahead += 1
        result = own[turn].clone()
        one_shot(result)
        assert torch.equal(result, own[turn] + theirs[turn])
        for whose in range(RANKS):
            assert torch.equal(inboxes[whose, turn & 1, 0, :256], _slots(own[turn], turn))


def _slots(tensor: torch.Tensor, turn: int) -> torch.Tensor:
    """What a rank sends of a 16-bit tensor: every 32 bits below their turn."""
    return (turn << 32) | (tensor.view(torch.int32)[0].to(torch.int64) & 0xFFFFFFFF)


def test_one_shot_with_residual_and_squares(pair: Pair) -> None:
    """Rounded once, and the squares are of what was rounded."""
    for seed, shape in enumerate([(1, 512), (3, 1024), (5, 512)]):
        wanted = summed(shape, seed, with_residual=True).half().float()
        _check_result_and_sums(pair.both("one_add", *shape, seed), wanted)


def test_one_shot_goes_on_when_its_turns_wrap(pair: Pair) -> None:
    pair.followers.broadcast(RankCall("jump"))
    pair.zero.jump(RankCall("jump"))
    test_one_shot_is_right_at_every_call(pair)


def test_one_shot_takes_small_16_bit_tensors_only() -> None:
    """Between two ranks four times as many: then none sends more than a ring would."""
    for ranks, most in ((2, 512), (3, 128), (8, 128)):
        one_shot = OneShot(0, torch.zeros(ranks, dtype=torch.int64))
        assert one_shot.takes(torch.empty(most, 4096, dtype=torch.bfloat16))
        assert not one_shot.takes(torch.empty(most + 1, 4096, dtype=torch.bfloat16))
        assert not one_shot.takes(torch.empty(1, 4096))
        assert not one_shot.takes(torch.empty(1, 4080, dtype=torch.float16))
        assert most * 4096 // 2 == OneShot.capacity(ranks)


@pytest.mark.parametrize("numbers", [(7, 1 << 40), (1 << 40, 7), (7, 7)])
def test_least_of_the_ranks_numbers(pair: Pair, numbers: tuple[int, int]) -> None:
    assert pair.both("fewest", *numbers).tolist() == [[7, 7]]


def test_ranks_greet_each_other(pair: Pair) -> None:
    pair.both("greet")
    test_sums_and_joins(pair, (1, 8))


def test_barrier_waits_for_the_last(pair: Pair) -> None:
    began = time.monotonic()
    pair.both("meet", 0, 300)
    pair.both("meet", 0, 0)
    assert time.monotonic() - began > 0.3


def test_barrier_has_a_deadline(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    group = pair.zero.group
    monkeypatch.setattr(group, "_timeout", group._timeout / 200)
    with pytest.raises(EngineError, match="rank 0 of 2 failed at waiting for the others"):
        group.barrier()
    pair.followers.broadcast(RankCall("meet", (0, 0)))  # it was only late: no later barrier is off by one


def test_a_divided_layer_is_the_whole_one(pair: Pair, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "model", kv_heads=2)
    whole = _logits(read_model(folder, "dummy"), ProcessGroup(RankInfo(), "cpu"))
    divided = pair.both("layer", data=str(folder).encode())
    assert divided.shape == whole.shape
    torch.testing.assert_close(divided, whole)


def _logits(config: ModelConfig, group: ProcessGroup) -> torch.Tensor:
    """Logits of one decoder layer over seven rows, with one rank's part of every matrix."""
    weights = DummyWeights(placement=WeightPlacement(rank=group.rank, ranks=group.ranks))
    mine = config_of_rank(config, group.ranks)
    hidden, inner, dim = config.hidden_size, config.layers[0].feed_forward.width, config.head_dim
    q, kv = config.num_heads * dim, config.num_kv_heads * dim
    x = matrix(7, hidden, 3, 0)
    qkv = x @ weights.stack_rows(["q", "k", "v"], [q, kv, kv], hidden).t()
    heads = qkv.view(7, -1, dim).transpose(0, 1)
    queries, keys, values = heads.split([mine.num_heads, mine.num_kv_heads, mine.num_kv_heads])
    attended = F.scaled_dot_product_attention(
        queries[None], keys[None], values[None], is_causal=True, enable_gqa=True
    )
    added = attended[0].transpose(0, 1).reshape(7, -1) @ weights.take_columns("o", (hidden, q)).t()
    group.all_reduce(added)
    x = x + added
    gate, up = (x @ weights.stack_rows(["gate", "up"], [inner, inner], hidden).t()).chunk(2, dim=1)
    assert gate.shape[1] == mine.layers[0].feed_forward.width
    added = (F.silu(gate) * up) @ weights.take_columns("down", (hidden, inner)).t()
    group.all_reduce(added)
    return group.all_gather_columns((x + added) @ weights.take_rows("head", (config.vocab_size, hidden)).t())


def test_what_cannot_be_divided_is_an_error(tmp_path: Path) -> None:
    config = read_model(write_tiny_llama(tmp_path / "model", kv_heads=2), "dummy")
    with pytest.raises(ConfigError, match="2 key and value heads cannot be divided among 4 ranks") as refused:
        config_of_rank(config, 4)
    assert refused.value.message.startswith("--tensor-parallel-size: ")
    assert refused.value.param == "tensor-parallel-size"
    assert config_of_rank(config, 1) == config


def test_a_group_of_one_does_nothing() -> None:
    group, tensor = ProcessGroup(RankInfo(), "cpu"), torch.ones(2, 3)
    group.all_reduce(tensor)
    assert group.all_gather_columns(tensor) is tensor
    assert torch.equal(tensor, torch.ones(2, 3))
    group.barrier()
    group.close()
