"""`POST /generate` in SGLang's shape: its body, and the call that it becomes.

An unsupported field that asks for something is an error that names it; null, false or SGLang's default asks
for nothing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from eyas.common.config import GatewayConfig
from gateway.backends.admission import GenerationOptions, ServedModel, admit, check_model
from gateway.formats import unsupported
from gateway.formats.field_types import MAX_PROMPTS, Choices, Count, Ids, Many, Priority, Seed, TopLogprobs
from gateway.formats.fields import WHOLE, RequestBody, RequestId, as_ids, at_most_one, exactly_one, refuse
from gateway.formats.openai_request import ApiCall, named, sampling_params, text_rules, timeout_s
from gateway.formats.schema import SamplingFields, Speculation, drafting
from gateway.http.long_ids import settled
from gateway.text.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 128

_OUR_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "prompt_logprobs_start": "logprob_start_len",
    "prompt_logprobs": "return_logprob",
    "logprobs": "return_logprob",
}


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
    """The id of the served model, if given."""
    return_logprob: bool = False
    """The answer also tells the log-probability of each token."""
    top_logprobs_num: TopLogprobs = 0
    """With `return_logprob`: and this many of the likeliest tokens of its place."""
    return_text_in_logprobs: bool = False
    """Log-probabilities come with the tokens' texts."""
    logprob_start_len: Start | None = None
    """With `return_logprob`: prompt tokens after this place have theirs returned too; -1: none of them."""
    speculative: Speculation = Field(True)  # type: ignore[assignment]  # a bool stays one
    """False turns drafting off for this request; an object says how far its drafts reach at most."""
    priority: Priority = 0
    """Lower is earlier among the caller's own, each unit by a second: -100 to 100."""
    timings: bool = False
    """The answer also says where its time went."""
    timeout: float | None = Field(None, gt=0)
    """Seconds until the request fails. Without: none while tokens come, unless the server has a limit."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            refuse("text", "must be given, or input_ids, and not both")
        if len(self.prompts) > MAX_PROMPTS:
            refuse("text" if self.input_ids is None else "input_ids", f"has more than {MAX_PROMPTS} prompts")
        if self.rid is not None and len(self.rid) != len(self.prompts):
            refuse("rid", "must name every prompt")
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
    if body.model is not None:
        check_model(config, body.model)
    sampling, options, seconds = body.sampling_params, _options(model, body), timeout_s(config, body.timeout)
    names = _OUR_NAMES | ({} if sampling.sampling_seed is None else {"seed": "sampling_seed"})
    source = "text" if body.input_ids is None else "input_ids"
    requests = []
    for prompt in body.prompts:
        ids = await tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else settled(prompt)
        with named(names, source):
            requests.append(admit(model, ids, options, seconds))
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
        **drafting(body.speculative),
    )
