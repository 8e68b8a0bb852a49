"""Coordinates a drafter outside the step: its commits, its proposals, and how long a step waits for them.

Rows reach it in one batch per step, once they are certain. Where a step drafts by itself there is no such
drafter: then a sequence's last feature is only kept, for the step in which it begins.

A proposal that arrives saves `gain` plain steps, as running acceptance says, so waiting pays up to gain x the
step's time; beyond that the step goes plainly and the late proposal is trimmed when it comes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from eyas.common.config import EngineConfig, SpeculationConfig
from eyas.common.types import KvHandle, RequestDraftLimits
from eyas.engine.batch.sequence import GenerationKind, Sequence, SequenceWork
from eyas.engine.batch.step_result import StepResult
from eyas.engine.batch.tree import NO_TREE, DraftTree
from eyas.engine.batch.window import FIRST_ROWS, DeviceRows
from eyas.engine.grammar.grammars import GrammarManager
from eyas.engine.ipc.messages import DraftDown, DraftUp
from eyas.engine.speculation.depth import narrowed, shallower
from eyas.engine.speculation.depth_pacing import DepthPacing
from eyas.engine.speculation.drafters.base import AcceptedRows, Drafter, SequenceProposal
from eyas.engine.speculation.recall import AnswerRecall

NO_LIMITS = RequestDraftLimits()
SMOOTHING = 0.1
GAIN = 1.0  # accepted drafts per proposal, before one has been seen
MOST_WAITED_STEPS = 2.0  # however good the drafter was: a dead one must not cost more than this, 8 times
RECOVERY = 0.01
"""How far a low gain goes back to `GAIN` per step whose mailboxes held nothing. Where a wait is too short for
any proposal to come in time, no step would show that proposals have become worth more.
"""


class DraftCoordinator:
    """`drafter`: None if there is none outside the step. `most_nodes`: of a proposal that a step verifies.

    `spec`: what is wanted of the drafter; with `pacing` as deep as that says, and at most so. Recent answers
    are recalled here too, whoever looks drafts up in them.
    """

    def __init__(
        self,
        drafter: Drafter | None,
        width: int,
        most_nodes: int,
        spec: SpeculationConfig = EngineConfig.speculation,
        pacing: DepthPacing | None = None,
        grammars: GrammarManager | None = None,
    ) -> None:
        """`width`: of the head; 0 without one. `grammars`: they cut drafts, and force some."""
        self.drafter = drafter
        self._spec = spec
        self._pacing = pacing
        self._grammars = grammars
        self._recall = AnswerRecall(spec) if spec.suffix else None
        self.plain = False  # the steps have no room for drafts
        self.patience = DraftWait()
        self._width = width
        self._most_nodes = most_nodes
        self._commits: list[AcceptedRows] = []
        self._grown_by_grammar: list[Sequence] = []  # those held to a grammar that have new tokens

    # --- what is certain -------------------------------------------------------------------------------

    def certain(self, one: StepResult, *, propose: bool) -> None:
        """The rows of `one` whose next token is known: all of them where draft KV lives here."""
        seq, start = one.work.seq, one.work.start
        if propose:
            self._grew(seq)
        if self.drafter is None or one.features is None:
            return
        drafted = seq.generation.request.speculative
        if not drafted and (one.work.round or not self.drafter.local_kv):  # its prompt may serve others
            return
        end = start + one.rows
        start = end - len(one.features)  # those before are of no use to a drafter far away
        tokens = seq.tokens(start + 1, min(end + 1, len(seq)))
        features = one.features if len(tokens) == len(one.features) else one.features[: len(tokens)]
        if self.drafter.local_kv:
            if tokens and (seq.drafting or (seq.draft_len == start and self._open(seq, start))):
                want = self._want(seq) if propose and drafted else None
                self._commits.append(AcceptedRows(seq, start, tokens, features, want))
            return
        seq.window.add(start, features)
        if not propose:
            return  # a drafter far away hears of a prompt by its handle, or of the window at its end
        if seq.drafting:
            undrafted, want = one.work.round and not one.drafts.offered, self._want(seq)
            self._commits.append(AcceptedRows(seq, start, tokens, features, want, one.ringed, undrafted))
        else:
            self._open_from_window(seq)

    def beginning(self, works: SequenceOf[SequenceWork]) -> bool:
        """Begins drafting for the prompts that end in a step, before it is launched, where devices post rows
        and rounds to a drafter elsewhere: it can draft as soon as the step is over. True: there are some.
        """
        if self.drafter is None or self.drafter.local_kv or self.plain:
            return False
        began = False
        for work in works:
            seq, rows = work.seq, min(len(work.tokens), FIRST_ROWS)
            generation = seq.generation
            ends = work.sample and not work.round and generation.kind is not GenerationKind.PREFILL
            whole = rows == FIRST_ROWS or not seq.window.chunks  # of the features that it begins with
            if ends and whole and generation.request.speculative and not seq.drafting:
                base = work.start + len(work.tokens) - rows
                seq.drafting = self.drafter.begin(seq, base, self._want(seq))
                began = began or seq.drafting
        return began

    def fork(self, leader: Sequence, follower: Sequence, features: torch.Tensor | None) -> None:
        """`follower` begins with the prompt that `leader` led; `features` end with the prompt's last row."""
        self._grew(follower)
        if features is None:
            return
        follower.window = leader.window.copy()
        self._begin(follower, features[-1:])

    def join(self, seq: Sequence, feature: bytes) -> None:
        """A sequence begins whose prompt was computed elsewhere: `feature` is its last row's, as it came."""
        self._grew(seq)
        if not self._width or len(feature) != 4 * self._width:
            return
        generation = seq.generation
        row = torch.from_numpy(np.frombuffer(feature, np.float32).copy())[None]
        if self._begin(seq, row, generation.draft_handle) and generation.draft_handle is not None:
            generation.draft_claimed = True
        self.post()

    def _grew(self, seq: Sequence) -> None:
        if not seq.generation.request.speculative:
            return
        if self._recall is not None:
            self._recall.grew(seq)
        if self.drafter is not None:
            self.drafter.grew(seq)
            if seq.generation.request.params.grammar is not None:
                self._grown_by_grammar.append(seq)

    def _begin(self, seq: Sequence, feature: torch.Tensor, handle: KvHandle | None = None) -> bool:
        """The first commit of a sequence is (last feature, token 0). True: a drafter has it."""
        base = len(seq.prompt) - 1
        if seq.window.end != base + 1:
            seq.window.add(base, feature)
        if self.drafter is None or not seq.generation.request.speculative:
            return False
        if not self.drafter.local_kv:
            return self._open_from_window(seq, handle)
        if seq.draft_len != base or not self._open(seq, base):
            return False
        self._commits.append(AcceptedRows(seq, base, seq.output[:1], feature, self._want(seq)))
        return True

    def _open(self, seq: Sequence, base: int, handle: KvHandle | None = None) -> bool:
        """Follow `seq` from row `base` on, if somebody can."""
        assert self.drafter is not None
        seq.drafting = self.drafter.open(seq, base, handle)
        return seq.drafting

    def _open_from_window(self, seq: Sequence, handle: KvHandle | None = None) -> bool:
        """A drafter far away starts with the features that are still here; the last is the newest."""
        seq.window.forget_others(seq.slot, seq.occupancy)
        base = seq.window.base
        if not seq.window.chunks or not self._open(seq, base, handle):
            return False
        recent = _read(seq.window.chunks)
        self._commits.append(AcceptedRows(seq, base, seq.tokens(base + 1, len(seq)), recent, self._want(seq)))
        return True

    def _want(self, seq: Sequence) -> SpeculationConfig | None:
        """The proposal that the sequence's next round is to verify; None: it is plain."""
        spec, limits = self._spec, seq.generation.request.draft_limits
        if self._pacing is None:
            if self.plain:
                return None
        else:
            if not self._pacing.depth:
                return None
            spec = shallower(spec, self._pacing.depth)
        return spec if limits == NO_LIMITS else narrowed(spec, limits)

    def post(self) -> None:
        """Everything since the last call, in one batch."""
        if self.drafter is not None and self._commits:
            commits, self._commits = self._commits, []
            self.drafter.post(commits)

    def stop(self, seq: Sequence) -> None:
        """Stops drafting for a sequence that has ended, or lost its place."""
        if self._recall is not None:
            self._recall.gone(seq)
        if self.drafter is not None:
            self.drafter.close(seq)
        seq.drafting = False

    def answered(self, seq: Sequence) -> None:
        """A sequence has ended by itself: its answer is whole."""
        if self._recall is not None:
            self._recall.ended(seq)

    def forget_answers(self) -> None:
        """Forgets the recent answers, as a prefix cache that is flushed forgets its pages."""
        if self._recall is not None:
            self._recall.answers.clear()

    # --- proposals -------------------------------------------------------------------------------------

    def owed(self) -> bool:
        """True if a proposal is outstanding that is worth waiting for, for `wait_s`."""
        return self.drafter is not None and not self.plain and self.drafter.owed()

    def awaits(self) -> bool:
        """True if a drafter is to hear of a step before the next one is composed. Its drafts come in time."""
        return self.drafter is not None and self.drafter.in_time()

    @property
    def wait_s(self) -> float:
        """Seconds that a step may wait for drafts."""
        return self.patience.draft_wait_s

    def adopt(self) -> None:
        """Sets the drafts that the next step verifies: the remaining proposals, and the tokens that grammars
        force.
        """
        if self._recall is not None:
            self._recall.renew()
        for draft in self.drafter.take() if self.drafter is not None else ():
            self._adopt(draft)
        grown, self._grown_by_grammar = self._grown_by_grammar, []
        for seq in grown:
            if seq.pages and seq.tree is None:
                self._settle(seq, NO_TREE)

    def _adopt(self, draft: SequenceProposal) -> None:
        """Adopts the drafts that follow the tokens committed since, within what may be emitted."""
        seq = draft.seq
        if not seq.pages or draft.base >= len(seq):
            return
        self._settle(seq, draft.tree.trim(seq.tokens(draft.base + 1, len(seq))) or NO_TREE)

    def _settle(self, seq: Sequence, tree: DraftTree) -> None:
        """Sets the drafts for the next round of `seq`: as much of `tree` as is requested and allowed."""
        want = self._want(seq)
        if want is None:
            seq.tree = None
            return
        left = seq.generation.request.params.max_tokens - len(seq.output) - 1
        nodes, depth = min(self._most_nodes, want.width - 1), min(left, want.steps)
        tree = tree.narrow(nodes).truncate_depth(depth)
        if self._grammars is not None:
            tree = self._grammars.draft(seq, tree, min(nodes, depth))
        seq.tree = tree or None

    def stepped(self, landed: SequenceOf[StepResult], seconds: float) -> None:
        """A step took `seconds`: learns for how long a proposal is worth waiting for."""
        if self.drafter is not None:
            self.patience.stepped(landed, seconds)

    # --- the mailbox of a drafter far away ---------------------------------------------------------------

    def outgoing(self) -> list[DraftUp]:
        """Messages for the draft worker since the last call."""
        return [] if self.drafter is None else self.drafter.outgoing()

    @property
    def bells(self) -> SequenceOf[int]:
        """Descriptors that can be read when `arrived` has something to do."""
        return () if self.drafter is None else self.drafter.bells

    def leave(self) -> None:
        """The engine ends."""
        if self.drafter is not None:
            self.drafter.leave()

    def arrived(self) -> list[DraftDown]:
        """Drafts that have come past the front since the last call, for `deliver`."""
        return [] if self.drafter is None else self.drafter.arrived()

    def deliver(self, down: DraftDown) -> list[tuple[KvHandle, int]]:
        """Handles, and the attempts of their requests, that no drafter will pull now."""
        return [] if self.drafter is None else self.drafter.deliver(down)

    @property
    def sent(self) -> Mapping[str, int]:
        """Running totals of commits, by path."""
        return {} if self.drafter is None else self.drafter.sent

    @property
    def missed_rounds(self) -> int:
        """The number of rounds without a proposal because it came too late."""
        return 0 if self.drafter is None else self.drafter.missed_rounds


def _read(chunks: Iterable[Any]) -> torch.Tensor:
    """[n, head width] on the host. What a device keeps is asked for at once."""
    tensors = []
    for on_device, some in itertools.groupby(chunks, lambda one: isinstance(one, DeviceRows)):
        several = list(some)
        if on_device:
            rows = range(several[0].rows.start, several[-1].rows.stop)
            several = [replace(several[-1], rows=rows).read()]
        tensors += several
    return torch.cat(tensors)


class DraftWait:
    """Running averages of the time of a step and of the time that a proposal saves."""

    def __init__(self) -> None:
        self._gain = GAIN
        self._step_s = 0.0

    @property
    def draft_wait_s(self) -> float:
        """Seconds that a step may wait for a proposal; 0.0 before the first step."""
        return min(self._gain, MOST_WAITED_STEPS) * self._step_s

    def stepped(self, landed: SequenceOf[StepResult], seconds: float) -> None:
        """Learn from a step without prompt chunks.

        One that waited in vain on the device says nothing of a step's time, or waiting would breed waiting.
        Those of its proposals that did come say what they were worth.
        """
        if any(one.work.tree is None and len(one.work.tokens) > 1 for one in landed):
            return
        in_vain = any(one.work.seq.mailed and not one.drafts.offered for one in landed)
        if not (self._step_s and in_vain):
            self._step_s += (seconds - self._step_s) * (SMOOTHING if self._step_s else 1.0)
        verified = [one for one in landed if one.drafts.offered]
        if verified:
            accepted = sum(one.drafts.accepted for one in verified) / len(verified)
            self._gain += (accepted - self._gain) * SMOOTHING
        elif in_vain:
            self._gain += max(GAIN - self._gain, 0.0) * RECOVERY
