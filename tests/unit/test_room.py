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
from eyas.engine.loading.build import build_engine
from eyas.engine.loop.engine import Engine

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


def build(config: EngineConfig, num_pages: int) -> int:
    """Tokens of the longest request that the engine takes."""
    engine = build_engine(replace(config, num_pages=num_pages), QueueLink(lambda event: None))
    assert isinstance(engine, Engine)
    engine._close()
    return engine._parts.ready.context_length


def test_a_pool_for_no_request_at_all_is_refused(config: EngineConfig) -> None:
    with pytest.raises(ConfigError, match="--num-pages: 1 cannot hold one page of a request; it takes 2"):
        build(config, 1)
    build(config, 2)


def test_a_pool_smaller_than_the_context_is_told(
    config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="eyas.engine"):
        assert build(config, 7) == 100  # 112 rows: the context, and what two rounds of a chain of 5 may write
        assert caplog.messages == []
        assert build(config, 6) == 84  # so gateways offer and refuse what is true
    (told,) = caplog.messages
    assert "6 KV pages (--num-pages) hold a request of 84 tokens" in told and "the context has 100" in told
