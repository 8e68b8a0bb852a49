"""The drafter inside the decode engine. Its KV has the target's page numbers, so their cache and lifetime."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from eyas.common.config import SpeculationConfig
from eyas.common.types import KvHandle
from eyas.engine.batch.sequence import Sequence
from eyas.engine.speculation.draft_runner import DraftRequest, DraftRunner, Extension
from eyas.engine.speculation.drafter import Commit, Draft, Drafter


class ColocatedDrafter(Drafter):
    """Extends and proposes inside `post`, so no proposal is ever outstanding."""

    def __init__(self, runner: DraftRunner, spec: SpeculationConfig) -> None:
        self._runner = runner
        self._spec = spec
        self._drafts: list[Draft] = []

    @property
    def local_kv(self) -> bool:
        return True

    def open(self, seq: Sequence, base: int, handle: KvHandle | None) -> bool:
        seq.draft_len = base
        return True

    def post(self, commits: SequenceOf[Commit]) -> None:
        if not commits:
            return
        drafted = self._runner.extend([Extension(c.seq.pages, c.base, c.tokens, c.features) for c in commits])
        requests, owners = [], []
        for commit, last in zip(commits, drafted, strict=True):
            seq = commit.seq
            seq.draft_len = commit.base + len(commit.tokens)
            if commit.propose:
                params = seq.generation.request.params
                requests.append(DraftRequest(seq.pages, seq.draft_len, last, params, seq.choice))
                owners.append(seq)
        if requests:
            trees = self._runner.propose(requests, self._spec)
            found = zip(owners, requests, trees, strict=True)
            self._drafts += [Draft(seq, request.base, tree) for seq, request, tree in found]

    def take(self) -> list[Draft]:
        drafts, self._drafts = self._drafts, []
        return drafts

    def owed(self) -> bool:
        return False

    def close(self, seq: Sequence) -> None:
        pass
