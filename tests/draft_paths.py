"""How long a commit and its proposal take by each path of drafts: `python -m tests.draft_paths`.

Two real workers, each a front and an engine in processes of their own. The engines compute nothing: one posts
the commits of a batch and waits for all proposals, the other answers at once. Both paths take turns, batch by
batch, so that whatever else the machine does meets both: ratios mean something on any machine, times on a
quiet one.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from eyas.common.config import EngineConfig, WorkerConfig
from eyas.common.types import Role
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import (
    Command,
    DraftChannel,
    DraftCommit,
    DraftDown,
    DraftProposal,
    DraftUp,
    EngineLoad,
    EngineReady,
    ShutdownEngine,
)
from eyas.engine.speculation.drafters.channels import GRPC, SHM, DecodeChannels, DraftChannels
from eyas.worker import engine_main
from eyas.worker.worker import run_worker
from kv_transfer.host_files import new_path

BATCHES, WIDTHS = (1, 8, 32), (256, 4096)
ROWS, STEPS = 3, 3  # of a commit, of a proposal
ROUNDS = 200
WAIT_S = 0.5


class Ear:
    """The engine's link; the front hears now and then that all is well."""

    def __init__(self, link: EngineLink) -> None:
        self.link = link
        self._heard, self._told_at = 0, 0.0
        link.send([EngineReady(1, "none", "f", "g", 128, 1000, 1, {}, {}, slowest_step_s=0.1)])

    def recv(self, bells: Sequence[int]) -> list[Command]:
        commands = self.link.recv(WAIT_S, bells)
        self._heard += len(commands)
        now = time.monotonic()
        if now - self._told_at > WAIT_S:
            self._told_at = now
            self.link.send([EngineLoad(round(now * 1000), False, 0, 0, 0, heard=self._heard)])
        return commands


def answering(width: int, config: EngineConfig, endpoint: str) -> None:
    """The draft worker's engine."""

    def run(link: EngineLink) -> None:
        channels, ear = DraftChannels(width, config.pool_dir), Ear(link)
        while True:
            commands = ear.recv(channels.descriptors)
            for command in commands:
                if isinstance(command, ShutdownEngine):
                    return
                if isinstance(command, DraftUp):
                    if command.channel is not None:
                        assert not channels.answer(command.peer, command.channel)
                        mails = Mails(channels, command.peer)
                    some = [_proposal(commit) for commit in command.commits]
                    link.send([DraftDown(tuple(some), peer=command.peer)])
            channels.listen()
            if channels.descriptors:
                mails.answer()

    engine_main.serve(run, endpoint)


class Mails:
    """Sequences of a peer that have begun, in the places of their numbers."""

    def __init__(self, channels: DraftChannels, peer: int) -> None:
        self._channels, self._peer = channels, peer
        mailbox = channels.mailbox(peer)
        assert mailbox is not None
        self._mailbox = mailbox
        self._positions = [0] * max(BATCHES)  # of the next row of each

    def answer(self) -> None:
        """Every round that has come."""
        some = False
        for seq, first in enumerate(self._positions):
            if tokens := self._mailbox.rounds(seq, 1, first):
                features = self._mailbox.features(seq, 1, first, len(tokens))
                assert features is not None
                self._mailbox.propose(seq, _proposal(DraftCommit(seq, 1, first, tokens, features, STEPS)))
                self._positions[seq], some = first + len(tokens), True
        if some:
            self._channels.wake([self._peer])


def _proposal(commit: DraftCommit) -> DraftProposal:
    return DraftProposal(commit.seq, commit.generation, commit.base_len + ROWS, (1,) * STEPS, (-1, 0, 1))


def measuring(width: int, said: Callable[[str], None], config: EngineConfig, endpoint: str) -> None:
    """The decode worker's engine: tells one line per batch size, then nothing more."""

    def run(link: EngineLink) -> None:
        shape = DraftChannel({}, width, STEPS, max(BATCHES), 32)
        ends = Ends(Ear(link), DecodeChannels(shape, partial(new_path, "mail", Path(config.pool_dir))))
        ends.connect()
        for batch in BATCHES:
            took: dict[str, list[float]] = {GRPC: [], SHM: []}
            for number in range(ROUNDS):
                for path, times in took.items():
                    began = time.perf_counter()
                    ends.round(path, batch, width)
                    if number >= ROUNDS // 10:
                        times.append(1e6 * (time.perf_counter() - began))
            said(_line(width, batch, took))
        said("")

    engine_main.serve(run, endpoint)


@dataclass
class Ends:
    """What the measuring engine speaks by."""

    ear: Ear
    channels: DecodeChannels
    worker: str = ""
    bases: list[int] = field(default_factory=lambda: [0] * max(BATCHES))  # of rows by shared memory

    def connect(self) -> None:
        """Returns once there is a channel to the draft worker."""
        while not self.worker or self.channels.mailbox(self.worker) is None:
            for command in self.ear.recv(self.channels.descriptors):
                if isinstance(command, DraftDown) and not self.worker:
                    self.worker = command.worker
                    offer = self.channels.offer(self.worker)
                    self.ear.link.send([DraftUp(channel=offer, worker=self.worker)])
            self.channels.listen()

    def round(self, path: str, batch: int, width: int) -> None:
        """Commits up, all their proposals down."""
        if path == GRPC:
            features = bytes(4 * ROWS * width)
            commits = [DraftCommit(seq, 1, 9, (1,) * ROWS, features, STEPS, 1, 4) for seq in range(batch)]
            self.ear.link.send([DraftUp(commits=tuple(commits), worker=self.worker)])
            left = batch
            while left:
                downs = [d for d in self.ear.recv(self.channels.descriptors) if isinstance(d, DraftDown)]
                left -= sum(len(down.proposals) for down in downs)
            return
        mailbox, rows = self.channels.mailbox(self.worker), np.zeros((ROWS, width), np.float32)
        assert mailbox is not None
        for seq in range(batch):
            mailbox.post(seq, 1, self.bases[seq], (1,) * ROWS, rows)
            self.bases[seq] += ROWS
        self.channels.wake([self.worker])
        waiting = set(range(batch))
        while waiting:
            self.ear.recv(self.channels.descriptors)
            self.channels.listen()
            waiting -= {seq for seq in waiting if mailbox.proposal(seq, seq, 1, self.bases[seq])}


def _line(width: int, batch: int, took: dict[str, list[float]]) -> str:
    middle = {path: statistics.median(times) for path, times in took.items()}
    late = {path: sorted(times)[len(times) * 9 // 10] for path, times in took.items()}
    cells = [f"{middle[p]:8.0f} {late[p]:8.0f}" for p in (GRPC, SHM)]
    return f"{width:6} {batch:6} {cells[0]} {cells[1]} {middle[GRPC] / middle[SHM]:7.1f}"


def measure(width: int, ports: tuple[int, int]) -> None:
    """Prints the lines of one width."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    draft, decode = (EngineConfig(roles=(role,)) for role in (Role.DRAFT, Role.DECODE))
    known = f"static:127.0.0.1:{ports[0]}"
    workers = [
        context.Process(target=run_worker, args=(config, engine))
        for config, engine in (
            (WorkerConfig(draft, port=ports[0]), partial(answering, width)),
            (WorkerConfig(decode, port=ports[1], registry=known), partial(measuring, width, writer.send)),
        )
    ]
    for worker in workers:
        worker.start()
    try:
        while line := reader.recv():
            print(line, flush=True)
    finally:
        for worker in workers:
            worker.kill()  # its engine ends with it
            worker.join()


if __name__ == "__main__":
    sys.stdout.write(" width  batch   gRPC us     p90    shm us     p90   ratio\n")
    for number, width in enumerate(WIDTHS):
        measure(width, (47310 + 2 * number, 47311 + 2 * number))
