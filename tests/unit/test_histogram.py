"""Counts in buckets: which bucket a value is in."""

from __future__ import annotations

from eyas.common.histogram import STEP_SECONDS, STEP_SEQUENCES, Histogram


def test_a_bound_belongs_to_the_bucket_that_ends_there() -> None:
    found = Histogram((1, 4, 8))
    for value in (0.5, 1, 2, 4, 4.5, 9):
        found.add(value)
    assert (found.counts, found.total) == ([2, 2, 1, 1], 21.0)


def test_bounds_ascend() -> None:
    for bounds in (STEP_SECONDS, STEP_SEQUENCES):
        assert list(bounds) == sorted(set(bounds))
