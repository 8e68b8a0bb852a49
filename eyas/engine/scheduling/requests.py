"""The table of accepted requests: it admits, refuses, cancels and expires them.

It turns commands into sequences for the scheduler and reports the outcome of every request to the front.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from eyas.common.errors import (
    DeadlineExceeded,
    EyasError,
    GrammarTooSlow,
    InvalidRequest,
    LogitsNotFinite,
    NotFound,
    Overloaded,
    TransferFailed,
    Unavailable,
    WeightsChanging,
)
from eyas.common.logging import serving
from eyas.common.types import FinishCause, FirstToken, GenerationRequest, KvHandle, KvKind, RequestChoice
from eyas.engine.adapters.table import AdapterTable
from eyas.engine.batch.prompt_scores import PromptScores
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence
from eyas.engine.ipc.messages import (
    AttachKv,
    CancelGeneration,
    DrainEngine,
    PagesLost,
    PrefillPrompt,
    RequestAdmitted,
    SubmitGeneration,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.kv.leases import LeaseTable
from eyas.engine.kv.pulls import PullArrival, PullManager
from eyas.engine.scheduling.admission import AdmissionLimits
from eyas.engine.scheduling.crossing import PullCrossing
from eyas.engine.scheduling.draft_kv import DraftKv
from eyas.engine.scheduling.ranked import Schedulers

HOPELESS = (LogitsNotFinite, GrammarTooSlow)
"""Errors with which a prompt would fail on every worker."""
_log = logging.getLogger("eyas.engine")


@dataclass
class RequestTable:
    """Owns every generation from its admission to its last token.

    `draft_kv`: pulls the draft KV of pulled prompts, if this engine has draft KV. `joined` is called with
    every sequence whose prompt was pulled, and its last feature, as it begins; `left` with every sequence
    that is removed. `adapters`: None where no request may have one. `weights`: the digest of the loaded
    weights (`eyas.common.weights`); requests for others are refused. `closed`: the error with which requests
    without a token are refused.
    """

    scheduler: Schedulers
    leases: LeaseTable
    pulls: PullManager
    draft_kv: DraftKv | None
    outbox: EventOutbox
    admission: AdmissionLimits
    joined: Callable[[Sequence, bytes], None]
    left: Callable[[Sequence], None]
    copy_page: Callable[[int, int], None]
    adapters: AdapterTable | None = None
    table: dict[str, Generation] = field(default_factory=dict)
    draining: bool = False
    asleep: str = ""  # why new requests are refused while its memory is released
    lends: bool = True  # True: pages may be lent to pulled prompts
    weights: str = ""
    closed: EyasError | None = None
    spoiled: int = 0  # running total of requests that failed by their logits
    joins: int = 0  # running total of sequences with a pulled prompt that have begun
    _arrivals: dict[Sequence, PullArrival] = field(default_factory=dict)  # for joining sequences
    _unremembered: list[tuple[Sequence, int]] = field(default_factory=list)  # pulled, not cached; rows
    _uids: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        self._crossing = PullCrossing(self.scheduler, self.leases, self.pulls)

    def new_uid(self) -> int:
        """Returns an unused sequence number."""
        return next(self._uids)

    @property
    def waiting(self) -> int:
        """The number of sequences that do not run. A request without sequences counts as one."""
        sequences = sum(len(generation.sequences) or 1 for generation in self.table.values())
        return sequences - len(self.scheduler.running)

    @property
    def queued(self) -> int:
        """The number of requests without a running sequence."""
        return sum(all(seq.slot < 0 for seq in generation.sequences) for generation in self.table.values())

    def oldest_waiting_s(self, now: float) -> float:
        """Seconds since the arrival of the oldest request that has not begun; 0.0 if all have."""
        arrived = next((g.arrived for g in self.table.values() if not g.began), now)
        return now - arrived

    # --- commands ------------------------------------------------------------------------------------

    def submit(self, command: SubmitGeneration) -> None:
        """Admits a request to be decoded on this worker, or rejects it."""
        kind = GenerationKind.ATTACH if command.attach else GenerationKind.LOCAL
        generation = self._accept(command.request, command.attempt, kind)
        if generation is not None and kind is GenerationKind.LOCAL:
            self._enqueue(generation, command.request.choices)

    def prefill(self, command: PrefillPrompt) -> None:
        """Admits a prompt to be computed on this worker and decoded on another, or rejects it."""
        generation = self._accept(command.request, command.attempt, GenerationKind.PREFILL)
        if generation is not None:
            generation.offer_draft = command.offer_draft
            self._enqueue(generation, command.request.choices)

    def attach(self, command: AttachKv) -> None:
        """Pulls the handles. Without handles: computes the prompt locally and continues `first_tokens`."""
        generation = self.table.get(command.id)
        if generation is not None and command.attempt == generation.attached:
            return  # a repeated command: its handles are already pulled or in use
        if generation is None or command.attempt < generation.attempt or generation.sequences:
            for handle in command.handles:
                self.pulls.refuse(handle, command.attempt)
            return
        self._forget_handles(generation)
        generation.attempt = generation.attached = command.attempt
        if command.handles:
            self._pull(generation, command.handles)
        else:
            self._compute_here(generation, command.first_tokens)

    def cancel(self, command: CancelGeneration) -> None:
        """Ends one choice of a request, or the whole request, and frees its pages and slots."""
        generation = self.table.get(command.id)
        if generation is None:
            self.leases.abandon(command.id)
            return
        remaining = tuple(c for c in generation.request.choices if c.index != command.choice)
        if command.choice is None or not remaining:
            self._drop(generation)
            return
        generation.request = msgspec.structs.replace(generation.request, choices=remaining)
        for seq in list(generation.sequences):
            left = [choice for choice in (seq.choice, *seq.forks) if choice != command.choice]
            if not left:
                self.end(seq)
            elif (
                seq.in_flight
                and seq.choice == command.choice
                and generation.kind is not GenerationKind.PREFILL
            ):
                self._restart_choices(seq, left)
            else:  # if the leader is cancelled, another choice of the same prompt leads
                seq.choice, seq.forks = left[0], tuple(left[1:])

    def drain(self, _: DrainEngine) -> None:
        """Stops accepting requests. Prompts for other workers that are not offered yet fail immediately, so
        that another worker computes them. Requests that decode on this worker run to their end.
        """
        self.draining = True
        for generation in list(self.table.values()):
            if generation.kind is GenerationKind.PREFILL and not self.leases.is_offered(generation):
                self.fail(generation, _draining())

    # --- pauses, while no step runs --------------------------------------------------------------------

    def abort(self) -> int:
        """Ends every request that decodes on this worker with its tokens so far; returns their number.
        Prompts for other workers stay: the decode worker ends their requests.
        """
        return self._abort([g for g in self.table.values() if g.kind is not GenerationKind.PREFILL])

    def abort_begun(self) -> int:
        """Aborts the requests that arrived since and have begun on another worker; returns their number."""
        others = [g for g in self.table.values() if g.kind is not GenerationKind.PREFILL]
        return self._abort([g for g in others if g.attached >= 0 or self._has_tokens(g)])

    @staticmethod
    def _has_tokens(generation: Generation) -> bool:
        return generation.request.begun or any(seq.output for seq in generation.sequences)

    def _abort(self, ended: list[Generation]) -> int:
        for generation in ended:
            if generation.scores is not None and generation.scores.next is not None:
                generation.scores = None  # not all of the prompt is scored
            for seq in self._unended(generation):
                self.outbox.entry(seq, [], [], FinishCause.ABORT)
            self._drop(generation)
        return len(ended)

    def retract(self) -> int:
        """Returns requests to the queue, without KV; returns the number of sequences. Computed prompts for
        other workers fail, and all leases end: their requesters submit them again.
        """
        count = self.scheduler.retract()
        self._arrivals.clear()
        self._unremembered.clear()
        error = Unavailable("generation has paused where the prompt was computed")
        for generation in list(self.table.values()):
            if generation.kind is GenerationKind.PREFILL and generation.sequences[0].pages:
                self.fail(generation, error)
                count += 1
        self.leases.withdraw_all(error)
        for _ in range(self.pulls.active):
            self.pulls.preempt()
        return count

    def _unended(self, generation: Generation) -> Iterator[Sequence]:
        """Yields a sequence for each unfinished choice, also for choices that have none yet."""
        choices = {choice.index: choice.output_ids for choice in generation.request.choices}
        if generation.sequences:
            yield from generation.sequences
            choices = {fork: () for seq in generation.sequences for fork in seq.forks}
        for index, ids in choices.items():
            yield Sequence(self.new_uid(), generation, index, generation.request.prompt_ids, list(ids))

    # --- ends ----------------------------------------------------------------------------------------

    def end(self, seq: Sequence) -> None:
        """Frees the slot and pages of an ended sequence. The last one of a request drops the request."""
        self._free(seq)
        if not seq.generation.sequences:
            self._drop(seq.generation)

    def fail(self, generation: Generation, error: EyasError) -> None:
        """Reports the failure of a request and drops it, unless a later attempt has replaced it."""
        if self.table.get(generation.id) is not generation:
            return
        self.outbox.failed(generation, error)
        self._drop(generation, error)

    def end_all(self, error: EyasError) -> int:
        """Fails every request; returns how many there were."""
        for generation in (ending := list(self.table.values())):
            self.fail(generation, error)
        return len(ending)

    def turn_away(self, error: EyasError) -> None:
        """Fails every request that has not begun and has no token, so that another worker can run it."""
        for generation in list(self.table.values()):
            begun = generation.began or generation.kind is GenerationKind.ATTACH
            if not begun and not self._has_tokens(generation):
                self.fail(generation, error)

    def spoil(self, generation: Generation) -> None:
        """Fails a request whose logits are not finite, and removes its rows from the prefix cache."""
        self.spoiled += 1
        for seq in generation.sequences:
            seq.kv_len = seq.draft_len = 0
            self.scheduler.disown(seq)
        self.fail(generation, LogitsNotFinite("the model gave NaN or infinity as logits of this request"))

    def expire(self, now: float) -> None:
        """Fails every request whose deadline is before `now` (monotonic seconds)."""
        for generation in [g for g in self.table.values() if now > g.deadline]:
            self.fail(generation, DeadlineExceeded("the request's deadline passed while it was running"))

    def remember(self) -> None:
        """Caches pulled prompts. Runs after their first launch: it takes a millisecond for long ones."""
        pulled, self._unremembered = self._unremembered, []
        for seq, rows in pulled:
            if seq.pages:  # otherwise it has been preempted or removed
                self.scheduler.remember(seq, below=rows)

    def join(self, now: float) -> None:
        """Gives free slots to the sequences whose KV has arrived."""
        for generation, arrival in self.draft_kv.complete(now) if self.draft_kv is not None else ():
            self._begin_all(generation, arrival)
        self._join()

    def _join(self) -> None:
        while (seq := self.scheduler.join()) is not None:
            self._joined(seq, self._arrivals.pop(seq))
            self.joins += 1

    # --- the destination of pulls (`eyas.engine.kv.pulls.PullDestination`) ----------------------------------

    def first(self, owners: list[Hashable]) -> Hashable:
        """Chooses the request that gets pages first."""
        return self.scheduler.first(_generations(owners))

    def lend(self, owner: Hashable, handle: KvHandle) -> tuple[list[int], int] | None:
        """Lends all pages of the prompt: (pages, number of cached ones, which are not pulled).

        None: too few pages are free.
        """
        assert isinstance(owner, Generation)
        if not self.lends:
            return None
        lent = self.scheduler.lend(owner, handle.tokens)
        if lent is not None:
            owner.began = owner.began or time.monotonic()
            owner.cached_tokens = lent[1] * self.scheduler.limits.page_size
            if self.draft_kv is not None:
                self.draft_kv.lent(owner, *lent)
        return lent

    def refused(self, owner: Hashable, handle: KvHandle, now: float) -> None:
        """Computes a prompt locally if two workers wait for pages of each other."""
        waiting = self._crossing.given_up(owner, handle.tokens, now)
        if waiting is not None:
            self._compute_instead(*waiting)

    def arrived(self, owner: Hashable, arrival: PullArrival) -> None:
        """Begins a request whose KV has arrived, unless its draft KV is still being pulled."""
        assert isinstance(owner, Generation)
        owner.transfer_ms, owner.transfer_bytes = 1e3 * arrival.seconds, arrival.bytes
        owner.transfer_path = arrival.path
        if self.draft_kv is None or not self.draft_kv.keep(owner, arrival):
            self._begin_all(owner, arrival)

    def _begin_all(self, owner: Generation, arrival: PullArrival) -> None:
        if alive := self._unfinished(owner, arrival.first_tokens):
            self._seat(alive, arrival)
        else:
            self.scheduler.pool.drop(arrival.pages)

    def _compute_instead(self, owner: Generation, first_tokens: tuple[FirstToken, ...]) -> None:
        """Computes the prompt locally instead of pulling its pages."""
        with serving(owner.request.request_id, owner.request.traceparent):
            _log.warning("request %s: leases leave no room for its KV: computed here", owner.id)
        self._forget_handles(owner)
        owner.kind = GenerationKind.LOCAL
        for seq in self._unfinished(owner, first_tokens):
            self.scheduler.enqueue(seq)

    def _unfinished(self, owner: Generation, first_tokens: tuple[FirstToken, ...]) -> list[Sequence]:
        """Begins the unfinished choices with their token 0. Empty: the request has ended or is lost."""
        firsts = {first.choice: first for first in first_tokens}
        indices = [choice.index for choice in owner.request.choices]
        if not all(index in firsts and self.admission.is_token(firsts[index].token) for index in indices):
            self.lost(owner, TransferFailed("the prefill worker did not give every choice its first token"))
            return []
        sequences = [self._begin(owner, firsts[index]) for index in indices]
        owner.sequences += [seq for seq in sequences if seq.output]
        if not owner.sequences:
            self._drop(owner)
        return list(owner.sequences)

    def lost(self, owner: Hashable, error: EyasError) -> None:
        """Makes a request whose pages did not arrive wait for another Attach. A request whose prompt would
        fail on every worker fails.
        """
        assert isinstance(owner, Generation)
        if isinstance(error, HOPELESS):
            self.fail(owner, error)
            return
        with serving(owner.request.request_id, owner.request.traceparent):
            _log.warning("request %s: its KV did not arrive: %s", owner.id, error.message)
        self._forget_handles(owner)
        self.outbox.add(PagesLost(owner.id, owner.attempt))

    def pages_free(self, pages: list[int]) -> None:
        """Frees the destination pages of a pull that ended early, once no copy writes them."""
        if self.draft_kv is not None:
            self.draft_kv.taken(pages)
        self.scheduler.pool.drop(pages)

    # --- inside --------------------------------------------------------------------------------------

    def _begin(self, generation: Generation, first: FirstToken) -> Sequence:
        """Creates the sequence of a choice with its token 0; without output if that token finished it."""
        seq = Sequence(self.new_uid(), generation, first.choice, generation.request.prompt_ids, [])
        if first.prompt is not None:  # all requested prompt scores
            generation.scores = PromptScores(seq.prompt, len(seq.prompt), first.prompt)
        most = generation.request.params.max_tokens
        self.outbox.entry(seq, [first.token][:most], [first.logprob], first.finish)
        if first.finish is None:
            seq.output.append(first.token)
        return seq

    def _seat(self, sequences: list[Sequence], arrival: PullArrival) -> None:
        """Gives the pulled pages to the first choice; the other choices share them."""
        leader, *others = sequences
        rows = len(leader.prompt)
        self.scheduler.tables.seat(leader, arrival.pages, rows)
        draft_rows = 0 if self.draft_kv is None else self.draft_kv.rows(leader.generation)
        leader.draft_len = max(draft_rows, leader.generation.cached_tokens)  # cached pages have draft KV
        self._unremembered.append((leader, self.scheduler.complete_rows(leader)))
        self.scheduler.arrived(leader)
        self._arrivals[leader] = arrival
        for seq in others:
            copies = self.scheduler.fork(leader, seq)
            if copies is not None:
                for copy in copies:
                    self.copy_page(*copy)
                self._joined(seq, arrival)
        self._join()

    def _joined(self, seq: Sequence, arrival: PullArrival) -> None:
        self.joined(seq, arrival.last_feature)
        self._return_draft_handle(seq.generation)

    def _pull(self, generation: Generation, handles: tuple[KvHandle, ...]) -> None:
        by_group = {handle.group: handle for handle in handles}
        generation.draft_handle = by_group.get(KvKind.DRAFT)
        target = by_group.get(KvKind.TARGET)
        if target is None or target.tokens != len(generation.request.prompt_ids):
            message = "handles must have one of the target's KV, with one row for each prompt token"
            self.fail(generation, InvalidRequest(message, param="handles"))
            return
        draft = generation.draft_handle
        if self.draft_kv is not None and draft is not None and generation.request.speculative:
            generation.draft_claimed = True
            self.draft_kv.open(generation, draft)
        self.pulls.open(generation, target, generation.attempt, generation.deadline)

    def _compute_here(self, generation: Generation, first_tokens: tuple[FirstToken, ...]) -> None:
        """Computes the prompt locally. A choice whose token 0 was already delivered continues after it."""
        if not all(self.admission.is_token(first.token) for first in first_tokens):
            message = "first_tokens has a token id outside the vocabulary"
            self.fail(generation, InvalidRequest(message, param="first_tokens"))
            return
        generation.kind = GenerationKind.LOCAL
        known = {first.choice: first for first in first_tokens}
        choices = tuple(
            RequestChoice(c.index, (known[c.index].token,)) if c.index in known else c
            for c in generation.request.choices
            if c.index not in known or known[c.index].finish is None
        )
        self._enqueue(generation, choices)
        if not choices:
            self._drop(generation)

    def _forget_handles(self, generation: Generation) -> None:
        """Ends the pulls of all attempts of this generation, and returns unclaimed handles to their owner."""
        self.pulls.cancel(generation)
        if self.draft_kv is not None:
            self.draft_kv.forget(generation)
        self._return_draft_handle(generation)
        generation.draft_handle, generation.draft_claimed = None, False

    def _return_draft_handle(self, generation: Generation) -> None:
        """Returns the draft handle to its owner unless a drafter has claimed it."""
        if generation.draft_handle is not None and not generation.draft_claimed:
            self.pulls.refuse(generation.draft_handle, generation.attempt)
            generation.draft_handle = None

    def _accept(self, request: GenerationRequest, attempt: int, kind: GenerationKind) -> Generation | None:
        older = self.table.get(request.id)
        if older is not None:
            if older.attempt > attempt:
                return None
            self._drop(older)
        try:
            if self.draining:
                raise _draining()
            if self.asleep:
                raise Unavailable(self.asleep)
            self._check_weights(request)
            self.admission.check(request, kind, self.scheduler)
            self._check_adapter(request.adapter)
            if self.queued >= self.admission.max_waiting and not request.begun:
                raise Overloaded("this worker's queue is full")
        except EyasError as error:
            self.outbox.rejected(request.id, attempt, error)
            return None
        now = time.monotonic()
        generation = Generation(request, attempt, kind, arrived=now, deadline=now + request.timeout_s)
        self.table[request.id] = generation
        self.outbox.add(RequestAdmitted(request.id, attempt))
        return generation

    def _check_weights(self, request: GenerationRequest) -> None:
        """Raises WeightsChanging if the request began with other weights, or the weights are changing."""
        if request.weights != self.weights:
            raise WeightsChanging("the worker has other weights than the request began with")
        if self.closed is not None and not request.begun:
            raise self.closed

    def _check_adapter(self, name: str) -> None:
        """Raises NotFound for an adapter that is not loaded here."""
        if name and self.adapters is None:
            raise NotFound(f"no adapter {name} is loaded: none can be here (--max-loras 0)", param="model")
        if self.adapters is not None:
            self.adapters.check(name)

    def has_requests(self, adapter: str) -> bool:
        """True if a request has that adapter."""
        return any(generation.request.adapter == adapter for generation in self.table.values())

    def _enqueue(self, generation: Generation, choices: tuple[RequestChoice, ...]) -> None:
        """Queues the choices. Those without output share one prompt: the first leads, the others fork."""
        prompt = generation.request.prompt_ids
        fresh = [c.index for c in choices if not c.output_ids]
        resumed = [c for c in choices if c.output_ids]
        if fresh:
            generation.scores = None if resumed else PromptScores.of(generation.request)
            leader = Sequence(self.new_uid(), generation, fresh[0], prompt, [], forks=tuple(fresh[1:]))
            generation.sequences.append(leader)
        for choice in resumed:
            seq = Sequence(self.new_uid(), generation, choice.index, prompt, list(choice.output_ids))
            generation.sequences.append(seq)
        for seq in generation.sequences:
            self.scheduler.enqueue(seq)

    def _restart_choices(self, seq: Sequence, choices: list[int]) -> None:
        """Restarts `choices` with a new leader: the cancelled leader has a step in flight."""
        self._free(seq)
        forks = tuple(choices[1:])
        leader = Sequence(self.new_uid(), seq.generation, choices[0], seq.prompt, [], forks=forks)
        seq.generation.sequences.append(leader)
        self.scheduler.enqueue(leader)

    def _drop(self, generation: Generation, error: EyasError | None = None) -> None:
        self._forget_handles(generation)
        self.leases.withdraw(generation, error)
        for seq in list(generation.sequences):
            self._free(seq)
        if self.table.get(generation.id) is generation:  # a later attempt may have replaced it
            del self.table[generation.id]

    def _free(self, seq: Sequence) -> None:
        self.left(seq)
        self._arrivals.pop(seq, None)
        self.scheduler.remove(seq)
        seq.generation.sequences.remove(seq)


def _generations(owners: Iterable[Hashable]) -> list[Generation]:
    return [owner for owner in owners if isinstance(owner, Generation)]


def _draining() -> Unavailable:
    return Unavailable("the worker is draining")
