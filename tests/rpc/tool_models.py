"""Models that speak each dialect: the embedded tokenizer, a template, and a text to say."""

from __future__ import annotations

from functools import cache

import msgspec
from scripted_backend import INFO, ScriptedBackend, nano_tokenizer
from tokenizers import Tokenizer as HFTokenizer

from gateway.text.templates import ChatTemplate
from gateway.text.tokenizer import Tokenizer
from tests import chat_templates

SILENT = chat_templates.TEMPLATES["deepseek_v3"]
"""As published: it writes calls, and shows no tools."""
TEMPLATES = chat_templates.TEMPLATES | {
    "silent": SILENT,
    "deepseek_v3": "{% if tools %}{{ tools | tojson }}{% endif %}" + SILENT,
}
SPECIAL = {"bos_token": "", "eos_token": ""}
CONTROL = [
    "[TOOL_CALLS]",
    "[ARGS]",
    "[CALL_ID]",
    "<|python_tag|>",
    "<|python_start|>",
    "<|channel|>",
    "<|message|>",
    "<|call|>",
    "<｜tool▁calls▁begin｜>",
]
WIDE = msgspec.structs.replace(INFO, context_length=1 << 16, vocab_size=8192)


@cache
def tokenizer_of(dialect: str) -> Tokenizer:
    """The embedded tokenizer with this dialect's template, and some markers as special tokens."""
    hf = HFTokenizer.from_str(nano_tokenizer().table.hf.to_str())
    hf.add_special_tokens(CONTROL)
    return Tokenizer(hf, ChatTemplate(TEMPLATES[dialect], SPECIAL))


def speaker(dialect: str, text: str, stride: int = 2) -> ScriptedBackend:
    """A backend that says `text`, some tokens at a time."""
    return ScriptedBackend(tokenizer_of(dialect), lambda request, choice: text, stride, infos=[WIDE])
