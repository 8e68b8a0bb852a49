"""Which workers a campaign strikes, in which order, and which answers it lets pass."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from eyas.common.errors import ConfigError
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest, Role
from tests.chaos.__main__ import read_site
from tests.chaos.faults import Kind, Phase, each_worker
from tests.chaos.rig import ON_CPU, UNSPLIT
from tests.chaos.streams import complete

GPUS = ["--device", "cuda", "--layout", "split", "--gpus", "0,1,0,1"]


def test_a_round_kills_and_stops_every_worker_once_and_kinds_take_turns() -> None:
    kinds = (Role.PREFILL, Role.DECODE)
    faults = list(itertools.islice(each_worker(3, kinds, 2, list(Phase)), 16))
    for faults_of_round in (faults[:8], faults[8:]):
        struck = Counter((fault.kind, fault.worker) for fault in faults_of_round)
        assert set(struck.values()) == {1} and len(struck) == 8
    assert [fault.role for fault in faults] == [*kinds] * 8
    assert faults == list(itertools.islice(each_worker(3, kinds, 2, list(Phase)), 16))
    assert faults != list(itertools.islice(each_worker(4, kinds, 2, list(Phase)), 16))


def test_the_site_follows_the_flags() -> None:
    assert read_site([]) is ON_CPU and ON_CPU.exact and ON_CPU.kinds == tuple(Role)
    gpus = read_site(GPUS)
    assert not gpus.exact and gpus.kinds == (Role.PREFILL, Role.DECODE)
    assert (gpus.config.prefill, gpus.config.decode, gpus.config.gpus) == (2, 2, (0, 1, 0, 1))
    assert gpus.config.engine.num_pages == ON_CPU.config.engine.num_pages
    assert {fault.kind for fault in itertools.islice(gpus.faults(1), 8)} == {Kind.KILL, Kind.STOP}
    alone = read_site(["--layout", "unified"])
    assert alone.kinds == ("worker",) and alone.config.workers == 2
    assert {fault.phase for fault in itertools.islice(alone.faults(1), 40)} == set(UNSPLIT)
    assert read_site(["--draft", "none"]).kinds == (Role.PREFILL, Role.DECODE)
    assert read_site(["--spec-steps", "2"]).config.draft_workers == 2
    assert read_site(["--lora-dir", "/tmp", "--max-loras", "2"]).config.engine.max_loras == 2
    with pytest.raises(ConfigError, match="decode-tp"):
        read_site(["--layout", "unified", "--decode-tp", "2"])


@pytest.mark.parametrize(("ignore_eos", "fits"), [(True, {5}), (False, {1, 2, 3, 4, 5})])
def test_an_answer_may_have_these_lengths(ignore_eos: bool, fits: set[int]) -> None:
    request = GenerationRequest("one", (1, 2), SamplingParams(max_tokens=5, ignore_eos=ignore_eos))
    assert {count for count in range(8) if complete(request, (7,) * count)} == fits
