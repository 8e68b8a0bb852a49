"""Random requests by steps launched ahead on a `PaperDevice`, and what the plain rule gives each of them."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from engine_rig import PAGE, Rig
from paper_device import VOCAB, PaperDevice, Pool, logits_after
from paper_grammars import GRAMMAR, PaperGrammars, allowed_after
from wandering import SPEC, Wandering

from eyas.common.params import SamplingParams
from eyas.common.types import FinishCause, GenerationRequest, PromptTokenLogprobs, RequestChoice, TokenEntry
from eyas.engine.batch.sequence import Sequence, SequenceWork
from eyas.engine.batch.stopping import banned_ids, finish
from eyas.engine.batch.tables import SlotTables, TableSizes
from eyas.engine.device.buckets import DepthBuckets, GraphBuckets
from eyas.engine.device.flight import LaunchedStep
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.device.step import StepLayout, StepShape
from eyas.engine.ipc.messages import CancelGeneration, Event, StepReply
from eyas.engine.loop.commit import StepCommitter
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.loop.step_loop import StepLoop
from eyas.engine.sampling.sampler import SampledRow, sample
from eyas.engine.sampling.scores import score
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.speculation.depth_pacing import DepthPacing

EOS = (23,)
TILE = 3
LONGEST = 40  # rows of a request
HISTORY = (
    {"logprobs": 2},
    {"frequency_penalty": 0.7},
    {"min_tokens": 4, "max_tokens": 9},
    {"bad_words": tuple((id,) for id in range(0, 20, 3))},
)
SCORING = (
    {"prompt_logprobs": 2},
    {"prompt_logprobs": 0, "prompt_logprobs_start": 5, "max_tokens": 0, "min_tokens": 0},
    {"prompt_logprobs": 1, "logprobs": 1, "max_tokens": 0, "min_tokens": 0},
)


@dataclass(frozen=True)
class Setting:
    """`width`: rows of a round; `pages` of the pool, of 4 rows; `ahead`: as the runner takes it."""

    width: int = 3
    pages: int = 48
    max_running: int = 4
    ahead: bool = True
    graphs: bool = True
    adaptive: bool = False
    looks_up: bool = False  # a head may wait

    @property
    def limits(self) -> BatchLimits:
        ahead = 3 if self.width > 1 else 2
        return BatchLimits(
            PAGE,
            self.max_running,
            8,
            self.width,
            rounds_ahead=ahead,
            mixed_prefill_budget=lambda _, many: 8 if many else 4,
        )


class WatchedRunner(DeviceRunner):
    """Launches only what may still run, the longest rounds first."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.shapes: list[StepShape] = []

    rounds = 0
    ahead = 0  # those launched before the one before them had landed
    special_ahead = 0  # those of them that are special
    held_ahead = 0  # those of them whose outputs are held to a grammar

    def launch(self, works: SequenceOf[SequenceWork]) -> LaunchedStep:
        assert works
        for work in works:
            assert work.seq in work.seq.generation.sequences and work.seq.slot >= 0, "it has ended"
            self.rounds += work.round
            self.ahead += work.round and work.seq.in_flight > 0
            self.special_ahead += work.round and work.seq.in_flight > 0 and work.seq.special
            held = work.seq.generation.request.params.grammar is not None
            self.held_ahead += work.round and work.seq.in_flight > 0 and held
        flight = super().launch(works)
        self.shapes.append(flight.shape)
        assert self._depths is None or flight.shape.width == 1 + abs(flight.depth or 0)
        lengths = [work.seq.kv_len for work in flight.parts[0].placed.rounds]
        assert lengths == sorted(lengths, reverse=True), "attention begins with the longest"
        return flight


@dataclass
class Story:
    """One request: what came of each choice, and which of them were given up."""

    request: GenerationRequest
    tokens: dict[int, list[int]]
    finishes: dict[int, FinishCause] = field(default_factory=dict)
    prompt: PromptTokenLogprobs | None = None
    cancelled: set[int] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        return all(c.index in self.finishes or c.index in self.cancelled for c in self.request.choices)


class World:
    """`run` plays until every request has ended. Raises AssertionError for what must not be."""

    def __init__(self, seed: int, setting: Setting) -> None:
        self.random = random.Random(seed)
        rows = LONGEST + 3 * setting.width
        sizes = TableSizes(setting.max_running + 1, rows // PAGE + 1, setting.width, context=LONGEST)
        self.tables = SlotTables(sizes, "cpu")
        self.rig = Rig(setting.pages, lookahead=int(setting.width > 1), max_running=setting.max_running)
        self.rig.scheduler.tables.limits = setting.limits
        pool = Pool(PAGE)
        self.device = PaperDevice(self.tables, pool, seed)
        batches, mixed = ((2, setting.max_running), (2,)) if setting.graphs else ((), ())
        buckets = GraphBuckets(setting.width, TILE, batches, mixed, 8, 8)
        layout = StepLayout(PAGE, self.tables.padding_slot, TILE)
        self.policy, depths, pacing = None, None, None
        if setting.adaptive:
            spec = replace(SPEC, steps=setting.width - 1)
            self.policy = Wandering(spec, setting.max_running, seed, looks_up=setting.looks_up)
            pacing = DepthPacing(self.policy)
            depths = DepthBuckets(pacing, self._by_depth(buckets, self.policy.depths))
        self.grammars = PaperGrammars()
        self.rig.scheduler._holds = self.grammars.holds
        self.runner = WatchedRunner(
            self.device, buckets, [layout], self.grammars, ahead=setting.ahead, depths=depths
        )
        self.loop = StepLoop(self.rig.scheduler, self.runner, self._committer(), pacing)
        self.rig.requests.copy_page = self.runner.copy_page
        self.stories: dict[str, Story] = {}
        self.seen: dict[int, Sequence] = {}

    @staticmethod
    def _by_depth(whole: GraphBuckets, depths: SequenceOf[int]) -> dict[int, GraphBuckets]:
        """As `step_shapes.by_depth` makes them."""
        mixed = {depth: whole.mixed_batches if depth in (0, max(depths)) else () for depth in depths}
        alike = replace(whole, alone=False)
        return {
            depth: replace(alike, width=1 + abs(depth), mixed_batches=mixed[depth], headless=depth < 0)
            for depth in depths
        }

    def _committer(self) -> StepCommitter:
        requests = self.rig.requests
        return StepCommitter(
            scheduler=self.rig.scheduler,
            runner=self.runner,
            drafting=DraftCoordinator(None, 0, 0),
            leases=self.rig.leases,
            outbox=self.rig.outbox,
            eos_ids=EOS,
            new_uid=requests.new_uid,
            on_end=requests.end,
            on_broken=requests.spoil,
            flush=lambda: None,
        )

    def run(self, requests: SequenceOf[GenerationRequest], *, cancels: float = 0.0) -> None:
        coming, idle = list(requests), 0
        while coming or not all(story.ended for story in self.stories.values()):
            while coming and len(self.rig.requests.table) < 8 and self.random.random() < 0.5:
                self.submit(coming.pop(0))
            if self.random.random() < cancels:
                self._cancel_any()
            idle = 0 if self.step() else idle + 1
            assert idle < 20, "nothing runs"
        while self.step():
            pass
        self._judge()

    def submit(self, request: GenerationRequest) -> None:
        self.stories[request.id] = self.story(request)
        self.rig.submit(request)

    @staticmethod
    def story(request: GenerationRequest) -> Story:
        return Story(request, {choice.index: list(choice.output_ids) for choice in request.choices})

    def cancel(self, story: Story, choice: int | None) -> None:
        """Somebody gives up one choice, or (None) all of them."""
        story.cancelled |= {c.index for c in story.request.choices} if choice is None else {choice}
        self.rig.requests.cancel(CancelGeneration(story.request.id, choice))

    def _cancel_any(self) -> None:
        live = [story for story in self.stories.values() if not story.ended]
        if live:
            story = self.random.choice(live)
            self.cancel(story, self.random.choice([None, *(c.index for c in story.request.choices)]))

    def step(self) -> bool:
        """False when there was nothing to do."""
        busy = self.loop.step()
        assert not self.grammars.take_failed()
        self.seen |= {id(seq): seq for seq in self.rig.scheduler.running}
        for event in self.rig.outbox.take():
            assert busy or not isinstance(event, StepReply), "it would nap although there was something to do"
            self._hear(event)
        return busy

    def _hear(self, event: Event) -> None:
        if isinstance(event, StepReply):
            for entry in event.entries:
                self._told(entry)

    def _told(self, entry: TokenEntry) -> None:
        story = self.stories[entry.id]
        have = story.tokens[entry.choice]
        assert entry.index == len(have) and entry.choice not in story.finishes
        assert bool(entry.tokens) == bool(story.request.params.max_tokens)
        assert 0 <= entry.accepted <= entry.offered
        if entry.prompt is not None:
            assert story.prompt is None and not any(story.tokens.values()), "told late, or twice"
            story.prompt = entry.prompt
        have += entry.tokens
        if story.request.params.logprobs is not None:
            assert len(entry.logprobs) == len(entry.tokens)
        if entry.finish is not None:
            story.finishes[entry.choice] = entry.finish

    def _judge(self) -> None:
        for story in self.stories.values():
            for choice in story.request.choices:
                expected, why = plain_rule(story.request, choice)
                found = story.tokens[choice.index]
                if choice.index in story.cancelled and choice.index not in story.finishes:
                    expected, why = expected[: len(found)], None
                assert (found, story.finishes.get(choice.index)) == (expected, why), story.request
            if (
                story.prompt is not None
                or story.finishes
                and not any(c.output_ids for c in story.request.choices)
            ):
                assert story.prompt == plain_scores(story.request), story.request
        assert not self.rig.requests.table and not self.rig.scheduler.running
        assert self.rig.held() == 0, "pages are left"
        assert all(seq.in_flight == 0 for seq in self.seen.values())


def plain_rule(request: GenerationRequest, choice: RequestChoice) -> tuple[list[int], FinishCause | None]:
    """One token after the other, from all ids so far."""
    output, params = list(choice.output_ids), request.params
    while True:
        ids = [*request.prompt_ids, *output]
        banned = banned_ids(params, EOS, len(output))
        allowed = None if params.grammar is None else allowed_after(output)
        row = SampledRow(
            params, choice.index, len(ids), request.prompt_ids, tuple(output), (), banned, allowed
        )
        (token,) = sample(logits_after(ids)[None], [row]).tokens
        kept, why = finish(params, EOS, len(output), [token])
        output += kept
        if why is not None:
            return output, why


def plain_scores(request: GenerationRequest) -> PromptTokenLogprobs | None:
    """Row after row, from all ids before."""
    params, ids = request.params, request.prompt_ids
    if params.prompt_logprobs is None:
        return None
    found = PromptTokenLogprobs(params.prompt_logprobs)
    for row in range(params.prompt_logprobs_start, len(ids) - 1):
        one = score(logits_after(ids[: row + 1])[None], torch.tensor([ids[row + 1]]), found.top)
        found = found.joined(one.packed(), 0)
    return found


def some_requests(
    seed: int, count: int, *, special: float = 0.15, many: float = 0.15, held: float = 0.0
) -> list[GenerationRequest]:
    """`special`: the share whose history counts, or whose log-probabilities; `many`: with several choices;
    `held`: with a grammar.
    """
    pick, calls, holds = random.Random(seed), random.Random(seed), random.Random(seed)
    stem = tuple(pick.choices(range(VOCAB), k=12))  # of prompts that are alike
    made = []
    for i in range(count):
        prompt = (*stem[: pick.choice((0, 0, 8, 12))], *pick.choices(range(VOCAB), k=pick.randint(1, 14)))
        params = _params(pick)
        if pick.random() < special:
            params = msgspec.structs.replace(params, **pick.choice(HISTORY))
        if pick.random() < 0.3:
            params = msgspec.structs.replace(params, **pick.choice(SCORING))
        if holds.random() < held:
            params = msgspec.structs.replace(params, grammar=GRAMMAR, bad_words=())
        begun = tuple(pick.choices(range(4, VOCAB - 1), k=2)) if params.max_tokens > 3 else ()
        begun = begun if params.grammar is None else ()
        choices = (RequestChoice(pick.randint(0, 3), begun if pick.random() < 0.1 else ()),)
        if pick.random() < many:
            choices = tuple(RequestChoice(index) for index in pick.sample(range(5), pick.randint(2, 3)))
        request = GenerationRequest(f"r{i}", prompt, params, choices, speculative=pick.random() < 0.8)
        made.append(msgspec.structs.replace(request, caller=calls.choice("ab"), call=calls.choice("xxy")))
    return made


def _params(pick: random.Random) -> SamplingParams:
    return SamplingParams(
        max_tokens=pick.randint(1, 14),
        temperature=pick.choice((0.0, 0.7, 1.0)),
        top_k=pick.choice((0, 0, 5)),
        top_p=pick.choice((1.0, 1.0, 0.8)),
        seed=pick.getrandbits(64),
        ignore_eos=pick.random() < 0.3,
        stop_token_ids=(3,) if pick.random() < 0.3 else (),
    )
