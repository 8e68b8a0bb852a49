"""Sampling parameters: every rule names its field."""

from __future__ import annotations

from typing import Any

import pytest

from eyas.common.errors import InvalidRequest
from eyas.common.params import SamplingParams

VOCAB = 100


def test_the_defaults_are_valid() -> None:
    SamplingParams().validate(VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", 256),
        ("temperature", 2.0),
        ("top_p", 1.0),
        ("min_p", 0.999),
        ("repetition_penalty", 10.0),
        ("presence_penalty", -2.0),
        ("frequency_penalty", 2.0),
        ("logit_bias", {VOCAB - 1: -100.0}),
        ("seed", 2**64 - 1),
        ("stop_token_ids", (0, VOCAB - 1)),
        ("logprobs", 20),
        ("prompt_logprobs", 20),
        ("prompt_logprobs_start", 0),
        ("top_k", 2**31 - 1),
        ("bad_words", ((0,) * 64,) * 128),
    ],
)
def test_the_edge_is_allowed(field: str, value: Any) -> None:
    SamplingParams(**{field: value}).validate(VOCAB)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", 257),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("inf")),
        ("logit_bias", {VOCAB: 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
        ("seed", -1),
        ("seed", 2**64),
        ("stop_token_ids", (VOCAB,)),
        ("stop_token_ids", tuple([0] * 65)),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("prompt_logprobs_start", -1),
        ("max_tokens", 2**31),
        ("top_k", 2**31),
        ("bad_words", ((VOCAB,),)),
        ("bad_words", ((-1, 2),)),
        ("bad_words", ((),)),
        ("bad_words", ((0,) * 65,)),
        ("bad_words", ((0,),) * 129),
    ],
)
def test_past_the_edge_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field} ") as refused:
        SamplingParams(**{field: value}).validate(VOCAB)
    assert refused.value.param == field
