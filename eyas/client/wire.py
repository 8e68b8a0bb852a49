"""The SDK's values as protobuf messages and back.

No other module of the SDK names protobuf fields.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar, cast

from eyas.client.types import (
    ChatOptions,
    Delta,
    FinishReason,
    LoraAdapter,
    MemoryTag,
    Message,
    MovedMemory,
    Options,
    PauseMode,
    PromptLogprobs,
    Timings,
    Tool,
    ToolCall,
    ToolCallDelta,
    Usage,
    WeightsUpdated,
    WorkerTimings,
)
from eyas.client.weights import BroadcastTensors, DeviceTensors, SharedTensors, WeightsSource
from eyas.common.errors import EyasError, InvalidRequest
from eyas.common.grammars.notations import Grammar, GrammarKind
from eyas.common.types import TokenLogprob
from eyas.common.wire import rpc
from protos import eyas_pb2

R = TypeVar("R", eyas_pb2.ChatRequest, eyas_pb2.GenerateRequest)
_FINISH: dict[int, FinishReason | None] = {
    eyas_pb2.FINISH_REASON_UNSPECIFIED: None,
    eyas_pb2.FINISH_REASON_STOP: "stop",
    eyas_pb2.FINISH_REASON_LENGTH: "length",
    eyas_pb2.FINISH_REASON_TOOL_CALLS: "tool_calls",
    eyas_pb2.FINISH_REASON_ABORT: "abort",
}

_PAUSE_MODES: dict[PauseMode, eyas_pb2.PauseMode.ValueType] = {
    "abort": eyas_pb2.PAUSE_MODE_ABORT,
    "in_place": eyas_pb2.PAUSE_MODE_IN_PLACE,
    "retract": eyas_pb2.PAUSE_MODE_RETRACT,
}
_TAGS: dict[MemoryTag, eyas_pb2.MemoryTag.ValueType] = {
    "weights": eyas_pb2.MEMORY_TAG_WEIGHTS,
    "kv_cache": eyas_pb2.MEMORY_TAG_KV_CACHE,
}
_TAGS_FROM_PB = {pb: tag for tag, pb in _TAGS.items()}

_ROLES = {
    "system": eyas_pb2.CHAT_ROLE_SYSTEM,
    "user": eyas_pb2.CHAT_ROLE_USER,
    "assistant": eyas_pb2.CHAT_ROLE_ASSISTANT,
    "tool": eyas_pb2.CHAT_ROLE_TOOL,
}
_MODES = {
    "auto": eyas_pb2.TOOL_MODE_AUTO,
    "none": eyas_pb2.TOOL_MODE_NONE,
    "required": eyas_pb2.TOOL_MODE_REQUIRED,
}
_OWN = ChatOptions.__optional_keys__ - Options.__optional_keys__


def chat_request(model: str, messages: Sequence[Message], options: ChatOptions) -> eyas_pb2.ChatRequest:
    """Raises InvalidRequest naming a value that cannot be sent."""
    common = {name: value for name, value in options.items() if name not in _OWN}
    request = request_to_pb(eyas_pb2.ChatRequest, model, cast(Options, common))
    try:
        request.messages.extend(_message_to_pb(i, message) for i, message in enumerate(messages))
    except (AttributeError, TypeError, ValueError) as error:
        name = f"messages[{len(request.messages)}]" if isinstance(error, UnicodeEncodeError) else "messages"
        raise unsendable(name, "messages must be a list of role and content", error) from error
    for name in options.keys() & _OWN:
        value: Any = options[name]  # type: ignore[literal-required]
        if value is None:
            continue
        try:
            request.MergeFrom(eyas_pb2.ChatRequest(**{name: _own_to_pb(name, value)}))
        except (AttributeError, TypeError, ValueError) as error:
            raise unsendable(name, f"{name} cannot be {value!r:.200}", error) from error
    return request


def _message_to_pb(i: int, message: Message) -> eyas_pb2.ChatMessage:
    role, content, calls = message.get("role"), message.get("content"), message.get("tool_calls") or ()
    if role not in _ROLES:
        _refuse(f"messages[{i}].role", f"must be one of {', '.join(_ROLES)}, not {role!r:.40}")
    if role != "assistant" and content is None:
        _refuse(f"messages[{i}].content", "is required")
    if not isinstance(content, str | None):
        _refuse(f"messages[{i}].content", f"must be text, not a {type(content).__name__}")
    if not all(isinstance(call, ToolCall) for call in calls):
        _refuse(f"messages[{i}].tool_calls", "must be a list of eyas.client.ToolCall")
    return eyas_pb2.ChatMessage(
        role=_ROLES[role],
        content=content,
        reasoning=message.get("reasoning"),
        tool_calls=[
            eyas_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in calls
        ],
        tool_call_id=message.get("tool_call_id"),
    )


def _refuse(field: str, reason: str) -> NoReturn:
    raise InvalidRequest(f"{field} {reason}", param=field)


def _own_to_pb(name: str, value: Any) -> Any:
    match name:
        case "tools":
            return [_tool_to_pb(tool) for tool in value]
        case "tool_choice":
            return _choice_to_pb(value)
        case "chat_template_kwargs":
            return _text_of(value)
    return value


def _tool_to_pb(tool: Tool) -> eyas_pb2.Tool:
    if not isinstance(tool, Tool):
        _refuse("tools", "must be a list of eyas.client.Tool")
    parameters = None if tool.parameters is None else _text_of(tool.parameters)
    return eyas_pb2.Tool(
        name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict
    )


def _choice_to_pb(choice: str | Tool) -> eyas_pb2.ToolChoice:
    if isinstance(choice, Tool):
        return eyas_pb2.ToolChoice(name=choice.name)
    if choice not in _MODES:
        raise ValueError(f"it must be one of {', '.join(_MODES)}, or a tool")
    return eyas_pb2.ToolChoice(mode=_MODES[choice])


def _text_of(value: Mapping[str, Any]) -> str:
    """The JSON text of an object."""
    return json.dumps(dict(value), ensure_ascii=False)


def generate_request(model: str, prompt: str | Sequence[int], options: Options) -> eyas_pb2.GenerateRequest:
    """Raises InvalidRequest naming a value that cannot be sent."""
    request = request_to_pb(eyas_pb2.GenerateRequest, model, options)
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.ids.CopyFrom(eyas_pb2.TokenIds(ids=prompt))
    except (TypeError, ValueError) as error:
        raise unsendable("prompt", "prompt must be text or a list of token ids", error) from error
    return request


def request_to_pb(kind: type[R], model: str, options: Options) -> R:
    """A request of this kind that says nothing else. Raises as `generate_request` does."""
    others = cast(Options, {name: value for name, value in options.items() if name != "model"})
    named = options.get("model") or model
    try:
        request = kind(model=named)
    except (TypeError, ValueError) as error:
        raise unsendable("model", f"model cannot be {named!r:.200}", error) from error
    request.options.CopyFrom(options_to_pb(others))
    return request


def unsendable(name: str, text: str, error: Exception) -> InvalidRequest:
    """The error for a field that protobuf does not take; `text` says what it must be, if it is text."""
    if isinstance(error, UnicodeEncodeError):
        return InvalidRequest(f"{name} holds half of a surrogate pair, which is no text", param=name)
    return InvalidRequest(f"{text}: {error}", param=name)


def options_to_pb(options: Options) -> eyas_pb2.GenerateOptions:
    """Converts options (None: left out). Raises InvalidRequest for an unknown name or a wrong type."""
    message = eyas_pb2.GenerateOptions()
    for name, value in options.items():
        if name not in Options.__optional_keys__:
            raise InvalidRequest(f"{name} is not an option", param=name)
        if value is None:
            continue
        if name in ("stop", "bad_words") and isinstance(value, str):
            value = [value]  # a common slip; a string is a sequence of strings too
        try:
            field: dict[str, Any] = {name: value}
            if isinstance(value, Grammar):
                field[name] = _grammar_to_pb(value)
            message.MergeFrom(eyas_pb2.GenerateOptions(**field))
        except (TypeError, ValueError) as error:
            raise unsendable(name, f"{name} cannot be {value!r}", error) from error
    return message


def _grammar_to_pb(grammar: Grammar) -> eyas_pb2.Grammar:
    if grammar.kind is GrammarKind.JSON_OBJECT:
        return eyas_pb2.Grammar(json_object=True)
    if grammar.kind is GrammarKind.CHOICE:
        return eyas_pb2.Grammar(choice=eyas_pb2.Texts(texts=json.loads(grammar.text)))
    return eyas_pb2.Grammar(**{grammar.kind.value: grammar.text})


def update_to_pb(source: WeightsSource, running: str) -> eyas_pb2.UpdateWeightsRequest:
    """An update, but for its numbers. Raises InvalidRequest for a `running` that is none."""
    name = f"RUNNING_REQUESTS_{running.upper()}"
    if name not in eyas_pb2.RunningRequests.keys():  # an enum's wrapper, no dict
        raise InvalidRequest(f"running must be drain, abort or restart, not {running!r}", param="running")
    request = eyas_pb2.UpdateWeightsRequest(running=eyas_pb2.RunningRequests.Value(name))
    if isinstance(source, str):
        request.folder = source
    elif isinstance(source, SharedTensors):
        request.shared.paths.append(source.path)
        request.shared.digests.append(source.digest)
    elif isinstance(source, DeviceTensors):
        request.device.buffers.extend(source.buffers)
    elif isinstance(source, BroadcastTensors):
        request.broadcast.group = source.group
        for tensor, (dtype, shape) in source.shapes.items():
            request.broadcast.tensors.add(name=tensor, dtype=dtype, shape=shape)
    else:
        request.files.files.extend(source)
    return request


def updated_from_pb(reply: eyas_pb2.UpdateWeightsResponse) -> WeightsUpdated:
    """The outcome of an update of weights."""
    return WeightsUpdated(
        reply.version, reply.generation, reply.digest, reply.requests, reply.pause_s, tuple(reply.behind)
    )


def adapter_from_pb(adapter: eyas_pb2.Adapter) -> LoraAdapter:
    """An adapter as the server tells it."""
    return LoraAdapter(adapter.name, adapter.id, adapter.rank)


def delta_from_pb(delta: eyas_pb2.Delta) -> Delta:
    """Raises EyasError for a finish reason that this version does not have."""
    if delta.finish_reason not in _FINISH:
        raise EyasError(f"the server gave the unknown finish reason {delta.finish_reason}: it is newer")
    return Delta(
        choice=delta.choice,
        text=delta.text,
        tokens=tuple(delta.tokens),
        logprobs=tuple(_logprob_from_pb(logprob) for logprob in delta.logprobs),
        finish_reason=_FINISH[delta.finish_reason],
        reasoning=delta.reasoning,
        tool_calls=tuple(
            ToolCallDelta(call.index, call.id, call.name, call.arguments) for call in delta.tool_calls
        ),
    )


def _logprob_from_pb(pb: eyas_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(pb.logprob, tuple((top.token, top.logprob) for top in pb.top))


def prompt_logprobs_from_pb(pb: eyas_pb2.PromptLogprobs) -> PromptLogprobs:
    """Reads the log-probabilities of prompt tokens. Raises ValueError if the message's lists do not match."""
    best, top = list(zip(pb.top_tokens, pb.top_logprobs, strict=True)), pb.top
    rows = [TokenLogprob(own, tuple(best[i * top : (i + 1) * top])) for i, own in enumerate(pb.logprobs)]
    return PromptLogprobs(pb.start, tuple(pb.tokens), tuple(rows))


def usage_from_pb(usage: eyas_pb2.Usage, metadata: Iterable[tuple[str, str | bytes]]) -> Usage:
    """`metadata`: the call's initial one."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens,
        verify_steps=usage.verify_steps,
        cached_tokens=usage.cached_tokens,
        synthetic=any(key == rpc.SYNTHETIC for key, _ in metadata),
        reasoning_tokens=usage.reasoning_tokens,
    )


def timings_from_pb(pb: eyas_pb2.Timings) -> Timings:
    """Reads the times of one request, in milliseconds."""
    return Timings(
        first_token_ms=pb.first_token_ms,
        first_decode_ms=_given(pb, "first_decode_ms"),
        total_ms=pb.total_ms,
        workers=tuple(_worker_from_pb(worker) for worker in pb.workers),
    )


def _worker_from_pb(pb: eyas_pb2.WorkerTimings) -> WorkerTimings:
    return WorkerTimings(
        role="prefill" if pb.role == eyas_pb2.WORKER_ROLE_PREFILL else "decode",
        worker=pb.worker,
        queue_ms=pb.queue_ms,
        prefill_ms=_given(pb, "prefill_ms"),
        cached_tokens=pb.cached_tokens,
        transfer_ms=_given(pb, "transfer_ms"),
        transfer_bytes=_given(pb, "transfer_bytes"),
        transfer_path=_given(pb, "transfer_path"),
    )


def _given(pb: Any, name: str) -> Any:
    """A field's value; None if it is absent."""
    return getattr(pb, name) if pb.HasField(name) else None


def pause_request(mode: PauseMode, limit_s: float) -> eyas_pb2.PauseGenerationRequest:
    """The request to pause. Raises InvalidRequest for another mode."""
    if mode not in _PAUSE_MODES:
        raise InvalidRequest(f"mode must be one of {', '.join(_PAUSE_MODES)}", param="mode")
    return eyas_pb2.PauseGenerationRequest(mode=_PAUSE_MODES[mode], limit_s=limit_s)


def tags_to_pb(tags: Sequence[MemoryTag]) -> list[eyas_pb2.MemoryTag.ValueType]:
    """The tags. Raises InvalidRequest for another one."""
    if unknown := [tag for tag in tags if tag not in _TAGS]:
        raise InvalidRequest(f"tags: {unknown[0]!r} is none of {', '.join(_TAGS)}", param="tags")
    return [_TAGS[tag] for tag in tags]


def moved_from_pb(moved: Sequence[eyas_pb2.MovedMemory]) -> list[MovedMemory]:
    """What moved, on each worker."""
    return [MovedMemory(one.worker, _TAGS_FROM_PB[one.tag], one.bytes, one.seconds) for one in moved]
