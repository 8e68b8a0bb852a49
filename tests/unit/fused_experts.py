"""How far models of experts may be from the plain ones on the device path."""

from __future__ import annotations

from pathlib import Path

import torch

from eyas.engine.checkpoint.weights import FolderWeights
from eyas.engine.models.decoder import Decoder
from eyas.engine.models.ops.device_machine import DeviceMachine
from eyas.engine.models.refusal import refusal
from tests.unit.fused_models import FIRST, SLOTS, Steps, Twin, with_tokens
from tests.unit.model_rig import Rig

BLOCKS = {"hidden_size": 192, "intermediate_size": 256, "head_dim": 32, "num_key_value_heads": 4}
TIPPED = 0.03
"""Of a logit, over their deviation: sums in another order put a number on the other side of a rounding."""
ERROR = 0.15
"""What one scale that is twice as large does, at the least."""


def logits_differ(fused: Path, plain: Path) -> float:
    """The difference of two models' logits, over their deviation, of the median row: near ties of a router
    may send a few of them elsewhere.
    """
    rig = Rig(plain)
    assert refusal(rig.config, rig.config.vocab_size) == ""
    twin = Twin(rig.config, rig.pool, torch.zeros(SLOTS, 16, dtype=torch.int32))
    with FolderWeights(fused, quantized=rig.config.quantized) as weights:
        model = Decoder(rig.config, weights, DeviceMachine(twin.context))
    assert model.few_rows == 0
    differences: list[torch.Tensor] = []
    for rounds, chunks, spans, tokens in Steps(rig, FIRST["narrow"]):
        expected = rig.model.logits(rig.forward(spans, tokens.tolist())[0])
        found, _ = model.forward(with_tokens(twin.rows(rounds, chunks), tokens.tolist()), twin.pool)
        difference = (model.logits(found) - expected[: found.shape[0]]).square().mean(1).sqrt()
        differences.append(difference / expected.std())
    return float(torch.cat(differences).median())
