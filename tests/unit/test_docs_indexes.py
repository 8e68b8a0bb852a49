"""docs/decisions.md and docs/experiments.md have an index of all decisions and experiments, by topic."""

from __future__ import annotations

import pytest

from tests.doc_index import DOCS, INDEXED, anchor, fresh, with_entries, with_index


@pytest.mark.parametrize("page", INDEXED)
def test_the_index_is_fresh(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == fresh(page), "run: python -m tests.doc_index"


def test_experiments_are_listed_by_page() -> None:
    pages = {
        "b.md": "# B\n\n## 2026-01-02 · A `x`, an H200\n\nx\n",
        "a.md": "# A\n\n## 2026-01-01 · Y\n\ny\n",
    }
    made = with_entries("# All\n\nWords.\n", pages)
    assert "## [A](experiments/a.md)\n\n* 2026-01-01 [Y](experiments/a.md#2026-01-01--y)\n\n## [B]" in made
    assert "* 2026-01-02 [A `x`, an H200](experiments/b.md#2026-01-02--a-x-an-h200)" in made
    assert with_entries(made, pages) == made and made.startswith("# All\n\nWords.\n\n<!--")


def test_an_index_names_headings_by_topic() -> None:
    made = with_index(
        "decisions.md", "# Why\n\nWords.\n\n## A draft's way (2026-01-01)\n\nx\n\n## Odd\n\ny\n"
    )
    assert "* **Speculation**: [A draft's way](#a-drafts-way-2026-01-01)\n* **Other**: [Odd](#odd)" in made
    assert with_index("decisions.md", made) == made and anchor("Two `x.y` (1)") == "two-xy-1"
