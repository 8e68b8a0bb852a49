"""A folder with modules that somebody has put there, named as Python's own: what imports one is found out."""

from __future__ import annotations

from pathlib import Path

NAMES = (
    "enum",
    "json",
    "pickle",
    "random",
    "resource",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "tempfile",
)


def plant(folder: Path) -> Path:
    """Fills `folder`, and returns the file that comes into being when one of its modules is imported."""
    mark = folder / "imported"
    for name in NAMES:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')\n")
    return mark
