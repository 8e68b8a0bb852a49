"""The specification of drafting ahead: the outcomes of a round and their chains, pass by pass.

A device does the same in one run (`eyas.engine.speculation.draft_worker.outcome_runs`). No server drafts
ahead this way: on a CPU it takes the cores that a verifier needs.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from eyas.common.config import SpeculationConfig
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.batch.tree import DraftTree
from eyas.engine.models.base import Drafted
from eyas.engine.sampling.row import SampledRow
from eyas.engine.speculation.draft_worker.draft_runner import (
    DraftInput,
    DraftRequest,
    DraftRunner,
    ProposedTree,
    chain_of,
)
from eyas.engine.speculation.drafters.ahead import VerifiedRound, accepted_of, fan_out, rows_ahead

OUTCOMES = 8


@dataclass(frozen=True)
class Chain:
    """Drafts in a row. `inputs` [len(tokens), width]: the feature that the draft row of each token joins."""

    tokens: list[int]
    inputs: torch.Tensor

    @property
    def tree(self) -> DraftTree:
        return chain_of(self.tokens)


class ChainRunner(DraftRunner):
    """A `DraftRunner` whose proposals may be drafted ahead of."""

    def draft(self, asked: SequenceOf[DraftInput], spec: SpeculationConfig) -> list[ProposedTree]:
        proposed = super().draft(asked, spec)
        if spec.topk > 1:
            return proposed
        found = []
        for one in asked:
            new = one.extension
            [last] = self.extend([new])
            base = new.base + len(new.tokens)
            request = DraftRequest(new.pages, base, last, one.params, one.choice, new.offset)
            chain = self.chain(request, spec.steps)
            found.append(ProposedTree(chain.tree, chain))  # type: ignore[arg-type]
        return found

    def chain(self, request: DraftRequest, steps: int) -> Chain:
        """As `propose` makes it, with what its rows have joined."""
        [tree] = self.propose([request], SpeculationConfig(steps))
        tokens, inputs = list(tree.tokens), [request.last.features]
        for step, token in enumerate(tokens[:-1]):
            span = QuerySpan(request.pages, request.base + step, 1, offset=request.offset)
            inputs.append(self.forward([span], [token], inputs[-1][None], step + 1).features[0])
        return Chain(tokens, torch.stack(inputs))


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

    span: QuerySpan
    tokens: list[int]
    features: torch.Tensor
    picked: range
    noise: list[SampledRow]


class Ahead:
    """The outcomes of one round, and how far they are drafted. `fan_out`: as the function gives it.

    Its first pass runs the certain rows and the chain, and finds the outcomes; each later one adds a token
    below every outcome. The rows behind the certain ones are scratch: nothing is kept of their KV.
    """

    def __init__(self, verified: VerifiedRound, fan_out: SequenceOf[int]) -> None:
        assert isinstance(verified.chain, Chain)
        self._round, self._chain = verified, verified.chain
        self._certain = verified.draft_input.extension
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
        span = QuerySpan(certain.pages, certain.base, len(tokens), offset=certain.offset)
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
        span = QuerySpan(certain.pages, base, len(forks), paths, certain.offset)
        noise = [self._noise(fork.accepted + level + 1) for fork in forks]
        tokens = [fork.tokens[-1] for fork in forks]
        return Pass(span, tokens, self._entering, range(len(forks)), noise)

    def _noise(self, depth: int) -> SampledRow:
        """Of the token that stands `depth` + 1 below the round's root."""
        position = self._certain.offset + self._round.base + 1 + depth
        return SampledRow(
            self._round.draft_input.params, self._round.draft_input.choice, position, (), (), ()
        )


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


class PlainAhead:
    """Drafts ahead of rounds as a device's does, one forward at a time."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner

    def rows(self, chain: Chain, root: int) -> int:
        return rows_ahead(len(chain.tokens), OUTCOMES)

    def begin(self, verified: VerifiedRound, acceptance: float) -> Ahead:
        return Ahead(verified, fan_out(len(verified.chain.tokens), acceptance, OUTCOMES))

    def advance(self, rounds: SequenceOf[Ahead]) -> None:
        advance(self._runner, rounds)
