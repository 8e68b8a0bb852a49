"""The steps of an update on one worker, whatever comes between them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from eyas.common.errors import InvalidRequest
from eyas.common.weights import (
    PREPARE_S,
    BytesSource,
    CheckJoin,
    CloseForWeights,
    CommitWeights,
    DropWeights,
    JoinGroup,
    PrepareWeights,
    ReadWeight,
    Running,
    WeightsCommand,
    WeightsReply,
)
from eyas.engine.ipc.messages import WeightsAnswer, WeightsCall
from eyas.engine.ipc.pulse import Beat, no_pulse
from eyas.engine.loop.weight_updates import StagedWeights, WeightUpdates


@dataclass
class HandStore:
    """Weights that are their version's name; `reads` lets them be read."""

    served: str = "start"
    staged: str = ""
    dropped: list[str] = field(default_factory=list)
    tidied: int = 0
    reads: threading.Event = field(default_factory=threading.Event)

    def stage(self, update: PrepareWeights) -> StagedWeights:
        assert self.reads.wait(5.0)
        self.staged = update.version
        return StagedWeights(update.version, 1, 1)

    def drop(self, staged: StagedWeights) -> None:
        self.staged = ""
        self.dropped.append(staged.digest)

    def tidy(self) -> None:
        self.tidied += 1

    def write(self, staged: StagedWeights, beat: Beat) -> None:
        assert self.staged == staged.digest
        self.served = self.staged

    def read(self, name: str, count: int) -> tuple[float, ...]:
        return (3.0,) * count

    def check_join(self, group: str, backend: str) -> None:
        if backend == "nccl":
            raise InvalidRequest("a GPU is needed")

    def join(self, command: JoinGroup) -> None:
        assert self.reads.wait(5.0)

    def leave(self, group: str) -> None:
        raise AssertionError


class Worker:
    """Its loop runs when the test says so."""

    def __init__(self) -> None:
        self.store = HandStore()
        self.store.reads.set()
        self.adapters = SimpleNamespace(busy=False, renew=lambda beat: None)
        self.away = False
        self.free = True  # no page is in use
        self._answers: dict[int, WeightsReply] = {}
        self._between: list[Callable[[], None]] = []
        self._calls = 0
        requests: Any = SimpleNamespace(adapters=self.adapters, closed=None, weights="")
        outbox: Any = SimpleNamespace(add=self._add)
        self.updates = WeightUpdates(
            self.store,
            requests,
            outbox,
            work=str,
            forget=lambda: 0 if self.free else None,
            between=self._between.append,
            beat=no_pulse,
            away=lambda: self.away,
            paused=frozenset,
        )

    def _add(self, answer: WeightsAnswer) -> None:
        self._answers[answer.call] = answer.reply

    def send(self, command: WeightsCommand) -> int:
        self._calls += 1
        self.updates.receive(WeightsCall(self._calls, command))
        return self._calls

    def loop(self, after_s: float = 0.0) -> None:
        calls, self._between[:] = list(self._between), []
        for call in calls:
            call()
        self.updates.poll(time.monotonic() + after_s)

    def answer(self, call: int) -> WeightsReply:
        for _ in range(500):
            self.loop()
            if call in self._answers:
                return self._answers[call]
            time.sleep(0.01)
        raise AssertionError("no answer")

    def tell(self, command: WeightsCommand) -> WeightsReply:
        return self.answer(self.send(command))

    def closed_for(self, version: str) -> None:
        for command in (prepare(version), close(version)):
            assert self.tell(command).failure is None


def prepare(version: str, generation: int = 1) -> PrepareWeights:
    return PrepareWeights(version, generation, BytesSource(()), True)


def close(version: str) -> CloseForWeights:
    return CloseForWeights(version, Running.DRAIN, 5.0, 5.0)


def test_weights_that_are_being_written_cannot_be_dropped() -> None:
    """A gateway that gave the commit up may say so before it is done."""
    worker = Worker()
    worker.closed_for("new")
    worker.free = False
    commit = worker.send(CommitWeights("new"))
    worker.loop()
    assert worker.tell(DropWeights("new")).failure is not None
    worker.free = True
    assert worker.answer(commit).failure is None
    assert (worker.store.served, worker.updates.info.version) == ("new", "new")


def test_weights_of_which_nothing_more_is_heard_go() -> None:
    """Else the host's memory would have them until the next update."""
    worker = Worker()
    worker.closed_for("new")
    worker.loop(after_s=6.0)
    assert worker.tell(close("new")).failure is not None
    assert worker.tell(prepare("other")).failure is None
    worker.loop(after_s=PREPARE_S + 1.0)
    assert worker.tell(close("other")).failure is not None
    assert worker.tell(prepare("last")).failure is None  # behind the others in the thread
    assert (worker.store.dropped, worker.store.tidied) == (["new", "other"], 1)


def test_what_new_weights_have_replaced_is_let_go_beside_the_steps() -> None:
    worker = Worker()
    worker.closed_for("new")
    threads = list[str]()
    worker.store.drop = lambda staged: threads.append(threading.current_thread().name)  # type: ignore[method-assign]
    assert worker.tell(CommitWeights("new")).failure is None
    assert worker.tell(prepare("other", 2)).failure is None
    assert len(threads) == 1 and threads[0].startswith("weights")


def test_a_commit_that_finds_pages_in_use_ends() -> None:
    worker = Worker()
    worker.closed_for("new")
    worker.free = False
    commit = worker.send(CommitWeights("new"))
    worker.loop(after_s=6.0)
    failure = worker.answer(commit).failure
    assert failure is not None and "pages" in failure.message
    worker.loop()
    assert (worker.store.served, worker.updates.info.closed) == ("start", False)


def test_no_worker_closes_while_other_weights_are_read() -> None:
    """Those would take the place of the ones that it closes for."""
    worker = Worker()
    assert worker.tell(prepare("new")).failure is None
    worker.store.reads.clear()
    other = worker.send(prepare("other"))
    assert worker.tell(close("new")).failure is not None
    worker.store.reads.set()
    assert worker.answer(other).failure is None


def test_a_commit_writes_to_no_memory_that_has_left() -> None:
    worker = Worker()
    worker.closed_for("new")
    worker.away = True
    failure = worker.tell(CommitWeights("new")).failure
    assert failure is not None and "resumed first" in failure.message
    assert (worker.store.served, worker.updates.info.closed) == ("start", False)


def test_a_commit_renews_adapters_once_none_is_read() -> None:
    """What is being read takes numbers of the old weights."""
    worker, renewed = Worker(), list[str]()
    worker.adapters.renew = lambda beat: renewed.append(worker.store.served)
    worker.closed_for("new")
    worker.adapters.busy = True  # one is loaded meanwhile
    commit = worker.send(CommitWeights("new"))
    worker.loop()
    worker.loop()
    assert (worker.store.served, renewed) == ("start", [])
    worker.adapters.busy = False
    assert worker.answer(commit).failure is None
    assert renewed == ["new"]


def test_two_gateways_commit_the_same_weights() -> None:
    """One repairs what the other has not finished: both hear that the weights are in place."""
    worker = Worker()
    worker.closed_for("new")
    calls = [worker.send(CommitWeights("new")) for _ in range(2)]
    assert [worker.answer(call).failure for call in calls] == [None, None]
    assert worker.tell(CommitWeights("new")).failure is None
    assert worker.tell(CommitWeights("other")).failure is not None
    assert (worker.store.served, worker.updates.info.closed) == ("new", False)


def test_whether_it_can_join_is_answered_while_it_waits_for_others_of_a_group() -> None:
    """A group of that name is the one that it waits for: whoever joins again and fails would leave it."""
    worker = Worker()
    worker.store.reads.clear()
    joining = worker.send(JoinGroup("one", "127.0.0.1:1", 1, 2, "gloo", 5.0))
    assert worker.tell(CheckJoin("other", "gloo")).failure is None
    assert "a GPU is needed" in str(worker.tell(CheckJoin("other", "nccl")).failure)
    assert worker.tell(ReadWeight("lm_head.weight", 2)).numbers == (3.0, 3.0)
    assert "waits for the others of a group 'one'" in str(worker.tell(CheckJoin("one", "gloo")).failure)
    worker.store.reads.set()
    assert worker.answer(joining).failure is None
    assert worker.tell(CheckJoin("one", "gloo")).failure is None, "the store says whether it is in one"
