"""The drafter inside the decode engine. Its KV has the target's page numbers, so their cache and lifetime."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf

from eyas.common.config import SpeculationConfig
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Sequence
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftRequest, DraftRunner
from eyas.engine.speculation.drafters.base import AcceptedRows, Drafter, SequenceProposal
from kv_transfer.layout import pages_for

WAITING_ROWS = 16
"""Rows of a sequence that may wait until a proposal is wanted: many at once cost hardly more than one."""


class ColocatedDrafter(Drafter):
    """Extends and proposes inside `post`, so no proposal is ever outstanding."""

    def __init__(self, runner: DraftRunner) -> None:
        self._runner = runner
        self._waiting: dict[
            int, AcceptedRows
        ] = {}  # by the sequence's uid: rows below which no proposal is wanted
        self._drafts: list[SequenceProposal] = []

    @property
    def local_kv(self) -> bool:
        return True

    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        seq.draft_len = base
        return True

    def post(self, commits: SequenceOf[AcceptedRows]) -> None:
        due = [commit for one in commits if (commit := self._due(one)) is not None]
        if not due:
            return
        extensions = [
            DraftExtension(c.seq.pages, c.base, c.tokens, c.features, adapter=c.seq.adapter_slot) for c in due
        ]
        drafted = self._runner.extend(extensions)
        groups: dict[SpeculationConfig, list[tuple[Sequence, DraftRequest]]] = defaultdict(list)
        for commit, new, last in zip(due, extensions, drafted, strict=True):
            seq = commit.seq
            seq.draft_len = commit.base + len(commit.tokens)
            if commit.spec is not None and self._has_room(seq, commit.spec):
                params = seq.generation.request.params
                request = DraftRequest.below(new, last, params, seq.choice)
                groups[commit.spec].append((seq, request))
        for spec, group in groups.items():
            trees = self._runner.propose([request for _, request in group], spec)
            pairs = zip(group, trees, strict=True)
            self._drafts += [SequenceProposal(seq, request.base, tree) for (seq, request), tree in pairs]

    def _has_room(self, seq: Sequence, spec: SpeculationConfig) -> bool:
        """Whether its pages hold the rows that a proposal writes: else its next round is plain.

        A pulled prompt has just the pages that came, and gets more before its first round.
        """
        rows = seq.draft_len + self._runner.draft_rows(spec)
        return pages_for(rows, self._runner.pool.shape.page_size) <= len(seq.pages)

    def _due(self, commit: AcceptedRows) -> AcceptedRows | None:
        """The commit with what waited before it; None: it waits too."""
        before = self._waiting.pop(commit.seq.uid, None)
        if before is not None:
            commit = before.joined(commit)
        if commit.spec is None and commit.generated and len(commit.tokens) < WAITING_ROWS:
            self._waiting[commit.seq.uid] = commit
            return None
        return commit

    def take(self) -> list[SequenceProposal]:
        drafts, self._drafts = self._drafts, []
        return drafts

    def owed(self) -> bool:
        return False

    def close(self, seq: Sequence) -> None:
        self._waiting.pop(seq.uid, None)
