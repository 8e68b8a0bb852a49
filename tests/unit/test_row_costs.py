"""How much context doubles a row's time on a CPU follows from a model's own numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from eyas.common.config import NANO
from eyas.engine.loading.step_rates import ATTENDED, context_of_a_row
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.tiny_deepseek import SMALL, write_tiny_nextn_deepseek

SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


def test_of_the_embedded_model() -> None:
    assert 200 < context_of_a_row(read_model(NANO)) < 300  # measured: 200 to 300 for rows alone


def test_of_a_dense_model_by_hand(tmp_path: Path) -> None:
    write_family(tmp_path / "model", "llama", **SIZES, **HEADS)
    weights = 3 * (2 * 64 * 16 * (4 + 2) + 3 * 64 * 96) + 64 * 128
    attended = 3 * 4 * (16 + 16)
    assert context_of_a_row(read_model(tmp_path / "model")) == pytest.approx(weights / (ATTENDED * attended))


@pytest.mark.parametrize("kind", ["mixtral", "deepseek", "mistral"])
def test_of_experts_latents_and_windows(tmp_path: Path, kind: str) -> None:
    if kind == "deepseek":
        write_tiny_nextn_deepseek(tmp_path / "model", SMALL)
    else:
        windowed = {"sliding_window": 32} if kind == "mistral" else {}
        write_family(tmp_path / "model", kind, **SIZES, **HEADS, **windowed)
    model = read_model(tmp_path / "model")
    context = context_of_a_row(model)
    if kind == "mistral":
        assert context == model.context_length, "what windows read has an end"
    else:
        assert 1 < context < model.context_length * 100
