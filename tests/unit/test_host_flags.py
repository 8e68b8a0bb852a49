"""What flags take for a host: a name, or an IP address as URLs write it."""

from __future__ import annotations

import pytest

from tests.unit.command_line import parse


@pytest.mark.parametrize("host", ["::1", "[::1]"])
@pytest.mark.parametrize("command", [("serve",), ("gateway", "--registry", "static:"), ("worker",)])
def test_an_ipv6_host_may_stand_in_brackets(command: tuple[str, ...], host: str) -> None:
    assert parse(*command, "--host", host).host == "::1"
    assert parse("certs", "folder", "--names", f"a.b,{host}").names == ("a.b", "::1")
