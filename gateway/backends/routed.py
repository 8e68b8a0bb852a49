"""Adds to complete answers the experts that the router chose for each of their rows.

The prompt and its answer are computed once more, as a prompt whose tokens are scored. Exact arithmetic then
chooses the same experts, whatever drafts, chunks or cached prefixes the answer had; workers with other
arithmetic refuse the request.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Sequence

import msgspec

from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice, RequestDraftLimits
from gateway.backends.base import GenerationBackend
from gateway.text.entries import TextDelta

SCORES_ALONE = SamplingParams(max_tokens=0, temperature=0.0, prompt_logprobs=0, prompt_experts=True)


async def with_experts(
    backend: GenerationBackend, requests: Sequence[GenerationRequest], n: int, choices: Sequence[TextDelta]
) -> list[TextDelta]:
    """Returns the complete answers, `n` per request, with the experts of their rows."""
    texts = [
        msgspec.structs.replace(
            requests[i // n],
            id=f"{requests[i // n].id}-experts-{i % n}",
            prompt_ids=(*requests[i // n].prompt_ids, *choice.tokens),
            params=SCORES_ALONE,
            choices=(RequestChoice(0),),
            speculative=False,
            draft_limits=RequestDraftLimits(),
            predicted=(),
        )
        for i, choice in enumerate(choices)
    ]
    experts = await asyncio.gather(*(_experts(backend, text) for text in texts))
    pairs = zip(choices, experts, strict=True)
    return [msgspec.structs.replace(choice, experts=own) for choice, own in pairs]


async def _experts(backend: GenerationBackend, text: GenerationRequest) -> bytes:
    """The experts as int32, little-endian, [tokens - 1, layers, experts per row]; -1: none."""
    narrow = b""
    async with contextlib.aclosing(await backend.start(text)) as stream:
        while entries := await stream.take():
            narrow = next((entry.prompt.experts for entry in entries if entry.prompt is not None), narrow)
    if not narrow and len(text.prompt_ids) > 1:
        raise EyasError("a worker did not say which experts were taken")
    return await asyncio.to_thread(_widened, narrow)


def _widened(experts: bytes) -> bytes:
    """Converts int16 to int32."""
    narrow = array("h")
    narrow.frombytes(experts)
    return array("i", narrow).tobytes()
