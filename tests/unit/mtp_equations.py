"""An MTP head's equations in plain PyTorch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

N = 70  # certain rows: more than one block of keys


@dataclass(frozen=True)
class Form:
    """What a published form says, and each trap as a change to it."""

    prefix: str
    names: tuple[str, str, str, str]  # norm of tokens, norm of features, join, last norm
    hidden_first: bool
    first_is_blank: bool
    theta: float
    shift: int = 0  # of all positions
    gap: int = 0  # positions between the certain rows and those drafted below them
    raw_recurrence: bool = False  # the next feature has not passed the last norm


class Equations:
    """Features f, embeddings e: z = J [norm(e); norm(f)], h = z + attn(norm(z)), g = norm(h + mlp(norm(h))).

    MiMo joins [norm(f); norm(e)], and its first e is 0.
    """

    def __init__(self, head: Path, target: Path, form: Form) -> None:
        stored, ends = load_file(head / "model.safetensors"), load_file(target / "model.safetensors")
        self.w = {
            name.removeprefix(f"{form.prefix}."): tensor
            for name, tensor in stored.items()
            if name.startswith(f"{form.prefix}.")
        }
        self.embedding, self.head = ends["model.embed_tokens.weight"], ends["lm_head.weight"]
        self.form = form
        self.read: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def rope(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, heads, 16], row i at position i: complex multiplication of (x_j, x_{j + 8})."""
        places = torch.arange(x.shape[0])
        places = places + self.form.shift + self.form.gap * (places >= N)
        turn = torch.polar(torch.ones(1), places[:, None] * self.form.theta ** (-torch.arange(8) / 8))[
            :, None
        ]
        turned = torch.complex(x[..., :8], x[..., 8:]) * turn
        return torch.cat((turned.real, turned.imag), -1)

    def project(self, part: str) -> torch.Tensor:
        """Of all rows so far."""
        rows = torch.stack(self.read) @ self.w[f"self_attn.{part}_proj.weight"].T
        return (rows + self.w.get(f"self_attn.{part}_proj.bias", 0.0)).view(len(self.read), -1, 16)

    def keys(self) -> torch.Tensor:
        return self.rope(self.project("k"))

    def row(self, feature: torch.Tensor, token: int) -> tuple[torch.Tensor, torch.Tensor]:
        """g of one more row after all rows so far, and the feature of a row below it."""
        token_norm, feature_norm, join, final_norm = self.form.names
        e = self.embedding[token]
        if self.form.first_is_blank and not self.read and not self.form.shift:
            e = torch.zeros_like(e)
        halves = [self.norm(e, token_norm), self.norm(feature, feature_norm)]
        z = self.w[f"{join}.weight"] @ torch.cat(halves[::-1] if self.form.hidden_first else halves)
        self.read.append(self.norm(z, "input_layernorm"))
        q, k, v = self.rope(self.project("q"))[-1], self.keys(), self.project("v")
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = torch.einsum("hd,khd->hk", q, k) / 4.0
        mixed = torch.einsum("hk,khd->hd", scores.softmax(-1), v).reshape(-1)
        h = z + self.w["self_attn.o_proj.weight"] @ mixed
        m = self.norm(h, "post_attention_layernorm")
        gated = F.silu(self.w["mlp.gate_proj.weight"] @ m) * (self.w["mlp.up_proj.weight"] @ m)
        x = h + self.w["mlp.down_proj.weight"] @ gated
        g = self.norm(x, final_norm)
        return g, x if self.form.raw_recurrence else g

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        return self.head @ g


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a - b).abs().max() < 1e-5)
