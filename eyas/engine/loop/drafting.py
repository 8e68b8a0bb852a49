"""Coordinates a drafter outside the step: sends it committed rows, adopts its proposals, bounds the wait for
them.

The drafter receives committed rows in one batch per step. Where a draft head runs inside the step there is no
such drafter, and only the last feature of a sequence is stored, for the step in which the sequence begins.

A proposal saves `gain` plain steps (a running mean of accepted drafts), so a step waits at most gain x the
time of a step. After that the step runs without drafts, and the late proposal is trimmed when it arrives.
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
GAIN = 1.0  # accepted drafts per proposal, before the first proposal
MAX_WAIT_STEPS = 2.0  # the longest wait, in steps, whatever the gain: a dead drafter may cost this 8 times
RECOVERY = 0.01
"""How far a low gain returns to `GAIN` per step without a proposal: when the wait is too short for any
proposal to arrive in time, no step could show that proposals have become better.
"""


class DraftCoordinator:
    """Connects the step loop with the drafter.

    `drafter`: None if drafts are made inside the step or not at all. `most_nodes`: the largest proposal that
    a step verifies. `spec`: the proposals to request; `pacing`, if given, lowers their depth. Also records
    recent answers for suffix lookups.
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
        """`width`: features per row of the draft head; 0 without one. `grammars`: they cut and force
        drafts.
        """
        self.drafter = drafter
        self._spec = spec
        self._pacing = pacing
        self._grammars = grammars
        self._recall = AnswerRecall(spec) if spec.suffix else None
        self.plain = False  # steps are too full for drafts
        self.draft_wait = DraftWait()
        self._width = width
        self._most_nodes = most_nodes
        self._commits: list[AcceptedRows] = []
        self._grown_by_grammar: list[Sequence] = []  # sequences with a grammar and new tokens

    # --- committed rows --------------------------------------------------------------------------------

    def commit_rows(self, result: StepResult, *, propose: bool) -> None:
        """Queues for the drafter the rows of `result` whose next token is known.

        A drafter whose KV is in this process receives all rows, a remote drafter the last ones. `propose`:
        also requests a proposal for the next round.
        """
        seq, start = result.work.seq, result.work.start
        if propose:
            self._add_tokens(seq)
        if self.drafter is None or result.features is None:
            return
        drafted = seq.generation.request.speculative
        if not drafted and (
            result.work.round or not self.drafter.local_kv
        ):  # later requests may share a prompt
            return
        end = start + result.rows
        start = end - len(result.features)  # a remote drafter needs no earlier rows
        tokens = seq.tokens(start + 1, min(end + 1, len(seq)))
        features = result.features if len(tokens) == len(result.features) else result.features[: len(tokens)]
        if self.drafter.local_kv:
            if tokens and (seq.drafting or (seq.draft_len == start and self._open(seq, start))):
                want = self._requested_draft(seq) if propose and drafted else None
                self._commits.append(AcceptedRows(seq, start, tokens, features, want))
            return
        seq.window.add(start, features)
        if not propose:
            return  # a remote drafter gets a prompt by its handle, or by the window at its end
        if seq.drafting:
            undrafted, want = result.work.round and not result.drafts.offered, self._requested_draft(seq)
            self._commits.append(AcceptedRows(seq, start, tokens, features, want, result.ringed, undrafted))
        else:
            self._open_from_window(seq)

    def begin_prompts(self, works: SequenceOf[SequenceWork]) -> bool:
        """Begins drafting for the prompts that end in a step, before the step is launched.

        Only for a remote drafter to which the device posts rows itself: it can then draft as soon as the step
        ends. True if drafting began for any.
        """
        if self.drafter is None or self.drafter.local_kv or self.plain:
            return False
        began = False
        for work in works:
            seq, rows = work.seq, min(len(work.tokens), FIRST_ROWS)
            generation = seq.generation
            ends = work.sample and not work.round and generation.kind is not GenerationKind.PREFILL
            whole = rows == FIRST_ROWS or not seq.window.chunks  # all features that drafting begins with
            if ends and whole and generation.request.speculative and not seq.drafting:
                base = work.start + len(work.tokens) - rows
                seq.drafting = self.drafter.begin(seq, base, self._requested_draft(seq))
                began = began or seq.drafting
        return began

    def fork(self, leader: Sequence, follower: Sequence, features: torch.Tensor | None) -> None:
        """Begins drafting for `follower`, a further choice of `leader`'s prompt, whose last row's features
        end `features`.
        """
        self._add_tokens(follower)
        if features is None:
            return
        follower.window = leader.window.copy()
        self._begin(follower, features[-1:])

    def join(self, seq: Sequence, feature: bytes) -> None:
        """Begins drafting for a sequence whose prompt another worker computed.

        `feature`: of the prompt's last row, float32 bytes.
        """
        self._add_tokens(seq)
        if not self._width or len(feature) != 4 * self._width:
            return
        generation = seq.generation
        row = torch.from_numpy(np.frombuffer(feature, np.float32).copy())[None]
        if self._begin(seq, row, generation.draft_handle) and generation.draft_handle is not None:
            generation.draft_claimed = True
        self.post()

    def _add_tokens(self, seq: Sequence) -> None:
        if not seq.generation.request.speculative:
            return
        if self._recall is not None:
            self._recall.grew(seq)
        if self.drafter is not None:
            self.drafter.grew(seq)
            if seq.generation.request.params.grammar is not None:
                self._grown_by_grammar.append(seq)

    def _begin(self, seq: Sequence, feature: torch.Tensor, handle: KvHandle | None = None) -> bool:
        """Queues a sequence's first commit: (last feature, token 0). True if a drafter follows the
        sequence.
        """
        base = len(seq.prompt) - 1
        if seq.window.end != base + 1:
            seq.window.add(base, feature)
        if self.drafter is None or not seq.generation.request.speculative:
            return False
        if not self.drafter.local_kv:
            return self._open_from_window(seq, handle)
        if seq.draft_len != base or not self._open(seq, base):
            return False
        self._commits.append(AcceptedRows(seq, base, seq.output[:1], feature, self._requested_draft(seq)))
        return True

    def _open(self, seq: Sequence, base: int, handle: KvHandle | None = None) -> bool:
        """Has the drafter follow `seq` from row `base` on; False if it cannot."""
        assert self.drafter is not None
        seq.drafting = self.drafter.open(seq, base, handle)
        return seq.drafting

    def _open_from_window(self, seq: Sequence, handle: KvHandle | None = None) -> bool:
        """Has a remote drafter follow `seq` from the stored features, the last of which is the newest."""
        seq.window.forget_others(seq.slot, seq.occupancy)
        base = seq.window.base
        if not seq.window.chunks or not self._open(seq, base, handle):
            return False
        recent = _read(seq.window.chunks)
        self._commits.append(
            AcceptedRows(seq, base, seq.tokens(base + 1, len(seq)), recent, self._requested_draft(seq))
        )
        return True

    def _requested_draft(self, seq: Sequence) -> SpeculationConfig | None:
        """The proposal to request for the sequence's next round; None: the round verifies no drafts."""
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
        """Sends the commits since the last call to the drafter, in one batch."""
        if self.drafter is not None and self._commits:
            commits, self._commits = self._commits, []
            self.drafter.post(commits)

    def stop(self, seq: Sequence) -> None:
        """Stops drafting for a sequence that has ended or was preempted."""
        if self._recall is not None:
            self._recall.gone(seq)
        if self.drafter is not None:
            self.drafter.close(seq)
        seq.drafting = False

    def record_answer(self, seq: Sequence) -> None:
        """Records the complete answer of a sequence, for lookups in recent answers."""
        if self._recall is not None:
            self._recall.ended(seq)

    def forget_answers(self) -> None:
        """Drops the recent answers, when the prefix cache is flushed."""
        if self._recall is not None:
            self._recall.answers.clear()

    # --- proposals -------------------------------------------------------------------------------------

    def owed(self) -> bool:
        """True if a proposal is outstanding and worth waiting `wait_s` for."""
        return self.drafter is not None and not self.plain and self.drafter.owed()

    def blocks_next_step(self) -> bool:
        """True if the drafter must receive a step's results before the next step is composed."""
        return self.drafter is not None and self.drafter.in_time()

    @property
    def wait_s(self) -> float:
        """Seconds that a step may wait for drafts."""
        return self.draft_wait.seconds

    def adopt(self) -> None:
        """Sets the drafts that the next step verifies, from new proposals and from tokens forced by
        grammars.
        """
        if self._recall is not None:
            self._recall.renew()
        for draft in self.drafter.take() if self.drafter is not None else ():
            self._adopt(draft)
        grown, self._grown_by_grammar = self._grown_by_grammar, []
        for seq in grown:
            if seq.pages and seq.tree is None:
                self._set_tree(seq, NO_TREE)

    def _adopt(self, draft: SequenceProposal) -> None:
        """Adopts the part of a proposal that agrees with the tokens committed since it was requested."""
        seq = draft.seq
        if not seq.pages or draft.base >= len(seq):
            return
        self._set_tree(seq, draft.tree.trim(seq.tokens(draft.base + 1, len(seq))) or NO_TREE)

    def _set_tree(self, seq: Sequence, tree: DraftTree) -> None:
        """Sets the drafts for the next round of `seq`: `tree`, cut to the limits and by the grammar."""
        want = self._requested_draft(seq)
        if want is None:
            seq.tree = None
            return
        left = seq.generation.request.params.max_tokens - len(seq.output) - 1
        nodes, depth = min(self._most_nodes, want.width - 1), min(left, want.steps)
        tree = tree.narrow(nodes).truncate_depth(depth)
        if self._grammars is not None:
            tree = self._grammars.draft(seq, tree, min(nodes, depth))
        seq.tree = tree or None

    def record_step(self, landed: SequenceOf[StepResult], seconds: float) -> None:
        """Updates the longest wait for a proposal by the results of a step of `seconds`."""
        if self.drafter is not None:
            self.draft_wait.record_step(landed, seconds)

    # --- messages of a remote drafter --------------------------------------------------------------------

    def outgoing(self) -> list[DraftUp]:
        """Messages for the draft worker since the last call."""
        return [] if self.drafter is None else self.drafter.outgoing()

    @property
    def bells(self) -> SequenceOf[int]:
        """File descriptors that become readable when `arrived` has drafts."""
        return () if self.drafter is None else self.drafter.bells

    def leave(self) -> None:
        """Disconnects the drafter when the engine stops."""
        if self.drafter is not None:
            self.drafter.leave()

    def arrived(self) -> list[DraftDown]:
        """Drafts that arrived on a direct path since the last call, for `deliver`."""
        return [] if self.drafter is None else self.drafter.arrived()

    def deliver(self, down: DraftDown) -> list[tuple[KvHandle, int]]:
        """Passes drafts on; returns the KV handles that no drafter will pull any more, with their
        attempts.
        """
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
    """The features as one host tensor [n, head width]. Adjacent chunks on a device are read by one copy."""
    tensors = []
    for on_device, run in itertools.groupby(chunks, lambda chunk: isinstance(chunk, DeviceRows)):
        parts = list(run)
        if on_device:
            rows = range(parts[0].rows.start, parts[-1].rows.stop)
            parts = [replace(parts[-1], rows=rows).read()]
        tensors += parts
    return torch.cat(tensors)


class DraftWait:
    """Running means of a step's time and of the number of steps that a proposal saves."""

    def __init__(self) -> None:
        self._gain = GAIN
        self._step_s = 0.0

    @property
    def seconds(self) -> float:
        """The longest time that a step may wait for a proposal; 0.0 before the first step."""
        return min(self._gain, MAX_WAIT_STEPS) * self._step_s

    def record_step(self, landed: SequenceOf[StepResult], seconds: float) -> None:
        """Updates the means by a step; steps with prompt chunks are ignored.

        A step that waited on the device for a proposal that did not arrive does not change the mean time:
        otherwise each wait would lengthen the next. The proposals that did arrive still change the gain.
        """
        if any(result.work.tree is None and len(result.work.tokens) > 1 for result in landed):
            return
        missed = any(result.work.seq.mailed and not result.drafts.offered for result in landed)
        if not (self._step_s and missed):
            self._step_s += (seconds - self._step_s) * (SMOOTHING if self._step_s else 1.0)
        verified = [result for result in landed if result.drafts.offered]
        if verified:
            accepted = sum(result.drafts.accepted for result in verified) / len(verified)
            self._gain += (accepted - self._gain) * SMOOTHING
        elif missed:
            self._gain += max(GAIN - self._gain, 0.0) * RECOVERY
