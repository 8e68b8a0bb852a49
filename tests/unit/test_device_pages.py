"""No row is written, or read, beyond the pages that its sequence was given, whatever the drafts come to.

The host composes a step before it knows what the one before gave, so pages are reserved by arithmetic. Here
scheduler, pace, step and round kernels are the real ones (interpreted), and the models only look at the rows
that they are told to write. Page tables hold a page that does not exist wherever nothing was told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from engine_rig import PAGE, Rig

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, TokenEntry
from eyas.engine.batch.rows import DecodeRows, ForwardRows
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.buckets import GraphBuckets
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.program import DeviceState
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.device.special import SpecialSampler
from eyas.engine.device.step import StepLayout
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.ipc.messages import CancelGeneration, StepReply
from eyas.engine.kernels.drafts import chains
from eyas.engine.kernels.sampling import sample
from eyas.engine.kv.format import KvFormat
from eyas.engine.kv.pool import KvPool, PoolShape
from eyas.engine.loading.device_build import rounds_ahead
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loop.commit import StepCommitter
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.loop.step_loop import StepLoop
from eyas.engine.models.base import Drafted
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.speculation.device import DeviceDrafter
from kv_transfer.layout import pages_for

CONTEXT = 64  # as the rig admits
CHUNK = 8
MAX_RUNNING = 6
VOCAB, HIDDEN = 16, 4
DRAFT, OTHER = 1, 15  # what is always proposed first; a token that no draft is

PLAIN = None
CHAIN = SpeculationConfig(steps=5, topk=1, draft_tokens=6)
TREES = {
    "tree": SpeculationConfig(steps=5, topk=8, draft_tokens=32),
    "narrow": SpeculationConfig(steps=5, topk=2, draft_tokens=4),  # no path is as long as the head's steps
}

Agrees = Callable[[int], bool]  # does the target choose DRAFT at this position?
Agree = Callable[[Agrees], None]


def always(position: int) -> bool:
    return True


AGREEMENTS: dict[str, Agrees] = {
    "always": always,
    "never": lambda position: False,
    "now and then": lambda position: position % 7 not in (2, 3),
}


class Watch(StepExecutor):
    """Sees every row of every forward; stands in for both models."""

    layers = (0,)
    token_map = None
    whole = False
    block = None
    config = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, rig: Rig, tables: SlotTables, spec: SpeculationConfig | None) -> None:
        self._rig = rig
        self._most_width = max(tables.sizes.width, 0 if spec is None else spec.topk)
        self.nowhere = rig.pool.num_pages
        pool = KvPool(PoolShape(KvFormat(1, 1, 16), self.nowhere + 1, PAGE))
        drafter = None if spec is None else DeviceDrafter((self, self), pool, tables, spec, pdl=False)  # type: ignore[arg-type]
        special = SpecialSampler(tables, VOCAB, pdl=False)
        super().__init__(DeviceState(self, pool, tables, special, drafter))  # type: ignore[arg-type]

    def _apply(self, writes: np.ndarray) -> None:
        poked = set(writes[0].tolist())
        for slot in range(self.tables.padding_slot):
            if self.tables.places("seed", slot, 0, 1)[0] in poked:  # somebody new
                self.tables.pages[slot] = self.nowhere
        super()._apply(writes)

    # --- as the target and the head --------------------------------------------------------------------

    def forward(self, *args):
        rows, tokens = next(arg for arg in args if isinstance(arg, ForwardRows)), args[0]
        self._look_at(rows)
        x = torch.zeros(rows.count, HIDDEN)
        return (x, x) if tokens is rows else Drafted(x, x)

    def may_drop(self, count: int, taps: tuple[int, ...]) -> bool:
        """As the target: no row leaves, so that each is seen."""
        return False

    def features(self, of, tokens=None):
        """Of the head; and of the executor, whose rows are handed on."""
        return super().features(of) if isinstance(of, list) else of

    def logits(self, x, picked=None, out=None, adapters=None) -> torch.Tensor:
        count = x.shape[0] if picked is None else picked.shape[0]
        return -torch.arange(VOCAB, dtype=torch.float32).sub(DRAFT).abs().repeat(count, 1)

    # --- what must hold --------------------------------------------------------------------------------

    def _look_at(self, rows: ForwardRows) -> None:
        written = [row for row in rows.kv_rows.tolist() if row >= 0]
        assert len(set(written)) == len(written), "two write the same row"
        for page in {row // PAGE for row in written}:
            assert page != self.nowhere, "written beyond the pages that were told"
            assert self._rig.pool.owners(page) == 1 and page not in self._rig.cache._nodes, (
                "written where others read"
            )
        for rounds in rows.groups:
            self._look_at_group(rounds)

    def _look_at_group(self, rounds: DecodeRows) -> None:
        assert rounds.width <= self._most_width, "wider than the attention has room for"
        for slot, start in zip(rounds.slots.tolist(), rounds.starts.tolist(), strict=False):
            pages = pages_for(start + max(rounds.width, rounds.extent), PAGE)
            assert pages <= self.tables.sizes.max_pages, "beyond the page table"
            read = self.tables.pages[slot, :pages].tolist()
            assert slot == self.tables.padding_slot or self.nowhere not in read, "read beyond the pages"


class World:
    """Steps launched ahead on a `Watch`. `fewer`: rounds less than the engine has pages for."""

    def __init__(
        self, spec: SpeculationConfig | None, *, pages: int = 400, fewer: int = 0, padded: bool = True
    ) -> None:
        config = EngineConfig(context_length=CONTEXT, page_size=PAGE, speculation=spec or CHAIN)
        loaded = EngineSpec.of(replace(config, draft=None) if spec is None else config)
        ahead, rows = rounds_ahead(loaded), loaded.round_rows
        self.rig = Rig(pages, lookahead=int(spec is not None), max_running=MAX_RUNNING)
        self.rig.scheduler.tables.limits = BatchLimits(
            PAGE, MAX_RUNNING, CHUNK, rows, rounds_ahead=ahead - fewer
        )
        longest = pages_for(CONTEXT + ahead * rows, PAGE)
        tables = SlotTables(TableSizes(MAX_RUNNING + 1, longest, loaded.width), "cpu")
        self.watch = Watch(self.rig, tables, spec)
        layout = StepLayout(PAGE, tables.padding_slot, 4)
        buckets = GraphBuckets(loaded.width, 4, (3, MAX_RUNNING), (4,), CHUNK, CHUNK)
        if not padded:
            buckets = GraphBuckets(loaded.width, 4, ())
        self.runner = DeviceRunner(self.watch, buckets, [layout], GrammarManager(Path(), 0, ()), ahead=True)
        self.rig.requests.copy_page = self.runner.copy_page
        self.loop = StepLoop(self.rig.scheduler, self.runner, self._committer())
        self.tokens: dict[tuple[str, int], int] = {}

    def _committer(self) -> StepCommitter:
        rig = self.rig
        return StepCommitter(
            scheduler=rig.scheduler,
            runner=self.runner,
            drafting=DraftCoordinator(None, 0, 0),
            leases=rig.leases,
            outbox=rig.outbox,
            eos_ids=(),
            new_uid=rig.requests.new_uid,
            on_end=rig.requests.end,
            on_broken=rig.requests.spoil,
            flush=lambda: None,
        )

    def submit(self, name: str, prompt: int, max_tokens: int, choices: int = 1) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        ids = tuple(2 + i % 5 for i in range(prompt))
        self.rig.submit(GenerationRequest(name, ids, params, tuple(RequestChoice(i) for i in range(choices))))

    def step(self) -> bool:
        busy = self.loop.step()
        for entry in (entry for step in self.rig.said(StepReply) for entry in step.entries):
            self._count(entry)
        return busy

    def _count(self, entry: TokenEntry) -> None:
        key = entry.id, entry.choice
        self.tokens[key] = self.tokens.get(key, 0) + len(entry.tokens)

    def run(self) -> None:
        while self.step():
            pass
        assert not self.rig.requests.table and self.rig.held() == 0


@pytest.fixture
def agree(monkeypatch: pytest.MonkeyPatch) -> Agree:
    """How the models agree from now on: the head always says DRAFT."""

    def set_to(agrees: Agrees) -> None:
        def choose(logits, rows, tables, out, pdl=False) -> None:
            out.copy_(
                torch.tensor([DRAFT if agrees(p) else OTHER for p in (rows.positions + rows.ahead).tolist()])
            )

        def propose(batch, logits, step, token_map, rows) -> None:
            told = torch.arange(logits.shape[1]) == DRAFT
            proposes(batch, told.float().expand_as(logits).contiguous(), step, None, rows)

        proposes = chains.propose
        monkeypatch.setattr(sample, "choose", choose)
        monkeypatch.setattr(chains, "propose", propose)

    return set_to


def fill_the_context(world: World) -> None:
    """Prompts that end at each place of a page, the first with its last row as a round of its own."""
    for i, prompt in enumerate((CHUNK + 1, 6, 7, 12)):
        world.submit(f"r{i}", prompt, CONTEXT - prompt)
    world.submit("short", 3, 2)
    world.run()
    assert [world.tokens[f"r{i}", 0] for i in range(4)] == [55, 58, 57, 52]


@pytest.mark.slow
@pytest.mark.parametrize(
    "agreement", ["always", *(pytest.param(a, marks=pytest.mark.slow) for a in ("now and then", "never"))]
)
def test_every_row_of_a_chain_has_its_page(agreement: str, agree: Agree) -> None:
    agree(AGREEMENTS[agreement])
    fill_the_context(World(CHAIN))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [CHAIN, TREES["tree"]], ids=["chain", "tree"])
def test_every_row_of_a_whole_model_has_its_page(
    spec: SpeculationConfig, agree: Agree, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs one row more, the root's."""
    monkeypatch.setattr(Watch, "whole", True)
    agree(always)
    fill_the_context(World(spec))


@pytest.mark.slow
def test_every_row_has_its_page_without_drafts(agree: Agree) -> None:
    agree(always)
    fill_the_context(World(PLAIN))


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(TREES["tree"], id="tree", marks=pytest.mark.slow),
        pytest.param(TREES["narrow"], id="narrow"),
    ],
)
def test_every_row_of_a_tree_has_its_page(spec: SpeculationConfig, agree: Agree) -> None:
    """One sequence at the end of its context, whose last prompt row is a round of its own."""
    agree(always)
    world = World(spec, padded=False)
    world.submit("a", 5 * CHUNK + 1, 23)
    world.run()
    assert world.tokens == {("a", 0): 23}


@pytest.mark.slow
@pytest.mark.parametrize("agreement", ["always", "now and then"])
@pytest.mark.parametrize("spec", TREES.values(), ids=TREES)
def test_every_row_of_many_trees_has_its_page(spec: SpeculationConfig, agreement: str, agree: Agree) -> None:
    agree(AGREEMENTS[agreement])
    fill_the_context(World(spec))


@pytest.mark.parametrize(
    ("spec", "pages"),
    [
        pytest.param(PLAIN, 28, marks=pytest.mark.slow, id="plain"),
        pytest.param(CHAIN, 48, marks=pytest.mark.slow, id="chain"),
    ],
)
def test_after_preemptions_forks_and_cancels(
    spec: SpeculationConfig | None, pages: int, agree: Agree
) -> None:
    """A pool for two and a half of them."""
    agree(AGREEMENTS["now and then"])
    world = World(spec, pages=pages)
    for i, prompt in enumerate((6, 13, 23)):
        world.submit(f"r{i}", prompt, 30)
    world.submit("forks", 10, 20, choices=3)
    for _ in range(7):
        world.step()
    world.rig.requests.cancel(CancelGeneration("r1", None))
    world.run()
    assert world.rig.scheduler.preemptions > 0, "the pool was large enough"
    assert world.tokens.pop(("r1", 0), 0) < 30
    assert world.tokens == {("r0", 0): 30, ("r2", 0): 30, **{("forks", i): 20 for i in range(3)}}


# --- power: with fewer rows it fails -------------------------------------------------------------------

TOO_FEW = {"plain": (PLAIN, 2), "chain": (CHAIN, 1), "tree": (TREES["tree"], 2)}
"""Of plain rows all lengths are known, and of a tree few rows are a path: there one round would do less."""


@pytest.mark.parametrize(("spec", "fewer"), TOO_FEW.values(), ids=TOO_FEW)
def test_fewer_rounds_ahead_are_noticed(spec: SpeculationConfig | None, fewer: int, agree: Agree) -> None:
    agree(always)
    world = World(spec, fewer=fewer, padded=False)
    world.submit("a", 8, 30)
    with pytest.raises(AssertionError, match="beyond the pages"):
        world.run()


# --- any drafts ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topk", [1, 2, 3, 8, 16, 64])
def test_rows_ahead_are_enough_for_any_drafts(topk: int) -> None:
    """Rows after those that the host knows of. With a round of `path` rows at most in flight, one of them
    counted already, the next begins up to path - 1 rows on; it writes its own rows, and the head's drafts
    below it, a whole model below one more."""
    loaded = EngineSpec.of(EngineConfig())
    for steps in range(1, 64 // topk + 2):
        for nodes in {2, steps, steps + 1, 32, 64} - {1}:
            spec = SpeculationConfig(steps, topk, nodes if topk > 1 else steps + 1)
            drafted = replace(loaded, config=replace(loaded.config, speculation=spec))
            path = min(steps + 1, drafted.width)
            verified, proposed = path - 1 + drafted.width, 2 * path + (steps - 1) * topk
            assert max(verified, proposed) <= rounds_ahead(drafted) * drafted.round_rows, spec
