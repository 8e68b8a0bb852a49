"""Hostile but accepted requests beside ordinary streams: `python -m tests.e2e.hostile`.

16 ordinary streams run alone, then beside 30 tame requests, then beside 30 that cost the server all that a
caller may make them cost: grammars, patterns, lookups, many choices, long prompts. The streams must give the
same texts each time. No stream may take more than twice its time alone, or where a machine has so few cores
that tame company alone slows it, more than twice its time beside that. A hostile request may be refused or
ended by a status of its own, which is no 5xx. The exit code is 1 if anything is not so.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from eyas.common.config import NANO, NANO_HEAD
from tests.e2e.served import Folders, serving

ORDINARY, COMPANY = 16, 30
TOKENS = 120  # of an ordinary stream
LATER = 2.0  # times
ANSWER_S = 600.0

Body = dict[str, Any]


@dataclass(frozen=True)
class Heard:
    """An ordinary stream: its text, and the seconds until its end."""

    text: str
    seconds: float


def ordinary(number: int) -> Body:
    text = f"{number}: Once upon a time there was a " + ("fox", "king", "ship", "tree")[number % 4]
    warm = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0.0}
    return {"prompt": text, "max_tokens": TOKENS, "ignore_eos": True, "stream": True, **warm}


def tame(number: int) -> Body:
    return {**ordinary(100 + number), "stream": False}


def hostile(number: int, rng: random.Random) -> Body:
    """One of each kind in turn."""
    words = [rng.randrange(3, 4096) for _ in range(1900)]
    kinds: Sequence[Body] = (
        {"guided_regex": "[a-z ]{120}(([a-z ]*)*[a-z ]*)*x"},
        {"guided_regex": "((a|b|c|d|e)*[a-e]{1,40}){2,30}z"},
        {"guided_json": {"type": "array", "items": {"$ref": "#/$defs/n"}, "$defs": {"n": NESTED}}},
        {"guided_json": {"type": "string", "pattern": "^(([a-f]+[0-9]?)*-){3,20}[a-f]{8,64}$"}},
        {"guided_grammar": 'root ::= a | root a\na ::= "x" | "(" root ")" | "x" a | a "x"'},
        {"n": 16, "temperature": 1.0},
        {"prompt": words, "logprobs": 5},
        {"prompt": words, "n": 4, "temperature": 1.5},
        {"prompt": [7, 8] * 950},
        {"logit_bias": {str(i): 0.5 for i in range(3, 303)}, "frequency_penalty": 1.0, "logprobs": 5},
    )
    plain = {"prompt": f"{number} the", "max_tokens": 100, "temperature": 0.8, "seed": number}
    return {**plain, "ignore_eos": True, **kinds[number % len(kinds)]}


NESTED = {
    "type": "object",
    "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"type": "string", "maxLength": 200}},
    "required": ["b"],
    "additionalProperties": False,
}


class Campaign:
    """Three rounds against the server at `url`. Every `problem` is a sentence."""

    def __init__(self, http: httpx.AsyncClient, company: int, seed: int) -> None:
        self._http = http
        self._company = company
        self._rng = random.Random(f"hostile/{seed}")
        self.statuses: Counter[str] = Counter()
        self.problems: list[str] = []

    async def round(self, bodies: Sequence[Body]) -> list[Heard]:
        """The ordinary streams beside `bodies`, which are given up when the streams have ended."""
        beside = [asyncio.create_task(self._ask(body)) for body in bodies]
        await asyncio.sleep(1.0 if bodies else 0.0)  # they come first
        heard = await asyncio.gather(*(self._stream(ordinary(i)) for i in range(ORDINARY)))
        for task in beside:
            task.cancel()
        for ended in await asyncio.gather(*beside, return_exceptions=True):
            if isinstance(ended, Exception):
                self.problems.append(f"a companion ended with {ended!r}")
        return heard

    async def run(self) -> dict[str, list[Heard]]:
        """By round."""
        await self.round([])  # what is done once is done
        tame_ones = [tame(i) for i in range(self._company)]
        hostile_ones = [hostile(i, self._rng) for i in range(self._company)]
        return {
            "alone": await self.round([]),
            f"beside {self._company} tame": await self.round(tame_ones),
            f"beside {self._company} hostile": await self.round(hostile_ones),
        }

    async def _ask(self, body: Body) -> None:
        reply = await self._http.post("/v1/completions", json={"model": "eyas-nano", **body})
        self.statuses[str(reply.status_code)] += 1
        if reply.status_code >= 500:
            self.problems.append(f"a companion got {reply.status_code}: {reply.text[:200]}")

    async def _stream(self, body: Body) -> Heard:
        began, text = time.monotonic(), ""
        asked = {"model": "eyas-nano", **body}
        async with self._http.stream("POST", "/v1/completions", json=asked) as reply:
            async for line in reply.aiter_lines():
                said = line.removeprefix("data: ")
                if said in ("", "[DONE]"):
                    continue
                event = json.loads(said)
                if "choices" not in event:
                    self.problems.append(f"an ordinary stream ended with {said[:200]}")
                else:
                    text += event["choices"][0]["text"]
        return Heard(text, time.monotonic() - began)


def judge(rounds: dict[str, list[Heard]]) -> list[str]:
    """What is not as it must be."""
    alone, beside_tame, beside_hostile = rounds.values()
    problems = []
    for name, heard in list(rounds.items())[1:]:
        changed = sum(one.text != other.text for one, other in zip(alone, heard, strict=True))
        if changed:
            problems.append(f"{changed} streams changed {name}")
    for i, (one, some, late) in enumerate(zip(alone, beside_tame, beside_hostile, strict=True)):
        bound = LATER * max(one.seconds, some.seconds)
        if late.seconds > bound:
            problems.append(f"stream {i} took {late.seconds:.1f} s, more than {bound:.1f} s")
    return problems


def table(rounds: dict[str, list[Heard]]) -> Table:
    made = Table("streams", "median s", "longest s", "longest, times alone", title="Ordinary streams")
    alone = next(iter(rounds.values()))
    for name, heard in rounds.items():
        seconds = sorted(one.seconds for one in heard)
        times = max(one.seconds / first.seconds for one, first in zip(heard, alone, strict=True))
        made.add_row(name, f"{seconds[len(seconds) // 2]:.1f}", f"{seconds[-1]:.1f}", f"{times:.2f}")
    return made


async def _run(url: str, company: int, seed: int) -> tuple[Campaign, dict[str, list[Heard]]]:
    limits = httpx.Limits(max_connections=ORDINARY + company)
    async with httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits, trust_env=False) as http:
        campaign = Campaign(http, company, seed)
        return campaign, await campaign.run()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.e2e.hostile", description="Hostile company.")
    parser.add_argument("--company", type=int, default=COMPANY, help="requests beside (default: %(default)d)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts (default: %(default)d)")
    given, flags = parser.parse_known_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    with serving(Folders(str(NANO), str(NANO_HEAD)), *flags) as served:
        campaign, rounds = asyncio.run(_run(served.url, given.company, given.seed))
        problems = [*campaign.problems, *judge(rounds)]
        problems += [line for line in served.lines if "not serving: its engine" in line]
    console.print(table(rounds))
    console.print(f"hostile and tame requests that ended: {dict(campaign.statuses)}", highlight=False)
    for problem in problems:
        console.print(f"[red]{problem}", highlight=False)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
