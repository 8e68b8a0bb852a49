"""The answers of /v1/responses: one object, or the events that build it up.

Both come from the same steps, so that a stream ends with the object that a whole answer is.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from eyas.common.errors import EyasError, InvalidRequest, Overloaded
from eyas.common.types import FinishCause
from gateway.backends.answer import CallAnswer
from gateway.formats.openai_logprobs import chat_logprobs
from gateway.formats.openai_reply import AnswerFormat
from gateway.formats.openai_request import ApiCall
from gateway.formats.responses_request import UNNAMED, FlatChoice, ResponsesBody
from gateway.parsers.message import MessageReading
from gateway.parsers.output import CallArguments, CallDone, CallStarted, ContentText, Event, ReasoningText
from gateway.text.detokenize import TokenBytes
from gateway.text.entries import TextDelta
from gateway.text.message_reader import MessageReader

_encode = msgspec.json.Encoder().encode
Object = dict[str, Any]


class ResponsesFormat(AnswerFormat):
    """Writes one response. Its output has one item at a time: reasoning, a message, or a call."""

    def __init__(self, call: ApiCall, body: ResponsesBody, table: TokenBytes, answer: CallAnswer) -> None:
        self._call = call
        self._body = body
        self._table = table
        self._answer = answer
        self._reader = MessageReader(call.reading or MessageReading())
        self._finish: FinishCause | None = None
        self._output: list[Object] = []
        self._open: _OutputItem | None = None
        self._scored: list[Any] = []  # log-probabilities that no event has told yet
        self._lines: list[bytes] = []
        self._number = 0

    def opening(self) -> bytes:
        started = self._response("in_progress")
        self._tell("response.created", response=started)
        self._tell("response.in_progress", response=started)
        return self._drain()

    def event(self, delta: TextDelta) -> bytes:
        self._read(delta)
        return self._drain()

    def closing(self) -> bytes:
        status = self._end()
        self._tell(f"response.{status}", response=self._response(status))
        return self._drain()

    def failure(self, error: EyasError) -> bytes:
        self._close("incomplete")
        failed = self._response("failed") | {"error": {"code": _code(error), "message": str(error)}}
        self._tell("response.failed", response=failed)
        return self._drain()

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        self._read(choices[0])
        return _encode(self._response(self._end()))

    # --- steps ---

    def _read(self, delta: TextDelta) -> None:
        if self._call.logprobs and (logprobs := chat_logprobs(delta, self._table)) is not None:
            self._scored += logprobs.content
        for event in self._reader.read(delta):
            self._take(event)
        self._finish = delta.finish or self._finish

    def _take(self, event: Event) -> None:
        match event:
            case ReasoningText(text=text):
                self._item("reasoning").add(text)
            case ContentText(text=text):
                self._item("message").add(text)
            case CallStarted(index=index, name=name):
                self._close("completed")
                self._begin(_CallItem(self, self._reader.call_ids[index], name))
            case CallArguments(text=text):
                self._item("function_call").add(text)
            case CallDone():
                self._close("completed")

    def _item(self, kind: str) -> _OutputItem:
        """The open item of this kind, a new one if another is open."""
        if self._open is None or self._open.item["type"] != kind:
            self._close("completed")
            self._begin(_MessageItem(self) if kind == "message" else _ReasoningItem(self))
        assert self._open is not None
        return self._open

    def _begin(self, item: _OutputItem) -> None:
        self._open = item
        self.tell_item("response.output_item.added", item=item.item)
        item.begin()

    def _close(self, status: str) -> None:
        if self._open is None:
            return
        self._open.end()
        self._open.item["status"] = status
        self.tell_item("response.output_item.done", item=self._open.item)
        self._output.append(self._open.item)
        self._open = None

    def _end(self) -> str:
        """Closes what is open, and gives the response's status. There is always a message or a call."""
        status = "completed" if self._finish is FinishCause.STOP else "incomplete"
        if self._open is None and not self._output:
            self._item("message")
        self._close(status)
        return status

    # --- telling ---

    def tell_item(self, kind: str, **fields: Any) -> None:
        """An event about the open item."""
        self._tell(kind, output_index=len(self._output), **fields)

    def take_scores(self) -> list[Any]:
        """Log-probabilities since the last call."""
        scored, self._scored = self._scored, []
        return scored

    def _tell(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        self._lines.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event)))

    def _drain(self) -> bytes:
        lines, self._lines = b"".join(self._lines), []
        return lines

    def _response(self, status: str) -> Object:
        over = status != "in_progress"
        cut = {"reason": "max_output_tokens"} if self._finish is FinishCause.LENGTH else None
        return _frame(self._call, self._body) | {
            "metadata": (self._body.metadata or {}) | (self._answer.metadata if over else {}),
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "output": list(self._output),
            "usage": self._usage() if over else None,
        }

    def _usage(self) -> Object:
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reader.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


class _OutputItem:
    """An item of the output while it grows."""

    def __init__(self, response: ResponsesFormat, item: Object) -> None:
        self.item = item
        self._events = response
        self._text: list[str] = []

    def begin(self) -> None:
        """Tells what comes before the first piece."""

    def add(self, text: str) -> None:
        """Tells a piece."""
        raise NotImplementedError

    def end(self) -> None:
        """Tells the whole, and puts it into the item."""
        raise NotImplementedError


class _PartItem(_OutputItem):
    """An item that is one part of text."""

    kind: str  # the part's type
    events: str  # how the events of its text begin

    def begin(self) -> None:
        self._tell("response.content_part.added", part=self._part(""))

    def end(self) -> None:
        text = "".join(self._text)
        self._tell(f"{self.events}.done", text=text, **self._scores())
        part = self._part(text)
        self._tell("response.content_part.done", part=part)
        self.item["content"] = [part]

    def _tell(self, kind: str, **fields: Any) -> None:
        self._events.tell_item(kind, item_id=self.item["id"], content_index=0, **fields)

    def _part(self, text: str) -> Object:
        return {"type": self.kind, "text": text}

    def _scores(self) -> Object:
        return {}


class _ReasoningItem(_PartItem):
    kind, events = "reasoning_text", "response.reasoning_text"

    def __init__(self, response: ResponsesFormat) -> None:
        item = {"id": _id("rs"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
        super().__init__(response, item)

    def add(self, text: str) -> None:
        self._text.append(text)
        self._tell(f"{self.events}.delta", delta=text)


class _MessageItem(_PartItem):
    kind, events = "output_text", "response.output_text"

    def __init__(self, response: ResponsesFormat) -> None:
        item: Object = {"id": _id("msg"), "type": "message", "role": "assistant"}
        super().__init__(response, item | {"content": [], "status": "in_progress"})
        self._scored: list[Any] = []

    def add(self, text: str) -> None:
        self._text.append(text)
        scored = [_brief(token) for token in self._new_scores()]
        self._tell(f"{self.events}.delta", delta=text, logprobs=scored)

    def _part(self, text: str) -> Object:
        return super()._part(text) | {"annotations": [], "logprobs": self._scored}

    def _scores(self) -> Object:
        self._new_scores()  # of tokens without a text, such as the last one
        return {"logprobs": [_brief(token) for token in self._scored]}

    def _new_scores(self) -> list[Any]:
        scored = self._events.take_scores()
        self._scored += scored
        return scored


class _CallItem(_OutputItem):
    def __init__(self, response: ResponsesFormat, call_id: str, name: str) -> None:
        item = {"id": _id("fc"), "type": "function_call", "call_id": call_id, "name": name}
        super().__init__(response, item | {"arguments": "", "status": "in_progress"})

    def add(self, text: str) -> None:
        self._text.append(text)
        self._events.tell_item("response.function_call_arguments.delta", item_id=self.item["id"], delta=text)

    def end(self) -> None:
        whole = "".join(self._text)
        self.item["arguments"] = whole
        self._events.tell_item(
            "response.function_call_arguments.done", item_id=self.item["id"], arguments=whole
        )


def _id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"


def _code(error: EyasError) -> str:
    """The error by one of the names that OpenAI has for a response that fails."""
    if isinstance(error, Overloaded):
        return "rate_limit_exceeded"
    return "invalid_prompt" if isinstance(error, InvalidRequest) else "server_error"


def _brief(token: Any) -> Object:
    """A token's log-probability as events tell it: without bytes, which the part has."""
    top = [{"token": other.token, "logprob": other.logprob} for other in token.top_logprobs]
    return {"token": token.token, "logprob": token.logprob, "top_logprobs": top}


def _frame(call: ApiCall, body: ResponsesBody) -> Object:
    """Returns the fields of the request that its response repeats."""
    params = call.requests[0].params
    format = body.text.format if body.text else None
    text_format = {"type": "text"} if format is None else format.model_dump(exclude_none=True)
    if "definition" in text_format:
        text_format["schema"] = text_format.pop("definition")
        text_format.setdefault("name", UNNAMED)
    return {
        "id": call.id,
        "object": "response",
        "background": False,
        "created_at": call.created,
        "model": call.model.id,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": body.prompt_cache_key or None,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": {"format": text_format},
        "tool_choice": _choice(body.tool_choice),
        "tools": [_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
    }


def _choice(choice: Any) -> Any:
    return choice.model_dump(exclude_none=True) if isinstance(choice, FlatChoice) else choice or "auto"


def _tool(tool: Any) -> Object:
    return {"description": None, "parameters": None, "strict": False, **tool.model_dump(exclude_none=True)}
