"""What `/generate` answers with: SGLang's objects, whole or as events whose text and ids are cumulative.

It knows the shape of one choice's answer. It refuses to know where the deltas come from.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from eyas.common.types import Finish
from gateway.answer import Answer, joined
from gateway.detokenize import TokenBytes
from gateway.openai_reply import DONE
from gateway.openai_request import Call
from gateway.sglang_request import Shape
from gateway.text import Delta, Usage
from gateway.timings import timings_object

_encode = msgspec.json.Encoder().encode
_FLOOR = -9999.0  # JSON has no minus infinity

Scored = tuple[float, int, str | None]  # log-probability, token id, its text if asked for


class SglangFormat:
    """Choices by their place in the answer; a batch is a list, and its events carry `index`."""

    def __init__(self, call: Call, shape: Shape, table: TokenBytes, answer: Answer) -> None:
        self._call = call
        self._shape = shape
        self._table = table
        self._answer = answer
        self._so_far: dict[int, Delta] = {}

    def opening(self) -> bytes:
        return b""

    def event(self, delta: Delta) -> bytes:
        before = self._so_far.get(delta.choice)
        self._so_far[delta.choice] = so_far = delta if before is None else joined([before, delta])
        reply = self._reply(delta.choice, so_far)
        if self._shape.batch:
            reply["index"] = delta.choice
        return b"data: " + _encode(reply) + b"\n\n"

    def closing(self) -> bytes:
        return DONE

    def whole(self, choices: Sequence[Delta]) -> bytes:
        replies = [self._reply(place, choice) for place, choice in enumerate(choices)]
        return _encode(replies if self._shape.batch else replies[0])

    def _reply(self, place: int, choice: Delta) -> dict[str, Any]:
        return {"text": choice.text, "output_ids": choice.tokens, "meta_info": self._meta(place, choice)}

    def _meta(self, place: int, choice: Delta) -> dict[str, Any]:
        prompt, number = divmod(place, self._call.n)
        course = self._answer.courses[prompt]
        usage = Usage(len(self._call.requests[prompt].prompt_ids), cached_tokens=course.cached_tokens)
        usage.add(choice)
        meta: dict[str, Any] = {
            "id": self._name(prompt, number),
            "finish_reason": _finish_reason(choice),
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
        if self._call.logprobs:
            meta |= self._logprobs(choice)
        if self._call.timings and choice.finish is not None:
            meta["timings"] = timings_object(self._call.began, course, usage)
        return meta

    def _name(self, prompt: int, number: int) -> str:
        name = self._call.requests[prompt].id if self._shape.rids is None else self._shape.rids[prompt]
        return name if self._call.n == 1 else f"{name}_{number}"

    def _logprobs(self, choice: Delta) -> dict[str, Any]:
        scored = list(zip(choice.tokens, choice.logprobs, strict=True))
        tops = [[self._scored(id, value) for id, value in logprob.top] for _, logprob in scored]
        return {
            "input_token_logprobs": [],
            "output_token_logprobs": [self._scored(token, logprob.logprob) for token, logprob in scored],
            "input_top_logprobs": [],
            "output_top_logprobs": [top or None for top in tops],
        }

    def _scored(self, token: int, logprob: float) -> Scored:
        text = self._table.label(token)[0] if self._shape.token_texts else None
        return max(logprob, _FLOOR), token, text


def _finish_reason(choice: Delta) -> dict[str, str | int | None] | None:
    match choice.finish:
        case None:
            return None
        case Finish.LENGTH:
            return {"type": "length", "length": len(choice.tokens)}
        case Finish.STOP:
            return {"type": "stop", "matched": choice.matched}
