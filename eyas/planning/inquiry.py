"""The request of `eyas plan`: a kind of worker, a load and targets, checked before anything is simulated.

It says which targets no number of workers can meet.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial

from eyas.bench.records import LatencySlo
from eyas.common.errors import ConfigError
from eyas.common.step_times import prompt_s
from eyas.simulator.goodput import Draw, SearchEffort
from eyas.simulator.hardware import WorkerHardware, example, read_hardware
from eyas.simulator.workload import BLOCK_TOKENS, RandomTraffic, means, poisson
from gateway.routing.capacity import RequestMix
from gateway.routing.placement import LatencyTargets, MeasuredRates

DRAWN = 400
"""Requests from which the means of a load are taken."""


@dataclass(frozen=True)
class PlanRequest:
    """A kind of worker, a load and its targets; `effort`: how long loads are that are simulated."""

    hardware: WorkerHardware
    traffic: RandomTraffic
    targets: LatencyTargets
    effort: SearchEffort

    @property
    def draw(self) -> Draw:
        """Draws the load."""
        return partial(poisson, self.traffic)

    @property
    def mix(self) -> RequestMix:
        """The load as the closed-form estimate sees it: shared prefixes count as cached."""
        prompt, output, spread = means(poisson(self.traffic, 1.0, DRAWN, self.effort.seed))
        cached = int(prompt * self.traffic.shared) // BLOCK_TOKENS * BLOCK_TOKENS
        return RequestMix(prompt, prompt - cached, output, spread)

    @property
    def rates(self) -> MeasuredRates:
        """The rates of these workers, as the gateway's policy would measure them."""
        return MeasuredRates(self.hardware.times, self.hardware.budget, self.targets)


def read_inquiry(args: argparse.Namespace) -> PlanRequest:
    """The inquiry of a command line. Raises ConfigError, naming the flag, for what has no answer."""
    hardware = example() if args.rates is None else read_hardware(args.rates)
    traffic = RandomTraffic(args.input_len, args.output_len, args.range_ratio, args.prefix_share)
    effort = SearchEffort(seconds=args.seconds, seed=args.seed)
    inquiry = PlanRequest(hardware, traffic, parse_targets(args.slo), effort)
    check(inquiry)
    return inquiry


def parse_targets(text: str) -> LatencyTargets:
    """Bounds on TTFT and TPOT from text like ttft=1s,tpot=15ms; both are needed. Raises ConfigError."""
    bounds = LatencySlo.parse(text).bounds_s
    for name in ("ttft", "tpot"):
        if not bounds.get(name):
            raise ConfigError(f"--slo: {name} is missing, or 0", param="slo")
    if "e2e" in bounds:
        raise ConfigError("--slo: a plan knows ttft and tpot, not e2e", param="slo")
    return LatencyTargets(bounds["ttft"], bounds["tpot"])


def check(inquiry: PlanRequest) -> None:
    """Raises ConfigError for a request that fits no worker, or that is too slow on a worker of its own."""
    hardware, traffic, targets = inquiry.hardware, inquiry.traffic, inquiry.targets
    if traffic.input_len + traffic.output_len > hardware.pool_tokens:
        raise ConfigError(
            f"--input-len: {traffic.input_len} tokens and an answer of {traffic.output_len} do not fit into"
            f" the {hardware.pool_tokens} tokens of a worker",
            param="input-len",
        )
    typical = round(inquiry.mix.prompt)
    alone = hardware.times.step_s(1, typical)
    if targets.tpot_s < alone:
        raise ConfigError(
            f"--slo: no number of workers meets tpot={1e3 * targets.tpot_s:g}ms: one sequence alone takes"
            f" {1e3 * alone:.2f} ms per token",
            param="slo",
        )
    missing = round(inquiry.mix.missing)
    first = prompt_s(hardware.times, hardware.budget, missing, 0, 0) + hardware.front_s
    if targets.ttft_s < first:
        raise ConfigError(
            f"--slo: no number of workers meets ttft={1e3 * targets.ttft_s:g}ms: a prompt of {missing}"
            f" tokens alone takes {1e3 * first:.1f} ms",
            param="slo",
        )
