"""Every family's device model on a GPU against transformers in float32: logits, and so greedy tokens.

Random models of real proportions, a few layers deep. Two prompts go the wide way in one step, then both
sequences the narrow way, a row at a time, in turn together and alone, along the tokens of the reference. A
greedy token is right if the reference gives no other a logit higher by more than `SLACK`. In bfloat16 routers
decide near ties otherwise: there rows follow the experts of the same kernels in float32 (`followed_experts`).
Families share most of their kernels: `python -m tests.gpu.warm_families` compiles each once for all of them,
by all cores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas.common.machine import gpus
from eyas.engine.kernels.launch.warm import use_cache
from eyas.engine.kernels.products import skinny
from tests.gpu.family_models import ANSWER, FAMILIES, PROMPTS, SLACK, Device, sizes_of
from tests.gpu.followed_experts import TakenExperts
from tests.unit.families import write_family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no GPU here"),
]


@dataclass(frozen=True)
class Reference:
    """A model's folder, prompts, and transformers' logits: float32 [prompt + answer, vocab] for each."""

    folder: Path
    prompts: list[list[int]]
    logits: list[torch.Tensor]

    @classmethod
    def of(cls, folder: Path, family: str, device: str = "cuda", **sizes: Any) -> Reference:
        """Its greedy answers are appended to the prompts."""
        changes = sizes_of(family) | sizes
        model = write_family(folder, family, std=changes["hidden_size"] ** -0.5, **changes)
        if family.startswith("gemma4"):
            _scale_scores(model)
            model.save_pretrained(folder)
        model = model.to(device)
        generator = torch.Generator().manual_seed(1)
        prompts, logits = [], []
        for length in PROMPTS:
            ids = torch.randint(changes["vocab_size"], (1, length), generator=generator).to(device)
            whole = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ANSWER,
                do_sample=False,
                pad_token_id=0,
            )
            with torch.no_grad():
                logits.append(model(whole).logits[0])
            prompts.append(whole[0].tolist())
        return cls(folder, prompts, logits)


def _scale_scores(model: torch.nn.Module) -> None:
    """Makes scores as wide as those of other families: Gemma 4 divides them by nothing, and gains that were
    not trained make each row see one key, which in bfloat16 is sometimes another one, transformers' too.
    """
    with torch.no_grad():
        for name, gain in model.named_parameters():
            if name.endswith(".q_norm.weight"):
                gain.mul_(gain.numel() ** -0.5)


@pytest.fixture(scope="module")
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """One family's. Kernels that `warm_families` has not compiled are, when they are launched."""
    use_cache(gpus.capability("cuda"))
    return Reference.of(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("dtype", SLACK)
@pytest.mark.parametrize("reference", FAMILIES, indirect=True)
def test_logits_are_transformers(reference: Reference, dtype: str) -> None:
    taken = TakenExperts()
    with taken.recorded():
        check(reference, Device(reference.folder, torch.float32), SLACK["float32"])
    if dtype != "float32":
        with taken.followed():
            check(reference, Device(reference.folder, getattr(torch, dtype)), SLACK[dtype])


def check(reference: Reference, device: Device, slack: float) -> None:
    """Raises AssertionError with the greatest error, if it is too great, or a greedy token is wrong."""
    assert device.model.few_rows == skinny.MAX_ROWS
    found = device.prompts([prompt[:-ANSWER] for prompt in reference.prompts])
    worst, spread = 0.0, min(float(logits.std()) for logits in reference.logits)
    assert spread > 0.02, "the logits say too little"
    slack *= min(spread, 1.0)
    for step in range(ANSWER):
        lengths = [len(prompt) - ANSWER + step for prompt in reference.prompts]
        expected = torch.stack([x[n - 1] for x, n in zip(reference.logits, lengths, strict=True)])
        worst = max(worst, float((found - expected).abs().max()))
        chosen = expected.gather(1, found.argmax(1, keepdim=True))[:, 0]
        assert (expected.amax(1) - chosen).max() <= slack, f"a greedy token is wrong at step {step}"
        tokens = [prompt[n] for prompt, n in zip(reference.prompts, lengths, strict=True)]
        found = (device.alone if step % 2 else device.rounds)(tokens, lengths)
    print(f"greatest error {worst:.5f} of logits with a standard deviation of {spread:.2f}")
    assert worst < slack
