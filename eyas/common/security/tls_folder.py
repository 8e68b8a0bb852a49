"""Where a service's certificates are, if no flag says it: one variable for all processes of a container.

It refuses to know what the folder holds (`eyas.common.security.tls`).
"""

from __future__ import annotations

import os

VARIABLE = "EYAS_TLS_DIR"


def chosen(flag: str | None) -> str | None:
    """The folder that the flag names, else the variable; None: services talk in plain."""
    return flag or os.environ.get(VARIABLE) or None
