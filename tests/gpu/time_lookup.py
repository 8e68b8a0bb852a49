"""Lookups against plain decoding on one GPU: tokens per second of texts that are copied, and of others.

    python -m tests.gpu.time_lookup --out FILE [--batches 1 8 32] [--seconds 100]

The model is a shape without weights, so its verdicts are replayed: whatever it computes, the target says the
next token of a recorded text. These figures are synthetic, and marked so. `copies`: edits of this project's
own history, a file before as the prompt and after as the answer; `prose`: the beginning of a page as the
prompt, what follows as the answer; `rewrites`: the file after as the answer to a prompt of prose, where the
one before was answered to another request. Every answer must be the recorded one, drafts or not. Each batch
is answered twice, first with other texts of its kind, and the second time counts. Lines are on disk as soon
as they are known; `--report` reads them again. `--device cpu` tries the script out with a tiny shape.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tokenizers import Tokenizer

from eyas.common.config import NANO, EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from eyas.engine.device.program import StepProgram
from tests.gpu.lines import lines_of, say_all
from tests.gpu.steady import (
    TINY,
    Clocked,
    batch_line,
    clocked,
    engine_config,
    going_on,
    shape_folders,
    submit,
    warm,
)
from tests.unit.loopback import wait_all

HERE = Path(__file__).parent
PAGES = ("security", "planning", "step-loop", "tools", "limits", "console", "benchmarks", "tracing")
BATCHES, STEPS = (1, 8, 32), 7
PLAIN, FIXED, ADAPTIVE, SUFFIX = "plain", "ngram", "ngram, adaptive", "suffix, adaptive"
WAYS = (PLAIN, ADAPTIVE, SUFFIX, FIXED)
COPIES, PROSE, REWRITES = "copies", "prose", "rewrites"
LEAST = {(COPIES, 1): 1.5}  # of what adapts over plain decoding; elsewhere:
NEVER_LESS = {ADAPTIVE: 0.98, SUFFIX: 0.99}
WAIT_S = 120


@dataclass(frozen=True)
class Text:
    """Ids of a prompt, of its recorded answer, and of one that another request had before."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    before: tuple[int, ...]


@dataclass(frozen=True)
class Sizes:
    """Of a run: the shape, the longest prompt, and the answers' length."""

    shape: str
    prompt: int
    answer: int


SIZES = {"cuda": Sizes("llama-3.1-8b", 1792, 384), "cpu": Sizes(TINY, 96, 12)}


def texts(sizes: Sizes) -> dict[str, list[Text]]:
    """All sets, in ids from 0 up without gaps."""
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    edits = json.loads((HERE / "recorded_edits.json").read_text())
    pages = [ids((HERE.parents[1] / "docs" / f"{page}.md").read_text()) for page in PAGES]
    half = min(sizes.prompt, 512)
    files = [(ids(edit["before"]), ids(edit["after"])[: sizes.answer]) for edit in edits]
    prose = [(page[:half], page[half : half + sizes.answer]) for page in pages]
    raw = {
        COPIES: _behind([(before[: sizes.prompt], after) for before, after in files]),
        PROSE: _behind(prose),
        REWRITES: [
            (prose[i % len(prose)][0], after, before[: sizes.answer])
            for i, (before, after) in enumerate(files)
        ],
    }
    used = sorted({id for pairs in raw.values() for pair in pairs for part in pair for id in part})
    place = {id: i for i, id in enumerate(used)}
    return {
        name: [Text(*(tuple(place[id] for id in part) for part in pair)) for pair in pairs]
        for name, pairs in raw.items()
    }


def _behind(pairs: list[tuple[list[int], list[int]]]) -> list[tuple[list[int], list[int], list[int]]]:
    """Prompts and answers; the answer before each is that of the pair before it."""
    return [(prompt, answer, pairs[i - 1][1]) for i, (prompt, answer) in enumerate(pairs)]


class Replay:
    """What the target says in place of its own choice: of each sequence the next token of its text.

    A sequence's ids lie in a range of their own, `span` wide. So its newest token says whose text goes on,
    and that token's position where; a row below a wrong draft says something that is not heard.
    """

    def __init__(self, sequences: int, span: int, context: int, device: str) -> None:
        self.span = span
        self._next = torch.zeros(sequences, context, dtype=torch.int32, device=device)

    def requests(self, name: str, chosen: Sequence[Text]) -> list[GenerationRequest]:
        """A request per text, to be answered as recorded. Raises ValueError for ids beyond the span."""
        found, told = [], self._next.new_zeros(self._next.shape, device="cpu")
        for i, text in enumerate(chosen):
            if max(text.prompt + text.answer + text.before) >= self.span:
                raise ValueError(f"{name}: more than {self.span} ids; take fewer sequences")
            prompt, answer = ([id + i * self.span for id in part] for part in (text.prompt, text.answer))
            whole = torch.tensor([*prompt, *answer], dtype=torch.int32)
            told[i, : len(whole)] = whole
            params = SamplingParams(temperature=0.0, max_tokens=len(answer), ignore_eos=True)
            found.append(GenerationRequest(f"{name} {i}", tuple(prompt), params))
        self._next.copy_(told)
        return found

    def choose(self, program: StepProgram) -> torch.Tensor:
        """In place of `StepProgram.choose`, which runs all the same: its time belongs to the step."""
        chosen = _choose(program)
        shape, part = program._shape, program._part
        if not shape.sampled:
            return chosen
        rows = torch.arange(shape.round_rows, device=chosen.device)
        if shape.ends:
            rows = torch.cat((rows, shape.round_rows + part["end_rows"].clamp(max=shape.chunk - 1)))
        whose = (part["tokens"][rows] // self.span).clamp(max=self._next.shape[0] - 1)
        return self._next[whose, (part["positions"][rows] + 1).clamp(max=self._next.shape[1] - 1)]


_choose = StepProgram.choose


def answered(cluster: Clocked, replay: Replay, name: str, chosen: Sequence[Text], batch: int) -> None:
    """A batch of answers that begin together. Raises ValueError for another answer than was recorded."""
    requests = replay.requests(name, [chosen[i % len(chosen)] for i in range(batch)])
    results = submit(cluster, requests)
    wait_all(results, WAIT_S)
    for i, (request, result) in enumerate(zip(requests, results, strict=True)):
        said, wanted = [id - i * replay.span for id in result.tokens[0]], chosen[i % len(chosen)].answer
        if said != list(wanted):
            raise ValueError(f"{request.id}: {said[:20]}.. was said, not {wanted[:20]}")


@dataclass(frozen=True)
class Plan:
    """What a run measures, and until when, by `time.monotonic`."""

    device: str
    sizes: Sizes
    batches: Sequence[int]
    model: Path
    end: float
    sets: Sequence[str]

    @property
    def rows(self) -> int:
        """Of the longest text, and some."""
        return self.sizes.prompt + self.sizes.answer + 64


def config_of(plan: Plan, way: str) -> EngineConfig:
    """The engine of a way; a graph for each batch that is measured."""
    most = max(plan.batches)
    options: dict[str, Any] = {"draft": None}
    if plan.device == "cpu":
        options |= {"chunk_tokens": 32}
    else:
        options |= {"cuda_graph_bs": tuple(plan.batches)}
    if way != PLAIN:
        spec = SpeculationConfig(STEPS, 1, STEPS + 1, ngram=True, suffix=way == SUFFIX)
        options["speculation"] = replace(spec, adaptive=way in NEVER_LESS)
    return engine_config(
        plan.device, model=str(plan.model), context_length=plan.rows, max_running=most,
        num_pages=2 * (most * plan.rows // 16 + 64), **options,
    )  # fmt: skip


def measured(plan: Plan, way: str) -> Iterator[dict[str, Any]]:
    """Every set and batch through one engine."""
    most, found, chosen = max(plan.batches), texts(plan.sizes), config_of(plan, way)
    config = json.loads((plan.model / "config.json").read_text())
    replay = Replay(most, config["vocab_size"] // most, plan.rows, plan.device)
    with (
        mock.patch.object(StepProgram, "choose", lambda program: replay.choose(program)),
        clocked(chosen) as cluster,
    ):
        for batch in plan.batches:
            for name, some in ((name, found[name]) for name in plan.sets):
                if time.monotonic() > plan.end:
                    print(f"no time is left for {way}, {name}, batch {batch}", flush=True)
                    continue
                earlier = [replace(text, answer=text.before) for text in some]
                answered(cluster, replay, f"learn {name} {batch}", earlier, batch)
                answered(cluster, replay, f"count {name} {batch}", some, batch)
                line = {"synthetic": True, "way": way, "set": name, "batch": batch}
                yield line | batch_line(cluster, batch)


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per set and batch: every way, and the ratios of those that adapt to plain decoding."""
    found: dict[tuple[str, int], dict[str, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        found[line["set"], line["batch"]][line["way"]] = line
    yield "synthetic: verdicts are replayed from recorded texts"
    for (name, batch), ways in sorted(found.items()):
        plain = ways.get(PLAIN, {}).get("tokens_per_s", 0.0)
        cells = [
            f"{way} {line['tokens_per_s']:.0f} tokens/s ({line['round_ms']:.2f} ms, "
            f"{line['tokens_per_round']:.2f} a round)"
            for way, line in ways.items()
        ]
        ratios = {way: line["tokens_per_s"] / plain for way, line in ways.items() if plain}
        verdicts = [
            f"{way} {ratios[way]:.3f} of {least} {'PASS' if ratios[way] >= least else 'FAIL'}"
            for way in NEVER_LESS
            if way in ratios
            for least in (LEAST.get((name, batch), NEVER_LESS[way]),)
        ]
        verdict = ", ".join(verdicts) or "not measured"
        fixed = f" (always {STEPS} deep: {ratios[FIXED]:.3f})" if FIXED in ratios else ""
        yield f"{name} bs{batch}: {verdict}{fixed}; " + "; ".join(cells)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--sets", choices=[COPIES, PROSE, REWRITES], nargs="+", default=[])
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--seconds", type=float, default=100.0, help="nothing new begins after (100)")
    parser.add_argument("--report", action="store_true", help="only print what FILE has")
    given = parser.parse_args()
    if not given.report:
        end = time.monotonic() + given.seconds - 10
        with tempfile.TemporaryDirectory() as folder:
            model, _ = shape_folders(SIZES[given.device].shape, Path(folder))
            sets = tuple(given.sets) or (COPIES, PROSE, REWRITES)
            plan = Plan(given.device, SIZES[given.device], given.batches, model, end, sets)
            warm([config_of(plan, way) for way in given.ways])
            for way in given.ways:
                with going_on(way):
                    say_all(given.out, measured(plan, way))
    print(*report(lines_of(given.out)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
