"""Log-probabilities in the two shapes of OpenAI's API.

It knows how a token is shown by itself. A token may be half a character: the chat shape then gives its
bytes beside a replacement character, the text shape spells them out.
"""

from __future__ import annotations

import msgspec

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
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


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


def text_logprobs(delta: Delta, table: TokenBytes) -> TextLogprobs | None:
    """Four lists with one item a token; None without tokens. Of ids that look alike the best is listed."""
    if not delta.tokens:
        return None
    best = [
        {_spelled(table, id): max(p, _FLOOR) for id, p in reversed(scored.top)} for scored in delta.logprobs
    ]
    return TextLogprobs(
        tokens=[_spelled(table, token) for token in delta.tokens],
        token_logprobs=[max(scored.logprob, _FLOOR) for scored in delta.logprobs],
        top_logprobs=best,
        text_offset=list(delta.offsets),
    )


def _spelled(table: TokenBytes, id: int) -> str:
    text, data = table.label(id)
    if text.encode() == data:
        return text
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
