"""`POST /generate` as SGLang shapes it: its body, and the call that it becomes.

It knows SGLang's names of fields and their defaults. What is asked for and cannot be had is an error that
names the field; what is switched off (null, false, or SGLang's default) asks for nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from eyas.common.config import GatewayConfig
from eyas.common.errors import InvalidRequest
from eyas.common.params import MAX_TOP_LOGPROBS, SamplingParams
from gateway.admission import ServedModel, Wish, admit, check_model
from gateway.openai_request import Call, timeout_s
from gateway.schema import MAX_CHOICES, MAX_PROMPTS, Body, is_ids, refuse, stop_list
from gateway.text import TextRules
from gateway.tokenizer import Tokenizer

DEFAULT_MAX_NEW_TOKENS = 128

_OUR_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "logprobs": "return_logprob",
}
_SAME_NAMES = (
    "temperature top_p min_p frequency_penalty presence_penalty repetition_penalty ignore_eos logit_bias"
).split()


def _texts(value: Any) -> str | list[str]:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ValueError("must be a string or a list of strings")
    return value


def _ids(value: Any) -> list[int] | list[list[int]]:
    if is_ids(value) or (isinstance(value, list) and value and all(map(is_ids, value))):
        return value  # type: ignore[no-any-return]
    raise ValueError("must be a list of token ids or a list of such lists")


def _rids(value: Any) -> Any:
    rids = [value] if isinstance(value, str) else value
    if not isinstance(rids, list) or not all(isinstance(r, str) and 1 <= len(r) <= 128 for r in rids):
        raise ValueError("must be a string of 1 to 128 characters or a list of such strings")
    return rids


class SamplingBody(Body):
    """SGLang's `sampling_params`."""

    max_new_tokens: int | None = Field(None, ge=1)
    min_new_tokens: int = Field(0, ge=0)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(None, ge=-1)  # -1: all
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop: Annotated[list[str], BeforeValidator(stop_list)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    sampling_seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    no_stop_trim: Literal[False] | None = None

    @model_validator(mode="after")
    def _one_seed(self) -> Self:
        if self.seed is not None and self.sampling_seed is not None:
            refuse("seed", "and sampling_seed are two names of one field: give one")
        return self


@dataclass(frozen=True)
class Shape:
    """What of the body is only told back: one object or a list, the requests' names, and logprobs."""

    batch: bool
    rids: tuple[str, ...] | None
    token_texts: bool


class GenerateBody(Body):
    """Exactly one of `text` and `input_ids`; `speculative`, `timings` and `timeout` are extensions."""

    text: Annotated[str | list[str], PlainValidator(_texts)] | None = None
    input_ids: Annotated[list[int] | list[list[int]], PlainValidator(_ids)] | None = None
    sampling_params: SamplingBody = SamplingBody.model_validate({})
    stream: bool = False
    rid: Annotated[list[str], BeforeValidator(_rids)] | None = None
    model: str | None = None
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    return_text_in_logprobs: bool = False
    logprob_start_len: Literal[-1] | None = None  # the prompt's own logprobs are not computed
    return_hidden_states: Literal[False] | None = None
    return_routed_experts: Literal[False] | None = None
    background: Literal[False] | None = None
    log_metrics: bool | None = None
    speculative: bool = True
    timings: bool = False
    timeout: float | None = Field(None, gt=0)  # seconds

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.text is None) == (self.input_ids is None):
            refuse("text", "must be given, or input_ids, and not both")
        if len(self.prompts) > MAX_PROMPTS:
            refuse("text" if self.input_ids is None else "input_ids", f"has more than {MAX_PROMPTS} prompts")
        if self.rid is not None and len(self.rid) != len(self.prompts):
            refuse("rid", "must name every prompt")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        if self.input_ids is None:
            return [self.text] if isinstance(self.text, str) else self.text or []
        return self.input_ids if self._lists_ids else [self.input_ids]  # type: ignore[return-value]

    @property
    def shape(self) -> Shape:
        return Shape(
            batch=isinstance(self.text, list) or self._lists_ids or self.sampling_params.n > 1,
            rids=None if self.rid is None else tuple(self.rid),
            token_texts=self.return_text_in_logprobs,
        )

    @property
    def _lists_ids(self) -> bool:
        return bool(self.input_ids) and not is_ids(self.input_ids)


async def generate_call(
    config: GatewayConfig, model: ServedModel, tokenizer: Tokenizer, body: GenerateBody
) -> Call:
    """Raises EyasError for what the model cannot do."""
    if body.model is not None:
        check_model(config, body.model)
    wish, seconds = _wish(body), timeout_s(config, body.timeout)
    names = _OUR_NAMES | ({} if body.sampling_params.sampling_seed is None else {"seed": "sampling_seed"})
    requests = []
    for prompt in body.prompts:
        ids = await tokenizer.encode_prompt(prompt) if isinstance(prompt, str) else tuple(prompt)
        with _named(names):
            requests.append(admit(model, ids, wish, seconds))
    return Call(
        id=requests[0].id,
        created=int(time.time()),
        model=model,
        requests=tuple(requests),
        n=wish.n,
        rules=TextRules(tuple(body.sampling_params.stop or ()), continues_prompt=True),
        stream=body.stream,
        include_usage=False,
        timings=body.timings,
        began=time.monotonic(),
    )


def _wish(body: GenerateBody) -> Wish:
    asked = body.sampling_params
    given = {name: value for name in _SAME_NAMES if (value := getattr(asked, name)) is not None}
    params = SamplingParams(
        **given,
        top_k=max(0, asked.top_k or 0),
        min_tokens=asked.min_new_tokens,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        logprobs=body.top_logprobs_num if body.return_logprob else None,
    )
    return Wish(
        params,
        asked.max_new_tokens,
        default_max_tokens=DEFAULT_MAX_NEW_TOKENS,
        seed=asked.seed if asked.sampling_seed is None else asked.sampling_seed,
        n=asked.n,
        speculative=body.speculative,
    )


@contextlib.contextmanager
def _named(names: Mapping[str, str]) -> Iterator[None]:
    """Refusals name the fields as they are called here: `names`, by our own."""
    try:
        yield
    except InvalidRequest as error:
        message = error.message
        for ours, theirs in names.items():
            message = message.replace(ours, theirs)
        raise type(error)(message, param=names.get(error.param or "", error.param)) from None
