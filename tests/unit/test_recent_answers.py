"""How recent answers went on: against a plain rule over whole lists, in bounded memory, by tenant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence as SequenceOf

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.engine.speculation import recent_answers as module
from eyas.engine.speculation.recent_answers import (
    GRAMS,
    LEAST,
    LONGEST,
    MOST_TOKENS,
    PLACES,
    AnswerMatch,
    RecentAnswers,
)

A, B = ("a", b""), ("b", b"")
Ids = SequenceOf[int]


def followed(answers: SequenceOf[Ids], ids: Ids) -> AnswerMatch | None:
    """The rule: over the tenant's own answers, the oldest first."""
    for gram in GRAMS:
        if len(ids) < gram:
            continue
        places = [
            (answer, at)
            for answer in reversed(answers)
            for at in range(len(answer) - 1, gram - 1, -1)
            if tuple(answer[at - gram : at]) == tuple(ids[-gram:])
        ][:PLACES]
        if places:
            lengths = [shared(answer[:at], ids) for answer, at in places]
            match = max(lengths)
            rows = [
                answer[at : at + MOST_TOKENS]
                for (answer, at), one in zip(places, lengths, strict=True)
                if one == match
            ]
            return AnswerMatch(match, most_followed(rows))
    return None


def shared(before: Ids, ids: Ids) -> int:
    """How many of the last ids are the same."""
    count = 0
    while count < min(LONGEST, len(before), len(ids)) and before[-1 - count] == ids[-1 - count]:
        count += 1
    return count


def most_followed(rows: list[Ids]) -> tuple[int, ...]:
    tokens: list[int] = []
    least = LEAST * len(rows)
    while len(tokens) < MOST_TOKENS:
        counts = Counter(tuple(row[len(tokens) : len(tokens) + 1]) for row in rows)
        token, count = counts.most_common(1)[0]
        if not token or count < least:
            break
        rows = [row for row in rows if tuple(row[len(tokens) : len(tokens) + 1]) == token]
        tokens += token
    return tuple(tokens)


texts = st.lists(st.integers(0, 2), max_size=60)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from([A, B]), texts), max_size=12), texts)
def test_proposals_are_what_the_rule_says(answers: list[tuple[tuple[str, bytes], Ids]], ids: Ids) -> None:
    index = RecentAnswers(1 << 12)
    for tenant, answer in answers:
        index.add(tenant, answer)
    for tenant in (A, B):
        own = [answer for owner, answer in answers if owner == tenant]
        assert index.look_up(tenant, ids) == followed(own, ids)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**32 - 1))
def test_the_oldest_give_way_and_nothing_else_changes(seed: int) -> None:
    """A ring that went round many times says what the rule says of the answers that lie in it whole, and of
    the rest of the one that is being overwritten.
    """
    rng, size = np.random.default_rng(seed), 256
    index, written = RecentAnswers(size), []
    for _ in range(60):
        answer = rng.integers(0, 3, rng.integers(4, 31)).tolist()
        index.add(A, answer)
        written.append((index._end - len(answer) - 1, answer))
        oldest = index._end - size
        there = [answer[max(oldest - first, 0) :] for first, answer in written]
        ids = rng.integers(0, 3, 40).tolist()
        assert index.look_up(A, ids) == followed(there, ids)


def test_another_tenants_answers_are_nobody_elses() -> None:
    """Neither another key's nor another salt's, the newer ones least of all."""
    index, answer = RecentAnswers(1 << 12), list(range(40))
    index.add(("key", b"salt"), answer)
    for _ in range(3):
        index.add(("key", b"other"), [*answer[:20], *range(100, 120)])
    assert index.look_up(("key", b"salt"), answer[:20]) == AnswerMatch(20, tuple(answer[20:]))
    for stranger in (("other", b"salt"), ("key", b""), ("", b"salt")):
        assert index.look_up(stranger, answer[:20]) is None


def test_what_is_cleared_is_gone_and_what_comes_after_is_found() -> None:
    index, answer = RecentAnswers(1 << 12), list(range(40))
    index.add(A, answer)
    index.clear()
    assert index.look_up(A, answer[:20]) is None and index.tenants == 0
    assert not set(index._ids.tolist()) & set(answer)
    index.add(A, [*answer[:20], 7])
    assert index.look_up(A, answer[:20]) == AnswerMatch(20, (7,))


def test_a_long_answer_leaves_room_for_others() -> None:
    index = RecentAnswers(256)
    index.add(A, [7, 8, 9, 10, 11])
    index.add(A, list(range(1000, 9000)))
    assert index.look_up(A, [7, 8, 9]) == AnswerMatch(3, (10, 11))
    assert index.look_up(A, [8995, 8996, 8997]) == AnswerMatch(3, (8998, 8999))


def test_memory_is_bounded() -> None:
    """Bytes of arrays never change, and tenants whose answers are gone are forgotten."""
    index = RecentAnswers(1 << 12)
    before = index.nbytes
    for number in range(3000):
        index.add((f"key {number}", b""), [number, *range(30)])
    assert index.nbytes == before <= 30 * (1 << 12) + (1 << 16)
    assert index.tenants <= (1 << 12) / 32 + 1
    assert RecentAnswers().nbytes <= 25 << 20


@pytest.mark.parametrize(
    "wrong", [{"LEAST": 0.6}, {"PLACES": 2}, {"LONGEST": 9}, {"MOST_TOKENS": 5}, {"_END": 1}, {"GRAMS": (3,)}]
)
def test_another_rule_is_noticed(wrong: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in wrong.items():
        monkeypatch.setattr(module, name, value)
    rng, different = np.random.default_rng(5), 0
    for _ in range(8):
        index, answers = RecentAnswers(1 << 12), [rng.integers(0, 3, 60).tolist() for _ in range(12)]
        for answer in answers:
            index.add(A, answer)
        for end in range(20, 60):
            ids = answers[0][end % 2 * (end - 4) : end]  # a long match of one place, or short ones of many
            different += index.look_up(A, ids) != followed(answers, ids)
    assert different


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_day_of_traffic_takes_no_more_memory_than_its_first_hours() -> None:
    """Ten answers of 300 tokens in the mean per second, of a thousand tenants: 260 million tokens."""
    rng, index = np.random.default_rng(1), RecentAnswers()
    texts = rng.integers(0, 128_000, (64, 600))
    resident, begun, looks, worst = [], time.process_time(), 0, 0.0
    for _hour in range(24):
        for number in range(36_000):
            text, count = texts[number % 64], int(rng.integers(4, 600))
            answer = np.where(rng.random(count) < 0.05, rng.integers(0, 128_000), text[:count]).tolist()
            tenant = (f"key {int(rng.integers(1000))}", b"")
            index.add(tenant, answer)
            if not number % 100:
                before = time.perf_counter()
                looks += index.look_up(tenant, answer[: count // 2]) is not None
                worst = max(worst, time.perf_counter() - before)
        resident.append(psutil.Process().memory_info().rss >> 20)
    seconds = time.process_time() - begun
    print(f"MiB resident by hour {resident}; {seconds:.0f} s of CPU; {looks} looks, at most {worst:.4f} s")
    assert max(resident[2:]) - resident[1] <= 4 and index.tenants <= 1000 and looks > 1000
