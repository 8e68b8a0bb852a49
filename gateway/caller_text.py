"""Texts of callers in chats stay text: none of their characters becomes part of a control token.

A chat template writes control tokens (`<|im_end|>`) as text between the texts of callers, and a tokenizer
reads both alike: a message that spells out `<|im_end|><|im_start|>system` would begin a turn. So before
rendering, a sign (a character that the chat does not have) goes into each text wherever a control token could
begin or end in it; what the tokenizer then still recognises was written by the template alone. Those tokens
get private names, the signs go, and a tokenizer that knows control tokens by private names alone reads the
text.

A token is a control token if the tokenizer calls it special. `<think>` and `<tool_call>` usually are not.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tokenizers import Tokenizer as HFTokenizer

Value = TypeVar("Value")
_SIGNS = range(0xE100, 0xF8FF)  # private use: no tokenizer's control tokens have one


class CallerText:
    """Guards the chats of one tokenizer. Building the second tokenizer waits for a chat that needs it."""

    def __init__(self, hf: HFTokenizer) -> None:
        self._hf = hf
        self._private: _PrivateNames | None = None
        tokens = hf.get_added_tokens_decoder().values()
        self._names = sorted(
            {token.content for token in tokens if token.special and token.content}, key=_long
        )
        self._any = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._first = re.compile(rf"(?={self._any.pattern})(.)", re.DOTALL)
        self._heads = {name[:end] for name in self._names for end in range(1, len(name))}
        self._tails = {name[start:] for name in self._names for start in range(1, len(name))}
        self._longest = max(map(len, self._names), default=0)

    def signed(self, chat: Value) -> tuple[Value, str]:
        """The chat (JSON) with signs in its texts and names, and the sign: "" if it needs none."""
        if not self._needs(chat):
            return chat, ""
        written = json.dumps(chat, ensure_ascii=False)
        sign = next(chr(code) for code in _SIGNS if chr(code) not in written)
        return self._with_signs(chat, sign), sign

    def encode(self, prompt: str, sign: str) -> tuple[int, ...]:
        """The ids of what a template wrote of a chat with signs, without the tokens around a text.

        Takes a second or more the first time, so it belongs into a thread.
        """
        if self._private is None:
            self._private = _PrivateNames(self._hf)
        renamed = self._any.sub(lambda found: self._private.names[found[0]], prompt)  # type: ignore[union-attr]
        return self._private.encode(unsigned(renamed, sign))

    def _needs(self, value: Any) -> bool:
        if isinstance(value, str):
            return bool(self._any.search(value)) or self._may_join(value)
        if isinstance(value, Mapping):
            return any(self._needs(name) or self._needs(item) for name, item in value.items())
        return isinstance(value, Sequence) and any(map(self._needs, value))

    def _may_join(self, text: str) -> bool:
        """Whether it may be part of a control token together with what stands before or after it."""
        lengths = range(1, min(self._longest, len(text) + 1))
        return any(text[-size:] in self._heads or text[:size] in self._tails for size in lengths)

    def _with_signs(self, value: Any, sign: str) -> Any:
        if isinstance(value, str):
            return self._sign_text(value, sign)
        if isinstance(value, Mapping):
            return {
                self._with_signs(name, sign): self._with_signs(item, sign) for name, item in value.items()
            }
        if isinstance(value, Sequence):
            return [self._with_signs(item, sign) for item in value]
        return value

    def _sign_text(self, text: str, sign: str) -> str:
        """A sign after the first character of each control token, whole or cut off at the end, and one in
        front if the text may end a token that begins before it.
        """
        lengths = range(1, min(self._longest, len(text) + 1))
        cuts = {len(text) - size + 1 for size in lengths if text[-size:] in self._heads}
        cuts |= {found.end(1) for found in self._first.finditer(text)}
        cuts |= {0} if any(text[:size] in self._tails for size in lengths) else set()
        bounds = [0, *sorted(cuts), len(text)]
        return (
            sign.join(text[start:end] for start, end in zip(bounds, bounds[1:], strict=False))
            if cuts
            else text
        )


class _PrivateNames:
    """A tokenizer with other names for the control tokens: `names`, which no caller can know."""

    def __init__(self, hf: HFTokenizer) -> None:
        definition = json.loads(hf.to_str())
        secret = secrets.token_hex(8)
        ids = {token["content"]: token["id"] for token in definition["added_tokens"]}
        self.names = {
            token["content"]: f"\ue000{secret}.{token['id']}\ue001"
            for token in definition["added_tokens"]
            if token["special"]
        }
        for token in definition["added_tokens"]:
            token["content"] = self.names.get(token["content"], token["content"])
        definition["post_processor"] = None  # it names tokens, and adds what templates write
        self._hf = HFTokenizer.from_str(json.dumps(definition))
        self._ids = {self._hf.token_to_id(self.names.get(name, name)): id for name, id in ids.items()}

    def encode(self, text: str) -> tuple[int, ...]:
        ids = self._hf.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return tuple(self._ids.get(id, id) for id in ids)


def unsigned(text: str, sign: str) -> str:
    """The text without its signs, also where a template wrote them as JSON escapes."""
    return text.replace(sign, "").replace(f"\\u{ord(sign):04x}", "") if sign else text


def _long(name: str) -> tuple[int, str]:
    """Sorts the longest name first: tokenizers prefer it too."""
    return -len(name), name
