"""What a head gains by its own acceptance, on one GPU: tokens per second with and without it.

    python -m tests.gpu.real_head --target DIR --draft DIR --prompts FILE --out FILE [--chains 3 5]

Plain decoding and chains answer the same questions, greedily and at temperature 1; nothing is synthetic. An
engine always has as many requests as a batch says, and what is timed are its steps. A line per way,
temperature and batch is on disk as soon as its engine ends. `--device cpu` tries the script out.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.bench.answering import AnswerLink, BatchesLink, BatchSteps, EnginePrompt
from eyas.common.config import SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.engine.loading.build import build_engine
from eyas.train.answers import engine_of
from eyas.train.conversations import ChatTokenizer, read_lines
from tests.gpu.lines import lines_of, say_all
from tests.gpu.steady import going_on

TEMPERATURES = (0.0, 1.0)
CONTEXT = 1024


@dataclass(frozen=True)
class Plan:
    """What is measured, and with how many questions for each place in a batch."""

    device: str
    target: Path
    draft: Path
    questions: Sequence[EnginePrompt]
    batches: Sequence[int]
    each: int

    def asked(self, batch: int) -> Sequence[EnginePrompt]:
        """Enough for a batch to be full for long."""
        return self.questions[: 8 + batch * self.each]


def measured(plan: Plan, steps: int) -> Iterator[dict[str, Any]]:
    """Every temperature and batch through one engine; steps 0: plain decoding. The first run warms up."""
    options: dict[str, Any] = {"max_running": max(plan.batches), "context_length": CONTEXT}
    if steps:
        options["speculation"] = SpeculationConfig(steps, 1, steps + 1)
    config = engine_of(plan.device, str(plan.target), str(plan.draft) if steps else None, **options)
    cases = [(temperature, BatchSteps(batch)) for temperature in TEMPERATURES for batch in plan.batches]
    runs = [(0.0, BatchSteps(plan.batches[0])), *cases]
    links = [
        AnswerLink(
            plan.asked(run.size),
            SamplingParams(temperature=temperature, seed=1),
            run.size,
            lambda answer: None,
            run.add,
        )
        for temperature, run in runs
    ]
    build_engine(config, BatchesLink(links)).run()
    for temperature, run in cases:
        yield {"chain": steps, "temperature": temperature, "batch": run.size} | run.figures()


def report(lines: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row per temperature and batch: every way and its speed-up."""
    found: dict[tuple[float, int], dict[int, dict[str, Any]]] = defaultdict(dict)
    for line in lines:
        found[line["temperature"], line["batch"]][line["chain"]] = line
    for (temperature, batch), ways in sorted(found.items()):
        plain = ways.get(0, {}).get("output_throughput", 0.0)
        cells = [
            f"{f'chain {steps}' if steps else 'plain'} {line['output_throughput']:.0f} tokens/s"
            + (f" x {line['output_throughput'] / plain:.2f}" if plain and steps else "")
            + f" ({line['median_step_ms']:.3f} ms, {line['accept_length']:.2f} a round)"
            for steps, line in sorted(ways.items())
        ]
        yield f"temperature {temperature:g}, bs{batch}: " + "; ".join(cells)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("target", "draft", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--chains", type=int, nargs="+", default=[3, 5], help="drafts of a round (3 5)")
    parser.add_argument("--longest", type=int, default=192, help="tokens of an answer (192)")
    parser.add_argument("--each", type=int, default=4, help="questions per place in a batch (4)")
    given = parser.parse_args()
    speech = ChatTokenizer(given.target)
    asked = [ids for line in read_lines(given.prompts, "prompts") if (ids := speech.question(line))]
    questions = [EnginePrompt(i, ids, given.longest) for i, ids in enumerate(asked)]
    plan = Plan(given.device, given.target, given.draft, questions, given.batches, given.each)
    for steps in (0, *given.chains):
        with going_on(f"chain {steps}" if steps else "plain"):
            say_all(given.out, measured(plan, steps))
    print(*report(lines_of(given.out)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
