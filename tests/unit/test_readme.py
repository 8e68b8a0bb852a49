"""README.md is short; docs show the examples as they are, and name every folder and every flag."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from eyas import flags, layout_flags, process_flags

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


def test_every_flag_of_a_server_is_named() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    for add in (
        process_flags.add_gateway,
        layout_flags.add_layout,
        layout_flags.add_targets,
        flags.add_engine,
    ):
        add(parser)
    text = (ROOT / "docs" / "configuration.md").read_text()
    known = [name for action in parser._actions for name in action.option_strings]
    assert [name for name in known if f"`{name}" not in text] == []
