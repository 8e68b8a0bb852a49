"""MiMo as a target: transformers' Qwen2 of the same weights, the MTP layer in its folder left alone."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from eyas.engine.batch.spans import QuerySpan
from eyas.engine.models.table import read_model
from tests.unit.family_changes import CLOSE, attention, wanted, whole
from tests.unit.family_engines import config_of, generated, prompts, served
from tests.unit.loopback import Loopback
from tests.unit.model_rig import Rig
from tests.unit.tiny_mtp import MIMO, THETA, write_tiny_mimo

TOKENS = torch.randint(256, (150,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_mimo(tmp_path_factory.mktemp("models") / "mimo")


def as_qwen2(folder: Path) -> Any:
    """transformers' model of the target's tensors, float32, eager."""
    raw = json.loads((folder / "config.json").read_text())
    config = transformers.Qwen2Config(
        **{k: v for k, v in raw.items() if k not in ("model_type", "torch_dtype")}
    )
    config._attn_implementation = "eager"
    model = transformers.Qwen2ForCausalLM(config).eval()
    stored = load_file(folder / "model.safetensors")
    model.load_state_dict({name: t for name, t in stored.items() if not name.startswith(MIMO)})
    return model


def test_logits_are_those_of_a_qwen2(folder: Path) -> None:
    """A whole prompt; the same in chunks; and its last rows one at a time."""
    expected, rig = wanted(as_qwen2(folder), TOKENS), Rig(folder)
    assert rig.config.num_layers == 8
    assert (whole(rig, TOKENS) - expected).abs().max() < CLOSE
    assert expected.std() > 0.1

    table, parts = rig.table(len(TOKENS)), []
    cuts = [0, 5, 69, 140, *range(141, len(TOKENS) + 1)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        parts.append(rig.logits([QuerySpan(table, start, end - start)], TOKENS[start:end]))
    assert (torch.cat(parts) - expected).abs().max() < CLOSE


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("load_format", ["auto", pytest.param("dummy", marks=pytest.mark.slow)])
def test_it_is_served_with_its_own_head_and_without(folder: Path, load_format: str) -> None:
    """Stored, it says what transformers generates."""
    plain = config_of(folder.parent, model=str(folder), load_format=load_format)
    expected = served(Loopback(plain))
    if load_format == "auto":
        model = as_qwen2(folder)
        assert expected == [generated(model, prompt) for prompt in prompts()]
    assert served(Loopback(dataclasses.replace(plain, draft=str(folder)))) == expected


def test_without_its_special_it_is_another_model(folder: Path) -> None:
    """Power check: what the comparison above would say of a decoder that left this out."""
    config = read_model(folder)
    rope = dataclasses.replace(config.layers[0].attention.rope, theta=10000.0)
    assert config.layers[0].attention.rope.theta == THETA
    found = whole(Rig(folder, attention(rope=rope)(config)), TOKENS)
    assert (found - wanted(as_qwen2(folder), TOKENS)).abs().max() > 100 * CLOSE


def test_the_published_configuration(tmp_path: Path) -> None:
    raw = {
        "architectures": ["MiMoForCausalLM"],
        "attention_bias": True,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 32768,
        "max_window_layers": 36,
        "model_type": "mimo",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 640000,
        "sliding_window": 32768,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151680,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config = read_model(tmp_path, "dummy")
    assert (config.num_layers, config.hidden_size, config.vocab_size) == (36, 4096, 151680)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    first = config.layers[0]
    assert first.attention.qkv_bias and not first.attention.output_bias and not first.attention.window
    assert first.attention.rope.theta == THETA and first.feed_forward.width == 11008
    assert config.norm_eps == 1e-5 and config.context_length == 32768 and not config.tied_head
