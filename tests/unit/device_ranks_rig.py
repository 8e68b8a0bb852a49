"""Engines of two attention ranks on the device path, kernels interpreted, beside the plain engine of one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch.distributed as dist

from eyas.common.config import EngineConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.device.runner import DeviceRunner
from eyas.engine.loading import follower
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.parallel.ranks import FollowerMain, RankChannel, RankInfo
from tests.unit import tiny_deepseek
from tests.unit.loopback import Loopback, Result, wait_all

SIZES = tiny_deepseek.SMALL | {"num_hidden_layers": 2, "vocab_size": 64, "n_routed_experts": 8}
PLAIN = EngineConfig(
    draft=None, num_pages=32, max_running=4, chunk_tokens=16, context_length=128, transfer="none", worker="w"
)
PATIENCE_S = 400.0  # steps are slow where other tests run beside these
BACKENDS = {"attention_backend": "triton", "prefill_attention_backend": "triton"}


_main = follower.main


def interpreted_follower(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    """A follower whose kernels are interpreted as this process's are."""
    from tests.unit import interpreted

    interpreted.install()
    _main(loaded, rank_info, channel)


@dataclass
class DeviceRanks:
    """A running engine. `seen`: of every step how many works each rank has, and prompt rows."""

    cluster: Loopback
    seen: list[tuple[tuple[int, int], tuple[int, int]]]

    @property
    def runner(self) -> DeviceRunner:
        runner = self.cluster.workers["w"].engine._parts.runner
        assert isinstance(runner, DeviceRunner)
        return runner

    def run(self, requests: list[GenerationRequest]) -> list[Result]:
        results = [self.cluster.submit(request, split=False) for request in requests]
        wait_all(results, PATIENCE_S)
        return results

    def idle(self, first: int = 0) -> tuple[int, int]:
        """Steps from `first` on in which one rank had nothing to do: with prompt rows, and without."""
        idle = [rows for works, rows in self.seen[first:] if 0 in works]
        return sum(any(rows) for rows in idle), sum(not any(rows) for rows in idle)


def device_ranks(config: EngineConfig, main: FollowerMain = interpreted_follower) -> DeviceRanks:
    """Starts two ranks of a plain engine's configuration; the caller closes the cluster."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(follower, "main", main)
        cluster = Loopback(replace(config, **BACKENDS, overlap_schedule=True, dp_attention=2))
    made = DeviceRanks(cluster, [])
    launch = made.runner.launch

    def noted(works):
        rows = [
            [0 if w.round else len(w.tokens) for w in works if w.seq.generation.rank == r] for r in (0, 1)
        ]
        made.seen.append((tuple(map(len, rows)), tuple(map(sum, rows))))
        return launch(works)

    made.runner.launch = noted  # type: ignore[method-assign]
    return made


def no_group_stays() -> Iterator[None]:
    """The body of a fixture: a group that has lost a rank is given up after the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def mixed() -> list[GenerationRequest]:
    """Prompts of several chunks and of one row; greedy, seeded, special, several choices."""

    def asked(name: str, prompt: tuple[int, ...], choices: int = 1, **changes: object) -> GenerationRequest:
        usual = {"temperature": 0.0, "max_tokens": 5, "ignore_eos": True}
        params = SamplingParams(**(usual | changes))  # type: ignore[arg-type]
        return GenerationRequest(name, prompt, params, tuple(map(RequestChoice, range(choices))))

    return [
        asked("long", tuple(range(3, 44))),
        asked("short", (7,), max_tokens=9),
        asked("special", tuple(range(20)), logprobs=3, prompt_logprobs=2),
        asked("seeded", (9, 8, 7, 6), temperature=1.0, seed=4),
        asked("forks", tuple(range(18)), 2, temperature=1.0, seed=3, repetition_penalty=1.2, max_tokens=3),
        asked("kept", (5, 6, 7), logit_bias={11: 100.0}, logprobs=2, min_tokens=2),
    ]


def tokens(results: list[Result]) -> list[object]:
    """Of every request, choice by choice."""
    return [result.tokens for result in results]


def logprobs(results: list[Result]) -> list[float]:
    """Of everything that was asked for, prompts included, in the order of requests, choices and places."""
    found: list[float] = []
    for result in results:
        entries = sorted(result.entries, key=lambda entry: (entry.choice, entry.index))
        for entry in entries:
            rows = [*(entry.prompt.rows() if entry.prompt is not None else ()), *(entry.logprobs or ())]
            found += [value for row in rows for value in (row.logprob, *(best for _, best in row.top))]
    return found
