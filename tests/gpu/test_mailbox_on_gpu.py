"""A mailbox between a decode engine's device and a draft worker's process: rounds one way, drafts the other,
while the host of the decode engine sleeps.

With one GPU both processes share it. What only hardware shows: that kernels reach memory of the host that the
driver has registered, that a round which looks often enough has its drafts, that none has others than those
of its own root, and that a dead draft worker's memory can still be looked at.
`tests/unit/test_kernels_mailbox.py` has the rules themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.ipc.draft_channel import MailChannel, answer
from eyas.engine.ipc.mailbox import MailLayout
from eyas.engine.ipc.messages import DraftChannel, DraftProposal
from eyas.engine.ipc.row_ring import RowMemory
from eyas.engine.kernels.drafts.rounds import FACTS, RoundBatch
from eyas.engine.kernels.exchange import mail_rounds, mailbox
from eyas.engine.kernels.exchange.mail_rounds import HeardRows, MailWait
from eyas.engine.kernels.exchange.mailbox import MailLimits
from tests.gpu.channel_pair import PLACES, THEIRS, gpu, pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

WIDTH, VOCAB, ROUNDS = 4, 1000, 400
SHAPE = DraftChannel({}, 64, WIDTH - 1, PLACES, 32, dtype="bfloat16")


def token(generation: int, position: int) -> int:
    """The token at a position of a sequence's text."""
    return (generation * 37 + position * 11) % VOCAB


def draft(generation: int, position: int) -> int:
    """What is drafted there: it cannot be taken for the token."""
    return (generation * 53 + position * 17 + 5) % VOCAB


def drafter(offer: DraftChannel, folder: str, every: int) -> None:
    """The draft worker's process: it answers each whole round, but leaves out one of `every`."""
    torch.cuda.set_device(THEIRS)
    there = answer(offer, SHAPE.width, folder, RowMemory.new(offer, gpu(THEIRS, SHAPE)))
    box = there.mailbox
    positions, answered = [0] * PLACES, 0
    while not there.gone:
        there.listen()
        for place, first in enumerate(positions):
            generation = 1 + place
            tokens = box.rounds(place, generation, first) or ()
            positions[place] = base = first + len(tokens)
            right = tuple(token(generation, position) for position in range(first + 1, base + 1))
            answered += bool(tokens)
            if tokens and tokens == right and answered % every:
                ids = tuple(draft(generation, base + 1 + i) for i in range(WIDTH - 1))
                box.propose(place, DraftProposal(place, generation, base, ids, tuple(range(-1, WIDTH - 2))))


def device_drafter(offer: DraftChannel, folder: str, _: int) -> None:
    """The draft worker's process, whose device hears rounds and answers them; its host only launches."""
    torch.cuda.set_device(THEIRS)
    device = f"cuda:{THEIRS}"
    rows = RowMemory.new(offer, gpu(THEIRS, SHAPE))
    tables = SlotTables(TableSizes(PLACES + 1, ROUNDS * WIDTH // 16 + 1, WIDTH), device)
    slots = torch.arange(PLACES, dtype=torch.int32, device=device)
    tables.ring_generation[:PLACES] = slots + 1
    heard, lost = HeardRows.empty(PLACES, WIDTH, device), torch.zeros_like(slots)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    wait = MailWait(MailLayout(SHAPE.rows, SHAPE.nodes), rows.ring.row_bytes, VOCAB, 1 << 12, stop)
    ahead = torch.arange(1, WIDTH, device=device)

    def once() -> None:
        mail_rounds.hear(RoundBatch(tables, slots, 16), wait, heard)
        bases = tables.length[:PLACES, None] + ahead
        drafts = (tables.ring_generation[:PLACES, None] * 53 + bases * 17 + 5) % VOCAB
        right = tables.root[:PLACES] == ((slots + 1) * 37 + tables.length[:PLACES] * 11) % VOCAB
        tables.drafts[:PLACES] = torch.where(right[:, None], drafts, 1)
        mail_rounds.answer(tables, heard.slots, lost, wait.place)
        torch.cuda.synchronize()

    once()  # compiles what it launches, before any round waits
    there = answer(offer, SHAPE.width, folder, rows)
    assert there.mailbox.on_device and there.mailbox.place == wait.place
    addresses = [there.mailbox.address(place) for place in range(PLACES)]
    tables.mailbox[:PLACES] = torch.tensor(addresses, device=device)
    while not there.gone:
        once()
        there.listen()


class Decode:
    """Sequences in the slots and places of their numbers; a round makes 1 to WIDTH rows of each certain."""

    def __init__(self, channel: MailChannel, polls: int) -> None:
        self._place = channel.mailbox.place
        self.tables = SlotTables(TableSizes(PLACES + 1, 4, WIDTH), "cuda:0")
        self._slots = torch.arange(PLACES, dtype=torch.int32, device="cuda:0")
        addresses = [channel.mailbox.address(place) for place in range(PLACES)]
        self.tables.mailbox[:PLACES] = torch.tensor(addresses, device="cuda:0")
        self.tables.ring_generation[:PLACES] = self._slots + 1
        self.tables.polls.fill_(polls)
        self.tables.speculative.fill_(WIDTH)
        draws = torch.Generator().manual_seed(1)
        self._counts = torch.randint(1, WIDTH + 1, (ROUNDS, PLACES), generator=draws, dtype=torch.int32)
        self.bases = self._counts.cumsum(0).to("cuda:0", torch.int32)  # lengths after each round
        self._results = self._told().to("cuda:0")
        self.drafts = torch.zeros(ROUNDS, PLACES, WIDTH - 1, dtype=torch.int32, device="cuda:0")

    def _told(self) -> torch.Tensor:
        """Of each round what its verdict leaves."""
        results = torch.full((ROUNDS, PLACES, FACTS + WIDTH), -1, dtype=torch.int32)
        results[:, :, 0] = self._counts
        firsts = self._counts.cumsum(0) - self._counts
        for i in range(WIDTH):
            ids = (torch.arange(1, PLACES + 1) * 37 + (firsts + 1 + i) * 11) % VOCAB
            results[:, :, FACTS + i] = torch.where(i < self._counts, ids, -1)
        return results

    def launch(self) -> None:
        """All rounds: none is landed before the next."""
        batch = RoundBatch(self.tables, self._slots, 16)
        for number in range(ROUNDS):
            self.tables.length[:PLACES] = self.bases[number]
            mailbox.post(self.tables, self._slots, self._results[number], self._place)
            mailbox.fetch(batch, self._place, MailLimits(VOCAB, WIDTH - 1))
            self.drafts[number] = self.tables.drafts[:PLACES]

    def judged(self) -> tuple[int, int]:
        """Rounds with other drafts than their own, and rounds without any."""
        ahead = self.bases[:, :, None] + torch.arange(1, WIDTH, device="cuda:0")
        right = (torch.arange(1, PLACES + 1, device="cuda:0")[:, None] * 53 + ahead * 17 + 5) % VOCAB
        none = (self.drafts == -1).all(2)
        wrong = ((self.drafts != right).any(2) & ~none).sum()
        return int(wrong), int(none.sum())


@pytest.mark.parametrize("drafter", [drafter, device_drafter], ids=["by its host", "by its device"])
def test_every_round_that_waits_has_its_drafts(tmp_path: Path, drafter: Callable[..., None]) -> None:
    with pair(tmp_path, SHAPE, drafter, 1 << 60) as (channel, _):
        decode = Decode(channel, polls=1 << 18)
        decode.launch()
        torch.cuda.synchronize(0)
        assert decode.judged() == (0, 0)


def test_a_round_that_does_not_wait_has_its_own_drafts_or_none(tmp_path: Path) -> None:
    """The rounds run ahead of the drafter, over laps of their rings: some are never answered."""
    with pair(tmp_path, SHAPE, drafter, 7) as (channel, _):
        decode = Decode(channel, polls=8)
        decode.launch()
        torch.cuda.synchronize(0)
        wrong, none = decode.judged()
        print(f"{ROUNDS * PLACES} rounds: {none} without drafts, {wrong} with others'")
        assert wrong == 0 and none > 0


def test_a_dead_drafter_costs_a_few_rounds_their_looks_and_no_more(tmp_path: Path) -> None:
    with pair(tmp_path, SHAPE, drafter, 1 << 60) as (channel, process):
        process.kill()
        process.join()
        decode = Decode(channel, polls=1 << 12)
        began = time.perf_counter()
        decode.launch()
        torch.cuda.synchronize(0)
        seconds = time.perf_counter() - began
        wrong, none = decode.judged()
        print(f"{ROUNDS} rounds without a drafter in {1e3 * seconds:.0f} ms")
        assert (wrong, none) == (0, ROUNDS * PLACES)
        assert bool((decode.tables.missed[:PLACES] == ROUNDS).all())
        assert seconds < 2.0, "fourteen rounds look 4,096 times, the others once"
        channel.listen()
        assert channel.gone
    assert torch.ones(3, device="cuda:0").sum() == 3


@pytest.mark.parametrize("drafter", [drafter, device_drafter], ids=["by its host", "by its device"])
def test_a_way_there_and_back_is_short(tmp_path: Path, drafter: Callable[..., None]) -> None:
    """Prints what a round waits, at the least: the drafter answers at once."""
    with pair(tmp_path, SHAPE, drafter, 1 << 60) as (channel, _):
        decode = Decode(channel, polls=1 << 18)
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        decode.launch()
        ended.record()
        torch.cuda.synchronize(0)
        print(f"{1e3 * begun.elapsed_time(ended) / ROUNDS:.0f} us per round of {PLACES} sequences")
        assert decode.judged() == (0, 0)
