"""Gemma 4 text in float64 numpy, written from the architecture's description: independent of every layer under test.

Dense masks, one sequence, growing K/V lists. Used to find prompts whose greedy continuation cannot flip by rounding, and to check the
served tokens against something that is not JAX.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def _rms(x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Gemma4Oracle:
    """One model, one sequence at a time. ``window`` overrides the config's; 0 switches the window off."""

    def __init__(self, folder: Path, window: int | None = None) -> None:
        self.cfg = json.loads((folder / "config.json").read_text())
        self.weights = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}
        self.window = self.cfg["sliding_window"] if window is None else window
        self.reset()

    def reset(self) -> None:
        self.keys: list[list[np.ndarray]] = [[] for _ in self.cfg["layer_types"]]
        self.values: list[list[np.ndarray]] = [[] for _ in self.cfg["layer_types"]]
        self.length = 0

    def forward(self, ids: np.ndarray) -> np.ndarray:
        """Append ``ids``; logits of every new position, [T, vocab]."""
        w, eps = self.weights, self.cfg["rms_norm_eps"]
        table = w["model.embed_tokens.weight"]
        position = np.arange(self.length, self.length + len(ids))
        x = table[ids] * np.sqrt(self.cfg["hidden_size"])
        for i in range(len(self.cfg["layer_types"])):
            p = f"model.layers.{i}."

            def norm(y: np.ndarray, name: str, p: str = p) -> np.ndarray:
                return _rms(y, eps) * w[f"{p}{name}.weight"]

            attn = self._attention(i, norm(x, "input_layernorm"), position)
            x = x + norm(attn, "post_attention_layernorm")
            y = norm(x, "pre_feedforward_layernorm")
            gate, up = (y @ w[f"{p}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
            down = (_gelu_tanh(gate) * up) @ w[f"{p}mlp.down_proj.weight"].T
            x = (x + norm(down, "post_feedforward_layernorm")) * w[f"{p}layer_scalar"]
        self.length += len(ids)
        cap = self.cfg["final_logit_softcapping"]
        return cap * np.tanh((_rms(x, eps) * w["model.norm.weight"]) @ table.T / cap)

    def greedy(self, prompt: np.ndarray, steps: int) -> tuple[list[int], float]:
        """(tokens, smallest top-1 minus top-2 logit along the output)."""
        self.reset()
        logits = self.forward(prompt)[-1]
        tokens, margin = [], np.inf
        for step in range(steps):
            second, first = np.sort(logits)[-2:]
            margin = min(margin, first - second)
            tokens.append(int(logits.argmax()))
            if step + 1 < steps:
                logits = self.forward(np.array(tokens[-1:]))[-1]
        return tokens, float(margin)

    def _attention(self, layer: int, x: np.ndarray, position: np.ndarray) -> np.ndarray:
        p, w, eps = f"model.layers.{layer}.self_attn.", self.weights, self.cfg["rms_norm_eps"]
        full = self.cfg["layer_types"][layer] == "full_attention"
        dim = self.cfg["global_head_dim"] if full else self.cfg["head_dim"]
        q, k = ((x @ w[f"{p}{n}_proj.weight"].T).reshape(len(x), -1, dim) for n in "qk")
        v = k if full else (x @ w[f"{p}v_proj.weight"].T).reshape(len(x), -1, dim)
        q = self._rope(_rms(q, eps) * w[f"{p}q_norm.weight"], position, full)
        k = self._rope(_rms(k, eps) * w[f"{p}k_norm.weight"], position, full)
        self.keys[layer].append(k)
        self.values[layer].append(_rms(v, eps))
        keys, values = np.concatenate(self.keys[layer]), np.concatenate(self.values[layer])
        per_kv = q.shape[1] // keys.shape[1]
        scores = np.einsum("qhd,khd->hqk", q, keys.repeat(per_kv, 1))
        at = np.arange(len(keys))
        seen = at[None] <= position[:, None]
        if not full and self.window:
            seen &= at[None] > position[:, None] - self.window
        weights = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, values.repeat(per_kv, 1))
        return out.reshape(len(x), -1) @ w[f"{p}o_proj.weight"].T

    def _rope(self, x: np.ndarray, position: np.ndarray, full: bool) -> np.ndarray:
        rope = self.cfg["rope_parameters"]["full_attention" if full else "sliding_attention"]
        dim = x.shape[-1]
        freq = rope["rope_theta"] ** (-2.0 * np.arange(dim // 2) / dim)
        if full:
            freq[int(rope["partial_rotary_factor"] * dim // 2) :] = 0
        angle = (position[:, None] * freq)[:, None]
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate(
            [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1
        )
