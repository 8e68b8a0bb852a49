"""Prefill on one host, everything else on another, and the cable between them is pulled: `make two-hosts`.

    far    10.77.0.1   prefill
    near   10.77.0.2   Redis, decode, draft, gateway, and this program

The hosts are network namespaces (`namespaces`); their workers have pools in folders of their own, as if there
were no common memory, so KV pages must come by gRPC, or as `--transfer` says. Every text is
compared with what one worker alone says.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from eyas.common.config import NANO, NANO_HEAD
from tests.e2e.namespaces import FAR_ADDRESS, NEAR_ADDRESS, TwoHosts, problem, two_hosts
from tests.e2e.served import Folders, serving, wait_until
from tests.rpc.redis_server import SERVER

REDIS = f"redis://{NEAR_ADDRESS}:6379/0"
URL = "http://127.0.0.1:8000"
PROMPTS, FRESH = 16, 4  # questions; the last ones are kept until the cable is back
STREAMS = 4
REPEATS = 40  # of a sentence: 600 tokens, so that prompts and their pages take a while
START_S, STOP_S = 120.0, 45.0  # a worker that is asked to leave may wait for leases
END_S = 10.0  # a request that cannot be served has its error by then
BETWEEN_S = (0.2, 3.0)  # from one pull to the next
BACK_S = 15.0  # after the cable is back, requests succeed by then


@dataclass(frozen=True)
class Pulls:
    """How often the cable is pulled, for how long, and what it is like: packets lost, megabits per second."""

    times: int
    seconds: float
    loss: float
    mbit: float


@dataclass(frozen=True)
class Seen:
    """One chat: when it began and ended (monotonic seconds), its status, and its text or the error.

    `ends`: by the names of its phases, in order, when each ended, as its timings say.
    """

    prompt: int
    began: float
    ended: float
    status: int
    said: str
    path: str = ""
    ends: tuple[tuple[str, float], ...] = ()

    def phase(self, when: float) -> str:
        """What went on then; empty if it was not there."""
        if not self.began < when <= self.ended:
            return ""
        return next((name for name, end in self.ends if when <= end), "decode")


def chat(url: str, prompt: int) -> Seen:
    body = {
        "model": "eyas-nano",
        "messages": [
            {"role": "user", "content": " ".join([f"Number {prompt * 137}: tell me about it."] * REPEATS)}
        ],
        "max_tokens": 96,
        "temperature": 0.7,
        "seed": prompt,
        "ignore_eos": True,
        "timings": True,
    }
    began = time.monotonic()
    reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120, trust_env=False)
    ended, answer = time.monotonic(), reply.json()
    if reply.status_code != 200:
        return Seen(prompt, began, ended, reply.status_code, answer["error"]["message"])
    paths = [leg.get("transfer_path", "") for leg in answer["timings"]["legs"]]
    text = answer["choices"][0]["message"]["content"]
    return Seen(prompt, began, ended, 200, text, "".join(paths), phase_ends(began, answer["timings"]))


def phase_ends(began: float, timings: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    """Queue and prefill end with token 0; a transfer follows it, until the first step of decoding."""
    queued = max(leg.get("queue_ms", 0.0) for leg in timings["legs"])
    first = timings["first_token_ms"] or 0.0
    second = first + (timings["first_decode_ms"] or 0.0)
    ends = (("queue", min(queued, first)), ("prefill", first), ("transfer and first step", second))
    return tuple((name, began + end / 1e3) for name, end in ends)


def chats(url: str, prompts: range) -> list[Seen]:
    with concurrent.futures.ThreadPoolExecutor(STREAMS) as pool:
        return list(pool.map(lambda prompt: chat(url, prompt), prompts))


# --- processes -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(hosts: TwoHosts, transfer: str, log_file: Path) -> Iterator[None]:
    """Redis, three workers and a gateway on their hosts, from healthy to gone; `log_file`: what they say."""
    with tempfile.TemporaryDirectory(prefix="eyas-two-hosts-", dir="/dev/shm") as memory:
        eyas = [sys.executable, "-m", "eyas.cli"]
        registry = ["--registry", REDIS]

        def worker(role: str, address: str, port: int) -> list[str]:
            pools = Path(memory, address)
            pools.mkdir(exist_ok=True)
            place = ["--host", address, "--port", str(port), "--pool-dir", str(pools)]
            place += ["--transfer", transfer]
            return [*eyas, "worker", "--roles", role, *place, *registry, "--supervised"]

        redis = [
            str(SERVER),
            "--bind",
            NEAR_ADDRESS,
            "--port",
            "6379",
            "--save",
            "",
            "--protected-mode",
            "no",
        ]
        commands = [
            redis,
            hosts.on_far(*worker("prefill", FAR_ADDRESS, 7001)),
            hosts.on_near(*worker("decode", NEAR_ADDRESS, 7002)),
            hosts.on_near(*worker("draft", NEAR_ADDRESS, 7003)),
            [*eyas, "gateway", *registry, "--supervised"],
        ]
        with log_file.open("wb") as log:
            quiet: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": log, "stderr": subprocess.STDOUT}
            processes = [subprocess.Popen(command, **quiet) for command in commands]
            try:
                wait_until(healthy, START_S)
                yield
            except BaseException:
                print(log_file.read_text(errors="replace")[-8000:], file=sys.stderr)
                raise
            finally:
                for process in processes[::-1]:
                    process.terminate()
                for process in processes:
                    process.wait(STOP_S)


def healthy() -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{URL}/health", timeout=5, trust_env=False).status_code == 200
    return False


# --- the course of events ------------------------------------------------------------------------------


def traffic(seconds_before: float, hosts: TwoHosts, pulls: Pulls) -> tuple[list[Seen], list[float], float]:
    """`STREAMS` chats at a time while the cable is pulled and put back; and when that was."""
    seen: list[Seen] = []
    over = threading.Event()
    prompts = itertools.cycle(range(PROMPTS - FRESH))
    rng = random.Random(pulls.times)

    def ask() -> None:
        while not over.is_set():
            seen.append(chat(URL, next(prompts)))

    threads = [threading.Thread(target=ask) for _ in range(STREAMS)]
    for thread in threads:
        thread.start()
    time.sleep(seconds_before)
    cuts = []
    for number in range(pulls.times):
        if number:
            time.sleep(rng.uniform(*BETWEEN_S))
        cuts.append(time.monotonic())
        hosts.cable("down")
        time.sleep(pulls.seconds)
        back = time.monotonic()
        hosts.cable("up")
    with contextlib.suppress(AssertionError):  # the new prompts that follow must succeed in any case
        wait_until(lambda: len([s for s in seen if s.began > back and s.status == 200]) > 2 * STREAMS, BACK_S)
    over.set()
    for thread in threads:
        thread.join(END_S + 120)
    return seen, cuts, back


def told(name: str, seen: list[Seen], since: float) -> None:
    """A line of what was seen, times in seconds since the cut."""
    failed = [s for s in seen if s.status != 200]
    slowest = max((s.ended - s.began for s in seen), default=0.0)
    paths = ", ".join(sorted({s.path or "none" for s in seen if s.status == 200}))
    print(f"{name:>34}: {len(seen) - len(failed)} answered (pages by: {paths}), {len(failed)} failed, "
          f"slowest {slowest:.1f} s")  # fmt: skip
    for s in failed[:4]:
        print(f"{'':>36}{s.began - since:+.1f} s: {s.status} after {s.ended - s.began:.1f} s: {s.said}")


def judge(seen: list[Seen], expected: list[str], cut: float, back: float) -> list[str]:
    """What should not have been."""
    wrong = [
        f"prompt {s.prompt} got another text"
        for s in seen
        if s.status == 200 and s.said != expected[s.prompt]
    ]
    for s in seen:
        if s.status != 200 and s.ended - max(s.began, min(cut, s.ended)) > END_S:
            wrong.append(f"an error took {s.ended - s.began:.1f} s")
        if s.status != 200 and s.status not in (429, 503, 504):
            wrong.append(f"status {s.status}: {s.said}")
        if s.status != 200 and (s.ended < cut or s.began > back + BACK_S):
            wrong.append(f"an error with the cable in place: {s.said}")
    return wrong


def run(pulls: Pulls, transfer: str, log_file: Path) -> int:
    with two_hosts() as hosts:
        with serving(Folders(str(NANO), str(NANO_HEAD)), "--layout", "unified") as alone:
            expected = [seen.said for seen in chats(alone.url, range(PROMPTS))]
        if pulls.loss:
            hosts.lose(pulls.loss)
        if pulls.mbit:
            hosts.slow_down(pulls.mbit)
        with cluster(hosts, transfer, log_file):
            seen, cuts, back = traffic(4.0, hosts, pulls)
            wait_until(healthy, BACK_S)
            after = chats(URL, range(PROMPTS - FRESH, PROMPTS))
    cut = cuts[0]
    hit = Counter(s.phase(at) for at in cuts for s in seen if s.status == 200)
    print("phases that a pull came into:", ", ".join(f"{n} x {phase}" for phase, n in hit.items() if phase))
    told("ended before the cut", [s for s in seen if s.ended < cut], cut)
    told("in flight when the cable was pulled", [s for s in seen if s.began < cut <= s.ended], cut)
    told("begun until it was put back", [s for s in seen if cut <= s.began < back], cut)
    told("begun after it was put back", [s for s in seen if s.began >= back], cut)
    told("new prompts in the end", after, cut)
    wrong = judge(seen, expected, cut, back) + judge(after, expected, cut, back)
    wrong += [f"prompt {s.prompt} was not pulled by {transfer}" for s in after if s.path != transfer]
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cut", type=float, default=20.0, metavar="SECONDS", help="without the cable (20)")
    parser.add_argument("--times", type=int, default=1, help="it is pulled so often (1)")
    parser.add_argument(
        "--loss", type=float, default=0.0, metavar="PERCENT", help="of all packets; needs nft"
    )
    parser.add_argument("--mbit", type=float, default=0.0, help="that the cable carries (no bound); needs tc")
    ways = ["grpc", "nixl", "tcp"]
    parser.add_argument("--transfer", choices=ways, default="grpc", help="how pages move (grpc)")
    parser.add_argument(
        "--log", type=Path, default=Path("/dev/null"), metavar="FILE", help="of all processes"
    )
    args = parser.parse_args()
    if reason := problem():
        print(f"two hosts cannot be made here: {reason}", file=sys.stderr)
        return 2
    return run(Pulls(args.times, args.cut, args.loss, args.mbit), args.transfer, args.log)


if __name__ == "__main__":
    sys.exit(main())
