"""A process takes as many open files as the system lets it have."""

from __future__ import annotations

import resource
import subprocess
import sys

ASK = "from eyas.worker.descriptors import raise_limit; import resource; "
ASK += "print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))

    done = subprocess.run(
        [sys.executable, "-c", ASK], preexec_fn=few, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["512", "512"], done.stderr
