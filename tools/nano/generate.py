"""Batched generation with a plain key-value cache, and a plain speculative loop for one chat.

They are the references of this folder: no pages, no graphs, no scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas.train.heads.base import DraftHead
from eyas.train.model import CacheView, KvCache, grouped_attention
from tools.nano.model import NanoModel

CHAIN = 5
COMPACT_EVERY = 16


@dataclass(frozen=True)
class SamplingOptions:
    """The sampling of tokens, and the end of a row: at a `stop` id or after `max_new` tokens."""

    stop: tuple[int, ...]
    max_new: int
    temperature: float = 0.0
    seed: int = 0


def choose(logits: Tensor, sampling: SamplingOptions, noise: torch.Generator) -> Tensor:
    """One token per row of `logits` [rows, vocab]."""
    if sampling.temperature == 0:
        return logits.argmax(-1)
    uniform = torch.rand(logits.shape, generator=noise, device=logits.device).clamp(1e-9, 1 - 1e-7)
    return (logits / sampling.temperature - (-uniform.log()).log()).argmax(-1)


@torch.inference_mode()
def generate(model: NanoModel, prompts: list[list[int]], sampling: SamplingOptions) -> list[list[int]]:
    """Continues all prompts in one batch, padded on the left; an answer keeps its stop token.

    Rows that have ended are removed from the batch from time to time, so that long answers cost little.
    """
    device = model.embed_tokens.weight.device
    width = max(map(len, prompts))
    new = torch.tensor([[0] * (width - len(row)) + row for row in prompts], device=device)
    pad = torch.tensor([width - len(row) for row in prompts], device=device)
    cache = KvCache(model.config, len(prompts), width + sampling.max_new, model.embed_tokens.weight)
    noise = torch.Generator(device).manual_seed(sampling.seed)
    stops = torch.tensor(sampling.stop, device=device)
    active = torch.arange(len(prompts), device=device)
    answers = torch.full((len(prompts), sampling.max_new), -1, device=device)
    for step in range(sampling.max_new):
        start = 0 if step == 0 else width + step - 1
        view, positions = _view(cache, start, new.shape[1], pad)
        hidden, _ = model(new, positions, view)
        token = choose(model.logits(hidden[:, -1]), sampling, noise)
        answers[active, step] = token
        alive = ~torch.isin(answers[active], stops).any(-1)
        if not alive.any():
            break
        if step % COMPACT_EVERY == 0 and alive.sum() < 0.8 * len(alive):
            cache.keep(alive)
            active, pad, token = active[alive], pad[alive], token[alive]
        new = token[:, None]
    return [until_stop([token for token in row if token >= 0], sampling.stop) for row in answers.tolist()]


def _view(cache: KvCache, start: int, count: int, pad: Tensor) -> tuple[CacheView, Tensor]:
    """The places of the next rows, the columns that they see (themselves at least), and their positions."""
    rows = torch.arange(start, start + count, device=pad.device)
    seen = torch.arange(start + count, device=pad.device)
    mask = (seen <= rows[:, None])[None] & (seen >= pad[:, None])[:, None] | (seen == rows[:, None])[None]
    return CacheView(cache, start, mask), (rows[None] - pad[:, None]).clamp(min=0)


@dataclass
class AcceptanceCounts:
    """Counts of a speculative run."""

    rounds: int = 0
    tokens: int = 0
    by_depth: list[int] = field(default_factory=lambda: [0] * CHAIN)

    def add(self, accepted: int, made: int) -> None:
        """Counts one round; tokens after a stop are not counted."""
        self.rounds += 1
        self.tokens += made
        for depth in range(accepted):
            self.by_depth[depth] += 1

    @property
    def length(self) -> float:
        """Tokens per verify step, the model's own included."""
        return self.tokens / max(1, self.rounds)


def until_stop(tokens: list[int], stop: tuple[int, ...]) -> list[int]:
    """The tokens up to the first stop token, which is included."""
    ends = [index for index, token in enumerate(tokens) if token in stop]
    return tokens[: ends[0] + 1] if ends else tokens


class HeadRows:
    """The draft head's keys and values: true rows, then the rows of the current chain."""

    def __init__(self) -> None:
        self.key: Tensor | None = None
        self.value: Tensor | None = None

    def cut(self, rows: int) -> None:
        """Drops all rows after the first `rows`, which are the true ones."""
        if self.key is not None and self.value is not None:
            self.key, self.value = self.key[:, :, :rows], self.value[:, :, :rows]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Appends these rows and attends causally."""
        self.key = k if self.key is None else torch.cat((self.key, k), 2)
        self.value = v if self.value is None else torch.cat((self.value, v), 2)
        new, seen = q.shape[2], self.key.shape[2]
        mask = torch.ones(new, seen, dtype=torch.bool, device=q.device).tril(seen - new)
        return grouped_attention(q, self.key, self.value, mask[None])


def draft_chain(
    head: DraftHead, target: NanoModel, rows: HeadRows, features: Tensor, tokens: list[int], base: int
) -> list[int]:
    """Extends the head over the true pairs from position `base` on, then drafts a chain of CHAIN tokens."""
    device = features.device
    position = torch.arange(base, base + len(tokens), device=device)[None]
    embeds = target.embed_tokens(torch.tensor([tokens], device=device))
    state = head(embeds, head.enter(features), position, rows)[:, -1:]
    length, drafts = base + len(tokens), []
    for step in range(CHAIN):
        drafts.append(int(head.logits(state)[0, -1].argmax()))
        if step < CHAIN - 1:
            embeds = target.embed_tokens(torch.tensor([drafts[-1:]], device=device))
            state = head(embeds, state, torch.tensor([[length + step]], device=device), rows)
    rows.cut(length)
    return drafts


@torch.inference_mode()
def speculate(
    target: NanoModel, head: DraftHead, prompt: list[int], sampling: SamplingOptions, counts: AcceptanceCounts
) -> list[int]:
    """Greedy chain speculation for one chat; every round recomputes the target in full."""
    device = target.embed_tokens.weight.device
    hidden, features = target(torch.tensor([prompt], device=device))
    ids = [*prompt, int(target.logits(hidden[:, -1]).argmax())]
    rows, base = HeadRows(), 0
    while len(ids) - len(prompt) < sampling.max_new and ids[-1] not in sampling.stop:
        drafts = draft_chain(head, target, rows, features[:, base : len(ids) - 1], ids[base + 1 :], base)
        base = len(ids) - 1
        hidden, features = target(torch.tensor([ids + drafts], device=device))
        choices = target.logits(hidden[0, base:]).argmax(-1).tolist()
        accepted = 0
        while accepted < CHAIN and drafts[accepted] == choices[accepted]:
            accepted += 1
        made = until_stop(choices[: accepted + 1], sampling.stop)
        counts.add(accepted=min(accepted, len(made)), made=len(made))
        ids += made
    return ids[len(prompt) :]
