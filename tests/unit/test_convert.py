"""Every record survives the wire: what goes through protobuf bytes comes back equal."""

from __future__ import annotations

import dataclasses
import struct
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.common import errors
from eyas.common.errors import ContextLengthExceeded, InvalidRequest
from eyas.common.grammars.notations import Grammar, GrammarKind
from eyas.common.params import SamplingParams
from eyas.common.prompt_room import StepBudget
from eyas.common.step_times import PiecewiseCurve, StepPace, StepRates, StepTimes
from eyas.common.types import (
    EngineTimings,
    FinishCause,
    FirstToken,
    GenerationRequest,
    KvHandle,
    KvKind,
    PromptTokenLogprobs,
    RankPages,
    RequestChoice,
    RequestDraftLimits,
    Role,
    TokenEntry,
    TokenLogprob,
    WorkerBacklog,
    WorkerInfo,
)
from eyas.common.wire import convert
from eyas.common.wire.convert import backlog_from_pb, backlog_to_pb, rates_from_pb, rates_to_pb
from eyas.common.wire.convert_step import step_from_pb, step_to_pb
from protos import common_pb2, decode_pb2, worker_pb2

token = st.integers(0, 2**31 - 1)
tokens = st.lists(token, max_size=5).map(tuple)
single = st.floats(width=32, allow_nan=False)
double = st.floats(allow_nan=False)
logprob = st.builds(TokenLogprob, single, st.lists(st.tuples(token, single), max_size=3).map(tuple))
finish = st.sampled_from([None, *FinishCause])
params = st.builds(
    SamplingParams,
    max_tokens=token,
    temperature=double,
    top_p=double,
    logit_bias=st.dictionaries(token, double, max_size=3),
    seed=st.integers(0, 2**64 - 1),
    stop_token_ids=tokens,
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs_start=token,
    bad_words=st.lists(tokens, max_size=3).map(tuple),
    grammar=st.none() | st.builds(Grammar, st.sampled_from(GrammarKind), st.text(max_size=8)),
)
request = st.builds(
    GenerationRequest,
    id=st.text(max_size=8),
    prompt_ids=tokens,
    params=params,
    choices=st.lists(st.builds(RequestChoice, token, tokens), max_size=3).map(tuple),
    timeout_s=st.floats(2.0**-10, 2.0**20, width=32),
    speculative=st.booleans(),
    draft_limits=st.builds(RequestDraftLimits, token, token, token),
    predicted=tokens,
    adapter=st.sampled_from(["", "0123456789abcdef"]),
)
timings = st.builds(EngineTimings, single, single, single, st.integers(0, 2**62), st.text(max_size=4), token)
prompt = st.builds(
    lambda rows, top: PromptTokenLogprobs(top, b"own." * rows, b"ids." * rows * top, b"best" * rows * top),
    st.integers(0, 3),
    st.integers(0, 2),
)
entry = st.builds(
    TokenEntry,
    id=st.text(max_size=8),
    attempt=st.integers(0, 2**32 - 1),
    choice=token,
    index=token,
    tokens=tokens,
    logprobs=st.lists(logprob, max_size=2).map(tuple),
    finish=finish,
    accepted=token,
    offered=token,
    timings=st.none() | timings,
    prompt=st.none() | prompt,
)
first_token = st.builds(FirstToken, token, token, st.none() | logprob, finish, st.none() | prompt)
handle = st.builds(
    KvHandle,
    worker=st.text(max_size=8),
    epoch=st.integers(0, 2**64 - 1),
    attention_rank=token,
    id=st.integers(0, 2**64 - 1),
    group=st.sampled_from(KvKind),
    layout=st.text(max_size=8),
    tokens=token,
    shards=st.lists(st.builds(RankPages, token, tokens), max_size=2).map(tuple),
)


def over_the_wire(pb: Any) -> Any:
    return type(pb).FromString(pb.SerializeToString())


@given(request)
def test_requests(value: GenerationRequest) -> None:
    message = common_pb2.GenerationRequest()
    convert.fill_request(message, value)
    assert convert.request_from_pb(over_the_wire(message), 5) == value


def test_many_prompt_ids_are_packed() -> None:
    """As four bytes each, whatever holds them; half an id is refused by name."""
    ids = (0, 1, 2**31 - 1, *range(1000))
    message = common_pb2.GenerationRequest()
    convert.fill_request(message, GenerationRequest("r", array("i", ids), SamplingParams()))
    assert message.prompt_ids == struct.pack(f"<{len(ids)}i", *ids)
    assert convert.request_from_pb(over_the_wire(message), len(ids)).prompt_ids == ids
    with pytest.raises(ContextLengthExceeded):
        convert.request_from_pb(message, len(ids) - 1)
    message.prompt_ids += b"\0\0"
    with pytest.raises(InvalidRequest, match="prompt_ids"):
        convert.request_from_pb(message, len(ids))


@given(st.lists(entry, max_size=4))
def test_steps(entries: list[TokenEntry]) -> None:
    assert step_from_pb(over_the_wire(step_to_pb(entries))) == tuple(entries)


@pytest.mark.parametrize(
    "change",
    [
        {"ids": ["a", "b", "c"]},
        {"tokens": [1]},
        {"counts": [1]},
        {"counts": [3, -1]},
        {"offered": [1]},
        {"extras": [decode_pb2.Extra(row=2)]},
        {"extras": [decode_pb2.Extra(row=-1)]},
        {"extras": [decode_pb2.Extra(row=0, finish=99)]},  # type: ignore[arg-type]
    ],
)
def test_a_step_whose_columns_do_not_fit_is_refused(change: dict[str, Any]) -> None:
    def step(**columns: Any) -> decode_pb2.Step:
        rows = {"ids": ["a", "b"], "attempts": [1, 1], "choices": [0, 0], "indices": [4, 5], "tokens": [7, 8]}
        return decode_pb2.Step(**rows | columns)

    assert [one.tokens for one in step_from_pb(step())] == [(7,), (8,)]
    assert [one.tokens for one in step_from_pb(step(counts=[2, 0]))] == [(7, 8), ()]
    with pytest.raises(InvalidRequest):
        step_from_pb(step(**change))


@given(first_token)
def test_first_tokens(value: FirstToken) -> None:
    assert convert.first_token_from_pb(over_the_wire(convert.first_token_to_pb(value))) == value


@given(handle)
def test_handles(value: KvHandle) -> None:
    assert convert.handle_from_pb(over_the_wire(convert.handle_to_pb(value))) == value


def test_worker_info() -> None:
    value = WorkerInfo(
        "h:1", (Role.PREFILL, Role.DRAFT), 2**64 - 1, "m", "f", "d", 2048, 4096, 9, 8, 7, 6, False, True
    )
    assert convert.info_from_pb(over_the_wire(convert.info_to_pb(value))) == value
    times = StepTimes(
        PiecewiseCurve(((1, 2.5), (8, 2.5), (64, 9.0))),
        PiecewiseCurve(((0, 0.0), (1e6, 30.0))),
        0.5,
        0.25,
        64,
    )
    rates = StepRates(times, StepBudget(512, 128))
    backlog = WorkerBacklog(1, 2**40, 3, 0.25, 5, 6, StepPace(1.5, 0.0, 0.75))
    value = msgspec.structs.replace(
        value, stalled=True, stays=True, backlog=backlog, rates=rates, tokenizer="t"
    )
    assert convert.info_from_pb(over_the_wire(convert.info_to_pb(value))) == value


@pytest.mark.parametrize(
    "change",
    [
        {"pairs_ms": -1.0},
        {"mixed_ms": float("nan")},
        {"grain": 0},
        {"chunk_tokens": 0},
        {"rows_ms": PiecewiseCurve(((1, 1.0),))},
        {"rows_ms": PiecewiseCurve(((1, 1.0), (1, 2.0)))},
        {"rows_ms": PiecewiseCurve(((1, 2.0), (2, 1.0)))},
        {"context_ms": PiecewiseCurve(((0, -1.0), (2, 1.0)))},
        {"context_ms": PiecewiseCurve(((0, 0.0), (2, float("inf"))))},
        {"context_ms": PiecewiseCurve(tuple((i, i) for i in range(1000)))},
    ],
)
def test_rates_by_which_no_step_can_be_timed_are_refused(change: dict[str, Any]) -> None:
    good = StepTimes(PiecewiseCurve(((1, 1.0), (2, 2.0))), PiecewiseCurve(((0, 0.0), (1, 1.0))), 0.5, 0.25, 1)
    budget = StepBudget(change.pop("chunk_tokens", 512), 128)
    bad = StepRates(dataclasses.replace(good, **change), budget)
    with pytest.raises(InvalidRequest, match="rates"):
        rates_from_pb(over_the_wire(rates_to_pb(bad)))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_pace_that_is_none_is_refused(value: float) -> None:
    told = backlog_to_pb(WorkerBacklog(pace=StepPace(mixed=value)))
    with pytest.raises(InvalidRequest, match="pace"):
        backlog_from_pb(told)


@pytest.mark.parametrize("cls", errors._tree(errors.EyasError))
def test_errors_keep_their_class(cls: type[errors.EyasError]) -> None:
    back = convert.error_from_pb(over_the_wire(convert.error_to_pb(cls("what happened", param="top_p"))))
    assert (type(back), back.message, back.param) == (cls, "what happened", "top_p")


def test_unknown_values_are_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="group"):
        convert.handle_from_pb(common_pb2.KvHandle())
    with pytest.raises(InvalidRequest, match="finish"):
        convert.first_token_from_pb(common_pb2.FirstToken(finish=9))
    with pytest.raises(InvalidRequest, match="roles has the unknown value 9"):
        convert.info_from_pb(worker_pb2.InfoResponse(roles=[common_pb2.ROLE_DECODE, 9]))
    with pytest.raises(InvalidRequest, match="prompt"):
        convert.prompt_from_pb(common_pb2.PromptLogprobs(top=1, logprobs=b"1234"))
