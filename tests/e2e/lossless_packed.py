"""Targets and heads in four bits: whatever way requests are answered, the tokens are those of plain decoding.

    python -m tests.e2e.lossless_packed [--prompts 40]

The embedded model and its EAGLE-3 head, as `eyas quantize` writes them. Of a target in four bits, and of one
whose KV is in FP8, the reference is so as well; a head changes no token of the target that it was made for.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from eyas import cli
from eyas.common.config import NANO, NANO_HEAD, SpeculationConfig
from tests.e2e.lossless import PLAIN, REFERENCE, SHORT_TREE, TOGETHER, Variant, main
from tests.e2e.lossless_ways import InProcess
from tests.unit.loopback import split_configs

PROMPTS = 40
FP8_KV = "fp8_e4m3"
FORMS = {"target": "gptq", "head": "int4"}
SHAPES = {"chain 3": SpeculationConfig(3, draft_tokens=4), "tree 12": SHORT_TREE.speculation}


@dataclass(frozen=True)
class PackedModels:
    """Folders of the embedded model and of its head in four bits, below `folder`."""

    folder: Path

    @property
    def target(self) -> str:
        """The target's folder."""
        return str(self.folder / "target")

    @property
    def head(self) -> str:
        """The head's."""
        return str(self.folder / "head")

    def write(self) -> None:
        """Quantises both."""
        for source, out in ((NANO, self.target), (NANO_HEAD, self.head)):
            form = FORMS[Path(out).name]
            assert not cli.main(
                ["quantize", str(source), "--out", out, "--format", form, "--group-size", "16"]
            )

    def reference(self, kv: str = "auto") -> Variant:
        """The packed target, alone and without a drafter; `kv`: the type of its KV."""
        way = InProcess((replace(PLAIN, model=self.target, kv_cache_dtype=kv),), 1)
        return replace(REFERENCE, name="four bits, alone: the reference", way=way)

    def of_the_target(self) -> Iterator[Variant]:
        """Ways to answer by the packed target, with the head in 16 bits and in four."""
        together = InProcess((replace(PLAIN, model=self.target),), TOGETHER)
        yield Variant("four bits, together", together, speculates=False)
        for name, head in (("a head", str(NANO_HEAD)), ("a head in four bits", self.head)):
            yield from self._drafted(f"four bits, {name}", self.target, head)

    def with_fp8_kv(self) -> Iterator[Variant]:
        """Ways to answer by the packed target and head with KV in FP8, also by pages that travel."""
        plain = replace(PLAIN, model=self.target, kv_cache_dtype=FP8_KV)
        yield Variant("four bits, FP8 KV, together", InProcess((plain,), TOGETHER), speculates=False)
        spec = SHAPES["chain 3"]
        engine = replace(plain, draft=self.head, num_pages=640, speculation=spec)
        yield Variant("four bits, FP8 KV, chain 3, unified", InProcess((engine,), TOGETHER))
        yield Variant("four bits, FP8 KV, chain 3, split", InProcess(split_configs(engine), TOGETHER))

    def of_the_head(self) -> Iterator[Variant]:
        """Ways to answer by the target in 16 bits with the packed head."""
        yield from self._drafted("a head in four bits", str(NANO), self.head)

    @staticmethod
    def _drafted(name: str, target: str, head: str) -> Iterator[Variant]:
        """In every shape, in one engine and in several."""
        for shape, spec in SHAPES.items():
            engine = replace(PLAIN, model=target, draft=head, num_pages=640, speculation=spec)
            yield Variant(f"{name}, {shape}, unified", InProcess((engine,), TOGETHER))
            yield Variant(f"{name}, {shape}, split", InProcess(split_configs(engine), TOGETHER))


def _both(prog: str) -> int:
    """0 if every variant of either did what it must."""
    with TemporaryDirectory() as folder:
        models = PackedModels(Path(folder))
        models.write()
        failed = main(list(models.of_the_target()), prog, PROMPTS, models.reference())
        failed |= main(list(models.with_fp8_kv()), prog, PROMPTS, models.reference(FP8_KV))
        return main(list(models.of_the_head()), prog, PROMPTS) or failed


if __name__ == "__main__":
    sys.exit(_both("python -m tests.e2e.lossless_packed"))
