"""The indexes docs/decisions.md and docs/experiments.md: `python -m tests.doc_index` writes them.

Each lists the entries (headings of the second level) of all pages in its folder, a line per entry.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- index: python -m tests.doc_index -->", "<!-- end of the index -->"
INDEXED = ("decisions", "experiments")
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)
_DATED = re.compile(r"(\d{4}-\d\d-\d\d) · (.+)")


def anchor(heading: str) -> str:
    """The fragment of a link to a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def with_index(folder: str, text: str, pages: dict[str, str]) -> str:
    """The index page `text` with the entries of all `pages` (texts by name) of `folder`."""
    before = text.partition(BEGIN)[0].rstrip()
    listed = [_entries(f"{folder}/{name}", page) for name, page in sorted(pages.items())]
    return "\n\n".join([before, BEGIN, *listed, END]) + "\n"


def _entries(path: str, text: str) -> str:
    """The title of a page and a line per entry."""
    title = text.partition("\n")[0].removeprefix("# ")
    return "\n".join([f"## [{title}]({path})", "", *(_line(path, one) for one in _HEADING.findall(text))])


def _line(path: str, heading: str) -> str:
    dated = _DATED.fullmatch(heading)
    date, title = (f"{dated[1]} ", dated[2]) if dated else ("", heading)
    return f"* {date}[{title}]({path}#{anchor(heading)})"


def fresh(folder: str) -> str:
    """The index page of a folder of docs/ as it should be."""
    pages = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / folder).glob("*.md")}
    return with_index(folder, (DOCS / f"{folder}.md").read_text(encoding="utf-8"), pages)


if __name__ == "__main__":
    for name in INDEXED:
        made = fresh(name)
        (DOCS / f"{name}.md").write_text(made, encoding="utf-8")
