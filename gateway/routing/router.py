"""Chooses the worker of a request by pure functions of a snapshot.

There are no streams, clocks or network calls, so that every decision can be tested as a value. A conversation
stays on the worker that has its prefix cached. A conversation with a name also has a home worker, which is
chosen when no worker has the prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from eyas.common.types import Role, WorkerInfo
from gateway.routing.in_flight import UnderWay

CROWD = 4
"""A worker is crowded, and avoided even if it has the prefix cached, if it has more sequences than twice
those of the idlest worker plus this number.
"""


SLOT_TOKENS = 256
"""The cost of an adapter that must first be copied to the device, in prompt tokens."""


def adapter_state(adapter: str, info: WorkerInfo) -> bool | None:
    """Whether the adapter with this id is on the worker's device; None if it is not loaded on the worker.

    True for "", the base model.
    """
    if not adapter:
        return True
    if info.adapters is None or all(known.id != adapter for known in info.adapters.adapters):
        return None
    return adapter in info.adapter_slots


@dataclass(frozen=True)
class RouterCandidate:
    """The state of a worker for the routing of one prompt.

    `in_flight`: the sequences of this gateway's requests on the worker, newer than its last report: one per
    choice that it decodes, one per prompt that it only computes. `connected`: its Session is open (needed to
    decode, not to prefill). `cached`: the estimated number of tokens at the start of the prompt in its cache.
    `under_way`: the load that `in_flight` sums up; `reported`: that load at the worker's last report.
    `affinity`: 0 to 1, the greatest on the home of the request's conversation. `broken`: the worker fails its
    requests. `adapter`: the `adapter_state` of the request's adapter.
    """

    info: WorkerInfo
    in_flight: int = 0
    connected: bool = True
    cached: int = 0
    under_way: UnderWay = UnderWay()
    reported: UnderWay = UnderWay()
    affinity: float = 0.0
    broken: bool = False
    adapter: bool | None = True

    @property
    def ahead(self) -> int:
        """Prompt tokens that the worker computes before this prompt's own, less those of it that are
        cached.
        """
        others = self.info.backlog.queued - self.reported.queued
        return self.under_way.queued + max(others, 0) + self.slot_tokens - self.cached

    @property
    def slot_tokens(self) -> int:
        """The cost of the request's adapter on the worker, in prompt tokens."""
        return 0 if self.adapter else SLOT_TOKENS

    @property
    def sequences(self) -> int:
        """Running and waiting sequences: this gateway's own now, and those of others at the last report."""
        others = self.info.running + self.info.waiting - self.reported.total
        return self.in_flight + max(others, 0)

    @property
    def load(self) -> tuple[int, float]:
        """The number of sequences, then the share of the pages in use."""
        return self.sequences, self.info.pages_used / max(self.info.pages_total, 1)

    def can(self, role: Role) -> bool:
        """Whether the worker serves in this role, and has the request's adapter if it runs the target
        model.
        """
        able = self.adapter is not None or role is Role.DRAFT
        return able and self.info.serving and role in self.info.roles


@dataclass(frozen=True)
class RequestRoute:
    """The workers of a request. With `prefill` None the decode worker computes the prompt itself.

    `ttft_s`, `tpot_s`: seconds to the first token and per output token, if they were predicted.
    """

    decode: str
    prefill: str | None
    ttft_s: float | None = None
    tpot_s: float | None = None


def route(workers: Sequence[RouterCandidate]) -> RequestRoute | None:
    """The workers for a new request; None while no worker, and no pair of them, can serve it."""
    decode = choose_decode(workers)
    if decode is None:
        return None
    if decode.can(Role.PREFILL):
        return RequestRoute(decode.info.worker, None)
    prefill = choose_prefill(workers)
    return RequestRoute(decode.info.worker, prefill.info.worker) if prefill else None


def missing(workers: Sequence[RouterCandidate]) -> str:
    """Why `route` returns None, as half a sentence."""
    if choose_decode(workers) is None:
        known = any(w.can(Role.DECODE) for w in workers)
        return "no decode worker is connected" if known else "no decode worker is serving"
    return "no prefill worker is serving"


def asleep(workers: Sequence[RouterCandidate]) -> str:
    """Which workers sleep, as a sentence, if no request can be served because of them; else empty."""
    sleeping = [w for w in workers if w.info.released and not w.info.paused]
    if not sleeping or route(workers) is not None:
        return ""
    tags = " and ".join(sorted({tag for w in sleeping for tag in w.info.released}))
    return f"{len(sleeping)} of {len(workers)} workers sleep without {tags} (/resume_memory_occupation)"


def paused(workers: Sequence[RouterCandidate]) -> str:
    """How many workers are paused, as a sentence; empty if none is."""
    count = sum(w.info.paused for w in workers)
    if not count:
        return ""
    return f"generation is paused on {count} of {len(workers)} workers: requests wait (/continue_generation)"


def choose_decode(workers: Sequence[RouterCandidate], avoid: Collection[str] = ()) -> RouterCandidate | None:
    """The best connected decode worker; one to `avoid` only if there is no other."""
    return _best([w for w in workers if w.can(Role.DECODE) and w.connected], avoid)


def choose_prefill(workers: Sequence[RouterCandidate], avoid: Collection[str] = ()) -> RouterCandidate | None:
    """The best prefill worker; one to `avoid` only if there is no other."""
    return _best([w for w in workers if w.can(Role.PREFILL)], avoid)


def reopened(worker: RouterCandidate) -> RouterCandidate:
    """Returns the worker as serving if it is only closed for new weights; else unchanged."""
    return (
        replace(worker, info=structs.replace(worker.info, serving=True))
        if worker.info.weights.closed
        else worker
    )


def wants_draft(workers: Sequence[RouterCandidate]) -> bool:
    """Whether some drafter can use the draft KV of a prompt."""
    return any(w.can(Role.DRAFT) and w.info.draft_fingerprint for w in workers)


def _best(workers: Sequence[RouterCandidate], avoid: Collection[str]) -> RouterCandidate | None:
    """The worker that would compute the prompt first, given its queue and its cached prefix; then the home of
    the conversation, then the least load. Crowded workers come last.

    A broken worker is taken only if there is no other, and workers to `avoid` (which failed this request)
    only after that.
    """
    usable = [w for w in workers if w.info.worker not in avoid] or workers
    usable = [w for w in usable if not w.broken] or usable
    crowded = 2 * min((w.sequences for w in usable), default=0) + CROWD
    return min(usable, key=lambda w: (w.sequences > crowded, w.ahead, -w.affinity, w.load), default=None)


def affinity(session: str, worker: str) -> float:
    """The rank of a worker as the home of a conversation, 0 to 1, uniform and the same in every gateway.

    Rendezvous hashing (Thaler and Ravishankar, 1998): a worker that joins or leaves moves only the
    conversations of which it is the home. 0.0 for a conversation without a name.
    """
    if not session:
        return 0.0
    digest = hashlib.blake2b(f"{session} {worker}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
