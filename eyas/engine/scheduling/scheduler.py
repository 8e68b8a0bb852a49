"""The scheduler: which sequences run in the next step, and which pages they own. Torch-free, deterministic.

It composes every step as a list of `SequenceWork`: decode rows and verify trees of the running sequences
first, then prompt chunks under a token budget. Pages come from one pool, which the prefix cache shares. When
pages run out, the scheduler preempts the last admitted sequence of the call with the largest share: the
sequence goes back to the queue and is recomputed later. A call with more than its share also loses a sequence
while another call waits (see `fairness`). The sequence that has run longest is never preempted, so at least
one always finishes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceOf

from eyas.common.prompt_room import LONG_PROMPT, PromptRoom, WaitingPrompt, prompt_room, tokens_ahead
from eyas.engine.batch.page_table import PageTable
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.ipc.messages import StateCache
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.kv.states import PagesAndStates
from eyas.engine.scheduling.adapter_turns import AdapterTurns
from eyas.engine.scheduling.elsewhere import IncomingPrompts
from eyas.engine.scheduling.fairness import CallShares, WaitingQueue
from eyas.engine.scheduling.host_loads import HostLoads, LoadDecision
from eyas.engine.scheduling.limits import BatchLimits
from eyas.engine.scheduling.page_tables import PageTables
from eyas.engine.scheduling.turns import DecodeTurns
from kv_transfer.layout import pages_for

MOST_PASSED = 4
"""The maximum number of prompts that later ones may overtake while they wait for a shared prefix."""


class Scheduler:
    """Owns slots, queue and pages of all sequences. One thread uses it, and empties `preempted` per step."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        limits: BatchLimits,
        incoming: IncomingPrompts,
        host: HostLoads | None = None,
        holds: Callable[[Sequence], bool] = lambda seq: False,
    ) -> None:
        """`holds`: returns True for a sequence whose next token must wait (for its grammar, say)."""
        self.host = host
        self.adapters: AdapterTurns | None = None  # where requests may have one
        self._holds = holds
        self.pool = pool
        self._incoming = incoming
        self.cache = cache
        self.tables = PageTables(pool, cache, limits)
        self.waiting = WaitingQueue(limits.yields)
        self.running: list[Sequence] = []  # in order of admission
        self.joining: list[Sequence] = []  # their KV has arrived; they wait only for a slot
        self.preempted: list[Sequence] = []  # since the caller last emptied it
        self.prompt_tokens = 0  # running total over all allocations
        self.cached_tokens = 0  # the part of `prompt_tokens` from the prefix cache
        self.preemptions = 0
        self._slots = list(range(limits.max_running - 1, -1, -1))  # the free slots
        self._occupancies = itertools.count()
        self._running_shares = CallShares()
        self._turns = None if limits.room is None else DecodeTurns(limits.room)
        self._starved = False  # a running sequence waits for reclaimed pages, which no other may take

    @property
    def limits(self) -> BatchLimits:
        """The size limits of a step and of a sequence."""
        return self.tables.limits

    @property
    def slots(self) -> int:
        """The number of sequences that a step may have."""
        return self.limits.max_running

    @property
    def probed(self) -> tuple[PagePool, PrefixCache]:
        """The pool and cache whose pages a link probe uses."""
        return self.pool, self.cache

    @property
    def crowded(self) -> bool:
        """True if so many sequences decode that drafts would only lengthen the steps."""
        return self._turns is not None and self._turns.crowded

    # --- adding and removing sequences ------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        """Adds a sequence to the waiting queue."""
        seq.ahead = tokens_ahead(len(seq), self._missing())
        self.waiting.add(seq)

    def pass_on(self) -> Sequence | None:
        """Removes the next waiting sequence, for another scheduler to run. None: none can be moved."""
        seq = self.waiting.first(self.shares()) if self.waiting else None
        if seq is None or seq.generation.has_started or len(seq.generation.sequences) > 1:
            return None
        self.waiting.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Frees the slot and pages of an ended or cancelled sequence. Its computed pages stay cached."""
        if seq in self.running:
            self._vacate(seq)
        elif seq in self.joining:
            self.joining.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        elif self.host is not None:
            self.host.forget(seq)
        self._release(seq)

    def arrived(self, seq: Sequence) -> None:
        """Adds a sequence whose KV has arrived in its pages to those that wait for a slot."""
        if self.adapters is None or self.adapters.enter(seq):
            self.joining.append(seq)

    def seat_adapters(self) -> bool:
        """Fills adapter slots with the adapters that sequences wait for; True if a sequence can continue."""
        if self.adapters is None:
            return False
        seated = self.adapters.poll()
        for seq in seated:
            if seq.pages:
                self.joining.append(seq)
            else:
                self.waiting.add(seq)
        return bool(seated)

    def join(self) -> Sequence | None:
        """Gives a slot to one of the `joining` sequences and returns it. None: no sequence or no slot."""
        if not self.joining:
            return None
        shares = self.shares()
        seq = min(self.joining, key=lambda seq: shares.turn(seq.generation))
        if not self._free_slots and not self._take_from_richer(seq.generation, shares, gain=0):
            return None
        self.joining.remove(seq)
        self._occupy(seq)
        self._grow(seq)  # for the drafts of its first round, which has none if no pages are free
        return seq

    def fork(self, leader: Sequence, follower: Sequence) -> list[tuple[int, int]] | None:
        """Gives `follower` the leader's prompt rows: whole pages shared, the page of the last row copied.

        Returns (source page, target page) in each group of layers, which the caller copies before the next
        step. None: no page or slot is free, or the leader was preempted. Then the follower is queued, and
        computes the rows that are not cached.
        """
        rows = len(leader.prompt)
        copies = self.tables.fork(leader, follower, rows) if self._free_slots else None
        if copies is None:
            self.remember(leader)
            self.waiting.add(follower)
            return None
        follower.kv_len = rows
        follower.draft_len = min(leader.draft_len, rows - 1)
        self._occupy(follower)
        self.pool.copied()
        return copies

    # --- pages ---------------------------------------------------------------------------------------

    def lend(self, generation: Generation, rows: int) -> tuple[list[int], int] | None:
        """Allocates pages for a pulled prompt of `rows` rows: (pages, number of cached ones among them).

        None: too few pages are free, or a sequence in the queue (a preempted one, say) comes first.
        """
        shares = self.shares()
        if self.waiting:
            first = self.waiting.first(shares)
            earlier = shares.turn(first.generation) < shares.turn(generation)
            if earlier and not self._waits_for_prefix(first):
                return None
        lent = self._allocate(generation, generation.request.prompt_ids, rows, shares, copied=True)
        if lent is None:
            return None
        tables, state, cached = lent
        pages = [page for table in tables for page in table.owned]
        return pages + self.tables.pages_of_state(state), cached

    def beside(self, leased: Collection[int]) -> int:
        """The number of pages that a request can get beside the `leased` ones; 0 without a state slot."""
        if isinstance(self.pool, PagesAndStates) and not self.pool.slots_beside(leased):
            return 0
        return self.pool.num_pages - sum(page < self.pool.num_pages for page in leased)

    @property
    def unowned(self) -> int:
        """The number of pages that no sequence uses; they may be cached."""
        return self.pool.num_pages - self.pool.used

    def first(self, generations: SequenceOf[Generation]) -> Generation:
        """The generation that is scheduled next."""
        return min(generations, key=self.shares().turn)

    def _allocate(
        self,
        claimant: Generation,
        tokens: SequenceOf[int],
        rows: int,
        shares: CallShares,
        computed: int | None = None,
        *,
        copied: bool = False,
    ) -> tuple[list[PageTable], int, int] | None:
        """Allocates tables for `rows` rows of `tokens`: (tables, state slot, number of cached pages in the
        first table). None: too few pages are free.

        `computed`: this row and the rows after it are computed, so their pages never come from the cache.
        `copied`: the rows are copied, not computed; pages that a step in flight may still write are not used.
        """
        while not self._starved:
            known = tokens if computed is None else tokens[: computed + 1]
            cached = self.cache.matches(known, claimant.request.salt, windows=not copied)
            count = len(cached[0])
            counts = self.tables.counts(rows, count, claimant.kind, pulled=copied)
            fresh = sum(map(sum, counts))
            room = self._make_room(fresh)
            state: int | None = None
            if room and (not copied or fresh <= self.pool.settled):
                state = self.tables.begin_state(cached, pulled=copied)
            if state is not None:
                self.prompt_tokens += len(tokens)
                self.cached_tokens += count * self.limits.page_size
                return self.tables.made(cached, counts, rows, pulled=copied), state, count
            self.tables.drop_columns(cached)
            if room or not self._take_from_richer(claimant, shares, gain=1):
                break
        return None

    def remember(self, seq: Sequence, below: int | None = None) -> None:
        """Caches the complete pages of the sequence, up to row `below`, and its state."""
        rows = self.complete_rows(seq)
        self.tables.remember(seq, rows if below is None else min(rows, below))
        if self.tables.states is not None:
            self.tables.states.snapshot(seq)

    def passed(self, work: SequenceWork) -> None:
        """Records a chunk that does not end its prompt: its state, if the model has one, may be cached."""
        states, seq = self.tables.states, work.seq
        if states is not None and states.passed(work):
            self.tables.remember(seq, self.complete_rows(seq))
            states.snapshot(seq, spaced=seq.kv_len != seq.branch)

    @property
    def states(self) -> StateCache:
        """The number of state slots, and running totals; zeros for a model without states."""
        return StateCache() if self.tables.states is None else self.tables.states.slots.counts

    def state_copies(self) -> list[tuple[int, int]]:
        """Takes the pending state copies (source slot, target slot), to run before the next step."""
        states = self.tables.states
        if states is None:
            return []
        copies, states.slots.copies = states.slots.copies, []
        return copies

    def disown(self, seq: Sequence) -> None:
        """Removes the rows of the sequence, and every prompt that continues them, from the cache."""
        if self.tables.caches_early:  # otherwise no prompt is cached before its end
            self.cache.cut(seq.prompt, seq.salt)

    def flush(self) -> int | None:
        """Empties the prefix cache, also on the host; returns the number of pages removed.

        None: a page is in use or being loaded from the host, and nothing was removed.
        """
        if self.pool.used or (self.host is not None and self.host.loading):
            return None
        from_host = 0 if self.host is None else self.host.tier.clear()
        return self.cache.evict(self.cache.cached_pages) + from_host

    def retract(self) -> int:
        """Returns all decoding sequences to the queue, without KV, while no step runs; their number."""
        retracted = self._movable
        for seq in retracted:
            self._preempt(seq)
        joining, self.joining = self.joining, []
        joining += () if self.adapters is None else self.adapters.copied
        for seq in joining:
            self._release(seq)
            self.waiting.add(seq)
        return len(retracted) + len(joining)

    def complete_rows(self, seq: Sequence) -> int:
        """The number of rows that may be cached: their KV, and draft KV in the same pages, is complete."""
        return self.tables.complete_rows(seq)

    # --- one step ------------------------------------------------------------------------------------

    def schedule(self) -> list[SequenceWork]:
        """Composes the next step. Empty when nothing can run."""
        self._starved, preempted = False, len(self.preempted)
        # a reservation may preempt a later sequence
        works = [self._decode(seq) for seq in self._choose_decoding() if seq.pages and self._reserve(seq)]
        works += self._prompts(prompt_room(self.limits, len(works), self._missing()))
        if self.adapters is not None and (adapter := self.adapters.overdue):
            self._end_turn(self.adapters, adapter)
        if self.preempted[preempted:]:  # some were preempted after their work was composed
            works = [work for work in works if work.occupancy == work.seq.occupancy]
        return works

    def _missing(self) -> Iterator[WaitingPrompt]:
        """Yields the prompts that are not fully computed, not counting the last token of each."""
        for seq in itertools.chain(self.running, self.waiting):
            if seq.missing > 1:
                yield WaitingPrompt(_uncached(seq), seq.missing - 1, seq.ahead)

    def _prompts(self, room: PromptRoom) -> list[SequenceWork]:
        """Composes the chunks of running prompts, then admits waiting ones, while `room` has rows.

        On devices with a `StepRoom`, `room` counts rows without context, and waiting prompts are admitted
        before the running prompt that yields to them.
        """
        works: list[SequenceWork] = []
        for seq, occupancy in [(seq, seq.occupancy) for seq in self.running if seq.in_prompt]:
            if self._turns is not None:
                works += (admitted := self._admissions(room, before=seq))
                for work in admitted:
                    room = self._room_after(room, work)
            if seq.occupancy == occupancy and (chunk := self._chunk(seq, room)):
                works.append(chunk)
                room = self._room_after(room, chunk)
        return works + self._admissions(room)

    def _admissions(self, room: PromptRoom, before: Sequence | None = None) -> list[SequenceWork]:
        """Admits waiting sequences and returns their first chunks, while `room` has rows.

        `before`: only sequences to which this running one yields are admitted.
        """
        works, passed = list[SequenceWork](), list[Sequence]()
        if not self.waiting or not room.rows:
            return works
        shares = self.shares()
        while room.rows and self.waiting and len(passed) < MOST_PASSED:
            seq = self.waiting.first(shares)
            if before is not None and not self.waiting.yields(before, seq):
                break
            if self._waits_for_prefix(seq):
                self.waiting.remove(seq)
                passed.append(seq)
                continue
            if self.adapters is not None and not self.adapters.enter(seq):
                self.waiting.remove(seq)
                continue
            if not self._admit(seq, shares):
                break
            self.waiting.remove(seq)
            if not seq.pages:
                continue  # its first pages are being loaded from the host
            self._occupy(seq)
            shares.add(seq.generation, 1 + seq.keeps)
            if chunk := self._chunk(seq, room):
                works.append(chunk)
                room = self._room_after(room, chunk)
        for seq in passed:
            self.waiting.add(seq)
        return works

    def _waits_for_prefix(self, seq: Sequence) -> bool:
        """True if a running prompt computes the same prefix, whose pages this one can then reuse. A scored
        prompt cannot reuse them, so it never waits.
        """
        return seq.generation.scores is None and any(
            _is_being_computed(other) and _share_prefix(other, seq) for other in self.running
        )

    def _choose_decoding(self) -> SequenceOf[Sequence]:
        """Chooses the sequences that decode in this step."""
        decoding = [seq for seq in self.running if self._may_decode(seq)]
        return decoding if self._turns is None else self._turns.choose(decoding, self.running)

    def _may_decode(self, seq: Sequence) -> bool:
        if seq.in_prompt or not seq.pages or seq.generation.kind is GenerationKind.PREFILL:
            return False
        if seq.in_flight and len(seq.output) + seq.in_flight >= seq.generation.request.params.max_tokens:
            return False  # the steps in flight reach its last token
        return not self._holds(seq)

    def _decode(self, seq: Sequence) -> SequenceWork:
        root = seq.output[-1] if seq.output else seq.prompt[-1]
        tokens = [root, *(seq.tree.tokens if seq.tree is not None else ())]
        return SequenceWork(seq, seq.kv_len, tokens, seq.tree, sample=True, round=True)

    def _chunk(self, seq: Sequence, room: PromptRoom) -> SequenceWork | None:
        """The next prompt rows of the sequence. The last row yields a token; it waits while `holds` says so.

        None: no row can run in this step.
        """
        rows = room.of(_uncached(seq))
        if self._turns is not None:
            rows = self._turns.room.rows_within(rows, seq.kv_len)
        stop = min(seq.kv_len + rows, len(seq))
        if self.tables.states is not None:
            stop = self.tables.states.stop(seq, stop)
        if self.tables.windowed and stop > seq.kv_len:
            stop = self.tables.cover(seq, stop) if self._reserve(seq) else 0
        stop -= stop == len(seq) and self._holds(seq)
        if stop <= seq.kv_len:
            return None
        return SequenceWork(seq, seq.kv_len, seq.tokens(seq.kv_len, stop), None, sample=stop == len(seq))

    def _room_after(self, room: PromptRoom, chunk: SequenceWork) -> PromptRoom:
        """The room left after a chunk. A chunk costs its rows, or its time in rows without context."""
        rows = len(chunk.tokens)
        taken = rows if self._turns is None else round(self._turns.room.cost(rows, chunk.start))
        return room.behind(_uncached(chunk.seq), taken)

    def _admit(self, seq: Sequence, shares: CallShares) -> bool:
        """Gives a waiting sequence pages for all its rows, or starts a load from the host. False: it waits.

        Free slots are reserved for its forks, unless they decode on another worker. Forks without a reserved
        slot wait, and compute the part of their prompt that is not cached.
        """
        generation = seq.generation
        if seq.in_flight or self._starved:
            return False
        turn = shares.turn(generation)
        if any(shares.turn(pull) < turn for pull in self._incoming.waiting()):
            return False
        elsewhere = generation.kind is GenerationKind.PREFILL
        forks = 0 if elsewhere else len(seq.forks)
        while (free := self._free_slots) <= forks:
            if not self._take_from_richer(generation, shares, gain=free + 1):
                break
        if not free:
            return False
        rows = len(seq) + (0 if elsewhere else self.limits.rows_ahead)
        computed = None if generation.scores is None else generation.scores.next
        if self.host is not None:
            tokens = seq.tokens(0, len(seq) if computed is None else computed + 1)
            answer = self.host.ask(seq, tokens, pages_for(rows, self.limits.page_size))
            if answer is not LoadDecision.COMPUTE:
                return answer is LoadDecision.LOADS
        allocated = self._allocate(generation, seq.all_tokens(), rows, shares, computed)
        if allocated is None:
            return False
        seq.reserved = min(free - 1, forks)
        seq.tables, state, cached = allocated
        if self.tables.states is not None:
            self.tables.states.seat(seq, state, cached * self.limits.page_size)
        seq.kv_len = seq.draft_len = cached * self.limits.page_size
        seq.generation.cached_tokens = max(seq.generation.cached_tokens, seq.kv_len)
        return True

    def _reserve(self, seq: Sequence) -> bool:
        """Takes pages for all rows that the next rounds may write; may preempt sequences, also this one."""
        while not self._grow(seq):
            if self._incoming.preempt():
                self._starved = not self._grow(seq)
                return not self._starved  # while starved it waits for the copies to stop, which frees pages
            movable = self._movable
            if not movable:
                return False  # prompts for other workers are never preempted
            victim = self._last_of_the_richest(movable[1:] or movable, self.shares())
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence) -> bool:
        """Takes these pages if enough are free."""
        return self.tables.grow(seq)

    # --- shares ----------------------------------------------------------------------------------------

    def shares(self) -> CallShares:
        """Counts the sequences of each call: running, joining, and being pulled."""
        joining = (seq.generation for seq in self.joining)
        shares = self._running_shares.plus(itertools.chain(joining, self._incoming.coming()))
        for seq in self.running:
            if seq.forks:
                shares.add(seq.generation, seq.keeps)
        return shares

    def _take_from_richer(self, claimant: Generation, shares: CallShares, gain: int) -> bool:
        """Takes a slot from a call that holds more than the claimant would. False: no call does.

        Reserved slots are taken first; then a running sequence is preempted.
        """
        owing = shares.owing(claimant, gain)
        if not owing:
            return False
        keeping = [seq for seq in self.running if seq.keeps and seq.generation.share in owing]
        victims = keeping or [seq for seq in self._movable[1:] if seq.generation.share in owing]
        if not victims:
            return False
        victim = self._last_of_the_richest(victims, shares)
        if keeping:
            victim.reserved = victim.keeps - 1
        else:
            self._preempt(victim)
        shares.add(victim.generation, -1)
        return True

    @property
    def _movable(self) -> list[Sequence]:
        """Running sequences without leased pages, in order of admission."""
        return [seq for seq in self.running if seq.generation.kind is not GenerationKind.PREFILL]

    @staticmethod
    def _last_of_the_richest(sequences: SequenceOf[Sequence], shares: CallShares) -> Sequence:
        return max(sequences, key=lambda seq: (shares.counts(seq.generation.share), seq.occupancy))

    # --- slots ---------------------------------------------------------------------------------------

    @property
    def _free_slots(self) -> int:
        """The number of slots that are neither used nor reserved for forks of a running sequence."""
        free = self.limits.max_running - len(self.running)
        return free and free - sum(seq.keeps for seq in self.running if seq.forks)

    def _occupy(self, seq: Sequence) -> None:
        """Adds the sequence to the running batch, in a free slot."""
        self.running.append(seq)
        self._running_shares.add(seq.generation)
        seq.slot, seq.occupancy = self._slots.pop(), next(self._occupancies)
        if self.adapters is not None:
            self.adapters.let_in(seq)

    def _vacate(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self._running_shares.add(seq.generation, -1)
        self._slots.append(seq.slot)
        seq.slot = seq.occupancy = -1

    def _preempt(self, seq: Sequence) -> None:
        self._vacate(seq)
        self._release(seq)
        self.waiting.add(seq)
        self.preempted.append(seq)
        self.preemptions += 1

    def _end_turn(self, turns: AdapterTurns, adapter: str) -> None:
        """Takes the slot from an adapter: preempts its sequences, and its queued ones leave the slot."""
        for seq in self._movable:
            if seq.adapter == adapter and turns.has_had_its_turn(seq):
                self._preempt(seq)
        for seq in self.waiting:
            if seq.adapter == adapter:
                turns.leave(seq)

    def _make_room(self, count: int) -> bool:
        """Frees pages for a new sequence, which can wait for pages that are saved to the host first."""
        return self.tables.make_room(count, spare=True)

    def _release(self, seq: Sequence) -> None:
        if self.adapters is not None:
            self.adapters.leave(seq)
        self.tables.remember(seq, self.complete_rows(seq))
        self.tables.give_back(seq)
        seq.kv_len, seq.draft_len, seq.tree = 0, 0, None
        seq.fetched = seq.sought = False


def _uncached(seq: Sequence) -> int:
    """The number of tokens that did not come from the prefix cache at admission."""
    return len(seq) - seq.generation.cached_tokens


def _is_being_computed(seq: Sequence) -> bool:
    """True until the prompt can be cached, which is when the step of its first token has ended."""
    return seq.missing > 1 or (seq.in_flight > 0 and not seq.output)


def _share_prefix(computed: Sequence, seq: Sequence) -> bool:
    """True if the first `LONG_PROMPT` uncached tokens of `computed` equal those of `seq`.

    The tokens before them are not compared: a wrong answer only changes how long `seq` waits.
    """
    first = computed.generation.cached_tokens
    last, ours, theirs = first + LONG_PROMPT - 1, seq.prompt, computed.prompt
    if computed.salt != seq.salt or last >= min(len(ours), len(theirs)) or ours[last] != theirs[last]:
        return False  # cheap, and rejects most pairs
    return ours[first:last] == theirs[first:last]
