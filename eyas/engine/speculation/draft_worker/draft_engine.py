"""The engine of a draft worker: it answers the commits of many decode engines with proposals, in batches.

One loop, like the target engine's: receive, answer, send. Commits come by the front or by mailboxes, and so
do their answers go. Nothing here can change a token: whatever is missing, full or late leads to
`DraftClosed` or to no answer.

For what a device posts into a mailbox nothing wakes this worker, so mailboxes are looked into. Their words
become the commits that would have come by the fronts. Whether a commit makes sense for its sequence is
checked where all commits are.
"""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import msgspec
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.histogram import STEP_SECONDS, STEP_SEQUENCES, Histogram
from eyas.engine.batch.tree import DraftTree
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.mailbox import DraftMailbox
from eyas.engine.ipc.messages import (
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftPeerGone,
    DraftProposal,
    DraftUp,
    DrainEngine,
    EngineLoad,
    EngineReady,
    EngineStopped,
    ProbeLink,
    ShutdownEngine,
)
from eyas.engine.ipc.outbox import EventOutbox
from eyas.engine.ipc.pulse import EngineHeartbeat
from eyas.engine.ipc.row_ring import LocalGpu
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pulls import PULL_REPORTS, PullManager
from eyas.engine.speculation.draft_worker.draft_sequences import (
    LOST_FEATURES,
    BatchRunner,
    DraftedSequence,
    DraftSequences,
    Key,
)
from eyas.engine.speculation.draft_worker.mailed_rounds import MailedRounds
from eyas.engine.speculation.draft_worker.rounds_ahead import RoundsAhead
from eyas.engine.speculation.drafters.channels import DraftChannels
from kv_transfer.copier import PageCopier
from kv_transfer.copy_threads import CopyBell

IDLE_S = 0.1
COPYING_S = 0.001
MAILBOX_S = 0.001  # between two looks into mailboxes that have been quiet for a while: no bell rings for them
FLYING_S = 0.0003  # between two looks after a batch that waits for rounds: the next one has a round's time
LOAD_S = 0.5
STOP_S = 5.0
DraftingSequence = tuple[Key, DraftedSequence]
BUSY_S = 0.05
"""For so long after a round or its answer the next one is looked for without a pause: rounds take less."""
SPIN_S = 0.0002
"""So long at once; then the fronts have their turn."""
NO_PLACE = "it has no place in a mailbox that is known here"
LOST = "its rounds were not in its mailbox any more"


@dataclass(frozen=True)
class DraftParts:
    """Everything a draft engine is made of, loaded and warm. `gpu`: its own, if features may come there from
    other GPUs. `mailed`: where its device may take rounds from mailboxes by itself.
    """

    config: EngineConfig
    runner: BatchRunner
    pool: PagePool
    pulls: PullManager
    copier: PageCopier
    bell: CopyBell
    outbox: EventOutbox
    ready: EngineReady
    gpu: LocalGpu | None = None
    mailed: MailedRounds | None = None


class DraftEngine:
    """Built from `DraftParts`; `run` blocks until `DrainEngine` or `ShutdownEngine`.

    `pulse`: of all that the engine computes with.
    """

    def __init__(self, parts: DraftParts, link: EngineLink, pulse: EngineHeartbeat | None = None) -> None:
        self._parts = parts
        self._link = link
        self._pulse = pulse or EngineHeartbeat(link)
        self._sequences = DraftSequences(parts.ready, parts.pool, parts.pulls, parts.runner)
        self._channels = DraftChannels(parts.ready.draft_width, parts.config.pool_dir, parts.gpu)
        self._posted = PostedCommits(self._sequences, self._channels.mailbox)
        self._ahead = RoundsAhead(self._sequences, self._channels, parts.mailed)
        self._proposals: dict[int, list[DraftProposal]] = defaultdict(list)  # for the fronts, by peer
        self._mailed: set[int] = set()  # peers with new proposals in their mailboxes
        self._stopping = False
        self._progress = 0
        self._heard = 0  # commands carried out
        self._reported = 0.0
        self._step_seconds = Histogram(STEP_SECONDS)
        self._step_sequences = Histogram(STEP_SEQUENCES)
        self._handlers: dict[type, Callable[..., None]] = {
            DraftUp: self._up,
            DraftPeerGone: self._peer_gone,
            **dict.fromkeys(PULL_REPORTS, parts.pulls.receive),
            ProbeLink: lambda probe: parts.pulls.prober.begin(probe, parts.pool, None, time.monotonic()),
            DrainEngine: self._shut_down,  # drafts are advice: decoding goes on without them
            ShutdownEngine: self._shut_down,
        }

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop: receives, drafts and sends until it is told to stop."""
        gc.collect()
        gc.freeze()  # as in `eyas.engine.loop.engine`: a search of all that was loaded makes a round late
        self._link.send([self._parts.ready])
        try:
            while not self._stopping:
                self._pulse.loop()
                if self._ahead.flying and not self._posted.any_starts:
                    self._counted(self._ahead.count())
                else:
                    self._counted(self._ahead.stop())
                    if self._posted.pass_on():
                        self._step()  # devices wait for these: nothing else goes before them
                copies = (self._parts.bell.descriptor,) if self._parts.pulls.active else ()
                for command in self._link.recv(self._nap(), (*self._channels.descriptors, *copies)):
                    self._counted(self._ahead.stop())  # nothing changes below a batch that waits
                    self._handlers[type(command)](command)
                    self._heard += 1
                    self._pulse()
                self._channels.listen()
                self._parts.bell.quiet()
                self._step()
                self._parts.pulls.poll(time.monotonic())
                self._report()
                if self._posted.busy and not self._posted.most_begin:
                    self._ahead.launch()
        finally:
            self._close()
        self._link.send([EngineStopped()])

    def _nap(self) -> float:
        """How long to wait for commands."""
        if self._ahead.flying:
            return FLYING_S
        if self._posted.busy:
            return 0.0
        if self._posted.any:
            return MAILBOX_S
        return COPYING_S if self._parts.pulls.active else IDLE_S

    def _counted(self, came: bool) -> None:
        """Have rounds come for a batch that the device took by itself? Then the next ones come soon."""
        if came:
            self._posted.came()

    def _up(self, up: DraftUp) -> None:
        """By the front: the channel that it may offer comes first."""
        if up.channel is not None and (reason := self._channels.answer(up.peer, up.channel)):
            self._link.send([DraftDown(no_channel=reason, peer=up.peer)])
        self._sequences.up(msgspec.structs.replace(up, commits=tuple(self._whole(up.peer, up.commits))))
        if any(opened.steps for opened in up.opens):
            self._posted.came()  # as soon as its prompt is computed

    def _whole(self, peer: int, commits: Iterable[DraftCommit]) -> Iterator[DraftCommit]:
        """Commits with their features; those that were lent and are not there stay without."""
        for one in commits:
            features = self._channels.fetch(peer, one.lent) if one.lent else one.features
            yield msgspec.structs.replace(one, features=features, lent=0) if one.lent else one

    def _peer_gone(self, gone: DraftPeerGone) -> None:
        self._channels.end(gone.peer)
        self._sequences.forget(gone.peer)

    @torch.inference_mode()
    def _step(self) -> None:
        """Answers all commits, by the shape they ask for."""
        groups: dict[SpeculationConfig | None, list[DraftingSequence]] = defaultdict(list)
        followed = self._sequences.followed.items()
        for key, one in [(key, one) for key, one in followed if one.is_here and one.is_due]:
            if self._sequences.reserve(key, one.requested):
                groups[one.requested].append((key, one))
        for spec, group in groups.items():
            self._pulse()
            began = time.monotonic()
            self._draft(spec, group)
            self._step_seconds.add(time.monotonic() - began)
            self._step_sequences.add(len(group))

    def _draft(self, spec: SpeculationConfig | None, group: list[DraftingSequence]) -> None:
        """Writes the rows of their commits, and proposes below them as `spec` says; None: nothing."""
        inputs = {}
        for key, followed in group:
            one = followed.draft_input(key, self._channels.rows(key[0]))
            if one is None:
                self._sequences.close(key, "its features are in no ring that is known here")
            else:
                inputs[key] = one
        if not inputs:
            return
        for key, proposed in zip(inputs, self._parts.runner.draft(list(inputs.values()), spec), strict=True):
            if not proposed.whole:  # the decode engine has them still, and opens it anew
                self._sequences.close(key, LOST_FEATURES)
                continue
            followed = self._sequences.followed[key]
            followed.written()
            if spec is not None:
                self._propose(key, followed, proposed.tree)
        self._send_replies()  # before the next shape is computed

    def _propose(self, key: Key, followed: DraftedSequence, tree: DraftTree) -> None:
        peer, seq = key
        base = followed.first + followed.end
        proposal = DraftProposal(seq, followed.open.generation, base, tuple(tree.tokens), tuple(tree.parents))
        if self._posted.answer(key, followed, proposal):
            self._mailed.add(peer)
        else:
            self._proposals[peer].append(proposal)

    def _shut_down(self, _: DrainEngine | ShutdownEngine) -> None:
        self._stopping = True

    # --- answers, and the end ------------------------------------------------------------------------

    def _report(self) -> None:
        """Everything since the last time, and now and then the load."""
        self._progress += 1
        self._send_replies()
        now = time.monotonic()
        if now - self._reported > LOAD_S:
            self._reported = now
            self._link.send([self._load()])

    def _send_replies(self) -> None:
        closed: dict[int, list[DraftClosed]] = defaultdict(list)
        for peer, one in self._sequences.take_closed():
            closed[peer].append(one)
        self._channels.wake(self._mailed)
        self._mailed.clear()
        proposals, self._proposals = self._proposals, defaultdict(list)
        peers = proposals.keys() | closed.keys()
        downs = [DraftDown(tuple(proposals[p]), tuple(closed[p]), peer=p) for p in peers]
        self._link.send([*self._parts.outbox.take(), *downs])

    def _load(self) -> EngineLoad:
        followed, pulls = self._sequences.followed.values(), self._parts.pulls
        return EngineLoad(
            progress=self._progress,
            pending=any(one.commits for one in followed),
            running=len(followed),
            waiting=0,
            pages_used=self._parts.pool.used,
            moved=dict(pulls.moved),
            ways_refused=dict(pulls.routes.refused),
            pulls_failed=pulls.failed,
            heard=self._heard,
            step_seconds=tuple(self._step_seconds.counts),
            step_seconds_total=self._step_seconds.total,
            step_sequences=tuple(self._step_sequences.counts),
            step_sequences_total=self._step_sequences.total,
        )

    def _close(self) -> None:
        self._ahead.stop()
        self._channels.close()
        if self._parts.copier.close(time.monotonic() + STOP_S):
            self._parts.runner.pool.close()


class PostedCommits:
    """`mailbox`: of a peer, if it has one. Who is followed there is known to `sequences`."""

    def __init__(self, sequences: DraftSequences, mailbox: Callable[[int], DraftMailbox | None]) -> None:
        self._sequences = sequences
        self._mailbox = mailbox
        self._came = 0.0  # monotonic seconds, when the last round or answer did

    @property
    def any(self) -> bool:
        """Is there anything to look for that nothing wakes this worker for?"""
        boxes = [self._mailbox(key[0]) for key, _ in self._expected]
        return any(box is None or not box.place.width for box in boxes)

    @property
    def any_starts(self) -> bool:
        """Have the first rows of a sequence come, which a batch on the device does not wait for?"""
        return any(self._rounds(key, one) != () for key, one in self._beginning)

    @property
    def most_begin(self) -> bool:
        """Are the first rows of most sequences still to come? Steps wait for these then: a batch on the
        device would be in their way, and all are drafted for together.
        """
        return 2 * len(self._beginning) > len(self._expected)

    @property
    def busy(self) -> bool:
        """Is it likely to come soon?"""
        return time.monotonic() - self._came < BUSY_S and self.any

    def pass_on(self) -> bool:
        """The sequences get the commits that have come, if any; while it is busy, waits a little for them.

        A step posts for all its sequences in the same moment; only ends of prompts come after rounds. So it
        looks again until nothing more has come, or all have, and while most begin: they are drafted for
        together.
        """
        wait_s = SPIN_S if self.busy else 0.0
        deadline = time.monotonic() + wait_s
        while not (came := self._look()) and time.monotonic() < deadline:
            pass
        if not (more := came):
            return False
        deadline = time.monotonic() + wait_s
        while came < len(self._expected) and (more or self.most_begin) and time.monotonic() < deadline:
            more = self._look()
            came += more
        return True

    def answer(self, key: Key, followed: DraftedSequence, proposal: DraftProposal) -> bool:
        """Leaves a proposal in the sequence's mailbox. False: it has none."""
        mailbox = self._mailbox(key[0]) if followed.mailed else None
        if mailbox is None:
            return False
        mailbox.propose(followed.open.place, proposal)  # one that has no room there is dropped
        self.came()
        return True

    def came(self) -> None:
        """A round or an answer did, now."""
        self._came = time.monotonic()

    @property
    def _expected(self) -> list[tuple[Key, DraftedSequence]]:
        """Sequences whose next rows are to be in a mailbox: what these ask for is known."""
        followed = self._sequences.followed.items()
        return [(key, one) for key, one in followed if one.mailed and one.latest is not None]

    @property
    def _beginning(self) -> list[tuple[Key, DraftedSequence]]:
        """Those of them whose first rows have not come."""
        return [(key, one) for key, one in self._expected if not one.started and not one.commits]

    def _look(self) -> int:
        """How many sequences' rounds have come."""
        came = sum(self._look_for(key, followed) for key, followed in self._expected)
        if came:
            self.came()
        return came

    def _rounds(self, key: Key, followed: DraftedSequence) -> tuple[int, ...] | None:
        """The tokens of its next rows, as `DraftMailbox.rounds` has them; None, too, if it has no place."""
        opened, mailbox = followed.open, self._mailbox(key[0])
        if mailbox is None or opened.place >= mailbox.places:
            return None
        return mailbox.rounds(opened.place, opened.generation, followed.first + followed.end)

    def _look_for(self, key: Key, followed: DraftedSequence) -> bool:
        """A commit for each of its rounds that has come. Has any?"""
        came = False
        while self._look_once(key, followed):
            came = True
        return came

    def _look_once(self, key: Key, followed: DraftedSequence) -> bool:
        """The commit of its next round, if that has come."""
        opened, mailbox = followed.open, self._mailbox(key[0])
        if mailbox is None or opened.place >= mailbox.places:
            self._sequences.close(key, NO_PLACE)
            return False
        position = followed.first + followed.end
        tokens = mailbox.rounds(opened.place, opened.generation, position)
        features: bytes | None = b""
        if tokens and mailbox.place.width:  # they were left beside the words
            features = mailbox.features(opened.place, opened.generation, position, len(tokens))
        if tokens is None or features is None:
            self._sequences.close(key, LOST)
            return False
        if tokens:
            place = -1 if mailbox.place.width else opened.place
            assert followed.latest is not None
            commit = msgspec.structs.replace(
                followed.latest, base_len=position, tokens=tokens, features=features, place=place
            )
            self._sequences.commit(key, commit)
        return bool(tokens) and self._sequences.followed.get(key) is followed
