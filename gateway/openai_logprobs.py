"""Log-probabilities in the two shapes of OpenAI's API.

It knows how a token is shown by itself. A token may be half a character: the chat shape then gives its
bytes beside a replacement character, the text shape spells them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from eyas.common.types import TokenLogprob
from gateway.detokenize import TokenBytes
from gateway.text import Delta

_FLOOR = -9999.0  # JSON has no minus infinity


class TopToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatToken]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """One item a token in each list; the first token of a prompt has no log-probabilities."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, following: TextLogprobs) -> TextLogprobs:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(following), strict=True)
        return TextLogprobs(*(ours + theirs for ours, theirs in pairs))


def chat_logprobs(delta: Delta, table: TokenBytes) -> ChatLogprobs | None:
    """One item a token, in order; None without tokens."""
    if not delta.tokens:
        return None
    content = []
    for token, scored in zip(delta.tokens, delta.logprobs, strict=True):
        text, data = table.label(token)
        best = [TopToken(t, max(p, _FLOOR), list(b)) for id, p in scored.top for t, b in [table.label(id)]]
        content.append(ChatToken(text, max(scored.logprob, _FLOOR), list(data), best))
    return ChatLogprobs(content)


def text_logprobs(
    tokens: Sequence[int],
    scored: Sequence[TokenLogprob | None],
    offsets: Sequence[int],
    table: TokenBytes,
) -> TextLogprobs:
    """Of ids that look alike the best is listed."""
    best = [
        None if one is None else {_spelled(table, id): max(p, _FLOOR) for id, p in reversed(one.top)}
        for one in scored
    ]
    return TextLogprobs(
        tokens=[_spelled(table, token) for token in tokens],
        token_logprobs=[None if one is None else max(one.logprob, _FLOOR) for one in scored],
        top_logprobs=best,
        text_offset=list(offsets),
    )


def _spelled(table: TokenBytes, id: int) -> str:
    text, data = table.label(id)
    if text.encode() == data:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
