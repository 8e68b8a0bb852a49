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
"""Prompts at the head of the queue that may wait for another one's pages while those behind them pass."""


class Scheduler:
    """Slots, queue and pages of all sequences. One thread uses it and empties `preempted` after each step."""

    def __init__(
        self,
        pool: PagePool,
        cache: PrefixCache,
        limits: BatchLimits,
        incoming: IncomingPrompts,
        host: HostLoads | None = None,
        holds: Callable[[Sequence], bool] = lambda seq: False,
    ) -> None:
        """`holds`: must a sequence's next token wait for something that the engine lacks?"""
        self.host = host
        self.adapters: AdapterTurns | None = None  # where requests may have one
        self._holds = holds
        self.pool = pool
        self._incoming = incoming
        self.cache = cache
        self.tables = PageTables(pool, cache, limits)
        self.waiting = WaitingQueue(limits.yields)
        self.running: list[Sequence] = []  # in order of admission
        self.joining: list[Sequence] = []  # their KV is here: they wait for nothing but a slot
        self.preempted: list[Sequence] = []  # since the caller last emptied it
        self.prompt_tokens = 0  # running total over all allocations
        self.cached_tokens = 0  # how many of `prompt_tokens` came from the prefix cache
        self.preemptions = 0
        self._slots = list(range(limits.max_running - 1, -1, -1))  # the free slots
        self._occupancies = itertools.count()
        self._running_shares = CallShares()
        self._turns = None if limits.room is None else DecodeTurns(limits.room)
        self._starved = False  # a running sequence waits for reclaimed pages: no other may take them

    @property
    def limits(self) -> BatchLimits:
        """The bounds of a step and of what a sequence may take."""
        return self.tables.limits

    @property
    def slots(self) -> int:
        """The number of sequences that a step may have."""
        return self.limits.max_running

    @property
    def probed(self) -> tuple[PagePool, PrefixCache]:
        """The pool and cache whose pages a link is tried with."""
        return self.pool, self.cache

    @property
    def crowded(self) -> bool:
        """True if drafts only make steps longer, since many sequences decode."""
        return self._turns is not None and self._turns.crowded

    # --- sequences come and go -----------------------------------------------------------------------

    def enqueue(self, seq: Sequence) -> None:
        """Puts a sequence into the queue, to be admitted when its turn comes."""
        seq.ahead = tokens_ahead(len(seq), self._missing())
        self.waiting.add(seq)

    def pass_on(self) -> Sequence | None:
        """Takes the next sequence out of the queue, for another scheduler. None: what waits belongs here."""
        seq = self.waiting.first(self.shares()) if self.waiting else None
        if seq is None or seq.generation.has_started or len(seq.generation.sequences) > 1:
            return None
        self.waiting.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Frees all that an ended or cancelled sequence holds. Its computed pages stay in the cache."""
        if seq in self.running:
            self._vacate(seq)
        elif seq in self.joining:
            self.joining.remove(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        elif self.host is not None:
            self.host.forget(seq)
        self._give_back(seq)

    def arrived(self, seq: Sequence) -> None:
        """The sequence's KV has come, in pages of its own: it waits for a slot."""
        if self.adapters is None or self.adapters.enter(seq):
            self.joining.append(seq)

    def seat_adapters(self) -> bool:
        """Fills slots with the adapters that sequences wait for; True if one of these waits no longer."""
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
        """Gives a slot to one of the `joining` sequences and returns it. None: nothing joins now."""
        if not self.joining:
            return None
        shares = self.shares()
        seq = min(self.joining, key=lambda seq: shares.turn(seq.generation))
        if not self._free_slots and not self._take_from_richer(seq.generation, shares, gain=0):
            return None
        self.joining.remove(seq)
        self._occupy(seq)
        self._grow(seq)  # for the drafts of its first round; without room that one is plain
        return seq

    def fork(self, leader: Sequence, follower: Sequence) -> list[tuple[int, int]] | None:
        """Gives `follower` the leader's prompt rows: whole pages shared, the page of the last row copied.

        Returns (source page, target page) in each group of layers, which the caller copies before the next
        step. None: there is no page or no slot, or the leader has lost its own. Then the follower is queued;
        it will compute the rows that the cache does not hold.
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
        """Pages for a pulled prompt of `rows` rows: (pages, how many of them came from the cache).

        None: there is no room, or a sequence that waits to be computed here (a preempted one, say) is first.
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
        """The pages that a request can get while others may read these: without a slot of states none."""
        if isinstance(self.pool, PagesAndStates) and not self.pool.slots_beside(leased):
            return 0
        return self.pool.num_pages - sum(page < self.pool.num_pages for page in leased)

    @property
    def unowned(self) -> int:
        """Pages that nobody has; the cache may hold them."""
        return self.pool.num_pages - self.pool.used

    def first(self, generations: SequenceOf[Generation]) -> Generation:
        """The generation whose turn it is."""
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
        """Tables for `rows` rows of `tokens`: (tables, the slot of its state, how many pages of the first
        came from the cache).

        None: no room.

        No page with row `computed`, or one after it, comes from the cache. `copied`: the rows are copied, not
        computed, and pages that a step in flight may still write are waited for.
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
        """Caches the sequence's complete pages, as far as their rows lie below `below`, and its state."""
        rows = self.complete_rows(seq)
        self.tables.remember(seq, rows if below is None else min(rows, below))
        if self.tables.states is not None:
            self.tables.states.snapshot(seq)

    def passed(self, work: SequenceWork) -> None:
        """A chunk has landed that is no prompt's end: its state may be worth keeping, if it has one."""
        states, seq = self.tables.states, work.seq
        if states is not None and states.passed(work):
            self.tables.remember(seq, self.complete_rows(seq))
            states.snapshot(seq, spaced=seq.kv_len != seq.branch)

    @property
    def states(self) -> StateCache:
        """The slots of states, if there are some, and running totals."""
        return StateCache() if self.tables.states is None else self.tables.states.slots.counts

    def state_copies(self) -> list[tuple[int, int]]:
        """Copies of slots of states (source, target) that come before the next step, each once."""
        states = self.tables.states
        if states is None:
            return []
        copies, states.slots.copies = states.slots.copies, []
        return copies

    def disown(self, seq: Sequence) -> None:
        """No other sequence begins with its rows: what of them is cached goes, with all that begins alike."""
        if self.tables.caches_early:  # else nothing is cached of a prompt before its end
            self.cache.cut(seq.prompt, seq.salt)

    def flush(self) -> int | None:
        """Empties the prefix cache, on the host too; returns how many pages it had.

        None: a page is in use, or on its way from the host, and nothing has changed.
        """
        if self.pool.used or (self.host is not None and self.host.loading):
            return None
        from_host = 0 if self.host is None else self.host.tier.clear()
        return self.cache.evict(self.cache.cached_pages) + from_host

    def retract(self) -> int:
        """Sends what decodes here back to the queue, without KV, while no step runs; how many sequences."""
        retracted = self._movable
        for seq in retracted:
            self._preempt(seq)
        joining, self.joining = self.joining, []
        joining += () if self.adapters is None else self.adapters.copied
        for seq in joining:
            self._give_back(seq)
            self.waiting.add(seq)
        return len(retracted) + len(joining)

    def complete_rows(self, seq: Sequence) -> int:
        """The number of its rows that may be cached.

        Where pages also hold draft KV, that must be complete too.
        """
        return self.tables.complete_rows(seq)

    # --- one step ------------------------------------------------------------------------------------

    def schedule(self) -> list[SequenceWork]:
        """Composes the next step. Empty when nothing can run."""
        self._starved, preempted = False, len(self.preempted)
        # a reservation may preempt a sequence that comes later
        works = [self._decode(seq) for seq in self._in_turn() if seq.pages and self._reserve(seq)]
        works += self._prompts(prompt_room(self.limits, len(works), self._missing()))
        if self.adapters is not None and (adapter := self.adapters.overdue):
            self._end_turn(self.adapters, adapter)
        if self.preempted[preempted:]:  # some were preempted after their work was composed
            works = [work for work in works if work.occupancy == work.seq.occupancy]
        return works

    def _missing(self) -> Iterator[WaitingPrompt]:
        """The prompts that are not computed; of each, the last token does not count as missing."""
        for seq in itertools.chain(self.running, self.waiting):
            if seq.missing > 1:
                yield WaitingPrompt(_uncached(seq), seq.missing - 1, seq.ahead)

    def _prompts(self, room: PromptRoom) -> list[SequenceWork]:
        """Chunks of prompts that run and of prompts that are admitted now, as far as there is room.

        Where steps have little room, it is of rows without context, and those prompts come first to which one
        that runs yields.
        """
        works: list[SequenceWork] = []
        for seq, occupancy in [(seq, seq.occupancy) for seq in self.running if seq.in_prompt]:
            if self._turns is not None:
                works += (admitted := self._admissions(room, before=seq))
                for work in admitted:
                    room = self._behind(room, work)
            if seq.occupancy == occupancy and (chunk := self._chunk(seq, room)):
                works.append(chunk)
                room = self._behind(room, chunk)
        return works + self._admissions(room)

    def _admissions(self, room: PromptRoom, before: Sequence | None = None) -> list[SequenceWork]:
        """Admits waiting sequences and gives their first chunks, as far as there is room.

        `before`: only those to which this one yields.
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
                continue  # the host loads the first of them
            self._occupy(seq)
            shares.add(seq.generation, 1 + seq.keeps)
            if chunk := self._chunk(seq, room):
                works.append(chunk)
                room = self._behind(room, chunk)
        for seq in passed:
            self.waiting.add(seq)
        return works

    def _waits_for_prefix(self, seq: Sequence) -> bool:
        """True if a prompt that is being computed begins like this one, which will find its pages cached. A
        prompt that is scored takes none from there.
        """
        return seq.generation.scores is None and any(
            _is_being_computed(other) and _begin_alike(other, seq) for other in self.running
        )

    def _in_turn(self) -> SequenceOf[Sequence]:
        """The sequences that decode in this step."""
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
        """The sequence's next rows; the last one gives a token, and waits if that must.

        None: nothing can run.
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

    def _behind(self, room: PromptRoom, chunk: SequenceWork) -> PromptRoom:
        """The room behind a chunk, which takes its own rows, or rows without context that take as long."""
        rows = len(chunk.tokens)
        taken = rows if self._turns is None else round(self._turns.room.cost(rows, chunk.start))
        return room.behind(_uncached(chunk.seq), taken)

    def _admit(self, seq: Sequence, shares: CallShares) -> bool:
        """Gives a waiting sequence pages for all its rows, or none if the host loads some. False: it waits.

        Free slots are reserved for its forks, unless these decode on another worker. Forks without a reserved
        slot wait, and compute the part of their prompt that the cache does not hold.
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
        """Takes pages for all rows that the coming rounds may write; may preempt sequences, also this one."""
        while not self._grow(seq):
            if self._incoming.preempt():
                self._starved = not self._grow(seq)
                return not self._starved  # if so it waits: the pages come when the copies have stopped
            movable = self._movable
            if not movable:
                return False  # prompts for other workers go on with the pages that they have
            victim = self._last_of_the_richest(movable[1:] or movable, self.shares())
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _grow(self, seq: Sequence) -> bool:
        """Takes those pages if there is room for them."""
        return self.tables.grow(seq)

    # --- shares ----------------------------------------------------------------------------------------

    def shares(self) -> CallShares:
        """The numbers of sequences of each call: running, joining, and with pages on their way."""
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
        """The number of slots that are neither taken nor reserved for forks of a running sequence."""
        free = self.limits.max_running - len(self.running)
        return free and free - sum(seq.keeps for seq in self.running if seq.forks)

    def _occupy(self, seq: Sequence) -> None:
        """Adds the sequence to the running batch, in a slot of its own."""
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
        self._give_back(seq)
        self.waiting.add(seq)
        self.preempted.append(seq)
        self.preemptions += 1

    def _end_turn(self, turns: AdapterTurns, adapter: str) -> None:
        """Sends back what computes with an adapter, and what could not begin: others wait for its slot."""
        for seq in self._movable:
            if seq.adapter == adapter and turns.has_had_its_turn(seq):
                self._preempt(seq)
        for seq in self.waiting:
            if seq.adapter == adapter:
                turns.leave(seq)

    def _make_room(self, count: int) -> bool:
        """Makes room for a sequence without pages: it can wait for those that go to the host first."""
        return self.tables.make_room(count, spare=True)

    def _give_back(self, seq: Sequence) -> None:
        if self.adapters is not None:
            self.adapters.leave(seq)
        self.tables.remember(seq, self.complete_rows(seq))
        self.tables.give_back(seq)
        seq.kv_len, seq.draft_len, seq.tree = 0, 0, None
        seq.fetched = seq.sought = False


def _uncached(seq: Sequence) -> int:
    """Its tokens beyond those that came from the prefix cache when it was admitted."""
    return len(seq) - seq.generation.cached_tokens


def _is_being_computed(seq: Sequence) -> bool:
    """True until its prompt may be cached: its first token may be that of a step in flight."""
    return seq.missing > 1 or (seq.in_flight > 0 and not seq.output)


def _begin_alike(computed: Sequence, seq: Sequence) -> bool:
    """True if the first `LONG_PROMPT` tokens that `computed` did not find in the cache are those of `seq`.
    What lies before them is not compared: nothing but how long `seq` waits depends on it.
    """
    first = computed.generation.cached_tokens
    last, ours, theirs = first + LONG_PROMPT - 1, seq.prompt, computed.prompt
    if computed.salt != seq.salt or last >= min(len(ours), len(theirs)) or ours[last] != theirs[last]:
        return False  # at little cost, of most
    return ours[first:last] == theirs[first:last]
