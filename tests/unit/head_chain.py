"""A head of the engine beside its equations: a prompt in two pieces, then a recurrent chain of drafts."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.engine.batch.spans import QuerySpan
from tests.unit.head_equations import Eagle, Eagle3
from tests.unit.model_rig import HeadRig, Rig

N, FIRST, STEPS = 70, 41, 5  # certain rows: more than one block of keys; those of the first piece; drafts
SAME, NOTICED = 1e-5, 1e-3


def worst_difference(
    folders: tuple[Path, Path],
    paper: Eagle | Eagle3,
    taps: tuple[int, ...],
    asked: tuple[int, ...] = (),
    late: int = 0,
) -> float:
    """Between the head in `folders` (target, head) and `paper`: of features, outputs, logits and keys.

    `taps`: what the equations capture. `asked`: the layers that a flag names. `late`: by how much the
    equations' drafts stand behind their positions.
    """
    target, folder = folders
    rig = Rig(target)
    draft = HeadRig(folder, rig, asked)
    tokens = torch.randint(256, (N + 1,), generator=torch.Generator().manual_seed(3)).tolist()
    prompt = [QuerySpan(rig.table(N), 0, N)]
    captured = [rig.forward(prompt, tokens[:N], layers)[1] for layers in (draft.capture.layers, taps)]
    features, same = draft.capture.features(captured[0], torch.tensor(tokens[:N])), paper.feature(captured[1])
    found, wanted = [features], [same]

    table = rig.table(N + STEPS)
    pieces = [
        draft.forward(features[:FIRST], [QuerySpan(table, 0, FIRST)], tokens[1 : FIRST + 1]),
        draft.forward(features[FIRST:], [QuerySpan(table, FIRST, N - FIRST)], tokens[FIRST + 1 :]),
    ]
    found.append(torch.cat(pieces))
    wanted.append(torch.stack([paper.row(f, t) for f, t in zip(same, tokens[1:], strict=True)]))
    ours, theirs = found[-1][-1:], wanted[-1][-1]
    for step in range(STEPS):
        found.append(draft.head.logits(ours)[0])
        wanted.append(paper.logits(theirs))
        token = 7 * step + 3  # any: which one is proposed is the drafter's business
        ours = draft.forward(ours, [QuerySpan(table, N + step, 1)], [token])
        theirs = paper.row(theirs, token, paper.count + late)
        found.append(ours[0])
        wanted.append(theirs)
    for layer in range(len(paper.layers)):
        found.append(stored_keys(draft, table, N + STEPS, layer))
        wanted.append(paper.layers[layer].keys())
    return max(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True))


def stored_keys(draft: HeadRig, table: list[int], rows: int, layer: int) -> torch.Tensor:
    """Of a sequence, from the head's pool, [rows, kv heads, dim]."""
    pages = draft.pool.layer(layer)[torch.tensor(table), 0]
    return pages.flatten(0, 1)[:rows]
