"""Hostile gRPC: calls that are nearly right, so that they get deep, and calls that are right in nothing.

It knows how a gateway, a puller and a decode engine talk to workers. What an answer may be is the wire's.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping

import numpy as np
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from eyas.common.config import NANO_HEAD
from eyas.common.page_names import packed
from eyas.common.types import Role
from protos import common_pb2, decode_pb2, draft_pb2, eyas_pb2, prefill_pb2, transfer_pb2
from tests.fuzz.values import fill, nearly
from tests.fuzz.wire import Method, Talk, Wire, methods

WIDTH = json.loads((NANO_HEAD / "config.json").read_text())["hidden_size"]  # of a feature
TIMEOUT_S = 5.0


class GrpcFuzz:
    """`attack` makes one random call, or a few that belong together. `workers`: addresses by name."""

    def __init__(self, gateway: str, workers: Mapping[str, str], seed: int) -> None:
        self._rng = random.Random(f"grpc/{seed}")
        self._gateway = gateway
        self._workers = workers
        self._methods = methods()
        self._ids = 0
        self.wire = Wire()

    async def attack(self) -> None:
        plays = (
            self._anything, self._front_door, self._surroundings, self._decode, self._decode, self._draft,
            self._draft, self._pull, self._pull,
        )  # fmt: skip
        await self._rng.choice(plays)()

    # --- right in nothing --------------------------------------------------------------------------------

    async def _anything(self) -> None:
        """Any method of any server: random messages, none, too many, or bytes that are no message."""
        rng, method = self._rng, self._rng.choice(list(self._methods.values()))
        make = self._bytes if rng.random() < 0.3 else self._message
        most = 6 if method.streams_up else 2
        sent = [make(method) for _ in range(rng.choice((0, 1, 1, 1, 2, most)))]
        address = rng.choice((self._gateway, *self._workers.values()))
        await self.wire.call(address, method, Talk(sent, hold_s=rng.choice((0.0, 0.0, 0.3))))

    def _message(self, method: Method) -> bytes:
        return bytes(fill(self._rng, method.takes()).SerializeToString())

    def _bytes(self, method: Method) -> bytes:
        rng, right = self._rng, self._message(method)
        cut = right[: rng.randrange(len(right) + 1)]
        return rng.choice((cut, rng.randbytes(rng.choice((1, 9, 500))), right + rng.randbytes(4)))

    # --- nearly right ------------------------------------------------------------------------------------

    async def _front_door(self) -> None:
        rng = self._rng
        options = eyas_pb2.GenerateOptions(
            max_tokens=rng.randrange(1, 24), temperature=rng.choice((0.0, 0.8)), seed=rng.getrandbits(64),
            n=rng.choice((1, 1, 3)), stop=["no such text"], logit_bias={5: 1.0}, logprobs=2,
        )  # fmt: skip
        if rng.random() < 0.5:
            messages = [
                eyas_pb2.ChatMessage(role=eyas_pb2.CHAT_ROLE_USER, content="What is the capital of Peru?")
            ]
            await self._ask("Eyas/Chat", eyas_pb2.ChatRequest(messages=messages, options=options))
        else:
            prompt = {"ids": eyas_pb2.TokenIds(ids=self._prompt())} if rng.random() < 0.5 else {"text": "Hi"}
            await self._ask("Eyas/Generate", eyas_pb2.GenerateRequest(options=options, **prompt))

    async def _surroundings(self) -> None:
        """Health and reflection, of any server."""
        rng = self._rng
        address = rng.choice((self._gateway, *self._workers.values()))
        service = rng.choice(("", "eyas.v1.Eyas", "no.such.Service"))
        check = health_pb2.HealthCheckRequest(service=service)
        info = rng.choice(("file_by_filename", "file_containing_symbol", "list_services"))
        ask = reflection_pb2.ServerReflectionRequest(**{info: rng.choice(("eyas.v1.Eyas", "x" * 9999, "*"))})
        method, message = rng.choice(
            (
                ("/grpc.health.v1.Health/Check", check),
                ("/grpc.health.v1.Health/Watch", check),
                ("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", ask),
            )
        )
        await self._say(address, method, [message])

    async def _decode(self) -> None:
        """A gateway's Session with a request or two: computed there, or begun with first tokens."""
        rng, ups = self._rng, []
        for request in [self._request() for _ in range(rng.choice((1, 2, 4)))]:
            source = rng.choice((decode_pb2.SOURCE_ATTACH, decode_pb2.SOURCE_LOCAL))
            attempt = rng.choice((1, 2))
            submit = decode_pb2.Submit(request=request, attempt=attempt, source=source)
            ups.append(decode_pb2.DecodeServiceSessionRequest(submit=submit))
            if source == decode_pb2.SOURCE_ATTACH:
                firsts = [common_pb2.FirstToken(choice=c.index, token=77) for c in request.choices]
                attach = decode_pb2.Attach(id=request.id, attempt=attempt, first_tokens=firsts)
                ups.append(decode_pb2.DecodeServiceSessionRequest(attach=attach))
            if rng.random() < 0.4:
                cancel = decode_pb2.Cancel(id=request.id, choice=rng.choice((None, 0, 1)))
                ups.append(decode_pb2.DecodeServiceSessionRequest(cancel=cancel))
        ups += rng.choices(ups, k=rng.choice((0, 0, 0, 1)))  # twice the same
        await self._session(ups)

    async def _session(self, ups: list[decode_pb2.DecodeServiceSessionRequest]) -> None:
        hold_s = self._rng.uniform(0.1, 1.5)
        await self._say(self._one(Role.DECODE), "DecodeService/Session", ups, hold_s)

    async def _draft(self) -> None:
        """A decode engine's Session: sequences that open, commit rows in order, and close."""
        rng, ups = self._rng, []
        for seq in range(1, rng.choice((2, 4, 8))):
            base = rng.choice((0, 0, 7, 40, 2000))
            opens = [draft_pb2.DraftOpen(seq=seq, generation=1, base_len=base, params=self._params())]
            ups.append(draft_pb2.DraftServiceSessionRequest(opens=opens))
            request = rng.choice(((5, 1, 6), (5, 1, 6), (3, 4, 16), (16, 8, 128)))
            for _ in range(rng.randrange(1, 5)):
                ups.append(draft_pb2.DraftServiceSessionRequest(commits=[self._commit(seq, base, request)]))
                base += len(ups[-1].commits[0].tokens)
            if rng.random() < 0.3:
                ups.append(
                    draft_pb2.DraftServiceSessionRequest(closes=[draft_pb2.DraftClose(seq=seq, generation=1)])
                )
        await self._say(self._one(Role.DRAFT), "DraftService/Session", ups, rng.uniform(0.1, 0.6))

    def _commit(self, seq: int, base: int, request: tuple[int, int, int]) -> draft_pb2.DraftCommit:
        rng = self._rng
        tokens = [rng.randrange(4096) for _ in range(rng.choice((1, 2, 17)))]
        features = np.array([[rng.choice((0.1, -3.0, 1e30))] * WIDTH for _ in tokens], np.float32)
        if rng.random() < 0.1:
            features[0, 0] = np.nan
        steps, topk, draft_tokens = request
        return draft_pb2.DraftCommit(
            seq=seq, generation=1, base_len=base, tokens=tokens, features=features.tobytes(),
            steps=steps, topk=topk, draft_tokens=draft_tokens,
        )  # fmt: skip

    async def _pull(self) -> None:
        """A prompt is computed, and its pages are asked for: by a decode worker, a draft worker, or here."""
        rng, owner, request = self._rng, self._one(Role.PREFILL), self._request()
        handles: list[common_pb2.KvHandle] = []

        def heard(reply: Message) -> None:
            assert isinstance(reply, prefill_pb2.PrefillResponse)
            handles.extend(reply.started.handles)

        ask = prefill_pb2.PrefillRequest(request=request, attempt=1, offer_draft=rng.random() < 0.7)
        path = "/eyas.internal.v1.PrefillService/Prefill"
        await self.wire.call(owner, self._methods[path], Talk([self._perhaps(ask, 0.3)]), heard)
        if not handles:
            return
        way = rng.randrange(3)
        if way == 0:
            submit = decode_pb2.Submit(request=request, attempt=1, source=decode_pb2.SOURCE_ATTACH)
            attach = decode_pb2.Attach(id=request.id, attempt=1, handles=handles)
            await self._session(
                [
                    decode_pb2.DecodeServiceSessionRequest(submit=submit),
                    decode_pb2.DecodeServiceSessionRequest(attach=attach),
                ]
            )
        elif way == 1:
            await self._draft_from(handles[-1])
        else:
            await self._read(owner, rng.choice(handles))

    async def _draft_from(self, handle: common_pb2.KvHandle) -> None:
        base = handle.tokens - self._rng.choice((0, 0, 1))
        open = draft_pb2.DraftOpen(
            seq=1, generation=1, base_len=base, params=self._params(), handle=handle, attempt=1
        )
        up = draft_pb2.DraftServiceSessionRequest(opens=[open], commits=[self._commit(1, base, (5, 1, 6))])
        await self._say(self._one(Role.DRAFT), "DraftService/Session", [up], 1.0)

    async def _read(self, owner: str, handle: common_pb2.KvHandle) -> None:
        """As a puller does: Handshake, then Watch, and beside it Fetch and Release."""
        shake = transfer_pb2.HandshakeRequest(group=handle.group, layout_hash=handle.layout)
        await self._say(owner, "TransferService/Handshake", [shake])
        pages = [page for shard in handle.shards for page in shard.pages]
        fetch = transfer_pb2.FetchRequest(
            epoch=handle.epoch, id=handle.id, attempt=1, pages=pages, group=handle.group
        )
        release = transfer_pb2.ReleaseRequest(epoch=handle.epoch, id=handle.id, attempt=1)

        async def beside() -> None:
            await asyncio.sleep(0.1)
            await self._say(owner, "TransferService/Fetch", [fetch])
            await self._say(owner, "TransferService/Release", [release])

        watch = transfer_pb2.WatchRequest(handle=handle, attempt=1)
        await asyncio.gather(self._say(owner, "TransferService/Watch", [watch]), beside())

    # --- what they are made of ---------------------------------------------------------------------------

    def _one(self, role: Role) -> str:
        return self._rng.choice([at for name, at in self._workers.items() if name.startswith(role)])

    async def _ask(self, name: str, message: Message) -> None:
        await self._say(self._gateway, name, [message])

    async def _say(self, address: str, name: str, messages: list[Message], hold_s: float = 0.0) -> None:
        """Some of the messages are only nearly right; every tenth caller hangs up after a few replies."""
        rng = self._rng
        leaves_after = rng.randrange(1, 6) if rng.random() < 0.1 else None
        share = 0.5 if len(messages) == 1 else 0.2
        talk = Talk([self._perhaps(message, share) for message in messages], hold_s, leaves_after)
        package = "eyas.v1" if name.startswith("Eyas/") else "eyas.internal.v1"
        path = name if name.startswith("/") else f"/{package}.{name}"
        await self.wire.call(address, self._methods[path], talk)

    def _perhaps(self, message: Message, share: float) -> bytes:
        """`share` of the messages are wrong in one field."""
        wrong = self._rng.random() < share
        return nearly(self._rng, message) if wrong else bytes(message.SerializeToString())

    def _request(self) -> common_pb2.GenerationRequest:
        rng = self._rng
        self._ids += 1
        indices = rng.choice(((0,), (0,), (0, 1, 2), (2, 5)))
        known = rng.choice(((), (), (), (77, 78)))  # of a request that has moved
        return common_pb2.GenerationRequest(
            id=f"fuzz-{self._ids}", prompt_ids=packed(self._prompt()), params=self._params(),
            timeout_s=TIMEOUT_S,
            choices=[common_pb2.Choice(index=index, output_ids=known) for index in indices],
            speculative=rng.random() < 0.8,
        )  # fmt: skip

    def _prompt(self) -> list[int]:
        return [self._rng.randrange(4096) for _ in range(self._rng.choice((1, 16, 17, 50, 200)))]

    def _params(self) -> common_pb2.SamplingParams:
        rng = self._rng
        params = common_pb2.SamplingParams(
            max_tokens=rng.randrange(0, 24), temperature=rng.choice((0.0, 0.8)), top_p=1.0, top_k=20,
            repetition_penalty=rng.choice((1.0, 1.1)), logit_bias={5: 1.0}, seed=rng.getrandbits(64),
        )  # fmt: skip
        if rng.random() < 0.3:
            params.logprobs, params.prompt_logprobs = 2, 1
        return params
