"""What a grammar costs a token on one GPU: the same batches with one and without, plain and with chains of 3.

    python -m tests.gpu.time_grammar --out FILE [--ways chain plain lookup] [--batches 1 32] [--waits]

An 8B's shape without weights. Drafts of an EAGLE-3 head are accepted by chance at 3.0 tokens a round,
whatever the grammar says, so the head drafts what every text may have: invented words. The grammar allows any
text, so that every round has masks for all of its nodes, and nothing is forced. `--waits`: also with requests
that take no step before their last one has landed. The way `lookup` has no head, drafts that are judged by
the model, and JSON whose names are forced: there tokens in a round are what differs. Every batch is answered
twice, the ways in turn, and the second time counts. FILE gets a line of JSON whenever something is known.
`--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from eyas.bench.shapes import SHAPES, SPECIALS, write_head, write_model
from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.grammars.notations import Grammar
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Sequence as EngineSequence
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.speculation.synthetic import resolve
from tests.gpu.lines import lines_of, say_all
from tests.gpu.steady import (
    Clocked,
    batch_line,
    clocked,
    engine_config,
    going_on,
    submit,
    warm,
)
from tests.unit.loopback import wait_all

CHAIN, PLAIN, LOOKUP = "chain", "plain", "lookup"
FREE, BOUND, WAITS = "free", "grammar", "grammar, waits"
ANY_TEXT = Grammar.regex(r"[ -~\n]*")  # without half characters, behind which no word may stand
OBJECT = {
    "type": "object",
    "properties": {
        "temperature": {"enum": ["centigrade", "fahrenheit"]},
        "description": {"type": "string", "maxLength": 8},
    },
    "required": ["temperature", "description"],
    "additionalProperties": False,
}
OBJECTS = Grammar.json_schema({"type": "array", "minItems": 40, "items": OBJECT})
STEPS, LENGTH = 3, 3.0
REACH = 1.02
WAIT_S = 120


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    device: str
    batches: Sequence[int]
    prompt: int
    answer: int
    kinds: Sequence[str]


def config_of(plan: Plan, way: str, folders: tuple[Path, Path]) -> EngineConfig:
    """The engine of a way; a graph for each batch that is measured."""
    options: dict[str, Any] = {"draft": None, "model": str(folders[0])}
    if way == CHAIN:
        rates = resolve(STEPS, (), LENGTH)
        options |= {
            "draft": str(folders[1]),
            "speculation": SpeculationConfig(STEPS, 1, STEPS + 1, synthetic_rates=rates),
        }
    if way == LOOKUP:
        options["speculation"] = SpeculationConfig(STEPS, 1, STEPS + 1, ngram=True)
    options |= {"chunk_tokens": 32} if plan.device == "cpu" else {"cuda_graph_bs": tuple(plan.batches)}
    most, rows = max(plan.batches), plan.prompt + plan.answer + 64
    config: EngineConfig = engine_config(
        plan.device, context_length=rows, max_running=most, num_pages=2 * (most * rows // 16 + 64), **options
    )
    return config


def drafting_words(cluster: Clocked) -> None:
    """The head drafts invented words alone, which every text may have."""
    drafter = cluster.workers["unified"].engine._loop.runner._executor.state.drafter
    if drafter is not None and drafter._proposer.head.token_map is not None:
        drafter._proposer.head.token_map.clamp_(min=SPECIALS)  # bytes come first


def waiting(kind: str) -> AbstractContextManager[Any]:
    """Requests of this kind take their steps one after the other, if that is what it says."""
    if kind != WAITS:
        return nullcontext()
    holds = GrammarManager.holds

    def waits(self: GrammarManager, seq: EngineSequence) -> bool:
        return holds(self, seq) or bool(seq.generation.request.params.grammar and seq.in_flight)

    return mock.patch.object(GrammarManager, "holds", waits)


def answered(
    cluster: Clocked, plan: Plan, grammar: Grammar | None, batch: int, seed: int
) -> dict[str, float]:
    """A batch of answers that begin together: its figures while all of them run."""
    dice = random.Random(seed)
    params = SamplingParams(temperature=0.0, max_tokens=plan.answer, ignore_eos=True, grammar=grammar)
    requests = [
        GenerationRequest(
            f"{seed} {i} {time.perf_counter()}", tuple(dice.choices(range(300, 760), k=plan.prompt)), params
        )
        for i in range(batch)
    ]
    wait_all(submit(cluster, requests), WAIT_S)
    line = batch_line(cluster, batch)
    return line | {"token_ms": round(1e3 * batch / line["tokens_per_s"], 4)}


def measured(cluster: Clocked, plan: Plan, way: str) -> Iterator[dict[str, Any]]:
    """Every batch of one engine."""
    drafting_words(cluster)
    for batch in plan.batches:
        for seed in range(2):
            for kind in plan.kinds:
                grammar = None if kind == FREE else OBJECTS if way == LOOKUP else ANY_TEXT
                with waiting(kind):
                    line = answered(cluster, plan, grammar, batch, seed)
                if seed:
                    yield {"way": way, "batch": batch, "kind": kind} | line


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per way and batch: milliseconds of a token and of a round, over those without a grammar."""
    for way, batch in dict.fromkeys((line["way"], line["batch"]) for line in lines):
        own = {line["kind"]: line for line in lines if (line["way"], line["batch"]) == (way, batch)}
        for kind, line in own.items():
            ratio = line["token_ms"] / own[FREE]["token_ms"]
            verdict = "" if kind != BOUND or way == LOOKUP else "  PASS" if ratio <= REACH else "  FAIL"
            yield (
                f"{way} bs{batch} {kind}: {line['token_ms']:.3f} ms a token, {line['round_ms']:.3f} a round "
                f"of {line['tokens_per_round']:.2f}, {ratio:.3f} of free{verdict}"
            )


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--ways", choices=[CHAIN, PLAIN, LOOKUP], nargs="+", default=[CHAIN])
    parser.add_argument("--waits", action="store_true", help="also requests that wait for their tokens")
    given = parser.parse_args()
    cuda = given.device == "cuda"
    kinds = (FREE, BOUND, WAITS) if given.waits else (FREE, BOUND)
    plan = Plan(given.device, given.batches, *((128, 320) if cuda else (8, 12)), kinds)
    with tempfile.TemporaryDirectory() as folder:
        folders = Path(folder, "model"), Path(folder, "head")
        shape = SHAPES["llama-3.1-8b" if cuda else "tiny"]
        write_model(shape, folders[0])
        write_head(shape, folders[1])
        configs = {way: config_of(plan, way, folders) for way in given.ways}
        warm(list(configs.values()))
        for way, config in configs.items():
            with going_on(way), clocked(config) as cluster:
                say_all(given.out, measured(cluster, plan, way))
    print(*report(lines_of(given.out)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
