"""Where a gateway's keys come from, and how they go on to the processes that it starts."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from eyas import cli, configuration
from eyas.cluster.plan import gateway_argv
from eyas.common.errors import ConfigError
from eyas.common.security import api_keys


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
