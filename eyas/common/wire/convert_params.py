"""Sampling parameters and grammars as protobuf, and back. Whether values are valid, the receiver checks."""

from __future__ import annotations

from eyas.common.errors import InvalidRequest
from eyas.common.grammars.notations import Grammar, GrammarKind
from eyas.common.params import SamplingParams
from protos import common_pb2

_KIND_TO_PB = {kind: common_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_KIND_FROM_PB = {wire: kind for kind, wire in _KIND_TO_PB.items()}


def params_to_pb(params: SamplingParams) -> common_pb2.SamplingParams:
    """Every field; an absent one of `logprobs` and `prompt_logprobs` stays absent."""
    return common_pb2.SamplingParams(
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        prompt_logprobs_start=params.prompt_logprobs_start,
        bad_words=[common_pb2.Run(ids=word) for word in params.bad_words],
        grammar=None if params.grammar is None else grammar_to_pb(params.grammar),
    )


def params_from_pb(pb: common_pb2.SamplingParams) -> SamplingParams:
    """The values as they came: `SamplingParams.validate` checks them."""
    return SamplingParams(
        max_tokens=pb.max_tokens,
        min_tokens=pb.min_tokens,
        temperature=pb.temperature,
        top_k=pb.top_k,
        top_p=pb.top_p,
        min_p=pb.min_p,
        repetition_penalty=pb.repetition_penalty,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        logit_bias=dict(pb.logit_bias),
        seed=pb.seed,
        stop_token_ids=tuple(pb.stop_token_ids),
        ignore_eos=pb.ignore_eos,
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
        prompt_logprobs_start=pb.prompt_logprobs_start,
        bad_words=tuple(tuple(word.ids) for word in pb.bad_words),
        grammar=grammar_from_pb(pb.grammar) if pb.HasField("grammar") else None,
    )


def grammar_to_pb(grammar: Grammar) -> common_pb2.Grammar:
    """Converts a grammar: its notation and its text."""
    return common_pb2.Grammar(kind=_KIND_TO_PB[grammar.kind], text=grammar.text)


def grammar_from_pb(pb: common_pb2.Grammar) -> Grammar:
    """Raises InvalidRequest for a notation that this version does not have."""
    if pb.kind not in _KIND_FROM_PB:
        raise InvalidRequest(f"grammar has the unknown kind {pb.kind}", param="grammar")
    return Grammar(_KIND_FROM_PB[pb.kind], pb.text)
