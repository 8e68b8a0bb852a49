"""Makes the request for a prompt and a caller's options, or refuses it, for the HTTP and the gRPC front."""

from __future__ import annotations

import dataclasses
import hashlib
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from eyas.common.config import GatewayConfig
from eyas.common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unavailable
from eyas.common.logging import request_id, traceparent
from eyas.common.page_names import salt_of
from eyas.common.params import ADAPTER_NAME, MOST_ADAPTER_NAME, SamplingParams
from eyas.common.types import (
    EXACT,
    FAST,
    Adapter,
    AdapterRoster,
    GenerationRequest,
    PromptIds,
    RequestChoice,
    RequestDraftLimits,
    Role,
    WorkerInfo,
)
from gateway.backends.base import GenerationBackend
from gateway.http.long_ids import all_below

MAX_PROMPT_LOGPROBS = 1 << 20  # log-probabilities per prompt: of its own tokens and of the best ids

MOST_NAMED = 20  # names that a refusal lists at most
NO_ADAPTERS = AdapterRoster()


@dataclass(frozen=True)
class GenerationOptions:
    """The options of a generation request.

    `max_tokens` None: the context length bounds the answer, and so does the model's own default or, if it has
    none, `default_max_tokens`. `cut_to_fit`: a larger `max_tokens` than fits is reduced instead of refused.
    `params.max_tokens` is not read; a `params.top_k` of -1 means all, like 0. `seed` None: the server's.
    `truncate_prompt`: keeps this number of the prompt's last tokens; -1: those that leave space for
    `max_tokens`. `predicted`: ids of the expected answer. `priority`: see `eyas.common.params`. `session`:
    the name of the conversation. `cache_salt`: pages are shared only among requests of the same salt. Prompts
    with the same `call` share the part of a worker that one call gets.
    """

    params: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    cut_to_fit: bool = False
    default_max_tokens: int | None = None
    seed: int | None = None
    n: int = 1
    speculative: bool = True
    draft_limits: RequestDraftLimits = RequestDraftLimits()
    truncate_prompt: int | None = None
    predicted: tuple[int, ...] = ()
    priority: int = 0
    session: str = ""
    cache_salt: str = ""
    call: str = field(default_factory=lambda: secrets.token_hex(8))

    def with_params(self, **changes: Any) -> GenerationOptions:
        """A copy with some sampling parameters changed."""
        return dataclasses.replace(self, params=msgspec.structs.replace(self.params, **changes))


@dataclass(frozen=True)
class ServedModel:
    """The abilities of the served model, and the smallest limits of its workers. Lengths are in tokens.

    `synthetic`: workers accept drafts by chance, for benchmarks, and answers mean nothing. `arithmetic`: see
    `WorkerInfo`; "fast" unless it is the same on all workers. `sampling`: the model's own defaults of
    sampling parameters. `seed`: determines the seeds of requests without one; None: they are random.
    `adapters`: those that requests may use; `adapter`: the id of this request's adapter; "": none.
    """

    id: str
    context_length: int
    vocab_size: int
    fingerprint: str
    synthetic: bool = False
    arithmetic: str = FAST
    sampling: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    adapters: AdapterRoster = NO_ADAPTERS
    adapter: str = ""

    def params(self, **requested: Any) -> SamplingParams:
        """Returns the requested sampling parameters; the model's defaults fill the rest."""
        return SamplingParams(**{**self.sampling, **requested})

    @property
    def system_fingerprint(self) -> str:
        """The field of OpenAI's replies that identifies the model and the mode."""
        exact = f"_{self.arithmetic}" if self.arithmetic.startswith(EXACT) else ""
        return f"fp_{self.fingerprint[:12]}{exact}" + ("_synthetic" if self.synthetic else "")


def is_synthetic(workers: Iterable[WorkerInfo]) -> bool:
    """Whether a decode worker among them accepts drafts by chance."""
    return any(worker.synthetic and Role.DECODE in worker.roles for worker in workers)


def arithmetic_of(workers: Iterable[WorkerInfo]) -> str:
    """Returns the arithmetic of answers: exact if all target workers compute exactly, in one way."""
    kinds = {worker.arithmetic for worker in workers if worker.runs_target} or {FAST}
    return kinds.pop() if len(kinds) == 1 else FAST


def served_model(
    config: GatewayConfig, workers: Sequence[WorkerInfo], adapters: AdapterRoster = NO_ADAPTERS
) -> ServedModel:
    """The model behind this gateway, with its adapters, also while it sleeps. Raises Unavailable if no worker
    has it.
    """
    targets = [worker for worker in workers if (worker.serving or worker.released) and worker.runs_target]
    if not targets:
        raise Unavailable("no worker is serving the model")
    return ServedModel(
        id=config.served_model,
        context_length=min(worker.context_length for worker in targets),
        vocab_size=min(worker.vocab_size for worker in targets),
        fingerprint=targets[0].fingerprint,
        synthetic=is_synthetic(targets),
        arithmetic=arithmetic_of(targets),
        sampling=config.sampling,
        seed=config.seed,
        adapters=adapters,
    )


async def serving(config: GatewayConfig, backend: GenerationBackend, *names: str) -> ServedModel:
    """The model behind this gateway, with its adapters. Raises Unavailable if no worker serves it.

    For an unknown name the adapters are first read from all workers again: another gateway may just have
    loaded it.
    """
    control = backend.adapters
    if any(name and not _has(config, control.roster, name) for name in names):
        await control.look()
    return served_model(config, await backend.models(), control.roster)


def called(model: ServedModel, config: GatewayConfig, name: str, adapter: str = "") -> ServedModel:
    """The model, or one of its adapters, by the name that a caller gave it, which its answer repeats.

    An adapter is named as the model, or after it and a colon, or apart: as `adapter`. Raises
    ModelNotFound for a name that neither the model nor an adapter has, and InvalidRequest for two adapters.
    """
    for given, where in ((name, "model"), (adapter, "lora_path")):
        if given and not _has(config, model.adapters, given):
            names = [*config.names, *(one.name for one in model.adapters.adapters)]
            more = " and others" if len(names) > MOST_NAMED else ""
            has = " and ".join(map(repr, names[:MOST_NAMED])) + more
            raise ModelNotFound(
                f"the model {given[:200]!r} does not exist: this server has {has}", param=where
            )
    chosen = _adapter(config, model.adapters, name)
    apart = _adapter(config, model.adapters, adapter)
    if chosen is not None and apart not in (None, chosen):
        raise InvalidRequest("lora_path names another adapter than model", param="lora_path")
    chosen = chosen or apart
    if name == model.id and chosen is None:
        return model
    return dataclasses.replace(model, id=name, adapter="" if chosen is None else chosen.id)


def new_adapter(config: GatewayConfig, name: str, path: str, *, pinned: bool) -> Adapter:
    """An adapter that a caller wants to be loaded. Raises InvalidRequest for a name that none can have."""
    if len(name) > MOST_ADAPTER_NAME or not re.fullmatch(ADAPTER_NAME, name):
        most = f"1 to {MOST_ADAPTER_NAME} printable characters without spaces and colons"
        raise InvalidRequest(f"lora_name must be {most}", param="lora_name")
    if name in config.names:
        raise InvalidRequest(f"lora_name {name!r} is the model's own", param="lora_name")
    return Adapter(name, path, pinned=pinned)


def _has(config: GatewayConfig, adapters: AdapterRoster, name: str) -> bool:
    return name in config.names or _adapter(config, adapters, name) is not None


def _adapter(config: GatewayConfig, adapters: AdapterRoster, name: str) -> Adapter | None:
    """The adapter of this name, alone or after the model's name and a colon; None if there is none."""
    if not (name and adapters.adapters):
        return None
    base, _, after = name.partition(":")
    return adapters.named(name) or (adapters.named(after) if base in config.names else None)


def admit(
    model: ServedModel, prompt_ids: PromptIds, options: GenerationOptions, timeout_s: float
) -> GenerationRequest:
    """The request for one prompt, its id and seed chosen. `timeout_s`: seconds until its deadline.

    Raises InvalidRequest for an empty prompt, for a bad parameter, and for one that has no meaning while
    drafts are accepted by chance; ContextLengthExceeded if prompt and answer do not fit.
    """
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if options.truncate_prompt is not None:
        prompt_ids = prompt_ids[-_prompt_limit(model, options) :]
    max_tokens = _max_tokens(model, len(prompt_ids), options)  # before any id is looked at
    if not all_below(prompt_ids, model.vocab_size):
        raise InvalidRequest(
            f"the prompt holds a token id outside 0 .. {model.vocab_size - 1}", param="prompt"
        )
    if model.synthetic and options.speculative:
        _refuse_synthetic(options)
    params = msgspec.structs.replace(
        options.params,
        max_tokens=max_tokens,
        top_k=0 if options.params.top_k == -1 else options.params.top_k,
        seed=_seed(model, options, prompt_ids),
    )
    params.validate(model.vocab_size)
    _check_prompt_logprobs(params, len(prompt_ids))
    return GenerationRequest(
        id=secrets.token_hex(12),
        prompt_ids=prompt_ids,
        params=params,
        choices=tuple(map(RequestChoice, range(options.n))),
        timeout_s=timeout_s,
        speculative=options.speculative,
        draft_limits=options.draft_limits,
        call=options.call,
        predicted=_predicted(model, options, len(prompt_ids)),
        priority=options.priority,
        session=options.session,
        salt=salt_of(options.cache_salt, model.adapter),
        adapter=model.adapter,
        request_id=request_id.get(),
        traceparent=traceparent.get(),
    )


def _seed(model: ServedModel, options: GenerationOptions, prompt_ids: PromptIds) -> int:
    """The request's own seed; else one derived from the server's seed and the prompt, or a random one."""
    if options.seed is not None:
        return options.seed % 2**64
    if model.seed is None:
        return secrets.randbits(64)
    said = f"{model.seed % 2**64} {','.join(map(str, prompt_ids))}"
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest(), "little")


def _refuse_synthetic(options: GenerationOptions) -> None:
    """Raises InvalidRequest for options that have a meaning only if the model chooses the tokens."""
    params = options.params
    for name, given in (("seed", options.seed), ("logprobs", params.logprobs), ("grammar", params.grammar)):
        if given is not None:
            raise InvalidRequest(
                f"{name} means nothing here: this server accepts drafts by chance, for benchmarks "
                "(--rejection-sample-method synthetic); leave it out, or turn speculative off",
                param=name,
            )


def _predicted(model: ServedModel, options: GenerationOptions, prompt: int) -> tuple[int, ...]:
    """Returns the part of the prediction that fits into an answer to `prompt` tokens.

    Raises InvalidRequest for ids that the model does not have.
    """
    if not options.speculative:
        return ()
    predicted = options.predicted[: model.context_length - prompt]
    if predicted and not 0 <= min(predicted) <= max(predicted) < model.vocab_size:
        raise InvalidRequest(
            f"the prediction holds a token id outside 0 .. {model.vocab_size - 1}", param="prediction"
        )
    return predicted


def _check_prompt_logprobs(params: SamplingParams, prompt: int) -> None:
    """Raises InvalidRequest if prompt log-probabilities start beyond `prompt` tokens, or are too many."""
    top, start = params.prompt_logprobs, params.prompt_logprobs_start
    if top is None:
        return
    if start >= prompt:
        raise InvalidRequest(
            f"prompt_logprobs_start is {start}, but the prompt has {prompt} tokens",
            param="prompt_logprobs_start",
        )
    if (prompt - start) * (1 + top) > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs of {prompt - start} prompt tokens and {top} more ids each are too many: "
            f"{MAX_PROMPT_LOGPROBS} numbers is the most",
            param="prompt_logprobs",
        )


def _prompt_limit(model: ServedModel, options: GenerationOptions) -> int:
    """The number of a prompt's last tokens that are kept, at least one."""
    if options.truncate_prompt is not None and options.truncate_prompt > 0:
        return options.truncate_prompt
    return max(1, model.context_length - (1 if options.max_tokens is None else options.max_tokens))


def answer_limit(model: ServedModel, prompt: int, least: int) -> int:
    """The most tokens that an answer to `prompt` tokens can have.

    Raises ContextLengthExceeded if these are fewer than `least`.
    """
    left = model.context_length - prompt
    if left < least:
        answer = ", and at least one token must be left for the answer" if least else ""
        raise ContextLengthExceeded(f"{_most(model)}, but the prompt has {prompt}{answer}", param="prompt")
    return left


def _max_tokens(model: ServedModel, prompt: int, options: GenerationOptions) -> int:
    requested = options.max_tokens
    left = answer_limit(model, prompt, least=0 if requested == 0 else 1)
    if requested is None:
        default: int | None = model.sampling.get("max_tokens", options.default_max_tokens)
        return left if default is None else min(left, default)
    if requested > left and options.cut_to_fit:
        return left
    if requested > left:
        raise ContextLengthExceeded(
            f"{_most(model)}, but the prompt has {prompt} and max_tokens is {requested}", param="max_tokens"
        )
    return requested


def _most(model: ServedModel) -> str:
    """Returns the beginning of a refusal, in the words that clients match."""
    return f"this model's maximum context length is {model.context_length} tokens"
