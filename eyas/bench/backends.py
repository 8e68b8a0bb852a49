"""The requests and events of each kind of server: OpenAI's completions and chats, and SGLang's /generate.

Paths, request bodies and event objects have the names that SGLang's `bench_serving` gives them. msgspec
decodes, because this runs per event of every stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from eyas.bench.jobs import LoadJob, Prompt
from eyas.common.errors import ConfigError, EyasError

Message = Mapping[str, Any]
SHOWN = 200  # bytes of a malformed event that its error quotes


@dataclass(frozen=True)
class RequestTemplate:
    """The fields that every request of a run has. `extra` is merged last, over everything else."""

    model: str
    temperature: float = 0.0
    ignore_eos: bool = True
    timings: bool = False
    """Asks where the time went, an extension of Eyas's."""
    extra: Mapping[str, Any] = field(default_factory=dict)


class ParsedEvent(msgspec.Struct):
    """The content of one event. A count of None: the event does not say."""

    text: str = ""
    """New text, or all so far where `ServerBackend.cumulative`."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """Output tokens so far."""
    accepted: int | None = None
    rejected: int | None = None
    verify_steps: int | None = None
    cached_tokens: int | None = None
    timings: dict[str, Any] | None = None


Question = Prompt | Sequence[Message]


@dataclass(frozen=True)
class ServerBackend:
    """One way to ask. `chats`: it takes messages. `cumulative`: every event has all text so far."""

    path: str
    body: Callable[[RequestTemplate, LoadJob, Question, int], dict[str, Any]]
    """Of the run's template, the job, the prompt or messages, and the most tokens of the answer."""
    read: Callable[[bytes], ParsedEvent]
    """Raises EyasError for an event that is an error or is malformed."""
    chats: bool = False
    cumulative: bool = False


# --- OpenAI ------------------------------------------------------------------------------------------------


class _UsageDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _TokenUsage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _UsageDetails | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _ChoiceDelta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _StreamChoice(msgspec.Struct):
    text: str | None = None
    delta: _ChoiceDelta | None = None


class _OpenAiEvent(msgspec.Struct):
    choices: list[_StreamChoice] | None = None
    usage: _TokenUsage | None = None
    timings: dict[str, Any] | None = None
    error: Any = None


_read_openai = msgspec.json.Decoder(_OpenAiEvent).decode


def _openai(data: bytes) -> ParsedEvent:
    event = _decoded(_read_openai, data)
    parsed = ParsedEvent(timings=event.timings)
    if event.choices:
        choice = event.choices[0]
        if choice.delta is not None:  # a model's reasoning counts as its text
            parsed.text = (choice.delta.reasoning_content or "") + (choice.delta.content or "")
        else:
            parsed.text = choice.text or ""
    if (usage := event.usage) is not None:
        parsed.prompt_tokens, parsed.output_tokens = usage.prompt_tokens, usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            parsed.cached_tokens = usage.prompt_tokens_details.cached_tokens
        if (details := usage.completion_tokens_details) is not None:
            parsed.accepted = details.accepted_prediction_tokens
            parsed.rejected = details.rejected_prediction_tokens
    if event.timings:
        parsed.verify_steps = event.timings.get("verify_steps")
    return parsed


def _openai_body(template: RequestTemplate, job: LoadJob, max_tokens: int) -> dict[str, Any]:
    body = {
        "model": template.model,
        "max_tokens": max_tokens,
        "temperature": template.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if template.timings:
        body["timings"] = True
    if template.ignore_eos and not job.may_stop:
        body["ignore_eos"] = True
    if job.schema is not None:
        schema = {"name": "answer", "schema": job.schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    return body


def _completion(
    template: RequestTemplate, job: LoadJob, question: Question, max_tokens: int
) -> dict[str, Any]:
    return {**_openai_body(template, job, max_tokens), "prompt": question, **template.extra}


def _chat(template: RequestTemplate, job: LoadJob, question: Question, max_tokens: int) -> dict[str, Any]:
    return {**_openai_body(template, job, max_tokens), "messages": question, **template.extra}


# --- SGLang ------------------------------------------------------------------------------------------------


class _MetaInfo(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    spec_accept_token_num: int | None = None
    spec_draft_token_num: int | None = None
    spec_verify_ct: int | None = None
    timings: dict[str, Any] | None = None


class _GenerateEvent(msgspec.Struct):
    text: str = ""
    meta_info: _MetaInfo = msgspec.field(default_factory=_MetaInfo)
    error: Any = None


Event = TypeVar("Event", _OpenAiEvent, _GenerateEvent)
_read_generate = msgspec.json.Decoder(_GenerateEvent).decode


def _generate(data: bytes) -> ParsedEvent:
    event = _decoded(_read_generate, data)
    meta = event.meta_info
    parsed = ParsedEvent(event.text, meta.prompt_tokens, meta.completion_tokens, meta.spec_accept_token_num)
    if meta.spec_draft_token_num is not None:
        parsed.rejected = meta.spec_draft_token_num - (meta.spec_accept_token_num or 0)
    parsed.verify_steps, parsed.timings = meta.spec_verify_ct, meta.timings
    parsed.cached_tokens = meta.cached_tokens
    if meta.timings:
        parsed.verify_steps = meta.timings.get("verify_steps")
    return parsed


def _generate_body(
    template: RequestTemplate, job: LoadJob, question: Question, max_tokens: int
) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "temperature": template.temperature,
        "max_new_tokens": max_tokens,
        "ignore_eos": template.ignore_eos and not job.may_stop,
    }
    if job.schema is not None:
        sampling["json_schema"] = msgspec.json.encode(job.schema).decode()
    body = {"sampling_params": sampling, "stream": True}
    if template.timings:
        body["timings"] = True
    return {"text" if isinstance(question, str) else "input_ids": question, **body, **template.extra}


# --- both --------------------------------------------------------------------------------------------------


def _decoded(decode: Callable[[bytes], Event], data: bytes) -> Event:
    """The event. Raises EyasError if it is malformed or is an error."""
    try:
        event = decode(data)
    except msgspec.DecodeError as error:
        shown = data[:SHOWN].decode(errors="replace")
        raise EyasError(f"an event is malformed ({error}): {shown}") from error
    if event.error is not None:
        raise EyasError(f"the server broke off: {event.error}")
    return event


COMPLETIONS = ServerBackend("/v1/completions", _completion, _openai)
CHATS = ServerBackend("/v1/chat/completions", _chat, _openai, chats=True)
GENERATE = ServerBackend("/generate", _generate_body, _generate, cumulative=True)
BACKENDS = {
    "sglang": GENERATE,
    "sglang-oai": COMPLETIONS,
    "sglang-oai-chat": CHATS,
    "vllm": COMPLETIONS,
    "vllm-chat": CHATS,
}


def backend_for(jobs: Sequence[LoadJob]) -> str:
    """The name of the backend that suits these jobs: completions for token ids, chats for texts."""
    return "sglang-oai" if isinstance(jobs[0].turns[0].prompt, tuple) else "sglang-oai-chat"


def check(name: str, jobs: Sequence[LoadJob]) -> None:
    """Raises ConfigError if a backend cannot ask for these jobs."""
    ids = any(isinstance(turn.prompt, tuple) for job in jobs for turn in job.turns)
    if BACKENDS[name].chats and ids:
        raise ConfigError(f"--backend: {name} takes texts, and these prompts are token ids", param="backend")
    if not BACKENDS[name].chats and any(len(job.turns) > 1 for job in jobs):
        raise ConfigError(f"--backend: {name} has no conversations; sglang-oai-chat has", param="backend")
