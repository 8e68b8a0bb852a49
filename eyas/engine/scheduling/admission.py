"""The limits of a worker: sizes, ids and parameters that a request must keep to. It holds no request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from eyas.common.config import SpeculationConfig
from eyas.common.errors import ContextLengthExceeded, InvalidRequest
from eyas.common.types import GenerationRequest, RequestChoice, RequestDraftLimits
from eyas.engine.batch.sequence import GenerationKind
from eyas.engine.scheduling.ranked import Schedulers


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits of one worker."""

    context_length: int  # not more than the pool holds for one request
    vocab_size: int
    max_waiting: int
    travels: bool = True  # can KV pages leave this worker, or come here?
    drafts: SpeculationConfig | None = None  # how far a request's drafts may reach; None: there are none
    no_experts: str = ""  # why it is not told which experts rows take; "": it is

    def check(self, request: GenerationRequest, kind: GenerationKind, scheduler: Schedulers) -> None:
        """Raises InvalidRequest, which names the field, for what can never be served here."""
        params, n = request.params, len(request.prompt_ids)
        if kind is not GenerationKind.LOCAL and not self.travels:
            raise InvalidRequest("KV pages of this worker cannot travel: it takes whole requests only")
        if n == 0:
            raise InvalidRequest("prompt must have at least one token", param="prompt")
        if n + params.max_tokens > self.context_length:  # before any id is looked at
            message = (
                f"prompt ({n} tokens) and max_tokens ({params.max_tokens}) exceed the context length of "
            )
            raise ContextLengthExceeded(message + f"{self.context_length} tokens", param="max_tokens")
        ids = (request.prompt_ids, *(choice.output_ids for choice in request.choices))
        if not all(map(self._are_tokens, ids)):
            raise InvalidRequest(f"prompt has a token id outside 0 .. {self.vocab_size - 1}", param="prompt")
        if not self._are_tokens(request.predicted):
            message = f"prediction has a token id outside 0 .. {self.vocab_size - 1}"
            raise InvalidRequest(message, param="prediction")
        most = max(params.max_tokens, 1) if kind is GenerationKind.LOCAL else 1
        self._check_choices(request.choices, most, scheduler.limits.max_running)
        if not 0.0 < request.timeout_s < math.inf:
            raise InvalidRequest("timeout_s must be above 0 and finite", param="timeout_s")
        params.validate(self.vocab_size)
        if params.prompt_experts and self.no_experts:
            raise InvalidRequest(f"return_routed_experts: {self.no_experts}", param="return_routed_experts")
        if self.drafts is not None and request.speculative:
            _check_limits(request.draft_limits, self.drafts)

    def _check_choices(self, choices: tuple[RequestChoice, ...], most: int, slots: int) -> None:
        """Each must have fewer than `most` tokens: with that many it has ended, or it is begun elsewhere."""
        indices = {choice.index for choice in choices}
        if not choices or len(indices) < len(choices) or min(indices) < 0:
            raise InvalidRequest("choices must have distinct indices from 0 up, at least one", param="n")
        if len(choices) > slots:
            raise InvalidRequest("n is larger than this worker's batch", param="n")
        if any(len(choice.output_ids) >= most for choice in choices):
            message = f"choices must have fewer than {most} output ids here"
            raise InvalidRequest(message, param="choices")

    def _are_tokens(self, ids: Sequence[int]) -> bool:
        """True if all of them are; a prompt has thousands."""
        return not ids or (min(ids) >= 0 and max(ids) < self.vocab_size)

    def is_token(self, token: int) -> bool:
        """True if the model's vocabulary has this number."""
        return 0 <= token < self.vocab_size


def _check_limits(requested: RequestDraftLimits, most: SpeculationConfig) -> None:
    """Raises InvalidRequest for limits beyond the engine's own."""
    for name, number, limit in (
        ("steps", requested.steps, most.steps),
        ("topk", requested.topk, most.topk),
        ("draft_tokens", requested.draft_tokens, most.draft_tokens),
    ):
        if not 0 <= number <= limit:
            field, flag = f"speculative.{name}", name.replace("_", "-")
            message = f"{field} is {number}, and this server's --spec-{flag} is {limit}: that is the most"
            raise InvalidRequest(message, param=field)
