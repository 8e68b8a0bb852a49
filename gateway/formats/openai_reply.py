"""The answers of OpenAI's API: whole objects, stream events, and error bodies, as JSON bytes.

msgspec encodes, because this runs per engine step and stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from eyas.common.errors import EyasError
from gateway.backends.answer import CallAnswer, EventFormat, TextEvent
from gateway.formats.openai_logprobs import TextLogprobs, chat_logprobs, text_logprobs
from gateway.formats.openai_request import ApiCall
from gateway.observe.timings import TimingsObject, timings_object
from gateway.text.detokenize import TokenBytes
from gateway.text.entries import TextDelta, UsageCounts

DONE = b"data: [DONE]\n\n"
_ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error"}  # by HTTP status, where one has its own
_encode = msgspec.json.Encoder().encode

Ids = Sequence[int] | msgspec.UnsetType  # sent on request only


class AnswerFormat(EventFormat, Protocol):
    """How one API writes one answer; it lives as long as the answer."""

    text_event: TextEvent | None = None

    def opening(self) -> bytes:
        """Events sent as soon as the request is admitted."""
        ...

    def closing(self) -> bytes:
        """The last events."""
        ...

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        """The whole answer, of one delta per choice in order."""
        ...

    def failure(self, error: EyasError) -> bytes:
        """The last events of a stream that fails after it began."""
        return error_event(error)


class CompletionDetails(msgspec.Struct, frozen=True):
    """Drafted tokens, counted in depth, and what the answer begins with."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int
    reasoning_tokens: int = 0  # of a reasoning model, to the end of its reasoning


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens that a prefix cache held."""

    cached_tokens: int


class UsageObject(msgspec.Struct, frozen=True):
    """`usage`, in tokens, over all prompts and choices of the call."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a message that an event adds: its role, or more content."""

    role: str | None = None
    content: str | None = None


class AssistantMessage(msgspec.Struct, frozen=True):
    """A whole answer to a chat."""

    role: str
    content: str
    refusal: None = None


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A choice in an event of a streamed chat."""

    index: int
    delta: ChatDelta
    logprobs: Any = None
    finish_reason: str | None = None
    token_ids: Ids = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """A choice of a whole chat answer."""

    index: int
    message: AssistantMessage
    logprobs: Any
    finish_reason: str | None
    token_ids: Ids = msgspec.UNSET


class TextChoice(msgspec.Struct, frozen=True):
    """A choice of a text completion, whole or in an event."""

    index: int
    text: str
    logprobs: Any = None
    finish_reason: str | None = None
    token_ids: Ids = msgspec.UNSET
    prompt_token_ids: Ids = msgspec.UNSET


class OpenAIReply(msgspec.Struct, frozen=True):
    """An answer or event around its choices. `created`: seconds since 1970. `metadata`: of a whole answer and
    of the last event, `weight_version`: the weights that all of its tokens come from, once they have changed.
    """

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: Sequence[msgspec.Struct]
    usage: UsageObject | None | msgspec.UnsetType = msgspec.UNSET
    timings: TimingsObject | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: Ids = msgspec.UNSET
    metadata: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ErrorObject(msgspec.Struct, frozen=True):
    """OpenAI's error: `type` by HTTP status, `code` by the error's class, `param` the field at fault."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is no success."""

    error: ErrorObject


class ReplyFrame:
    """Puts the choices of one call into `OpenAIReply` objects.

    `whole` and `event` are the names of the two kinds of object. `reasoning_tokens`: how many of the tokens
    so far are reasoning.
    """

    def __init__(self, call: ApiCall, answer: CallAnswer, whole: str, event: str) -> None:
        self._call = call
        self._answer = answer
        self._whole = whole
        self._event = event
        self.reasoning_tokens: Callable[[], int] = lambda: 0
        # The events of a call differ in their choice alone: the rest is encoded once.
        none = None if call.include_usage else msgspec.UNSET
        self._before, _, self._after = _event(self._reply(event, [], none)).partition(b'"choices":[]')
        self._counted = msgspec.structs.replace(answer.usage)  # of the deltas that were shown

    def count(self, delta: TextDelta) -> None:
        """Takes note of a delta before its event: several may have come together."""
        if self._call.continuous_usage:
            self._counted.add(delta)
            self._counted.cached_tokens = self._answer.usage.cached_tokens

    def event(self, choice: msgspec.Struct, prompt_ids: Ids = msgspec.UNSET) -> bytes:
        """An event with one choice."""
        if not self._call.continuous_usage and prompt_ids is msgspec.UNSET:
            return b'%b"choices":[%b]%b' % (self._before, _encode(choice), self._after)
        reply = self._reply(self._event, [choice], self._usage())
        return _event(msgspec.structs.replace(reply, prompt_token_ids=prompt_ids))

    def closing(self) -> bytes:
        """The last events: usage and timings if asked for, then [DONE]."""
        if not (self._call.include_usage or self._call.timings or self._answer.metadata):
            return DONE
        usage = self._total() if self._call.include_usage else msgspec.UNSET
        return _event(self._timed(self._reply(self._event, [], usage))) + DONE

    def whole(self, choices: Sequence[msgspec.Struct], prompt_ids: Ids = msgspec.UNSET) -> bytes:
        """The answer as one object."""
        reply = self._reply(self._whole, choices, self._total())
        return _encode(msgspec.structs.replace(self._timed(reply), prompt_token_ids=prompt_ids))

    def _usage(self) -> UsageObject | None | msgspec.UnsetType:
        """`usage` of an event before the last: of all choices so far if asked for, else null or absent."""
        if self._call.continuous_usage:
            return usage_object(self._counted, self.reasoning_tokens())
        return None if self._call.include_usage else msgspec.UNSET

    def _total(self) -> UsageObject:
        return usage_object(self._answer.usage, self.reasoning_tokens())

    def _timed(self, reply: OpenAIReply) -> OpenAIReply:
        if metadata := self._answer.metadata:
            reply = msgspec.structs.replace(reply, metadata=metadata)
        if not self._call.timings:
            return reply
        (trace,) = self._answer.traces
        timings = timings_object(self._call.began, trace, self._answer.usage)
        return msgspec.structs.replace(reply, timings=timings)

    def _reply(
        self,
        kind: str,
        choices: Sequence[msgspec.Struct],
        usage: UsageObject | None | msgspec.UnsetType,
    ) -> OpenAIReply:
        call = self._call
        fingerprint = call.model.system_fingerprint
        return OpenAIReply(call.id, kind, call.created, call.model.id, fingerprint, choices, usage)


def _is_bare(call: ApiCall) -> bool:
    """Whether the events of a choice's text say nothing but this text."""
    return not (call.logprobs or call.token_ids or call.continuous_usage)


class ChatFormat(AnswerFormat):
    """Writes chat.completion and chat.completion.chunk."""

    def __init__(self, call: ApiCall, table: TokenBytes, answer: CallAnswer) -> None:
        self._call = call
        self._table = table
        self._wants_logprobs = call.logprobs
        self._frame = ReplyFrame(call, answer, "chat.completion", "chat.completion.chunk")
        self.text_event = self._render if _is_bare(call) else None

    def opening(self) -> bytes:
        first, prompt = ChatDelta(role="assistant", content=""), prompt_ids(self._call, 0)
        choices = (ChatChunkChoice(i, first) for i in range(self._call.choices))
        return b"".join(self._frame.event(choice, prompt) for choice in choices)

    def event(self, delta: TextDelta) -> bytes:
        self._frame.count(delta)
        logprobs, ids = self._logprobs(delta), token_ids(self._call, delta)
        if not (delta.text or delta.finish or logprobs or ids):
            return b""
        added = ChatDelta(content=delta.text) if delta.text else ChatDelta()
        return self._frame.event(ChatChunkChoice(delta.choice, added, logprobs, delta.finish, ids))

    def closing(self) -> bytes:
        return self._frame.closing()

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        answers = [
            ChatChoice(
                index=i,
                message=AssistantMessage("assistant", delta.text),
                logprobs=self._logprobs(delta),
                finish_reason=delta.finish,
                token_ids=token_ids(self._call, delta),
            )
            for i, delta in enumerate(choices)
        ]
        return self._frame.whole(answers, prompt_ids(self._call, 0))

    def _render(self, choice: int, text: str) -> bytes:
        return self._frame.event(ChatChunkChoice(choice, ChatDelta(content=text)))

    def _logprobs(self, delta: TextDelta) -> Any:
        return chat_logprobs(delta, self._table) if self._wants_logprobs else None


class TextFormat(AnswerFormat):
    """Writes text_completion, whole and streamed."""

    def __init__(self, call: ApiCall, table: TokenBytes, answer: CallAnswer) -> None:
        self._call = call
        self._table = table
        self._answer = answer
        self._frame = ReplyFrame(call, answer, "text_completion", "text_completion")
        self._to_begin = set(range(call.choices)) if call.echoes or call.token_ids else set()
        self.text_event = self._render if _is_bare(call) else None

    def opening(self) -> bytes:
        """The echoed prompts; with log-probabilities they wait for the first delta, which brings these."""
        if self._call.logprobs:
            return b""
        return b"".join(map(self._first, sorted(self._to_begin)))

    def event(self, delta: TextDelta) -> bytes:
        self._frame.count(delta)
        first = self._first(delta.choice) if delta.choice in self._to_begin else b""
        logprobs, ids = self._logprobs(delta), token_ids(self._call, delta)
        if not (delta.text or delta.finish or logprobs or ids):
            return first
        return first + self._frame.event(TextChoice(delta.choice, delta.text, logprobs, delta.finish, ids))

    def closing(self) -> bytes:
        return self._frame.closing()

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        if self._call.returned is not None:
            choices = likeliest(choices, self._call.n, self._call.returned)
        return self._frame.whole([self._choice(i, delta) for i, delta in enumerate(choices)])

    def _choice(self, place: int, delta: TextDelta) -> TextChoice:
        """The whole choice, with its prompt if that is echoed."""
        echo, scored = self._echo(delta.choice)
        logprobs = self._logprobs(delta)
        return TextChoice(
            index=place,
            text=echo + delta.text,
            logprobs=scored + logprobs if scored and logprobs else logprobs or scored,
            finish_reason=delta.finish,
            token_ids=token_ids(self._call, delta),
            prompt_token_ids=prompt_ids(self._call, delta.choice),
        )

    def _first(self, choice: int) -> bytes:
        """The event with what a choice begins with; empty if that is nothing."""
        self._to_begin.remove(choice)
        echo, logprobs = self._echo(choice)
        ids = prompt_ids(self._call, choice)
        if not (echo or logprobs or ids):
            return b""
        return self._frame.event(TextChoice(choice, echo, logprobs, prompt_token_ids=ids))

    def _render(self, choice: int, text: str) -> bytes:
        return self._frame.event(TextChoice(choice, text))

    def _echo(self, choice: int) -> tuple[str, TextLogprobs | None]:
        """The prompt's text, if echoed, and its log-probabilities, if asked for."""
        if not self._call.echoes:
            return "", None
        prompt = choice // self._call.n
        echo, scored = self._call.echoes[prompt], self._answer.traces[prompt].prompt
        if scored is None:
            return echo.text, None
        ids = self._call.requests[prompt].prompt_ids
        return echo.text, text_logprobs(ids, [None, *scored.rows()], echo.offsets, self._table)

    def _logprobs(self, delta: TextDelta) -> TextLogprobs | None:
        if not self._call.logprobs or not delta.tokens:
            return None
        offsets: Sequence[int] = delta.offsets
        if self._call.echoes:
            before = len(self._call.echoes[delta.choice // self._call.n].text)
            offsets = [before + offset for offset in offsets]
        return text_logprobs(delta.tokens, delta.logprobs, offsets, self._table)


def token_ids(call: ApiCall, delta: TextDelta) -> Ids:
    """The delta's tokens, if the call asks for ids."""
    return delta.tokens if call.token_ids else msgspec.UNSET


def prompt_ids(call: ApiCall, choice: int) -> Ids:
    """The ids of the choice's prompt, if the call asks for ids."""
    return tuple(call.requests[choice // call.n].prompt_ids) if call.token_ids else msgspec.UNSET


def error_body(error: EyasError) -> bytes:
    """OpenAI's error object."""
    by_class = "invalid_request_error" if error.http_status < 500 else "server_error"
    kind = _ERROR_TYPES.get(error.http_status, by_class)
    return _encode(ErrorBody(ErrorObject(str(error), kind, error.param, error.code)))


def error_event(error: EyasError) -> bytes:
    """The last events of a stream that fails after it began: the error, then [DONE]."""
    return b"data: " + error_body(error) + b"\n\n" + DONE


def usage_object(usage: UsageCounts, reasoning_tokens: int = 0) -> UsageObject:
    """The counts as OpenAI's object."""
    return UsageObject(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptDetails(usage.cached_tokens),
        completion_tokens_details=CompletionDetails(usage.accepted, usage.rejected, reasoning_tokens),
    )


def _event(reply: OpenAIReply) -> bytes:
    return b"data: " + _encode(reply) + b"\n\n"


def likeliest(choices: Sequence[TextDelta], drawn: int, count: int) -> list[TextDelta]:
    """Returns the `count` best of each prompt's `drawn` choices, by mean log-probability of their tokens.

    The best comes first; of equal choices the earlier one wins.
    """
    prompts = (choices[first : first + drawn] for first in range(0, len(choices), drawn))
    return [choice for drawn_ones in prompts for choice in sorted(drawn_ones, key=_cost)[:count]]


def _cost(choice: TextDelta) -> float:
    return -sum(scored.logprob for scored in choice.logprobs) / max(len(choice.logprobs), 1)
