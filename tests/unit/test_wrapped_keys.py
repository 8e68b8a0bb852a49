"""Keys of checkpoints that read images too, where wrapper and `text_config` differ; very long contexts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from eyas.common.config import EngineConfig
from eyas.engine.checkpoint.rope import NO_ROPE, RopeConfig
from eyas.engine.layers.rotary import SPAN, Rotary, tables
from eyas.engine.loading.spec import MOST_UNASKED, EngineSpec
from eyas.engine.models.table import read_model
from tests.unit.families import write_family
from tests.unit.family_changes import CLOSE, edit, prompt, wanted, whole
from tests.unit.model_rig import Rig

TEXT: dict[str, Any] = {"num_hidden_layers": 1, "eos_token_id": 7}


def written(folder: Path, architecture: str, **raw: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw | {"architectures": [architecture]}))
    return folder


@pytest.mark.parametrize(
    "architecture",
    [
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "Glm4vForConditionalGeneration",
    ],
)
def test_ends_may_stand_in_the_text_alone(tmp_path: Path, architecture: str) -> None:
    inside = written(tmp_path / "inside", architecture, text_config=TEXT)
    assert read_model(inside, "dummy").eos_token_ids == (7,)
    both = written(tmp_path / "both", architecture, text_config=TEXT, eos_token_id=[8, 9])
    assert read_model(both, "dummy").eos_token_ids == (8, 9)


@pytest.mark.parametrize("name", ["qwen2_vl", "glm4v"])
def test_a_head_may_be_tied_by_the_text_alone(tmp_path: Path, name: str) -> None:
    """As transformers before 5 wrote it, and as transformers reads it."""
    write_family(tmp_path, name, tie_word_embeddings=True)
    inner = json.loads((tmp_path / "config.json").read_text())["text_config"]
    edit(tmp_path, tie_word_embeddings=False, text_config=inner | {"tie_word_embeddings": True})
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.tie_word_embeddings
    model = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="eager")
    tokens = prompt(60)
    assert (whole(Rig(tmp_path), tokens) - wanted(model.eval(), tokens)).abs().max() < CLOSE


@pytest.mark.parametrize("rope", [RopeConfig(5e5), NO_ROPE], ids=str)
def test_tables_of_angles_grow_with_the_positions_that_are_met(rope: RopeConfig) -> None:
    rotary, length = Rotary(rope, 16, 10_485_760), 3 * SPAN
    assert rotary.rows == SPAN
    places = torch.tensor([0, 5, 2 * SPAN + 17])
    cos, sin = rotary.angles(places)
    assert rotary.rows == length
    expected = tables(rope, 16, 10_485_760, range(length))
    assert torch.equal(cos[:, 0, :8], expected[0][places]) and torch.equal(sin[:, 0, 8:], expected[1][places])
    assert torch.equal(sin[:, 0, :8], -expected[1][places])


def test_of_a_very_long_context_a_part_is_served_unasked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    text = TEXT | {"max_position_embeddings": 10_485_760, "hidden_size": 64, "vocab_size": 64}
    folder = written(tmp_path / "scout", "Llama4ForConditionalGeneration", text_config=text)
    asked = {"model": str(folder), "draft": None, "load_format": "dummy"}
    with caplog.at_level(logging.WARNING):
        assert EngineSpec.of(EngineConfig(**asked)).target.context_length == MOST_UNASKED
    assert "of a context of 10485760 tokens 1048576 are served" in caplog.text
    longer = EngineConfig(**asked, context_length=10_485_760)
    assert EngineSpec.of(longer).target.context_length == 10_485_760
