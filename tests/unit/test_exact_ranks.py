"""Sums over ranks by the exact arithmetic: one order, whatever their size and however they are sent.

Two processes are two ranks of a model, in Triton's interpreter, with `tensor_core`'s model of Hopper's matrix
unit. That a GPU's ranks send what these do, tests/gpu shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from eyas.engine.checkpoint.weights import WeightPlacement
from eyas.engine.kernels.exchange.exact_ranks import add_in_order
from eyas.engine.kernels.products import skinny
from eyas.engine.parallel.group import ProcessGroup
from eyas.engine.parallel.one_shot import OneShot
from eyas.engine.parallel.ranks import RankCall, RankChannel, RankFollowers, RankInfo, follow
from tests.bits.compare import Composition, differences
from tests.bits.models import CHUNK, ROWS, Model, Step
from tests.bits.products import halved
from tests.unit import tensor_core
from tests.unit.families import write_family

RANKS = 3


def shares(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of every rank, [ranks, m, n], and a residual; rank 0's almost takes away rank 1's, so that an order
    shows.
    """
    random = torch.Generator().manual_seed(width)
    every = (
        torch.randn(RANKS + 1, rows, width, generator=random) * torch.tensor([2e3, 1, 1, 1])[:, None, None]
    )
    every[1] -= every[0]
    return every[:RANKS].half(), every[RANKS].half()


def in_turn(*terms: torch.Tensor) -> torch.Tensor:
    """The rule: from left to right in float32, rounded once."""
    total = torch.zeros_like(terms[0], dtype=torch.float32)
    for term in terms:
        total = total + term.float()
    return total.half()


def one_shot(every: torch.Tensor, residual: torch.Tensor | None, sums: torch.Tensor | None) -> torch.Tensor:
    """Rank 0's result by the kernel for small sums, whose inbox has what the others send."""
    # [whose, turn & 1, from, word]
    inboxes = torch.zeros(RANKS, 2, RANKS, OneShot.capacity(RANKS), dtype=torch.int64)
    for rank in range(1, RANKS):
        words = every[rank].contiguous().view(torch.int32).flatten().to(torch.int64)
        inboxes[0, 1, rank, : len(words)] = (1 << 32) | (words & 0xFFFFFFFF)
    own = every[0].clone()
    OneShot(0, torch.tensor([each.data_ptr() for each in inboxes]))(own, residual, sums, exact=True)
    return own


def room(width: int) -> torch.Tensor:
    return torch.zeros(width // skinny.sum_group(width), skinny.MAX_ROWS)


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (3, 96), (5, 512), (2, 1024)])
@pytest.mark.parametrize("added", [False, True], ids=["alone", "with a residual"])
def test_both_ways_of_sending_have_the_bits_of_the_rule(rows: int, width: int, added: bool) -> None:
    every, residual = shares(rows, width)
    residual = residual if added else None
    wanted = in_turn(*([residual] if added else []), *every)
    groups = wanted.float().square().view(rows, -1, skinny.sum_group(width))
    for way in (one_shot, gathered):
        sums = room(width)
        assert torch.equal(way(every, residual, sums), wanted), way.__name__
        assert torch.equal(sums[:, :rows].t(), halved(groups)), way.__name__
        assert torch.equal(way(every, residual, None), wanted), way.__name__


def gathered(every: torch.Tensor, residual: torch.Tensor | None, sums: torch.Tensor | None) -> torch.Tensor:
    out = torch.empty_like(every[0])
    add_in_order(every, out, residual, sums)
    return out


def test_other_orders_are_noticed() -> None:
    """The residual last, another rank first, a sum that is rounded before the residual; sums by tiles."""
    every, residual = shares(4, 512)
    wanted = in_turn(residual, *every)
    for other in (in_turn(*every, residual), in_turn(residual, *every.flip(0))):
        assert not torch.equal(other, wanted)
    assert not torch.equal(in_turn(in_turn(*every), residual), wanted)
    exact, fast = room(512), torch.zeros(OneShot.parts(512), skinny.MAX_ROWS)
    one_shot(every, residual, exact)
    fast[0, :4] = wanted.float().square().sum(1)
    assert not torch.equal(halved(exact[:, :4].t()), fast[0, :4])


def test_one_rank_is_a_group_too() -> None:
    every, residual = shares(2, 64)
    own = every[0].clone()
    ProcessGroup(RankInfo(), "cpu").sum_in_order(own, residual)
    assert torch.equal(own, in_turn(residual, every[0]))


# --- a model on two ranks --------------------------------------------------------------------------------

KINDS = (CHUNK, ROWS)
WAYS: dict[str, list[Step]] = {
    "one wide chunk": [(CHUNK, 135)],
    "narrow ones and a chain": [(CHUNK, 70), (CHUNK, 56), (ROWS, 4), (ROWS, 1)],
}


class Rank:
    """What both ranks do alike."""

    def __init__(self, rank_info: RankInfo) -> None:
        self.group = ProcessGroup(rank_info, "cpu", timeout_s=300)
        self._model: Model | None = None
        self.calls = {"load": self.load, "logits": self.logits, "careless": self.careless}

    def load(self, call: RankCall) -> None:
        placement = WeightPlacement("cpu", torch.float16, self.group.rank, self.group.ranks)
        with tensor_core.hopper():
            self._model = Model(Path(call.data.decode()), True, placement, self.group)

    def careless(self, call: RankCall) -> None:
        """From here on, wide steps have the sums of a library, which are rounded before the residual."""
        exact = self.group.sum_in_order

        def some(tensor: torch.Tensor, residual: torch.Tensor | None = None, *rest: torch.Tensor) -> None:
            if tensor.shape[0] <= skinny.MAX_ROWS or residual is None:
                exact(tensor, residual, *rest)
                return
            self.group.all_reduce(tensor)
            tensor.add_(residual)

        object.__setattr__(self.group, "sum_in_order", some)

    def logits(self, call: RankCall) -> dict[int, torch.Tensor]:
        assert self._model is not None
        steps = [(KINDS[kind], count) for kind, count in zip(*[iter(call.numbers)] * 2, strict=True)]
        with tensor_core.hopper():
            return self._model.logits(steps)


def _follower(rank_info: RankInfo, channel: RankChannel) -> None:
    from tests.unit import interpreted

    interpreted.install()
    torch.set_num_threads(1)
    channel.ready()
    rank = Rank(rank_info)
    follow(channel, rank.calls)  # type: ignore[arg-type]
    rank.group.close()


class Pair:
    """This process is rank 0."""

    def __init__(self, followers: RankFollowers, zero: Rank) -> None:
        self._followers, self._zero = followers, zero

    def both(self, kind: str, numbers: Sequence[int] = (), data: bytes = b"") -> dict[int, torch.Tensor]:
        call = RankCall(kind, tuple(numbers), data)
        self._followers.broadcast(call)
        return self._zero.calls[kind](call)

    def logits(self, steps: Sequence[Step]) -> dict[int, torch.Tensor]:
        return self.both("logits", [n for kind, count in steps for n in (KINDS.index(kind), count)])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with RankFollowers(_follower, 2, tmp_path / "meeting") as followers:
        followers.wait_ready(120)
        zero = Rank(followers.rank_info)
        yield Pair(followers, zero)
        followers.dismiss()
        zero.group.close()


def said(pair: Pair) -> list[str]:
    runs = [Composition(name, partial(pair.logits, steps)) for name, steps in WAYS.items()]
    return [str(difference) for difference in differences(runs)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_positions_logits_do_not_depend_on_the_steps(tmp_path: Path, pair: Pair, family: str) -> None:
    """By either way through the layers; gemma2 has norms behind its sums. Careless sums are noticed."""
    write_family(tmp_path / family, family, vocab_size=128, num_hidden_layers=1)
    pair.both("load", data=str(tmp_path / family).encode())
    assert said(pair) == []
    if family == "llama":
        pair.both("careless")
        assert said(pair)
