"""README.md is short; docs show the examples as they are, and name every folder and every flag."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import flag_pages

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["openai_sdk.py", "grpc_sdk.py"])
def test_the_example_that_runs_is_shown(name: str) -> None:
    code = (ROOT / "examples" / name).read_text().strip()
    assert f"```python\n{code}\n```" in (ROOT / "docs" / "using.md").read_text()


def test_every_folder_is_named() -> None:
    folders = (ROOT / "docs" / "architecture.md").read_text().partition("## Folders")[2].partition("## ")[0]
    own = [f"{part.name}/" for part in ROOT.iterdir() if (part / "__init__.py").exists()]
    eyas = [f"eyas/{part.name}/" for part in (ROOT / "eyas").iterdir() if (part / "__init__.py").exists()]
    engine = folders.partition("eyas/engine/")[2].partition("eyas/worker/")[0]
    parts = [part.name for part in (ROOT / "eyas" / "engine").iterdir() if (part / "__init__.py").exists()]
    missing = [name for name in [*own, *eyas] if f"\n{name}" not in folders and name != "eyas/"]
    assert missing + [name for name in parts if name not in engine] == []


def test_the_readme_is_read_in_minutes() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8192


@pytest.mark.parametrize("page", flag_pages.PAGES)
def test_the_pages_of_flags_are_those_of_the_parsers(page: str) -> None:
    """`python -m tests.flag_pages` writes them."""
    assert flag_pages.renewed(page) == (ROOT / "docs" / page).read_text()
