"""Answers of OpenAI's chat API that hold more than content: calls of tools, and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.backends.answer import CallAnswer
from gateway.formats.openai_logprobs import chat_logprobs
from gateway.formats.openai_reply import AnswerFormat, Ids, ReplyFrame, prompt_ids, token_ids
from gateway.formats.openai_request import ApiCall
from gateway.parsers.output import CallArguments, CallDone, CallStarted, ContentText, Event, ReasoningText
from gateway.text.detokenize import TokenBytes
from gateway.text.entries import TextDelta
from gateway.text.message_reader import CALLS, MessageReader


class FunctionPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that is called, or more of its arguments. The name comes once."""

    arguments: str
    name: str | None = None


class CallPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call, or more of it: what comes first has the id and the name, and what follows neither."""

    index: int
    function: FunctionPart
    id: str | None = None
    type: str | None = None


class MessageDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The part of a message that an event adds."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: Sequence[CallPart] | None = None
    function_call: FunctionPart | None = None


class MessageChunkChoice(msgspec.Struct, frozen=True):
    """A choice in an event of a streamed chat."""

    index: int
    delta: MessageDelta
    logprobs: Any = None
    finish_reason: str | None = None
    token_ids: Ids = msgspec.UNSET


class FunctionCall(msgspec.Struct, frozen=True):
    """A function that is called; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call."""

    id: str
    function: FunctionCall
    type: str = "function"


class AnswerMessage(msgspec.Struct, frozen=True):
    """A whole answer."""

    role: str
    content: str | None
    refusal: None = None
    reasoning_content: str | None | msgspec.UnsetType = msgspec.UNSET
    tool_calls: Sequence[MessageToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCall | msgspec.UnsetType = msgspec.UNSET


class MessageChoice(msgspec.Struct, frozen=True):
    """A choice of a whole answer."""

    index: int
    message: AnswerMessage
    logprobs: Any
    finish_reason: str | None
    token_ids: Ids = msgspec.UNSET


class MessageFormat(AnswerFormat):
    """Writes chat.completion and chat.completion.chunk of answers that are read (`ApiCall.reading`)."""

    def __init__(self, call: ApiCall, table: TokenBytes, answer: CallAnswer) -> None:
        assert call.reading is not None
        self._call = call
        self._table = table
        self._readers = [MessageReader(call.reading) for _ in range(call.choices)]
        self._frame = ReplyFrame(call, answer, "chat.completion", "chat.completion.chunk")
        self._frame.reasoning_tokens = lambda: sum(reader.reasoning_tokens for reader in self._readers)

    def opening(self) -> bytes:
        first, prompt = MessageDelta(role="assistant"), prompt_ids(self._call, 0)
        choices = (MessageChunkChoice(i, first) for i in range(self._call.choices))
        return b"".join(self._frame.event(choice, prompt) for choice in choices)

    def event(self, delta: TextDelta) -> bytes:
        self._frame.count(delta)
        reader = self._readers[delta.choice]
        older, ids_of = self._call.speaks_functions, reader.call_ids
        deltas = (_part(event, ids_of) for event in reader.read(delta))
        parts = [_older_delta(part) if older else part for part in deltas if part is not None]
        logprobs, ids = self._logprobs(delta), token_ids(self._call, delta)
        if not parts and (delta.finish or logprobs or ids):
            parts = [MessageDelta()]
        chunks = []
        for i, part in enumerate(parts):
            choice = MessageChunkChoice(delta.choice, part)
            if i == 0:
                choice = msgspec.structs.replace(choice, logprobs=logprobs, token_ids=ids)
            if i == len(parts) - 1:
                choice = msgspec.structs.replace(choice, finish_reason=self._reason(reader, delta))
            chunks.append(self._frame.event(choice))
        return b"".join(chunks)

    def closing(self) -> bytes:
        return self._frame.closing()

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        answers = [
            MessageChoice(
                index=i,
                message=self._message(reader, delta),
                logprobs=self._logprobs(delta),
                finish_reason=self._reason(reader, delta),
                token_ids=token_ids(self._call, delta),
            )
            for i, (reader, delta) in enumerate(zip(self._readers, choices, strict=True))
        ]
        return self._frame.whole(answers, prompt_ids(self._call, 0))

    def _message(self, reader: MessageReader, delta: TextDelta) -> AnswerMessage:
        message = _message(reader.read(delta), reader.call_ids)
        if not self._call.speaks_functions or message.tool_calls is msgspec.UNSET:
            return message
        function = message.tool_calls[0].function
        return msgspec.structs.replace(message, tool_calls=msgspec.UNSET, function_call=function)

    def _reason(self, reader: MessageReader, delta: TextDelta) -> str | None:
        reason = reader.finish_reason(delta.finish)
        return "function_call" if reason == CALLS and self._call.speaks_functions else reason

    def _logprobs(self, delta: TextDelta) -> Any:
        return chat_logprobs(delta, self._table) if self._call.logprobs else None


def _part(event: Event, ids: Sequence[str]) -> MessageDelta | None:
    """Returns the part of a message that the event adds; None: nothing."""
    match event:
        case ReasoningText(text=text):
            return MessageDelta(reasoning_content=text)
        case ContentText(text=text):
            return MessageDelta(content=text)
        case CallStarted(index=index, name=name):
            return MessageDelta(tool_calls=[CallPart(index, FunctionPart("", name), ids[index], "function")])
        case CallArguments(index=index, text=text):
            return MessageDelta(tool_calls=[CallPart(index, FunctionPart(text))])
        case CallDone():
            return None


def _older_delta(delta: MessageDelta) -> MessageDelta:
    """The delta in OpenAI's older words: a call without an id, which is the only one."""
    if delta.tool_calls is None:
        return delta
    return MessageDelta(function_call=delta.tool_calls[0].function)


def _message(events: Sequence[Event], ids: Sequence[str]) -> AnswerMessage:
    """The whole message of all its events."""
    content = "".join(event.text for event in events if isinstance(event, ContentText))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    names = [event.name for event in events if isinstance(event, CallStarted)]
    arguments = dict.fromkeys(range(len(names)), "") | {
        event.index: event.text for event in events if isinstance(event, CallArguments)
    }
    calls = [MessageToolCall(ids[i], FunctionCall(name, arguments[i])) for i, name in enumerate(names)]
    return AnswerMessage(
        role="assistant",
        content=content or (None if calls or reasoning else ""),
        reasoning_content=reasoning or msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )
