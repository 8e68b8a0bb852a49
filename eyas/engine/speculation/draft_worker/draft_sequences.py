"""The sequences of a draft worker: who opened them, which rows are certain, and which pages they have.

It checks what decode engines send and owns every page. `commits` wait here until somebody writes their rows.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Hashable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch

from eyas.common.config import MOST_NODES, MOST_ROWS, MOST_STEPS, MOST_TOPK, SpeculationConfig
from eyas.common.errors import EyasError, InvalidRequest
from eyas.common.types import KvHandle
from eyas.engine.ipc.messages import DraftClosed, DraftCommit, DraftOpen, DraftUp, EngineReady
from eyas.engine.ipc.row_ring import WAITING_ROWS, RingRow, RowMemory
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pool import KvPool
from eyas.engine.kv.pulls import PullArrival, PullManager
from eyas.engine.speculation.draft_worker.draft_runner import DraftExtension, DraftInput, ProposedTree
from kv_transfer.layout import pages_for

NO_FEATURES = torch.empty(0, 0)
NO_PAGES = "the draft worker has no free pages"
LOST_FEATURES = "its features were not in its ring any more"
NO_SENSE = "a commit must have known ids, a feature for each, and sane options"
PULL_S = 30.0  # draft KV that takes longer to arrive is of no use any more

_log = logging.getLogger("eyas.engine")

Key = tuple[int, int]  # (peer, its number for the sequence)


@dataclass(eq=False)
class PromptKv:
    """The draft KV of a prompt, being pulled or here. Freed when no sequence needs it."""

    users: list[Key] = field(default_factory=list)
    pages: list[int] | None = None  # None: still being pulled


@dataclass(eq=False)
class DraftedSequence:
    """A sequence that is followed. `first`: the position of its row 0; above 0 if it starts from a window,
    whose first row is row 0 or one of the next few.

    `rows`: written; counted from `first`, like every row here. `commits`: rows to be written and answered.
    `latest`: its last commit; those in its mailbox, if it has one, ask for the same. One without rows where
    the first ones come there too.
    """

    open: DraftOpen
    first: int
    prompt: PromptKv | None
    rows: int
    pages: list[int] = field(default_factory=list)
    commits: list[DraftCommit] = field(default_factory=list)
    latest: DraftCommit | None = None

    @property
    def mailed(self) -> bool:
        """Does it have a mailbox?"""
        return self.open.place >= 0

    @property
    def started(self) -> bool:
        """Are any rows written that are not its prompt's by a handle?"""
        return self.first + self.rows > self.open.base_len

    @property
    def lowest(self) -> int:
        """The position of its first row that is one: those below it in its first page are not."""
        return self.open.base_len if self.prompt is None else 0

    @property
    def is_here(self) -> bool:
        """Is the draft KV of its prompt here?"""
        return self.prompt is None or self.prompt.pages is not None

    @property
    def end(self) -> int:
        """The row after the last of its commits: the root token's."""
        last = self.commits[-1:]
        return last[0].base_len + len(last[0].tokens) - self.first if last else self.rows

    @property
    def requested(self) -> SpeculationConfig | None:
        """The proposal that its newest commit asks for; None: none."""
        return _spec(self.commits[-1]) if self.commits[-1].steps else None

    @property
    def next_request(self) -> SpeculationConfig | None:
        """What the rows in its mailbox ask for: the same. None: nothing, or there is no such row yet."""
        return _spec(self.latest) if self.latest is not None and self.latest.steps else None

    def owner(self, key: Key) -> Hashable:
        """As which runners know it."""
        return (*key, self.open.generation)

    @property
    def is_due(self) -> bool:
        """Are there commits that may not wait? Rows that ask for no proposal do, until they are many."""
        return bool(self.commits) and (self.commits[-1].steps > 0 or self.end - self.rows >= WAITING_ROWS)

    def draft_input(self, key: Key, rows: RowMemory | None) -> DraftInput | None:
        """The rows of its commits as one run; at least one. None: their features are nowhere.

        `rows`: where its peer's device writes features.
        """
        opened, tokens = self.open, [token for commit in self.commits for token in commit.tokens]
        near = [_features(commit) for commit in self.commits if commit.place < 0]
        features, ringed = torch.cat(near) if near else NO_FEATURES, list[RingRow]()
        for commit in self.commits[len(near) :]:
            if rows is None or commit.place >= rows.ring.places:
                return None
            positions = range(commit.base_len, commit.base_len + len(commit.tokens))
            ringed += rows.located(commit.place, commit.generation, positions)
        new = DraftExtension(self.pages, self.rows, tokens, features, self.first, ringed)
        return DraftInput(self.owner(key), new, opened.params, opened.choice, self.lowest)

    def written(self) -> None:
        """The rows of all commits are in its pages."""
        self.rows, self.commits = self.end, []


class BatchRunner(Protocol):
    """What writes and proposes, for whole batches. `alignment` as in `DraftRunner`."""

    alignment: int

    @property
    def pool(self) -> KvPool:
        """The pool of the draft KV."""

    def draft_rows(self, spec: SpeculationConfig | None) -> int:
        """How many rows behind the certain ones `draft` may write: pages are reserved for them."""

    def draft(self, inputs: SequenceOf[DraftInput], spec: SpeculationConfig | None) -> list[ProposedTree]:
        """As `DraftRunner.draft`; a proposal may be of another shape than `spec`, but not larger."""


class DraftSequences:
    """Follows sequences for their peers; the destination of the pulls of their prompts.

    Raises nothing for what peers send: a sequence that makes no sense is closed.
    """

    def __init__(self, ready: EngineReady, pool: PagePool, pulls: PullManager, runner: BatchRunner) -> None:
        self.followed: dict[Key, DraftedSequence] = {}
        self._closed: list[tuple[int, DraftClosed]] = []
        self._prompts: dict[Hashable, PromptKv] = {}  # by `_name`
        self._ready = ready
        self._pool = pool
        self._pulls = pulls
        self._page_size = pulls.page_size
        self._runner = runner
        pulls.destination = self

    @property
    def context_length(self) -> int:
        """Of the target: no row stands beyond."""
        return self._ready.context_length

    # --- what decode engines send ----------------------------------------------------------------------

    def up(self, up: DraftUp) -> None:
        """One message of a peer: opens, then commits, then closes."""
        for message in up.opens:
            self._open((up.peer, message.seq), message)
        for commit in up.commits:
            self.commit((up.peer, commit.seq), commit)
        for close in up.closes:
            followed = self.followed.get((up.peer, close.seq))
            if followed is not None and followed.open.generation == close.generation:
                self._drop((up.peer, close.seq))

    def forget(self, peer: int) -> None:
        """The peer is gone: so are its sequences, and none is told."""
        for key in [key for key in self.followed if key[0] == peer]:
            self._drop(key)
        self._closed = [(to, closed) for to, closed in self._closed if to != peer]

    def take_closed(self) -> list[tuple[int, DraftClosed]]:
        """Sequences that were dropped here since the last call, with the peer to tell."""
        closed, self._closed = self._closed, []
        return closed

    def _open(self, key: Key, message: DraftOpen) -> None:
        self._drop(key)
        handle = message.handle
        refusal = self._refusal(message)
        if refusal is not None:
            self._closed.append((key[0], DraftClosed(message.seq, message.generation, refusal)))
            if handle is not None and _name(handle) not in self._prompts:
                self._pulls.refuse(handle, message.attempt)
        elif handle is None:
            below = message.base_len % self._runner.alignment
            first = message.base_len - below
            self.followed[key] = DraftedSequence(message, first, None, below, latest=_asked(message))
        else:
            self._open_with_handle(key, message, handle)

    def _open_with_handle(self, key: Key, message: DraftOpen, handle: KvHandle) -> None:
        """All choices of a request share the pull of its handle."""
        name = _name(handle)
        new = name not in self._prompts
        prompt = self._prompts.setdefault(name, PromptKv())
        prompt.users.append(key)
        self.followed[key] = DraftedSequence(message, first=0, prompt=prompt, rows=message.base_len)
        if new:
            self._pulls.open(name, handle, message.attempt, time.monotonic() + PULL_S)
        elif prompt.pages is not None:
            self._take_prompt(key, prompt.pages)

    def _refusal(self, message: DraftOpen) -> str | None:
        """Why a sequence cannot be followed; None if it can."""
        if not 0 <= message.base_len < self._ready.context_length:
            return "base_len must be a position within the model's context"
        handle = message.handle
        if handle is not None and handle.tokens < message.base_len:
            return "the handle has fewer rows than base_len"
        if handle is not None and pages_for(handle.tokens, self._page_size) > self._pool.num_pages:
            return "the draft worker has fewer pages than the prompt"  # others would wait behind it
        if not 0 <= message.steps <= MOST_STEPS:
            return f"steps must be between 0 and {MOST_STEPS}"
        try:
            message.params.validate(self._ready.vocab_size)
        except InvalidRequest as error:
            return error.message
        return None

    def commit(self, key: Key, commit: DraftCommit) -> None:
        """One of a peer: queues a commit that continues the rows here; any other commit ends the sequence."""
        followed = self.followed.get(key)
        if followed is None or followed.open.generation != commit.generation:
            reason = "the draft worker does not know this sequence"
            self._closed.append((key[0], DraftClosed(commit.seq, commit.generation, reason)))
            return
        expected = followed.first + followed.end
        if commit.base_len != expected:
            self.close(key, f"rows from {expected} on were expected, not from {commit.base_len}")
        elif commit.place < 0 and any([one.place >= 0 for one in followed.commits]):
            self.close(key, "features came by the host after some that did not")
        elif not self._makes_sense(commit):
            self.close(key, NO_SENSE)
        else:
            followed.latest = commit
            followed.commits.append(commit)

    def _makes_sense(self, commit: DraftCommit) -> bool:
        ready, near = self._ready, len(commit.tokens) if commit.place < 0 else 0
        return (
            len(commit.tokens) > 0
            and len(commit.features) == 4 * ready.draft_width * near
            and all(0 <= token < ready.vocab_size for token in commit.tokens)
            and commit.base_len + len(commit.tokens) < ready.context_length
            and 0 <= commit.steps <= MOST_STEPS
            and 1 <= commit.topk <= min(MOST_TOPK, MOST_ROWS // max(commit.steps, 1))
            and (commit.topk == 1 or 2 <= commit.draft_tokens <= MOST_NODES)
        )

    # --- prompts by handle (the destination of pulls) ------------------------------------------------

    def first(self, owners: list[Hashable]) -> Hashable:
        """The one that came first."""
        return owners[0]

    def lend(self, owner: Hashable, handle: KvHandle) -> tuple[list[int], int] | None:
        """As many new pages as the prompt needs, none of them filled; None: too few are free."""
        count = pages_for(handle.tokens, self._page_size)
        return (self._pool.take(count), 0) if count <= self._pool.free else None

    def refused(self, owner: Hashable, handle: KvHandle, now: float) -> None:
        """Its sequences are closed, and opened anew without it: others, and its owner's pages, would wait."""
        for key in list(self._prompts[owner].users):
            self.close(key, NO_PAGES)

    def arrived(self, owner: Hashable, arrival: PullArrival) -> None:
        """Gives the pages to every sequence that waits for this prompt."""
        prompt = self._prompts[owner]
        prompt.pages = arrival.pages
        for key in list(prompt.users):
            self._take_prompt(key, arrival.pages)
        self._leave(owner)

    def lost(self, owner: Hashable, error: EyasError) -> None:
        """Closes the sequences of a prompt whose pull failed."""
        _log.warning("draft KV did not arrive: %s", error.message)
        prompt = self._prompts.pop(owner, None)
        for key in list(prompt.users) if prompt else []:
            self.close(key, error.message)

    def pages_free(self, pages: list[int]) -> None:
        """Takes back pages that were lent to a pull."""
        self._pool.drop(pages)

    def _take_prompt(self, key: Key, pages: list[int]) -> None:
        """Shares the whole pages with the sequence, and copies the page that its first commit writes to."""
        followed = self.followed[key]
        rows = followed.open.base_len
        whole = rows // self._page_size
        partial = pages[whole : pages_for(rows, self._page_size)]
        if len(partial) > self._pool.free:
            self.close(key, NO_PAGES)
            return
        self._pool.share(pages[:whole])
        followed.pages = [*pages[:whole], *self._pool.take(len(partial))]
        for source, target in zip(partial, followed.pages[whole:], strict=True):
            self._runner.pool.copy_page(source, target)

    def _leave(self, owner: Hashable) -> None:
        """Drops a prompt without users: frees its pages, or ends its pull."""
        prompt = self._prompts.get(owner)
        if prompt is None or prompt.users:
            return
        if prompt.pages is None:
            self._pulls.cancel(owner)
        else:
            self._pool.drop(prompt.pages)
        del self._prompts[owner]

    # --- pages ---------------------------------------------------------------------------------------

    def reserve(self, key: Key, spec: SpeculationConfig | None, ahead: int = 0) -> bool:
        """Takes pages for the waiting commits, for `ahead` rows more, and for the rows that drafting by
        `spec` writes after them.

        False: there are too few, and the sequence is closed.
        """
        followed = self.followed[key]
        rows = followed.end + ahead + self._runner.draft_rows(spec)
        need = pages_for(rows, self._page_size) - len(followed.pages)
        if need > self._pool.free:
            self.close(key, NO_PAGES)
            return False
        if need > 0:
            followed.pages += self._pool.take(need)
        return True

    def close(self, key: Key, reason: str) -> None:
        """Drops a sequence, and tells its peer why."""
        followed = self.followed.get(key)
        if followed is not None:
            self._closed.append((key[0], DraftClosed(key[1], followed.open.generation, reason)))
            self._drop(key)

    def _drop(self, key: Key) -> None:
        followed = self.followed.pop(key, None)
        if followed is None:
            return
        self._pool.drop(followed.pages)
        handle = followed.open.handle
        if followed.prompt is not None and handle is not None:
            followed.prompt.users.remove(key)
            self._leave(_name(handle))


def _name(handle: KvHandle) -> tuple[str, int, int]:
    """The key of a prompt, the same for all choices of a request."""
    return handle.worker, handle.epoch, handle.id


def _asked(opened: DraftOpen) -> DraftCommit | None:
    """A commit of no rows that asks for what the rows in its mailbox do; None: its first commit says."""
    steps, base = opened.steps, opened.base_len
    return DraftCommit(opened.seq, opened.generation, base, (), b"", steps, 1, steps + 1) if steps else None


def _features(commit: DraftCommit) -> torch.Tensor:
    """float32 [rows, head width]."""
    return torch.from_numpy(np.frombuffer(commit.features, np.float32).copy()).view(len(commit.tokens), -1)


def _spec(commit: DraftCommit) -> SpeculationConfig:
    """The shape that a commit asks for."""
    return _spec_of(commit.steps, commit.topk, commit.draft_tokens)


@functools.lru_cache(64)
def _spec_of(steps: int, topk: int, draft_tokens: int) -> SpeculationConfig:
    """Most commits ask for the same."""
    return SpeculationConfig(steps, topk, draft_tokens)
