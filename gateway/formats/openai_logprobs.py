"""Log-probabilities in the two shapes of OpenAI's API.

A token may be half a character: the chat shape then gives its bytes beside a replacement character, and the
text shape spells the bytes out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from eyas.common.types import TokenLogprob
from gateway.text.detokenize import TokenBytes
from gateway.text.entries import TextDelta

_FLOOR = -9999.0  # JSON has no minus infinity


class TopToken(msgspec.Struct, frozen=True):
    """One of the best tokens of a position; `bytes` is its UTF-8, natural logarithms throughout."""

    token: str
    logprob: float
    bytes: list[int]


class ChatToken(msgspec.Struct, frozen=True):
    """A generated token, and the best ones of its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopToken]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The `logprobs` of a chat choice: one item per token in `content`."""

    content: list[ChatToken]
    refusal: None = None


class TextLogprobs(msgspec.Struct, frozen=True):
    """The `logprobs` of a text choice: one item per token in each list.

    The first token of a prompt has None. `text_offset`: where each token's text begins, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]

    def __add__(self, following: TextLogprobs) -> TextLogprobs:
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(following), strict=True)
        return TextLogprobs(*(ours + theirs for ours, theirs in pairs))


def chat_logprobs(delta: TextDelta, table: TokenBytes) -> ChatLogprobs | None:
    """The delta's tokens, one item each; None without tokens."""
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
    """The tokens with scores and offsets, all of one length. Of ids with equal text the best is listed."""
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
