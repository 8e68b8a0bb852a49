"""Two tiers that are one value: their engines, and every message still under way.

A prefill and a decode engine (`admission_tier`) share a gateway that only relays. A `World` can be stored,
restored and compared, so a test may follow every order in which loops, messages, copies and mishaps can
interleave. Time stands still: whatever the tiers get done here, they do without a deadline passing.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial

from admission_tier import LEASE_S, Tier

from eyas.common.types import FirstToken, GenerationRequest, KvHandle
from eyas.engine.ipc.messages import (
    AttachKv,
    CancelGeneration,
    ClosePull,
    Command,
    Event,
    LeaseReleased,
    OpenPull,
    PagesLost,
    PrefillDone,
    PrefillPrompt,
    PrefillStarted,
    PullDone,
    PullFailed,
    PullReady,
    PullReleased,
    ReleaseHandle,
    ReleaseLease,
    ReleasePull,
    RequestAdmitted,
    RequestFailed,
    RequestRejected,
    StepReply,
    SubmitGeneration,
    WatchClosed,
    WatchOpened,
    WatchUpdate,
    WireFailure,
)
from kv_transfer.puller import PullState

PREFILL, DECODE = "prefill", "decode"


@dataclass(frozen=True)
class Sizes:
    """Of one world: pages and sequences of each tier."""

    prefill_pages: int
    decode_pages: int
    max_running: int = 2


@dataclass
class Asked:
    """A request as its gateway sees it. `local`: no prefill tier is asked."""

    request: GenerationRequest
    local: bool = False
    attempt: int = 1
    admitted: bool = False  # by decode
    handles: tuple[KvHandle, ...] = ()
    first: tuple[FirstToken, ...] = ()
    ended: set[int] = field(default_factory=set)  # choices
    over: bool = False

    def shape(self) -> Hashable:
        return (
            self.attempt,
            self.admitted,
            bool(self.handles),
            bool(self.first),
            sorted(self.ended),
            self.over,
        )


class World:
    """All there is. `moves` are what may happen next; `mishaps` are used up once they did."""

    def __init__(self, sizes: Sizes, asked: list[Asked], mishaps: tuple[str, ...] = ()) -> None:
        self.tiers = {
            PREFILL: Tier(PREFILL, sizes.prefill_pages, sizes.max_running),
            DECODE: Tier(DECODE, sizes.decode_pages, sizes.max_running),
        }
        self.asked = {a.request.id: a for a in asked}
        self.coming = {
            PREFILL: [id for id, a in self.asked.items() if not a.local],
            DECODE: list(self.asked),
        }
        self.mishaps, self.lossy = list(mishaps), bool(mishaps)
        self.watches: dict[int, tuple[KvHandle, int]] = {}  # open ones, by pull
        self.names: dict[int, tuple[int, int]] = {}  # handle and attempt of every pull

    # --- as a value ---

    def freeze(self) -> bytes:
        return pickle.dumps(self)

    @staticmethod
    def thaw(frozen: bytes) -> World:
        world: World = pickle.loads(frozen)
        return world

    def shape(self) -> str:
        parts = [tier.shape() for tier in self.tiers.values()]
        parts += [[self._told(command) for command in tier.inbox] for tier in self.tiers.values()]
        parts += [[a.shape() for a in self.asked.values()], self.coming, self.mishaps]
        return repr((parts, sorted(self.names[pull] for pull in self.watches)))

    def _told(self, command: Command) -> Hashable:
        number = next(
            (getattr(command, name) for name in ("pull", "watch", "call") if hasattr(command, name)), None
        )
        rest = [getattr(command, name, None) for name in ("id", "attempt", "tokens", "valid")]
        named = self.names.get(number or 0)
        if isinstance(command, ReleaseLease):
            named = command.handle, command.attempt
        return type(command).__name__, named, rest

    def sights(self) -> set[str]:
        """What a world was made to show, as far as it is to be seen now."""
        decode = self.tiers[DECODE]
        pulls = [active.pull.state for active in decode.pulls._active.values()]
        found = {
            "both tiers full": all(tier.exhausted() for tier in self.tiers.values()),
            "pull drained": PullState.DRAINING in pulls and bool(decode.scheduler.running),
            "preempted": decode.scheduler.preemptions > 0,
            "gave way": decode.gave_way,
            "waits for a slot": bool(decode.scheduler.joining),
            "computed again": any(a.attempt > 1 for a in self.asked.values()),
        }
        return {sight for sight, seen in found.items() if seen}

    def over(self) -> bool:
        """Every request has ended, and nothing is held any more."""
        return all(a.over for a in self.asked.values()) and all(t.idle() for t in self.tiers.values())

    # --- what may happen ---

    def moves(self) -> dict[str, Callable[[], None]]:
        moves: dict[str, Callable[[], None]] = {}
        for name, tier in self.tiers.items():
            if self.coming[name]:
                moves[f"{self.coming[name][0]} comes to {name}"] = partial(self._come, name)
            waiting = len(tier.inbox)
            moves[f"{name} hears all"] = partial(self._turn, name, waiting)
            if waiting > 0:
                moves[f"{name} hears nothing"] = partial(self._turn, name, 0)
            if waiting > 1 and not self.lossy:
                moves[f"{name} hears one"] = partial(self._turn, name, 1)
        if self.tiers[DECODE].copier.jobs:
            moves["copies stop"] = self.tiers[DECODE].copier.finish
        if "cancel" in self.mishaps:
            moves |= {
                f"{id} is cancelled": partial(self._cancel, a) for id, a in self.asked.items() if not a.over
            }
        if "break" in self.mishaps:
            moves |= {f"Watch {pull} breaks": partial(self._break, pull) for pull in self.watches}
        if self.lossy and all(a.over for a in self.asked.values()):
            moves["leases run out"] = self._lapse
        return moves

    def _come(self, tier: str) -> None:
        asked = self.asked[self.coming[tier].pop(0)]
        made = (
            PrefillPrompt(asked.request, 1, False)
            if tier == PREFILL
            else SubmitGeneration(asked.request, 1, not asked.local)
        )
        self._tell(tier, made)

    def _turn(self, name: str, count: int) -> None:
        for event in self.tiers[name].turn(count):
            if name == PREFILL:
                self._prefill_said(event)
            else:
                self._decode_said(event)
        for tier in self.tiers.values():
            tier.check()

    def _cancel(self, asked: Asked) -> None:
        self.mishaps.remove("cancel")
        asked.over = True
        for tier in self.tiers:
            self.coming[tier] = [id for id in self.coming[tier] if id != asked.request.id]
            self._tell(tier, CancelGeneration(asked.request.id))

    def _break(self, pull: int) -> None:
        self.mishaps.remove("break")
        del self.watches[pull]
        self._tell(DECODE, PullFailed(pull, WireFailure("unavailable", "the Watch broke")))
        self._tell(PREFILL, WatchClosed(pull))

    def _lapse(self) -> None:
        """Handles with a broken Watch, or unknown to any worker, wait for this and block nothing else."""
        self.tiers[PREFILL].leases.owner.sweep(time.monotonic() + LEASE_S)
        self._turn(PREFILL, 0)

    # --- the gateway and the fronts, which relay ---

    def _tell(self, tier: str, *commands: Command) -> None:
        self.tiers[tier].inbox += commands

    def _attach(self, asked: Asked) -> None:
        if asked.admitted and asked.handles:
            self._tell(DECODE, AttachKv(asked.request.id, asked.attempt, asked.handles))

    def _prefill_said(self, event: Event) -> None:
        match event:
            case PrefillStarted(id=id, attempt=attempt, handles=handles):
                asked = self.asked[id]
                if attempt == asked.attempt and not asked.over:
                    asked.handles = handles
                    self._attach(asked)
            case PrefillDone(id=id, choices=choices):
                self.asked[id].first = choices
            case WatchUpdate() if event.watch in self.watches:
                self._updated(event)
            case LeaseReleased(call=pull, valid=valid):
                self._tell(DECODE, PullReleased(pull, valid))
            case RequestRejected() | RequestFailed():
                raise AssertionError(event)

    def _updated(self, update: WatchUpdate) -> None:
        if update.failure is not None:
            del self.watches[update.watch]
            self._tell(DECODE, PullFailed(update.watch, update.failure))
            return
        if update.tokens:
            self._tell(DECODE, PullReady(update.watch, update.tokens))
        if update.done:
            self._tell(DECODE, PullDone(update.watch, update.choices, update.last_feature))

    def _decode_said(self, event: Event) -> None:
        match event:
            case RequestAdmitted(id=id):
                self.asked[id].admitted = True
                self._attach(self.asked[id])
            case StepReply(entries=entries):
                for entry in entries:
                    if entry.finish is not None:
                        asked = self.asked[entry.id]
                        asked.ended.add(entry.choice)
                        asked.over = asked.over or len(asked.ended) == len(asked.request.choices)
            case PagesLost(id=id):
                self._again(self.asked[id])
            case OpenPull(pull=pull, handle=handle, attempt=attempt):
                self.names[pull] = handle.id, attempt
                self.watches[pull] = handle, attempt
                self._tell(PREFILL, WatchOpened(pull, handle, attempt))
            case ReleasePull(pull=pull):
                if pull not in self.watches:
                    self._tell(DECODE, PullReleased(pull, False))
                else:
                    handle, attempt = self.watches[pull]
                    self._tell(PREFILL, ReleaseLease(pull, handle.id, handle.epoch, attempt))
            case ReleaseHandle(handle=handle, attempt=attempt):
                self._tell(PREFILL, ReleaseLease(0, handle.id, handle.epoch, attempt))
            case ClosePull(pull=pull):
                if self.watches.pop(pull, None):
                    self._tell(PREFILL, WatchClosed(pull))
            case RequestRejected() | RequestFailed():
                raise AssertionError(event)

    def _again(self, asked: Asked) -> None:
        """Decode kept the request's place without its pages: as `gateway.backends.generate` answers."""
        asked.attempt += 1
        if asked.over:
            return
        if asked.first:
            self._tell(DECODE, AttachKv(asked.request.id, asked.attempt, (), asked.first))
        else:
            asked.handles = ()
            self._tell(
                PREFILL,
                CancelGeneration(asked.request.id),
                PrefillPrompt(asked.request, asked.attempt, False),
            )
