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
from numpy.typing import NDArray

from eyas.common.config import SpeculationConfig
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import RingPlace, Sequence
from eyas.engine.batch.tree import DraftTree
from eyas.engine.batch.window import DeviceRows
from eyas.engine.ipc.mailbox import MISSED_ROUNDS
from eyas.engine.ipc.messages import (
    DraftChannel,
    DraftClose,
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftOpen,
    DraftProposal,
    DraftUp,
)
from eyas.engine.ipc.row_ring import WAITING_ROWS
from eyas.engine.speculation.drafters.base import AcceptedRows, Drafter, SequenceProposal
from eyas.engine.speculation.drafters.channels import GRPC, MAILBOX, SHM, DecodeChannels, mails

BACKOFF_S = 0.5  # a worker that dropped a sequence gets no new one during this time


@dataclass
class _FollowedSequence:
    """A sequence and the draft worker that drafts for it."""

    seq: Sequence
    worker: str
    generation: int
    handle: KvHandle | None  # of its prompt's draft KV, until the worker has certainly pulled that
    place: RingPlace | None = None  # its mailbox
    requested: int = -1  # base of the newest commit
    answered: int = -1  # base of the newest proposal
    missed_rounds: int = 0  # late rounds in a row
    proposing: bool | None = None  # does its last commit by the front, as its first is, ask for a proposal?
    waiting: AcceptedRows | None = None  # rows that ask for no proposal: they go with those after them

    @property
    def mailed(self) -> bool:
        """Does the device post its rounds and wait for its drafts, and no host?"""
        return self.place is not None and self.place.address != 0

    def due(self, commit: AcceptedRows) -> AcceptedRows | None:
        """The commit with what waited before it; None: it waits too. Rows on a device do not."""
        before, self.waiting = self.waiting, None
        if before is not None:
            commit = before.joined(commit)
        started, few = self.proposing is not None, len(commit.tokens) < WAITING_ROWS
        if started and commit.spec is None and few and isinstance(commit.features, torch.Tensor):
            self.waiting = commit
            return None
        return commit


@dataclass
class _WorkerOutbox:
    """The messages to one draft worker since `outgoing` was last called."""

    opens: list[DraftOpen] = field(default_factory=list)
    commits: list[DraftCommit] = field(default_factory=list)
    closes: list[DraftClose] = field(default_factory=list)
    channel: DraftChannel | None = None


class RemoteDrafter(Drafter):
    """Commits go into mailboxes that the draft worker shares, or wait for `outgoing`, so for the front.

    `deliver` takes what draft workers send back, whichever way it came.
    """

    def __init__(self, spec: SpeculationConfig, vocab_size: int, channels: DecodeChannels) -> None:
        self._vocab_size = vocab_size
        self._channels = channels
        self._sent: Counter[str] = Counter()
        self._workers: list[str] = []  # addresses of the connected draft workers
        self._spec = spec
        self._followed: dict[int, _FollowedSequence] = {}
        self._outbox: dict[str, _WorkerOutbox] = defaultdict(_WorkerOutbox)
        self._drafts: list[SequenceProposal] = []
        self._down_until: dict[str, float] = defaultdict(float)  # monotonic seconds
        self._generations = 0
        self._missed_rounds = 0

    @property
    def local_kv(self) -> bool:
        return False

    @property
    def missed_rounds(self) -> int:
        return self._missed_rounds

    @property
    def sent(self) -> Mapping[str, int]:
        return self._sent

    @property
    def bells(self) -> SequenceOf[int]:
        return self._channels.descriptors

    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        return self._open(seq, base, handle)

    def begin(self, seq: Sequence, base: int, want: SpeculationConfig | None) -> bool:
        return want is not None and mails(seq, self._spec) and self._open(seq, base, None, want)

    def _open(
        self, seq: Sequence, base: int, handle: KvHandle | None, mailed: SpeculationConfig | None = None
    ) -> bool:
        """`mailed`: what its rows ask for, if all of them are to come by a device; else it is not opened."""
        now = time.monotonic()
        up = [worker for worker in self._workers if now >= self._down_until[worker]]
        if not up:
            return False
        load = Counter(f.worker for f in self._followed.values())
        siblings = {f.worker for f in self._followed.values() if f.seq.generation is seq.generation}
        # The choices of a request share one pull of its handle, so they share a worker.
        worker = min(up, key=lambda w: (w not in siblings, load[w]))
        self._generations += 1
        by_device = mails(seq, self._spec)
        place = self._channels.take_place(worker, self._generations, by_device=by_device)
        followed = _FollowedSequence(seq, worker, self._generations, handle, place)
        if mailed is not None and not followed.mailed:
            if place is not None:
                self._channels.give_back(worker, place)
            return False
        self._followed[seq.uid] = followed
        seq.ring, seq.answered = place if followed.mailed else None, False
        params = seq.generation.request.params
        message = DraftOpen(
            seq=seq.uid,
            generation=self._generations,
            base_len=base,
            params=msgspec.structs.replace(params, grammar=None),  # what it forbids is cut here
            choice=seq.choice,
            handle=handle,
            attempt=seq.generation.attempt,
            place=-1 if place is None else place.number,
            steps=0 if mailed is None else mailed.steps,
        )
        self._outbox[worker].opens.append(message)
        return True

    def post(self, commits: SequenceOf[AcceptedRows]) -> None:
        woken: set[str] = set()
        for commit in commits:
            followed = self._followed.get(commit.seq.uid)
            if followed is None:
                continue
            if followed.mailed and commit.ringed == followed.generation:
                self._sent[MAILBOX] += 1
                self._missed_rounds += commit.late
                if not commit.late:
                    followed.handle = None
                self._hear(followed, commit)
                continue
            if followed.requested > followed.answered and not followed.mailed:
                followed.missed_rounds += 1
                self._missed_rounds += 1
            followed.requested = commit.base + len(commit.tokens) if commit.spec else followed.answered
            if (due := followed.due(commit)) is not None and self._send(due, followed):
                woken.add(followed.worker)
        self._channels.wake(woken)

    def _hear(self, followed: _FollowedSequence, commit: AcceptedRows) -> None:
        """Has the draft worker begun to leave drafts for a device? Its host sees it once."""
        mailbox, place = self._channels.mailbox(followed.worker), followed.place
        if not followed.seq.answered and mailbox is not None and place is not None:
            newest = commit.base + len(commit.tokens)
            followed.seq.answered = mailbox.answered(place.number, followed.generation, newest)

    def _send(self, commit: AcceptedRows, followed: _FollowedSequence) -> bool:
        """By the mailbox (True) if it asks for what the last by the front asked for; else by the front."""
        proposing, place = commit.spec is not None, None if followed.mailed else followed.place
        if place is None or proposing != followed.proposing:
            self._outbox[followed.worker].commits.append(self._message(commit, followed))
            self._sent[GRPC] += 1
            followed.proposing = proposing
            return False
        mailbox = self._channels.mailbox(followed.worker)
        assert mailbox is not None, "a channel that ends takes its sequences along"
        features = _floats(commit.features)
        mailbox.post(place.number, followed.generation, commit.base, commit.tokens, features)
        self._sent[SHM] += 1
        return True

    def _message(self, commit: AcceptedRows, followed: _FollowedSequence) -> DraftCommit:
        """For the front. Large features go beside it, where there is a way."""
        want, features = commit.spec, _floats(commit.features)
        lent = self._channels.lend(followed.worker, features)
        return DraftCommit(
            seq=commit.seq.uid,
            generation=followed.generation,
            base_len=commit.base,
            tokens=tuple(commit.tokens),
            features=b"" if lent else features.tobytes(),
            steps=want.steps if want else 0,
            topk=want.topk if want else 1,
            draft_tokens=want.draft_tokens if want else 1,
            lent=lent,
        )

    def deliver(self, down: DraftDown) -> list[tuple[KvHandle, int]]:
        """Proposals, and sequences that the worker dropped.

        An empty message says that the worker is connected; a dropped sequence 0 says that it is gone.
        """
        if down.no_channel:
            self._channels.refused(down.worker, down.no_channel)
        elif not down.proposals and not down.closed and down.worker not in self._workers:
            self._connected(down.worker)
        for p in down.proposals:
            followed = self._followed.get(p.seq)
            if followed is None or followed.generation != p.generation:
                continue
            followed.answered, followed.handle = max(followed.answered, p.base_len), None
            if followed.answered == followed.requested:
                followed.missed_rounds = 0
            tree = self._tree(p)
            if tree is not None and not followed.mailed:
                self._drafts.append(SequenceProposal(followed.seq, p.base_len, tree))
        dropped = [followed for closed in down.closed for followed in self._drop(closed, down.worker)]
        unpulled = {f.handle.id: (f.handle, f.seq.generation.attempt) for f in dropped if f.handle}
        return list(unpulled.values())

    def leave(self) -> None:
        self._channels.close()

    def arrived(self) -> list[DraftDown]:
        gone = DraftClosed(0, 0, "its channel broke")
        downs = [DraftDown(closed=(gone,), worker=worker) for worker in self._channels.listen()]
        proposals: dict[str, list[DraftProposal]] = defaultdict(list)
        for uid, followed in self._followed.items():
            mailbox = self._channels.mailbox(followed.worker)
            place = None if followed.mailed or followed.requested <= followed.answered else followed.place
            if mailbox is None or place is None:
                continue
            one = mailbox.proposal(place.number, uid, followed.generation, followed.requested)
            if one is not None and one.base_len > followed.answered:
                proposals[followed.worker].append(one)
        return [DraftDown(tuple(some), worker=worker) for worker, some in proposals.items()] + downs

    def _connected(self, worker: str) -> None:
        self._workers.append(worker)
        if (offer := self._channels.offer(worker)) is not None:
            self._outbox[worker].channel = offer

    def _tree(self, proposal: DraftProposal) -> DraftTree | None:
        """A proposal as a tree; None if it is no tree, is larger than asked, or has unknown ids."""
        if len(proposal.tokens) > max(self._spec.steps, self._spec.draft_tokens):
            return None
        if not all(0 <= token < self._vocab_size for token in proposal.tokens):
            return None
        try:
            return DraftTree(list(proposal.tokens), list(proposal.parents))
        except ValueError:
            return None

    def _drop(self, closed: DraftClosed, worker: str) -> list[_FollowedSequence]:
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
            self._leave_place(followed)
        if all_of_them:
            self._workers = [w for w in self._workers if w != worker]
            self._down_until.pop(worker, None)
            self._channels.end(worker)
        elif dropped:
            self._down_until[worker] = time.monotonic() + BACKOFF_S
        return dropped

    def take(self) -> list[SequenceProposal]:
        drafts, self._drafts = self._drafts, []
        return drafts

    def owed(self) -> bool:
        waited = (f for f in self._followed.values() if f.missed_rounds < MISSED_ROUNDS and not f.mailed)
        return any(f.requested > f.answered for f in waited)

    def in_time(self) -> bool:
        return any(f.missed_rounds < MISSED_ROUNDS and not f.mailed for f in self._followed.values())

    def close(self, seq: Sequence) -> None:
        followed = self._followed.pop(seq.uid, None)
        if followed is not None:
            self._outbox[followed.worker].closes.append(DraftClose(seq.uid, followed.generation))
            self._leave_place(followed)

    def _leave_place(self, followed: _FollowedSequence) -> None:
        followed.seq.ring = None
        if followed.place is not None:
            self._channels.give_back(followed.worker, followed.place)

    def outgoing(self) -> list[DraftUp]:
        box, self._outbox = self._outbox, defaultdict(_WorkerOutbox)
        return [
            DraftUp(tuple(o.opens), tuple(o.commits), tuple(o.closes), o.channel, worker=w)
            for w, o in box.items()
        ]


def _floats(features: torch.Tensor | DeviceRows) -> NDArray[np.float32]:
    """[rows, width], on the host."""
    # Those on a device are needed here if the sequence was opened anew while its step was in flight.
    rows: torch.Tensor = features.read() if isinstance(features, DeviceRows) else features
    floats: NDArray[np.float32] = rows.float().cpu().contiguous().numpy()
    return floats
