"""docs/decisions.md and docs/experiments.md begin with an index of all their headings, by topic."""

from __future__ import annotations

import pytest

from tests.doc_index import DOCS, TOPICS, anchor, with_index


@pytest.mark.parametrize("page", TOPICS)
def test_the_index_is_fresh(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    assert text == with_index(page, text), "run: python -m tests.doc_index"


def test_an_index_names_headings_by_topic() -> None:
    made = with_index(
        "decisions.md", "# Why\n\nWords.\n\n## A draft's way (2026-01-01)\n\nx\n\n## Odd\n\ny\n"
    )
    assert "* **Speculation**: [A draft's way](#a-drafts-way-2026-01-01)\n* **Other**: [Odd](#odd)" in made
    assert with_index("decisions.md", made) == made and anchor("Two `x.y` (1)") == "two-xy-1"
