"""Engines of the 8B shape in either arithmetic, and answers that are compared to the token.

A way is an arithmetic and how drafts are made. It knows engines, requests and answers; what is asked in which
company is the scripts' own.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from eyas.bench.shapes import SHAPES, write_head, write_model
from eyas.common.config import EngineConfig, SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit.loopback import Loopback, Result

DRAFTS = {
    "plain": None,
    "chain 3": SpeculationConfig(steps=3, topk=1, draft_tokens=4),
    "tree 32": SpeculationConfig(steps=4, topk=8, draft_tokens=32),
}
GPTQ = {
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "biases": {"attention_bias": True},
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "rope_scaling": None,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "fp8": {
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
    },
    "hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5",
        "head_dim": 256,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 12288,
        "rope_scaling": None,
        "mtp_num_hidden_layers": 1,
    },
    "int4": GPTQ,
    "int4-head": GPTQ,
    "latents": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "head_dim": 64,
        "num_key_value_heads": 32,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "rope_scaling": None,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_intermediate_size": 768,
        "num_nextn_predict_layers": 0,
    },
}
"""What the model's config.json says beside its sizes."""
HEADS_TOO = ("int4-head",)
"""Kinds of which the heads are too."""
OWN_HEADS = ("hybrid",)
"""Kinds whose folders have heads of their own, in place of one of EAGLE-3."""
ONE_WAY = ("fp8", "latents")
"""Kinds whose layers have one way for any number of rows, with grouped products."""
LENGTHS = ((40, 5, 120), (8, 120, 600), (2, 600, 2300), (1, 2300, 5000))  # weight, shortest, longest prompt
ANSWER = (24, 72)
LOOK_S = 0.02


@dataclass(frozen=True)
class Way:
    """`layers`: of the model, if not all; `rates`: drafts are accepted by this chance, for timing."""

    arithmetic: str
    drafts: str = "plain"
    layers: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.arithmetic}, {self.drafts}"


@dataclass(frozen=True)
class Bed:
    """Where engines run: the device, a shape of `eyas.bench.shapes`, a folder for what is written, and one of
    `KINDS`. `layers`: of the models of ways that do not say it, if not all.
    """

    device: str
    shape: str
    folder: Path
    kind: str = "dense"
    layers: int = 0

    def written(self, layers: int = 0) -> tuple[Path, Path]:
        """The folders of the model and of its head. Processes that run at the same time find them written."""
        shape = SHAPES[self.shape]
        if layers or self.layers:
            shape = replace(shape, layers=layers or self.layers)
        model, head = (self.folder / f"{name}-{shape.layers}" for name in ("model", "head"))
        if not (model / "tokenizer_config.json").exists():
            write_model(shape, model)
            write_head(shape, head)
            for folder in (model, head) if self.kind in HEADS_TOO else (model,):
                told = json.loads((folder / "config.json").read_text()) | KINDS[self.kind]
                (folder / "config.json").write_text(json.dumps(told))
        return model, head

    def config(self, way: Way, **options: Any) -> EngineConfig:
        """Of one engine, in its process alone."""
        model, head = self.written(way.layers)
        drafts = DRAFTS[way.drafts]
        if drafts is not None:
            drafts = replace(drafts, synthetic_rates=(way.rate,) * drafts.steps if way.rate else ())
            options |= {
                "draft": str(model if self.kind in OWN_HEADS else head),
                "speculation": drafts,
            }
        if self.device != "cpu":
            options = {"prefill_attention_backend": "triton"} | options
            options["deterministic"] = way.arithmetic == "exact"
        usual = {
            "draft": None,
            "model": str(model),
            "load_format": "dummy",
            "worker": "unified",
            "transfer": "none",
        }
        return resolve_engine(self.device, **(usual | {"context_length": self.context} | options))

    @property
    def vocabulary(self) -> int:
        return SHAPES[self.shape].vocab

    @property
    def context(self) -> int:
        return min(8192, SHAPES[self.shape].context)


def asked(bed: Bed, count: int) -> list[GenerationRequest]:
    """Prompts of very different lengths; every second answer is seeded, with filters of several kinds, and
    every fourth comes with log-probabilities, of which every bit counts.
    """
    found = []
    for i in range(count):
        dice = random.Random(i)
        (_, least, most) = dice.choices(LENGTHS, [weight for weight, *_ in LENGTHS])[0]
        length = min(dice.randint(least, most), bed.context // 2)
        prompt = tuple(dice.randrange(10, bed.vocabulary - 300) for _ in range(length))
        noise = {"temperature": 0.8, "seed": i, **dice.choice(({}, {"top_p": 0.9}, {"top_k": 50}))}
        fields = noise if i % 2 else {"temperature": 0.0}
        fields |= {"logprobs": 0} if i % 8 in (2, 5) else {}
        params = SamplingParams(max_tokens=dice.randint(*ANSWER), ignore_eos=True, **fields)
        found.append(GenerationRequest(f"{i}", prompt, params))
    return found


@dataclass
class Ledger:
    """What was first said to each request, and by which company; every later answer is held against it."""

    said: dict[str, tuple[str, list[float]]] = field(default_factory=dict)
    compared: int = 0
    differing: int = 0

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """An empty one if there is none."""
        return cls(**json.loads(path.read_text())) if path.exists() else cls()

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    def tokens(self, request: GenerationRequest) -> tuple[int, ...]:
        """What is known of its answer; (): nothing."""
        _, said = self.said.get(request.id, ("", []))
        return tuple(int(token) for token in said[: request.params.max_tokens])

    def add(self, company: str, key: str, result: Result, moved: int = 0) -> dict[str, Any] | None:
        """The first difference, if there is one: behind the answer's tokens stand its log-probabilities. An
        answer that was `moved` has none of as many first tokens.
        """
        values = [one.logprob for entry in result.entries for one in entry.logprobs]
        tokens: list[float] = [*result.tokens[0], *values]
        if key not in self.said:
            self.said[key] = (company, tokens)
            return None
        other, known = self.said[key]
        count = len(result.tokens[0])
        known = [*known[:count], *known[count + moved :]]
        self.compared += 1
        if tokens == known:
            return None
        self.differing += 1
        pairs = zip(known, tokens, strict=False)
        place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(known), len(tokens)))
        return {"request": key, "first said": other, "now": company, "place": place, "of": len(known)}


class Engine(Loopback):
    """One engine on this process's device; answers come back in the order in which they were asked for."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        (self.worker,) = self.workers.values()
        self._turn = 0
        while self.worker.ready is None:
            time.sleep(LOOK_S)

    @property
    def preemptions(self) -> int:
        """Since its start."""
        return self.worker.load.preemptions if self.worker.load else 0

    def flow(
        self, requests: Iterable[GenerationRequest], at_once: int, ends_at: float, gap_s: float = 0.0
    ) -> Iterator[tuple[GenerationRequest, Result]]:
        """At most `at_once` run at a time, and come with random gaps; after `ends_at` no more are begun.

        Raises RuntimeError for a request that fails, or does not end within a minute.
        """
        begun: list[tuple[GenerationRequest, Result]] = []
        running: list[Result] = []
        dice = random.Random(7)
        for request in requests:
            while len(running) >= at_once:
                running = [result for result in running if not result.done.wait(LOOK_S / at_once)]
            if time.monotonic() > ends_at:
                break
            self._turn += 1
            running.append(self.submit(msgspec.structs.replace(request, id=f"{self._turn}"), split=False))
            begun.append((request, running[-1]))
            time.sleep(dice.expovariate(1 / gap_s) if gap_s else 0.0)
        for request, result in begun:
            if not result.done.wait(60.0) or result.failure is not None:
                raise RuntimeError(f"request {request.id}: {result.failure or 'no answer within a minute'}")
            yield request, result
