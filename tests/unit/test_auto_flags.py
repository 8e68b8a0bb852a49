"""`--layout auto` on the command line: when it is the usual one, and what does not go with it."""

from __future__ import annotations

import itertools

import pytest

from eyas import cli, configuration
from eyas.cluster.plan import HostResources, gateway_argv, plan
from eyas.common.config import ServeConfig
from eyas.common.errors import ConfigError
from eyas.common.types import Role


def served(*flags: str) -> ServeConfig:
    args = cli._parser().parse_args(["serve", *flags])
    return configuration.serve_config(args, configuration.gateway_config(args))


@pytest.mark.parametrize(
    ("flags", "gpus", "expected"),
    [
        ((), 4, ("split", 1)),
        (("--layout", "auto"), 0, ("auto", 2)),
        (("--layout", "auto", "--workers", "3"), 0, ("auto", 3)),
        (("--device", "cuda"), 0, ("unified", 1)),
        (("--device", "cuda"), 1, ("unified", 1)),
        (("--device", "cuda"), 4, ("auto", 4)),
        (("--device", "cuda:1"), 4, ("unified", 1)),
        (("--device", "cuda", "--gpus", "2,3"), 4, ("auto", 2)),
        (("--device", "cuda", "--gpus", "2,2"), 4, ("unified", 1)),
        (("--device", "cuda", "--workers", "1"), 4, ("unified", 1)),
        (("--device", "cuda", "--workers", "3"), 4, ("auto", 3)),
        (("--device", "cuda", "--tp", "2"), 2, ("unified", 1)),
        (("--device", "cuda", "--tp", "2"), 4, ("auto", 2)),
        (("--device", "cuda", "--tp", "4"), 8, ("auto", 2)),
        (("--device", "cuda", "--tp", "2", "--gpus", "0,1,0,1"), 2, ("unified", 1)),
        (("--device", "cuda", "--tp", "2", "--layout", "auto", "--gpus", "0,1,0,1"), 2, ("auto", 2)),
        (("--device", "cuda", "--layout", "unified"), 4, ("unified", 1)),
    ],
)
def test_several_gpus_are_for_the_auto_layout(
    flags: tuple[str, ...], gpus: int, expected: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configuration, "visible", lambda: gpus)
    config = served(*flags)
    assert (config.layout, config.workers) == expected


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--layout", "auto", "--prefill", "1"), "--prefill: needs --layout split, and this one is auto"),
        (("--layout", "auto", "--transfer", "none"), "--transfer: none keeps pages where --layout auto"),
        (("--ttft-target", "2"), "--ttft-target: needs --layout auto, and this one is split"),
        (
            ("--layout", "unified", "--tpot-target", "2"),
            "--tpot-target: needs --layout auto, and this one is",
        ),
    ],
)
def test_what_the_auto_layout_cannot_have_is_refused(flags: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        served(*flags)
    assert says in refused.value.message and refused.value.param == says[2:].partition(":")[0]


@pytest.mark.parametrize(("gpus", "seen"), [(0, "0"), (1, "1")])
def test_why_a_layout_is_not_auto_is_said(gpus: int, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "visible", lambda: gpus)
    with pytest.raises(ConfigError, match=f"this one is unified, as is usual where GPUs are seen: {seen}"):
        served("--device", "cuda", "--ttft-target", "0.5")


@pytest.mark.parametrize("value", ["0", "-1", "x", "nan", "inf"])
def test_a_target_is_a_time(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        served("--layout", "auto", f"--ttft-target={value}")
    assert f"--ttft-target: {value!r} is not a number of seconds above 0" in capsys.readouterr().err


def test_auto_workers_have_all_roles_and_their_gateway_the_targets() -> None:
    config = served("--layout", "auto", "--workers", "3", "--ttft-target", "0.5", "--tpot-target", "0.02")
    made = plan(config, itertools.count(7000), HostResources(4))
    assert [worker.engine.roles for worker in made.workers.values()] == [tuple(Role)] * 3
    told = (made.gateway.layout, made.gateway.ttft_target, made.gateway.tpot_target)
    assert told == ("auto", 0.5, 0.02)
    args = cli._parser().parse_args(gateway_argv(made.gateway))
    assert configuration.gateway_alone(args) == made.gateway


def test_a_gateway_alone_may_be_told_of_the_auto_layout() -> None:
    args = cli._parser().parse_args(["gateway", "--registry", "static:127.0.0.1:1", "--tpot-target", "1"])
    with pytest.raises(ConfigError, match="--tpot-target: needs --layout auto, and this one is static"):
        configuration.gateway_alone(args)


def test_a_gateway_without_any_worker_is_refused() -> None:
    """As where a shell's variable is empty: it would wait for ever."""
    args = cli._parser().parse_args(["gateway", "--registry", "static:"])
    with pytest.raises(ConfigError, match="--registry: static: lists no worker"):
        configuration.gateway_alone(args)
