"""Drafts for verdicts that have not come yet: what is likeliest to become of a round that is being verified.

A verdict on a chain is an outcome: how many drafts were accepted, and which token followed them. For the
likeliest outcomes a chain of their own is drafted meanwhile, from features that the head has predicted itself
(SSD, arXiv 2603.03251: outcomes enumerated with a geometric fan-out). If the verdict is among them, its
proposal is ready. This file knows no sequences, messages or time; true features are written by its first
pass, before anything else is made of them.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import torch

from eyas.engine.batch.spans import Span
from eyas.engine.models.base import Drafted
from eyas.engine.sampling.row import Row
from eyas.engine.speculation.draft_runner import AnyChain, Asked, Chain, DraftRunner

OUTCOMES = 8
"""The number of outcomes of a round for which a chain is drafted."""

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
class Verified:
    """A round that is being verified: `chain` below the token that the last row of `asked` ends with.

    `asked`: at least the last certain row, with its true feature. `again`: that row is written already, and
    is run once more. Its pages reach to the `Foreseer`'s `rows` after it; the last `lent` of them are its own
    for this time only.
    """

    asked: Asked
    chain: AnyChain
    again: bool = False
    lent: int = 0

    @property
    def base(self) -> int:
        """The row after the certain ones."""
        return self.asked.extension.base + len(self.asked.extension.tokens)


class Foreseen(Protocol):
    """The outcomes of one round, and how far they are drafted."""

    @property
    def steps(self) -> int:
        """Drafts of the chain that is being verified."""

    @property
    def drafted(self) -> bool:
        """Is every outcome's chain complete, as far as it is known? This does not wait."""

    @property
    def written(self) -> bool:
        """Are the rows of true features written?"""

    @property
    def outcomes(self) -> int:
        """How many verdicts would find their proposal here."""

    def accepted(self, tokens: SequenceOf[int]) -> int:
        """How many drafts of the chain were accepted if `tokens` are those since the round's root."""

    def answer(self, tokens: SequenceOf[int], steps: int) -> AnyChain | None:
        """The proposal of `steps` drafts below `tokens`, those since the round's root; None: not drafted."""

    def end(self) -> None:
        """After this nothing writes its rows."""


class Foreseer(Protocol):
    """Who drafts ahead, for many rounds at once."""

    def rows(self, chain: AnyChain, root: int) -> int:
        """How many rows behind the certain ones it writes for a chain below position `root`; 0: it cannot."""

    def begin(self, verified: Verified, acceptance: float) -> Foreseen:
        """A round of which nothing is drafted yet. `acceptance`: as of `fan_out`."""

    def advance(self, rounds: SequenceOf[Foreseen]) -> None:
        """The next work for rounds that are not drafted, as much as a message may wait for."""


def accepted_of(drafts: SequenceOf[int], tokens: SequenceOf[int]) -> int:
    """As `Foreseen.accepted`, of these drafts."""
    pairs = zip(drafts, tokens[:-1], strict=False)
    ends = (i for i, (draft, token) in enumerate(pairs) if draft != token)
    return next(ends, min(len(drafts), len(tokens) - 1))


def rows_ahead(steps: int, outcomes: int) -> int:
    """Rows behind the certain ones that drafting ahead of a chain of `steps` writes."""
    return steps + outcomes * steps


@dataclass
class _Fork:
    """One outcome: `tokens` are the one that follows `accepted` drafts, and what was drafted below it.

    `inputs` [width]: the features that the rows of the drafts join; one behind the tokens.
    """

    accepted: int
    tokens: list[int]
    inputs: list[torch.Tensor] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Pass:
    """One forward's rows of one round: `features` [n, width]; the logits of `picked` rows are wanted.

    `noise`: who would sample there.
    """

    span: Span
    tokens: list[int]
    features: torch.Tensor
    picked: range
    noise: list[Row]


class Ahead:
    """The outcomes of one round, and how far they are drafted. `fan_out`: as the function gives it.

    Its first pass runs the certain rows and the chain, and finds the outcomes; each later one adds a token
    below every outcome. The rows behind the certain ones are scratch: nothing is kept of their KV.
    """

    def __init__(self, verified: Verified, fan_out: SequenceOf[int]) -> None:
        assert isinstance(verified.chain, Chain)
        self._round, self._chain = verified, verified.chain
        self._certain = verified.asked.extension
        self._steps = len(verified.chain.tokens)
        self._fan_out = fan_out
        self._forks: list[_Fork] | None = None
        self._entering: torch.Tensor | None = None  # features that the next pass's rows join

    @property
    def steps(self) -> int:
        """Drafts of the chain that is being verified."""
        return self._steps

    @property
    def drafted(self) -> bool:
        """Is every outcome's chain complete?"""
        return self._forks is not None and all(len(fork.tokens) > self._steps for fork in self._forks)

    @property
    def outcomes(self) -> int:
        """How many verdicts would find their proposal here."""
        return len(self._forks or ())

    @property
    def written(self) -> bool:
        """Has its first pass run?"""
        return self._forks is not None

    def accepted(self, tokens: SequenceOf[int]) -> int:
        """How many drafts of the chain were accepted if `tokens` are those since the round's root."""
        return accepted_of(self._chain.tokens, tokens)

    def end(self) -> None:
        """A pass writes nothing after `take`."""

    def answer(self, tokens: SequenceOf[int], steps: int) -> Chain | None:
        """The proposal of `steps` drafts below `tokens`, those since the round's root; None: not drafted."""
        *path, follows = tokens
        accepted = len(path)
        if not self.drafted or steps > self._steps or path != self._chain.tokens[:accepted]:
            return None
        for fork in self._forks or ():
            if fork.accepted == accepted and fork.tokens[0] == follows:
                return Chain(fork.tokens[1 : steps + 1], torch.stack(fork.inputs[:steps]))
        return None

    def next_pass(self) -> Pass:
        """What is to be run next; its results are for `take`."""
        return self._spine() if self._forks is None else self._level(self._forks)

    def take(self, drafted: Drafted, best: list[list[int]]) -> None:
        """Results of the pass: all rows of it, and the best ids at the picked ones, best first."""
        if self._forks is None:
            self._find(drafted, best)
            return
        self._entering = drafted.features
        for fork, feature, ids in zip(self._forks, drafted.features, best, strict=True):
            fork.inputs.append(feature)
            fork.tokens.append(ids[0])

    # --- the certain rows and the chain ------------------------------------------------------------------

    def _spine(self) -> Pass:
        certain, chain = self._certain, self._chain
        tokens = [*certain.tokens, *chain.tokens]
        span = Span(certain.pages, certain.base, len(tokens), offset=certain.offset)
        features = torch.cat((certain.features, chain.inputs))
        noise = [self._noise(accepted) for accepted in range(self._steps + 1)]
        return Pass(span, tokens, features, range(len(certain.tokens) - 1, len(tokens)), noise)

    def _find(self, drafted: Drafted, best: list[list[int]]) -> None:
        """The outcomes: after each number of accepted drafts the best tokens, but not the next draft."""
        first = len(self._certain.tokens) - 1
        self._forks, entering = [], []
        for accepted, (count, ids) in enumerate(zip(self._fan_out, best, strict=True)):
            drafts = self._chain.tokens[accepted : accepted + 1]
            for token in [token for token in ids if token not in drafts][:count]:
                self._forks.append(_Fork(accepted, [token]))
                entering.append(drafted.features[first + accepted])
        self._entering = torch.stack(entering) if entering else None  # None: a head of one id knows no other

    # --- below the outcomes --------------------------------------------------------------------------------

    def _level(self, forks: list[_Fork]) -> Pass:
        assert self._entering is not None
        certain, base = self._certain, self._round.base
        level = len(forks[0].tokens) - 1
        first = base + self._steps + level * len(forks)
        for i, fork in enumerate(forks):
            fork.rows.append(first + i)
        paths = tuple((*range(base, base + fork.accepted), *fork.rows) for fork in forks)
        span = Span(certain.pages, base, len(forks), paths, certain.offset)
        noise = [self._noise(fork.accepted + level + 1) for fork in forks]
        tokens = [fork.tokens[-1] for fork in forks]
        return Pass(span, tokens, self._entering, range(len(forks)), noise)

    def _noise(self, depth: int) -> Row:
        """Of the token that stands `depth` + 1 below the round's root."""
        position = self._certain.offset + self._round.base + 1 + depth
        return Row(self._round.asked.params, self._round.asked.choice, position, (), (), ())


def advance(runner: DraftRunner, aheads: SequenceOf[Ahead]) -> None:
    """One forward: the next pass of each, whatever that is."""
    passes = [ahead.next_pass() for ahead in aheads]
    tokens = [token for one in passes for token in one.tokens]
    drafted = runner.forward(
        [one.span for one in passes], tokens, torch.cat([one.features for one in passes])
    )
    picked, first = [], 0
    for one in passes:
        picked += [first + row for row in one.picked]
        first += len(one.tokens)
    noise = [row for one in passes for row in one.noise]
    best = iter(runner.best(drafted.rows[torch.tensor(picked)], noise, OUTCOMES + 1))
    counts = [len(one.tokens) for one in passes]
    shares = zip(drafted.rows.split(counts), drafted.features.split(counts), strict=True)
    for ahead, one, (rows, features) in zip(aheads, passes, shares, strict=True):
        ahead.take(Drafted(rows, features), [next(best) for _ in one.picked])


class PlainForeseer:
    """A `Foreseer` of `OUTCOMES` outcomes per round, one forward at a time."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner

    def rows(self, chain: AnyChain, root: int) -> int:
        """As of `Foreseer`; positions have no end."""
        return rows_ahead(len(chain.tokens), OUTCOMES)

    def begin(self, verified: Verified, acceptance: float) -> Ahead:
        """As of `Foreseer`."""
        return Ahead(verified, fan_out(len(verified.chain.tokens), acceptance, OUTCOMES))

    def advance(self, rounds: SequenceOf[Foreseen]) -> None:
        """As of `Foreseer`: one forward."""
        advance(self._runner, [one for one in rounds if isinstance(one, Ahead)])
