"""What a key may use: buckets, files, and accounts that are forgotten."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from eyas.common.errors import ConfigError, RateLimited
from gateway.limits.quotas import CallerLimits, CallerQuotas, KeyLimits, TokenBucket, read_limits

RATE = 60


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_keeps_its_rate_over_any_time() -> None:
    rng = random.Random(3)
    bucket, now, taken = TokenBucket(RATE, 0.0), 0.0, []
    while now < 1200:
        now += rng.expovariate(5.0)
        if bucket.level(now) >= 1:
            bucket.take(1, now)
            taken.append(now)
    assert len(taken) == pytest.approx(RATE * 21, rel=0.01)  # a minute's worth at first, then the rate
    for begin in range(0, 1140, 7):
        assert sum(begin <= at < begin + 60 for at in taken) <= 2 * RATE + 1


def test_tokens_may_be_overdrawn_and_are_paid_back() -> None:
    clock = Clock()
    quotas = CallerQuotas(CallerLimits(KeyLimits(tokens_per_minute=600)), clock)
    use = quotas.use("a")
    use.enter()
    use.pay(1800)
    with pytest.raises(RateLimited, match="600 tokens per minute") as caught:
        quotas.use("a").enter()
    assert caught.value.retry_after_s == 121  # 1,200 owed at ten a second, and one to begin with
    clock.now += 120.5
    quotas.use("a").enter()
    quotas.use("b").enter()


def test_requests_and_requests_at_a_time() -> None:
    clock = Clock()
    quotas = CallerQuotas(CallerLimits(KeyLimits(requests_per_minute=2, concurrent_requests=1)), clock)
    first = quotas.use("a")
    first.enter()
    with pytest.raises(RateLimited, match="1 requests of this key are open"):
        quotas.use("a").enter()
    first.leave()
    first.leave()
    quotas.use("a").enter()
    refused = quotas.use("a")
    with pytest.raises(RateLimited):
        refused.enter()
    refused.leave()  # it had not begun
    told = refused.headers()
    assert told == {
        "x-ratelimit-limit-requests": "2",
        "x-ratelimit-remaining-requests": "0",
        "x-ratelimit-reset-requests": "1m0s",
    }
    clock.now += 45
    assert refused.headers()["x-ratelimit-remaining-requests"] == "1"
    assert refused.headers()["x-ratelimit-reset-requests"] == "15s"
    clock.now += 14.99
    assert refused.headers()["x-ratelimit-reset-requests"] == "10ms"


def test_idle_accounts_are_forgotten_and_used_ones_are_not() -> None:
    clock = Clock()
    quotas = CallerQuotas(CallerLimits(KeyLimits(requests_per_minute=60)), clock)
    for number in range(100):
        use = quotas.use(f"caller {number}")
        use.enter()
        use.leave()
    open_one = quotas.use("open")
    open_one.enter()
    clock.now += 3600
    quotas.use("new")
    assert set(quotas.accounts._accounts) == {"open", "new"}


def test_a_file_names_keys_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(
        "[default]\nrequests_per_minute = 60\n[keys.abc]\ntokens_per_minute = 5\nweight = 2.5\n[keys.def]\n"
        '[adapters.alice]\ntokens_per_minute = 7\n[adapters."*"]\nconcurrent_requests = 2\n'
    )
    limits = read_limits(str(file))
    assert limits.of("abc") == KeyLimits(60, 5, weight=2.5)
    assert limits.of("def") == limits.of("other") == KeyLimits(60)
    assert limits.of_adapter("alice") == KeyLimits(None, 7)
    assert limits.of_adapter("bob") == KeyLimits(concurrent_requests=2)
    assert read_limits(None).of("abc") == read_limits(None).of_adapter("abc") == KeyLimits()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default", "is not TOML"),
        ("[defaults]", "defaults is none of"),
        ("default = 3", "default must be a table"),
        ("keys = 3", "keys must be tables"),
        ("adapters = 3", "adapters must be tables"),
        ("[adapters.a]\nweight = 2", "adapters.a has weight"),
        ("[adapters.a]\ntokens = 2", "adapters.a has tokens"),
        ("[keys.a]\nrequests = 3", "keys.a has requests"),
        ("[default]\nrequests_per_minute = 0", "default.requests_per_minute"),
        ("[default]\nrequests_per_minute = 1.5", "default.requests_per_minute"),
        ("[default]\nrequests_per_minute = true", "default.requests_per_minute"),
        ("[default]\nweight = inf", "default.weight"),
    ],
)
def test_what_is_no_limit_is_refused(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "limits.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_limits(str(file))
    assert caught.value.param == "key-limits"
