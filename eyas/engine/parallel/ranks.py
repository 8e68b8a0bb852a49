"""The processes of an engine with several ranks: rank 0 speaks, the others do as told.

Rank 0 lives in the engine process and schedules; ranks 1 .. n-1 are processes of their own that run the same
device work in the same order. It knows processes, pipes and deadlines, neither tensors nor what a call means.
An engine of one rank has no followers and uses nothing of this file but `RankInfo`.

The group lives and dies together: a follower that ends is an EngineError at rank 0's next call, the end of
rank 0 kills its followers, also those that wait on a device for ever.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.context import SpawnProcess
from typing import Self

import msgspec

from eyas.common.errors import EngineError

PR_SET_PDEATHSIG = 1
SEND_S = 10.0  # a follower that takes no message for so long is stuck
LEAVE_S = 5.0  # a follower may take so long to leave; then it is killed
LENGTH_BYTES = 4
POLL_S = 0.2  # while a pipe is silent, the process behind it is looked at so often


class RankCall(msgspec.Struct, frozen=True, array_like=True):
    """One message: what to do, integers (a step's shape), and bytes (its array). Nothing is pickled."""

    kind: str
    numbers: tuple[int, ...] = ()
    data: bytes = b""


READY = "ready"
FAILED = "failed"


@dataclass(frozen=True)
class RankInfo:
    """One rank's place in a group. `meeting`: a path at which no file exists yet, the same for all ranks."""

    rank: int = 0
    ranks: int = 1
    meeting: str = ""


class Channel:
    """A follower's end of its pipe to rank 0. Iterating gives every call until rank 0 closes its end."""

    def __init__(self, pipe: socket.socket) -> None:
        self._pipe = pipe
        self._reader = pipe.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(RankCall)

    def __iter__(self) -> Iterator[RankCall]:
        while (call := self.read()) is not None:
            yield call

    def read(self) -> RankCall | None:
        """The next call; None once the other end is closed."""
        with contextlib.suppress(ConnectionResetError):
            length = self._reader.read(LENGTH_BYTES)
            payload = self._reader.read(int.from_bytes(length, "little"))
            if payload:
                return self._decoder.decode(payload)
        return None

    def ready(self) -> None:
        """Tells rank 0, which is in `Followers.wait_ready`, that this rank is loaded."""
        self._pipe.sendall(_framed(RankCall(READY)))

    def failed(self, reason: str) -> None:
        with contextlib.suppress(OSError):  # rank 0 may be gone too
            self._pipe.sendall(_framed(RankCall(FAILED, data=reason.encode())))


def follow(channel: Channel, calls: Mapping[str, Callable[[RankCall], None]]) -> None:
    """A follower's life: does what rank 0 says, by the call's kind, until rank 0 closes the channel."""
    for call in channel:
        calls[call.kind](call)


FollowerMain = Callable[[RankInfo, Channel], None]
"""What a follower runs: it loads, says ready, joins its group, follows. It must be picklable."""


class Followers:
    """Ranks 1 .. ranks-1 of rank 0's group: started when made, ended by `close`. `rank_info` is rank 0's own.

    Used by one thread; a follower is killed when that thread ends.
    """

    def __init__(self, main: FollowerMain, ranks: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="eyas-ranks-", ignore_cleanup_errors=True)
        self.rank_info = RankInfo(0, ranks, f"{self._folder.name}/meeting")
        seats = [RankInfo(rank, ranks, self.rank_info.meeting) for rank in range(1, ranks)]
        self._followers = [_Follower(main, rank_info) for rank_info in seats]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until every follower has said ready. Raises EngineError if one ends or is late."""
        deadline = time.monotonic() + timeout_s
        for follower in self._followers:
            follower.wait_ready(deadline)

    def check(self) -> None:
        """Raises EngineError, in the follower's own words if it left any, if one has ended."""
        for follower in self._followers:
            follower.check()

    def broadcast(self, call: RankCall) -> None:
        """Hands `call` to every follower, one write each.

        Raises EngineError if one has ended, or takes nothing for SEND_S.
        """
        payload = _framed(call)
        for follower in self._followers:
            follower.check()
            follower.send(payload)

    def dismiss(self) -> None:
        """Lets every follower leave once it has done what it was told; no call follows.

        Whoever shares a `ProcessGroup` with them closes it now, as they do, then calls `close`.
        """
        for follower in self._followers:
            follower.dismiss()

    def close(self) -> None:
        """Dismisses the followers, and kills those that have not left after LEAVE_S. Twice is once."""
        self.dismiss()
        deadline = time.monotonic() + LEAVE_S
        for follower in self._followers:
            follower.reap(deadline)
        self._folder.cleanup()


class _Follower:
    """One follower's process, and rank 0's end of its pipe."""

    def __init__(self, main: FollowerMain, rank_info: RankInfo) -> None:
        self._name = f"rank {rank_info.rank} of {rank_info.ranks}"
        self._pipe, theirs = socket.socketpair()
        self._pipe.settimeout(SEND_S)
        context = multiprocessing.get_context("spawn")
        arguments = (main, rank_info, theirs, os.getpid())
        self._process: SpawnProcess = context.Process(target=_run, args=arguments, daemon=True)
        self._process.start()
        theirs.close()  # so that its end is the end of the stream

    def check(self) -> None:
        if not self._process.is_alive():
            raise EngineError(f"{self._name} has ended: {self._reason()}")

    def send(self, payload: bytes) -> None:
        try:
            self._pipe.sendall(payload)
        except TimeoutError:
            raise EngineError(f"{self._name} has taken no message for {SEND_S:g} s") from None
        except OSError:
            self._process.join(LEAVE_S)
            raise EngineError(f"{self._name} has ended: {self._reason()}") from None

    def wait_ready(self, deadline: float) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._pipe, selectors.EVENT_READ)
            while not selector.select(POLL_S):
                self.check()
                if time.monotonic() > deadline:
                    raise EngineError(f"{self._name} was not ready in time")
        call = Channel(self._pipe).read()
        if call is None or call.kind != READY:
            self._process.join(LEAVE_S)
            raise EngineError(f"{self._name} could not start: {_words(call) or self._exit()}")

    def dismiss(self) -> None:
        self._pipe.close()

    def reap(self, deadline: float) -> None:
        self._process.join(max(0.0, deadline - time.monotonic()))
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _reason(self) -> str:
        """The last words of a process that has ended; without any, how it ended."""
        return _words(Channel(self._pipe).read()) or self._exit()

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
    """A follower's process from its first line to its last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the front's; rank 0 closes the channel
    _die_with(parent)
    channel = Channel(pipe)
    try:
        main(rank_info, channel)
    except Exception as error:
        channel.failed(f"{type(error).__name__}: {error}")
        raise


def _die_with(parent: int) -> None:
    """SIGKILL when rank 0 ends: a process that waits on its device for a lost peer hears nothing less."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before we could ask for the signal
