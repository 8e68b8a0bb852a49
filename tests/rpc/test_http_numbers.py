"""Numbers that the wire cannot carry, or that make no sense, are a 400 that names the field, on every front.

Whatever is admitted is converted to the wire's records here, as it would be on its way to a worker.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from http_client import ROUTES, client_of, refused
from scripted_backend import nano_tokenizer
from scripted_cluster import UNIFIED, gateway, make_request, nothing_in_flight
from scripted_worker import workers

from eyas.client import AsyncClient, InvalidRequest
from eyas.common.params import SamplingParams
from tests.rpc.scripted_backend import WireBackend
from tests.rpc.sdk_front import served

NASTY = [
    *("3000000000", "-3000000000", "2147483648", "18446744073709551616", "-9223372036854775809"),
    *("1" + "0" * 400, "-1" + "0" * 400, "1e400", "-1e400", "1e308", "NaN", "Infinity", "-Infinity"),
    *("1.5", "true", "false", '"5"', "[]", "{}", '"\\u0000"'),
]
NUMBERS = (
    "temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed n timeout"
).split()
OPENAI = "max_tokens min_tokens truncate_prompt_tokens".split()
FIELDS = {
    "/v1/chat/completions": [*NUMBERS, *OPENAI, "max_completion_tokens", "top_logprobs"],
    "/v1/completions": [*NUMBERS, *OPENAI, "logprobs"],
    "/generate": ["timeout", "top_logprobs_num"],
}
SAMPLING = [
    *(name for name in NUMBERS if name != "timeout"),
    "max_new_tokens",
    "min_new_tokens",
    "sampling_seed",
]


@pytest.fixture
def backend() -> WireBackend:
    return WireBackend(nano_tokenizer())


@pytest.fixture
async def client(backend: WireBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(backend) as client:
        yield client


def bodies(path: str, value: str) -> Iterator[tuple[str, str]]:
    """(the field, a body whose field is the JSON text `value`)."""
    slots: list[tuple[str, dict[str, Any]]] = [(name, {name: "?"}) for name in FIELDS[path]]
    lists = {
        "stop_token_ids": {"stop_token_ids": ["?"]},
        "logit_bias[5]": {"logit_bias": {"5": "?"}},
    }
    if path == "/generate":
        slots += [(f"sampling_params.{name}", {"sampling_params": {name: "?"}}) for name in SAMPLING]
        slots += [(f"sampling_params.{name}", {"sampling_params": field}) for name, field in lists.items()]
        slots.append(("input_ids", {"text": None, "input_ids": ["?"]}))
    else:
        slots += list(lists.items())
    if path == "/v1/completions":
        slots.append(("prompt", {"prompt": ["?"]}))
    for name, changes in slots:
        yield name, json.dumps(ROUTES[path] | changes).replace('"?"', value)


@pytest.mark.parametrize("value", NASTY)
@pytest.mark.parametrize("path", ROUTES)
async def test_no_number_causes_a_server_error(client: httpx.AsyncClient, path: str, value: str) -> None:
    for field, body in bodies(path, value):
        response = await client.post(path, content=body)
        if response.status_code != 200:
            param = response.json()["error"]["param"]
            name = field.removeprefix("sampling_params.")  # limits of the model are told without it
            assert param in (field, name, f"{field}[0]", name.partition("[")[0]), (field, response.text)
            refused(response, param)


BEYOND = [
    ("top_k", 3_000_000_000),
    ("max_tokens", 2**31),
    ("min_tokens", 2**31),
    ("truncate_prompt_tokens", 2**31),
    ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2),
    ("n", 2**31),
    ("seed", 2**64),
    ("temperature", 10**400),
    ("timeout", 10**400),
    ("timeout", 0),
    ("logit_bias[3000000000]", {"logit_bias": {"3000000000": 1}}),
    ("logit_bias.-1", {"logit_bias": {"-1": 1}}),
    ("logit_bias[5]", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {str(id): 1 for id in range(1025)}}),
    ("stop_token_ids[1]", {"stop_token_ids": [1, 3_000_000_000]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 65}),
]


@pytest.mark.parametrize(("field", "value"), BEYOND)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_numbers_out_of_range_are_named(
    client: httpx.AsyncClient, backend: WireBackend, path: str, field: str, value: Any
) -> None:
    changes = value if isinstance(value, dict) else {field: value}
    refused(await client.post(path, content=json.dumps(ROUTES[path] | changes)), field)
    assert not backend.requests


BY_OTHERS = (
    "seed",
    "min_tokens",
    "top_k",
    "bad_words",
    "prompt_logprobs",
    "prompt_logprobs_start",
    "prompt_experts",
    "grammar",
)


async def test_the_front_bounds_what_the_parameters_bound(client: httpx.AsyncClient) -> None:
    """Ranges stand in the HTTP schema and in the parameters, which gRPC's callers meet: they are one."""
    schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    fields = schemas["TextBody"]["properties"]
    checked = 0
    for name in SamplingParams.__struct_fields__:
        if name in BY_OTHERS:
            continue  # what these mean depends on others, or on who asks
        for number in fields[name].get("anyOf", [fields[name]]):
            for key, sign in (
                ("minimum", -1),
                ("maximum", 1),
                ("exclusiveMinimum", 0),
                ("exclusiveMaximum", 0),
            ):
                if key in number:
                    _is_the_edge(name, number[key], sign * (1 if number["type"] == "integer" else 1e-9))
                    checked += 1
    assert checked == 16


def _is_the_edge(name: str, edge: float, step: float) -> None:
    """The parameters allow `edge` (unless `step` is 0), and not what lies a step beyond."""
    if step:
        SamplingParams(**{name: edge}).validate(4096)
    with pytest.raises(InvalidRequest, match=f"^{name} "):
        SamplingParams(**{name: edge + step}).validate(4096)


GRPC_BAD: list[tuple[str, dict[str, Any]]] = [
    ("top_k", {"top_k": -2}),
    ("max_tokens", {"max_tokens": -1}),
    ("min_tokens", {"min_tokens": -1}),
    ("min_tokens", {"min_tokens": 2**31 - 1}),
    ("temperature", {"temperature": float("nan")}),
    ("top_p", {"top_p": float("inf")}),
    ("logit_bias", {"logit_bias": {-1: 1.0}}),
    ("logit_bias", {"logit_bias": {5: float("nan")}}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("stop_token_ids", {"stop_token_ids": [2**31 - 1]}),
    ("n", {"n": 2**31 - 1}),
]


async def test_grpc_names_numbers_out_of_range(backend: WireBackend) -> None:
    async with served(backend) as address, AsyncClient(address, retries=0) as client:
        for field, options in GRPC_BAD:
            with pytest.raises(InvalidRequest, match=f"^{field} "):
                await client.generate("Hi", **options)
        with pytest.raises(InvalidRequest, match="^the prompt holds a token id outside"):
            await client.generate([-1])
        assert not backend.requests
        await client.generate("Hi", top_k=-1, seed=2**64 - 1)
        assert backend.requests[0].params.top_k == 0


async def test_a_request_that_cannot_be_sent_leaves_nothing() -> None:
    too_large = make_request(tokens=3_000_000_000)
    async with workers(UNIFIED) as started, gateway(started) as (backend, cluster):
        session = cluster.session(started[0].address)
        with pytest.raises(ValueError):
            await backend.start(too_large)
        assert not session._listeners
        assert nothing_in_flight(cluster)
        assert not started[0].of("cancel")
