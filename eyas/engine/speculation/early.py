"""Commits that came by a line before what they follow came by the front: here they wait for it.

A sequence's open and its first commit go by the front, which is slower than the line. So a commit of the line
may be the first word of a sequence, or ahead of it. It knows when a commit's turn has come and when it never
will; whether it makes sense is checked where all commits are.
"""

from __future__ import annotations

from collections import defaultdict, deque

from eyas.engine.ipc.messages import DraftCommit, DraftUp
from eyas.engine.speculation.draft_sequences import DraftSequences, Key

MOST_EARLY = 64
"""Of one sequence: then its next one is passed on, whatever is missing, and so the sequence is closed."""


class EarlyCommits:
    """Between the lines and the sequences of a draft worker. `add` what came, then `pass_on`."""

    def __init__(self, sequences: DraftSequences) -> None:
        self._sequences = sequences
        self._waiting: dict[Key, deque[DraftCommit]] = defaultdict(deque)

    def add(self, up: DraftUp) -> None:
        """Commits of a line, in order."""
        for commit in up.commits:
            self._waiting[up.peer, commit.seq].append(commit)

    def forget(self, peer: int) -> None:
        """The peer is gone."""
        for key in [key for key in self._waiting if key[0] == peer]:
            del self._waiting[key]

    def pass_on(self) -> None:
        """Every commit whose turn has come."""
        for key, commits in list(self._waiting.items()):
            while commits and not self._waits(key, commits):
                commit = commits.popleft()
                if not self._is_over(key, commit):
                    self._sequences.up(DraftUp(commits=(commit,), peer=key[0]))
            if not commits:
                del self._waiting[key]

    def _waits(self, key: Key, commits: deque[DraftCommit]) -> bool:
        """Is what the first of them follows still on its way?"""
        if len(commits) > MOST_EARLY:
            return False
        commit, followed = commits[0], self._sequences.followed.get(key)
        if followed is None or followed.open.generation != commit.generation:
            return commit.generation > self._sequences.opened.get(key[0], 0)
        return commit.base_len > followed.first + followed.end

    def _is_over(self, key: Key, commit: DraftCommit) -> bool:
        """Was its sequence opened, and has ended? The side that ended it has told the other."""
        followed = self._sequences.followed.get(key)
        ended = followed is None or followed.open.generation != commit.generation
        return ended and commit.generation <= self._sequences.opened.get(key[0], 0)
