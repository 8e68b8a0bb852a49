"""The drafter that uses a draft service: turns commits into messages, and proposals into drafts.

It picks one draft worker per sequence from those that are connected, and never waits for one: the engine
trims late proposals, and decodes plainly where one is lost.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import msgspec
import numpy as np
import torch

from eyas.common.config import SpeculationConfig
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import RingPlace, Sequence
from eyas.engine.batch.tree import DraftTree
from eyas.engine.batch.window import KeptRows
from eyas.engine.ipc.mailbox import LATE_ROUNDS
from eyas.engine.ipc.messages import (
    DraftClose,
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftLine,
    DraftOpen,
    DraftUp,
    Proposal,
)
from eyas.engine.speculation.drafter import Commit, Draft, Drafter
from eyas.engine.speculation.lines import CUDA_IPC, GRPC, MAILBOX, SHM, OfferedLines
from eyas.engine.speculation.mailing import mails

BACKOFF_S = 0.5  # a worker that dropped a sequence gets no new one during this time


@dataclass
class _Followed:
    """A sequence and the draft worker that drafts for it."""

    seq: Sequence
    worker: str
    generation: int
    handle: KvHandle | None  # of its prompt's draft KV, until the worker has certainly pulled that
    asked: int = -1  # base of the newest commit
    answered: int = -1  # base of the newest proposal
    place: RingPlace | None = None  # of its features, if they go from GPU to GPU
    late: int = 0  # late rounds in a row
    begun: bool = False  # its first commit has been posted, which goes with its open: by the front

    @property
    def mailed(self) -> bool:
        """Does the device wait for its drafts, and no host?"""
        return self.place is not None and self.place.mailbox != 0


@dataclass
class _Outbox:
    """The messages to one draft worker since `outgoing` was last called."""

    opens: list[DraftOpen] = field(default_factory=list)
    commits: list[DraftCommit] = field(default_factory=list)
    closes: list[DraftClose] = field(default_factory=list)
    line: DraftLine | None = None


class RemoteDrafter(Drafter):
    """Commits go by a direct line to the draft worker, or wait for `outgoing`, so for the front.

    `deliver` takes what draft workers send back, whichever way it came.
    """

    def __init__(self, spec: SpeculationConfig, vocab_size: int, lines: OfferedLines) -> None:
        self._vocab_size = vocab_size
        self._lines = lines
        self._sent: Counter[str] = Counter()
        self._workers: list[str] = []  # addresses of the connected draft workers
        self._spec = spec
        self._followed: dict[int, _Followed] = {}
        self._outbox: dict[str, _Outbox] = defaultdict(_Outbox)
        self._drafts: list[Draft] = []
        self._down_until: dict[str, float] = defaultdict(float)  # monotonic seconds
        self._generations = 0
        self._late_rounds = 0

    @property
    def local_kv(self) -> bool:
        return False

    @property
    def late_rounds(self) -> int:
        return self._late_rounds

    @property
    def sent(self) -> Mapping[str, int]:
        return self._sent

    @property
    def bells(self) -> SequenceOf[int]:
        return self._lines.descriptors

    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        now = time.monotonic()
        up = [worker for worker in self._workers if now >= self._down_until[worker]]
        if not up:
            return False
        load = Counter(f.worker for f in self._followed.values())
        siblings = {f.worker for f in self._followed.values() if f.seq.generation is seq.generation}
        # The choices of a request share one pull of its handle, so they share a worker.
        worker = min(up, key=lambda w: (w not in siblings, load[w]))
        self._generations += 1
        mailed = mails(seq, self._spec)
        seq.ring = self._lines.take_place(worker, self._generations, mailed=mailed)
        self._followed[seq.uid] = _Followed(seq, worker, self._generations, handle, place=seq.ring)
        params = seq.generation.request.params
        message = DraftOpen(
            seq=seq.uid,
            generation=self._generations,
            base_len=base,
            params=msgspec.structs.replace(params, grammar=None),  # what it forbids is cut here
            choice=seq.choice,
            handle=handle,
            attempt=seq.generation.attempt,
        )
        self._outbox[worker].opens.append(message)
        return True

    def post(self, commits: SequenceOf[Commit]) -> None:
        rung: set[str] = set()
        for commit in commits:
            followed = self._followed.get(commit.seq.uid)
            if followed is None:
                continue
            if followed.mailed and commit.ringed == followed.generation:
                self._sent[MAILBOX] += 1
                self._late_rounds += commit.late
                if not commit.late:
                    followed.handle = None
                continue
            if followed.asked > followed.answered and not followed.mailed:
                followed.late += 1
                self._late_rounds += 1
            followed.asked = commit.base + len(commit.tokens) if commit.want else followed.answered
            direct = followed.begun and self._lines.has(followed.worker)
            message = self._message(commit, followed, direct)
            if not direct:
                self._outbox[followed.worker].commits.append(message)
                self._sent[GRPC] += 1
                if followed.mailed and not followed.begun and self._announce(followed, message):
                    rung.add(followed.worker)
                followed.begun = True
            elif self._lines.post(followed.worker, message):
                rung.add(followed.worker)
                self._sent[SHM if message.place < 0 else CUDA_IPC] += 1
            else:
                self._give_up(followed)
        self._lines.ring(rung)

    def _announce(self, followed: _Followed, first: DraftCommit) -> bool:
        """Says by the line where the rows after the `first` commit come from: a commit of none at all."""
        assert followed.place is not None
        base, place = first.base_len + len(first.tokens), followed.place.number
        told = msgspec.structs.replace(first, base_len=base, tokens=(), features=b"", place=place)
        if not self._lines.post(followed.worker, told):
            self._give_up(followed)
            return False
        return True

    def _give_up(self, followed: _Followed) -> None:
        """The line is full: the worker is behind. The sequence is opened anew when it may have caught up."""
        self.close(followed.seq)
        followed.seq.drafting = False
        self._down_until[followed.worker] = time.monotonic() + BACKOFF_S
        self._sent["dropped"] += 1

    @staticmethod
    def _message(commit: Commit, followed: _Followed, direct: bool) -> DraftCommit:
        """`direct`: it goes by a line; then its features may be in the draft worker's GPU already."""
        want, place = commit.want, followed.place
        there = direct and place is not None and commit.ringed == followed.generation
        return DraftCommit(
            seq=commit.seq.uid,
            generation=followed.generation,
            base_len=commit.base,
            tokens=tuple(commit.tokens),
            features=b"" if there else _bytes(commit.features),
            steps=want.steps if want else 0,
            topk=want.topk if want else 1,
            draft_tokens=want.draft_tokens if want else 1,
            place=place.number if there and place is not None else -1,
        )

    def deliver(self, down: DraftDown) -> list[tuple[KvHandle, int]]:
        """Proposals, and sequences that the worker dropped.

        An empty message says that the worker is connected; a dropped sequence 0 says that it is gone.
        """
        if down.no_line:
            self._leave_rings(down.worker)
            self._lines.refused(down.worker, down.no_line)
        elif not down.proposals and not down.closed and down.worker not in self._workers:
            self._connected(down.worker)
        for p in down.proposals:
            followed = self._followed.get(p.seq)
            if followed is None or followed.generation != p.generation:
                continue
            followed.answered, followed.handle = max(followed.answered, p.base_len), None
            if followed.answered == followed.asked:
                followed.late = 0
            tree = self._tree(p)
            if tree is not None and not followed.mailed:
                self._drafts.append(Draft(followed.seq, p.base_len, tree))
        dropped = [followed for closed in down.closed for followed in self._drop(closed, down.worker)]
        unpulled = {f.handle.id: (f.handle, f.seq.generation.attempt) for f in dropped if f.handle}
        return list(unpulled.values())

    def leave(self) -> None:
        self._lines.close()

    def arrived(self) -> list[DraftDown]:
        return self._lines.take()

    def _connected(self, worker: str) -> None:
        self._workers.append(worker)
        line = self._lines.offer(worker)
        if line is not None:
            self._outbox[worker].line = line

    def _tree(self, proposal: Proposal) -> DraftTree | None:
        """A proposal as a tree; None if it is no tree, is larger than asked, or has unknown ids."""
        if len(proposal.tokens) > max(self._spec.steps, self._spec.draft_tokens):
            return None
        if not all(0 <= token < self._vocab_size for token in proposal.tokens):
            return None
        try:
            return DraftTree(list(proposal.tokens), list(proposal.parents))
        except ValueError:
            return None

    def _drop(self, closed: DraftClosed, worker: str) -> list[_Followed]:
        all_of_them = closed.seq == 0
        uids = [
            uid
            for uid, followed in self._followed.items()
            if followed.worker == worker
            and (all_of_them or (uid, followed.generation) == (closed.seq, closed.generation))
        ]
        dropped = [self._followed.pop(uid) for uid in uids]
        for followed in dropped:
            followed.seq.drafting = False
            self._leave_ring(followed)
        if all_of_them:
            self._workers = [w for w in self._workers if w != worker]
            self._down_until.pop(worker, None)
            self._lines.end(worker)
        elif dropped:
            self._down_until[worker] = time.monotonic() + BACKOFF_S
        return dropped

    def take(self) -> list[Draft]:
        drafts, self._drafts = self._drafts, []
        return drafts

    def owed(self) -> bool:
        waited = (f for f in self._followed.values() if f.late < LATE_ROUNDS and not f.mailed)
        return any(f.asked > f.answered for f in waited)

    def in_time(self) -> bool:
        return any(f.late < LATE_ROUNDS and not f.mailed for f in self._followed.values())

    def close(self, seq: Sequence) -> None:
        followed = self._followed.pop(seq.uid, None)
        if followed is not None:
            self._outbox[followed.worker].closes.append(DraftClose(seq.uid, followed.generation))
            self._leave_ring(followed)

    def _leave_rings(self, worker: str) -> None:
        """Before its line goes: the next step may write there."""
        for followed in self._followed.values():
            if followed.worker == worker:
                self._leave_ring(followed)
                followed.place = None

    def _leave_ring(self, followed: _Followed) -> None:
        followed.seq.ring = None
        if followed.place is not None:
            self._lines.give_back(followed.worker, followed.place)

    def outgoing(self) -> list[DraftUp]:
        box, self._outbox = self._outbox, defaultdict(_Outbox)
        return [
            DraftUp(tuple(o.opens), tuple(o.commits), tuple(o.closes), o.line, worker=w)
            for w, o in box.items()
        ]


def _bytes(features: torch.Tensor | KeptRows) -> bytes:
    """As a `DraftCommit` has them."""
    # Kept ones are wanted here if the sequence was opened anew while its step was in flight.
    rows: torch.Tensor = features.read() if isinstance(features, KeptRows) else features
    return rows.float().cpu().contiguous().numpy().astype(np.float32, copy=False).tobytes()
