"""Drafts for verdicts that have not come yet: which outcomes a round may have, and who drafts for them.

A verdict on a chain is an outcome: how many drafts were accepted, and which token followed them. For the
likeliest outcomes a chain of their own is drafted meanwhile, from features that the head has predicted itself
(SSD, arXiv 2603.03251: outcomes enumerated with a geometric fan-out). If the verdict is among them, its
proposal is ready. All passes of a batch of rounds are one run on the device, which is begun and then looked
for: a verdict that comes meanwhile waits for its end, about a millisecond.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from eyas.engine.speculation.draft_worker.draft_commits import NO_FEATURES
from eyas.engine.speculation.draft_worker.draft_runner import DeviceChain, DraftInput
from eyas.engine.speculation.draft_worker.outcome_runs import OutcomeResult, OutcomeRound, OutcomeRuns
from eyas.engine.speculation.draft_worker.seats import SeatTables

SPREAD = 2.0
"""1 + r, where the chance to miss a token with its F best guesses falls as F^-r; r = 1 fits most heads."""

SURE, UNSURE = 0.95, 0.05  # acceptance beyond these gives no finite, or no useful, fan-out


def fan_out(steps: int, acceptance: float, outcomes: int) -> tuple[int, ...]:
    """How many tokens to guess after each number of accepted drafts, 0 .. steps; `outcomes` in all.

    `acceptance`: the chance of a draft whose predecessors were accepted. Geometric (SSD, theorem 12): with a
    fixed total this minimises the chance of a miss. All drafts being accepted is an outcome that no draft can
    end early, so it gets more.
    """
    chance = min(max(acceptance, UNSURE), SURE)
    falls = chance ** (1.0 / SPREAD)
    shares = [falls**accepted for accepted in range(steps)]
    shares.append(falls**steps * (1.0 - chance) ** (-1.0 / SPREAD))
    exact = [outcomes * share / sum(shares) for share in shares]
    counts = [int(share) for share in exact]
    largest = sorted(range(steps + 1), key=lambda i: (counts[i] - exact[i], i))
    for i in largest[: outcomes - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


@dataclass(frozen=True)
class VerifiedRound:
    """A round that is being verified: `chain` below the token that the last row of `draft_input` ends with.

    `draft_input`: at least the last certain row, with its true feature. `again`: that row is written already,
    and is run once more. Its pages reach to `AheadRunner.rows` after it; the last `lent` of them are its own
    for this time only.
    """

    draft_input: DraftInput
    chain: DeviceChain
    again: bool = False
    lent: int = 0

    @property
    def base(self) -> int:
        """The row after the certain ones."""
        return self.draft_input.extension.base + len(self.draft_input.extension.tokens)


def accepted_of(drafts: SequenceOf[int], tokens: SequenceOf[int]) -> int:
    """How many of `drafts`, a chain, were accepted if `tokens` are those since the round's root."""
    pairs = zip(drafts, tokens[:-1], strict=False)
    ends = (i for i, (draft, token) in enumerate(pairs) if draft != token)
    return next(ends, min(len(drafts), len(tokens) - 1))


def rows_ahead(steps: int, outcomes: int) -> int:
    """Rows behind the certain ones that drafting ahead of a chain of `steps` writes."""
    return steps + outcomes * steps


class AheadRound:
    """The outcomes of one round. `ends`: as of `OutcomeRound`."""

    def __init__(
        self, drafter: AheadRunner, verified: VerifiedRound, ends: SequenceOf[tuple[int, int]]
    ) -> None:
        self.verified, self.chain, self.ends = verified, verified.chain, ends
        self._drafter = drafter
        self._outcomes: list[tuple[int, int, list[int]]] | None = None  # number, accepted drafts, tokens
        self._whole = False

    @property
    def steps(self) -> int:
        """Drafts of the chain that is being verified."""
        return len(self.chain.tokens)

    @property
    def drafted(self) -> bool:
        """Is its run over, or will there be none? This does not wait."""
        return self._outcomes is not None

    @property
    def written(self) -> bool:
        """Are the rows of true features written?"""
        return self._whole

    @property
    def outcomes(self) -> int:
        """How many verdicts would find their proposal here."""
        return len(self._outcomes or ())

    def accepted(self, tokens: SequenceOf[int]) -> int:
        """How many drafts of the chain were accepted if `tokens` are those since the round's root."""
        return accepted_of(self.chain.tokens, tokens)

    def answer(self, tokens: SequenceOf[int], steps: int) -> DeviceChain | None:
        """The proposal of `steps` drafts below `tokens`, those since the round's root; None: not drafted.

        Waits for a run that is under way.
        """
        self.end()
        *path, follows = tokens
        if path != self.chain.tokens[: len(path)]:
            return None
        for number, accepted, own in self._outcomes or ():
            if (accepted, own[0]) == (len(path), follows) and steps < len(own):
                return DeviceChain(own[1 : steps + 1], self.chain.owner, self.chain.seat, number)
        return None

    def end(self) -> None:
        """After this no run writes its rows."""
        if not self.drafted:
            self._drafter.end(self)

    def take(self, ran: OutcomeResult | None) -> None:
        """What came of its run; None: there was none, and will be none."""
        self._whole = ran is not None and ran.whole
        tokens = ran.tokens if ran is not None and ran.whole else ()
        each = enumerate(zip(self.ends, tokens, strict=False))
        self._outcomes = [(number, after, own) for number, ((after, _), own) in each if own[0] >= 0]


class AheadRunner:
    """One run at a time, of the rounds that wait for one. `seating`: of the runner that proposes."""

    def __init__(self, runs: OutcomeRuns, seating: SeatTables) -> None:
        self.runs = runs
        self._seating = seating
        self._flying: list[AheadRound] = []

    def rows(self, chain: DeviceChain, root: int) -> int:
        """How many rows behind the certain ones a run writes for a chain below `root`; 0: none can."""
        kept, sits = self.runs.kept, self._seating.seats.current(chain.owner) is chain.seat
        rows = rows_ahead(kept.steps, kept.outcomes)
        return rows if sits and root + rows <= self.runs.context else 0

    def begin(self, verified: VerifiedRound, acceptance: float) -> AheadRound:
        """A round of which nothing is drafted yet. `acceptance`: as of `fan_out`."""
        counts = fan_out(len(verified.chain.tokens), acceptance, self.runs.kept.outcomes)
        ends = [(accepted, rank) for accepted, count in enumerate(counts) for rank in range(count)]
        return AheadRound(self, verified, ends)

    def advance(self, rounds: SequenceOf[AheadRound]) -> None:
        """Begins a run if none is under way, else looks whether that has ended."""
        if self._flying and not self.runs.done:
            return
        self._land()
        waiting = [one for one in rounds if not one.drafted]
        launched = waiting[: self.runs.most]
        for one in [one for one in launched if not self._fits(one)]:
            launched.remove(one)
            one.take(None)
        if launched:
            self._launch(launched)

    def end(self, one: AheadRound) -> None:
        """Waits for the run that `one` is part of, if it is under way."""
        if one in self._flying:
            self._land()

    def _fits(self, one: AheadRound) -> bool:
        """Are its chain's features still in its slot, and its certain rows those of one verdict?"""
        sits = self._seating.seats.current(one.chain.owner) is one.chain.seat
        return sits and len(one.verified.draft_input.extension.tokens) <= self.runs.kept.steps + 1

    def _launch(self, rounds: list[AheadRound]) -> None:
        asked = [one.verified.draft_input for one in rounds]
        slots, writes = self._seating.take(asked, [one.verified.lent for one in rounds])
        running = []
        for one, asks, slot in zip(rounds, asked, slots, strict=True):
            if one.verified.again:  # its feature is kept, and need not come once more
                asks = replace(asks, extension=replace(asks.extension, features=NO_FEATURES, ringed=()))
            running.append(OutcomeRound(asks, one.chain.tokens, slot, one.chain.outcome, one.ends))
        self.runs.launch(running, writes)
        self._flying = rounds

    def _land(self) -> None:
        if self._flying:
            flying, self._flying = self._flying, []
            for one, ran in zip(flying, self.runs.take(), strict=True):
                one.take(ran)
