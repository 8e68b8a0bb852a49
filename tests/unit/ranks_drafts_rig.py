"""A DeepSeek whose NextN layer is often right, and requests whose drafts can be compared round by round."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from tests.unit.attention_ranks_rig import alone
from tests.unit.device_engines import rounds
from tests.unit.device_ranks_rig import PLAIN
from tests.unit.loopback import Result
from tests.unit.tiny import edit
from tests.unit.tiny_deepseek import V3, write_tiny_nextn_deepseek
from tests.unit.tiny_mtp import nextn_prefix

VOCAB = V3["vocab_size"]
CHAIN = SpeculationConfig(steps=2, topk=1, draft_tokens=3)
TREE = SpeculationConfig(steps=2, topk=2, draft_tokens=4)
LOUD = 1.0  # of a token's own row, beside which the layer's experts decide
QUIET = 0.1  # of what a feature adds to it in the head
LAST = "model.layers.1"
SILENT = ("model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight")


def knowing(folder: Path, spec: SpeculationConfig = CHAIN) -> EngineConfig:
    """Only the target's last layer says anything, and the NextN layer is a copy of it: its drafts are often
    right, and only if its experts are.
    """
    write_tiny_nextn_deepseek(folder, V3)
    hidden, prefix = V3["hidden_size"], nextn_prefix(folder)
    stored, generator = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(7)
    rows = torch.randn(VOCAB, hidden, generator=generator)
    rows *= LOUD / rows.square().mean(1, keepdim=True).sqrt()
    feature = QUIET * torch.randn(hidden, hidden, generator=generator) / hidden**0.5
    changed = {name: torch.zeros_like(stored[name]) for name in SILENT}
    changed |= {
        name.replace(LAST, prefix): tensor.clone() for name, tensor in stored.items() if name.startswith(LAST)
    }
    changed |= {
        "model.embed_tokens.weight": rows,
        f"{prefix}.embed_tokens.weight": rows.clone(),
        f"{prefix}.eh_proj.weight": torch.cat((LOUD * torch.eye(hidden), feature), 1),
        "model.norm.weight": torch.ones(hidden),
    }
    norms = ("enorm", "hnorm", "shared_head.norm")
    edit(folder, changed | {f"{prefix}.{name}.weight": torch.ones(hidden) for name in norms})
    config = replace(PLAIN, model=str(folder), draft=str(folder), pool_dir=str(folder))
    return replace(config, speculation=spec)


def asked(name: str, rows: int, tokens: int, choices: int = 1, **changes: object) -> GenerationRequest:
    """`rows` prompt ids that follow from the name. Greedy, unless `changes` say otherwise."""
    first = sum(name.encode())
    prompt = tuple((first + 7 * i * i + i) % VOCAB for i in range(rows))
    speculative = bool(changes.pop("speculative", True))
    usual = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True}
    params = SamplingParams(**(usual | changes))  # type: ignore[arg-type]
    each = tuple(map(RequestChoice, range(choices)))
    return GenerationRequest(name, prompt, params, each, speculative=speculative)


def everything() -> list[GenerationRequest]:
    """Prompts of several chunks and of one row, scored or not; greedy, drawn, with penalties; forks; one that
    is not drafted for.
    """
    return [
        asked("long", 41, 6, prompt_logprobs=2),
        asked("short", 1, 9),
        asked("seeded", 4, 7, temperature=1.0, seed=4),
        asked("penalties", 9, 6, presence_penalty=0.7, frequency_penalty=0.4, logprobs=3),
        asked("forks", 18, 5, 3, temperature=1.0, seed=3, repetition_penalty=1.2),
        asked("plain", 5, 6, speculative=False),
        asked("kept", 3, 4, logit_bias={11: 100.0}, logprobs=2, min_tokens=2),
    ]


def one_rank(config: EngineConfig, requests: list[GenerationRequest]) -> list[Result]:
    """What a plain engine gives that has as much room as two ranks together."""
    room = {"max_running": 2 * config.max_running, "num_pages": 2 * PLAIN.num_pages}
    return alone(replace(config, **room), requests)


def walks(results: list[Result]) -> list[list[tuple[int, ...]]]:
    """The tokens of every round: where one ends says which drafts were right."""
    return [rounds(result) for result in results]


def accepted(results: list[Result]) -> int:
    """Drafts that were right."""
    return sum(entry.accepted for result in results for entry in result.entries)
