"""The engine of a draft worker: it answers the commits of many decode engines with proposals, in batches.

One loop, like the target engine's: receive, extend and propose for all sequences with commits, send. Draft KV
of a sequence is pulled by a handle (once for all choices of a request) or starts with its first commit.
Nothing here can change a token: whatever is missing, full or late leads to `DraftClosed` or to no answer.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import torch

from eyas.common.config import MOST_NODES, MOST_ROWS, MOST_STEPS, MOST_TOPK, EngineConfig, SpeculationConfig
from eyas.common.errors import EyasError, InvalidRequest
from eyas.common.histogram import STEP_SECONDS, STEP_SEQUENCES, Histogram
from eyas.common.types import KvHandle
from eyas.engine.ipc.link import EngineLink
from eyas.engine.ipc.messages import (
    DraftClosed,
    DraftCommit,
    DraftDown,
    DraftOpen,
    DraftPeerGone,
    DraftUp,
    Drain,
    Load,
    ProbeLink,
    Proposal,
    Ready,
    Shutdown,
    Stopped,
)
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.pages import PagePool
from eyas.engine.kv.pulls import TOLD, Arrival, Pulls
from eyas.engine.speculation.draft_runner import DraftRequest, DraftRunner, Extension
from kv_transfer.copier import Copier
from kv_transfer.layout import pages_for

IDLE_S = 0.1
COPYING_S = 0.001
LOAD_S = 0.5
STOP_S = 5.0
NO_PAGES = "the draft worker has no free pages"
PULL_S = 30.0  # draft KV that takes longer to arrive is of no use any more

_log = logging.getLogger("eyas.engine")

Key = tuple[int, int]  # (peer, its number for the sequence)


@dataclass(eq=False)
class _Prompt:
    """The draft KV of a prompt, being pulled or here. Freed when no sequence needs it."""

    users: list[Key] = field(default_factory=list)
    pages: list[int] | None = None  # None: still being pulled


@dataclass(eq=False)
class _DraftedSequence:
    """A sequence that is followed. `first`: the position of its row 0; above 0 if it starts from a window."""

    open: DraftOpen
    first: int
    prompt: _Prompt | None
    rows: int = 0  # rows that are valid, counted from `first`
    pages: list[int] = field(default_factory=list)
    commits: list[DraftCommit] = field(default_factory=list)


@dataclass(frozen=True)
class DraftParts:
    """Everything a draft engine is made of, loaded and warm."""

    config: EngineConfig
    runner: DraftRunner
    pool: PagePool
    pulls: Pulls
    copier: Copier
    outbox: Outbox
    ready: Ready


class DraftEngine:
    """Built from `DraftParts`; `run` blocks until `Drain` or `Shutdown`. Owns the pages of its sequences."""

    def __init__(self, parts: DraftParts, link: EngineLink) -> None:
        self._parts = parts
        self._link = link
        self._pool = parts.pool
        self._page_size = parts.config.page_size
        self._width = parts.ready.draft_width
        self._followed: dict[Key, _DraftedSequence] = {}
        self._prompts: dict[Hashable, _Prompt] = {}  # by `_name`
        self._replies: dict[int, tuple[list[Proposal], list[DraftClosed]]] = defaultdict(lambda: ([], []))
        self._stopping = False
        self._progress = 0
        self._heard = 0  # commands carried out
        self._told_at = 0.0
        self._step_seconds = Histogram(STEP_SECONDS)
        self._step_sequences = Histogram(STEP_SEQUENCES)
        parts.pulls.destination = self
        self._handlers: dict[type, Callable[..., None]] = {
            DraftUp: self._up,
            DraftPeerGone: self._peer_gone,
            **dict.fromkeys(TOLD, parts.pulls.told),
            ProbeLink: lambda probe: parts.pulls.prober.begin(probe, parts.pool, None, time.monotonic()),
            Drain: self._shut_down,  # drafts are advice: decoding goes on without them
            Shutdown: self._shut_down,
        }

    # --- the loop ------------------------------------------------------------------------------------

    def run(self) -> None:
        """The loop: receives, drafts and sends until it is told to stop."""
        self._link.send([self._parts.ready])
        try:
            while not self._stopping:
                nap = COPYING_S if self._parts.pulls.active else IDLE_S
                for command in self._link.recv(nap):
                    self._handlers[type(command)](command)
                    self._heard += 1
                self._step()
                self._parts.pulls.poll(time.monotonic())
                self._tell()
        finally:
            self._close()
        self._link.send([Stopped()])

    @torch.inference_mode()
    def _step(self) -> None:
        """Extends the sequences with commits and proposes for them, grouped by the shape they ask for."""
        wanted: dict[SpeculationConfig, list[tuple[Key, _DraftedSequence]]] = defaultdict(list)
        for key, followed in list(self._followed.items()):
            if followed.commits and self._is_here(followed) and self._reserve(key, followed):
                last = followed.commits[-1]
                wanted[SpeculationConfig(last.steps, last.topk, last.draft_tokens)].append((key, followed))
        for spec, group in wanted.items():
            began = time.monotonic()
            self._draft(spec, group)
            self._step_seconds.add(time.monotonic() - began)
            self._step_sequences.add(len(group))

    def _draft(self, spec: SpeculationConfig, group: list[tuple[Key, _DraftedSequence]]) -> None:
        extensions = [self._extension(followed) for _, followed in group]
        drafted = self._parts.runner.extend(extensions)
        if not spec.steps:
            return
        requests = [
            DraftRequest(f.pages, f.rows, last, f.open.params, f.open.choice, offset=f.first)
            for (_, f), last in zip(group, drafted, strict=True)
        ]
        trees = self._parts.runner.propose(requests, spec)
        for ((peer, seq), followed), tree in zip(group, trees, strict=True):
            base = followed.first + followed.rows
            proposal = Proposal(seq, followed.open.generation, base, tuple(tree.tokens), tuple(tree.parents))
            self._replies[peer][0].append(proposal)

    def _extension(self, followed: _DraftedSequence) -> Extension:
        """All waiting commits of a sequence as one run of rows; `_commit` has checked that they join."""
        commits, followed.commits = followed.commits, []
        base = commits[0].base_len - followed.first
        tokens = [t for commit in commits for t in commit.tokens]
        raw = b"".join(commit.features for commit in commits)
        features = torch.from_numpy(np.frombuffer(raw, np.float32).copy()).view(-1, self._width)
        followed.rows = base + len(tokens)
        return Extension(followed.pages, base, tokens, features, offset=followed.first)

    # --- commands ------------------------------------------------------------------------------------

    def _up(self, up: DraftUp) -> None:
        for message in up.opens:
            self._open((up.peer, message.seq), message)
        for commit in up.commits:
            self._commit((up.peer, commit.seq), commit)
        for close in up.closes:
            followed = self._followed.get((up.peer, close.seq))
            if followed is not None and followed.open.generation == close.generation:
                self._drop((up.peer, close.seq))

    def _open(self, key: Key, message: DraftOpen) -> None:
        self._drop(key)
        handle = message.handle
        refusal = self._refusal(message)
        if refusal is not None:
            self._replies[key[0]][1].append(DraftClosed(message.seq, message.generation, refusal))
            if handle is not None and _name(handle) not in self._prompts:
                self._parts.pulls.refuse(handle, message.attempt)
        elif handle is None:
            self._followed[key] = _DraftedSequence(message, first=message.base_len, prompt=None)
        else:
            self._open_with_handle(key, message, handle)

    def _open_with_handle(self, key: Key, message: DraftOpen, handle: KvHandle) -> None:
        """All choices of a request share the pull of its handle."""
        name = _name(handle)
        prompt = self._prompts.get(name)
        new = prompt is None
        if prompt is None:
            prompt = self._prompts[name] = _Prompt()
        prompt.users.append(key)
        self._followed[key] = _DraftedSequence(message, first=0, prompt=prompt)
        if new:
            self._parts.pulls.open(name, handle, message.attempt, time.monotonic() + PULL_S)
        elif prompt.pages is not None:
            self._take_prompt(key, prompt.pages)

    def _refusal(self, message: DraftOpen) -> str | None:
        """Why a sequence cannot be followed; None if it can."""
        if not 0 <= message.base_len < self._parts.ready.context_length:
            return "base_len must be a position within the model's context"
        handle = message.handle
        if handle is not None and handle.tokens < message.base_len:
            return "the handle has fewer rows than base_len"
        if handle is not None and pages_for(handle.tokens, self._page_size) > self._pool.num_pages:
            return "the draft worker has fewer pages than the prompt"  # others would wait behind it
        try:
            message.params.validate(self._parts.ready.vocab_size)
        except InvalidRequest as error:
            return error.message
        return None

    def _commit(self, key: Key, commit: DraftCommit) -> None:
        """Queues a commit that continues the rows here; any other commit ends the sequence."""
        followed = self._followed.get(key)
        if followed is None or followed.open.generation != commit.generation:
            reason = "the draft worker does not know this sequence"
            closed = DraftClosed(commit.seq, commit.generation, reason)
            self._replies[key[0]][1].append(closed)
            return
        before = followed.commits[-1] if followed.commits else None
        rows = followed.open.base_len if followed.rows == 0 else followed.first + followed.rows
        expected = before.base_len + len(before.tokens) if before else rows
        if commit.base_len != expected:
            self._close_sequence(key, f"rows from {expected} on were expected, not from {commit.base_len}")
        elif not self._makes_sense(commit):
            self._close_sequence(key, "a commit must have known ids, a feature for each, and sane options")
        else:
            followed.commits.append(commit)

    def _makes_sense(self, commit: DraftCommit) -> bool:
        ready = self._parts.ready
        return (
            len(commit.tokens) > 0
            and len(commit.features) == 4 * self._width * len(commit.tokens)
            and all(0 <= token < ready.vocab_size for token in commit.tokens)
            and commit.base_len + len(commit.tokens) < ready.context_length
            and 0 <= commit.steps <= MOST_STEPS
            and 1 <= commit.topk <= min(MOST_TOPK, MOST_ROWS // max(commit.steps, 1))
            and (commit.topk == 1 or 2 <= commit.draft_tokens <= MOST_NODES)
        )

    def _peer_gone(self, gone: DraftPeerGone) -> None:
        for key in [key for key in self._followed if key[0] == gone.peer]:
            self._drop(key)
        self._replies.pop(gone.peer, None)

    def _shut_down(self, _: Drain | Shutdown) -> None:
        self._stopping = True

    # --- prompts by handle (the destination of pulls) ------------------------------------------------

    def first(self, owners: list[Hashable]) -> Hashable:
        return owners[0]

    def lend(self, owner: Hashable, handle: KvHandle) -> tuple[list[int], int] | None:
        """As many new pages as the prompt needs, none of them filled; None: too few are free."""
        count = pages_for(handle.tokens, self._page_size)
        return (self._pool.take(count), 0) if count <= self._pool.free else None

    def arrived(self, owner: Hashable, arrival: Arrival) -> None:
        """Gives the pages to every sequence that waits for this prompt."""
        prompt = self._prompts[owner]
        prompt.pages = arrival.pages
        for key in list(prompt.users):
            self._take_prompt(key, arrival.pages)
        self._leave(owner)

    def lost(self, owner: Hashable, error: EyasError) -> None:
        _log.warning("draft KV did not arrive: %s", error.message)
        prompt = self._prompts.pop(owner, None)
        for key in list(prompt.users) if prompt else []:
            self._close_sequence(key, error.message)

    def pages_free(self, pages: list[int]) -> None:
        self._pool.drop(pages)

    def _take_prompt(self, key: Key, pages: list[int]) -> None:
        """Shares the whole pages with the sequence, and copies the page that its first commit writes to."""
        followed = self._followed[key]
        rows = followed.open.base_len
        whole = rows // self._page_size
        partial = pages[whole : pages_for(rows, self._page_size)]
        if len(partial) > self._pool.free:
            self._close_sequence(key, NO_PAGES)
            return
        self._pool.share(pages[:whole])
        followed.pages = [*pages[:whole], *self._pool.take(len(partial))]
        for source, target in zip(partial, followed.pages[whole:], strict=True):
            self._parts.runner.pool.copy_page(source, target)
        followed.rows = rows

    def _leave(self, owner: Hashable) -> None:
        """Drops a prompt without users: frees its pages, or ends its pull."""
        prompt = self._prompts.get(owner)
        if prompt is None or prompt.users:
            return
        if prompt.pages is None:
            self._parts.pulls.cancel(owner)
        else:
            self._pool.drop(prompt.pages)
        del self._prompts[owner]

    # --- pages ---------------------------------------------------------------------------------------

    def _is_here(self, followed: _DraftedSequence) -> bool:
        return followed.prompt is None or followed.prompt.pages is not None

    def _reserve(self, key: Key, followed: _DraftedSequence) -> bool:
        """Takes pages for the waiting commits and for the rows that drafting writes after them."""
        last = followed.commits[-1]
        rows = last.base_len + len(last.tokens) - followed.first + last.steps * max(1, last.topk)
        need = pages_for(rows, self._page_size) - len(followed.pages)
        if need > self._pool.free:
            self._close_sequence(key, NO_PAGES)
            return False
        followed.pages += self._pool.take(max(0, need))
        return True

    def _close_sequence(self, key: Key, reason: str) -> None:
        followed = self._followed.get(key)
        if followed is not None:
            self._replies[key[0]][1].append(DraftClosed(key[1], followed.open.generation, reason))
            self._drop(key)

    def _drop(self, key: Key) -> None:
        followed = self._followed.pop(key, None)
        if followed is None:
            return
        self._pool.drop(followed.pages)
        handle = followed.open.handle
        if followed.prompt is not None and handle is not None:
            followed.prompt.users.remove(key)
            self._leave(_name(handle))

    # --- answers, and the end ------------------------------------------------------------------------

    def _tell(self) -> None:
        self._progress += 1
        replies, self._replies = self._replies, defaultdict(lambda: ([], []))
        events = [
            *self._parts.outbox.take(),
            *(DraftDown(tuple(p), tuple(c), peer=peer) for peer, (p, c) in replies.items()),
        ]
        now = time.monotonic()
        if now - self._told_at > LOAD_S:
            self._told_at = now
            running = len(self._followed)
            pending = any(f.commits for f in self._followed.values())
            pulls = self._parts.pulls
            load = Load(
                progress=self._progress,
                pending=pending,
                running=running,
                waiting=0,
                pages_used=self._pool.used,
                moved=dict(pulls.moved),
                pulls_failed=pulls.failed,
                heard=self._heard,
                step_seconds=tuple(self._step_seconds.counts),
                step_seconds_total=self._step_seconds.total,
                step_sequences=tuple(self._step_sequences.counts),
                step_sequences_total=self._step_sequences.total,
            )
            events.append(load)
        self._link.send(events)

    def _close(self) -> None:
        if self._parts.copier.close(time.monotonic() + STOP_S):
            self._parts.runner.pool.close()


def _name(handle: KvHandle) -> tuple[str, int, int]:
    """The key of a prompt, the same for all choices of a request."""
    return handle.worker, handle.epoch, handle.id
