"""Chooses the worker of a request: pure functions of a snapshot.

It has no streams, no clocks and no network, so that every decision can be tested as a value. A conversation
stays on its worker because its prefix is cached there, and one that names itself has a home where its prefix
is not, or no longer, cached anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from eyas.common.types import Role, WorkerInfo
from gateway.routing.in_flight import UnderWay

CROWD = 4
"""A worker with more sequences than twice the idlest one's plus this is avoided, cached prefix or not."""


SLOT_TOKENS = 256
"""Tokens of a prompt as which an adapter counts that has to come to the device first."""


def adapter_state(adapter: str, info: WorkerInfo) -> bool | None:
    """Whether the adapter of this id is on the worker's device; None: the worker does not have it at all.

    "" is the base model, which is everywhere.
    """
    if not adapter:
        return True
    if info.adapters is None or all(one.id != adapter for one in info.adapters.adapters):
        return None
    return adapter in info.adapter_slots


@dataclass(frozen=True)
class RouterCandidate:
    """A worker as the router sees it, for one prompt.

    `in_flight` counts the sequences of this gateway's own requests there, which is newer than the worker's
    last report: one per choice that it decodes, one per prompt that it only computes. `connected`: its
    Session is open (decode needs one, prefill does not). `cached`: how many ids at the start of the prompt
    its cache should hold. `under_way`: all that `in_flight` sums up; `reported`: as it was at the worker's
    last report. `affinity`: 0 to 1, the greatest at the home of the request's conversation. `broken`: it
    fails what it is sent. `adapter`: as `adapter_state` says of the request's.
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
        """Prompt tokens to compute there before this prompt's own are done, less those that it holds."""
        others = self.info.backlog.queued - self.reported.queued
        return self.under_way.queued + max(others, 0) + self.slot_tokens - self.cached

    @property
    def slot_tokens(self) -> int:
        """Prompt tokens that the request's adapter costs there."""
        return 0 if self.adapter else SLOT_TOKENS

    @property
    def sequences(self) -> int:
        """Running and waiting there: this gateway's own now, and those of others by the last report."""
        others = self.info.running + self.info.waiting - self.reported.total
        return self.in_flight + max(others, 0)

    @property
    def load(self) -> tuple[int, float]:
        """Sequences, then the share of its pages in use."""
        return self.sequences, self.info.pages_used / max(self.info.pages_total, 1)

    def can(self, role: Role) -> bool:
        """Whether it serves now and has the role; of the target model: and the request's adapter."""
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
    """Why `route` finds nothing, as half a sentence."""
    if choose_decode(workers) is None:
        known = any(w.can(Role.DECODE) for w in workers)
        return "no decode worker is connected" if known else "no decode worker is serving"
    return "no prefill worker is serving"


def asleep(workers: Sequence[RouterCandidate]) -> str:
    """Why no request can be served while workers sleep, as a sentence; empty: that is not so."""
    sleeping = [w for w in workers if w.info.released and not w.info.paused]
    if not sleeping or route(workers) is not None:
        return ""
    tags = " and ".join(sorted({tag for w in sleeping for tag in w.info.released}))
    return f"{len(sleeping)} of {len(workers)} workers sleep without {tags} (/resume_memory_occupation)"


def paused(workers: Sequence[RouterCandidate]) -> str:
    """Why requests wait while workers are paused, as a sentence; empty: none is."""
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
    """The worker as one that serves, if it is closed for new weights."""
    return (
        replace(worker, info=structs.replace(worker.info, serving=True))
        if worker.info.weights.closed
        else worker
    )


def wants_draft(workers: Sequence[RouterCandidate]) -> bool:
    """Whether some drafter can use the draft KV of a prompt."""
    return any(w.can(Role.DRAFT) and w.info.draft_fingerprint for w in workers)


def _best(workers: Sequence[RouterCandidate], avoid: Collection[str]) -> RouterCandidate | None:
    """The worker that has the prompt first: what is cached counts against what is queued. Then the home of
    the conversation, then the least load. Crowded ones come last.

    Workers to `avoid` (they just failed this request) are taken only if there is no other, and broken ones
    only before those.
    """
    usable = [w for w in workers if w.info.worker not in avoid] or workers
    usable = [w for w in usable if not w.broken] or usable
    crowded = 2 * min((w.sequences for w in usable), default=0) + CROWD
    return min(usable, key=lambda w: (w.sequences > crowded, w.ahead, -w.affinity, w.load), default=None)


def affinity(session: str, worker: str) -> float:
    """How much a worker is a conversation's home, 0 to 1: the same in every gateway, and even.

    Rendezvous hashing (Thaler and Ravishankar, 1998): a worker that comes or goes moves only its own. 0.0 for
    a conversation without a name.
    """
    if not session:
        return 0.0
    digest = hashlib.blake2b(f"{session} {worker}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64
