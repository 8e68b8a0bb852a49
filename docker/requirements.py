"""Prints what pyproject.toml asks for, one requirement per line: first of all what builds Eyas, then what it
needs, then the extras that the command line names. So an image has them in a layer below the sources.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(path: Path, extras: list[str]) -> list[str]:
    """The lines for pip, in the order of the file at `path`."""
    says = tomllib.loads(path.read_text())
    optional = says["project"]["optional-dependencies"]
    needed = [*says["build-system"]["requires"], *says["project"]["dependencies"]]
    return [*needed, *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print("\n".join(requirements(Path("pyproject.toml"), sys.argv[1:])))
