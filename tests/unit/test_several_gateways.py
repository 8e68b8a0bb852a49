"""What a gateway knows of a worker that others use too: its own part now, theirs by the last report."""

from __future__ import annotations

import msgspec
import pytest

from eyas.common.types import Role, WorkerBacklog, WorkerInfo
from gateway.routing.in_flight import InFlightLedger, UnderWay
from gateway.routing.layouts import place_of
from gateway.routing.placement import AdmissionPreference
from gateway.routing.router import RouterCandidate

IDLE = WorkerInfo("w", (Role.PREFILL, Role.DECODE), 1, "m", "f", "", 4096, 1000, 100)
ONE = UnderWay(sequences=1, context=100, queued=100)


def report(sequences: int, queued: int = 0) -> WorkerInfo:
    """A worker with requests of 100 tokens each."""
    backlog = WorkerBacklog(sequences, 100 * sequences, queued, prefill_room=8, decode_room=8)
    return msgspec.structs.replace(IDLE, running=sequences, backlog=backlog)


class Gateway:
    """One of several: its ledger, and the last report that it has seen."""

    def __init__(self) -> None:
        self._ledger = InFlightLedger()
        self.hears(report(0))

    def hears(self, info: WorkerInfo) -> None:
        self._info = info
        self._ledger.at_report(info)

    def sends(self, requests: int) -> None:
        for _ in range(abs(requests)):
            self._ledger.add("w", ONE, 1 if requests > 0 else -1)

    @property
    def sees(self) -> RouterCandidate:
        now = self._ledger.now("w")
        return RouterCandidate(
            self._info,
            in_flight=now.total,
            connected=True,
            under_way=now,
            reported=self._ledger.at_report(self._info),
        )


@pytest.mark.parametrize("others", [0, 3])
def test_both_policies_count_each_request_once(others: int) -> None:
    gateways = [Gateway(), Gateway()]
    gateways[0].sends(4)
    gateways[1].sends(others)
    for gateway in gateways:
        gateway.hears(report(4 + others, queued=100 * (4 + others)))
    for gateway in gateways:
        assert (
            gateway.sees.sequences == place_of(gateway.sees, AdmissionPreference.ANY).sequences == 4 + others
        )
        assert place_of(gateway.sees, AdmissionPreference.ANY).queued == 100 * (4 + others)
    gateways[0].sends(2)  # known at once to the one that sent them, and by the next report to the other
    assert [gateway.sees.sequences for gateway in gateways] == [6 + others, 4 + others]
    gateways[0].sends(-6)
    assert [gateway.sees.sequences for gateway in gateways] == [others, 4 + others]
    for gateway in gateways:
        gateway.hears(report(others))
        assert gateway.sees.sequences == others


def test_a_report_older_than_what_was_sent_hides_nothing() -> None:
    gateway = Gateway()
    gateway.sends(3)
    gateway.hears(report(0))  # the worker said so before they arrived
    assert gateway.sees.sequences == place_of(gateway.sees, AdmissionPreference.ANY).sequences == 3
