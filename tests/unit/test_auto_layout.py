"""The auto layout without a network: what the policy is told of a worker, and when preferences change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from eyas.common.step_times import StepPace, StepRates
from eyas.common.types import Role, WorkerBacklog, WorkerInfo
from eyas.simulator.hardware import example
from gateway.backends.delivery import TokenTimes
from gateway.observe.metrics import PlacementMetrics
from gateway.routing.in_flight import InFlightLedger, LegLoad, UnderWay
from gateway.routing.layouts import AutoLayout, place_of
from gateway.routing.placement import AdmissionPreference, LatencyTargets, WorkerPlace
from gateway.routing.preference import ENOUGH, FIRST
from gateway.routing.router import RequestRoute, RouterCandidate

RATES = StepRates(example().times, example().budget)
IDLE = WorkerBacklog(prefill_room=256, decode_room=512)
TIGHT = LatencyTargets(1.0, 0.008)


def info(name: str, backlog: WorkerBacklog = IDLE, rates: StepRates | None = RATES) -> WorkerInfo:
    return WorkerInfo(name, tuple(Role), 1, "m", "f", "", 8192, 1000, 100, backlog=backlog, rates=rates)


class World:
    """Two workers whose reports are old, the ledger of a gateway, and a clock."""

    def __init__(self, targets: LatencyTargets = TIGHT, workers: int = 2) -> None:
        self.now = 1000.0
        self.infos = [info(f"w{i}") for i in range(workers)]
        self.ledger = InFlightLedger()
        self.registry = CollectorRegistry()
        self.layout = AutoLayout(self.workers, targets, PlacementMetrics(self.registry), lambda: self.now)

    def workers(self) -> Sequence[RouterCandidate]:
        return [
            RouterCandidate(one, under_way=self.ledger.now(one.worker), reported=self.ledger.at_report(one))
            for one in self.infos
        ]

    def send(self, prompt: int) -> RequestRoute:
        """Places a request and counts it, as its legs do."""
        route = self.layout.route(prompt, self.workers())
        assert route is not None
        here = route.prefill or route.decode
        self.ledger.add(route.decode, UnderWay(1, prompt))
        self.ledger.add(here, UnderWay(prompts=here != route.decode, queued=prompt))
        self.layout.placed(route, prompt, prompt)
        return route

    def page(self) -> str:
        return generate_latest(self.registry).decode()


# --- what the policy is told -------------------------------------------------------------------------------


def test_a_place_is_the_report_and_what_changed_since() -> None:
    told = WorkerBacklog(
        decoding=5, context=5000, queued=700, prompt_share=0.5, prefill_room=10, decode_room=20
    )
    then, now = UnderWay(2, 2000, prompts=1, queued=300), UnderWay(4, 4500, prompts=1, queued=900)
    worker = RouterCandidate(info("w", told), cached=48, under_way=now, reported=then)
    found = place_of(worker, AdmissionPreference.DECODE)
    # Others have 3 sequences, 3000 tokens and 400 prompt tokens there; 2 more requests need room.
    assert found == WorkerPlace(
        "w", 4 + 3, 4500 + 3000, 900 + 400, 0.5, 8, 18, 48, AdmissionPreference.DECODE
    )


def test_a_late_report_never_hides_what_was_sent() -> None:
    """The worker had not yet counted what this gateway had sent before the report came."""
    sent = UnderWay(40, 40_000, queued=40_000)
    found = place_of(RouterCandidate(info("w"), under_way=sent, reported=sent), AdmissionPreference.ANY)
    assert (found.sequences, found.context, found.queued) == (40, 40_000, 40_000)


@pytest.mark.parametrize(
    ("change", "rooms"),
    [
        ({"roles": (Role.PREFILL,)}, (256, 0)),
        ({"roles": (Role.DECODE,)}, (0, 512)),
        ({"serving": False}, (0, 0)),
        ({}, (256, 512)),
    ],
)
def test_a_worker_has_room_for_its_roles_while_it_serves(change: dict, rooms: tuple[int, int]) -> None:
    found = place_of(RouterCandidate(msgspec.structs.replace(info("w"), **change)), AdmissionPreference.ANY)
    assert (found.prefill_room, found.decode_room) == rooms


def test_without_a_session_nothing_is_decoded() -> None:
    found = place_of(RouterCandidate(info("w"), connected=False), AdmissionPreference.ANY)
    assert (found.prefill_room, found.decode_room) == (256, 0)


def test_the_room_for_kv_is_the_report_less_what_was_sent_since() -> None:
    told = msgspec.structs.replace(IDLE, kv_room=1000)
    then, now = UnderWay(1, 500, prompts=1, queued=100), UnderWay(2, 800, prompts=2, queued=300)
    found = place_of(RouterCandidate(info("w", told), under_way=now, reported=then), AdmissionPreference.ANY)
    assert found.kv_room == 1000 - 300 - 200
    assert place_of(RouterCandidate(info("w")), AdmissionPreference.ANY).kv_room == float("inf"), (
        "it did not say"
    )


def test_prompts_do_not_cross_between_workers_that_have_no_room_for_both() -> None:
    """Each has pages for one prompt and a half: what is sent elsewhere at once with another does not wait."""
    world = World()
    room = msgspec.structs.replace(IDLE, decoding=30, context=60_000, kv_room=12_000)
    world.infos = [info("w0", room), info("w1", room)]
    world.layout.preferences = {"w0": AdmissionPreference.DECODE, "w1": AdmissionPreference.PREFILL}
    assert world.send(8000).prefill == "w1"
    world.layout.preferences = {"w0": AdmissionPreference.PREFILL, "w1": AdmissionPreference.DECODE}
    assert world.send(8000).prefill is None


# --- between reports ---------------------------------------------------------------------------------------


def test_a_burst_between_two_reports_is_spread() -> None:
    world = World(LatencyTargets(1.0, 0.05), workers=4)
    counts: dict[str, int] = {}
    for _ in range(40):
        route = world.send(1000)
        counts[route.decode] = counts.get(route.decode, 0) + 1
    assert len(counts) == 4 and max(counts.values()) <= 12


def test_a_stake_comes_back_in_parts_and_once() -> None:
    ledger = InFlightLedger()
    stake = LegLoad(lambda part, sign: ledger.add("w", part, sign), UnderWay(2, 600, queued=300))
    assert ledger.now("w") == UnderWay(2, 600, 0, 300)
    for _ in range(2):
        stake.computed()
        assert ledger.now("w") == UnderWay(2, 600, 0, 0)
    for _ in range(2):
        stake.close()
        assert ledger.now("w") == UnderWay()


def test_what_was_under_way_is_noted_at_each_report() -> None:
    ledger, first, second = InFlightLedger(), info("w"), info("w")
    ledger.add("w", UnderWay(1, 10))
    assert ledger.at_report(first) == UnderWay(1, 10)
    ledger.add("w", UnderWay(1, 10))
    assert ledger.at_report(first) == UnderWay(1, 10)
    assert ledger.at_report(second) == UnderWay(2, 20)
    ledger.forget("w")
    assert ledger.at_report(second) == UnderWay()


# --- routes ------------------------------------------------------------------------------------------------


def test_preferences_part_long_prompts_from_streams() -> None:
    world = World()
    world.infos[0] = info("w0", msgspec.structs.replace(IDLE, decoding=30, context=60_000))
    world.layout.preferences = {"w0": AdmissionPreference.DECODE, "w1": AdmissionPreference.PREFILL}
    route = world.send(8000)
    assert (route.decode, route.prefill) == ("w0", "w1")
    assert route.ttft_s is not None and 0.0 < route.ttft_s < 1.0
    assert 'eyas_placements_total{placement="apart"} 1.0' in world.page()


def test_no_request_is_shared_while_the_pages_of_some_worker_stay() -> None:
    world = World()
    world.infos = [info("w0"), msgspec.structs.replace(info("w1"), stays=True)]
    world.layout.preferences = {"w0": AdmissionPreference.DECODE, "w1": AdmissionPreference.PREFILL}
    assert world.send(8000).prefill is None
    load(world, 8192, ENOUGH)
    assert (
        thought(world)
        == world.layout.preferences
        == {"w0": AdmissionPreference.DECODE, "w1": AdmissionPreference.PREFILL}
    )


def test_where_nothing_is_known_or_free_roles_decide() -> None:
    world = World()
    world.infos = [info("w0", rates=None), info("w1", rates=None)]
    assert world.send(100) == RequestRoute("w0", None)
    world.infos = [
        info("w0", WorkerBacklog()),
        info("w1", WorkerBacklog()),
    ]  # full: the worker itself refuses
    assert world.layout.route(100, world.workers()) in (RequestRoute("w0", None), RequestRoute("w1", None))
    assert world.layout.route(100, []) is None
    assert 'eyas_placements_total{placement="by_roles"} 1.0' in world.page()


def paced(steps: int, tokens_each: int, tpot_s: float) -> TokenTimes:
    """The pace of an answer whose first token came after 0.2 s."""
    later = (steps - 1) * tokens_each
    return TokenTimes(1, steps, 1 + later, began=50.0, first=50.2, last=50.2 + later * tpot_s)


def test_predictions_are_compared_and_count_accepted_drafts() -> None:
    world = World()
    before = world.layout.route(1000, world.workers())
    assert before is not None and before.tpot_s is not None
    pace = paced(101, 3, 0.004)
    assert (pace.ttft_s, pace.tpot_s) == (pytest.approx(0.2), pytest.approx(0.004))
    world.layout.ended(RequestRoute("w0", None, ttft_s=0.1, tpot_s=0.004), pace)
    page = world.page()
    assert 'eyas_ttft_to_predicted_sum{placement="together"} 2.0' in page
    assert 'eyas_tpot_to_predicted_count{placement="together"} 1.0' in page
    assert world.layout.tokens_per_step == pytest.approx(3.0, rel=0.02)
    after = world.layout.route(1000, world.workers())
    assert after is not None and after.tpot_s == pytest.approx(before.tpot_s / 3.0, rel=0.1)


def test_a_request_without_a_token_is_compared_with_nothing() -> None:
    world = World()
    world.layout.ended(RequestRoute("w0", None, 0.1, 0.01), TokenTimes(1))
    assert "_to_predicted_count" not in world.page() and world.layout.tokens_per_step == 1.0


# --- preferences -------------------------------------------------------------------------------------------


def load(world: World, prompt: int, requests: int, answer: int = 256) -> None:
    """Requests and answers, one per second."""
    for _ in range(requests):
        world.now += 1.0
        world.layout.placed(RequestRoute("w0", None), prompt, prompt)
        world.layout.ended(RequestRoute("w0", None), TokenTimes(1, answer, answer))


def thought(world: World) -> dict[str, AdmissionPreference]:
    asyncio.run(world.layout.update_preferences())
    return world.layout.preferences


def test_preferences_follow_the_mix_and_wait_for_enough_of_it() -> None:
    world = World()
    load(world, 8192, FIRST - 1)
    assert thought(world) == {}
    load(world, 8192, 1)
    split = thought(world)
    assert sorted(p.value for p in split.values()) == ["decode", "prefill"]
    for worker, preference in split.items():
        line = f'eyas_worker_preference{{preference="{preference.value}",worker="{worker}"}} 1.0'
        assert line in world.page()
    load(world, 256, 400, answer=512)
    assert set(thought(world).values()) == {AdmissionPreference.ANY}
    assert world.page().count("eyas_worker_preference{") == 2


def test_preferences_are_thought_over_again_when_a_worker_goes() -> None:
    world = World(workers=3)
    load(world, 8192, ENOUGH)
    before = thought(world)
    assert AdmissionPreference.PREFILL in before.values()
    world.infos = world.infos[:1]
    assert thought(world) == {"w0": AdmissionPreference.ANY}


def test_workers_that_do_not_serve_or_have_one_role_get_no_preference() -> None:
    world = World()
    load(world, 8192, ENOUGH)
    world.infos = [
        info("w0"),
        msgspec.structs.replace(info("w1"), serving=False),
        msgspec.structs.replace(info("w2"), roles=(Role.DECODE,)),
    ]
    assert thought(world) == {"w0": AdmissionPreference.ANY}


def paces(world: World, *told: StepPace) -> None:
    """What the workers say of their steps from now on."""
    world.infos = [
        msgspec.structs.replace(one, backlog=msgspec.structs.replace(one.backlog, pace=pace))
        for one, pace in zip(world.infos, told, strict=True)
    ]


def test_predictions_are_made_at_the_pace_of_the_steps() -> None:
    world = World()
    before = world.layout.route(1000, world.workers())
    paces(world, StepPace(1.5, 1.5, 1.5), StepPace(1.7, 0.0, 0.0))
    asyncio.run(world.layout.update_preferences())
    after = world.layout.route(1000, world.workers())
    assert before is not None and after is not None
    assert after.ttft_s == pytest.approx(1.5 * before.ttft_s) and after.tpot_s > 1.5 * before.tpot_s
    assert 'eyas_step_pace{kind="decode"} 1.6' in world.page()


def test_steps_that_turn_out_slow_change_preferences(caplog: pytest.LogCaptureFixture) -> None:
    """And once it was seen that the change made others slow, it is undone for good."""
    world = World()
    load(world, 512, 100, answer=512)
    assert set(thought(world).values()) == {AdmissionPreference.ANY}
    paces(world, StepPace(1.0, 0.0, 2.0), StepPace(1.0, 0.0, 2.0))
    with caplog.at_level("INFO", "eyas.gateway"):
        assert AdmissionPreference.PREFILL in thought(world).values()
    assert "preferences: w0 prefill, w1 decode" in caplog.text
    paces(world, StepPace(1.5, 1.0, 2.0), StepPace(1.5, 0.0, 2.0))
    assert set(thought(world).values()) == {AdmissionPreference.ANY}
    paces(world, StepPace(1.0, 0.0, 2.0), StepPace(1.0, 0.0, 2.0))
    assert set(thought(world).values()) == {AdmissionPreference.ANY}
