"""Renderings that take long: done elsewhere with the same result, and ended whatever they do."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from eyas.common.errors import InvalidRequest
from gateway.text.rendering import QUICK_STEPS, TemplateRenderer
from gateway.text.templates import MAX_STEPS, ChatTemplate

CHAT = [{"role": "user", "content": "Größe \U0001f642 <&>"}]
LONG = "{% for i in range(" + str(QUICK_STEPS * 2) + ") %}{% endfor %}"
# What one step does, Python cannot interrupt.
A_LOT = "{% set a = messages[0].content[:1] | center(1000000) | replace(' ', 'a b ') %}"
STUCK = {
    "memory": LONG + A_LOT + "{{ a | replace('a', a[:9000]) | length }}",
    "time": LONG + A_LOT + "{{ a | wordwrap(1) | urlize | striptags | wordwrap(1) | length }}",
}
GROWING = "{{% set ns = namespace(x={}) %}}{{% for i in range(99) %}}{{% set ns.x = {} %}}{{% endfor %}}"


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": CHAT, **more}


async def test_what_takes_many_steps_is_rendered_elsewhere_with_the_same_result() -> None:
    source = (
        LONG + "{{ messages | tojson }}{{ tools | tojson }}{{ bos_token }}{{ x }}{{ add_generation_prompt }}"
    )
    template = ChatTemplate(source, {"bos_token": "<s>"})
    renderer = TemplateRenderer(template)
    for more in (
        {},
        {"tools": [{"type": "function"}], "add_generation_prompt": False},
        {"template_kwargs": {"x": 1}},
    ):
        assert await renderer.render(**chat(**more)) == template.render(**chat(**more))
    assert renderer._child is not None
    quick = TemplateRenderer(ChatTemplate("{{ messages[0].content }}", {}))
    assert await quick.render(**chat()) == CHAT[0]["content"] and quick._child is None


async def test_a_refusal_comes_back_too() -> None:
    renderer = TemplateRenderer(ChatTemplate(LONG + "{{ raise_exception('no ' ~ messages[0].role) }}", {}))
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="refused the messages: no user") as refused:
            await renderer.render(**chat())
        assert refused.value.param == "messages"
    endless = TemplateRenderer(
        ChatTemplate("{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}", {})
    )
    with pytest.raises(InvalidRequest, match=f"more than {MAX_STEPS} steps"):
        await endless.render(**chat())


@pytest.mark.parametrize("kind", STUCK)
async def test_a_deadline_ends_it_and_others_go_on(kind: str) -> None:
    renderer = TemplateRenderer(
        ChatTemplate("{% if x %}" + STUCK[kind] + "{% else %}" + LONG + "{% endif %}", {}), 2.0
    )
    await renderer.render(**chat())  # its process has started
    start, turns = time.process_time(), 0
    stuck = asyncio.ensure_future(renderer.render(**chat(template_kwargs={"x": True})))
    while not stuck.done():
        await asyncio.sleep(0.01)
        turns += 1
    with pytest.raises(InvalidRequest, match="takes more than 2 s|too much memory|MemoryError"):
        await stuck
    assert turns > 0 and time.process_time() - start < 1.0
    assert await renderer.render(**chat()) == ""  # a new process


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ 'x' * 10 ** 9 }}", "characters"),
        ("{{ 10 ** 100000000 }}", "too high"),
        ("{{ [1] * 99999999 }}", "characters"),
        ("{{ '%099999999d' % 1 }}", "width"),
        (GROWING.format("'ab'", "ns.x ~ ns.x"), "characters"),
        (GROWING.format("'ab'", "ns.x + ns.x"), "characters"),
        (GROWING.format("3", "ns.x * ns.x"), "number"),
    ],
)
async def test_an_operator_alone_cannot_take_long(source: str, reason: str) -> None:
    start = time.process_time()
    with pytest.raises(InvalidRequest, match=reason):
        await TemplateRenderer(ChatTemplate(source, {})).render(**chat())
    assert time.process_time() - start < 1.0


def test_operators_mean_what_they_mean() -> None:
    source = "{{ 'ab' * 3 }}{{ 2 ** 10 }}{{ '%5.1f|%s' % (1.5, 'x') }}{{ 1 + 2 }}{{ [1] + [2] }}"
    source += "{{ 'a' ~ 1 ~ none }}"
    assert ChatTemplate(source, {}).render(CHAT) == "ababab1024  1.5|x3[1, 2]a1None"
