"""The bodies that the HTTP API accepts: OpenAI's chat and text completions, and this server's extensions.

`admission` checks what needs the model (lengths, token ids). The string under a field is its description in
/openapi.json and docs/api.md. Every whole number is bounded by what protobuf can carry.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from eyas.common import types
from eyas.common.params import MAX_STOP_TOKEN_IDS
from gateway.formats import unsupported
from gateway.formats.chat_fields import ChatMessage, Content, TextPart
from gateway.formats.fields import (
    AdapterName,
    AtLeastOne,
    AtLeastTwo,
    BadWord,
    Biases,
    CacheSalt,
    Choices,
    Count,
    FromMinusOne,
    LastTokens,
    NewAdapterName,
    Priority,
    Prompts,
    RequestBody,
    RequestId,
    Seed,
    Stops,
    TokenId,
    TopLogprobs,
    exactly_one,
    given,
    needs,
    refuse,
)
from gateway.formats.grammar_fields import GrammarFields, GuidedFields
from gateway.formats.tool_fields import ToolFields

MAX_BAD_WORDS = 64

# Variables of every template that are fields of their own, and what a caller must not replace.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


def _no_reserved(variables: dict[str, Any]) -> dict[str, Any]:
    for name in _RESERVED:
        if name in variables:
            raise ValueError(f"{name} is a field of its own")
    if "chat_template" in variables:
        raise ValueError("chat_template is not supported: chats go through the model's own template")
    return variables


def _only_content(kind: Any) -> Any:
    if kind != "content":
        raise ValueError(f"only content can be predicted, not {kind!r:.40}")
    return kind


class PredictedContent(RequestBody):
    """The expected answer of a chat. Drafts are taken from it; it changes no token."""

    type: Annotated[str, BeforeValidator(_only_content, json_schema_input_type=Literal["content"])]
    """The kind of prediction."""
    content: Content
    """Text, or parts of text, which follow one another."""

    @property
    def text(self) -> str:
        """All of it."""
        content: str | list[TextPart] = self.content
        return content if isinstance(content, str) else "".join(part.text for part in content)


class StreamOptions(RequestBody):
    """The parts of a stream's events beside the answer."""

    include_usage: bool = False
    """A last event tells the usage."""
    continuous_usage_stats: bool = False
    """With `include_usage`: every event tells the usage so far."""


class DraftLimits(RequestBody):
    """How far a request's drafts reach at most."""

    steps: AtLeastOne | None = None
    """How deep, in tokens; at most the server's `--spec-steps`."""
    topk: AtLeastOne | None = None
    """How many branches a node has (1: a chain); at most the server's `--spec-topk`."""
    draft_tokens: AtLeastTwo | None = None
    """How many nodes are verified, the root too; at most the server's `--spec-draft-tokens`."""


def _switch_or_limits(value: Any, limits: ValidatorFunctionWrapHandler) -> Any:
    if isinstance(value, bool):
        return value
    if not isinstance(value, dict):
        raise ValueError("must be true, false, or limits (steps, topk, draft_tokens)")
    return limits(value)


# A wrapped object, not a union: errors then say which limit is wrong.
Speculation = Annotated[
    DraftLimits, WrapValidator(_switch_or_limits, json_schema_input_type=bool | DraftLimits)
]


def drafting(speculative: Any) -> dict[str, Any]:
    """The field `speculative` as the options of its request."""
    if isinstance(speculative, bool):
        return {"speculative": speculative}
    limits = (speculative.steps, speculative.topk, speculative.draft_tokens)
    return {"draft_limits": types.RequestDraftLimits(*(limit or 0 for limit in limits))}


class SamplingFields(GrammarFields):
    """How tokens are chosen and shown, on every route that generates."""

    temperature: float | None = Field(None, ge=0, le=2)
    """0 takes the likeliest token. The model's default, else 1."""
    top_p: float | None = Field(None, gt=0, le=1)
    """Keeps the likeliest tokens that together have this probability. The model's default, else 1."""
    top_k: FromMinusOne | None = None
    """Keeps this many of the likeliest tokens; -1 and 0 keep all. The model's default, else all."""
    min_p: float | None = Field(None, ge=0, lt=1)
    """Keeps tokens that have at least this share of the likeliest one's probability. As above, else 0."""
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted once from the logits of tokens in the output."""
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    """Subtracted from the logits of tokens in the output, for each time they stand there."""
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    """Weakens tokens of prompt and output by this factor. As above, else 1, which is none."""
    logit_bias: Biases | None = None
    """Added to the logits of these token ids; at most 1024, each -100 to 100."""
    stop: Stops | None = None
    """Texts that end a choice: one or at most 16, each of 1 to 512 characters."""
    stop_token_ids: list[TokenId] | None = Field(None, max_length=MAX_STOP_TOKEN_IDS)
    """Tokens that end a choice, beside the model's own."""
    ignore_eos: bool = False
    """The model's own end does not end a choice."""
    skip_special_tokens: bool = True
    """Special tokens are left out of the text."""
    spaces_between_special_tokens: bool = True
    """Accepted; as in transformers' fast tokenizers it changes nothing."""
    no_stop_trim: bool = False
    """SGLang's name of `include_stop_str_in_output`."""


class GenerationBody(GuidedFields, SamplingFields):
    """The fields that chat and text completions share. None means the server's default.

    `endpoint` names the route in docs/api.md. That `stream_options` needs `stream` is no rule of the schema:
    with one more, programs that make examples of it give up.
    """

    endpoint: ClassVar[str]

    model: str
    """The id of the served model, or the name of one of its adapters."""
    lora_path: AdapterName | None = None
    """The name of an adapter, where `model` names the model itself."""
    stream: bool = False
    """Answers as server-sent events, as tokens come."""
    stream_options: StreamOptions | None = None
    """With `stream` only; without it a 400, as from OpenAI."""
    n: Choices = 1
    """How many answers each prompt gets."""
    max_tokens: Count | None = None
    """The longest answer, in tokens. Chat: what the context has space for; completions: 16."""
    min_tokens: Count = 0
    """The shortest answer, in tokens: nothing ends it before."""
    seed: Seed | None = None
    """Fixes the whole answer; random unless given."""
    bad_words: list[BadWord] | None = Field(None, max_length=MAX_BAD_WORDS)
    """Texts of at most 64 tokens that no choice may hold, with or without a space before them."""
    include_stop_str_in_output: bool = False
    """The text of a choice ends with the stop string that ended it."""
    truncate_prompt_tokens: LastTokens | None = None
    """Keeps this many of the prompt's last tokens; -1: as many as leave room for `max_tokens`."""
    return_token_ids: bool = False
    """The answer also holds the ids of prompt (`prompt_token_ids`) and choices (`token_ids`)."""
    request_id: RequestId | None = Field(None, validation_alias=AliasChoices("request_id", "rid"))
    """Names the request in the answer's `id`; SGLang's name of it is `rid`."""
    speculative: Speculation = Field(True)  # type: ignore[assignment]  # a bool stays one
    """False turns drafting off for this request; an object says how far its drafts reach at most."""
    priority: Priority = 0
    """Lower is earlier among the caller's own, each unit by a second: -100 to 100."""
    prompt_cache_key: str = Field("", max_length=512)
    """Names the conversation: its requests prefer one worker, also where its prefix is not cached yet."""
    cache_salt: CacheSalt = ""
    """Cached prefixes are shared with requests of the same salt alone, on every tier."""
    timings: bool = False
    """The answer also says where its time went."""
    timeout: float | None = Field(None, gt=0)
    """Seconds until the request fails. Without: none while tokens come, unless the server has a limit."""

    @model_validator(mode="after")
    def _truncated_to_something(self) -> Self:
        if self.truncate_prompt_tokens == 0:
            refuse("truncate_prompt_tokens", "must be -1 or at least 1")
        return self

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            refuse("stream_options", "is only allowed with stream")
        return self

    @property
    def includes_stop(self) -> bool:
        """Whether the text keeps what stopped it."""
        return self.include_stop_str_in_output or self.no_stop_trim

    @property
    def include_usage(self) -> bool:
        """Whether the last event of a stream holds the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        """Whether every event of a stream does."""
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


_ENDS = {
    "allOf": [given(end, {"const": True}) for end in ("continue_final_message", "add_generation_prompt")]
}


class TemplateFields(ToolFields):
    """How messages become a prompt."""

    rules = (*ToolFields.rules, {"not": _ENDS})

    add_generation_prompt: bool | None = None
    """The prompt ends where the assistant's next message begins; true unless a message is continued."""
    continue_final_message: bool = False
    """The answer continues the last message."""
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_no_reserved)] | None = None
    """More variables for the model's chat template."""
    documents: list[dict[str, Any]] | None = None
    """Texts beside the chat, for templates that read them."""
    enable_thinking: bool | None = None
    """Whether the model reasons before its answer, for templates that have a switch for it."""
    reasoning_effort: str | None = None
    """How much the model reasons, for templates that read it; `none` is `enable_thinking` false elsewhere."""

    @model_validator(mode="after")
    def _one_end(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            refuse("add_generation_prompt", "is not allowed with continue_final_message")
        return self

    @property
    def asks_for_a_message(self) -> bool:
        """Whether the prompt ends where the assistant's next message begins."""
        return not self.continue_final_message and self.add_generation_prompt is not False


class ChatBody(TemplateFields, GenerationBody):
    """The body of /v1/chat/completions."""

    endpoint = "chat"
    unsupported = unsupported.CHAT
    rules = (
        *GenerationBody.rules,
        *TemplateFields.rules,
        needs(given("top_logprobs", {"minimum": 1}), given("logprobs", {"const": True})),
    )

    messages: list[ChatMessage] = Field(min_length=1)
    """The chat so far."""
    max_completion_tokens: Count | None = None
    """The newer name of `max_tokens`; it wins."""
    prediction: PredictedContent | None = None
    """The expected answer: the more of it is right, the sooner the answer comes. It changes no token."""
    logprobs: bool = False
    """The answer also tells the log-probability of each token."""
    top_logprobs: TopLogprobs | None = None
    """With `logprobs`: and this many of the likeliest tokens of its place."""
    add_special_tokens: bool = False
    """The tokenizer's special tokens are put around the chat, beside those that its template writes."""

    @model_validator(mode="after")
    def _top_needs_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            refuse("top_logprobs", "is only allowed with logprobs")
        return self


_SEVERAL = {"type": "array", "minItems": 2, "items": {"type": ["string", "array"]}}


class TextBody(GenerationBody):
    """The body of /v1/completions."""

    endpoint = "completions"
    ids_field = "prompt"
    unsupported = unsupported.TEXT
    rules = (
        *GenerationBody.rules,
        needs(given("timings", {"const": True}), {"not": given("prompt", _SEVERAL)}),
    )

    prompt: Prompts
    """The prompt: text, token ids, or a list of at most 64 of either."""
    logprobs: TopLogprobs | None = None
    """The answer also tells the log-probabilities of each token and of this many of the likeliest ones."""
    best_of: Choices | None = None
    """How many answers are drawn for each prompt; the `n` likeliest per token are returned. Not streamed."""
    echo: bool = False
    """The text begins with the prompt."""
    add_special_tokens: bool = True
    """The tokenizer's special tokens are put around the prompt."""

    @model_validator(mode="after")
    def _what_goes_together(self) -> Self:
        if self.timings and len(self.prompt) > 1:
            refuse("timings", "is only told of a single prompt")
        if 1 < (self.best_of or 1) < self.n:
            refuse("best_of", "must be at least n")
        if self.stream and self.drawn > self.n:
            refuse("best_of", "is not allowed with stream: the best answer is known at the end")
        return self

    def take_ids(self, ids: array[int]) -> None:
        self.prompt = [ids]

    @property
    def drawn(self) -> int:
        """How many choices each prompt gets, those that are not told too."""
        return max(self.best_of or 1, self.n)


class TokenizeBody(TemplateFields):
    """Exactly one of `prompt` (text) and `messages` (a chat)."""

    rules = (*TemplateFields.rules, exactly_one("prompt", "messages"))

    model: str | None = None
    """Not read."""
    prompt: str | None = None
    """A text."""
    messages: list[ChatMessage] | None = Field(None, min_length=1)
    """A chat."""
    add_special_tokens: bool | None = None
    """The tokenizer's special tokens are put around it: true for a text, false for a chat."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            refuse("prompt", "must be given, or messages, and not both")
        return self


class LoadAdapterBody(RequestBody):
    """The body of /v1/load_lora_adapter."""

    lora_name: NewAdapterName
    """The name by which requests choose it, as their `model`: printable, without spaces or colons."""
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]
    """Its folder on every worker's machine, as PEFT writes one: in a folder of `--lora-dir`."""
    pinned: bool = False
    """It stays on the device, however seldom it is asked for."""
    load_inplace: bool = False
    """It takes the place of one that has the name already, whose requests go on to their ends."""


class UnloadAdapterBody(RequestBody):
    """The body of /v1/unload_lora_adapter."""

    lora_name: AdapterName
    """The name of an adapter."""
    lora_id: str | None = None
    """The id that it must have, if given."""


class AbortBody(RequestBody):
    """The body of /abort_request."""

    rules = (needs({"not": given("abort_all", {"const": True})}, given("rid", {"minLength": 1})),)

    rid: str | None = None
    """The id of the request: its `X-Request-Id`, the `id` of its answer, or a `rid` of /generate."""
    abort_all: bool = False
    """All of the caller's requests."""

    @model_validator(mode="after")
    def _names_some(self) -> Self:
        if not (self.rid or self.abort_all):
            refuse("rid", "must be given, or abort_all be true")
        return self


class DetokenizeBody(RequestBody):
    """The body of /detokenize."""

    model: str | None = None
    """Not read."""
    tokens: list[TokenId]
    """Token ids."""
    skip_special_tokens: bool = True
    """Special tokens are left out of the text."""
