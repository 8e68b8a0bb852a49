"""The specification of a step: one forward for all works, then one sampling call for all sampled rows.

The scheduler has decided which works run, and `StepCommitter` decides what their tokens change.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from functools import partial

import torch

from eyas.engine.attention.forward import ForwardBatch, rows_of_adapters
from eyas.engine.batch.sequence import SequenceWork
from eyas.engine.batch.spans import QuerySpan, StatePlace
from eyas.engine.batch.step_result import StepResult
from eyas.engine.batch.stopping import banned_ids
from eyas.engine.batch.tree import DraftCounts
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.kv.pool import KvPool
from eyas.engine.layers.adapted import RowsOfSlots
from eyas.engine.loop.forwards import StepForward
from eyas.engine.models.base import DecoderModel, FeatureTap
from eyas.engine.models.ops.recording import ExpertRecorder
from eyas.engine.parallel.step_calls import StepRows
from eyas.engine.sampling.sampler import SampledRow, SampledTokens, sample
from eyas.engine.sampling.scores import score_slices
from eyas.engine.speculation.verify import walk


@dataclass(frozen=True)
class ComputedStep:
    """A step whose results have been computed."""

    works: SequenceOf[SequenceWork]
    results: SequenceOf[StepResult]
    launched: float
    shape: None = None
    depth: None = None
    over: bool = True

    def complete(self) -> None:
        """Does nothing: the step is complete."""

    def land(self) -> SequenceOf[StepResult]:
        """The results, one per work."""
        return self.results


class PlainRunner:
    """Computes steps in plain torch.

    `pools`: the target's first; a draft head's pool uses the same page numbers. `forward` runs the rows
    through the layers, `model` makes the logits.
    """

    drafts = False
    ahead = False
    draft_wait_s = 0.0

    def __init__(
        self,
        model: DecoderModel[ForwardBatch],
        pools: tuple[KvPool, ...],
        forward: StepForward,
        tap: FeatureTap | None,
        grammars: GrammarManager | None,
        beat: Beat = no_pulse,
    ) -> None:
        """`grammars`: masks of requests with a grammar, if any. `beat` is called after each work's rows."""
        self.model = model
        self._pools = pools
        self._forward = forward
        self._tap = tap
        self._grammars = grammars
        self._beat = beat
        self._eos_ids = model.config.eos_token_ids
        self._recorder: ExpertRecorder | None = None  # made for the first request that reports experts

    def copy_page(self, source: int, target: int) -> None:
        """Copies page `source` to page `target`, in every pool."""
        for pool in self._pools:
            pool.copy_page(source, target)

    def copy_state(self, source: int, target: int) -> None:
        """Copies slot `source` of the recurrent states to slot `target`."""
        states = self._pools[0].states
        assert states is not None
        states.copy(source, target)

    def wait(self) -> None:
        """Waits for page copies; steps have been computed when `launch` returns."""
        pages = self._pools[0].pages
        if pages.is_cuda:
            torch.cuda.current_stream(pages.device).synchronize()

    def close(self) -> bool:
        """Closes the forward, and with it the other ranks, after the last step. False if a rank was lost."""
        return self._forward.close()

    @torch.inference_mode()
    def launch(self, works: SequenceOf[SequenceWork]) -> ComputedStep:
        """Computes the whole step before it returns."""
        launched, pool = time.monotonic(), self._pools[0]
        spans, tokens = [_span(w) for w in works], [t for work in works for t in work.tokens]
        layers = self._tap.layers if self._tap else ()
        with self._recording() if any(map(_reports_experts, works)) else contextlib.nullcontext():
            residual, tapped = self._forward(StepRows(spans, tokens, layers))
        adapters = rows_of_adapters(spans, residual.device)
        features = None
        if self._tap is not None:
            features = self._tap.features(tapped, torch.tensor(tokens, device=tapped.device))

        picked: list[int] = []
        rows: list[SampledRow] = []
        counts: list[int] = []  # sampled rows of each work
        first = 0
        for work in works:
            self._beat()
            sampled_rows = self._rows(work)
            rows += sampled_rows
            counts.append(len(sampled_rows))
            picked += _picked(work, first, len(sampled_rows))
            first += len(work.tokens)
        sampled = SampledTokens([], [])
        if rows:
            self._beat()
            places = torch.tensor(picked, device=residual.device)
            sampled = sample(self.model.logits(residual, places, adapters=adapters), rows)
        landed = self._scored(verified(works, counts, sampled, features, pool), residual, adapters)
        self._cleanse([result.work for result in landed if not result.finite])
        if residual.is_cuda:
            torch.cuda.current_stream(residual.device).synchronize()  # its pages may be copied from now on
        return ComputedStep(works, landed, launched)

    def _recording(self) -> contextlib.AbstractContextManager[None]:
        """Records the experts that the rows of a forward take."""
        self._recorder = self._recorder or ExpertRecorder(self.model.config)
        return self._recorder.hearing(self.model)

    def _cleanse(self, works: list[SequenceWork]) -> None:
        """Replaces NaN and infinity in these sequences' pages: the next owner of a page attends over all of
        it, and a weight of 0 times NaN is NaN. Finite numbers, which other sequences may share, do not
        change.
        """
        for pool in self._pools if works else ():
            tables = (table for work in works for table in work.seq.tables)
            pages = torch.tensor(sorted({page for table in tables for page in table.owned}))
            pool.cleanse(pages)

    def _scored(
        self, results: list[StepResult], residual: torch.Tensor, adapters: RowsOfSlots
    ) -> list[StepResult]:
        """A copy of the results with the requested log-probabilities of the prompts' rows."""
        first, logits = 0, partial(self.model.logits, residual, adapters=adapters)
        for i, result in enumerate(results):
            request = result.work.score_request(first)
            first += len(result.work.tokens)
            if request is not None:
                rows = torch.tensor(request.places, device=residual.device)
                tokens = torch.tensor(request.tokens, device=residual.device)
                scores = score_slices(rows, tokens, request.top, logits)
                if request.experts:
                    assert self._recorder is not None
                    scores = replace(scores, experts=self._recorder.rows(rows))
                results[i] = result._replace(scores=(request, scores.packed()))
        return results

    def _rows(self, work: SequenceWork) -> list[SampledRow]:
        """The sampling context of every row of `work` that yields a token."""
        if not work.sample:
            return []
        seq, params = work.seq, work.seq.generation.request.params
        banned = banned_ids(params, self._eos_ids, len(seq.output))
        masks = self._grammars.masks(seq, work.tree) if self._grammars is not None else ()
        first = masks[0] if masks else None
        if work.tree is None:
            choices = (seq.choice, *seq.forks)
            return [
                SampledRow(params, c, len(seq), seq.prompt, seq.output, (), banned, first) for c in choices
            ]
        rows = [SampledRow(params, seq.choice, len(seq), seq.prompt, seq.output, (), banned, first)]
        for node in range(len(work.tree.tokens)):
            ancestors = [work.tree.tokens[i] for i in work.tree.path(node)]
            depth = len(ancestors)
            banned = banned_ids(params, self._eos_ids, len(seq.output) + depth)
            at, mask = len(seq) + depth, masks[1 + node] if masks else None
            rows.append(SampledRow(params, seq.choice, at, seq.prompt, seq.output, ancestors, banned, mask))
        return rows


def verified(
    works: SequenceOf[SequenceWork],
    counts: SequenceOf[int],
    sampled: SampledTokens,
    features: torch.Tensor | None,
    pool: KvPool,
) -> list[StepResult]:
    """The result of each work, which has `counts` sampled rows; moves the KV rows of accepted drafts in
    place.
    """
    landed: list[StepResult] = []
    moves: list[tuple[int, int]] = []
    in_rings: list[tuple[int, int, int]] = []
    first, at = 0, 0
    for work, count in zip(works, counts, strict=True):
        own = None if features is None else features[first : first + len(work.tokens)]
        share = SampledTokens(sampled.tokens[at : at + count], sampled.logprobs[at : at + count])
        result, nodes = _walked(work, share, own) if work.tree else _plain(work, share, own)
        landed.append(result)
        moves += _moves(work, nodes, pool.page_size)
        if (slot := work.seq.state) >= 0:
            in_rings += [(slot, *pair) for pair in _moved(work, nodes)]
        first += len(work.tokens)
        at += count
    if moves:
        sources, targets = zip(*moves, strict=True)
        pool.move(torch.tensor(sources), torch.tensor(targets))
    if in_rings:
        assert pool.states is not None
        pool.states.move(*torch.tensor(in_rings).T)
    return landed


def _plain(
    work: SequenceWork, share: SampledTokens, features: torch.Tensor | None
) -> tuple[StepResult, list[int]]:
    """The result of a row without drafts, or of a chunk; a prompt's last row has a token for each choice."""
    firsts = zip(share.tokens[1:], share.logprobs[1:], strict=True)
    forks = dict(zip(work.seq.forks, firsts, strict=True)) if work.sample else {}
    landed = StepResult(work, tuple(share.tokens[:1]), share.logprobs[:1], forks=forks, features=features)
    return landed, list(range(len(work.tokens)))


def _walked(
    work: SequenceWork, share: SampledTokens, features: torch.Tensor | None
) -> tuple[StepResult, list[int]]:
    """The result of a round with drafts: those that the target accepts, from the root down."""
    assert work.tree is not None
    verdict = walk(work.tree, share.tokens)
    nodes = [0, *(1 + node for node in verdict.path)]
    landed = StepResult(
        work,
        verdict.tokens,
        [share.logprobs[node] for node in nodes],
        DraftCounts(len(verdict.path), work.tree.height, len(work.tree)),
        features=None if features is None else features[nodes],
    )
    return landed, nodes


def _moves(work: SequenceWork, nodes: list[int], page_size: int) -> list[tuple[int, int]]:
    """Physical KV rows of the accepted nodes and their destinations: (source, target)."""

    def physical(pages: list[int], row: int) -> int:
        return pages[row // page_size] * page_size + row % page_size

    tables = [table.pages for table in work.seq.tables]
    return [(physical(pages, a), physical(pages, b)) for pages in tables for a, b in _moved(work, nodes)]


def _moved(work: SequenceWork, nodes: list[int]) -> list[tuple[int, int]]:
    """Logical rows of the accepted nodes and their destinations, start, start + 1, ...: (source, target)."""
    return [(work.start + node, work.start + i) for i, node in enumerate(nodes) if node != i]


def _picked(work: SequenceWork, first: int, count: int) -> list[int]:
    """The step's rows that are sampled: all of a round with drafts, the last of a prompt."""
    if work.tree is not None:
        return list(range(first, first + count))
    return [first + len(work.tokens) - 1] * count


def _reports_experts(work: SequenceWork) -> bool:
    request = work.score_request()
    return request is not None and request.experts


def _span(work: SequenceWork) -> QuerySpan:
    tree = work.tree
    pages, *others = (table.pages for table in work.seq.tables)
    state = None
    if work.seq.state >= 0:
        state = StatePlace(work.seq.state, work.seq.bound, work.fold, work.occupancy)
    span = QuerySpan(
        *(pages, work.start, len(work.tokens)),
        others=tuple(others),
        state=state,
        adapter=work.seq.adapter_slot,
    )
    if tree is None or tree.is_chain:
        return span
    root = (work.start,)
    below = [root + tuple(work.start + 1 + i for i in tree.path(node)) for node in range(len(tree.tokens))]
    return replace(span, paths=(root, *below))
