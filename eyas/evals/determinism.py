"""`eyas doctor determinism`: does a running server give a request the same tokens in any company?

The same requests, greedy and seeded, are asked alone, all at once and among others, with drafts and without,
and so are the turns that follow their answers; every answer is held against the first. What a server promises
is its `arithmetic` (docs/determinism.md).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from eyas.client.reach import ServerAddress, http_options, unreachable
from eyas.common.errors import EyasError
from eyas.common.types import EXACT
from eyas.configuration import client_key
from eyas.flags import add_server, positive

TIMEOUT_S = 120.0  # of one request
LONGEST = 1200  # tokens of a prompt, at most
TURN = 9  # tokens of a second turn, beside all that was said
SHOWN = 3  # differences that are written out
SEED = 5  # of the prompts


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `eyas doctor determinism`."""
    add_server(parser)
    add = parser.add_argument
    add("--requests", type=positive, default=12, metavar="N", help="different ones (%(default)s)")
    add("--max-tokens", type=positive, default=48, metavar="N", help="of each answer (%(default)s)")
    add("--others", type=positive, default=16, metavar="N", help="requests beside them (%(default)s)")


def run(args: argparse.Namespace) -> int:
    """Prints a table; returns the exit code: 0 if no answer differs, else 1."""
    server = ServerAddress(args.url, client_key(args), args.ca)
    return asyncio.run(_examine(server, args))


@dataclass(frozen=True)
class ProbeRequest:
    """One request: its name, its prompt's ids, and its sampling parameters."""

    name: str
    prompt: tuple[int, ...]
    sampling: dict[str, Any]
    speculative: bool = True

    @property
    def body(self) -> dict[str, Any]:
        """The request as `/generate` takes it."""
        fields = {"input_ids": list(self.prompt), "sampling_params": self.sampling, "timeout": TIMEOUT_S}
        return fields | {"speculative": self.speculative}


@dataclass
class FirstAnswers:
    """The first answer to each request, and its company."""

    said: dict[str, tuple[str, list[int]]] = field(default_factory=dict)

    def differing(self, company: str, answers: dict[str, list[int]]) -> list[str]:
        """Compares these answers with the first ones: a sentence for each that differs."""
        texts = []
        for name, tokens in answers.items():
            other, known = self.said.setdefault(name, (company, tokens))
            if tokens != known:
                pairs = enumerate(zip(known, tokens, strict=False))
                place = next((i for i, (a, b) in pairs if a != b), min(len(known), len(tokens)))
                texts.append(f"{name}: token {place} of {len(known)} is not that of {other!r}")
        return texts


async def _examine(server: ServerAddress, args: argparse.Namespace) -> int:
    limits = httpx.Limits(max_connections=None)
    options = http_options(server)
    async with httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT_S, limits=limits, **options) as http:
        model = await _ask(http, "/get_model_info")
        if missing := {"served_model_name", "max_model_len", "vocab_size"} - set(model):
            raise EyasError(f"{server.url} is no Eyas: /get_model_info lacks {', '.join(sorted(missing))}")
        arithmetic = model.get("arithmetic", "")
        print(f"{model['served_model_name']} at {server.url}: arithmetic {arithmetic or 'unknown'}")
        if model.get("synthetic"):
            raise EyasError("it accepts drafts by chance, for benchmarks: its answers mean nothing")
        campaign = _DeterminismRun(http, made(model, args.requests, args.max_tokens), args.others)
        differing = await campaign.all()
    if not differing:
        print("every answer is the same in any company")
        return 0
    promising = "its arithmetic" if arithmetic.startswith(EXACT) else "--deterministic"
    print(f"{differing} answers differ: {promising} promises that none does")
    return 1


def made(model: dict[str, Any], count: int, max_tokens: int) -> list[ProbeRequest]:
    """Makes `count` requests of very different lengths, every second one seeded."""
    dice, most = random.Random(SEED), min(LONGEST, model["max_model_len"] // 2 - max_tokens - TURN)
    if most < 1:
        raise EyasError(f"--max-tokens: {max_tokens} leaves no room for a prompt and a second turn")
    usual = {"max_new_tokens": max_tokens, "ignore_eos": True}
    requests = []
    for i in range(count):
        length = max(1, round(most ** dice.uniform(0.3, 1.0)))
        prompt = tuple(dice.randrange(model["vocab_size"]) for _ in range(length))
        noise = {"temperature": 0.8, "sampling_seed": i} if i % 2 else {"temperature": 0}
        requests.append(ProbeRequest(f"request {i}", prompt, usual | noise))
    return requests


class _DeterminismRun:
    """The requests in every company, one after another; a line of the table for each."""

    def __init__(self, http: httpx.AsyncClient, requests: Sequence[ProbeRequest], others: int) -> None:
        self._http = http
        self._cases = list(requests)
        pairs = ((i, requests[i % len(requests)]) for i in range(others))
        self._others = [  # of all lengths too, and with no beginning in common
            dataclasses.replace(one, name=f"other {i}", prompt=one.prompt[1 + i % 7 :] or (i,))
            for i, one in pairs
        ]
        self._answers = FirstAnswers()

    async def all(self) -> int:
        """Runs everything; gives the number of answers that differ."""
        print(f"{'company':34} {'answers':>7} {'differ':>7}")
        together = len(self._cases)
        plain = [dataclasses.replace(request, speculative=False) for request in self._cases]
        differing = await self._count_differing("alone", self._cases, 1)
        differing += await self._count_differing("alone, without drafts", plain, 1)
        turns = [self._turn(request) for request in self._cases]
        differing += await self._count_differing("second turns, alone", turns, 1)
        differing += await self._count_differing("all at once", self._cases, together)
        differing += await self._count_differing("among others", self._cases, together, self._others)
        differing += await self._count_differing(
            "among others, without drafts", plain, together, self._others
        )
        return differing + await self._count_differing(
            "second turns, among others", turns, together, self._others
        )

    def _turn(self, request: ProbeRequest) -> ProbeRequest:
        """A request that follows a request's answer, whose pages the server may still have."""
        _, said = self._answers.said[request.name]
        prompt = (*request.prompt, *said, *request.prompt[:TURN])
        return dataclasses.replace(request, name=f"{request.name}, second turn", prompt=prompt)

    async def _count_differing(
        self,
        company: str,
        requests: Sequence[ProbeRequest],
        at_once: int,
        others: Sequence[ProbeRequest] = (),
    ) -> int:
        room = asyncio.Semaphore(at_once + len(others))

        async def answer(request: ProbeRequest) -> tuple[str, list[int]]:
            async with room:
                return request.name, (await _ask(self._http, "/generate", request.body))["output_ids"]

        answers = dict(await asyncio.gather(*map(answer, _shuffled((*others, *requests)))))
        own = {request.name: answers[request.name] for request in requests}
        texts = self._answers.differing(company, own)
        print(f"{company:34} {len(requests):>7} {len(texts):>7}")
        for text in texts[:SHOWN]:
            print(f"  {text}")
        return len(texts)


def _shuffled(requests: Sequence[ProbeRequest]) -> list[ProbeRequest]:
    """The requests in a random order, always the same."""
    return random.Random(SEED).sample(requests, len(requests))


async def _ask(http: httpx.AsyncClient, path: str, body: dict[str, Any] | None = None) -> Any:
    """The JSON of an answer. Raises EyasError if the server refuses, does not answer, or is no Eyas."""
    try:
        reply = await http.request("GET" if body is None else "POST", path, json=body)
    except httpx.ConnectError as error:
        raise unreachable(str(http.base_url).rstrip("/"), error) from error
    except httpx.HTTPError as error:
        raise EyasError(f"{http.base_url} does not answer {path}: {error or type(error).__name__}") from error
    if reply.status_code != 200:
        raise EyasError(f"{path}: HTTP {reply.status_code}: {reply.text[:300]}")
    try:
        return reply.json()
    except ValueError as error:
        raise EyasError(f"{http.base_url} is no Eyas: {path} is not JSON") from error
