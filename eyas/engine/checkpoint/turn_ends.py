"""The end tokens that tokenizer files name: the `eos_token`, and what chat templates end turns with.

A fine-tune often has neither in config.json: its base model's end of text stands there, while it was trained
to end its turns with `<|im_end|>`, and it would go on with invented turns. A turn's end is known by its name:
a special token, called an end of turn (of message, of text), that a chat template spells out.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError
from eyas.common.model_folder import TextSource, given_template, read_json_object
from eyas.common.tokenizers.source import special_tokens, tokenizer_file

_OF = "turn|text|message|msg|sentence|assistant|utterance|response"
_END = re.compile(
    rf"im_end|eo[tms](_id)?|end|turn_end|message_end|msg_end|assistant_end|end_?(of_?)?({_OF})(_token)?"
)
_TEKKEN_EOS = "</s>"
_TURN_BACK = "<turn|>"  # Gemma 4: its other end of a turn has the bar in front
_MESSAGE_END, _ANSWER_END = "<|end|>", "<|return|>"  # Harmony: an answer has several messages


def named_ends(source: TextSource, vocab_size: int) -> tuple[int, ...]:
    """Ids below `vocab_size`. Files that are missing or say nothing of the kind name no end; the gateway
    refuses those that cannot be read. Raises ConfigError for a given template that cannot be.
    """
    folder = source.folder
    settings = _settings(folder / "tokenizer_config.json")
    added = _added_tokens(folder, settings)
    texts = _templates(folder, settings) if source.template is None else given_template(source.template)[0]
    older = _settings(folder / "special_tokens_map.json")
    eos = _content(settings.get("eos_token")) or _content(older.get("eos_token")) or _usual_eos(folder)
    ends = [id for name, id in added.items() if name == eos or _ends_turns(name, texts, added)]
    return tuple(id for id in ends if 0 <= id < vocab_size)


def _ends_turns(token: str, templates: str, added: dict[str, int]) -> bool:
    if token not in templates or (token == _MESSAGE_END and _ANSWER_END in added):
        return False
    words = re.sub(r"[^a-z]+", "_", token.lower()).strip("_")
    return token == _TURN_BACK or bool(_END.fullmatch(words))


def _added_tokens(folder: Path, settings: dict[str, Any]) -> dict[str, int]:
    """The special tokens by their text, whichever form the tokenizer has."""
    tokens: dict[str, int] = {}
    decoder = settings.get("added_tokens_decoder")
    for id, token in decoder.items() if isinstance(decoder, dict) else ():
        name = _content(token)
        if name is not None and id.isdecimal() and len(id) < 10:
            tokens[name] = int(id)
    return tokens | special_tokens(folder)


def _usual_eos(folder: Path) -> str | None:
    """The end token of a tekken.json, beside which no file names one."""
    path = tokenizer_file(folder)
    return _TEKKEN_EOS if path is not None and path.name == "tekken.json" else None


def _templates(folder: Path, settings: dict[str, Any]) -> str:
    """The text of all chat templates."""
    texts = [json.dumps(settings.get("chat_template", ""), ensure_ascii=False)]
    for path in (folder / "chat_template.jinja", *sorted(folder.glob("additional_chat_templates/*.jinja"))):
        if path.is_file():
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    texts.append(json.dumps(_settings(folder / "chat_template.json"), ensure_ascii=False))
    return "\n".join(texts)


def _content(token: Any) -> str | None:
    """The text of a token that is written as a text or as an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _settings(path: Path) -> dict[str, Any]:
    try:
        return read_json_object(path) if path.is_file() else {}
    except ConfigError:
        return {}
