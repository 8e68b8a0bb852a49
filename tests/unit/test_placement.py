"""Where a request is computed and which workers prefer prompts: every small world, as values."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from eyas.simulator.hardware import example
from gateway.routing.capacity import RequestMix, capacity, steady
from gateway.routing.placement import (
    FEW,
    FINE,
    AdmissionPreference,
    LatencyTargets,
    MeasuredRates,
    RequestPlacement,
    WorkerPlace,
    place,
)
from gateway.routing.preference import PaceMemory, best_split, estimates, prefer

HARDWARE = example()
LOOSE, TIGHT = LatencyTargets(2.0, 0.020), LatencyTargets(1.0, 0.008)
FULL = {"prefill_room": 0, "decode_room": 0}


UNSEEN = PaceMemory()  # no step has run


def rates(targets: LatencyTargets) -> MeasuredRates:
    return MeasuredRates(HARDWARE.times, HARDWARE.budget, targets)


def split(mix: RequestMix, workers: int, now: int, asked: MeasuredRates) -> int:
    return best_split(estimates(mix, workers, asked, UNSEEN), now)


def states() -> Iterator[WorkerPlace]:
    """A worker in every state that the policy tells apart."""
    rooms = itertools.product((0, 1), (0, 1))
    loads = ((0, 0, 0.0), (40, 0, 0.1), (0, 20_000, 0.5), (200, 20_000, 1.0))
    for (prefill, decode), (sequences, queued, share), liked in itertools.product(
        rooms, loads, AdmissionPreference
    ):
        yield WorkerPlace("", sequences, 1000 * sequences, queued, share, prefill, decode, 0, liked)


def worlds() -> Iterator[list[WorkerPlace]]:
    """Every pair of states, the first of which holds nothing or most of the prompt."""
    for cached, (first, second) in itertools.product((0, 4000), itertools.product(states(), repeat=2)):
        yield [first._replace(worker="a", cached=cached), second._replace(worker="b")]


def test_a_full_worker_is_never_chosen_and_a_free_one_always_found() -> None:
    checked = 0
    for places, apart in itertools.product(worlds(), (False, True)):
        by_name = {p.worker: p for p in places}
        both = [p for p in places if p.prefill_room and p.decode_room]
        pairs = [(p, d) for p in places for d in places if p != d and p.prefill_room and d.decode_room]
        found = place(4096, places, rates(TIGHT), apart)
        assert (found is not None) == bool(both or apart and pairs)
        if found is not None:
            assert by_name[found.decode].decode_room
            assert by_name[found.prefill or found.decode].prefill_room
            assert found.prefill is None or apart and found.prefill != found.decode
        checked += 1
    assert checked == 2 * 2 * 48**2


def test_who_prefers_prompts_decodes_only_where_nobody_else_can() -> None:
    for places in worlds():
        found = place(4096, places, rates(TIGHT))
        if found is None:
            continue
        chosen = next(p for p in places if p.worker == found.decode)
        others = [p for p in places if p.decode_room and p.preference is not AdmissionPreference.PREFILL]
        assert chosen.preference is not AdmissionPreference.PREFILL or not others


def test_the_order_of_workers_decides_nothing() -> None:
    for places in itertools.islice(worlds(), 0, None, 3):
        assert place(4096, places, rates(TIGHT)) == place(4096, places[::-1], rates(TIGHT))


def test_idle_workers_compute_prompts_where_they_decode() -> None:
    found = place(1024, [WorkerPlace("a"), WorkerPlace("b")], rates(LOOSE))
    assert found is not None and found.prefill is None
    assert 0 < found.tpot_s < LOOSE.tpot_s and found.ttft_s < LOOSE.ttft_s


def test_long_prompts_leave_streams_with_a_tight_target_alone() -> None:
    streams = WorkerPlace("a", sequences=30, context=60_000, preference=AdmissionPreference.DECODE)
    found = place(8192, [streams, WorkerPlace("b", preference=AdmissionPreference.PREFILL)], rates(TIGHT))
    assert found is not None and (found.decode, found.prefill) == ("a", "b")
    # A few missing tokens are computed on the spot.
    warm = streams._replace(cached=8160)
    found = place(8192, [warm, WorkerPlace("b", preference=AdmissionPreference.PREFILL)], rates(TIGHT))
    assert found is not None and found.prefill is None


def test_no_prompt_is_moved_where_its_pages_would_be_waited_for() -> None:
    """Neither where it is computed nor where it decodes; unless nobody can take it whole."""
    streams = WorkerPlace("a", sequences=30, context=60_000, preference=AdmissionPreference.DECODE)
    prompts = WorkerPlace("b", preference=AdmissionPreference.PREFILL)
    for a, b in ((8191, 8192), (8192, 8191), (0, 0)):
        found = place(8192, [streams._replace(kv_room=a), prompts._replace(kv_room=b)], rates(TIGHT))
        assert found is not None and found.prefill is None
    found = place(8192, [streams._replace(kv_room=8192), prompts._replace(kv_room=8192)], rates(TIGHT))
    assert found is not None and (found.decode, found.prefill) == ("a", "b")
    split = [streams._replace(kv_room=0, prefill_room=0), prompts._replace(kv_room=0, decode_room=0)]
    found = place(8192, split, rates(TIGHT))
    assert found is not None and (found.decode, found.prefill) == ("a", "b")


def test_a_short_prompt_goes_where_it_decodes_if_the_prefill_queue_is_long() -> None:
    queue = WorkerPlace("b", queued=60_000, preference=AdmissionPreference.PREFILL)
    streams = WorkerPlace("a", sequences=10, context=10_000, preference=AdmissionPreference.DECODE)
    found = place(400, [streams, queue], rates(LatencyTargets(1.0, 0.02)))
    assert found is not None and (found.decode, found.prefill) == ("a", None)
    assert found.ttft_s <= FINE


def test_where_nothing_keeps_the_targets_no_prompt_moves_to_streams() -> None:
    queue = WorkerPlace("b", queued=60_000, preference=AdmissionPreference.PREFILL)
    streams = WorkerPlace("a", sequences=100, context=200_000, preference=AdmissionPreference.DECODE)
    found = place(8192, [streams, queue], rates(TIGHT))
    assert found is not None and (found.decode, found.prefill) == ("a", "b")


def test_the_longest_cached_prefix_wins_among_equals_in_any_cluster() -> None:
    for count in (2, FEW, 5 * FEW):
        places = [WorkerPlace(f"w{i}", cached=6000 if i == 1 else 0) for i in range(count)]
        found = place(8192, places, rates(LOOSE))
        assert isinstance(found, RequestPlacement) and (found.decode, found.prefill) == ("w1", None)
    crowded = [WorkerPlace("w0"), WorkerPlace("w1", sequences=250, context=700_000, cached=6000)]
    found = place(8192, crowded, rates(LOOSE))
    assert found is not None and found.decode == "w0"


def test_long_prompts_split_only_under_a_tight_target() -> None:
    mix = RequestMix(8192, 8192, 256)
    assert split(mix, 2, 0, rates(TIGHT)) == 1
    assert split(mix, 2, 0, rates(LatencyTargets(2.0, 0.015))) == 0
    assert split(RequestMix(256, 256, 512), 2, 0, rates(TIGHT)) == 0


def test_requests_in_bunches_split_under_a_tight_target_however_large_the_bunches_are_taken_for() -> None:
    """16 at once are taken for 6 to 26: what is seen for a minute says no more. All that is one decision."""
    for burst, now in itertools.product(range(6, 27), (0, 1)):
        mix = RequestMix(1024, 1024, 256, burst=burst)
        assert split(mix, 2, now, rates(TIGHT)) == 1
        assert split(mix, 2, 0, rates(LatencyTargets(1.0, 0.015))) == 0


def test_a_split_changes_for_a_clear_gain_only() -> None:
    mix = RequestMix(8192, 8192, 256)
    for bound in range(6, 20):
        asked = rates(LatencyTargets(1.0, 1e-3 * bound))
        now = split(mix, 8, 0, asked)
        assert split(mix, 8, now, asked) == now


def test_a_cluster_of_no_capacity_keeps_what_it_has() -> None:
    impossible = rates(LatencyTargets(0.001, 0.001))
    assert [split(RequestMix(8192, 8192, 256), 4, now, impossible) for now in range(4)] == [
        0,
        1,
        2,
        3,
    ]


def test_preferences_reach_their_number_and_leave_one_to_decode() -> None:
    for liked in itertools.product(AdmissionPreference, repeat=3):
        places = [WorkerPlace(f"w{i}", sequences=i, preference=one) for i, one in enumerate(liked)]
        for wanted in range(4):
            found = prefer(places, wanted)
            assert sum(one is AdmissionPreference.PREFILL for one in found.values()) == min(wanted, 2)
            assert (wanted == 0) == (set(found.values()) == {AdmissionPreference.ANY})
            held = {p.worker for p in places if p.preference is AdmissionPreference.PREFILL}
            kept = {name for name in held if found[name] is AdmissionPreference.PREFILL}
            assert len(kept) == min(len(held), wanted, 2)  # no worker changes without need


def test_the_idlest_change_first() -> None:
    places = [WorkerPlace("a", sequences=9), WorkerPlace("b", sequences=2), WorkerPlace("c", sequences=5)]
    assert [name for name, one in prefer(places, 1).items() if one is AdmissionPreference.PREFILL] == ["b"]


def test_more_load_is_never_faster_and_capacity_is_its_limit() -> None:
    mix = RequestMix(2000, 1500, 300, 1.3, 2.0)
    for prefilling in (0, 1, 3):
        bears = capacity(mix, 4, prefilling, rates(TIGHT))
        at = [steady(mix, bears * part, 4, prefilling, rates(TIGHT)) for part in (0.2, 0.6, 0.99, 1.05)]
        assert [s.ttft_s for s in at] == sorted(s.ttft_s for s in at)
        assert at[2].ttft_s <= TIGHT.ttft_s and at[2].tpot_s <= TIGHT.tpot_s
        assert at[3].ttft_s > TIGHT.ttft_s or at[3].tpot_s > TIGHT.tpot_s
