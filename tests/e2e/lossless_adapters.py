"""Two adapters and the plain model, mixed: by every way to draft, requests get the tokens they get alone.

    python -m tests.e2e.lossless_adapters [--prompts 10]

The adapters are generated for the embedded model; a request's id says which of the three answers it. Heads
draft for the model alone. Suffixes are those of answers with the same salt, so of the same adapter.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from eyas.common.config import NANO, NANO_HEAD, EngineConfig, SpeculationConfig
from eyas.common.page_names import salt_of
from eyas.common.types import GenerationRequest
from eyas.engine.adapters.peft import read_adapter
from eyas.engine.loading.spec import EngineSpec
from tests.e2e.lossless import PLAIN, REFERENCE, TOGETHER, Variant, main
from tests.e2e.lossless_ways import InProcess
from tests.unit.adapter_rig import write_adapter
from tests.unit.loopback import Loopback, Result, split_configs

PROMPTS = 10
RANKS = (8, 16)
BASE = replace(PLAIN, num_pages=640, max_loras=2)
DRAFTS = {
    "chain": replace(BASE, draft=str(NANO_HEAD), speculation=SpeculationConfig(3, draft_tokens=4)),
    "tree": replace(BASE, draft=str(NANO_HEAD), speculation=SpeculationConfig(5, 4, 16)),
    "lookup": replace(BASE, speculation=SpeculationConfig(3, draft_tokens=4, ngram=True)),
    "suffix": replace(BASE, speculation=SpeculationConfig(3, draft_tokens=4, ngram=True, suffix=True)),
}


@dataclass(frozen=True)
class Mixed(InProcess):
    """Engines with the adapters of these folders, by their ids; a third of the requests has none."""

    folders: tuple[tuple[str, Path], ...] = ()

    def _begin(self, cluster: Loopback) -> None:
        for name, folder in self.folders:
            assert cluster.load_adapter(folder).id == name
        super()._begin(cluster)

    def _ask(self, cluster: Loopback, request: GenerationRequest) -> list[Result]:
        names = ["", *(name for name, _ in self.folders)]
        adapter = names[zlib.crc32(request.id.encode()) % len(names)]
        salt = salt_of("", adapter)
        return super()._ask(cluster, msgspec.structs.replace(request, adapter=adapter, salt=salt))


@dataclass(frozen=True)
class AdaptedVariants:
    """Ways to answer with adapters that are written below `folder`."""

    folder: Path

    def written(self) -> tuple[tuple[str, Path], ...]:
        """The folders, by their ids."""
        target, made = EngineSpec.of(BASE).target, []
        for seed, rank in enumerate(RANKS):
            path = write_adapter(self.folder / f"rank{rank}", NANO, rank=rank, seed=seed, size=0.3)
            made.append((read_adapter(path, target, max(RANKS)).id, path))
        return tuple(made)

    def all(self) -> Iterator[Variant]:
        """The reference, then all others."""
        folders = self.written()

        def way(*configs: EngineConfig, at_once: int = TOGETHER) -> Mixed:
            return Mixed(configs, at_once, folders=folders)

        yield replace(REFERENCE, name="adapters, alone: the reference", way=way(BASE, at_once=1))
        yield Variant("plain, unified", way(BASE), speculates=False)
        yield Variant("plain, split", way(*split_configs(BASE)[:2]), speculates=False)
        one_slot = replace(DRAFTS["chain"], max_loras=1)
        yield Variant("chain, one slot for both, unified", way(one_slot))
        for name, engine in DRAFTS.items():
            split = split_configs(engine)
            yield Variant(f"{name}, unified", way(engine))
            yield Variant(f"{name}, split", way(*(split if engine.draft else split[:2])))


if __name__ == "__main__":
    with TemporaryDirectory() as written:
        first, *others = AdaptedVariants(Path(written)).all()
        status = main(others, "python -m tests.e2e.lossless_adapters", PROMPTS, first)
    sys.exit(status)
