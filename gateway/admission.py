"""From a prompt and a caller's wishes to a request that the cluster can run, or a clear refusal.

It knows the served model's limits and the defaults. It refuses to know where the wishes came from: the HTTP
and the gRPC front both end here.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from eyas.common.config import GatewayConfig
from eyas.common.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, Unavailable
from eyas.common.params import SamplingParams
from eyas.common.types import Choice, GenerationRequest, Role, WorkerInfo

DEFAULT_MAX_TOKENS = 4096  # a caller who wants a longer answer says so


@dataclass(frozen=True)
class Wish:
    """What a caller wants done with a prompt. `max_tokens` None: what fits, up to `default_max_tokens`.

    `params.max_tokens` is not read. `seed` None: a random one. All prompts of one wish are one `call` of its
    `caller`, and share what a worker gives to one.
    """

    params: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    default_max_tokens: int = DEFAULT_MAX_TOKENS
    seed: int | None = None
    n: int = 1
    speculative: bool = True
    caller: str = ""
    call: str = field(default_factory=lambda: secrets.token_hex(8))


@dataclass(frozen=True)
class ServedModel:
    """What all workers of the model can do: the smallest of their limits.

    `synthetic`: they accept drafts by chance, for benchmarks, and answers mean nothing.
    """

    id: str
    context_length: int
    vocab_size: int
    fingerprint: str
    synthetic: bool = False

    @property
    def system_fingerprint(self) -> str:
        """What answered, as OpenAI's replies name it."""
        return f"fp_{self.fingerprint[:12]}" + ("_synthetic" if self.synthetic else "")


def is_synthetic(workers: Iterable[WorkerInfo]) -> bool:
    """Whether tokens come from workers that accept drafts by chance."""
    return any(worker.synthetic and Role.DECODE in worker.roles for worker in workers)


def served_model(config: GatewayConfig, workers: Sequence[WorkerInfo]) -> ServedModel:
    """The model behind this gateway. Raises Unavailable if no worker serves it."""
    targets = [w for w in workers if w.serving and (Role.PREFILL in w.roles or Role.DECODE in w.roles)]
    if not targets:
        raise Unavailable("no worker is serving the model")
    return ServedModel(
        id=config.served_model,
        context_length=min(worker.context_length for worker in targets),
        vocab_size=min(worker.vocab_size for worker in targets),
        fingerprint=targets[0].fingerprint,
        synthetic=is_synthetic(targets),
    )


def check_model(config: GatewayConfig, name: str) -> None:
    """Raises ModelNotFound unless `name` is the model served here."""
    if name != config.served_model:
        raise ModelNotFound(
            f"the model {name[:200]!r} does not exist: this server has {config.served_model!r}", param="model"
        )


def admit(model: ServedModel, prompt_ids: tuple[int, ...], wish: Wish, timeout_s: float) -> GenerationRequest:
    """The request for one prompt, its id and seed chosen.

    Raises InvalidRequest for an empty prompt or a parameter that makes no sense, here or with drafts accepted
    by chance; ContextLengthExceeded if prompt and answer do not fit.
    """
    if not prompt_ids:
        raise InvalidRequest("the prompt is empty", param="prompt")
    if min(prompt_ids) < 0 or max(prompt_ids) >= model.vocab_size:
        raise InvalidRequest(f"prompt holds a token id outside 0 .. {model.vocab_size - 1}", param="prompt")
    if model.synthetic and wish.speculative:
        _refuse_meaning(wish)
    params = msgspec.structs.replace(
        wish.params,
        max_tokens=_max_tokens(model, len(prompt_ids), wish),
        seed=secrets.randbits(64) if wish.seed is None else wish.seed % 2**64,
    )
    params.validate(model.vocab_size)
    return GenerationRequest(
        id=secrets.token_hex(12),
        prompt_ids=prompt_ids,
        params=params,
        choices=tuple(map(Choice, range(wish.n))),
        timeout_s=timeout_s,
        speculative=wish.speculative,
        caller=wish.caller,
        call=wish.call,
    )


def _refuse_meaning(wish: Wish) -> None:
    """Raises InvalidRequest for what says something of the model's own tokens."""
    for name, given in (("seed", wish.seed), ("logprobs", wish.params.logprobs)):
        if given is not None:
            raise InvalidRequest(
                f"{name} means nothing here: this server accepts drafts by chance, for benchmarks "
                "(--rejection-sample-method synthetic); leave it out, or turn speculative off",
                param=name,
            )


def _max_tokens(model: ServedModel, prompt: int, wish: Wish) -> int:
    asked = wish.max_tokens
    room = model.context_length - prompt
    if room < 1:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens, but the context length is {model.context_length} "
            "and at least one token must be left for the answer",
            param="prompt",
        )
    if asked is None:
        return min(room, wish.default_max_tokens)
    if asked > room:
        raise ContextLengthExceeded(
            f"the prompt has {prompt} tokens and max_tokens is {asked}: "
            f"together more than the context length of {model.context_length}",
            param="max_tokens",
        )
    return asked
