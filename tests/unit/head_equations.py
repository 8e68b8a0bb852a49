"""The equations of EAGLE heads in plain PyTorch: dense, unpaged, row by row. Nothing of the engine is used.

`wrong` names one thing done otherwise, for checks that a comparison would notice it.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

Tensors = dict[str, torch.Tensor]
HEADS, KV_HEADS, DIM = 4, 2, 16
EPS = 1e-5


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * gain


def rope(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x [rows, heads, 16]: complex multiplication of (x_j, x_{j + 8})."""
    inverse = theta ** (-torch.arange(8) / 8)
    turn = torch.polar(torch.ones(1), positions[:, None] * inverse)[:, None]
    turned = torch.complex(x[..., :8], x[..., 8:]) * turn
    return torch.cat((turned.real, turned.imag), -1)


class Layer:
    """What attention reads, a row at a time; h = x + attention(read), then h + mlp(norm(h))."""

    def __init__(self, tensors: Tensors, theta: float) -> None:
        self.w, self.theta = tensors, theta
        self.read: list[torch.Tensor] = []
        self.positions: list[int] = []

    def project(self, name: str) -> torch.Tensor:
        """Of every row so far, [rows, heads, 16]."""
        out = torch.stack(self.read) @ self.w[f"self_attn.{name}_proj.weight"].T
        return (out + self.w.get(f"self_attn.{name}_proj.bias", 0.0)).view(len(self.read), -1, DIM)

    def keys(self) -> torch.Tensor:
        """As a pool holds them, [rows, 2, 16]."""
        return rope(self.project("k"), torch.tensor(self.positions), self.theta)

    def row(self, x: torch.Tensor, read: torch.Tensor, position: int) -> torch.Tensor:
        self.read.append(read)
        self.positions.append(position)
        w = self.w
        q = rope(self.project("q"), torch.tensor(self.positions), self.theta)[-1]
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (self.keys(), self.project("v")))
        scores = torch.einsum("hd,khd->hk", q, k) / DIM**0.5
        mixed = torch.einsum("hk,khd->hd", scores.softmax(-1), v).reshape(-1)
        h = x + w["self_attn.o_proj.weight"] @ mixed
        m = norm(h, w["post_attention_layernorm.weight"])
        gated = F.silu(w["mlp.gate_proj.weight"] @ m) * (w["mlp.up_proj.weight"] @ m)
        return h + w["mlp.down_proj.weight"] @ gated


class _Head:
    def __init__(self, folder: Path, target: Path, wrong: str = "") -> None:
        """`folder`: in the official spelling."""
        self.w = load_file(folder / "model.safetensors")
        self.ends = load_file(target / "model.safetensors")
        self.wrong = wrong
        self.embedding = self.w.get("embed_tokens.weight", self.ends["model.embed_tokens.weight"])
        if wrong == "the target's embedding":
            self.embedding = self.ends["model.embed_tokens.weight"]
        self.lm_head = self.ends.get("lm_head.weight", self.ends["model.embed_tokens.weight"])
        theta = 500000.0 if wrong == "the target's rope_theta" else 10000.0
        self.final_gain = self.ends["model.norm.weight"]
        self.layers: list[Layer] = []
        while tensors := self.below("midlayer." if self.midlayer() else f"layers.{len(self.layers)}."):
            self.layers.append(Layer(tensors, theta))
        assert self.layers

    def midlayer(self) -> bool:
        return not self.layers and "midlayer.self_attn.q_proj.weight" in self.w

    def below(self, prefix: str) -> Tensors:
        return {name.removeprefix(prefix): t for name, t in self.w.items() if name.startswith(prefix)}

    def others(self, x: torch.Tensor, position: int) -> torch.Tensor:
        """The layers after the first: those of a Llama."""
        for layer in self.layers[1:]:
            x = layer.row(x, norm(x, layer.w["input_layernorm.weight"]), position)
        return x

    @property
    def count(self) -> int:
        """Rows so far; the next one stands at this position."""
        return len(self.layers[0].read)

    def forget(self, count: int) -> None:
        """All rows but the first `count`."""
        for layer in self.layers:
            del layer.read[count:], layer.positions[count:]


class Eagle(_Head):
    """f: features, e: embeddings. z = fc [e ; f] + b; g = the layers of z; no norm before, none after."""

    def feature(self, residual: torch.Tensor) -> torch.Tensor:
        """Of rows that leave the target's last layer: what its lm_head reads."""
        return residual if self.wrong == "the feature before the norm" else norm(residual, self.final_gain)

    def row(self, feature: torch.Tensor, token: int, position: int | None = None) -> torch.Tensor:
        """g of one more row after all rows so far."""
        halves = [self.embedding[token], feature]
        if self.wrong == "the feature first":
            halves.reverse()
        z = self.w["fc.weight"] @ torch.cat(halves)
        if self.wrong != "no bias":
            z = z + self.w.get("fc.bias", 0.0)
        read = norm(z, torch.ones(64)) if self.wrong == "a norm before the first layer" else z
        position = self.count if position is None else position
        return self.others(self.layers[0].row(z, read, position), position)

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return self.lm_head @ (norm(g, self.final_gain) if self.wrong == "a norm at the end" else g)


class Eagle3(_Head):
    """c: captured. f = fc norm(c), a = [norm(e) ; norm(f)], g = the layers of f; the first reads a."""

    def __init__(self, folder: Path, target: Path, variants: tuple[str, ...] = (), wrong: str = "") -> None:
        super().__init__(folder, target, wrong)
        self.variants = variants
        self.lm_head = self.w.get("lm_head.weight", self.lm_head)

    def feature(self, captured: torch.Tensor) -> torch.Tensor:
        """captured [rows, 3 * hidden] -> [rows, hidden]."""
        if "last_hidden" in self.variants:
            wrong = self.wrong == "the feature before the norm"
            return captured if wrong else norm(captured, self.final_gain)
        gains = self.below("fc_norm.") or self.below("input_norm.")
        if gains and self.wrong != "no norm before fc":
            pairs = zip(captured.chunk(len(gains), -1), sorted(gains), strict=True)
            captured = torch.cat([norm(chunk, gains[name]) for chunk, name in pairs], -1)
        return captured @ self.w["fc.weight"].T

    def row(self, feature: torch.Tensor, token: int, position: int | None = None) -> torch.Tensor:
        """What the next feature is, and what `logits` takes."""
        layer, position = self.layers[0], self.count if position is None else position
        normed = norm(feature, layer.w["hidden_norm.weight"])
        read = torch.cat((norm(self.embedding[token], layer.w["input_layernorm.weight"]), normed))
        before = ("norm_before_residual" in self.variants) != (self.wrong == "the other residual")
        g = self.others(layer.row(normed if before else feature, read, position), position)
        after = ("norm_output" in self.variants) != (self.wrong == "the other recurrence")
        return norm(g, self.w["norm.weight"]) if after else g

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        after = ("norm_output" in self.variants) != (self.wrong == "the other recurrence")
        return self.lm_head @ (g if after else norm(g, self.w["norm.weight"]))


class PEagle(Eagle3):
    """EAGLE-3's certain rows; below them rows of a mask token, whose captured streams are learnt ones."""

    def block(self, mask_token: int, width: int) -> torch.Tensor:
        """What `logits` takes of the rows behind all rows so far, [width, hidden]; they are forgotten."""
        certain = self.count
        streams = self.w["mask_hidden"].view(1, -1)
        if self.wrong == "no streams":
            streams = torch.zeros_like(streams)
        feature = self.feature(streams)[0]
        late = {"a position too late": 1, "a position too early": -1}.get(self.wrong, 0)
        token = mask_token + (self.wrong == "another mask")
        rows = []
        for place in range(width):
            position = certain if self.wrong == "one position" else certain + place + late
            rows.append(self.row(feature, token, position))
            if self.wrong == "rows that see no others":
                self.forget(certain)
            if self.wrong == "what a row gave":
                feature = rows[-1]
        self.forget(certain)
        return torch.stack(rows)
