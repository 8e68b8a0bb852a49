"""What a step's outputs leave behind: rows, cached pages, commits, and what is told."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from engine_rig import Rig, request

from eyas.common.types import FinishCause, RequestChoice
from eyas.engine.batch.sequence import Sequence, SequenceWork
from eyas.engine.batch.tree import DraftTree
from eyas.engine.ipc.messages import StepReply
from eyas.engine.loop.commit import StepCommitter
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.loop.plain_runner import ComputedStep, verified
from eyas.engine.loop.step_loop import StepLoop
from eyas.engine.sampling.sampler import SampledTokens
from eyas.engine.speculation.drafters.base import AcceptedRows, Drafter, SequenceProposal

WIDTH = 2


class PagesOfNumbers:
    """A pool whose every row is one number."""

    page_size = 4

    def __init__(self, pages: int) -> None:
        self.rows = torch.zeros(pages * self.page_size, dtype=torch.int64)

    def move(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        self.rows[dst] = self.rows[src]

    def copy_page(self, src: int, dst: int) -> None:
        size = self.page_size
        self.rows[dst * size : (dst + 1) * size] = self.rows[src * size : (src + 1) * size]


class FarDrafter(Drafter):
    """Remembers what it was told; drafts nothing."""

    local_kv = False

    def __init__(self) -> None:
        self.opened: list[tuple[int, int]] = []  # (choice, base)
        self.posted: list[AcceptedRows] = []

    def open(self, seq, base, handle) -> bool:
        self.opened.append((seq.choice, base))
        return True

    def post(self, commits) -> None:
        self.posted += commits

    def take(self) -> list[SequenceProposal]:
        return []

    def owed(self) -> bool:
        return False

    def close(self, seq) -> None:
        pass


class ToldRunner:
    """Runs steps of one sequence: the row of token t becomes t, the target chooses what the test says."""

    drafts = ahead = False

    def __init__(self, pool: PagesOfNumbers) -> None:
        self.pool = pool
        self.copy_page = pool.copy_page
        self.chosen: list[int] = []

    def launch(self, works: list[SequenceWork]) -> ComputedStep:
        (work,) = works
        for row, token in enumerate(work.tokens, start=work.start):
            self.pool.rows[work.seq.pages[row // 4] * 4 + row % 4] = token
        features = torch.tensor(work.tokens, dtype=torch.float32)[:, None].expand(-1, WIDTH)
        sampled, counts = SampledTokens(self.chosen, [None] * len(self.chosen)), [len(self.chosen)]
        return ComputedStep(works, verified(works, counts, sampled, features, self.pool), 0.0)  # type: ignore[arg-type]

    def close(self) -> bool:
        return True


def _loop(
    rig: Rig, pool: PagesOfNumbers, drafter: Drafter | None = None, tell: Callable[[], None] = lambda: None
) -> StepLoop:
    runner = ToldRunner(pool)
    committer = StepCommitter(
        scheduler=rig.scheduler,
        runner=runner,
        drafting=DraftCoordinator(drafter, WIDTH, 7),
        leases=rig.leases,
        outbox=rig.outbox,
        eos_ids=(99,),
        new_uid=rig.requests.new_uid,
        on_end=rig.requests.end,
        on_broken=rig.requests.spoil,
        flush=tell,
    )
    return StepLoop(rig.scheduler, runner, committer)


def _run(rig: Rig, loop: StepLoop, chosen: list[int]) -> Sequence:
    """One step, in which the target chooses `chosen`; whose it was."""
    loop.runner.chosen = chosen  # type: ignore[attr-defined]
    seq = (*rig.scheduler.running, *rig.scheduler.waiting)[0]
    assert loop.step()
    return seq


def test_rows_of_a_tree_that_ends_its_sequence_are_true_before_they_are_cached() -> None:
    rig, pool = Rig(round_rows=8), PagesOfNumbers(64)
    loop = _loop(rig, pool)
    rig.submit(request((10, 11), max_tokens=8))
    seq = _run(rig, loop, [20])
    seq.tree = DraftTree([50, 21, 51, 22, 52, 23, 24], [-1, -1, 1, 1, 3, 3, 5])
    _run(rig, loop, [21, 0, 22, 0, 23, 0, 24, 99])
    assert not rig.requests.table, "it ended with token 99"
    ids = (10, 11, 20, 21, 22, 23, 24)  # and 99, whose own row was never computed
    (page,) = rig.cache.match((*ids, 99, 1))
    assert pool.rows[page * 4 : page * 4 + 4].tolist() == list(ids[:4])


def test_a_first_token_is_sent_before_its_prompt_is_cached() -> None:
    """A long prompt takes a millisecond. An end is told once all is given back."""
    rig, cached = Rig(round_rows=4), list[tuple[int, int]]()

    def tell() -> None:
        (step,) = rig.said(StepReply)
        cached.append((step.entries[0].tokens[0], rig.cache.cached_pages))

    loop = _loop(rig, PagesOfNumbers(64), tell=tell)
    rig.submit(request(tuple(range(10, 20)), max_tokens=3))
    _run(rig, loop, [30])
    assert cached == [(30, 0)] and rig.cache.cached_pages == 2
    for token in (31, 32):
        _run(rig, loop, [token])
    rig.submit(request((10, 11), max_tokens=1))
    _run(rig, loop, [33])
    assert len(cached) == 1 and not rig.requests.table


@pytest.mark.parametrize("begins", [False, True])
def test_a_far_drafter_hears_of_a_prompt_before_its_step_is_launched(begins: bool) -> None:
    """That takes the host as long as the device, if the step is large."""
    rig, order, drafter = Rig(round_rows=4), list[str](), FarDrafter()
    drafter.begin = lambda *_: begins  # type: ignore[method-assign]
    loop = _loop(rig, PagesOfNumbers(64), drafter, tell=lambda: order.append("told"))
    launch = loop.runner.launch
    loop.runner.launch = lambda works: order.append("launched") or launch(works)  # type: ignore[method-assign]
    rig.submit(request(tuple(range(10, 20)), max_tokens=3))
    _run(rig, loop, [30])
    assert order == [*["told"] * begins, "launched", "told"]


def test_accepted_drafts_that_came_after_the_end_are_not_counted() -> None:
    rig, pool = Rig(round_rows=4), PagesOfNumbers(64)
    loop = _loop(rig, pool)
    rig.submit(request((10, 11), max_tokens=8))
    seq = _run(rig, loop, [20])
    seq.tree = DraftTree([99, 22, 23], [-1, 0, 1])
    rig.outbox.take()
    _run(rig, loop, [99, 22, 23, 24])
    (step,) = rig.said(StepReply)
    (entry,) = step.entries
    assert (entry.tokens, entry.finish, entry.accepted, entry.offered) == ((99,), FinishCause.STOP, 1, 3)


def test_of_a_trees_branches_only_one_could_be_accepted() -> None:
    """So its drafts are offered as deep as it is; how many were verified is another figure."""
    rig, pool = Rig(round_rows=8), PagesOfNumbers(64)
    loop = _loop(rig, pool)
    rig.submit(request((10, 11), max_tokens=8))
    seq = _run(rig, loop, [20])
    seq.tree = DraftTree([50, 21, 51, 22, 52, 23, 54], [-1, -1, 1, 1, 3, 3, 5])
    rig.outbox.take()
    _run(rig, loop, [21, 0, 22, 0, 23, 0, 24, 25])
    (step,) = rig.said(StepReply)
    (entry,) = step.entries
    assert (entry.tokens, entry.accepted, entry.offered) == ((21, 22, 23, 24), 3, 4)
    assert rig.outbox.nodes_verified == 7


def test_every_choice_of_a_prompt_opens_its_far_drafter_with_the_whole_window() -> None:
    rig, pool, drafter = Rig(), PagesOfNumbers(64), FarDrafter()
    loop = _loop(rig, pool, drafter)
    rig.submit(request((10, 11, 12, 13, 14), RequestChoice(0), RequestChoice(1), RequestChoice(2)))
    _run(rig, loop, [20, 21, 22])
    assert drafter.opened == [(0, 0), (1, 0), (2, 0)]
    assert [list(commit.tokens) for commit in drafter.posted] == [[11, 12, 13, 14, t] for t in (20, 21, 22)]
    for commit in drafter.posted:
        assert commit.features[:, 0].tolist() == [10, 11, 12, 13, 14]
    assert [seq.output for seq in rig.scheduler.running] == [[20], [21], [22]]


def test_a_choice_goes_on_when_the_one_that_led_its_prompt_ended_at_token_0() -> None:
    rig, pool, drafter = Rig(), PagesOfNumbers(64), FarDrafter()
    loop = _loop(rig, pool, drafter)
    rig.submit(request((10, 11, 12, 13, 14), RequestChoice(0), RequestChoice(1)))
    _run(rig, loop, [99, 21])
    (seq,) = rig.scheduler.running
    assert seq.choice == 1 and drafter.opened == [(1, 0)]
    assert [pool.rows[seq.pages[i // 4] * 4 + i % 4].item() for i in range(5)] == [10, 11, 12, 13, 14]
