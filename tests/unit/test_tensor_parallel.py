"""Two ranks in Triton's interpreter, against one rank of the torch backend: the same tokens and logprobs."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.errors import ConfigError, EngineError
from eyas.common.params import SamplingParams
from eyas.common.step_times import StepRates
from eyas.common.types import GenerationRequest, RequestChoice
from eyas.engine.batch.prompt_scores import ScoreRequest
from eyas.engine.batch.spans import QuerySpan
from eyas.engine.device import calls
from eyas.engine.device.executor import StepExecutor
from eyas.engine.device.rank0_executor import Rank0Executor
from eyas.engine.device.step import ArrivedState, JoinBatch, RowMasks, StepInput, StepShape
from eyas.engine.loading import build, follower
from eyas.engine.loading.spec import EngineSpec
from eyas.engine.loading.step_rates import StepLimits, measure
from eyas.engine.loop.runner import StepRunner
from eyas.engine.parallel import leader, ranks
from eyas.engine.parallel.leader import RankLeader, join_leader
from eyas.engine.parallel.ranks import FollowerMain, RankCall, RankChannel, RankInfo, follow
from tests.unit import tiny_deepseek
from tests.unit.families import write_family
from tests.unit.loopback import Loopback, Result, wait_all
from tests.unit.tiny import write_tiny_eagle, write_tiny_eagle3, write_tiny_llama
from tests.unit.tiny_deepseek import write_tiny_deepseek
from tests.unit.tiny_dflash import write_tiny_dflash, write_tiny_dspark
from tests.unit.tiny_mtp import write_tiny_mimo
from tests.unit.tiny_peagle import write_tiny_peagle

pytestmark = pytest.mark.slow

RANKS = 2
SMALL = EngineConfig(
    draft=None, num_pages=32, max_running=4, chunk_tokens=16, context_length=128, worker="whole"
)
SHARED = replace(
    SMALL,
    attention_backend="triton",
    prefill_attention_backend="triton",
    overlap_schedule=True,
    tensor_parallel_size=RANKS,
    transfer="none",  # an interpreted rank's pool is on no GPU
    worker="shared",
)
PROMPT = tuple(range(7, 26))
LAYERS = ["sliding_attention", "full_attention"]
BLOCKS = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
WHOLE_BLOCKS = tiny_deepseek.WHOLE | {
    "vocab_size": 256,
    "num_hidden_layers": 1,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
}
DEEPSEEK = tiny_deepseek.SMALL | {"vocab_size": 64, "num_hidden_layers": 2, "n_routed_experts": 8}


def _interpreted(loaded: EngineSpec, rank_info: RankInfo, channel: RankChannel) -> None:
    """A follower whose kernels are interpreted as this process's are."""
    from tests.unit import interpreted

    interpreted.install()
    follower.main(loaded, rank_info, channel)


@pytest.fixture
def followers_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "main", _interpreted)


def _answers(config: EngineConfig, requests: Sequence[GenerationRequest]) -> list[Result]:
    cluster = Loopback(config)
    try:
        results = [cluster.submit(request, split=False) for request in requests]
        wait_all(results, 300)
    finally:
        cluster.close()
    return results


def _request(name: str, tokens: int, choices: int = 1, **params: Any) -> GenerationRequest:
    wanted = SamplingParams(**({"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True} | params))
    return GenerationRequest(name, PROMPT, wanted, tuple(RequestChoice(i) for i in range(choices)))


def _logprobs(result: Result) -> torch.Tensor:
    """Of the best ids at every token, choice by choice."""
    entries = sorted(result.entries, key=lambda entry: (entry.choice, entry.index))
    return torch.tensor([[value for _, value in one.top] for entry in entries for one in entry.logprobs])


def _prompt_logprobs(result: Result) -> torch.Tensor:
    (told,) = [entry.prompt for entry in result.entries if entry.prompt is not None]
    return torch.tensor([[row.logprob, *(value for _, value in row.top)] for row in told.rows()])


def _dummy_with_biases(folder: Path) -> dict[str, Any]:
    """A model of the wide path, whatever the rows; its biases are ones."""
    write_tiny_llama(folder, layers=2)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    return {"model": str(folder), "load_format": "dummy"}


@pytest.mark.slow
@pytest.mark.parametrize("path", ["narrow", "wide", "norms around", "experts", "latents and experts"])
def test_two_ranks_give_what_one_gives(tmp_path: Path, path: str, followers_interpret: None) -> None:
    """Special rows, forked choices whose pages are copied, tokens chosen on the device."""
    model = {"model": str(write_tiny_llama(tmp_path, layers=2, tied=False))}
    if path == "wide":
        model = _dummy_with_biases(tmp_path / "biased")
    if path == "norms around":
        write_family(tmp_path / "gemma", "gemma3", vocab_size=64, num_hidden_layers=2, layer_types=LAYERS)
        model = {"model": str(tmp_path / "gemma")}
    if path == "experts":
        write_family(tmp_path / "experts", "mixtral", vocab_size=64, num_hidden_layers=2)
        model = {"model": str(tmp_path / "experts")}
    if path == "latents and experts":
        write_tiny_deepseek(tmp_path / "deepseek", DEEPSEEK)
        model = {"model": str(tmp_path / "deepseek")}
    requests = [
        _request("special", 3, logprobs=5, logit_bias={11: 100.0}, prompt_logprobs=5),
        _request("forks", 3, choices=2, logprobs=5, temperature=1.0, seed=3),
        _request("plain", 6, temperature=1.0, seed=4),
    ]
    ours, wanted = (_answers(replace(config, **model), requests) for config in (SHARED, SMALL))
    assert [result.tokens for result in ours] == [result.tokens for result in wanted]
    assert len(ours[1].tokens) == 2 and ours[1].tokens[0] != ours[1].tokens[1]
    for mine, theirs in zip(ours[:2], wanted[:2], strict=True):
        torch.testing.assert_close(_logprobs(mine), _logprobs(theirs), atol=1e-4, rtol=0)
    mine, theirs = (_prompt_logprobs(results[0]) for results in (ours, wanted))
    assert len(mine) == len(PROMPT) - 1
    torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dense", [1, 0])
def test_latents_in_fp8_are_what_one_rank_has(tmp_path: Path, dense: int, followers_interpret: None) -> None:
    """In float32, because a sum over ranks is rounded. A rounded bf16 sum changes many roundings to FP8: the
    logits of eight layers of noise then differ by tenths, and a comparison shows nothing.
    """
    write_tiny_deepseek(tmp_path, WHOLE_BLOCKS | {"first_k_dense_replace": dense})
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | {"quantization_config": BLOCKS}))
    config = replace(SHARED, model=str(tmp_path), load_format="dummy")
    requests = [_request("free", 4, logprobs=5), _request("given", 4, logprobs=5, logit_bias={11: 100.0})]
    one, two = (_answers(replace(config, tensor_parallel_size=ranks), requests) for ranks in (1, RANKS))
    assert [result.tokens for result in two] == [result.tokens for result in one]
    for mine, theirs in zip(two, one, strict=True):
        torch.testing.assert_close(_logprobs(mine), _logprobs(theirs), atol=1e-4, rtol=0)


@pytest.mark.slow
def test_ranks_whose_steps_were_measured_give_what_one_gives(
    tmp_path: Path, followers_interpret: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As workers of the auto layout are, before they serve."""
    rates = []

    def measured(
        runner: StepRunner, config: EngineConfig, most: StepLimits, grain: int = 1
    ) -> StepRates | None:
        rates.append(measure(runner, config, StepLimits(2, 12, 64), grain))
        return rates[-1]

    model = {"model": str(write_tiny_llama(tmp_path, layers=2, tied=False))}
    wanted = _answers(replace(SMALL, **model), [_request("plain", 6, temperature=1.0, seed=4)])
    monkeypatch.setattr(build, "_rates", measured)
    ours = _answers(replace(SHARED, **model), [_request("plain", 6, temperature=1.0, seed=4)])
    assert [result.tokens for result in ours] == [result.tokens for result in wanted]
    assert rates[0] is not None and rates[0].times.step_s(1, 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["shared_head", "own_head", "mapped", "eagle_2", "mtp", "dflash", "dspark", "peagle", "whole"]
)
def test_two_ranks_draft_what_one_drafts(tmp_path: Path, kind: str, followers_interpret: None) -> None:
    """With the target's lm_head, tied to its embedding, with one of the head's own; and other kinds of heads.

    Head and target see the same noise at a temperature, so even a random head is right now and then.
    """
    model = head = tmp_path / "model"
    if kind == "mtp":
        write_tiny_mimo(model, layers=4)
    else:
        write_tiny_llama(model, layers=4)
        head = tmp_path / "head"
        if kind == "eagle_2":
            write_tiny_eagle(head, model)
        elif kind == "dflash":
            write_tiny_dflash(head, model, reads=(1, 2, 4), draft_vocab=128)
        elif kind == "dspark":
            write_tiny_dspark(head, model, "gated", reads=(1, 2, 4))
        elif kind == "peagle":
            write_tiny_peagle(head, model, layers=2, draft_vocab=128)
        elif kind == "whole":
            write_tiny_llama(head, layers=2, seed=5)
        else:
            write_tiny_eagle3(head, model, draft_vocab=128 if kind == "own_head" else None)
    changes = {"model": str(model), "draft": str(head), "speculation": SpeculationConfig(2, 1, 3)}
    if kind == "mapped":
        changes["speculative_token_map"] = str(_token_map(tmp_path / "ids.txt"))
    requests = [_request("drafted", 12, temperature=1.5, seed=0)]
    (ours,), (wanted,) = (_answers(replace(config, **changes), requests) for config in (SHARED, SMALL))
    assert ours.tokens == wanted.tokens
    assert _accepted(ours) == _accepted(wanted)
    assert sum(_accepted(ours).values()) > 0


def _token_map(file: Path) -> Path:
    """Ids in no order, of both ranks' rows, and not as many of each."""
    ids = torch.randperm(200, generator=torch.Generator().manual_seed(4))[:96].tolist()
    file.write_text("\n".join(map(str, ids)))
    return file


def _accepted(result: Result) -> dict[int, int]:
    """By place, of the rounds whose drafts the end does not cut short."""
    return {entry.index: entry.accepted for entry in result.entries if 0 < entry.index < 9}


# --- calls -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunks", [0, 1, 3])
def test_a_step_arrives_as_it_was_sent(chunks: int) -> None:
    numbers = np.random.default_rng(chunks)
    shape = StepShape(5, 4, 48 * chunks, chunks, chunks, singles=2 * chunks)
    data = numbers.integers(-(2**31), 2**31, shape.sections["all"][1]).astype(np.int32)
    writes = numbers.integers(-9, 9, (2, 7 * chunks)).astype(np.int32)
    spans = [QuerySpan(list(range(i, 3 * i + 1)), 16 * i, 48) for i in range(chunks)]
    held = list(range(2, 2 + chunks))
    new = [ArrivedState(i, 64 * i, 64 * i + 5) for i in range(chunks)]
    step = StepInput(shape, data, writes, spans=spans, scored=chunks == 3, drafted_slots=held, arrived=new)
    step = replace(step, forced=list(range(6 * chunks)))
    found = calls.step_of(calls.begin(step))
    assert (found.shape, found.spans, found.scored) == (shape, spans, step.scored)
    assert (found.drafted_slots, found.arrived, found.forced) == (held, new, step.forced)
    assert np.array_equal(found.data, data) and np.array_equal(found.writes, writes)


def test_rows_to_be_scored_arrive() -> None:
    asked = ScoreRequest(7, range(40, 43), (2**31 - 1, 0, 5), 20)
    assert calls.score_request_of(calls.score(asked)) == asked


def test_special_rows_arrive() -> None:
    rows = np.arange(-5, 3, dtype=np.int32).reshape(2, 4)
    assert np.array_equal(calls.rows_of(calls.sample(rows)), rows)
    masked = calls.masked_of(calls.mask(RowMasks(rows[:, 0], rows)))
    assert np.array_equal(masked.places, rows[:, 0]) and np.array_equal(masked.masks, rows)


def test_those_who_join_arrive() -> None:
    words, features = np.arange(8, dtype=np.int32).reshape(4, 2), np.array([[0.5, -1.5, 3e9]] * 2, np.float32)
    writes = np.array([[7, 9], [1, -1]], np.int32)
    joined = calls.joined_of(calls.join(JoinBatch(words, features, 3, writes)))
    assert np.array_equal(joined.words, words) and np.array_equal(joined.features, features)
    assert np.array_equal(joined.writes, writes) and joined.width == 3
    assert calls.features([3, 5]).numbers == (3, 5)


# --- a follower that is gone -------------------------------------------------------------------------------


def _idle(rank_info: RankInfo, channel: RankChannel) -> None:
    group = join_leader(rank_info, channel, "cpu", 60.0)
    assert group is not None
    follow(channel, {"die": lambda call: os.kill(os.getpid(), signal.SIGKILL)})
    group.close()


def _early(rank_info: RankInfo, channel: RankChannel) -> None:
    """Ends between its join and its first answer, as one does that finds no room for its weights."""
    join_leader(rank_info, channel, "cpu", 60.0)
    raise ConfigError("no room for the weights")


def leading(main: FollowerMain, folder: Path) -> RankLeader:
    """Two ranks that have met."""
    led = RankLeader(main, 2, folder / "meeting")
    led.meet("cpu", 60.0, 60.0)
    return led


NEVER = SimpleNamespace(query=lambda: False)


@pytest.fixture
def no_group_is_left() -> Iterator[None]:
    """The group that a lead leaves as it stands is given up after the test."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("no_group_is_left")
def test_a_rank_that_waits_for_a_device_hears_of_a_dead_follower(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    led = leading(_idle, tmp_path)
    led.tell(RankCall("die"))
    with pytest.raises(EngineError, match="rank 1 of 2 has ended: killed by SIGKILL"):
        led.wait(NEVER)
    monkeypatch.setattr(ranks, "LEAVE_S", 60.0)
    began = time.monotonic()
    led.close()
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("no_group_is_left")
def test_a_step_has_a_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(leader, "STEP_S", 0.3)
    led = leading(_idle, tmp_path)
    with pytest.raises(EngineError, match="have not done a step in 0.3 s"):
        led.wait(NEVER)
    led.close()


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("asked", ["synchronize", "query"])
def test_a_device_that_fails_is_no_more_waited_for(
    asked: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As one whose kernel has waited in vain for a peer that still lives: any call to it raises, or hangs."""
    monkeypatch.setattr(leader, "LOST_S", 0.3)

    def failed() -> bool:
        raise RuntimeError("CUDA error: unspecified launch failure")

    led = leading(_idle, tmp_path)
    with pytest.raises(EngineError, match="could not do a step together: CUDA error"):
        getattr(leader.WatchedEvent(SimpleNamespace(query=failed), led), asked)()  # type: ignore[arg-type]
    assert not led.whole
    led.close()


@pytest.mark.usefixtures("no_group_is_left")
@pytest.mark.parametrize("failure", [RuntimeError("CUDA out of memory"), ValueError("too many rows")])
def test_what_rank_zero_alone_cannot_do_is_done_together_no_more(
    failure: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The followers are in the middle of it, and wait for rank 0: nothing may wait for them."""
    monkeypatch.setattr(leader, "LOST_S", 0.3)
    led = leading(_idle, tmp_path)
    executor = object.__new__(Rank0Executor)
    executor._leader, executor.state = led, SimpleNamespace(sharers=None)  # type: ignore[assignment]
    with (
        mock.patch.object(StepExecutor, "copy_page", side_effect=failure),
        mock.patch.object(led, "tell"),
        pytest.raises((EngineError, ValueError), match=str(failure)),
    ):
        executor.copy_page(1, 2)
    assert not led.whole
    led.close()


@pytest.mark.usefixtures("no_group_is_left")
def test_a_follower_that_cannot_load_says_why(tmp_path: Path) -> None:
    led = leading(_early, tmp_path)
    with pytest.raises(EngineError, match="ConfigError: no room for the weights"):
        led.group.least(5)
    led.close()


# --- what is refused ---------------------------------------------------------------------------------------


def test_the_torch_backend_runs_on_one_gpu() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size: --attention-backend torch"):
        resolve_engine("cuda", attention_backend="torch", tensor_parallel_size=2)


def test_a_cpu_has_one_rank() -> None:
    with pytest.raises(ConfigError, match="--tensor-parallel-size: 2 needs a GPU"):
        resolve_engine("cpu", tensor_parallel_size=2)


@pytest.mark.parametrize(("kv_heads", "ranks", "folder"), [((2, 2), 4, "model"), ((2, 1), 2, "head")])
def test_every_rank_has_kv_heads_of_its_own(
    tmp_path: Path, kv_heads: tuple[int, int], ranks: int, folder: str
) -> None:
    """Of the model and of its head; otherwise it is said before any rank starts."""
    model = write_tiny_llama(tmp_path / "model", kv_heads=kv_heads[0])
    head = write_tiny_eagle3(tmp_path / "head", model)
    told = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(told | {"num_key_value_heads": kv_heads[1]}))
    config = replace(SHARED, model=str(model), draft=str(head), tensor_parallel_size=ranks)
    heads = f"{min(kv_heads)} key and value heads cannot be divided among {ranks} ranks"
    with pytest.raises(ConfigError, match=f"--tensor-parallel-size: {folder}: {heads}") as refused:
        EngineSpec.of(config)
    assert refused.value.param == "tensor-parallel-size"
