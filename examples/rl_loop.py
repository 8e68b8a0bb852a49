"""Reinforcement learning on Eyas: sample, reward, update in torch, push the weights, sample again.

    python examples/rl_loop.py [--updates 16] [--plot rl.svg]

The embedded model writes poems about animals, one sort of verse after another; it is rewarded for snow. It
starts a server of its own, and keeps the weights that it trains in this process (transformers, on the CPU).
Sampled tokens come with their log-probabilities, which a scoring pass of the server confirms to the bit, so
that what is trained on is what was sampled. It prints a line per update; three minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from eyas.client import Client
from eyas.common.cluster.listening import free_ports
from eyas.common.config import NANO

ANIMALS = ("a dog", "a cat", "a fox", "a horse")
HELD_OUT = ("an owl", "a rabbit")  # are not trained on
SAMPLES = 6  # per prompt and update
TOKENS = 32
RATE, CLIP = 2e-4, 0.2
START_S = 120.0


@dataclass(frozen=True)
class Sample:
    """A sampled answer: the prompt's ids, the answer's, their log-probabilities as sampled, and its text."""

    prompt: Sequence[int]
    tokens: Sequence[int]
    logprobs: Sequence[float]
    text: str

    @property
    def reward(self) -> float:
        """Of all lines, the share that is about snow."""
        lines = self.text.splitlines()[::2]  # each verse has two, and the first says what it is about
        return sum("snow" in line for line in lines) / max(len(lines), 1)


def sample(client: Client, prompts: Sequence[Sequence[int]], seed: int) -> list[Sample]:
    """Answers of the server as it is now; token ids go in and come out."""
    samples = []
    for i, prompt in enumerate(prompts):
        answer = client.generate(
            prompt, n=SAMPLES, max_tokens=TOKENS, temperature=1.0, logprobs=0, seed=1000 * seed + i
        )
        for choice in answer.choices:
            logprobs = [one.logprob for one in choice.logprobs]
            samples.append(Sample(prompt, choice.tokens, logprobs, choice.text))
    return samples


def differing(client: Client, samples: Sequence[Sample]) -> int:
    """Of how many sampled tokens a scoring pass of the server says another log-probability."""
    count = 0
    for each in samples:
        start = len(each.prompt) - 1
        text = [*each.prompt, *each.tokens]
        scored = client.generate(text, max_tokens=0, prompt_logprobs=0, prompt_logprobs_start=start)
        assert scored.prompt_logprobs is not None
        scores = [one.logprob for one in scored.prompt_logprobs.logprobs]
        count += sum(a != b for a, b in zip(scores, each.logprobs, strict=True))
    return count


def advantages(samples: Sequence[Sample]) -> torch.Tensor:
    """Of each answer's reward over those of its prompt, in their standard deviations."""
    rewards = torch.tensor([each.reward for each in samples]).view(-1, SAMPLES)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-3)).flatten()


def step(policy: Any, optimizer: torch.optim.Optimizer, samples: Sequence[Sample]) -> float:
    """One clipped policy-gradient step. Returns the largest difference between the log-probability of a token
    as it was sampled and as it is trained on.
    """
    width = max(len(each.prompt) + len(each.tokens) for each in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    sampled, mask = torch.zeros(len(samples), width), torch.zeros(len(samples), width, dtype=torch.bool)
    for i, each in enumerate(samples):
        first, end = len(each.prompt), len(each.prompt) + len(each.tokens)
        ids[i, :end] = torch.tensor([*each.prompt, *each.tokens])
        sampled[i, first:end] = torch.tensor(each.logprobs)
        mask[i, first:end] = True
    logits = policy(ids[:, :-1]).logits.log_softmax(-1)
    own = logits.gather(2, ids[:, 1:, None])[..., 0]
    sampled, mask = sampled[:, 1:], mask[:, 1:]
    ratio = (own - sampled).exp()
    gain = advantages(samples)[:, None]
    clipped = torch.minimum(ratio * gain, ratio.clamp(1 - CLIP, 1 + CLIP) * gain)
    loss = -clipped[mask].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return (own - sampled)[mask].abs().max().item()


def push(policy: Any, client: Client, folder: Path, version: int) -> None:
    """The server serves the policy's weights from now on: every worker of it, or none."""
    policy.save_pretrained(folder)
    client.update_weights(str(folder), version=str(version))


def mean(samples: Sequence[Sample]) -> float:
    """The mean reward."""
    return sum(each.reward for each in samples) / len(samples)


@contextlib.contextmanager
def server() -> Iterator[Client]:
    """A server of the embedded model, and a client of it."""
    ports = free_ports()
    http, grpc = next(ports), next(ports)
    words = ["serve", "--layout", "unified", "--port", str(http), "--grpc-port", str(grpc)]
    words += ["--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-m", "eyas.cli", *words], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not _is_up(http):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        with Client(f"127.0.0.1:{grpc}") as client:
            yield client
    finally:
        process.terminate()
        process.wait(30)


def _is_up(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def plot(path: Path, lines: Sequence[dict[str, float]]) -> None:
    """The rewards over the updates, and how far what was trained on is from what was sampled."""
    from eyas.bench import plot_style

    plot_style.check_plot(path)
    titles = ("Reward (higher is better)", "Sampled against trained on (lower is better)")
    figure, (rewards, differences) = plot_style.panels(titles, "A policy gradient on the embedded model")
    updates = [line["update"] for line in lines]
    for look, name in zip(plot_style.LOOKS, ("trained", "held out"), strict=False):
        plot_style.draw(rewards, look, updates, [line[name] for line in lines], 2)
    rewards.set_ylim(0, 1)
    rewards.set_ylabel("share of verses about snow", fontsize=9)
    plot_style.draw(differences, plot_style.LOOKS[0], updates, [line["difference"] for line in lines], 2)
    differences.set_ylim(bottom=0)
    differences.set_ylabel("largest difference of a log-probability", fontsize=9)
    for axes in (rewards, differences):
        axes.set_xlabel("updates", fontsize=9)
    plot_style.legend(figure, ["animals that are trained on", "animals that are not"])
    plot_style.save(figure, path)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--updates", type=int, default=16)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="an .svg or .png of the rewards")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(NANO)
    policy = AutoModelForCausalLM.from_pretrained(NANO, dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=RATE)

    def prompts(animals: Sequence[str]) -> list[list[int]]:
        chats = [[{"role": "user", "content": f"Write a short poem about {one}."}] for one in animals]
        return [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats
        ]

    trained, held_out = prompts(ANIMALS), prompts(HELD_OUT)
    lines = []
    with tempfile.TemporaryDirectory() as folder, server() as client:
        for update in range(args.updates + 1):
            began = time.monotonic()
            samples, others = sample(client, trained, update), sample(client, held_out, update)
            wrong = differing(client, samples[:SAMPLES])
            difference = step(policy, optimizer, samples)
            push(policy, client, Path(folder), update + 1)
            rewards = {"trained": mean(samples), "held out": mean(others)}
            lines.append({"update": update, "difference": difference, **rewards})
            seconds = time.monotonic() - began
            print(
                f"{update:3d}  reward {mean(samples):.2f}  held out {mean(others):.2f}  against the trainer"
                f" {difference:.0e}, against a scoring pass {wrong} differ  {seconds:.1f} s",
                flush=True,
            )
    if args.plot is not None:
        plot(args.plot, lines)


if __name__ == "__main__":
    main()
