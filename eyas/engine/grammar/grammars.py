"""The grammars of an engine's sequences: compiled in a thread beside the step loop, each once, and paced.

A sequence whose grammar is not compiled yet, or is slow to follow, waits, and no other does. What a token
costs depends on the grammar and on the text, and a call of the library cannot be interrupted. So the calls of
a sequence whose last ones were slow are made aside, in a thread of another, while it is left out of the
steps; nothing is drafted for it. Seconds are those of a processor: a busy machine makes none slow.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from eyas.common.errors import EngineError, EyasError, GrammarTooSlow
from eyas.common.grammars.compiler import GrammarCompiler
from eyas.common.grammars.notations import Grammar
from eyas.engine.batch.sequence import Generation, Sequence
from eyas.engine.batch.tree import NO_TREE, ROOT, DraftTree
from eyas.engine.grammar.state import ForcedDrafts, GrammarState, MaskRoom

MAX_COMPILED = 256  # compiled grammars
MAX_COMPILED_BYTES = 512 << 20
_NICE = 5  # steps come first
CLOCK_S = 0.001  # between two looks at the processor's clock
SLOW_S = 0.004  # a call that takes longer makes its sequence slow
QUICK_LOOKS = 16  # in a row, after which it is slow no more: texts pass through slow places and quick ones
ALLOWED_S = 2.0  # of one sequence
PER_TOKEN_S = 0.02  # and more for each of its tokens: twice what a gateway lets a grammar take
AT_ONCE = 64  # tokens of an output that was begun elsewhere; more are followed aside
T = TypeVar("T")


class GrammarManager:
    """Everything about grammars for one model. The engine's thread uses it."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """`eos_ids`: the ids that end an answer of the model."""
        self._folder = folder
        self._vocab_size = vocab_size
        self.eos_ids = eos_ids
        self._compiler: GrammarCompiler | None = None  # the thread's
        self._thread: ThreadPoolExecutor | None = None
        self._compiled: dict[Grammar, Future[Any]] = {}  # the newest last
        self._slow: set[Grammar] = set()  # of those, what a sequence was slow to follow
        self._aside: ThreadPoolExecutor | None = None  # follows what is slow
        self._states: WeakKeyDictionary[Sequence, PacedState] = WeakKeyDictionary()
        self._failed: dict[Generation, EyasError] = {}
        self._waits = False  # a sequence has to wait, since the last `awaited`
        self._clock = ProcessorClock()

    def awaited(self) -> bool:
        """True if a grammar is being compiled, or followed, beside the step loop. One that was when a
        sequence asked for it, since the last call, counts: it may be ready now, and that sequence waits.
        """
        waits, self._waits = self._waits, False
        if waits or any(not future.done() for future in self._compiled.values()):
            return True
        return any(state.looking for state in self._states.values())

    def prepare(self) -> None:
        """Begins to load the library and the vocabulary: done at the first grammar, it would slow the
        steps of a GPU for a second.
        """
        self._compiling_thread().submit(self._loaded_compiler)

    def holds(self, seq: Sequence) -> bool:
        """True if its next round must wait: for its grammar, or for its own tokens if that is slow to follow.

        Nothing is drafted for such a one: its next mask is filled before its step begins.
        """
        if seq.generation.request.params.grammar is None:
            return False
        slow = self._is_slow(seq)
        if slow:
            seq.tree = None
        return bool(slow and seq.in_flight) or self._state(seq) is None

    def awaits(self, seq: Sequence) -> bool:
        """True if the mask of its next token waits for tokens of its own that are in flight."""
        return seq.generation.request.params.grammar is not None and seq.in_flight > 0

    def masks(
        self, seq: Sequence, tree: DraftTree | None, room: MaskRoom | None = None
    ) -> list[np.ndarray | None]:
        """The masks of the next token and below drafts, as `GrammarState.masks`; empty without a grammar, and
        for an output that has ended, or failed, since its step began.
        """
        if seq.generation.request.params.grammar is None or seq not in seq.generation.sequences:
            return []
        if (state := self._state(seq, now=True)) is None:
            return []
        try:
            return state.masks(tree, room)
        except Exception as error:  # the library's; the step goes on, and its request fails after it
            self._fail(seq, error)
            return [None] * (1 + len(tree or ()))

    def draft(self, seq: Sequence, tree: DraftTree, most: int) -> DraftTree:
        """The drafts that its grammar allows, or up to `most` tokens that it forces, if these reach further.

        Without a grammar that is `tree`; where one is slow to follow there is none.
        """
        if seq.generation.request.params.grammar is None:
            return tree
        state = None if self._is_slow(seq) else self._state(seq)
        if state is None:
            return NO_TREE if self._is_slow(seq) else tree
        try:
            allowed, forced = state.cut(tree), state.forced(most)
        except Exception as error:  # as in `masks`
            self._fail(seq, error)
            return tree
        if len(forced) <= allowed.height:
            return allowed
        return DraftTree(forced, range(ROOT, len(forced) - 1))

    def forced(self, seq: Sequence, most: int) -> DraftTree | None:
        """Finds up to `most` tokens that its grammar forces, where they are better than drafts that are not
        known.

        These may reach `most` tokens and be wrong: half as many are as good, or as few as end the output.
        None: the others are better. Of one that is slow to follow nothing is verified.
        """
        if self._is_slow(seq):
            return NO_TREE
        forced = self.draft(seq, NO_TREE, most)
        return forced if forced and self._are_good(seq, forced.tokens, most) else None

    def forced_after(self, seq: Sequence, tree: DraftTree, most: int) -> list[ForcedDrafts]:
        """What its grammar forces behind the ends of its round in flight, which verifies `tree`: as `forced`
        has them, where few tokens may be such an end.
        """
        state = None if self._is_slow(seq) else self._state(seq)
        try:
            behind = [] if state is None else state.forced_after(tree, most)
        except Exception as error:  # as in `masks`
            self._fail(seq, error)
            return []
        return [one for one in behind if self._are_good(seq, one.drafts, most)]

    def _are_good(self, seq: Sequence, forced: SequenceOf[int], most: int) -> bool:
        """Whether they are better than drafts that are not known."""
        ends = (*self.eos_ids, *seq.generation.request.params.stop_token_ids)
        return 2 * len(forced) >= most or any(token in ends for token in forced)

    def take_failed(self) -> dict[Generation, EyasError]:
        """Requests that cannot be followed, since the last call, and why."""
        failed, self._failed = self._failed, {}
        return failed

    def close(self) -> None:
        """Begins no other compilation."""
        for thread in (self._thread, self._aside):
            if thread is not None:
                thread.shutdown(wait=False, cancel_futures=True)

    def _is_slow(self, seq: Sequence) -> bool:
        state = self._states.get(seq)
        return state is not None and state.slow

    def _state(self, seq: Sequence, *, now: bool = False) -> PacedState | None:
        """The grammar state after the sequence's output; None: not known yet, or never will be.

        `now`: its step has begun, so one that is slow is waited for.
        """
        params = seq.generation.request.params
        assert params.grammar is not None
        try:
            if seq not in self._states:
                future = self._future(params.grammar)
                if not future.done():
                    self._waits = True
                    return None
                compiled = future.result()
                assert self._compiler is not None
                state = GrammarState(compiled, params, self.eos_ids, self._compiler.pieces)
                slow = params.grammar in self._slow
                self._states[seq] = PacedState(
                    state, self._other_thread, len(seq.output), slow=slow, here=self._clock
                )
            if self._states[seq].slow:
                self._slow.add(params.grammar)
                if not now:
                    ready = self._states[seq].ready(seq.output)
                    self._waits |= not ready
                    return self._states[seq] if ready else None
            self._states[seq].follow(seq.output)
        except Exception as error:  # of the library, perhaps: it concerns this request alone
            self._fail(seq, error)
            return None
        return self._states[seq]

    def _fail(self, seq: Sequence, error: Exception) -> None:
        if not isinstance(error, EyasError):
            error = EngineError(f"grammar cannot be followed: {error}")
        self._failed.setdefault(seq.generation, error)

    def _other_thread(self) -> ThreadPoolExecutor:
        if self._aside is None:
            self._aside = ThreadPoolExecutor(1, "slow-grammars", os.nice, (_NICE,))
        return self._aside

    def _future(self, grammar: Grammar) -> Future[Any]:
        if grammar in self._compiled:
            self._compiled[grammar] = self._compiled.pop(grammar)
        else:
            self._forget()
            self._compiled[grammar] = self._compiling_thread().submit(self._compile, grammar)
        return self._compiled[grammar]

    def _compiling_thread(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        return self._thread

    def _compile(self, grammar: Grammar) -> Any:
        return self._loaded_compiler().compile(grammar)

    def _loaded_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(self._folder, self._vocab_size, self.eos_ids)
        return self._compiler

    def _forget(self) -> None:
        """Drops the oldest until there is room for one more."""
        sizes = {
            grammar: 0 if future.exception() else future.result().memory_size_bytes
            for grammar, future in self._compiled.items()
            if future.done()
        }
        total = sum(sizes.values())
        for grammar, size in sizes.items():
            if total <= MAX_COMPILED_BYTES and len(self._compiled) < MAX_COMPILED:
                break
            del self._compiled[grammar]
            self._slow.discard(grammar)
            total -= size


class ProcessorClock:
    """Seconds of one thread's processor. The system is asked once per `CLOCK_S` at most, since its answer
    takes longer than a mask; between two answers all time counts.
    """

    def __init__(self) -> None:
        self._since = self._seconds = -math.inf

    def __call__(self) -> float:
        """The seconds now; right to `CLOCK_S`."""
        now = time.perf_counter()
        if now - self._since > CLOCK_S:
            self._since, self._seconds = now, time.thread_time()
        return self._seconds + now - self._since


class PacedState:
    """A `GrammarState` and what it has taken. The step loop's thread uses it; `aside` makes slow calls."""

    def __init__(
        self,
        state: GrammarState,
        aside: Callable[[], Executor],
        backlog: int = 0,
        *,
        slow: bool = False,
        clock: Callable[[], float] = time.thread_time,
        here: Callable[[], float] | None = None,
    ) -> None:
        """`backlog`: tokens to follow at first. `slow`: whether others were slow with this grammar.
        `clock`: seconds of the thread that asks; `here`: of the step loop's alone (None: the same clock).
        """
        self._looks_left = QUICK_LOOKS if slow else int(backlog > AT_ONCE)
        self._state = state
        self._aside = aside
        self._clock, self._here = clock, here or clock
        self._look: Future[float] | None = None  # that is being taken aside, or was
        self._spent_s = 0.0

    @property
    def slow(self) -> bool:
        """True if its next calls are made aside."""
        return self._looks_left > 0

    @property
    def looking(self) -> bool:
        """True while a call is being made aside."""
        return self._look is not None and not self._look.done()

    def ready(self, output: SequenceOf[int]) -> bool:
        """True if its next mask is known, after `output`. If not it is brought there aside.

        Raises GrammarTooSlow once its budget is spent, and what the state raises; so do all others.
        """
        if self.looking:
            return False
        self._take()
        if not self._state.knows(output):
            self._look = self._aside().submit(self._see, list(output))
            return False
        return True

    def follow(self, output: SequenceOf[int]) -> None:
        """Follows the output here and now, as `GrammarState.follow`."""
        self._take()
        if self._state.followed != len(output):
            self._timed(self._state.follow, output)

    def masks(self, tree: DraftTree | None, room: MaskRoom | None = None) -> list[np.ndarray | None]:
        """Computes masks, as `GrammarState.masks`."""
        return self._timed(self._state.masks, tree, room)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cuts the tree, as `GrammarState.cut`."""
        return self._timed(self._state.cut, tree)

    def forced(self, most: int) -> list[int]:
        """The forced tokens, as `GrammarState.forced`."""
        return self._timed(self._state.forced, most)

    def forced_after(self, tree: DraftTree, most: int) -> list[ForcedDrafts]:
        """The drafts that are forced behind a round; see `GrammarState.forced_after`."""
        return self._timed(self._state.forced_after, tree, most)

    def _see(self, output: SequenceOf[int]) -> float:
        began = self._clock()
        self._state.follow(output)
        self._state.masks(None)
        return self._clock() - began

    def _take(self) -> None:
        """Counts the time of the last look, and decides whether the next one may be taken here."""
        look, self._look = self._look, None
        if look is not None:
            seconds = look.result()
            self._looks_left = QUICK_LOOKS if seconds > SLOW_S else max(self._looks_left - 1, 0)
            self._spend(seconds)

    def _timed(self, call: Callable[..., T], *args: Any) -> T:
        began = self._here()
        result = call(*args)
        seconds = max(self._here() - began, 0.0)
        if seconds > SLOW_S:
            self._looks_left = QUICK_LOOKS
        self._spend(seconds)
        return result

    def _spend(self, seconds: float) -> None:
        self._spent_s += seconds
        tokens = self._state.followed
        if self._spent_s > ALLOWED_S + PER_TOKEN_S * tokens:
            took = f"{self._spent_s:.1f} s of a processor for {tokens} tokens"
            message = f"grammar takes too long to follow: {took}; it is too ambiguous"
            raise GrammarTooSlow(message, param="grammar")
