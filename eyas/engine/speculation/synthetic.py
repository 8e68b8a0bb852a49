"""Synthetic acceptance: how often drafts are accepted in a benchmark, whatever the models say.

The names and meanings are vLLM's (`rejection_sample_method: synthetic`). Plain numbers; the kernel of the
verdict makes the draws.
"""

from __future__ import annotations

from collections.abc import Sequence

from eyas.common.errors import ConfigError

RATES, LENGTH = "synthetic-acceptance-rates", "synthetic-acceptance-length"  # flags


def resolve(steps: int, rates: Sequence[float], length: float | None) -> tuple[float, ...]:
    """The chance of each of `steps` drafts in a row that it is accepted if the ones before it were.

    Exactly one of the other two is given. `rates`: entry i is the chance that the first i + 1 drafts are all
    accepted. `length`: mean tokens per round, the model's own included; rounds then differ by at most one
    token. Raises ConfigError, which names the flag, for values that make no sense.
    """
    if bool(rates) == (length is not None):
        raise _refused(RATES, f"give either this or --{LENGTH} with --rejection-sample-method synthetic")
    together = _of_length(steps, length) if length is not None else _checked(steps, rates)
    before = (1.0, *together[:-1])
    return tuple(rate / above if above > 0 else 0.0 for rate, above in zip(together, before, strict=True))


def _checked(steps: int, rates: Sequence[float]) -> Sequence[float]:
    if len(rates) != steps:
        raise _refused(RATES, f"{len(rates)} entries, but {steps} drafts are made in a row")
    for i, rate in enumerate(rates):
        if not 0.0 <= rate <= 1.0:
            raise _refused(RATES, f"entry {i} is {rate}: a chance lies within 0 .. 1")
        if i and rate > rates[i - 1]:
            raise _refused(RATES, f"entry {i} is {rate}, more than the one before it ({rates[i - 1]})")
    return rates


def _of_length(steps: int, length: float) -> Sequence[float]:
    """1, .., 1, a fraction, 0, ..: the schedule with this mean that has the least variance."""
    if not 1.0 <= length <= steps + 1:
        raise _refused(LENGTH, f"{length}, but {steps} drafts in a row give 1 .. {steps + 1} tokens")
    return [min(max(length - 1 - i, 0.0), 1.0) for i in range(steps)]


def _refused(flag: str, why: str) -> ConfigError:
    return ConfigError(f"--{flag}: {why}", param=flag)
