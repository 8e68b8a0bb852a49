"""A worker's backlog and step rates as protobuf, and back. A curve that cannot be read is refused."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable

import msgspec

from eyas.common.errors import InvalidRequest
from eyas.common.step_times import PiecewiseCurve, StepBudget, StepPace, StepRates, StepTimes
from eyas.common.types import WorkerBacklog
from protos import worker_pb2

MOST_POINTS = 256


def backlog_to_pb(backlog: WorkerBacklog) -> worker_pb2.Backlog:
    """Every field."""
    told = msgspec.structs.asdict(backlog)
    return worker_pb2.Backlog(**told | {"pace": worker_pb2.StepPace(**dataclasses.asdict(backlog.pace))})


def backlog_from_pb(pb: worker_pb2.Backlog) -> WorkerBacklog:
    """Every field; one that is absent has its default. Raises InvalidRequest for a pace that is none."""
    told = {name: getattr(pb, name) for name in WorkerBacklog.__struct_fields__}
    pace = StepPace(pb.pace.decode, pb.pace.prompt, pb.pace.mixed)
    if not all(math.isfinite(value) and value >= 0.0 for value in dataclasses.astuple(pace)):
        raise InvalidRequest("backlog has a pace that is none", param="backlog")
    kv_room = pb.kv_room if pb.HasField("kv_room") else None
    return WorkerBacklog(**told | {"pace": pace, "kv_room": kv_room})


def rates_to_pb(rates: StepRates) -> worker_pb2.StepRates:
    """Every field."""
    times, budget = rates.times, rates.budget
    return worker_pb2.StepRates(
        rows_ms=_points(times.rows_ms),
        context_ms=_points(times.context_ms),
        pairs_ms=times.pairs_ms,
        mixed_ms=times.mixed_ms,
        grain=times.grain,
        chunk_tokens=budget.chunk_tokens,
        mixed_tokens=budget.mixed_tokens,
    )


def rates_from_pb(pb: worker_pb2.StepRates) -> StepRates:
    """Raises InvalidRequest for rates by which no step could be timed."""
    if min(pb.grain, pb.chunk_tokens, pb.mixed_tokens) < 1:
        raise InvalidRequest("rates has a grain or a budget below 1", param="rates")
    if not all(math.isfinite(value) and value >= 0.0 for value in (pb.pairs_ms, pb.mixed_ms)):
        raise InvalidRequest("rates has times that are none", param="rates")
    times = StepTimes(_curve(pb.rows_ms), _curve(pb.context_ms), pb.pairs_ms, pb.mixed_ms, pb.grain)
    return StepRates(times, StepBudget(pb.chunk_tokens, pb.mixed_tokens))


def _points(curve: PiecewiseCurve) -> list[worker_pb2.CurvePoint]:
    return [worker_pb2.CurvePoint(x=x, y=y) for x, y in curve.points]


def _curve(points: Iterable[worker_pb2.CurvePoint]) -> PiecewiseCurve:
    """At least two points, x and time rising: a time is then never below 0."""
    pairs = tuple((point.x, point.y) for point in points)
    rising = all(a[0] < b[0] and a[1] <= b[1] for a, b in zip(pairs, pairs[1:], strict=False))
    if not (2 <= len(pairs) <= MOST_POINTS and rising and pairs[0][1] >= 0.0 and math.isfinite(pairs[-1][1])):
        raise InvalidRequest("rates has a curve that does not rise", param="rates")
    return PiecewiseCurve(pairs)
