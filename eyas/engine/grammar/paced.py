"""One sequence's grammar within a budget of time, for the step loop must not wait for a slow one.

What a token costs depends on the grammar and on the text, and a call of the library cannot be interrupted. So
the calls of a sequence whose last ones were slow are made aside, in a thread of another, while it is left out
of the steps; nothing is drafted for it. Seconds are those of a processor: a busy machine makes none slow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import numpy as np

from eyas.common.errors import GrammarTooSlow
from eyas.engine.batch.tree import DraftTree
from eyas.engine.grammar.state import GrammarState

SLOW_S = 0.004  # a call that takes longer makes its sequence slow
QUICK_LOOKS = 16  # in a row, after which it is slow no more: texts pass through slow places and quick ones
ALLOWED_S = 2.0  # of one sequence
PER_TOKEN_S = 0.02  # and more for each of its tokens: twice what a gateway lets a grammar take
AT_ONCE = 64  # tokens of an output that was begun elsewhere; more are followed aside

T = TypeVar("T")


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
    ) -> None:
        """`backlog`: tokens to follow at first. `slow`: whether others were slow with this grammar.
        `clock`: seconds of the thread that asks.
        """
        self._looks_left = QUICK_LOOKS if slow else int(backlog > AT_ONCE)
        self._state = state
        self._aside = aside
        self._clock = clock
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
        self._timed(self._state.follow, output)

    def masks(self, tree: DraftTree | None) -> list[np.ndarray | None]:
        """Computes masks, as `GrammarState.masks`."""
        return self._timed(self._state.masks, tree)

    def cut(self, tree: DraftTree) -> DraftTree:
        """Cuts the tree, as `GrammarState.cut`."""
        return self._timed(self._state.cut, tree)

    def forced(self, most: int) -> list[int]:
        """The forced tokens, as `GrammarState.forced`."""
        return self._timed(self._state.forced, most)

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

    def _timed(self, call: Callable[[Any], T], argument: Any) -> T:
        began = self._clock()
        result = call(argument)
        seconds = self._clock() - began
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
