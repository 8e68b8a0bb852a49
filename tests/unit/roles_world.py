"""A `World` whose prompts also come from elsewhere, or are decoded elsewhere: pulls, offers and their pages.

The test plays the owner of what is pulled and the puller of what is offered. A copy asserts that no step in
flight may write where it writes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

import numpy as np
from engine_rig import PAGE, HandCopier
from overlap_world import EOS, Setting, World, plain_rule, plain_scores

from eyas.common.types import (
    FirstToken,
    GenerationRequest,
    KvHandle,
    KvKind,
    RankPages,
    RequestChoice,
    TokenLogprob,
)
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.stopping import finish
from eyas.engine.device.flight import LaunchedStep
from eyas.engine.ipc.messages import (
    AttachKv,
    Event,
    OpenPull,
    PrefillDone,
    PrefillPrompt,
    PrefillStarted,
    PullDone,
    PullReleased,
    ReleasePull,
)
from kv_transfer.backends.base import CopyJob
from kv_transfer.layout import pages_for
from kv_transfer.peers import PeerRoute


class CarefulCopier(HandCopier):
    """Knows which pages a step in flight may write."""

    def __init__(self, world: RolesWorld) -> None:
        super().__init__()
        self._world = world

    def submit(self, route: PeerRoute, job: CopyJob) -> None:
        both = set(job.dst_pages) & self._world.written
        assert not both, f"a step in flight may write pages {both}"
        super().submit(route, job)


class RolesWorld(World):
    def __init__(self, seed: int, setting: Setting) -> None:
        super().__init__(seed, setting)
        self.rig.copier = self.rig.pulls.copier = CarefulCopier(self)  # type: ignore[assignment]
        self.pulled: dict[int, GenerationRequest] = {}  # by handle
        self.pulls: dict[int, int] = {}  # handles, by pull
        self.offered: dict[str, tuple[int, ...]] = {}  # pages, by request
        self.handed_over: dict[str, tuple[FirstToken, ...]] = {}
        self.prompts: dict[str, GenerationRequest] = {}  # that are decoded elsewhere
        self.written: set[int] = set()
        launch = self.runner.launch

        def watched(works: SequenceOf[SequenceWork]) -> LaunchedStep:
            self._launched = {page for work in works for page in work.seq.pages}
            return launch(works)

        self.runner.launch = watched  # type: ignore[method-assign]

    def submit(self, request: GenerationRequest) -> None:
        """Begun choices stay here; of the others one in three comes from elsewhere, or goes there."""
        way = 0 if any(c.output_ids for c in request.choices) else self.random.randrange(3)
        if way == 0 or not request.params.max_tokens:
            super().submit(request)
        elif way == 1:
            self._pull(request)
        else:
            self.prompts[request.id] = request
            self.rig.requests.prefill(PrefillPrompt(request, 1, offer_draft=False))

    def _pull(self, request: GenerationRequest) -> None:
        rows, number = len(request.prompt_ids), len(self.pulled) + 1
        self.pulled[number] = request
        shard = RankPages(0, tuple(range(pages_for(rows, PAGE))))
        self.stories[request.id] = self.story(request)
        self.rig.submit(request, attach=True)
        handle = KvHandle("there", 7, 0, number, KvKind.TARGET, "m", rows, (shard,))
        self.rig.requests.attach(AttachKv(request.id, 1, (handle,)))

    def step(self) -> bool:
        busy = super().step()
        self.rig.requests.remember()
        self.written = self._launched if self.loop._flight is not None else set()
        now = time.monotonic()
        self.rig.pulls.poll(now)
        self.rig.requests.join(now)
        self.rig.leases.poll(now)
        self._copy()
        while events := self.rig.outbox.take():
            for event in events:
                self._hear(event)
        return busy

    def _copy(self) -> None:
        """Some copies stop: then their rows are there."""
        if self.random.random() < 0.5:
            return
        for job in self.rig.copier.jobs:
            request = self.pulled[self.pulls[job.pull]]
            for source, target in zip(job.source.pages, job.dst_pages, strict=True):
                for row in range(source * PAGE, min((source + 1) * PAGE, len(request.prompt_ids))):
                    self.device.pool.rows[target * PAGE + row % PAGE] = row, request.prompt_ids[row]
        self.rig.copier.finish()

    def _hear(self, event: Event) -> None:
        super()._hear(event)
        match event:
            case OpenPull(pull=pull, handle=handle):
                self.pulls[pull] = handle.id
                self.rig.pulls.receive(PullDone(pull, self._first(self.pulled[handle.id])))
            case ReleasePull(pull=pull):
                self.rig.pulls.receive(PullReleased(pull, True))
            case PrefillStarted(id=id, handles=(handle,)):
                self.offered[id] = handle.shards[0].pages
            case PrefillDone(id=id, choices=choices):
                self.handed_over[id] = choices
                self._check_rows(self.prompts[id])
                self.rig.leases.abandon(id)

    def _first(self, request: GenerationRequest) -> tuple[FirstToken, ...]:
        """What the prefill worker would say."""
        prompt, first = plain_scores(request), []
        for choice in request.choices:
            (token, *_), _ = plain_rule(request, RequestChoice(choice.index))
            _, why = finish(request.params, EOS, 0, [token])
            logprob = None if request.params.logprobs is None else TokenLogprob(0.0)
            first.append(FirstToken(choice.index, token, logprob, why, prompt))
            prompt = None
        return tuple(first)

    def _check_rows(self, request: GenerationRequest) -> None:
        for position, token in enumerate(request.prompt_ids):
            page = self.offered[request.id][position // PAGE]
            assert self.device.pool.rows[page * PAGE + position % PAGE] == (position, token)

    def _judge(self) -> None:
        super()._judge()
        for id, request in self.prompts.items():
            found = self.handed_over.get(id)
            assert found is not None, f"{id} was not handed over"
            expected = [(first.choice, first.token, first.finish) for first in self._first(request)]
            assert [(first.choice, first.token, first.finish) for first in found] == expected
            assert np.all([first.prompt is None for first in found[1:]])
