"""The messages of `eyas.v1.Eyas`: it reads options and chats, and writes answers.

Messages of a chat and its tools are as the HTTP front has them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from pydantic import Field

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import Grammar
from eyas.common.params import MOST_PRIORITY, MOST_SALT
from eyas.common.types import (
    Adapter,
    FinishCause,
    GenerationRequest,
    PromptTokenLogprobs,
    RequestDraftLimits,
    TokenLogprob,
)
from gateway.backends.admission import GenerationOptions, ServedModel
from gateway.formats.chat_fields import ChatMessage
from gateway.formats.fields import MAX_CHOICES, MAX_STOP_LENGTH, MAX_STOPS, validated
from gateway.formats.schema import MAX_BAD_WORDS, TemplateFields
from gateway.observe.timings import LegObject, TimingsObject
from gateway.parsers.output import CallArguments, CallStarted, ContentText, Event, ReasoningText
from gateway.text.entries import TextDelta, TextRules, UsageCounts
from gateway.text.message_reader import CALLS, MessageReader
from protos import eyas_pb2

_FINISH = {
    None: eyas_pb2.FINISH_REASON_UNSPECIFIED,
    FinishCause.STOP: eyas_pb2.FINISH_REASON_STOP,
    FinishCause.LENGTH: eyas_pb2.FINISH_REASON_LENGTH,
    FinishCause.ABORT: eyas_pb2.FINISH_REASON_ABORT,
}
_WORKER_ROLES = {"prefill": eyas_pb2.WORKER_ROLE_PREFILL, "decode": eyas_pb2.WORKER_ROLE_DECODE}
_SAMPLING = (
    "min_tokens temperature top_k top_p min_p repetition_penalty presence_penalty frequency_penalty "
    "ignore_eos logprobs prompt_logprobs prompt_logprobs_start"
).split()


# --- what is asked -----------------------------------------------------------------------------------
_ROLES = {
    eyas_pb2.CHAT_ROLE_SYSTEM: "system",
    eyas_pb2.CHAT_ROLE_USER: "user",
    eyas_pb2.CHAT_ROLE_ASSISTANT: "assistant",
    eyas_pb2.CHAT_ROLE_TOOL: "tool",
}
_MODES = {
    eyas_pb2.TOOL_MODE_UNSPECIFIED: "auto",
    eyas_pb2.TOOL_MODE_AUTO: "auto",
    eyas_pb2.TOOL_MODE_NONE: "none",
    eyas_pb2.TOOL_MODE_REQUIRED: "required",
}


def text_rules(options: eyas_pb2.GenerateOptions, *, continues_prompt: bool) -> TextRules:
    """How the answer's text is shown. Raises InvalidRequest for too many, empty or too long stop strings."""
    stops = tuple(options.stop)
    if len(stops) > MAX_STOPS or not all(1 <= len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise InvalidRequest(
            f"stop must be at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters", param="stop"
        )
    return TextRules(
        stops,
        continues_prompt=continues_prompt,
        skip_special_tokens=_given(options, "skip_special_tokens", True),
        include_stop=options.include_stop_str_in_output,
    )


def bad_words(options: eyas_pb2.GenerateOptions) -> tuple[str, ...]:
    """The bad words as texts. Raises InvalidRequest for too many, blank or too long ones."""
    words = tuple(options.bad_words)
    if len(words) > MAX_BAD_WORDS or not all(w.strip() and len(w) <= MAX_STOP_LENGTH for w in words):
        raise InvalidRequest(
            f"bad_words must be at most {MAX_BAD_WORDS} strings of 1 to {MAX_STOP_LENGTH} characters, "
            "not all of them spaces",
            param="bad_words",
        )
    return words


def generation_options(
    model: ServedModel, options: eyas_pb2.GenerateOptions, bad_words: tuple[tuple[int, ...], ...]
) -> GenerationOptions:
    """The options for `admit`, which checks the sampling parameters; `bad_words` are in ids.

    Raises InvalidRequest for `n`, `truncate_prompt_tokens`, `draft_limits`, `priority`, `cache_salt` and
    `grammar`.
    """
    given = {name: getattr(options, name) for name in _SAMPLING if options.HasField(name)}
    params = model.params(
        **given,
        logit_bias=dict(options.logit_bias),
        stop_token_ids=tuple(options.stop_token_ids),
        bad_words=bad_words,
        grammar=_grammar(options.grammar) if options.HasField("grammar") else None,
    )
    n = _given(options, "n", 1)
    if not 1 <= n <= MAX_CHOICES:
        raise InvalidRequest(f"n must be between 1 and {MAX_CHOICES}", param="n")
    truncated = _given(options, "truncate_prompt_tokens", None)
    if truncated is not None and truncated != -1 and truncated < 1:
        raise InvalidRequest(
            "truncate_prompt_tokens must be -1 or at least 1", param="truncate_prompt_tokens"
        )
    return GenerationOptions(
        params,
        max_tokens=_given(options, "max_tokens", None),
        seed=_given(options, "seed", None),
        n=n,
        speculative=_given(options, "speculative", True),
        draft_limits=_draft_limits(options.draft_limits),
        truncate_prompt=truncated,
        priority=_priority(options.priority),
        cache_salt=_cache_salt(options.cache_salt),
    )


def _priority(priority: int) -> int:
    if abs(priority) > MOST_PRIORITY:
        raise InvalidRequest(
            f"priority must be between -{MOST_PRIORITY} and {MOST_PRIORITY}", param="priority"
        )
    return priority


def _cache_salt(salt: str) -> str:
    if len(salt) > MOST_SALT:
        raise InvalidRequest(f"cache_salt has more than {MOST_SALT} characters", param="cache_salt")
    return salt


def _grammar(message: eyas_pb2.Grammar) -> Grammar:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequest("grammar is empty", param="grammar")
    if kind == "json_object":
        if not message.json_object:
            raise InvalidRequest("grammar.json_object must be true", param="grammar.json_object")
        return Grammar.json_object()
    if kind == "choice":
        return Grammar.choice(message.choice.texts)
    make: Callable[[str], Grammar] = getattr(Grammar, kind)  # a notation whose grammars are texts
    return make(getattr(message, kind))


def _draft_limits(limits: eyas_pb2.DraftLimits) -> RequestDraftLimits:
    for name, least in (("steps", 1), ("topk", 1), ("draft_tokens", 2)):
        if limits.HasField(name) and getattr(limits, name) < least:
            field = f"draft_limits.{name}"
            raise InvalidRequest(f"{field} must be at least {least}", param=field)
    return RequestDraftLimits(limits.steps, limits.topk, limits.draft_tokens)


def _given(options: eyas_pb2.GenerateOptions, name: str, default: Any) -> Any:
    return getattr(options, name) if options.HasField(name) else default


# --- what is answered --------------------------------------------------------------------------------


def adapter_to_pb(adapter: Adapter) -> eyas_pb2.Adapter:
    """An adapter as callers see it: its folder is the server's."""
    return eyas_pb2.Adapter(name=adapter.name, id=adapter.id, rank=adapter.rank)


def started_to_pb(model: ServedModel, request: GenerationRequest) -> eyas_pb2.Started:
    """The first message: the request is admitted."""
    return eyas_pb2.Started(
        request_id=request.id, model=model.id, system_fingerprint=model.system_fingerprint
    )


def delta_to_pb(delta: TextDelta) -> eyas_pb2.Delta:
    """Converts one delta of a choice."""
    return eyas_pb2.Delta(
        choice=delta.choice,
        text=delta.text,
        tokens=delta.tokens,
        logprobs=[_logprob_to_pb(logprob) for logprob in delta.logprobs],
        finish_reason=_FINISH[delta.finish],
    )


def prompt_to_pb(request: GenerationRequest, prompt: PromptTokenLogprobs) -> eyas_pb2.PromptLogprobs:
    """The prompt's log-probabilities, from the first token that has one."""
    start = request.params.prompt_logprobs_start + 1
    logprobs, top_tokens, top_logprobs = prompt.columns()
    return eyas_pb2.PromptLogprobs(
        start=start,
        tokens=request.prompt_ids[start:],
        logprobs=logprobs,
        top=prompt.top,
        top_tokens=top_tokens,
        top_logprobs=top_logprobs,
    )


def finished_to_pb(usage: UsageCounts, timings: TimingsObject, reasoned: int) -> eyas_pb2.Finished:
    """The last message: usage and timings. `reasoned`: tokens of reasoning."""
    return eyas_pb2.Finished(
        usage=eyas_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            accepted_prediction_tokens=usage.accepted,
            rejected_prediction_tokens=usage.rejected,
            verify_steps=usage.verify_steps,
            cached_tokens=usage.cached_tokens,
            reasoning_tokens=reasoned,
        ),
        timings=eyas_pb2.Timings(
            first_token_ms=timings.first_token_ms or 0.0,
            first_decode_ms=timings.first_decode_ms,
            total_ms=timings.total_ms,
            workers=[_worker_to_pb(leg) for leg in timings.legs],
        ),
    )


def _logprob_to_pb(logprob: TokenLogprob) -> eyas_pb2.TokenLogprob:
    top = [eyas_pb2.TopLogprob(token=token, logprob=value) for token, value in logprob.top]
    return eyas_pb2.TokenLogprob(logprob=logprob.logprob, top=top)


def _worker_to_pb(leg: LegObject) -> eyas_pb2.WorkerTimings:
    fields = {
        name: value for name, value in msgspec.structs.asdict(leg).items() if value is not msgspec.UNSET
    }
    return eyas_pb2.WorkerTimings(**fields | {"role": _WORKER_ROLES.get(leg.role)})


class GrpcChat(TemplateFields):
    """A chat with its tools."""

    messages: list[ChatMessage] = Field(min_length=1)


def chat_of(request: eyas_pb2.ChatRequest) -> GrpcChat:
    """The chat that is asked for. Raises InvalidRequest naming the first field that is wrong."""
    if not request.messages:
        raise InvalidRequest("messages is empty", param="messages")
    fields: dict[str, Any] = {
        "messages": [_message(i, message) for i, message in enumerate(request.messages)],
        "tools": [_tool(i, tool) for i, tool in enumerate(request.tools)] or None,
        "tool_choice": _choice(request.tool_choice),
        "chat_template_kwargs": _object(request, "chat_template_kwargs"),
    }
    names = ("parallel_tool_calls", "enable_thinking", "reasoning_effort")
    fields |= {name: getattr(request, name) for name in names if request.HasField(name)}
    try:
        return validated(GrpcChat, fields)
    except InvalidRequest as error:  # here a function's fields are the tool's, and the call's
        param = (error.param or "").replace(".function", "")
        raise InvalidRequest(error.message.replace(".function", ""), param=param or None) from None


def read_delta_to_pb(delta: TextDelta, reader: MessageReader) -> eyas_pb2.Delta:
    """Converts one delta of a parsed choice: reasoning, then content, then calls."""
    events = reader.read(delta)
    message = delta_to_pb(delta)
    message.text = "".join(event.text for event in events if isinstance(event, ContentText))
    message.reasoning = "".join(event.text for event in events if isinstance(event, ReasoningText))
    message.tool_calls.extend(_calls_to_pb(events, reader))
    if reader.finish_reason(delta.finish) == CALLS:
        message.finish_reason = eyas_pb2.FINISH_REASON_TOOL_CALLS
    return message


def _calls_to_pb(events: Sequence[Event], reader: MessageReader) -> list[eyas_pb2.ToolCallDelta]:
    calls: dict[int, eyas_pb2.ToolCallDelta] = {}
    for event in events:
        if isinstance(event, CallStarted):
            id = reader.call_ids[event.index]
            calls[event.index] = eyas_pb2.ToolCallDelta(index=event.index, id=id, name=event.name)
        elif isinstance(event, CallArguments):
            call = calls.setdefault(event.index, eyas_pb2.ToolCallDelta(index=event.index))
            call.arguments += event.text
    return list(calls.values())


def _message(i: int, message: eyas_pb2.ChatMessage) -> dict[str, Any]:
    if message.role not in _ROLES:
        field, names = f"messages[{i}].role", ", ".join(map(eyas_pb2.ChatRole.Name, _ROLES))
        raise InvalidRequest(f"{field} must be one of {names}", param=field)
    read: dict[str, Any] = {"role": _ROLES[message.role]}
    if message.HasField("content") or message.role != eyas_pb2.CHAT_ROLE_ASSISTANT:
        read["content"] = message.content
    if message.HasField("reasoning"):
        read["reasoning"] = message.reasoning
    if message.HasField("tool_call_id"):
        read["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        read["tool_calls"] = [
            {"id": call.id or None, "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return read


def _tool(i: int, tool: eyas_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.HasField("description"):
        function["description"] = tool.description
    if tool.HasField("parameters"):
        function["parameters"] = _object(tool, "parameters", f"tools[{i}].")
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: eyas_pb2.ToolChoice) -> Any:
    if choice.WhichOneof("choice") == "name":
        return {"type": "function", "function": {"name": choice.name}}
    if choice.mode not in _MODES:
        names = ", ".join(map(eyas_pb2.ToolMode.Name, _MODES))
        raise InvalidRequest(f"tool_choice.mode must be one of {names}", param="tool_choice.mode")
    return _MODES[choice.mode]


def _object(message: Any, name: str, path: str = "") -> dict[str, Any] | None:
    """The JSON object that a field holds as text; None if the field is absent, or null."""
    if not message.HasField(name) or getattr(message, name).strip() == "null":
        return None
    try:
        read = json.loads(getattr(message, name))
        json.dumps(read, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except UnicodeEncodeError:
        what = f"{path}{name} holds half of a surrogate pair, which is no text"
        raise InvalidRequest(what, param=path + name) from None
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, dict):
        raise InvalidRequest(f"{path}{name} must be the text of a JSON object", param=path + name)
    return read
