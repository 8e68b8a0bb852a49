"""`POST /generate` in SGLang's shape: its body, the call that it becomes, and its answers.

An unsupported field that asks for something is an error that names it; null, false or SGLang's default asks
for nothing. Answers are whole, or events that repeat the answer so far: SGLang's clients read the last event
alone, or cut off what they have. So an event grows with the answer, but the work per event does not: ids and
log-probabilities of earlier events stay encoded and are only copied.
"""

from __future__ import annotations

import time
from array import array
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

import msgspec
from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from eyas.common.config import GatewayConfig
from eyas.common.types import FinishCause
from gateway.backends.admission import GenerationOptions, ServedModel, admit, called
from gateway.backends.answer import CallAnswer
from gateway.formats import unsupported
from gateway.formats.fields import (
    MAX_PROMPTS,
    WHOLE,
    AdapterName,
    CacheSalt,
    Choices,
    Count,
    Ids,
    Many,
    Priority,
    RequestBody,
    RequestId,
    Seed,
    TopLogprobs,
    as_ids,
    at_most_one,
    exactly_one,
    refuse,
)
from gateway.formats.openai_reply import DONE, AnswerFormat
from gateway.formats.openai_request import ApiCall, named, sampling_params, text_rules, timeout_s
from gateway.formats.schema import SamplingFields, Speculation, drafting
from gateway.http.long_ids import settled
from gateway.observe.timings import timings_object
from gateway.text.detokenize import TokenBytes
from gateway.text.entries import TextDelta, UsageCounts
from gateway.text.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 128
_OUR_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "prompt_logprobs_start": "logprob_start_len",
    "prompt_logprobs": "return_logprob",
    "logprobs": "return_logprob",
}
_encode = msgspec.json.Encoder().encode
_FLOOR = -9999.0  # JSON has no minus infinity
Scored = tuple[float | None, int, str | None]  # log-probability, token id, its text if asked for


def _texts(value: Any) -> str | list[str]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a string or a list of strings")
    return value


def _ids(value: Any) -> list[int] | list[list[int]]:
    if (ids := as_ids(value)) is not None:
        return ids
    if isinstance(value, list) and value:
        lists = [ids for item in value if (ids := as_ids(item)) is not None]
        if len(lists) == len(value):
            return lists
    raise ValueError("must be a list of token ids or a list of such lists")


def _rids(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[str | list[str], PlainValidator(_texts, json_schema_input_type=str | Many[str])]
IdLists = Annotated[
    Sequence[int] | list[list[int]], PlainValidator(_ids, json_schema_input_type=Ids | Many[Ids])
]
Rids = Annotated[list[RequestId], BeforeValidator(_rids, json_schema_input_type=RequestId | list[RequestId])]
Start = Annotated[int, Field(ge=-1), WHOLE]


class SamplingBody(SamplingFields):
    """SGLang's `sampling_params`."""

    unsupported = unsupported.SAMPLING_PARAMS
    rules = (*SamplingFields.rules, at_most_one("seed", "sampling_seed"))

    max_new_tokens: Count | None = None
    """The longest answer, in tokens; what fits, at most 128, unless given."""
    min_new_tokens: Count = 0
    """The shortest answer, in tokens: nothing ends it before."""
    n: Choices = 1
    """How many answers each prompt gets."""
    sampling_seed: Seed | None = None
    """Fixes the whole answer; random unless given."""
    seed: Seed | None = None
    """Another name of `sampling_seed`."""
    no_stop_trim: bool = False
    """The text of a choice ends with the stop string that ended it."""

    @model_validator(mode="after")
    def _one_seed(self) -> Self:
        if self.seed is not None and self.sampling_seed is not None:
            refuse("seed", "and sampling_seed are two names of one field: give one")
        return self


@dataclass(frozen=True)
class ReplyShape:
    """How the reply is written: as a list (`batch`), the prompts' names, tokens' texts beside logprobs."""

    batch: bool
    rids: tuple[str, ...] | None
    token_texts: bool


class GenerateBody(RequestBody):
    """Exactly one of `text` and `input_ids`; `speculative`, `timings` and `timeout` are extensions."""

    ids_field = "input_ids"
    unsupported = unsupported.GENERATE
    rules = (exactly_one("text", "input_ids"),)

    text: Texts | None = None
    """The prompt: a text or a list of at most 64."""
    input_ids: IdLists | None = None
    """The prompt as token ids."""
    sampling_params: SamplingBody = SamplingBody.model_validate({})
    """How to generate."""
    stream: bool = False
    """Answers as server-sent events, each with all so far."""
    rid: Rids | None = None
    """Names the prompts in the answers' `meta_info.id`: one name each, of printable ASCII."""
    model: str | None = None
    """The id of the served model, or the name of one of its adapters, if given."""
    lora_path: AdapterName | list[AdapterName | None] | None = None
    """The name of an adapter, or one for each prompt: null is the model itself."""
    return_logprob: bool = False
    """The answer also tells the log-probability of each token."""
    top_logprobs_num: TopLogprobs = 0
    """With `return_logprob`: and this many of the likeliest tokens of its place."""
    return_text_in_logprobs: bool = False
    """Log-probabilities come with the tokens' texts."""
    logprob_start_len: Start | None = None
    """With `return_logprob`: prompt tokens after this place have theirs returned too; -1: none of them."""
    return_routed_experts: bool = False
    """The answer also tells which experts its rows took, as base64 of int32 [tokens - 1, layers, experts of a
    row]; -1 where a layer has none. For models of experts with exact arithmetic, and not in a stream."""
    speculative: Speculation = Field(True)  # type: ignore[assignment]  # a bool stays one
    """False turns drafting off for this request; an object says how far its drafts reach at most."""
    priority: Priority = 0
    """Lower is earlier among the caller's own, each unit by a second: -100 to 100."""
    cache_salt: CacheSalt = ""
    """Cached prefixes are shared with requests of the same salt alone, on every tier."""
    timings: bool = False
    """The answer also says where its time went."""
    timeout: float | None = Field(None, gt=0)
    """Seconds until the request fails. Without: none while tokens come, unless the server has a limit."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            refuse("text", "must be given, or input_ids, and not both")
        if self.return_routed_experts and self.stream:
            refuse("return_routed_experts", "is not for streams")
        if len(self.prompts) > MAX_PROMPTS:
            refuse("text" if self.input_ids is None else "input_ids", f"has more than {MAX_PROMPTS} prompts")
        if self.rid is not None and len(self.rid) != len(self.prompts):
            refuse("rid", "must name every prompt")
        if isinstance(self.lora_path, list) and len(self.lora_path) != len(self.prompts):
            refuse("lora_path", "must have one name for every prompt, or be one for all")
        return self

    def take_ids(self, ids: array[int]) -> None:
        self.input_ids = ids

    @property
    def prompts(self) -> Sequence[str] | Sequence[Sequence[int]]:
        """The prompts as a list of texts or a list of ids."""
        if self.input_ids is None:
            return [self.text] if isinstance(self.text, str) else self.text or []
        return self.input_ids if self._lists_ids else [self.input_ids]  # type: ignore[return-value]

    @property
    def adapters(self) -> list[str]:
        """The name of each prompt's adapter; "": none is named."""
        named = self.lora_path
        each = named if isinstance(named, list) else [named] * len(self.prompts)
        return [name or "" for name in each]

    @property
    def shape(self) -> ReplyShape:
        """How the reply is to be written."""
        return ReplyShape(
            batch=isinstance(self.text, list) or self._lists_ids or self.sampling_params.n > 1,
            rids=None if self.rid is None else tuple(self.rid),
            token_texts=self.return_text_in_logprobs,
        )

    @property
    def _lists_ids(self) -> bool:
        return isinstance(self.input_ids, list) and isinstance(self.input_ids[0], list)


async def generate_call(
    config: GatewayConfig, model: ServedModel, tokenizer: Tokenizer, body: GenerateBody
) -> ApiCall:
    """The call of the body. Raises EyasError for what the model cannot do."""
    models = iter([called(model, config, body.model or model.id, name) for name in body.adapters])
    sampling, options, seconds = body.sampling_params, _options(model, body), timeout_s(config, body.timeout)
    names = _OUR_NAMES | ({} if sampling.sampling_seed is None else {"seed": "sampling_seed"})
    source = "text" if body.input_ids is None else "input_ids"
    requests = []
    for prompt in body.prompts:
        ids = await tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else settled(prompt)
        with named(names, source):
            requests.append(admit(next(models), ids, options, seconds))
    return ApiCall(
        id=requests[0].id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        n=options.n,
        rules=text_rules(sampling, continues_prompt=True, include_stop=sampling.no_stop_trim),
        stream=body.stream,
        timings=body.timings,
        began=time.monotonic(),
        grammar_field=f"sampling_params.{sampling.grammar_field[0]}" if sampling.grammar_field else "",
        names=tuple(body.rid or ()),
        experts=body.return_routed_experts,
    )


def _options(model: ServedModel, body: GenerateBody) -> GenerationOptions:
    sampling, start = body.sampling_params, body.logprob_start_len
    logprobs = body.top_logprobs_num if body.return_logprob else None
    of_prompt = logprobs is not None and start is not None and start >= 0
    params = sampling_params(
        model,
        sampling,
        min_tokens=sampling.min_new_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if of_prompt else None,
        prompt_logprobs_start=start if of_prompt else 0,
    )
    return GenerationOptions(
        params,
        sampling.max_new_tokens,
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        seed=sampling.seed if sampling.sampling_seed is None else sampling.sampling_seed,
        n=sampling.n,
        priority=body.priority,
        cache_salt=body.cache_salt,
        **drafting(body.speculative),
    )


class _GrowingArray:
    """A JSON array that only grows: each item is encoded once, however often the array is sent."""

    def __init__(self) -> None:
        self._items = bytearray()

    def extend(self, items: Sequence[Any]) -> None:
        if items:
            self._items += b"," * bool(self._items) + _encode(items)[1:-1]

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + self._items + b"]")


class _GrowingText:
    """A JSON string that only grows, as such an array does."""

    def __init__(self) -> None:
        self._said = bytearray()

    def extend(self, text: str) -> None:
        self._said += _encode(text)[1:-1]

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b'"' + self._said + b'"')


class _SoFar:
    """The answer of one choice so far: the sum of its deltas."""

    def __init__(self, prompt_tokens: int) -> None:
        self.text = _GrowingText()
        self.ids, self.scored, self.tops = _GrowingArray(), _GrowingArray(), _GrowingArray()
        self.inputs: dict[str, Any] = {}  # the prompt's log-probabilities, the same in every event
        self.usage = UsageCounts(prompt_tokens)

    def add(self, delta: TextDelta) -> None:
        self.text.extend(delta.text)
        self.ids.extend(delta.tokens)
        self.usage.add(delta)


class SglangFormat(AnswerFormat):
    """Writes SGLang's objects; a batch is a list of them, and its events carry `index`."""

    def __init__(self, call: ApiCall, shape: ReplyShape, table: TokenBytes, answer: CallAnswer) -> None:
        self._call = call
        self._shape = shape
        self._table = table
        self._answer = answer
        self._so_far = [_SoFar(len(request.prompt_ids)) for request in call.requests for _ in range(call.n)]

    def opening(self) -> bytes:
        return b""

    def event(self, delta: TextDelta) -> bytes:
        reply = self._reply(delta)
        if self._shape.batch:
            reply["index"] = delta.choice
        return b"data: " + _encode(reply) + b"\n\n"

    def closing(self) -> bytes:
        return DONE

    def whole(self, choices: Sequence[TextDelta]) -> bytes:
        replies = [self._reply(choice) for choice in choices]
        return _encode(replies if self._shape.batch else replies[0])

    def _reply(self, delta: TextDelta) -> dict[str, Any]:
        """The delta's choice so far, with this delta."""
        so_far = self._so_far[delta.choice]
        so_far.add(delta)
        meta = self._meta(delta, so_far.usage)
        if self._call.logprobs:
            meta |= self._logprobs(delta, so_far)
        return {"text": so_far.text.json(), "output_ids": so_far.ids.json(), "meta_info": meta}

    def _meta(self, delta: TextDelta, usage: UsageCounts) -> dict[str, Any]:
        prompt, number = divmod(delta.choice, self._call.n)
        trace = self._answer.traces[prompt]
        usage.cached_tokens = trace.cached_tokens
        meta: dict[str, Any] = {
            "id": self._name(prompt, number),
            "finish_reason": _finish_reason(delta, usage),
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "e2e_latency": time.monotonic() - self._call.began,
            "weight_version": self._answer.weight_versions[prompt],
        }
        if self._call.model.synthetic:
            meta["synthetic"] = True
        if usage.acceptance_length is not None:
            offered = usage.accepted + usage.rejected
            meta |= {
                "spec_verify_ct": usage.verify_steps,
                "spec_accept_length": usage.acceptance_length,
                "spec_accept_rate": usage.accepted / offered,
                "spec_accept_token_num": usage.accepted,
                "spec_draft_token_num": offered,
            }
        if self._call.experts:
            meta["routed_experts"] = b64encode(delta.experts).decode()
        if self._call.timings and delta.finish is not None:
            meta["timings"] = timings_object(self._call.began, trace, usage)
        return meta

    def _name(self, prompt: int, number: int) -> str:
        name = self._call.requests[prompt].id if self._shape.rids is None else self._shape.rids[prompt]
        return name if self._call.n == 1 else f"{name}_{number}"

    def _logprobs(self, delta: TextDelta, so_far: _SoFar) -> dict[str, Any]:
        scored = list(zip(delta.tokens, delta.logprobs, strict=True))
        tops = [[self._scored(id, value) for id, value in logprob.top] for _, logprob in scored]
        so_far.scored.extend([self._scored(token, logprob.logprob) for token, logprob in scored])
        so_far.tops.extend([top or None for top in tops])
        so_far.inputs = so_far.inputs or self._inputs(delta.choice // self._call.n)
        return so_far.inputs | {
            "output_token_logprobs": so_far.scored.json(),
            "output_top_logprobs": so_far.tops.json(),
        }

    def _inputs(self, prompt: int) -> dict[str, Any]:
        """The log-probabilities of the prompt's tokens that were asked for; the first token has none."""
        request, logprobs = self._call.requests[prompt], self._answer.traces[prompt].prompt
        own, tops = _GrowingArray(), _GrowingArray()
        if logprobs is not None:
            first, *others = request.prompt_ids[request.params.prompt_logprobs_start :]
            rows = logprobs.rows()
            own.extend([self._scored(first, None)])
            own.extend([self._scored(id, row.logprob) for id, row in zip(others, rows, strict=True)])
            tops.extend([None, *([self._scored(*best) for best in row.top] or None for row in rows)])
        return {"input_token_logprobs": own.json(), "input_top_logprobs": tops.json()}

    def _scored(self, token: int, logprob: float | None) -> Scored:
        text = self._table.label(token)[0] if self._shape.token_texts else None
        return None if logprob is None else max(logprob, _FLOOR), token, text


def _finish_reason(delta: TextDelta, usage: UsageCounts) -> dict[str, str | int | None] | None:
    match delta.finish:
        case None:
            return None
        case FinishCause.LENGTH:
            return {"type": "length", "length": usage.completion_tokens}
        case FinishCause.STOP:
            return {"type": "stop", "matched": delta.matched}
        case FinishCause.ABORT:
            return {"type": "abort", "message": "generation was paused (/pause_generation)"}
