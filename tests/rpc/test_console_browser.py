"""The console in a headless Chromium: what it shows, what a keyboard reaches, and that text stays text."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import msgspec
import pytest
from prometheus_client import CollectorRegistry
from scripted_backend import INFO, ScriptedBackend, nano_tokenizer
from tool_models import WIDE, speaker, tokenizer_of

from eyas.common.cluster.listening import free_ports
from eyas.common.config import GatewayConfig
from eyas.common.types import GenerationRequest, Role
from gateway.main import fronts
from gateway.observe.metrics import GatewayMetrics
from gateway.routing.router import RouterCandidate
from tests.chromium import Browser, Page, chromium, installed
from tests.rpc.tool_requests import SAYS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(installed() is None, reason="needs Chromium to look at the console"),
]
HOSTILE = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>'
HEALTHY = "document.querySelector('#health').textContent === 'healthy'"
IDLE = "document.querySelector('#send').textContent === 'Send'"
ANSWERED = "[...document.querySelectorAll('.assistant > .coloured .token')].map(t => t.textContent).join('')"
ENTER = 13


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@contextlib.asynccontextmanager
async def served(backend: ScriptedBackend, **config: object) -> AsyncIterator[str]:
    """The URL of a gateway over the backend, all of whose workers are connected."""
    ports = free_ports()
    given = GatewayConfig(port=next(ports), grpc_port=next(ports), **config)  # type: ignore[arg-type]
    backend.links = lambda: [RouterCandidate(info, connected=True) for info in backend.infos]  # type: ignore[method-assign]
    async with fronts(given, backend, backend.tokenizer, GatewayMetrics(CollectorRegistry())):
        yield f"http://127.0.0.1:{given.port}/"


async def look(browser: Browser, url: str, steps: Callable[[Page], None], width: int = 1280) -> None:
    """Opens the console and takes `steps`; no script may fail and no policy be broken."""

    def drive() -> None:
        page = browser.open(width, 900)
        page.go(url)
        page.wait(HEALTHY)
        steps(page)
        assert page.complaints() == []

    await asyncio.to_thread(drive)


def say(page: Page, text: str) -> None:
    page.evaluate("document.querySelector('#text').focus()")
    page.type(text)
    page.press("Enter", ENTER, "\r")


async def test_nothing_that_others_write_becomes_html(browser: Browser) -> None:
    backend = ScriptedBackend(nano_tokenizer(), says=lambda *_: f"{HOSTILE} **bold** {HOSTILE}")
    backend.infos = [msgspec.structs.replace(WIDE, worker=f"{HOSTILE}:1", roles=(Role.PREFILL, Role.DECODE))]

    def steps(page: Page) -> None:
        httpx.post(
            f"{url}v1/completions",
            json={"model": HOSTILE, "prompt": "Hi"},
            headers={"x-request-id": HOSTILE.replace(" ", "/")},
        )
        page.wait("document.querySelector('.request')")
        page.evaluate("document.querySelector('.request summary').click()")
        say(page, HOSTILE)
        page.wait(f"{IDLE} && document.querySelector('.assistant')")
        page.evaluate("document.querySelector('#coloured').click()")  # the same as Markdown
        page.wait("document.querySelector('.prose strong')")
        time.sleep(0.3)
        for place in (
            "#model",
            ".card.prefill .name",
            ".request dd",
            ".said.user",
            ".prose",
        ):
            shown = page.evaluate(f"document.querySelector('{place}').textContent")
            assert "<script>window.owned=1</script>" in shown, place
        assert page.evaluate(ANSWERED) == f"{HOSTILE} **bold** {HOSTILE}"
        assert page.evaluate("document.querySelectorAll('img, script:not([src])').length") == 0
        assert page.evaluate("window.owned === undefined")

    async with served(backend, served_model=HOSTILE) as url:
        await look(browser, url, steps)


async def test_the_policy_stands_behind_the_page_s_own_care(browser: Browser) -> None:
    """Were a text read as HTML after all, no script in it would run."""

    def drive() -> None:
        page = browser.open(1280, 900)
        page.go(url)
        page.wait(HEALTHY)
        page.evaluate(f"document.querySelector('#log').innerHTML = {json.dumps(HOSTILE)}")
        page.evaluate(
            "document.body.append(Object.assign(document.createElement('script'), {text: 'owned = 1'}))"
        )
        page.wait("document.querySelector('#log img').complete")
        assert page.evaluate("window.owned === undefined")
        refused = [line for line in page.complaints() if "Content Security Policy" in line]
        assert len(refused) >= 2  # the handler or its picture, and the script

    async with served(ScriptedBackend(nano_tokenizer())) as url:
        await asyncio.to_thread(drive)


async def test_drafts_are_seen_in_the_text(browser: Browser) -> None:
    said = "One two three four five six seven."
    backend = ScriptedBackend(nano_tokenizer(), says=lambda *_: said, stride=3)
    steps_of_three = math.ceil((len(backend.tokenizer.encode(said, special=False)) + 1) / 3)

    def steps(page: Page) -> None:
        say(page, "Count.")
        page.wait(f"{IDLE} && document.querySelector('.token.accepted')")
        assert page.evaluate(ANSWERED) == said
        kinds = page.evaluate("[...document.querySelectorAll('.assistant .token')].map(t => t.className)")
        # A step of the scripted backend offers three drafts, accepts two, and the third is the model's own.
        assert kinds[:6] == ["token first"] * 3 + ["token accepted"] * 2 + ["token correction"]
        assert page.evaluate("document.querySelector('.assistant .rejected').textContent") == "×1"
        assert page.evaluate("document.querySelectorAll('.step').length") == steps_of_three
        figures = page.evaluate("document.querySelector('#figures').textContent")
        assert "drafts accepted" in figures and "acceptance length" in figures

    async with served(backend) as url:
        await look(browser, url, steps)


async def test_reasoning_and_calls_fold_and_a_result_goes_back(browser: Browser) -> None:
    def says(request: GenerationRequest, _: int) -> str:
        asked = backend.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)
        return "It rains." if "<tool_response>" in asked else f"<think>\nWhere?\n</think>\n\n{SAYS['hermes']}"

    backend = ScriptedBackend(tokenizer_of("hermes"), says, 2, infos=[WIDE])

    def steps(page: Page) -> None:
        page.evaluate("document.querySelector('#tool-choice').value = 'auto'")
        say(page, "The weather?")
        page.wait(f"{IDLE} && document.querySelectorAll('.call').length === 2")
        assert page.evaluate("document.querySelector('.reasoning summary').textContent") == "Reasoning"
        thought = page.evaluate(
            "[...document.querySelectorAll('.reasoning .token')].map(t => t.textContent).join('')"
        )
        assert thought.strip() == "Where?"
        assert page.evaluate("document.querySelector('.call summary').textContent") == "Calls weather"
        arguments = (
            "[...document.querySelector('.call').querySelectorAll('.token')].map(t => t.textContent).join('')"
        )
        assert json.loads(page.evaluate(arguments)) == {"city": "Köln"}
        page.evaluate("document.querySelector('.reasoning summary').click()")
        assert not page.evaluate("document.querySelector('.reasoning').open")
        assert "weather" in page.evaluate("document.querySelector('#text').placeholder")
        say(page, "rain")
        say(page, "noon")  # two calls, two results
        page.wait(f"{IDLE} && document.querySelectorAll('.assistant').length === 2")
        assert "It rains." in page.evaluate("document.querySelectorAll('.assistant')[1].textContent")

    async with served(backend, reasoning_parser="qwen3") as url:
        await look(browser, url, steps)
    assert len(backend.requests) == 2


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_stop_ends_the_request(browser: Browser, way: str) -> None:
    backend = speaker("hermes", "word " * 200, 2)
    backend.pause_s = 0.1

    def steps(page: Page) -> None:
        say(page, "Go on.")
        page.wait("document.querySelectorAll('.assistant .token').length > 4")
        assert page.evaluate("document.querySelector('#send').textContent") == "Stop"
        if way == "button":
            page.evaluate("document.querySelector('#send').click()")
        else:
            page.press("Escape", 27)
        page.wait(IDLE)
        assert page.evaluate("document.querySelector('#figures').textContent") == "stopped"

    async with served(backend) as url:
        await look(browser, url, steps)
        await asyncio.wait_for(backend.streams[0].closed.wait(), 30)
    assert backend.streams[0].told < 100


@pytest.mark.parametrize("width", [1280, 400])
async def test_it_fits_and_a_keyboard_reaches_everything(browser: Browser, width: int) -> None:
    backend = ScriptedBackend(nano_tokenizer())
    backend.infos = [
        msgspec.structs.replace(INFO, worker=f"10.0.0.{i}:50051", roles=(role,))
        for i, role in enumerate([Role.PREFILL, Role.DECODE, Role.DRAFT] * 3)
    ]

    def steps(page: Page) -> None:
        say(page, "Hi")
        page.wait("document.querySelector('.request')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("document.querySelectorAll('.card').length") == 10
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        reached = set()
        for _ in range(45):
            page.press("Tab", 9)
            reached.add(
                page.evaluate("document.activeElement.id || document.activeElement.classList[0] || ''")
            )
        assert {"key", "theme", "chart", "own-scale", "hold", "waterfall", "log", "text", "send"} <= reached
        page.evaluate("document.querySelector('.chart').focus()")
        page.press("ArrowLeft", 37)
        assert " s ago:" in page.evaluate("document.querySelector('.chart').getAttribute('aria-label')")
        unnamed = "[...document.querySelectorAll('input, textarea, select, button, svg[tabindex]')].filter("
        unnamed += (
            "e => !(e.getAttribute('aria-label') || e.labels?.length || e.textContent.trim())).map(e => e.id)"
        )
        assert page.evaluate(unnamed) == []

    async with served(backend) as url:
        await look(browser, url, steps, width)


async def test_the_theme_is_the_system_s_or_the_one_that_is_chosen(browser: Browser) -> None:
    def steps(page: Page) -> None:
        colour = "getComputedStyle(document.body).backgroundColor"
        seen = {}
        for scheme in ("light", "dark"):
            page.prefer(scheme)
            seen[scheme] = page.evaluate(colour)
        assert seen["light"] != seen["dark"]
        for chosen in ("light", "dark", "dark"):  # the last: the system's again
            page.evaluate("document.querySelector('#theme').click()")
            assert page.evaluate(colour) == seen[chosen]
        page.evaluate("document.querySelector('#theme').click()")
        page.call("Page.reload")
        page.wait(f"document.readyState === 'complete' && {HEALTHY}")
        assert page.evaluate(colour) == seen["light"]  # remembered, although the system is dark
        page.evaluate("localStorage.clear()")

    async with served(ScriptedBackend(nano_tokenizer())) as url:
        await look(browser, url, steps)


async def test_a_browser_that_knows_the_key_can_do_everything(browser: Browser) -> None:
    word = base64.b64encode(b"anyone:k").decode()

    def drive() -> None:
        page = browser.open(1280, 900)
        page.send_with_all({"authorization": f"Basic {word}"})
        page.go(url)
        page.wait(HEALTHY)
        say(page, "Hi")
        page.wait(f"{IDLE} && document.querySelector('.assistant')")
        assert "Hello" in page.evaluate("document.querySelector('.assistant').textContent")
        page.send_with_all({})
        page.wait("document.querySelector('#health').textContent.includes('API key')")
        page.evaluate("document.querySelector('#key').focus()")
        page.type("k")
        page.press("Enter", ENTER, "\r")
        page.wait(HEALTHY)

    async with served(ScriptedBackend(nano_tokenizer()), api_keys=("k",)) as url:
        await asyncio.to_thread(drive)
