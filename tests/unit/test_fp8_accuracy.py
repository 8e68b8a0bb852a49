"""What FP8 costs the embedded model: the log-likelihood of held-out answers, format by format.

Run with -s it prints the figures.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eyas.common.config import ASSETS
from eyas.engine.batch.spans import QuerySpan
from tests.unit.fp8_formats import FORMATS, write_format
from tests.unit.model_rig import Rig
from tools.nano.data import split_bits
from tools.nano.text.core import TextSplit
from tools.nano.text.dialogues import dialogue
from tools.nano.tokenizer import encode_chat, load_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NANO = ASSETS / "nano"
TEXTS, LEARNT = 48, 8
MOST = 0.004
"""Nats per token that a format may add: a tenth of what the model itself needs, four times the noise."""
NAMES = ("channel and token", "tensor and token", "tensor and tensor", "fp8 in blocks", "channel")


def texts(split: TextSplit, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Ids of some dialogues, and which of them are answers."""
    tokenizer = load_tokenizer(NANO)
    packed = (encode_chat(tokenizer, dialogue(0, index, split)) for index in range(count))
    return [split_bits(torch.from_numpy(ids.astype("int32"))) for ids in packed]


def nats(folder: Path) -> torch.Tensor:
    """Of each token of the held-out answers, float64."""
    rig, found = Rig(folder, pages=160), []
    for ids, answers in texts(TextSplit.HELDOUT, TEXTS):
        rows = len(ids)
        logits = rig.logits([QuerySpan(list(range(-(-rows // 16))), 0, rows)], ids.tolist())
        said = logits[:-1].double().log_softmax(-1).gather(1, ids[1:, None].long())[:, 0]
        found.append(-said[answers[1:].bool()])
    return torch.cat(found)


def calibrate(folder: Path) -> None:
    """Sets every stored scale of rows to the largest number that texts of the training bring there."""
    model: Any = transformers.LlamaForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    most: dict[str, float] = {}

    def watched(name: str, rows: torch.Tensor) -> None:
        most[name] = max(most.get(name, 0.0), float(rows.abs().max()))

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, rows, name=name: watched(name, rows[0]))
    with torch.no_grad():
        for ids, _ in texts(TextSplit.TRAIN, LEARNT):
            model(ids[None].long())
    stored = load_file(folder / "model.safetensors")
    for name in stored:
        if name.endswith(".input_scale"):
            stored[name] = torch.tensor([most[name.removesuffix(".input_scale")] / 448.0])
    save_file(stored, folder / "model.safetensors")


def test_held_out_answers_are_as_likely(tmp_path: Path) -> None:
    plain = nats(NANO)
    print(f"\nplain: {plain.mean():.4f} nats per token, {len(plain)} tokens of {TEXTS} held-out dialogues")
    for name in NAMES:
        folder = tmp_path / name
        meant = write_format(folder, NANO, FORMATS[name])
        if FORMATS[name].rows == "tensor":
            calibrate(folder)
        wide = tmp_path / f"{name}, widened"
        wide.mkdir()
        (wide / "config.json").write_text((NANO / "config.json").read_text())
        save_file(meant, wide / "model.safetensors")
        found, widened = nats(folder), nats(wide)
        more, by_weights = float((found - plain).mean()), float((widened - plain).mean())
        noise = float((found - plain).std()) / len(plain) ** 0.5
        print(f"{name}: {more:+.4f} +- {noise:.4f}, of which dequantised weights alone {by_weights:+.4f}")
        assert abs(more) < MOST and abs(by_weights) < MOST
        assert torch.equal(found, widened) == (not FORMATS[name].rows)
    spoilt = load_file(folder / "model.safetensors")
    key = next(key for key in spoilt if key.endswith("weight_scale"))
    spoilt[key] *= 2.0
    save_file(spoilt, folder / "model.safetensors")
    assert float((nats(folder) - plain).mean()) > MOST, "power check: one matrix is twice as large"
