"""Where a gateway's keys come from, and how they go on to the processes that it starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from eyas import cli, configuration
from eyas.cluster.plan import gateway_argv, worker_argv
from eyas.common.errors import ConfigError
from eyas.common.security import api_keys, secret_urls


def parse(*args: str) -> argparse.Namespace:
    return cli._parser().parse_args(args)


def test_a_key_is_handed_on_out_of_sight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From a flag or the environment; never into the command line of another process. A file is named."""
    monkeypatch.setenv(api_keys.VARIABLE, "from-environment\n# ours\n another ")
    for flags, keys in {
        (): ("from-environment", "another"),
        ("--api-key", "from-flag"): ("from-flag",),
    }.items():
        config = configuration.gateway_config(parse("serve", *flags))
        assert config.api_keys == keys
        assert not any(key in word for key in keys for word in (*gateway_argv(config), repr(config)))
    assert api_keys.VARIABLE not in api_keys.environment(())  # a worker's, or that of a gateway without keys
    api_keys.add(str(tmp_path / "keys"), "alice", "a-key-that-alice-brings")
    config = configuration.gateway_config(
        parse("serve", "--api-key-file", str(tmp_path / "keys")), "static:127.0.0.1:1"
    )
    assert (config.api_keys, config.api_key_file) == ((), str(tmp_path / "keys"))
    assert configuration.gateway_alone(parse(*gateway_argv(config))) == config


SECRET = "redis://me:hunter2@127.0.0.1:6379/0"


def test_a_password_in_an_address_is_handed_on_out_of_sight(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a flag or the environment; what a child gets there gives it an equal configuration."""
    words = "worker --registry", "--host-cache-gb 0.1 --kv-store"
    plain = configuration.worker_config(parse(*f"{words[0]} static: {words[1]} redis://a:1/0".split()))
    assert "--kv-store=redis://a:1/0" in worker_argv(plain)
    worker = configuration.worker_config(parse(*f"{words[0]} {SECRET} {words[1]} {SECRET}?a=b".split()))
    gateway = configuration.gateway_alone(parse("gateway", "--registry", SECRET))
    assert "hunter2" not in repr((worker, gateway, worker_argv(worker), gateway_argv(gateway)))
    urls = {"kv-store": worker.engine.kv_store, "registry": worker.registry}
    for name, value in secret_urls.environment({}, urls).items():
        monkeypatch.setenv(name, value)
    assert configuration.worker_config(parse(*worker_argv(worker))) == worker
    assert configuration.gateway_alone(parse(*gateway_argv(gateway))) == gateway
    inherited = {name: SECRET for name in secret_urls.VARIABLES.values()}
    assert secret_urls.environment(inherited, {"kv-store": None}) == {}, "a draft worker has no store"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (SECRET, "redis://***@127.0.0.1:6379/0"),
        ("redis://a:1/0?password=hunter2", "redis://***@a:1/0"),
        ("redis://me:p@hunter2@a:1", "redis://***@a:1"),
        ("me:hunter2@a:1", "***@a:1"),
        ("redis://a:1/0", "redis://a:1/0"),
    ],
)
def test_an_address_is_shown_without_its_password(url: str, shown: str) -> None:
    assert secret_urls.shown(url) == shown


@pytest.mark.parametrize("flag", ["--kv-store", "--registry"])
def test_no_error_has_the_password_of_an_address(flag: str) -> None:
    flags = {"--kv-store": "--host-cache-gb 1 --kv-store", "--registry": "--registry"}[flag].split()
    read = configuration.worker_config if flag == "--kv-store" else configuration.gateway_alone
    with pytest.raises(ConfigError) as raised:
        read(parse("worker" if flag == "--kv-store" else "gateway", *flags, "http://me:hunter2@a:1"))
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize("given", ["", "# not a key", "two words", "schlüssel"])
def test_what_is_no_key_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: str) -> None:
    """Rather than that a server stands open whose owner thinks that it is locked."""
    file = tmp_path / "keys"
    file.write_text(given)
    for flags in (["--api-key", given], ["--api-key-file", str(file)]):
        with pytest.raises(ConfigError, match=flags[0]):
            configuration.gateway_config(parse("serve", *flags))
    monkeypatch.setenv(api_keys.VARIABLE, given)
    if given:
        with pytest.raises(ConfigError, match=api_keys.VARIABLE):
            configuration.gateway_config(parse("serve"))
    else:
        assert configuration.gateway_config(parse("serve")).api_keys == ()
