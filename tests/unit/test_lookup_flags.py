"""`--draft ngram|suffix`, `--spec-ngram`, `--spec-suffix`: what they mean, how they travel, their faults."""

from __future__ import annotations

import argparse
import dataclasses
import itertools

import pytest

from eyas import cli, configuration
from eyas.cluster.plan import HostResources, plan, worker_argv
from eyas.common.config import EngineConfig, GatewayConfig, SpeculationConfig, WorkerConfig
from eyas.common.errors import ConfigError


def parse(*words: str) -> argparse.Namespace:
    return cli._parser().parse_args(words)


def test_alone_no_draft_worker_is_started() -> None:
    alone = configuration.serve_config(parse("serve", "--draft", "ngram"), GatewayConfig())
    assert alone.engine.draft is None and alone.engine.speculation.ngram and alone.engine.speculates
    assert alone.layout == "split"
    assert list(plan(alone, itertools.count(1), HostResources(cores=2)).workers) == ["prefill-0", "decode-0"]


def test_beside_a_head_it_is_asked_for() -> None:
    beside = configuration.engine_config(parse("serve", "--spec-ngram"))
    assert beside.draft == EngineConfig().draft and beside.speculation.ngram
    assert not configuration.engine_config(parse("serve")).speculation.ngram
    assert not configuration.engine_config(parse("serve", "--draft", "none")).speculates


def test_recent_answers_are_looked_into_beside_the_text() -> None:
    for flags in (["--draft", "suffix"], ["--spec-suffix"]):
        engine = configuration.engine_config(parse("serve", *flags))
        assert engine.speculation.suffix and engine.speculation.ngram and engine.speculates
        assert (engine.draft is None) == (flags[0] == "--draft")
    assert not configuration.engine_config(parse("serve", "--draft", "ngram")).speculation.suffix


@pytest.mark.parametrize("suffix", [False, True])
@pytest.mark.parametrize("draft", ["/models/h", None])
def test_a_worker_command_line_comes_back_as_its_config(draft: str | None, suffix: bool) -> None:
    spec = SpeculationConfig(steps=3, draft_tokens=4, ngram=True, suffix=suffix)
    worker = WorkerConfig(port=7001)
    engine = EngineConfig(model="/models/m", draft=draft, worker=worker.address, speculation=spec)
    worker = dataclasses.replace(worker, engine=engine)
    assert configuration.worker_config(parse(*worker_argv(worker))) == worker


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--draft", "none", "--spec-ngram"], "spec-ngram"),
        (["--draft", "none", "--spec-suffix"], "spec-suffix"),
        (["--model", "/models/m", "--spec-ngram"], "spec-ngram"),
        (["--draft", "ngram", "--spec-topk", "2", "--spec-draft-tokens", "6"], "spec-topk"),
    ],
)
def test_what_does_not_go_together_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=f"--{named}") as refused:
        configuration.engine_config(parse("serve", *flags))
    assert refused.value.param == named
