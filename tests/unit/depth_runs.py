"""Requests to engines whose depth of drafts changes, and their answers."""

from __future__ import annotations

import random
from collections.abc import Sequence as SequenceOf

from loopback import Loopback, Result, wait_all

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice

VOCAB = 16  # few ids: random drafts are often right


def requests() -> list[GenerationRequest]:
    draw = random.Random(1)
    some = (
        SamplingParams(temperature=0.0, max_tokens=28, ignore_eos=True, logprobs=1),
        SamplingParams(temperature=1.0, seed=7, max_tokens=28, ignore_eos=True),
        SamplingParams(
            temperature=0.9,
            seed=2**63,
            top_p=0.9,
            max_tokens=20,
            ignore_eos=True,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            logit_bias={7: 1.0},
        ),
    )
    prompts = [tuple(draw.randrange(VOCAB) for _ in range(draw.choice((1, 5, 16, 33)))) for _ in range(5)]
    made = [
        GenerationRequest(f"r{i}", prompt, some[i % 3], tuple(map(RequestChoice, range(1 + 2 * (i == 4)))))
        for i, prompt in enumerate(prompts)
    ]
    return [*made, GenerationRequest("undrafted", prompts[0], some[0], speculative=False)]


def answers(*configs: EngineConfig, wanted: SequenceOf[GenerationRequest] = ()) -> list[Result]:
    cluster = Loopback(*configs)
    try:
        results = [cluster.submit(request, split=len(configs) > 1) for request in wanted or requests()]
        wait_all(results, 60)
    finally:
        cluster.close()
    return results
