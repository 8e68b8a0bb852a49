"""The memory that a model takes of a worker's GPU: weights, KV, and states, as a worker counts them at its
start.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from eyas.cluster.checks import MemoryNeeds
from eyas.common.config import EngineConfig, resolve_engine
from eyas.common.errors import ConfigError
from eyas.common.machine.memory import GIB
from eyas.engine.checkpoint.folder import has_weights
from eyas.engine.checkpoint.sizes import groups_of, slot_bytes
from eyas.engine.kv.groups import KvGroups, most_of_window
from eyas.engine.models.table import read_model
from eyas.simulator.hardware import WindowedKv, WorkerHardware


@dataclass(frozen=True)
class ModelMemory:
    """A model on a GPU of `gpu` bytes. `needs`: as of `eyas.cluster.checks`; `config`: the worker's.
    `state_bytes`: of a sequence's state; 0: it has none.
    """

    config: EngineConfig
    needs: MemoryNeeds
    groups: KvGroups
    gpu: int
    state_bytes: int = 0

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
        needs, groups, gpu = MemoryNeeds.of(config), groups_of(model, config), int(gpu_gib * GIB)
        made = cls(config, needs, groups, gpu, slot_bytes(model, config))
        if made.room <= 0:
            takes = needs.weights + made.states
            has = config.mem_fraction_static * gpu_gib
            fewer = f" ({made.states / GIB:.1f} of it are --state-slots)" if made.states else ""
            raise ConfigError(
                f"--model: what {made.needs.model} takes beside its KV is {takes / GIB:.1f} GiB{fewer}, and a"
                f" worker has {has:.1f} of the {gpu_gib:g} of a GPU (--gpu-gib)",
                param="model",
            )
        return made

    @property
    def _beside(self) -> int:
        """Bytes that are left for KV and states."""
        return int(self.gpu * self.config.mem_fraction_static) - self.needs.weights

    @property
    def slots(self) -> int:
        """Slots of states: as many as were asked for, else what half of the room holds, if that is fewer."""
        config = self.config
        if not self.state_bytes or config.state_slots is not None:
            return config.slots_of_states
        fit = max(self._beside // 2 // self.state_bytes, config.fewest_slots)
        return min(config.slots_of_states, fit)

    @property
    def states(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.state_bytes

    @property
    def room(self) -> int:
        """Bytes that are left for KV."""
        return self._beside - self.states

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of a token in all groups of layers."""
        return self.needs.page // self.config.page_size

    @property
    def most_running(self) -> int:
        """Sequences that may run at once: each takes a slot, where there are states."""
        return min(self.slots, self.config.max_running)

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
        """Lines for a reader. `hardware`: of `worker`; `length`: tokens of a sequence."""
        needs, whole = self.needs, hardware.held(length) * self.token_bytes
        kv = f"{self.token_bytes:,} bytes of KV for each token"
        if hardware.windows:
            last = " and ".join(f"{span:,}" for span in sorted({each.tokens for each in hardware.windows}))
            share = sum(each.share for each in hardware.windows)
            kv += f", {share:.0%} of them for the last {last} tokens alone"
        states = f", {self.slots} slots of states {self.states / GIB:.1f} GiB" if self.states else ""
        fit = int(hardware.pool_tokens // hardware.held(length))
        few = f" ({hardware.max_running} run at once)" if fit > hardware.max_running else ""
        return [
            f"{needs.model}: weights {needs.weights / GIB:.1f} GiB{states}; {kv}.",
            f"{self.room / GIB:.1f} of {self.gpu / GIB:.1f} GiB are left for KV: {fit:,} sequences of"
            f" {length:,} tokens, {whole / 2**20:,.1f} MiB each{few}.",
        ]
