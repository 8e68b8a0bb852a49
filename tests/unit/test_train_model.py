"""The training model, its export, the EAGLE-3 unroll and a tiny run of every stage."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import eyas
from eyas.common.errors import ConfigError
from eyas.train.heads.base import TrainingBatch
from eyas.train.model import LlamaShape
from eyas.train.recipe import TrainingRecipe
from eyas.train.saving import TrainingCheckpoint
from eyas.train.unroll import UnrolledKv, unrolled_attention, unrolled_step
from tools.nano.build import TINY, train_nano
from tools.nano.files import STOP, load_head, load_target, read_config, save_head, save_target
from tools.nano.generate import AcceptanceCounts, HeadRows, SamplingOptions, draft_chain, generate, speculate
from tools.nano.head import UNROLL, head_of, train_head
from tools.nano.model import NanoModel
from tools.nano.target import TargetRun
from tools.nano.tokenizer import ANSWER_BIT, load_tokenizer, render

ASSETS = Path(eyas.__file__).parent / "assets"
SMALL = LlamaShape(
    hidden=64, layers=8, heads=4, kv_heads=2, head_dim=16, intermediate=96, vocab=128, context=256
)
GREEDY = SamplingOptions(stop=(), max_new=12)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def small() -> NanoModel:
    torch.manual_seed(0)
    model = NanoModel(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    return model


def test_exported_folder_loads_in_transformers_with_the_same_logits(small: NanoModel, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_target(small, tmp_path)
    ours = load_target(tmp_path, "cpu")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = torch.randint(0, SMALL.vocab, (2, 40))
    hidden, features = ours(ids)
    with torch.no_grad():
        reply = theirs(ids, output_hidden_states=True)
    torch.testing.assert_close(ours.logits(hidden), reply.logits, atol=2e-4, rtol=1e-4)
    captured = torch.cat([reply.hidden_states[layer] for layer in (2, 4, 5)], -1)
    torch.testing.assert_close(features, captured, atol=2e-4, rtol=1e-4)


def test_cached_batched_generation_is_plain_recomputation(small: NanoModel) -> None:
    prompts = [[5, 6, 7], [1, 2, 3, 4, 5, 6, 7, 8], [9]]
    made = generate(small, prompts, GREEDY)
    for prompt, answer in zip(prompts, made, strict=True):
        ids = list(prompt)
        for _ in range(GREEDY.max_new):
            hidden, _ = small(torch.tensor([ids]))
            ids.append(int(small.logits(hidden[:, -1]).argmax()))
        assert answer == ids[len(prompt) :]


def test_speculation_gives_the_greedy_tokens(small: NanoModel) -> None:
    head, counts = head_of(small), AcceptanceCounts()
    prompt = [3, 1, 4, 1, 5]
    answer = speculate(small, head, prompt, GREEDY, counts)
    assert answer[: GREEDY.max_new] == generate(small, [prompt], GREEDY)[0]
    assert counts.tokens == len(answer) - 1 and counts.rounds >= 1


def _naive(q: Tensor, steps: list[tuple[Tensor, Tensor]], t: int) -> Tensor:
    keys = torch.cat([steps[0][0][:, :, : t + 1], *(key[:, :, t : t + 1] for key, _ in steps[1:])], 2)
    values = torch.cat([steps[0][1][:, :, : t + 1], *(value[:, :, t : t + 1] for _, value in steps[1:])], 2)
    scores = q[:, :, t : t + 1] @ keys.transpose(-1, -2) * q.shape[-1] ** -0.5
    return (scores.softmax(-1) @ values)[:, :, 0]


@pytest.mark.parametrize("self_fed", range(1, UNROLL))
def test_unrolled_attention_is_the_naive_loop(self_fed: int) -> None:
    torch.manual_seed(self_fed)
    steps = [(torch.randn(2, 2, 6, 4), torch.randn(2, 2, 6, 4)) for _ in range(self_fed + 1)]
    q = torch.randn(2, 2, 6, 4)
    made = unrolled_attention(q, *steps[-1], UnrolledKv.of(steps[:-1], UNROLL - 2), None)
    for t in range(6):
        torch.testing.assert_close(made[:, :, t], _naive(q, steps, t))


def test_unrolled_steps_are_the_chain_of_the_serving_loop(small: NanoModel) -> None:
    """Feeding the head its own greedy tokens in the unroll drafts what the speculative loop drafts."""
    head = head_of(small)
    ids = torch.randint(0, SMALL.vocab, (1, 12))
    with torch.no_grad():
        _, features = small(ids)
        drafts = draft_chain(head, small, HeadRows(), features[:, :11], ids[0, 1:].tolist(), 0)
        state, tokens, steps = head.fc(features[:, :11]), ids[:, 1:], []
        for step, drafted in enumerate(drafts):
            positions = torch.arange(step, step + 11)[None]
            lesson = TrainingBatch(
                embeds=small.embed_tokens(tokens),
                positions=positions,
                mask=None,
                target_logits=torch.zeros(1, 11, SMALL.vocab),
                hidden=state,
                learnt=torch.ones(1, 11, dtype=torch.bool),
            )
            past = [UnrolledKv.of(steps, UNROLL - 2)] if steps else []
            state, [made], _ = unrolled_step(head, state, lesson, past)
            steps.append(made)
            tokens = head.logits(state).argmax(-1)
            assert int(tokens[0, -1]) == drafted


@pytest.mark.slow
def test_both_trainings_lower_their_loss(small: NanoModel, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    rows = (torch.arange(49) % 7 + 3).repeat(4, 1).int() | ANSWER_BIT
    for train in (
        lambda recipe: TargetRun(small, recipe).train(iter([rows] * recipe.steps)),
        lambda recipe: train_head(head_of(small), small, iter([rows] * recipe.steps), recipe),
    ):
        caplog.clear()
        train(TrainingRecipe(steps=25, rows=4, length=48))
        losses = [float(record.getMessage().split("loss ")[1].split()[0]) for record in caplog.records]
        assert losses[-1] < 0.5 * losses[0]


def test_a_target_goes_on_where_it_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, of the same batches."""
    monkeypatch.setattr("tools.nano.target.SAVE_EVERY", 2)
    recipe, checkpoint = (
        TrainingRecipe(steps=3, rows=1, length=16),
        TrainingCheckpoint(tmp_path / "target.pt", {"steps": 3}),
    )
    rows = [torch.randint(0, SMALL.vocab, (1, 17)).int() | ANSWER_BIT for _ in range(3)]

    def run() -> TargetRun:
        torch.manual_seed(0)
        return TargetRun(NanoModel(SMALL), recipe, checkpoint)

    whole = run()
    whole.train(iter(rows))
    again = run()
    assert (whole.step, again.step) == (3, 2)
    again.train(iter(rows[2:]))
    states = [one.model.state_dict() for one in (whole, again)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert whole.history == again.history


@pytest.mark.parametrize("content", [b"", b"junk", {"step": 3}, [1, 2]], ids=str)
def test_a_file_that_is_no_checkpoint_is_refused_in_one_line(tmp_path: Path, content: object) -> None:
    path = tmp_path / "head.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ConfigError, match=r"^--resume: \S+ [^\n]*$"):
        TrainingCheckpoint(path, {"steps": 3}).load("cpu")


@pytest.mark.slow
def test_a_tiny_run_makes_both_folders(tmp_path: Path) -> None:
    (tmp_path / "nano").mkdir()
    shutil.copy(ASSETS / "nano" / "tokenizer.json", tmp_path / "nano")
    scale = replace(TINY, target=replace(TINY.target, steps=2), head=replace(TINY.head, steps=2))
    train_nano(tmp_path, scale=scale, device="cpu")
    target = load_target(tmp_path / "nano", "cpu")
    assert target.config == scale.model == read_config(tmp_path / "nano")
    load_head(tmp_path / "nano-eagle3", target)


def test_a_head_of_another_shape_is_refused(small: NanoModel, tmp_path: Path) -> None:
    save_head(head_of(NanoModel(replace(SMALL, rope_theta=5e5))), tmp_path)
    with pytest.raises(ValueError, match="does not fit"):
        load_head(tmp_path, small)


def test_the_embedded_model_answers_and_its_head_is_accepted() -> None:
    tokenizer, target = load_tokenizer(ASSETS / "nano"), load_target(ASSETS / "nano", "cpu")
    head, counts = load_head(ASSETS / "nano-eagle3", target), AcceptanceCounts()
    chat = [{"role": "user", "content": "Which city is Japan's capital?"}]
    prompt = tokenizer.encode(render(chat, True), add_special_tokens=False).ids
    answer = speculate(target, head, prompt, SamplingOptions(STOP, 40), counts)
    assert tokenizer.decode(answer) == "The capital of Japan is Tokyo." and answer[-1] in STOP
    assert counts.length > 2
