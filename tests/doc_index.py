"""The indexes of docs/decisions.md and docs/experiments.md, by topic: `python -m tests.doc_index` writes them.

A decision belongs to the first topic that a word of its heading names, an experiment to the page that it stands in.
"""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[1] / "docs"
BEGIN, END = "<!-- index: python -m tests.doc_index -->", "<!-- end of the index -->"
_HEADING = re.compile(r"^## (?!Template)(.+)$", re.MULTILINE)

TOPICS = {
    "decisions.md": {
        "Structured output and tools": "grammar|json's rules|strings of json|forced tokens|template|pythonic",
        "Speculation": r"draft|mtp|trees know|lookups|heads\b|spec's|adaptive|mailbox|verdicts|depths|synthetic|features",
        "KV and transfer": "kv|page|pull|transfer|lease|handle|nixl|pool|copy|copies|copied|cache|limbo|links|board|host tier|token 0|tier|route|share",
        "Exactness and arithmetic": "noise|arithmetic|exact|rounded|round rows|cublas|onednn|invariant|tiles free|rope",
        "The engine's step": "step|graph|rows|queue|scheduler|loop|sequences|prompts attend|device|launch|admission|numpy|process copies",
        "Kernels and models": "products|weights|experts|latent|attention ranks|family|folder|fp8|ranks",
        "The gateway": "gateway|stream|http|call|redis|key|caller|fields|proto|relay|console|text of|chat|lane|attacker|rules over|ids|span|token's",
        "Layouts and routing": "auto|layout|load|goodput|estimate|predict|burst|drained|worker counts|returning",
        "Operating": "worker|process|sigterm|supervisor|engine|kubernetes|gpu|memory|port|histogram|figures|evaluation|counted|argparse|link|redis|owns",
    },
}
OTHER = "Other"


def headings(text: str) -> list[str]:
    """The headings of the second level, in order."""
    return _HEADING.findall(text)


def anchor(heading: str) -> str:
    """What a link within the page calls a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def index(page: str, text: str) -> str:
    """The index of a page: a line per topic."""
    topics: dict[str, list[str]] = {topic: [] for topic in [*TOPICS[page], OTHER]}
    for heading in headings(text):
        words = heading.lower()
        topic = next(
            (name for name, known in TOPICS[page].items() if re.search(rf"\b(?:{known})", words)), OTHER
        )
        topics[topic].append(heading)
    lines = [
        f"* **{topic}**: " + " · ".join(f"[{_short(one)}](#{anchor(one)})" for one in found)
        for topic, found in topics.items()
        if found
    ]
    return "\n".join([BEGIN, *lines, END])


def _short(heading: str) -> str:
    """A heading without its date."""
    return re.sub(r"^\d{4}-\d\d-\d\d · | \(\d{4}-\d\d-\d\d\)$", "", heading)


def with_index(page: str, text: str) -> str:
    """The page with its index made anew, behind its introduction."""
    bare = re.sub(rf"{BEGIN}.*?{END}\n\n", "", text, flags=re.DOTALL)
    before, heading, rest = bare.partition("\n## ")
    return f"{before.rstrip()}\n\n{index(page, bare)}\n\n## {rest}" if heading else bare


def with_entries(text: str, pages: dict[str, str]) -> str:
    """docs/experiments.md with the entries of all `pages` (texts by name), newest first in each topic."""
    before = text.partition(BEGIN)[0].rstrip()
    return "\n\n".join([before, BEGIN, *(_entries(*each) for each in sorted(pages.items())), END]) + "\n"


def _entries(name: str, text: str) -> str:
    """The title of a page of experiments, and a line per entry."""
    title = text.partition("\n")[0].removeprefix("# ")
    lines = [
        f"* {heading[:10]} [{_short(heading)}](experiments/{name}#{anchor(heading)})"
        for heading in headings(text)
    ]
    return "\n".join([f"## [{title}](experiments/{name})", "", *lines])


def fresh(page: str) -> str:
    """A page of docs/ with its index as it should be."""
    text = (DOCS / page).read_text(encoding="utf-8")
    if page in TOPICS:
        return with_index(page, text)
    pages = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "experiments").glob("*.md")}
    return with_entries(text, pages)


INDEXED = (*TOPICS, "experiments.md")

if __name__ == "__main__":
    for name in INDEXED:
        made = fresh(name)
        (DOCS / name).write_text(made, encoding="utf-8")
