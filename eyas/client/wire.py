"""The SDK's values as protobuf messages and back. The only module of the SDK that knows fields' names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from eyas.client.types import Delta, Message, Options, Usage
from eyas.common import convert, rpc
from eyas.common.errors import InvalidRequest
from protos import eyas_pb2


def chat_request(model: str, messages: Sequence[Message], options: Options) -> eyas_pb2.ChatRequest:
    """Raises InvalidRequest naming a value that cannot be sent."""
    with_options = options_to_pb(options)
    try:
        turns = [eyas_pb2.ChatMessage(role=m["role"], content=m["content"]) for m in messages]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest(
            f"messages must be a list of role and content: {error}", param="messages"
        ) from error
    return eyas_pb2.ChatRequest(model=model, messages=turns, options=with_options)


def generate_request(model: str, prompt: str | Sequence[int], options: Options) -> eyas_pb2.GenerateRequest:
    """Raises InvalidRequest naming a value that cannot be sent."""
    request = eyas_pb2.GenerateRequest(model=model, options=options_to_pb(options))
    try:
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.ids.CopyFrom(eyas_pb2.TokenIds(ids=prompt))
    except (TypeError, ValueError) as error:
        raise InvalidRequest(
            f"prompt must be text or a list of token ids: {error}", param="prompt"
        ) from error
    return request


def options_to_pb(options: Options) -> eyas_pb2.GenerateOptions:
    """Raises InvalidRequest for an unknown option or a value of the wrong type."""
    message = eyas_pb2.GenerateOptions()
    for name, value in options.items():
        if name not in Options.__optional_keys__:
            raise InvalidRequest(f"{name} is not an option", param=name)
        if name == "stop" and isinstance(value, str):
            value = [value]  # a common slip; a string is a sequence of strings too
        field: dict[str, Any] = {name: value}
        try:
            message.MergeFrom(eyas_pb2.GenerateOptions(**field))
        except (TypeError, ValueError) as error:
            raise InvalidRequest(f"{name} cannot be {value!r}: {error}", param=name) from error
    return message


def delta_from_pb(delta: eyas_pb2.Delta) -> Delta:
    return Delta(
        choice=delta.choice,
        text=delta.text,
        tokens=tuple(delta.tokens),
        logprobs=tuple(convert.logprob_from_pb(logprob) for logprob in delta.logprobs),
        finish_reason=delta.finish_reason or None,
    )


def usage_from_pb(usage: eyas_pb2.Usage, metadata: Iterable[tuple[str, str | bytes]] = ()) -> Usage:
    """`metadata`: the call's initial one."""
    return Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens,
        verify_steps=usage.verify_steps,
        synthetic=any(key == rpc.SYNTHETIC for key, _ in metadata),
    )
