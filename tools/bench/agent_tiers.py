"""Many sessions of agents on a GPU cache for few of them, with the host's memory behind it and without.

    python -m tools.bench.agent_tiers [--device cuda] [--sessions 64] [--fit 8] [--turns 6] [--ways few tiers]

The same requests for each way: `few` has pages for `--fit` sessions, `tiers` also host memory for all, `all`
has pages for all of them. Sessions are those of `eyas bench serve --dataset-name agents` in mid-day: a first
prompt brings all turns but the last ones, which follow. It says how much faster `tiers` is than `few`, and
its cached part of what `all` has cached. Flags that it does not know go to `eyas serve`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from eyas.bench.agents import agent_sessions, say
from eyas.bench.jobs import JobTurn, LoadJob, generator
from eyas.bench.shapes import SHAPES, write_model
from eyas.common.cluster.listening import free_ports

SEED = 1
PAGE = 16  # tokens
CHAT_TOKENS = 12  # of a template, for each message
READY, LOCKED = "is ready after", "the host cache has all of its"  # of logs; until then steps are stalled
START_S = 180.0
SPARE, HOST_SPARE = 1.2, 1.05  # of pages and of the host's memory, for what runs
EMBEDDED = Path(__file__).parents[2] / "eyas" / "assets" / "nano"
WAYS = ("few", "tiers", "all")


@dataclass(frozen=True)
class Session:
    """A conversation so far, and what follows it."""

    past: list[dict[str, str]]
    turns: Sequence[JobTurn]

    @classmethod
    def of(cls, job: LoadJob, last: int, number: int) -> Session:
        """`job` before its `last` turns and after."""
        rng = generator(SEED, f"answers {number}")
        past = [{"role": "system", "content": job.system}]
        for turn in job.turns[:-last]:
            past.append({"role": "user", "content": str(turn.prompt)})
            past.append({"role": "assistant", "content": say(rng, turn.max_tokens)})
        return cls(past, job.turns[-last:])

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of recorded sessions, as `eyas bench serve` reads them."""
        said = self.past
        for turn in self.turns:
            said = [*said, {"role": "user", "content": str(turn.prompt)}]
            yield {
                "session_id": name,
                "message_mode": "delta",
                "messages": said,
                "output_length": turn.max_tokens,
                "delay": 1e3 * turn.think_s,
            }
            said = []

    def tokens(self, tokenizer: Tokenizer) -> int:
        """At its end."""
        texts = [each["content"] for each in self.past] + [str(turn.prompt) for turn in self.turns]
        counts = [len(text.ids) for text in tokenizer.encode_batch(texts, add_special_tokens=False)]
        answers = sum(turn.max_tokens + CHAT_TOKENS for turn in self.turns)
        return sum(counts) + CHAT_TOKENS * len(texts) + answers


@dataclass(frozen=True)
class Sizes:
    """Tokens of all sessions, and of the longest; bytes of a token's KV."""

    total: int
    longest: int
    sessions: int
    token_bytes: int

    def pages(self, sessions: int) -> int:
        """Pages for this number of sessions of average length, and at least for the longest."""
        return int(SPARE * max(self.total * sessions / self.sessions, self.longest)) // PAGE

    @property
    def host_gb(self) -> float:
        """GiB for all of them."""
        return HOST_SPARE * self.total * self.token_bytes / 2**30


def token_bytes(model: Path, width: int) -> int:
    """Bytes of a token's keys and values, each of `width` bytes."""
    config = json.loads((model / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 2 * width * int(config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


def measured(way: str, sizes: Sizes, fit: int, serve: Sequence[str], folder: Path) -> dict[str, Any]:
    """The figures of one way, by a server of its own."""
    pages = sizes.pages(sizes.sessions if way == "all" else fit)
    flags = ["--layout", "unified", "--draft", "none", "--num-pages", str(pages), *serve]
    words = [READY]
    if way == "tiers":
        flags += ["--host-cache-gb", f"{sizes.host_gb:.3f}"]
        words.append(LOCKED)
    out = folder / f"{way}.jsonl"
    with served(flags, words, folder / f"{way}.log") as url:
        command = [sys.executable, "-m", "eyas.cli", "bench", "serve", "--url", url]
        command += ["--dataset-name", "agents", "--dataset-path", str(folder / "sessions.jsonl")]
        if subprocess.run([*command, "--output-file", str(out)]).returncode:
            raise SystemExit(f"{way} failed")
    figures: dict[str, Any] = json.loads(out.read_text())
    return figures


@contextlib.contextmanager
def served(flags: Sequence[str], words: Sequence[str], log: Path) -> Iterator[str]:
    """The URL of a server with these flags, once its log has all of `words`."""
    port = str(next(free_ports()))
    command = [sys.executable, "-m", "eyas.cli", "serve", "--port", port, *flags]
    print(f"\n{' '.join(command[3:])}", flush=True)
    began = time.monotonic()
    with log.open("w") as file, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT) as server:
        try:
            while missing := [word for word in words if word not in log.read_text()]:
                if server.poll() is not None or time.monotonic() > began + START_S:
                    raise SystemExit(f"{log.read_text()}\nthe server did not say {missing[0]!r}")
                time.sleep(0.1)
            print(f"{' and '.join(words)}, {time.monotonic() - began:.1f} s", flush=True)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def report(found: dict[str, dict[str, Any]]) -> Iterator[str]:
    """A line for each way, and what the ways are to each other."""
    yield f"{'way':<8}{'seconds':>9}{'tokens/s':>10}{'cached':>9}{'TTFT p50':>10}{'p90 ms':>9}{'failed':>8}"
    for way, one in found.items():
        ttft = f"{one['median_ttft_ms']:>10.0f}{one['p90_ttft_ms']:>9.0f}"
        rate = f"{one['duration']:>9.2f}{one['output_throughput']:>10.1f}{one['cache_hit_rate']:>9.1%}"
        yield f"{way:<8}{rate}{ttft}{one['failed']:>8}"
    if {"few", "tiers"} <= found.keys():
        faster = found["tiers"]["output_throughput"] / found["few"]["output_throughput"]
        yield f"tiers are {faster:.2f} times as fast as few"
    if {"all", "tiers"} <= found.keys():
        part = found["tiers"]["cache_hit_rate"] / found["all"]["cache_hit_rate"]
        yield f"tiers have {part:.3f} of what all has cached"


def main() -> int:
    """The command line; 1 if a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--device", default="cpu", help="cuda: an 8B model's shape, without weights")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--fit", type=int, default=8, help="sessions that the GPU cache has pages for")
    parser.add_argument("--turns", type=int, default=6, help="of each session that are sent one by one")
    parser.add_argument("--context", type=int, default=1200, help="words at which a session ends")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    args, serve = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="eyas-agents-") as name:
        folder, model = Path(name), EMBEDDED
        serve += ["--device", args.device]
        if args.device != "cpu":
            model = folder / "model"
            write_model(SHAPES["llama-3.1-8b"], model)
            serve += ["--model", str(model), "--load-format", "dummy"]
        drawn = agent_sessions(args.sessions, args.context, None, 0.0, SEED)
        sessions = [Session.of(job, args.turns, number) for number, job in enumerate(drawn)]
        with (folder / "sessions.jsonl").open("w") as file:
            for number, session in enumerate(sessions):
                file.writelines(json.dumps(line) + "\n" for line in session.lines(f"{number}"))
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        lengths = [session.tokens(tokenizer) for session in sessions]
        each = token_bytes(model, 4 if args.device == "cpu" else 2)
        sizes = Sizes(sum(lengths), max(lengths), len(lengths), each)
        print(f"{len(lengths)} sessions of {min(lengths)} to {max(lengths)} tokens, {sizes.host_gb:.1f} GiB")
        found = {way: measured(way, sizes, args.fit, serve, folder) for way in args.ways}
        print("\n" + "\n".join(report(found)))
    return int(any(one["failed"] for one in found.values()))


if __name__ == "__main__":
    sys.exit(main())
