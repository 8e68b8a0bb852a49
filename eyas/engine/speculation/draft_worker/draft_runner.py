"""Runs a draft head over paged draft KV: extends sequences by certain rows, then proposes from the last one.

The colocated drafter and the draft service both use it. A tree of drafts is grown from the head's
probabilities (EAGLE-2, section 3), in plain numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch

from eyas.common.config import SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch, build_batch
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.batch.tree import NO_TREE, ROOT, DraftTree
from eyas.engine.checkpoint.config import DraftBlock
from eyas.engine.ipc.row_ring import RingRow
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import CoupledDraftModel, Drafted, DraftModel
from eyas.engine.sampling.sampler import SampledRow, draft_probabilities, perturbed


@dataclass(frozen=True)
class DraftExtension:
    """Certain rows of one sequence: `tokens` [n], where tokens[j] is at position base + j + 1, and
    `features` [n - r, width] of the first ones; those of the last r are `ringed`.

    `offset` is the position of the sequence's row 0; it is above 0 for a sequence that starts from a window.
    `adapter`: the slot of the sequence's, whose updates of the head count here; 0: none's.
    """

    pages: SequenceOf[int]
    base: int
    tokens: SequenceOf[int]
    features: torch.Tensor
    offset: int = 0
    ringed: SequenceOf[RingRow] = ()
    adapter: int = 0


@dataclass(frozen=True)
class DraftInput:
    """Certain rows of one sequence, and the wish for a proposal below the last of them.

    `owner`: the sequence, as any object that is the same whenever it asks. `params` and `choice` key the
    noise. `lowest`: the position of its first row; what lies below it in its pages is no row of it.
    """

    owner: Hashable
    extension: DraftExtension
    params: SamplingParams
    choice: int
    lowest: int = 0


@dataclass(frozen=True)
class DraftRequest:
    """Asks for a proposal below row `base`, that of the token `root`. `last`: what row base - 1 gave.

    `params` and `choice` key the noise; `offset` and `adapter` as in `DraftExtension`.
    """

    pages: SequenceOf[int]
    base: int
    last: Drafted
    params: SamplingParams
    choice: int
    root: int
    offset: int = 0
    adapter: int = 0

    def span(self, start: int, count: int, **more: Any) -> QuerySpan:
        """Some of its rows."""
        return QuerySpan(self.pages, start, count, offset=self.offset, adapter=self.adapter, **more)

    @classmethod
    def below(cls, new: DraftExtension, last: Drafted, params: SamplingParams, choice: int) -> DraftRequest:
        """Asks for one below the rows `new`, of which the newest gave `last`."""
        base = new.base + len(new.tokens)
        return cls(new.pages, base, last, params, choice, new.tokens[-1], new.offset, new.adapter)


def chain_of(tokens: SequenceOf[int]) -> DraftTree:
    """Drafts each of which stands below the one before."""
    return DraftTree(tokens, range(-1, len(tokens) - 1))


class ProposedTree(NamedTuple):
    """A proposal. `whole`: all its features were there; if not, the tree is made of others."""

    tree: DraftTree
    whole: bool = True


class DraftRunner:
    """A draft head with its KV pool and attention backend. Whole batches; one thread."""

    alignment = 1
    """Row 0 of a sequence may stand at any multiple of this number of positions."""

    def __init__(self, head: DraftModel[ForwardBatch], pool: KvPool, backend: AttentionBackend) -> None:
        self.head = head
        self._pool = pool
        self._backend = backend

    @property
    def pool(self) -> KvPool:
        """The pool of the draft KV."""
        return self._pool

    def draft_rows(self, spec: SpeculationConfig | None) -> int:
        """How many rows behind the certain ones a proposal of `spec` may write; None: there is none."""
        block = self.head.block
        if spec is None:
            return 0
        return spec.steps * spec.topk if block is None else block.width(spec.steps)

    def draft(self, inputs: SequenceOf[DraftInput], spec: SpeculationConfig | None) -> list[ProposedTree]:
        """Writes the draft KV of all their rows, and proposes for each; without `spec` nothing."""
        drafted = self.extend([one.extension for one in inputs])
        if spec is None:
            return [ProposedTree(NO_TREE) for _ in inputs]
        requests = [
            DraftRequest.below(one.extension, last, one.params, one.choice)
            for one, last in zip(inputs, drafted, strict=True)
        ]
        return [ProposedTree(tree) for tree in self.propose(requests, spec)]

    def extend(self, extensions: SequenceOf[DraftExtension]) -> list[Drafted]:
        """Writes the draft KV of the rows; returns what the head gave for each sequence's last row."""
        spans = [
            QuerySpan(e.pages, e.base, len(e.tokens), offset=e.offset, adapter=e.adapter) for e in extensions
        ]
        tokens = [t for e in extensions for t in e.tokens]
        drafted = self._forward(spans, tokens, torch.cat([e.features for e in extensions]))
        ends = torch.tensor([len(e.tokens) for e in extensions]).cumsum(0) - 1
        return [Drafted(*last) for last in zip(drafted.rows[ends], drafted.features[ends], strict=True)]

    def propose(self, requests: SequenceOf[DraftRequest], spec: SpeculationConfig) -> list[DraftTree]:
        """One draft per request: a chain of spec.steps tokens, or a tree of spec.draft_tokens - 1 nodes."""
        if self.head.block is not None:
            return self._blocks(requests, self.head.block, spec.steps)
        if spec.topk > 1:
            return self._trees(requests, spec)
        return self._chains(requests, spec.steps)

    def _newest(self, requests: SequenceOf[DraftRequest]) -> Drafted:
        """What the row before each one's first draft gave. A whole model has yet to run that of the root."""
        last = _stacked(requests)
        if not self.head.whole:
            return last
        spans = [w.span(w.base, 1) for w in requests]
        return self._forward(spans, [w.root for w in requests], last.features, depth=1)

    def _chains(self, requests: SequenceOf[DraftRequest], steps: int) -> list[DraftTree]:
        """The last token of a chain gets no draft row."""
        last, behind = self._newest(requests), int(self.head.whole)
        drafted = []
        for step in range(steps):
            rows = [_row(w, w.offset + w.base + 1 + step) for w in requests]
            scores = perturbed(self.head.logits(last.rows), rows, self.head.token_map)
            drafted.append(self._targets(scores.argmax(-1)).tolist())
            if step + 1 < steps:
                spans = [w.span(w.base + behind + step, 1) for w in requests]
                last = self._forward(spans, drafted[-1], last.features, step + 1)
        return [chain_of(tokens) for tokens in zip(*drafted, strict=True)]

    def _blocks(self, requests: SequenceOf[DraftRequest], block: DraftBlock, steps: int) -> list[DraftTree]:
        """Chains of which one pass gives all drafts."""
        width, last = block.width(steps), _stacked(requests)
        scored = last.rows.unsqueeze(1)
        if width:
            together = not block.causal
            spans = [w.span(w.base, width, together=together) for w in requests]
            tokens = [token for w in requests for token in block.tokens(w.root, width)]
            made = self._forward(spans, tokens, last.features, depth=1).rows
            made = made.unflatten(0, (len(requests), width))
            scored = torch.cat((scored, made), 1) if block.first < 0 else made[:, block.first :]
        logits = self.head.logits(scored.flatten(0, 1)).unflatten(0, (len(requests), steps))
        couple = cast(CoupledDraftModel[ForwardBatch], self.head).coupling(scored) if block.coupling else None
        before, drafted = torch.tensor([w.root for w in requests], device=logits.device), []
        for step in range(steps):
            scores = logits[:, step] if couple is None else couple(logits[:, step], step, before)
            rows = [_row(w, w.offset + w.base + 1 + step) for w in requests]
            before = self._targets(perturbed(scores, rows, self.head.token_map).argmax(-1))
            drafted.append(before.tolist())
        return [chain_of(tokens) for tokens in zip(*drafted, strict=True)]

    def _trees(self, requests: SequenceOf[DraftRequest], spec: SpeculationConfig) -> list[DraftTree]:
        """EAGLE-2: every level runs the k best nodes of each sequence, so k rows per sequence."""
        growing = [TreeExpansion(spec.topk, spec.draft_tokens) for _ in requests]
        last = self._newest(requests)  # rows of sequences (x k)
        for level in range(spec.steps):
            logits = self.head.logits(last.rows)
            width = logits.shape[0] // len(requests)
            rows = [_row(w, w.offset + w.base + 1 + level) for w in requests for _ in range(width)]
            probs, ids = draft_probabilities(logits, rows, self.head.token_map).topk(spec.topk)
            tokens = self._targets(ids).view(len(requests), -1, spec.topk).tolist()
            scores = probs.view(len(requests), -1, spec.topk).tolist()
            for tree, t, s in zip(growing, tokens, scores, strict=True):
                tree.grow(t, s)
            if level + 1 < spec.steps:
                last = self._level(requests, growing, last.features, level + 1)
        return [tree.select() for tree in growing]

    def _level(
        self,
        requests: SequenceOf[DraftRequest],
        growing: SequenceOf[TreeExpansion],
        features: torch.Tensor,
        level: int,
    ) -> Drafted:
        """Run the frontier below `level` others: node g of level l is written at row base + l * k + g, by a
        whole model one row further.

        `features`: of the level above, those of one sequence after those of another.
        """
        spans, tokens, sources = [], [], []
        width = features.shape[0] // len(requests)
        for i, (request, tree) in enumerate(zip(requests, growing, strict=True)):
            frontier, base = tree.frontier(), request.base + self.head.whole
            paths = tuple(tuple(base + row for row in node.rows) for node in frontier)
            spans.append(request.span(base, len(frontier), paths=paths))
            tokens += [node.token for node in frontier]
            sources += [i * width + node.parent_slot for node in frontier]
        return self._forward(spans, tokens, features[torch.tensor(sources)], level)

    def _forward(
        self, spans: SequenceOf[QuerySpan], tokens: SequenceOf[int], features: torch.Tensor, depth: int = 0
    ) -> Drafted:
        """The head over the spans' rows, in order, one token and one of `features` [R, width] per row.

        `depth`: of the rows, below the certain ones.
        """
        batch = build_batch(spans, tokens, self._pool.page_size, self._backend, depth)
        return self.head.forward(features, batch.tokens, batch, self._pool)

    def _targets(self, ids: torch.Tensor) -> torch.Tensor:
        """The target's ids of these ids of the draft vocabulary."""
        return ids if self.head.token_map is None else self.head.token_map[ids]


def _stacked(requests: SequenceOf[DraftRequest]) -> Drafted:
    rows, features = zip(*(request.last for request in requests), strict=True)
    return Drafted(torch.stack(rows), torch.stack(features))


def _row(request: DraftRequest, position: int) -> SampledRow:
    return SampledRow(request.params, request.choice, position, (), (), ())


@dataclass(frozen=True)
class FrontierNode:
    """A candidate that the draft head runs next.

    `candidate` is its flat index among all candidates, and `parent_slot` the place of its parent in the
    previous frontier. With k nodes per level, slot g of level l is draft row l * k + g; `rows` lists the rows
    of the node's path, its own last.
    """

    candidate: int
    token: int
    score: float
    parent_slot: int
    rows: tuple[int, ...]


class TreeExpansion:
    """Grows one EAGLE-2 tree: the k best candidates of each level are expanded, the best of all are kept.

    A candidate's score is the product of the draft probabilities on its path. Of equal scores the lower flat
    index wins. A child never scores above its parent and always has a higher index, so the parent of a kept
    node is always kept too.
    """

    def __init__(self, topk: int, draft_tokens: int) -> None:
        """`draft_tokens` counts the root: the final tree has at most draft_tokens - 1 nodes."""
        self._topk = topk
        self._draft_tokens = draft_tokens
        self._tokens: list[int] = []
        self._scores: list[float] = []
        self._parents: list[int] = []
        self._frontier = [FrontierNode(ROOT, token=-1, score=1.0, parent_slot=0, rows=())]
        self._level = 0

    def grow(self, tokens: SequenceOf[SequenceOf[int]], probabilities: SequenceOf[SequenceOf[float]]) -> None:
        """Adds the children of each frontier node, best first. Both are [1, k] at first, then [k, k]."""
        first = len(self._tokens)
        slots = []
        for slot, parent in enumerate(self._frontier):
            for token, probability in zip(tokens[slot], probabilities[slot], strict=True):
                self._tokens.append(token)
                self._scores.append(parent.score * _sane(probability))
                self._parents.append(parent.candidate)
                slots.append(slot)
        best = self._best(range(first, len(self._tokens)), self._topk)
        self._frontier = [self._node(q, slots[q - first], g) for g, q in enumerate(best)]
        self._level += 1

    def frontier(self) -> list[FrontierNode]:
        """The k best candidates of the last level, best first."""
        return self._frontier

    def select(self) -> DraftTree:
        """The tree of the best candidates of all levels, in the order of their flat indices."""
        chosen = sorted(self._best(range(len(self._tokens)), self._draft_tokens - 1))
        place = {ROOT: ROOT} | {q: i for i, q in enumerate(chosen)}
        return DraftTree([self._tokens[q] for q in chosen], [place[self._parents[q]] for q in chosen])

    def _best(self, candidates: Iterable[int], count: int) -> list[int]:
        return sorted(candidates, key=lambda q: (-self._scores[q], q))[:count]

    def _node(self, q: int, parent_slot: int, slot: int) -> FrontierNode:
        rows = (*self._frontier[parent_slot].rows, self._level * self._topk + slot)
        return FrontierNode(q, self._tokens[q], self._scores[q], parent_slot, rows)


def _sane(probability: float) -> float:
    """Clamped to 0 .. 1, NaN to 0: rounding (or a broken head) must not lift a child above its parent."""
    return min(probability, 1.0) if probability > 0.0 else 0.0
