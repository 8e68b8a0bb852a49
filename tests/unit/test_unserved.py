"""What no server here can run is refused by its config.json alone: no torch, no transformers, no seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eyas.common.errors import ConfigError
from eyas.engine.models.table import MODELS, read_model
from eyas.engine.models.unserved import ENCODER_DECODERS, HYBRIDS, STATE_SPACE

STATED: dict[str, tuple[str, dict[str, Any], str]] = {
    "t5": (
        "T5ForConditionalGeneration",
        {"is_encoder_decoder": True},
        r"encoder-decoder \(t5\).*its `generate",
    ),
    "whisper": ("WhisperForConditionalGeneration", {}, r"encoder-decoder \(whisper\).*take a decoder"),
    "xlstm": ("xLSTMForCausalLM", {}, "none of its layers attends.*take Falcon-Mamba.*transformers serve"),
    "rwkv7": ("RWKV7ForCausalLM", {"auto_map": {}}, "a state-space model, rwkv7.*take Falcon-Mamba"),
    "zamba2": ("Zamba2ForCausalLM", {}, "some of its layers keep a running state.*or give it a file"),
    "bert": ("BertForMaskedLM", {}, "does not write text token by token.*take a decoder"),
    "olmo": ("OlmoForSequenceClassification", {}, "does not write text token by token"),
    "qwen3": ("Qwen3Model", {}, "does not write text token by token"),
    "deepseek_v3": ("MistralLarge3ForCausalLM", {}, "Mistral's own format.*Mistral4ForCausalLM"),
}


@pytest.fixture(params=STATED)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    architecture, more, _ = STATED[request.param]
    stated = {"architectures": [architecture], "model_type": request.param, **more}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    return tmp_path


@pytest.mark.parametrize("impl", ["auto", "transformers", "eyas"])
def test_each_is_one_sentence_that_says_what_can_be_done(folder: Path, impl: str) -> None:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    architecture, _, says = STATED[kind]
    with pytest.raises(ConfigError, match=f"architecture {architecture} of .* is not supported: .*{says}"):
        read_model(folder, impl=impl)


def test_a_command_says_so_without_torch(tmp_path: Path) -> None:
    """It comes before the weights and the tokenizer, which T5 has in a file that is not read either."""
    (tmp_path / "config.json").write_text(
        '{"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}'
    )
    code = (
        "import sys; from eyas.cli import main; code = main(); "
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "serve", "--model", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "it is an encoder-decoder (t5)" in ran.stderr
    assert ran.stdout.split()[1:] == ["False", "False"]


def test_no_type_is_of_two_kinds_or_has_a_file() -> None:
    assert not (STATE_SPACE | HYBRIDS | ENCODER_DECODERS) & set(MODELS.values())
    assert not STATE_SPACE & HYBRIDS | STATE_SPACE & ENCODER_DECODERS | HYBRIDS & ENCODER_DECODERS
