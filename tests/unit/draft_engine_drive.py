"""A draft engine that is driven message by message."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from engine_rig import PAGE, VOCAB, HandCopier, Rig, hand_pulls, request

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import RequestChoice
from eyas.engine.batch.sequence import Sequence
from eyas.engine.ipc.messages import (
    Command,
    DraftClose,
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftOpen,
    DraftProposal,
    DraftUp,
    Event,
    OpenPull,
    PullDone,
    PullReleased,
    ShutdownEngine,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.pages import PagePool
from eyas.engine.speculation.draft_worker.draft_engine import DraftEngine, DraftParts
from eyas.engine.speculation.draft_worker.draft_runner import ProposedTree, chain_of
from eyas.engine.speculation.drafters.channels import DecodeChannels
from eyas.engine.speculation.drafters.remote import RemoteDrafter
from kv_transfer.copy_threads import CopyBell

WIDTH = 2
PEER = 4
NO_CHANNELS = DecodeChannels(None, Path)  # has no state: everything goes by the front
SPEC = SpeculationConfig(steps=2, topk=1, draft_tokens=3)


class CountingRunner:
    """Proposes the next ids in order; refuses to read a row that was never written."""

    def __init__(self) -> None:
        self.written: set[tuple[int, int]] = set()
        self.least_rows = 0
        self.pool = SimpleNamespace(copy_page=self._copy, close=lambda: None)

    def _copy(self, source: int, target: int) -> None:
        self.written = {(p, s) for p, s in self.written if p != target}
        self.written |= {(target, slot) for page, slot in self.written if page == source}

    alignment = 1

    def draft_rows(self, spec):
        return 0 if spec is None else max(spec.steps * spec.topk, self.least_rows)

    def draft(self, asked, spec):
        assert asked, "a pass over nothing"
        return [self._drafted(one.extension, spec.steps if spec else 0) for one in asked]

    def _drafted(self, new, steps):
        base, end = new.base, new.base + len(new.tokens)
        for row in range(base):
            assert (new.pages[row // PAGE], row % PAGE) in self.written, f"row {row} was never written"
        self.written |= {(new.pages[row // PAGE], row % PAGE) for row in range(base, end)}
        assert len(new.pages) * PAGE >= end + steps
        return ProposedTree(chain_of([(new.tokens[-1] + i) % VOCAB for i in range(steps)]))


class Drive:
    """A draft engine driven loop by loop: `tell` hands over commands and returns what it said."""

    def __init__(self, pages: int = 16) -> None:
        self.batches: list[list[Command]] = []
        self.events: list[Event] = []
        self.pool, self.runner, self.copier, outbox = (
            PagePool(pages),
            CountingRunner(),
            HandCopier(),
            EventOutbox(),
        )
        self.copier.close = lambda deadline: True  # type: ignore[attr-defined]
        ready = SimpleNamespace(context_length=64, vocab_size=VOCAB, draft_width=WIDTH, rates=None)
        pulls = hand_pulls(self.copier, PAGE, outbox)
        config = EngineConfig(page_size=PAGE)
        parts = DraftParts(config, self.runner, self.pool, pulls, self.copier, CopyBell(), outbox, ready)  # type: ignore[arg-type]
        self.engine = DraftEngine(parts, self)
        self.pulls = pulls

    def recv(self, timeout_s: float, bells: SequenceOf[int] = ()) -> list[Command]:
        return self.batches.pop(0) if self.batches else [ShutdownEngine()]

    def send(self, events: SequenceOf[Event]) -> None:
        self.events += events

    def tell(self, *commands: Command) -> list[Event]:
        self.batches, self.events = [list(commands), []], []
        self.engine._stopping = False
        self.engine.run()
        return self.events

    def up(
        self, *messages: DraftOpen | DraftCommit | DraftClose
    ) -> tuple[list[DraftProposal], list[DraftClosed]]:
        def of(kind):
            return tuple(m for m in messages if isinstance(m, kind))

        up = DraftUp(of(DraftOpen), of(DraftCommit), of(DraftClose), peer=PEER)
        return answers_of(self.tell(up))

    def pull_here(self, pull: OpenPull) -> list[Event]:
        """The owner finishes, the copies stop, the owner confirms."""
        events = self.tell(PullDone(pull.pull, ()))
        for job in self.copier.jobs:
            self.runner.written |= {(page, slot) for page in job.dst_pages for slot in range(PAGE)}
        self.copier.finish()
        return events + self.tell() + self.tell(PullReleased(pull.pull, True)) + self.tell()


def answers_of(events: list[Event]) -> tuple[list[DraftProposal], list[DraftClosed]]:
    downs = [event for event in events if isinstance(event, DraftDown)]
    assert all(down.peer == PEER for down in downs)
    return [p for d in downs for p in d.proposals], [c for d in downs for c in d.closed]


def new_sequence(seq: int = 1, base: int = 0, **changes) -> DraftOpen:
    fields = {
        "seq": seq,
        "generation": seq,
        "base_len": base,
        "params": SamplingParams(),
        "choice": 0,
    }
    return DraftOpen(**(fields | changes))


def new_commit(base: int, *tokens: int, seq: int = 1, **changes) -> DraftCommit:
    features = np.zeros((len(tokens), WIDTH), np.float32).tobytes()
    fields = {"seq": seq, "generation": seq, "base_len": base, "tokens": tokens, "features": features}
    return DraftCommit(**(fields | {"steps": 2} | changes))


def opened_sequences(drafter: RemoteDrafter, n: int, id: str = "a") -> list[Sequence]:
    rig = Rig()
    rig.submit(request(5, *(RequestChoice(i) for i in range(n)), id=id))
    generation = rig.requests.table[id]
    uid = 100 * (1 + len(drafter._followed))
    found = [Sequence(uid + i, generation, i, generation.request.prompt_ids, [7]) for i in range(n)]
    for seq in found:
        seq.drafting = drafter.open(seq, 4, None)
    return found
