"""Takes the pictures of docs/console.md: the console of a cluster under load, in each colour and width.

Until shortly before them some calls are wrong, and some too many, so that failures show.

    python -m tests.e2e.console_pictures [--url URL] [--out FOLDER] [--seconds S]

Without --url it starts a cluster of the embedded model with a service for each kind of work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from eyas.common.config import NANO, NANO_HEAD
from tests.chromium import Page, chromium, installed
from tests.e2e.served import Folders, serving

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
CALLERS = 4
CROWD = 18  # more calls at once than the cluster takes
FEW = ("--max-running-requests=4", "--max-queued-requests=2")
QUESTIONS = (
    "Tell me a story.",
    "What can you do?",
    "What colour is the sky?",
    "Write a Python function that adds two numbers.",
    "Count from one to ten.",
    "What is the capital of France?",
)
SIZES = {"light": (1280, 1100, "light"), "dark": (1280, 1100, "dark"), "narrow": (400, 1560, "light")}
IDLE = "document.querySelector('#send').textContent === 'Send'"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", help="a server that runs already")
    parser.add_argument("--out", type=Path, default=PICTURES)
    parser.add_argument("--seconds", type=float, default=70.0, help="of load before the pictures")
    args = parser.parse_args()
    if installed() is None:
        sys.exit("no pictures: Chromium is not installed")
    args.out.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as owned:
        url = args.url
        if url is None:
            layout = ("--layout", "split", "--prefill", "2", "--decode", "2", *FEW)
            url = owned.enter_context(serving(Folders(str(NANO), str(NANO_HEAD)), *layout)).url
        owned.enter_context(load(url, args.seconds * 0.8))
        take(url.rstrip("/"), args.out, args.seconds)


def take(url: str, out: Path, seconds: float) -> None:
    """Looks at the console for some seconds, asks two questions in it, and takes all pictures."""
    with chromium() as browser:
        page = browser.open(*SIZES["light"][:2])
        page.go(f"{url}/")
        page.wait("document.querySelectorAll('.card').length > 1")
        time.sleep(seconds)
        for question in ("What can you do?", "Tell me a story."):
            ask(page, question)
        page.evaluate("document.querySelector('.request summary').click()")
        for name, (width, height, scheme) in SIZES.items():
            page.resize(width, height)
            page.prefer(scheme)
            time.sleep(2.5)  # the page redraws every second
            page.photograph(out / f"console-{name}.png")
        complaints = page.complaints()
    print(f"{len(SIZES)} pictures in {out}; complaints of the browser: {complaints or 'none'}")
    if complaints:
        sys.exit(1)


def ask(page: Page, question: str) -> None:
    """A question in the playground, and its whole answer."""
    page.evaluate("document.querySelector('#max-tokens').value = 90")
    page.evaluate("document.querySelector('#text').focus()")
    page.type(question)
    page.press("Enter", 13, "\r")
    page.wait(f"{IDLE} && document.querySelector('#figures').textContent", timeout_s=120.0)


@contextlib.contextmanager
def load(url: str, faulty_s: float) -> Iterator[None]:
    """Some callers that ask one question after another, meanwhile; for `faulty_s` seconds wrong ones too."""
    over = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_callers(url, over, faulty_s)))
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


async def _callers(url: str, over: threading.Event, faulty_s: float) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        callers = (_caller(client, model, over, random.Random(i)) for i in range(CALLERS))
        await asyncio.gather(_faults(client, model, faulty_s), *callers)


async def _faults(client: httpx.AsyncClient, model: str, seconds: float) -> None:
    """Wrong calls, and now and then too many at once."""
    end = time.monotonic() + seconds
    body = {"model": model, "messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 24}
    while time.monotonic() < end:
        wrong = [body | {"temperature": 9}, body | {"model": "another"}, body | {"max_tokens": 10**6}]
        bodies = [*wrong, *[body] * CROWD]
        await asyncio.gather(*(client.post("/v1/chat/completions", json=each) for each in bodies))
        await asyncio.sleep(8.0)


async def _caller(client: httpx.AsyncClient, model: str, over: threading.Event, dice: random.Random) -> None:
    while not over.is_set():
        before = dice.choice((0, 4, 12))  # turns of a chat, so that prompts differ in length
        said = [
            {"role": role, "content": dice.choice(QUESTIONS)}
            for _ in range(before)
            for role in ("user", "assistant")
        ]
        messages = [*said, {"role": "user", "content": dice.choice(QUESTIONS)}]
        body = {
            "model": model,
            "messages": messages,
            "max_tokens": dice.choice((24, 64, 128)),
            "stream": True,
        }
        reply = await client.post("/v1/chat/completions", json=body)
        if reply.status_code != 429:  # the crowd's
            reply.raise_for_status()
        await asyncio.sleep(dice.uniform(0.0, 1.0))


if __name__ == "__main__":
    main()
