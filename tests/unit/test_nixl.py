"""The backend `nixl` over played bindings: READs that hang, break, come late, or after all was given up."""

from __future__ import annotations

import logging
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from fake_nixl import FakeNixl, nixlBackendError, nixlNotFoundError

from eyas import cli
from eyas.common.errors import Cancelled, ConfigError, TransferFailed
from eyas.common.types import RankPages
from kv_transfer import nics
from kv_transfer.area import PoolArea
from kv_transfer.backends import table
from kv_transfer.backends.base import BackendSite, CopyJob
from kv_transfer.backends.nixl import NixlBackend
from kv_transfer.backends.nixl_agent import GREET_S, NixlAgent, NixlPeer, OwnPages, RemotePages
from kv_transfer.backends.nixl_reads import COPY_S, REBUILD_AFTER, NixlReads, ReadLimits
from kv_transfer.copy_threads import CopyDone

PAGES, PAGE = 16, 4096
LATE = COPY_S + 1.0


def area(seed: int) -> PoolArea:
    made = PoolArea.new(memoryview(bytearray((PAGES + 1) * PAGE)), PAGE)
    made.pages[:] = np.random.default_rng(seed).integers(0, 256, made.pages.shape, np.uint8)
    return made


def job(*pages: int, number: int = 0) -> CopyJob:
    """Page p there becomes page p here."""
    return CopyJob(1, number, RankPages(0, pages), pages)


@dataclass
class Rig:
    """A puller with zeros, an owner with random bytes, and a clock that the test turns."""

    nixl: FakeNixl = field(default_factory=FakeNixl)
    mine: PoolArea = field(default_factory=lambda: area(1))
    owner: PoolArea = field(default_factory=lambda: area(2))
    now: float = 100.0

    def __post_init__(self) -> None:
        self.mine.pages[:] = 0
        self.reads = NixlReads(lambda: NixlAgent(self.nixl, [OwnPages.in_host(self.mine)]))
        self.peer = self.other()

    def other(self) -> NixlPeer:
        """One more agent over the owner's pages: the first, or that of a restarted owner."""
        agent = NixlAgent(self.nixl, [OwnPages.in_host(self.owner)])
        return NixlPeer(RemotePages(agent.name, agent.metadata(), agent.own[0].memory))

    def add(self, *jobs: CopyJob, peer: NixlPeer | None = None) -> list[CopyDone[CopyJob]]:
        for each in jobs:
            self.reads.add(peer or self.peer, each, self.now)
        return self.step()

    def step(self, seconds: float = 0.0, times: int = 6) -> list[CopyDone[CopyJob]]:
        """What stopped in `seconds`; several looks, since a greeting takes some."""
        self.now += seconds
        return [done for _ in range(times) for done in self.reads.step(self.now)]

    def written(self) -> list[int]:
        return [page for page in range(PAGES) if self.mine.pages[page].any()]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.nixl.wrong == []


def held(rig: Rig, *jobs: CopyJob) -> list[CopyDone[CopyJob]]:
    """`jobs` run over an open link, and stay."""
    (proof,) = rig.add(job(0, number=99))
    assert proof.error is None
    rig.nixl.hold = True
    return rig.add(*jobs)


# --- a READ that was given up still writes ------------------------------------------------------------


@pytest.mark.parametrize("way", ["late", "cancelled", "closed"])
def test_what_was_given_up_is_reported_when_it_has_stopped_and_not_before(rig: Rig, way: str) -> None:
    assert held(rig, job(1, 2)) == []
    match way:
        case "late":
            assert rig.step(LATE) == []
        case "cancelled":
            rig.reads.cancel(job(1, 2))
        case "closed":
            rig.reads.close()
    assert rig.step(3600.0) == [] and rig.reads.busy and not rig.reads.urgent
    assert rig.written() == [0]
    rig.nixl.let_go()  # the bytes land in pages that are still the job's
    (done,) = rig.step()
    assert rig.written() == [0, 1, 2] and done.bytes == 0
    assert isinstance(done.error, TransferFailed if way == "late" else Cancelled)
    assert not rig.reads.busy


def test_an_answer_that_does_not_say_stopped_is_none(rig: Rig) -> None:
    """(The library says "not found" of READs whose peer was forgotten, and they write all the same.)"""
    held(rig, job(1))
    (read,) = rig.nixl.running
    read.status = nixlNotFoundError("NOT_FOUND")
    assert rig.step(1.0) == [] and rig.step(LATE) == []
    read.land()
    assert len(rig.step()) == 1


@pytest.mark.parametrize("status", ["ERR", nixlBackendError("BACKEND")])
def test_a_read_that_breaks_has_stopped(rig: Rig, status: object) -> None:
    held(rig, job(1))
    rig.nixl.running[0].status = status
    (done,) = rig.step()
    assert isinstance(done.error, TransferFailed) and rig.peer.current


def test_a_peer_whose_read_hangs_is_asked_nothing_more_until_that_has_stopped(rig: Rig) -> None:
    held(rig, job(1))
    rig.step(LATE)
    (refused,) = rig.add(job(2, number=1))
    assert refused.error is not None and "has not stopped since" in refused.error.message
    rig.nixl.let_go()
    assert [done.job.number for done in rig.step()] == [0]
    (done,) = rig.add(job(3, number=2))
    assert done.error is None and rig.written() == [0, 1, 3]


# --- peers --------------------------------------------------------------------------------------------


def test_a_peer_that_dies_ends_its_copies_at_once(rig: Rig) -> None:
    assert held(rig, job(1), job(2, number=1)) == []
    rig.nixl.kill(rig.peer.remote.agent)
    both = rig.step()
    assert [type(done.error) for done in both] == [TransferFailed] * 2
    assert not rig.peer.current and rig.written() == [0]
    (again,) = rig.add(job(3))
    assert isinstance(again.error, TransferFailed)


def test_a_restarted_peer_is_another_agent(rig: Rig) -> None:
    held(rig, job(1))
    rig.nixl.kill(rig.peer.remote.agent)
    rig.step()
    rig.nixl.let_go()
    (done,) = rig.add(job(4), peer=rig.other())
    assert done.error is None and rig.written() == [0, 4]
    np.testing.assert_array_equal(rig.mine.pages[4], rig.owner.pages[4])


def test_a_greeting_that_hangs_ends_the_wait_and_touches_no_page(rig: Rig) -> None:
    rig.nixl.hold = True
    assert rig.add(job(1)) == [] and rig.step(GREET_S - 0.1) == []
    (done,) = rig.step(0.2)
    assert done.error is not None and "has not answered within 10 s" in done.error.message
    (at_once,) = rig.add(job(2))
    assert at_once.error is not None and "has not stopped since" in at_once.error.message
    rig.nixl.let_go()
    rig.step()
    assert rig.written() == []
    assert rig.add(job(3))[0].error is None and rig.written() == [3]


def test_metadata_of_another_agent_is_refused(rig: Rig) -> None:
    other = rig.other().remote
    (done,) = rig.add(job(1), peer=NixlPeer(RemotePages(other.agent, rig.peer.remote.metadata, other.memory)))
    assert done.error is not None and f"not of {other.agent}" in done.error.message


def test_a_peer_that_is_kept_by_no_one_is_forgotten(rig: Rig) -> None:
    rig.add(job(1))
    (mine,) = [agent for agent in rig.nixl.agents.values() if agent.known]
    old, rig.peer = rig.peer.remote.agent, rig.other()
    assert mine.known == {old}
    rig.add(job(2))
    assert mine.known == {rig.peer.remote.agent}


# --- the agent ----------------------------------------------------------------------------------------


def test_faults_in_a_row_make_the_agent_anew_and_what_peers_know_stays(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    exported = rig.reads.export()
    assert rig.add(job(1))[0].error is None
    before = set(rig.nixl.agents)
    rig.nixl.faults = REBUILD_AFTER
    with caplog.at_level(logging.WARNING):
        for number in range(REBUILD_AFTER):
            assert isinstance(rig.add(job(1, number=number))[0].error, TransferFailed)
    assert "its agent is made anew" in caplog.text
    assert rig.add(job(2))[0].error is None
    (new,) = set(rig.nixl.agents) - before
    assert rig.nixl.agents[new].known and rig.reads.export() is exported


def test_an_agent_that_never_read_anything_is_not_made_anew(rig: Rig) -> None:
    """(Another one would not reach what it cannot reach.)"""
    rig.nixl.faults = 5 * REBUILD_AFTER
    for number in range(5 * REBUILD_AFTER):
        assert isinstance(rig.add(job(1, number=number))[0].error, TransferFailed)
    assert len(rig.nixl.agents) == 2


def test_faults_with_success_between_them_are_none(rig: Rig) -> None:
    for number in range(2 * REBUILD_AFTER):
        rig.nixl.faults = 1
        assert rig.add(job(1, number=number))[0].error is not None
        assert rig.add(job(2, number=number))[0].error is None
    assert len(rig.nixl.agents) == 2


def test_bytes_in_flight_are_bounded_and_all_come(rig: Rig) -> None:
    rig.reads.limits = ReadLimits(2 * PAGE, 6 * PAGE)
    jobs = [job(*range(8)), job(*range(8, 16), number=1)]
    assert held(rig, *jobs) == []
    for most in (3, 3, 2):
        assert len(rig.nixl.running) == most
        for read in rig.nixl.running:
            read.land()
        results = rig.step(times=1)
    assert [(done.error, done.bytes) for done in results][-1] == (None, 8 * PAGE)
    np.testing.assert_array_equal(rig.mine.pages[:PAGES], rig.owner.pages[:PAGES])


def test_reads_that_are_late_leave_room_for_others(rig: Rig) -> None:
    rig.reads.limits = ReadLimits(PAGE, PAGE)
    held(rig, job(1))
    rig.step(LATE)
    rig.nixl.hold = False
    (done,) = rig.add(job(2, number=1), peer=rig.other())
    assert done.error is None


# --- the backend and its thread -----------------------------------------------------------------------


def test_one_thread_makes_all_calls_and_close_says_what_runs() -> None:
    nixl, owner, mine = FakeNixl(), area(1), area(2)
    owners, puller = (NixlBackend(BackendSite(a, "", None), lambda: nixl) for a in (owner, mine))  # type: ignore[arg-type]
    export = owners.export()
    assert export is not None
    source = puller.open(export)
    puller.start(source, job(1))
    wait_for_one(puller)
    nixl.hold = True
    puller.start(source, job(2))
    while not nixl.running:
        time.sleep(0.001)
    assert puller.close(time.monotonic() + 0.1) is False
    assert puller.poll() == []
    nixl.let_go()
    assert puller.close(time.monotonic() + 5.0)
    (result,) = puller.poll()
    assert isinstance(result.error, Cancelled)
    assert owners.close(time.monotonic() + 5.0)
    assert nixl.wrong == [] and all(len(callers) == 1 for callers in nixl.threads.values())


def wait_for_one(backend: NixlBackend) -> None:
    deadline = time.monotonic() + 5.0
    while not (results := backend.poll()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert [result.error for result in results] == [None]


@pytest.mark.parametrize("field", ["agent", "metadata", "memory"])
def test_an_export_of_something_else_is_refused(field: str) -> None:
    backend = NixlBackend(BackendSite(area(1), "", None), FakeNixl)  # type: ignore[arg-type]
    export = {"agent": b"a", "metadata": b"m", "memory": struct.pack("<QQQq", 4096, 1, PAGE, -1)}
    backend.open(export)
    with pytest.raises(ConfigError, match="is not a NIXL agent's"):
        backend.open({name: value for name, value in export.items() if name != field})


@pytest.mark.parametrize("pages", [0, 2**31, 2**64 - 1])
def test_an_export_of_no_pages_or_too_many_is_refused(pages: int) -> None:
    backend = NixlBackend(BackendSite(area(1), "", None), FakeNixl)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"has {pages} pages"):
        backend.open(
            {
                "agent": b"a",
                "metadata": b"m",
                "memory": struct.pack("<QQQq", 4096, pages, PAGE, -1),
            }
        )


def test_staging_is_told_as_what_it_is() -> None:
    """A peer that reads its slots without asking would get bytes of anything."""
    site = BackendSite(area(1), "", None, (object(),))  # type: ignore[arg-type]
    backend = NixlBackend(site, FakeNixl)
    export = backend.export()
    assert export is not None
    source = backend.open(export)
    assert isinstance(source, NixlPeer) and source.is_staging
    assert backend.close(time.monotonic() + 5.0)


def test_a_library_that_cannot_make_an_agent_offers_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> None:
        raise ConfigError("no such library")

    backend = NixlBackend(BackendSite(area(1), "", None), broken)  # type: ignore[arg-type]
    assert backend.export() is None and "no such library" in caplog.text
    assert backend.close(time.monotonic() + 5.0)


def test_without_the_library_it_is_refused_by_name_and_left_out_of_auto(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: None)
    assert table.usable() == ["cuda_ipc", "shm", "tcp", "grpc"] and table.missing("auto") == ""
    assert cli.main(["serve", "--transfer", "nixl"]) != 0
    assert "pip install eyas[nixl]" in capsys.readouterr().err
    monkeypatch.setattr(table.importlib.util, "find_spec", lambda name: object())
    assert table.usable() == ["cuda_ipc", "shm", "rdma", "rdma_slots", "nixl", "tcp", "grpc"]
    assert table.usable(encrypted=True) == ["cuda_ipc", "shm", "grpc"]
    for command in (["serve"], ["worker"]):
        assert cli.main([*command, "--transfer", "nixl", "--tls-dir", "x"]) == 2
        assert "nixl does not encrypt KV" in capsys.readouterr().err


@pytest.mark.parametrize(("here", "there"), [(True, True), (True, False), (False, True), (False, False)])
def test_auto_passes_over_a_library_without_cards_at_both_ends(
    here: bool, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One end's card carries nothing by RDMA to a host without one."""
    nixl = FakeNixl()
    monkeypatch.setattr(nics, "any_up", lambda: there)
    export = NixlBackend(BackendSite(area(1), "", None), lambda: nixl).export()  # type: ignore[arg-type]
    monkeypatch.setattr(nics, "any_up", lambda: here)
    puller = NixlBackend(BackendSite(area(1), "", None), lambda: nixl)  # type: ignore[arg-type]
    said = puller.drawback(export or {})
    whose = "this" if not here else "the peer's"
    assert said == "" if here and there else said.startswith(f"no RDMA card of {whose} host is up")
