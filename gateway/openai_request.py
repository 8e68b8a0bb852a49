"""A validated HTTP body becomes a call: the generation requests to run and how to tell their answers.

It knows what OpenAI's fields mean and their defaults. It refuses to know sockets and JSON.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.common.config import GatewayConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from gateway.admission import ServedModel, Wish, admit, check_model
from gateway.schema import ChatBody, GenerationBody, TextBody
from gateway.text import TextRules
from gateway.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions

_SAMPLING = (
    "min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
    "logit_bias ignore_eos"
).split()


@dataclass(frozen=True)
class Call:
    """One HTTP request, ready to run: one generation a prompt, each with `n` choices.

    Choice c of prompt p is choice p * n + c of the answer. `echoes` holds the prompts' texts where the
    answer must begin with them.
    """

    id: str
    created: int  # seconds since 1970
    model: ServedModel
    requests: tuple[GenerationRequest, ...]
    n: int
    rules: TextRules
    stream: bool
    include_usage: bool
    timings: bool
    began: float  # monotonic seconds
    echoes: tuple[str, ...] = ()

    @property
    def choices(self) -> int:
        return self.n * len(self.requests)

    @property
    def timeout_s(self) -> float:
        return self.requests[0].timeout_s

    @property
    def logprobs(self) -> bool:
        return self.requests[0].params.logprobs is not None


async def chat_call(config: GatewayConfig, model: ServedModel, tokenizer: Tokenizer, body: ChatBody) -> Call:
    """Raises EyasError for what the model cannot do."""
    check_model(config, body.model)
    prompt = await tokenizer.encode_chat([message.as_dict() for message in body.messages])
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    wish = _wish(body, limit, (body.top_logprobs or 0) if body.logprobs else None)
    request = admit(model, prompt, wish, timeout_s(config, body.timeout))
    return _call("chatcmpl-", model, body, TextRules(tuple(body.stop or ())), [request])


async def text_call(config: GatewayConfig, model: ServedModel, tokenizer: Tokenizer, body: TextBody) -> Call:
    """Raises EyasError for what the model cannot do."""
    check_model(config, body.model)
    wish = _wish(body, body.max_tokens, body.logprobs)
    wish = dataclasses.replace(wish, default_max_tokens=COMPLETION_MAX_TOKENS)
    requests, echoes = [], []
    for prompt in body.prompt:
        ids = await tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
        requests.append(admit(model, ids, wish, timeout_s(config, body.timeout)))
        if body.echo:
            echoes.append(prompt if isinstance(prompt, str) else tokenizer.decode(ids))
    rules = TextRules(tuple(body.stop or ()), continues_prompt=True)
    return _call("cmpl-", model, body, rules, requests, echoes)


def timeout_s(config: GatewayConfig, asked: float | None) -> float:
    """Seconds until a call's deadline: what its caller asked for, at most what the server allows."""
    return min(config.request_timeout_s, asked or config.request_timeout_s)


def _wish(body: GenerationBody, max_tokens: int | None, logprobs: int | None) -> Wish:
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    params = SamplingParams(**given, stop_token_ids=tuple(body.stop_token_ids or ()), logprobs=logprobs)
    return Wish(params, max_tokens, seed=body.seed, n=body.n or 1, speculative=body.speculative)


def _call(
    prefix: str,
    model: ServedModel,
    body: GenerationBody,
    rules: TextRules,
    requests: Sequence[GenerationRequest],
    echoes: Sequence[str] = (),
) -> Call:
    return Call(
        id=prefix + requests[0].id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        n=body.n or 1,
        rules=rules,
        stream=body.stream,
        include_usage=body.include_usage,
        timings=body.timings,
        began=time.monotonic(),
        echoes=tuple(echoes),
    )
