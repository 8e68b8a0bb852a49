"""Hybrids: whatever way requests are answered, every token and the bits of its log-probability are the same.

    python -m tests.e2e.lossless_hybrids [--family qwen3_next] [--every 1] [--log FILE]

Every way to draft, in one engine, in several, moved in mid-answer and preempted. `cached`: a request begins
with the first tokens of a text whose states are cached, one request for every cut, in the prompt and in the
answer to it. `fresh`: as many requests of the same lengths that nobody has begun before. What is looked up
are answers that requests foretell, with a few errors. Ways that are broken on purpose must differ. A campaign
that is begun again with its --log goes on behind the ways that are done.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.e2e import lossless_faults as faults
from tests.e2e.lossless import Finding, Requests, Variant, row, run
from tests.e2e.lossless_ways import InProcess, Moved, Uncached
from tests.unit.family_sample import VOCAB
from tests.unit.hybrid_rig import write_hybrid, write_with_mtp
from tests.unit.loopback import split_configs

CUTS = 250  # past three places of states
PROMPT = 100  # of the text, whose rest is the answer to it
RESUMED = 66  # cuts from here on resume from a state, the token behind the page included
NEW = 24
TOGETHER = 16
PAGES = 100  # of four rows, where sequences are preempted: room for two of the longest
TEMPERATURES = (0.0, 0.7, 1.3, 2.0)  # the higher, the more of a random head's drafts are right
SEED = 5

CHAIN, TREE = SpeculationConfig(3, draft_tokens=4), SpeculationConfig(3, 3, 10)
LOOKED_UP = {
    "lookup chain": replace(CHAIN, ngram=True),
    "lookup tree": replace(TREE, ngram=True),
}
DRAFTED = {"MTP chain": CHAIN, "MTP tree": TREE, "MTP tree and lookups": replace(TREE, ngram=True)}


@dataclass(frozen=True)
class Campaign:
    """The ways of the model in `folder`, whose head is in `drafts` (None: it has none), over a request for
    each of `cuts`.
    """

    folder: Path
    drafts: Path | None
    cuts: range

    def variants(self, requests: Requests, before: Requests) -> Iterator[Variant]:
        """Every way to draft in every layout; `before`: what has been answered, so that it is cached."""
        kind = "cached" if before else "fresh"
        resumes = sum(int(request.id) >= RESUMED for request in requests) if before else 0
        for name, engine in self._engines():
            few = replace(engine, page_size=4, num_pages=PAGES, state_slots=7)
            parts = split_configs(engine)[: 3 if engine.draft else 2]
            two = tuple(replace(engine, worker=worker) for worker in ("first", "second"))
            told = engine.speculation.ngram and not engine.draft
            ways = {
                "unified": InProcess((engine,), TOGETHER, foretold=told, before=before),
                "split": InProcess(parts, TOGETHER, foretold=told, before=before),
                "moved": Moved(two, TOGETHER, foretold=told, before=before),
                "preempted": InProcess((few,), TOGETHER, foretold=told, before=before),
            }
            for layout, way in ways.items():
                preempted = layout == "preempted"
                yield Variant(
                    f"{name}, {kind}, {layout}",
                    way,
                    speculates=engine.speculates,
                    preempts=preempted,
                    resumes=0 if preempted else resumes,
                )

    def broken(self, before: Requests) -> Iterator[Variant]:
        """Ways that must differ from the others, once `before` has been answered."""
        plain = self._engine()
        if self.drafts:
            tree = replace(plain, draft=str(self.drafts), speculation=DRAFTED["MTP tree"])
            way = InProcess((tree,), TOGETHER, before=before)
            yield Variant("rows of a ring stay", way, fault=faults.ring_rows_stay)
        way = InProcess((plain,), TOGETHER, before=before)
        yield Variant("a state of another prefix", way, fault=faults.states_of_other_prefixes)
        parts = split_configs(replace(plain, max_running=2, state_slots=3))[:2]
        way = InProcess(parts, TOGETHER, before=before)
        yield Variant("states run on in their slots", way, fault=faults.states_run_on)

    def reference(self) -> Variant:
        """One request after the other, without drafts and without anything cached."""
        return Variant("the reference", Uncached((self._engine(),), 1), speculates=False)

    def fresh(self) -> Requests:
        """Requests of every length, each with a pattern of its own that lookups find."""
        draw, made = random.Random(SEED), []
        for cut in self.cuts:
            pattern = draw.choices(range(3, VOCAB), k=23)
            ids = [*pattern, *draw.choices(range(3, VOCAB), k=11)] * (cut // 34 + 1)
            made.append(_request(str(cut), [*ids[:cut], *pattern[:7]], draw))
        return tuple(made)

    def cached(self) -> tuple[Requests, Requests]:
        """Requests that leave one text at every cut, and those that leave the text's states behind."""
        draw = random.Random(SEED + 1)
        prompt = draw.choices(range(3, VOCAB), k=PROMPT)
        whole = _request("text", prompt, draw, CUTS - PROMPT)
        answer = run(self.reference(), (whole,), None, lambda: None).answers.tokens["text"]
        text = [*prompt, *(id for id, _ in answer)]
        params = msgspec.structs.replace(whole.params, max_tokens=PROMPT)
        begun = GenerationRequest("begun", tuple(prompt), params)
        before = (begun, _request("longer", text[:130], draw))
        made = []
        for cut in self.cuts:
            made.append(_request(str(cut), [*text[:cut], *draw.choices(range(3, VOCAB), k=3) * 4], draw))
        draw.shuffle(made)
        return tuple(made), before

    def _engines(self) -> Iterator[tuple[str, EngineConfig]]:
        engine = self._engine()
        yield "plain", engine
        for name, spec in LOOKED_UP.items():
            yield name, replace(engine, speculation=spec)
        for name, spec in DRAFTED.items() if self.drafts else ():
            yield name, replace(engine, draft=str(self.drafts), speculation=spec)

    def _engine(self) -> EngineConfig:
        return EngineConfig(
            model=str(self.folder),
            draft=None,
            worker="unified",
            num_pages=600,
            chunk_tokens=90,
            max_running=TOGETHER,
            pool_dir=str(self.folder.parent),
        )


def _request(id: str, ids: Sequence[int], draw: random.Random, max_tokens: int = NEW) -> GenerationRequest:
    params = SamplingParams(
        temperature=draw.choice(TEMPERATURES), seed=draw.getrandbits(63), max_tokens=max_tokens, logprobs=1
    )
    return GenerationRequest(id, tuple(ids), params)


def campaign(ways: Campaign, log: Path) -> int:
    """Runs what `log` has not yet; gives the number of ways that did not do what they must."""
    done = {line["way"]: line for line in map(json.loads, log.read_text().splitlines())}
    for requests, before in ((ways.fresh(), ()), ways.cached()):
        every = [*ways.variants(requests, before), *(ways.broken(before) if before else ())]
        left = [each for each in every if each.name not in done]
        if not left:
            continue
        reference = run(ways.reference(), requests, None, lambda: None)
        _print(reference)
        assert not reference.failure and not reference.answers.resumed
        for variant in left:
            finding = run(variant, requests, reference.answers.tokens, lambda: None)
            _print(finding)
            done[variant.name] = {"way": variant.name, "requests": len(requests), "problem": finding.problem}
            with log.open("a") as file:
                file.write(json.dumps(done[variant.name]) + "\n")
    count, failed = (
        sum(line["requests"] for line in done.values()),
        [line for line in done.values() if line["problem"]],
    )
    print(f"{count} requests by {len(done)} ways, {len(failed)} of which failed", flush=True)
    return len(failed)


def _print(finding: Finding) -> None:
    """A line for what one way did."""
    name, *columns = row(finding)
    print(f"{name:40}", *(f"{column:>8}" for column in columns), finding.answers.resumed, flush=True)


def main() -> int:
    """0 if every way did what it must."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.e2e.lossless_hybrids", description="Compares ways."
    )
    parser.add_argument("--family", default="qwen3_next", help="of tests/unit/hybrid_rig.py")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every N-th cut alone")
    parser.add_argument("--log", type=Path, help="a file of the ways that are done")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as scratch:
        folder, log = Path(scratch, "model"), given.log or Path(scratch, "log")
        log.touch()
        drafts = folder if given.family.startswith("qwen") else None
        (write_with_mtp if drafts else write_hybrid)(folder, given.family)
        return int(campaign(Campaign(folder, drafts, range(given.every, CUTS + 1, given.every)), log) > 0)


if __name__ == "__main__":
    sys.exit(main())
