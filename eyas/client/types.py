"""What the SDK's calls take and return. Plain values; nothing here knows gRPC or protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

import msgspec

from eyas.common.types import TokenLogprob


class Message(TypedDict):
    """One turn of a chat. `role`: system, user or assistant."""

    role: str
    content: str


class Options(TypedDict, total=False):
    """How to generate; whatever is left out takes the server's default (see `SamplingParams`)."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int  # fixes the whole answer
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int  # of each token, and of the so many best at its position
    n: int  # how many answers
    speculative: bool  # False turns drafting off


class Delta(msgspec.Struct, frozen=True):
    """What one message added to one choice. `finish_reason` ("stop", "length") comes with its last delta."""

    choice: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one call. `rejected_prediction_tokens` are not part of `completion_tokens`.

    Of a tree of drafts, which can be accepted along one branch, the longest branch counts.

    `synthetic`: the server accepts drafts by chance, for benchmarks, and the answer means nothing.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    verify_steps: int = 0
    synthetic: bool = False


class Choice(msgspec.Struct, frozen=True):
    """One whole answer."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True):
    """Every answer of one call, by index."""

    choices: tuple[Choice, ...]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first answer."""
        return self.choices[0].text


class Model(msgspec.Struct, frozen=True):
    """A model that the server offers. `context_length` in tokens, prompt and answer together."""

    id: str
    context_length: int
