"""The EAGLE-3 head and its training: a training-time test over seven steps that feed themselves.

The pair at position i is (feature of token i, embedding of token i + 1). Its rotary position is i, the
embedding comes first, and the next step receives the hidden state before the norm. This file knows the head
and its loss; it knows no serving, no tree and no file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eyas.train.data import split_bits
from eyas.train.model import GroupedAttention, Mlp, Nano, NanoConfig, Norm, rope_table
from eyas.train.target import REPORT_EVERY, Recipe, descend, optimisers, progress, report

UNROLL = 7
DISCOUNT = 0.8
HEAD_INTERMEDIATE = 624
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


Step = Callable[..., tuple[Tensor, tuple[Tensor, Tensor], Tensor]]


def head_config(target: NanoConfig) -> NanoConfig:
    """The shape of the head for a target."""
    return replace(target, layers=1, intermediate=HEAD_INTERMEDIATE * target.hidden // 256)


class MidLayer(nn.Module):
    """A decoder layer whose attention reads the embedding and the hidden state, concatenated."""

    def __init__(self, config: NanoConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden, config.norm_eps)
        self.hidden_norm = Norm(config.hidden, config.norm_eps)
        self.self_attn = GroupedAttention(config, 2 * config.hidden)
        self.post_attention_layernorm = Norm(config.hidden, config.norm_eps)
        self.mlp = Mlp(config.hidden, config.intermediate)

    def forward(self, embeds: Tensor, hidden: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """One step: embeds, hidden [batch, rows, hidden] -> [batch, rows, hidden].

        `attend` decides which rows each query sees.
        """
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), -1)
        q, k, v = self.self_attn.project(both, rope)
        hidden = hidden + self.self_attn.join(attend(q, k, v))
        fed: Tensor = self.mlp(self.post_attention_layernorm(hidden))
        return hidden + fed


class EagleHead(nn.Module):
    """The draft head. Its caller embeds with the target's table, which the head does not own."""

    def __init__(self, target: Nano) -> None:
        super().__init__()
        self.config = head_config(target.config)
        self.fc = nn.Linear(3 * self.config.hidden, self.config.hidden, bias=False)
        self.midlayer = MidLayer(self.config)
        self.norm = Norm(self.config.hidden, self.config.norm_eps)
        self.lm_head = nn.Linear(self.config.hidden, self.config.vocab, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
        with torch.no_grad():
            self.lm_head.weight.copy_(target.embed_tokens.weight)
            self.norm.weight.copy_(target.norm.weight)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The next hidden state of each pair, before the norm: [batch, rows, hidden]."""
        cos, sin = rope_table(self.config, positions)
        state: Tensor = self.midlayer(embeds, hidden, (cos[:, None], sin[:, None]), attend)
        return state

    def logits(self, hidden: Tensor) -> Tensor:
        """The scores of all tokens: float32 [..., vocab]."""
        scores: Tensor = self.lm_head(self.norm(hidden))
        return scores.float()


@dataclass(frozen=True)
class Unrolled:
    """Keys and values of the training-time test so far: the true rows, and those of the self-fed steps.

    `keys`, `values`: [batch, heads, rows, dim]. `own_keys`, `own_values`: [batch, heads, rows, UNROLL - 2,
    dim]. `used` [UNROLL - 2] says which of them exist: so all later steps have one shape and compile once.
    """

    keys: Tensor
    values: Tensor
    own_keys: Tensor
    own_values: Tensor
    used: Tensor

    @staticmethod
    def of(steps: list[tuple[Tensor, Tensor]]) -> Unrolled:
        """Gathers the keys and values of the steps so far; the first step has the true rows."""
        (keys, values), own = steps[0], steps[1:]
        blank = [torch.zeros_like(keys)] * (UNROLL - 2 - len(own))
        used = torch.arange(UNROLL - 2, device=keys.device) < len(own)
        stacks = [torch.stack([step[i] for step in own] + blank, 3) for i in (0, 1)]
        return Unrolled(keys, values, stacks[0], stacks[1], used)


def unrolled_attention(q: Tensor, k: Tensor, v: Tensor, past: Unrolled) -> Tensor:
    """Attention of a self-fed step: row t sees the true rows up to t, then its own rows of earlier steps."""
    length = q.shape[2]
    causal = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    scores = (q @ past.keys.transpose(-1, -2)).masked_fill(~causal, -torch.inf)
    own = (q[:, :, :, None] * past.own_keys).sum(-1).masked_fill(~past.used, -torch.inf)
    itself = (q * k).sum(-1, keepdim=True)
    weights = (torch.cat((scores, own, itself), -1).float() * q.shape[-1] ** -0.5).softmax(-1).to(v.dtype)
    split = weights.split((length, UNROLL - 2, 1), -1)
    seen: Tensor = split[0] @ past.values + (split[1][..., None] * past.own_values).sum(3) + split[2] * v
    return seen


@dataclass(frozen=True)
class Lesson:
    """The inputs of one step and what it must learn.

    `embeds` [batch, rows, hidden], `positions` [1, rows], `wanted` [batch, rows, vocab]: the target's scores,
    `learnt` bool [batch, rows]: which rows count.
    """

    embeds: Tensor
    positions: Tensor
    wanted: Tensor
    learnt: Tensor


def unrolled_step(
    head: EagleHead, state: Tensor, lesson: Lesson, past: Unrolled | None
) -> tuple[Tensor, tuple[Tensor, Tensor], Tensor]:
    """One step; returns the next state, the step's keys and values, and its loss."""
    made: list[tuple[Tensor, Tensor]] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        made.append((k, v))
        if past is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return unrolled_attention(q, k, v, past)

    state = head(lesson.embeds, state, lesson.positions, attend)
    wanted = lesson.wanted.flatten(0, 1).softmax(-1)
    loss = F.cross_entropy(head.logits(state).flatten(0, 1), wanted, reduction="none")
    learnt = lesson.learnt.flatten().float()
    return state, made[0], (loss * learnt).sum() / learnt.sum().clamp(min=1)


def unrolled_loss(head: EagleHead, target: Nano, packed: Tensor, step_of: Step = unrolled_step) -> Tensor:
    """The soft cross-entropy against the target's distribution, summed over the unrolled steps."""
    ids, answer = split_bits(packed)
    rows = ids.shape[1] - UNROLL - 1
    with torch.no_grad():
        hidden, features = target(ids)
        wanted, embeds = target.logits(hidden), target.embed_tokens(ids)
    state = head.fc(features[:, :rows])
    steps: list[tuple[Tensor, Tensor]] = []
    total = torch.zeros((), device=ids.device)
    for step in range(UNROLL):
        ahead = slice(1 + step, 1 + step + rows)
        positions = torch.arange(step, step + rows, device=ids.device)[None]
        learnt = answer[:, 2 + step : 2 + step + rows]
        lesson = Lesson(embeds[:, ahead], positions, wanted[:, ahead], learnt)
        state, made, loss = step_of(head, state, lesson, Unrolled.of(steps) if steps else None)
        steps.append(made)
        total = total + DISCOUNT**step * loss
    return total


def train_head(head: EagleHead, target: Nano, stream: Iterator[Tensor], recipe: Recipe) -> None:
    """Trains the head in place; freezes the target."""
    device = head.fc.weight.device
    target.requires_grad_(False)
    opts = optimisers(head, recipe, frozenset({"lm_head.weight"}))
    step_of = torch.compile(unrolled_step, dynamic=False) if device.type == "cuda" else unrolled_step
    begun = time.time()
    with progress("head") as bar:
        task = bar.add_task("", total=recipe.steps, note="")
        for step, packed in zip(range(recipe.steps), stream, strict=False):
            with torch.autocast(device.type, torch.bfloat16):
                loss = unrolled_loss(head, target, packed.to(device, non_blocking=True), step_of)
            descend(head, loss, opts, recipe, step)
            if step % REPORT_EVERY == 0 or step == recipe.steps - 1:
                bar.update(task, completed=step + 1, note=report("head", step, loss, begun, recipe))
