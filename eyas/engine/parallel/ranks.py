"""The processes of an engine with several ranks: rank 0 leads, the other ranks follow.

Rank 0 lives in the engine process and schedules. Ranks 1 .. n-1 are separate processes that run the same
device work in the same order. An engine of one rank has no followers and uses only `RankInfo` from here.

The group lives and dies together: when a follower ends, rank 0's next call raises EngineError. The end of
rank 0 kills its followers, also those that wait on a device forever.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Self

import msgspec

from eyas.common.errors import EngineError
from eyas.common.machine.processes import importing_safely

PR_SET_PDEATHSIG = 1
SEND_S = 10.0  # a follower that takes no message within this time is stuck
LEAVE_S = 5.0  # a follower that does not leave within this time is killed
LENGTH_BYTES = 4
POLL_S = 0.2  # while a pipe is silent, its process is checked at this interval


class RankCall(msgspec.Struct, frozen=True, array_like=True):
    """One message: what to do, integers (a step's shape, say), and an array's bytes. Nothing is pickled."""

    kind: str
    numbers: tuple[int, ...] = ()
    data: bytes = b""


RankCalls = Mapping[str, Callable[[RankCall], None]]
"""What a rank does at a call, by the call's kind."""

READY = "ready"
FAILED = "failed"
ANSWER = "answer"


@dataclass(frozen=True)
class RankInfo:
    """One rank's place in a group. `meeting`: the path of an empty file, the same for all ranks."""

    rank: int = 0
    ranks: int = 1
    meeting: str = ""


class RankChannel:
    """An end of the pipe between a follower and rank 0. Iterating yields calls until the other end closes."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._decoder = msgspec.msgpack.Decoder(RankCall)

    def __iter__(self) -> Iterator[RankCall]:
        while (call := self.read()) is not None:
            yield call

    def read(self) -> RankCall | None:
        """The next call; None once the other end is closed."""
        with contextlib.suppress(ConnectionResetError):
            payload = self._next(int.from_bytes(self._next(LENGTH_BYTES), "little"))
            if payload:
                return self._decoder.decode(payload)
        return None

    def _next(self, count: int) -> bytes:
        """The next `count` bytes, and none ahead of them: a wait for the pipe is a wait for the next call.
        Fewer where the other end was closed.
        """
        read = bytearray()
        while len(read) < count and (more := self._pipe.recv(count - len(read))):
            read += more
        return bytes(read)

    def ready(self) -> None:
        """Tells rank 0, which waits in `RankFollowers.wait_ready`, that this rank is loaded."""
        self._pipe.sendall(_framed(RankCall(READY)))

    def answer(self, number: int, data: bytes = b"") -> None:
        """Answers a call of `RankFollowers.ask`; does nothing if rank 0 is gone. Any thread may."""
        with contextlib.suppress(OSError):
            self._pipe.sendall(_framed(RankCall(ANSWER, (number,), data)))

    def failed(self, reason: str) -> None:
        """Tells rank 0 why this rank ends; does nothing if rank 0 is gone."""
        with contextlib.suppress(OSError):  # rank 0 may be gone too
            self._pipe.sendall(_framed(RankCall(FAILED, data=reason.encode())))

    def close(self) -> None:
        """Closes this end, which is the end of the stream for the other."""
        self._pipe.close()


def follow(channel: RankChannel, calls: RankCalls) -> None:
    """The main loop of a follower: runs the function for each call's kind until rank 0 closes the channel."""
    for call in channel:
        calls[call.kind](call)


FollowerMain = Callable[[RankInfo, RankChannel], None]
"""What a follower's process runs: it loads, says ready, joins its group, follows. It must be picklable."""


class RankFollowers:
    """Ranks 1 .. ranks-1: the constructor starts them, `close` ends them. `rank_info` is that of rank 0.

    `meeting` is the path of a file that the constructor makes and `close` removes. After a kill it stays: it
    lies where the owner of the process looks for what a killed one has left.

    One thread makes it; when that ends, the followers are killed. Others may send calls and wait for answers.
    """

    def __init__(self, main: FollowerMain, ranks: int, meeting: Path) -> None:
        meeting.touch(mode=0o600, exist_ok=False)
        self._meeting = meeting
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self.rank_info = RankInfo(0, ranks, str(meeting))
        others = [RankInfo(rank, ranks, str(meeting)) for rank in range(1, ranks)]
        self._followers = [_FollowerProcess(main, rank_info) for rank_info in others]
        # A process that ends waits for its children, and asks them by SIGTERM, to which these are deaf.
        self._end = Finalize(None, self._close, exitpriority=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until every follower has said ready. Raises EngineError if one ends or is late."""
        deadline, left = time.monotonic() + timeout_s, self._followers
        while left := [follower for follower in left if not follower.is_ready()]:
            if time.monotonic() > deadline:
                raise EngineError(f"{left[0].name} was not ready in time")
            wait([follower.pipe for follower in left], POLL_S)

    def check(self) -> None:
        """Raises EngineError if a follower has ended, with the reason that it gave."""
        for follower in self._followers:
            follower.check()

    def broadcast(self, call: RankCall) -> None:
        """Sends `call` to every follower, with one write each.

        Raises EngineError if one has ended, or takes nothing for SEND_S.
        """
        payload = _framed(call)
        with self._sending:
            for follower in self._followers:
                follower.check()
                follower.send(payload)

    def send(self, rank: int, call: RankCall) -> None:
        """Sends `call` to one follower. Raises EngineError as `broadcast`."""
        follower = self._followers[rank - 1]
        with self._sending:
            follower.check()
            follower.send(_framed(call))

    def ask(self, call: RankCall) -> int:
        """Broadcasts a call that every follower answers. Returns the number of the answers, which stands
        before the call's own numbers.
        """
        number = next(self._numbers)
        self.broadcast(RankCall(call.kind, (number, *call.numbers), call.data))
        return number

    def answers(self, number: int, wait_s: float, beat: Callable[[], None] = lambda: None) -> list[bytes]:
        """The answer of every follower, rank 1's first. `beat` is called meanwhile.

        Raises EngineError if one has ended, or does not answer within `wait_s`.
        """
        deadline, answers = time.monotonic() + wait_s, list[bytes]()
        for follower in self._followers:
            while (data := follower.answer(number)) is None:
                beat()
                self.check()
                if time.monotonic() > deadline:
                    raise EngineError(f"{follower.name} has not answered in time")
            answers.append(data)
        return answers

    def dismiss(self) -> None:
        """Lets every follower leave after the calls that it has received; no call may follow.

        If the caller shares a `ProcessGroup` with them, it closes that now, as they do, then calls `close`.
        """
        for follower in self._followers:
            follower.dismiss()

    def close(self) -> None:
        """Dismisses the followers and kills those left after LEAVE_S. A second call does nothing.

        A process that ends before calls it by itself.
        """
        self._end()

    def _close(self) -> None:
        self.dismiss()
        deadline = time.monotonic() + LEAVE_S
        for follower in self._followers:
            follower.reap(deadline)
        self._meeting.unlink(missing_ok=True)


class _FollowerProcess:
    """One follower's process, and rank 0's end of its pipe."""

    def __init__(self, main: FollowerMain, rank_info: RankInfo) -> None:
        self.name = f"rank {rank_info.rank} of {rank_info.ranks}"
        self.pipe, theirs = socket.socketpair()
        self.pipe.settimeout(SEND_S)
        self._reports = RankChannel(self.pipe)
        self._reading = threading.Lock()
        self._answers: dict[int, bytes] = {}
        self._last_words = ""
        context = multiprocessing.get_context("spawn")
        arguments = (main, rank_info, theirs, os.getpid())
        self._process: SpawnProcess = context.Process(target=_run, args=arguments, daemon=True)
        with importing_safely():
            self._process.start()
        theirs.close()  # so that its end is the end of the stream

    def check(self) -> None:
        if not self._process.is_alive():
            raise EngineError(f"{self.name} has ended: {self._reason()}")

    def send(self, payload: bytes) -> None:
        try:
            self.pipe.sendall(payload)
        except TimeoutError:
            raise EngineError(f"{self.name} has taken no message for {SEND_S:g} s") from None
        except OSError:
            self._process.join(LEAVE_S)
            raise EngineError(f"{self.name} has ended: {self._reason()}") from None

    def is_ready(self) -> bool:
        """True if it says so by now; asked until it is True. Raises EngineError if it has ended instead."""
        if not wait([self.pipe], timeout=0):
            self.check()
            return False
        call = self._reports.read()
        if call is None or call.kind != READY:
            self._process.join(LEAVE_S)
            raise EngineError(f"{self.name} could not start: {_words(call) or self._exit()}")
        return True

    def answer(self, number: int) -> bytes | None:
        """Its answer; None: it has said nothing for a moment, or something else."""
        if self.pipe.fileno() < 0:
            raise EngineError(f"{self.name} was dismissed")
        with self._reading:
            ended = number not in self._answers and self._says_more(POLL_S) and not self._hear()
            data = self._answers.pop(number, None)
        if ended:
            self._process.join(POLL_S)
        return data

    def dismiss(self) -> None:
        self._reports.close()

    def reap(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _says_more(self, wait_s: float) -> bool:
        """Whether there is something to read: the end of the stream, too. False once this end is closed."""
        return self.pipe.fileno() >= 0 and bool(wait([self.pipe], wait_s))

    def _hear(self) -> bool:
        """Reads a message, which is there; False: the end of the stream."""
        call = self._reports.read()
        if call is None:
            return False
        if call.kind == ANSWER:
            self._answers[call.numbers[0]] = call.data
        else:
            self._last_words = _words(call)
        return True

    def _reason(self) -> str:
        """The reason why a process has ended: its last words, or else its exit code."""
        with self._reading:
            while self._says_more(0) and self._hear():
                pass
        return self._last_words or self._exit()

    def _exit(self) -> str:
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exit code {code}"


def _words(call: RankCall | None) -> str:
    return call.data.decode() if call is not None else ""


def _framed(call: RankCall) -> bytes:
    payload = msgspec.msgpack.encode(call)
    return len(payload).to_bytes(LENGTH_BYTES, "little") + payload


def _run(main: FollowerMain, rank_info: RankInfo, pipe: socket.socket, parent: int) -> None:
    """The main function of a follower's process."""
    # The front handles these signals, and rank 0 closes the channel.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _die_with(parent)
    channel = RankChannel(pipe)
    try:
        main(rank_info, channel)
    except Exception as error:
        channel.failed(f"{type(error).__name__}: {error}")
        raise


def _die_with(parent: int) -> None:
    """Asks for SIGKILL when rank 0 ends: a process that waits on its device ignores any other signal."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before we could ask for the signal
