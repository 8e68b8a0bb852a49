from protos import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class InfoRequest(_message.Message):
    __slots__ = ("known_epoch",)
    KNOWN_EPOCH_FIELD_NUMBER: _ClassVar[int]
    known_epoch: int
    def __init__(self, known_epoch: _Optional[int] = ...) -> None: ...

class CachedRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CachedResponse(_message.Message):
    __slots__ = ("epoch", "page_size", "lookahead", "whole", "added", "dropped")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LOOKAHEAD_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    ADDED_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    page_size: int
    lookahead: int
    whole: bool
    added: bytes
    dropped: bytes
    def __init__(self, epoch: _Optional[int] = ..., page_size: _Optional[int] = ..., lookahead: _Optional[int] = ..., whole: _Optional[bool] = ..., added: _Optional[bytes] = ..., dropped: _Optional[bytes] = ...) -> None: ...

class InfoResponse(_message.Message):
    __slots__ = ("worker", "roles", "epoch", "model", "fingerprint", "draft_fingerprint", "context_length", "vocab_size", "pages_total", "pages_used", "running", "waiting", "serving", "synthetic", "starting", "stalled", "stays", "backlog", "rates", "arithmetic", "tokenizer", "trouble", "weights", "paused", "released", "adapters", "adapter_slots")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGES_TOTAL_FIELD_NUMBER: _ClassVar[int]
    PAGES_USED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    SERVING_FIELD_NUMBER: _ClassVar[int]
    SYNTHETIC_FIELD_NUMBER: _ClassVar[int]
    STARTING_FIELD_NUMBER: _ClassVar[int]
    STALLED_FIELD_NUMBER: _ClassVar[int]
    STAYS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_FIELD_NUMBER: _ClassVar[int]
    RATES_FIELD_NUMBER: _ClassVar[int]
    ARITHMETIC_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    TROUBLE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_SLOTS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    roles: _containers.RepeatedScalarFieldContainer[_common_pb2.Role]
    epoch: int
    model: str
    fingerprint: str
    draft_fingerprint: str
    context_length: int
    vocab_size: int
    pages_total: int
    pages_used: int
    running: int
    waiting: int
    serving: bool
    synthetic: bool
    starting: bool
    stalled: bool
    stays: bool
    backlog: Backlog
    rates: StepRates
    arithmetic: str
    tokenizer: str
    trouble: str
    weights: Weights
    paused: bool
    released: _containers.RepeatedScalarFieldContainer[str]
    adapters: AdapterRoster
    adapter_slots: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_common_pb2.Role, str]]] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., fingerprint: _Optional[str] = ..., draft_fingerprint: _Optional[str] = ..., context_length: _Optional[int] = ..., vocab_size: _Optional[int] = ..., pages_total: _Optional[int] = ..., pages_used: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., serving: _Optional[bool] = ..., synthetic: _Optional[bool] = ..., starting: _Optional[bool] = ..., stalled: _Optional[bool] = ..., stays: _Optional[bool] = ..., backlog: _Optional[_Union[Backlog, _Mapping]] = ..., rates: _Optional[_Union[StepRates, _Mapping]] = ..., arithmetic: _Optional[str] = ..., tokenizer: _Optional[str] = ..., trouble: _Optional[str] = ..., weights: _Optional[_Union[Weights, _Mapping]] = ..., paused: _Optional[bool] = ..., released: _Optional[_Iterable[str]] = ..., adapters: _Optional[_Union[AdapterRoster, _Mapping]] = ..., adapter_slots: _Optional[_Iterable[str]] = ...) -> None: ...

class Weights(_message.Message):
    __slots__ = ("version", "generation", "digest", "folder", "closed", "seconds")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    version: str
    generation: int
    digest: str
    folder: str
    closed: bool
    seconds: float
    def __init__(self, version: _Optional[str] = ..., generation: _Optional[int] = ..., digest: _Optional[str] = ..., folder: _Optional[str] = ..., closed: _Optional[bool] = ..., seconds: _Optional[float] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "id", "rank", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    id: str
    rank: int
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., id: _Optional[str] = ..., rank: _Optional[int] = ..., pinned: _Optional[bool] = ...) -> None: ...

class AdapterRoster(_message.Message):
    __slots__ = ("revision", "adapters")
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    revision: int
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, revision: _Optional[int] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Backlog(_message.Message):
    __slots__ = ("decoding", "context", "queued", "prompt_share", "prefill_room", "decode_room", "pace", "kv_room")
    DECODING_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROOM_FIELD_NUMBER: _ClassVar[int]
    DECODE_ROOM_FIELD_NUMBER: _ClassVar[int]
    PACE_FIELD_NUMBER: _ClassVar[int]
    KV_ROOM_FIELD_NUMBER: _ClassVar[int]
    decoding: int
    context: int
    queued: int
    prompt_share: float
    prefill_room: int
    decode_room: int
    pace: StepPace
    kv_room: int
    def __init__(self, decoding: _Optional[int] = ..., context: _Optional[int] = ..., queued: _Optional[int] = ..., prompt_share: _Optional[float] = ..., prefill_room: _Optional[int] = ..., decode_room: _Optional[int] = ..., pace: _Optional[_Union[StepPace, _Mapping]] = ..., kv_room: _Optional[int] = ...) -> None: ...

class StepPace(_message.Message):
    __slots__ = ("decode", "prompt", "mixed")
    DECODE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    MIXED_FIELD_NUMBER: _ClassVar[int]
    decode: float
    prompt: float
    mixed: float
    def __init__(self, decode: _Optional[float] = ..., prompt: _Optional[float] = ..., mixed: _Optional[float] = ...) -> None: ...

class StepRates(_message.Message):
    __slots__ = ("rows_ms", "context_ms", "pairs_ms", "mixed_ms", "grain", "chunk_tokens", "mixed_tokens")
    ROWS_MS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_MS_FIELD_NUMBER: _ClassVar[int]
    PAIRS_MS_FIELD_NUMBER: _ClassVar[int]
    MIXED_MS_FIELD_NUMBER: _ClassVar[int]
    GRAIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIXED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    rows_ms: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    context_ms: _containers.RepeatedCompositeFieldContainer[CurvePoint]
    pairs_ms: float
    mixed_ms: float
    grain: int
    chunk_tokens: int
    mixed_tokens: int
    def __init__(self, rows_ms: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ..., context_ms: _Optional[_Iterable[_Union[CurvePoint, _Mapping]]] = ..., pairs_ms: _Optional[float] = ..., mixed_ms: _Optional[float] = ..., grain: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., mixed_tokens: _Optional[int] = ...) -> None: ...

class CurvePoint(_message.Message):
    __slots__ = ("x", "y")
    X_FIELD_NUMBER: _ClassVar[int]
    Y_FIELD_NUMBER: _ClassVar[int]
    x: float
    y: float
    def __init__(self, x: _Optional[float] = ..., y: _Optional[float] = ...) -> None: ...

class ProbeLinksRequest(_message.Message):
    __slots__ = ("owner",)
    OWNER_FIELD_NUMBER: _ClassVar[int]
    owner: str
    def __init__(self, owner: _Optional[str] = ...) -> None: ...

class ProbeLinksResponse(_message.Message):
    __slots__ = ("links",)
    LINKS_FIELD_NUMBER: _ClassVar[int]
    links: _containers.RepeatedCompositeFieldContainer[Link]
    def __init__(self, links: _Optional[_Iterable[_Union[Link, _Mapping]]] = ...) -> None: ...

class Link(_message.Message):
    __slots__ = ("rank", "path", "passed_over", "latency_s", "bytes_per_s", "pulls", "pulled_bytes", "problem")
    RANK_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PASSED_OVER_FIELD_NUMBER: _ClassVar[int]
    LATENCY_S_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    PULLS_FIELD_NUMBER: _ClassVar[int]
    PULLED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    rank: int
    path: str
    passed_over: _containers.RepeatedCompositeFieldContainer[PassedOver]
    latency_s: float
    bytes_per_s: float
    pulls: int
    pulled_bytes: int
    problem: str
    def __init__(self, rank: _Optional[int] = ..., path: _Optional[str] = ..., passed_over: _Optional[_Iterable[_Union[PassedOver, _Mapping]]] = ..., latency_s: _Optional[float] = ..., bytes_per_s: _Optional[float] = ..., pulls: _Optional[int] = ..., pulled_bytes: _Optional[int] = ..., problem: _Optional[str] = ...) -> None: ...

class PassedOver(_message.Message):
    __slots__ = ("path", "reason")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    path: str
    reason: str
    def __init__(self, path: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class FlushCacheRequest(_message.Message):
    __slots__ = ("wait_s",)
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    wait_s: float
    def __init__(self, wait_s: _Optional[float] = ...) -> None: ...

class FlushCacheResponse(_message.Message):
    __slots__ = ("pages",)
    PAGES_FIELD_NUMBER: _ClassVar[int]
    pages: int
    def __init__(self, pages: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class SetAdaptersRequest(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: AdapterRoster
    def __init__(self, adapters: _Optional[_Union[AdapterRoster, _Mapping]] = ...) -> None: ...

class SetAdaptersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
