"""The compressed arrays name, for each query, exactly the physical rows that its span lets it see."""

from __future__ import annotations

import random

from eyas.engine.attention.page_lists import PageLists, page_lists
from eyas.engine.batch.spans import QuerySpan

PAGE = 4


def test_every_query_sees_its_span() -> None:
    random.seed(1)
    for _ in range(200):
        free = random.sample(range(300), 300)
        spans = []
        for _ in range(random.randint(1, 5)):
            start, count = random.choice((0, random.randint(1, 40))), random.randint(1, 30)
            needed = -(-(start + count) // PAGE)
            spans.append(QuerySpan([free.pop() for _ in range(needed + random.randint(0, 3))], start, count))
        assert _visible(page_lists(spans, PAGE)) == [rows for span in spans for rows in _expected(span)]


def _expected(span: QuerySpan) -> list[list[int]]:
    """Physical rows seen by each query, from the definition of a causal span."""
    physical = [span.pages[row // PAGE] * PAGE + row % PAGE for row in range(span.start + span.count)]
    return [physical[: span.start + i + 1] for i in range(span.count)]


def _visible(lists: PageLists) -> list[list[int]]:
    """The same as a paged causal kernel reads it: the last query sees all rows of the pages' list."""
    seen = []
    for i in range(len(lists.last_rows)):
        pages = lists.pages[lists.first_page[i] : lists.first_page[i + 1]].tolist()
        rows = [page * PAGE + slot for page in pages for slot in range(PAGE)]
        rows = rows[: len(rows) - PAGE + int(lists.last_rows[i])]
        count = int(lists.queries[i + 1] - lists.queries[i])
        seen += [rows[: len(rows) - count + j + 1] for j in range(count)]
    return seen
