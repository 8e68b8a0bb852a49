"""Commits that came by a line before what they follow came by the front: here they wait for it.

A sequence's open and its first commit go by the front, which is slower than the line. So a commit of the line
may be the first word of a sequence, or ahead of it. It knows when a commit's turn has come and when it never
will; whether it makes sense is checked where all commits are.
"""

from __future__ import annotations

import enum
from collections import defaultdict, deque

from eyas.engine.ipc.messages import DraftCommit, DraftUp
from eyas.engine.speculation.draft_sequences import DraftSequences, Key

MOST_EARLY = 64
"""Of one sequence: then its next one is passed on, whatever is missing, and so the sequence is closed."""


class _Turn(enum.Enum):
    """WAITS: what a commit follows is on its way. OVER: its sequence was opened and has ended, and the side
    that ended it has told the other.
    """

    WAITS = enum.auto()
    COMES = enum.auto()
    OVER = enum.auto()


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
            while commits and (turn := self._turn(key, commits)) is not _Turn.WAITS:
                commit = commits.popleft()
                if turn is _Turn.COMES:
                    self._sequences.commit(key, commit)
            if not commits:
                del self._waiting[key]

    def _turn(self, key: Key, commits: deque[DraftCommit]) -> _Turn:
        """Of the first of them."""
        commit, followed = commits[0], self._sequences.followed.get(key)
        late = len(commits) > MOST_EARLY
        if followed is not None and followed.open.generation == commit.generation:
            early = commit.base_len > followed.first + followed.end
            return _Turn.WAITS if early and not late else _Turn.COMES
        if commit.generation <= self._sequences.opened.get(key[0], 0):
            return _Turn.OVER
        return _Turn.COMES if late else _Turn.WAITS
