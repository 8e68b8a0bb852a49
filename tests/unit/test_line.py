"""Whose piece of work is next, and whose is refused."""

from __future__ import annotations

import random
from collections import Counter

from gateway.limits.queues import BoundedQueue


def line(most: int = 1000, **weights: float) -> BoundedQueue[str]:
    return BoundedQueue(most, 1000, lambda caller: weights.get(caller, 1.0))


def drained(waiting: BoundedQueue[str]) -> list[str]:
    return [waiting.next() for _ in range(len(waiting))]


def test_one_caller_is_served_in_order_and_what_was_begun_goes_first() -> None:
    waiting = line()
    for name in ("a1", "a2", "a3"):
        assert waiting.add_new(name, "a", 10) == []
    waiting.add_started("a0", "a", 10)
    assert drained(waiting) == ["a0", "a1", "a2", "a3"] and waiting.waiting == 0


def test_callers_take_turns_by_bytes_over_weight() -> None:
    waiting = line(b=2.0)
    for number in range(6):
        waiting.add_new(f"a{number}", "a", 10)
    for number in range(6):
        waiting.add_new(f"b{number}", "b", 10)
    assert Counter(name[0] for name in drained(waiting)[:6]) == {"a": 2, "b": 4}


def test_small_pieces_of_a_caller_do_not_wait_behind_its_large_ones() -> None:
    waiting = line(50_000)
    for number in range(4):
        waiting.add_new(f"large {number}", "a", 9000)
    for number in range(12):
        waiting.add_new(f"small {number}", "a", 1000)
    assert waiting.add_new("large 4", "a", 9000) == ["large 4"]
    order = drained(waiting)
    assert order.index("small 0") <= 1 and order.index("small 8") <= 10
    assert order.index("large 1") <= 11, "nor do large ones starve"


def test_who_holds_most_for_its_weight_loses_its_newest() -> None:
    waiting = line(100, b=2.0)
    assert waiting.add_new("a1", "a", 40) == []
    assert waiting.add_new("a2", "a", 20) == []
    assert waiting.add_new("b1", "b", 40) == []
    assert waiting.add_new("a3", "a", 10) == ["a3"]  # its own
    assert waiting.add_new("c1", "c", 20) == ["a2"]  # for another, who holds less
    assert waiting.add_new("b2", "b", 50) == ["b2"]
    assert waiting.waiting == 100 and sorted(drained(waiting)) == ["a1", "b1", "c1"]


def test_a_piece_larger_than_the_bound_is_refused_alone() -> None:
    waiting = line(100)
    waiting.add_new("a1", "a", 60)
    assert waiting.add_new("b1", "b", 101) == ["b1"]
    assert drained(waiting) == ["a1"]


def test_what_was_begun_is_never_refused() -> None:
    waiting = line(100)
    for number in range(5):
        waiting.add_started(f"a{number}", "a", 90)
    assert waiting.add_new("a5", "a", 100) == [] and len(waiting) == 6


def test_bytes_are_counted_once_through_any_history() -> None:
    rng, waiting, sizes, begun = random.Random(5), line(500), dict[str, int](), dict[str, int]()
    for number in range(5000):
        name, caller, size = f"{number}", rng.choice("abc"), rng.randrange(1, 200)
        match rng.randrange(4):
            case 0:
                waiting.add_started(name, caller, size)
                begun[name] = size
            case 1:
                sizes[name] = size
                for refused in waiting.add_new(name, caller, size):
                    del sizes[refused]
            case 2 if len(waiting):
                served = waiting.next()
                assert served in begun or not begun
                begun.pop(served, None)
                sizes.pop(served, None)
            case 3 if sizes:
                left = rng.choice(list(sizes))
                waiting.remove(left)
                waiting.remove(left)  # it may have left before
                del sizes[left]
        assert sum(sizes.values()) <= 500 and len(waiting) == len(sizes) + len(begun)
        assert waiting.waiting == sum(sizes.values()) + sum(begun.values())


def test_a_caller_is_judged_by_its_large_and_small_pieces_together() -> None:
    waiting = line(5000)
    for name, caller, size in (("a1", "a", 900), ("a2", "a", 900), ("a3", "a", 1900)):
        assert waiting.add_new(name, caller, size) == []
    assert waiting.add_new("b1", "b", 1950) == ["a3"]
