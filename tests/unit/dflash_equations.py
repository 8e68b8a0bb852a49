"""The equations of DFlash heads in plain PyTorch: dense, unpaged, block by block. Nothing of the engine is
used.

`wrong` names one thing done otherwise, for checks that a comparison would notice it.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.unit.head_equations import DIM, HEADS, KV_HEADS, Tensors, norm, rope


class DFlash:
    """c: captured. f = norm(fc c). Keys and values: of f at f's position, and of the block's own rows."""

    def __init__(self, folder: Path, target: Path, mask: int, wrong: str = "") -> None:
        """`mask`: the token of rows to be drafted."""
        self.w, ends = load_file(folder / "model.safetensors"), load_file(target / "model.safetensors")
        self.mask = mask + 1 if wrong == "another mask" else mask
        self.wrong = wrong
        self.embedding = self.w.get("embed_tokens.weight", ends["model.embed_tokens.weight"])
        tied = ends.get("lm_head.weight", ends["model.embed_tokens.weight"])
        self.lm_head = self.w.get("lm_head.weight", tied)
        told = json.loads((folder / "config.json").read_text())
        windowed = [kind == "sliding_attention" for kind in told.get("layer_types", ())]
        self.windows = [told["sliding_window"] if within else 0 for within in windowed] or [0] * 8
        self.features = torch.empty(0, self.embedding.shape[1])
        self.layers = sum(name.endswith("q_proj.weight") for name in self.w)

    def feature(self, captured: torch.Tensor) -> torch.Tensor:
        """captured [rows, layers * hidden] -> [rows, hidden]."""
        made = captured @ self.w["fc.weight"].T
        return made if self.wrong == "no norm of features" else norm(made, self.w["hidden_norm.weight"])

    def extend(self, features: torch.Tensor) -> None:
        """Certain positions, from the last one on."""
        self.features = torch.cat((self.features, features))

    def of(self, layer: int) -> Tensors:
        prefix = f"layers.{layer}."
        return {name.removeprefix(prefix): t for name, t in self.w.items() if name.startswith(prefix)}

    def keys(self, w: Tensors, read: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[rows, 2, 16], as a pool holds them."""
        k = (read @ w["self_attn.k_proj.weight"].T).view(-1, KV_HEADS, DIM)
        if self.wrong != "no norm of keys":
            k = norm(k, w["self_attn.k_norm.weight"])
        return rope(k, positions, 10000.0)

    def context_keys(self, layer: int) -> torch.Tensor:
        """Of certain positions."""
        features, w = self.features, self.of(layer)
        if self.wrong == "features pass the layer's norm":
            features = norm(features, w["input_layernorm.weight"])
        return self.keys(w, features, torch.arange(len(features)))

    def block(self, root: int, width: int) -> torch.Tensor:
        """What leaves the last norm, of the root's row and width - 1 masks behind it, [width, hidden]."""
        start = len(self.features) + (self.wrong == "a block too late") - (self.wrong == "a block too early")
        positions = torch.arange(start, start + width)
        x = self.embedding[torch.tensor([root, *[self.mask] * (width - 1)])]
        for layer in range(self.layers):
            w = self.of(layer)
            read = norm(x, w["input_layernorm.weight"])
            q = norm(
                (read @ w["self_attn.q_proj.weight"].T).view(-1, HEADS, DIM), w["self_attn.q_norm.weight"]
            )
            q = rope(q, positions, 10000.0)
            k = torch.cat((self.context_keys(layer), self.keys(w, read, positions)))
            sources = torch.cat((self.features, read))
            v = (sources @ w["self_attn.v_proj.weight"].T).view(-1, KV_HEADS, DIM)
            k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) / DIM**0.5
            if self.wrong == "a causal block":
                own = torch.ones(width, width, dtype=torch.bool).triu(1)
                scores[:, :, -width:].masked_fill_(own, -torch.inf)
            if window := self.windows[layer]:
                places = torch.cat((torch.arange(len(self.features)), positions))
                behind = positions[:, None] - places[None]
                scores.masked_fill_((behind >= window + (self.wrong == "a wider window")), -torch.inf)
                if self.wrong != "a window that sees ahead":
                    scores.masked_fill_(behind < 0, -torch.inf)
            mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
            h = x + mixed @ w["self_attn.o_proj.weight"].T
            m = norm(h, w["post_attention_layernorm.weight"])
            gated = F.silu(m @ w["mlp.gate_proj.weight"].T) * (m @ w["mlp.up_proj.weight"].T)
            x = h + gated @ w["mlp.down_proj.weight"].T
        return norm(x, self.w["norm.weight"])

    def drafts(self, root: int, count: int, first: int = 1) -> torch.Tensor:
        """Logits of the drafts behind the root, [count, ids]; those of the rows from `first` on."""
        return self.block(root, count + first)[first:] @ self.lm_head.T
