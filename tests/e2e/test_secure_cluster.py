"""`eyas serve` with everything locked: TLS at the door, mutual TLS between services, keys from a file.

And with everything that a user says marked, in requests that end well and in requests that do not: no line of
any process and no metric may repeat it.
"""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from served import Served, make_folders, serving, wait_until

from eyas.client import AsyncClient
from eyas.common.errors import EyasError, Unavailable
from eyas.common.security import api_keys
from eyas.common.security.tls import ServiceTls
from eyas.common.wire import rpc
from eyas.common.wire.clients import InfoClient
from tests.rpc import certificates
from tests.rpc.certificates import Certificates

pytestmark = pytest.mark.slow  # tests/rpc has the same in small
MARK = "Xylograph"  # no process says this word by itself
KEY = "a-key-that-alice-brings"
WAIT_S = 30.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates.make(tmp_path_factory.mktemp("secure") / "certs")


@pytest.fixture(scope="module")
def cluster(ours: Certificates, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    parent = tmp_path_factory.mktemp("models")
    keys = str(parent / "keys")
    api_keys.add(keys, "alice", KEY)
    flags = ["--transfer=grpc", f"--tls-dir={ours.services}", f"--api-key-file={keys}", "--drain-s=1"]
    flags += ["--tool-call-parser=hermes"]
    flags += [f"--ssl-certfile={ours.door.certfile}", f"--ssl-keyfile={ours.door.keyfile}"]
    with serving(make_folders(parent), *flags) as served:
        yield served


@pytest.fixture
def http(cluster: Served, ours: Certificates) -> Iterator[httpx.Client]:
    verify = ssl.create_default_context(cafile=ours.ca)
    url, headers = f"https://127.0.0.1:{cluster.port}", {"authorization": f"Bearer {KEY}"}
    with httpx.Client(
        base_url=url, verify=verify, headers=headers, timeout=WAIT_S, trust_env=False
    ) as client:
        yield client


def chat(**fields: Any) -> dict[str, Any]:
    said = {"messages": [{"role": "user", "content": f"Tell me of {MARK}."}], "max_tokens": 8}
    return {"model": "tiny", **said, **fields}


def metrics_pages(cluster: Served, http: httpx.Client) -> dict[int, str]:
    """Those of the gateway and of every worker, by port."""
    pages = {cluster.port: http.get("/metrics").text}
    for process in cluster.descendants():
        for connection in process.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port not in pages:
                try:
                    found = httpx.get(f"http://127.0.0.1:{connection.laddr.port}/metrics", timeout=5)
                except httpx.HTTPError:
                    continue  # gRPC's
                pages[connection.laddr.port] = found.text
    return pages


def addresses(http: httpx.Client) -> list[str]:
    return [worker["worker"] for worker in http.get("/cluster").json()["workers"]]


def test_requests_go_through_all_services(cluster: Served, http: httpx.Client, ours: Certificates) -> None:
    body = http.post("/v1/chat/completions", json=chat(timings=True)).json()
    (leg,) = [leg for leg in body["timings"]["legs"] if leg["role"] == "decode"]
    assert leg["transfer_path"] == "grpc" and leg["transfer_bytes"] > 0
    assert body["usage"]["completion_tokens"] == 8

    async def by_grpc() -> int:
        target = f"https://127.0.0.1:{cluster.grpc_port}"
        async with AsyncClient(target, api_key=KEY, ca=ours.ca) as client:
            return (await client.generate("Hello", max_tokens=4)).usage.completion_tokens

    assert asyncio.run(by_grpc()) == 4
    steps = re.compile(r"^eyas_verify_steps_total\{.*\} [1-9]", re.MULTILINE)

    def drafted() -> bool:
        http.post("/v1/chat/completions", json=chat(max_tokens=32)).raise_for_status()
        return steps.search(http.get("/metrics").text) is not None

    wait_until(drafted, WAIT_S)


def test_no_service_answers_a_stranger(http: httpx.Client, ours: Certificates) -> None:
    async def asked(address: str, tls: ServiceTls | None) -> bool:
        async with rpc.dialer(tls)(address) as channel:
            try:
                await InfoClient(channel).info(WAIT_S)
            except Unavailable:
                return False
            return True

    found = addresses(http)
    assert len(found) == 3
    for address in found:
        assert asyncio.run(asked(address, ServiceTls.load(ours.services)))
        assert not asyncio.run(asked(address, None))


def test_a_worker_of_another_cluster_gets_no_requests(
    cluster: Served, http: httpx.Client, tmp_path: Path
) -> None:
    """It stands where one of ours was: those that dial it say why it does not count, and are not deceived."""
    decode = cluster.worker("decode")
    port = next(
        c.laddr.port for c in decode.net_connections("tcp") if f"127.0.0.1:{c.laddr.port}" in addresses(http)
    )
    theirs = certificates.make(tmp_path / "theirs")

    async def impostor() -> None:
        server = rpc.server()
        rpc.HealthService(server, [])
        async with asyncio.timeout(WAIT_S):
            while True:
                try:
                    rpc.bind(server, "127.0.0.1", port, ServiceTls.load(theirs.services).server)
                    break
                except EyasError:
                    await asyncio.sleep(0.01)
        await server.start()
        await asyncio.to_thread(
            wait_until, lambda: cluster.says("its certificate is refused: unable to get local issuer"), WAIT_S
        )
        await server.stop(0)

    decode.send_signal(signal.SIGKILL)
    asyncio.run(impostor())
    wait_until(lambda: http.get("/health").status_code == 200, 60.0)  # ours has come back


def test_what_users_say_stands_in_no_log_and_no_metric(
    cluster: Served, http: httpx.Client, ours: Certificates
) -> None:
    """Power: the mark was in what was sent, in what came back, and one line at least tells of each answer."""
    good = http.post("/v1/completions", json={"model": "tiny", "prompt": MARK, "echo": True, "max_tokens": 2})
    assert MARK in good.text
    for body in grammars():
        reply = http.post("/v1/chat/completions", json=body)
        assert reply.status_code == 200 and MARK in reply.text, reply.text
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": MARK}}}
    tool = {"type": "function", "function": {"name": MARK, "parameters": {}}}
    refused = [
        chat(messages=[{"role": MARK, "content": MARK}]),
        chat(messages=MARK),
        chat(max_tokens=MARK),
        chat(stop=[MARK] * 1000),
        chat(model=MARK),
        chat(response_format=schema),
        chat(tools=[tool], tool_choice={"type": "function", "function": {"name": MARK + "2"}}),
        chat(messages=[{"role": "user", "content": MARK * 5000}]),
        chat(timeout=0.001, max_tokens=512),
        chat(logit_bias={MARK: 1}),
        chat(n=MARK, **{MARK: 1}),
    ]
    statuses = [http.post("/v1/chat/completions", json=body).status_code for body in refused]
    assert statuses[:-4] == [400, 400, 400, 400, 404, 400, 400] and all(s >= 400 for s in statuses), statuses
    for send in (
        lambda: http.post("/v1/chat/completions", content=f'{{"model": {MARK}'.encode()),
        lambda: http.get(f"/v1/models/{MARK}"),
        lambda: http.get(f"/{MARK}", headers={"authorization": f"Bearer {MARK}"}),
        lambda: http.post("/tokenize", json={"prompt": [MARK]}),
        lambda: http.post("/generate", json={"text": MARK, "sampling_params": {"regex": f"({MARK}"}}),
        lambda: http.post("/v1/responses", json={"model": "tiny", "input": [{"type": MARK}]}),
    ):
        assert send().status_code >= 400
    leave_early(http)
    asyncio.run(by_grpc(cluster, ours))
    cluster.worker("prefill").send_signal(signal.SIGKILL)  # a request that fails, or is moved, in mid-air
    http.post("/v1/chat/completions", json=chat(max_tokens=64))
    wait_until(lambda: cluster.says("ended after 2 tokens"), WAIT_S)
    pages = metrics_pages(cluster, http)
    assert len(pages) >= 3 and all("# HELP" in page for page in pages.values())
    mark = re.compile(MARK, re.IGNORECASE)
    assert [line for line in cluster.lines if mark.search(line)] == []
    assert [line for page in pages.values() for line in page.splitlines() if mark.search(line)] == []


def grammars() -> list[dict[str, Any]]:
    """Requests whose grammars say the mark, so that workers read it as text."""
    wanted = {"type": "object", "properties": {MARK: {"type": "boolean"}}, "required": [MARK]}
    schema = {"type": "json_schema", "json_schema": {"name": MARK, "strict": True, "schema": wanted}}
    tool = {"type": "function", "function": {"name": MARK, "parameters": wanted}}
    choice = {"type": "function", "function": {"name": MARK}}
    return [
        chat(response_format=schema, max_tokens=64),
        chat(guided_regex=f"{MARK}( {MARK})?", max_tokens=64),
        chat(guided_choice=[MARK], max_tokens=64, prediction={"type": "content", "content": MARK}),
        chat(tools=[tool], tool_choice=choice, max_tokens=64),
    ]


def leave_early(http: httpx.Client) -> None:
    """A stream whose client hangs up."""
    with http.stream("POST", "/v1/chat/completions", json=chat(stream=True, max_tokens=256)) as reply:
        next(reply.iter_lines())


async def by_grpc(cluster: Served, ours: Certificates) -> None:
    target = f"https://127.0.0.1:{cluster.grpc_port}"
    async with AsyncClient(target, api_key=KEY, ca=ours.ca, retries=0) as client:
        assert (await client.generate(MARK, max_tokens=2)).usage.completion_tokens == 2
        for asked in ({"timeout_s": 0.001}, {"max_tokens": 10**6}, {"stop": [MARK] * 1000}):
            with pytest.raises(EyasError):
                await client.chat([{"role": "user", "content": MARK}], **asked)
        with pytest.raises(EyasError):
            await client.chat([{"role": MARK, "content": MARK}])
    async with AsyncClient(target, api_key=MARK, ca=ours.ca, retries=0) as client:
        with pytest.raises(EyasError):
            await client.models()
