"""What one request that asks for more costs the others: milliseconds of a step of 32 sequences.

    python -m tests.gpu.time_special_rows [--shape llama-3.1-8b] [--tokens 200]

Greedy answers to short prompts, dummy weights, without drafts and with chains of 3: all alike; with one that
asks for log-probabilities and penalties; with one that turns drafting off; with only such ones. A step's time
is that of a whole answer over the steps of a request that asks for nothing. The engine is used by its
requests alone, so the same file measures another version.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from eyas.common.config import SpeculationConfig, resolve_engine
from eyas.common.params import SamplingParams
from eyas.common.types import GenerationRequest
from tests.unit.loopback import Loopback, wait_all

STREAMS, PROMPT, WAIT_S = 32, 40, 120
CHAIN = SpeculationConfig(steps=3, topk=1, draft_tokens=4)
ASKING = {"logprobs": 5, "presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}


def requests(name: str, tokens: int) -> list[GenerationRequest]:
    plain = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asking = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, **ASKING)  # type: ignore[arg-type]
    made = []
    for i in range(STREAMS):
        prompt = tuple(range(100 + i, 100 + i + PROMPT))
        last = i == STREAMS - 1
        params = asking if name == "one asks" and last else plain
        drafted = not (name == "none drafted" or name == "one undrafted" and last)
        made.append(GenerationRequest(f"{name} {i}", prompt, params, speculative=drafted))
    return made


def step_ms(cluster: Loopback, name: str, tokens: int) -> float:
    began = time.perf_counter()
    results = [cluster.submit(request, split=False) for request in requests(name, tokens)]
    wait_all(results, WAIT_S)
    return 1e3 * (time.perf_counter() - began) / len(results[0].entries)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--tokens", type=int, default=200)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model, head = Path(folder) / "model", Path(folder) / "head"
        command = ["-m", "eyas.bench.shapes", asked.shape, str(model), "--head", str(head)]
        subprocess.run([sys.executable, *command], check=True)
        for drafts, names in (
            (None, ("all alike", "one asks")),
            (str(head), ("all alike", "one asks", "one undrafted", "none drafted")),
        ):
            options = {"model": str(model), "draft": drafts, "load_format": "dummy", "speculation": CHAIN}
            options |= {
                "max_running": STREAMS,
                "worker": "unified",
                "context_length": 2048,
                "num_pages": 2048,
            }
            cluster = Loopback(resolve_engine("cuda", prefill_attention_backend="triton", **options))
            try:
                step_ms(cluster, "warm", asked.tokens // 4)
                for name in names:
                    found = step_ms(cluster, name, asked.tokens)
                    print(f"{'chains of 3' if drafts else 'no drafts'}, {name}: {found:.2f} ms", flush=True)
            finally:
                cluster.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
