"""A real head on another GPU: drafts go past the decode worker's host, and every answer
has a plain worker's tokens, to the last one, under exact arithmetic.

The embedded model; with one GPU all three workers share it. Timing is `tests.gpu.time_remote`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from eyas.common.cluster.listening import free_ports
from eyas.common.config import NANO, EngineConfig, SpeculationConfig, WorkerConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from eyas.common.wire import rpc
from eyas.common.wire.clients import DecodeSession
from eyas.common.wire.message import StepReply
from eyas.worker import engine_main
from gateway.text.tokenizer import Tokenizer
from tests.gpu.time_remote import PAGE_S, Engine, commits, counted, ready, running
from tools.nano.heldout import heldout_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
    pytest.mark.timeout(400),
]

BATCHES = (1, 8, 32)
PROMPTS, ANSWERS, TOKENS, ANSWER_S = 24, 64, 96, 120.0
CHAIN = SpeculationConfig(3, 1, 4)
WAYS = (
    SamplingParams(temperature=0.0, max_tokens=TOKENS),
    SamplingParams(temperature=1.0, top_p=0.9, max_tokens=TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=TOKENS, frequency_penalty=0.7, ignore_eos=True),
    SamplingParams(temperature=0.7, max_tokens=TOKENS),
)


class Ports(NamedTuple):
    """Of the three workers, and of the page of one."""

    plain: int
    decode: int
    draft: int
    page: int


def workers(ports: Ports) -> list[tuple[WorkerConfig, Engine]]:
    """One without drafts, one that decodes, one that drafts for it."""
    last = torch.cuda.device_count() - 1

    def engine(gpu: int, *roles: Role, **more: Any) -> EngineConfig:
        sizes = {"max_running": max(BATCHES), "num_pages": 4096}
        return resolve_engine(
            f"cuda:{gpu}", roles=roles, deterministic=True, speculation=CHAIN, **sizes, **more
        )

    plain = engine(0, *Role, draft=None)
    way = "auto" if last else "cuda_ipc"  # on one GPU drafts go past the host by name alone
    decode = engine(0, Role.DECODE, transfer=way)
    draft = engine(last, Role.DRAFT, transfer=way)
    known = f"static:127.0.0.1:{ports.draft}"
    return [
        (WorkerConfig(plain, port=ports.plain), engine_main.main),
        (WorkerConfig(draft, port=ports.draft), engine_main.main),
        (WorkerConfig(decode, port=ports.decode, metrics_port=ports.page, registry=known), engine_main.main),
    ]


def embedded_prompts() -> list[tuple[int, ...]]:
    """Held-out chats of the embedded model."""
    tokenizer = Tokenizer.load(NANO)
    return [asyncio.run(tokenizer.encode_chat(chat)) for chat in heldout_prompts(PROMPTS, 1)]


def asked(prompts: Sequence[tuple[int, ...]], batch: int) -> list[GenerationRequest]:
    """As many as there are answers, in all the ways in turn."""
    found = []
    for i in range(ANSWERS):
        prompt, params = prompts[i % len(prompts)], WAYS[i % len(WAYS)]
        found.append(GenerationRequest(f"{batch} {i}", prompt, msgspec.structs.replace(params, seed=i)))
    return found


async def told(
    session: DecodeSession, requests: Sequence[GenerationRequest], batch: int
) -> dict[str, list[int]]:
    """The tokens of each request, `batch` at once."""
    left, open_, tokens = list(requests), set[str](), {one.id: list[int]() for one in requests}
    began, rounds = time.perf_counter(), 0
    async with contextlib.aclosing(aiter(session)) as events:

        def submit() -> None:
            while left and len(open_) < batch:
                open_.add(left[0].id)
                session.submit(left.pop(0), 1, False)

        submit()
        async for event in events:
            for entry in event.entries if isinstance(event, StepReply) else ():
                tokens[entry.id] += entry.tokens
                rounds += 1
                open_ -= {entry.id} if entry.finish is not None else set()
            submit()
            if not open_:
                break
    seconds = time.perf_counter() - began
    count = sum(map(len, tokens.values()))
    print(f"{batch:>3} at once: {count / rounds:.2f} tokens per round, {count / seconds:.0f} tokens/s")
    return tokens


async def all_told(
    port: int, drafted: float, prompts: Sequence[tuple[int, ...]]
) -> dict[int, dict[str, list[int]]]:
    """By batch, from the worker at this port, once that share of its rounds has drafts."""
    address, found = f"127.0.0.1:{port}", {}
    async with rpc.channel(address) as channel, ready(channel, address, drafted) as session:
        for batch in BATCHES:
            async with asyncio.timeout(ANSWER_S):
                found[batch] = await told(session, asked(prompts, batch), batch)
    return found


def test_drafts_from_another_gpu_change_no_token() -> None:
    prompts, ports = embedded_prompts(), Ports(*itertools.islice(free_ports(), 4))
    with running(workers(ports)):
        plain = asyncio.run(all_told(ports.plain, 0.0, prompts))
        drafted = asyncio.run(all_told(ports.decode, 0.5, prompts))
        time.sleep(2 * PAGE_S)
        paths, late = commits(ports.page), counted("eyas_draft_rounds_late_total", ports.page)[""]
    print(f"commits {paths}; {late:.0f} rounds too late")
    assert drafted == plain
    assert paths["mailbox"] > 0.5 * sum(paths.values())
