"""An answer ends where any file says so: two configs, the tokenizer's eos, the template's ends of turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas.common.model_folder import TextSource
from eyas.engine.checkpoint.folder import end_tokens, named_ends

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
LLAMA = (
    "<|start_header_id|>{{ role }}<|end_header_id|>\n{{ content }}<|eot_id|>{% if x %}<|eom_id|>{% endif %}"
)


def write(folder: Path, tokens: list[str], **settings: Any) -> Path:
    """A tokenizer with these special tokens as its ids 0, 1, ..."""
    added = [{"id": id, "content": token, "special": True} for id, token in enumerate(tokens)]
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"x": 9}}, "added_tokens": added}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    ("tokens", "settings", "ends"),
    [
        (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], {"eos_token": "<|im_end|>"}, {2}),
        (["<s>", "</s>"], {"eos_token": {"content": "</s>"}}, {1}),
        (["</s>", "<|im_start|>", "<|im_end|>"], {"eos_token": "</s>", "chat_template": CHATML}, {0, 2}),
        (
            ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|end_header_id|>"],
            {"eos_token": "<|end_of_text|>", "chat_template": LLAMA},
            {0, 1, 2},
        ),
        (["<eos>", "<end_of_turn>"], {"eos_token": "<eos>", "chat_template": "{{ m }}<end_of_turn>"}, {0, 1}),
        (["<eos>", "<turn|>", "<|turn>"], {"chat_template": "<|turn>{{ m }}<turn|>"}, {1}),
        (["<|end|>", "<|assistant|>"], {"chat_template": "<|assistant|>{{ m }}<|end|>"}, {0}),
        (["<|END_OF_TURN_TOKEN|>"], {"chat_template": "{{ m }}<|END_OF_TURN_TOKEN|>"}, {0}),
        (["[|endofturn|]", "[|assistant|]"], {"chat_template": "[|assistant|]{{ m }}[|endofturn|]"}, {0}),
        # Harmony ends messages, not answers, with <|end|>.
        (["<|end|>", "<|return|>"], {"eos_token": "<|return|>", "chat_template": "{{ m }}<|end|>"}, {1}),
        (["<|im_end|>"], {"chat_template": "no turn ends here"}, set()),
        (
            ["<|end_of_role|>", "</think>", "<|tool_call_end|>"],
            {"chat_template": "<|end_of_role|></think>"},
            set(),
        ),
        (["<|im_end|>"], {"chat_template": [{"name": "default", "template": CHATML}]}, {0}),
        (["<|im_end|>"], {"eos_token": 5, "chat_template": 7}, set()),
    ],
)
def test_ends_that_tokenizer_files_name(
    tmp_path: Path, tokens: list[str], settings: dict[str, Any], ends: set[int]
) -> None:
    assert set(named_ends(TextSource(write(tmp_path, tokens, **settings)), 100)) == ends
    assert named_ends(TextSource(tmp_path), 0) == ()


def test_all_files_count_and_generation_config_comes_first(tmp_path: Path) -> None:
    write(tmp_path, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], eos_token="<|im_end|>")
    assert end_tokens(tmp_path, {"eos_token_id": 7}, 100) == (7, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    assert end_tokens(tmp_path, {"eos_token_id": 7}, 100) == (5, 7, 2)


def test_template_files_and_older_token_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        '{"added_tokens_decoder": {"4": {"content": "<|im_end|>"}}}'
    )
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    assert named_ends(TextSource(tmp_path), 100) == (4,)
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|im_end|>"}')
    assert named_ends(TextSource(tmp_path), 100) == (4,)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"eos_token": ', '{"added_tokens": 5}', '{"added_tokens_decoder": 1}']
)
def test_files_that_cannot_be_read_name_no_end(tmp_path: Path, text: str) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.json"):
        (tmp_path / name).write_text(text)
    assert named_ends(TextSource(tmp_path), 100) == ()
