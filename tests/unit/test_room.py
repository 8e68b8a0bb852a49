"""A pool that is too small for what is promised says so at the start, or is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from loopback import QueueLink
from tiny import write_tiny_eagle3, write_tiny_llama

from eyas.common.config import EngineConfig
from eyas.common.errors import ConfigError
from eyas.engine.build import build_engine

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    write_tiny_llama(tmp_path / "target")
    write_tiny_eagle3(tmp_path / "head", tmp_path / "target")
    (tmp_path / "pools").mkdir()
    return EngineConfig(
        model=str(tmp_path / "target"),
        draft=str(tmp_path / "head"),
        context_length=100,
        chunk_tokens=16,
        pool_dir=str(tmp_path / "pools"),
    )


def build(config: EngineConfig, num_pages: int) -> None:
    engine = build_engine(replace(config, num_pages=num_pages), QueueLink(lambda event: None))
    engine._close()  # type: ignore[union-attr]


def test_a_pool_for_no_request_at_all_is_refused(config: EngineConfig) -> None:
    for pages in (1, 4):
        with pytest.raises(
            ConfigError, match=f"--num-pages: {pages} cannot hold any request: 5 are the least"
        ):
            build(config, pages)
    build(config, 5)


def test_a_pool_smaller_than_the_context_is_told(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="eyas.engine"):
        build(config, 9)  # 144 rows, less those that two rounds of drafts may write
        assert caplog.messages == []
        build(config, 8)
    (told,) = caplog.messages
    assert told.startswith("8 KV pages (--num-pages) hold a request of ") and told.endswith(
        "the context has 100"
    )
