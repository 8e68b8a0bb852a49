"""What a model takes of a worker's GPU: weights, KV, and states, as a worker counts them at its start."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from eyas.cluster.checks import MemoryNeeds
from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.errors import ConfigError
from eyas.common.machine.memory import GIB
from eyas.engine.checkpoint.folder import has_weights
from eyas.engine.checkpoint.sizes import groups_of
from eyas.engine.kv.groups import KvGroups, most_of_window
from eyas.engine.models.table import read_model
from eyas.simulator.hardware import WindowedKv, WorkerHardware


@dataclass(frozen=True)
class ModelMemory:
    """A model on a GPU of `gpu` bytes. `needs`: as of `eyas.cluster.checks`; `config`: the worker's."""

    config: EngineConfig
    needs: MemoryNeeds
    groups: KvGroups
    gpu: int

    @classmethod
    def of(
        cls, folder: Path, gpu_gib: float, kv_dtype: str = "auto", slots: int | None = None
    ) -> ModelMemory:
        """Reads config.json and, where there are weights, their headers. `slots`: of states; None: as many as
        a worker takes by itself. Raises ConfigError.
        """
        there = folder.is_dir() and has_weights(folder)
        config = resolve_engine(
            "cuda",
            model=str(folder),
            kv_cache_dtype=kv_dtype,
            state_slots=slots,
            load_format="auto" if there else "dummy",
        )
        model = read_model(folder, config.load_format)
        made = cls(config, MemoryNeeds.of(config), groups_of(model, config), int(gpu_gib * GIB))
        if made.room <= 0:
            takes = made.needs.weights + made.needs.states
            has = config.mem_fraction_static * gpu_gib
            fewer = f" ({made.needs.states / GIB:.1f} of it are --state-slots)" if made.needs.states else ""
            raise ConfigError(
                f"--model: what {made.needs.model} takes beside its KV is {takes / GIB:.1f} GiB{fewer}, and a"
                f" worker has {has:.1f} of the {gpu_gib:g} of a GPU (--gpu-gib)",
                param="model",
            )
        return made

    @property
    def room(self) -> int:
        """Bytes that are left for KV."""
        return int(self.gpu * self.config.mem_fraction_static) - self.needs.weights - self.needs.states

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of a token in all groups of layers."""
        return self.needs.page // self.config.page_size

    @property
    def state_bytes(self) -> int:
        """Bytes of a sequence's state."""
        return self.needs.states // self.config.slots_of_states

    @property
    def most_running(self) -> int:
        """Sequences that may run at once: each takes a slot, where there are states."""
        return self.config.slots_of_states if self.needs.states else self.config.max_running

    def worker(self, hardware: WorkerHardware) -> WorkerHardware:
        """A worker as fast as `hardware`, with this memory."""
        page, windowed = self.config.page_size, [group for group in self.groups if group.windowed]
        spans = tuple(page * most_of_window(group, page, self.config.round_width) for group in windowed)
        return dataclasses.replace(
            hardware,
            max_running=min(hardware.max_running, self.most_running),
            pool_tokens=self.room // self.token_bytes,
            kv_bytes_per_token=self.token_bytes,
            windows=tuple(WindowedKv(1 / len(self.groups), span) for span in spans),
            state_bytes=self.state_bytes,
        )

    def lines(self, hardware: WorkerHardware, length: int) -> list[str]:
        """What a reader is told. `hardware`: of `worker`; `length`: tokens of a sequence."""
        needs, whole = self.needs, hardware.held(length) * self.token_bytes
        kv = f"{self.token_bytes:,} bytes of KV for each token"
        if hardware.windows:
            last = " and ".join(f"{span:,}" for span in sorted({each.tokens for each in hardware.windows}))
            share = sum(each.share for each in hardware.windows)
            kv += f", {share:.0%} of them for the last {last} tokens alone"
        slots = f"{self.config.slots_of_states} slots of states"
        states = f", {slots} {needs.states / GIB:.1f} GiB" if needs.states else ""
        fit = int(hardware.pool_tokens // hardware.held(length))
        few = f" ({hardware.max_running} run at once)" if fit > hardware.max_running else ""
        return [
            f"{needs.model}: weights {needs.weights / GIB:.1f} GiB{states}; {kv}.",
            f"{self.room / GIB:.1f} of {self.gpu / GIB:.1f} GiB are left for KV: {fit:,} sequences of"
            f" {length:,} tokens, {whole / 2**20:,.1f} MiB each{few}.",
        ]
