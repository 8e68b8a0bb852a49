"""The only conversion between messages of several services and the values of `eyas.common.types`.

`x_to_pb` and `x_from_pb` come in pairs and lose nothing. Messages that arrive are checked for their size, and
for enum values that this version has (else InvalidRequest names the field); the receiver checks whether
values are valid. Messages of one service alone are converted by its servicer and client.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import msgspec

from eyas.common.errors import ContextLengthExceeded, EyasError, InvalidRequest, from_code
from eyas.common.grammars.notations import Grammar, GrammarKind
from eyas.common.page_names import ID_BYTES, NAME_BYTES, CacheNews, PageShape, packed, unpacked
from eyas.common.params import SamplingParams
from eyas.common.prompt_room import StepBudget
from eyas.common.step_times import PiecewiseCurve, StepPace, StepRates, StepTimes
from eyas.common.types import (
    FAST,
    Adapter,
    AdapterRoster,
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
    TokenLogprob,
    WeightsInfo,
    WorkerBacklog,
    WorkerInfo,
)
from protos import common_pb2, worker_pb2

_FINISH_TO_PB = {
    None: common_pb2.FINISH_UNSPECIFIED,
    FinishCause.STOP: common_pb2.FINISH_STOP,
    FinishCause.LENGTH: common_pb2.FINISH_LENGTH,
    FinishCause.ABORT: common_pb2.FINISH_ABORT,
}
_FINISH_FROM_PB = {wire: finish for finish, wire in _FINISH_TO_PB.items()}
_GROUP_TO_PB = {KvKind.TARGET: common_pb2.KV_KIND_TARGET, KvKind.DRAFT: common_pb2.KV_KIND_DRAFT}
_GROUP_FROM_PB = {wire: group for group, wire in _GROUP_TO_PB.items()}
_ROLE_TO_PB = {
    Role.PREFILL: common_pb2.ROLE_PREFILL,
    Role.DECODE: common_pb2.ROLE_DECODE,
    Role.DRAFT: common_pb2.ROLE_DRAFT,
}
_ROLE_FROM_PB = {wire: role for role, wire in _ROLE_TO_PB.items()}
# --- requests ----------------------------------------------------------------------------------------


MOST_POINTS = 256
_KIND_TO_PB = {kind: common_pb2.GrammarKind.Value(f"GRAMMAR_KIND_{kind.name}") for kind in GrammarKind}
_KIND_FROM_PB = {wire: kind for kind, wire in _KIND_TO_PB.items()}


def backlog_to_pb(backlog: WorkerBacklog) -> worker_pb2.Backlog:
    """Every field."""
    fields = msgspec.structs.asdict(backlog)
    return worker_pb2.Backlog(**fields | {"pace": worker_pb2.StepPace(**dataclasses.asdict(backlog.pace))})


def backlog_from_pb(pb: worker_pb2.Backlog) -> WorkerBacklog:
    """Every field; one that is absent has its default. Raises InvalidRequest for a pace that is none."""
    fields = {name: getattr(pb, name) for name in WorkerBacklog.__struct_fields__}
    pace = StepPace(pb.pace.decode, pb.pace.prompt, pb.pace.mixed)
    if not all(math.isfinite(value) and value >= 0.0 for value in dataclasses.astuple(pace)):
        raise InvalidRequest("backlog has a pace that is none", param="backlog")
    kv_room = pb.kv_room if pb.HasField("kv_room") else None
    return WorkerBacklog(**fields | {"pace": pace, "kv_room": kv_room})


def rates_to_pb(rates: StepRates) -> worker_pb2.StepRates:
    """Every field."""
    times, budget = rates.times, rates.budget
    return worker_pb2.StepRates(
        rows_ms=_points(times.rows_ms),
        context_ms=_points(times.context_ms),
        pairs_ms=times.pairs_ms,
        mixed_ms=times.mixed_ms,
        grain=times.grain,
        chunk_tokens=budget.chunk_tokens,
        mixed_tokens=budget.mixed_tokens,
    )


def rates_from_pb(pb: worker_pb2.StepRates) -> StepRates:
    """Raises InvalidRequest for rates by which no step could be timed."""
    if min(pb.grain, pb.chunk_tokens, pb.mixed_tokens) < 1:
        raise InvalidRequest("rates has a grain or a budget below 1", param="rates")
    if not all(math.isfinite(value) and value >= 0.0 for value in (pb.pairs_ms, pb.mixed_ms)):
        raise InvalidRequest("rates has times that are none", param="rates")
    times = StepTimes(_curve(pb.rows_ms), _curve(pb.context_ms), pb.pairs_ms, pb.mixed_ms, pb.grain)
    return StepRates(times, StepBudget(pb.chunk_tokens, pb.mixed_tokens))


def _points(curve: PiecewiseCurve) -> list[worker_pb2.CurvePoint]:
    return [worker_pb2.CurvePoint(x=x, y=y) for x, y in curve.points]


def _curve(points: Iterable[worker_pb2.CurvePoint]) -> PiecewiseCurve:
    """Checks a curve: at least two points, x and time rising, so that no time is below 0."""
    pairs = tuple((point.x, point.y) for point in points)
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(pairs, pairs[1:], strict=False))
    if not (2 <= len(pairs) <= MOST_POINTS and rising and pairs[0][1] >= 0.0 and math.isfinite(pairs[-1][1])):
        raise InvalidRequest("rates has a curve that does not rise", param="rates")
    return PiecewiseCurve(pairs)


def fill_request(pb: common_pb2.GenerationRequest, request: GenerationRequest) -> None:
    """Writes the request, with its unfinished choices, into an empty message where it stands.

    One that is made first and put there is copied, which takes a millisecond for a long prompt.
    """
    limits = request.draft_limits
    pb.id = request.id
    pb.prompt_ids = packed(request.prompt_ids)
    pb.params.CopyFrom(params_to_pb(request.params))
    for choice in request.choices:
        pb.choices.add(index=choice.index, output_ids=choice.output_ids)
    pb.timeout_s = request.timeout_s
    pb.speculative = request.speculative
    pb.draft_limits.steps, pb.draft_limits.topk = limits.steps, limits.topk
    pb.draft_limits.draft_tokens = limits.draft_tokens
    pb.caller = request.caller
    pb.call = request.call
    pb.begun = request.begun
    pb.predicted_ids.extend(request.predicted)
    pb.priority = request.priority
    pb.salt = request.salt
    pb.adapter = request.adapter
    pb.weights = request.weights
    pb.request_id = request.request_id
    pb.traceparent = request.traceparent


def request_from_pb(pb: common_pb2.GenerationRequest, context_length: int) -> GenerationRequest:
    """Raises ContextLengthExceeded for more than `context_length` ids, before any of them is looked at, and
    InvalidRequest for a time that no clock can wait for, for half an id, and for a salt that is no digest.
    """
    outputs = (len(choice.output_ids) for choice in pb.choices)
    longest = max(len(pb.prompt_ids) // ID_BYTES, len(pb.predicted_ids), *outputs)
    if longest > context_length:
        message = f"the request has {longest} ids, more than the context length of {context_length}"
        raise ContextLengthExceeded(message, param="prompt")
    if len(pb.prompt_ids) % ID_BYTES:
        raise InvalidRequest("prompt_ids ends inside an id", param="prompt_ids")
    if len(pb.salt) not in (0, NAME_BYTES):
        raise InvalidRequest(f"salt has {len(pb.salt)} bytes, not {NAME_BYTES}", param="salt")
    if not 0.0 < pb.timeout_s < math.inf:
        raise InvalidRequest("timeout_s must be above 0 and finite", param="timeout_s")
    return GenerationRequest(
        id=pb.id,
        prompt_ids=unpacked(pb.prompt_ids),
        params=params_from_pb(pb.params),
        choices=tuple(RequestChoice(c.index, tuple(c.output_ids)) for c in pb.choices),
        timeout_s=pb.timeout_s,
        speculative=pb.speculative,
        draft_limits=RequestDraftLimits(
            pb.draft_limits.steps, pb.draft_limits.topk, pb.draft_limits.draft_tokens
        ),
        caller=pb.caller,
        call=pb.call,
        begun=pb.begun,
        predicted=tuple(pb.predicted_ids),
        priority=pb.priority,
        salt=pb.salt,
        adapter=pb.adapter,
        weights=pb.weights,
        request_id=pb.request_id,
        traceparent=pb.traceparent,
    )


# --- tokens ------------------------------------------------------------------------------------------


def logprob_to_pb(logprob: TokenLogprob) -> common_pb2.TokenLogprob:
    """One token's log-probability and the best ids of its position."""
    top = [common_pb2.TopLogprob(token=token, logprob=value) for token, value in logprob.top]
    return common_pb2.TokenLogprob(logprob=logprob.logprob, top=top)


def logprob_from_pb(pb: common_pb2.TokenLogprob) -> TokenLogprob:
    """One token's log-probability and the best ids of its position."""
    return TokenLogprob(pb.logprob, tuple((t.token, t.logprob) for t in pb.top))


def prompt_to_pb(prompt: PromptTokenLogprobs) -> common_pb2.PromptLogprobs:
    """The prompt's log-probabilities, packed as they are."""
    return common_pb2.PromptLogprobs(**msgspec.structs.asdict(prompt))


def prompt_from_pb(pb: common_pb2.PromptLogprobs) -> PromptTokenLogprobs:
    """Raises InvalidRequest if its parts do not fit together."""
    rows = len(pb.logprobs)
    even = not pb.experts or (rows and len(pb.experts) % (rows // 4) == 0)
    if rows % 4 or pb.top < 0 or not len(pb.best_ids) == len(pb.best) == rows * pb.top or not even:
        raise InvalidRequest("prompt has log-probabilities of different numbers of tokens", param="prompt")
    return PromptTokenLogprobs(pb.top, pb.logprobs, pb.best_ids, pb.best, pb.experts)


def finish_to_pb(finish: FinishCause | None) -> common_pb2.Finish:
    """Converts a finish; None becomes the unspecified value."""
    return _FINISH_TO_PB[finish]


def finish_from_pb(wire: common_pb2.Finish) -> FinishCause | None:
    """Raises InvalidRequest for a value that this version does not have."""
    if wire not in _FINISH_FROM_PB:
        raise InvalidRequest(f"finish has the unknown value {wire}", param="finish")
    return _FINISH_FROM_PB[wire]


def timings_to_pb(timings: EngineTimings) -> common_pb2.Timings:
    """Converts timings without the fields that the gateway fills in."""
    return common_pb2.Timings(
        queue_ms=timings.queue_ms,
        prefill_ms=timings.prefill_ms,
        transfer_ms=timings.transfer_ms,
        transfer_bytes=timings.transfer_bytes,
        transfer_path=timings.transfer_path,
        cached_tokens=timings.cached_tokens,
    )


def timings_from_pb(pb: common_pb2.Timings) -> EngineTimings:
    """Converts timings without the fields that the gateway fills in."""
    return EngineTimings(
        queue_ms=pb.queue_ms,
        prefill_ms=pb.prefill_ms,
        transfer_ms=pb.transfer_ms,
        transfer_bytes=pb.transfer_bytes,
        transfer_path=pb.transfer_path,
        cached_tokens=pb.cached_tokens,
    )


def first_token_to_pb(first: FirstToken) -> common_pb2.FirstToken:
    """Token 0 of a choice."""
    return common_pb2.FirstToken(
        choice=first.choice,
        token=first.token,
        logprob=logprob_to_pb(first.logprob) if first.logprob is not None else None,
        finish=finish_to_pb(first.finish),
        prompt=None if first.prompt is None else prompt_to_pb(first.prompt),
    )


def first_token_from_pb(pb: common_pb2.FirstToken) -> FirstToken:
    """Token 0 of a choice. Raises InvalidRequest for a finish that this version does not have."""
    return FirstToken(
        choice=pb.choice,
        token=pb.token,
        logprob=logprob_from_pb(pb.logprob) if pb.HasField("logprob") else None,
        finish=finish_from_pb(pb.finish),
        prompt=prompt_from_pb(pb.prompt) if pb.HasField("prompt") else None,
    )


def first_tokens_from_pb(pbs: Iterable[common_pb2.FirstToken]) -> tuple[FirstToken, ...]:
    """Token 0 of each choice. Raises as `first_token_from_pb` does."""
    return tuple(first_token_from_pb(pb) for pb in pbs)


# --- handles -----------------------------------------------------------------------------------------


def group_to_pb(group: KvKind) -> common_pb2.KvKind:
    """Converts the owner of a handle's KV."""
    return _GROUP_TO_PB[group]


def group_from_pb(wire: common_pb2.KvKind) -> KvKind:
    """Raises InvalidRequest for an unset or unknown group."""
    if wire not in _GROUP_FROM_PB:
        raise InvalidRequest(f"group has the unknown value {wire}", param="group")
    return _GROUP_FROM_PB[wire]


def handle_to_pb(handle: KvHandle) -> common_pb2.KvHandle:
    """The handle with all its shards."""
    return common_pb2.KvHandle(
        worker=handle.worker,
        epoch=handle.epoch,
        attention_rank=handle.attention_rank,
        id=handle.id,
        group=group_to_pb(handle.group),
        layout=handle.layout,
        tokens=handle.tokens,
        shards=[common_pb2.Shard(rank=s.rank, pages=s.pages) for s in handle.shards],
    )


def handle_from_pb(pb: common_pb2.KvHandle) -> KvHandle:
    """The handle with all its shards. Raises InvalidRequest for an unset or unknown group."""
    return KvHandle(
        worker=pb.worker,
        epoch=pb.epoch,
        attention_rank=pb.attention_rank,
        id=pb.id,
        group=group_from_pb(pb.group),
        layout=pb.layout,
        tokens=pb.tokens,
        shards=tuple(RankPages(s.rank, tuple(s.pages)) for s in pb.shards),
    )


def handles_from_pb(pbs: Iterable[common_pb2.KvHandle]) -> tuple[KvHandle, ...]:
    """Several handles. Raises as `handle_from_pb` does."""
    return tuple(handle_from_pb(pb) for pb in pbs)


# --- errors and workers ------------------------------------------------------------------------------


def error_to_pb(error: EyasError) -> common_pb2.Status:
    """An error by its name on the wire."""
    return common_pb2.Status(code=error.code, message=error.message, param=error.param or "")


def error_from_pb(pb: common_pb2.Status) -> EyasError:
    """The error with its class; an EyasError for a name that this version does not have."""
    return from_code(pb.code, pb.message, pb.param or None)


def info_to_pb(info: WorkerInfo) -> worker_pb2.InfoResponse:
    """A worker's description of itself."""
    return worker_pb2.InfoResponse(
        worker=info.worker,
        roles=[_ROLE_TO_PB[role] for role in info.roles],
        epoch=info.epoch,
        model=info.model,
        fingerprint=info.fingerprint,
        draft_fingerprint=info.draft_fingerprint,
        context_length=info.context_length,
        vocab_size=info.vocab_size,
        pages_total=info.pages_total,
        pages_used=info.pages_used,
        running=info.running,
        waiting=info.waiting,
        serving=info.serving,
        synthetic=info.synthetic,
        starting=info.starting,
        stalled=info.stalled,
        stays=info.stays,
        backlog=backlog_to_pb(info.backlog),
        rates=None if info.rates is None else rates_to_pb(info.rates),
        arithmetic=info.arithmetic,
        tokenizer=info.tokenizer,
        trouble=info.trouble,
        paused=info.paused,
        released=info.released,
        adapters=None if info.adapters is None else roster_to_pb(info.adapters),
        adapter_slots=info.adapter_slots,
        weights=None
        if info.weights == WeightsInfo()
        else worker_pb2.Weights(**msgspec.structs.asdict(info.weights)),
    )


def _weights_from_pb(pb: worker_pb2.Weights) -> WeightsInfo:
    return WeightsInfo(pb.version, pb.generation, pb.digest, pb.folder, pb.closed, pb.seconds)


def info_from_pb(pb: worker_pb2.InfoResponse) -> WorkerInfo:
    """Raises InvalidRequest for a role that this version does not have, and for rates that make no sense."""
    unknown = sorted(set(pb.roles) - _ROLE_FROM_PB.keys())
    if unknown:
        raise InvalidRequest(f"roles has the unknown value {unknown[0]}", param="roles")
    return WorkerInfo(
        worker=pb.worker,
        roles=tuple(_ROLE_FROM_PB[role] for role in pb.roles),
        epoch=pb.epoch,
        model=pb.model,
        fingerprint=pb.fingerprint,
        draft_fingerprint=pb.draft_fingerprint,
        context_length=pb.context_length,
        vocab_size=pb.vocab_size,
        pages_total=pb.pages_total,
        pages_used=pb.pages_used,
        running=pb.running,
        waiting=pb.waiting,
        serving=pb.serving,
        synthetic=pb.synthetic,
        starting=pb.starting,
        stalled=pb.stalled,
        stays=pb.stays,
        backlog=backlog_from_pb(pb.backlog),
        rates=rates_from_pb(pb.rates) if pb.HasField("rates") else None,
        arithmetic=pb.arithmetic or FAST,
        tokenizer=pb.tokenizer,
        trouble=pb.trouble,
        paused=pb.paused,
        released=tuple(pb.released),
        adapters=roster_from_pb(pb.adapters) if pb.HasField("adapters") else None,
        adapter_slots=tuple(pb.adapter_slots),
        weights=_weights_from_pb(pb.weights) if pb.HasField("weights") else WeightsInfo(),
    )


def adapter_to_pb(adapter: Adapter) -> worker_pb2.Adapter:
    """Every field."""
    return worker_pb2.Adapter(**msgspec.structs.asdict(adapter))


def adapter_from_pb(pb: worker_pb2.Adapter) -> Adapter:
    """Every field."""
    return Adapter(name=pb.name, path=pb.path, id=pb.id, rank=pb.rank, pinned=pb.pinned)


def roster_to_pb(roster: AdapterRoster) -> worker_pb2.AdapterRoster:
    """The roster with all its adapters."""
    return worker_pb2.AdapterRoster(revision=roster.revision, adapters=map(adapter_to_pb, roster.adapters))


def roster_from_pb(pb: worker_pb2.AdapterRoster) -> AdapterRoster:
    """The roster with all its adapters."""
    return AdapterRoster(pb.revision, tuple(map(adapter_from_pb, pb.adapters)))


def news_to_pb(news: CacheNews) -> worker_pb2.CachedResponse:
    """Converts news without `until`, which only the worker counts by."""
    return worker_pb2.CachedResponse(
        epoch=news.epoch,
        page_size=news.shape.size,
        lookahead=news.shape.lookahead,
        whole=news.whole,
        added=news.added,
        dropped=news.dropped,
    )


def news_from_pb(pb: worker_pb2.CachedResponse) -> CacheNews:
    """Raises InvalidRequest for pages that cannot be."""
    if pb.page_size < 1 or pb.lookahead < 0:
        raise InvalidRequest(f"page_size is {pb.page_size} and lookahead {pb.lookahead}", param="page_size")
    return CacheNews(pb.epoch, PageShape(pb.page_size, pb.lookahead), pb.added, pb.dropped, pb.whole)


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
        prompt_experts=params.prompt_experts,
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
        prompt_experts=pb.prompt_experts,
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
