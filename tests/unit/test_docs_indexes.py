"""docs/decisions.md and docs/experiments.md list all decisions and experiments, by page."""

from __future__ import annotations

import pytest

from tests.doc_index import DOCS, INDEXED, anchor, fresh, with_index


@pytest.mark.parametrize("folder", INDEXED)
def test_the_index_is_fresh(folder: str) -> None:
    text = (DOCS / f"{folder}.md").read_text(encoding="utf-8")
    assert text == fresh(folder), "run: python -m tests.doc_index"


def test_entries_are_listed_by_page() -> None:
    pages = {
        "b.md": "# B\n\n## 2026-01-02 · A `x`, an H200\n\nx\n",
        "a.md": "# A\n\n## A draft's `x.y` (1)\n\ny\n",
    }
    made = with_index("all", "# All\n\nWords.\n", pages)
    assert "## [A](all/a.md)\n\n* [A draft's `x.y` (1)](all/a.md#a-drafts-xy-1)\n\n## [B]" in made
    assert "* 2026-01-02 [A `x`, an H200](all/b.md#2026-01-02--a-x-an-h200)" in made
    assert with_index("all", made, pages) == made and made.startswith("# All\n\nWords.\n\n<!--")
    assert anchor("Two `x.y` (1)") == "two-xy-1"
