"""The limits of each API key and of each adapter: requests and tokens per minute, and requests at a time.

Rates are buckets: they hold a minute's worth, fill evenly, and a call may overdraw the tokens, whose number
is known only at its end; the next call then waits until the debt is paid.
"""

from __future__ import annotations

import math
import time
import tomllib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from eyas.common.errors import ConfigError, InvalidRequest, RateLimited
from gateway.limits.queues import ReadQueue

FLAG = "key-limits"
OTHERS = "*"
"""In the place of an adapter's name: each that is not named."""

# What the call that this code serves has used; tasks inherit it from the code that starts them.
current: ContextVar[QuotaUse | None] = ContextVar("use", default=None)


@dataclass(frozen=True)
class KeyLimits:
    """The limits of one key; None: no limit. `weight`: its part of a full cluster, beside those of others."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class CallerLimits:
    """The limits of all callers. `keys`: by caller (`gateway.limits.keys.ApiCaller.name`). `default`: of each
    other key, and of callers without one. `adapters`: by name, for all callers together; `OTHERS`: of each
    other one.
    """

    default: KeyLimits = KeyLimits()
    keys: Mapping[str, KeyLimits] = field(default_factory=dict)
    adapters: Mapping[str, KeyLimits] = field(default_factory=dict)

    def of(self, caller: str) -> KeyLimits:
        """The limits of a caller."""
        return self.keys.get(caller, self.default)

    def of_adapter(self, name: str) -> KeyLimits:
        """The limits of an adapter."""
        return self.adapters.get(name) or self.adapters.get(OTHERS, KeyLimits())


def read_limits(path: str | None) -> CallerLimits:
    """The limits in a TOML file: a table `default`, in `keys.NAME` what differs for one key, and in
    `adapters.NAME` those of an adapter.

    No limits for None. Raises ConfigError, naming the table and the key, for what is no limit.
    """
    if path is None:
        return CallerLimits()
    try:
        tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(f"{path} cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _wrong(f"{path} is not TOML: {error}") from error
    for name in tables.keys() - {"default", "keys", "adapters"}:
        raise _wrong(f"{path}: {name} is none of default, keys and adapters")
    default = _limits(tables.get("default", {}), "default", path)
    for name in ("keys", "adapters"):
        if not isinstance(tables.get(name, {}), dict):
            raise _wrong(f"{path}: {name} must be tables [{name}.NAME]")
    keys, adapters = tables.get("keys", {}), tables.get("adapters", {})
    for name, table in adapters.items():
        if isinstance(table, dict) and "weight" in table:
            raise _wrong(f"{path}: adapters.{name} has weight: a full cluster is shared by key")
    return CallerLimits(
        default,
        {name: _limits(table, f"keys.{name}", path, vars(default)) for name, table in keys.items()},
        {name: _limits(table, f"adapters.{name}", path) for name, table in adapters.items()},
    )


def _limits(table: Any, name: str, path: str, given: Mapping[str, Any] | None = None) -> KeyLimits:
    known = {item.name for item in fields(KeyLimits)}
    if not isinstance(table, dict):
        raise _wrong(f"{path}: {name} must be a table")
    for word, value in table.items():
        if word not in known:
            raise _wrong(f"{path}: {name} has {word}; a key has {', '.join(sorted(known))}")
        whole = isinstance(value, int) or (word == "weight" and isinstance(value, float))
        if not whole or isinstance(value, bool) or not 0 < value < math.inf:
            raise _wrong(f"{path}: {name}.{word} must be a number above 0, and whole but for weight")
    return KeyLimits(**{**(given or {}), **table})


def _wrong(reason: str) -> ConfigError:
    return ConfigError(f"--{FLAG}: {reason}", param=FLAG)


class TokenBucket:
    """Holds up to `per_minute` and fills by as much per minute. Times are seconds of one clock."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """Returns the tokens in the bucket; a negative number is debt."""
        return min(self._level + (now - self._at) * self.per_minute / 60, self.per_minute)

    def take(self, count: int, now: float) -> None:
        """Takes out `count`, also what is not in it."""
        self._level, self._at = self.level(now) - count, now

    def until(self, level: float, now: float) -> float:
        """Seconds until it holds `level`."""
        return max(level - self.level(now), 0.0) * 60 / self.per_minute


class CallerAccount:
    """The usage of one caller, or of an adapter. Its buckets are there only for the limits that it has.

    `whose`: of whom refusals speak.
    """

    def __init__(self, limits: KeyLimits, now: float, whose: str) -> None:
        self.limits, self._whose = limits, whose
        self.open = 0  # requests
        self.requests = _bucket(limits.requests_per_minute, now)
        self.tokens = _bucket(limits.tokens_per_minute, now)

    def check(self, now: float, count: int = 1) -> None:
        """Raises RateLimited if `count` calls cannot begin together now, InvalidRequest if they never can."""
        most, rate = self.limits.concurrent_requests, self.limits.requests_per_minute
        for limit, name in ((most, "requests at a time"), (rate, "requests per minute")):
            if limit is not None and count > limit:
                raise InvalidRequest(f"{count} prompts are more than the {limit} {name} of {self._whose}")
        if most is not None and self.open + count > most:
            raise RateLimited(
                f"{self.open} requests of {self._whose} are open already: {most} is the most", 1
            )
        for bucket, name, level in ((self.requests, "requests", count), (self.tokens, "tokens", 1)):
            if bucket is not None and bucket.level(now) < level:
                wait = max(math.ceil(bucket.until(level, now)), 1)
                used = f"{self._whose} has used its {bucket.per_minute} {name} per minute"
                raise RateLimited(f"{used}: come back in {wait} s", wait)

    def enter(self, now: float) -> None:
        """A call begins. Raises RateLimited if that is one too many."""
        self.check(now)
        if self.requests is not None:
            self.requests.take(1, now)
        self.open += 1

    def is_idle(self, now: float) -> bool:
        """Whether it is as it began."""
        full = (b is None or b.level(now) >= b.per_minute for b in (self.requests, self.tokens))
        return not self.open and all(full)

    def headers(self, now: float) -> dict[str, str]:
        """OpenAI's: of each rate what is allowed, what is left, and when all of it is back."""
        headers: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.per_minute)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(int(bucket.level(now)), 0))
                headers[f"x-ratelimit-reset-{name}"] = _span(bucket.until(bucket.per_minute, now))
        return headers


def _bucket(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, now)


def _span(seconds: float) -> str:
    """Writes a duration as OpenAI does: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(1e3 * seconds)}ms"
    minutes, rest = divmod(math.ceil(10 * seconds) / 10, 60)
    return f"{int(minutes)}m{rest:g}s" if minutes else f"{rest:g}s"


class UsageAccounts:
    """The accounts of many, by name: one that is idle is forgotten. `limits`: of a name. `whose`: as of
    `CallerAccount`, for a name.
    """

    def __init__(
        self,
        limits: Callable[[str], KeyLimits],
        whose: Callable[[str], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits, self._whose, self.clock = limits, whose, clock
        self._accounts: dict[str, CallerAccount] = {}

    def of(self, name: str) -> CallerAccount:
        """The account of this name."""
        if name not in self._accounts:
            now = self.clock()
            self._accounts = {n: a for n, a in self._accounts.items() if not a.is_idle(now)}
            self._accounts[name] = CallerAccount(self._limits(name), now, self._whose(name))
        return self._accounts[name]

    def use(self, name: str) -> QuotaUse:
        """A call on this account that has not begun."""
        return QuotaUse(self.of(name), self.clock)


class CallerQuotas:
    """The accounts of all callers of one gateway process. `pace`: the turns of their requests."""

    def __init__(
        self, limits: CallerLimits | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits or CallerLimits()
        self.pace = ReadQueue(lambda caller: self.limits.of(caller).weight)
        self.accounts = UsageAccounts(self.limits.of, lambda _: "this key", clock)

    def use(self, caller: str) -> QuotaUse:
        """A call of this caller that has not begun."""
        return self.accounts.use(caller)


class QuotaUse:
    """The usage of one call on an account, from `enter` to `leave`."""

    def __init__(self, account: CallerAccount, clock: Callable[[], float]) -> None:
        self._account = account
        self._clock = clock
        self._entered = False

    def check(self, count: int) -> None:
        """See `CallerAccount.check`: `count` calls like this one would begin together."""
        self._account.check(self._clock(), count)

    def enter(self) -> None:
        """The call begins. Raises RateLimited."""
        self._account.enter(self._clock())
        self._entered = True

    def serve(self) -> None:
        """The call that this code serves begins: it is the current one. Raises RateLimited."""
        current.set(self)
        self.enter()

    def leave(self) -> None:
        """The call has ended. Idempotent; nothing if it has not begun."""
        self._account.open -= self._entered
        self._entered = False

    def pay(self, tokens: int) -> None:
        """The call has used these tokens."""
        if self._account.tokens is not None:
            self._account.tokens.take(tokens, self._clock())

    def headers(self) -> dict[str, str]:
        """See `CallerAccount.headers`."""
        return self._account.headers(self._clock())


class MeteredCall:
    """The context of one call, which leaves its account. (A class: every request pays for it.)"""

    def __enter__(self) -> None:
        self._token = current.set(None)

    def __exit__(self, *_: object) -> None:
        if (use := current.get()) is not None:
            use.leave()
        current.reset(self._token)


def headers() -> dict[str, str]:
    """Returns the limit headers of the current call; none if nothing of it is limited."""
    return {} if (use := current.get()) is None else use.headers()


def pay(tokens: int) -> None:
    """The call that this code serves has used these tokens."""
    if (use := current.get()) is not None:
        use.pay(tokens)
