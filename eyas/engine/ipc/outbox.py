"""The events that an engine sends to its front after a step: collected here, sent as one batch."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf

from eyas.common.errors import EyasError
from eyas.common.types import FinishCause, TokenEntry, TokenLogprob
from eyas.engine.batch.sequence import Generation, Sequence
from eyas.engine.batch.tree import NO_DRAFTS, DraftCounts
from eyas.engine.ipc.messages import Event, RequestFailed, RequestRejected, StepReply, WireFailure


class EventOutbox:
    """Events in order, and the entries of the step. Used by the engine's thread only."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._entries: list[TokenEntry] = []
        self.nodes_verified = 0  # running total over all entries

    def add(self, *events: Event) -> None:
        """Queues events."""
        self._events += events

    def entry(
        self,
        seq: Sequence,
        tokens: SequenceOf[int],
        logprobs: SequenceOf[TokenLogprob | None],
        finish: FinishCause | None,
        *,
        drafts: DraftCounts = NO_DRAFTS,
    ) -> None:
        """Queues tokens that follow `seq.output`, and the counts of their drafts.

        `logprobs`: one for each token, perhaps followed by those of tokens that were not kept.
        """
        generation = seq.generation
        entry = TokenEntry(
            id=generation.id,
            attempt=generation.attempt,
            choice=seq.choice,
            index=len(seq.output),
            tokens=tuple(tokens),
            logprobs=tuple(lp for _, lp in zip(tokens, logprobs, strict=False) if lp is not None),
            finish=finish,
            accepted=drafts.accepted,
            offered=drafts.offered,
            timings=generation.timings_once(time.monotonic()),
            prompt=generation.prompt_once(),
        )
        self._entries.append(entry)
        self.nodes_verified += drafts.nodes

    def rejected(self, generation_id: str, attempt: int, error: EyasError) -> None:
        """Queues the refusal of a request."""
        self.add(RequestRejected(generation_id, attempt, WireFailure.of(error)))

    def failed(self, generation: Generation, error: EyasError) -> None:
        """Queues the failure of an admitted request."""
        self.add(RequestFailed(generation.id, generation.attempt, WireFailure.of(error)))

    def take(self) -> list[Event]:
        """Takes all events out, in order; the step's tokens come last."""
        events, entries = self._events, self._entries
        self._events, self._entries = [], []
        return [*events, StepReply(tuple(entries))] if entries else events
