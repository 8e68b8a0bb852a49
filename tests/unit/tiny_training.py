"""A target that tests can train heads for in seconds: it is almost sure of each token's one successor.

Written as a real folder, so that it loads as any model does.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.train.heads.base import DraftHead
from eyas.train.heads.table import head_kind
from eyas.train.packing import PackedBatch, TrainingExample
from eyas.train.teacher import BatchLimit, TeacherModel
from eyas.train.unroll import UnrollBatch
from tests.unit.tiny import write_tiny_llama

VOCAB = 48
LENGTH = 64
ROOM = BatchLimit(tokens=4 * LENGTH, texts=4 * LENGTH, length=LENGTH)
SIZES = {"layers": 3, "hidden": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "ffn": 48, "vocab": VOCAB}


def successors() -> torch.Tensor:
    """Of each id; a permutation."""
    return torch.randperm(VOCAB, generator=torch.Generator().manual_seed(11))


def write_sure_target(folder: Path) -> Path:
    """A Llama whose layers say little, and whose output head finds the successor of what was embedded."""
    write_tiny_llama(folder, tied=False, **SIZES)
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] *= 0.1
    embedding = weights["model.embed_tokens.weight"]
    head = torch.zeros_like(embedding)
    head[successors()] = 3.0 * embedding / embedding.norm(dim=1, keepdim=True)
    weights["lm_head.weight"] = head
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = None  # chains go on
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def texts(count: int, seed: int, length: int = 20) -> list[TrainingExample]:
    """Chains of successors from random ids on; the first two tokens are the question."""
    following, draw = successors().tolist(), np.random.default_rng(seed)
    found = []
    for start in draw.integers(VOCAB, size=count).tolist():
        ids = [start]
        while len(ids) < length:
            ids.append(following[ids[-1]])
        found.append(TrainingExample(np.array(ids, np.int32), np.arange(length) >= 2))
    return found


def new_head(kind: str, teacher: TeacherModel, token_map: Tensor | None = None) -> DraftHead:
    """With gains and matrices that all matter."""
    torch.manual_seed(3)
    head = head_kind(kind).head_for(teacher.config, teacher.ends, token_map)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(6.0)
    return head.eval()


def course_of(
    kind: str, teacher: TeacherModel, batch: PackedBatch, token_map: Tensor | None = None
) -> UnrollBatch:
    taps = head_kind(kind).taps(teacher.config)
    seen = teacher.observe(batch, taps)
    wanted = teacher.logits(seen.hidden)
    return UnrollBatch(
        features=seen.tapped if taps else seen.hidden,
        hidden=seen.hidden,
        embeds=teacher.ends.embedding[batch.ids],
        target_logits=wanted if token_map is None else wanted[..., token_map],
        learnt=batch.answer,
        positions=batch.positions,
        segments=batch.segments,
    )
