"""Commits a landed step: appends tokens, ends sequences, and notifies drafters and leases.

The code is the same for every runner. A step's work is of three kinds: rows of a prompt; the end of a prompt
that another worker decodes; and work that yields tokens here, a round or the end of a prompt.
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
    """Commits steps in the order in which they land.

    `on_end` is called with every finished sequence, `on_broken` with every request whose logits are not
    finite. `flush` sends the events in the outbox and the messages for drafters.
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
    flush: Callable[[], None]

    def commit(self, landed: SequenceOf[StepResult]) -> None:
        """Applies the results of one step; those of cancelled requests are dropped.

        The draft KV of a prompt's rows is written before the pages are offered or copied, and no page is
        released before that.
        """
        alive = [result for result in landed if self._is_alive(result)]
        if broken := dict.fromkeys(result.work.seq.generation for result in alive if not result.finite):
            for generation in broken:
                self.on_broken(generation)
            alive = [result for result in alive if result.work.seq.generation not in broken]
        ended = [result.work.seq for result in alive if self._commit_tokens(result)]
        self.drafting.post()
        if not ended and any(result.work.sample and not result.work.round for result in alive):
            self.flush()  # before the prompt is cached, which takes a millisecond for a long one
        for result in alive:
            if not result.work.sample:
                self.scheduler.passed(result.work)
            if result.work.seq.generation.kind is GenerationKind.PREFILL:
                self._offer(result)
                continue
            if result.work.sample and not result.work.round:  # a whole prompt, which others may share now
                self.scheduler.remember(result.work.seq, below=result.work.start + result.rows)
            if result.forks:
                self._fork(result)
        self.drafting.post()
        for seq in ended:
            self.drafting.record_answer(seq)
            self.on_end(seq)

    def _is_alive(self, result: StepResult) -> bool:
        seq, generation = result.work.seq, result.work.seq.generation
        seq.in_flight -= result.work.sample
        if result.scores is not None:
            generation.scored(*result.scores)
        return seq in generation.sequences

    def _commit_tokens(self, result: StepResult) -> bool:
        """Commits the accepted rows, and the tokens of a sequence that decodes here; True if it has ended."""
        work, seq = result.work, result.work.seq
        if not work.sample or seq.generation.kind is GenerationKind.PREFILL:
            self.drafting.commit_rows(result, propose=False)
            return False
        emitted, why = finish(seq.generation.request.params, self.eos_ids, len(seq.output), result.tokens)
        drafts = result.drafts._replace(accepted=min(result.drafts.accepted, len(emitted)))
        self.outbox.entry(seq, emitted, result.logprobs, why, drafts=drafts)
        seq.output += emitted
        if work.round and seq.occupancy == work.occupancy:
            seq.grow(result.rows - 1, drafted=self.runner.drafts and work.followed)
            # The state is that of the newest round's first row; that round may be in flight.
            seq.bound = (seq.kv_len - (seq.in_flight or result.rows)) // SPAN * SPAN
        # A prompt may be shared by later requests even when its answer has ended.
        if why is None or result.forks or not work.round:
            self.drafting.commit_rows(result, propose=why is None)
        return why is not None

    def _fork(self, result: StepResult) -> None:
        """Starts the other choices of a finished prompt: their first token, pages and drafts."""
        leader, generation = result.work.seq, result.work.seq.generation
        choices, leader.forks = leader.forks, ()
        for choice in choices:
            token, logprob = result.forks[choice]
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
                self.drafting.fork(leader, follower, result.features)

    def _offer(self, result: StepResult) -> None:
        """Offers computed rows of a prompt that another worker decodes; at the end of the prompt, also sends
        the first token of every choice to the front and to the decode worker.
        """
        work, seq, generation = result.work, result.work.seq, result.work.seq.generation
        self.leases.filled(generation, work.start + result.rows)
        if not work.sample:
            return
        first = []
        logprob = result.logprobs[0] if result.logprobs else None
        sampled = {seq.choice: (result.tokens[0], logprob), **result.forks}
        for choice in (seq.choice, *seq.forks):
            token, logprob = sampled[choice]
            _, why = finish(generation.request.params, self.eos_ids, 0, [token])
            first.append(FirstToken(choice, token, logprob, why, generation.prompt_once()))
        feature = b"" if result.features is None else result.features[-1].float().cpu().numpy().tobytes()
        self.leases.finished(generation, tuple(first), feature)
        timings = generation.timings_once(time.monotonic()) or EngineTimings()
        self.outbox.add(PrefillDone(generation.id, generation.attempt, tuple(first), timings))
        self.on_end(seq)
