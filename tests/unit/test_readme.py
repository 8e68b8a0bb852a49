"""README.md shows the examples as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["openai_sdk.py", "grpc_sdk.py"])
def test_the_readme_shows_the_example_that_runs(name: str) -> None:
    code = (ROOT / "examples" / name).read_text().strip()
    assert f"```python\n{code}\n```" in (ROOT / "README.md").read_text()
