"""Chooses the workers that prefer prompts under `--layout auto`: a pure function of the load.

The number of workers for prompts is the one that bears the highest rate of the requests that come now. It
changes only for a clear gain, and a change acts at the next admission: no running request notices. Its caller
decides how often it is asked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gateway.routing.capacity import RequestMix, capacity
from gateway.routing.paces import PaceMemory
from gateway.routing.placement import AdmissionPreference, MeasuredRates, WorkerPlace

GAIN = 1.05
"""The number changes for at least this factor of capacity: preferences do not flap between equals."""


def best_split(mix: RequestMix, workers: int, now: int, rates: MeasuredRates, paces: PaceMemory) -> int:
    """How many of the workers should prefer prompts; 0: none does, and all do both. `now`: how many do."""
    bears = []
    for prefilling in range(workers):
        times = dataclasses.replace(rates.times, pace=paces.at(prefilling))
        bears.append(capacity(mix, workers, prefilling, dataclasses.replace(rates, times=times)))
    best = max(range(workers), key=lambda prefilling: bears[prefilling])
    return best if bears[best] > GAIN * bears[min(now, workers - 1)] else min(now, workers - 1)


def rethink(
    mix: RequestMix, places: Sequence[WorkerPlace], rates: MeasuredRates, paces: PaceMemory
) -> dict[str, AdmissionPreference]:
    """The preference of each worker, by name, for requests of this mix."""
    rates = dataclasses.replace(rates, answer=mix.output)
    return prefer(places, best_split(mix, len(places), preferring(places), rates, paces))


def preferring(places: Sequence[WorkerPlace]) -> int:
    """How many workers prefer prompts."""
    return sum(p.preference is AdmissionPreference.PREFILL for p in places)


def prefer(places: Sequence[WorkerPlace], prefilling: int) -> dict[str, AdmissionPreference]:
    """The preference of each worker, by name, if `prefilling` of them are to prefer prompts.

    Those that prefer prompts now keep doing so; then come those with the fewest sequences to finish. At least
    one worker that can decode goes on decoding.
    """
    if not prefilling:
        return {p.worker: AdmissionPreference.ANY for p in places}
    order = sorted(
        places,
        key=lambda p: (p.preference is not AdmissionPreference.PREFILL, p.sequences, -p.queued, p.worker),
    )
    chosen = {p.worker for p in order[: min(prefilling, len(order) - 1)]}
    return {
        p.worker: AdmissionPreference.PREFILL if p.worker in chosen else AdmissionPreference.DECODE
        for p in places
    }
