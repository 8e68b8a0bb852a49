"""The names of clusters, by which those that share a Redis database are told apart."""

from __future__ import annotations

import re

from eyas.common.errors import ConfigError

CLUSTER = "eyas"
"""The name of a cluster that was given none."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # none is a pattern, or a part of another one's keys


def checked_cluster(name: str) -> str:
    """The name of a cluster. Raises ConfigError for another string."""
    if not _NAME.fullmatch(name):
        shape = "1 to 64 letters, digits, dots, dashes and underlines"
        raise ConfigError(f"--cluster: {name!r} is not {shape}", param="cluster")
    return name
