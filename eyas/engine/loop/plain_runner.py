"""Runs one step on the device: every `Work` in one forward, then one sampling call for all sampled rows.

It knows tensors and the model; it decides nothing: what runs was chosen by the scheduler, what the tokens
mean is decided by the engine.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

import torch

from eyas.common.types import PromptLogprobs, TokenLogprob
from eyas.engine.attention.base import AttentionBackend
from eyas.engine.attention.forward import ForwardBatch, build_batch
from eyas.engine.batch.prompt_scores import Asked
from eyas.engine.batch.sequence import Work
from eyas.engine.batch.spans import Span
from eyas.engine.batch.stopping import banned_ids
from eyas.engine.kv.pool import KvPool
from eyas.engine.models.base import DecoderModel, FeatureTap
from eyas.engine.sampling.sampler import Row, Sampled, sample
from eyas.engine.sampling.scores import score_slices


@dataclass(frozen=True)
class Output:
    """What a step computed for one `Work`.

    `chosen`: the target's token at every sampled node: [root, node 0, ...] of a verify row; of a prompt's
    last row one token for the sequence itself and one for each of its forks. `features`: [rows, head
    width], or None without a head.
    """

    work: Work
    chosen: list[int]
    logprobs: list[TokenLogprob | None]
    features: torch.Tensor | None
    scores: tuple[Asked, PromptLogprobs] | None = None


class Runner:
    def __init__(
        self,
        model: DecoderModel[ForwardBatch],
        pool: KvPool,
        backend: AttentionBackend,
        tap: FeatureTap | None,
    ) -> None:
        self.model = model
        self.pool = pool
        self._backend = backend
        self._tap = tap
        self._eos_ids = model.config.eos_token_ids

    @torch.inference_mode()
    def run(self, works: SequenceOf[Work]) -> list[Output]:
        tokens = [t for work in works for t in work.tokens]
        batch = build_batch([_span(w) for w in works], tokens, self.pool.page_size, self._backend)
        layers = self._tap.layers if self._tap else ()
        residual, tapped = self.model.forward(batch, self.pool, layers)
        features = self._tap.features(tapped) if self._tap else None

        picked: list[int] = []
        rows: list[Row] = []
        counts: list[int] = []  # sampled rows of each work
        first = 0
        for work in works:
            mine = self._rows(work)
            rows += mine
            counts.append(len(mine))
            picked += _picked(work, first, len(mine))
            first += len(work.tokens)
        sampled = Sampled([], [])
        if rows:
            places = torch.tensor(picked, device=residual.device)
            sampled = sample(self.model.logits(residual, places), rows)
        outputs = _outputs(works, counts, sampled, features)
        return self._scored(outputs, residual)

    def _scored(self, outputs: list[Output], residual: torch.Tensor) -> list[Output]:
        """With the log-probabilities of the prompts' rows that somebody asked for."""
        first = 0
        for i, out in enumerate(outputs):
            asked = out.work.asked(first)
            first += len(out.work.tokens)
            if asked is not None:
                rows = torch.tensor(asked.places, device=residual.device)
                tokens = torch.tensor(asked.tokens, device=residual.device)
                found = score_slices(rows, tokens, asked.top, lambda some: self.model.logits(residual, some))
                outputs[i] = replace(out, scores=(asked, found.packed()))
        return outputs

    def _rows(self, work: Work) -> list[Row]:
        """The sampling context of every row of `work` that gives a token."""
        if not work.sample:
            return []
        seq, params = work.seq, work.seq.generation.request.params
        banned = banned_ids(params, self._eos_ids, len(seq.output))
        if work.tree is None:
            choices = (seq.choice, *seq.forks)
            return [Row(params, c, len(seq), seq.prompt, seq.output, (), banned) for c in choices]
        rows = [Row(params, seq.choice, len(seq), seq.prompt, seq.output, (), banned)]
        for node in range(len(work.tree.tokens)):
            ancestors = [work.tree.tokens[i] for i in work.tree.path(node)]
            depth = len(ancestors)
            banned = banned_ids(params, self._eos_ids, len(seq.output) + depth)
            rows.append(Row(params, seq.choice, len(seq) + depth, seq.prompt, seq.output, ancestors, banned))
        return rows


def _outputs(
    works: SequenceOf[Work], counts: SequenceOf[int], sampled: Sampled, features: torch.Tensor | None
) -> list[Output]:
    """Each work's share of the step's sampled tokens and feature rows."""
    outputs, first, at = [], 0, 0
    for work, count in zip(works, counts, strict=True):
        mine = None if features is None else features[first : first + len(work.tokens)]
        here = slice(at, at + count)
        outputs.append(Output(work, sampled.tokens[here], sampled.logprobs[here], mine))
        first += len(work.tokens)
        at += count
    return outputs


def _picked(work: Work, first: int, count: int) -> list[int]:
    """Which of the step's rows the sampled ones are: all of a verify row, the last of a prompt."""
    if work.tree is not None:
        return list(range(first, first + count))
    return [first + len(work.tokens) - 1] * count


def _span(work: Work) -> Span:
    tree = work.tree
    if tree is None or tree.is_chain:
        return Span(work.seq.pages, work.start, len(work.tokens))
    root = (work.start,)
    below = [root + tuple(work.start + 1 + i for i in tree.path(node)) for node in range(len(tree.tokens))]
    return Span(work.seq.pages, work.start, len(work.tokens), (root, *below))
