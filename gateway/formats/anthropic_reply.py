"""The answers of /v1/messages: one message, or the events that build it up, and errors in their shape.

Both come from the same steps, so that a stream's blocks are those of a whole answer.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from eyas.common.errors import EyasError
from eyas.common.logging import request_id
from eyas.common.types import FinishCause
from gateway.backends.answer import CallAnswer
from gateway.formats.openai_reply import AnswerFormat
from gateway.formats.openai_request import ApiCall
from gateway.parsers.message import MessageReading
from gateway.parsers.output import CallArguments, CallDone, CallStarted, ContentText, Event, ReasoningText
from gateway.text.entries import TextDelta
from gateway.text.message_reader import CALLS, MessageReader

_encode = msgspec.json.Encoder().encode
Object = dict[str, Any]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def anthropic_error(error: EyasError) -> bytes:
    """Anthropic's error object. `type` follows the HTTP status."""
    usual = "invalid_request_error" if error.http_status < 500 else "api_error"
    kind = _ERROR_TYPES.get(error.http_status, usual)
    id = request_id.get() or None
    return _encode({"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": id})


class AnthropicFormat(AnswerFormat):
    """Writes one message. It has one block at a time: thinking, text, or a call."""

    def __init__(self, call: ApiCall, answer: CallAnswer) -> None:
        self._call = call
        self._answer = answer
        self._reader = MessageReader(call.reading or MessageReading())
        self._finish: FinishCause | None = None
        self._matched: str | None = None
        self._blocks: list[Object] = []
        self._is_open = False
        self._arguments = ""
        self._lines: list[bytes] = []

    def opening(self) -> bytes:
        self._tell("message_start", message=self._message() | {"content": []})
        self._tell("ping")
        return self._drain()

    def event(self, delta: TextDelta) -> bytes:
        self._read(delta)
        return self._drain()

    def closing(self) -> bytes:
        self._close()
        ended = {"stop_reason": self._stop_reason(), "stop_sequence": self._matched}
        self._tell("message_delta", delta=ended, usage=self._usage(), **self._metadata())
        self._tell("message_stop")
        return self._drain()

    def failure(self, error: EyasError) -> bytes:
        return b"event: error\ndata: %b\n\n" % anthropic_error(error)

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        self._read(choices[0])
        self._close()
        return _encode(self._message() | self._metadata())

    # --- steps ---

    def _read(self, delta: TextDelta) -> None:
        for event in self._reader.read(delta):
            self._take(event)
        if delta.finish is not None:
            self._finish = delta.finish
            self._matched = delta.matched if isinstance(delta.matched, str) else None

    def _take(self, event: Event) -> None:
        match event:
            case ReasoningText(text=text):
                self._block("thinking", signature="")
                self._add("thinking", text)
            case ContentText(text=text):
                self._block("text")
                self._add("text", text)
            case CallStarted(index=index, name=name):
                self._close()
                self._begin(
                    {"type": "tool_use", "id": self._reader.call_ids[index], "name": name, "input": {}}
                )
            case CallArguments(text=text):
                self._arguments += text
                self._tell_delta({"type": "input_json_delta", "partial_json": text})
            case CallDone():
                self._close()

    def _block(self, kind: str, **more: str) -> None:
        """Makes a block of this kind the open one."""
        if not self._is_open or self._blocks[-1]["type"] != kind:
            self._close()
            self._begin({"type": kind, kind: "", **more})

    def _begin(self, block: Object) -> None:
        self._blocks.append(block)
        self._is_open = True
        self._tell("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _add(self, kind: str, text: str) -> None:
        self._blocks[-1][kind] += text
        self._tell_delta({"type": f"{kind}_delta", kind: text})

    def _close(self) -> None:
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            self._tell_delta({"type": "signature_delta", "signature": ""})
        elif block["type"] == "tool_use":
            block["input"], self._arguments = _object(self._arguments), ""
        self._tell("content_block_stop", index=len(self._blocks) - 1)
        self._is_open = False

    # --- telling ---

    def _tell_delta(self, delta: Object) -> None:
        self._tell("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._lines.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **fields})))

    def _drain(self) -> bytes:
        lines, self._lines = b"".join(self._lines), []
        return lines

    def _message(self) -> Object:
        return {
            "id": self._call.id,
            "type": "message",
            "role": "assistant",
            "model": self._call.model.id,
            "content": self._blocks,
            "stop_reason": self._stop_reason(),
            "stop_sequence": self._matched,
            "usage": self._usage(),
        }

    def _metadata(self) -> Object:
        """Which weights have answered: a field beside Anthropic's own, once they have changed."""
        metadata = self._answer.metadata
        return {"metadata": metadata} if metadata else {}

    def _stop_reason(self) -> str | None:
        if self._finish is None:
            return None
        if self._finish is FinishCause.LENGTH:
            return "max_tokens"
        if self._finish is FinishCause.ABORT:
            return "pause_turn"
        if self._reader.finish_reason(self._finish) == CALLS or self._calls_named():
            return "tool_use"
        return "stop_sequence" if self._matched is not None else "end_turn"

    def _calls_named(self) -> bool:
        """Whether the answer is the call that the caller named, which OpenAI's reasons do not tell."""
        return bool(self._blocks) and self._blocks[-1]["type"] == "tool_use"

    def _usage(self) -> Object:
        """Tokens; those of the prompt that were cached count by themselves."""
        usage = self._answer.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }


def _object(arguments: str) -> Object:
    """The arguments of a call; {} for those of one that was cut."""
    try:
        read = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
