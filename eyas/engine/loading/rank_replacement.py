"""New weights on all ranks of an engine. Rank 0 has read them; the others map its memory, and each makes its
own share of it: rehearses beside its steps, and writes between two of them.

A rank that cannot write ends, and with it the engine: no step is computed by ranks of two versions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from eyas.common.errors import ConfigError, EyasError
from eyas.common.weights import PREPARE_S
from eyas.engine.checkpoint.host_tensors import HostFile, LayeredFile, SharedFile, mapped, shared
from eyas.engine.ipc.pulse import Beat
from eyas.engine.loading.replacement import WeightReplacement
from eyas.engine.parallel.leader import STEP_S, RankLeader
from eyas.engine.parallel.ranks import RankCall, RankCalls, RankChannel

REHEARSE, WRITE, FORGET = "rehearse weights", "write weights", "forget weights"


@contextlib.contextmanager
def handed_over(data: bytes) -> Iterator[str]:
    """A path by which other ranks read these bytes, while the block lasts. Through a rank's pipe megabytes
    of names would hold up steps until the rank, which may be waiting for one, has taken them.
    """
    with os.fdopen(os.memfd_create("eyas-handed-over"), "wb") as file:
        file.write(data)
        file.flush()
        yield f"/proc/{os.getpid()}/fd/{file.fileno()}"


class LeaderReplacement:
    """A `Replacement` of all ranks: what rank 0's does, the others' do too."""

    def __init__(self, own: WeightReplacement, leader: RankLeader) -> None:
        self._own, self._leader = own, leader

    def rehearse(self, file: HostFile) -> None:
        """Raises ConfigError, as the first rank does that finds something wrong. Rank 0 keeps `file` until
        it is forgotten, here too; whatever is raised, the others have let it go.
        """
        try:
            with handed_over(msgspec.msgpack.encode(shared(file))) as path:
                number = self._leader.ask(RankCall(REHEARSE, data=path.encode()))
                try:
                    self._own.rehearse(file)
                finally:
                    answers = self._leader.answers(number, PREPARE_S)
            for rank, text in enumerate(answers, start=1):
                if text:
                    raise ConfigError(f"rank {rank}: {text.decode()}")
        except Exception:  # it has no memory for it, say
            self.forget()
            raise

    def write(self, file: HostFile, beat: Beat) -> None:
        """Ends when all have written. Raises EngineError if one ends meanwhile, or takes too long."""
        with self._leader.together():
            number = self._leader.ask(RankCall(WRITE))
            self._own.write(file, beat)
            self._leader.answers(number, STEP_S, beat)

    def forget(self) -> None:
        """The others let the memory go."""
        self._leader.tell(RankCall(FORGET))


class FollowerReplacement:
    """The same on a rank above 0. `calls`: what it does, by their kinds."""

    def __init__(
        self, own: WeightReplacement, device: str, channel: RankChannel, settle: Callable[[], None]
    ) -> None:
        """`settle`: waits until the device has computed the steps that were launched."""
        self._own, self._device, self._channel, self._settle = own, device, channel, settle
        self._file: LayeredFile | None = None
        self._thread = ThreadPoolExecutor(1, "weights")
        self.calls: RankCalls = {
            REHEARSE: lambda call: self._aside(self._rehearse, call),
            WRITE: self._write,
            FORGET: lambda call: self._aside(self._forget, call),
        }

    def _aside(self, work: Callable[[RankCall], None], call: RankCall) -> None:
        """Runs `work` beside the steps, in the order of the calls."""
        self._thread.submit(work, call)

    def _rehearse(self, call: RankCall) -> None:
        """Answers with what is wrong; nothing: all is well."""
        text = ""
        try:
            data = Path(call.data.decode()).read_bytes()
            self._file = mapped(msgspec.msgpack.decode(data, type=list[SharedFile]), self._device)
            self._own.rehearse(self._file)
        except Exception as error:  # it serves on, whatever the update is
            text = error.message if isinstance(error, EyasError) else f"{type(error).__name__}: {error}"
        self._channel.answer(call.numbers[0], text.encode())

    def _write(self, call: RankCall) -> None:
        assert self._file is not None
        self._settle()
        self._own.write(self._file)
        self._channel.answer(call.numbers[0])

    def _forget(self, _: RankCall) -> None:
        self._file = None
