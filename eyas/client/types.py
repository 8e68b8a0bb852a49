"""The arguments and results of the SDK's calls. Plain values, without gRPC or protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Required, TypeAlias, TypedDict

import msgspec

from eyas.common.grammars.notations import Grammar
from eyas.common.types import TokenLogprob

FinishReason: TypeAlias = Literal["stop", "length", "tool_calls", "abort"]
"""Why a choice has ended. "stop": the model's own end, a stop token or a stop string; "length": it has
`max_tokens` tokens; "tool_calls": the model's own end, after complete calls of tools that it chose itself.
"""


PauseMode: TypeAlias = Literal["abort", "in_place", "retract"]
"""What becomes of requests when generation pauses: they end with what they have, keep KV, or lose it."""
MemoryTag: TypeAlias = Literal["weights", "kv_cache"]
"""Memory that workers can let go of."""


class MovedMemory(msgspec.Struct, frozen=True):
    """Memory of one worker that has left, or come back: `bytes` in `seconds`."""

    worker: str
    tag: MemoryTag
    bytes: int
    seconds: float


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool. `arguments`: the text of a JSON object, as the model wrote it."""

    id: str
    name: str
    arguments: str


class Tool(msgspec.Struct, frozen=True):
    """A tool that the model may call. `parameters`: a JSON schema of its arguments; None: it takes none.

    `strict`: they follow the schema, however the model comes to call it; None: where calls are required.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool | None = None


class Message(TypedDict, total=False):
    """One turn of a chat: whose words, and the words. An assistant's may be missing beside its calls."""

    role: Required[Literal["system", "user", "assistant", "tool"]]
    content: str | None
    reasoning: str | None  # what an assistant thought before
    tool_calls: Sequence[ToolCall] | None  # that an assistant made
    tool_call_id: str | None  # of a tool's message: the call whose result it is


class Options(TypedDict, total=False):
    """How to generate. What is left out or None takes the server's default: see protos/eyas.proto."""

    model: str | None  # another than the client's: a name of the model, or of one of its adapters
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None  # fixes the whole answer
    stop: Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    logprobs: (
        int | None
    )  # tells each token's log-probability, and those of this many of the likeliest in its place
    n: int | None  # how many answers
    speculative: bool | None  # False turns drafting off
    draft_limits: Mapping[str, int] | None  # how far drafts reach at most: "steps", "topk", "draft_tokens"
    prompt_logprobs: int | None  # as `logprobs`, of the prompt's tokens
    prompt_logprobs_start: int | None  # only of those after this position
    bad_words: Sequence[str] | None  # texts that no answer may hold
    priority: int | None  # lower is earlier among the key's own requests: -100 to 100
    cache_salt: str | None  # cached prefixes are shared with requests of the same salt alone
    truncate_prompt_tokens: int | None  # keeps this many of the prompt's last tokens; -1: what leaves room
    skip_special_tokens: bool | None  # False shows them in the text
    prediction: str | None  # what the answer is expected to be: it comes sooner if that is right
    grammar: Grammar | None  # what every answer must be, unless max_tokens or a stop string cuts it
    include_stop_str_in_output: bool | None  # True shows what stopped an answer as its end


class ChatOptions(Options, total=False):
    """How to answer a chat."""

    tools: Sequence[Tool] | None  # that the model may call
    tool_choice: Literal["auto", "none", "required"] | Tool | None  # a tool: the answer is one call of it
    parallel_tool_calls: bool | None  # False: at most one call
    enable_thinking: bool | None  # whether the model reasons first, where its template has a switch for it
    reasoning_effort: str | None  # how much it reasons, where its template reads that
    chat_template_kwargs: Mapping[str, Any] | None  # more variables for the model's chat template


class ToolCallDelta(msgspec.Struct, frozen=True):
    """A call, or more of it. `id` and `name` come where it begins, else they are empty.

    `index`: which of the choice's calls; `arguments`: more of their text.
    """

    index: int
    id: str
    name: str
    arguments: str


class Delta(msgspec.Struct, frozen=True):
    """The part of one choice that one message adds. `finish_reason` comes with its last delta.

    `reasoning` stands before `text`, and `tool_calls` stand behind it.
    """

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one call. `rejected_prediction_tokens` are not part of `completion_tokens`.

    Of a tree of drafts, which can be accepted along one branch, the longest branch counts. `cached_tokens`
    are the prompt's tokens whose KV was in a cache already. `reasoning_tokens`: those up to the reasoning's
    end, its tags too.

    `synthetic`: the server accepts drafts by chance, for benchmarks, and the answer means nothing.
    `weight_version`: the name of the weights that all tokens come from.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    verify_steps: int = 0
    cached_tokens: int = 0
    synthetic: bool = False
    reasoning_tokens: int = 0
    weight_version: str = ""


class WorkerTimings(msgspec.Struct, frozen=True):
    """One worker's part of a call, times in milliseconds. None: that did not happen there.

    `cached_tokens` of the prompt were in its cache. It pulled `transfer_bytes` from another worker, by the
    transfer backend named `transfer_path`.
    """

    role: Literal["prefill", "decode"]
    worker: str
    queue_ms: float
    prefill_ms: float | None
    cached_tokens: int
    transfer_ms: float | None
    transfer_bytes: int | None
    transfer_path: str | None


class Timings(msgspec.Struct, frozen=True):
    """The stages of a call, in milliseconds, from the tokenized prompt on.

    `first_decode_ms` is from the first token to the next ones; None if there were none. `first_token_ms` is 0
    of an answer without a token.
    """

    first_token_ms: float = 0.0
    first_decode_ms: float | None = None
    total_ms: float = 0.0
    workers: tuple[WorkerTimings, ...] = ()


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of prompt tokens, each given all before it: tokens[i] is at position `start` + i."""

    start: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]


class Choice(msgspec.Struct, frozen=True):
    """One whole answer."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """The answer as a turn of the chat that goes on."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.reasoning:
            message["reasoning"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = self.tool_calls
        return message


class Completion(msgspec.Struct, frozen=True):
    """Every answer of one call, by index.

    `request_id` is the call's name in the server's logs. `prompt_logprobs` only if they were asked for.
    """

    choices: tuple[Choice, ...]
    usage: Usage
    request_id: str
    timings: Timings
    prompt_logprobs: PromptLogprobs | None = None

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].text


class Model(msgspec.Struct, frozen=True):
    """A model that the server offers. `context_length` in tokens, prompt and answer together. `parent`: the
    model that it is an adapter of; "": it is the model itself.
    """

    id: str
    context_length: int
    parent: str = ""


class WeightsUpdated(msgspec.Struct, frozen=True):
    """New weights that serve: their name, number and digest. `requests`: that were ended for them. `pause_s`:
    how long no step could run. `behind`: workers that failed in it.
    """

    version: str
    generation: int
    digest: str
    requests: int
    pause_s: float
    behind: tuple[str, ...] = ()


class LoraAdapter(msgspec.Struct, frozen=True):
    """A LoRA adapter of the server's model. `id`: a digest of its content."""

    name: str
    id: str
    rank: int
