"""What OpenAI's API answers with: whole objects, stream events, and error bodies, as JSON bytes.

It knows the two shapes of an answer (chat and text) and server-sent events. It refuses to know sockets,
and where the deltas come from. Encoding is by msgspec: it runs once an engine step and stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from eyas.common.errors import EyasError
from gateway.answer import Answer
from gateway.detokenize import TokenBytes
from gateway.openai_logprobs import chat_logprobs, text_logprobs
from gateway.openai_request import Call
from gateway.text import Delta, Usage
from gateway.timings import TimingsObject, timings_object

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Format(Protocol):
    """One API's way of telling an answer, for as long as that answer runs."""

    def opening(self) -> bytes:
        """Events sent as soon as the request is admitted."""
        ...

    def event(self, delta: Delta) -> bytes:
        """The event of one delta; empty if it holds nothing to show yet."""
        ...

    def closing(self) -> bytes:
        """The last events."""
        ...

    def whole(self, choices: Sequence[Delta]) -> bytes:
        """The answer in one piece: one delta a choice, in order."""
        ...


class Details(msgspec.Struct, frozen=True):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class UsageObject(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: Details


class Piece(msgspec.Struct, frozen=True, omit_defaults=True):
    """A chat delta."""

    role: str | None = None
    content: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
    refusal: None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: Piece
    logprobs: Any = None
    finish_reason: str | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    index: int
    message: AssistantMessage
    logprobs: Any
    finish_reason: str | None


class TextChoice(msgspec.Struct, frozen=True):
    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None


class Reply(msgspec.Struct, frozen=True):
    """The frame that all answers and events share."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[ChatChunkChoice | ChatChoice | TextChoice]
    usage: UsageObject | None | msgspec.UnsetType = msgspec.UNSET
    timings: TimingsObject | msgspec.UnsetType = msgspec.UNSET


class ErrorObject(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorObject


class Frame:
    """Puts choices into a `Reply` of one call."""

    def __init__(self, call: Call, answer: Answer, whole: str, event: str) -> None:
        self._call = call
        self._answer = answer
        self._whole = whole
        self._event = event
        # All events of a call are alike but for their choice: the rest is encoded once.
        usage = None if call.include_usage else msgspec.UNSET
        self._before, _, self._after = _event(self._reply(event, [], usage)).partition(b'"choices":[]')

    def event(self, choice: ChatChunkChoice | TextChoice) -> bytes:
        return b'%b"choices":[%b]%b' % (self._before, _encode(choice), self._after)

    def closing(self) -> bytes:
        if not (self._call.include_usage or self._call.timings):
            return DONE
        usage = _usage_object(self._answer.usage) if self._call.include_usage else msgspec.UNSET
        return _event(self._timed(self._reply(self._event, [], usage))) + DONE

    def whole(self, choices: Sequence[ChatChoice | TextChoice]) -> bytes:
        return _encode(self._timed(self._reply(self._whole, choices, _usage_object(self._answer.usage))))

    def _timed(self, reply: Reply) -> Reply:
        if not self._call.timings:
            return reply
        (course,) = self._answer.courses
        timings = timings_object(self._call.began, course, self._answer.usage)
        return msgspec.structs.replace(reply, timings=timings)

    def _reply(
        self,
        kind: str,
        choices: Sequence[ChatChunkChoice | ChatChoice | TextChoice],
        usage: UsageObject | None | msgspec.UnsetType,
    ) -> Reply:
        call = self._call
        fingerprint = call.model.system_fingerprint
        return Reply(call.id, kind, call.created, call.model.id, fingerprint, choices, usage)


class ChatFormat:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, call: Call, table: TokenBytes, answer: Answer) -> None:
        self._call = call
        self._table = table
        self._wants_logprobs = call.logprobs
        self._frame = Frame(call, answer, "chat.completion", "chat.completion.chunk")

    def opening(self) -> bytes:
        first = Piece(role="assistant", content="")
        return b"".join(self._frame.event(ChatChunkChoice(i, first)) for i in range(self._call.choices))

    def event(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta)
        if not delta.text and delta.finish is None and logprobs is None:
            return b""
        piece = Piece(content=delta.text) if delta.text else Piece()
        return self._frame.event(ChatChunkChoice(delta.choice, piece, logprobs, delta.finish))

    def closing(self) -> bytes:
        return self._frame.closing()

    def whole(self, choices: Sequence[Delta]) -> bytes:
        return self._frame.whole(
            [
                ChatChoice(i, AssistantMessage("assistant", d.text), self._logprobs(d), d.finish)
                for i, d in enumerate(choices)
            ]
        )

    def _logprobs(self, delta: Delta) -> Any:
        return chat_logprobs(delta, self._table) if self._wants_logprobs else None


class TextFormat:
    """text_completion, whole and streamed."""

    def __init__(self, call: Call, table: TokenBytes, answer: Answer) -> None:
        self._call = call
        self._table = table
        self._wants_logprobs = call.logprobs
        self._frame = Frame(call, answer, "text_completion", "text_completion")

    def opening(self) -> bytes:
        echoes = (self._echo(i) for i in range(self._call.choices))
        return b"".join(self._frame.event(TextChoice(i, echo)) for i, echo in enumerate(echoes) if echo)

    def event(self, delta: Delta) -> bytes:
        logprobs = self._logprobs(delta)
        if not delta.text and delta.finish is None and logprobs is None:
            return b""
        return self._frame.event(TextChoice(delta.choice, delta.text, logprobs, delta.finish))

    def closing(self) -> bytes:
        return self._frame.closing()

    def whole(self, choices: Sequence[Delta]) -> bytes:
        return self._frame.whole(
            [
                TextChoice(i, self._echo(i) + d.text, self._logprobs(d), d.finish)
                for i, d in enumerate(choices)
            ]
        )

    def _echo(self, choice: int) -> str:
        return self._call.echoes[choice // self._call.n] if self._call.echoes else ""

    def _logprobs(self, delta: Delta) -> Any:
        return text_logprobs(delta, self._table) if self._wants_logprobs else None


def error_body(error: EyasError) -> bytes:
    """OpenAI's error object."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    if error.http_status == 429:
        kind = "rate_limit_error"
    return _encode(ErrorBody(ErrorObject(str(error), kind, error.param, error.code)))


def error_event(error: EyasError) -> bytes:
    """What a stream ends with when it fails after it began: the error, and the word that nothing follows."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def _usage_object(usage: Usage) -> UsageObject:
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        completion_tokens_details=Details(usage.accepted, usage.rejected),
    )


def _event(reply: Reply) -> bytes:
    return b"data: " + _encode(reply) + b"\n\n"
