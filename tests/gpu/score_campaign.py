"""Have sampled tokens the log-probabilities that a scoring pass of the same weights gives them, to the bit?

    python -m tests.gpu.score_campaign --out FILE [--drafts "chain 3"] [--tokens 100000] [--seconds 40]
        [--arithmetic exact] [--kind dense] [--adapters 0]
        [--device cuda --shape llama-3.1-8b --folder /tmp/eyas-score]

One engine samples: seeded answers with log-probabilities to prompts of many lengths, up to 64 at once, with
temperatures, top-p and penalties, plain or with an adapter, half of them with drafts that are accepted. Every
text is scored afterwards as a prompt, in chunks, beside others, and often with its prefix in the cache. FILE
gets a line of JSON per round, with the first differences; the last has the sums. `--arithmetic fast` shows
that it can fail.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from eyas.bench.output import append_line
from eyas.common.page_names import salt_of
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.loading.startup import EngineStart
from tests.gpu.exact_rig import DRAFTS, KINDS, Bed, Engine, Way
from tests.gpu.time_lora import write_adapters
from tests.unit.loopback import Result

RUNNING, PAGES = 64, 1600
GRAPHS = (8, RUNNING)  # few: each has kernels of its own
LENGTHS = (8, 24, 65, 130, 300, 700)
SHOWN = 5  # differences that are written out


@dataclass
class Sums:
    """Of all rounds."""

    tokens: int = 0
    differing: int = 0
    accepted: int = 0
    cached: int = 0
    preempted: int = 0
    routed: int = 0  # texts whose experts were told
    routed_otherwise: int = 0  # than when the same text was scored before


def main() -> int:
    """The command line; 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="for JSON lines")
    parser.add_argument("--drafts", default="chain 3", choices=list(DRAFTS))
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=40.0, help="for asking, at most")
    parser.add_argument("--arithmetic", default="exact", choices=["exact", "fast"])
    parser.add_argument("--kind", default="dense", choices=list(KINDS))
    parser.add_argument("--adapters", type=int, default=0, metavar="N", help="that answers take turns with")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=0, help="of the model, if not all")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/eyas-score"))
    args = parser.parse_args()
    bed = Bed(args.device, args.shape, args.folder / args.kind, args.kind, args.layers)
    options: dict[str, Any] = {} if args.device == "cpu" else {"cuda_graph_bs": GRAPHS}
    options |= {"max_loras": args.adapters} if args.adapters else {}
    running = 8 if args.device == "cpu" else RUNNING
    way = Way(args.arithmetic, args.drafts)
    config = bed.config(way, num_pages=PAGES, max_running=running, max_waiting=1024, **options)
    began = time.monotonic()
    EngineStart.of(config).wait_for_kernels()
    engine = Engine(config)
    append_line(args.out, {"ready_s": round(time.monotonic() - began, 1), "way": str(way), "kind": args.kind})
    adapters = ["", *loaded(engine, Path(config.model), args.adapters)]
    sums, ends_at = Sums(), time.monotonic() + args.seconds
    for number in itertools.count():
        if sums.tokens >= args.tokens or time.monotonic() > ends_at:
            break
        requests = asked(bed, 6 if args.device == "cpu" else 128, number, adapters)
        play(engine, requests, args, number, sums, ends_at)
    last = {"verdict": str(way), "kind": args.kind, **sums.__dict__, "s": round(time.monotonic() - began, 1)}
    append_line(args.out, last)
    print(last, flush=True)
    sys.stdout.flush()
    os._exit(int(sums.differing > 0 or not sums.tokens))  # a device that hangs keeps no time from the others


def loaded(engine: Engine, model: Path, count: int) -> list[str]:
    """The ids of as many adapters, which the engine has loaded."""
    if not count:
        return []
    with tempfile.TemporaryDirectory() as folder:
        folders = write_adapters(Path(folder) / "adapters", model, 16, count)
        return [engine.load_adapter(each).id for each in folders]


def play(
    engine: Engine,
    requests: list[GenerationRequest],
    args: argparse.Namespace,
    number: int,
    sums: Sums,
    ends_at: float,
) -> None:
    """One round: prompts are answered, the same again with drafts that are accepted, and all is scored."""
    most = 8 if args.device == "cpu" else RUNNING + 16
    answers = list(engine.flow(requests, most, ends_at))
    again = [with_drafts(*answer) for answer in answers] if args.drafts != "plain" else []
    answers += engine.flow(again, most, ends_at)
    texts = [scoring(*answer, args.kind == "experts") for answer in answers]
    random.Random(number).shuffle(texts)
    said = {key_of(request): sampled(result) for request, result in answers}
    found: list[dict[str, Any]] = []
    routes: dict[str, bytes] = {}  # texts are scored twice, in different company
    compared = differing = cached = 0
    for request, result in engine.flow(texts, most, ends_at + 30.0):
        tokens, logprobs = said[request.id]
        scores = [
            row.logprob for entry in result.entries if entry.prompt is not None for row in entry.prompt.rows()
        ]
        places = [i for i, pair in enumerate(zip(scores, logprobs, strict=True)) if pair[0] != pair[1]]
        compared, differing = compared + len(logprobs), differing + len(places)
        for entry in result.entries:
            if entry.prompt is not None and entry.prompt.experts:
                told = routes.setdefault(request.id.removesuffix("+"), entry.prompt.experts)
                sums.routed += 1
                sums.routed_otherwise += told != entry.prompt.experts
        cached += sum(entry.timings.cached_tokens for entry in result.entries if entry.timings is not None)
        found += [
            {"text": request.id, "place": i, "of": len(tokens), "scored": scores[i], "sampled": logprobs[i]}
            for i in places[:1]
        ]
    accepted = sum(entry.accepted for _, result in answers for entry in result.entries)
    sums.tokens, sums.differing = sums.tokens + compared, sums.differing + differing
    sums.accepted, sums.cached = sums.accepted + accepted, sums.cached + cached
    sums.preempted = engine.preemptions
    line = {"round": number, "tokens": compared, "differing": differing, "first": found[:SHOWN]}
    append_line(args.out, line | {"accepted": accepted, "cached": cached, "preempted": engine.preemptions})


def asked(bed: Bed, count: int, seed: int, adapters: Sequence[str]) -> list[GenerationRequest]:
    """Seeded answers with an adapter each, or without ("") one; each third has the prompt of the one before
    it, so that prefixes are cached.
    """
    dice, made = random.Random(seed), []
    longest = min(200, bed.context // 4)
    for i in range(count):
        if i % 3 != 1:
            adapter = dice.choice(adapters)
            length = min(dice.choice(LENGTHS) + dice.randrange(9), bed.context // 4)
            prompt = tuple(dice.randrange(10, bed.vocabulary - 300) for _ in range(length))
        fields: dict[str, Any] = {
            "temperature": dice.choice((0.0, 0.7, 1.0)),
            "seed": i,
            "top_p": dice.choice((1.0, 0.9)),
        }
        if dice.random() < 0.5:
            fields |= {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": -0.3}
        most = dice.randint(longest // 4, longest)
        params = SamplingParams(max_tokens=most, ignore_eos=True, logprobs=0, **fields)
        salt = salt_of("", adapter)
        made.append(GenerationRequest(f"{seed}.{i}", prompt, params, adapter=adapter, salt=salt))
    return made


def with_drafts(request: GenerationRequest, result: Result) -> GenerationRequest:
    """The same again, and what was said is drafted."""
    return msgspec.structs.replace(request, id=f"{request.id}+", predicted=tuple(result.tokens[0]))


def key_of(request: GenerationRequest) -> str:
    """The name of the text that scores it."""
    return f"text {request.id}"


def sampled(result: Result) -> tuple[list[int], list[float]]:
    """The tokens of an answer, and their log-probabilities as they were sampled."""
    logprobs = [one.logprob for entry in result.entries for one in entry.logprobs]
    assert len(logprobs) == len(result.tokens[0])
    return result.tokens[0], logprobs


def scoring(request: GenerationRequest, result: Result, experts: bool) -> GenerationRequest:
    """Asks for the scores of an answer's tokens, given its prompt; perhaps for its rows' experts."""
    text = (*request.prompt_ids, *result.tokens[0])
    start = len(request.prompt_ids) - 1
    params = SamplingParams(
        max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start, prompt_experts=experts
    )
    return GenerationRequest(key_of(request), text, params, adapter=request.adapter, salt=request.salt)


if __name__ == "__main__":
    main()
