"""The LoRA adapters of a worker: those loaded at startup, and those that gateways load later.

A gateway loads an adapter on every worker of a cluster before it lists the adapter, so that either all
workers serve it or none. The engine identifies adapters by id; this module maps names to ids.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec

from eyas.common.config import AdapterConfig
from eyas.common.errors import (
    Busy,
    ConfigError,
    EyasError,
    Forbidden,
    NotFound,
)
from eyas.common.types import Adapter, AdapterRoster
from eyas.common.wire.info import AdapterHost
from eyas.engine.ipc.adapter_messages import ADAPTER_FILES, DRAFT_FOLDER
from eyas.engine.ipc.client import EngineClient
from eyas.worker.engine_calls import load_adapter, unload_adapter

HEARD_S = 3.0  # after this time, every gateway has received a new roster
_log = logging.getLogger("eyas.front")


class WorkerAdapters(AdapterHost):
    """`begin` loads the adapters of the command line; gateways call `load` and `set`. Calls run one at a
    time.

    `roster`: the adapters that requests may name.
    """

    def __init__(self, engine: EngineClient, config: AdapterConfig) -> None:
        self._engine = engine
        self._config = config
        self.roster = AdapterRoster()
        self._loaded: dict[str, Adapter] = {}  # by id, listed or not
        self._replaced: dict[str, asyncio.Task[None]] = {}  # by id
        self._turn = asyncio.Lock()

    async def begin(self) -> None:
        """Loads the adapters of the command line. Raises ConfigError for one that cannot be loaded."""
        adapters = []
        for name, path in self._config.loras:
            try:
                adapters.append(await self._load(Adapter(name, path)))
            except EyasError as error:
                raise ConfigError(f"--lora {name}={path}: {error.message}", param="lora") from error
        self.roster = AdapterRoster(adapters=tuple(adapters))

    async def load(self, adapter: Adapter) -> Adapter:
        """Loads an adapter from a folder that callers may name, without listing it."""
        self._check_allowed()
        async with self._turn:
            return await self._load(msgspec.structs.replace(adapter, path=self._folder(adapter.path)))

    async def set(self, roster: AdapterRoster) -> None:
        """Loads and lists the adapters of `roster`, and unloads all others.

        If some cannot be loaded, the worker lists the rest but stays at its older revision, which shows
        gateways that it is out of date. Raises the last error.
        """
        self._check_allowed()
        async with self._turn:
            older = roster.revision < self.roster.revision
            if older or (roster.revision == self.roster.revision and roster.content != self.roster.content):
                raise Busy("the adapters of this cluster were changed meanwhile", param="lora_name")
            adapters: list[Adapter] = []
            failure: EyasError | None = None
            for adapter in roster.adapters:
                try:
                    await self._ensure_loaded(adapter)
                    adapters.append(adapter)
                except EyasError as error:
                    failure = error
            names = {adapter.name for adapter in adapters}
            for id in self._loaded.keys() - {adapter.id for adapter in adapters} - self._replaced.keys():
                if self._loaded[id].name not in names:
                    await self._unload(id)
                    continue
                task = asyncio.create_task(self._unload_replaced(id), name=f"replaced adapter {id}")
                self._replaced[id] = task
            revision = self.roster.revision if failure else roster.revision
            self.roster = AdapterRoster(revision, tuple(adapters))
            if failure is not None:
                raise failure

    async def _unload(self, id: str) -> None:
        await unload_adapter(self._engine, id)
        _log.info("adapter %s is unloaded: %s", self._loaded.pop(id).name, id)

    async def _unload_replaced(self, id: str) -> None:
        """Unloads an adapter whose name now belongs to another one, after HEARD_S: until then, a gateway with
        the old roster may still send requests for it.
        """
        await asyncio.sleep(HEARD_S)
        async with self._turn:
            del self._replaced[id]
            if id not in self.roster.ids:
                await self._unload(id)

    def close(self) -> None:
        """Cancels the pending unloads."""
        for task in self._replaced.values():
            task.cancel()

    async def _ensure_loaded(self, adapter: Adapter) -> None:
        known = self._loaded.get(adapter.id)
        if known is None:
            await self._load(msgspec.structs.replace(adapter, path=self._folder(adapter.path)))
        elif known.pinned != adapter.pinned:
            await self._load(msgspec.structs.replace(adapter, path=known.path))

    async def _load(self, adapter: Adapter) -> Adapter:
        """Loads the adapter into the engine. Raises EyasError if its folder cannot be used."""
        loaded = await load_adapter(self._engine, adapter)
        what = f"{loaded.id}, of rank {loaded.rank}, from {adapter.path}"
        _log.info("adapter %s is loaded: %s", adapter.name, what)
        self._loaded[loaded.id] = loaded
        return loaded

    # --- what callers may name ---------------------------------------------------------------------------

    def _check_allowed(self) -> None:
        if not self._config.dirs:
            raise Forbidden(
                "adapters are those of the start here: --lora-dir DIR lets callers load others from a folder",
                param="lora_path",
            )

    def _folder(self, path: str) -> str:
        """Resolves a path, absolute or relative to a folder of --lora-dir. Links are followed first.

        Raises Forbidden for a path outside these folders, and NotFound for a folder that does not exist.
        """
        roots = [Path(root).resolve() for root in self._config.dirs]
        try:
            candidates = [(root / path).resolve() for root in roots]
        except (OSError, ValueError, RuntimeError):  # an invalid path, or a cycle of links
            candidates = []
        inside = [folder for folder in candidates if any(folder.is_relative_to(root) for root in roots)]
        if not inside:
            raise Forbidden(f"{path[:200]!r} is in no folder of --lora-dir", param="lora_path")
        for folder in inside:
            if folder.is_dir():
                self._check_files(folder, roots)
                return str(folder)
        raise NotFound(f"there is no folder {path[:200]!r} of an adapter", param="lora_path")

    @staticmethod
    def _check_files(folder: Path, roots: list[Path]) -> None:
        """Raises Forbidden for a file that links to one outside `roots`."""
        for name in (*ADAPTER_FILES, *(f"{DRAFT_FOLDER}/{name}" for name in ADAPTER_FILES)):
            try:
                file = (folder / name).resolve()
            except (OSError, RuntimeError):  # a cycle of links
                file = Path("/")
            if not any(file.is_relative_to(root) for root in roots):
                raise Forbidden(f"{name} of {folder} is in no folder of --lora-dir", param="lora_path")
