"""A load through the engine's own scheduler on a simulated clock: `python -m tests.played_steps`.

The scheduler, its queue, pages and preemption are those of an engine; a step takes what a worker's table of
rates says. No model is loaded, and nothing is computed. By default the 200 requests of `s8k` on one H200, and
on a card with 420,000 tokens of KV whose steps take 1.37 times as long, as they are admitted by PromptYields.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from eyas.bench.cases import make_case
from eyas.common.params import SamplingParams
from eyas.common.prompt_room import StepBudget
from eyas.common.step_times import StepPace, StepTimes
from eyas.common.types import GenerationRequest
from eyas.engine.batch.sequence import Generation, GenerationKind, Sequence, SequenceWork
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.prefix_cache import PrefixCache
from eyas.engine.scheduling.limits import GPU_YIELD, BatchLimits, PromptYield
from eyas.engine.scheduling.scheduler import Scheduler
from eyas.simulator.goodput import quantile
from eyas.simulator.hardware import WorkerHardware, example
from eyas.simulator.workload import SimulatedRequest

CARDS = {"H200": (880_000, 1.0), "smaller, slower": (420_000, 1.37)}  # tokens of KV; times over the table's
YIELDS = {
    "first come, first served": PromptYield(),
    "n / 500 s": PromptYield(GPU_YIELD.tokens_per_s),
    "at most 12 s": GPU_YIELD,
}


class _NoPulls:
    """Nothing comes from other workers."""

    def waiting(self) -> SequenceOf[Generation]:
        return ()

    def coming(self) -> SequenceOf[Generation]:
        return ()

    def preempt(self) -> bool:
        return False


class PlayedStep(NamedTuple):
    """A step that ended at `end_s`: its sequences that decode, its prompt rows, and its seconds."""

    end_s: float
    seconds: float
    decoding: int
    rows: int


@dataclass
class PlayedSteps:
    """Requests through one engine's scheduler. Times of a request are by its number, in seconds."""

    times: StepTimes
    budget: StepBudget
    limits: BatchLimits
    pages: int
    admitted: dict[int, float] = field(default_factory=dict)
    first: dict[int, float] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    steps: list[PlayedStep] = field(default_factory=list)

    def __post_init__(self) -> None:
        pool = PagePool(self.pages)
        cache = PrefixCache(pool, self.limits.page_size, lookahead=0)
        pulls: Any = _NoPulls()
        self.scheduler = Scheduler(pool, cache, self.limits, pulls)

    def run(self, arrivals: SequenceOf[SimulatedRequest]) -> None:
        """Plays the requests to their ends. `arrivals`: in order of time."""
        coming = list(reversed([*enumerate(arrivals)]))
        now, queue = 0.0, self.scheduler
        while coming or queue.running or queue.waiting:
            if not queue.running and not queue.waiting:
                now = max(now, coming[-1][1].at_s)
            while coming and coming[-1][1].at_s <= now:
                queue.enqueue(_sequence(*coming.pop()))
            now = self._step(now)

    def _step(self, now: float) -> float:
        """Runs the next step; its end."""
        works = self.scheduler.schedule()
        assert works, "nothing runs, though requests wait"
        self.scheduler.preempted.clear()
        rounds = [work for work in works if work.round and work.seq.output]
        chunks = [work for work in works if not (work.round and work.seq.output)]
        rows = sum(len(work.tokens) for work in chunks)
        pairs = sum(len(work.tokens) * (work.start + len(work.tokens) / 2) for work in chunks)
        seconds = self.times.step_s(len(rounds), sum(work.start for work in rounds), rows, pairs)
        for work in works:
            self.admitted.setdefault(work.seq.uid, now)
            work.seq.generation.began = work.seq.generation.began or max(now, 1e-9)
        for work in works:
            self._land(work, now + seconds)
        self.steps.append(PlayedStep(now + seconds, seconds, len(rounds), rows))
        return now + seconds

    def _land(self, work: SequenceWork, now: float) -> None:
        seq = work.seq
        seq.kv_len = seq.draft_len = work.start + len(work.tokens)
        if not work.sample:
            return
        seq.output.append(1)
        self.first.setdefault(seq.uid, now)
        if len(seq.output) >= seq.generation.request.params.max_tokens:
            self.ended[seq.uid] = now
            self.scheduler.remove(seq)


def _sequence(number: int, arrival: SimulatedRequest) -> Sequence:
    """A request whose prompt begins like no other."""
    prompt = range(number << 20, (number << 20) + arrival.prompt)
    request = GenerationRequest(str(number), prompt, SamplingParams(max_tokens=arrival.output))
    generation = Generation(request, 1, GenerationKind.LOCAL, arrived=arrival.at_s, deadline=float("inf"))
    return Sequence(number, generation, 0, request.prompt_ids, [])


def engine(hardware: WorkerHardware, yields: PromptYield) -> PlayedSteps:
    """An engine on a worker of a GPU."""
    budget = hardware.budget
    limits = BatchLimits(
        16,
        hardware.max_running,
        budget.chunk_tokens,
        1,
        mixed_prefill_budget=budget.mixed_prefill_budget,
        long_prompt_rows=budget.long_prompt_rows,
        yields=yields,
    )
    return PlayedSteps(hardware.times, budget, limits, hardware.pool_tokens // limits.page_size)


def case(name: str, seed: int) -> list[SimulatedRequest]:
    """The requests of a named case of `eyas bench suite`."""
    return [
        SimulatedRequest(job.due_s or 0.0, len(job.turns[0].prompt), job.turns[0].max_tokens)
        for job in make_case(name, seed).jobs
    ]


def figures(played: PlayedSteps, arrivals: SequenceOf[SimulatedRequest]) -> str:
    """One line of a table."""
    waits = sorted(played.first[number] - arrival.at_s for number, arrival in enumerate(arrivals))
    gaps = sorted(itertools.chain(*([step.seconds] * step.decoding for step in played.steps)))
    tokens = sum(arrival.output for arrival in arrivals) / played.steps[-1].end_s
    ms = [1e3 * quantile(gaps, share) for share in (0.5, 0.99)]
    return (
        f"{quantile(waits, 0.5):.2f} | {quantile(waits, 0.9):.1f} | {quantile(waits, 0.99):.1f} | "
        f"{ms[0]:.1f} | {ms[1]:.1f} | {tokens:,.0f} | {played.scheduler.preemptions} |"
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", default="s8k", help="of `eyas bench suite` (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    print("| card | draw | order | TTFT p50, s | p90 | p99 | gap p50, ms | p99 | tokens/s | preempted |")
    print("|---|--:|---|--:|--:|--:|--:|--:|--:|--:|")
    for (card, (tokens, pace)), seed in itertools.product(CARDS.items(), args.seeds):
        made, arrivals = example(), case(args.case, seed)
        times = replace(made.times, pace=StepPace(pace, pace, pace))
        for name, yields in YIELDS.items():
            played = engine(replace(made, times=times, pool_tokens=tokens), yields)
            played.run(arrivals)
            print(f"| {card} | {seed} | {name} | {figures(played, arrivals)}", flush=True)


if __name__ == "__main__":
    main()
