"""`--spec-adaptive` and `--no-spec-adaptive`: where depths adapt if no flag says so."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

import pytest

from eyas import cli, configuration
from eyas.cluster.plan import HostResources, plan
from eyas.common.config import GatewayConfig
from eyas.peers.reading import read

GPU = ("--device", "cuda")
CHANCE = ("--rejection-sample-method", "synthetic", "--synthetic-acceptance-length", "3")


def parse(*words: str) -> argparse.Namespace:
    return cli._parser().parse_args(words)


def served(*flags: str) -> bool:
    return configuration.serve_config(parse("serve", *flags), GatewayConfig()).engine.speculation.adaptive


@pytest.mark.parametrize(
    ("flags", "adapts"),
    [
        (("--layout", "unified"), True),
        (GPU, True),
        ((*GPU, "--layout", "split"), True),
        (("--draft", "ngram"), True),  # looked up where it is decoded
        ((), False),  # on a CPU draft workers draft
        ((*GPU, "--layout", "split", "--draft-workers", "1"), False),
        ((*GPU, "--draft", "none"), False),
        ((*GPU, *CHANCE), False),
    ],
)
def test_depths_adapt_wherever_drafts_are_made_beside_the_target(
    flags: tuple[str, ...], adapts: bool
) -> None:
    assert served(*flags) == adapts


@pytest.mark.parametrize("flags", [GPU, ()])
def test_flags_decide(flags: tuple[str, ...]) -> None:
    assert served(*flags, "--spec-adaptive") and not served(*flags, "--no-spec-adaptive")
    assert not served(*GPU, "--no-speculative-adaptive")


@pytest.mark.parametrize("name", ["spec-adaptive", "speculative-adaptive", "speculative_adaptive"])
def test_a_file_may_fix_the_depth(name: str, tmp_path: Path) -> None:
    """A flag that is false in a file is its opposite."""
    (tmp_path / "flags.yaml").write_text(f"{name}: false\n")
    parser = next(a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    line = read(parser.choices["serve"], ["--config", str(tmp_path / "flags.yaml")])
    assert "--no-spec-adaptive" in line.words


@pytest.mark.parametrize(("roles", "adapts"), [("decode", False), ("decode,draft", True), ("draft", False)])
def test_a_worker_adapts_if_it_drafts_for_itself(roles: str, adapts: bool) -> None:
    worker = configuration.worker_config(parse("worker", "--roles", roles))
    assert worker.engine.speculation.adaptive == adapts


def test_a_cluster_says_it_to_its_workers() -> None:
    config = configuration.serve_config(parse("serve", "--layout", "unified"), GatewayConfig())
    (worker,) = plan(config, itertools.count(1), HostResources(cores=2)).workers.values()
    assert worker.engine.speculation.adaptive
