"""The long comparison: whatever way requests are answered, every token is the same.

The reference is an engine without a drafter that answers one request at a time. Every variant answers the
same requests another way, and every difference is told. Variants that are broken on purpose must differ.
`make lossless` runs all of it; `test_lossless.py` a part.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from eyas.common.config import NANO, NANO_EAGLE, NANO_MTP, EngineConfig, ServeConfig, SpeculationConfig
from eyas.common.errors import EyasError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from gateway.text.tokenizer import Tokenizer
from tests.e2e import lossless_faults as faults
from tests.e2e.lossless_drafter import RandomDrafter
from tests.e2e.lossless_ways import Answers, InProcess, Services, Task, Tokens, Way
from tests.unit.loopback import split_configs
from tools.nano.heldout import heldout_prompts

PROMPTS = 200
SEED = 20
MAX_TOKENS = 64
VOCAB = 4096
TOGETHER = 32

Requests = tuple[GenerationRequest, ...]

PLAIN = EngineConfig(draft=None, worker="unified", num_pages=512)
CHAIN = EngineConfig(worker="unified", num_pages=512)
TREE = replace(CHAIN, speculation=SpeculationConfig(steps=4, topk=4, draft_tokens=12))
SHORT_TREE = replace(CHAIN, speculation=SpeculationConfig(steps=3, topk=4, draft_tokens=12))
NGRAM = replace(PLAIN, speculation=SpeculationConfig(ngram=True))
RECALLED = replace(PLAIN, speculation=SpeculationConfig(ngram=True, suffix=True))
BOTH = replace(SHORT_TREE, speculation=replace(SHORT_TREE.speculation, ngram=True))
# A decode engine whose drafter is out of sight: what stands in that place is the variant's to say.
ADVISED = replace(SHORT_TREE, roles=(Role.DECODE,))


@dataclass(frozen=True)
class Variant:
    """`quick`: part of `make test`. `fault`: breaks the engines, so that the answers must differ; of a
    `harmless` one they must not. `resumes`: so many sequences go on from cached states, or more.
    """

    name: str
    way: Way
    quick: bool = True
    speculates: bool = True
    preempts: bool = False
    fault: faults.Fault | None = None
    harmless: bool = False
    resumes: int = 0


@dataclass(frozen=True)
class Finding:
    """What one variant did. `problem` is empty if it did what it must."""

    variant: Variant
    answers: Answers
    differing: list[str]  # one line a request
    seconds: float
    failure: str = ""  # why there is no answer to some request

    @property
    def problem(self) -> str:
        variant, answers = self.variant, self.answers
        if self.failure:
            return self.failure
        if variant.fault is not None and not variant.harmless:
            return "" if self.differing else "was not noticed"
        if self.differing:
            return f"differs: {self.differing[0]}"
        if variant.speculates and not answers.accepted:
            return "no draft was ever accepted"
        if variant.preempts and not answers.preemptions:
            return "nothing was preempted"
        if answers.resumed < variant.resumes:
            return f"{answers.resumed} sequences resumed from a state, not {variant.resumes}"
        return ""


def few_pages(config: EngineConfig) -> EngineConfig:
    """Far too few pages for all requests at once, and prompts in small chunks."""
    return replace(config, num_pages=26, chunk_tokens=48)


REFERENCE = Variant("plain, alone: the reference", InProcess((PLAIN,), 1), speculates=False)
VARIANTS = [
    Variant("plain, together", InProcess((PLAIN,), TOGETHER), speculates=False, quick=False),
    Variant("unified chain, alone", InProcess((CHAIN,), 1), quick=False),
    Variant("unified chain, together", InProcess((CHAIN,), TOGETHER), quick=False),
    Variant("unified tree, together", InProcess((TREE,), TOGETHER), quick=False),
    Variant("split chain, together", InProcess(split_configs(CHAIN), TOGETHER), quick=False),
    Variant("split tree, together", InProcess(split_configs(SHORT_TREE), TOGETHER), quick=False),
    Variant(
        "random drafts",
        InProcess((ADVISED,), TOGETHER, lambda _: RandomDrafter(VOCAB, {})),
        speculates=False,  # whether nonsense is ever accepted is luck
        quick=False,
    ),
    Variant(
        "drafts around the answer",
        InProcess((ADVISED,), TOGETHER, lambda e: RandomDrafter(VOCAB, e)),
        quick=False,
    ),
    Variant(
        "unified tree, features a row late",
        InProcess((TREE,), TOGETHER),
        quick=False,
        fault=faults.stale_features,
        harmless=True,
    ),
    Variant(
        "EAGLE-2 chain, together", InProcess((replace(CHAIN, draft=str(NANO_EAGLE)),), TOGETHER), quick=False
    ),
    Variant("MTP tree, split", InProcess(split_configs(replace(SHORT_TREE, draft=str(NANO_MTP))), TOGETHER)),
    Variant("looked up, together", InProcess((NGRAM,), TOGETHER), quick=False),
    Variant("looked up, split", InProcess(split_configs(NGRAM)[:2], TOGETHER), quick=False),
    Variant("looked up beside a tree", InProcess((BOTH,), TOGETHER), quick=False),
    Variant("recalled, few at once", InProcess((RECALLED,), 4), quick=False),
    Variant("foretold, chain", InProcess((CHAIN,), TOGETHER, foretold=True), quick=False),
    Variant("foretold, looked up", InProcess((NGRAM,), TOGETHER, foretold=True), quick=False),
    Variant("foretold, split tree", InProcess(split_configs(BOTH), TOGETHER, foretold=True), quick=False),
    Variant("few pages, looked up", InProcess((few_pages(NGRAM),), TOGETHER), preempts=True, quick=False),
    Variant("services, split, looked up", Services(ServeConfig(engine=NGRAM), TOGETHER), quick=False),
    Variant("few pages, chain", InProcess((few_pages(CHAIN),), TOGETHER), preempts=True, quick=False),
    Variant("few pages, tree", InProcess((few_pages(TREE),), TOGETHER), preempts=True, quick=False),
    Variant(
        "few pages, split chain",
        InProcess(split_configs(few_pages(CHAIN)), TOGETHER),
        preempts=True,
        quick=False,
    ),
    Variant("services, split chain", Services(ServeConfig(layout="split"), TOGETHER), quick=False),
    Variant(
        "services, two of each, split tree",
        Services(ServeConfig(engine=SHORT_TREE, prefill=2, decode=2, draft_workers=2), TOGETHER),
        quick=False,
    ),
    Variant("services, auto chain", Services(ServeConfig(layout="auto", workers=2), TOGETHER), quick=False),
    Variant("services, unified chain", Services(ServeConfig(layout="unified"), TOGETHER), quick=False),
]
BROKEN = [
    Variant(
        "accepts what was looked up wrongly",
        InProcess((NGRAM,), TOGETHER, foretold=True),
        quick=False,
        fault=faults.accepts_a_wrong_child,
    ),
    Variant("accepts a wrong child", InProcess((CHAIN,), TOGETHER), fault=faults.accepts_a_wrong_child),
    Variant("noise by row", InProcess((CHAIN,), TOGETHER), quick=False, fault=faults.noise_by_row),
    Variant(  # a head seldom drafts what penalties forbid; an answer that is foretold is all drafts
        "penalties without ancestors",
        InProcess((CHAIN,), TOGETHER, foretold=True),
        quick=False,
        fault=faults.penalties_without_ancestors,
    ),
    Variant("rows stay", InProcess((TREE,), TOGETHER), quick=False, fault=faults.rows_stay),
]


def make_requests(prompts: int, seed: int) -> Requests:
    """Every held-out prompt under three parameter sets, every fourth under one more, in a random order."""
    tokenizer, rng = Tokenizer.load(NANO), random.Random(seed)
    made = []
    for i, chat in enumerate(heldout_prompts(prompts, seed)):
        ids = asyncio.run(tokenizer.encode_chat(chat))
        for name, params in _parameter_sets(rng, harsh=i % 4 == 0).items():
            made.append(GenerationRequest(f"{i}/{name}", ids, params))
    rng.shuffle(made)
    return tuple(made)


def _parameter_sets(rng: random.Random, *, harsh: bool) -> dict[str, SamplingParams]:
    """Gentle penalties seldom decide a token inside one draft; harsh ones do."""
    plain = SamplingParams(max_tokens=MAX_TOKENS, seed=rng.getrandbits(64))
    change = msgspec.structs.replace
    sets = {
        "greedy": change(plain, temperature=0.0),
        "seeded": plain,  # temperature 1
        "penalties": change(
            plain,
            top_p=0.95,
            repetition_penalty=1.1,
            presence_penalty=0.4,
            frequency_penalty=0.2,
            logit_bias={rng.randrange(VOCAB): rng.choice((-100.0, 2.0, 6.0)) for _ in range(8)},
            min_tokens=24,
        ),
    }
    if harsh:
        weights = {"repetition_penalty": 1.1, "presence_penalty": 2.0, "frequency_penalty": 2.0}
        wanted = {rng.randrange(VOCAB): 60.0 for _ in range(4)}  # which take turns: penalties say whose it is
        sets["harsh"] = change(plain, temperature=0.0, logit_bias=wanted, **weights)
    return sets


def differences(expected: Tokens, found: Tokens) -> list[str]:
    """One line for each request whose answer is not the expected one: where the two part."""
    lines = []
    for name in sorted(expected.keys() | found.keys()):
        a, b = expected.get(name, ()), found.get(name, ())
        if a != b:
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
            lines.append(f"{name} from token {at}: {list(a[at : at + 3])} became {list(b[at : at + 3])}")
    return lines


def run(variant: Variant, requests: Requests, expected: Tokens | None, done: Callable[[], None]) -> Finding:
    """`expected` None: the variant is the reference itself."""
    known = expected or {}
    answers, failure = Answers({}, 0, 0), ""
    began = time.monotonic()
    with (variant.fault or nullcontext)():
        try:
            answers = variant.way.serve(Task(requests, known, done))
        except (EyasError, AssertionError) as error:
            failure = str(error) or type(error).__name__
    seconds = time.monotonic() - began
    asked = {r.id: known[r.id] for r in requests if r.id in known}
    return Finding(variant, answers, differences(asked, answers.tokens) if known else [], seconds, failure)


# --- the command -----------------------------------------------------------------------------------------


def campaign(
    requests: Requests, console: Console, variants: Sequence[Variant], first: Variant
) -> list[Finding]:
    """The reference, and every variant."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def measured(variant: Variant, expected: Tokens | None = None) -> Finding:
            bar = progress.add_task(variant.name, total=len(requests))
            finding = run(variant, requests, expected, lambda: progress.advance(bar))
            if not console.is_terminal:
                console.print(f"{variant.name}: {finding.seconds:.0f} s, {len(finding.differing)} differ")
            return finding

        reference = measured(first)
        if reference.failure:
            return [reference]
        expected = reference.answers.tokens
        return [reference, *(measured(variant, expected) for variant in variants)]


def report(findings: list[Finding]) -> Table:
    table = Table(title="The same tokens, whatever the way")
    table.add_column("variant")
    for name in ("requests", "tokens", "differing", "acceptance length", "preempted", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for finding in findings:
        table.add_row(*row(finding))
    return table


def row(finding: Finding) -> list[str]:
    """Its row in the table."""
    variant, answers = finding.variant, finding.answers
    return [
        f"BROKEN: {variant.name}" if variant.fault and not variant.harmless else variant.name,
        str(len(answers.tokens)),
        str(sum(map(len, answers.tokens.values()))),
        str(len(finding.differing)),
        f"{answers.acceptance_length:.2f}" if answers.verify_steps else "-",
        str(answers.preemptions or "-"),
        f"{finding.seconds:.0f}",
        finding.problem or ("noticed" if finding.differing else "the same"),
    ]


def main(variants: Sequence[Variant], prog: str, prompts: int, reference: Variant = REFERENCE) -> int:
    """0 if every variant did what it must."""
    parser = argparse.ArgumentParser(prog=prog, description="Compares ways to answer.")
    parser.add_argument("--prompts", type=int, default=prompts)
    parser.add_argument("--seed", type=int, default=SEED)
    given = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 140)
    findings = campaign(make_requests(given.prompts, given.seed), console, variants, reference)
    console.print(report(findings))
    return int(any(finding.problem for finding in findings))


if __name__ == "__main__":
    sys.exit(main((*VARIANTS, *BROKEN), "make lossless", PROMPTS))
