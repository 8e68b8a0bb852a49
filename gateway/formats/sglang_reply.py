"""The answers of `/generate`: SGLang's objects, whole or as events that repeat the answer so far.

SGLang's clients read the last event alone, or cut off what they have. So an event grows with the answer, but
the work per event does not: ids and log-probabilities of earlier events stay encoded and are only copied.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from eyas.common.types import FinishCause
from gateway.backends.answer import CallAnswer
from gateway.formats.openai_reply import DONE, AnswerFormat
from gateway.formats.openai_request import ApiCall
from gateway.formats.sglang_request import ReplyShape
from gateway.observe.timings import timings_object
from gateway.text.detokenize import TokenBytes
from gateway.text.entries import TextDelta, UsageCounts

_encode = msgspec.json.Encoder().encode
_FLOOR = -9999.0  # JSON has no minus infinity

Scored = tuple[float | None, int, str | None]  # log-probability, token id, its text if asked for


class _GrowingArray:
    """A JSON array that only grows: each item is encoded once, however often the array is sent."""

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            self._items += b"," * bool(self._items) + _encode(items)[1:-1]

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + self._items + b"]")


class _GrowingText:
    """A JSON string that only grows, as such an array does."""

    def __init__(self) -> None:
        self._said = bytearray()

    def extend(self, text: str) -> None:
        self._said += _encode(text)[1:-1]

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b'"' + self._said + b'"')


class _SoFar:
    """The answer of one choice so far: the sum of its deltas."""

    def __init__(self, prompt_tokens: int) -> None:
        self.text = _GrowingText()
        self.ids, self.scored, self.tops = _GrowingArray(), _GrowingArray(), _GrowingArray()
        self.inputs: dict[str, Any] = {}  # the prompt's log-probabilities, the same in every event
        self.usage = UsageCounts(prompt_tokens)

    def add(self, delta: TextDelta) -> None:
        self.text.extend(delta.text)
        self.ids.extend(delta.tokens)
        self.usage.add(delta)


class SglangFormat(AnswerFormat):
    """Writes SGLang's objects; a batch is a list of them, and its events carry `index`."""

    def __init__(self, call: ApiCall, shape: ReplyShape, table: TokenBytes, answer: CallAnswer) -> None:
        self._call = call
        self._shape = shape
        self._table = table
        self._answer = answer
        self._so_far = [_SoFar(len(request.prompt_ids)) for request in call.requests for _ in range(call.n)]

    def opening(self) -> bytes:
        return b""

    def event(self, delta: TextDelta) -> bytes:
        reply = self._reply(delta)
        if self._shape.batch:
            reply["index"] = delta.choice
        return b"data: " + _encode(reply) + b"\n\n"

    def closing(self) -> bytes:
        return DONE

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        replies = [self._reply(choice) for choice in choices]
        return _encode(replies if self._shape.batch else replies[0])

    def _reply(self, delta: TextDelta) -> dict[str, Any]:
        """The delta's choice so far, with this delta."""
        so_far = self._so_far[delta.choice]
        so_far.add(delta)
        meta = self._meta(delta, so_far.usage)
        if self._call.logprobs:
            meta |= self._logprobs(delta, so_far)
        return {"text": so_far.text.json(), "output_ids": so_far.ids.json(), "meta_info": meta}

    def _meta(self, delta: TextDelta, usage: UsageCounts) -> dict[str, Any]:
        prompt, number = divmod(delta.choice, self._call.n)
        trace = self._answer.traces[prompt]
        usage.cached_tokens = trace.cached_tokens
        meta: dict[str, Any] = {
            "id": self._name(prompt, number),
            "finish_reason": _finish_reason(delta, usage),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": time.monotonic() - self._call.began,
        }
        if self._call.model.synthetic:
            meta["synthetic"] = True
        if usage.acceptance_length is not None:
            offered = usage.accepted + usage.rejected
            meta |= {
                "spec_verify_ct": usage.verify_steps,
                "spec_accept_length": usage.acceptance_length,
                "spec_accept_rate": usage.accepted / offered,
                "spec_accept_token_num": usage.accepted,
                "spec_draft_token_num": offered,
            }
        if self._call.timings and delta.finish is not None:
            meta["timings"] = timings_object(self._call.began, trace, usage)
        return meta

    def _name(self, prompt: int, number: int) -> str:
        name = self._call.requests[prompt].id if self._shape.rids is None else self._shape.rids[prompt]
        return name if self._call.n == 1 else f"{name}_{number}"

    def _logprobs(self, delta: TextDelta, so_far: _SoFar) -> dict[str, Any]:
        scored = list(zip(delta.tokens, delta.logprobs, strict=True))
        tops = [[self._scored(id, value) for id, value in logprob.top] for _, logprob in scored]
        so_far.scored.extend([self._scored(token, logprob.logprob) for token, logprob in scored])
        so_far.tops.extend([top or None for top in tops])
        so_far.inputs = so_far.inputs or self._inputs(delta.choice // self._call.n)
        return so_far.inputs | {
            "output_token_logprobs": so_far.scored.json(),
            "output_top_logprobs": so_far.tops.json(),
        }

    def _inputs(self, prompt: int) -> dict[str, Any]:
        """The log-probabilities of the prompt's tokens that were asked for; the first token has none."""
        request, logprobs = self._call.requests[prompt], self._answer.traces[prompt].prompt
        own, tops = _GrowingArray(), _GrowingArray()
        if logprobs is not None:
            first, *others = request.prompt_ids[request.params.prompt_logprobs_start :]
            rows = logprobs.rows()
            own.extend([self._scored(first, None)])
            own.extend([self._scored(id, row.logprob) for id, row in zip(others, rows, strict=True)])
            tops.extend([None, *([self._scored(*best) for best in row.top] or None for row in rows)])
        return {"input_token_logprobs": own.json(), "input_top_logprobs": tops.json()}

    def _scored(self, token: int, logprob: float | None) -> Scored:
        text = self._table.label(token)[0] if self._shape.token_texts else None
        return None if logprob is None else max(logprob, _FLOOR), token, text


def _finish_reason(delta: TextDelta, usage: UsageCounts) -> dict[str, str | int | None] | None:
    match delta.finish:
        case None:
            return None
        case FinishCause.LENGTH:
            return {"type": "length", "length": usage.completion_tokens}
        case FinishCause.STOP:
            return {"type": "stop", "matched": delta.matched}
