"""Drafting ahead on a device: which rounds a run is for, and what has become of it.

The same face as `eyas.engine.speculation.ahead.PlainForeseer`, but all passes of a round are one run, which
is begun and then looked for: a verdict that comes meanwhile waits for its end, about a millisecond. It knows
who sits in which slot; the launches are the business of `eyas.engine.speculation.outcome_runs`.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from eyas.engine.batch.tree import DraftTree
from eyas.engine.speculation.ahead import Foreseen, Verified, accepted_of, fan_out, rows_ahead
from eyas.engine.speculation.draft_commits import NO_FEATURES
from eyas.engine.speculation.draft_runner import AnyChain, chain_of
from eyas.engine.speculation.outcome_runs import OutcomeRuns, Ran, Running
from eyas.engine.speculation.seats import Seat, Seating


@dataclass(frozen=True)
class StoredChain:
    """Drafts in a row, whose features are kept in its owner's slot as those of `outcome`, for as long as it
    has that `seat`.
    """

    tokens: list[int]
    owner: Hashable
    seat: Seat
    outcome: int = 0

    @property
    def tree(self) -> DraftTree:
        """The proposal."""
        return chain_of(self.tokens)


class DeviceForeseen:
    """The outcomes of one round. `ends`: as of `Running`."""

    def __init__(
        self, drafter: DeviceForeseer, verified: Verified, ends: SequenceOf[tuple[int, int]]
    ) -> None:
        assert isinstance(verified.chain, StoredChain)
        self.verified, self.chain, self.ends = verified, verified.chain, ends
        self._drafter = drafter
        self._outcomes: list[tuple[int, int, list[int]]] | None = None  # number, accepted drafts, tokens
        self._whole = False

    @property
    def steps(self) -> int:
        """As of `Foreseen`."""
        return len(self.chain.tokens)

    @property
    def drafted(self) -> bool:
        """As of `Foreseen`."""
        return self._outcomes is not None

    @property
    def written(self) -> bool:
        """As of `Foreseen`."""
        return self._whole

    @property
    def outcomes(self) -> int:
        """As of `Foreseen`."""
        return len(self._outcomes or ())

    def accepted(self, tokens: SequenceOf[int]) -> int:
        """As of `Foreseen`."""
        return accepted_of(self.chain.tokens, tokens)

    def answer(self, tokens: SequenceOf[int], steps: int) -> StoredChain | None:
        """As of `Foreseen`. Waits for a run that is under way."""
        self.end()
        *path, follows = tokens
        if path != self.chain.tokens[: len(path)]:
            return None
        for number, accepted, own in self._outcomes or ():
            if (accepted, own[0]) == (len(path), follows) and steps < len(own):
                return StoredChain(own[1 : steps + 1], self.chain.owner, self.chain.seat, number)
        return None

    def end(self) -> None:
        """As of `Foreseen`: no run writes its rows any more."""
        if not self.drafted:
            self._drafter.end(self)

    def take(self, ran: Ran | None) -> None:
        """What came of its run; None: there was none, and will be none."""
        self._whole = ran is not None and ran.whole
        tokens = ran.tokens if ran is not None and ran.whole else ()
        each = enumerate(zip(self.ends, tokens, strict=False))
        self._outcomes = [(number, after, own) for number, ((after, _), own) in each if own[0] >= 0]


class DeviceForeseer:
    """One run at a time, of the rounds that wait for one. `seating`: of the runner that proposes."""

    def __init__(self, runs: OutcomeRuns, seating: Seating) -> None:
        self.runs = runs
        self._seating = seating
        self._flying: list[DeviceForeseen] = []

    def rows(self, chain: AnyChain, root: int) -> int:
        """As of `Foreseer`."""
        assert isinstance(chain, StoredChain)
        kept, sits = self.runs.kept, self._seating.seats.held(chain.owner) is chain.seat
        rows = rows_ahead(kept.steps, kept.outcomes)
        return rows if sits and root + rows <= self.runs.context else 0

    def begin(self, verified: Verified, acceptance: float) -> DeviceForeseen:
        """As of `Foreseer`."""
        counts = fan_out(len(verified.chain.tokens), acceptance, self.runs.kept.outcomes)
        ends = [(accepted, rank) for accepted, count in enumerate(counts) for rank in range(count)]
        return DeviceForeseen(self, verified, ends)

    def advance(self, rounds: SequenceOf[Foreseen]) -> None:
        """As of `Foreseer`: begins a run if none is under way, else looks whether that has ended."""
        if self._flying and not self.runs.done:
            return
        self._land()
        waiting = [one for one in rounds if isinstance(one, DeviceForeseen) and not one.drafted]
        launched = waiting[: self.runs.most]
        for one in [one for one in launched if not self._fits(one)]:
            launched.remove(one)
            one.take(None)
        if launched:
            self._launch(launched)

    def end(self, one: DeviceForeseen) -> None:
        """Waits for the run that `one` is part of, if it is under way."""
        if one in self._flying:
            self._land()

    def _fits(self, one: DeviceForeseen) -> bool:
        """Are its chain's features still in its slot, and its certain rows those of one verdict?"""
        sits = self._seating.seats.held(one.chain.owner) is one.chain.seat
        return sits and len(one.verified.asked.extension.tokens) <= self.runs.kept.steps + 1

    def _launch(self, rounds: list[DeviceForeseen]) -> None:
        asked = [one.verified.asked for one in rounds]
        slots, writes = self._seating.take(asked, [one.verified.lent for one in rounds])
        running = []
        for one, asks, slot in zip(rounds, asked, slots, strict=True):
            if one.verified.again:  # its feature is kept, and need not come once more
                asks = replace(asks, extension=replace(asks.extension, features=NO_FEATURES, ringed=()))
            running.append(Running(asks, one.chain.tokens, slot, one.chain.outcome, one.ends))
        self.runs.launch(running, writes)
        self._flying = rounds

    def _land(self) -> None:
        if self._flying:
            flying, self._flying = self._flying, []
            for one, ran in zip(flying, self.runs.take(), strict=True):
                one.take(ran)
