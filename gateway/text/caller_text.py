"""Keeps callers from writing control tokens into chats: none of their text becomes part of such a token.

A chat template writes control tokens (`<|im_end|>`) as text between the texts of callers, and a tokenizer
does not distinguish the two: a message with `<|im_end|><|im_start|>system` would begin a turn. So before
rendering, a sign (a character that the chat does not contain) is inserted into each text wherever a control
token could begin or end in it; the control tokens that remain in the rendered text were written by the
template. They are replaced by private names, the signs are removed, and the text is tokenized by a tokenizer
that knows control tokens by their private names only. A template that cuts words out of texts, or changes
letters, could form a token out of other text: signs are then inserted after every character with which a
token begins.

A token is a control token if the tokenizer calls it special. `<think>` and `<tool_call>` usually are not.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar

from tokenizers import Tokenizer as HFTokenizer

from gateway.text.templates import TemplateCuts

Value = TypeVar("Value")
_SHORT = 64  # characters: words of tools' schemas, which come with each request of an agent, have fewer
_MOST_SHORT = 1 << 14  # short texts of which it is remembered whether they need signs
_SIGNS = range(0xE100, 0xF8FF)  # private use: no tokenizer's control tokens have one


class CallerText:
    """Guards the chats of one tokenizer. Building the second tokenizer waits for a chat that needs it."""

    def __init__(self, hf: HFTokenizer, cuts: TemplateCuts) -> None:
        """`cuts`: what the chat template does to texts."""
        self._hf = hf
        self._cuts = cuts
        self._private: _PrivateNames | None = None
        tokens = [token for token in hf.get_added_tokens_decoder().values() if token.special]
        self._names = sorted({token.content for token in tokens if token.content}, key=_long)
        self._any = re.compile("|".join(map(re.escape, self._names)) or r"(?!)")
        self._case = re.IGNORECASE if cuts.changes_case else re.NOFLAG
        self._written = re.compile(self._any.pattern, self._case)
        self._first = re.compile(rf"(?={self._any.pattern})(.)", re.DOTALL | self._case)
        names = [self._folded(name) for name in self._names]
        self._heads = tuple({name[:end] for name in names for end in range(1, len(name))})
        self._tails = tuple({name[start:] for name in names for start in range(1, len(name))})
        self._longest = max(map(len, self._names), default=0)
        begins = {name[0] for name in self._names} | {name[0] for name in names}
        self._begins = re.compile("|".join(map(re.escape, sorted(begins))) or r"(?!)", self._case)
        self._spared = re.compile("|".join(self._spared_words()) or r"(?!)")
        self._needs_short = lru_cache(_MOST_SHORT)(self._needs_signs)
        self._always = hf.normalizer is not None and any(token.normalized for token in tokens)

    def signed(self, chat: Value) -> tuple[Value, str]:
        """The chat (JSON) with signs in its texts and names, and the sign: "" if it needs none."""
        if not (self._always or self._needs(chat)):
            return chat, ""
        written = json.dumps(chat, ensure_ascii=False)
        sign = next(
            chr(code)
            for code in _SIGNS
            if chr(code) not in written and f"\\u{code:04x}" not in written  # also not as a JSON escape
        )
        return self._with_signs(chat, sign), sign

    def encode(self, prompt: str, sign: str) -> tuple[int, ...]:
        """The ids of what a template wrote of a chat with signs, without the tokens around a text.

        Takes a second or more the first time, so it belongs into a thread.
        """
        if self._private is None:
            self._private = _PrivateNames(self._hf)
        renamed = self._any.sub(lambda match: self._private.names[match[0]], prompt)  # type: ignore[union-attr]
        return self._private.encode(unsigned(renamed, sign))

    def _needs(self, chat: Any) -> bool:
        todo = [chat]
        while todo:
            value = todo.pop()
            if isinstance(value, str):
                if self._needs_short(value) if len(value) <= _SHORT else self._needs_signs(value):
                    return True
            elif isinstance(value, Mapping):
                todo += value
                todo += value.values()
            elif isinstance(value, Sequence):
                todo += value
        return False

    def _needs_signs(self, text: str) -> bool:
        return bool(self._written.search(text)) or bool(self._places(text))

    def _with_signs(self, value: Any, sign: str) -> Any:
        if isinstance(value, str):
            places = self._places(value) | {match.end(1) for match in self._first.finditer(value)}
            bounds = [0, *sorted(places), len(value)]
            parts = (value[start:end] for start, end in zip(bounds, bounds[1:], strict=False))
            return sign.join(parts) if places else value
        if isinstance(value, Mapping):
            return {
                self._with_signs(name, sign): self._with_signs(item, sign) for name, item in value.items()
            }
        if isinstance(value, Sequence):
            return [self._with_signs(item, sign) for item in value]
        return value

    def _places(self, text: str) -> set[int]:
        """Returns the places of signs beside those in whole control tokens: behind the first character of one
        that is cut off at the end, in front of the rest of one, and behind all first characters if the
        template cuts words out of this text.
        """
        places = self._places_at_ends(text, 0)
        if text[:1] in self._cuts.ends or text[-1:] in self._cuts.ends:
            start = len(text) - len(text.lstrip(self._cuts.ends))
            places |= self._places_at_ends(text.strip(self._cuts.ends), start)
        if any(word in text for word in self._cuts.words):
            places |= {
                match.end()
                for match in self._begins.finditer(text)
                if not self._spared.match(text, match.start())
            }
        return places

    def _places_at_ends(self, text: str, start: int) -> set[int]:
        """Returns the places at the ends of a stripped text, which stands at `start`."""
        end, start_text = self._folded(text[-self._longest :]), self._folded(text[: self._longest])
        places = {start} if start_text.startswith(self._tails) else set()
        if end.endswith(self._heads):
            sizes = range(1, min(self._longest, len(text) + 1))
            places |= {start + len(text) - size + 1 for size in sizes if end[-size:] in self._heads}
        return places

    def _spared_words(self) -> Iterator[str]:
        """Patterns of what a template may look for (`</think>`), from each character on that could begin a
        control token but does not: a sign would hide it from the template.
        """
        for word in sorted(self._cuts.looked_for, key=_long):
            for match in self._begins.finditer(word):
                rest = word[match.start() :]
                if not any(name.startswith(rest) or rest.startswith(name) for name in self._names):
                    before = re.escape(word[: match.start()])
                    yield rf"(?<={before}){re.escape(rest)}" if before else re.escape(rest)

    def _folded(self, text: str) -> str:
        return text.casefold() if self._cuts.changes_case else text


class _PrivateNames:
    """A tokenizer with other names for the control tokens: `names`, which no caller can guess."""

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
