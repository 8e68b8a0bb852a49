"""The folder of a service's certificates, if no flag says it: one variable for a whole container."""

from __future__ import annotations

import os

VARIABLE = "EYAS_TLS_DIR"


def chosen(flag: str | None) -> str | None:
    """The folder that the flag names, else the variable; None: services talk in plain."""
    return flag or os.environ.get(VARIABLE) or None
