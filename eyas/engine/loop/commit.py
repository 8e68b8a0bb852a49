"""Commits a landed step: the tokens that count, the sequences that end, the reports to drafters and leases.

It is the same for every runner. Work is of three kinds: rows of a prompt, the end of a prompt that is decoded
elsewhere, and what gives tokens here (a round, or the end of a prompt).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from eyas.common.types import EngineTimings, FirstToken
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence
from eyas.engine.batch.step_result import StepResult
from eyas.engine.batch.stopping import finish
from eyas.engine.ipc.messages import PrefillDone
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.loop.drafting import DraftCoordinator
from eyas.engine.loop.runner import StepRunner
from eyas.engine.scheduling.ranked import Schedulers
from eyas.engine.states.shape import SPAN


@dataclass(frozen=True)
class StepCommitter:
    """Commits steps in the order of their landing. `on_end` is told of every sequence that finished,
    `on_broken` of every request with logits that are not finite. `tell` sends what is in the outbox, and
    what drafters are to hear.
    """

    scheduler: Schedulers
    runner: StepRunner
    drafting: DraftCoordinator
    leases: LeaseTable
    outbox: EventOutbox
    eos_ids: tuple[int, ...]
    new_uid: Callable[[], int]
    on_end: Callable[[Sequence], None]
    on_broken: Callable[[Generation], None]
    tell: Callable[[], None]

    def commit(self, landed: SequenceOf[StepResult]) -> None:
        """Applies one step; results of requests cancelled meanwhile are dropped.

        A prompt's rows have their draft KV before its pages are offered or copied, and no page is
        given back before that is done.
        """
        alive = [one for one in landed if self._is_alive(one)]
        if broken := dict.fromkeys(one.work.seq.generation for one in alive if not one.finite):
            for generation in broken:
                self.on_broken(generation)
            alive = [one for one in alive if one.work.seq.generation not in broken]
        ended = [one.work.seq for one in alive if self._take(one)]
        self.drafting.post()
        if not ended and any(one.work.sample and not one.work.round for one in alive):
            self.tell()  # before a prompt is cached, which takes a millisecond if it is long
        for one in alive:
            if not one.work.sample:
                self.scheduler.passed(one.work)
            if one.work.seq.generation.kind is GenerationKind.PREFILL:
                self._offer(one)
                continue
            if one.work.sample and not one.work.round:  # while it decodes, others may begin with this prompt
                self.scheduler.remember(one.work.seq, below=one.work.start + one.rows)
            if one.forks:
                self._fork(one)
        self.drafting.post()
        for seq in ended:
            self.drafting.answered(seq)
            self.on_end(seq)

    def _is_alive(self, one: StepResult) -> bool:
        seq, generation = one.work.seq, one.work.seq.generation
        seq.in_flight -= one.work.sample
        if one.scores is not None:
            generation.scored(*one.scores)
        return seq in generation.sequences

    def _take(self, one: StepResult) -> bool:
        """Takes the accepted rows, and the tokens of a sequence that decodes here; True if they end it."""
        work, seq = one.work, one.work.seq
        if not work.sample or seq.generation.kind is GenerationKind.PREFILL:
            self.drafting.certain(one, propose=False)
            return False
        emitted, why = finish(seq.generation.request.params, self.eos_ids, len(seq.output), one.tokens)
        drafts = one.drafts._replace(accepted=min(one.drafts.accepted, len(emitted)))
        self.outbox.entry(seq, emitted, one.logprobs, why, drafts=drafts)
        seq.output += emitted
        if work.round and seq.occupancy == work.occupancy:
            seq.grow(one.rows - 1, drafted=self.runner.drafts and work.followed)
            # Where the newest round began, which may be in flight, its state stands.
            seq.bound = (seq.kv_len - (seq.in_flight or one.rows)) // SPAN * SPAN
        if why is None or one.forks or not work.round:  # a prompt may serve others when its answer is over
            self.drafting.certain(one, propose=why is None)
        return why is not None

    def _fork(self, one: StepResult) -> None:
        """The prompt is done: its other choices get their first token, their pages, and their drafts."""
        leader, generation = one.work.seq, one.work.seq.generation
        choices, leader.forks = leader.forks, ()
        for choice in choices:
            token, logprob = one.forks[choice]
            emitted, why = finish(generation.request.params, self.eos_ids, 0, [token])
            follower = Sequence(self.new_uid(), generation, choice, leader.prompt, [])
            self.outbox.entry(follower, emitted, [logprob], why)
            if why is not None:
                continue
            follower.output = list(emitted)
            generation.sequences.append(follower)
            copies = self.scheduler.fork(leader, follower)
            if copies is not None:
                for copy in copies:
                    self.runner.copy_page(*copy)
                self.drafting.fork(leader, follower, one.features)

    def _offer(self, one: StepResult) -> None:
        """Rows of a prompt for elsewhere are here; at its end token 0 of every choice goes to both sides."""
        work, seq, generation = one.work, one.work.seq, one.work.seq.generation
        self.leases.filled(generation, work.start + one.rows)
        if not work.sample:
            return
        first = []
        sampled = {seq.choice: (one.tokens[0], one.logprobs[0] if one.logprobs else None), **one.forks}
        for choice in (seq.choice, *seq.forks):
            token, logprob = sampled[choice]
            _, why = finish(generation.request.params, self.eos_ids, 0, [token])
            first.append(FirstToken(choice, token, logprob, why, generation.prompt_once()))
        feature = b"" if one.features is None else one.features[-1].float().cpu().numpy().tobytes()
        self.leases.finished(generation, tuple(first), feature)
        timings = generation.timings_once(time.monotonic()) or EngineTimings()
        self.outbox.add(PrefillDone(generation.id, generation.attempt, tuple(first), timings))
        self.on_end(seq)
