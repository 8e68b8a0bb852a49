"""What a step's outputs mean: which tokens are kept, who ends, what the drafter and the leases are told.

One function a kind of work: a chunk in the middle of a prompt, the end of a prompt that is decoded
elsewhere, and a round (a plain row, a verify row, or the end of a prompt that is decoded here).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from eyas.common.types import FirstToken, KvHandle, Timings
from eyas.engine.batch.sequence import Kind, Sequence
from eyas.engine.batch.stopping import finish
from eyas.engine.batch.tree import NO_DRAFTS, Drafts, DraftTree
from eyas.engine.ipc.messages import PrefillDone
from eyas.engine.ipc.outbox import Outbox
from eyas.engine.kv.leases import Leases
from eyas.engine.kv.pool import KvPool
from eyas.engine.loop.plain_runner import Output
from eyas.engine.scheduling.scheduler import Scheduler
from eyas.engine.speculation.drafter import Commit, Drafter
from eyas.engine.speculation.verify import walk


@dataclass
class _Pending:
    """Side effects of one step, applied together at its end."""

    commits: list[Commit] = field(default_factory=list)
    forked_commits: list[Commit] = field(default_factory=list)  # after their pages were copied
    copies: list[tuple[int, int]] = field(default_factory=list)  # whole pages (source, target)
    moves: list[tuple[list[int], list[int]]] = field(default_factory=list)  # rows (sources, targets)
    ended: list[Sequence] = field(default_factory=list)
    handed_over: list[Output] = field(default_factory=list)


@dataclass(frozen=True)
class Committer:
    """Commits outputs. `on_end` is told of every sequence that finished."""

    scheduler: Scheduler
    pools: tuple[KvPool, ...]  # target first; a colocated draft pool has the same page numbers
    drafter: Drafter | None
    leases: Leases
    outbox: Outbox
    eos_ids: tuple[int, ...]
    new_uid: Callable[[], int]
    on_end: Callable[[Sequence], None]

    def commit(self, outputs: SequenceOf[Output]) -> None:
        """Apply one step. Rows move and pages are copied before anyone may read or free them."""
        pending = _Pending()
        for out in outputs:
            if out.scores is not None:
                out.work.seq.generation.scored(*out.scores)
            if not out.work.sample:
                self._chunk(out, pending)
            elif out.work.seq.generation.kind is Kind.PREFILL:
                self._prompt_done(out, pending)
            else:
                self._round(out, pending)
        for sources, targets in pending.moves:
            self.pools[0].move(torch.tensor(sources), torch.tensor(targets))
        self._post(pending.commits)
        for source, target in pending.copies:
            for pool in self.pools:
                pool.copy_page(source, target)
        self._post(pending.forked_commits)
        self._offer_rows(outputs)
        for out in pending.handed_over:
            self._hand_over(out)
        for seq in pending.ended:
            self.on_end(seq)

    def _chunk(self, out: Output, pending: _Pending) -> None:
        """Rows in the middle of a prompt: the token after each of them is known."""
        work, seq = out.work, out.work.seq
        seq.kv_len += len(work.tokens)
        self._follow(out, seq.tokens(work.start + 1, seq.kv_len + 1), pending, propose=False)

    def _prompt_done(self, out: Output, pending: _Pending) -> None:
        """The draft head runs over rows 0 .. n-2 here; the last feature is handed on."""
        work, seq = out.work, out.work.seq
        seq.kv_len += len(work.tokens)
        self._follow(out, seq.tokens(work.start + 1, seq.kv_len), pending, propose=False)
        pending.handed_over.append(out)

    def _round(self, out: Output, pending: _Pending) -> None:
        work, seq = out.work, out.work.seq
        verdict = walk(work.tree, out.chosen) if work.tree else walk(None, out.chosen[:1])
        params = seq.generation.request.params
        kept, why = finish(params, self.eos_ids, len(seq.output), verdict.tokens)
        nodes = [0, *(1 + node for node in verdict.path)] if work.tree else list(range(len(work.tokens)))
        drafts = _drafts(work.tree, min(len(verdict.path), len(kept)))
        sampled_at = nodes if work.tree else [0]
        logprobs = [out.logprobs[node] for node in sampled_at]
        self.outbox.entry(seq, kept, logprobs, why, drafts=drafts)
        known = seq.tokens(work.start + 1, len(seq))  # empty on a verify row
        seq.output += kept
        seq.kv_len = work.start + len(nodes)
        seq.tree = None
        if why is None or seq.forks:
            chosen = out if work.tree is None else _only(out, nodes)
            self._follow(chosen, [*known, *verdict.tokens], pending, propose=why is None)
        self._fork(out, pending)
        if why is not None:
            pending.ended.append(seq)
        if nodes != list(range(len(nodes))):  # of an ended sequence too: its pages go to the cache
            pending.moves.append(_rows_of(seq, work.start, nodes, self.pools[0].page_size))

    def _fork(self, out: Output, pending: _Pending) -> None:
        """The prompt is done: its other choices get their first token, their pages, and a drafter."""
        leader, generation = out.work.seq, out.work.seq.generation
        choices, leader.forks = leader.forks, ()
        for choice, token, logprob in zip(choices, out.chosen[1:], out.logprobs[1:], strict=False):
            kept, why = finish(generation.request.params, self.eos_ids, 0, [token])
            follower = Sequence(self.new_uid(), generation, choice, leader.prompt, [])
            self.outbox.entry(follower, kept, [logprob], why)
            if why is not None:
                continue
            follower.output = list(kept)
            generation.sequences.append(follower)
            copy = self.scheduler.fork(leader, follower)
            if copy is None:
                continue
            pending.copies.append(copy)
            pending.forked_commits += self._follow_fork(out, follower)

    def _follow_fork(self, out: Output, follower: Sequence) -> list[Commit]:
        """The first commit of a choice whose prompt another one led: its own token 0."""
        if self.drafter is None or out.features is None:
            return []
        if not self.drafter.local_kv:
            follower.window = out.work.seq.window.copy()
            return self._open_from_window(follower)
        base = len(follower.prompt) - 1
        if not self.start_drafting(follower, base):
            return []
        return [Commit(follower, base, follower.output[:1], out.features[-1:], propose=True)]

    def start_drafting(self, seq: Sequence, base: int, handle: KvHandle | None = None) -> bool:
        """Follow `seq` from row `base` on, if it may be drafted for and somebody can."""
        if self.drafter is not None and seq.generation.request.speculative:
            seq.drafting = self.drafter.open(seq, base, handle)
        return seq.drafting

    def _follow(self, out: Output, tokens: SequenceOf[int], pending: _Pending, *, propose: bool) -> None:
        """Tell the drafter the certain rows of `out`: all of them where draft KV lives here."""
        seq, start = out.work.seq, out.work.start
        if self.drafter is None or out.features is None or not seq.generation.request.speculative:
            return
        features = out.features[: len(tokens)]
        if self.drafter.local_kv:
            if tokens and (seq.drafting or (seq.draft_len == start and self.start_drafting(seq, start))):
                pending.commits.append(Commit(seq, start, tokens, features, propose))
            return
        seq.window.add(start, features)
        if not propose:
            return  # a drafter far away hears of a prompt by its handle, or of the window at its end
        if seq.drafting:
            pending.commits.append(Commit(seq, start, tokens, features, propose))
        else:
            pending.commits += self._open_from_window(seq)

    def _open_from_window(self, seq: Sequence) -> list[Commit]:
        """A drafter far away starts with the features that are still here; the last is the newest."""
        base = seq.window.base
        if not seq.window.chunks or not self.start_drafting(seq, base):
            return []
        recent = torch.cat(tuple(seq.window.chunks))
        return [Commit(seq, base, seq.tokens(base + 1, len(seq)), recent, propose=True)]

    def _post(self, commits: list[Commit]) -> None:
        if self.drafter is not None and commits:
            self.drafter.post(commits)

    def _offer_rows(self, outputs: SequenceOf[Output]) -> None:
        for out in outputs:
            if out.work.seq.generation.kind is Kind.PREFILL:
                self.leases.filled(out.work.seq.generation, out.work.seq.kv_len)

    def _hand_over(self, out: Output) -> None:
        """The prompt's KV now belongs to its leases; token 0 of every choice goes to both sides."""
        seq, generation = out.work.seq, out.work.seq.generation
        first = []
        sampled = zip((seq.choice, *seq.forks), out.chosen, out.logprobs, strict=True)
        for choice, token, logprob in sampled:
            _, why = finish(generation.request.params, self.eos_ids, 0, [token])
            first.append(FirstToken(choice, token, logprob, why, generation.prompt_once()))
        feature = b"" if out.features is None else out.features[-1].float().cpu().numpy().tobytes()
        self.leases.finished(generation, tuple(first), feature)
        timings = generation.timings_once(time.monotonic()) or Timings()
        self.outbox.add(PrefillDone(generation.id, generation.attempt, tuple(first), timings))
        self.on_end(seq)


def _only(out: Output, nodes: list[int]) -> Output:
    """The output restricted to the accepted rows, in path order."""
    features = None if out.features is None else out.features[nodes]
    return Output(out.work, out.chosen, out.logprobs, features)


def _drafts(tree: DraftTree | None, accepted: int) -> Drafts:
    return Drafts(accepted, tree.height, len(tree)) if tree else NO_DRAFTS


def _rows_of(seq: Sequence, start: int, nodes: list[int], page_size: int) -> tuple[list[int], list[int]]:
    """Physical rows of the accepted nodes, and where they belong: start, start + 1, ..."""

    def physical(row: int) -> int:
        return seq.pages[row // page_size] * page_size + row % page_size

    pairs = [(start + node, start + i) for i, node in enumerate(nodes) if node != i]
    return [physical(a) for a, _ in pairs], [physical(b) for _, b in pairs]
