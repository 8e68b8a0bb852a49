"""Whole engines on tiny random models: every way of serving gives the same tokens, and leaks nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
from loopback import Loopback, QueueLink, Result, split_configs, wait_all
from loopback_runs import VOCAB, assert_idle, mixed_requests, patient, run_all, undrafted
from tiny import write_tiny_pair

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.ipc.messages import CancelGeneration, EngineLoad, EngineReady, Event, ShutdownEngine
from eyas.engine.loading.build import build_engine
from eyas.engine.loop import engine as engine_module
from eyas.engine.loop.engine import Engine
from tests.unit.crossed import crossed

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    folder = tmp_path_factory.mktemp("models")
    write_tiny_pair(folder)
    pool_dir = tmp_path_factory.mktemp("pools")
    return EngineConfig(
        model=str(folder / "target"),
        draft=str(folder / "head"),
        num_pages=256,
        chunk_tokens=48,
        pool_dir=str(pool_dir),
        worker="unified",
    )


@pytest.mark.slow
def test_unified_speculation_changes_no_token(base: EngineConfig) -> None:
    requests = mixed_requests(18)
    expected = undrafted(base, requests)
    cluster = Loopback(base)
    assert run_all(cluster, requests) == expected
    accepted = sum(e.accepted for r in cluster.results.values() for e in r.entries)
    assert accepted > 0, "nothing was ever accepted: speculation was not exercised"
    assert_idle(cluster)
    cluster.close()


def test_tree_speculation_changes_no_token(base: EngineConfig) -> None:
    requests = mixed_requests(6, seed=1)
    expected = undrafted(base, requests)
    spec = SpeculationConfig(steps=3, topk=4, draft_tokens=12)
    cluster = Loopback(replace(base, speculation=spec))
    assert run_all(cluster, requests) == expected
    rounds = [e for r in cluster.results.values() for e in r.entries if e.offered]
    assert any(e.accepted for e in rounds) and max(e.offered for e in rounds) == spec.steps
    assert_idle(cluster)
    (worker,) = cluster.workers.values()
    assert worker.load.nodes_verified > sum(e.offered for e in rounds), "drafts never branched"
    cluster.close()


def test_split_services_change_no_token(base: EngineConfig) -> None:
    requests = mixed_requests(6, seed=2)
    expected = undrafted(base, requests)
    cluster = patient(base)
    assert run_all(cluster, requests, split=True) == expected
    assert any(e.accepted for r in cluster.results.values() for e in r.entries)
    moved = [e.timings for r in cluster.results.values() for e in r.entries if e.timings]
    assert all(timings.transfer_path == "shm" for timings in moved)
    assert_idle(cluster)
    cluster.close()


def test_the_first_round_of_every_choice_is_drafted_by_a_service(base: EngineConfig) -> None:
    """What asks for its draft leaves before the engine waits for the answer."""
    cluster = Loopback(*split_configs(base))
    cluster.by_role["decode"].engine._drafting.draft_wait = SimpleNamespace(
        seconds=20.0, record_step=lambda landed, seconds: None
    )
    for i in range(4):
        params, choices = (
            SamplingParams(seed=i, max_tokens=9),
            (RequestChoice(0), RequestChoice(1), RequestChoice(2)),
        )
        request = GenerationRequest(f"r{i}", tuple(range(30 + i)), params, choices[: 1 + 2 * (i % 2)])
        run_all(cluster, [request], split=True)
    first = [e for r in cluster.results.values() for e in r.entries if e.index == 1]
    assert len(first) == 8 and all(e.offered == base.speculation.steps for e in first)
    cluster.close()


@pytest.mark.slow
def test_preemption_changes_no_token(base: EngineConfig) -> None:
    """A pool too small for all of them: sequences go back to the queue and are recomputed."""
    requests = [
        GenerationRequest(
            f"r{i}", tuple(range(i, i + 40)), SamplingParams(temperature=0.7, seed=i, max_tokens=60)
        )
        for i in range(8)
    ]
    expected = undrafted(base, requests)
    for config in (replace(base, num_pages=24), replace(base, num_pages=24, draft=None)):
        cluster = Loopback(config)
        assert run_all(cluster, requests) == expected
        assert cluster.workers["unified"].engine._scheduler.preemptions > 0, "the pool was large enough"
        assert_idle(cluster)
        cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_giving_way_to_another_call_changes_no_token(base: EngineConfig, split: bool) -> None:
    """One call has all slots and more in the queue when a short one comes: it ends first."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=40, ignore_eos=True)
    prompts = [tuple(range(i, i + 40)) for i in range(2)]
    many = [
        GenerationRequest(f"r{i}", prompt, params, tuple(map(RequestChoice, range(3))), call="many")
        for i, prompt in enumerate(prompts)
    ]
    one = GenerationRequest("one", (5, 6, 7), msgspec.structs.replace(params, max_tokens=4), call="one")
    expected = undrafted(base, [*many, one])
    small = replace(base, max_running=4)
    cluster = Loopback(*(split_configs(small) if split else (small,)))
    results = [cluster.submit(request, split=split) for request in many]
    while not any(len(tokens) > 5 for tokens in results[0].tokens.values()):
        time.sleep(0.001)
    late = cluster.submit(one, split=split)
    assert late.done.wait(30) and not all(result.done.is_set() for result in results)
    wait_all(results, 60)
    assert [result.tokens for result in (*results, late)] == expected
    assert cluster.workers["decode" if split else "unified"].engine._scheduler.preemptions > 0
    assert_idle(cluster)
    cluster.close()


def test_cached_prefixes_change_no_token(base: EngineConfig) -> None:
    prompt = tuple(random.Random(5).randrange(VOCAB) for _ in range(100))
    first = [GenerationRequest("a", prompt, SamplingParams(temperature=0.0, max_tokens=40))]
    expected = undrafted(base, first)[0][0]
    follow = GenerationRequest(
        "b", (*prompt, *expected, 1, 2, 3), SamplingParams(temperature=0.0, max_tokens=20)
    )
    wanted = undrafted(base, [follow])[0]
    cluster = Loopback(base)
    assert run_all(cluster, first)[0][0] == expected
    result = cluster.submit(follow, split=False)
    wait_all([result], 30)
    assert result.tokens == wanted
    timings = next(e.timings for e in result.entries if e.timings)
    assert timings.cached_tokens >= 128, "prompt and answer of the first turn should have been found"
    cluster.close()


@pytest.fixture(scope="module")
def turns(base: EngineConfig) -> tuple[list[GenerationRequest], list[dict]]:
    """A turn of a chat with a long answer, the turn after it, and what both give alone."""
    prompt = tuple(random.Random(6).randrange(VOCAB) for _ in range(100))
    first = GenerationRequest("a", prompt, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    follow = GenerationRequest("b", (*prompt, 1, 2, 3), SamplingParams(temperature=0.0, max_tokens=8))
    return [first, follow], undrafted(base, [first, follow])


@pytest.mark.slow
@pytest.mark.parametrize("draft", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_prompt_is_cached_while_its_answer_goes_on(
    base: EngineConfig, turns: tuple[list[GenerationRequest], list[dict]], draft: bool
) -> None:
    """The next turn of a chat may come before the last one is answered."""
    (first, follow), wanted = turns
    cluster = Loopback(base if draft else replace(base, draft=None))
    before = cluster.submit(first, split=False)
    while not before.tokens:
        time.sleep(0.001)
    after = cluster.submit(follow, split=False)
    wait_all([after], 30)
    assert len(before.tokens[0]) < 100, "the first answer ended too soon to show anything"
    wait_all([before], 60)
    assert [before.tokens, after.tokens] == wanted
    assert next(e.timings for e in after.entries if e.timings).cached_tokens == 96
    assert_idle(cluster)
    cluster.close()


def test_migrated_choices_continue_as_they_would_have(base: EngineConfig) -> None:
    params = SamplingParams(temperature=0.9, seed=3, max_tokens=30)
    request = GenerationRequest("a", tuple(range(50)), params, (RequestChoice(0), RequestChoice(1)))
    whole = undrafted(base, [request])[0]
    cluster = Loopback(base)
    begun = replace_choices(
        request, (RequestChoice(0, tuple(whole[0][:7])), RequestChoice(1, tuple(whole[1][:19])))
    )
    result = Result(2, tokens={0: whole[0][:7], 1: whole[1][:19]})
    cluster.results["a"] = result
    cluster.by_role["decode"].send(_submit(begun))
    wait_all([result], 30)
    assert result.tokens == whole
    cluster.close()


@pytest.mark.parametrize("split", [False, True])
def test_cancelled_requests_leave_nothing(base: EngineConfig, split: bool) -> None:
    rng = random.Random(0)
    cluster = Loopback(*(split_configs(base) if split else (base,)))
    for i in range(30):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randrange(1, 120)))
        request = GenerationRequest(
            f"c{i}", prompt, SamplingParams(max_tokens=60, seed=i), (RequestChoice(0), RequestChoice(1))
        )
        cluster.submit(request, split=split)
        time.sleep(rng.random() * 0.05)
        for worker in {cluster.by_role["decode"], cluster.by_role["prefill"]}:
            worker.send(CancelGeneration(request.id, rng.choice([None, 0])), CancelGeneration(request.id))
    assert_idle(cluster)
    cluster.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "cancelled"),
    crossed([False, True], [0, 1], quick=lambda split, cancelled: split and cancelled == 1),
)
def test_a_cancelled_choice_leaves_the_others_as_they_were(
    base: EngineConfig, split: bool, cancelled: int
) -> None:
    params = SamplingParams(temperature=0.9, seed=11, max_tokens=12)
    prompt = tuple(i % VOCAB for i in range(400))  # several chunks, so that the cancellation comes first
    request = GenerationRequest("a", prompt, params, (RequestChoice(0), RequestChoice(1), RequestChoice(2)))
    expected = undrafted(base, [request])[0]
    cluster = Loopback(*(split_configs(base) if split else (base,)))
    result = cluster.submit(request, split=split)
    result.wanted = 2
    cluster.by_role["decode"].send(CancelGeneration("a", cancelled))
    assert result.done.wait(30) and result.failure is None
    assert {c: result.tokens[c] for c in result.finishes} == {
        c: tokens for c, tokens in expected.items() if c != cancelled
    }
    assert cancelled not in result.tokens, "it was computed all the same"
    assert_idle(cluster)
    cluster.close()


def test_refusals_are_clear(base: EngineConfig) -> None:
    cluster = Loopback(replace(base, num_pages=16, max_waiting=2))
    bad = {
        "context": GenerationRequest("context", (1,) * 2000, SamplingParams(max_tokens=100)),
        "length of 244": GenerationRequest("pages", (1,) * 200, SamplingParams(max_tokens=100)),
        "token id": GenerationRequest("token id", (999,), SamplingParams(max_tokens=4)),
        "temperature": GenerationRequest("temperature", (1,), SamplingParams(max_tokens=4, temperature=9.0)),
    }
    for word, request in bad.items():
        result = cluster.submit(request, split=False)
        assert result.done.wait(5) and result.failure is not None
        assert word in result.failure, result.failure
    cluster.close()


def test_the_load_tells_of_a_queue_behind_many_choices(base: EngineConfig) -> None:
    cluster = Loopback(replace(base, draft=None, max_running=3))
    params = SamplingParams(temperature=1.0, max_tokens=40, ignore_eos=True)
    many = cluster.submit(
        GenerationRequest("many", (1, 2), params, tuple(map(RequestChoice, range(3)))), split=False
    )
    others = [cluster.submit(GenerationRequest(id, (3, 4), params), split=False) for id in "ab"]
    told = set()
    while not many.done.wait(0.001):
        if load := cluster.workers["unified"].load:
            told.add((load.running, load.waiting))
    assert (3, 2) in told, told
    wait_all(others, 60)
    assert_idle(cluster)
    cluster.close()


def test_the_load_counts_steps_and_tells_how_long_the_oldest_waits(base: EngineConfig) -> None:
    cluster = Loopback(replace(base, draft=None, max_running=1))
    params = SamplingParams(temperature=1.0, max_tokens=30, ignore_eos=True)
    results = [cluster.submit(GenerationRequest(id, (3, 4), params), split=False) for id in "ab"]
    waited, worker = 0.0, cluster.workers["unified"]
    while not results[0].done.wait(0.001):
        waited = max(waited, worker.load.oldest_waiting_s) if worker.load else waited
    assert waited > 0.0
    wait_all(results, 30)
    deadline = time.monotonic() + 10
    while sum(worker.load.step_seconds) < 60 and time.monotonic() < deadline:
        time.sleep(0.01)
    load = worker.load
    assert sum(load.step_seconds) == load.step_sequences_total == 60 and load.step_sequences[0] == 60
    assert load.step_seconds_total > 0.0 and load.oldest_waiting_s == 0.0
    cluster.close()


def test_a_worker_that_is_ready_says_at_once_what_it_can_take(base: EngineConfig) -> None:
    said: list[Event] = []

    class OneBatch(QueueLink):
        def send(self, events: Sequence[Event]) -> None:
            said.extend(events if not said else ())

    link = OneBatch(said.append)
    link.commands.put(ShutdownEngine())
    config = replace(base, draft=None, max_running=8, max_waiting=10)
    build_engine(config, link).run()
    ready, load = said
    assert isinstance(ready, EngineReady) and isinstance(load, EngineLoad)
    assert (load.backlog.prefill_room, load.backlog.decode_room) == (10, 18)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("way", ["one token", "no token", "no drafts"])
def test_prompts_that_nothing_is_drafted_for_are_cached_too(
    base: EngineConfig, way: str, split: bool
) -> None:
    """Pages that also hold draft KV have it of every prompt, so that they serve any request after it."""
    tokens = {"one token": 1, "no token": 0, "no drafts": 6}[way]
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    first = GenerationRequest("0", tuple(range(70)), params, speculative=way != "no drafts")
    drafted = msgspec.structs.replace(params, max_tokens=6)
    again = msgspec.structs.replace(first, id="1")
    last = msgspec.structs.replace(first, id="2", params=drafted, speculative=True)
    cluster, found = Loopback(*(split_configs(base) if split else (base,))), []
    try:
        for one in (first, again, last):
            found.append(cluster.submit(one, split=split))
            wait_all(found, 60)
    finally:
        cluster.close()
    engine = cluster.by_role["prefill"].engine
    assert isinstance(engine, Engine) and engine._scheduler.cached_tokens == 2 * 64
    assert not any(entry.offered for result in found[:2] for entry in result.entries)
    assert split or any(entry.offered for entry in found[2].entries)  # a service may be too late


def test_pages_that_come_free_are_not_slept_over(base: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt waits for pages that another's puller has not read yet."""
    prefill, decode, _ = split_configs(replace(base, draft=None))
    cluster = Loopback(replace(prefill, num_pages=10), decode)
    try:
        time.sleep(2 * engine_module.IDLE_S)
        monkeypatch.setattr(engine_module, "IDLE_S", 4.0)
        began, params = time.monotonic(), SamplingParams(temperature=0.0, max_tokens=1)
        prompts = [tuple((i * i + 7 * k) % VOCAB for i in range(100)) for k in range(4)]
        results = [
            cluster.submit(GenerationRequest(f"{k}", prompt, params), split=True)
            for k, prompt in enumerate(prompts)
        ]
        wait_all(results, 60)
        assert time.monotonic() - began < 3.0
    finally:
        monkeypatch.undo()
        cluster.close()


def test_deadlines_end_requests(base: EngineConfig) -> None:
    cluster = Loopback(*split_configs(base))
    request = GenerationRequest("slow", (1, 2, 3), SamplingParams(max_tokens=10), timeout_s=0.2)
    result = cluster.results["slow"] = Result(1)
    cluster.by_role["decode"].send(_submit(request, attach=True))  # and it is not attached
    assert result.done.wait(5)
    assert result.failure is not None and "deadline" in result.failure
    assert_idle(cluster)
    cluster.close()


def _submit(request: GenerationRequest, *, attach: bool = False):
    from eyas.engine.ipc.messages import SubmitGeneration

    return SubmitGeneration(request, attempt=1, attach=attach)


def replace_choices(request: GenerationRequest, choices: tuple[RequestChoice, ...]) -> GenerationRequest:
    return GenerationRequest(request.id, request.prompt_ids, request.params, choices)
