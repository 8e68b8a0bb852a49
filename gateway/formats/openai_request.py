"""Turns a validated HTTP body into a call: the generation requests to run and how to answer."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from eyas.common.config import GatewayConfig
from eyas.common.errors import InvalidRequest
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, PromptIds
from gateway.backends.admission import GenerationOptions, ServedModel, admit, called
from gateway.formats.schema import GenerationBody, SamplingFields, TextBody, drafting
from gateway.http.long_ids import settled
from gateway.parsers.message import MessageReading
from gateway.text.entries import TextRules
from gateway.text.tokenizer import Tokenizer

COMPLETION_MAX_TOKENS = 16  # OpenAI's default for text completions

_SAMPLING = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty "
    "logit_bias ignore_eos"
).split()


@dataclass(frozen=True)
class PromptEcho:
    """A prompt's text and, if asked for, the offsets in it (characters) where its tokens' texts begin."""

    text: str
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True)
class ApiCall:
    """One HTTP request, ready to run: one generation per prompt, each with `n` choices.

    Choice c of prompt p is choice p * n + c of the answer. `echoes`: one per prompt if answers begin with
    their prompts, else (). `reading`: what is looked for in the answers' text; None: it is the content.
    `returned`: how many choices of each prompt are returned, the likeliest; None: all.
    """

    id: str
    created: int  # seconds since 1970
    model: ServedModel
    requests: tuple[GenerationRequest, ...]
    n: int
    rules: TextRules
    stream: bool
    timings: bool
    began: float  # monotonic seconds
    include_usage: bool = False
    continuous_usage: bool = False  # in every event, not in the last one alone
    token_ids: bool = False
    returned: int | None = None
    tells_logprobs: bool = True  # False: they are there to choose by
    echoes: tuple[PromptEcho, ...] = ()
    reading: MessageReading | None = None
    speaks_functions: bool = False  # a call is returned as OpenAI's older `function_call`
    grammar_field: str = ""  # of the body: where its grammar comes from
    names: tuple[str, ...] = ()  # that its caller gave its prompts
    experts: bool = False  # the answer tells those that its rows took

    def named(self, error: Exception) -> Exception:
        """A refusal of its grammar names the field that asks for it."""
        if not isinstance(error, InvalidRequest) or error.param != "grammar":
            return error
        field = self.grammar_field
        return type(error)(error.message.replace("grammar", field, 1), param=field)

    def of(self, caller: str) -> ApiCall:
        """A copy in the name of this caller (`keys.ApiCaller`)."""
        named = (msgspec.structs.replace(request, caller=caller) for request in self.requests)
        return dataclasses.replace(self, requests=tuple(named))

    @property
    def choices(self) -> int:
        """Over all prompts."""
        return self.n * len(self.requests)

    @property
    def timeout_s(self) -> float:
        """Seconds until the deadline, the same for all prompts."""
        return self.requests[0].timeout_s

    @property
    def logprobs(self) -> bool:
        """Whether the answer holds log-probabilities of its tokens."""
        return self.tells_logprobs and self.requests[0].params.logprobs is not None

    @property
    def prompt_logprobs(self) -> bool:
        """Whether it also holds those of the prompts. They are many, so a thread encodes them: the event loop
        serves other streams meanwhile.
        """
        return self.requests[0].params.prompt_logprobs is not None


async def text_call(
    config: GatewayConfig, model: ServedModel, tokenizer: Tokenizer, body: TextBody
) -> ApiCall:
    """The call of text completions. Raises EyasError for what the model cannot do."""
    model = called(model, config, body.model, body.lora_path or "")
    options = await generation_options(model, tokenizer, body, body.max_tokens)
    options = dataclasses.replace(options, default_max_tokens=COMPLETION_MAX_TOKENS)
    drawn = body.drawn
    chooses = drawn > body.n
    options = dataclasses.replace(options, n=drawn).with_params(
        logprobs=0 if chooses and body.logprobs is None else body.logprobs,
        prompt_logprobs=body.logprobs if body.echo else None,
    )
    requests, echoes = [], []
    for prompt in body.prompt:
        ids = await _ids(tokenizer, body, prompt)
        with named({"prompt_logprobs": "logprobs"}, "prompt"):
            request = admit(model, ids, options, timeout_s(config, body.timeout))
        requests.append(request)
        if body.echo:
            whole = isinstance(prompt, str) and request.prompt_ids == ids
            text = str(prompt) if whole else None
            echoes.append(await asyncio.to_thread(_echo, tokenizer, body, request.prompt_ids, text))
    rules = text_rules(body, continues_prompt=True, include_stop=body.includes_stop)
    call = api_call("cmpl-", model, body, rules, requests, echoes)
    if not chooses:
        return call
    return dataclasses.replace(call, n=drawn, returned=body.n, tells_logprobs=body.logprobs is not None)


async def _ids(tokenizer: Tokenizer, body: TextBody, prompt: str | Sequence[int]) -> PromptIds:
    if not isinstance(prompt, str):
        return settled(prompt)
    return await tokenizer.encode_prompt(prompt, add_special_tokens=body.add_special_tokens)


def _echo(tokenizer: Tokenizer, body: TextBody, ids: Sequence[int], text: str | None) -> PromptEcho:
    """A prompt as the answer repeats it: its `text` if it came as one, else the text of `ids`."""
    skip = body.skip_special_tokens
    if text is None:
        text = tokenizer.decode(ids, skip_special_tokens=skip)
    if body.logprobs is None:
        return PromptEcho(text, ())
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    lengths = [len(detokenizer.feed((id,))) for id in ids]
    return PromptEcho(text, tuple(itertools.accumulate(lengths[:-1], initial=0)))


def timeout_s(config: GatewayConfig, requested: float | None) -> float:
    """Seconds until a call's deadline. Raises InvalidRequest for more than the server allows."""
    if requested is not None and requested > config.request_timeout_s:
        most = f"timeout is {requested:g} s, and this server allows {config.request_timeout_s:g} s at most"
        raise InvalidRequest(most, param="timeout")
    return requested or config.request_timeout_s


@contextlib.contextmanager
def named(names: Mapping[str, str], source: str) -> Iterator[None]:
    """Renames fields in refusals to the caller's names.

    `names` maps ours to theirs; `source` is the field that the prompt came from.
    """
    try:
        yield
    except InvalidRequest as error:
        message = error.message
        for ours, theirs in names.items():
            message = message.replace(ours, theirs)
        param = {"prompt": source, **names}.get(error.param or "", error.param)
        raise type(error)(message, param=param) from None


def sampling_params(model: ServedModel, body: SamplingFields, **others: Any) -> SamplingParams:
    """The parameters that `body` and `others` give; the rest are the model's defaults."""
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    grammar = body.grammar_field
    if grammar is not None:
        given["grammar"] = grammar[1]
    return model.params(**given, stop_token_ids=tuple(body.stop_token_ids or ()), **others)


def text_rules(body: SamplingFields, *, continues_prompt: bool, include_stop: bool) -> TextRules:
    """The text rules that the fields ask for (see `TextRules`)."""
    return TextRules(
        stops=tuple(body.stop or ()),
        continues_prompt=continues_prompt,
        skip_special_tokens=body.skip_special_tokens,
        include_stop=include_stop,
    )


async def generation_options(
    model: ServedModel, tokenizer: Tokenizer, body: GenerationBody, max_tokens: int | None
) -> GenerationOptions:
    """Returns the body's options, beside its prompt and its log-probabilities."""
    words = await tokenizer.spellings(body.bad_words) if body.bad_words else ()
    return GenerationOptions(
        sampling_params(model, body, min_tokens=body.min_tokens, bad_words=words),
        max_tokens,
        seed=body.seed,
        n=body.n,
        priority=body.priority,
        session=body.prompt_cache_key,
        cache_salt=body.cache_salt,
        **drafting(body.speculative),
        truncate_prompt=body.truncate_prompt_tokens,
    )


def api_call(
    prefix: str,
    model: ServedModel,
    body: GenerationBody,
    rules: TextRules,
    requests: Sequence[GenerationRequest],
    echoes: Sequence[PromptEcho] = (),
) -> ApiCall:
    """The call of these requests; `prefix`: of its id."""
    return ApiCall(
        id=prefix + (body.request_id or requests[0].id),
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        n=body.n,
        rules=rules,
        stream=body.stream,
        include_usage=body.include_usage,
        continuous_usage=body.continuous_usage,
        token_ids=body.return_token_ids,
        timings=body.timings,
        began=time.monotonic(),
        echoes=tuple(echoes),
        grammar_field=body.grammar_field[0] if body.grammar_field else "",
    )
