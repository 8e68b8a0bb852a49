"""Random requests on slots of states that are tokens on paper: every step checks what stands in its slot."""

from __future__ import annotations

import itertools
import random
import time
import zlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any

from engine_rig import PAGE, VOCAB, Rig, request

from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.batch.sequence import Sequence, SequenceWork
from eyas.engine.batch.tree import ROOT, DraftTree
from eyas.engine.ipc.messages import CancelGeneration, StepReply
from eyas.engine.kv.states import StateSlots
from eyas.engine.loop.commit import StepCommitter
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.loop.plain_runner import ComputedStep, verified
from eyas.engine.loop.step_loop import StepLoop
from eyas.engine.sampling.sampler import SampledTokens
from eyas.engine.states.shape import SPAN

WIDTH = 5
RING = 2 * SPAN


def token_after(ids: SequenceOf[int]) -> int:
    """The paper model: what follows depends on all ids before."""
    return zlib.crc32(bytes(ids)) % VOCAB


@dataclass
class PaperSlot:
    """`folded`: the ids below the state's position; `ring`: an id and its row by place."""

    folded: tuple[int, ...] = (-1,)
    ring: dict[int, tuple[int, int]] = field(default_factory=dict)


class PaperStates:
    """Slots of states; as the pool of a `PlainRunner` it has pages without content."""

    page_size = PAGE

    def __init__(self, slots: int) -> None:
        self.slots = [PaperSlot() for _ in range(slots)]
        self.states = self

    def copy(self, source: int, target: int) -> None:
        slot = self.slots[source]
        self.slots[target] = PaperSlot(slot.folded, dict(slot.ring))

    def move(self, *rows: Any) -> None:
        if len(rows) == 2:
            return  # of pages
        triples = list(zip(*(part.tolist() for part in rows), strict=True))
        taken = [self.slots[slot].ring[source % RING] for slot, source, _ in triples]
        for (slot, _, target), (id, _) in zip(triples, taken, strict=True):
            self.slots[slot].ring[target % RING] = (id, target)

    def run(self, work: SequenceWork) -> None:
        """Reads what the work's rows read, writes its rows, and folds."""
        seq = work.seq
        slot, bound, known = self.slots[seq.state], seq.bound, list(seq.all_tokens())
        assert bound % SPAN == 0 and 0 <= bound <= work.start and work.start - bound < 2 * SPAN
        if bound:
            assert slot.folded == tuple(known[:bound]), "the state is another prefix's, or stands elsewhere"
        for row in range(bound, work.start):
            assert slot.ring[row % RING] == (known[row], row), "a row that is not folded is lost"
        certain = work.start + (0 if work.round else len(work.tokens))
        assert work.fold <= certain and certain - work.fold < SPAN
        for row, id in enumerate(work.tokens, work.start):
            if row >= work.fold:
                slot.ring[row % RING] = (id, row)
        slot.folded = tuple(known[: work.fold])


class PaperRunner:
    """A plain runner whose model is on paper."""

    drafts = ahead = False
    draft_wait_s = 0.0

    def __init__(self, pool: PaperStates) -> None:
        self.pool = pool
        self.steps = self.computed = self.accepted = 0

    def copy_page(self, source: int, target: int) -> None:
        """Pages have no content."""

    def copy_state(self, source: int, target: int) -> None:
        self.pool.copy(source, target)

    def wait(self) -> None:
        """Everything has been done."""

    def launch(self, works: SequenceOf[SequenceWork]) -> ComputedStep:
        slots = [work.seq.state for work in works]
        assert len(set(slots)) == len(slots) and min(slots) >= 0, "every sequence has a slot of its own"
        tokens: list[int] = []
        counts = []
        for work in works:
            self.pool.run(work)
            mine = self._sampled(work)
            tokens += mine
            counts.append(len(mine))
            self.computed += len(work.tokens)
        self.steps += 1
        sampled = SampledTokens(tokens, [None] * len(tokens))
        landed = verified(works, counts, sampled, None, self.pool)  # type: ignore[arg-type]
        self.accepted += sum(one.drafts.accepted for one in landed)
        return ComputedStep(works, landed, time.monotonic())

    @staticmethod
    def _sampled(work: SequenceWork) -> list[int]:
        if not work.sample:
            return []
        known = list(work.seq.all_tokens())
        if work.tree is None:
            return [token_after(known)] * (1 + len(work.seq.forks))
        nodes = range(len(work.tree))
        paths = ([work.tree.tokens[i] for i in work.tree.path(node)] for node in nodes)
        return [token_after(known), *(token_after(known + path) for path in paths)]


class StateWorld:
    """`submit` what is to run and `run` it; `answers` by (request, choice)."""

    def __init__(self, seed: int, *, slots: int = 8, pages: int = 400, chunk: int = 48, **rig: Any) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(pages, round_rows=WIDTH, states=slots, **rig)
        limits = self.rig.scheduler.limits
        self.rig.scheduler.tables.limits = replace(limits, chunk_tokens=chunk)
        self.rig.requests.admission = replace(
            self.rig.requests.admission, context_length=4000, max_waiting=100
        )
        self.runner = PaperRunner(PaperStates(slots))
        committer = StepCommitter(
            scheduler=self.rig.scheduler,
            runner=self.runner,  # type: ignore[arg-type]
            drafting=DraftCoordinator(None, 0, 0),
            leases=self.rig.leases,
            outbox=self.rig.outbox,
            eos_ids=(),
            new_uid=self.rig.requests.new_uid,
            on_end=self.rig.requests.end,
            on_broken=self.rig.requests.spoil,
            flush=lambda: None,
        )
        self.loop = StepLoop(self.rig.scheduler, self.runner, committer)  # type: ignore[arg-type]
        self._ids = itertools.count()
        self.requests: dict[str, GenerationRequest] = {}
        self.answers: dict[tuple[str, int], list[int]] = {}

    @property
    def slots(self) -> StateSlots:
        states = self.rig.cache.states
        assert states is not None
        return states

    def submit(self, prompt: tuple[int, ...], *, choices: int = 1, max_tokens: int = 8) -> str:
        id = str(next(self._ids))
        every = [RequestChoice(index) for index in range(choices)]
        self.requests[id] = request(prompt, *every, id=id, max_tokens=max_tokens)
        self.rig.submit(self.requests[id])
        return id

    def cancel(self, id: str) -> None:
        self.rig.requests.cancel(CancelGeneration(id))
        self.requests.pop(id)

    def step(self) -> bool:
        for seq in self.rig.scheduler.running:
            if not seq.in_prompt and self.random.random() < 0.7:
                seq.tree = self._drafts(seq)
        went = self.loop.step()
        for event in self.rig.outbox.take():
            if isinstance(event, StepReply):
                for entry in event.entries:
                    answer = self.answers.setdefault((entry.id, entry.choice), [])
                    assert entry.index == len(answer)
                    answer += entry.tokens
        return went

    def run(self) -> None:
        while self.step():
            pass
        self.check_answers()

    def check_answers(self) -> None:
        for id, made in self.requests.items():
            for choice in made.choices:
                ids = list(made.prompt_ids)
                for _ in range(made.params.max_tokens):
                    ids.append(token_after(ids))
                assert self.answers[id, choice.index] == ids[len(made.prompt_ids) :]

    def check_idle(self) -> None:
        """Nobody owns a page or a slot, and what the cache keeps is what its nodes say."""
        assert not self.rig.pool.used and not self.slots.pool.used
        assert not self.slots.copies
        assert self.slots.pool.free + self.slots.kept == self.slots.pool.num_pages

    def _drafts(self, seq: Sequence) -> DraftTree:
        """A tree with some right nodes, perhaps a chain."""
        known = list(seq.all_tokens())
        tokens: list[int] = []
        parents: list[int] = []
        for node in range(self.random.randint(1, WIDTH - 1)):
            parent = node - 1 if self.random.random() < 0.6 else self.random.randint(ROOT, node - 1)
            path, at = [], parent
            while at != ROOT:
                path.append(tokens[at])
                at = parents[at]
            right = token_after(known + path[::-1])
            taken = [tokens[i] for i in range(node) if parents[i] == parent]
            wrong = self.random.randrange(VOCAB)
            id = right if self.random.random() < 0.7 and right not in taken else wrong
            tokens.append(id)
            parents.append(parent)
        return DraftTree(tokens, parents)
