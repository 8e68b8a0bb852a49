"""The system's limit of open files and connections of this process."""

from __future__ import annotations

import resource

MOST = 65536  # a process needs no more


def raise_limit() -> int:
    """Raises the soft limit on open files to the hard one, at most to MOST; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        return target
    return MOST if soft == resource.RLIM_INFINITY else soft
