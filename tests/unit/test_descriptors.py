"""A process takes as many open files as the system lets it have."""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys

import pytest

from eyas.common.config import CertificateFiles, GatewayConfig
from gateway.main import fitting

ASK = "from eyas.common.machine.processes import raise_limit; import resource; "
ASK += "print(raise_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])"


def test_the_soft_limit_is_raised_to_the_hard_one() -> None:
    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))

    done = subprocess.run(
        [sys.executable, "-c", ASK], preexec_fn=few, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == ["512", "512"], done.stderr


def test_a_gateway_has_files_for_all_connections_that_it_may_take(caplog: pytest.LogCaptureFixture) -> None:
    plain = GatewayConfig()
    tls = dataclasses.replace(plain, certificate=CertificateFiles("a", "b"))
    assert fitting(plain, 1 << 16) == plain and fitting(tls, 1 << 16) == tls and not caplog.records
    for config, files_each in ((plain, 1 + 3), (tls, 1 + 3 + 2)):  # HTTP, gRPC, handshakes
        connections = fitting(config, 1000).max_connections
        assert files_each * connections <= 900 < (files_each + 2) * connections
        assert f"at most {connections} connections" in caplog.records[-1].message
