"""Routing decisions as values."""

from __future__ import annotations

import msgspec

from eyas.common.types import Role, WorkerBacklog
from gateway.routing.in_flight import UnderWay
from gateway.routing.router import (
    RequestRoute,
    RouterCandidate,
    affinity,
    choose_decode,
    choose_prefill,
    route,
    wants_draft,
)
from tests.unit.routed_workers import DECODE, DRAFT, PREFILL, worker

UNIFIED = (Role.PREFILL, Role.DECODE, Role.DRAFT)


def test_a_unified_worker_needs_no_prefill() -> None:
    assert route([worker("u", UNIFIED)]) == RequestRoute("u", None)
    assert route([worker("p", PREFILL), worker("u", UNIFIED)]) == RequestRoute("u", None)


def test_split_roles_make_a_pair_or_nothing() -> None:
    assert route([worker("p", PREFILL), worker("d", DECODE)]) == RequestRoute("d", "p")
    for lonely in (PREFILL, DECODE, DRAFT):
        assert route([worker("w", lonely)]) is None
    assert route([]) is None


def test_a_decode_worker_may_borrow_a_unified_workers_prefill() -> None:
    workers = [worker("u", UNIFIED, in_flight=3), worker("d", DECODE)]
    assert route(workers) == RequestRoute("d", "u")


def test_the_least_loaded_is_chosen() -> None:
    workers = [worker("a", DECODE, running=2), worker("b", DECODE, waiting=1), worker("c", DECODE, running=3)]
    assert choose_decode(workers).info.worker == "b"
    # What this gateway sent since the last report counts.
    workers[1] = worker("b", DECODE, waiting=1, in_flight=5)
    assert choose_decode(workers).info.worker == "a"
    # Ties go to the emptier pool.
    full, empty = worker("a", PREFILL, pages_used=90), worker("b", PREFILL, pages_used=10)
    assert choose_prefill([full, empty]).info.worker == "b"


def test_who_cannot_take_a_request() -> None:
    for reason in ({"serving": False}, {"connected": False}):
        assert choose_decode([worker("d", DECODE, **reason)]) is None
    assert choose_prefill([worker("p", PREFILL, connected=False)]) is not None
    assert choose_prefill([worker("p", PREFILL, serving=False)]) is None


def test_workers_to_avoid_are_the_last_resort() -> None:
    workers = [worker("a", DECODE), worker("b", DECODE, running=9)]
    assert choose_decode(workers, {"a"}).info.worker == "b"
    assert choose_decode(workers, {"a", "b"}).info.worker == "a"


def test_draft_pages_are_offered_only_to_a_drafter() -> None:
    assert wants_draft([worker("p", PREFILL), worker("x", DRAFT)])
    assert not wants_draft([worker("p", PREFILL), worker("d", DECODE)])
    assert not wants_draft([worker("x", DRAFT, draft_fingerprint="")])
    assert not wants_draft([worker("x", DRAFT, serving=False)])


def test_a_prefix_counts_against_what_is_queued() -> None:
    known = worker("known", PREFILL, cached=500, backlog=WorkerBacklog(queued=400))
    assert choose_prefill([known, worker("idle", PREFILL)]) == known
    late = worker("known", PREFILL, cached=500, backlog=WorkerBacklog(queued=600))
    assert choose_prefill([late, worker("idle", PREFILL)]).info.worker == "idle"
    # This gateway's own part of the report is as it is now: 600 were reported, and 300 of them are computed.
    own = msgspec.structs.replace(late.info, backlog=WorkerBacklog(queued=600))
    now = RouterCandidate(own, cached=500, under_way=UnderWay(queued=300), reported=UnderWay(queued=600))
    assert choose_prefill([now, worker("idle", PREFILL)]) == now


def test_a_conversation_has_a_home_where_nothing_is_cached() -> None:
    names = [f"w{i}" for i in range(4)]

    def home(session: str, known: list[str], **changes: object) -> str:
        workers = [worker(name, PREFILL, **(changes if name == "w1" else {})) for name in known]
        at = [RouterCandidate(**{**vars(w), "affinity": affinity(session, w.info.worker)}) for w in workers]
        return choose_prefill(at).info.worker

    homes = {f"s{i}": home(f"s{i}", names) for i in range(400)}
    counts = [list(homes.values()).count(name) for name in names]
    assert min(counts) > 60  # even
    for session, at in homes.items():
        left = home(session, names[:3])
        assert left == at or at == "w3"  # a worker that leaves moves its own conversations alone
        assert home(session, names, cached=16) == "w1"  # what is cached counts more
        assert home(session, names, in_flight=5) != "w1" or at != "w1"  # and a crowd is avoided
    assert affinity("", "w1") == affinity("", "w2") == 0.0
