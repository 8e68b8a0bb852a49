"""Which worker gets a request: pure functions of a snapshot.

It knows roles, cached prefixes and load; it refuses to know streams, clocks and the network, so that every
decision can be tested as a value. A conversation stays where it is because its prefix is there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eyas.common.types import Role, WorkerInfo

CROWD = 4  # sequences more than twice those of the idlest worker, for which no cached prefix makes up


@dataclass(frozen=True)
class Candidate:
    """A worker as the router sees it, for one prompt.

    `in_flight` counts the sequences of this gateway's own requests there, fresher than what the worker last
    reported: one for each choice that is decoded there, one for a prompt that is only computed. `connected`
    says that its Session is open (decode needs one, prefill does not); `cached` is how many of the prompt's
    first ids it should have in its cache.
    """

    info: WorkerInfo
    in_flight: int = 0
    connected: bool = True
    cached: int = 0

    @property
    def sequences(self) -> int:
        return max(self.in_flight, self.info.running + self.info.waiting)

    @property
    def load(self) -> tuple[int, float]:
        """Sequences, then the share of its pages in use."""
        return self.sequences, self.info.pages_used / max(self.info.pages_total, 1)

    def can(self, role: Role) -> bool:
        return self.info.serving and role in self.info.roles


@dataclass(frozen=True)
class Route:
    """Who serves a request. Without `prefill`, the decode worker computes the prompt itself."""

    decode: str
    prefill: str | None


def route(workers: Sequence[Candidate]) -> Route | None:
    """The legs of a new request, or None while no worker, or no pair of workers, can serve it."""
    decode = choose_decode(workers)
    if decode is None:
        return None
    if decode.can(Role.PREFILL):
        return Route(decode.info.worker, None)
    prefill = choose_prefill(workers)
    return Route(decode.info.worker, prefill.info.worker) if prefill else None


def missing(workers: Sequence[Candidate]) -> str:
    """What `route` does not find."""
    if choose_decode(workers) is None:
        known = any(w.can(Role.DECODE) for w in workers)
        return "no decode worker is connected" if known else "no decode worker is serving"
    return "no prefill worker is serving"


def choose_decode(workers: Sequence[Candidate], avoid: Collection[str] = ()) -> Candidate | None:
    return _best([w for w in workers if w.can(Role.DECODE) and w.connected], avoid)


def choose_prefill(workers: Sequence[Candidate], avoid: Collection[str] = ()) -> Candidate | None:
    return _best([w for w in workers if w.can(Role.PREFILL)], avoid)


def wants_draft(workers: Sequence[Candidate]) -> bool:
    """Whether a prefill's draft KV would find a drafter."""
    return any(w.can(Role.DRAFT) and w.info.draft_fingerprint for w in workers)


def _best(workers: Sequence[Candidate], avoid: Collection[str]) -> Candidate | None:
    """The longest cached prefix, then the least load; but not where everybody else goes already.

    Workers to `avoid` (they just failed this request) are the last resort, not forbidden.
    """
    usable = [w for w in workers if w.info.worker not in avoid] or workers
    crowded = 2 * min((w.sequences for w in usable), default=0) + CROWD
    return min(usable, key=lambda w: (w.sequences > crowded, -w.cached, w.load), default=None)
